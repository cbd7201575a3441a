"""Bodies of the routes for embeddings: OpenAI's fields, vLLM's beyond them by their names there, and native ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from ...core.limits import MAX_LISTED, MAX_SPECS
from ...wire.strict import Strict
from ..http.body import at_most, checked
from ..protocol import MAX_MESSAGES, CaptureField, HookableRequest, InterventionField, Message, MonitorField
from ..routes.refused_fields import REFUSED, Refused

_BYTES = "values are float32, little-endian"
OF_POOLING: dict[str, Refused] = REFUSED | {
    "embed_dtype": Refused(_BYTES, ("float32",)),
    "endianness": Refused(_BYTES, ("native", "little")),
    "add_generation_prompt": Refused("conversations end without the beginning of an answer", (False,)),
    "continue_final_message": Refused("conversations are read whole", (False,)),
    "softmax": Refused("use use_activation"),
}
"""`REFUSED` for these routes."""


class PooledRequest(HookableRequest):
    """Fields of all routes that pool."""

    REFUSED: ClassVar[Mapping[str, Refused]] = OF_POOLING

    model: str | None = None
    truncate_prompt_tokens: StrictInt | None = Field(
        None, description="tokens of a text to keep; -1: as many as the model reads"
    )
    add_special_tokens: StrictBool | None = Field(None, description="of texts; true unless it says false")
    priority: StrictInt | None = None
    cache_salt: str | None = None
    timeout: float | None = Field(None, description="seconds, after which the request is an error")

    interventions: Annotated[list[InterventionField] | None, at_most(MAX_SPECS)] = Field(
        None, description="applied to each input, in order"
    )
    monitors: Annotated[list[MonitorField] | None, at_most(MAX_SPECS)] = Field(
        None, description="score the states of each input"
    )
    capture: Annotated[list[CaptureField] | None, at_most(MAX_SPECS)] = Field(
        None, description="sites, or captures; the states are each entry's activations"
    )
    user: str | None = Field(None, description="of OpenAI's, without effect")


class InputsRequest(PooledRequest):
    """Inputs, each a text or token ids, or one conversation."""

    input: checked(str, list[str], list[int], list[list[int]], None) = None  # pyright: ignore[reportInvalidTypeForm]
    messages: Annotated[list[Message] | None, at_most(MAX_MESSAGES)] = Field(
        None, min_length=1, description="vLLM's: a conversation, as the chat template writes it, in place of input"
    )
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_input(self) -> InputsRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("input: a text, token ids, or a list of them is expected; or messages, a conversation")
        if isinstance(self.input, list) and not self.input:
            raise ValueError("input is an empty list: one at least is expected")
        if self.messages is None and self.chat_template_kwargs is not None:
            raise ValueError("chat_template_kwargs: they are of messages, and input has none")
        return self

    def inputs(self) -> list[Any]:
        """Texts or token ids; none for a conversation."""
        if self.input is None:
            return []
        several = isinstance(self.input, list) and not isinstance(self.input[0], int)
        return list(self.input) if several else [self.input]


class EmbeddingRequest(InputsRequest):
    """Body of `POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: of float32, little-endian")
    dimensions: StrictInt | None = Field(None, description="first values to keep, for models that were trained so")
    normalize: StrictBool | None = Field(None, description="whether vectors have length 1; null: as the model says")
    use_activation: StrictBool | None = Field(None, description="vLLM's name of normalize")
    pooling: str | None = Field(None, description='"last", "mean", "cls", ...; null: as the model says')
    prompt_name: str | None = Field(None, description='name of a text of the model before each input, such as "query"')
    prompt: str | None = Field(None, description="that text itself")

    @model_validator(mode="after")
    def _check_fields(self) -> EmbeddingRequest:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise ValueError("normalize and use_activation are one field by two names: give one of them")
        for name in ("prompt", "prompt_name"):
            if getattr(self, name) is not None and not all(isinstance(one, str) for one in self.inputs() or [None]):
                raise ValueError(f"{name}: it stands before texts; token ids and messages are read as they are")
        return self

    @property
    def normalized(self) -> bool | None:
        """`normalize`, by either name."""
        return self.use_activation if self.normalize is None else self.normalize


class ClassifyRequest(InputsRequest):
    """Body of vLLM's `POST /classify`."""

    use_activation: StrictBool | None = Field(None, description="false: probs are the logits")


_Texts = checked(str, list[str], None)


class ScoreRequest(PooledRequest):
    """Body of vLLM's `POST /score`: one first text for all second ones, or as many."""

    text_1: _Texts = None  # pyright: ignore[reportInvalidTypeForm]
    text_2: _Texts = None  # pyright: ignore[reportInvalidTypeForm]
    queries: _Texts = None  # pyright: ignore[reportInvalidTypeForm]
    documents: _Texts = None  # pyright: ignore[reportInvalidTypeForm]
    items: _Texts = None  # pyright: ignore[reportInvalidTypeForm]
    data_1: _Texts = None  # pyright: ignore[reportInvalidTypeForm]
    data_2: _Texts = None  # pyright: ignore[reportInvalidTypeForm]
    use_activation: StrictBool | None = Field(None, description="false: scores of a classification head are its logits")

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        given = {name for name in _SIDES if getattr(self, name) is not None}
        if given not in ({"text_1", "text_2"}, {"queries", "documents"}, {"queries", "items"}, {"data_1", "data_2"}):
            raise ValueError("expected text_1 and text_2; or queries and documents (or items); or data_1 and data_2")
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        """First and second texts."""
        first, second = [found for name in _SIDES if (found := getattr(self, name)) is not None]
        return ([first] if isinstance(first, str) else first), ([second] if isinstance(second, str) else second)


_SIDES = ("text_1", "queries", "data_1", "text_2", "documents", "items", "data_2")


class RankedDocument(Strict):
    """A document of a rerank request."""

    text: str


class RerankRequest(PooledRequest):
    """Body of `POST /rerank`, with Jina's, Cohere's and vLLM's fields."""

    REFUSED: ClassVar[Mapping[str, Refused]] = OF_POOLING | {
        "max_tokens_per_doc": Refused("use truncate_prompt_tokens, of a whole pair"),
        "rank_fields": Refused("a document is a text"),
    }

    query: str
    documents: Annotated[list[str | RankedDocument], at_most(MAX_LISTED)] = Field(min_length=1)
    top_n: StrictInt | None = Field(None, ge=0, description="results, best first; null or 0: all")
    return_documents: StrictBool = True
    use_activation: StrictBool | None = Field(None, description="false: scores of a classification head are its logits")

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class PoolingRequest(EmbeddingRequest):
    """Body of vLLM's `POST /pooling`."""

    task: Literal["embed", "token_embed"] | None = Field(
        None, description="token_embed: a row for each token, as pooling=all"
    )
    step_tag_id: StrictInt | None = Field(None, description="token that ends a step, with pooling=step")
    returned_token_ids: Annotated[list[StrictInt] | None, at_most(MAX_LISTED)] = Field(
        None, description="tokens of which step returns the probabilities"
    )

    @model_validator(mode="after")
    def _check_task(self) -> PoolingRequest:
        if self.task == "token_embed":
            if self.pooling not in (None, "all"):
                raise ValueError("task: token_embed is pooling=all")
            self.pooling = "all"
        return self

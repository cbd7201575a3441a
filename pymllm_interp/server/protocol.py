"""Requests over HTTP: OpenAI's fields, vLLM's beyond them by their names there, and native ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, StrictBool, StrictInt, WithJsonSchema, model_validator

from ..core.limits import MAX_CALL_SPECS, MAX_LISTED, MAX_SPECS
from ..core.sampling_params import MAX_BAD_WORDS, MAX_STOPS, MAX_TOKEN_IDS, SamplingParams
from ..core.structured.structured_outputs import StructuredOutputs
from ..utils.arguments import PromptError
from ..wire.strict import Strict
from .http.body import at_most, checked
from .response_format import ResponseFormat, form_of
from .routes.refused_fields import REFUSED, Refused, without_neutral
from .tools.request import NamedTool, Tool, ToolPlan

SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "stop",
    "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "prompt_logprobs", "include_stop_str_in_output",
    "skip_special_tokens", "skip_reading_prefix_cache", "allowed_token_ids", "bad_words", "truncate_prompt_tokens",
    "speculate",
)  # fmt: skip
"""Fields with the name that they have in SamplingParams."""
MAX_LISTED_NAMES, MAX_TARGETS = 512, 256
"""Most transcoders, and most targets, of a circuit."""
MAX_MESSAGES, MAX_TOOLS = 4096, 128
"""Most messages of a conversation, or parts of one, and most tools."""
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(16)]
"""OpenAI's: up to 16 pairs of strings."""
COMPONENT = "x-component"
"""Marks a schema that the engine process knows (schema.py), by its name there."""
InterventionField = Annotated[dict[str, Any], WithJsonSchema({COMPONENT: "Intervention"})]
MonitorField = Annotated[dict[str, Any], WithJsonSchema({COMPONENT: "MonitorSpec"})]
CaptureField = Annotated[str | dict[str, Any], WithJsonSchema({COMPONENT: "CaptureSpec"})]
"""Read by the engine process; its objects check them."""


class StreamOptions(Strict):
    """Fields of `stream_options`."""

    include_usage: bool | None = Field(None, description="a last chunk with the usage of the whole request")
    continuous_usage_stats: bool | None = Field(
        None, description="the usage so far in each chunk, as vLLM sends it; includes include_usage"
    )
    include_obfuscation: Literal[False] | None = Field(None, description="of OpenAI's: events are not padded here")

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and self.include_usage is False:
            raise ValueError("continuous_usage_stats needs include_usage: leave it out, or set it to true")
        return self

    @property
    def usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return bool(self.include_usage or self.continuous_usage_stats)


class HookableRequest(Strict):
    """A request with interventions, monitors and captures, which also names fields of other servers."""

    REFUSED: ClassVar[Mapping[str, Refused]] = REFUSED
    """Fields of other servers."""

    @classmethod
    def read(cls, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Name the alternatives of other servers' fields."""
        return without_neutral(given, cls.model_fields, cls.REFUSED)

    @property
    def hooked(self) -> bool:
        """Whether the request has interventions, monitors or captures."""
        return any(getattr(self, name) for name in ("interventions", "monitors", "capture"))

    def engine_options(self, adapter: str | None, prompts: int) -> dict[str, Any]:
        """Fields of `messages.Submit`: options of the prompts' requests, and hooks, once for all prompts."""
        found: Any = self  # its subclasses have the fields
        options: dict[str, Any] = {"timeout": found.timeout, "cache_salt": found.cache_salt}
        if adapter is not None:
            options["lora"] = adapter
        if found.priority is not None:
            options["priority"] = [found.priority] * prompts
        given = {"interventions": found.interventions, "monitors": found.monitors, "captures": found.capture}
        return {"options": options} | {name: [field] for name, field in given.items() if field}


class SharedRequest(HookableRequest):
    """Fields of all requests that generate."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_TOKEN_IDS)] = None
    seed: StrictInt | None = None
    stop: str | Annotated[list[str], at_most(MAX_STOPS)] | None = None
    stream: bool | None = None

    top_k: StrictInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: Annotated[list[StrictInt] | None, at_most(MAX_TOKEN_IDS)] = None
    allowed_token_ids: Annotated[list[StrictInt] | None, at_most(MAX_LISTED)] = None
    bad_words: Annotated[list[str] | None, at_most(MAX_BAD_WORDS)] = None
    truncate_prompt_tokens: StrictInt | None = Field(None, description="keep the prompt's last tokens; -1: what fits")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    speculate: bool | None = Field(
        None, description="false: no drafts are proposed; true: refused where they cannot be"
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: json, regex, choice, grammar, json_object or structural_tag"
    )
    priority: StrictInt | None = None
    cache_salt: str | None = None
    timeout: float | None = Field(
        None, description='seconds, after which the completion ends with finish_reason "timeout"'
    )

    interventions: Annotated[list[InterventionField] | None, at_most(MAX_SPECS)] = Field(
        None, description="applied to each prompt and completion, in order"
    )
    monitors: Annotated[list[MonitorField] | None, at_most(MAX_SPECS)] = Field(
        None,
        description="score the states of each prompt and completion; the scores are in each choice's pymllm.monitors",
    )
    capture: Annotated[list[CaptureField] | None, at_most(MAX_SPECS)] = Field(
        None, description="sites, or captures; the states are each choice's activations"
    )

    # Accepted, and without effect: OpenAI's bookkeeping.
    user: str | None = None
    store: StrictBool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None


class GenerationRequest(SharedRequest):
    """Fields of both kinds of completions."""

    n: StrictInt | None = Field(None, ge=1)
    max_tokens: StrictInt | None = Field(None, ge=0)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="the form of the text, as of OpenAI's")
    prompt_logprobs: StrictInt | None = None
    return_token_ids: bool | None = Field(None, description="token_ids in each choice, and prompt_token_ids")

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    def logprobs_wanted(self) -> int | None:
        """Number of log probabilities for each token, or None."""
        raise NotImplementedError

    def form(self) -> StructuredOutputs | None:
        """The form of the text."""
        return form_of(self.response_format, self.structured_outputs)

    def sampling_params(self, defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
        """The sampling parameters.

        Args:
            defaults: the model's defaults of sampling parameters.
            max_tokens: limit used if neither the request nor the defaults give one.

        Raises:
            PromptError: a value that is out of its range.
        """
        given: dict[str, Any] = {name: value for name, value in defaults.items() if value is not None}
        given.setdefault("max_tokens", max_tokens)
        given |= {name: value for name in SAME_NAMES if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            try:
                given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
            except ValueError:
                raise PromptError("logit_bias: its keys are token ids") from None
        try:
            given["structured_outputs"] = self.form()
            return SamplingParams(logprobs=self.logprobs_wanted(), **given)
        except (ValueError, TypeError) as error:
            raise PromptError(str(error)) from error


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "My neighbour told me that", "max_tokens": 20,
                "interventions": [{"op": "scale", "site": "resid_post.12", "factor": 1.1, "positions": "generated"}],
                "capture": [{"site": "resid_post.20", "positions": -1}],
            }
        }
    )  # fmt: skip
    prompt: checked(str, list[str], list[int], list[list[int]], None) = None  # pyright: ignore[reportInvalidTypeForm]
    prompt_embeds: str | Annotated[list[str], at_most(MAX_LISTED)] | None = Field(
        None,
        description="vLLM's: base64 of safetensors, or of torch.save, with [tokens, hidden]; prompts before those of `prompt`",
    )
    logprobs: StrictInt | None = Field(None, description="log probabilities of this many tokens at each position")
    echo: bool | None = Field(
        None, description="the prompt before the completion, with its log probabilities if asked for"
    )
    add_special_tokens: bool | None = None

    def logprobs_wanted(self) -> int | None:
        """The request's `logprobs`."""
        return self.logprobs

    @model_validator(mode="after")
    def _check_prompts(self) -> CompletionRequest:
        if self.prompt is None and self.prompt_embeds is None:
            raise ValueError("prompt: a text, token ids, or a list of them is expected, or prompt_embeds")
        if self.echo and self.prompt_embeds is not None:
            raise ValueError("echo: embeddings have no text")
        return self

    @property
    def hooked(self) -> bool:
        """Whether the request has embeddings, interventions or captures."""
        return self.prompt_embeds is not None or super().hooked

    def embeds(self) -> list[str]:
        """Embeddings of prompts, as base64."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else list(self.prompt_embeds or ())

    def prompts(self) -> list[Any]:
        """Texts or token ids, one for each prompt without embeddings."""
        given = self.prompt
        if given is None or (given == "" and self.prompt_embeds is not None):  # OpenAI's client always sends a prompt
            return []
        several = isinstance(given, list) and given and not isinstance(given[0], int)
        return list(given) if several else [given]  # pyright: ignore[reportArgumentType]


class Message(Strict):
    """A message of a conversation. Templates may read further fields."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | Annotated[list[Any], at_most(MAX_MESSAGES)] | None = None


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_completion_tokens": 20
            }
        }
    )  # fmt: skip
    messages: Annotated[list[Message], at_most(MAX_MESSAGES)] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: StrictInt | None = None
    tools: Annotated[list[Tool] | None, at_most(MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = Field(None, description="false: one tool call at most")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    _plan: ToolPlan | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    def planned(self, tool_format: str | None, reasoning: str | None) -> ToolPlan:
        """Plan of writing and parsing its messages, in the formats of the server.
        Raises PromptError: it requires calls that are impossible."""
        several = self.parallel_tool_calls is not False
        self._plan = plan = ToolPlan(self.tools, self.tool_choice, several, tool_format, reasoning)
        if plan.keeps_special:
            self.skip_special_tokens = False
        return plan

    def form(self) -> StructuredOutputs | None:
        """The structured output of the text: that of the calls, if calls are required."""
        asked = super().form()
        return asked if self._plan is None else self._plan.form(asked)

    def logprobs_wanted(self) -> int | None:
        """`top_logprobs`, where `logprobs` is asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


T = TypeVar("T")
_Lists = list[Annotated[list[T], at_most(MAX_SPECS)]]
_FOR_EACH = "a list for each prompt, or one for all, or none"


class ImagesField(Strict):
    """Images of a prompt in `/v1/interp/generate`."""

    bodies: checked(list[str], description="base64 of files, or of safetensors with outputs of the image processor")  # pyright: ignore[reportInvalidTypeForm]
    text: str | None = Field(
        None, description="the prompt's text, with an image token for each image; null: its ids have them"
    )
    special: bool = Field(True, description="whether the tokenizer adds special tokens to the text")


class TokenRequest(Strict):
    """Body of `POST /v1/interp/generate`, which `LM.connect` sends. The answer is a stream of token ids."""

    prompts: checked(list[list[int]])  # pyright: ignore[reportInvalidTypeForm]
    params: checked(  # pyright: ignore[reportInvalidTypeForm]
        list[dict[str, Any] | None], description="fields of SamplingParams: an object for each prompt, or one for all"
    )
    interventions: Annotated[_Lists[InterventionField], at_most(MAX_CALL_SPECS)] = Field(
        default=[], description=_FOR_EACH
    )
    monitors: Annotated[_Lists[MonitorField], at_most(MAX_CALL_SPECS)] = Field(default=[], description=_FOR_EACH)
    captures: Annotated[_Lists[CaptureField], at_most(MAX_CALL_SPECS)] = Field(default=[], description=_FOR_EACH)
    lora: Annotated[list[str | None] | None, at_most(MAX_LISTED)] = Field(
        None, description="LoRA adapters by name, or null, one for each prompt"
    )
    priority: checked(list[int], None) = None  # pyright: ignore[reportInvalidTypeForm]
    cache_salt: str | None = None
    timeout: float | None = None
    names: checked(list[str], None, description="of the prompts, for messages") = None  # pyright: ignore[reportInvalidTypeForm]
    stream: bool = False
    prompt_logits: bool = False
    receipts: bool = Field(False, description="receipts of requests that declare nothing, too")
    embeds: checked(
        list[str | None], None, description="base64 of embeddings in safetensors, or null, one for each prompt"
    ) = None  # pyright: ignore[reportInvalidTypeForm]
    images: Annotated[list[ImagesField | None] | None, at_most(MAX_LISTED)] = Field(
        None, description="images of each prompt, or null"
    )
    encoders: checked(
        list[str | None], None, description="base64 of encoders' inputs in safetensors, or null, one for each prompt"
    ) = None  # pyright: ignore[reportInvalidTypeForm]
    edits: str = Field("", description="base64 of persistent edits, which are code")

    @model_validator(mode="after")
    def _check(self) -> TokenRequest:
        if not self.prompts:
            raise ValueError("prompts: one at least is expected")
        of_all = ("params", "interventions", "monitors", "captures")
        for name in (*of_all, "priority", "names", "lora", "embeds", "images", "encoders"):
            value, shared = getattr(self, name), name in of_all
            if (value or name == "params") and len(value) != len(self.prompts) and not (shared and len(value) == 1):
                raise ValueError(
                    f"{name}: one for each of the {len(self.prompts)} prompts is expected, got {len(value)}"
                )
        return self


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, at_most(MAX_MESSAGES)] = Field(None, min_length=1)
    add_special_tokens: StrictBool | None = Field(None, description="of a text; true unless it says false")
    return_token_strs: StrictBool | None = Field(None, description="token_strs, the tokens as the vocabulary has them")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool] | None, at_most(MAX_TOOLS)] = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def read(cls, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return without_neutral(given, cls.model_fields, REFUSED)

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected prompt, a text, or messages, a conversation, and not both")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: the chat template writes the special tokens of a conversation")
        return self


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[StrictInt], at_most(MAX_LISTED)]


class LensRequest(Strict):
    """Body of `POST /v1/interp/lens`."""

    prompt: checked(str, list[int])  # pyright: ignore[reportInvalidTypeForm]
    top: StrictInt = Field(3, ge=1, le=20, description="tokens of each layer and position")


Name = Annotated[str, Field(max_length=512)]
Target = Name | StrictInt
"""A token, as text or id."""


class CircuitRequest(Strict):
    """Body of `POST /v1/interp/circuit`."""

    prompt: checked(str, list[int])  # pyright: ignore[reportInvalidTypeForm]
    transcoders: Name | Annotated[list[Name], at_most(MAX_LISTED_NAMES)] = Field(
        description="names of SAEs that the server has (serve --sae), or of a set of them: the part before a slash"
    )
    target: Target | Annotated[list[Target | Annotated[list[Target], at_most(2)]], at_most(MAX_TARGETS)] | None = Field(
        None,
        description="a token, or a list of tokens and pairs (differences of two logits); null: the most probable ones",
    )
    max_features: StrictInt = Field(1024, ge=1, description="the most influential features")
    max_logits: StrictInt = Field(10, ge=1, le=MAX_TARGETS)
    logit_mass: float = Field(0.95, ge=0, le=1)
    node_threshold: float = Field(0.8, ge=0, le=1)
    edge_threshold: float = Field(0.98, ge=0, le=1)
    batch: StrictInt = Field(64, ge=1)
    skip: StrictInt = Field(1, ge=0)
    form: Literal["graph", "figure", "tensors"] = Field(
        "graph", description="circuit-tracer's JSON; a figure of plotly's; or frames with all tensors, for LM.connect"
    )


class LoadAdapterRequest(Strict):
    """Body of vLLM's `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=128, description="the model's name in requests")
    lora_path: str = Field(
        min_length=1, max_length=4096, description="a folder of the server's machine, in PEFT's format"
    )
    load_inplace: Literal[False] | None = Field(None, description="of vLLM's: unload the adapter first")


class UnloadAdapterRequest(Strict):
    """Body of vLLM's `POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_int_id: StrictInt | None = Field(None, description="of vLLM's, without effect")


class InitTransferRequest(Strict):
    """Body of vLLM's `POST /init_weight_transfer_engine`."""

    init_info: dict[str, Any] = Field(max_length=16)


class UpdateWeightsRequest(Strict):
    """Body of vLLM's `POST /update_weights`."""

    update_info: dict[str, Any] = Field(
        max_length=16, description="names, dtype_names, shapes, and handles of the tensors"
    )


class FinishUpdateRequest(Strict):
    """Body of vLLM's `POST /finish_weight_update`."""

    weight_version: str | None = Field(None, max_length=256)


class EmptyRequest(Strict):
    """The body of a route that takes no fields."""


class AbortRequest(Strict):
    """Body of `POST /v1/interp/abort`."""

    call: StrictInt = Field(description="the number in the first frame of the stream")
    requests: checked(list[int], None, description="by number; null: all of them") = None  # pyright: ignore[reportInvalidTypeForm]

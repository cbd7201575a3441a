"""Requests over HTTP: OpenAI's fields, vLLM's beyond them by their names there, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, WithJsonSchema, model_validator

from ..core import unsupported
from ..core.arguments import PromptError
from ..core.sampling_params import SamplingParams

SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "stop",
    "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "prompt_logprobs", "include_stop_str_in_output",
    "skip_special_tokens", "skip_reading_prefix_cache",
)  # fmt: skip
"""Fields with the name that they have in SamplingParams."""
ELSEWHERE: dict[str, str] = {
    **unsupported.OF_REQUESTS,
    "best_of": "there is no best_of: n draws as many completions",
    "suffix": "suffix is not supported: the models here continue a prompt",
    "functions": "functions is OpenAI's old name: use tools",
    "guided_json": unsupported.STRUCTURED,
    "use_beam_search": "there is no beam search; n draws as many completions",
}
"""Fields of other servers -> what serves here."""


COMPONENT = "x-component"
"""Marks a schema that the engine process knows (schema.py), by its name there."""
InterventionField = Annotated[dict[str, Any], WithJsonSchema({COMPONENT: "Intervention"})]
CaptureField = Annotated[str | dict[str, Any], WithJsonSchema({COMPONENT: "CaptureSpec"})]
"""Read by the engine process, whose objects check them."""


class Strict(BaseModel):
    """An object without further fields."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    """What else a stream has."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Strict):
    """Fields of both kinds of completions."""

    model: str | None = None
    n: StrictInt | None = Field(None, ge=1)
    max_tokens: StrictInt | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = None

    top_k: StrictInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    prompt_logprobs: StrictInt | None = None
    return_token_ids: bool | None = Field(None, description="token_ids in each choice, and prompt_token_ids")
    priority: StrictInt | None = None
    cache_salt: str | None = None
    timeout: float | None = Field(
        None, description='seconds, after which the completion ends with finish_reason "timeout"'
    )

    interventions: list[InterventionField] | None = Field(
        None, description="applied to each prompt and completion, in order"
    )
    capture: list[CaptureField] | None = Field(
        None, description="sites, or captures; the states are each choice's activations"
    )

    # Accepted, and without effect: OpenAI's bookkeeping.
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Say what serves in the place of fields of other servers."""
        for name in given if isinstance(given, Mapping) else ():
            if name not in cls.model_fields and name in ELSEWHERE:
                raise ValueError(f"{name}: {ELSEWHERE[name]}")
        return given

    @property
    def hooked(self) -> bool:
        """Whether anything is declared."""
        return bool(self.interventions or self.capture)

    def logprobs_wanted(self) -> int | None:
        """SamplingParams.logprobs."""
        raise NotImplementedError

    def sampling_params(self, defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
        """The sampling parameters.

        Args:
            defaults: of the model, for what the request does not say.
            max_tokens: where nobody says.

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
            return SamplingParams(logprobs=self.logprobs_wanted(), **given)
        except ValueError as error:
            raise PromptError(str(error)) from error


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "My neighbour told me that", "max_tokens": 20,
                "interventions": [{"op": "scale", "site": "resid_post.12", "factor": 1.1, "positions": "generated"}],
                "capture": [{"site": "resid_post.20", "positions": -1}],
            }
        }
    )  # fmt: skip
    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    logprobs: StrictInt | None = Field(None, description="log probabilities of this many tokens at each position")
    echo: bool | None = Field(
        None, description="the prompt before the completion, with its log probabilities if asked for"
    )
    add_special_tokens: bool | None = None

    def logprobs_wanted(self) -> int | None:
        """`logprobs`."""
        return self.logprobs

    def prompts(self) -> list[Any]:
        """Texts or token ids, one for each prompt."""
        given = self.prompt
        several = isinstance(given, list) and given and not isinstance(given[0], int)
        return list(given) if several else [given]  # pyright: ignore[reportArgumentType]


class Message(Strict):
    """A message of a conversation. Templates may read further fields."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Any] | None = None


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_completion_tokens": 20
            }
        }
    )  # fmt: skip
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Any = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.response_format not in (None, {"type": "text"}):
            raise ValueError(f"response_format: {unsupported.STRUCTURED}")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    def logprobs_wanted(self) -> int | None:
        """`top_logprobs`, where `logprobs` is asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenRequest(Strict):
    """`POST /v1/interp/generate`: what `LM.connect` sends. The answer is a stream of token ids."""

    prompts: list[list[StrictInt]] = Field(min_length=1)
    params: list[dict[str, Any] | None] = Field(description="fields of SamplingParams, one object for each prompt")
    interventions: list[list[InterventionField]] = Field(default=[], description="one list for each prompt, or none")
    captures: list[list[CaptureField]] = Field(default=[], description="one list for each prompt, or none")
    priority: list[StrictInt] | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    names: list[str] | None = Field(None, description="of the prompts, for messages")
    stream: bool = False
    prompt_logits: bool = False
    edits: str = Field("", description="base64 of persistent edits, which are code")

    @model_validator(mode="after")
    def _check(self) -> TokenRequest:
        for name in ("params", "interventions", "captures", "priority", "names"):
            value = getattr(self, name)
            if (value or name == "params") and len(value) != len(self.prompts):
                raise ValueError(
                    f"{name}: one for each of the {len(self.prompts)} prompts is expected, got {len(value)}"
                )
        return self


class LensRequest(Strict):
    """`POST /v1/interp/lens`."""

    prompt: str | list[StrictInt]
    top: StrictInt = Field(3, ge=1, le=20, description="tokens of each layer and position")


class AbortRequest(Strict):
    """`POST /v1/interp/abort`."""

    call: StrictInt = Field(description="the number in the first frame of the stream")
    requests: list[Annotated[StrictInt, Field(ge=0)]] | None = Field(None, description="by number; null: all of them")

"""Messages between the HTTP process and the engine process: plain data, as msgpack.

No message is a pickle. The one opaque part is `RunTrace.payload`, which only the engine process reads.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.events import RequestTimes
from .failures import Failure, failure_of

Logprobs = dict[int, tuple[float, int]]
"""Token id -> (log probability, rank), as core.events.Logprob without its text."""


class EngineMessage(msgspec.Struct, tag=True, omit_defaults=True):
    """Base class. `call` is the number that the HTTP process gave to the call that a message belongs to."""

    call: int


class PromptImages(msgspec.Struct):
    """Images of a prompt, one for each image token of its text or ids.

    Attributes:
        bodies: files of images, or safetensors with the outputs of the model's image processor.
        text: text of the prompt, with an image token for each image; None: its token ids have them.
        special: whether the tokenizer adds special tokens to the text.
    """

    bodies: list[bytes]
    text: str | None = None
    special: bool = True


# -- to the engine process -----------------------------------------------------------------


class Submit(EngineMessage):
    """Start requests, all or none. Answered by `Accepted`, or by `Failed`; then come `Token` and `Finished`."""

    owner: str
    """Owner of the named vectors."""
    prompts: list[list[int]]
    """Token ids."""
    params: list[dict[str, Any] | None]
    """Fields of SamplingParams for each prompt, or once for all; None: the model's defaults."""
    interventions: list[list[dict[str, Any]]] = []
    """Interventions of each prompt, or one list for all, as `specs.to_json` writes them; empty: none."""
    monitors: list[list[dict[str, Any]]] = []
    """Monitors of each prompt, or one list for all: interventions, of which "op" may be left out."""
    captures: list[list[Any]] = []
    options: dict[str, Any] = {}
    """`timeout`, `priority` and `lora` (one for each prompt), and `cache_salt`."""
    names: list[str] | None = None
    """Prompt names used in error messages."""
    stream: bool = False
    """Whether each token is a message."""
    prompt_logits: bool = False
    receipts: bool = False
    """Whether requests without interventions and captures have receipts, too."""
    embeds: list[bytes | None] = []
    """Embeddings of each prompt as safetensors (wire/embeds.py), or None; empty: none."""
    images: list[PromptImages | None] = []
    """Images of each prompt, or None; empty: none."""
    encoders: list[bytes | None] = []
    """Encoder's input of each prompt, as safetensors with transformers' name of it; None, or empty: the prompt is that input."""
    edits: bytes = b""
    """Persistent edits: arbitrary code, as `RunTrace.payload`; empty: none."""


class Abort(EngineMessage):
    """End the work of a call. Its last messages still come."""

    requests: list[int] | None = None
    """Numbers of requests; None: all."""


class PutVector(EngineMessage):
    """Store a vector under a name. Answered by `Answer` or `Failed`."""

    owner: str
    name: str
    body: bytes
    format: str
    """safetensors or gguf."""
    stamp: int = 0
    """Nanoseconds of the order. Of two orders for one name, the later one holds."""


class DropVector(EngineMessage):
    """Forget a vector. Answered by `Answer`."""

    owner: str
    name: str
    stamp: int = 0


class LoadAdapter(EngineMessage):
    """Load a LoRA adapter from a folder of this machine. Answered by `Answer` or `Failed`."""

    name: str
    folder: str


class UnloadAdapter(EngineMessage):
    """Unload a LoRA adapter. Answered by `Answer` or `Failed`."""

    name: str


class RunTrace(EngineMessage):
    """Run a trace's block: arbitrary code. Answered by `Frame`s, then `Answer` or `Failed`."""

    owner: str
    payload: bytes
    timeout: float | None = None
    """Seconds for the whole trace."""


class RunCircuit(EngineMessage):
    """Make an attribution graph. Answered by `Frame`s, then `Answer` or `Failed`. The first frame says that it is accepted."""

    owner: str
    prompt: list[int]
    transcoders: list[str]
    """Names of SAEs that the server has, or of sets of them."""
    target: Any
    form: str
    """Form of the result: "tensors", "graph" (circuit-tracer's JSON) or "figure"."""
    options: dict[str, Any]
    """Numbers, as `LM.circuit` takes them."""
    max_bytes: int
    timeout: float | None = None
    """Seconds for the circuit, and for those before it."""


class ReadFrames(EngineMessage):
    """The client has read frames or captured rows of the call, with this many bytes: it may be sent more."""

    size: int


class AskStats(EngineMessage):
    """Answered by `Answer` with the engine's counters."""


class AskProgress(EngineMessage):
    """Answered by `Answer` with `Engine.progress`, as JSON."""


class ResetPrefixCache(EngineMessage):
    """Forget the KV that the prefix cache keeps, and that of a connector if asked. Answered by `Answer`."""

    reset_connector: bool = False


class Control(EngineMessage):
    """An order to the engine, see `Backend.control`. Answered by `Answer` or `Failed`."""

    order: str
    arguments: dict[str, Any] = {}


class AskTokenizer(EngineMessage):
    """Request for the tokenizer's files. The `Answer` maps names to bytes; empty if the model has no tokenizer."""


class Hello(EngineMessage):
    """A front begins a session with a replica. Answered by all `Spread` orders of vectors, then `Ready`."""


class Pulse(EngineMessage):
    """The sender lives. Answered by a replica with its own."""

    received: int = 0
    """Bytes of messages that came to the sender in this session."""


class Stop(EngineMessage):
    """End the process and all its work."""


# -- from the engine process ----------------------------------------------------------------


class Ready(EngineMessage):
    """The engine runs. `info` is its description for clients (`engine_process.describe`)."""

    info: dict[str, Any]
    schemas: dict[str, Any]
    """Schemas of interventions and captures, for the OpenAPI document (`schema.components`)."""


class Accepted(EngineMessage):
    """The call's requests run. `max_tokens` and `params` are given for each prompt, with defaults and limits applied."""

    params: list[dict[str, Any]]
    max_tokens: list[int]
    prompts: list[list[int] | None] = []
    """Token ids of prompts with images, with all image tokens, or of a decoder behind an encoder; None for others. Empty: there
    are only others."""


class Token(EngineMessage):
    """A request of a call has a new token. Requests are numbered over prompts, and their `n`."""

    request: int
    token_id: int
    logprobs: Logprobs | None = None
    scores: dict[str, list[tuple[int, float]]] | None = None
    """Monitor -> (position, score)."""


class CapturedStates(msgspec.Struct, omit_defaults=True):
    """Captured states, as safetensors."""

    size: int
    """Size in bytes."""
    sites: dict[str, list[int]]
    """Site -> shape."""
    data: bytes | None = None
    file: str | None = None
    """Name of a file in the store, if they are too large for `data`."""


class Rows(EngineMessage):
    """Captured rows of a request's stream, before its next message. The client reads them (`ReadFrames`) before too many more."""

    request: int
    states: CapturedStates
    words: list[int] = []
    """Token ids that a lens named."""


class MonitorResult(msgspec.Struct, omit_defaults=True):
    """`hooks.monitors.scores.MonitorScores`, as lists."""

    positions: list[int]
    scores: list[float]
    values: list[float]
    fired: list[int]
    threshold: float
    stopped: bool = False


class Finished(EngineMessage):
    """A request has ended (core.events.FinishedEvent)."""

    request: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    text_length: int | None = None
    num_hidden_tokens: int = 0
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    captured: CapturedStates | None = None
    receipt: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    failure: Failure | None = None
    warnings: list[str] = []
    drafts: tuple[int, int, int] | None = None
    """Steps with drafts, draft tokens, and accepted ones."""
    monitors: dict[str, MonitorResult] | None = None
    times: RequestTimes | None = None


class Frame(EngineMessage):
    """A part of a trace's results: a JSON header, and safetensors."""

    header: bytes
    body: bytes = b""


class Answer(EngineMessage):
    """A call has ended well."""

    value: Any = None


class Failed(EngineMessage):
    """A call has ended with an error."""

    failure: Failure


class Spread(EngineMessage):
    """A replica tells its fronts of an order that it took."""

    order: PutVector | DropVector


class Gone(EngineMessage):
    """The replica has no session with this front, or has ended it. Its calls are lost; a new `Hello` is due."""

    why: str = ""


ToEngine = (
    Submit | Abort | PutVector | DropVector | LoadAdapter | UnloadAdapter | RunTrace | RunCircuit | ReadFrames | AskStats
    | AskProgress | ResetPrefixCache | Control | AskTokenizer | Hello | Pulse | Stop
)  # fmt: skip
FromEngine = Ready | Accepted | Rows | Token | Finished | Frame | Answer | Failed | Spread | Pulse | Gone

encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(list[FromEngine])
_UNSENDABLE = TypeError, ValueError, OverflowError, RecursionError


def encoded(messages: list[FromEngine]) -> bytes:
    """Messages as msgpack. One that has no such form, such as a text that is not UTF-8, becomes a `Failed` of its call."""
    try:
        return encoder.encode(messages)
    except _UNSENDABLE:
        return encoder.encode([_sendable(message) for message in messages])


def _sendable(message: FromEngine) -> FromEngine:
    try:
        encoder.encode(message)
    except _UNSENDABLE as error:
        return Failed(message.call, failure_of(error))
    return message

"""`ServeSettings`: the operator's settings of a server."""

from __future__ import annotations

import math
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .http.origins import is_loopback
from .http.trust import Keys, Trust
from .tools.formats import REASONING, TOOL_FORMATS

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Upper bounds, each answered with a 4xx that names it. Bytes, seconds, or counts."""

    max_body_bytes: int = 64 * MIB
    """Bytes of a request's body."""
    max_trace_bytes: int = 64 * MIB
    """Bytes of a trace's payload."""
    max_concurrent: int = 256
    """Requests of one key at a time; each prompt, and each of its `n`, counts."""
    max_traces: int = 32
    """Traces of one key at a time."""
    max_circuits: int = 1
    """Circuits of one key at a time, also those that wait: the engine makes one at a time."""
    max_circuit_tokens: int = 2048
    """Tokens of a circuit's prompt."""
    max_circuit_features: int = 4096
    """Kept features of a circuit."""
    max_circuit_bytes: int = 2048 * MIB
    """Bytes of a circuit, of the device and of the host, beside weights and transcoders."""
    circuit_timeout: float = 600.0
    """Seconds of a circuit, with the time that it waits for others."""
    max_prompts: int = 1024
    """Prompts of one call, times `n`."""
    max_vectors: int = 256
    """Named vectors of one key."""
    max_vector_bytes: int = 64 * MIB
    """Bytes of one key's named vectors, as uploaded."""
    inline_bytes: int = 256 * 1024
    """Captured states of a completion up to this size are in the response, as base64."""
    max_store_bytes: int = 4096 * MIB
    """Bytes of captured states that wait to be fetched."""
    max_store_bytes_per_key: int = 2048 * MIB
    """Bytes of captured states of one key."""
    store_seconds: float = 300.0
    """Seconds that captured states wait to be fetched."""
    max_responses: int = 1024
    """Responses of one key that can be continued (/v1/responses)."""
    max_response_bytes: int = 512 * MIB
    """Bytes of all keys' responses, with their conversations."""
    max_response_bytes_per_key: int = 64 * MIB
    """Bytes of one key's responses."""
    response_seconds: float = 86400.0
    """Seconds that a response can be continued."""
    trace_timeout: float = 600.0
    """Seconds of a whole trace. `trace_step_timeout` of the engine bounds each visit of a block."""
    order_seconds: float = 120.0
    """Time limit of a vector upload or an adapter load, after which the client gets a 504."""
    engine_message_seconds: float = 60.0
    """Seconds that the engine process may take to answer the server. Then it is ended (liveness.py)."""
    engine_start_seconds: float = 300.0
    """Seconds without a sign of life from a starting engine process, after which it is ended."""
    engine_step_seconds: float = 300.0
    """Seconds that a step of the engine may take. Then its process is ended."""
    replica_silence_seconds: float = 10.0
    """Seconds that a replica or front of a cluster may be silent. Then the calls between them end."""
    max_image_bytes: int = 16 * MIB
    """Bytes of an image's file."""
    max_audio_bytes: int = 25 * MIB
    """Bytes of an audio file."""
    image_fetch_seconds: float = 5.0
    """Seconds that fetching an image may take."""
    max_connections: int = 2048
    """Limit of connections. Beyond it, the one idle for longest is closed; 503 if all have running requests."""
    idle_seconds: float = 30.0
    """Seconds that a connection may wait for a request."""
    header_seconds: float = 10.0
    """Seconds from the first byte of a request to the end of its headers."""
    max_header_bytes: int = 64 * 1024
    """Bytes of a request's line and headers."""
    max_queued_bytes: int = 256 * MIB
    """Results that wait for one slow client; beyond it, its call ends."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number above 0")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of engine processes: of a server's one, or of all replicas."""

    model: dict[str, Any]
    """Fields of ModelConfig."""
    server: dict[str, Any]
    """Fields of ServerConfig."""
    limits: ServeLimits = field(default_factory=ServeLimits)
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters that are loaded at the start: name -> a folder, which all nodes of a cluster have."""
    shared_prefix_cache: bool = False
    """Whether keys share KV. If so, each can learn from `cached_tokens` and from times which prompts others sent."""
    monitors: Sequence[dict[str, Any]] = ()
    """Monitors of all requests, as JSON, each with a name."""
    monitor_visible: bool = False
    """Whether clients see these, with their scores."""
    vllm: dict[str, Any] | None = None
    """Arguments of vLLM, if it is the engine (docs/engine/vllm.md); None: the native engine."""
    log_level: str = "info"
    log_format: str = "json"
    """A line a record: "json" or "text"."""
    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(EngineSettings):
    """All settings of a server."""

    name: str
    """The model's name for clients."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    uds: Path | None = None
    """Unix socket that is listened on in place of host and port."""
    keys: Keys = field(default_factory=lambda: Keys([]))
    store: Path | None = None
    """Folder of captured states that wait to be fetched; None: a temporary one."""
    shared_store: bool = False
    """Whether other servers of a cluster on this machine have the store, too."""
    on_engine_exit: str = "restart"
    """Action when the engine process ends: "restart" it, or "exit"."""
    drain_seconds: float = 30.0
    """Seconds that running requests may take to end after SIGTERM."""
    otlp_traces_endpoint: str | None = None
    """OTLP/HTTP endpoint that receives OpenTelemetry spans; None disables tracing."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls (tools/formats.py); None: they are not parsed."""
    reasoning_parser: str | None = None
    """Format of its reasoning; None: it is a part of the text."""
    root_path: str = ""
    """Path under which a proxy serves this server, such as "/llm"."""
    ssl_keyfile: Path | None = None
    """TLS key file. This and the next three settings are uvicorn's."""
    ssl_certfile: Path | None = None
    ssl_ca_certs: Path | None = None
    """Certificates that clients' are checked against."""
    ssl_cert_reqs: int = 0
    """Whether clients need a certificate: 0 no, 1 they may have one, 2 yes."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that images of requests are fetched from; "*": all of the public web. None: requests send images as data URLs."""
    allowed_local_media_path: Path | None = None
    """Folder of this machine with files that requests may name as images; None: none."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may use the server (CORS), also one without keys; "*": of all. The next three say how."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        if self.on_engine_exit not in ("restart", "exit"):
            raise ValueError(f"on_engine_exit={self.on_engine_exit!r}: expected 'restart' or 'exit'")
        for name, known in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING)):
            if (given := getattr(self, name)) is not None and given not in known:
                raise ValueError(f"{name}={given!r}: expected one of {', '.join(known)}")
        if (self.tool_call_parser, self.reasoning_parser) != (None, None):
            harmony = {self.tool_call_parser in ("openai", None), self.reasoning_parser in ("openai_gptoss", None)}
            others = {self.tool_call_parser, self.reasoning_parser} & {"openai", "openai_gptoss"}
            if others and harmony != {True}:
                raise ValueError(
                    "tool_call_parser='openai' and reasoning_parser='openai_gptoss' go together: both are gpt-oss'"
                )
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds={self.drain_seconds}: expected a number of seconds from 0 on")
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_traces_endpoint={self.otlp_traces_endpoint!r}: expected a URL such as http://localhost:4318/v1/traces"
            )
        for host in self.allowed_media_domains:
            if host != host.lower().strip() or not host or set("/:") & set(host):
                raise ValueError(
                    f"allowed_media_domains has {host!r}: expected a host such as 'images.example.com', or '*'"
                )
        if self.allowed_local_media_path is not None and not self.allowed_local_media_path.is_dir():
            raise ValueError(
                f"allowed_local_media_path={str(self.allowed_local_media_path)!r}: there is no such folder"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port}: expected 0 (any free one) to 65535")
        self._check_tls()
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(
                f"root_path={self.root_path!r}: expected a path such as '/llm', without a slash at its end"
            )
        if "*" in self.allowed_origins and self.keys.anybody and self.keys.keyless is Trust.CODE:
            raise ValueError(
                "allowed_origins has '*', and there are no keys: any web page would run code here. Name the origins, or give keys"
            )
        if taken := {self.name, str(self.model.get("model"))} & self.adapters.keys():
            raise ValueError(
                f"adapter {taken.pop()!r} has the model's name: give it another one (--lora-modules NAME=FOLDER)"
            )
        self.check_address(self.host)

    def check_address(self, address: str) -> None:
        """Refuse to run code for other machines' users without keys.

        Args:
            address: current or future listening address of the server.

        Raises:
            ValueError: other machines can reach it, and all clients may send code.
        """
        if self.keys.anybody and self.keys.keyless is Trust.CODE and not is_loopback(address):
            raise ValueError(
                f"host={address!r} is reachable from other machines, and there are no keys: any client could run code. "
                "Give keys (--keys FILE) and name those that may send code, or listen on 127.0.0.1"
            )

    def _check_tls(self) -> None:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs need ssl_certfile, the server's certificate")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, which clients' certificates are checked against"
            )
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            file: Path | None = getattr(self, name)
            if file is not None and not file.is_file():
                raise ValueError(f"{name}={str(file)!r}: there is no such file")
        if self.ssl_certfile is not None:
            try:  # uvicorn would read them when the model is loaded, and ask a terminal for a password
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                    self.ssl_certfile, self.ssl_keyfile, password=lambda: ""
                )
            except OSError as error:
                raise ValueError(
                    f"ssl_certfile={str(self.ssl_certfile)!r} and ssl_keyfile={str(self.ssl_keyfile)!r} are no certificate and its "
                    f"private key without a password, as PEM ({error})"
                ) from error

"""Configuration: frozen dataclasses, validated on construction. Imports no torch: the HTTP process reads them, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .core.families import INNER_SITES
from .speculative.drafter import SpeculativeConfig
from .utils.arguments import shown, warn_renamed

if TYPE_CHECKING:
    import torch

FP8_KV = ("fp8", "fp8_e4m3")
DTYPE_NAMES = ("float32", "fp32", "float16", "fp16", "half", "bfloat16", "bf16")
"""Names of the dtypes of models and KV pools, beside "auto"."""
LOWER_TRACES = ("auto", "off", "require")
"""Values of `ServerConfig.lower_traces`."""


MAX_IMAGES = 256
"""Most images of a prompt, without `ServerConfig.limit_mm_per_prompt`."""


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(
                f"{type(owner).__name__}({name}={value!r}): expected a whole number of at least 1, or None"
            )


def _one_of(owner: object, name: str, allowed: tuple) -> None:
    if getattr(owner, name) not in allowed:
        raise ValueError(f"{type(owner).__name__}({name}={getattr(owner, name)!r}): expected one of {allowed}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and the dtype and origin of its weights."""

    model: str = "demo"
    """ "demo", a folder with config.json and safetensors, a .gguf file, or a hub id."""
    dtype: str | torch.dtype = "auto"
    load_format: str = "auto"
    """ "auto" reads weights; "dummy" makes seeded random weights from config.json."""
    impl: str = "auto"
    """"native": this package's modules; "transformers": the family's own class; "auto": native if available."""
    seed: int = 0
    """Seed of dummy weights, and of requests without a seed."""
    hf_config: Any = None
    """A transformers config in place of config.json (with load_format="dummy")."""
    generation_config: str = "auto"
    """ "auto": the model's generation_config.json has the default sampling parameters; "none": it has not; or a folder with one."""

    quantize: str | None = None
    """ "fp8" rounds unquantised weights of linear layers to FP8 at load, with a scale for each output channel. "fp8-w8a8" also
    rounds the inputs of FP8 products, of more than 48 rows on CUDA. They take less time, and states are less exact. None: as
    they are stored."""

    saes: Mapping[str, Any] = field(default_factory=dict)
    """SAEs by name: `SAE`s, files or folders. On CUDA, passes encode those that cannot compute one feature
    (docs/use/intervene.md)."""

    def __post_init__(self) -> None:
        if not isinstance(self.saes, Mapping):
            raise ValueError(f"ModelConfig(saes={shown(self.saes)}): expected {{name: SAE, file or folder}}")
        _one_of(self, "load_format", ("auto", "safetensors", "gguf", "dummy"))
        _one_of(self, "impl", ("auto", "native", "transformers"))
        _one_of(self, "quantize", (None, "fp8", "fp8-w8a8"))
        torch_dtype = type(self.dtype).__module__ == "torch"
        if not torch_dtype and self.dtype not in ("auto", *DTYPE_NAMES):
            raise ValueError(f"unknown dtype {self.dtype!r}; use one of {sorted(DTYPE_NAMES)} or 'auto'")


@dataclass(frozen=True, kw_only=True)
class EngineTuning:
    """Memory and scheduling inside the engine: ``LM(..., tuning=EngineTuning(max_segments=64))``. Changes times, never results."""

    hook_execution: str = "auto"
    """Execution of a step with a block that waits for a module. "segments" replays the graph segments between blocks. "split"
    replays the plain requests of a decode step and runs the hooked ones module by module. Models by transformers' classes run
    as with "eager". "eager" runs the whole batch module by module. "auto" is "segments" if the pass's size is captured."""
    max_segments: int = 256
    """Maximum graph segments between blocks to keep; the least recently used one is evicted. Steps with prompts have separate
    segments, one for each layer and size. Four times as many of them are kept."""
    prefill_policy: str = "mixed"
    """ "mixed" puts decode and prefill into one step; "prefill_first" gives prefill steps of its own, at most every second one."""
    prefill_graph_tokens: int = 1024
    """The largest prefill or mixed step, in token rows, to capture as piecewise CUDA graphs; 0: none."""
    enable_torch_compile: bool = False
    """Compile decode passes before they are captured as CUDA graphs. Start-up takes longer."""
    lazy_graphs: bool = False
    """Serve before all CUDA graphs are captured. The others are captured when the engine is idle, and one by one between steps
    that ask for them. Their passes have the same bits, and take longer until then. `lm.wake` does this, whatever is set here."""
    torch_compile_max_bs: int = 32
    """The largest batch size to compile."""
    capture_ring_bytes: int = 1 << 30
    """Bytes of the ring buffer for captured states, on a CUDA device and in pinned memory on the host. The captured prompts of one
    step take at most a quarter of it."""
    capture_kept_bytes: int = 1 << 33
    """Upper bound, in bytes, of freed result memory kept for reuse."""
    device_capture_bytes: int = 1 << 28
    """Upper bound, in bytes, of captured states that stay on the engine's device (`Capture(device="engine")`, `lm.activations`).
    On a CUDA device the KV pool leaves room for them. 0: none."""
    state_cache_bytes: int = 1 << 30
    """Memory for snapshots of recurrent states, behind which later prompts start (docs/reference/models.md). At most an eighth
    of the memory for KV and states. 0: prefixes are not reused in models with such states."""
    encoder_cache_tokens: int | None = None
    """Size of the encoder cache, which keeps the vision tower's states of images, in tokens. The least recently used ones are
    evicted. None: the tokens of the largest step, at least 8192."""
    max_num_encoder_tokens: int | None = None
    """Most image tokens that the vision tower computes at once; a step with more computes them in parts. A larger image is
    computed by itself. None: the tokens of the largest step."""

    def __post_init__(self) -> None:
        _positive(self, "capture_ring_bytes", "capture_kept_bytes", "max_segments", "torch_compile_max_bs")
        _positive(self, "encoder_cache_tokens", "max_num_encoder_tokens")
        for name in ("prefill_graph_tokens", "state_cache_bytes", "device_capture_bytes"):
            if getattr(self, name) != 0:
                _positive(self, name)
        _one_of(self, "prefill_policy", ("mixed", "prefill_first"))
        _one_of(self, "hook_execution", ("auto", "segments", "split", "eager"))


@dataclass(frozen=True, kw_only=True)
class ServerConfig(EngineTuning):
    """Serving settings, with the engine's tuning. None: derived from the model and the machine."""

    device: str = "auto"
    max_model_len: int | None = None
    """Maximum prompt and generated tokens of one request. None: the model's own limit, or less where memory derives a smaller KV
    pool."""
    max_running_requests: int | None = 512
    """Maximum requests in one step. None: derived from the KV pool, 512 tokens a request (`device_memory.num_running_requests`)."""
    max_num_tokens: int | None = None
    """Maximum token rows in one step; chunked prefill fills steps up to it. None: 2048 on a CPU, 8192 on CUDA."""
    kv_cache_tokens: int | None = None
    """Slots of the KV pool. None: derived from the free memory. More than the device holds is an error."""
    cross_cache_tokens: int | None = None
    """Encoder positions with cross keys and values, in an encoder-decoder model. None: the longest input of each running request,
    within half of the memory for KV."""
    kv_cache_dtype: str = "auto"
    """The KV pool's dtype; "auto" is the model's. "fp8" is E4M3, with a checkpoint's scales, else 1."""
    state_dtype: str = "float32"
    """The dtype of recurrent states between steps, in models that have them: "float32", or "bfloat16" for half of the memory."""
    page_size: int = 16
    """Slots of one KV page."""
    enable_prefix_caching: bool = True
    """Keep the KV of requests, and start prompts after pages of earlier requests (docs/internals/prefix-cache.md)."""
    kv_spill_bytes: int = 0
    """Bytes of host memory for the KV of evicted prefixes, which come back for later prompts (docs/internals/prefix-cache.md)."""
    kv_spill_folder: str | None = None
    """Folder for the same, which outlives the process. It is to be readable and writable by its owner only. None: no folder."""
    kv_spill_disk_bytes: int = 16 << 30
    """Maximum bytes of its files."""
    async_scheduling: bool | None = None
    """Launch each step before the previous step's tokens are read. None: on CUDA only."""
    max_loras: int = 4
    """Slots for LoRA adapters on the device: adapters of requests in flight at the same time. More may be loaded."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    max_interventions_per_site: int = 4
    """Maximum interventions of one request at one site."""
    max_intervention_vectors: int = 4096
    """Maximum vectors of all live requests' interventions; equal vectors count once."""
    inner_sites: tuple[str, ...] = ()
    """Kinds of sites inside attention and MLP, for declared ops and captures on CUDA. They are "q", "k", "v", "z", "mlp_act",
    "router", "experts" and "shared_out".
    Each kind costs at least one kernel launch a layer, used or not. On a CPU all kinds can be used, at no cost."""
    reconstruct: tuple[str, ...] = ()
    """Names in `ModelConfig.saes` of SAEs that `Reconstruct` may take on CUDA. Each costs an encoding and a decoding in every step
    with declared ops or captures."""
    max_capture_bytes: int = 1 << 30
    """Maximum bytes of one request's captures on the host."""
    capture_when_full: str = "block"
    """A request for which the ring has no room: "block" makes it wait, "fail" drops its captures."""
    queue_order: str = "fcfs"
    """The order of waiting requests with equal `priority`. "fcfs": first come, first served. "lpm": the longest prefix in the
    prefix cache first."""
    max_itl_ms: float | None = None
    """Target for the time between a request's tokens, in milliseconds. It limits the prompt tokens of a step beside decoding
    requests, by the measured times of steps. Prompts of traces run in one pass all the same. None: `max_num_tokens` is the only
    limit."""
    max_prefill_tokens: int | None = None
    """Maximum prompt tokens of a step in which several requests have some. A single one may fill `max_num_tokens`. Small numbers
    bring first tokens of a burst sooner, and cost throughput. None: `max_num_tokens` is the only limit. `serve` sets 2048."""
    attention_backend: str = "auto"
    """ "torch", or "flashinfer" on CUDA."""
    disable_cuda_graph: bool = False
    batch_invariant: bool = False
    """Whether a request's results have the same bits in any company (docs/batch-invariance.md). It costs time, and the bits are
    others than without it. Models and settings without such kernels are refused at load."""
    limit_mm_per_prompt: Mapping[str, int] | None = None
    """Most images of a prompt, {"image": n}. None: 256."""
    mm_processor_cache_gb: float = 1.0
    """GiB of host memory for images that the processor has read, kept for later prompts. 0: none are kept."""
    logprobs_mode: str = "raw_logprobs"
    """Contents of `logprobs` and `prompt_logprobs`, with vLLM's names. "raw_logprobs" and "raw_logits" are before penalties,
    temperature and filters. "processed_logprobs" and "processed_logits" are after them; prompt tokens have no such values."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the device's memory for weights, activations and KV."""
    speculative: Any = None
    """Source of draft tokens: None, {"method": "ngram", "num_speculative_tokens": k} with vLLM's keys, or a `Drafter`
    (speculative/drafter.py). "draft_model" and "eagle3" take a "model". Drafts never change a token
    (docs/engine/speculative.md)."""
    lower_traces: str = "auto"
    """Whether blocks that only read known places run after their request, over captured states. "auto" lowers such
    blocks. "require" refuses other blocks, with the line that prevents it. "off" runs every block in the forward passes."""
    trace_step_warning: float = 5.0
    """Seconds that one visit of a trace's block may take before a warning."""
    trace_step_timeout: float | None = 60.0
    """Seconds after which the block's request ends with an error; None: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "max_model_len", "max_running_requests", "max_num_tokens", "kv_cache_tokens", "page_size")
        _positive(self, "cross_cache_tokens", "kv_spill_disk_bytes", "max_prefill_tokens")
        if type(self.kv_spill_bytes) is not int or self.kv_spill_bytes < 0:
            raise ValueError(f"kv_spill_bytes={shown(self.kv_spill_bytes)}: expected a number of bytes, or 0")
        _positive(self, "max_interventions_per_site", "max_intervention_vectors", "max_capture_bytes")
        _positive(self, "max_loras", "max_lora_rank")
        for kind in self.inner_sites:
            if kind not in INNER_SITES:
                raise ValueError(f"inner_sites holds {kind!r}: expected some of {', '.join(INNER_SITES)}")
        if isinstance(self.reconstruct, str) or not all(isinstance(name, str) for name in self.reconstruct):
            raise ValueError(f"reconstruct={shown(self.reconstruct)}: expected names of SAEs, as in ['name']")
        media = self.limit_mm_per_prompt or {}
        if not isinstance(media, Mapping) or not all(type(n) is int and n >= 0 for n in media.values()):
            raise ValueError(f"limit_mm_per_prompt={shown(media)}: expected {{'image': n}}")
        if others := [name for name, count in media.items() if name != "image" and count]:
            raise ValueError(
                f"limit_mm_per_prompt names {', '.join(map(repr, others))}: images are read, and no other media"
            )
        if not 0 <= self.mm_processor_cache_gb < float("inf"):
            raise ValueError(f"mm_processor_cache_gb={self.mm_processor_cache_gb}: expected a number of GiB from 0 on")
        SpeculativeConfig.of(self.speculative)
        _one_of(self, "state_dtype", ("float32", "bfloat16"))
        _one_of(self, "capture_when_full", ("block", "fail"))
        _one_of(self, "queue_order", ("fcfs", "lpm"))
        _one_of(self, "lower_traces", LOWER_TRACES)
        _one_of(self, "logprobs_mode", ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"))
        _one_of(self, "attention_backend", ("auto", "torch", "flashinfer"))
        if self.kv_cache_dtype not in ("auto", *FP8_KV, *DTYPE_NAMES):
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: expected 'auto', 'fp8' (E4M3) or one of {sorted(DTYPE_NAMES)}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: expected above 0 and at most 1")
        for name, unit in (("trace_step_warning", "s"), ("trace_step_timeout", "s"), ("max_itl_ms", "ms")):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: expected {'seconds' if unit == 's' else 'milliseconds'} above 0")


TUNING = frozenset(EngineTuning.__dataclass_fields__)
RENAMED = {"schedule_policy": "prefill_policy", "scheduling_policy": "queue_order"}
"""Old name of a field, which works until 0.2 -> the new one."""


def renamed_fields(given: Mapping[str, Any], call: str, stacklevel: int = 4) -> dict[str, Any]:
    """Fields of `ServerConfig` by their present names. Issues a DeprecationWarning for each old one.

    Args:
        call: shows a setting in the warning, such as "LM({}=...)".
        stacklevel: stack level of `warn_renamed`.
    """
    for old in given.keys() & RENAMED.keys():
        warn_renamed(call.format(old), call.format(RENAMED[old]), stacklevel)
    return {RENAMED.get(name, name): value for name, value in given.items()}

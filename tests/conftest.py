"""Shared fixtures: tiny random models of each family, with a tokenizer, saved once a session."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any

if gc.isenabled():
    gc.disable()  # until the tests are collected: imports make half a million objects, none of them garbage

import pytest
import torch
from _pytest.logging import catching_logs
from gpu_workers import SHARERS, share_of, take_device

if torch.cuda.device_count():
    take_device(os.environ, torch.cuda.device_count())
if not torch.cuda.is_available():
    # The kernels' tests run under Triton's interpreter. Triton asks when it is imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "sklearn" not in sys.modules:
    from pymllm_interp.utils.light_imports import import_generation

    import_generation()  # each process of a test run would import scikit-learn with it

import helpers_durations
from helpers_graphs import use_eager_graphs
from helpers_selection import select
from helpers_server import CHAT_TEMPLATE, Server, serving
from helpers_triton import quicken_the_interpreter
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import pymllm_interp
from pymllm_interp import LM
from pymllm_interp.client import local_backend
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.models.weights.source import ModelSource

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
quicken_the_interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hook-execution", default="auto", choices=["auto", "segments", "split", "eager"],
        help="how the engines of the tests run hooked decode steps; off CUDA, segments run as functions in place of graphs",
    )  # fmt: skip
    parser.addoption(
        "--remote",
        action="store_true",
        help="`lm_of` gives LM.connect(...) to servers; tests marked `local` are skipped",
    )
    parser.addoption(
        "--ahead", action="store_true", help="engines launch each step before they read the last one's tokens"
    )
    parser.addoption(
        "--lower-traces", default="auto", choices=["auto", "off", "require"],
        help="whether blocks that only read run after their requests; see ServerConfig.lower_traces",
    )  # fmt: skip
    parser.addoption("--durations-json", type=Path, help="a file that gets the seconds of each test")
    parser.addoption("--tenth", type=int, help="runs a tenth of the tests: N of 0 to 9, or any number, such as a day's")
    parser.addoption("--fuzz-seeds", help="FIRST:END: the seeds of the slow fuzz (tests/fuzz)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items, torch.cuda.is_available())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector, as the imports above."""
    try:
        return (yield)
    finally:
        gc.enable()


@contextmanager
def device_share(workers: int) -> Iterator[None]:
    """Limit this process to its share of the device's memory, and let engines see the share as the whole device.

    Engines size their KV pool by the total and free memory of the device. Without shares, the first worker's takes nearly all.
    """
    total = torch.cuda.mem_get_info()[1]
    share = share_of(total, workers)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return max(share - torch.cuda.memory_reserved(device), 0), share

    torch.cuda.set_per_process_memory_fraction(share / total)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="session", autouse=True)
def shared_device() -> Iterator[None]:
    """Several workers share a CUDA device."""
    workers = int(os.environ.get(SHARERS, "1"))
    with device_share(workers) if workers > 1 and torch.cuda.is_available() else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What is there before a file's tests lives on after them, and the end of each engine looks for garbage: not among that."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by folder. And how many tests of the server's page ran: they need a browser, and a skipped one says why."""
    path = terminalreporter.config.getoption("--durations-json")
    if path is not None:
        seconds = helpers_durations.seconds_by_test(chain.from_iterable(terminalreporter.stats.values()))
        helpers_durations.write(path, seconds)
        if "lanes" not in sys.modules:  # which sums up the seconds of all sessions
            for line in helpers_durations.summary(seconds):
                terminalreporter.write_line(line)
    found = {
        kind: [one for one in terminalreporter.getreports(kind) if "test_server_page.py" in one.nodeid]
        for kind in ("passed", "failed", "error", "skipped")
    }
    if any(found.values()):
        skipped = found.pop("skipped")
        terminalreporter.write_line(f"tests of the page: {sum(map(len, found.values()))} ran, {len(skipped)} skipped")
        for one in skipped:
            terminalreporter.write_line(f"  {one.nodeid}: {one.longrepr[2] if one.longrepr else ''}")


def _catch_at_the_root(self: catching_logs[Any]) -> Any:
    """`catching_logs.__enter__` without a search of all loggers, six times a test, for torch's 60 that do not propagate."""
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = logging.root.level
        logging.root.setLevel(min(self.orig_level, self.level))
    logging.root.addHandler(self.handler)
    if hasattr(self, "attached_loggers"):
        self.attached_loggers.append(logging.root)
    return self.handler


catching_logs.__enter__ = _catch_at_the_root


def pytest_configure(config: pytest.Config) -> None:
    """A worker leaves without freeing its modules one by one, for seconds: its exit status is asked by nobody."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and "xgrammar" in sys.modules:
        gc.unfreeze()  # so that what it made is let go of as it expects it


VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    # 9 heads over 3, tied embeddings
    "llama": lambda: LlamaConfig(
        **COMMON, hidden_size=72, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    ),
    # biases everywhere, llama3 RoPE scaling, head_dim not hidden over heads
    "llama-rope": lambda: LlamaConfig(
        **COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=24,
        attention_bias=True, mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral": lambda: MistralConfig(
        **COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=5
    ),
    "qwen2": lambda: Qwen2Config(
        **COMMON, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True,
        sliding_window=4, max_window_layers=1, tie_word_embeddings=True,
    ),
    "qwen3": lambda: Qwen3Config(
        **COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24
    ),
    "gpt2": lambda: GPT2Config(**{**COMMON, "n_inner": 56}, n_embd=64, n_layer=2, n_head=4),
    "gemma": lambda: GemmaConfig(
        **COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=24
    ),
    # soft-caps that are felt, a scale of its own, windows by turns
    "gemma2": lambda: Gemma2Config(
        **COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
        query_pre_attn_scalar=16, attn_logit_softcapping=4.0, final_logit_softcapping=12.0, sliding_window=5,
    ),
    # two rotations, one of them scaled
    "gemma3_text": lambda: Gemma3TextConfig(
        **COMMON, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        query_pre_attn_scalar=24, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    # a dense layer, then experts with shared ones; biases, a rotation of 12 of 24 channels
    "glm4_moe": lambda: Glm4MoeConfig(
        **COMMON, hidden_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=24,
        attention_bias=True, use_qk_norm=True, moe_intermediate_size=40, n_routed_experts=5, num_experts_per_tok=3,
        n_shared_experts=2, routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ),
    # sinks, windows by turns, YaRN, biases, experts
    "gpt_oss": lambda: GptOssConfig(
        **COMMON, hidden_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        sliding_window=5, num_local_experts=5, num_experts_per_tok=3,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    # a rotation of 6 of 24 channels
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON, hidden_size=96, num_hidden_layers=3, num_attention_heads=4),
    "gpt_neox-sequential": lambda: GPTNeoXConfig(
        **COMMON, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, use_parallel_residual=False,
        hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True,
    ),
}  # fmt: skip


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over w0 ... w94, with an unknown and a padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {f"w{i}": i for i in range(VOCAB - 2)} | {"<unk>": VOCAB - 2, "<pad>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", padding_side="left"
    )


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """transformers' own class with seeded random weights, float32, in eval mode; every parameter random, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.dim() == 1:  # a norm's; Gemma's is stored less 1
                parameter.normal_(0 if "gemma" in config.model_type else 1, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> a folder with config, safetensors and a tokenizer."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            random_model(CONFIGS[family]()).save_pretrained(made[family])
            tiny_tokenizer().save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> a folder with a random vision-language model, its tokenizer and its processor's settings."""
    from helpers_vision import save_vision_model  # which imports the families

    return cache(lambda family: save_vision_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def vision_oracle(vision_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """family -> transformers' own model of `vision_folder`."""
    from transformers import AutoModelForImageTextToText

    load = AutoModelForImageTextToText.from_pretrained
    return cache(lambda family: load(vision_folder(family), attn_implementation="eager", dtype=torch.float32).eval())


@pytest.fixture(scope="session")
def demo_tokenizer() -> Iterator[None]:
    """Most of the second that each `LM("demo")` takes is its tokenizer: this process reads it once."""
    load, found = local_backend.load_tokenizer, {}

    def load_once(source: ModelSource) -> Any:
        if source.tokenizer_path not in found:
            found[source.tokenizer_path] = load(source)
        return found[source.tokenizer_path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_backend, "load_tokenizer", load_once)
        yield


@pytest.fixture(scope="module")
def demo(demo_tokenizer: None) -> Iterator[LM]:
    """The demo model."""
    with LM("demo") as found:
        yield found


@pytest.fixture
def one_demo(demo: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LM("demo")` without settings is one engine for all tests of a file, which their `shutdown` leaves as it is."""

    @wraps(LM)
    def load(model: str, **settings: Any) -> LM:
        return demo if model == "demo" and not settings else LM(model, **with_tuning(**settings))

    demo.reset_prefix_cache()
    demo.vectors.clear()
    monkeypatch.setattr(pymllm_interp, "LM", load)
    monkeypatch.setattr(demo, "shutdown", lambda: None)


@pytest.fixture(scope="session")
def oracle(model_folder: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """family -> transformers' model over the folder's weights, eager attention, float32."""
    made: dict[str, PreTrainedModel] = {}

    def load(family: str) -> PreTrainedModel:
        if family not in made:
            made[family] = AutoModelForCausalLM.from_pretrained(
                model_folder(family), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return made[family]

    return load


@pytest.fixture(scope="session")
def lm_of(model_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM over the folder's weights, float32; made once for equal arguments, shut down at the end."""
    made: dict[tuple, LM] = {}
    if request.config.getoption("--remote"):
        with ExitStack() as servers:
            start = serving
            if request.config.getoption("--tenth") is not None:  # the tests take less than the start of two processes
                from helpers_served import served as start
            yield partial(_connected, servers, made, model_folder, request.config.getoption("--lower-traces"), start)
        return
    defaults = {
        "dtype": "float32", "device": "cpu", "hook_execution": request.config.getoption("--hook-execution"),
        "async_scheduling": request.config.getoption("--ahead") or None,
        "lower_traces": request.config.getoption("--lower-traces"),
    }  # fmt: skip

    def load(family: str, **kwargs: Any) -> LM:
        key = (family, *sorted(kwargs.items()))
        if key not in made:
            # On CUDA, pools of the default sizes would leave no memory to the next engines.
            pool = (
                {"kv_cache_tokens": 4096, "capture_ring_bytes": 128 << 20}
                if str(kwargs.get("device")).startswith("cuda")
                else {}
            )
            made[key] = LM(model_folder(family), **with_tuning(**{**defaults, **pool, **kwargs}))
        return made[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        if defaults["hook_execution"] == "segments" and not torch.cuda.is_available():
            use_eager_graphs(monkeypatch)
        yield load
        for lm in made.values():
            lm.shutdown()


def _connected(
    servers: ExitStack,
    made: dict[tuple, LM],
    model_folder: Callable[[str], Path],
    lower_traces: str,
    start: Callable[..., AbstractContextManager[Server]],
    family: str,
    **kwargs: Any,
) -> LM:
    """An LM of a server with these arguments, which lives as long as `servers`."""
    key = (family, *sorted(kwargs.items()))
    if key not in made:
        if kwargs.keys() - {*ModelConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__}:
            pytest.skip(f"{', '.join(kwargs)}: of a local LM alone")
        options = [part for name, value in kwargs.items() for part in ("--option", f"{name}={value!r}")]
        server = servers.enter_context(start(model_folder(family), "--allow-code-from", "anybody", *options, keys=None))
        made[key] = servers.enter_context(LM.connect(server.url, lower_traces=lower_traces))
    return made[key]


@pytest.fixture(scope="session")
def pair_of(lm_of: Callable[..., LM], model_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """family -> our `Bridge`, and TransformerLens' own over the same weights (helpers_lens.py)."""
    from helpers_lens import make_pair

    return cache(lambda family: make_pair(family, lm_of, model_folder))


@contextmanager
def held(lm: LM) -> Iterator[Callable[[int], None]]:
    """The engine stands between two steps while the body submits, so that all of it starts together.

    Yields a function that waits until so many submissions have come, whatever the machine's pace.
    """
    if getattr(lm, "is_remote", False):
        pytest.skip("looks into an engine of this process")
    stands, goes_on = threading.Event(), threading.Event()

    def arrived(count: int) -> None:
        deadline = time.monotonic() + 600
        while len(lm.engine._inbox) < count:
            assert time.monotonic() < deadline, f"{len(lm.engine._inbox)} of {count} submissions have come"
            time.sleep(0.001)

    holder = threading.Thread(target=lm.engine.call, args=(lambda: stands.set() or goes_on.wait(600),))
    holder.start()
    assert stands.wait(600)
    try:
        yield arrived
    finally:
        goes_on.set()
        holder.join()


@pytest.fixture(scope="session")
def served_folder(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama folder, with a chat template."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(model_folder("llama"), folder, dirs_exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the llama folder, with the keys of helpers_server.py."""
    options = [
        "--allow-code-from", "code", "--operator", "code", "--inline-bytes", "20000", "--option", "trace_step_timeout=60",
    ]  # fmt: skip
    with serving(served_folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found

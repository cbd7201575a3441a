"""The pytest plugin of `nnsight_suite`: makes the models of nnsight's tests, and notes which test used one.

`NNSIGHT_SUITE_MODEL` says whose models: "nnsight" (the control) or "LM". `NNSIGHT_SUITE_OUT` is the file for the results;
`NNSIGHT_SUITE_ONLY` a file with the ids of the tests to run.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import tempfile
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnsight
import nnsight.modeling.transformers
import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError as OutOfOrderError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pymllm_interp import LM
from pymllm_interp.config import ModelConfig
from pymllm_interp.models.weights.source import resolve_model

OURS = os.environ.get("NNSIGHT_SUITE_MODEL") == "LM"
SECONDS = 90
"""A test may take so long."""
LOADING = {
    "task",
    "dispatch",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enable_prefix_caching",
    "disable_log_stats",
    "enable_chunked_prefill",
}
"""Keywords that say how nnsight or vLLM loads a model. An `LM` needs none of them."""
VLLM_SIZES = [
    ("max_num_seqs", "max_running_requests", 1), ("max_num_batched_tokens", "max_num_tokens", 1),
    ("num_gpu_blocks_override", "kv_cache_tokens", 16),
]  # fmt: skip
"""vLLM's keyword, ours, and how many of ours one of theirs is."""
POOL = {"kv_cache_tokens": 4096, "max_num_tokens": 1024, "device": "cpu", "dtype": "float32"}

torch.set_num_threads(1)


# -- models -------------------------------------------------------------------------------------


@functools.cache
def demo_folder() -> str:
    """SmolLM2-135M-Instruct as a transformers checkpoint."""
    folder = resolve_model(ModelConfig(model="demo")).folder
    assert folder is not None
    return str(folder)


@functools.cache
def tiny_folder() -> str:
    """A small random Llama with the demo model's tokenizer: stands for the hub's tiny-random-LlamaForCausalLM."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    return save_module(causal_module(vocab_size=len(tokenizer)), tokenizer)


def save_module(module: torch.nn.Module, tokenizer: Any) -> str:
    folder = tempfile.mkdtemp(prefix="nnsight-suite-")
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def causal_module(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@functools.cache
def hf_model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()


def lens_text() -> str:
    """What the demo model's last layer predicts after each token of the tests' prompt."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    ids = tokenizer("The Eiffel Tower is in the city of", return_tensors="pt").input_ids
    with torch.no_grad():
        return tokenizer.decode(hf_model()(ids).logits[0].argmax(-1))


CHECKPOINTS = {
    "gpt2": demo_folder, "openai-community/gpt2": demo_folder, "hf-internal-testing/tiny-random-LlamaForCausalLM": tiny_folder,
}  # fmt: skip


def TransformersModel(source: Any, **options: Any) -> Any:
    return make(nnsight.modeling.transformers.TransformersModel, source, options)


def LanguageModel(source: Any, **options: Any) -> Any:
    return make(nnsight.LanguageModel, source, options)


def VLLM(source: Any, **options: Any) -> Any:
    if not OURS:
        _run.note_model()
        pytest.skip("vLLM is not installed here: no control")
    for theirs, ours, factor in VLLM_SIZES:
        if theirs in options:
            options[ours] = factor * options.pop(theirs)
    return make(None, source, options)


_made: dict[str, Any] = {}
_loose: list[weakref.ref[LM]] = []


def make(cls: Any, source: Any, options: dict[str, Any]) -> Any:
    """A model of the kind under test. Those of fixtures are made once for equal arguments."""
    _run.note_model()
    options = {"dispatch": True, **options} if cls is nnsight.LanguageModel and _run.in_fixture else options
    key = f"{cls} {source if isinstance(source, str) else id(source)} {sorted(options.items(), key=str)}"
    if _run.in_fixture and key in _made:
        return _made[key]
    if options.get("task", "text-generation") != "text-generation":
        pytest.skip(f"the task {options['task']}")
    if isinstance(source, str) and source not in CHECKPOINTS and not Path(source).is_dir():
        pytest.skip(f"needs {source} from the hub")
    model = make_lm(source, options) if OURS else make_control(cls, source, options)
    if _run.in_fixture:
        _made[key] = model
    elif OURS:
        _loose.append(weakref.ref(model))
    return model


def make_control(cls: Any, source: Any, options: dict[str, Any]) -> Any:
    return cls(CHECKPOINTS[source]() if source in CHECKPOINTS else source, **options)


def make_lm(source: Any, options: dict[str, Any]) -> LM:
    """An LM has its weights from a folder: a module is saved first."""
    tokenizer = options.pop("tokenizer", None)
    if isinstance(source, torch.nn.Module):
        if not isinstance(source, LlamaForCausalLM):
            pytest.skip(f"{type(source).__name__}")
        folder = save_module(source, tokenizer or AutoTokenizer.from_pretrained(source.name_or_path))
    else:
        folder = CHECKPOINTS[source]() if source in CHECKPOINTS else source
    return LM(folder, **{**POOL, **{name: value for name, value in options.items() if name not in LOADING}})


def request_state(lm: LM) -> dict[str, int]:
    """How many requests the engine holds, for tests that look for what is left behind."""
    stats = lm.engine.stats()
    live = stats["running"] + stats["waiting"] + stats["swapped"]
    return {"mediators": live, "started": live}


def preemptions(lm: LM) -> int:
    stats = lm.engine.stats()
    return stats["preempted"] + stats["moved_to_host"]


# -- results ------------------------------------------------------------------------------------


class Run:
    """What happened so far."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self.in_fixture = ""
        self.fixtures: set[str] = set()
        self.used = False

    def note_model(self) -> None:
        self.used = True
        if self.in_fixture:
            self.fixtures.add(self.in_fixture)


_run = Run()


def fixture_key(fixture: Any) -> str:
    return f"{fixture.func.__module__}.{fixture.func.__qualname__}"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    outer, _run.in_fixture = _run.in_fixture, fixture_key(fixturedef)
    try:
        return (yield)
    finally:
        _run.in_fixture = outer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    only = os.environ.get("NNSIGHT_SUITE_ONLY")
    if only:
        wanted = set(json.loads(Path(only).read_text()))
        items[:] = [item for item in items if item.nodeid in wanted]


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"no result after {SECONDS} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Iterator[None]:
    _run.used = False
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
        result = _run.results.setdefault(item.nodeid, {"outcome": "error"})
        result["model"] = _run.used or any(fixture_key(fixture) in _run.fixtures for fixture in fixtures)
        while _loose:
            model = _loose.pop()()
            if model is not None:
                model.shutdown()
            del model
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[Any]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        result = {"outcome": report.outcome if report.when == "call" or report.skipped else "error"}
        if report.skipped:
            why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else call.excinfo.value
            result["reason"] = str(why).removeprefix("Skipped: ")
        elif report.failed:
            error = call.excinfo.value
            result["reason"] = f"{type(error).__name__}: {error}"[:600]
            frames = traceback.extract_tb(error.__traceback__)
            result["where"] = [f"{Path(frame.filename).name}:{frame.lineno} {frame.line}" for frame in frames][-3:]
        _run.results[item.nodeid] = result
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ["NNSIGHT_SUITE_OUT"]).write_text(json.dumps(_run.results, indent=1))
    for model in _made.values():
        if isinstance(model, LM):
            model.shutdown()

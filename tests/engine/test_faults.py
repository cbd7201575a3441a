"""What goes wrong on a device, and what is said about it: no device, no kernels, no memory.

Memory that is not there is asked for in earnest: more of it than any machine has or, where a step is to fail, more than the
allocator is allowed to take. A CPU has no such limit to set, so there a kernel says that it found none.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMMON, CONFIGS, held, random_model
from helpers_devices import DEVICES, ways
from helpers_graphs import use_eager_graphs
from helpers_runner import make_runner, random_ids
from helpers_waits import assert_idle, until
from transformers import LlamaConfig, PretrainedConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.attention import FlashInferAttnBackend, TorchAttnBackend
from pymllm_interp.attention.flashinfer_backend import WORKSPACE_BYTES
from pymllm_interp.client.handle import RequestError
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.models.native.llama import LlamaForCausalLM
from pymllm_interp.runner import model_runner
from pymllm_interp.runner.graphs import graph_capture
from pymllm_interp.runner.graphs.cuda_graph_runner import is_capture_mode
from pymllm_interp.utils.device import resolve_device
from pymllm_interp.utils.out_of_memory import is_out_of_memory

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ASTRONOMIC = 10**13
MANY_WORDS, SOME_WORDS = 10**6, 12347
WIDE: dict[str, Any] = {**COMMON, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 64}


def dummy(config: PretrainedConfig, device: str, **options: Any) -> LM:
    server = {"kv_cache_tokens": 1024, "max_running_requests": 4, **options}
    return LM("dummy", load_format="dummy", hf_config=config, device=device, **server)


def weights_of(words: int) -> list[torch.nn.Parameter]:
    """What is left of models with so large a vocabulary."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is torch.nn.Parameter and x.shape[0] == words]


# -- no device, no kernels -------------------------------------------------------------------------


def test_cuda_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, cause in ((None, "install a CUDA build of torch"), ("13.0", "CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(torch.version, "cuda", version)
        for device in ("cuda", "cuda:1"):
            with pytest.raises(ValueError, match=rf"device='{device}'.*no CUDA device.*device='cpu', or .*{cause}"):
                LM("dummy", load_format="dummy", hf_config=CONFIGS["llama"](), device=device)
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cuda0", ""])
def test_a_device_that_is_none_is_refused_by_name(device):
    with pytest.raises(ValueError, match=rf"device='{device}' is not supported; use 'cpu', 'cuda', 'cuda:N' or 'auto'"):
        resolve_device(device)


@pytest.mark.gpu
def test_a_device_past_the_last_one_is_refused():
    last = torch.cuda.device_count() - 1
    assert resolve_device(f"cuda:{last}") == f"cuda:{last}"
    with pytest.raises(ValueError, match=rf"device='cuda:{last + 1}', but the last CUDA device is 'cuda:{last}'"):
        resolve_device(f"cuda:{last + 1}")


@pytest.mark.gpu
def test_head_sizes_and_dtypes_without_kernels_run_on_torch_and_are_refused_where_flashinfer_is_asked_for(caplog):
    with caplog.at_level(logging.WARNING), dummy(CONFIGS["qwen3"](), "cuda") as lm:
        assert isinstance(lm.runner.attn_backend, TorchAttnBackend) and lm.runner.dtype is torch.bfloat16
        assert "torch backend" in caplog.text and "head sizes (64, 128, 256), not 24" in caplog.text
        assert [len(out.token_ids) for out in lm.generate([[1, 2, 3], [4]], GREEDY)] == [8, 8]
    with pytest.raises(ValueError, match=r"head_dim=24.*attention_backend='torch'"):
        dummy(CONFIGS["qwen3"](), "cuda", attention_backend="flashinfer")
    config = LlamaConfig(**WIDE, num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"no float32 kernels.*dtype='bfloat16'"):
        dummy(config, "cuda", dtype="float32", attention_backend="flashinfer")
    with dummy(config, "cuda", dtype="float32") as lm:
        assert isinstance(lm.runner.attn_backend, TorchAttnBackend)


@pytest.mark.gpu
def test_without_flashinfer_attention_runs_on_torch_and_the_extra_is_named(monkeypatch, caplog):
    config = LlamaConfig(**WIDE, num_key_value_heads=1)
    with dummy(config, "cuda", kv_cache_tokens=256) as lm:
        assert isinstance(lm.runner.attn_backend, FlashInferAttnBackend)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # what an import of a missing package finds
    with caplog.at_level(logging.WARNING), dummy(config, "cuda") as lm:
        assert isinstance(lm.runner.attn_backend, TorchAttnBackend)
        assert 'pip install -e ".[cuda]"' in caplog.text
        assert len(lm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8
    with pytest.raises(ImportError, match=r"""pip install -e .\.\[cuda\].*attention_backend='torch'"""):
        dummy(config, "cuda", attention_backend="flashinfer")


# -- no memory at the start --------------------------------------------------------------------------


ENDLESS = LlamaConfig(**{**WIDE, "vocab_size": MANY_WORDS, "intermediate_size": ASTRONOMIC}, num_key_value_heads=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "helps"), [("float32", "dtype='bfloat16', a smaller model"), ("float16", "helps: a smaller model")]
)
def test_weights_that_do_not_fit_say_what_to_lower_and_are_let_go(device, dtype, helps):
    message = rf"(?s)the weights of 'dummy' as torch.{dtype} do not fit on {device}.*{helps}.*another process.*allocate"
    with pytest.raises(torch.OutOfMemoryError, match=message) as caught:
        dummy(ENDLESS, device, dtype=dtype)
    # The embedding was made before the layers, and `caught` is still here.
    assert not weights_of(MANY_WORDS), "the error holds weights"
    assert caught.value.__cause__ is None
    with dummy(CONFIGS["llama"](), device) as lm:
        assert len(lm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("device", DEVICES)
def test_a_kv_pool_that_does_not_fit_says_what_to_lower(device):
    message = rf"(?s)KV pool of {ASTRONOMIC} tokens .* do(es)? not fit on {device}.*lower kv_cache_tokens \(now {ASTRONOMIC}\)"
    config = LlamaConfig(**{**WIDE, "vocab_size": SOME_WORDS}, num_key_value_heads=1)
    with pytest.raises(torch.OutOfMemoryError, match=message) as caught:
        dummy(config, device, kv_cache_tokens=ASTRONOMIC)
    assert not weights_of(SOME_WORDS) and caught.value.__context__ is None, "the error holds weights"
    with dummy(CONFIGS["llama"](), device) as lm:
        assert len(lm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8


def test_a_workspace_of_attention_that_does_not_fit_says_what_to_lower(monkeypatch):
    """It is made when the pool has taken its share."""
    monkeypatch.setattr(model_runner, "create_attention_backend", lambda *args: torch.empty(ASTRONOMIC))
    message = r"workspace of attention does not fit on cpu.*lower kv_cache_tokens \(now 1024\).*gpu_memory_utilization \(now 0.9"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        dummy(CONFIGS["llama"](), "cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
    ],
)
def test_memory_that_is_lacking_is_told_from_other_faults_of_the_device(text, expected):
    """Pinned memory, and that of the libraries, is refused without a type of torch's."""
    assert is_out_of_memory(RuntimeError(text)) == expected


def test_an_error_of_the_start_that_is_not_about_memory_stays_what_it_is(monkeypatch):
    def broken(*args: Any) -> None:
        raise RuntimeError("broken kernel")

    monkeypatch.setattr("pymllm_interp.models.registry.init_dummy_weights", broken)
    with pytest.raises(RuntimeError, match=r"^broken kernel$") as caught:
        dummy(CONFIGS["llama"](), "cpu")
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
def test_a_largest_step_that_does_not_fit_says_what_to_lower():
    config = LlamaConfig(**{**WIDE, "intermediate_size": 32768}, num_key_value_heads=1)
    total = torch.cuda.mem_get_info()[1]
    rows = total // (2 * 32768 * 2)  # what one layer's gate_up takes is the whole device's memory
    with pytest.raises(torch.OutOfMemoryError, match=rf"largest step.*GiB are free.*max_num_tokens \(now {rows}\)"):
        dummy(config, "cuda", kv_cache_tokens=None, max_num_tokens=rows)
    with pytest.raises(
        ValueError, match=r"KV pool would hold -?\d+ tokens.*raise gpu_memory_utilization \(now 0.001\)"
    ):
        dummy(config, "cuda", kv_cache_tokens=None, gpu_memory_utilization=0.001)


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
@pytest.mark.parametrize("others", [0, 6 << 30])
def test_the_pool_is_sized_to_the_share_of_memory_whoever_has_the_rest(others):
    """Neither a peak of the past nor what others hold may count twice, or not at all."""
    torch.empty(8 << 30, dtype=torch.uint8, device="cuda")  # the peak of an engine that is gone
    taken = torch.zeros(others, dtype=torch.uint8, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    limit = total - free + (12 << 30)
    config = LlamaConfig(**WIDE, num_key_value_heads=1)
    runner = make_runner(
        config, dtype="bfloat16", device="cuda", kv_cache_tokens=None, gpu_memory_utilization=limit / total,
        max_running_requests=4,
    )  # fmt: skip
    assert runner.graph_runner is not None and runner.token_to_kv_pool is not None
    free, _ = torch.cuda.mem_get_info()
    used = total - free
    # 1 GiB is left to the graphs, which take some of it; the workspace lies in what the profile run has left cached.
    assert limit - (5 << 28) - WORKSPACE_BYTES <= used <= limit + (1 << 29), (
        f"{(used - limit) / 2**30:.2f} GiB past the limit"
    )
    runner.shutdown()
    del taken


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("broken"), OSError("no gcc")]
)
def test_a_capture_that_fails_lets_go_of_the_model_and_of_the_graphs_before_it(error, monkeypatch):
    """Whatever it fails with, and although the caller has the error: a notebook keeps the last one."""
    use_eager_graphs(monkeypatch)
    record, rows = graph_capture.record, []

    def fails_at_the_second(*args: Any) -> Any:
        rows.append(1)
        if len(rows) == 2:
            raise error
        return record(*args)

    monkeypatch.setattr(graph_capture, "record", fails_at_the_second)
    config = LlamaConfig(**{**WIDE, "vocab_size": SOME_WORDS}, num_key_value_heads=1)
    with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else OSError, match=str(error)) as caught:
        dummy(config, "cpu", dtype="float32")
    assert not weights_of(SOME_WORDS), "the error holds weights"
    assert caught.value.__traceback__ is not None and rows == [1, 1]
    with dummy(CONFIGS["llama"](), "cpu", dtype="float32") as lm:
        assert ways(lm)["replay"] == 0 and len(lm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8
        assert ways(lm)["replay"] == 8


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_a_device_that_the_next_engine_uses(monkeypatch):
    """A pass that waits for the device cannot be captured."""
    fused = LlamaForCausalLM.forward_fused

    def waits(self: Any, *args: Any) -> torch.Tensor:
        logits = fused(self, *args)
        if is_capture_mode() and torch.cuda.is_current_stream_capturing():
            logits.sum().item()
        return logits

    config = LlamaConfig(**WIDE, num_key_value_heads=1)
    with dummy(config, "cuda", dtype="bfloat16") as lm:
        expected = lm.generate([[1, 2, 3]], GREEDY)[0].token_ids
    monkeypatch.setattr(LlamaForCausalLM, "forward_fused", waits)
    with pytest.raises(RuntimeError, match=r"(?s)decode pass of 4 rows failed.*disable_cuda_graph=True"):
        dummy(config, "cuda", dtype="bfloat16")
    with dummy(config, "cuda", dtype="bfloat16", disable_cuda_graph=True) as lm:
        assert lm.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected
    monkeypatch.undo()
    with dummy(config, "cuda", dtype="bfloat16") as lm:
        assert lm.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected
        assert ways(lm)["replay"] == 8


# -- no memory in a step ----------------------------------------------------------------------------


class Exhausted:
    """An attention backend's `forward` that finds no memory in the last layer of the first pass for which `when` holds."""

    def __init__(self, lm: LM, when: Callable[[torch.Tensor], bool], error: type[Exception], times: int = 1) -> None:
        assert lm.runner.attn_backend is not None
        self.forward, self.when, self.error, self.times = lm.runner.attn_backend.forward, when, error, times
        self.last = lm.runner.num_hidden_layers - 1
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, q: torch.Tensor, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.times and layer.layer_id == self.last and self.when(q):
            self.times -= 1
            self.seen.append(weakref.ref(q))
            # What torch says where it has no memory, on a device and on the host.
            raise self.error(
                "CUDA out of memory" if self.error is torch.OutOfMemoryError else "DefaultCPUAllocator: ..."
            )
        return self.forward(q, k, v, layer, *args, **kwargs)

    @property
    def tensors_left(self) -> int:
        return sum(tensor() is not None for tensor in self.seen)


@pytest.fixture(scope="module")
def served(model_folder: Callable[[str], Path]) -> Iterator[Callable[[bool], LM]]:
    made: dict[bool, LM] = {}

    def load(ahead: bool) -> LM:
        if ahead not in made:
            made[ahead] = LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=512,
                             max_running_requests=8, async_scheduling=ahead, lower_traces="off")  # fmt: skip
        return made[ahead]

    yield load
    for lm in made.values():
        lm.shutdown()


TEACHES = (
    r"(?s)a step of \d+ requests and \d+ tokens ran out of memory on cpu; the engine continues.*max_num_tokens \(now 2048\)"
    r".*max_running_requests \(now 8\).*kv_cache_tokens \(now 512\)"
)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_step_without_memory_ends_its_requests_and_keeps_none_of_it(at, error, ahead, served, monkeypatch):
    lm = served(ahead)
    prompts = [random_ids(n, seed=n) for n in (5, 9)]
    expected = [out.token_ids for out in lm.generate(prompts, GREEDY)]
    exhausted = Exhausted(lm, lambda q: (q.shape[0] > 2) == (at == "prefill"), error)
    monkeypatch.setattr(lm.runner.attn_backend, "forward", exhausted)
    with pytest.raises(RequestError, match=TEACHES) as failed:
        lm.generate(prompts, GREEDY)
    outs = failed.value.outputs
    assert [out.finish_reason for out in outs] == ["error", "error"]
    for out, tokens in zip(outs, expected, strict=True):
        assert out.token_ids == ([] if at == "prefill" else tokens[:1])
        with pytest.raises(torch.OutOfMemoryError, match=TEACHES):
            raise out.outputs[0].error
    gc.collect()
    assert len(exhausted.seen) == 1 and not exhausted.tensors_left, "the error holds tensors of the pass that failed"
    assert [out.token_ids for out in lm.generate(prompts, GREEDY)] == expected
    assert_idle(lm)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_requests_that_decode_outlive_the_prompts_that_made_a_step_too_large(times, ahead, served, monkeypatch):
    """Unless their own rows are too many: then they end at the second failure."""
    lm, params = served(ahead), SamplingParams(temperature=0, max_tokens=60)
    decoding, prompt = random_ids(6, seed=1), random_ids(40, seed=2)
    expected = lm.generate([decoding], params)[0].token_ids
    exhausted = Exhausted(lm, lambda q: q.shape[0] > 6 or bool(exhausted.seen), torch.OutOfMemoryError, times)
    monkeypatch.setattr(lm.runner.attn_backend, "forward", exhausted)
    first = lm.submit(decoding, params)
    until(lambda: bool(first.requests[0].output_token_ids))
    second = lm.submit(prompt, params)
    with pytest.raises(RequestError):
        second.result()
    if times == 1:
        out = first.result()
        assert out.token_ids == expected and out.outputs[0].error is None
    else:
        with pytest.raises(RequestError, match="a step of 1 requests and 1 tokens") as failed:
            first.result()
        (out,) = failed.value.outputs
        assert out.token_ids == expected[: len(out.token_ids)]
    assert_idle(lm)


def test_a_step_without_memory_ends_its_traces_and_runs_plain_requests_again(served, monkeypatch):
    lm, params = served(True), SamplingParams(temperature=0, max_tokens=30)
    prompts = [random_ids(n, seed=n) for n in (4, 9)]
    expected = [out.token_ids for out in lm.generate(prompts, params)]
    exhausted = Exhausted(lm, lambda q: bool(lm.interleaver.traces), torch.OutOfMemoryError)
    monkeypatch.setattr(lm.runner.attn_backend, "forward", exhausted)
    handles = [lm.submit(prompt, params) for prompt in prompts]
    with pytest.raises(torch.OutOfMemoryError, match=TEACHES):
        with lm.trace([1, 2, 3]):
            lm.model.layers[1].output.save()
    assert [handle.result().token_ids for handle in handles] == expected
    gc.collect()
    assert not exhausted.tensors_left
    with lm.trace([1, 2, 3]):
        logits = lm.lm_head.output.save()
    assert logits.shape == (1, 3, 97)
    assert_idle(lm)


@pytest.mark.parametrize("way", ["swap_out", "swap_in"])
def test_a_traced_request_that_gives_way_and_finds_no_memory_ends_and_no_other(way, model_folder, monkeypatch):
    prompts = [random_ids(10, seed=i) for i in range(3)]
    with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=40, page_size=4) as lm:
        pool, found = lm.runner.token_to_kv_pool, {}
        move, left = getattr(pool, way), [1]

        def fails(*args: Any) -> Any:
            if left:
                left.pop()
                raise torch.OutOfMemoryError("CUDA out of memory")
            return move(*args)

        def trace(i: int) -> None:
            try:
                with lm.generate(prompts[i], max_new_tokens=12) as tracer:
                    for _ in tracer.iter[:]:
                        lm.model.layers[1].output.save()
                    found[i] = tracer.result
            except torch.OutOfMemoryError as error:
                found[i] = error

        def all_at_once() -> None:
            threads = [threading.Thread(target=trace, args=(i,)) for i in range(3)]
            with held(lm) as arrived:
                for thread in threads:
                    thread.start()
                arrived(3)
            for thread in threads:
                thread.join(600)

        all_at_once()
        expected = dict(found)
        monkeypatch.setattr(pool, way, fails)
        all_at_once()
        ended = [value for value in found.values() if isinstance(value, Exception)]
        assert len(ended) == 1 and not left
        assert re.search(
            r"was preempted.*the engine continues.*max_running_requests.*\nCUDA out of memory", str(ended[0]), re.S
        )
        served = [i for i in found if not isinstance(found[i], Exception)]
        assert len(served) == 2 and all(torch.equal(found[i], expected[i]) for i in served)
        all_at_once()
        assert all(torch.equal(found[i], expected[i]) for i in range(3))
        assert_idle(lm)


@pytest.fixture
def allowance() -> Iterator[Callable[[int], None]]:
    """Sets how many bytes of the device's memory this process may still take; all that there are, at the end."""
    ballast: list[torch.Tensor] = []

    def limit(free: int) -> None:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free) / total)

    def allow(free: int) -> None:
        ballast.clear()
        gc.collect()
        torch.cuda.empty_cache()
        limit(0)
        size = 1 << 34
        while size >= 1 << 20:  # what torch has and could not give back is taken, too
            try:
                ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        limit(free)

    yield allow
    ballast.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
@pytest.mark.parametrize("traced", [False, True])
def test_a_device_without_memory_for_a_step_ends_it_and_serves_the_next_request(traced, allowance, tmp_path):
    """For real: the step wants 512 MiB for one activation, and may have 256."""
    rows, width = 8192, 16384
    assert rows * 2 * width * 2 == 512 << 20
    sizes = {"intermediate_size": width, "max_position_embeddings": 2 * rows}
    random_model(LlamaConfig(**{**WIDE, **sizes}, num_key_value_heads=1)).save_pretrained(tmp_path)
    lm = LM(tmp_path, device="cuda", kv_cache_tokens=3 * rows, max_running_requests=4, max_num_tokens=rows + 8)
    long, short, params = random_ids(rows, seed=1), random_ids(5, seed=2), SamplingParams(temperature=0, max_tokens=32)
    expected = lm.generate([short], params)[0].token_ids
    allowance(256 << 20)
    beside = lm.submit(short, SamplingParams(temperature=0, max_tokens=4000))
    until(lambda: bool(beside.requests[0].output_token_ids))
    message = (
        rf"(?s)a step of 2 requests and {rows + 1} tokens ran out of memory on cuda.*max_num_tokens \(now {rows + 8}\)"
        r".*max_running_requests \(now 4\).*kv_cache_tokens.*CUDA out of memory"
    )
    with pytest.raises(torch.OutOfMemoryError if traced else RequestError, match=message):
        if traced:
            with lm.trace(long):
                lm.model.layers[0].output.save()
        else:
            lm.generate([long], params)
    assert not beside.done
    assert len(beside.result().token_ids) == 4000, "the one that decodes is run again"
    assert lm.generate([short], params)[0].token_ids == expected
    allowance(8 << 30)
    with lm.trace(long):
        h = lm.model.layers[0].output.save()
    assert h.shape == (1, rows, 128)
    assert_idle(lm)
    lm.shutdown()


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
def test_a_block_that_wants_more_memory_than_there_is_ends_alone(allowance):
    with dummy(LlamaConfig(**WIDE, num_key_value_heads=1), "cuda", dtype="bfloat16") as lm:
        params = SamplingParams(temperature=0, max_tokens=60)
        expected = lm.generate([[1, 2, 3]], params)[0].token_ids
        handle = lm.submit([1, 2, 3], params)
        allowance(256 << 20)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            with lm.trace([4, 5]):
                hoard = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
                lm.model.layers[0].output[:] += hoard[0]
        assert handle.result().token_ids == expected and handle.result().outputs[0].error is None
        assert ways(lm)["replay"] > 0
        assert_idle(lm)


# -- the engine closes -----------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["end_all", "send_events", "_callbacks"])
def test_a_closing_engine_answers_its_handles_whatever_fails_on_the_way(part, model_folder, monkeypatch):
    lm = LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=512, max_running_requests=1)
    engine, failures = lm.backend.engine, [MemoryError("no room"), SystemExit("a part of the closing")]
    owner, name = (engine._callbacks, "close") if part == "_callbacks" else (engine.ends, part)
    original = getattr(owner, name)

    def fails(*args: Any) -> Any:
        if engine._closing is not None and failures:
            raise failures.pop()
        return original(*args)

    monkeypatch.setattr(owner, name, fails)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    handles = [lm.submit(random_ids(5, seed=i), params) for i in range(32)]
    until(lambda: engine.num_turns > 3)
    lm.shutdown()
    for handle in handles[-2:]:
        with pytest.raises(EngineClosedError, match="was ended"):
            handle.result(timeout=10)
    assert len(failures) < 2

"""New weights, sleep and adapters of vLLM's processes, against our own engine with the same weights."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_model
from helpers_adapters import write_adapter
from helpers_vllm import (
    FAMILIES,
    SIZES,
    assert_close,
    assert_close_tensor,
    needs_vllm,
    own_lm,
    prompt,
    save_model,
    two_ranks,
    vector,
    vllm_lm,
)
from safetensors.torch import load_file
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.core.events import EngineClosedError, EngineSleepingError
from pymllm_interp.models.adapters.peft_config import AdapterError
from pymllm_interp.models.weights.loading import WeightsError
from pymllm_interp.vllm_engine.client.adapters import VllmAdapters
from pymllm_interp.vllm_engine.refusals import VllmRefusalError
from pymllm_interp.wire.weights import SentWeights

PROMPTS = [prompt(7, 1), prompt(40, 2), prompt(1, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
STEERED: dict[str, Any] = {
    "interventions": [Steer("resid_post.1", vector(2), 2.0)],
    "capture": ["resid_post.*", "logits"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one config."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        made.append(save_model("llama", tmp_path_factory.mktemp(f"llama{seed}"), initializer_range=0.2 + 0.02 * seed))
    for name in ("config.json",):
        (made[1] / name).write_text((made[0] / name).read_text())
    return made


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def oracle(folders: list[Path]) -> Iterator[LM]:
    with own_lm(folders[0]) as found:
        yield found


@pytest.fixture(scope="module")
def lm(folders: list[Path]) -> Iterator[LM]:
    with vllm_lm(folders[0], max_num_tokens=24) as found:
        yield found


def give(weights: Any, *models: LM) -> None:
    for model in models:
        model.update_weights(weights)


def assert_equal_models(lm: LM, oracle: LM) -> None:
    for options in ({}, STEERED):
        for one, other in zip(*(m.generate(PROMPTS, GREEDY, **options) for m in (lm, oracle)), strict=True):
            assert_close(one, other)


@needs_vllm
def test_new_weights_are_a_new_engines(lm: LM, oracle: LM, folders: list[Path]) -> None:
    first, other = tensors(folders[0]), tensors(folders[1])
    assert_equal_models(lm, oracle)
    versions, prints = [lm.weights.version], [lm.weights.fingerprint]
    down = {name: other[name] for name in other if "down_proj" in name or name == "model.norm.weight"}
    merged = {name: other[name] for name in other if "layers.2.self_attn" in name}
    for weights in (folders[1], str(folders[0]), down, merged, list(other.items()), first):
        give(weights, lm, oracle)
        assert_equal_models(lm, oracle)  # cached KV of these prompts is of other weights
        versions.append(lm.weights.version)
        prints.append(lm.weights.fingerprint)
    assert versions == sorted(set(versions))
    assert prints[0] == prints[2] == prints[-1] != prints[1] and prints[1] == prints[5] and len(set(prints)) == 4


@needs_vllm
def test_what_runs_continues_with_the_new_weights(lm: LM, oracle: LM, folders: list[Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    old = oracle.generate([PROMPTS[1]], params, capture=["resid_post.3"])[0].outputs[0]
    running = lm.submit(PROMPTS[1], params, capture=["resid_post.3"])
    backend: Any = lm.backend
    steps = lm.backend.engine.stats()["steps"]
    while backend.engine.stats()["steps"] < steps + 5:
        time.sleep(0.005)
    version = lm.weights.version
    lm.pause("keep")
    waiting = lm.submit(PROMPTS[0], GREEDY)
    try:
        give(folders[1], lm, oracle)
        assert lm.is_paused()
        lm.resume()
        (found,) = (out := running.result(120)).outputs
        (before, count), (after, rest) = found.receipt.weights
        assert (before, after) == (version, version + 1) and count + rest == 80 and 0 < count < 80
        assert found.token_ids[:count] == old.token_ids[:count]
        begun = [*PROMPTS[1], *found.token_ids[:count]]
        rest_of = SamplingParams(temperature=0, max_tokens=rest, ignore_eos=True)
        new = oracle.generate([begun], rest_of, capture=["resid_post.3"])[0].outputs[0]
        assert found.token_ids[count:] == new.token_ids
        rows, kept = out.outputs[0].activations["resid_post.3"], len(begun) - 1
        assert_close_tensor(rows[:kept], old.activations["resid_post.3"][:kept])  # states from before stay
        assert_close_tensor(rows[kept:], new.activations["resid_post.3"][kept:])
        assert_close(waiting.result(120), oracle.generate([PROMPTS[0]], GREEDY)[0])
    finally:
        give(folders[0], lm, oracle)
    assert_equal_models(lm, oracle)


@needs_vllm
def test_weights_that_do_not_fit_are_refused_and_nothing_is_written(
    lm: LM, oracle: LM, folders: list[Path], tmp_path: Path
) -> None:
    other = tensors(folders[1])
    q, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    for weights, message in (
        ({"model.nothing.weight": other[norm]}, r"1 unknown: model\.nothing\.weight"),
        ({norm: other[norm][:5]}, r"misshapen: model\.norm\.weight is \[5\], the model's is \[96\]"),
        ({norm: other[norm].bfloat16()}, "of another dtype"),
        ({q: other[q]}, r"qkv_proj as one: give .*k_proj\.weight, .*v_proj\.weight, too"),
        ([(norm, other[norm])] * 2, "is given twice"),
        ({}, "no weights were given"),
        (save_model("llama", tmp_path / "wide", intermediate_size=160), "another config .*intermediate_size"),
    ):
        with pytest.raises(WeightsError, match=message):
            lm.update_weights(weights)
    with pytest.raises(TypeError, match="new weights are a folder"):
        lm.update_weights([norm])  # pyright: ignore[reportArgumentType]
    with pytest.raises(VllmRefusalError, match="draft model keeps its weights"):
        lm.update_weights(folders[1], draft=True)
    assert_equal_models(lm, oracle)


@needs_vllm
def test_another_process_sends_weights_by_vllms_orders(lm: LM, oracle: LM, folders: list[Path]) -> None:
    control = lm.backend.control
    with pytest.raises(ValueError, match="comes after init_weight_transfer_engine"):
        control("start_weight_update")
    control("init_weight_transfer_engine", init_info={"backend": "shared_memory"})
    for folder in (folders[1], folders[0]):
        control("start_weight_update")
        with SentWeights(tensors(folder)) as sent:
            control("receive_weights", update_info=sent.info)
        with pytest.raises(WeightsError, match="give it alone"):
            control("receive_weights", update_info={"folder": str(folder)})
        control("start_weight_update")
        with SentWeights(tensors(folder)) as sent:
            control("receive_weights", update_info=sent.info)
        control("check_weight_update")
        assert control("finish_weight_update", weight_version=folder.name)["tensors"] == len(tensors(folder))
        assert control("weight_info")["weight_version"] == folder.name
        oracle.update_weights(folder)
        assert_equal_models(lm, oracle)


@needs_vllm
def test_a_sleeping_engine_takes_no_requests(
    lm: LM, oracle: LM, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM for CPUs frees nothing, and pauses its scheduler all the same: the memory is a case on a GPU."""
    with pytest.raises(VllmRefusalError, match=r"enable_sleep_mode=True\), which it has on CUDA only"):
        lm.sleep()
    backend: Any = lm.backend
    monkeypatch.setattr(backend.core.config.model_config, "enable_sleep_mode", True)
    for options, kind, message in (
        ({"level": 3}, ValueError, "level=3: 1 keeps"), ({"tags": ["weight"]}, ValueError, "expected a list of weights"),
        ({"tags": ["weights"]}, VllmRefusalError, "gives 'weights' and 'kv_cache' back together"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            lm.sleep(**options)
    running = lm.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    with pytest.raises(ValueError, match="1 requests are live"):
        lm.sleep()
    lm.sleep(drain=True)
    assert len(running.result(1).outputs[0].token_ids) == 60 and lm.is_sleeping()
    with pytest.raises(EngineSleepingError, match=r"lm\.wake\(\)"):
        lm.generate(PROMPTS[0], GREEDY)
    with pytest.raises(ValueError, match="the weights are asleep"):
        lm.update_weights(folders[1])
    with pytest.raises(EngineSleepingError, match="weights are asleep"):
        _ = lm.weights.fingerprint
    woken, wake_up = list[Any](), backend.core.llm.wake_up
    monkeypatch.setattr(backend.core.llm, "wake_up", lambda tags=None: woken.append(tags) or wake_up(tags))
    assert lm.wake() and not lm.is_sleeping()
    assert_equal_models(lm, oracle)
    lm.pause("keep")
    running = lm.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    lm.sleep(drain=True)  # requests of a pause end, too
    assert len(running.result(1).outputs[0].token_ids) == 60 and lm.wake()
    held = lm.submit(PROMPTS[0], GREEDY)
    time.sleep(0.3)
    assert lm.is_paused() and not held.done  # the pause outlives the sleep
    lm.resume()
    assert len(held.result(60).outputs[0].token_ids) == 6
    for order, paused in ((lm.pause, True), (lm.resume, False)):
        lm.sleep()
        order()
        assert lm.wake() and lm.is_paused() == paused
    lm.sleep(level=2)
    assert not lm.wake(["weights"])
    with pytest.raises(ValueError, match="only kv_cache sleeps"):
        lm.sleep()
    assert not lm.wake(["kv_cache"]) and lm.is_sleeping()
    assert woken == [None, None, None, None, ["weights"], ["kv_cache"]]
    with pytest.raises(WeightsError, match="missing"):
        lm.update_weights({"model.norm.weight": tensors(folders[0])["model.norm.weight"]})
    lm.update_weights(folders[0])
    assert not lm.is_sleeping()
    assert_equal_models(lm, oracle)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts: a shell has processes in its background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@needs_vllm
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("paused", [False, True])
def test_a_sleep_that_fails_leaves_a_pause_as_it_was(lm: LM, monkeypatch: pytest.MonkeyPatch, paused: bool) -> None:
    """vLLM's own sleep fails after it has paused, or Ctrl-C comes before it or meanwhile."""
    backend: Any = lm.backend
    llm, long = backend.core.llm, SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    monkeypatch.setattr(backend.core.config.model_config, "enable_sleep_mode", True)
    sleep = llm.sleep

    async def fails(level: int, mode: str) -> None:
        await sleep(0, mode)  # pauses, and no more
        await sleep(level, "no mode of vLLM's")

    async def is_slow(level: int, mode: str) -> None:
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)  # on the main thread, as by Ctrl-C
        await asyncio.sleep(0.2)
        await sleep(level, mode)

    if paused:
        lm.pause("keep")
    monkeypatch.setattr(llm, "sleep", fails)
    for drain in (False, True):
        with pytest.raises(Exception, match="no mode of vLLM's"):
            lm.sleep(drain=drain)
        assert not lm.is_sleeping() and lm.is_paused() == paused
    running = lm.submit(PROMPTS[0], long)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backend.engine, "wait_until_idle", lambda: signal.raise_signal(signal.SIGINT))
        lm.sleep(drain=True)
    assert not lm.is_sleeping() and lm.is_paused() == paused
    lm.resume()
    assert len(running.result(60).outputs[0].token_ids) == 110
    if paused:
        lm.pause("keep")
    monkeypatch.setattr(llm, "sleep", is_slow)
    with pytest.raises(KeyboardInterrupt):
        lm.sleep()
    assert lm.is_sleeping() and lm.wake() and lm.is_paused() == paused
    lm.resume()
    assert lm.generate(PROMPTS[:1], GREEDY)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("family, options", [
    ("gemma2", {}), ("qwen3", {}), ("llama", {"tensor_parallel_size": 2}), ("llama", {"enable_lora": True}),
    ("llama", {"disable_cuda_graph": False}),
])  # fmt: skip
def test_other_engines_take_new_weights(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks(monkeypatch, options)
    folders = [save_model(family, tmp_path / str(seed), pad_token_id=None) for seed in range(2)]
    other = tensors(folders[1]) if family == "llama" else folders[1]
    random_model_of(FAMILIES[family](), folders[1])
    with own_lm(folders[0]) as oracle, vllm_lm(folders[0], max_num_tokens=24, **options) as lm:
        named: dict[str, Any] = {}
        if options.get("enable_lora"):
            adapter = str(write_adapter(tmp_path / "adapter", random_model(LlamaConfig(**SIZES)), seed=3))
            lm.adapters.load("one", adapter)
            oracle.adapters.load("one", adapter)
            named = {"lora": "one"}
        for weights in (folders[1], other, folders[0]):
            give(weights, lm, oracle)
            assert_equal_models(lm, oracle)
            for one, two in zip(*(m.generate(PROMPTS, GREEDY, **named) for m in (lm, oracle)), strict=True):
                assert_close(one, two)


@needs_vllm
@pytest.mark.slow
def test_what_vllm_packs_on_a_cpu_is_refused(tmp_path: Path) -> None:
    folder = save_model("mixtral", tmp_path)
    with vllm_lm(folder) as lm:
        before = lm.generate(PROMPTS, GREEDY)
        with pytest.raises(VllmRefusalError, match="vLLM for CPUs packs experts"):
            lm.update_weights(folder)
        assert [out.outputs[0].token_ids for out in lm.generate(PROMPTS, GREEDY)] == [
            out.outputs[0].token_ids for out in before
        ]


def random_model_of(config: Any, folder: Path) -> None:
    """Other weights in a folder."""
    torch.manual_seed(9)
    model = random_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    model.save_pretrained(folder)


@needs_vllm
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_engine(folders: list[Path], tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folders[1], broken)
    with vllm_lm(folders[0]) as lm:
        running = lm.submit(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
        backend: Any = lm.backend
        with pytest.raises(EngineClosedError, match="written in part"):
            backend._orders._lifecycle.load(None, tmp_path / "nothing")
        with pytest.raises(EngineClosedError):
            lm.generate(PROMPTS[0], GREEDY)
        with pytest.raises(Exception, match="written in part"):
            running.result(60)


def test_two_loads_of_one_name_at_once_are_one_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    made = {"LoRARequest": lambda *fields: SimpleNamespace(lora_int_id=fields[1])}
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(**made))
    added: list[Any] = []

    def add_lora(request: Any) -> bool:
        time.sleep(0.2)
        added.append(request)
        return True

    core: Any = SimpleNamespace(
        config=SimpleNamespace(lora_config="any"), llm=SimpleNamespace(add_lora=add_lora), ask=lambda answer: answer
    )
    adapters, digests, errors = VllmAdapters(core, digests := {}), digests, list[AdapterError]()
    folder = str(write_adapter(tmp_path / "one", random_model(LlamaConfig(**SIZES)), seed=1))

    def load() -> None:
        try:
            adapters.load("one", folder)
        except AdapterError as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(added) == 1 and len(errors) == 2 and "is loaded already" in str(errors[0]) and list(digests) == ["one"]

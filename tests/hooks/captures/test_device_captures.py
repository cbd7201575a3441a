"""Captures that stay on the engine's device: `Capture(device="engine")`."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_declared import WAYS, is_freed, lms, prompt_of

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.hooks.captures.activations import Activations
from pymllm_interp.hooks.captures.egress.device_memory import DeviceMemory
from pymllm_interp.hooks.captures.reductions.lens import Lens
from pymllm_interp.interventions import Generated
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.specs import capture_of, to_json

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
SITES = ["embed", "resid_post.*", "attn_in.1", "mlp_out.0"]


@pytest.fixture(scope="module", params=WAYS)
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM in float32, its hooks in each of the ways."""
    with lms(request.param, model_folder) as load:
        yield load


def memory_of(lm: LM) -> DeviceMemory:
    return lm.runner.declared.device_memory


def sent(lm: LM) -> int:
    ring = lm.runner.capture_ring
    return 0 if ring is None else ring.bytes_sent


def assert_same(found: Activations, wanted: Activations, device: str) -> None:
    assert set(found) == set(wanted)
    for site, rows in wanted.items():
        assert found[site].device.type == device.partition(":")[0] and found[site].is_contiguous()
        torch.testing.assert_close(found[site].cpu(), rows, rtol=1e-4, atol=1e-4, msg=site)
        assert torch.equal(found.positions[site], wanted.positions[site])
        assert torch.equal(found.token_ids[site], wanted.token_ids[site])


@pytest.mark.few("family", "llama", ways=["tables", "graphs"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_states_on_the_device_are_those_of_the_host_and_nothing_is_sent(
    family: str, lm_of: Any, monkeypatch: Any
) -> None:
    """In chunks, after giving way, behind a shared prefix, beside others and beside ops; a token alone, too."""
    lm, rng = lm_of(family, kv_cache_tokens=80, page_size=4, max_num_tokens=16), random.Random(1)
    head = prompt_of(9, 7)
    prompts = [prompt_of(rng.choice([1, 4, 5, 14]), i) for i in range(8)] + [[*head, i] for i in range(3)]
    ops = [[Steer("resid_post.0", torch.ones(lm.hidden_size), scale=i % 3)] for i in range(len(prompts))]
    params, before = SamplingParams(temperature=0, max_tokens=7), lm.engine.stats()["preempted"]
    wanted = lm.generate(prompts, params, interventions=ops, capture=SITES)
    assert lm.engine.stats()["preempted"] > before
    made: set[int] = set()
    empty = DeviceMemory.empty

    def counted(self: DeviceMemory, *args: Any) -> torch.Tensor:
        found = empty(self, *args)
        made.add(found.data_ptr())
        return found

    monkeypatch.setattr(DeviceMemory, "empty", counted)
    held = memory_of(lm).used
    bytes_sent = sent(lm)
    asked = [Capture(site, device="engine") for site in SITES]
    plain = lm.generate(prompts, params, interventions=ops, capture=[asked] * len(prompts))
    assert sent(lm) == bytes_sent
    for one, other in zip(plain, wanted, strict=True):
        assert one.token_ids == other.token_ids
        found = one.activations
        # The memory that was made at submission is the result: no copy of it was made.
        assert all(found.as_arrived(site).data_ptr() in made for site in found)
        assert_same(found, other.activations, lm.runner.device)
        assert {c.site: c.prompt_rows for c in one.receipt.captures} == {
            c.site: c.prompt_rows for c in other.receipt.captures
        }
    assert memory_of(lm).used > held
    del one, plain, found
    assert is_freed(memory_of(lm), held)


@pytest.mark.few("dtype", "float32", ways=["functions"])
@pytest.mark.few("dtype", "bfloat16", ways=["tables"])
@pytest.mark.few("dtype", ways=["graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_dtypes_and_heads(dtype: str, lm_of: Any) -> None:
    """Narrower than the model's, and wider; states by heads; logits, which no kernel writes."""
    lm, params = lm_of("llama", inner_sites=("z", "k"), dtype=dtype), SamplingParams(temperature=0, max_tokens=5)
    for spec in (
        {"site": "resid_post.1", "positions": Generated(1, 3)},
        {"site": "resid_post.*", "positions": [0, -1], "dtype": "float16"},
        {"site": "resid_post.0", "dtype": torch.bfloat16},
        {"site": "z.1", "heads": [1], "positions": "prompt"},
        {"site": "mlp_in.1", "dtype": "float32"},
        {"site": "logits", "positions": "generated"},
        {"site": "k.0", "positions": slice(None, None, 2)},
    ):
        prompts = [prompt_of(length, length) for length in (1, 7, 16)]
        prompts = prompts[1:] if spec["site"].startswith("resid_post.*") else prompts
        wanted = lm.generate(prompts, params, capture=[Capture(**spec)])
        found = lm.generate(prompts, params, capture=[Capture(**spec, device="engine")])
        for one, other in zip(found, wanted, strict=True):
            assert one.activations.keys() and {t.dtype for t in one.activations.values()} == {
                t.dtype for t in other.activations.values()
            }
            assert_same(one.activations, other.activations, lm.runner.device)


def test_hosts_and_devices_captures_in_one_batch(lm_of: Any) -> None:
    """Each has its own, in passes of both."""
    lm, params = lm_of("llama"), SamplingParams(temperature=0, max_tokens=4)
    prompts = [prompt_of(5 + i, i) for i in range(6)]
    wanted = lm.generate(prompts, params, capture=["resid_post.*"])
    asked = [
        [Capture("resid_post.*", device="engine")] if i % 3 == 0 else ["resid_post.*"] if i % 3 == 1 else []
        for i in range(6)
    ]
    outs = lm.generate(prompts, params, capture=asked)
    for i, (out, other) in enumerate(zip(outs, wanted, strict=True)):
        if i % 3 == 2:
            assert not out.activations
        else:
            assert_same(out.activations, other.activations, lm.runner.device if i % 3 == 0 else "cpu")


def test_a_request_without_room_is_refused_before_it_is_scheduled(lm_of: Any) -> None:
    """And the next one has the room of dropped results, also of requests that were aborted."""
    lm = lm_of("llama", device_capture_bytes=10 * 4 * lm_of("llama").hidden_size)
    params, spec = SamplingParams(temperature=0, max_tokens=0), [Capture("resid_post.1", device="engine")]
    kept = lm.generate([prompt_of(6, 1)], params, capture=spec)
    seen = lm.engine.stats()["finished"] if "finished" in lm.engine.stats() else None
    with pytest.raises(ValueError, match=r"device_capture_bytes.*live results hold"):
        lm.generate([prompt_of(6, 2)], params, capture=spec)
    with pytest.raises(ValueError, match="device_capture_bytes"):  # both or none
        lm.generate([prompt_of(3, 2), prompt_of(3, 3)], params, capture=spec)
    if seen is not None:
        assert lm.engine.stats()["finished"] == seen
    part = kept[0].activations["resid_post.1"][2:4]
    del kept
    gc.collect()
    with pytest.raises(ValueError, match="live results"):  # a view holds all of it
        lm.generate([prompt_of(6, 2)], params, capture=spec)
    del part
    assert is_freed(memory_of(lm))
    handle = lm.submit(prompt_of(4, 2), SamplingParams(max_tokens=6), capture=[Capture("embed", device="engine")])
    handle.cancel()
    handle.wait()
    del handle
    assert is_freed(memory_of(lm))
    assert len(lm.generate([prompt_of(10, 2)], params, capture=spec)[0].activations["resid_post.1"]) == 10
    assert len(lm.generate([prompt_of(3, 2)], params)[0].token_ids) == 0


def test_what_cannot_stay_on_the_device_is_refused_by_name(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    for wrong in ({"reduce": "mean"}, {"reduce": Lens(top_k=1)}, {"stream": True}):
        with pytest.raises(ValueError, match="device='engine' keeps whole states"):
            Capture("resid_post.1", device="engine", **wrong)
    with pytest.raises(ValueError, match="'cpu' or 'engine'"):
        Capture("resid_post.1", device="cuda:0")  # pyright: ignore[reportArgumentType]
    stays = Capture("resid_post.1", device="engine")
    for captures, message in (
        ([stays, "embed"], "some captures of a request"),
        ([Capture("pattern.0", device="engine")], "patterns, recurrent states"),
        ([Capture("kv.0", device="engine")], "keys and values"),
        ([stays, Capture("resid_post.1")], "some captures|captured twice"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.generate([[1, 2]], capture=captures)
    with pytest.raises(ValueError, match=r"lm\.activations"):
        lm.harvest([[1, 2]], capture=[stays], out=tmp_path / "out")
    with pytest.raises(PromptError, match="engine in this process"):
        to_json(stays)
    with pytest.raises(PromptError, match="no field 'device'"):
        capture_of({"site": "embed", "device": "engine"})
    assert to_json(Capture("embed")) == {"site": "embed"}
    assert Capture("embed").fingerprint != Capture("embed", device="engine").fingerprint


def test_a_trace_with_captures_on_the_device(lm_of: Any) -> None:
    """Also one with gradients, whose pass does not use the ring."""
    lm = lm_of("llama")
    prompt, stays = prompt_of(6, 3), [Capture("resid_post.*", device="engine")]
    wanted = lm.generate([prompt], SamplingParams(max_tokens=0), capture=["resid_post.*"])[0].activations
    with lm.trace(prompt, capture=stays) as tracer:
        lm.model.layers[0].output.save()
    assert_same(tracer.activations, wanted, lm.runner.device)

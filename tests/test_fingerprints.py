"""Fingerprints: equal for what is equal, different for the smallest difference, and in every receipt of what was declared."""

from __future__ import annotations

import threading
from importlib.metadata import version
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model

from pymllm_interp import LM, Capture, Gate, SamplingParams, Scale, Steer
from pymllm_interp.engine.handle import EngineClosedError
from pymllm_interp.hooks.binding import fingerprint_of
from pymllm_interp.hooks.captures.spec import Project
from pymllm_interp.hooks.receipt import Applied, Captured, Receipt
from pymllm_interp.models import fingerprint
from pymllm_interp.models.fingerprint import checksum, model_fingerprint

ONE = SamplingParams(temperature=0, max_tokens=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_checksum_tells_every_bit_and_every_place(dtype, monkeypatch):
    tensor = torch.randn(7, 41, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {checksum(tensor), checksum(tensor.flip(0)), checksum(tensor.flip(1)), checksum(-tensor)}
    for row, column in ((0, 0), (3, 20), (6, 40)):
        changed = tensor.clone()
        changed[row, column] = torch.nextafter(tensor[row, column].float(), torch.tensor(9.0)).to(dtype) + 0.01
        seen.add(checksum(changed))
    assert len(seen) == 7 and all(0 <= value < 2**64 for value in seen)
    assert checksum(tensor.T.contiguous().T) == checksum(tensor), "values count, not how they lie in memory"
    monkeypatch.setitem(fingerprint.CHUNK, "cpu", 16)
    assert checksum(tensor) in seen and checksum(tensor.flip(0)) in seen, "nor how many are summed up at a time"


def test_models_are_told_apart_by_weights_dtype_and_config():
    config, model = CONFIGS["llama"](), random_model(CONFIGS["llama"]())
    first = model_fingerprint(model, config)
    assert first == model_fingerprint(random_model(CONFIGS["llama"]()), CONFIGS["llama"]()) and len(first) == 64
    config._name_or_path, config.transformers_version = "elsewhere", "9.9"
    assert model_fingerprint(model, config) == first, "where it lies, and who saved it, is not the model"
    others = {model_fingerprint(random_model(CONFIGS["llama"](), seed=1), CONFIGS["llama"]())}
    other = CONFIGS["llama"]()
    other.rms_norm_eps = 1e-4
    others.add(model_fingerprint(model, other))
    last = model.get_parameter("model.norm.weight")
    last.data[-1] += 1e-6
    others.add(model_fingerprint(model, CONFIGS["llama"]()))
    last.data[-1] -= 1e-6
    others.add(model_fingerprint(model.bfloat16(), CONFIGS["llama"]()))
    assert len(others) == 4 and first not in others


def test_the_model_that_runs_has_the_fingerprint_of_what_was_loaded(model_folder, lm_of):
    first = lm_of("llama").model_fingerprint
    with LM(model_folder("llama"), dtype="float32", device="cpu", max_num_tokens=8) as again:
        assert again.model_fingerprint == first
    with LM(model_folder("llama"), dtype="bfloat16", device="cpu") as half:
        assert half.model_fingerprint != first
    dummies = []
    for seed in (0, 0, 1):
        with LM("dummy", load_format="dummy", hf_config=CONFIGS["qwen2"](), device="cpu", seed=seed) as dummy:
            dummies.append(dummy.model_fingerprint)
    assert dummies[0] == dummies[1] != dummies[2]


def test_a_first_declared_request_waits_for_no_step_and_is_told_of_a_shutdown(model_folder):
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        stands, goes_on = threading.Event(), threading.Event()
        holder = threading.Thread(target=lm.engine.call, args=(lambda: stands.set() or goes_on.wait(60),))
        holder.start()
        assert stands.wait(60)
        handle = lm.submit([1, 2], ONE, interventions=[Scale("embed", 0.5)])
        assert not goes_on.is_set(), "the engine stood still, and the request was made"
        goes_on.set()
        holder.join()
        assert len(handle.result(60).receipt.model) == 64
    closed = LM(model_folder("llama"), dtype="float32", device="cpu")
    closed.shutdown()
    with pytest.raises(EngineClosedError, match="was shut down"):
        closed.generate([[1, 2]], ONE, interventions=[Scale("embed", 0.5)])


def test_specs_are_told_apart_by_all_that_they_say_and_by_their_order():
    v, w = torch.ones(4), torch.ones(4)
    w[2] = torch.nextafter(w[2], torch.tensor(2.0))
    steer, capture = Steer("resid_post.0", v), Capture("embed")
    first = fingerprint_of([steer], [capture])
    assert first == fingerprint_of([Steer("model.layers.0", v.clone())], [Capture(" embed ")])
    others = [
        ([Steer("resid_post.0", w)], [capture]),
        ([Steer("resid_post.1", v)], [capture]),
        ([Steer("resid_post.0", v, scale=2.0)], [capture]),
        ([Steer("resid_post.0", v, positions="prompt")], [capture]),
        ([Steer("resid_post.0", v, when=Gate(v))], [capture]),
        ([Steer("resid_post.0", v, when=Gate(w))], [capture]),
        ([steer, Scale("embed", 2.0)], [capture]),
        ([Scale("embed", 2.0), steer], [capture]),
        ([steer], []),
        ([], [capture]),
        ([steer], [Capture("embed", dtype="float16")]),
        ([steer], [Capture("embed", positions=[0])]),
        ([steer], [Capture("embed", reduce="mean")]),
        ([steer], [Capture("embed", reduce=Project(v))]),
        ([steer], [Capture("embed", reduce=Project(w))]),
    ]
    assert len({first, *(fingerprint_of(*given) for given in others)}) == len(others) + 1


def test_receipts_say_what_computed_and_what_was_captured(lm_of: Any) -> None:
    lm, prompt, steer = lm_of("llama"), [1, 2, 3, 4, 5], Scale("embed", 0.9)
    capture = [Capture("resid_post.1", positions="generated"), Capture("embed", positions=[0, -1], reduce="mean")]
    (out,) = lm.generate([prompt], ONE, interventions=[steer], capture=capture)
    receipt = out.receipt
    assert receipt.captures == [Captured("embed", 2, 0), Captured("resid_post.1", 0, 2)]
    assert receipt.model == lm.model_fingerprint and receipt.spec == fingerprint_of([steer], capture)
    assert receipt.engine == (
        f"pymllm-interp {version('pymllm-interp')}, torch {torch.__version__}, cpu, TorchAttnBackend, torch.float32"
    )
    with lm.trace(prompt, interventions=[steer]) as tracer:
        lm.model.layers[0].output.save()
    assert tracer.receipt.spec == fingerprint_of([steer], []) and tracer.receipt.model == receipt.model
    with lm.trace(prompt) as tracer:
        lm.model.layers[0].output.save()
    assert tracer.receipt.spec == tracer.receipt.model == "", "nothing was declared"


def test_a_printed_receipt_shows_what_is_not_empty() -> None:
    receipt = Receipt(engine="a machine", model="a hash")
    assert str(receipt) == repr(receipt) == "Receipt()"
    receipt.steps["plain"] += 3
    receipt.interventions.append(Applied("Steer('resid_post.1')", "resid_post.1", generated_rows=2, gate_fires=0))
    receipt.captures.append(Captured("embed", 4))
    receipt.edits = 1
    assert str(receipt) == (
        "Receipt(steps={'plain': 3}, interventions=[Applied(intervention=\"Steer('resid_post.1')\", site='resid_post.1', "
        "generated_rows=2, gate_fires=0)], captures=[Captured(site='embed', prompt_rows=4)], edits=1)"
    ), "a gate that never fired is told from none"

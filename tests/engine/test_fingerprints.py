"""Fingerprints: equal for what is equal, different for the smallest difference, and in every receipt of what was declared."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model
from family_configs import tiny_config
from helpers_state import AdaptedState

from pymllm_interp import LM, Capture, Gate, SamplingParams, Scale, Steer
from pymllm_interp.client.handle import EngineClosedError
from pymllm_interp.core.receipt import Applied, Captured, Receipt
from pymllm_interp.core.request import Request
from pymllm_interp.engine.prefix_sharing import PrefixSharing
from pymllm_interp.harvest.run import HarvestError
from pymllm_interp.hooks.bind import fingerprint_of
from pymllm_interp.hooks.captures.spec import Project
from pymllm_interp.mem_cache.radix_cache import RadixCache
from pymllm_interp.models.weights import model_state
from pymllm_interp.models.weights.model_state import ModelState, checksum, model_fingerprint

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
    monkeypatch.setitem(model_state.CHUNK, "cpu", 16)
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
    first = lm_of("llama").weights.fingerprint
    with LM(model_folder("llama"), dtype="float32", device="cpu", max_num_tokens=8) as again:
        assert again.weights.fingerprint == first
    with LM(model_folder("llama"), dtype="bfloat16", device="cpu") as half:
        assert half.weights.fingerprint != first
    dummies = []
    for seed in (0, 0, 1):
        with LM("dummy", load_format="dummy", hf_config=CONFIGS["qwen2"](), device="cpu", seed=seed) as dummy:
            dummies.append(dummy.weights.fingerprint)
    assert dummies[0] == dummies[1] != dummies[2]


def rewrite(weight: torch.Tensor, value: torch.Tensor) -> None:
    with torch.inference_mode():
        weight.copy_(value)


EDITS: list[Callable[[torch.Tensor], Any]] = [
    lambda w: w.__setitem__((0, 0), w[0, 0] + 1),
    lambda w: setattr(w, "data", w.data * 1.5),
    lambda w: w.data.add_(1),
    lambda w: w.detach().view(-1)[:3].mul_(2),
    lambda w: rewrite(w, w * 2),
    lambda w: torch._foreach_add_([w], 2.0),
    lambda w: torch.nn.init.zeros_(w),
]


@pytest.mark.parametrize(
    "path", ["model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj", "model.embed_tokens"]
)
def test_a_fingerprint_follows_edits_of_the_weights_and_their_undoing(path: str, model_folder: Any) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        first, version = lm.weights.fingerprint, lm.weights.version
        lm.generate([[1, 2]], ONE)
        assert lm.weights.fingerprint == first and lm.weights.version == version
        weight: Any = lm.get(path).weight
        kept, seen = weight.clone(), {first}
        for edit in EDITS:
            edit(weight)
            assert lm.weights.version > version
            version = lm.weights.version
            assert lm.weights.fingerprint == model_fingerprint(lm._module, lm.hf_config)
            seen.add(lm.weights.fingerprint)
            weight.copy_(kept)
            assert lm.weights.fingerprint == first and lm.weights.version > version
        assert len(seen) == len(EDITS) + 1


def test_persistent_buffers_belong_to_the_weights() -> None:
    """A router's bias picks the experts: edits of it change the model, and KV that was computed before is not used again."""
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "page_size": 4}
    with LM("deepseek", hf_config=tiny_config("deepseek_v3"), **options) as lm:
        prompt, bias = (
            list(range(1, 18)),
            next(b for n, b in lm._module.named_buffers() if n.endswith("correction_bias")),
        )
        router = next(m for m in lm._module.modules() if getattr(m, "e_score_correction_bias", None) is bias)
        (before,) = lm.generate([prompt], ONE, capture=["resid_post.-1"])
        kept, seen, version = bias.clone(), {lm.weights.fingerprint}, lm.weights.version
        edits: list[Callable[[], Any]] = [
            lambda: bias.add_(torch.arange(len(bias)) % 2 * 9),
            lambda: setattr(router, "e_score_correction_bias", -bias),
            lambda: bias.data.mul_(2),
            lambda: router.register_buffer("e_score_correction_bias", kept + torch.arange(len(bias)) % 3),
        ]
        for edit in edits:
            edit()
            assert lm.weights.version > version and router.e_score_correction_bias is bias
            version = lm.weights.version
            assert lm.weights.fingerprint == model_fingerprint(lm._module, lm.hf_config) not in seen
            seen.add(lm.weights.fingerprint)
            (out,) = lm.generate([prompt], ONE)
            assert out.num_cached_tokens == 0, "KV of other weights"
        bias.copy_(kept)
        (after,) = lm.generate([prompt], ONE, capture=["resid_post.-1"])
        assert after.receipt.model == before.receipt.model
        assert torch.equal(after.activations["resid_post.-1"], before.activations["resid_post.-1"])
        with pytest.raises(ValueError, match="shape"):
            router.e_score_correction_bias = bias[:1]
        assert type(deepcopy(router).e_score_correction_bias) is torch.Tensor


def test_an_edit_that_torch_does_not_count_is_seen_when_it_is_counted_by_hand(model_folder: Any) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        first, weight = lm.weights.fingerprint, lm.model.layers[0].mlp.up_proj.weight
        weight.numpy()[0, 0] += 1
        assert lm.weights.fingerprint == first, "as the module's docstring says"
        torch.autograd.graph.increment_version(weight)
        assert lm.weights.fingerprint != first


def test_only_an_edited_weight_is_summed_again(lm_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, summed = lm_of("qwen2"), []
    lm.weights.fingerprint  # noqa: B018
    real = checksum
    monkeypatch.setattr(model_state, "checksum", lambda tensor: summed.append(tensor.shape) or real(tensor))
    lm.generate([[1, 2]], ONE, interventions=[Scale("embed", 0.5)])
    assert summed == []
    lm.model.layers[0].mlp.down_proj.weight[0] += 0
    lm.generate([[1, 2]], ONE)
    assert summed == [], "a plain request asks for no fingerprint"
    lm.generate([[1, 2]], ONE, interventions=[Scale("embed", 0.5)])
    assert summed == [(64, 56)]


def test_receipts_name_the_weights_after_an_edit_inside_a_trace(model_folder: Any) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        (before,) = lm.generate([[1, 2]], ONE, interventions=[Scale("embed", 0.5)])
        with lm.trace([1, 2]):
            lm.model.layers[1].mlp.down_proj.weight[:] *= 2
            lm.model.layers[1].output.save()
        (after,) = lm.generate([[1, 2]], ONE, interventions=[Scale("embed", 0.5)])
        assert before.receipt.model != after.receipt.model == lm.weights.fingerprint


def test_a_harvest_goes_on_with_the_same_weights_only(model_folder: Any, tmp_path: Path) -> None:
    documents, capture = [[1, 2, 3], [4, 5], [6, 7, 8]], ["resid_post.1"]
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        weight = lm.model.layers[0].mlp.down_proj.weight
        kept = weight.clone()

        def until_the_second() -> Iterator[list[int]]:
            yield documents[0]
            raise OSError("the corpus is gone")

        with pytest.raises(HarvestError, match="the corpus is gone"):
            lm.harvest(until_the_second(), capture=capture, out=tmp_path / "states", shard_bytes=1)
        weight.data = kept * 2
        with pytest.raises(
            ValueError, match=r"was harvested with other settings; name a new folder\n  model: .*fingerprint"
        ):
            lm.harvest(documents, capture=capture, out=tmp_path / "states", shard_bytes=1)
        weight.data = kept
        result = lm.harvest(documents, capture=capture, out=tmp_path / "states", shard_bytes=1)
        assert result.documents == 3


def test_weights_that_are_edited_while_a_harvest_runs_end_it(model_folder: Any, tmp_path: Path) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu", max_running_requests=1) as lm:
        weight: Any = lm.model.layers[0].mlp.down_proj.weight

        def documents() -> Iterator[list[int]]:
            for i in range(40):
                if i == 20:
                    weight.mul_(2)
                yield [i, i + 1]

        with pytest.raises(HarvestError, match="the weights of the model were edited while the harvest ran"):
            lm.harvest(documents(), capture=["embed"], out=tmp_path / "states", shard_bytes=1)
        weight.div_(2)
        result = lm.harvest([[i, i + 1] for i in range(40)], capture=["embed"], out=tmp_path / "states", shard_bytes=1)
        assert result.documents == 40 > result.new_documents


def test_a_first_declared_request_waits_for_no_step_and_is_told_of_a_shutdown(model_folder):
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        stands, goes_on = threading.Event(), threading.Event()
        holder = threading.Thread(target=lm.engine.call, args=(lambda: stands.set() or goes_on.wait(600),))
        holder.start()
        assert stands.wait(600)
        handle = lm.submit([1, 2], ONE, interventions=[Scale("embed", 0.5)])
        assert not goes_on.is_set(), "the engine stood still, and the request was made"
        goes_on.set()
        holder.join()
        assert len(handle.result(600).receipt.model) == 64
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
    lm, prompt, steer = lm_of("llama", lower_traces="off"), [1, 2, 3, 4, 5], Scale("embed", 0.9)
    capture = [Capture("resid_post.1", positions="generated"), Capture("embed", positions=[0, -1], reduce="mean")]
    (out,) = lm.generate([prompt], ONE, interventions=[steer], capture=capture)
    receipt = out.receipt
    assert receipt.captures == [Captured("embed", 2, 0), Captured("resid_post.1", 0, 2)]
    assert receipt.model == lm.weights.fingerprint and receipt.spec == fingerprint_of([steer], capture)
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


def test_a_printed_receipt_folds_layers_with_equal_counts() -> None:
    receipt = Receipt()
    receipt.interventions += [
        Applied("Ablate", f"{kind}.{i}", 3) for i in range(30) for kind in ("attn_out", "mlp_out")
    ]
    receipt.captures += [Captured(f"resid_post.{i}", 3) for i in (0, 1, 2, 7, 9, 10)] + [
        Captured("embed", 3),
        Captured("z.1", 1),
    ]
    rows = [(what, where) for what, where, _ in receipt.table().rows]
    assert rows == [
        ("Ablate", "attn_out.0-29, mlp_out.0-29"), ("captured", "resid_post.0-2, resid_post.7, resid_post.9-10, embed"),
        ("captured", "z.1"),
    ]  # fmt: skip
    assert repr(receipt).count("Applied(") == 1 and len(receipt.interventions) == 60


def test_a_model_state_covers_the_weights_of_adapters() -> None:
    """By their digests: a name says nothing."""
    config = CONFIGS["llama"]()
    state = ModelState(random_model(config), config)
    assert state.namespace() is None and state.fingerprint() == state.fingerprint(None)
    for ask in (state.namespace, state.fingerprint):
        with pytest.raises(ValueError, match=r"there is no adapter 'french': lm\.adapters\.load"):
            ask("french")
    plain = state.fingerprint()
    state.adapters |= {"french": "1", "german": "2", "paris": "1"}
    prints = [state.fingerprint(name) for name in (None, "french", "german", "paris")]
    assert prints[0] == plain and prints[1] == prints[3] and len(set(prints)) == 3
    assert state.namespace("french") == state.namespace("paris") != state.namespace("german")


def test_requests_of_one_adapter_share_pages_with_no_others() -> None:
    """The slot that adapters get: the request's adapter, in the namespace of its first page."""
    model: Any = AdaptedState()
    sharing = PrefixSharing(RadixCache(2), model)
    ids = list(range(20, 29))

    def request(**given: Any) -> Request:
        return Request("r", ids, SamplingParams(max_tokens=1), 1, 0, **given)

    given: list[dict[str, Any]] = [
        {}, {"adapter": "a"}, {"adapter": "b"}, {"cache_salt": "a"}, {"adapter": "a", "cache_salt": "a"}, {"cache_owner": "a"},
    ]  # fmt: skip
    for i, one in enumerate(given):
        key = sharing.prefix_of(request(**one)).key
        assert key is not None and not sharing.tree.match(key, 4).pages, one
        sharing.tree.insert(
            sharing.tree.hold(sharing.tree.match(key, 4)), key, 0, [4 * i + page + 1 for page in range(4)]
        )
        again = sharing.prefix_of(request(**one)).key
        assert again is not None and len(sharing.tree.match(again, 4).pages) == 4, one


def test_the_runner_is_told_of_a_request_s_adapter() -> None:
    request = Request("r", [1], SamplingParams(), 1, 0, adapter="a")
    request.req_pool_idx = 1
    assert request.entering().adapter == "a"


def test_a_model_state_lets_go_of_a_model_that_is_shut_down(model_folder: Any) -> None:
    lm = LM(model_folder("llama"), dtype="float32", device="cpu")
    lm.generate([[1, 2]], ONE)
    weight = weakref.ref(lm.get("model.layers.0.mlp.down_proj").weight)
    held = lm.engine.scheduler.kv.sharing
    lm.shutdown()
    del lm
    gc.collect()
    assert held is not None and weight() is None

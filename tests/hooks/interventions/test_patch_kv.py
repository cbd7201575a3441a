"""`PatchKV` and `lm.kv` against transformers with an edited `past_key_values`; isolation, chunks, preemption and reuse."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held
from helpers_devices import DEVICES, lm_on
from transformers import DynamicCache

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.interventions import Monitor, PatchKV

GENERATOR = torch.Generator().manual_seed(11)
CLOSE = 1e-4 if torch.cuda.is_available() else 1e-5
IDS = torch.randint(0, 95, (41,), generator=GENERATOR).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


def pool_of(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=DynamicCache(), use_cache=True).past_key_values


def expected(model: Any, ids: list[int], patches: list[PatchKV], steps: int = 6) -> tuple[list[int], torch.Tensor]:
    """(greedy tokens, the logits of all positions behind the last patched one) of transformers."""
    stops = sorted({max(p.positions) + 1 for p in patches})
    cache, at, logits = DynamicCache(), 0, []  # of all positions, in layers with a window too
    with torch.no_grad():
        for stop in [*stops, len(ids)]:
            if stop > at:
                out = model(torch.tensor([ids[at:stop]]), past_key_values=cache, use_cache=True)
                cache, at = out.past_key_values, stop
                logits.append(out.logits[0])
            for patch in patches:
                if max(patch.positions) + 1 == stop:
                    heads = list(range(cache.layers[0].keys.shape[1])) if patch.heads is None else list(patch.heads)
                    for new, stored in (
                        (patch.k, cache.layers[patch.layer].keys),
                        (patch.v, cache.layers[patch.layer].values),
                    ):
                        if new is not None:
                            rows = new.view(len(patch.positions), len(heads), -1)
                            for row, position in zip(rows, patch.positions, strict=True):
                                stored[0, heads, position] = row
        tokens = [int(logits[-1][-1].argmax())]
        for _ in range(steps - 1):
            out = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
            logits.append(out.logits[0])
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens, torch.cat(logits)


def rows(model: Any, count: int, heads: int | None = None) -> torch.Tensor:
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = heads or getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return torch.randn(count, own, dim, generator=GENERATOR) * 2


def check(found: Any, wanted: tuple[list[int], torch.Tensor]) -> None:
    tokens, logits = wanted
    assert found.token_ids == tokens
    torch.testing.assert_close(found.activations["logits"], logits[-len(tokens) :], atol=2 * CLOSE, rtol=1e-4)


FAMILIES = [
    ("llama", "native"), ("llama", "transformers"), ("gemma2", "native"), ("gpt2", "transformers"), ("qwen3", "native"),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "impl"), FAMILIES)
def test_a_request_goes_on_as_transformers_with_an_edited_cache(family, impl, device, lm_of, oracle) -> None:
    """Single positions, several at several layers, some heads only, k or v alone; in chunks, and beside plain requests."""
    lm, model = lm_of(family, impl=impl, max_num_tokens=16, device=device), oracle(family)
    (read,) = lm.kv([IDS])
    cache = pool_of(model, IDS)
    for layer in range(model.config.num_hidden_layers):
        own = cache.layers[layer]
        torch.testing.assert_close(read.k[layer], own.keys[0].transpose(0, 1), atol=CLOSE, rtol=1e-4)
        torch.testing.assert_close(read.v[layer], own.values[0].transpose(0, 1), atol=CLOSE, rtol=1e-4)
    cases = [
        [PatchKV(0, [3], k=rows(model, 1), v=rows(model, 1))],
        [PatchKV(1, [20, 7, 8], k=rows(model, 3)), PatchKV(0, [30, 2], v=rows(model, 2))],
        [PatchKV(-1, [40], v=rows(model, 1))],
        [PatchKV(1, [5, 16], v=rows(model, 2, 1), heads=[1 if family != "gemma2" else 0])],
    ]
    plain = lm.generate([IDS], GREEDY)[0].token_ids
    with held(lm) as arrived:
        handles = [lm.submit(IDS, GREEDY, interventions=case, capture=["logits"]) for case in cases]
        beside = lm.submit(IDS, GREEDY)
        arrived(len(cases) + 1)
    model_layers = model.config.num_hidden_layers
    for case, handle in zip(cases, handles, strict=True):
        absolute = [PatchKV(p.layer % model_layers, p.positions, p.k, p.v, p.heads) for p in case]
        out = handle.result()
        check(out, expected(model, IDS, absolute))
        assert [one.prompt_rows for one in out.receipt.interventions] == [len(p.positions) for p in case]
    assert beside.result().token_ids == plain


def test_patches_are_keyed_in_the_prefix_cache_and_never_half_reused(lm_of, oracle) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    ids = torch.randint(0, 95, (100,), generator=GENERATOR).tolist()
    patch = PatchKV(1, [20, 50], k=rows(model, 2), v=rows(model, 2))
    lm.reset_prefix_cache()
    wanted, plain = expected(model, ids, [patch]), expected(model, ids, [])
    check(lm.generate([ids], GREEDY, interventions=[patch], capture=["logits"])[0], wanted)
    (again,) = lm.generate([ids], GREEDY, interventions=[patch])
    assert again.num_cached_tokens == 96 and again.token_ids == wanted[0]
    (other,) = lm.generate([ids], GREEDY)
    assert other.num_cached_tokens == 16 and other.token_ids == plain[0]
    # Of a prompt that ends inside of the patched positions' pages, only plain pages are taken.
    same = PatchKV(1, [20, 50], k=patch.k, v=patch.v)
    for stop in (51, 60, 70):
        (short,) = lm.generate([ids[:stop]], GREEDY, interventions=[same], capture=["logits"])
        check(short, expected(model, ids[:stop], [same]))
    steer = [Steer("resid_post.0", torch.randn(72, generator=GENERATOR), positions=[5])]
    (both,) = lm.generate([ids], GREEDY, interventions=[*steer, patch])
    assert not both.num_cached_tokens
    (one,) = lm.generate(
        [ids], GREEDY, interventions=[PatchKV(1, [20], k=patch.k[:1], v=patch.v[:1])], capture=["logits"]
    )
    check(one, expected(model, ids, [PatchKV(1, [20], k=patch.k[:1], v=patch.v[:1])]))
    assert one.num_cached_tokens == 16


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_and_repeated_patches_come_to_the_same(device, model_folder, oracle) -> None:
    """A pool of few pages; equal and other patches and plain requests of one prompt, cancelled ones among them."""
    lm, model = (
        lm_on(device, model_folder("llama"), kv_cache_tokens=192, max_model_len=128, max_num_tokens=24),
        oracle("llama"),
    )
    rng = random.Random(5)
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    ids = [torch.randint(0, 95, (45,), generator=GENERATOR).tolist() for _ in range(2)]
    patches = [None, PatchKV(0, [17, 30], v=rows(model, 2)), PatchKV(1, [3], k=rows(model, 1), v=rows(model, 1))]
    wanted = {
        (i, j): expected(model, ids[i], [] if patch is None else [patch], 30)[0]
        for i in range(2)
        for j, patch in enumerate(patches)
    }
    handles = []
    for _ in range(24):
        i, j = rng.randrange(2), rng.randrange(3)
        handles.append(((i, j), lm.submit(ids[i], long, interventions=[] if patches[j] is None else [patches[j]])))
        if rng.random() < 0.2:
            handles.pop()[1].cancel()
    for key, handle in handles:
        assert handle.result().token_ids == wanted[key], key
    assert lm.engine.stats()["preempted"]
    lm.shutdown()


def test_a_prefix_is_read_with_its_edits_and_from_the_cache(lm_of, oracle) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    ids = torch.randint(0, 95, (40,), generator=GENERATOR).tolist()
    patch = PatchKV(1, range(2, 4), k=rows(model, 2))
    (plain,), (edited,) = lm.kv([ids]), lm.kv([ids], interventions=[patch])
    assert lm.kv([ids])[0].num_cached_tokens == 32
    assert torch.equal(edited.k[1, 2:4], patch.k)
    torch.testing.assert_close(edited.k[:1], plain.k[:1])  # computed in other chunks
    torch.testing.assert_close(edited.v[1, 2:4], plain.v[1, 2:4])
    assert not torch.allclose(edited.v[2, 4:], plain.v[2, 4:])
    # What was read of one prompt is put into another.
    other = torch.randint(0, 95, (40,), generator=GENERATOR).tolist()
    moved = [PatchKV(layer, range(40), k=plain.k[layer], v=plain.v[layer]) for layer in range(lm.num_layers)]
    (out,) = lm.generate([other], SamplingParams(temperature=0, max_tokens=2), interventions=moved)
    check_moved = expected(model, other, [PatchKV(p.layer, list(range(40)), k=p.k, v=p.v) for p in moved], 2)
    assert out.token_ids == check_moved[0]
    kept = lm.generate([ids], GREEDY, capture=[Capture("kv.1", positions="all", dtype="float16")])[0].activations[
        "kv.1"
    ]
    assert kept.shape == (45, 2, *plain.k.shape[2:]) and torch.equal(kept[:40, 0], plain.k[1].half())


def test_a_prefix_is_read_beside_captures_and_monitors(lm_of) -> None:
    lm = lm_of("llama")
    (plain,) = lm.kv([IDS])
    assert not plain.activations and not plain.monitors
    monitor = Monitor("resid_post.0", torch.ones(lm.hidden_size), name="m")
    for capture in (["kv.1"], ["kv.*", "kv.1"], [Capture("kv.2", dtype="float32"), "resid_post.0"], ["kv.1", "kv.1"]):
        (out,) = lm.kv([IDS], capture=capture, monitors=[monitor])
        assert torch.equal(out.k, plain.k) and torch.equal(out.v, plain.v)
        assert len(out.monitors["m"].values) == len(IDS)
        for spec in capture:
            assert out.activations.stack(str(getattr(spec, "site", spec)).partition(".")[0]).shape[1] == len(IDS)
    assert torch.equal(out.activations["kv.1"][:, 0], plain.k[1])
    with pytest.raises(ValueError, match=r"kv\.1 is captured twice, with different positions"):
        lm.kv([IDS], capture=[Capture("kv.1", positions=[0])])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PatchKV(0, [1]), "give k=, v= or both"),
        (lambda: PatchKV(9, [1], k=torch.zeros(1, 72)), "layer=9; the model has 3 layers"),
        (lambda: PatchKV(0, [41], k=torch.zeros(1, 72)), "beyond the prompt"),
        (lambda: PatchKV(0, "generated", k=torch.zeros(1, 72)), "replaced at positions of the prompt"),
        (lambda: PatchKV(0, [1, 2], k=torch.zeros(1, 5, 2)), r"k has \[1, 5, 2\]; expected \[2, "),
        (lambda: PatchKV(0, [1], k=torch.zeros(1, 8), heads=[7]), r"heads=\[7\]; the model has"),
        (lambda: PatchKV(0, [1], k=torch.full((1, 8), torch.nan), heads=[0]), "finite|NaN"),
        (lambda: PatchKV("1", [1], k=torch.zeros(1, 8)), "layer='1'"),
        (lambda: Steer("kv.1", torch.zeros(72)), "replaced by PatchKV"),
    ],
)
def test_wrong_patches_are_refused_by_name(make, message, lm_of) -> None:
    lm = lm_of("llama")
    with pytest.raises(ValueError, match=message):
        lm.generate([IDS], GREEDY, interventions=[make()])
    assert lm.generate([IDS], GREEDY)


def test_models_and_calls_without_such_a_cache_refuse_it(lm_of, tmp_path) -> None:
    patch = PatchKV(0, [1], k=torch.zeros(1, 8), heads=[0])
    lm = lm_of("qwen3_next") if "qwen3_next" in CONFIGS else None
    if lm is not None:
        with pytest.raises(UnsupportedModelError, match="no K and V of one shape"):
            lm.kv([IDS])
    lm = lm_of("llama")
    with pytest.raises(ValueError, match="of a trace runs in one pass"):
        with lm.trace(IDS, interventions=[patch]):
            lm.model.layers[0].output.save()
    with pytest.raises(ValueError, match="not for each document"):
        lm.harvest([IDS], out=tmp_path / "h", capture=["resid_post.0"], interventions=[patch])
    with pytest.raises(ValueError, match="captured whole"):
        lm.generate([IDS], GREEDY, capture=[Capture("kv.0", reduce="mean")])


def test_a_connected_lm_and_http_patch_and_read_as_a_local_one(model_folder, oracle) -> None:
    from helpers_served import served

    from pymllm_interp.wire.specs import to_json

    model = oracle("llama")
    patch = PatchKV(1, [3, 9], k=rows(model, 2), v=rows(model, 2))
    wanted = expected(model, IDS, [patch])
    with served(model_folder("llama"), keys=None) as server, LM.connect(server.url) as lm:
        check(lm.generate([IDS], GREEDY, interventions=[patch], capture=["logits"])[0], wanted)
        torch.testing.assert_close(
            lm.kv([IDS])[0].k[1], pool_of(model, IDS).layers[1].keys[0].transpose(0, 1), atol=CLOSE, rtol=1e-4
        )
        with server.client(None) as client:
            body = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = client.post("/v1/completions", json=body | {"interventions": [to_json(patch)]}).json()
            assert answer["choices"][0]["token_ids"] == wanted[0], answer
            lm.vectors["keys"] = patch.k.flatten(1)
            named = {"op": "patchkv", "layer": 1, "positions": [3, 9], "k": "keys", "v": to_json(patch)["v"]}
            answer = client.post("/v1/completions", json=body | {"interventions": [named]}).json()
            assert answer["choices"][0]["token_ids"] == wanted[0], answer
            wrong = client.post("/v1/completions", json=body | {"interventions": [named | {"layer": 7}]})
            assert wrong.status_code == 400 and "no layer 7" in wrong.json()["error"]["message"]

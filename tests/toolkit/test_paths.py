"""`lm.path_patching`, `lm.logit_attribution` and `lm.das` equal the same by transformers' modules, and find a known subspace."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
import torch
from conftest import VOCAB
from family_configs import tiny_config
from helpers_edges import EdgeOracle
from helpers_paths import GOLDEN
from rich.console import Console
from safetensors import safe_open
from test_edges import METRIC, dummy, oracle_of, prompts
from transformers import AutoConfig, LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.toolkit import AlignedSubspace, alignment
from pymllm_interp.utils.arguments import PromptError

CLOSE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-3}
GREEDY = SamplingParams(max_tokens=1, temperature=0)


@torch.no_grad()
def path_by_hooks(oracle: EdgeOracle, sender: tuple[int, int], receiver: tuple[int, int, str]) -> float:
    """Wang et al.'s two passes: all heads as in the clean run but the sender, then the receiver's query, key or value."""
    spec, (layer, head, kind) = oracle.spec, receiver
    handles, read = [], []
    for i in range(spec.num_hidden_layers):
        z = oracle.states[0][f"z.{i}"].clone()
        if i == sender[0]:
            own = oracle.states[1][f"z.{i}"].unflatten(-1, (oracle.heads, -1))
            z.unflatten(-1, (oracle.heads, -1))[..., sender[1], :] = own[..., sender[1], :]
        module = oracle._module("z", i)
        handles.append(module.register_forward_pre_hook(lambda module, args, z=z: (z, *args[1:])))
    target = oracle._module(kind, layer)
    handles.append(target.register_forward_hook(lambda module, args, out: read.append(out.clone())))
    oracle.model(inputs_embeds=oracle.embeds[0])
    for handle in handles:
        handle.remove()
    first = {"q": 0, "k": oracle.heads, "v": oracle.heads + oracle.kv_heads}[kind] if spec.family.qkv else 0
    own = slice((first + head) * spec.head_dim, (first + head + 1) * spec.head_dim)

    def replace(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        new = out.clone()
        new[..., own] = read[0][..., own]
        return new

    handle = target.register_forward_hook(replace)
    logits = oracle.model(inputs_embeds=oracle.embeds[0]).logits[0, -1]
    handle.remove()
    return (logits[METRIC[0]] - logits[METRIC[1]]).item()


@pytest.mark.local
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_paths_through_mlps_are_two_passes_by_hooks(family, lm_of):
    lm = lm_of(family)
    clean, corrupted = prompts(3)
    oracle = oracle_of(lm, AutoConfig.for_model(**lm.hf_config.to_dict()), clean, corrupted)
    layers = lm.model_spec.num_hidden_layers
    kv = "h" if oracle.heads == oracle.kv_heads else "kv"
    for receiver, parts in ((f"a{layers - 1}.h2<q>", (layers - 1, 2, "q")), (f"a1.{kv}1<v>", (1, 1, "v"))):
        senders = ["a0.h0", "a0.h3"]
        found = lm.path_patching(clean, corrupted, receivers=receiver, senders=senders, metric=METRIC)
        wanted = [path_by_hooks(oracle, (0, int(name[-1])), parts) for name in senders]
        torch.testing.assert_close(found.values, torch.tensor(wanted), **CLOSE)
        assert found.effects.abs().max() > 1e-3


@pytest.mark.local
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_paths_without_mlps_are_patched_edges(family, lm_of):
    """Of all kinds of senders and receivers; the edges run by another way (`EdgeScores.faithfulness`)."""
    lm = lm_of(family)
    clean, corrupted = prompts(3)
    corrupted[-1] = (clean[-1] + 1) % VOCAB
    scores = lm.edge_attribution(clean, corrupted, metric=METRIC)
    last = lm.model_spec.num_hidden_layers - 1
    kv = "h" if "a0.h0<k>" in scores.targets else "kv"
    for receivers in ([f"m{last}"], [f"a{last}.h1<q>", f"a{last}.{kv}0<k>", f"a{last}.{kv}0<v>"], ["logits"]):
        senders = ["a0.h2", "m0", "input"]
        found = lm.path_patching(
            clean, corrupted, receivers=receivers, senders=senders, metric=METRIC, through_mlps=False
        )
        circuits = []
        for name in senders:
            mask = scores.real.clone()
            mask[scores.sources.index(name), [scores.targets.index(each) for each in receivers]] = False
            circuits.append(mask)
        torch.testing.assert_close(found.values, scores.faithfulness(circuits).metric, **CLOSE)
    whole = lm.path_patching(clean, corrupted, receivers=[f"a{last}.h1"], metric=METRIC, through_mlps=False)
    assert len(whole.senders) == last * scores.sources.index("m0") - last and whole.by_head()[last].abs().max() == 0
    assert whole.top(1)[0][0] in whole.senders and repr(whole).startswith("PathPatches(")
    console = Console(file=StringIO(), width=100)
    console.print(whole)
    assert whole.top(1)[0][0] in console.file.getvalue()  # pyright: ignore


@pytest.mark.local
def test_several_mlps_are_patched_with_what_each_has_by_itself(lm_of):
    """With frozen MLPs, a receiver's input has nothing of another receiver. Few vectors: a sender at a time."""
    lm = lm_of("llama")
    clean, corrupted = prompts(3)
    options: dict[str, Any] = {"senders": ["a0.h2", "a0.h4"], "metric": METRIC, "through_mlps": False}
    both = lm.path_patching(clean, corrupted, receivers=["m1", "m2", "a2.h3<q>"], **options)
    small = lm_of("llama", max_intervention_vectors=220, max_running_requests=2)
    again = small.path_patching(clean, corrupted, receivers=["m1", "m2", "a2.h3<q>"], **options)
    torch.testing.assert_close(both.values, again.values, **CLOSE)
    single = lm.path_patching(clean, corrupted, receivers=["m2"], **options)
    assert not torch.allclose(both.values, single.values)


def test_paths_of_a_served_model(lm_of):
    """Declared requests: the same through a server, with `--remote`."""
    lm = lm_of("llama")
    clean, corrupted = prompts(8)
    found = lm.path_patching(clean, corrupted, receivers="a2.h4<q>", senders=["a0.h1", "m1"], metric=METRIC)
    (plain,) = lm.generate([clean], GREEDY, capture=["logits"])
    logits = plain.activations["logits"][-1].float()
    assert found.clean == pytest.approx((logits[METRIC[0]] - logits[METRIC[1]]).item(), abs=1e-4)
    assert found.values.isfinite().all() and found.effects.abs().max() > 1e-4


@pytest.mark.local
@pytest.mark.parametrize("family", ["llama", "llama-rope", "gemma2", "gpt2", "olmo"])
def test_parts_of_logits_add_up(family, lm_of):
    """To the logit difference by transformers, less its soft cap; a head's part is its product with the frozen norm."""
    clean, corrupted = prompts(3)
    lm = dummy(tiny_config(family)) if family == "olmo" else lm_of(family)
    config = AutoConfig.for_model(**lm.hf_config.to_dict())
    oracle = oracle_of(lm, config, clean, corrupted)
    found = lm.logit_attribution(clean, [METRIC, 5, (3, 7)])
    with torch.no_grad():
        model = oracle.model
        head, norm = model.get_output_embeddings(), model.get_submodule(lm.model_spec.family.final_norm)
        streams: list[torch.Tensor] = []
        handle = norm.register_forward_pre_hook(lambda module, args: streams.append(args[0][0, -1]))
        model(torch.tensor([clean]))
        handle.remove()
        raw = head(norm(streams[0]))
        part, x = oracle.states[0]["a1.h2"][0, -1], streams[0]
        gain = getattr(norm, "weight", None)
        gain = torch.ones_like(x) if gain is None else 1 + gain if family == "gemma2" else gain
        if family in ("gpt2", "olmo"):
            part, x = part - part.mean(), x - x.mean()
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-5))
        own = (head.weight[7] - head.weight[11]) @ (gain * part / (x.square().mean() + eps).sqrt())
    wanted = torch.stack([raw[7] - raw[11], raw[5], raw[3] - raw[7]])
    torch.testing.assert_close(found.totals, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.values.sum(1), found.totals)
    assert found["a1.h2"][0].item() == pytest.approx(own.item(), abs=1e-4)
    assert found.heads[0, 1, 2] == found["a1.h2"][0] and torch.equal(found.mlps[:, 0], found["m0"])
    assert found.targets[0] and found.top(1)[0].value == found.values[0][found.values[0].abs().argmax()]
    if family == "olmo":
        lm.shutdown()


@pytest.mark.local
def test_the_most_probable_token_and_heads_that_scale(lm_of):
    lm = lm_of("llama")
    found = lm.logit_attribution([1, 2, 3])
    (out,) = lm.generate([[1, 2, 3]], GREEDY, capture=["logits"])
    assert found.totals[0] == pytest.approx(out.activations["logits"][-1].max().item(), abs=1e-4)
    console = Console(file=StringIO(), width=100)
    console.print(found)
    assert found.top(1)[0].source in console.file.getvalue()  # pyright: ignore
    with pytest.raises(KeyError, match="no source 'a9'"):
        found["a9"]
    with pytest.raises(PromptError, match="names a token twice"):
        lm.logit_attribution([1, 2], (3, 3))
    with dummy(tiny_config("cohere")) as other, pytest.raises(NotImplementedError, match="more than a product"):
        other.logit_attribution([1, 2, 3], 5)


@pytest.mark.local
def test_paths_that_are_none_are_refused(lm_of):
    lm = lm_of("llama")
    one, other = [1, 2, 3], [1, 5, 3]
    for text, receivers, senders in [
        ("is before none of the receivers", "a1.h0<q>", "a1.h3"),
        ("is before none of the receivers", "m1", ["a0.h0", "m1"]),
        ("no head is before them", "a0.h1<q>", None),
        ("'input' is no receiver", "input", None),
        ("'logits' is the end", ["logits", "m2"], None),
        ("has the inputs <k> and <v>", "a1.kv1", None),
        ("3 layers of 9 heads", "a3.h1<q>", None),
        ("3 layers of 9 heads", "a1.kv3<k>", None),
        ("is no sender", "m2", "a1.h1<q>"),
        ("is no node", "a1<q>", None),
        ("is no node", [3], None),
        ("each once", ["m1", "m1"], None),
        ("each once", [], None),
    ]:
        with pytest.raises(PromptError, match=text):
            lm.path_patching(one, other, receivers=receivers, senders=senders, metric=METRIC)
    with pytest.raises(PromptError, match="equally many"):
        lm.path_patching(one, [1, 2], receivers="m1", metric=METRIC)


# -- distributed alignment search ---------------------------------------------------------------


def known_model() -> tuple[LM, torch.Tensor]:
    """A model with a head that reads three dimensions of the last layer's output, and these [3, hidden]."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=36, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3, head_dim=4,
        intermediate_size=16, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    lm, basis = dummy(config), torch.linalg.qr(torch.randn(36, 3, generator=generator))[0].T.contiguous()
    weights = {}
    for name, value in lm.runner.get_model().state_dict().items():
        drawn = torch.randn(value.shape, generator=generator) * 0.3
        weights[name] = torch.ones_like(drawn) if "norm" in name else drawn
    weights["lm_head.weight"] = 3 * torch.randn(VOCAB, 3, generator=generator) @ basis
    lm.load_state_dict(weights)
    return lm, basis


@pytest.mark.local
def test_a_known_subspace_is_found_and_served():
    """The interchange of these three dimensions gives the source's token. Bases and sources have other lengths."""
    lm, basis = known_model()
    generator = torch.Generator().manual_seed(1)
    bases = [torch.randint(0, VOCAB, (3 + i % 2,), generator=generator).tolist() for i in range(160)]
    sources = torch.randint(0, VOCAB, (160, 5), generator=generator).tolist()
    labels = [out.token_ids[0] for out in lm.generate(sources, GREEDY)]
    plain = [out.token_ids[0] for out in lm.generate(bases, GREEDY)]
    known = AlignedSubspace("resid_post.1", basis)
    assert known.accuracy(lm, bases, sources, labels) == 1.0
    found = lm.das(bases, sources, labels, site="resid_post.1", rank=3, steps=50, lr=0.05)
    assert torch.linalg.svdvals(found.basis @ basis.T).min() > 0.9
    torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(3), atol=1e-5, rtol=1e-4)
    before = sum(one == other for one, other in zip(plain, labels, strict=True)) / 160
    assert found.accuracy(lm, bases, sources, labels) > 0.85 > before + 0.3
    assert found.losses is not None and found.losses[-10:].mean() < 0.6 * found.losses[:10].mean()
    free = lm.das(bases, sources, labels, site="resid_post.1", rank=None, steps=30, lr=0.05)
    assert 3 <= len(free.basis) < 36 and free.accuracy(lm, bases, sources, labels) > 0.85
    lm.shutdown()


@pytest.mark.local
def test_interchanges_and_subspaces_are_pyvenes():
    """By its LowRankRotatedSpaceIntervention: logits with its rotation, and what a training finds (golden/make_alignment.py)."""
    wanted = json.loads((GOLDEN / "alignment.json").read_text())
    with safe_open(GOLDEN / "attribution.safetensors", framework="pt") as file:
        config = AutoConfig.for_model(**json.loads(file.metadata()["llama"]))
        prefix = "llama/weights/"
        weights = {n.removeprefix(prefix): file.get_tensor(n) for n in file.keys() if n.startswith(prefix)}
    site, labels = f"resid_post.{wanted['layer']}", torch.tensor(wanted["labels"])
    given = wanted["bases"], wanted["sources"]
    with dummy(config) as lm:
        lm.load_state_dict({**weights, "lm_head.weight": torch.tensor(wanted["lm_head"])})
        for state in (wanted["before"], wanted["after"]):
            basis = torch.tensor(state["rotation"]).T.contiguous()
            found = AlignedSubspace(site, basis, tuple(wanted["positions"]))
            logits = found.logits(lm, *given)
            torch.testing.assert_close(logits[:8], torch.tensor(state["logits"]), **CLOSE)
            assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(state["loss"], abs=1e-3)
            assert found.accuracy(lm, *given, wanted["labels"]) == pytest.approx(state["accuracy"], abs=1e-6)
        options: dict[str, Any] = {"positions": tuple(wanted["positions"]), "batch": 96, "lr": 0.05, "steps": 100}
        own = lm.das(*given, wanted["labels"], site=site, rank=len(basis), **options)
        assert torch.linalg.svdvals(own.basis @ basis.T).min() > 0.95
        loss = torch.nn.functional.cross_entropy(own.logits(lm, *given), labels).item()
        assert loss < 1.1 * wanted["after"]["loss"] < 0.1 * wanted["before"]["loss"]


@pytest.mark.local
@pytest.mark.parametrize("site", ["resid_post.1", "z.1", "mlp_out.0"])
def test_training_runs_the_interchange_that_is_served(site, lm_of):
    """The first loss is that of the declared interventions, and a step lowers it."""
    lm = lm_of("llama")
    bases, sources, labels = [[1, 2, 3], [4, 5, 6]], [[9, 8, 7, 6], [3, 3, 3, 1]], [11, 40]
    options: dict[str, Any] = {"site": site, "rank": 2, "positions": (1, 2), "batch": 2}
    still = lm.das(bases, sources, labels, **options, steps=1, lr=0.0)
    logits = still.logits(lm, bases, sources)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    assert still.losses is not None and still.losses[0].item() == pytest.approx(loss.item(), abs=1e-4)
    moved = lm.das(bases, sources, labels, **options, steps=2, lr=0.01)
    assert moved.losses is not None and moved.losses[0] == still.losses[0] and moved.losses[1] < moved.losses[0]
    difference = moved.basis.T @ moved.basis - still.basis.T @ still.basis
    assert 1e-4 < difference.abs().max() < 0.2


@pytest.mark.local
def test_weights_that_are_edited_in_training_end_it_by_name(lm_of, monkeypatch):
    lm, step = lm_of("llama"), alignment._step
    weight = lm.runner.get_model().model.norm.weight

    def edited(*arguments: Any) -> Any:
        found = step(*arguments)
        weight.add_(0)
        return found

    monkeypatch.setattr(alignment, "_step", edited)
    with pytest.raises(RuntimeError, match=r"were edited since lm\.das began"):
        lm.das([[1, 2, 3]], [[4, 5, 6]], [7], site="resid_post.1", steps=3)
    monkeypatch.undo()
    assert len(lm.das([[1, 2, 3]], [[4, 5, 6]], [7], site="resid_post.1", steps=1).basis) == 1


@pytest.mark.local
def test_what_cannot_be_aligned_is_refused(lm_of):
    lm = lm_of("llama")
    bases, sources, labels = [[1, 2], [3, 4]], [[5, 6], [7, 8]], [1, 2]
    for error, text, options in [
        (PromptError, "one each", {"labels": [1]}),
        (PromptError, "expected lists", {"bases": "w1 w2"}),
        (PromptError, "expected lists", {"bases": [], "sources": [], "labels": []}),
        (PromptError, "from 0 to 96", {"labels": [1, 97]}),
        (PromptError, "base 0 has 2 tokens", {"positions": 2}),
        (PromptError, "source 0 has 2 tokens", {"positions": (0, -3)}),
        (PromptError, "positions=", {"positions": "last"}),
        (ValueError, "may name several sites", {"site": "resid_post.*"}),
        (ValueError, "one site of a layer", {"site": "logits"}),
        (ValueError, "no layer 9", {"site": "resid_post.9"}),
        (ValueError, "interventions act at", {"site": "attn_in.1"}),
        (ValueError, "rank=73", {"rank": 73}),
        (ValueError, "rank=0", {"rank": 0}),
        (ValueError, "steps=0", {"steps": 0}),
        (ValueError, "lr=-1", {"lr": -1}),
    ]:
        arguments: dict[str, Any] = {
            "bases": bases, "sources": sources, "labels": labels, "site": "resid_post.1", "steps": 1, **options
        }  # fmt: skip
        with pytest.raises(error, match=text):
            lm.das(**arguments)
    assert len(lm.generate(bases, SamplingParams(max_tokens=2))[0].token_ids) == 2


@pytest.mark.gpu
def test_a_subspace_trained_on_cuda_is_that_of_the_cpu(lm_of):
    found = [
        lm_of("llama", device=device).das([[1, 2, 3]], [[4, 5, 6]], [7], site="resid_post.1", rank=2, steps=3).losses
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-2)

"""`lm.attribute` equals the same maths on transformers' model with autograd; `contrast` the same sums on captured states."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB
from helpers_paths import GOLDEN
from rich.console import Console
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.core.model_spec import FAMILIES
from pymllm_interp.toolkit import ControlVectors, contrast
from pymllm_interp.utils.arguments import PromptError

RESULTS = GOLDEN / "attribution.safetensors"
METRIC = (7, 11)
CLOSE = {"atol": 2e-5, "rtol": 1e-3}
ONE = SamplingParams(temperature=0, max_tokens=1)


def prompts(seed: int, length: int = 7) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    first = [rng.randrange(VOCAB) for _ in range(length)]
    return first, [token if i % 3 else rng.randrange(VOCAB) for i, token in enumerate(first)]


def states_of(
    model: PreTrainedModel, ids: Sequence[int], names: Sequence[str], change: Callable[[str, Any], Any] | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Outputs of transformers' modules, "path", or their inputs, "path.input", in the graph; and the logit difference."""
    found, handles = {}, []

    def taken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        new = tensor if change is None else change(name, tensor)
        found[name] = new
        return new

    def after(name: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, out: Any) -> Any:
            return (taken(name, out[0]), *out[1:]) if isinstance(out, tuple) else taken(name, out)

        return hook

    def before(name: str) -> Callable[..., Any]:
        return lambda module, args: (taken(name, args[0]), *args[1:])

    for name in names:
        path = name.removesuffix(".input")
        module = model.get_submodule(path)
        handles.append(
            module.register_forward_pre_hook(before(name))
            if path != name
            else module.register_forward_hook(after(name))
        )
    try:
        logits = model(torch.tensor([ids])).logits[0, -1]
    finally:
        for handle in handles:
            handle.remove()
    return found, logits[METRIC[0]] - logits[METRIC[1]]


def paths_of(family: str, kinds: Sequence[str], layers: int) -> dict[str, str]:
    """Site -> the name of its value among transformers' modules."""
    points = FAMILIES[family].points
    return {
        f"{kind}.{i}": points[kind].module.format(i) + (".input" if points[kind].end == "input" else "")
        for kind in kinds
        for i in range(layers)
    }


@pytest.mark.local
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "gpt_neox"])
def test_one_step_is_attribution_patching(lm_of, oracle, family):
    """(clean - corrupted) times the corrupted run's gradient, by autograd over transformers' model."""
    lm, model = lm_of(family), oracle(family)
    clean, corrupted = prompts(3)
    kinds = ("resid_post", "attn_out", "mlp_out", "z", "mlp_act")
    names = paths_of(model.config.model_type, kinds, lm.model_spec.num_hidden_layers)
    wanted, clean_metric = states_of(model, clean, list(names.values()))
    start, metric = states_of(model, corrupted, list(names.values()))
    gradients = torch.autograd.grad(metric, list(start.values()))
    found = lm.attribute(clean, corrupted, metric=METRIC, sites=[f"{kind}.*" for kind in kinds])
    assert set(found) == set(names) and not found.completeness
    assert found.clean == pytest.approx(clean_metric.item(), abs=1e-4)
    assert found.corrupted == pytest.approx(metric.item(), abs=1e-4)
    by_name = dict(zip(start, gradients, strict=True))
    for site, name in names.items():
        products = ((wanted[name] - start[name]) * by_name[name]).detach()[0]
        if site.startswith("z"):
            products = products.unflatten(-1, lm.model_spec.shape("z"))
        torch.testing.assert_close(found[site], products.sum(-1), **CLOSE)
    neurons = lm.attribute(clean, corrupted, metric=METRIC, sites="mlp_act.0", neurons=True)
    assert neurons["mlp_act.0"].shape == (7, 56)
    torch.testing.assert_close(neurons["mlp_act.0"].sum(-1), found["mlp_act.0"], **CLOSE)
    assert found.stacked("resid_post").shape == (lm.model_spec.num_hidden_layers, 7)


@pytest.mark.local
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_scores_of_transformer_lens(family):
    """Those of `attribution_patch` of transformer-lens 4.3, which golden/make_attribution.py wrote with the weights."""
    with safe_open(RESULTS, framework="pt") as file:
        config = json.loads(file.metadata()[family])
        golden = {name: file.get_tensor(name) for name in file.keys() if name.startswith(family)}
    weights = f"{family}/weights/"
    hf_config = AutoConfig.for_model(**config)
    with LM("golden", hf_config=hf_config, load_format="dummy", dtype="float32", device="cpu") as lm:
        given = {name.removeprefix(weights): value for name, value in golden.items() if name.startswith(weights)}
        missing = lm.load_state_dict(given, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
        sites = ["z.*", "mlp_out.*", *(["embed"] if family == "llama" else ["resid_pre.0"])]
        found = lm.attribute([3, 7, 1, 14, 5, 9], [3, 8, 1, 14, 2, 9], metric=(4, 11), sites=sites)
    torch.testing.assert_close(found.stacked("z"), golden[f"{family}/z"], **CLOSE)
    torch.testing.assert_close(found.stacked("mlp_out"), golden[f"{family}/mlp_out"], **CLOSE)
    # GPT-2's positions are equal in both runs: their embeddings cancel.
    torch.testing.assert_close(found[sites[-1]], golden[f"{family}/embed"], **CLOSE)
    assert golden[f"{family}/z"].abs().max() > 0.01


@pytest.mark.local
@pytest.mark.parametrize(("family", "site"), [("llama", "resid_post.0"), ("gpt2", "z.1"), ("qwen3", "mlp_out.1")])
def test_more_steps_are_integrated_gradients(lm_of, oracle, family, site):
    """The mean of gradients at the middles of equal parts, by autograd over transformers' model."""
    lm, model = lm_of(family), oracle(family)
    clean, corrupted = prompts(5)
    kind, _, layer = site.partition(".")
    (name,) = [paths_of(model.config.model_type, [kind], int(layer) + 1)[site]]
    wanted, _ = states_of(model, clean, [name])
    start, _ = states_of(model, corrupted, [name])
    one, other, steps = start[name].detach(), wanted[name].detach(), 6
    total = torch.zeros_like(one)
    for step in range(steps):
        state = (one + (step + 0.5) / steps * (other - one)).requires_grad_()
        _, metric = states_of(model, corrupted, [name], lambda _, __, state=state: state)
        total += torch.autograd.grad(metric, state)[0]
    products = ((other - one) * total / steps)[0]
    if kind == "z":
        products = products.unflatten(-1, lm.model_spec.shape("z"))
    found = lm.attribute(clean, corrupted, metric=METRIC, sites=site, steps=steps)
    torch.testing.assert_close(found[site], products.sum(-1), **CLOSE)
    _, patched = states_of(model, corrupted, [name], lambda _, __: other)
    assert found.completeness[site].difference == pytest.approx((patched - found.corrupted).item(), abs=1e-4)


@pytest.mark.local
@pytest.mark.few("family", "llama", "gpt_neox")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
def test_integrated_gradients_add_up(lm_of, family):
    """At every kind of site, and in passes of few rows."""
    lm = lm_of(family, max_num_tokens=24)
    clean, corrupted = prompts(2, 5)
    kinds = [kind for kind in lm.model_spec.family.points if kind not in ("logits", "embed", "final_norm")]
    sites = [f"{kind}.1" for kind in kinds] + ["final_norm", "resid_pre.0"]
    sites += ["embed"] if "embed" in lm.model_spec.family.points else []
    found = lm.attribute(clean, corrupted, metric=METRIC, sites=sites, steps=30)
    whole = found.clean - found.corrupted
    for site, completeness in found.completeness.items():
        assert completeness.attributed == pytest.approx(found[site].sum().item(), abs=1e-4)
        bound = 0.1 if site in ("embed", "resid_pre.0") else 0.02  # small embeddings: the first norm bends sharply
        assert abs(completeness.error) < bound * max(1, abs(whole)), site
        if site.startswith(("resid", "final", "embed")):  # all of the run is behind it
            assert completeness.difference == pytest.approx(whole, abs=1e-4), site


@pytest.mark.local
def test_the_estimate_is_near_the_patch_where_the_change_is_small(lm_of):
    lm = lm_of("llama")
    clean, corrupted = prompts(4)
    found = lm.attribute(clean, corrupted, metric=METRIC, sites="final_norm")
    assert found["final_norm"].sum().item() == pytest.approx(
        found.clean - found.corrupted, abs=1e-4
    )  # linear from there
    assert found["final_norm"][:-1].abs().max() == 0


@pytest.mark.local
def test_an_attribution_shows_itself(lm_of):
    lm = lm_of("llama")
    clean, corrupted = prompts(4)
    found = lm.attribute(clean, corrupted, metric=METRIC, sites=["z.*", "resid_post.1"], steps=4)
    console = Console(file=StringIO(), width=100)
    console.print(found)
    assert "4 steps" in console.file.getvalue()  # pyright: ignore
    assert found._repr_html_().count("<tr>") == 5
    largest = found.top(3)
    assert [abs(entry.value) for entry in largest] == sorted((abs(e.value) for e in largest), reverse=True)
    entry = next(entry for entry in found.top(30) if entry.place)
    assert found[entry.site][entry.position, entry.place[0]] == entry.value
    assert found["blocks.1.hook_resid_post"] is found["resid_post.1"]
    with pytest.raises(KeyError, match=r"there are z\.0"):
        found["resid_post.2"]
    pytest.importorskip("plotly")
    figure = found.plot().figure
    assert len(figure.data[0].z) == 4 and list(figure.layout.yaxis.ticktext) == list(found)
    assert figure.layout.yaxis.title.text == "site"


@pytest.mark.local
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clean": [1, 2]}, "the clean prompt has 2 tokens"),
        ({"steps": 0}, "from 1 on"),
        ({"steps": 1.5}, "from 1 on"),
        ({"sites": "logits"}, "selects no site"),
        ({"sites": "resid_post.9"}, "there is no layer 9"),
        ({"metric": 400}, "from 0 to 96"),
    ],
)
def test_what_cannot_be_attributed_is_refused(lm_of, change, message):
    arguments: dict[str, Any] = {
        "clean": [1, 2, 3], "corrupted": [1, 5, 3], "metric": METRIC, "sites": "resid_post.*", **change
    }  # fmt: skip
    with pytest.raises((PromptError, ValueError), match=message):
        lm_of("llama").attribute(**arguments)


@pytest.mark.gpu
def test_attribution_on_cuda_equals_that_on_the_cpu(lm_of):
    clean, corrupted = prompts(4)
    found = [
        lm_of("llama", device=device).attribute(
            clean, corrupted, metric=METRIC, sites=["z.*", "resid_post.*"], steps=steps
        )
        for device in ("cpu", "cuda")
        for steps in (1, 4)
    ]
    for one, other in zip(found[:2], found[2:], strict=True):
        for site in one:
            torch.testing.assert_close(one[site], other[site], atol=1e-3, rtol=1e-2)


# -- contrast ---------------------------------------------------------------------------------

PAIRS = [([5, 8, 1], [5, 9, 2]), ([17, 3, 2, 44, 8], [17, 4]), ([6, 80], [7, 81]), ([1, 2, 3], [3, 2, 1])]


def differences(lm: LM, site: str) -> torch.Tensor:
    sides = [lm.generate(list(side), ONE, capture=[site]) for side in zip(*PAIRS, strict=True)]
    states = [torch.stack([out.activations[site][-1].flatten() for out in outs]) for outs in sides]
    return states[0] - states[1]


def test_the_mean_difference(lm_of):
    lm = lm_of("llama")
    for site in ("resid_post", "z"):
        found = contrast(lm, PAIRS, f"{site}.*")
        assert list(found) == [0, 1, 2]
        for layer, vector in found.items():
            torch.testing.assert_close(vector, differences(lm, f"{site}.{layer}").mean(0), atol=1e-5, rtol=1e-4)


def test_the_principal_component(lm_of):
    lm = lm_of("llama")
    found = contrast(lm, PAIRS, "resid_post.1", method="pca")[1]
    matrix = differences(lm, "resid_post.1")
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    assert values[-1] > 1.01 * values[-2]
    assert found.norm().item() == pytest.approx(1, abs=1e-5)
    assert (found @ vectors[:, -1]).abs().item() == pytest.approx(1, abs=1e-4)
    assert (matrix @ found).mean() > 0
    flipped = contrast(lm, [(b, a) for a, b in PAIRS], "resid_post.1", method="pca")[1]
    torch.testing.assert_close(flipped, -found, atol=1e-4, rtol=1e-3)


@pytest.mark.local
@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_vectors_are_written_read_and_steered_with(lm_of, tmp_path, suffix):
    if suffix == "gguf":
        gguf = pytest.importorskip("gguf")
    lm = lm_of("llama")
    found = contrast(lm, PAIRS, "resid_post.{1..-1}", method="mean")
    path = tmp_path / f"mood.{suffix}"
    found.save(path)
    if suffix == "gguf":
        reader = gguf.GGUFReader(path)
        assert [tensor.name for tensor in reader.tensors] == ["direction.1", "direction.2"]
        assert reader.fields["controlvector.model_hint"].contents() == "llama"
    again = ControlVectors.load(path)
    assert list(again) == [1, 2] and all(torch.equal(again[i], found[i]) for i in found)
    lm.vectors["mood"] = path
    capture = [Capture("resid_post.2", positions=[-1])]
    outs = [
        lm.generate([[5, 6, 7]], ONE, capture=capture, interventions=ops)[0].activations["resid_post.2"]
        for ops in ([], [Steer("resid_post.2", found)], [Steer("resid_post.2", "mood")])
    ]
    torch.testing.assert_close(outs[1], outs[0] + found[2], atol=1e-5, rtol=1e-4)
    assert torch.equal(outs[1], outs[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there are 0"),
        (([("w1", "w2", "w3")],), "entry 0 is not a pair"),
        ((["ab"],), "entry 0 is not a pair"),
        ((["abc"], ["def"], "resid_post.1"), "entry 0 is not a pair"),
        ((PAIRS[:1], "resid_post.*", "pca"), "2 at least"),
        ((PAIRS, "resid_post.*", "lda"), "'mean' or 'pca'"),
        ((PAIRS, "final_norm"), "has no layer"),
        ((PAIRS, "resid_pre.7"), "there is no layer 7"),
        (([([1, 2], [3, 2])], "resid_pre.0"), "equal at resid_pre.0"),
        (([([1, 2], [1, 2])] * 2, "resid_post.1", "pca"), "equal at resid_post.1"),
    ],
)
def test_what_makes_no_vector_is_refused(lm_of, arguments, message):
    with pytest.raises((PromptError, ValueError), match=message):
        contrast(lm_of("llama"), *arguments)


def test_layer_0_has_no_place_in_a_control_vector(lm_of, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="layers start at 1"):
        contrast(lm_of("llama"), PAIRS).save(tmp_path / "all.gguf")


def test_arithmetic_of_control_vectors_is_by_layer() -> None:
    a = ControlVectors({1: torch.tensor([1.0, 2.0]), 2: torch.tensor([3.0, 5.0])}, "llama", "f")
    b = ControlVectors({2: torch.tensor([10.0, 20.0]), 4: torch.tensor([7.0, 9.0])}, "llama", "f")
    for found, wanted in (
        (a + b, {1: [1.0, 2.0], 2: [13.0, 25.0], 4: [7.0, 9.0]}),
        (a - b, {1: [1.0, 2.0], 2: [-7.0, -15.0], 4: [-7.0, -9.0]}),
        (2 * a, {1: [2.0, 4.0], 2: [6.0, 10.0]}),
        (a * np.float32(0.5), {1: [0.5, 1.0], 2: [1.5, 2.5]}),
        (np.float64(2) * a, {1: [2.0, 4.0], 2: [6.0, 10.0]}),
        (a / 2, {1: [0.5, 1.0], 2: [1.5, 2.5]}),
        (-a, {1: [-1.0, -2.0], 2: [-3.0, -5.0]}),
    ):
        assert type(found) is ControlVectors and {i: vector.tolist() for i, vector in found.items()} == wanted
        assert (found.model_hint, found.model_fingerprint) == ("llama", "f")
    assert a[1].tolist() == [1, 2] and (a + b)[1] is not a[1]


def test_arithmetic_of_control_vectors_refuses_what_it_does_not_take() -> None:
    a = ControlVectors({1: torch.ones(2)}, "llama")
    with pytest.raises(ValueError, match=r"widths are \[2, 3\]"):
        a + ControlVectors({2: torch.ones(3)})
    with pytest.raises(ZeroDivisionError):
        a / 0
    for call in (lambda: a + 1, lambda: a * "2", lambda: a * a, lambda: a - {1: torch.ones(2)}):  # pyright: ignore
        with pytest.raises(TypeError):
            call()
    with pytest.warns(UserWarning, match="of different models are combined: their model_hints differ"):
        a + ControlVectors({1: torch.ones(2)}, "qwen2")


@pytest.mark.local
@pytest.mark.parametrize("given", ["vectors", "name", "gguf", "safetensors"])
def test_vectors_of_another_model_warn(lm_of, tmp_path, given):
    if given == "gguf":
        pytest.importorskip("gguf")
    lm, other = lm_of("llama"), lm_of("llama", dtype="bfloat16")
    vectors: Any = contrast(lm, PAIRS, "resid_post.{1..-1}")
    assert vectors.model_fingerprint == lm.weights.fingerprint != other.weights.fingerprint
    if given in ("gguf", "safetensors"):
        path = tmp_path / f"mood.{given}"
        vectors.save(path)
        vectors = path
    if given != "vectors":
        for one in (lm, other):
            one.vectors["mood"] = vectors
        vectors = "mood"
    steer = [Steer("resid_post.{1..-1}", vectors, scale=2.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate([[5, 6, 7]], ONE, interventions=steer)
    with pytest.warns(
        UserWarning, match=r"Steer\('resid_post.\{1..-1\}'\): .* made with another model: its fingerprint begins"
    ):
        other.generate([[5, 6, 7]], ONE, interventions=steer)

"""`lm.circuit` equals circuit-tracer's graphs, explains every pre-activation whole, and refuses by name what it cannot explain."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import golden_circuits as golden
import pytest
import torch
from conftest import VOCAB
from helpers_paths import GOLDEN
from helpers_saes import random_sae
from safetensors.torch import load_file

from pymllm_interp import SAE, SamplingParams
from pymllm_interp.toolkit.circuits import build, frozen, scores
from pymllm_interp.utils.arguments import PromptError

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
NATIVE = ["llama", "llama-rope", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"]


def transcoders_of(kind: str, lm: Any) -> list[SAE]:
    """The golden graphs' transcoders."""
    layers, width = lm.model_spec.num_hidden_layers, lm.model_spec.hidden_size
    made = []
    for layer, own in enumerate(golden.random_tensors(kind, layers, width)):
        written = range(layer, layer + own["W_dec"].shape[1])
        bias = torch.cat([own["b_dec"], torch.zeros((len(written) - 1) * width)])
        made.append(
            SAE(
                W_enc=own["W_enc"],
                b_enc=own["b_enc"],
                W_dec=own["W_dec"].flatten(1),
                b_dec=bias,
                architecture="jumprelu",
                threshold=own["threshold"],
                transcoder=True,
                site=f"{'mlp_in' if kind in ('mlp', 'unscaled') else 'resid_mid'}.{layer}",
                site_out=f"mlp_out.{{{','.join(map(str, written))}}}" if len(written) > 1 else f"mlp_out.{layer}",
                norm_gain=kind != "unscaled",
                W_skip=own["W_skip"] if kind == "skip" else None,
            )
        )
    return made


def small_sae(lm: Any, site: str, seed: int, **fields: Any) -> SAE:
    """A random SAE that reconstructs about as much as there is."""
    width, generator = lm.model_spec.hidden_size, torch.Generator().manual_seed(100 + seed)
    scaled = {
        "W_enc": torch.randn(width, 37, generator=generator) / width**0.5,
        "W_dec": torch.randn(37, width, generator=generator) * 0.1, "b_enc": torch.randn(37, generator=generator) - 0.7,
    }  # fmt: skip
    return random_sae(width, site, seed=seed, **{**scaled, **fields})


def transcoder(lm: Any, layer: int, site: str = "mlp_in", **fields: Any) -> SAE:
    made = {"transcoder": True, "site_out": f"mlp_out.{layer}", **fields}
    return small_sae(lm, f"{site}.{layer}", layer, **made)


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_complete(circuit: Any) -> None:
    values = torch.cat((circuit.activations, circuit.target_values))
    sums = circuit.weights.sum(1) + circuit.bias + circuit.rest
    torch.testing.assert_close(sums, values, **CLOSE)


@pytest.mark.parametrize("kind", golden.KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_graphs_equal_circuit_tracers(family, kind, lm_of):
    """Features, activations, adjacency, the pruned graph and its scores, whole and with the most influential features only."""
    lm, wanted = lm_of(family), load_file(GOLDEN / "circuits" / f"{family}.safetensors")
    for size, most, batch in (("whole", None, 7), ("part", golden.MOST, 4)):
        circuit = lm.circuit(golden.PROMPT, transcoders_of(kind, lm), max_features=most, batch=batch)
        found = {
            "features": circuit.features, "activations": circuit.activations, "nodes": circuit.graph.nodes,
            "cumulative": circuit.graph.scores, "scores": torch.tensor(circuit.scores()),
            "targets": torch.tensor([target.token for target in circuit.targets]),
            "probabilities": torch.tensor([target.weight for target in circuit.targets]),
        }  # fmt: skip
        for name, part in (("adjacency", circuit.weights), ("edges", circuit.graph.edges)):
            found[name] = torch.zeros(part.shape[1], part.shape[1], dtype=part.dtype)
            found[name][circuit.row_nodes] = part
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[f"{kind}.{size}.{name}"], **CLOSE)
        check_complete(circuit)


@pytest.mark.slow
@pytest.mark.skipif(
    "CIRCUIT_TRACER_PYTHON" not in os.environ, reason="names a Python with circuit-tracer, of older libraries"
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_recorded_graphs_are_circuit_tracers(family, model_folder, tmp_path):
    script, out = Path(golden.__file__ or ""), tmp_path / "out.safetensors"
    command = [os.environ["CIRCUIT_TRACER_PYTHON"], str(script), str(model_folder(family)), family, str(out)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"})
    wanted, found = load_file(GOLDEN / "circuits" / f"{family}.safetensors"), load_file(out)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.parametrize("family", NATIVE)
def test_effects_sum_to_what_they_explain(family, lm_of, monkeypatch):
    """Transcoders of some layers, with the Jacobian of the other MLPs; patterns and decoder rows in several parts."""
    monkeypatch.setattr(frozen, "QUERY_ROWS", 4)
    monkeypatch.setattr(scores, "ELEMENTS", 1)
    lm = lm_of(family)
    last = lm.model_spec.num_hidden_layers - 1
    for layers in ([last], [0, last]):
        circuit = lm.circuit(ids(3, 11), [transcoder(lm, layer) for layer in layers], batch=5, skip=2, max_features=20)
        assert set(circuit.features[:, 0].tolist()) <= set(layers) and circuit.features[:, 1].min() >= 2
        assert circuit.weights.abs().sum(1).min() > 0
        check_complete(circuit)


@pytest.mark.parametrize("site", ["mlp_out", "resid_post"])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"architecture": "topk", "k": 4}, {"subtract_b_dec": False}, {"architecture": "abstopk", "k": 3},
        {"architecture": "gated", "r_mag": torch.randn(37) * 0.3, "b_mag": torch.randn(37)},
    ],
    ids=["standard", "topk", "without b_dec", "abstopk", "gated"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_saes_in_their_own_place(family, fields, site, lm_of):
    lm = lm_of(family)
    layers = lm.model_spec.num_hidden_layers
    saes = [small_sae(lm, f"{site}.{layer}", layer, **fields) for layer in range(layers)]
    circuit = lm.circuit(ids(5, 6), saes, target=[3, (7, 11)])
    check_complete(circuit)
    if site == "resid_post":  # nothing goes past it: the logits read the last layer's features and errors only
        to_logits, last = circuit.weights[len(circuit.features) :], circuit.features[:, 0] == layers - 1
        assert (
            to_logits[:, : len(last)][:, ~last].abs().max() == 0
            and to_logits[:, circuit.first_embedding :].abs().max() == 0
        )
        at_end = [(number, key) for number, key in enumerate(circuit.features.tolist()) if key[:2] == [layers - 1, 5]]
        norm, head = lm.get("model.norm"), lm.lm_head.weight
        with lm.trace(ids(5, 6)):
            h = lm.model.layers[layers - 1].output[0, -1].save()
        gain = 1 + norm.weight if family == "gemma2" else norm.weight
        direction = (head[7] - head[11]) * gain * (h.square().mean() + norm.eps).rsqrt()
        for number, (_, _, feature) in at_end:
            wanted = circuit.activations[number] * (saes[-1].W_dec[feature] @ direction)
            torch.testing.assert_close(to_logits[1, number], wanted.detach(), **CLOSE)
        assert at_end


def test_targets_and_thresholds(lm_of):
    lm = lm_of("llama")
    prompt, coder = ids(1, 7), [transcoder(lm, layer) for layer in range(3)]
    several = lm.circuit(prompt, coder, target=["w3", (4, "w9"), 5])
    assert [target.label for target in several.targets] == ["w3", "w4 - w9", "w5"] and several.targets[1].weight == 1
    logits = (
        lm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), capture=["logits"])[0]
        .activations["logits"][-1]
        .float()
    )
    wanted = torch.stack((logits[3] - logits.mean(), logits[4] - logits[9], logits[5] - logits.mean()))
    torch.testing.assert_close(several.target_values, wanted, **CLOSE)
    one = lm.circuit(prompt, coder, target=(4, 9))
    torch.testing.assert_close(one.weights[-1, : one.first_target], several.weights[-2, : one.first_target], **CLOSE)
    strict, all_of_it = one.pruned(0.3, 0.5), one.pruned(1.0, 1.0)
    assert len(strict.nodes) < len(one.nodes) <= len(all_of_it.nodes) and len(strict.edges) < len(one.edges)
    assert {edge.source for edge in one.edges} <= set(one.nodes) and {edge.target for edge in one.edges} <= set(
        one.nodes
    )
    assert [abs(edge.weight) for edge in one.edges] == sorted((abs(edge.weight) for edge in one.edges), reverse=True)
    for node in one.nodes:
        if node.kind == "feature":
            assert one.node(one.number_of(node)) == node
    with pytest.raises(KeyError, match="no feature of this circuit"):
        one.number_of((0, 0, 0))


def test_runs_without_features_and_of_one_token(lm_of):
    lm = lm_of("gemma2")
    dead = transcoder(lm, 1, b_enc=torch.full((37,), -1e4))
    for prompt, skip, coder in (
        (ids(2, 1), 0, transcoder(lm, 1)),
        (ids(2, 1), 0, dead),
        (ids(2, 6), 1, dead),
        (ids(2, 6), 5, dead),
    ):
        circuit = lm.circuit(prompt, coder, skip=skip)
        assert len(circuit.nodes) >= len(prompt) + len(circuit.targets) and (len(circuit.features) > 0) == (
            coder is not dead
        )
        check_complete(circuit)


def test_requests_run_between_and_nothing_stays(lm_of, monkeypatch):
    """Outputs beside a circuit equal those alone; its memory goes at its end, also if it fails."""
    lm = lm_of("llama")
    sampling, prompts = SamplingParams(max_tokens=12, temperature=0), [ids(i, 5 + i) for i in range(4)]
    alone = [out.token_ids for out in lm.generate(prompts, sampling)]
    before = set(lm.runner.kept)
    coder = [transcoder(lm, layer) for layer in range(3)]
    handles = [lm.submit(prompt, sampling) for prompt in prompts]
    first = lm.circuit(ids(8, 9), coder, batch=2)
    assert [handle.result().token_ids for handle in handles] == alone
    torch.testing.assert_close(lm.circuit(ids(8, 9), coder, batch=64).weights, first.weights, **CLOSE)

    def fail(done: int, count: int) -> None:
        raise KeyboardInterrupt

    plan = build.planned(
        lm, ids(8, 9), coder, None, max_features=9, max_logits=3, logit_mass=0.9, node_threshold=0.8, edge_threshold=0.9, batch=2,
        skip=1, offload=False,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        build.build(plan, False, fail)
    lm.generate(prompts[0], sampling)
    assert set(lm.runner.kept) == before


def test_what_is_refused_by_name(lm_of):
    lm, gpt2 = lm_of("llama"), lm_of("gpt2")
    width = lm.model_spec.hidden_size
    coder, prompt = transcoder(lm, 1), ids(1, 5)
    normed = random_sae(width, "resid_post.1", normalization="layer_norm")
    for error, text, arguments in [
        (ValueError, "needs transcoders", (prompt, [])),
        (ValueError, "neither an SAE nor a name", (prompt, [3])),
        (ValueError, "no SAE 'sea'", (prompt, "sea")),
        (ValueError, "takes one SAE", (prompt, [coder, coder])),
        (ValueError, "not linear", (prompt, normed)),
        (ValueError, "another model", (prompt, random_sae(9, "mlp_out.1"))),
        (ValueError, "read mlp_in.N", (prompt, random_sae(width, "attn_out.1"))),
        (ValueError, "not before", (prompt, transcoder(lm, 1, site_out="mlp_out.0"))),
        (PromptError, "leaves no position", (prompt[:1], coder)),
        (PromptError, "tokens; this model takes", (ids(1, 127) * 9, coder)),
        (PromptError, "names a token twice", (prompt, coder, (3, 3))),
        (PromptError, "names a token twice", (prompt, coder, [3, 3])),
        (PromptError, "is not a token", (prompt, coder, VOCAB)),
        (PromptError, "expected a token", (prompt, coder, (1, 2, 3))),
        (PromptError, "expected from 1 to", (prompt, coder, [])),
        (PromptError, "expected from 1 to", (prompt, coder, list(range(300)))),
    ]:
        with pytest.raises(error, match=text):
            lm.circuit(*arguments)
    wrong = {"batch": 0, "max_features": 1.5, "skip": -1, "node_threshold": 2, "logit_mass": "all", "max_logits": True}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            lm.circuit(prompt, coder, **{name: value})
    with pytest.raises(NotImplementedError, match="family gpt2"):
        gpt2.circuit(prompt, random_sae(gpt2.model_spec.hidden_size, "mlp_out.1"))
    with pytest.raises(NotImplementedError, match="by its class"):
        lm_of("llama", impl="transformers").circuit(prompt, coder)
    assert len(lm.generate([prompt], SamplingParams(max_tokens=2))[0].token_ids) == 2

"""Which heads carry an edge, and which nodes make a head attend: exact sums, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_circuits import CLOSE, NATIVE, ids, small_sae, transcoder

from pymllm_interp import Capture, SamplingParams
from pymllm_interp.toolkit import Circuit
from pymllm_interp.toolkit.circuits import build

PROMPT = ids(4, 7)


def attention(lm: Any, layer: int, head: int, query: int) -> torch.Tensor:
    """Weights [keys] as a request captures them."""
    capture = [Capture(f"pattern.{layer}", heads=[head], positions=[query], dtype="float32")]
    (out,) = lm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0), capture=capture)
    return out.activations[f"pattern.{layer}"][0, 0]


@pytest.mark.parametrize("family", NATIVE)
def test_pairs_of_nodes_sum_to_the_score(family, lm_of):
    """At each layer, with some features kept. The scores are those behind the attention weights that requests capture."""
    lm = lm_of(family)
    cap = getattr(lm.hf_config, "attn_logit_softcapping", None)
    coders = [transcoder(lm, layer) for layer in range(lm.num_layers - 1)]  # the last MLP has a Jacobian
    circuit = lm.circuit(PROMPT, coders, target=[(7, 11)], max_features=15)
    for layer in range(lm.num_layers):
        head, scores = (layer + 1) % lm.num_heads, []
        weights = attention(lm, layer, head, 5)
        for key in (5, 4):
            parts = circuit.qk((layer, head, 5, key))
            score = torch.tensor(parts.score)
            torch.testing.assert_close(parts.scaling * (parts.query.sum(0) @ parts.key.sum(0)), score, **CLOSE)
            torch.testing.assert_close(parts.by_query.sum(), score, **CLOSE)
            torch.testing.assert_close(parts.by_key.sum(), score, **CLOSE)
            pairs = parts.pairs(10**6)
            torch.testing.assert_close(torch.tensor(sum(pair.weight for pair in pairs)), score, **CLOSE)
            sizes = [abs(pair.weight) for pair in pairs]
            assert sizes == sorted(sizes, reverse=True) and parts.pairs(3) == pairs[:3]
            assert all(getattr(pair.key, "position", 0) <= key for pair in pairs) and len(pairs) > 20 * layer
            assert parts.pattern == pytest.approx(weights[key].item(), abs=1e-5)
            scores.append(torch.tanh(score / cap) * cap if cap else score)
        torch.testing.assert_close((scores[0] - scores[1]).exp(), weights[5] / weights[4], **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "qwen3"])
def test_heads_sum_to_edges_between_positions(family, lm_of):
    """With a transcoder of each layer, what comes from another position comes by a head."""
    lm = lm_of(family)
    coders = [transcoder(lm, layer) for layer in range(lm.num_layers)]
    circuit = lm.circuit(PROMPT, coders, target=[3, (7, 11)], max_features=40, node_threshold=1.0, edge_threshold=1.0)
    edges = [edge for edge in circuit.edges if edge.source.position < edge.target.position]
    by_kind = {(edge.source.kind, edge.target.kind): edge for edge in reversed(edges)}
    assert len(by_kind) >= 5
    for edge in by_kind.values():
        heads = circuit.heads(edge)
        assert sum(head.weight for head in heads) == pytest.approx(edge.weight, abs=1e-5, rel=1e-4)
        first = max(edge.source.layer + (edge.source.kind == "feature" or edge.source.kind == "error"), 0)
        assert {head.layer for head in heads} <= set(range(first, max(edge.target.layer, 0) + 1))
        assert all(head.key == edge.source.position <= head.query <= edge.target.position for head in heads)
        assert [abs(head.weight) for head in heads] == sorted((abs(head.weight) for head in heads), reverse=True)
        assert circuit.qk(heads[0]).pattern > 0


def test_saes_of_the_stream_cut_what_is_before_them(lm_of):
    """An SAE's features reach the next SAE by the layer between: its head's parts and the stream's sum to the edge."""
    lm = lm_of("llama")
    saes = [small_sae(lm, f"resid_post.{layer}", layer) for layer in range(3)]
    circuit = lm.circuit(PROMPT, saes, target=[(7, 11)], node_threshold=1.0, edge_threshold=1.0)
    edges = [
        edge for edge in circuit.edges if edge.source.position < edge.target.position and edge.source.kind == "feature"
    ]
    edge = next(edge for edge in edges if edge.source.layer == 0)
    heads = circuit.heads(edge)
    assert {head.layer for head in heads} == {1} and edge.target.layer == 1
    assert sum(head.weight for head in heads) == pytest.approx(edge.weight, abs=1e-5, rel=1e-4)


def test_wrong_heads_are_refused_and_nothing_stays(lm_of):
    lm = lm_of("llama")
    lm.generate([PROMPT], SamplingParams(max_tokens=1))  # messages that came before have been taken
    before = set(lm.runner.kept)
    circuit = lm.circuit(PROMPT, transcoder(lm, 1), target=[(7, 11)])
    for place in ((3, 0, 1, 1), (0, 99, 1, 1), (0, 0, 7, 1), (0, 0, 2, 3), (0, 0, 1), (0.5, 0, 1, 1), (0, -1, 1, 1)):
        with pytest.raises(ValueError, match=r"qk: .* is no \(layer, head, query, key\)"):
            circuit.qk(place)
    with pytest.raises(ValueError, match="from a file"):
        Circuit.load(circuit.to_json()).qk((0, 0, 1, 1))
    circuit.qk((2, 0, 6, 3))
    lm.generate([PROMPT], SamplingParams(max_tokens=1))
    assert set(lm.runner.kept) == before


def test_edited_weights_or_transcoders_end_it_by_name(lm_of):
    """Passes with some of the weights before an edit, and some behind it, would be no circuit."""
    lm, coder = lm_of("llama"), transcoder(lm_of("llama"), 1)
    weight, before = lm.runner.get_model().model.norm.weight, set(lm.runner.kept)
    given: dict[str, Any] = {
        "max_logits": 3,
        "logit_mass": 0.9,
        "node_threshold": 0.8,
        "edge_threshold": 0.9,
        "skip": 1,
    }
    plan = build.planned(lm, PROMPT, coder, [(7, 11)], max_features=9, batch=4, offload=False, **given)
    with pytest.raises(RuntimeError, match="the weights of the model were edited since this circuit began"):
        build.build(plan, False, lambda rows, of: weight.add_(0))
    circuit = build.build(plan, False)  # its run is a new one
    place = next(edge for edge in circuit.edges if edge.source.position < edge.target.position)
    assert circuit.heads(place)
    coder.b_enc.sub_(1e4)
    with pytest.raises(RuntimeError, match="a transcoder was edited"):
        circuit.qk((2, 0, 6, 3))
    coder.b_enc.add_(1e4)
    weight.add_(0)
    for call in (lambda: circuit.qk((2, 0, 6, 3)), lambda: circuit.heads(place)):
        with pytest.raises(RuntimeError, match="were edited"):
            call()
    lm.generate([PROMPT], SamplingParams(max_tokens=1))
    assert set(lm.runner.kept) == before

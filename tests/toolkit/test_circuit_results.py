"""Interventions on a circuit's features, its files and its figure."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import golden_circuits as golden
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from test_circuits import CLOSE, ids, small_sae, transcoder, transcoders_of
from torch import Tensor

from pymllm_interp import SamplingParams, Steer
from pymllm_interp.interventions import SetFeature
from pymllm_interp.toolkit import Circuit
from pymllm_interp.toolkit.circuits import memory, pruning
from pymllm_interp.toolkit.circuits.files import EMBEDDING, ERROR, FEATURE, LOGIT
from pymllm_interp.toolkit.circuits.interventions import CircuitEffects


def made(lm: Any, **fields: Any) -> Circuit:
    coders = [transcoder(lm, layer) for layer in range(lm.model_spec.num_hidden_layers)]
    return lm.circuit(ids(4, 7), coders, target=[3, (7, 11)], max_features=25, **fields)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_measured_effects_are_those_of_set_feature(family, lm_of):
    lm = lm_of(family)
    circuit = made(lm)
    nodes = [circuit.node(number) for number in (0, 7, 15)]
    runs = [{nodes[0]: 0.0}, {nodes[1].key: 2.0, nodes[2]: -1.0}]
    found = circuit.intervene(runs)
    values = []
    for run in [{}, *runs]:
        ops = []
        for node, value in run.items():
            layer, position, feature = getattr(node, "key", node)
            ops.append(SetFeature(circuit.saes[layer], {feature: value}, positions=[position]))
        out = lm.generate(
            [ids(4, 7)], SamplingParams(max_tokens=1, temperature=0), interventions=ops, capture=["logits"]
        )[0]
        logits = out.activations["logits"][-1].float()
        logits = torch.atanh(logits / 12) * 12 if family == "gemma2" else logits
        values.append(torch.stack((logits[3] - logits.mean(), logits[7] - logits[11])))
    torch.testing.assert_close(found.measured, torch.stack(values)[1:] - values[0], **CLOSE)
    assert found.predicted.shape == (2, 2) and torch.isfinite(found.predicted).all()


@pytest.mark.parametrize("kind", ["cross", "skip"])
def test_effects_of_cross_layer_and_skip_transcoders_are_steers(kind, lm_of):
    """A feature's change adds its decoder rows to the MLPs that it writes. Predictions stand beside."""
    lm = lm_of("llama")
    circuit = lm.circuit(golden.PROMPT, transcoders_of(kind, lm), target=[(7, 11)], max_features=None)
    chosen = [node for node in map(circuit.node, range(len(circuit.features))) if node.layer < 2][::5][:4]
    found = circuit.intervene([{node: node.value + 0.5} for node in chosen])
    runs: list[Any] = [[]]
    for node in chosen:
        rows = circuit.saes[node.layer].W_dec[node.feature].split(lm.hidden_size)
        runs.append(
            [Steer(f"mlp_out.{node.layer + i}", 0.5 * row, positions=[node.position]) for i, row in enumerate(rows)]
        )
    assert {len(run) for run in runs[1:]} <= ({2, 3} if kind == "cross" else {1}) and len(runs) > 3
    outs = lm.generate(
        [golden.PROMPT] * len(runs), SamplingParams(max_tokens=1, temperature=0), interventions=runs, capture=["logits"]
    )
    gaps = torch.stack([out.activations["logits"][-1].float() for out in outs])
    gaps = gaps[:, 7] - gaps[:, 11]
    torch.testing.assert_close(found.measured[:, 0], gaps[1:] - gaps[0], **CLOSE)
    assert found.measured.abs().max() > 1e-3 and found.predicted.shape == found.measured.shape
    assert math.isfinite(found.faithfulness)


def test_predicted_effects_are_exact_where_the_model_is_linear(lm_of):
    """A feature of the last layer at the last position reaches the logits by its own edge only."""
    lm = lm_of("llama")
    circuit = lm.circuit(ids(4, 7), transcoder(lm, 2, b_enc=torch.zeros(37)), target=[(7, 11)])
    ends = [node for node in map(circuit.node, range(len(circuit.features))) if node.position == 6]
    assert len(ends) > 3
    found = circuit.intervene([{node: node.value + 1e-3} for node in ends])
    edges = torch.stack([circuit.weights[-1, circuit.number_of(node)] / node.value for node in ends])
    torch.testing.assert_close(found.predicted[:, 0], edges * 1e-3, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(found.measured, found.predicted, atol=2e-4, rtol=0.2)


def test_predicted_effects_take_all_paths(lm_of):
    """Equal to the sum over paths of the matrix of unit effects, in which features that are set have no inputs."""
    lm = lm_of("llama")
    circuit = made(lm)
    first, second = circuit.features[0].tolist(), circuit.features[9].tolist()
    found = circuit.intervene({tuple(first): 3.0, tuple(second): 0.5}).predicted[0]
    count = len(circuit.features)
    units = circuit.weights[:, :count] / circuit.activations
    change = torch.zeros(count)
    change[0], change[9] = 3.0 - circuit.activations[0], 0.5 - circuit.activations[9]
    inner = units[:count].clone()
    inner[[0, 9]] = 0
    torch.testing.assert_close(found, units[count:] @ torch.linalg.solve(torch.eye(count) - inner, change), **CLOSE)


def test_graphs_are_circuit_tracers_files(lm_of, tmp_path):
    lm = lm_of("llama")
    circuit = lm.circuit(golden.PROMPT, transcoders_of("mlp", lm), max_features=None)
    path = tmp_path / "one.json"
    circuit.save(path, scan="tiny")
    found, wanted = json.loads(path.read_text()), load_file(golden_path("llama"))
    assert found["metadata"]["slug"] == "one" and found["metadata"]["prompt_tokens"] == circuit.tokens
    names = {node["node_id"] for node in found["nodes"]}
    adjacency, edges = wanted["mlp.whole.adjacency"], wanted["mlp.whole.edges"]
    assert len(names) == len(found["nodes"]) == int(wanted["mlp.whole.nodes"].sum()) and len(found["links"]) == int(
        edges.sum()
    )
    weights = sorted(link["weight"] for link in found["links"])
    torch.testing.assert_close(torch.tensor(weights), adjacency[edges].sort().values, **CLOSE)
    assert all(link["source"] in names and link["target"] in names for link in found["links"])
    again = Circuit.load(path)
    assert again.to_json("one", "tiny")["links"] == found["links"]
    assert {node["node_id"] for node in again.to_json()["nodes"]} == names
    assert [node[:4] for node in again.nodes if node.kind == "feature"] == [
        node[:4] for node in circuit.nodes if node.kind == "feature"
    ]
    with pytest.raises(ValueError, match="from a file"):
        again.intervene({again.nodes[0]: 1.0})


@pytest.mark.parametrize("form", ["circuit-tracer", "neuronpedia"])
def test_circuit_tracers_own_files_are_read(form, lm_of, tmp_path):
    """Written by its `create_graph_files` (golden_circuits.py), and with what Neuronpedia adds: as the circuit made here."""
    lm, source = lm_of("llama"), json.loads((golden_path("llama").with_suffix(".json")).read_text())
    if form == "neuronpedia":
        source["metadata"] |= {
            "info": {"creator_name": "x"}, "generation_settings": {"max_n_logits": 10},
            "feature_details": {"neuronpedia_source_set": "y"},
            "pruning_settings": {"node_threshold": 0.99, "edge_threshold": 0.999},
        }  # fmt: skip
        first = source["nodes"][0]["node_id"]
        source["qParams"] |= {"pinnedIds": [first], "supernodes": [["one", first]], "clickedId": first}
        for node in source["nodes"]:
            node |= {"nodeId": node["node_id"], "isTargetLogit": node.pop("is_target_logit"), "remoteClerp": "a label"}
            del node["run_idx"], node["reverse_ctx_idx"]
            if node["activation"] is None:
                del node["activation"]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(source))
    found, coders = Circuit.load(path), transcoders_of("mlp", lm)
    coders[0].b_enc[: lm.num_layers] = -1e4
    wanted = lm.circuit(golden.PROMPT, coders, max_features=None, node_threshold=0.99, edge_threshold=0.999)

    def edges_of(circuit: Circuit) -> dict[Any, float]:
        token = [target.token for target in circuit.targets]
        return {
            tuple(
                (*end[:3], token[end.feature] if end.kind == "logit" else end.feature) for end in edge[:2]
            ): edge.weight
            for edge in circuit.edges
        }

    ours, theirs = edges_of(wanted), edges_of(found)
    assert len(ours) == len(wanted.edges) == len(theirs) and ours == pytest.approx(theirs, abs=1e-4)
    values = {node.key: node.value for node in wanted.nodes if node.kind == "feature"}
    assert values == pytest.approx({n.key: n.value for n in found.nodes if n.kind == "feature"}, abs=1e-4) and values
    shares = [target.weight for target in found.targets]
    assert shares == pytest.approx([target.weight for target in wanted.targets], abs=1e-4)
    again = json.loads(json.dumps(found.to_json()))
    assert len(again["links"]) == len(source["links"]) and edges_of(Circuit.load(again)) == theirs
    error = next(node for node in source["nodes"] if node["feature_type"] == ERROR)
    feature = next(node for node in source["nodes"] if node["feature_type"] == FEATURE)
    feature["node_id"] = error["node_id"]
    with pytest.raises(ValueError, match=f"2 nodes have the name {error['node_id']}"):
        Circuit.load(source)


def golden_path(family: str) -> Any:
    from helpers_paths import GOLDEN

    return GOLDEN / "circuits" / f"{family}.safetensors"


def test_files_of_strangers_are_refused(lm_of):
    whole = made(lm_of("llama")).to_json()

    def changed(**fields: Any) -> dict[str, Any]:
        return {**json.loads(json.dumps(whole)), **fields}

    nodes = json.loads(json.dumps(whole["nodes"]))
    logits = [node for node in nodes if node["feature_type"] == "logit"]
    for node in logits:
        node["layer"] = str(10**9)
    for source in (
        [], {}, changed(nodes=[]), changed(nodes=nodes), changed(links=[{"source": "a", "target": "b", "weight": 1}]),
        changed(nodes=[{"feature_type": "moon"}]), changed(metadata={}), changed(links=[{"weight": "x"}]), changed(nodes=3),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="graph of"):
            Circuit.load(source)


def test_wrong_places_links_and_numbers_of_strangers_are_refused(lm_of, tmp_path):
    lm = lm_of("llama")
    coders = [transcoder(lm, layer) for layer in range(3)]
    whole = lm.circuit(ids(4, 7), coders, max_features=None, node_threshold=1.0, edge_threshold=1.0).to_json()
    of = {kind: [n for n in whole["nodes"] if n["feature_type"] == kind] for kind in (FEATURE, EMBEDDING, LOGIT)}
    low, high = (pick(of[FEATURE], key=lambda node: int(node["layer"])) for pick in (min, max))
    assert low["layer"] != high["layer"]

    def linked(source: Any, target: Any, weight: Any = 1.0) -> dict[str, Any]:
        return {**whole, "links": [{"source": source["node_id"], "target": target["node_id"], "weight": weight}]}

    def placed(node: Any, **fields: Any) -> dict[str, Any]:
        return {**whole, "links": [], "nodes": [{**n, **fields} if n is node else n for n in whole["nodes"]]}

    embedding, logit = of[EMBEDDING][0], of[LOGIT][0]
    assert Circuit.load(linked(low, high)).edges[0].weight == 1
    for source in (
        linked(low, embedding), linked(logit, high), linked(high, low), linked(low, low), linked(low, high, float("nan")),
        linked(low, high, 1e300), linked(low, high, 10**400), placed(low, layer="9"), placed(low, ctx_idx=7),
        placed(low, ctx_idx=-1), placed(low, activation=float("inf")), placed(logit, token_prob=float("nan")),
        placed(low, influence=float("nan")), placed(logit, layer="1000"), {**whole, "metadata": {"prompt_tokens": []}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="graph of"):
            Circuit.load(source)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="not JSON"):
        Circuit.load(deep)


def dense_graph(weights: Tensor, row_nodes: Tensor, of_nodes: Tensor, features: int, always: int, shares: Any) -> Any:
    """Pruning as the paper and circuit-tracer have it, by whole matrices [nodes, nodes] in float64."""
    whole = torch.zeros(weights.shape[1], weights.shape[1], dtype=torch.float64)
    whole[row_nodes] = weights.double().abs()

    def influence_of(matrix: Tensor) -> Tensor:
        shared = matrix / matrix.sum(1, keepdim=True).clamp(min=1e-10)
        found, paths = torch.zeros(len(matrix), dtype=torch.float64), of_nodes.double()
        while paths.any():
            paths = paths @ shared
            found += paths
        return found

    def least(scores: Tensor, share: float) -> Tensor:
        ordered = scores.flatten().sort(descending=True).values
        reached = ordered.cumsum(0) / ordered.sum()
        return ordered[min(int(torch.searchsorted(reached, share)), len(ordered) - 1)]

    found = influence_of(whole)
    nodes = found >= least(found, shares[0])
    nodes[always:] = True
    whole[~nodes] = 0
    whole[:, ~nodes] = 0
    scores = whole / whole.sum(1, keepdim=True).clamp(min=1e-10) * (influence_of(whole) + of_nodes)[:, None]
    edges = scores >= least(scores[scores > 0], shares[1])
    while True:
        before = nodes.clone()
        nodes[:always] &= edges.any(0)[:always]
        nodes[:features] &= edges[:features].any(1)
        edges &= nodes[:, None] & nodes
        if torch.equal(before, nodes):
            return found, nodes, edges[row_nodes]


FEATURES, ERRORS, TARGETS = 30, 21, 3


def random_graph(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, nodes and levels of rows, and weights of targets: some without effects, magnitudes over many orders."""
    generator, nodes = torch.Generator().manual_seed(seed), FEATURES + ERRORS + TARGETS
    levels = torch.cat((torch.randint(6, (FEATURES,), generator=generator).sort().values, torch.full((TARGETS,), 6)))
    row_nodes = torch.cat((torch.arange(FEATURES), torch.arange(nodes - TARGETS, nodes)))
    weights = torch.randn(len(row_nodes), nodes, generator=generator)
    weights *= 10 ** torch.randint(-6, 3, weights.shape, generator=generator)
    weights[torch.rand(weights.shape, generator=generator) < 0.3] = 0
    weights[:, :FEATURES] *= levels[:FEATURES] < levels[:, None]
    weights[:, nodes - TARGETS :] = 0
    weights[7] = 0
    of_nodes = torch.zeros(nodes)
    of_nodes[-TARGETS:] = torch.tensor([0.5, 0.3, 0.1])
    return weights, row_nodes, levels, of_nodes


@pytest.mark.parametrize("cells", [1, 100, 1 << 20])
def test_pruning_by_parts_is_that_of_whole_matrices(cells, monkeypatch):
    monkeypatch.setattr(pruning, "CELLS", cells)
    sizes = FEATURES, FEATURES + ERRORS
    for seed in range(4):
        weights, row_nodes, levels, of_nodes = random_graph(seed)
        order = torch.randperm(len(row_nodes), generator=torch.Generator().manual_seed(seed))  # rows come in any order
        given = weights[order], row_nodes[order], levels[order], of_nodes
        for shares in ((0.8, 0.98), (0.3, 0.5), (0.999, 0.999), (0.0, 0.0)):
            found = pruning.prune(*given, *sizes, *shares)
            influence, kept, edges = dense_graph(weights, row_nodes, of_nodes, *sizes, shares)
            assert torch.equal(found.nodes, kept) and torch.equal(found.edges, edges[order])
            torch.testing.assert_close(pruning.influence(*given).double(), influence, **CLOSE)


def test_cycles_nan_and_graphs_without_effects():
    weights, *others = random_graph(0)
    none = pruning.prune(torch.zeros_like(weights), *others, FEATURES, FEATURES + ERRORS, 0.8, 0.98)
    assert not none.edges.any() and none.nodes.tolist() == [False] * (FEATURES + ERRORS) + [True] * TARGETS
    assert none.scores.isfinite().all()
    infinite = weights.clone()
    infinite[3, FEATURES + 2] = torch.inf  # of an error, which has no row
    weights[0, 20] = 1.0  # to its own level, or from one above it
    for wrong in (weights, torch.full_like(weights, torch.nan), infinite):
        with pytest.raises(ValueError, match="a NaN, or the graph has a cycle"):
            pruning.influence(wrong, *others)


def test_shares_of_a_million_equal_scores():
    """Three quarters are of the large ones; sums in float32 would have 0.748."""
    parts = [torch.full((1 << 10, 1 << 10), size) for size in (0.3, 0.1)]
    for share, wanted in ((0.749, 0.3), (0.751, 0.1)):
        assert pruning.threshold_of(lambda: parts, share) == pytest.approx(wanted, abs=1e-7)


def test_effects_of_edited_weights_are_refused(lm_of):
    lm = lm_of("llama")
    circuit = made(lm)
    lm.runner.get_model().model.norm.weight.add_(0)
    with pytest.raises(RuntimeError, match=r"were edited since lm\.circuit began"):
        circuit.intervene({circuit.node(0): 0.0})


def test_effects_without_a_change_have_a_defined_faithfulness():
    zero, one = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
    assert CircuitEffects(zero, zero).faithfulness == 1 and CircuitEffects(one, zero).faithfulness == -math.inf
    assert CircuitEffects(zero, one).faithfulness == 0 and CircuitEffects(one, one).faithfulness == 1


def test_tokens_may_look_like_markup(lm_of):
    """As Llama's [/INST] does."""
    circuit = made(lm_of("llama"))
    circuit.tokens = ["[/INST]"] * len(circuit.tokens)
    shown = io.StringIO()
    Console(file=shown, width=200).print(circuit)
    assert "'[/INST]'" in shown.getvalue()


def test_memory_of_the_host_is_compared_before_rows_are_made(lm_of, monkeypatch):
    lm = lm_of("llama")
    before = set(lm.runner.kept)
    circuit = lm.circuit(ids(4, 7), transcoder(lm, 1), max_features=None)
    rows = circuit.weights.numel() * 4
    monkeypatch.setattr(memory.os, "sysconf", lambda name: rows + rows // 2 if name == "SC_PHYS_PAGES" else 1)
    monkeypatch.setattr(memory.CircuitMemory, "device", lambda found, batch: 0)
    with pytest.raises(ValueError, match="host memory"):  # they are copied once
        lm.circuit(ids(4, 7), transcoder(lm, 1), max_features=None)
    monkeypatch.undo()
    lm.generate([ids(4, 7)], SamplingParams(max_tokens=1))
    assert set(lm.runner.kept) == before


def test_wrong_interventions_are_refused(lm_of):
    circuit = made(lm_of("llama"))
    key = circuit.node(0).key
    for changes in ([], [{}], 3.5, {key: float("nan")}, {key: "high"}, [3]):
        with pytest.raises((ValueError, TypeError)):
            circuit.intervene(changes)
    with pytest.raises(KeyError, match="no feature of this circuit"):
        circuit.intervene({(99, 0, 0): 1.0})
    error = next(node for node in map(circuit.node, range(circuit.first_error, circuit.first_error + 1)))
    with pytest.raises(KeyError, match="no feature of this circuit"):
        circuit.intervene({error: 1.0})


def test_the_figure_shows_nodes_and_edges(lm_of):
    pytest.importorskip("plotly")
    circuit = made(lm_of("llama"))
    figure = circuit.plot(edges=40).figure
    shown = {trace.name: trace for trace in figure.data}
    for kind in ("feature", "error", "embedding", "logit"):
        assert len(shown[kind].x) == sum(node.kind == kind for node in circuit.nodes)
    lines = sum(len(shown[name].x) for name in ("positive", "negative")) // 3
    assert lines == min(40, len(circuit.edges))
    assert str(circuit.layers) in circuit.plot().html() and "Circuit(" in repr(circuit.plot())


def test_saes_answer_interventions_in_their_own_place(lm_of):
    lm = lm_of("llama")
    circuit = lm.circuit(
        ids(4, 7), [small_sae(lm, f"resid_post.{layer}", layer) for layer in range(3)], target=[(7, 11)]
    )
    node = next(node for node in map(circuit.node, range(len(circuit.features) - 1, -1, -1)) if node.position == 6)
    found = circuit.intervene({node: node.value + 1e-3})
    torch.testing.assert_close(found.measured, found.predicted, atol=2e-4, rtol=0.3)

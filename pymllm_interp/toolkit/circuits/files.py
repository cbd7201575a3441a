"""Circuits as circuit-tracer's JSON, which Neuronpedia's graph viewer reads, and as a server sends them.

A file has the pruned graph: its nodes by name, and their links. Read again, it is a circuit without a model. A server sends the
whole circuit by parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...client.calls.requests import CallProgress
from ...utils.files.checked_files import read_json
from ...wire.values import tensors_of
from ..read_prompts import ReadPrompt
from .pruning import PrunedGraph
from .targets import CircuitTarget, checked_targets

PATH = "/v1/interp/circuit"
"""Path of a server's route."""

MAX_BYTES = 1 << 28
"""Bytes of a file that is read, at most."""
MAX_CELLS = 1 << 28
"""Entries of the weights of a circuit that is read, at most."""
MAX_LAYERS = 512
"""Layers of a circuit that is read, at most. No path has more edges."""
FEATURE, ERROR, EMBEDDING, LOGIT = "cross layer transcoder", "mlp reconstruction error", "embedding", "logit"
"""Kinds of nodes, as circuit-tracer names them."""


def graph_json(circuit: Any, slug: str, scan: str) -> dict[str, Any]:
    """The pruned graph as circuit-tracer writes it.

    Args:
        slug: name of the graph.
        scan: name of the transcoders, by which the viewer finds descriptions of features.
    """
    shares = circuit.graph.scores
    numbers = circuit.graph.nodes.nonzero()[:, 0].tolist()
    nodes = {number: _node_json(circuit, number, circuit.node(number), shares[number].item()) for number in numbers}
    rows, sources = circuit.graph.edges.nonzero(as_tuple=True)
    pairs = zip(
        sources.tolist(), circuit.row_nodes[rows].tolist(), circuit.weights[rows, sources].tolist(), strict=True
    )
    links = [
        {"source": nodes[one]["node_id"], "target": nodes[other]["node_id"], "weight": weight}
        for one, other, weight in pairs
    ]
    prompt = "".join(circuit.tokens)
    metadata = {
        "slug": slug, "scan": scan, "transcoder_list": [], "prompt_tokens": circuit.tokens, "prompt": prompt,
        "node_threshold": circuit.node_threshold, "schema_version": 1,
    }  # fmt: skip
    view = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    return {"metadata": metadata, "qParams": view, "nodes": list(nodes.values()), "links": links}


def _node_json(circuit: Any, number: int, node: Any, share: float) -> dict[str, Any]:
    position = node.position
    found: dict[str, Any] = {
        "ctx_idx": position, "token_prob": 0.0, "is_target_logit": False, "run_idx": 0, "reverse_ctx_idx": 0, "clerp": "",
        "influence": share, "activation": None,
    }  # fmt: skip
    if node.kind == "feature":
        paired = (node.layer + node.feature) * (node.layer + node.feature + 1) // 2 + node.feature
        return found | {
            "node_id": f"{node.layer}_{node.feature}_{position}", "feature": paired, "layer": str(node.layer),
            "feature_type": FEATURE, "jsNodeId": f"{node.layer}_{node.feature}-0", "activation": node.value,
        }  # fmt: skip
    if node.kind == "error":
        return found | {
            "node_id": f"{node.layer}_-1_{position}", "feature": -1, "layer": str(node.layer), "feature_type": ERROR,
            "jsNodeId": f"{node.layer}_-1-{position}",
        }  # fmt: skip
    if node.kind == "embedding":
        return found | {
            "node_id": f"E_{node.feature}_{position}", "feature": position, "layer": "E", "feature_type": EMBEDDING,
            "jsNodeId": f"E_{node.feature}-{position}",
        }  # fmt: skip
    target = circuit.targets[node.feature]
    # A difference has no token: numbers beyond the vocabulary stand for it, as in circuit-tracer.
    token = target.token if target.other is None else VIRTUAL + node.feature
    return found | {
        "node_id": f"{node.layer + 1}_{token}_{position}", "feature": token, "layer": str(node.layer + 1), "feature_type": LOGIT,
        "token_prob": target.weight, "is_target_logit": node.feature == 0, "jsNodeId": f"L_{token}-{position}",
        "clerp": f'Output "{target.label}" (p={target.weight:.3f})', "influence": None,
    }  # fmt: skip


PART = 1 << 22
"""Bytes of a part of a circuit's weights."""


def parts_of(circuit: Any) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """A whole circuit as JSON and tensors: everything else, then its weights, some rows at a time. See `circuit_of`."""
    fields = {name: getattr(circuit, name) for name in ("token_ids", "tokens", "layers", "active", "softcap")}
    fields |= {"node_threshold": circuit.node_threshold, "edge_threshold": circuit.edge_threshold}
    fields |= {"targets": [list(target) for target in circuit.targets], "saes": list(circuit.saes.items())}
    tensors = {name: getattr(circuit, name).contiguous() for name in TENSORS}
    yield {"type": "circuit", "fields": fields, "shape": list(circuit.weights.shape)}, tensors
    for rows in circuit.weights.split(max(1, PART // (4 * circuit.weights.shape[1]))):
        yield {"type": "weights"}, {"weights": rows.contiguous()}


TENSORS = ("features", "activations", "target_values", "bias", "rest")
"""Tensors of a circuit beside its weights."""


def circuit_of(kind: Any, lm: Any, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """A circuit from the first of its parts. The following ones fill its weights.

    Args:
        kind: the class `Circuit`.
        lm: the model of the server that sent it.
    """
    fields = dict(header["fields"])
    saes, targets = dict(fields.pop("saes")), [CircuitTarget(*each) for each in fields.pop("targets")]
    own = {name: tensors[name] for name in TENSORS}
    return kind(**fields, **own, targets=targets, weights=torch.zeros(header["shape"]), source=(lm, saes))


def remote_circuit(
    kind: Any, lm: Any, prompt: Any, transcoders: Any, target: Any, progress: bool | None, *, offload: bool, **options: Any
) -> Any:  # fmt: skip
    """A circuit that a server makes. Leaving the call early ends it there.

    Args:
        kind: the class `Circuit`.
        options: numbers, as `LM.circuit` takes them.

    Raises:
        PromptError, ValueError: the arguments are invalid, or beyond the server's limits.
        PermissionError: the key may not ask for circuits.
    """
    names = list(transcoders) if isinstance(transcoders, list | tuple) else [transcoders]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            "transcoders of a server's model are names: those of serve --sae NAME=PATH, which lm.saes lists"
        )
    if offload:
        raise ValueError("offload=True: a server's transcoders are on its device")
    body = {
        "prompt": ReadPrompt.ids_of(lm, prompt),
        "transcoders": names,
        "form": "tensors",
        **options,
    }
    pairs = checked_targets(target, lm)
    body["target"] = None if pairs is None else [one if other is None else [one, other] for one, other in pairs]
    frames, made, filled, done = lm.backend.engine.frames(PATH, json=body), None, 0, 0
    with ExitStack() as stack:
        stack.callback(frames.close)
        shown: CallProgress | None = None
        for header, content in frames:
            if header["type"] == "progress":
                shown = shown or stack.enter_context(CallProgress(progress, header["of"], "circuit rows"))
                for _ in range(header["rows"] - done):
                    shown.advance()
                done = header["rows"]
            elif header["type"] == "circuit":
                made = circuit_of(kind, lm, header, tensors_of(content))
            elif header["type"] == "weights" and made is not None:
                rows = tensors_of(content)["weights"]
                made.weights[filled : filled + len(rows)] = rows
                filled += len(rows)
    if made is None or filled != len(made.weights):
        raise ConnectionError("the server ended its answer before the whole circuit had come")
    return made


VIRTUAL = 1 << 24
"""Token number of the first target that is a difference."""


def read_graph(kind: Any, source: Any) -> Any:
    """A circuit from circuit-tracer's JSON: a path, or the object.

    Args:
        kind: the class `Circuit`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a graph, or too large.
    """
    if isinstance(source, str | Path):
        source = read_json(Path(source), MAX_BYTES)
    try:
        return _graph_of(kind, source)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ValueError(f"not a graph of circuit-tracer: {type(error).__name__}: {error}") from None


def _graph_of(kind: Any, source: dict[str, Any]) -> Any:
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (FEATURE, ERROR, EMBEDDING, LOGIT)}
    for node in source["nodes"]:
        by_kind[node["feature_type"]].append(node)
    (name, count) = Counter(node["node_id"] for node in source["nodes"]).most_common(1)[0]
    if count > 1:  # as circuit-tracer names an error and a feature of layer 0 alike
        raise KeyError(f"{count} nodes have the name {name}, and links do not tell which")
    tokens = [str(token) for token in source["metadata"]["prompt_tokens"]]
    layers = int(by_kind[LOGIT][0]["layer"]) - 1
    keys = sorted(
        (
            _within(int(n["layer"]), layers),
            _within(int(n["ctx_idx"]), len(tokens)),
            int(n["node_id"].split("_")[1]),
            n["node_id"],
        )
        for n in by_kind[FEATURE]
    )
    rows, count = len(keys) + len(by_kind[LOGIT]), len(keys) + (layers + 1) * len(tokens) + len(by_kind[LOGIT])
    if not tokens or not 1 <= layers <= MAX_LAYERS or rows * count > MAX_CELLS:
        raise ValueError(
            f"a graph of {layers} layers, {len(tokens)} tokens and {rows} x {count} effects; at most {MAX_LAYERS} layers and "
            f"{MAX_CELLS} effects are read"
        )
    numbers = {name: number for number, (*_, name) in enumerate(keys)}
    first_error = len(keys)
    token_ids = [0] * len(tokens)
    for node in by_kind[ERROR]:
        numbers[node["node_id"]] = (
            first_error + _within(int(node["layer"]), layers) * len(tokens) + _within(int(node["ctx_idx"]), len(tokens))
        )
    first_embedding = first_error + layers * len(tokens)
    for node in by_kind[EMBEDDING]:
        position = _within(int(node["ctx_idx"]), len(tokens))
        numbers[node["node_id"]] = first_embedding + position
        token_ids[position] = int(node["node_id"].split("_")[1])
    targets = list[CircuitTarget]()
    for node in by_kind[LOGIT]:
        numbers[node["node_id"]] = first_embedding + len(tokens) + len(targets)
        label = str(node.get("clerp") or "").partition('"')[2].rpartition('"')[0]
        targets.append(CircuitTarget(int(node["feature"]), None, _finite(node["token_prob"]), label))
    weights = torch.zeros(rows, count)
    edges = torch.zeros(rows, count, dtype=torch.bool)
    nodes = torch.zeros(count, dtype=torch.bool)
    nodes[list(numbers.values())] = True
    for link in source["links"]:
        one, other = numbers[link["source"]], numbers[link["target"]]
        if one >= count - len(targets) or first_error <= other < count - len(targets):
            raise IndexError(
                f"{link['source']} -> {link['target']}: features and logits have inputs, and logits have no effects"
            )
        if max(one, other) < first_error and keys[one][0] >= keys[other][0]:  # a cycle may be made of such links
            raise IndexError(f"{link['source']} -> {link['target']}: features read those of lower layers")
        row = other if other < first_error else len(keys) + other - (count - len(targets))
        weights[row, one], edges[row, one] = _finite(link["weight"]), True
    activations = {node["node_id"]: node.get("activation") for node in by_kind[FEATURE]}
    made = kind(
        token_ids=token_ids, tokens=tokens, layers=layers, features=torch.tensor([key[:3] for key in keys]).view(-1, 3).long(),
        activations=torch.tensor([_finite(activations[key[3]] or 0.0) for key in keys]), active=len(keys), targets=targets,
        target_values=torch.zeros(len(targets)), weights=weights, bias=torch.zeros(rows), rest=torch.zeros(rows),
        node_threshold=1.0, edge_threshold=1.0,
    )  # fmt: skip
    made.graph = PrunedGraph(nodes, edges, _shares(source["nodes"], numbers, count))
    return made


def _finite(value: Any) -> float:
    if not abs(number := float(value)) <= torch.finfo(torch.float32).max:
        raise OverflowError(f"{number} is no finite number")
    return number


def _within(number: int, count: int) -> int:
    if not 0 <= number < count:
        raise IndexError(f"{number} is not below {count}")
    return number


def _shares(nodes: list[dict[str, Any]], numbers: dict[str, int], count: int) -> Tensor:
    shares = torch.ones(count)
    for node in nodes:
        if node.get("influence") is not None:
            shares[numbers[node["node_id"]]] = _finite(node["influence"])
    return shares

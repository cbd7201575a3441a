"""`lm.path_patching`: the effect of a sender on the metric through some receivers (Wang et al. 2022, arXiv 2211.00593).

Two requests for each sender, all in batches. The first is the clean prompt with the sender's corrupted output, and all other heads
as in the clean run. The receivers' queries, keys and values are captured. The second is the clean prompt with these in place.
Both are declared `Patch`es, so a server runs them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from ...client.calls.requests import CallProgress
from ...client.remote.remote_backend import RemoteBackend
from ...core.sampling_params import SamplingParams
from ...hooks.captures.spec import Capture
from ...hooks.interventions.specs import Patch
from ...utils.arguments import PromptError, shown
from ..metrics import metric_of
from .graph import INPUT, LOGITS_NODE, EdgeGraph
from .run import EdgePair, pairs_of

ONE = SamplingParams(temperature=0.0, max_tokens=1)
LAST_LOGITS = Capture("logits", positions=[-1])
NODE = re.compile(r"a(?P<layer>\d+)\.(?P<kind>h|kv)(?P<head>\d+)(?:<(?P<input>[qkv])>)?|m(?P<mlp>\d+)|input|logits")
LISTED = 12


class PathNode(NamedTuple):
    """A sender or receiver.

    Attributes:
        site: site of its output, or of a receiver's input; "logits".
        layer: its layer; -1 for the embeddings, and the number of layers for logits.
        head: its head at the site, or None.
    """

    site: str
    layer: int
    head: int | None = None


class PathPatches:
    """The metric with each sender's effect through the receivers: `lm.path_patching` returns it.

    Attributes:
        senders, receivers: names.
        values: [senders] float32, the metric.
        clean, corrupted: metric of the two runs.
    """

    def __init__(
        self,
        senders: Sequence[str],
        receivers: Sequence[str],
        values: Tensor,
        both: tuple[float, float],
        graph: EdgeGraph,
    ) -> None:
        self.senders, self.receivers, self.values = list(senders), list(receivers), values
        (self.clean, self.corrupted), self._graph = both, graph

    @property
    def effects(self) -> Tensor:
        """[senders] float32, changes of the clean run's metric."""
        return self.values - self.clean

    def by_head(self) -> Tensor:
        """[layers, heads] float32, effects of the heads; 0 for those that are no senders."""
        found = torch.zeros(self._graph.layers, self._graph.heads)
        for name, effect in zip(self.senders, self.effects, strict=True):
            if match := re.fullmatch(r"a(\d+)\.h(\d+)", name):
                found[int(match[1]), int(match[2])] = effect
        return found

    def top(self, n: int = LISTED) -> list[tuple[str, float]]:
        """The `n` senders with the largest effects, up or down."""
        order = self.effects.abs().argsort(descending=True)[:n].tolist()
        return [(self.senders[i], self.effects[i].item()) for i in order]

    def __repr__(self) -> str:
        to = ", ".join(self.receivers[:3]) + (", ..." if len(self.receivers) > 3 else "")
        return (
            f"PathPatches({len(self.senders)} senders to {to}, clean {self.clean:.4g}, corrupted {self.corrupted:.4g})"
        )

    def __rich__(self) -> Table:
        table = Table("sender", "effect", title=repr(self), caption="the largest; changes of the metric")
        for name, effect in self.top():
            table.add_row(name, f"{effect:+.4g}")
        return table


def path_patching(
    lm: Any, clean: Any, corrupted: Any, *, receivers: Any, senders: Any, metric: Any, through_mlps: bool, progress: bool | None
) -> PathPatches:  # fmt: skip
    """Patch paths, see `LM.path_patching`."""
    (pair,) = pairs_of(lm, clean, corrupted, metric_of(metric, lm))
    plan = _Plan(lm, pair, receivers, senders, through_mlps)
    return plan.run(progress)


class _Plan:
    """Checked arguments, and the requests.

    Args:
        receivers, senders: names, or one; senders None: all heads before the last receiver.
    """

    def __init__(self, lm: Any, pair: EdgePair, receivers: Any, senders: Any, through_mlps: bool) -> None:
        self._lm, self._pair, self._spec, self._free = lm, pair, lm.model_spec, through_mlps
        self._graph = EdgeGraph.of(lm)
        for kind in ("q", "k", "v", "z", "mlp_out"):
            self._spec.family.check(kind)
        self._positions = list(range(len(pair.token_ids[0])))
        self._models, self._version = set[str](), None
        self.receivers = _names(receivers, "receivers")
        found = {name: self._receiver(name) for name in self.receivers}
        self._to = [node for nodes in found.values() for node in nodes]
        last = max(node.layer for node in self._to)
        if last == self._graph.layers and len(found) > 1:
            raise PromptError("receivers: 'logits' is the end of all paths; give it by itself, or heads and MLPs")
        heads = [
            f"a{layer}.h{head}"
            for layer in range(min(last + 1, self._graph.layers))
            for head in range(self._graph.heads)
        ]
        chosen = (
            [name for name in heads if self._reaches(self._sender(name))]
            if senders is None
            else _names(senders, "senders")
        )
        self.senders = chosen
        self._from = [self._sender(name) for name in chosen]
        for name, node in zip(chosen, self._from, strict=True):
            if not self._reaches(node):
                raise PromptError(f"senders: {name} is before none of the receivers {', '.join(self.receivers)}")
        if not chosen:
            raise PromptError(f"receivers={shown(self.receivers)}: no head is before them")

    # -- names -----------------------------------------------------------------------------------

    def _parts(self, name: str) -> dict[str, Any]:
        match = NODE.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise PromptError(
                f"{shown(name)} is no node: expected such as 'a3.h2', 'a3.h2<q>', 'm3', 'input' or 'logits'"
            )
        found = match.groupdict()
        layer = int(found["layer"] or found["mlp"] or 0)
        heads = self._graph.kv_heads if found["kind"] == "kv" else self._graph.heads
        if layer >= self._graph.layers or int(found["head"] or 0) >= heads:
            raise PromptError(f"{name}: this model has {self._graph.layers} layers of {self._graph.heads} heads")
        return found

    def _sender(self, name: str) -> PathNode:
        parts = self._parts(name)
        if name == INPUT:
            return PathNode("resid_pre.0", -1)
        if parts["mlp"]:
            return PathNode(f"mlp_out.{parts['mlp']}", int(parts["mlp"]))
        if parts["kind"] != "h" or parts["input"]:
            raise PromptError(f"{name} is no sender; senders are such as 'a3.h2', 'm3' and 'input'")
        return PathNode(f"z.{parts['layer']}", int(parts["layer"]), int(parts["head"]))

    def _receiver(self, name: str) -> list[PathNode]:
        parts = self._parts(name)
        if name == INPUT:
            raise PromptError("'input' is no receiver; receivers are such as 'a3.h2<q>', 'a3.h2', 'm3' and 'logits'")
        if name == LOGITS_NODE:
            return [PathNode(LOGITS_NODE, self._graph.layers)]
        if parts["mlp"]:
            return [PathNode(f"mlp_out.{parts['mlp']}", int(parts["mlp"]))]
        layer, head, own = int(parts["layer"]), int(parts["head"]), parts["input"]
        if parts["kind"] == "kv" and own not in ("k", "v"):
            raise PromptError(f"{name}: a K and V head has the inputs <k> and <v>")
        group = self._graph.heads // self._graph.kv_heads
        of_kv = head if parts["kind"] == "kv" else head // group
        return [PathNode(f"{kind}.{layer}", layer, head if kind == "q" else of_kv) for kind in own or "qkv"]

    def _reaches(self, sender: PathNode) -> bool:
        return any(self._before(sender, node) for node in self._to)

    def _before(self, sender: PathNode, receiver: PathNode) -> bool:
        """Whether a sender's output is in a receiver's input."""
        same_layer = receiver.site.startswith("mlp_out") and sender.head is not None and not self._graph.parallel
        return sender.layer < receiver.layer or (sender.layer == receiver.layer and same_layer)

    # -- requests --------------------------------------------------------------------------------

    def run(self, progress: bool | None) -> PathPatches:
        """Run the requests."""
        lm, graph = self._lm, self._graph
        sites = [f"z.{layer}" for layer in range(graph.layers)]
        sites += [] if self._free else [f"mlp_out.{layer}" for layer in range(graph.layers)]
        sites = list(dict.fromkeys([*sites, *(node.site for node in self._from)]))
        captures = [*(Capture(site, positions=self._positions) for site in sites), LAST_LOGITS]
        if not isinstance(lm.backend, RemoteBackend):
            self._version = lm.weights.version
        outs = self._known(lm.generate(list(self._pair.token_ids), ONE, capture=captures, progress=False))
        clean, corrupted = self._pair.metric(torch.cat([out.activations["logits"] for out in outs]).float()).tolist()
        states = [out.activations for out in outs]
        frozen = {site: Patch(site, states[0][site].float(), positions=self._positions) for site in sites}
        values = list[float]()
        with CallProgress(progress, len(self._from), "senders") as bar:
            for part in self._chunks(len(frozen)):
                values += self._part(self._from[part], frozen, states[1])
                for _ in range(len(self._from[part])):
                    bar.advance()
        return PathPatches(self.senders, self.receivers, torch.tensor(values), (clean, corrupted), graph)

    def _chunks(self, shared: int) -> Iterator[slice]:
        """Parts of the senders with vectors that fit the engine's pool, twice over: some widths take two slots."""
        most, tokens = self._lm.backend.facts.settings["max_intervention_vectors"], len(self._positions)
        own = 2 * tokens * max(1, len(self._to))
        step = max(1, min((most - 2 * tokens * shared) // own, self._lm.limits.max_running))
        yield from (slice(first, first + step) for first in range(0, len(self._from), step))

    def _part(self, senders: Sequence[PathNode], frozen: dict[str, Patch], corrupted: Any) -> list[float]:
        """The metric for some senders."""
        final = self._to[0].site == LOGITS_NODE
        jobs = [self._to] if self._free or final else self._groups()
        second = [list[Patch]() for _ in senders]
        for nodes in jobs:
            captures = [Capture(site, positions=self._positions) for site in dict.fromkeys(node.site for node in nodes)]
            read = {node.site for node in nodes}
            first = [self._sent(sender, frozen, corrupted, read) for sender in senders]
            outs = self._generate(first, [LAST_LOGITS] if final else captures)
            if final:
                return self._measured(outs)
            for sender, patches, out in zip(senders, second, outs, strict=True):
                patches += [self._received(node, out.activations) for node in nodes if self._before(sender, node)]
        return self._measured(self._generate(second, [LAST_LOGITS]))

    def _groups(self) -> list[list[PathNode]]:
        """Receivers of each run with frozen MLPs. An MLP that is read is not frozen, so it has its own."""
        heads = [node for node in self._to if node.head is not None]
        mlps = [[node] for node in self._to if node.head is None]
        return [heads, *mlps] if heads else mlps

    def _sent(self, sender: PathNode, frozen: dict[str, Patch], corrupted: Any, read: set[str]) -> list[Patch]:
        """The sender's corrupted output, and all others behind it as in the clean run."""
        value = corrupted[sender.site].float()
        if sender.head is None:
            own = Patch(sender.site, value, positions=self._positions)
        else:
            own = Patch(sender.site, value[:, sender.head], positions=self._positions, heads=[sender.head])
        found = [own]
        for site, patch in frozen.items():
            kind, layer = site.split(".")
            # An MLP is behind the heads of its layer; heads of a layer are beside each other.
            first = sender.layer + (kind == "z" or sender.head is None or self._graph.parallel)
            if (
                kind in ("z", "mlp_out")
                and int(layer) >= first
                and site not in read
                and not (kind == "mlp_out" and self._free)
            ):
                found.append(patch)
        return found

    def _received(self, node: PathNode, states: Any) -> Patch:
        value = states[node.site].float()
        if node.head is None:
            return Patch(node.site, value, positions=self._positions)
        return Patch(node.site, value[:, node.head], positions=self._positions, heads=[node.head])

    def _generate(self, patches: list[list[Patch]], captures: list[Capture]) -> list[Any]:
        prompts = [self._pair.token_ids[0]] * len(patches)
        return self._known(self._lm.generate(prompts, ONE, interventions=patches, capture=captures, progress=False))

    def _known(self, outs: list[Any]) -> list[Any]:
        """Outputs of one model. Raises RuntimeError: the weights were edited since the first ones. Receipts tell, of a server's."""
        if self._version is not None:
            self._lm.weights.check_version(self._version, "lm.path_patching")
        self._models |= {out.receipt.model for out in outs}
        if len(self._models) > 1 or any(out.receipt.weights for out in outs):
            raise RuntimeError("the weights of the model were edited since lm.path_patching began: call it again")
        return outs

    def _measured(self, outs: Sequence[Any]) -> list[float]:
        return self._pair.metric(torch.cat([out.activations["logits"] for out in outs]).float()).tolist()


def _names(given: Any, what: str) -> list[str]:
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not found or len(set(map(str, found))) < len(found):
        raise PromptError(f"{what}={shown(given)}: expected names of nodes, each once")
    return found

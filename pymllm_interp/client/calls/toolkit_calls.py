"""`ToolkitCalls`: the experiments of an `LM` that have their own package, toolkit/, which is imported when one is run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ...engine.engine import Engine
from ...hooks.heads import Heads
from ...hooks.positions import Positions
from ...hooks.traces.syntax.envoy import TracedModel
from ..activation_cache import NamesFilter


class ToolkitCalls(TracedModel):
    """Patch sweeps and attribution.

    Attributes:
        engine: runs them beside requests.
    """

    engine: Engine

    def patch_sweep(
        self,
        base: Any,
        source: Any,
        *,
        site: str = "resid_post",
        metric: Any,
        positions: Positions | None = None,
        heads: Heads | str = None,
        layers: Iterable[int] | None = None,
        how: str = "auto",
        stream: bool = False,
        progress: bool | None = None,
    ) -> Any:
        """Activation patching at every layer and position: the base prompt, each time with one state of the source prompt.

        Each cell is the run of one `Patch`. Native families run all cells as one growing pass (docs/toolkit.md), others as
        requests.

        Args:
            base, source: prompts with equally many tokens.
            site: a kind of site (`resid_pre`, `resid_mid`, `resid_post`, `attn_out`, `mlp_out`, `mlp_act`, `q`, `k`, `v`, `z`), or
                a pattern with layers.
            metric: of the last position's logits: two tokens, the difference of their logits; one token, its log probability; or
                a function of float32 logits [rows, vocab] that returns [rows]. A token is an id, or text.
            positions: of the prompts; None: all. The result has them in ascending order.
            heads: at `q`, `k`, `v` and `z`, patch these heads one by one; "all"; or None, for whole states.
            layers: some layers; None: all.
            how: "wavefront", "requests", or "auto": the wavefront where it serves.
            stream: return after the two unpatched runs. Iterating over the result runs the cells.
            progress: show a bar on standard error; None: on a terminal.

        Returns:
            a `PatchSweep`: `values` [layers, positions], or [layers, positions, heads].

        Raises:
            PromptError, ValueError: prompts of different lengths, or a metric, site, layer, position or head that cannot be served;
                nothing was scheduled then.
            NotImplementedError: a model with edits, or `how` is "wavefront" where it does not serve.
        """
        self._check_outside()
        sweep = import_module("pymllm_interp.toolkit.sweep")  # above this package, which it builds on
        return sweep.patch_sweep(
            self, base, source, site=site, metric=metric, positions=positions, heads=heads, layers=layers, how=how, stream=stream,
            progress=progress,
        )  # fmt: skip

    def attribute(
        self,
        clean: Any,
        corrupted: Any,
        *,
        metric: Any,
        sites: NamesFilter,
        steps: int = 1,
        neurons: bool = False,
    ) -> Any:
        """Attribution patching: an estimate of what patching each site from the clean run adds to the corrupted run's metric.

        One step is ``(clean - corrupted) * gradient`` with the corrupted run's gradients, and one pass serves all sites. More
        steps are integrated gradients: each site has passes of its own, with states between both runs in its place. Their sum is
        what patching the whole site does; the result's `completeness` compares the two.

        Args:
            clean, corrupted: prompts with equally many tokens.
            metric: as `patch_sweep`; a function must be differentiable.
            sites: a site's name or pattern, or several, of all kinds but `logits`.
            steps: gradients to average, at the middle of equal parts of the way.
            neurons: keep the width of each state, in place of sums over positions and heads.

        Returns:
            an `Attribution`: by site, [positions]; at `q`, `k`, `v` and `z` [positions, heads].

        Raises:
            PromptError, ValueError: prompts of different lengths, or a metric, site or number of steps that cannot be served;
                nothing was scheduled then.
            NotImplementedError: a model with edits, or a server's.
        """
        self._check_outside()
        attribution = import_module("pymllm_interp.toolkit.attribution")
        return attribution.attribute(self, clean, corrupted, metric=metric, sites=sites, steps=steps, neurons=neurons)

    def _check_outside(self) -> None:
        self.engine.check_open()
        if getattr(self.engine, "on_engine_thread", False):
            raise RuntimeError("this cannot run inside the block of a trace: the engine would wait for itself")

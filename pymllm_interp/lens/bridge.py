"""`Bridge`: TransformerLens' `RemoteBridge` over an `LM`, whose hooks edit."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import RemoteBridge
from transformer_lens.model_bridge.driver_protocol import to_torch
from transformer_lens.model_bridge.sources._bridge_builder import configure_tokenizer

from ..engine.lm import LM
from .driver import Edit, EngineDriver
from .points import GRADIENTS, Point
from .weights import Weights, adapter_of


class Bridge(Weights, RemoteBridge):
    """TransformerLens' calls and names over an `LM`: `run_with_cache`, `run_with_hooks`, `hooks`, `add_hook`.

    Names, shapes and values are those of ``TransformerBridge.boot_transformers``. `run_with_cache` returns TransformerLens'
    `ActivationCache`. Hooks read and edit, unlike those of other remote bridges: a pass with hooks is a trace. A pass without
    hooks is a fused one, if all names that `names_filter` selects are declared sites, their norms or attention patterns; without a
    filter it is a trace that reads all hook points.

    ``bridge(tokens, interventions=[Steer(...)])`` and the other calls take declared interventions.

    Args:
        lm: a local `LM` of an architecture that TransformerLens has. `close` does not shut it down.

    Attributes:
        lm: the `LM`.

    Raises:
        TypeError: an `LM` of a server.
        ValueError: TransformerLens does not know the architecture.
    """

    def __init__(self, lm: LM) -> None:
        if getattr(lm, "is_remote", False):
            raise TypeError("Bridge(lm) needs a local LM: run it in the server's process, or use lm.run_with_cache")
        adapter = adapter_of(lm)
        tokenizer = lm.tokenizer and configure_tokenizer(deepcopy(lm.tokenizer), adapter.cfg)
        driver = EngineDriver(lm, adapter.cfg, adapter.component_mapping, tokenizer)
        self.lm = lm
        self._caching: set[int] | None = None
        super().__init__(adapter, tokenizer, driver)
        self._hook_registry = {name: Point(name) for name in driver.places}

    # -- passes ----------------------------------------------------------------------------

    def forward(
        self, input: Any = None, *, intervene: Mapping[str, Any] | None = None, capture: Any = None, **kwargs: Any
    ) -> Any:
        """One forward pass; see `RemoteBridge.forward` and `EngineDriver.forward`."""
        canonical = {name: point.name for name, point in self.hook_dict.items()}
        edits = {canonical.get(name, name): what for name, what in (intervene or {}).items()}
        for name, point in self._hook_registry.items():
            if handles := self._editing(point):
                if name in edits:
                    raise ValueError(f"{name} has hooks and an intervention: give one of them")
                edits[name] = _run_hooks(point, handles)
        if capture is None:
            capture = [
                name for name, point in self._hook_registry.items() if len(point.fwd_hooks) > len(self._editing(point))
            ]
        kwargs["capture"] = tuple(dict.fromkeys(canonical.get(name, name) for name in capture))
        if isinstance(input, torch.Tensor) and input.dim() == 1:
            input = input[None]
        return super().forward(input, intervene=edits, **kwargs)

    __call__ = forward

    def run_with_hooks(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """As `TransformerBridge.run_with_hooks`: functions read values, edit them in place, or return others."""
        self._reject_stop_at_layer(kwargs.get("stop_at_layer"))
        self._reject_start_at_layer(kwargs.get("start_at_layer"))
        return super(RemoteBridge, self).run_with_hooks(input, *args, **kwargs)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As `TransformerBridge.run_with_cache`: (logits, TransformerLens' `ActivationCache`), on the CPU."""
        if kwargs.get("incl_bwd"):
            raise NotImplementedError(f"run_with_cache(incl_bwd=True): Bridge has no backward pass; {GRADIENTS}")
        if self._caching is not None:
            raise RuntimeError("run_with_cache cannot be called inside a hook of another")
        self._caching = {id(handle) for point in self._hook_registry.values() for handle in point.fwd_hooks}
        try:
            return super().run_with_cache(*args, **kwargs)
        finally:
            self._caching = None

    def _collect_block_instance_aliases(self) -> dict[str, str]:
        """None: the aliases of the architecture's components hold for all layers here."""
        return {}

    def _editing(self, point: HookPoint) -> list[Any]:
        """Handles of the user's hooks at a point: not those that `run_with_cache` put there to fill its cache."""
        return [handle for handle in point.fwd_hooks if self._caching is None or id(handle) in self._caching]

    def _replay_captures(self, captured: Mapping[str, Any]) -> None:
        """Fill the cache. The user's hooks have run in the pass."""
        for name, value in captured.items():
            point, tensor = self._hook_registry[name], to_torch(value)
            editing = {id(handle) for handle in self._editing(point)}
            _run_hooks(point, [handle for handle in point.fwd_hooks if id(handle) not in editing])(tensor)

    # -- weights that TransformerLens' cache asks for ----------------------------------------

    def _weight(self, path: str) -> torch.Tensor:
        return self.lm.get(path)._module.weight.detach()

    @property
    def W_E(self) -> torch.Tensor:
        """Token embeddings, [vocab, hidden], on the CPU as the cache is."""
        return self._weight(self.lm.runner.model_spec.family.embed).cpu()

    @property
    def W_U(self) -> torch.Tensor:
        """The LM head, [hidden, vocab], on the CPU."""
        return self._weight(self.lm.runner.model_spec.family.head).cpu().T

    @property
    def b_U(self) -> torch.Tensor:
        """The LM head's bias, [vocab], on the CPU; zeros where it has none."""
        head = self.lm.get(self.lm.runner.model_spec.family.head)._module
        bias = getattr(head, "bias", None)
        return head.weight.new_zeros(head.weight.shape[0], device="cpu") if bias is None else bias.detach().cpu()

    @torch.no_grad()
    def ln_final(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm of x [..., hidden], on x's device."""
        norm = self.lm.get(self.lm.runner.model_spec.family.final_norm)._module
        return norm(x.to(norm.weight.device)).to(x.device)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] of normed states x [..., hidden], before a soft-cap, on the CPU."""
        return x.cpu() @ self.W_U + self.b_U

    def to_single_token(self, string: str) -> int:
        """The id of a word that is one token."""
        return self.lm.to_single_token(string)

    def tokens_to_residual_directions(self, tokens: Any) -> torch.Tensor:
        """The columns of `W_U` of some tokens: text, an id, or ids [...] -> [..., hidden], on the CPU."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        weight = self._weight(self.lm.runner.model_spec.family.head)
        return weight[torch.as_tensor(tokens, device=weight.device)].cpu()


def _run_hooks(point: HookPoint, handles: list[Any]) -> Edit:
    """A function that calls some of a point's hooks, each on what the one before it left."""
    hooks = [point._forward_hooks[handle.hook.id] for handle in handles]

    def edit(value: torch.Tensor) -> torch.Tensor:
        for hook in hooks:
            new = hook(point, (value,), value)
            value = value if new is None else new
        return value

    return edit

"""`Bridge`: TransformerLens' `RemoteBridge` over an `LM`, with hooks that edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import transformer_lens
from torch.nn.utils.rnn import pad_sequence
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import RemoteBridge, TransformerBridge
from transformer_lens.model_bridge.driver_protocol import to_torch
from transformer_lens.model_bridge.sources._bridge_builder import configure_tokenizer

from ..client.calls.activation_cache import lens_name
from ..client.calls.model import ClientModel
from ..hooks.site import Site
from .driver import Edit, EngineDriver
from .generation import generate
from .names import GRADIENTS, BridgePoint
from .weights import Weights, adapter_of


class Bridge(Weights, RemoteBridge):
    """TransformerLens' calls and names over an `LM`: `run_with_cache`, `run_with_hooks`, `hooks`, `add_hook`, `generate`, weights.

    Names, shapes and values equal ``TransformerBridge.boot_transformers``. `run_with_cache` returns a subclass of TransformerLens'
    `BridgeCache`, in the order of a forward pass. Hooks read and edit, unlike in other remote bridges: a pass with hooks is a
    trace. A pass without hooks is a fused one, if `names_filter` selects only declared sites, norms or attention patterns. Without
    a filter it is a trace that reads all hook points.

    Prompts are text, token ids, or a list of either. Padding is not computed: its logits and values are zeros.
    ``bridge(tokens, interventions=[Steer(...)])`` and the other calls take declared interventions.

    Args:
        lm: a local `LM` of an architecture that TransformerLens has. `close` does not shut it down.

    Attributes:
        lm: the `LM`.

    Raises:
        TypeError: an `LM` of a server.
        ValueError: TransformerLens does not know the architecture.
    """

    def __init__(self, lm: ClientModel) -> None:
        if not lm.backend.in_process:
            raise TypeError("Bridge(lm) needs a local LM: run it in the server's process, or use lm.run_with_cache")
        adapter = adapter_of(lm)
        tokenizer = lm.tokenizer and configure_tokenizer(deepcopy(lm.tokenizer), adapter.cfg)
        driver = EngineDriver(
            lm, adapter.cfg, adapter.component_mapping, tokenizer, lambda layer: self.blocks[layer].attn.W_O
        )
        self.lm = lm
        self._caching: set[int] | None = None
        self._unfiltered, self._stop = False, None
        super().__init__(adapter, tokenizer, driver)
        self._hook_registry = {name: BridgePoint(name) for name in driver.places}

    def __repr__(self) -> str:
        return f"Bridge({str(self.lm).splitlines()[0]})"

    # -- passes ----------------------------------------------------------------------------

    def forward(
        self,
        input: Any = None,
        *,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        labels: torch.Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Any = None,
        input_ids: Any = None,
        stop_at_layer: int | None = None,
        capture: Any = None,
        intervene: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One forward pass over text, token ids [batch, tokens] or [tokens], or a list of texts or of token ids.

        Args:
            return_type, loss_per_token, labels: see `TransformerBridge.forward`.
            prepend_bos, padding_side: options of `to_tokens` for text. Padding is not computed: its logits and values
                are zeros.
            attention_mask: mask of token ids; 0 is padding.
            stop_at_layer: end the pass before this layer, and return the residual stream [batch, tokens, hidden].
            capture: names of hook points for the hooks there; None: those that have hooks.
            intervene, kwargs: see `EngineDriver.forward`.
        """
        self._check_loss_supported(return_type)
        tokens, mask = self._batch(input_ids if input is None else input, prepend_bos, padding_side, attention_mask)
        edits, names = self._edits_and_captures(intervene, capture)
        if self._unfiltered and len(tokens) > 1 and any(map(callable, edits.values())):
            names = [name for name in names if not self._driver.places[name].needs_eager]
        stop = self._layer(stop_at_layer if self._stop is None else self._stop)
        end = None if stop is None else f"blocks.{stop}.hook_in"
        if end is not None:
            names, edits = (self._before(stop, found) for found in (names, edits))
            kwargs |= {"stop_at_layer": stop}
        given = tuple(dict.fromkeys([*names, *([end] if end else [])]))
        result = self._driver(input_ids=tokens, attention_mask=mask, capture=given, intervene=edits, **kwargs)
        self._replay_captures(result.captured)
        if end is not None:
            return result.captured[end]
        return self._finalize_return(
            return_type, result.logits, tokens, attention_mask=mask, labels=labels, loss_per_token=loss_per_token
        )

    __call__ = forward

    def _batch(self, given: Any, prepend_bos: bool | None, side: str | None, mask: Any) -> tuple[Any, Any]:
        """Token ids [batch, tokens] and their mask, which is None without padding."""
        several = isinstance(given, list | tuple) and any(not isinstance(one, int) for one in given)
        if isinstance(given, str):
            return self.to_tokens(given, prepend_bos=prepend_bos), mask
        if not several:
            ids = None if given is None else torch.atleast_2d(torch.as_tensor(given))
            return ids, None if mask is None else torch.atleast_2d(torch.as_tensor(mask))
        if mask is not None:
            raise ValueError("attention_mask belongs to token ids [batch, tokens]; a list of prompts is padded here")
        rows = [
            self.to_tokens(one, prepend_bos=prepend_bos)[0] if isinstance(one, str) else torch.as_tensor(one).flatten()
            for one in given
        ]
        side = str(side or getattr(self.tokenizer, "padding_side", "right"))
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side)
        ones = [torch.ones_like(row) for row in rows]
        made = pad_sequence(ones, batch_first=True, padding_side=side)
        return ids, None if bool(made.all()) else made

    def _edits_and_captures(
        self, intervene: Mapping[str, Any] | None, capture: Any
    ) -> tuple[dict[str, Any], list[str]]:
        """Edits by hook point, and the names of the values that other hooks read."""
        canonical = {name: str(point.name) for name, point in self.hook_dict.items()}
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
        names = [canonical.get(str(name), str(name)) for name in capture]
        return edits, [name for name in names if self._gated_hook_reason(name) is None]

    def _layer(self, stop: int | None) -> int | None:
        """The layer that a pass ends before; None: it runs to its end."""
        count = self.cfg.n_layers
        if stop is None or stop == count:
            return None
        if not -count <= stop < count:
            raise ValueError(f"stop_at_layer={stop}: expected 0 to {count}, or -{count} to -1 from the end")
        return stop % count

    def _before(self, stop: int | None, names: Any) -> Any:
        """Subset of hook point names, or of a mapping from them, that a pass reaches before a layer."""
        reached = [name for name in names if self._driver.places[name].order < (stop, 0)]
        return {name: names[name] for name in reached} if isinstance(names, Mapping) else reached

    def run_with_hooks(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass with hooks that read values, edit them in place, or return others, as in `TransformerBridge`."""
        self._reject_start_at_layer(kwargs.get("start_at_layer"))
        return super(RemoteBridge, self).run_with_hooks(input, *args, **kwargs)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass and return (logits, `BridgeCache`) on the CPU, as in `TransformerBridge`.

        Without a `names_filter`, a pass of several prompts with functions has no attention scores and no rotated q and k.
        """
        if kwargs.get("incl_bwd"):
            raise NotImplementedError(f"run_with_cache(incl_bwd=True): Bridge has no backward pass; {GRADIENTS}")
        if self._caching is not None:
            raise RuntimeError("run_with_cache cannot be called inside a hook of another")
        self._reject_start_at_layer(kwargs.get("start_at_layer"))
        self._caching = {id(handle) for point in self._hook_registry.values() for handle in point.fwd_hooks}
        self._stop = self._layer(kwargs.pop("stop_at_layer", None))
        self._unfiltered = kwargs.get("names_filter") is None
        if self._stop is not None:
            kwargs["names_filter"] = self._names_before(self._stop, kwargs.get("names_filter"))
        try:
            output, cache = super().run_with_cache(*args, **kwargs)
        finally:
            self._caching, self._stop, self._unfiltered = None, None, False
        if isinstance(cache, dict):
            return output, cache
        return output, BridgeCache(cache.cache_dict, self, cache.has_batch_dim)

    def _names_before(self, stop: int, names_filter: Any) -> Callable[[str], bool]:
        """A filter of names that keeps the hook points before a layer."""
        points = self.hook_dict
        if names_filter is None:
            keeps = {
                name for name, point in points.items() if self._gated_hook_reason(str(point.name)) is None
            }.__contains__
        else:
            keeps = self._normalize_names_filter(names_filter)
        return lambda name: keeps(name) and bool(self._before(stop, [points[name].name]))

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Serve `hook_result`, [batch, tokens, heads, hidden]: each head's addition to the residual stream."""
        self.cfg.use_attn_result = use_attn_result

    def _collect_block_instance_aliases(self) -> dict[str, str]:
        """Return {}: the aliases of the architecture's components hold for all layers here."""
        return {}

    def cache_of(self, states: Mapping[str, torch.Tensor]) -> BridgeCache:
        """The cache of states by site, [batch, tokens, ...], that `lm.run_with_cache` captured."""
        found = self._driver.states(states)
        named = {name: found[point.name] for name, point in self.hook_dict.items() if point.name in found}
        return BridgeCache(named, self)

    def _editing(self, point: HookPoint) -> list[Any]:
        """Handles of the user's hooks at a point: not those that `run_with_cache` put there to fill its cache."""
        return [handle for handle in point.fwd_hooks if self._caching is None or id(handle) in self._caching]

    def _replay_captures(self, captured: Mapping[str, Any]) -> None:
        """Fill the cache. The user's hooks have run in the pass."""
        for name, value in (captured or {}).items():
            point, tensor = self._hook_registry[name], to_torch(value)
            editing = {id(handle) for handle in self._editing(point)}
            _run_hooks(point, [handle for handle in point.fwd_hooks if id(handle) not in editing])(tensor)

    # -- weights that TransformerLens' cache asks for ----------------------------------------

    def _weight(self, path: str) -> torch.Tensor:
        return self.lm.get(path)._module.weight.detach()

    @property
    def W_E(self) -> torch.Tensor:
        """Token embeddings, [vocab, hidden], on the CPU as the cache is."""
        return self._weight(self.lm.model_spec.family.embed).cpu()

    @property
    def W_U(self) -> torch.Tensor:
        """The LM head, [hidden, vocab], on the CPU."""
        return self._weight(self.lm.model_spec.family.head).cpu().T

    @property
    def b_U(self) -> torch.Tensor:
        """The LM head's bias, [vocab], on the CPU; zeros without a bias."""
        head = self.lm.get(self.lm.model_spec.family.head)._module
        bias = getattr(head, "bias", None)
        return head.weight.new_zeros(head.weight.shape[0], device="cpu") if bias is None else bias.detach().cpu()

    @torch.no_grad()
    def ln_final(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm of x [..., hidden], on x's device."""
        norm = self.lm.get(self.lm.model_spec.family.final_norm)._module
        return norm(x.to(norm.weight.device)).to(x.device)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] of normed states x [..., hidden], before a soft-cap, on the CPU."""
        return x.cpu() @ self.W_U + self.b_U

    # -- text --------------------------------------------------------------------------------

    to_tokens: Any = TransformerBridge.to_tokens
    to_string: Any = TransformerBridge.to_string
    to_str_tokens: Any = TransformerBridge.to_str_tokens
    to_single_str_token: Any = TransformerBridge.to_single_str_token
    get_token_position: Any = TransformerBridge.get_token_position

    def to_single_token(self, string: str) -> int:
        """The id of a word that is one token."""
        return self.lm.to_single_token(string)

    def generate(self, input: Any, max_new_tokens: int = 10, **options: Any) -> Any:
        """Generate as `TransformerBridge.generate`, by the engine. Options: `lens.generation.generate`."""
        if any(point.fwd_hooks for point in self._hook_registry.values()):
            raise NotImplementedError(
                "bridge.generate runs no hooks: give interventions=[...], or edit in `with lm.generate(prompt, ...) as tracer:`"
            )
        return generate(self, input, max_new_tokens, **options)

    def tokens_to_residual_directions(self, tokens: Any) -> torch.Tensor:
        """The columns of `W_U` of some tokens: text, an id, or ids [...] -> [..., hidden], on the CPU."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        weight = self._weight(self.lm.model_spec.family.head)
        return weight[torch.as_tensor(tokens, device=weight.device)].cpu()


def _run_hooks(point: HookPoint, handles: list[Any]) -> Edit:
    """A function that calls some of a point's hooks, each on the result of the one before it."""
    hooks = [point._forward_hooks[handle.hook.id] for handle in handles]

    def edit(value: torch.Tensor) -> torch.Tensor:
        for hook in hooks:
            new = hook(point, (value,), value)
            value = value if new is None else new
        return value

    return edit


class BridgeCache(transformer_lens.ActivationCache):
    """Values of hook points in the order of a forward pass.

    A key is TransformerLens' name or short form, or any name of a site: ``cache["resid_post.3"]``.
    """

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key not in self.cache_dict and isinstance(key, str | Site):
            try:
                site = Site.parse(str(key))
            except ValueError:
                return super().__getitem__(key)
            if site.layer is not None:
                site = replace(site, layer=site.layer % self.model.cfg.n_layers)
            key = lens_name(site)
        return super().__getitem__(key)

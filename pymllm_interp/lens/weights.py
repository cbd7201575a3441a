"""The weights of an `LM` in TransformerLens' shapes: `bridge.W_Q`, `bridge.blocks[3].mlp.W_out`, `bridge.OV`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf
from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
from transformers import AutoModelForCausalLM

from ..client.calls.model import ClientModel
from .names import BridgePoint


def adapter_of(lm: ClientModel) -> Any:
    """A new adapter of TransformerLens for the model's architecture.
    Raises ValueError: TransformerLens does not know the architecture."""
    architecture = determine_architecture_from_hf_config(lm.hf_config)
    config = build_bridge_config_from_hf(lm.hf_config, architecture, lm.backend.facts.model, lm.dtype)
    return ArchitectureAdapterFactory.select_architecture_adapter(config)


def weights_of(lm: ClientModel, points: Mapping[str, BridgePoint]) -> TransformerBridge:
    """TransformerLens' own components over the engine's parameters.

    The modules are transformers', without their own values. On a CPU they share the engine's memory; of another device
    they hold a copy.

    Args:
        points: hook points by name. They take the places of the components' own, which no pass of the engine calls.

    Raises:
        NotImplementedError: the engine stores weights in another form than transformers, such as a quantized one.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(lm.hf_config, dtype=lm.dtype, attn_implementation="eager")
    values = {name: value.detach().cpu() for name, value in lm._module.state_dict().items()}
    _check(model, values)
    model.load_state_dict(values, assign=True, strict=False)
    model.tie_weights()
    adapter = adapter_of(lm)
    adapter.cfg.device = "cpu"
    adapter.prepare_model(model)
    weights = TransformerBridge(model.eval().requires_grad_(False), adapter, None)
    _share_points(weights, points)
    return weights


def _check(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    for name, value in model.named_parameters():
        found = values.get(name)
        if (found is None and name not in tied) or (found is not None and found.shape != value.shape):
            raise NotImplementedError(
                f"the engine has no {name} {list(value.shape)} as transformers has it: weights in TransformerLens' shapes "
                "need a model that is not quantized; lm.get(path) has the engine's own modules"
            )


def _share_points(weights: TransformerBridge, points: Mapping[str, BridgePoint]) -> None:
    """Put `points` at the components' hook points, and points that refuse hooks if the engine has no value."""
    shared: dict[int, BridgePoint] = {}
    for name, own in weights._hook_registry.items():
        if name in points or id(own) not in shared:
            shared[id(own)] = points.get(name) or BridgePoint(own.name or name, served=False)
    for module in weights.modules():
        for names in (module._modules, module.__dict__):
            for name, own in list(names.items()):
                if isinstance(own, HookPoint) and id(own) in shared:
                    names[name] = shared[id(own)]


def _of_weights(name: str, text: str) -> Any:
    return property(lambda bridge: getattr(bridge.weights, name), doc=text)


class Weights:
    """Weights and TransformerLens' values computed from them, with its names and shapes, on the CPU.
    Raises AttributeError: the model has no such weight; TransformerLens' message names it."""

    lm: ClientModel
    _hook_registry: dict[str, Any]
    _weights: tuple[int, TransformerBridge] | None = None

    @property
    def weights(self) -> TransformerBridge:
        """TransformerLens' components over the engine's parameters, as they are now; see `weights_of`."""
        version = self.lm.weights.version
        if self._weights is None or self._weights[0] != version:
            self._weights = version, weights_of(self.lm, self._hook_registry)
        return self._weights[1]

    blocks = _of_weights("blocks", "The layers' components: ``blocks[3].attn.W_O``, ``blocks[3].mlp.W_out``.")
    W_Q = _of_weights("W_Q", "[layers, heads, hidden, head_dim].")
    W_K = _of_weights("W_K", "[layers, kv_heads, hidden, head_dim].")
    W_V = _of_weights("W_V", "[layers, kv_heads, hidden, head_dim].")
    W_O = _of_weights("W_O", "[layers, heads, head_dim, hidden].")
    W_in = _of_weights("W_in", "[layers, hidden, neurons].")
    W_gate = _of_weights("W_gate", "[layers, hidden, neurons]; None where MLPs have no gate.")
    W_out = _of_weights("W_out", "[layers, neurons, hidden].")
    W_pos = _of_weights("W_pos", "Learned position embeddings, [positions, hidden].")
    W_E_pos = _of_weights("W_E_pos", "`W_E` and `W_pos`, [vocab + positions, hidden].")
    b_Q = _of_weights("b_Q", "[layers, heads, head_dim].")
    b_K = _of_weights("b_K", "[layers, kv_heads, head_dim].")
    b_V = _of_weights("b_V", "[layers, kv_heads, head_dim].")
    b_O = _of_weights("b_O", "[layers, hidden].")
    b_in = _of_weights("b_in", "[layers, neurons].")
    b_out = _of_weights("b_out", "[layers, hidden].")
    OV = _of_weights("OV", "``W_V @ W_O``, a `FactoredMatrix` [layers, heads, hidden, hidden].")
    QK = _of_weights("QK", "``W_Q @ W_K.T``, a `FactoredMatrix` [layers, heads, hidden, hidden].")
    accumulated_bias = _of_weights("accumulated_bias", "As `TransformerBridge.accumulated_bias`.")
    all_composition_scores = _of_weights("all_composition_scores", "As `TransformerBridge.all_composition_scores`.")
    all_head_labels = _of_weights("all_head_labels", "``['L0H0', 'L0H1', ...]``.")
    stack_params_for = _of_weights("stack_params_for", "As `TransformerBridge.stack_params_for`.")

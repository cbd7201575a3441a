"""Rotary position embeddings (Su et al., 2021), in every scaling that transformers knows.

The frequencies are transformers' own (`ROPE_INIT_FUNCTIONS`); cosines and sines are looked up in a table. Scalings whose
frequencies depend on the length of the sequence ("dynamic", "longrope") are computed for each row with its own request's
length, so that a batch cannot change them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..core.forward_batch import ForwardBatch

LENGTH_DEPENDENT = ("dynamic", "longrope")


def rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `apply_rope` takes, from a `RotaryEmbedding`'s [1, tokens, head_dim]: [tokens, 1, head_dim] each.

    The sine's first half carries the sign that the rotation puts on the second half of what it turns.
    """
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
    return cos[0].unsqueeze(1), signed.unsqueeze(1)


def rotation_of(batch: ForwardBatch, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotation`, made once a pass: again only where a block replaced `cos` or `sin`, or wrote to them."""
    known = batch.rotation
    versions = (cos._version, sin._version)
    if known is None or known[0] is not cos or known[1] is not sin or known[2] != versions:
        batch.rotation = known = (cos, sin, versions, rotation(cos, sin))
    return known[3]


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by a `rotation`; fresh memory. Bit-equal to transformers' formula."""
    return x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * signed_sin


class RotaryEmbedding(nn.Module):
    """Positions -> (cos, sin), each [1, tokens, head_dim] in the model's dtype.

    Args:
        config: of the model; `rope_parameters` says which scaling.
        head_dim: of the attention heads.
        max_positions: length of the table.
    """

    def __init__(
        self, config: PretrainedConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self._config = config
        self._head_dim = head_dim
        self.rope_type: str = _parameters(config).get("rope_type", "default")
        if self.rope_type != "default" and self.rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_type {self.rope_type!r} is unknown to transformers: {sorted(ROPE_INIT_FUNCTIONS)}")
        self._dtype, self._device = dtype, device
        self._inv_freq = lru_cache(maxsize=4096)(self._frequencies)
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        if not self.length_dependent:
            self._table = self._cos_sin(torch.arange(max_positions, device=device), *self._inv_freq(None))

    @property
    def length_dependent(self) -> bool:
        """Whether rows need their request's length beside their position."""
        return self.rope_type in LENGTH_DEPENDENT

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, rope_lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, tokens]; rope_lens [tokens] for length-dependent scalings. `x` is ignored, as its dtype is known."""
        return self.lookup(position_ids, rope_lens)

    def lookup(self, position_ids: torch.Tensor, rope_lens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self._table is not None:
            return self._table[0][position_ids], self._table[1][position_ids]
        assert rope_lens is not None, f"rope_type {self.rope_type!r} needs the length of each row's request"
        return self._by_length(position_ids, rope_lens)

    def _by_length(self, position_ids: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*position_ids.shape, self._head_dim)
        cos = torch.empty(shape, dtype=self._dtype, device=position_ids.device)
        sin = torch.empty_like(cos)
        for length in lens.unique().tolist():
            rows = (lens == length).nonzero().squeeze(1)
            cos[0, rows], sin[0, rows] = self._cos_sin(position_ids[0, rows], *self._inv_freq(self._bucket(length)))
        return cos, sin

    def _bucket(self, length: int) -> int:
        """Lengths with the same frequencies share one entry of the cache."""
        if self.rope_type == "longrope":
            original = _parameters(self._config)["original_max_position_embeddings"]
            return original + 1 if length > original else original
        return max(length, self._config.max_position_embeddings)

    def _frequencies(self, length: int | None) -> tuple[torch.Tensor, float]:
        """([head_dim / 2] float32, factor on cos and sin)."""
        if self.rope_type == "default":
            exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float) / self._head_dim
            return (1.0 / (_parameters(self._config)["rope_theta"] ** exponents)).to(self._device), 1.0
        kwargs: dict[str, Any] = {"seq_len": length} if length is not None else {}
        inv_freq, factor = ROPE_INIT_FUNCTIONS[self.rope_type](self._config, self._device, **kwargs)
        return inv_freq, float(factor)

    def _cos_sin(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [n] -> two [n, head_dim]."""
        freqs = positions.float()[:, None] * inv_freq.float()[None, :]
        angles = torch.cat((freqs, freqs), dim=-1)
        return (angles.cos() * factor).to(self._dtype), (angles.sin() * factor).to(self._dtype)


def _parameters(config: PretrainedConfig) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or "rope_theta" not in parameters:
        raise ValueError(
            f"config.rope_parameters is {parameters!r}: a dict with 'rope_theta' is expected; this config was not read "
            "through transformers 5"
        )
    return parameters

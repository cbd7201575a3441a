"""Rotary position embeddings (Su et al., 2021), in every scaling that transformers knows.

The frequencies come from transformers (`ROPE_INIT_FUNCTIONS`); cosines and sines come from a table. Some scalings depend on
the length of the sequence ("dynamic", "longrope"). They are computed for each row with the length of its own request, independent
of the batch.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..core.families import MROPE_SECTIONS
from ..core.forward_batch import CachedRotation, ForwardBatch, PagedKV
from ..core.model_spec import LENGTH_DEPENDENT_ROPE
from .dispatch import kernels_for


def signed(sin: torch.Tensor) -> torch.Tensor:
    """sin [..., head_dim] with its first half negated, as `apply_rope` takes it."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments of `apply_rope`, from the [1, tokens, head_dim] of a `RotaryEmbedding`.
    Returns cosines and signed sines, each [tokens, 1, head_dim]: views of one [tokens, 1, 2 * head_dim]."""
    return _halves(torch.cat((cos[0], signed(sin[0])), dim=-1))


def rotation_of(batch: ForwardBatch, *embeddings: torch.Tensor, halved: bool = False) -> tuple[torch.Tensor, ...]:
    """`rotation` of cosines and sines, cached for the pass; () without any.

    Made again if a hook replaced the cosines or sines, or wrote to them.

    Args:
        halved: the embeddings come from a `HalvedRotaryEmbedding`.
    """
    if not embeddings:
        return ()
    cos, sin = embeddings
    cached, versions = batch.rotations.get(id(cos)), (cos._version, sin._version)
    if cached is None or cached.cos is not cos or cached.sin is not sin or cached.versions != versions:
        batch.rotations[id(cos)] = cached = CachedRotation(
            cos, sin, versions, rotation(*(torch.cat((x, x), -1) for x in embeddings)) if halved else rotation(cos, sin)
        )
    return cached.rotation


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by a `rotation`; fresh memory. Bit-equal to transformers' formula.

    A `rotation` that is narrower than a head rotates the first channels.
    """
    if (kernels := kernels_for(x, cos, signed_sin)) is not None:
        return kernels.rope(x, cos, signed_sin)
    width = cos.shape[-1]
    x, rest = x.split([width, x.shape[-1] - width], dim=-1) if width < x.shape[-1] else (x, None)
    turned = x * cos + torch.roll(x, width // 2, dims=-1) * signed_sin
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def heads_of(qkv: torch.Tensor, kv_heads: int, by_head: bool) -> list[torch.Tensor]:
    """q, k and v, views of qkv [tokens, heads + 2 * kv_heads, head_dim]. With `by_head` the three of each head are adjacent."""
    if by_head:
        return [qkv[:, i::3] for i in range(3)]
    return list(qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1))


def rope_and_write(
    qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim]
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
    pool: PagedKV,
    layer_id: int,
    slots: torch.Tensor,  # [tokens] int64
    out: torch.Tensor | None = None,  # [tokens, heads, head_dim]
    by_head: bool = False,
) -> torch.Tensor:
    """Rotate q and k by a `rotation`, and write k and v to the layer's `slots`, in one kernel.

    Args:
        cos, signed_sin: None for no rotation.
        by_head: see `heads_of`.

    Returns:
        the rotated q [tokens, heads, head_dim], in `out` or in fresh memory.
    """
    caches = pool.get_kv(layer_id)
    turn = () if cos is None or signed_sin is None else (cos, signed_sin)
    if (kernels := kernels_for(qkv, *turn, *caches)) is not None:
        scales = () if caches[0].dtype is qkv.dtype else (pool.scales(layer_id),)
        return kernels.rope_and_write(qkv, cos, signed_sin, *caches, slots, out, by_head, *scales)
    q, k, v = heads_of(qkv, pool.num_kv_heads, by_head)
    if turn:
        q, k = apply_rope(q, *turn), apply_rope(k, *turn)
    pool.set_kv(layer_id, slots, k, v)
    return q.contiguous() if out is None else out.copy_(q)


class RotaryEmbedding(nn.Module):
    """Positions -> (cos, sin), each [1, tokens, head_dim] in the model's dtype.

    Args:
        config: the model's; `rope_parameters` names the scaling.
        head_dim: width of an attention head.
        max_positions: length of the table.

    Raises:
        ValueError: a scaling that transformers does not know, or a config without `rope_parameters`.
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
        # Not a bound method: tables in a cycle would wait for the garbage collector.
        self._inv_freq = lru_cache(maxsize=4096)(partial(_frequencies, config, head_dim, device, self.rope_type))
        self._table: torch.Tensor | None = None  # [positions, 2 * head_dim], cosines and signed sines
        if not self.length_dependent:
            cos, sin = self._cos_sin(torch.arange(max_positions, device=device), *self._inv_freq(None))
            self._table = torch.cat((cos, signed(sin)), dim=-1)

    @property
    def length_dependent(self) -> bool:
        """Whether the rotation of a row depends on the length of its request."""
        return self.rope_type in LENGTH_DEPENDENT_ROPE

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, rope_lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, tokens]; rope_lens [tokens] for length-dependent scalings. `x` is ignored."""
        if self._table is None:
            return self._by_length(position_ids, rope_lens)
        cos, signed_sin = self._rows(self._table, position_ids).unsqueeze(0).chunk(2, dim=-1)
        return cos.contiguous(), signed(signed_sin)

    def rotation(self, position_ids: torch.Tensor, rope_lens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The `rotation` of the cosines and sines that `forward` returns."""
        if self._table is None:
            return rotation(*self._by_length(position_ids, rope_lens))
        return _halves(self._rows(self._table, position_ids))

    def _rows(self, table: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """The table's rows [tokens, 2 * head_dim] at position_ids [1, tokens]."""
        return table[position_ids[0]]

    def _by_length(self, position_ids: torch.Tensor, lens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert lens is not None, f"rope_type {self.rope_type!r} needs the length of each row's request"
        shape = (*position_ids.shape, self._head_dim)
        cos = torch.empty(shape, dtype=self._dtype, device=position_ids.device)
        sin = torch.empty_like(cos)
        for length in lens.unique().tolist():
            rows = (lens == length).nonzero().squeeze(1)
            cos[0, rows], sin[0, rows] = self._cos_sin(position_ids[0, rows], *self._inv_freq(self._bucket(length)))
        return cos, sin

    def _bucket(self, length: int) -> int:
        """A length that stands for all lengths with the same frequencies."""
        if self.rope_type == "longrope":
            original = _parameters(self._config)["original_max_position_embeddings"]
            return original + 1 if length > original else original
        return max(length, self._config.max_position_embeddings)

    def _cos_sin(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [n] -> two [n, head_dim]."""
        freqs = positions.float()[:, None] * inv_freq.float()[None, :]
        angles = torch.cat((freqs, freqs), dim=-1)
        return (angles.cos() * factor).to(self._dtype), (angles.sin() * factor).to(self._dtype)


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """A `RotaryEmbedding` by positions [3, tokens], where each channel turns by one of the three (Wang et al., 2024).

    Positions [1, tokens] stand for three equal ones.
    """

    def __init__(
        self, config: PretrainedConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__(config, head_dim, max_positions, dtype, device)
        sections = torch.tensor(_parameters(config).get("mrope_section") or MROPE_SECTIONS[config.model_type])
        axes = torch.zeros(head_dim // 2, dtype=torch.int64)
        if config.model_type.startswith("qwen3"):  # interleaved
            for axis in (1, 2):
                axes[axis : 3 * int(sections[axis]) : 3] = axis
        else:
            axes[:] = torch.arange(len(sections)).remainder(3).repeat_interleave(sections)
        self._axes = axes.repeat(4).to(device)  # of cosines and sines, both halves
        self._channels = torch.arange(len(self._axes), device=device)

    def _rows(self, table: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if len(position_ids) == 1:
            return super()._rows(table, position_ids)
        rows = position_ids[self._axes].T.contiguous()  # the result has its layout, and kernels read rows
        return table[rows, self._channels]


class HalvedRotaryEmbedding(RotaryEmbedding):
    """A `RotaryEmbedding` that returns the first half of its cosines and sines. The second half is equal to it."""

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, rope_lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(x, position_ids, rope_lens)
        half = cos.shape[-1] // 2
        return cos[..., :half].contiguous(), sin[..., :half].contiguous()


def _halves(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 2 * head_dim] -> two views [tokens, 1, head_dim]."""
    cos, signed_sin = both.unsqueeze(1).chunk(2, dim=-1)
    return cos, signed_sin


def _parameters(config: PretrainedConfig) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or "rope_theta" not in parameters:
        raise ValueError(
            f"config.rope_parameters is {parameters!r}: a dict with 'rope_theta' is expected; this config was not read "
            "through transformers 5"
        )
    return parameters


def _frequencies(
    config: PretrainedConfig, head_dim: int, device: str, rope_type: str, length: int | None
) -> tuple[torch.Tensor, float]:
    """([head_dim / 2] float32, factor on cos and sin)."""
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return (1.0 / (_parameters(config)["rope_theta"] ** exponents)).to(device), 1.0
    kwargs: dict[str, Any] = {"seq_len": length} if length is not None else {}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, device, **kwargs)
    return inv_freq, float(factor)

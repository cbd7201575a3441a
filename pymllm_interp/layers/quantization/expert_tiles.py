"""`ExpertTiles`: weights of experts in MXFP4, as the kernel of kernels/products/fp4_experts.py reads them.

A tile has 64 rows of a weight and 128 inputs: 4 KB that lie together. The tiles of a block of rows follow each other. So a program
reads its weight from one end to the other. Of a first product a tile of gate and the tile of up at the same place are neighbours.

A word has eight inputs, 16 apart. The lower half has inputs 0 to 3, the upper half 4 to 7. In a half, input 0 has its sign where a
bfloat16 has it. Its other bits are the end of the exponent and the beginning of the mantissa. Inputs 1 and 2 are 3 and 6 bits
lower. So a shift and a mask make two bfloat16 numbers, which are 2^126 times too small. A row's four scales in a tile are a word,
too. Each byte is the exponent of a bfloat16: the scale times 2^126.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .weight import QuantizedWeight

ROWS, INPUTS, GROUP, WORDS = 64, 128, 32, 16
"""Size of a tile: rows, inputs, inputs of a scale, and words of a row."""
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
"""Input of a half word -> its sign, and its other bits from the highest to the lowest."""
TO_FIELD = 126
"""Offset of E8M0: 2^(e - 127) becomes 2^(e - 1), with exponent field e + 126."""
MAX_FIELD = 254


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """A weight [experts * out, in] in MXFP4.

    Attributes:
        words: [experts, blocks, steps, parts, ROWS, WORDS] int32. Rows and inputs are padded with zeros. Parts are gate and up.
        scales: [experts, blocks, steps, parts, ROWS] int32.
        shift: power of 2 that all scales are to be multiplied by.
        rows, width: out of an expert, and in.
        interleaved: gate and up are every other row; False: all rows of gate come first.
        dtype: dtype of the dequantised weight.
    """

    words: torch.Tensor
    scales: torch.Tensor
    shift: int
    rows: int
    width: int
    interleaved: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: QuantizedWeight, experts: int, gated: bool, interleaved: bool) -> ExpertTiles:
        """The tiles of a weight [experts * out, in] with scales in E8M0.

        Args:
            gated: the rows are gate and up.

        Raises:
            ValueError: scales are NaN, or 2^127 and more apart.
        """
        rows, width = weight.shape[0] // experts, weight.shape[1]
        shift = shift_of(weight.scales)
        count = 2 if gated else 1
        layout = _Layout(rows // count, width, count, interleaved)
        words, scales = [], []
        for expert in range(experts):
            own = slice(expert * rows, (expert + 1) * rows)
            words.append(layout.words(weight.nibbles(own)))
            scales.append(layout.scale_words(weight.scales[own].int() + (TO_FIELD - shift)))
        # `stack` may keep the order of memory that its parts have.
        packed, exponents = torch.stack(words).contiguous(), torch.stack(scales).contiguous()
        return cls(packed, exponents, shift, rows, width, interleaved, weight.dtype)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.words)

    @property
    def shape(self) -> torch.Size:
        """Shape [experts * out, in]."""
        return torch.Size((self.experts * self.rows, self.width))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, as in a `QuantizedWeight`."""
        return {"codes": self.words, "scales": self.scales}

    def expert(self, index: int) -> QuantizedWeight:
        """The weight [out, in] of an expert, with its codes in rows."""
        parts = self.words.shape[3]
        layout = _Layout(self.rows // parts, self.width, parts, self.interleaved)
        codes, scales = layout.codes(self.words[index]), layout.fields(self.scales[index])
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        exponents = (scales + (self.shift - TO_FIELD)).to(torch.uint8)
        return QuantizedWeight("fp4", codes, exponents, None, GROUP, self.dtype)

    def dequantize(self) -> torch.Tensor:
        """The weight [experts * out, in]."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.words.device)
        for index in range(self.experts):
            out[index * self.rows : (index + 1) * self.rows] = self.expert(index).dequantize()
        return out


def shift_of(scales: torch.Tensor) -> int:
    """`ExpertTiles.shift` of scales in E8M0. Raises ValueError: scales are NaN, or 2^127 and more apart."""
    smallest, largest = int(scales.min()), int(scales.max())
    shift = max(0, largest + TO_FIELD - MAX_FIELD)
    if largest == 255 or smallest + TO_FIELD - shift < 1:
        raise ValueError(f"scales of experts are 2^{smallest - 127} to 2^{largest - 127}; use another checkpoint")
    return shift


@dataclass(frozen=True)
class _Layout:
    """Layout of an expert's codes.

    Args:
        rows: rows of a part.
    """

    rows: int
    width: int
    parts: int
    interleaved: bool

    def words(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [out, in] uint8 -> [blocks, steps, parts, ROWS, WORDS] int32."""
        tiles = self._tiled(codes, INPUTS).unflatten(-1, (8, WORDS)).int()
        word = torch.zeros_like(tiles[..., 0, :])
        for number, (code_bit, bit) in self._bits():
            word |= ((tiles[..., number, :] >> code_bit) & 1) << bit
        return word

    def codes(self, words: torch.Tensor) -> torch.Tensor:
        """`words`, back: [out, in] uint8."""
        found = torch.zeros(*words.shape[:-1], 8, WORDS, dtype=torch.uint8, device=words.device)
        for number, (code_bit, bit) in self._bits():
            found[..., number, :] |= (((words >> bit) & 1) << code_bit).to(torch.uint8)
        return self._rows_of(found.flatten(-2), self.width)

    def scale_words(self, fields: torch.Tensor) -> torch.Tensor:
        """Exponents [out, groups] -> [blocks, steps, parts, ROWS] int32, four in a word."""
        tiles = self._tiled(fields, INPUTS // GROUP)
        return tiles[..., 0] | (tiles[..., 1] << 8) | (tiles[..., 2] << 16) | (tiles[..., 3] << 24)

    def fields(self, words: torch.Tensor) -> torch.Tensor:
        """`scale_words`, back: [out, groups] int32."""
        tiles = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1)
        return self._rows_of(tiles, self.width // GROUP)

    def _bits(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """(input of a word, (bit of its code, bit of the word))."""
        for number in range(8):
            for at, place in enumerate(PLACES[number % 4]):
                yield number, (3 - at, place + 16 * (number // 4))

    def _tiled(self, values: torch.Tensor, size: int) -> torch.Tensor:
        """[out, columns] -> [blocks, steps, parts, ROWS, size]."""
        shape = (self.rows, self.parts) if self.interleaved else (self.parts, self.rows)
        parts = values.unflatten(0, shape)
        parts = parts.transpose(0, 1) if self.interleaved else parts
        padded = torch.nn.functional.pad(parts, (0, -parts.shape[2] % size, 0, -self.rows % ROWS))
        return padded.unflatten(2, (-1, size)).unflatten(1, (-1, ROWS)).permute(1, 3, 0, 2, 4)

    def _rows_of(self, tiles: torch.Tensor, columns: int) -> torch.Tensor:
        """Inverse of `_tiled`."""
        parts = tiles.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)[:, : self.rows, :columns]
        parts = parts.transpose(0, 1) if self.interleaved else parts
        return parts.flatten(0, 1)

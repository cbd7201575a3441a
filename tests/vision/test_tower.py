"""The vision tower by itself: attention of packed patches, groups of images, and its peak of memory."""

from __future__ import annotations

import pytest
import torch
from helpers_devices import DEVICES
from torch.nn.functional import conv3d, scaled_dot_product_attention

from pymllm_interp.models.vision.packed import PatchProjection, packed_attention

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Largest error of attention of values about 1, by dtype."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1], [64, 16, 64, 1], [37], [3] * 9 + [70, 2]])
def test_patches_attend_within_their_segment(device: str, dtype: torch.dtype, lengths: list[int]) -> None:
    made = torch.Generator().manual_seed(len(lengths))
    q, k, v = (torch.randn(1, 3, sum(lengths), 16, generator=made).to(device, dtype) for _ in range(3))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)  # as a part of a fused projection
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    found, _ = packed_attention(
        torch.nn.Module(), q, k, v, scaling=0.25, cu_seq_lens_q=bounds, max_length_q=max(lengths)
    )
    parts = [
        scaled_dot_product_attention(*own)
        for own in zip(*(x.double().split(lengths, 2) for x in (q, k, v)), strict=True)
    ]
    assert found.dtype is dtype
    torch.testing.assert_close(
        found.double(), torch.cat(parts, 2).transpose(1, 2), rtol=BOUND[dtype], atol=BOUND[dtype]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_patch_is_projected_as_by_the_convolution(device: str) -> None:
    projection = torch.nn.Conv3d(3, 20, (2, 4, 4), (2, 4, 4), bias=False, device=device)
    patches = torch.randn(7, 3, 2, 4, 4, device=device)
    wanted = conv3d(patches.double(), projection.weight.double(), stride=(2, 4, 4))
    projection.__class__ = PatchProjection
    torch.testing.assert_close(projection(patches).double(), wanted, rtol=1e-5, atol=1e-5)

"""Host values as bytes."""

from __future__ import annotations

import pytest
import torch

from pymllm_interp.utils.upload import flat_bytes
from pymllm_interp.wire.specs import vector_of, vector_to_json


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(5).expand(1), torch.tensor(5.0).expand(1, 1), torch.tensor(3.0), torch.arange(6).view(2, 3)[:, :1],
        torch.arange(6.0).view(2, 3).T, torch.arange(5.0)[2:].bfloat16()[1:], torch.zeros(0, 4), torch.tensor([True, False]),
        torch.arange(3.0).expand(2, 3), torch.arange(4.0).flip(0), torch.ones(2).requires_grad_(),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_any_layout_are_bytes_in_row_order(tensor: torch.Tensor) -> None:
    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)
    found = flat_bytes(tensor.detach())
    assert found.dtype is torch.uint8 and len(found) == tensor.nbytes
    assert torch.equal(found.view(tensor.dtype), plain.flatten())
    if tensor.is_floating_point() and tensor.numel():
        assert torch.equal(vector_of(vector_to_json(tensor), "vector").to(tensor.dtype), plain)

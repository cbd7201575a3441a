"""SAEs with random weights."""

from __future__ import annotations

from typing import Any

import torch

from pymllm_interp import (
    SAE,
)  # fmt: skip


def random_sae(width: int, site: str = "resid_post.1", d_sae: int = 37, seed: int = 0, **fields: Any) -> SAE:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "W_enc": normal(width, d_sae),
        "b_enc": normal(d_sae),
        "W_dec": normal(d_sae, width),
        "b_dec": normal(width),
    }
    return SAE(**{"site": site, **made, **fields})

"""`Lens`: a capture's reduction to the next tokens that the model's head reads off a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....core.limits import MAX_NAMED
from ....core.model_spec import ModelSpec
from ....utils.arguments import is_whole
from ....utils.upload import upload
from ...registry import reduction
from ...site import Site
from ..lens_files import JacobianLens, TunedLens
from .reduction import Readout, Reduced, Reduction, as_words, floats

KINDS = ("embed", "resid_pre", "resid_mid", "resid_post", "final_norm")
"""Kinds of sites that a lens reads."""
LARGEST_VOCAB = 1 << 18
"""About the largest vocabulary, which bounds the rows of one call."""


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest logits of each row, in descending order.

    Args:
        logits: [rows, vocab].

    Returns:
        ([rows, k], [rows, k] int64, [rows] float32: the log of the sum of exponentials).
    """
    if logits.is_cuda and logits.get_device() == torch.cuda.current_device():
        from ....kernels import triton_top_k

        return triton_top_k.top_k(logits.contiguous(), k)
    values, indexes = logits.topk(k, dim=-1)
    return values, indexes, logits.float().logsumexp(-1)


@reduction
@dataclass(frozen=True, eq=False)
class Lens(Reduction):
    """The most likely next tokens of each row, in place of the row. The model's final norm, head and soft-cap are applied to the
    state (nostalgebraist 2020).

        Capture("resid_post.*", reduce=Lens(top_k=10, tokens=[" Paris", 42]))

    The site's rows are log probabilities [positions, top_k], in descending order; `Activations.indexes` has the tokens' ids. For
    the asked tokens, `Activations.token_log_probs` and `Activations.token_ranks` have [positions, tokens]. A rank is the number of
    tokens that are more likely. At `final_norm` the state is normed already.

    Raises:
        ValueError: neither top_k nor tokens, a token that is neither an id nor text, or another transport.
    """

    top_k: int = 10
    """Number of tokens; 0 for none, with `tokens`."""
    tokens: Sequence[int | str] | None = None
    """Tokens to look up: ids, or texts that are one token each."""
    transport: TunedLens | JacobianLens | None = None
    """Map from a layer's state to the last layer's. None: the identity (the logit lens); a `TunedLens` (Belrose et al.
    2023, arXiv 2303.08112); or a `JacobianLens`."""

    def __post_init__(self) -> None:
        self._check("top_k", is_whole(self.top_k) and self.top_k >= 0, "a whole number from 0 on")
        self._check("top_k", self.top_k <= MAX_NAMED, f"at most {MAX_NAMED}")
        tokens = self.tokens.tolist() if isinstance(self.tokens, Tensor) else self.tokens
        if tokens is not None:
            if isinstance(tokens, Sequence) and len(tokens) > MAX_NAMED:
                raise ValueError(f"{self.name}: tokens has {len(tokens)} ids; at most {MAX_NAMED}")
            listed = isinstance(tokens, Sequence) and not isinstance(tokens, str)
            self._check("tokens", listed, "a list of token ids or texts, such as [' Paris']")
            self._set("tokens", tuple(tokens))
            known = all(isinstance(token, str) or (is_whole(token) and token >= 0) for token in tokens)
            self._check("tokens", known, "token ids, from 0 on, or texts")
        self._check("top_k", self.top_k > 0 or bool(tokens), "from 1 on, or tokens to look up")
        known = self.transport is None or isinstance(self.transport, TunedLens | JacobianLens)
        self._check("transport", known, "None, a TunedLens or a JacobianLens")

    def check(self, site: Site, model: ModelSpec) -> None:
        if site.kind not in KINDS:
            raise ValueError(f"it reads the residual stream: {', '.join(KINDS)}")
        if "final_norm" not in model.family.points:
            raise ValueError(f"{model.family.name} models have no site final_norm, whose norm and head it applies")
        if model.num_labels is not None:
            raise ValueError("a lens needs a language modelling head, and this model has a classification head")
        if self.top_k > model.vocab_size:
            raise ValueError(f"top_k={self.top_k}; the vocabulary has {model.vocab_size} tokens")
        for token in self.tokens or ():
            if isinstance(token, str):
                raise ValueError(f"tokens holds {token!r}, and only an LM's tokenizer knows its id")
            if token >= model.vocab_size:
                raise ValueError(f"tokens holds {token}; the vocabulary goes from 0 to {model.vocab_size - 1}")
        if self.transport is not None:
            self.transport.check(site, model)

    def sent_width(self, width: int) -> int:
        return 2 * (self.top_k + len(self.tokens or ()))

    def row_elements(self, width: int) -> int:
        return LARGEST_VOCAB

    def read_alike(self, site: Site) -> object:
        return site if self.transport is not None else site.kind == "final_norm"

    def read(self, site: Site, rows: Tensor, readout: Readout) -> Tensor:
        if self.transport is not None:
            rows = self.transport.transported(site, rows)
        return rows if site.kind == "final_norm" else readout.norm(Site("final_norm"), rows)

    def sent(self, rows: Tensor, readout: Readout) -> Tensor:
        logits = readout.logits(rows)
        values, indexes, total = top_k(logits, self.top_k)
        values, total = values.float(), total[:, None]
        if not self.tokens:
            return as_words(values - total, indexes)
        (asked,) = upload(rows.device, np.array(self.tokens))  # a list as an index would wait for the device
        own = logits[:, asked].float()
        ranks = torch.stack([(logits > own[:, i : i + 1]).sum(-1) for i in range(own.shape[1])], -1)
        return as_words(values - total, own - total, indexes, ranks)

    def results(self, values: Tensor, dtype: torch.dtype | None, states: bool) -> Reduced:
        dtype, count = dtype or torch.float32, len(self.tokens or ())
        log_probs, asked, indexes, ranks = values.split([self.top_k, count, self.top_k, count], dim=-1)
        others = {"indexes": indexes.long()}
        if count:
            others |= {"token_log_probs": floats(asked).to(dtype), "token_ranks": ranks.long()}
        return Reduced(floats(log_probs).to(dtype), others)

    def row_bytes(self, dtype: torch.dtype | None) -> int:
        return (self.top_k + len(self.tokens or ())) * ((dtype or torch.float32).itemsize + 8)

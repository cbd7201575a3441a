"""`loss_recovered`: the share of a model's loss that an SAE's reconstruction keeps, as SAEBench and SAELens measure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from ..core.sampling_params import SamplingParams
from ..hooks.interventions.reconstruct import Reconstruct
from ..hooks.interventions.specs import Scale
from ..hooks.positions import Positions
from ..hooks.saes.sae import SAE
from ..utils.arguments import PromptError


@dataclass(frozen=True)
class LossRecovered:
    """Losses of next tokens, in nats, over all prompts.

    Attributes:
        loss: the model's.
        spliced: loss with the SAE's reconstruction in place of the state.
        ablated: loss with zeros in place of the state.
        tokens: number of predicted tokens.
    """

    loss: float
    spliced: float
    ablated: float
    tokens: int

    @property
    def recovered(self) -> float:
        """``(ablated - spliced) / (ablated - loss)``: 1 for a perfect reconstruction, 0 for one as bad as zeros."""
        return (self.ablated - self.spliced) / (self.ablated - self.loss)


def loss_recovered(
    lm: Any, sae: SAE | str, prompts: Sequence[Any], positions: Positions = "all", params: SamplingParams | None = None
) -> LossRecovered:
    """The loss of prompts with an SAE spliced in, beside the model's own and that of a zero ablation. One batch of three runs each.

    Args:
        lm: An `LM`, or a connection to a server.
        sae: An `SAE`, or a name in `lm.saes`. On CUDA see `Reconstruct`.
        prompts: A list of texts, or of lists of token ids.
        positions: Positions of the reconstruction and of the zeros. ``slice(1, None)`` leaves the first token out, for SAEs that
            were not trained on it.
        params: Further parameters, such as an adapter's.

    Raises:
        PromptError: one text in place of a list, or a prompt of one token.
        ValueError: as `Reconstruct`.
    """
    if isinstance(prompts, str):
        raise PromptError("loss_recovered: prompts is one text; expected a list of them")
    known: Any = lm.saes[sae] if isinstance(sae, str) else sae
    facts = known if isinstance(known, Mapping) else {"site": known.site, "site_out": known.site_out}
    site = facts.get("site_out") or facts["site"]
    runs: list[list[Any]] = [[], [Reconstruct(sae, positions=positions)], [Scale(site, 0.0, positions=positions)]]
    made = replace(params or SamplingParams(), max_tokens=0, prompt_logprobs=0)
    outs = lm.generate(
        [prompt for prompt in prompts for _ in runs], made, interventions=[specs for _ in prompts for specs in runs]
    )
    totals, tokens = [0.0] * len(runs), 0
    for i, out in enumerate(outs):
        if out.perplexity is None:
            raise PromptError(f"loss_recovered: prompt {i // len(runs)} has one token, so that none is predicted")
        count = len(out.prompt_token_ids) - 1
        totals[i % len(runs)] += log(out.perplexity) * count
        tokens += count * (i % len(runs) == 0)
    loss, spliced, ablated = (total / tokens for total in totals)
    return LossRecovered(loss, spliced, ablated, tokens)

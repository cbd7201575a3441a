"""Sites whose values are parts of one projection, or are written to later: hooks and attributions are those of declared patches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from family_configs import tiny_config

from pymllm_interp import LM, Capture, Patch, SamplingParams

pytestmark = pytest.mark.local
METRIC = (7, 11)
ONE = SamplingParams(temperature=0, max_tokens=1)
LAST = Capture("logits", positions=[-1])
CLEAN, CORRUPTED = [5, 17, 3, 80, 44, 9], [5, 21, 3, 80, 1, 9]
PLACES = list(range(len(CLEAN)))
SITES = ["q.0", "k.0", "v.0", "mlp_out.0", "q.1", "k.1", "v.1"]


@pytest.fixture(scope="module", params=["falcon", "falcon-alibi"])
def lm(request: pytest.FixtureRequest) -> Iterator[LM]:
    """Falcon: each group's queries are beside its key and value (40B), or one key and value are behind all queries (7B). The
    MLP's output is written to by the layer."""
    with LM(
        "falcon", hf_config=tiny_config(request.param), load_format="dummy", dtype="float32", device="cpu", kv_cache_tokens=512
    ) as found:  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        weights = found.runner.get_model().state_dict()
        found.load_state_dict({
            name: torch.randn(value.shape, generator=generator) * 0.2 + ("weight" in name and value.ndim == 1)
            for name, value in weights.items()
        })  # fmt: skip
        yield found


def states_of(lm: LM, ids: list[int], site: str) -> torch.Tensor:
    (out,) = lm.generate([ids], ONE, capture=[Capture(site, positions=PLACES)])
    return out.activations[site].float()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_a_hook_sees_and_writes_the_states_that_are_captured_and_patched(lm: LM, site: str, in_place: bool) -> None:
    before, wanted = states_of(lm, CLEAN, site), states_of(lm, CORRUPTED, site)
    seen = list[torch.Tensor]()

    def hook(value: torch.Tensor, hook: Any) -> torch.Tensor | None:
        seen.append(value.clone())
        if not in_place:
            return wanted[None]
        value[:] = wanted
        return None

    logits = lm.run_with_hooks(CLEAN, [(site, hook)])[0, -1]
    assert torch.equal(seen[0][0], before)
    (out,) = lm.generate([CLEAN], ONE, interventions=[Patch(site, wanted, positions=PLACES)], capture=[LAST])
    torch.testing.assert_close(logits, out.activations["logits"][-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("site", SITES)
def test_attributions_are_slopes_of_patches(lm: LM, site: str) -> None:
    found = lm.attribute(CLEAN, CORRUPTED, metric=METRIC, sites=[site])[site]
    base = states_of(lm, CORRUPTED, site)
    change, share = states_of(lm, CLEAN, site) - base, 0.02
    patches = [
        [Patch(site, (base + sign * share * change)[place : place + 1], positions=[place])]
        for place in PLACES
        for sign in (1, -1)
    ]
    outs = lm.generate([CORRUPTED] * len(patches), ONE, interventions=patches, capture=[LAST])
    logits = torch.stack([out.activations["logits"][-1] for out in outs]).double()
    values = (logits[:, METRIC[0]] - logits[:, METRIC[1]]).view(-1, 2)
    slopes = ((values[:, 0] - values[:, 1]) / (2 * share)).float()
    torch.testing.assert_close(found.reshape(len(PLACES), -1).sum(1), slopes, atol=2e-3, rtol=1e-2)
    assert slopes.abs().max() > 0.01

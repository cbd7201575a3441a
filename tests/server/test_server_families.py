"""Models by transformers' own classes behind a server: what `LM.connect` gives equals what an `LM` of this process gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import random_model, tiny_tokenizer
from family_configs import tiny_config
from helpers_served import served

from pymllm_interp import LM, SamplingParams, Steer

PROMPT = [5, 17, 3, 80, 44, 9, 61]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module", params=[pytest.param("olmo2", marks=pytest.mark.slow), "bloom"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LM, LM]]:
    """(by LM.connect, of this process): attention by transformers' interface, and by a cache object."""
    folder = tmp_path_factory.mktemp(request.param)
    random_model(tiny_config(request.param)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with (
        served(folder, "--option", "impl='transformers'", "--allow-code-from", "anybody", keys=None) as server,
        LM.connect(server.url, lower_traces="off") as remote,
        LM(str(folder), impl="transformers", device="cpu", dtype="float32") as local,
    ):
        yield remote, local


def test_tokens_captures_and_ops_are_the_local_ones(pair: tuple[LM, LM]) -> None:
    steer = Steer("resid_post.0", torch.linspace(-1, 1, pair[1].model_spec.hidden_size), scale=3.0)
    for ops in ([], [steer]):
        remote, local = (
            lm.generate([PROMPT, PROMPT[:2]], GREEDY, interventions=ops, capture=["resid_post.*", "attn_out.1"])
            for lm in pair
        )
        for got, wanted in zip(remote, local, strict=True):
            assert got.token_ids == wanted.token_ids
            assert list(got.activations) == list(wanted.activations)
            for site in wanted.activations:
                torch.testing.assert_close(got.activations[site], wanted.activations[site])


def states(lm: LM, path: str) -> dict[str, torch.Tensor]:
    """Of a block that edits the first layer's output, and reads the second's."""
    with lm.trace(PROMPT):
        found = dict().save()
        state = lm.get(f"{path}.0").output
        state = state[0] if isinstance(state, tuple) else state
        found["before"] = state.clone()
        state[:, -1] *= 1.5
        after = lm.get(f"{path}.1").output
        found["after"] = after[0] if isinstance(after, tuple) else after
        found["logits"] = lm.lm_head.output
    return dict(found)


def test_a_trace_reads_and_edits_as_a_local_one(pair: tuple[LM, LM]) -> None:
    remote, local = pair
    path = local.model_spec.family.layers
    got, wanted = states(remote, path), states(local, path)
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], msg=lambda text, name=name: f"{name}: {text}")
    plain = remote.generate([PROMPT], GREEDY, capture=["resid_post.1"])[0].activations["resid_post.1"]
    assert not torch.equal(got["after"].reshape(plain[: len(PROMPT)].shape), plain[: len(PROMPT)])

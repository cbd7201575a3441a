"""Drafts over HTTP: the switch of a request, its counts, and the metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from helpers_served import served

from pymllm_interp import LM, SamplingParams

SPECULATIVE = (
    "speculative={'method': 'ngram', 'num_speculative_tokens': 3, 'prompt_lookup_max': 2, 'prompt_lookup_min': 1}"
)


@pytest.mark.local
def test_a_request_over_http_is_drafted_for_unless_it_says_no(model_folder: Callable[[str], Path]) -> None:
    bias = {5: 90.0, 6: 90.0}  # an output of two tokens repeats
    body = {
        "prompt": [3, 5, 6],
        "max_tokens": 30,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": {"5": 90, "6": 90},
    }
    with served(model_folder("llama"), "--option", SPECULATIVE, keys=None) as server:

        def post(**fields: object) -> httpx.Response:
            return httpx.post(
                f"{server.url}/v1/completions", json={**body, "return_token_ids": True, **fields}, timeout=600
            )

        on, off, asked = (post(**fields).json() for fields in ({}, {"speculate": False}, {"speculate": True}))
        tokens = [answer["choices"][0]["token_ids"] for answer in (on, off, asked)]
        assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 30
        details = on["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 5 and "completion_tokens_details" not in off["usage"]
        text = httpx.get(f"{server.url}/metrics", timeout=600).text
        series = r"^pymllm_interp_spec_decode_num_(\w+)_total{.*} (\d+)$"
        counts = {name: int(n) for name, n in re.findall(series, text, re.M)}
        assert counts["accepted_tokens"] == 2 * details["accepted_prediction_tokens"]
        assert counts.keys() >= {"drafts", "draft_tokens"}
        refused = post(speculate="perhaps")
        assert refused.status_code in (400, 422) and "speculate" in refused.text
        with LM.connect(server.url) as remote:
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias=bias)
            (out,) = remote.generate([[3, 5, 6]], params)
            assert out.token_ids == tokens[0] and out.outputs[0].drafts is not None
            assert out.outputs[0].drafts.accepted == details["accepted_prediction_tokens"]

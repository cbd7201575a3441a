"""Bars of calls that run many requests: where asked for, and by default only on terminals and in notebooks, after two seconds."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_declared import prompt_of

from pymllm_interp import LM, SamplingParams, Scale
from pymllm_interp.client.calls import requests
from pymllm_interp.client.calls.requests import CallProgress

ONE = SamplingParams(temperature=0, max_tokens=1)
CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda lm, **asked: lm.generate([prompt_of(4, i) for i in range(5)], ONE, **asked),
    "forward": lambda lm, **asked: lm.forward([prompt_of(4, i) for i in range(5)], **asked),
    "sweep": lambda lm, **asked: lm.sweep(prompt_of(4, 1), [Scale("resid_post.1", float(i)) for i in range(5)], ONE, **asked),
    "attribute": lambda lm, **asked: lm.attribute(
        prompt_of(4, 1), prompt_of(4, 2), metric=[3, 5], sites=["resid_post.{0..2}", "attn_out.{0,1}"], **asked
    ),
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lm(lm_of: Callable[..., LM]) -> LM:
    return lm_of("llama")


@pytest.mark.local
@pytest.mark.parametrize("call", CALLS)
def test_a_bar_is_shown_where_it_is_asked_for(call: str, lm: LM, capsys: pytest.CaptureFixture[str]) -> None:
    CALLS[call](lm, progress=True)
    assert "5/5" in capsys.readouterr().err
    CALLS[call](lm)
    CALLS[call](lm, progress=False)
    assert capsys.readouterr().err == ""


def test_vllms_name_means_it(lm: LM, capsys: pytest.CaptureFixture[str]) -> None:
    CALLS["generate"](lm, use_tqdm=True)
    assert "5/5" in capsys.readouterr().err
    CALLS["generate"](lm, use_tqdm=True, progress=False)
    CALLS["generate"](lm, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_sweep_of_patches_has_one_bar(lm: LM, capsys: pytest.CaptureFixture[str]) -> None:
    swept = lm.patch_sweep(prompt_of(4, 1), prompt_of(4, 2), metric=[3, 5], how="requests", progress=True)
    shown = capsys.readouterr().err
    assert "patching" in shown and "requests" not in shown and torch.isfinite(swept.values).all()


@pytest.mark.parametrize(("asked", "terminal", "seconds", "shown"), [
    (None, True, 3.0, True), (None, True, 1.0, False), (None, False, 3.0, False), (False, True, 3.0, False),
    (True, True, 0.0, True), (True, False, 0.0, True),
])  # fmt: skip
def test_by_default_a_bar_appears_on_terminals_after_two_seconds(
    asked: bool | None, terminal: bool, seconds: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, now = (Terminal if terminal else io.StringIO)(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(requests, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: now[0])}))
    with CallProgress(asked, 3, "parts") as bar:
        for _ in range(3):
            now[0] += seconds / 3
            bar.advance()
    assert ("3/3" in stream.getvalue()) == shown and (shown or not stream.getvalue())

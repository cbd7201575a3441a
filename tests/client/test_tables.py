"""What notebooks and rich show of results."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from pymllm_interp import LM, Capture, SamplingParams, Scale, Steer
from pymllm_interp.utils.tables import MAX_ROWS, Table


def cells(html: str) -> list[list[str]]:
    """The cells of a table's rows."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)] for row in rows]


def printed(value: Any) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(value)
    return console.export_text()


def test_cells_are_text_whatever_they_hold() -> None:
    evil = "<script>alert(1)</script> [red]not markup[/red] & more\nline"
    table = Table(evil, ("a", "b"), [(evil, 3)])
    html = table.html()
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert cells(html) == [["a", "b"], [evil, "3"]]
    assert "[red]not markup[/red]" in printed(table.rich())


def test_long_tables_and_long_cells_are_cut_and_say_so() -> None:
    html = Table("t", ("n", "x"), [(i, "y" * 1000) for i in range(MAX_ROWS + 5)]).html()
    found = cells(html)
    assert len(found) == MAX_ROWS + 2 and found[-1][0] == "and 5 more" and found[1][1].endswith("... (1000 characters)")
    assert len(cells(Table("t", ("n",), [(i,) for i in range(MAX_ROWS)]).html())) == MAX_ROWS + 1


@pytest.mark.parametrize("n", [1, 2])
def test_an_output_its_activations_and_its_receipt_are_tables(n: int, lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    ops = [Steer("resid_post.1", torch.ones(72), positions="generated"), Scale("mlp_out.0", 0.5)]
    (out,) = lm.generate(
        ["w5 w6 <unk>"], SamplingParams(temperature=0, max_tokens=4, n=n, logprobs=0), interventions=ops,
        capture=["resid_post.1", Capture("z.0", positions=[-1])],
    )  # fmt: skip
    shown = dict(cells(out._repr_html_())[1:])
    assert shown["prompt"] == "w5 w6 <unk>" and shown["prompt tokens"] == "3"
    for index, completion in enumerate(out.outputs):
        number = f" {index}" if n > 1 else ""
        assert shown[f"text{number}"] == completion.text and shown[f"finish_reason{number}"] == "length"
        assert float(shown[f"cumulative_logprob{number}"]) == pytest.approx(completion.cumulative_logprob, abs=1e-3)
        assert (
            shown[f"activations{number}"] == "resid_post.1, z.0" or shown[f"activations{number}"] == "z.0, resid_post.1"
        )
    assert out.outputs[0].text in printed(out) and dict(cells(out.outputs[0]._repr_html_())[1:])["tokens"] == "4"
    rows = {row[0]: row for row in cells(out.activations._repr_html_())[1:]}
    for site in out.activations:
        x = out.activations[site]
        assert rows[site][1:3] == [str(list(x.shape)), "float32"]
        assert float(rows[site][3]) == pytest.approx(x.mean().item(), rel=1e-2, abs=1e-4)
        assert float(rows[site][4]) == pytest.approx(x.std(correction=0).item(), rel=1e-2)
    counts = cells(out.receipt._repr_html_())[1:]
    applied = {applied.site: applied for applied in out.receipt.interventions}
    for what, where, count in counts:
        if what in ("Steer", "Scale"):
            assert count == f"{applied[where].prompt_rows} prompt rows, {applied[where].generated_rows} generated rows"
    assert sum(int(count) for what, _, count in counts if what == "steps") == sum(out.receipt.steps.values())
    assert {what for what, *_ in counts} >= {"steps", "captured"} and "receipt" in printed(out.receipt)


def test_a_cache_and_an_empty_set_of_activations_are_tables(lm_of: Callable[..., LM]) -> None:
    _, cache = lm_of("llama").run_with_cache("w1 w2", ["resid_post.1", "z.0"])
    assert [row[0] for row in cells(cache._repr_html_())[1:]] == list(cache)
    (out,) = lm_of("llama").generate(["w1"], SamplingParams(max_tokens=1))
    assert cells(out.activations._repr_html_()) == [["site", "shape", "dtype", "mean", "std"]]
    assert "0 sites" in out.activations._repr_html_()


def test_a_forward_pass_is_a_table(lm_of: Callable[..., LM]) -> None:
    (out,) = lm_of("llama").forward(["w1 w2"], capture=["z.0"], interventions=[Scale("mlp_out.1", 0.5)])
    shown = dict(cells(out._repr_html_())[1:])
    assert (shown["prompt"], shown["logits"], shown["activations"]) == ("w1 w2", "[2, 97]", "z.0")
    assert "mlp_out.1" in shown["intervention"]

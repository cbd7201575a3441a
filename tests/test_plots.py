"""Figures hold the numbers and the tokens that they were given, and load nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("plotly", reason='plotly is not installed: pip install -e ".[plot]"')

from pymllm_interp import plots

TOKENS = ["the", " cat", "\n", " the", " <b>"]
SHOWN = ["the", " cat", "\\n", " the", " &lt;b&gt;"]


def shown(plot: plots.Plot) -> list[torch.Tensor]:
    """The numbers of each trace."""
    return [torch.tensor(trace.z if trace.type == "heatmap" else trace.y) for trace in plot.figure.data]


def labels(plot: plots.Plot, name: str = "xaxis") -> list[str]:
    return list(plot.figure.layout[name].ticktext)


def test_patterns_are_a_square_for_each_head_with_every_token_though_tokens_repeat() -> None:
    pattern = torch.rand(6, 3, 5).softmax(-1)
    plot = plots.attention_patterns(pattern, TOKENS, heads=[0, 2, 4, 5, 7, 8], title="layer 3")
    assert torch.equal(torch.stack(shown(plot)), pattern)
    assert labels(plot) == SHOWN and labels(plot, "yaxis") == SHOWN[2:]
    assert [note.text for note in plot.figure.layout.annotations] == [f"head {i}" for i in (0, 2, 4, 5, 7, 8)]
    assert torch.equal(shown(plots.attention_patterns(pattern[0], TOKENS))[0], pattern[0])


def test_a_lens_writes_each_word_and_colours_it_by_its_probability() -> None:
    words, probs = [[f"{i}{j}" for j in range(5)] for i in range(3)], torch.rand(3, 5)
    plot = plots.lens_heatmap(words, probs, TOKENS, layers=["embed", 0, 1])
    (heatmap,) = plot.figure.data
    assert torch.equal(shown(plot)[0], probs) and [list(row) for row in heatmap.text] == words
    assert labels(plot) == SHOWN and labels(plot, "yaxis") == ["embed", "0", "1"]


def test_a_sweep_is_centred_at_the_score_without_a_patch() -> None:
    values = torch.tensor([[1.0, 2.0, 5.0, float("nan"), 0.5], [1.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    (heatmap,) = plots.sweep_heatmap(values, TOKENS, centre=1.0).figure.data
    assert (heatmap.zmin, heatmap.zmax) == (-3.0, 5.0)
    assert plots.sweep_heatmap(torch.zeros(2, 5), TOKENS).figure.data[0].zmax == 1.0


def test_the_strongest_features_are_rows_whatever_their_rank_at_a_token() -> None:
    values = torch.tensor([[3.0, 1.0], [2.0, 0.5], [4.0, 0.0], [0.0, 0.0], [1.5, 0.2]])
    indexes = torch.tensor([[7, 9], [9, 7], [2, 7], [0, 1], [9, 11]])
    plot = plots.feature_activations(values, indexes, TOKENS, most=3)
    assert labels(plot, "yaxis") == ["2", "7", "9"]
    assert shown(plot)[0].tolist() == [[0, 0, 4, 0, 0], [3, 0.5, 0, 0, 0], [1, 2, 0, 0, 1.5]]
    with pytest.raises(ValueError, match="no feature is active"):
        plots.feature_activations(torch.zeros(5, 2), indexes, TOKENS)


def test_bars_are_the_largest_in_their_order() -> None:
    plot = plots.attribution_bars([0.1, -3.0, 0.2, 2.0], ["a", "b", "a", "d"], most=3)
    assert shown(plot)[0].tolist() == pytest.approx([-3.0, 0.2, 2.0]) and labels(plot) == ["b", "a", "d"]


def test_a_page_loads_nothing_and_tokens_are_no_markup(tmp_path: Path) -> None:
    plot = plots.sweep_heatmap(torch.rand(2, 5), ["</script><script>x", *TOKENS[1:]])
    plot.save(tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    assert "plotly.js v" in page and len(page) > 1_000_000
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", page)
    assert "</script><script>x" not in page
    assert plot._repr_html_().lstrip().startswith("<div") and "plotly.js v" in plot._repr_html_()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens: expected 5, one for each of the pattern's keys; got 4"):
        plots.attention_patterns(torch.rand(2, 5, 5), TOKENS[:4])
    with pytest.raises(ValueError, match="got 'abcde'"):
        plots.sweep_heatmap(torch.rand(2, 5), "abcde")
    with pytest.raises(ValueError, match=r"shape \[5\]; expected 2 dimensions"):
        plots.sweep_heatmap(torch.rand(5), TOKENS)
    with pytest.raises(ValueError, match=r"values has shape \[5, 2\] and indexes \[5, 3\]"):
        plots.feature_activations(torch.rand(5, 2), torch.zeros(5, 3), TOKENS)
    with pytest.raises(ValueError, match="words: expected 2"):
        plots.lens_heatmap([TOKENS], torch.rand(2, 5), TOKENS)
    with pytest.raises(ValueError, match="6 queries and 5 keys"):
        plots.attention_patterns(torch.rand(6, 5), TOKENS)
    with pytest.raises(ValueError, match="most=0"):
        plots.attribution_bars([1.0], ["a"], most=0)

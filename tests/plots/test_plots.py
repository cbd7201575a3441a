"""Figures hold the numbers and the tokens that they were given, and load nothing."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("plotly", reason='plotly is not installed: pip install -e ".[plot]"')

from transformers import AutoModelForCausalLM

from pymllm_interp import LM, Capture, SamplingParams, plots
from pymllm_interp.plots.picture import picture_of

TOKENS = ["the", " cat", "\n", " the", " <b>"]
SHOWN = ["the", " cat", "\\n", " the", " &lt;b&gt;"]


def shown(plot: plots.Plot) -> list[torch.Tensor]:
    """The numbers of each trace."""
    return [torch.tensor(trace.z if trace.type == "heatmap" else trace.y) for trace in plot.figure.data]


def labels(plot: plots.Plot, name: str = "xaxis") -> list[str]:
    return list(plot.figure.layout[name].ticktext)


def test_patterns_are_a_square_for_each_head_with_every_token_though_tokens_repeat() -> None:
    pattern = torch.rand(6, 3, 5).softmax(-1)
    heads = [0, 2, 4, 5, 7, 8]
    plot = plots.attention_patterns(pattern, TOKENS, positions=[2, -2, 4], heads=heads, title="layer 3")
    assert torch.equal(torch.stack(shown(plot)), pattern)
    assert labels(plot) == SHOWN and labels(plot, "yaxis") == SHOWN[2:]
    assert [note.text for note in plot.figure.layout.annotations] == [f"head {i}" for i in (0, 2, 4, 5, 7, 8)]
    square = torch.rand(5, 5)
    assert torch.equal(shown(plots.attention_patterns(square.tril(), TOKENS))[0], square.tril())
    assert torch.equal(shown(plots.attention_patterns(square, TOKENS, positions=range(5)))[0], square)


@pytest.mark.parametrize("asked", ["all", [1, 3], [-1]])
def test_a_captured_pattern_is_drawn_with_its_axes_and_refused_without_them(model_folder, asked) -> None:
    """The oracle is the attention of transformers' model."""
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        ids = list(range(9))  # as many as heads
        params = SamplingParams(max_tokens=1, temperature=0.0)
        (out,) = lm.generate([ids], params, capture=[Capture("pattern.1", positions=asked), Capture("pattern.2")])
    model = AutoModelForCausalLM.from_pretrained(
        model_folder("llama"), dtype=torch.float32, attn_implementation="eager"
    )
    wanted = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions[1][0]
    rows, tokens = out.activations["pattern.1"], [str(token) for token in ids]
    at = [position % 9 for position in (range(9) if asked == "all" else asked)]
    for plot in (
        plots.attention_patterns(out.activations, tokens, site="pattern.1"),
        plots.attention_patterns(rows.transpose(0, 1), tokens, positions=at),
    ):
        torch.testing.assert_close(torch.stack(shown(plot)), wanted[:, at], rtol=1e-4, atol=1e-5)
        assert labels(plot, "yaxis") == [tokens[position] for position in at]
    with pytest.raises(ValueError, match=r"A capture has \[positions, heads, keys\]"):
        plots.attention_patterns(rows, tokens)
    with pytest.raises(ValueError, match=r"there is pattern\.1, pattern\.2"):
        plots.attention_patterns(out.activations, tokens)
    if len(at) != 9:  # the heads
        with pytest.raises(ValueError, match=r"A capture has \[positions, heads, keys\]"):
            plots.attention_patterns(rows, tokens, positions=at)


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


def test_features_have_their_names() -> None:
    values, indexes = torch.tensor([[3.0, 1.0], [2.0, 0.5]]), torch.tensor([[7, 9], [9, 7]])
    plot = plots.feature_activations(values, indexes, ["a", "b"], names={7: "the <sea>", 8: "unseen"})
    assert labels(plot, "yaxis") == ["7 the &lt;sea&gt;", "9"]


def test_scores_of_patches_lie_over_their_image(tmp_path: Path) -> None:
    image = Image.new("RGB", (60, 40), "white")
    image.paste("red", (20, 0, 40, 20))
    plot = plots.image_heatmap([[0.0, -2.0, 0.0], [0.0, 0.0, 1.0]], image, title="patches")
    (heatmap,), (below,) = plot.figure.data, plot.figure.layout.images
    assert (heatmap.zmin, heatmap.zmax, heatmap.opacity) == (-2.0, 2.0, 0.6)
    assert (below.x, below.y, below.sizex, below.sizey, below.layer) == (-0.5, -0.5, 3, 2, "below")
    assert plot.figure.layout.yaxis.range == (1.5, -0.5), "the first row is above"
    pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install -e ".[plot]"')
    panel, _ = picture_of(plot.figure).axes
    picture, scores = panel.images
    assert [*picture.get_extent()] == [*scores.get_extent()] == [-0.5, 2.5, 1.5, -0.5]
    assert picture.get_array()[10, 30].tolist() == [255, 0, 0] and scores.get_array().tolist() == [
        list(row) for row in heatmap.z
    ]
    plot.save(tmp_path / "heat.png")
    drawn = Image.open(tmp_path / "heat.png").convert("RGB")
    assert len(drawn.getcolors(1 << 20) or ()) > 10
    with pytest.raises(ValueError, match="opacity=2: expected 0 to 1"):
        plots.image_heatmap([[1.0]], image, opacity=2)
    with pytest.raises(ValueError, match=r"values has shape \[2\]; expected 2 dimensions"):
        plots.image_heatmap([1.0, 2.0], image)


# -- pictures --------------------------------------------------------------------------------


def everything() -> dict[str, plots.Plot]:
    """A figure of each kind."""
    values = torch.rand(3, 5)
    return {
        "patterns": plots.attention_patterns(torch.rand(6, 5, 5).tril(), TOKENS, title="layer 3"),
        "lens": plots.lens_heatmap([[f"{i}{j}" for j in range(5)] for i in range(3)], values, TOKENS),
        "sweep": plots.sweep_heatmap(values - 0.5, TOKENS, title="a <b> $sweep$"),
        "features": plots.feature_activations(values.T[:, :2], torch.arange(10).reshape(5, 2), TOKENS),
        "bars": plots.attribution_bars([1.0, -2.0, 3.0], ["a", " <b>", "$c$"]),
    }


BEGINNINGS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("name", ["patterns", "lens", "sweep", "features", "bars"])
def test_pictures_are_written_by_suffix(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install -e ".[plot]"')
    plot = everything()[name]
    for suffix, beginning in BEGINNINGS.items() if name == "patterns" else [(".svg", BEGINNINGS[".svg"])]:
        path = tmp_path / f"figure{suffix}"
        plot.save(path)
        assert path.read_bytes().startswith(beginning) and path.stat().st_size > 3000
    text = unescape((tmp_path / "figure.svg").read_text())
    for label in ("a", " <b>", "$c$") if name == "bars" else TOKENS:
        assert label.replace("\n", "\\n") in text
    if name == "sweep":
        assert "a <b> $sweep$" in text


def test_a_picture_has_the_numbers_the_colours_and_the_rows_of_the_figure() -> None:
    pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install -e ".[plot]"')
    for name, plot in everything().items():
        panels = picture_of(plot.figure).axes[: len(plot.figure.data)]
        for panel, trace in zip(panels, plot.figure.data, strict=True):
            if name == "bars":
                assert [bar.get_height() for bar in panel.patches] == list(trace.y)
                continue
            (image,) = panel.images
            torch.testing.assert_close(torch.tensor(image.get_array().data), torch.tensor(trace.z, dtype=torch.float64))
            low, high = panel.get_ylim()  # plotly's first row is the lowest, unless the axis is reversed
            assert (low > high) == (name in ("patterns", "features"))
    panel, _ = picture_of(plots.sweep_heatmap([[-1.0, 0.0, 1.0]], ["a", "b", "c"]).figure).axes
    shades = [panel.images[0].cmap(panel.images[0].norm(value)) for value in (-1, 0, 1)]
    assert shades[0][2] > shades[0][0] and shades[2][0] > shades[2][2] and min(shades[1][:3]) > 0.9


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    plot = everything()["sweep"]
    with pytest.raises(ValueError, match=r"the suffix says what is written: .html, .png, .svg, .pdf"):
        plot.save(tmp_path / "figure.gif")
    plot.figure.add_scatter(x=[1], y=[2])
    with pytest.raises(ValueError, match=r"this figure has scatter: plot.figure.write_image\(path\) draws it"):
        plot.save(tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


# -- notebooks -------------------------------------------------------------------------------


def shown_by(kernel: Any, code: str, cell: str | None) -> list[str]:
    """The HTML that a cell shows.

    Args:
        kernel: a client of a running one.
        cell: its id, as a front end sends it.
    """
    message = kernel.session.msg(
        "execute_request", {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
    )
    message["metadata"] = {} if cell is None else {"cellId": cell}
    kernel.shell_channel.send(message)
    pages = []
    while True:
        answer = kernel.get_iopub_msg(timeout=120)
        if answer["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        assert answer["msg_type"] != "error", answer["content"]
        if answer["msg_type"] in ("display_data", "execute_result"):
            pages.append(answer["content"]["data"]["text/html"])
        if answer["msg_type"] == "status" and answer["content"]["execution_state"] == "idle":
            return pages


def test_a_notebook_has_the_javascript_once() -> None:
    pytest.importorskip("ipykernel", reason='ipykernel is not installed: pip install -e ".[notebook]"')
    manager = pytest.importorskip("jupyter_client.manager", reason='not installed: pip install -e ".[notebook]"')
    running, kernel = manager.start_new_kernel()
    try:
        two = (
            "from pymllm_interp import plots\nplot = plots.sweep_heatmap([[1.0, 2.0]], ['a', 'b'])\ndisplay(plot)\nplot"
        )

        def carriers(code: str, cell: str | None) -> list[bool]:
            return ["plotly.js v" in page for page in shown_by(kernel, code, cell)]

        assert carriers(two, "first") == [True, False]
        assert carriers("plot", "second") == [False] == carriers("plot", None)
        (page,) = shown_by(kernel, "plot", "second")
        assert len(page) < 50_000 and "Plotly.newPlot" in page and "Run all cells again" in page
        assert carriers(two, "first") == [True, False]  # its output is replaced
        assert carriers("plot", "second") == [False]
    finally:
        kernel.stop_channels()
        running.shutdown_kernel(now=True)


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
    with pytest.raises(ValueError, match="4 queries and 9 keys"):
        plots.attention_patterns(torch.rand(9, 4, 9), [*"abcdefghi"])
    with pytest.raises(ValueError, match=r"positions=\[1, 5\]: expected 2"):
        plots.attention_patterns(torch.rand(3, 2, 5), TOKENS, positions=[1, 5])
    with pytest.raises(ValueError, match=r"site='pattern\.1' names a pattern of activations"):
        plots.attention_patterns(torch.rand(5, 5), TOKENS, site="pattern.1")
    with pytest.raises(ValueError, match="most=0"):
        plots.attribution_bars([1.0], ["a"], most=0)


def test_what_is_no_number_and_no_image_is_refused_by_name() -> None:
    for junk in (None, "x", [1, "a"], [[1], [1, 2]], object()):
        with pytest.raises(ValueError, match="values: expected numbers"):
            plots.attribution_bars(junk, ["a"])
    with pytest.raises(ValueError, match="values are complex numbers"):  # half of each was drawn
        plots.attribution_bars(torch.tensor([1 + 2j]), ["a"])
    with pytest.raises(ValueError, match="expected a Pillow image"):
        plots.image_heatmap(torch.rand(2, 2), torch.zeros(8, 8, 3))
    for most in (None, 1.5, "x"):
        with pytest.raises(ValueError, match="most="):
            plots.attribution_bars([1.0], ["a"], most=most)  # pyright: ignore[reportArgumentType]

"""What a caller may write for the arguments of ops and captures, and what messages show of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from helpers_declared import lms, prompt_of, vector

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.core.model_spec import INNER_SITES, ModelSpec
from pymllm_interp.hooks.bind import bind, resolved
from pymllm_interp.hooks.positions import windows_of

pytest.importorskip("triton", reason="the kernels' tests need the package triton")

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)
LAYERS, HIDDEN = MODEL.num_hidden_layers, MODEL.hidden_size
GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module", params=["functions", "tables"])
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM, its hooks as functions or from tables."""
    with lms(request.param, model_folder) as load:
        yield load


# Numbers and positions


def test_a_number_may_be_a_tensor_without_dimensions() -> None:
    v: Any = torch.ones(HIDDEN)
    two: Any = torch.tensor(2.0, dtype=torch.float64)
    assert Steer("resid_post.1", v, scale=two) == Steer("resid_post.1", v, scale=2.0)
    assert Gate(v, two).threshold == 2.0
    assert Clamp("resid_post.1", v, low=two.numpy()[()]).low == 2.0
    for wrong in (torch.tensor([2.0]), torch.tensor(True), torch.ones(2000)):
        with pytest.raises(ValueError, match=r"scale=Tensor\(shape=\[\d*\], dtype=torch.\w+\); expected a number"):
            Steer("resid_post.1", v, scale=wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor([1, 4, -1]), np.array([4, 1, 6]), torch.tensor([1, 4, 6], dtype=torch.int32), (1, 4, -1),
        torch.tensor([False, True, False, False, True, False, True]), np.arange(7) % 3 == 1,
        [False, True, False, False, True, False, True],
    ],
)  # fmt: skip
def test_positions_may_be_tensors_arrays_and_masks(positions: Any) -> None:
    wanted = [1, 4] if getattr(positions, "dtype", None) == np.bool_ else [1, 4, 6]
    (bound,) = bind(Scale("resid_post.1", 0.0, positions=positions), MODEL, 7)
    selected = [place for window in bound.windows for place in range(7)[window.start : window.stop : window.step]]
    assert selected == wanted
    assert windows_of(torch.tensor(3), 7) == windows_of(3, 7) and windows_of(range(2, 5), 7) == windows_of([2, 3, 4], 7)


def test_a_mask_is_for_a_prompt_of_its_length() -> None:
    mask = torch.tensor([True, False, True])
    for spec in (
        Scale("resid_post.1", 0.0, positions=mask),
        pickle.loads(pickle.dumps(Capture("embed", positions=mask))),
    ):
        assert len(bind(spec, MODEL, 3)) == 1
        with pytest.raises(ValueError, match=r"the mask has 3 positions, and the prompt 4 tokens"):
            bind(spec, MODEL, 4)


def test_messages_show_shapes_in_place_of_tensors(lm_of: Any) -> None:
    lm, big = lm_of("llama"), torch.ones(40, 50)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: Scale("resid_post.1", big), r"factor=Tensor\(shape=\[40, 50\], dtype=torch.float32\); expected"),  # pyright: ignore
        (
            lambda: Scale("resid_post.1", 1.0, positions=big),
            r"positions=Tensor\(shape=\[40, 50\], dtype=torch.float32\)",
        ),
        (lambda: Steer("resid_post.1", big[0], when=big), r"when=Tensor\(shape=\[40, 50\]"),  # pyright: ignore
        (lambda: lm.generate(["w1"], GREEDY, interventions=[big]), r"interventions: Tensor\(shape=\[40, 50\]"),
        (lambda: lm.generate(["w1"], GREEDY, capture=[big]), r"capture: Tensor\(shape=\[40, 50\]"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message) as raised:
            make()
        assert len(str(raised.value)) < 400


# Vectors by layer


def test_rows_of_a_tensor_and_a_dict_are_vectors_of_the_layers(lm_of: Any) -> None:
    lm, prompt, rows = lm_of("llama", inner_sites=INNER_SITES), prompt_of(6, 1), vector(HIDDEN, 3, LAYERS)
    each = [Steer(f"resid_post.{layer}", rows[layer], scale=0.5) for layer in range(LAYERS)]
    given: list[Any] = [
        each,
        [Steer("resid_post.*", rows, scale=0.5)],
        [Steer("resid_post.*", dict(enumerate(rows)), scale=0.5)],
        [Steer("resid_post.{0,2}", rows[[0, 2]], scale=0.5), each[1]],
        [Steer("resid_post.*", {layer: rows[layer].tolist() for layer in range(LAYERS)}, scale=0.5)],
    ]
    lm.vectors["rows"] = rows
    given.append([Steer("resid_post.*", "rows", scale=0.5)])
    outs = lm.generate([prompt] * len(given), GREEDY, interventions=given, capture=["resid_post.2"])
    for out in outs[1:]:
        torch.testing.assert_close(out.activations["resid_post.2"], outs[0].activations["resid_post.2"])
        assert len(out.receipt.interventions) == LAYERS


def test_each_op_takes_vectors_by_layer() -> None:
    states, many = vector(HIDDEN, 1, LAYERS, 4), vector(HIDDEN, 2, LAYERS)
    ops: list[Any] = [
        Patch("resid_post.*", states, [0, 1, 2, 3]), Clamp("resid_post.*", many, low=0.0),
        Ablate("resid_post.*", states), Ablate("resid_post.*", dict(enumerate(many))),
        Scale("resid_post.*", 2.0, when=Gate(dict(enumerate(many)))), Steer("z.*", vector(8, 1, LAYERS, 9)),
        Patch("z.*", vector(8, 1, LAYERS, 4, 9), [0, 1, 2, 3]),
    ]  # fmt: skip
    for op in ops:
        (found,) = resolved([[op]], {}, MODEL)
        assert [spec.site for spec in found] == [f"{op.site[:-2]}.{layer}" for layer in range(LAYERS)]
        assert all(bind(spec, MODEL, 5) for spec in found), op
        assert op == type(op)(**dict(op._content().arguments)) and op.fingerprint != found[0].fingerprint
    (patches,) = resolved([[ops[0]]], {}, MODEL)
    assert all(torch.equal(patch.values, rows) for patch, rows in zip(patches, states, strict=True))


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (lambda: Steer("resid_post.*", torch.ones(2, HIDDEN)), r"vectors of shape \[2, 72\] are for 2 layers; the sites have 3"),
        (lambda: Steer("resid_post.*", {0: torch.ones(HIDDEN)}), r"there is no vector for resid_post.1; it has the layers 0"),
        (lambda: Steer("resid_post.*", {0.5: torch.ones(HIDDEN)}), r"nor vectors by layer, .*its keys are \[0.5\]"),
        (lambda: Steer("resid_post.*", {0: torch.tensor([1.0, float("nan")])}), r"vector\[0\]: it holds NaN"),
        (lambda: Steer("resid_post.1", torch.ones(2, 2, HIDDEN)), r"the shape is \[2, 2, 72\]; expected 1-dimensional or 2-"),
    ],
)  # fmt: skip
def test_vectors_that_are_not_those_of_the_layers_are_refused(op: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        resolved([[op()]], {}, MODEL)


# Positions that a prompt does not have


def test_positions_that_a_prompt_does_not_have_are_skipped_where_that_was_asked_for(lm_of: Any) -> None:
    lm, places, prompts = lm_of("llama"), [7, 2, -5, 0], [prompt_of(length, 3) for length in (4, 8, 2)]
    values = vector(HIDDEN, 5, 4)
    edits = [Patch("resid_post.0", values, places, missing="skip"), Scale("attn_out.1", 0.0, [5], missing="skip")]
    capture = [
        Capture("resid_post.0", places, missing="skip"),
        Capture("mlp_out.1", [6], missing="skip", reduce="mean"),
    ]
    outs = lm.generate(prompts, GREEDY, interventions=edits, capture=capture)
    plain = lm.generate(prompts, GREEDY, interventions=edits, capture=["resid_post.0", "mlp_out.1"])
    wanted = [[(2, 1), (0, 3)], [(7, 0), (2, 1), (3, 2), (0, 3)], [(0, 3)]]  # (position, row of the values)
    for out, whole, pairs in zip(outs, plain, wanted, strict=True):
        rows, count = out.activations["resid_post.0"], len(pairs)
        assert out.activations.positions["resid_post.0"].tolist() == sorted(place for place, _ in pairs)
        assert torch.equal(rows, torch.stack([values[row] for _, row in sorted(pairs)]))
        mean = whole.activations["mlp_out.1"][6:7] if count == 4 else torch.empty(0, HIDDEN)
        assert torch.equal(out.activations["mlp_out.1"], mean)
        patched, scaled = out.receipt.interventions
        assert (patched.prompt_rows, patched.missing, scaled.prompt_rows, scaled.missing) == (
            count, 4 - count, int(count == 4), int(count < 4),
        )  # fmt: skip
        assert [(found.prompt_rows, found.missing) for found in out.receipt.captures] == [
            (count, 4 - count), (int(count == 4), int(count < 4)),
        ]  # fmt: skip


def test_positions_that_a_prompt_does_not_have_are_refused_otherwise() -> None:
    with pytest.raises(
        ValueError, match=r"positions \[7\] are beyond the prompt, .* and missing='skip' leaves them out"
    ):
        bind(Scale("embed", 0.0, [7, 1]), MODEL, 5)
    with pytest.raises(ValueError, match=r"Scale\('embed'\): missing='no'; expected 'error' or 'skip'"):
        Scale("embed", 0.0, missing="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"values has 2 rows for 3 positions"):
        bind(Patch("embed", torch.ones(2, HIDDEN), [0, 1, 9], missing="skip"), MODEL, 2)

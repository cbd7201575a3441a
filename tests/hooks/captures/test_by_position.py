"""`Steer` with a vector for each position: as one `Steer` for each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held
from helpers_declared import WAYS, lms, vector
from helpers_runner import random_ids

from pymllm_interp import Capture, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.bind import bind, resolved
from pymllm_interp.hooks.positions import ordinals_of
from pymllm_interp.hooks.site import Site
from pymllm_interp.wire.specs import intervention_of, to_json

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)
SITES = ["embed", "resid_post.1", "mlp_out.0", "attn_out.1", "final_norm", "z.1", "v.0", "mlp_act.1"]
PARAMS = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture(scope="module", params=WAYS[:2])
def lm(request: Any, model_folder: Any) -> Iterator[Any]:
    with lms(request.param, model_folder) as load:
        yield load(
            "llama", max_num_tokens=7, page_size=4, enable_prefix_caching=False, inner_sites=("z", "v", "mlp_act")
        )


@pytest.mark.few("seed", 0)
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_added_where_they_were_written_for(seed: int, lm: Any) -> None:
    """Prompts in chunks of random borders: the same bits as with an op for each position."""
    rng = random.Random(seed)
    prompts, specs, singles = [], [], []
    for i in range(3):
        prompt, site = random_ids(rng.randrange(4, 14), seed=10 * seed + i), rng.choice(SITES)
        places = rng.sample(range(-len(prompt), 0), 3)
        rows = vector(MODEL.width(Site.parse(site).kind), 10 * seed + i, 3)
        split = site.partition(".")[0] in "zv"
        when = Gate(vector(rows.shape[1], i), 0.0) if rng.random() < 0.3 else None
        kwargs: dict[str, Any] = {"scale": 1.5, "norm": rng.choice(["none", "preserve", "match"]), "when": when}
        prompts.append(prompt)
        given = rows.unflatten(-1, (-1, MODEL.head_dim)) if split else rows
        specs.append([Steer(site, given, positions=places, **kwargs)])
        singles.append([Steer(site, row, positions=[p], **kwargs) for row, p in zip(rows, places, strict=True)])
    capture = ["resid_post.*", "final_norm"]
    with held(lm):
        handles = [
            [lm.submit(p, PARAMS, interventions=s, capture=capture) for p, s in zip(prompts, given, strict=True)]
            for given in (specs, singles)
        ]
    for one, three in zip(*[[handle.result(600) for handle in group] for group in handles], strict=True):
        assert one.token_ids == three.token_ids
        for site in ["resid_post.0", "resid_post.2", "final_norm"]:
            torch.testing.assert_close(one.activations[site], three.activations[site], rtol=1e-5, atol=1e-5)
        (applied,) = one.receipt.interventions
        assert applied.prompt_rows == sum(entry.prompt_rows for entry in three.receipt.interventions) == 3


def test_the_order_of_positions_is_that_of_rows_and_missing_ones_leave_theirs_out() -> None:
    rows = vector(MODEL.hidden_size, 1, 3)
    (bound,) = bind(Steer("resid_post.0", rows, positions=[-1, 9, 2], missing="skip"), MODEL, 6)
    at = torch.tensor([5, 0, 2])
    state = torch.zeros(3, MODEL.hidden_size)
    found = bound.spec.act(state, torch.ones(3, 1), ordinals_of(bound.windows, at), bound.spec.vectors)
    assert torch.equal(found[0], rows[0]) and torch.equal(found[2], rows[2])
    heads = vector(MODEL.head_dim, 2, 3, 2)
    (bound,) = bind(Steer("z.0", heads, positions=[4, 0, 1], heads=[3, 0]), MODEL, 6)
    state = torch.zeros(2, MODEL.width("z"))
    found = bound.spec.act(
        state, torch.ones(2, 1), ordinals_of(bound.windows, torch.tensor([4, 1])), bound.spec.vectors
    )
    found = found.unflatten(-1, (-1, MODEL.head_dim))
    assert torch.equal(found[0, 3], heads[0, 0]) and torch.equal(found[1, 0], heads[2, 1]) and not found[:, 1:3].any()


def test_layers_come_before_positions_at_a_pattern() -> None:
    many = vector(MODEL.hidden_size, 3, 3, 2)
    for given in (many, {0: many[0], 1: many[1], 2: many[2]}):
        (found,) = resolved([[Steer("resid_post.*", given, positions=[0, 1])]], {}, MODEL)
        assert all(torch.equal(spec.vector, rows) for spec, rows in zip(found, many, strict=True))
    (found,) = resolved([[Steer("resid_post.1", "both", positions=[0, 1])]], {"both": many[0]}, MODEL)
    assert torch.equal(found[0].vector, many[0])
    (found,) = resolved([[Steer("resid_post.*", "each")]], {"each": many[:, 0]}, MODEL)
    assert torch.equal(found[1].vector, many[1, 0])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda w: Steer("resid_post.1", torch.ones(2, w)), r"vector has 2 rows for positions without end, which take one"),
        (
            lambda w: Steer("resid_post.1", torch.ones(5, w), positions="generated"),
            r"vector has 5 rows .*: positions=Generated\(0, 5\) takes one row for each of the first 5 generated tokens",
        ),
        (lambda w: Steer("resid_post.1", torch.ones(1, w)), r"vector has 1 rows .*: give vector\[0\], one vector for all"),
        (lambda w: Patch("resid_post.1", torch.ones(1, w), positions=[0, 1]), r"1 rows for 2 positions: give values\[0\]"),
        (lambda w: Steer("resid_post.1", torch.ones(2, w), positions=[0, 1, 2]), r"vector has 2 rows for 3 positions"),
        (lambda w: Steer("resid_post.1", torch.ones(2, w + 1), positions=[0, 1]), r"vector has \d+ values; at resid_post"),
        (lambda w: Steer("resid_post.1", torch.eye(w)[:2] * torch.tensor([[1], [0]]), positions=[0, 1], norm="match"),
         r"vector is zero in row 1"),
        (lambda w: Steer("z.1", torch.ones(2, w), positions=[0, 1]), r"vector has 144 values; at z the model has 72"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        bind(make(MODEL.hidden_size), MODEL, 6)


@pytest.mark.parametrize("scale", [[1, 2], (1.0,), range(3), torch.ones(2)])
def test_a_list_of_strengths_says_how_a_schedule_is_written(scale: Any) -> None:
    with pytest.raises(
        ValueError, match=r"scale=.*expected a number; .*strengths\[:, None\] \* vector.*Generated\(0, len"
    ):
        Steer("resid_post.1", torch.ones(MODEL.hidden_size), scale=scale)
    with pytest.raises(ValueError, match=r"factor=.*expected a number; for one a run, make a spec for each"):
        Scale("resid_post.1", scale)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"scale='1'; expected a number$"):
        Steer("resid_post.1", torch.ones(MODEL.hidden_size), scale="1")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("site", ["resid_post.1", "v.1"])
def test_it_goes_through_json(site: str) -> None:
    width = MODEL.width(site.partition(".")[0])
    rows = vector(width, 3, 2)
    given = rows.unflatten(-1, (-1, MODEL.head_dim)) if site[0] == "v" else rows
    spec = Steer(site, given, positions=[0, -1], scale=2.0)
    again = intervention_of(json.loads(json.dumps(to_json(spec))))
    assert again == spec and torch.equal(again.vector, rows)


def test_it_is_part_of_a_capture_with_equal_positions(lm: Any) -> None:
    rows, prompt = vector(MODEL.hidden_size, 5, 2), random_ids(9, seed=5)
    capture = [Capture("resid_post.0", positions=[2, 6])]
    edits = [None, [Steer("resid_post.0", rows, positions=[6, 2])]]
    plain, steered = lm.generate([prompt] * 2, PARAMS, interventions=edits, capture=capture)
    moved = steered.activations["resid_post.0"][0] - plain.activations["resid_post.0"][0]
    torch.testing.assert_close(moved, rows[1], rtol=1e-4, atol=1e-4)

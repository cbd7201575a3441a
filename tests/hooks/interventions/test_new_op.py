"""A new op is one class: these run through declaring, binding and acting, and no module of the package knows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from helpers_declared import lms
from torch import Tensor

from pymllm_interp import Capture, Gate, SamplingParams, Steer
from pymllm_interp.client.handle import RequestError
from pymllm_interp.client.prompts import for_each_prompt
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.bind import DeclaredLimits
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.captures.reductions.pools import Mean
from pymllm_interp.hooks.captures.reductions.reduction import Reduced, Reduction
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.hooks.interventions.host_ops import RequestRows, host_ops
from pymllm_interp.hooks.interventions.op import Op, row_dots
from pymllm_interp.hooks.positions import Positions
from pymllm_interp.hooks.site import Site
from pymllm_interp.hooks.vectors.files import Source
from pymllm_interp.kernels import edit_codes as codes
from pymllm_interp.kernels.edit_codes import OpWords

INFO = ModelSpec.of(CONFIGS["llama"](), torch.float32)
WIDTH, LAYERS, PROMPT = INFO.hidden_size, INFO.num_hidden_layers, 7
LIMITS = {"max_interventions_per_site": 4, "max_intervention_vectors": 40, "max_capture_bytes": 1 << 20}


@dataclass(frozen=True, eq=False)
class Feature(Op):
    """Set an SAE feature: ``state + (target - relu(dot(state, encoder) + bias)) * decoder``."""

    site: Site | str
    encoder: Source = field(repr=False)
    decoder: Source = field(repr=False)
    bias: float = 0.0
    target: float = 0.0
    positions: Positions = "all"
    when: Gate | None = None

    def __post_init__(self) -> None:
        self._set_place()
        self._set_tensor("encoder", 1)
        self._set_tensor("decoder", 1)
        self._set_number("bias")
        self._set_number("target")

    @cached_property
    def both(self) -> Tensor:
        return torch.stack([self.encoder, self.decoder])

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return (self.both,)

    def written(self) -> Iterator[tuple[str, float]]:
        yield "target * decoder", self.target * self.decoder.abs().max().item()

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        encoder, decoder = vectors[0]
        return x + (self.target - torch.relu(row_dots(x, encoder) + self.bias)) * decoder


@dataclass(frozen=True, eq=False)
class Negate(Op):
    """``-state``. Kernels know it as another op's special case."""

    site: Site | str
    positions: Positions = "all"
    when: Gate | None = None

    def __post_init__(self) -> None:
        self._set_place()

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        return -x

    def words(self) -> OpWords:
        return OpWords(codes.SCALE, rank=0, a=-1.0)


def vector(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (WIDTH,)), generator=torch.Generator().manual_seed(seed))


def feature(site: str = "resid_post.0", **kwargs: Any) -> Feature:
    return Feature(site, vector(1), vector(2), bias=0.3, target=2.0, **kwargs)


def set_feature(x: Tensor) -> Tensor:
    return x + (2.0 - torch.relu(x @ vector(1) + 0.3))[..., None] * vector(2)


@torch.no_grad()
def test_a_new_op_acts_on_a_cpu_beside_others_at_its_positions_and_behind_its_gate() -> None:
    gate = Gate(vector(3), 0.0)
    specs = [feature(positions="prompt", when=gate), Negate("resid_post.0", positions=[-1])]
    assert for_each_prompt(specs, 2) == [specs, specs]
    declared = Declared(BoundHooks.of(specs, INFO, PROMPT, DeclaredLimits(**LIMITS)))
    (site,) = declared.hooks.ops
    rows = torch.arange(PROMPT + 1)
    ops = host_ops([RequestRows(declared, 0, range(PROMPT + 1), 0, 0)], LAYERS)
    assert ops is not None
    state = vector(4, 1, PROMPT + 1, WIDTH)
    fires = (state[0] @ vector(3) > 0) & (rows < PROMPT)
    wanted = torch.where(fires[:, None], set_feature(state[0]), state[0])
    wanted[PROMPT - 1] *= -1
    assert 0 < fires.sum() < PROMPT
    torch.testing.assert_close(ops.at(site, state)[0], wanted)
    first, second = declared.hooks.applied(PROMPT + 1, declared.fires)
    assert (first.intervention, first.prompt_rows, first.generated_rows) == ("Feature", PROMPT, 0)
    assert first.gate_fires == int(fires.sum()) and (second.intervention, second.prompt_rows) == ("Negate", 1)


def test_a_new_op_is_checked_compared_and_named_as_the_others_are() -> None:
    assert feature() == feature() != feature(positions=[0])
    with pytest.raises(ValueError, match=r"Feature\('resid_post.0'\): decoder has 3 values; at resid_post"):
        BoundHooks.of([Feature("resid_post.0", vector(1), torch.ones(3))], INFO, PROMPT, DeclaredLimits(**LIMITS))
    with pytest.raises(ValueError, match=r"Feature\('resid_post.0'\): bias=inf; expected a finite number"):
        Feature("resid_post.0", vector(1), vector(2), bias=float("inf"))
    half = ModelSpec.of(CONFIGS["llama"](), torch.float16)
    with pytest.raises(ValueError, match=r"target \* decoder reaches 1e\+05, which torch.float16"):
        BoundHooks.of(
            [Feature("resid_post.0", vector(1), torch.ones(WIDTH), target=1e5)], half, PROMPT, DeclaredLimits(**LIMITS)
        )


@torch.no_grad()
def test_a_new_op_runs_through_an_engine_and_takes_vectors_by_name(lm_of: Any) -> None:
    lm = lm_of("llama", device="cpu")
    lm.vectors["encoder"], lm.vectors["decoder"] = vector(1), vector(2)
    named = Feature("resid_post.0", "encoder", "decoder", bias=0.3, target=2.0)
    prompt, params = [3, 4, 5, 6], SamplingParams(temperature=0, max_tokens=3)
    capture = [Capture("resid_post.0")]
    (plain,) = lm.generate([prompt], params, capture=capture)
    (out,) = lm.generate([prompt], params, capture=capture, interventions=[named])
    before, after = (run.activations["resid_post.0"][: len(prompt)] for run in (plain, out))
    torch.testing.assert_close(after, set_feature(before), rtol=1e-4, atol=1e-4)
    (applied,) = out.receipt.interventions
    assert (applied.intervention, applied.prompt_rows, applied.generated_rows) == ("Feature", 4, 2)
    del lm.vectors["encoder"], lm.vectors["decoder"]


@dataclass(frozen=True, eq=False)
class Fails(Op):
    """Raises behind the prompt."""

    site: Site | str
    error: type[BaseException]
    positions: Positions = "generated"
    when: Gate | None = None

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        raise self.error("of an op")


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_an_op_that_raises_ends_its_own_request(lm_of: Any, error: type[BaseException]) -> None:
    lm = lm_of("llama", device="cpu")
    prompt, params = [3, 4, 5, 6], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (alone,) = lm.generate([prompt], params)
    handles: list[Any] = []
    with lm.generate(prompt, max_new_tokens=8) as tracer:  # a block in the steps of the others
        steps = list().save()
        for step in tracer.iter[:]:
            steps.append(lm.model.layers[0].output[0, -1])
            if step == 0:
                edits = [[], [Steer("resid_post.1", vector(3))], [Fails("resid_post.1", error)]]
                handles.extend(lm.submit(prompt, params, interventions=edit) for edit in edits)
    *others, failing = handles
    with pytest.raises(RequestError, match=f"Fails.* raised {error.__name__}: of an op"):
        failing.result(60)
    assert others[0].result(60).token_ids == alone.token_ids
    assert len(others[1].result(60).token_ids) == len(steps) == 8


@dataclass(frozen=True, eq=False)
class NoSum(Mean):
    """Raises in the steps, or behind them."""

    error: type[BaseException] = ValueError

    def fold(self, before: np.ndarray, state: np.ndarray) -> None:
        raise self.error("of a fold")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_reduction_that_raises_ends_its_own_request(lm_of: Any, error: type[BaseException]) -> None:
    lm = lm_of("llama", device="cpu")
    prompt, params = [3, 4, 5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    captures = [[], [Capture("resid_post.1", reduce=NoSum(error))], [Capture("resid_post.1", reduce="mean")]]
    plain, failing, other = [lm.submit(prompt, params, capture=capture) for capture in captures]
    with pytest.raises(RequestError, match=f"{error.__name__}: of a fold"):
        failing.result(60)
    assert plain.result(60).token_ids == other.result(60).token_ids


@dataclass(frozen=True, eq=False)
class Reads(Reduction):
    """Counts of positive values. Raises where it reads no more than `most` rows, in `read` or in `sent`."""

    most: int = -1
    in_read: bool = True
    error: type[BaseException] = ValueError

    def sent_width(self, width: int) -> int:
        return 1

    def read(self, site: Site, rows: Tensor, readout: Any) -> Tensor:
        if self.in_read and len(rows) <= self.most:
            raise self.error("of a reading")
        return rows

    def sent(self, rows: Tensor, readout: Any) -> Tensor:
        if not self.in_read and len(rows) <= self.most:
            raise self.error("of a reading")
        return (rows > 0).sum(-1, keepdim=True)

    def results(self, values: Tensor, dtype: torch.dtype | None, states: bool) -> Reduced:
        return Reduced(values)


@pytest.mark.parametrize("way", ["functions", "tables"])
@pytest.mark.parametrize(("in_read", "error"), [(True, ValueError), (False, SystemExit)])
def test_a_reading_that_raises_ends_its_own_request(
    model_folder: Any, way: str, in_read: bool, error: type[BaseException]
) -> None:
    """In a chunk of a prompt, of a step with others, or in decode steps whose records are alike."""
    if way == "tables":
        pytest.importorskip("triton", reason="the tables are read by kernels")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    good, bad = (Capture("resid_post.1", reduce=Reads(most, in_read, error)) for most in (-1, 1))
    prompts, captures = [[3, 4, 5, 6]] * 4, [[good], [bad], ["resid_post.0"], []]
    with lms(way, model_folder) as load:
        lm = load("llama")
        wanted = [lm.generate([prompt], params, capture=[good])[0] for prompt in prompts[:1]]
        handles = [lm.submit(p, params, capture=c) for p, c in zip(prompts, captures, strict=True)]
        with pytest.raises(RequestError, match=f"{error.__name__}: of a reading"):
            handles[1].result(60)
        for handle in (handles[0], *handles[2:]):
            assert handle.result(60).token_ids == wanted[0].token_ids
        found = handles[0].result().activations["resid_post.1"]
        assert torch.equal(found, wanted[0].activations["resid_post.1"])
        several = Capture("resid_post.1", reduce=Reads(3, in_read, error))
        many = [lm.submit([3], params, capture=[several]) for _ in range(3)]  # alike, in all steps
        for handle in many:
            with pytest.raises(RequestError, match="of a reading"):
                handle.result(60)
        assert lm.generate([[3, 4, 5, 6]], params)[0].token_ids == wanted[0].token_ids


def test_device_tables_refuse_an_op_without_words_but_at_the_logits() -> None:
    limits = DeclaredLimits(**LIMITS, device_tables=True)
    with pytest.raises(ValueError, match=r"Feature\('resid_post.0'\): there is no kernel for it"):
        BoundHooks.of([feature()], INFO, PROMPT, limits)
    at_logits = Feature("logits", torch.ones(INFO.vocab_size), torch.ones(INFO.vocab_size))
    assert BoundHooks.of([at_logits, Negate("resid_post.0")], INFO, PROMPT, limits).ops


@torch.no_grad()
def test_device_tables_hold_an_op_as_its_words_say() -> None:
    pytest.importorskip("triton", reason="the tables are read by kernels")
    from pymllm_interp.hooks.interventions.device_tables import DeviceTables
    from pymllm_interp.hooks.interventions.vector_pool import VectorPool
    from pymllm_interp.layers.edits.table import TableOps

    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = DeclaredLimits(**LIMITS, device_tables=True)
    declared = Declared(BoundHooks.of([Negate("resid_post.0", positions=[0, 2])], INFO, PROMPT, limits))
    edited = torch.zeros(2, dtype=torch.int32, device=device)
    tables = DeviceTables(edited, INFO, limits, torch.zeros(8, device=device))
    pool = VectorPool(limits.max_intervention_vectors, INFO.hidden_size)
    tables.set_row(1, declared, pool.acquire(declared))
    tables.apply_staged_writes()
    assert edited.tolist() == [0, 1] and pool.used == 0
    rows, positions = torch.ones(3, dtype=torch.int64, device=device), torch.arange(3, device=device)
    ops = TableOps(tables.tables, rows, positions, torch.zeros(2, 3, dtype=torch.int64, device=device))
    (site,) = declared.hooks.ops
    state = vector(5, 1, 3, WIDTH).to(device)
    assert torch.equal(ops.at(site, state), state * torch.tensor([[-1], [1], [-1]], device=device))

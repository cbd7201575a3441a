"""Edits that depend on the states that they change: one call for the rows of many requests, with the bits of the blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers_idle import left_behind
from test_lowering import GENERATION, ONE_PASS, assert_equal, same, vectors_of

from pymllm_interp import LM
from pymllm_interp.hooks.interventions.row_edit import RowProgram, run_rows

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]
LAYER = "lm.model.layers[{i}].output"
VALUES = (
    "{h} / {h}.norm(dim=-1, keepdim=True)", "{h} - ({h} * V[0]).sum(-1, keepdim=True) * V[1]", "0.5 * {h} * V[2] + {h}",
    "{h}.float() / torch.norm({h}, dim=-1, keepdim=True)", "-{h} * 2", "{h} - {h}.mean(dim=-1, keepdim=True)", "{h}.relu() * 1.5",
    "({h} - {h}.mean(-1, keepdim=True)) / ({h}.square().mean(-1, keepdim=True) + 1e-5).sqrt()", "V[3] * torch.abs({h}) - 1",
    "{h} * V[4] / (1 + {h}.abs())", "{h}.clamp(-0.5, 0.25)", "torch.clamp({h}, min=0) - V[1]",
    "{h} / {h}.clone().detach().float().norm(dim=-1, keepdim=True)",
)  # fmt: skip
STATEMENTS = (
    "{x}[:] = {value}", "{x}[:, -1] = {last}", "{x}[0] = {value}", "{x}[:] *= V[5]", "{x}[:] /= 3", "{x}[0, -1] += {last}",
    "{x}[...] -= {value}", "{x}[:] *= {x}.norm(dim=-1, keepdim=True)", "{x}[:, -1] /= V[6]",
)  # fmt: skip


def random_rows(rng: random.Random, single: bool) -> list[str]:
    """A block that edits one layer by its own values, and reads what comes of it."""
    i, named = rng.randrange(2), rng.random() < 0.6
    x = rng.choice([LAYER.format(i=i), LAYER.format(i=i).replace(".output", ".mlp.output")])
    before, place = ([f"h = {x}"], "h") if named else ([], x)
    target = rng.choice([place, x])
    statement = rng.choice(STATEMENTS)
    last = rng.choice(VALUES).format(h=place + rng.choice(["[:, -1]", "[0, -1]"]))
    line = statement.format(x=target, value=rng.choice(VALUES).format(h=place), last=last)
    if not named and rng.random() < 0.2:
        line = f"{x} = {rng.choice(VALUES).format(h=x)}"
    after = rng.choice([[], [f"a = {target}.clone()"]])
    part = rng.choice(["[0, -1]", "", ".view(-1)", ".sum()"])
    body = [*before, line, *after, f"n = lm.model.layers[-1].output{part}", f"g = lm.model.norm.output{part}"]
    names = ["g", "n", *(["a"] if after else [])]
    if single:
        return ["V = known['V']", *body, *(f"{name}.save()" for name in names), "out = lm.lm_head.output.save()"]
    steps = rng.choice(["[:]", "[:3]", "[1:4]", "[2]", "[0]", "[3:]", "[[0, 2]]"])
    kept = [f"    kept.append({name})" for name in names]
    loop = [
        "V = known['V']",
        "kept = list().save()",
        f"for step in tracer.iter{steps}:",
        *(f"    {n}" for n in body),
        *kept,
    ]
    return [*loop, "out = tracer.result.save()"]


def compared_rows(lms: tuple[LM, LM], seed: int, tries: int) -> int:
    """Compare random blocks. Returns the number that were lowered."""
    rng, lowered = random.Random(seed), 0
    for _ in range(tries):
        single = rng.random() < 0.4
        prompt = [rng.randrange(1, 90) for _ in range(rng.choice([1, 2, 3, 7, 16, 17]))]
        receipt = same(lms, random_rows(rng, single), ONE_PASS if single else GENERATION, prompt)
        lowered += receipt is not None and receipt.lowered
    return lowered


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("tries", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_random_edits_by_the_row_give_the_same_bits(lm_of, family, dtype, tries):
    lms = lm_of(family, lower_traces="auto", dtype=dtype), lm_of(family, lower_traces="off", dtype=dtype)
    assert compared_rows(lms, 3, tries) > tries // 12
    assert not left_behind(lms[0])


KEPT = {
    "a value that is saved before": ["h = {x}", "g = h.norm(dim=-1).save()", "h[:] = h / 2.5 * h"],
    "a value of the edit that has a name": ["h = {x}", "n = h.norm(dim=-1, keepdim=True)", "h[:] = h / n"],
    "a row by another row": ["h = {x}", "h[:, -1] = h[:, 0] * h[:, 0]"],
    "a sum over tokens": ["h = {x}", "h[:] = h - h.mean(dim=1, keepdim=True)"],
    "no dimension is kept": ["h = {x}", "h[:, -1] *= h[0, -1].norm()"],
    "a product": ["h = {x}", "h[0, -1] -= (h[0, -1] @ known['V'][0]) * known['V'][0]"],
    "exp": ["h = {x}", "h[:] = h.exp()"],
    "another place": ["g = lm.model.layers[0].output", "lm.model.layers[1].output[:] = g * 2"],
    "another dtype": ["{x} = {x}.double() * 2"],
    "a value for all": ["{x} = {x}.sum(-1, keepdim=True)"],
    "a matrix": ["{x}[:] *= torch.ones(1, 1)"],
    "an assignment behind a name": ["h = {x}", "{x} = {x} * known['V'][0]", "h.save()"],
    "a name that is changed": ["h = {x}", "h[:] = h * h", "h[:] = h + h"],
    "a zero norm": ["{x}[:] *= 0.0", "g = lm.model.layers[2].output.save()"],
    "infinity": ["{x}[:] = {x}.abs() / ({x} - {x})", "g = lm.model.layers[1].output.save()"],
    "a power": ["{x}[:] **= 2"],
    "a truth value": ["{x}[:] = {x} * True"],
    "a division by zero": ["{x}[:] = {x} * (1 / 0)"],
    "a number beside the states": ["n = 3", "{x}[:] = n * {x} - n / 7", "g = lm.model.layers[2].output.save()"],
    "an order of the norm": ["{x}[:] = {x}.norm(1, dim=-1, keepdim=True) + {x}"],
    "maximum": ["{x}[:] = {x}.max(dim=-1, keepdim=True)[0] - {x}"],
}


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("opening", [ONE_PASS, GENERATION])
def test_what_may_not_be_a_program_gives_the_same(lm_of, what, opening):
    lms = lm_of("llama", lower_traces="auto"), lm_of("llama", lower_traces="off")
    lines = [line.format(x=LAYER.format(i=1)) for line in KEPT[what]]
    after = "lm.model.layers[2].output[0, -1]"
    after = "lm.model.layers[1].output[0, -1]" if what == "infinity" else after
    same(lms, [*lines, f"z = {after}.save()"], opening)
    body = [f"    {line}" for line in (*lines, f"kept.append({after})") if ".save()" not in line]
    if opening is GENERATION:
        same(lms, ["kept = list().save()", "for s in tracer.iter[:]:", *body], opening)


def test_edits_of_many_requests_are_one_call_in_a_step(lm_of, monkeypatch):
    """Each with a vector of its own, beside others."""
    import pymllm_interp.hooks.interventions.host_ops as host_ops

    calls: list[int] = []

    def counted(states: torch.Tensor, programs: Any, counts: Any) -> None:
        calls.append(len(programs))
        run_rows(states, programs, counts)

    monkeypatch.setattr(host_ops, "run_rows", counted)
    found = []
    for mode in ("auto", "off"):
        lm = lm_of("llama", lower_traces=mode, max_running_requests=64)
        vectors = vectors_of(lm)
        with lm.generate(max_new_tokens=6, ignore_eos=True) as tracer:
            rows = list().save()
            for i in range(12):
                v = vectors[i % 8]
                with tracer.invoke([3 + i, 5, 7][: 1 + i % 3]):
                    for _ in tracer.iter[:]:
                        h = lm.model.layers[0].output
                        h[:] = h - (h * v).sum(-1, keepdim=True) * v
                        rows.append(lm.model.layers[1].output[0, -1])
        assert all(receipt.lowered == (mode == "auto") for receipt in tracer.receipts)
        found.append(rows)
    assert_equal(*found, "rows")
    assert 12 in calls and calls.count(12) >= 4


def test_nan_of_an_edit_is_counted(lm_of):
    counts = []
    for mode in ("auto", "off"):
        lm = lm_of("llama", lower_traces=mode)
        with pytest.warns(UserWarning, match="held NaN"):
            with lm.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True) as tracer:
                for _ in tracer.iter[:]:
                    h = lm.model.layers[1].output
                    h[:] = (h - h) / (h - h)
        counts.append(tracer.receipt.nan_edits)
        assert tracer.receipt.lowered == (mode == "auto")
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 127, 576, 2048])
def test_a_row_has_the_same_bits_in_every_batch(width, dtype):
    noise = torch.Generator().manual_seed(width)
    rows = torch.randn(37, width, generator=noise).to(dtype)
    for value in VALUES:
        vectors = [torch.randn(width, generator=noise) for _ in range(len(rows) * 5)]
        names = {f"t{i}": f"V[{i}]" for i in range(5)}
        text = value.format(h="h")
        for name, written in names.items():
            text = text.replace(written, name)
        text = (
            text.replace("torch.norm(h, ", "h.norm(")
            .replace("torch.abs(h)", "h.abs()")
            .replace("torch.clamp(h, ", "h.clamp(")
        )
        programs = [
            RowProgram(f"h[:] = {text}", dict(zip(names, vectors[r * 5 :], strict=False))) for r in range(len(rows))
        ]
        together = rows.clone()
        run_rows(together, programs, [1] * len(rows))
        for row, program, ours in zip(rows, programs, together, strict=True):
            alone = row.clone()[None, None]
            program.run(alone, program.tensors)
            assert torch.equal(alone[0, 0], ours) or alone.isnan().any(), text

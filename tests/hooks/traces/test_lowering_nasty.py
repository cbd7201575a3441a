"""Blocks with aliases, late edits, casts, errors and early ends, on engines that chunk, preempt and reuse: each as in the pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers_idle import left_behind
from test_lowering import GENERATION, ONE_PASS, PROMPT, assert_equal, ran, same, script

from pymllm_interp import LM

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]
A, B, C = (f"lm.model.layers[{i}].output" for i in range(3))

BLOCKS = {
    "a row that is changed after it was saved": [f"h = {A}[0, -1].save()", "g = h * 2", f"z = {B}[0, -1].save()"],
    "a view that sees the edit": [f"h = {A}", "h[:] *= known['V'][0]", "first = h[0, 0].save()", "whole = h.save()"],
    "two names": [f"h = {A}", "f = h", "f[:] = h * f", "g = h[0, -1].save()", "e = f[0].save()"],
    "a name of another layer": [f"h = {A}", f"g = {B}", f"{B}[:] = g / g.norm(dim=-1, keepdim=True)", "h.save()", "g.save()"],
    "an operand with the name of the value": [f"h = {A}", "v = known['V'][0]", "h[:] = h * v + v", "v = h", "v.save()"],
    "an operand that changes behind the edit": ["v = known['V'][0].clone()", f"{A}[:] += v", "v = v * 0", f"h = {B}.save()"],
    "a number that is a truth value": [f"{A}[:] *= True", f"h = {B}.save()"],
    "a negative zero": [f"{A}[:] *= -0.0", f"h = {A}.save()"],
    "a cast in the edit": [f"h = {A}", "h[:] = h.float() * 3 - known['V'][0].float()", "g = h.save()"],
    "a cast behind it": [f"{A}[:] /= 7", f"h = {A}.double().save()", f"g = {B}[0, -1].half().save()"],
    "inputs and outputs": ["lm.model.layers[1].input[:, -1] *= 2", f"h = {B}[0, -1].save()", "g = lm.lm_head.output[0, -1].save()"],
    "the same state under two names": [f"h = {A}", "lm.model.layers[1].input[:] *= 2", "h.save()", f"g = {B}.save()"],
    "a read of the input behind the edit": ["lm.model.layers[1].input[:] += 1", "h = lm.model.layers[1].input.save()"],
    "an input by name": ["h = lm.model.layers[1].input", "h += 1", "o = lm.lm_head.output.save()"],
    "logits": ["lm.lm_head.output[0, -1] *= -1", "h = lm.lm_head.output.save()"],
    "logits by themselves": ["x = lm.lm_head.output", "x[:] = x - x.mean(-1, keepdim=True)", "x.save()"],
    "keys and values": [
        "lm.model.layers[0].self_attn.k_proj.output[:] *= 1.5", "v = lm.model.layers[0].self_attn.v_proj.output",
        "v[:] = v / v.norm(dim=-1, keepdim=True)", f"h = {C}.save()",
    ],
    "an error behind an edit": [f"{A}[:] *= 2", f"h = {B}.save()", "1 // len(known['rows'][2:])"],
    "an index that is out of range": [f"{A}[:] *= 2", f"h = {B}[0, 99].save()"],
    "an edit that is out of range": [f"{A}[:, 99] *= 2", f"h = {B}.save()"],
    "an edit with a wrong shape": [f"{A}[:] *= torch.ones(5)", f"h = {B}.save()"],
    "an edit behind a sum of it": [f"h = {A}", "s = h.sum().save()", "h[:] = h * h"],
    "a row by a column": [f"h = {A}", "h[:, -1] -= h[:, -1] * h[:, -1].mean(-1, keepdim=True)", "h.save()"],
    "a row of a matrix for each layer": [
        "V = torch.stack(known['V'])", "kept = [1].save()", "for layer, v in zip(lm.model.layers, V):", "    layer.output[:] += v",
        f"h = {C}.save()",
    ],
    "an edit in a branch": ["if known['layer'] == 1:", f"    {A}[:] /= 3", f"h = {B}.save()"],
    "a loop of edits": ["for i in range(2):", "    lm.model.layers[i].output[:] /= i + 2", f"h = {C}.save()"],
    "a comprehension": [f"{A}[:] *= known['V'][3]", "h = [layer.output[0, -1] for layer in lm.model.layers][1].save()"],
}  # fmt: skip


@pytest.fixture(params=["float32", "bfloat16"])
def lms(request, lm_of) -> tuple[LM, LM]:
    return tuple(lm_of("llama", lower_traces=mode, dtype=request.param) for mode in ("auto", "off"))


@pytest.mark.thin(3)
@pytest.mark.parametrize("what", BLOCKS)
def test_a_block_gives_what_it_gives_in_the_pass(what, lms):
    same(lms, BLOCKS[what], ONE_PASS)
    same(lms, BLOCKS[what], GENERATION)
    body = [line.replace(".save()", "") for line in BLOCKS[what]]
    for steps in ("[:]", "[1:3]", "[[0, 3]]"):
        loop = ["kept = list().save()", f"for step in tracer.iter{steps}:", *(f"    {line}" for line in body)]
        same(lms, [*loop, f"    kept.append({C}[0, -1])"] if "lm_head" not in str(body) else loop, GENERATION)


LOOPS = {
    "all rows": ["h = lm.model.layers[0].output", "h[:] -= known['V'][0]"],
    "the last row": ["h = lm.model.layers[0].output", "h[:, -1] += known['V'][1]"],
    "keys": ["lm.model.layers[0].self_attn.k_proj.output[:] *= 1.5"],
    "inputs": ["lm.model.layers[1].input[:] += known['V'][2]"],
    "logits": [],
}
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_tokens": 8},
    "a small pool": {"kv_cache_tokens": 96, "page_size": 4},
    "prefixes": {"page_size": 4},
    "steps ahead": {"async_scheduling": True},
}


@pytest.mark.thin(12)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", LOOPS)
def test_engines_that_chunk_preempt_and_reuse(what, engine, lm_of):
    """Many at once, with prompts that begin alike; compared with one after another in the passes."""
    lines = ["kept = list().save()", "for step in tracer.iter[:]:", *(f"    {line}" for line in LOOPS[what])]
    lines += ["    kept.append(lm.model.layers[1].output[0, -1])"]
    lines += ["    lm.lm_head.output[:] *= -1", "    kept.append(lm.lm_head.output[0, -1])"] if what == "logits" else []
    run = script([*lines, "out = tracer.result.save()"], GENERATION.replace("6", "9"))
    lm, solo = lm_of("llama", lower_traces="auto", **ENGINES[engine]), lm_of("llama", lower_traces="off")
    prompts = [[7, 9, 11, 13, 15, 17, 19, 21][: 3 + i % 6] + [i] * (1 + 5 * (i % 3)) for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        ours = list(threads.map(lambda prompt: ran(run, lm, prompt), prompts))
    for prompt, (found, tracer, error) in zip(prompts, ours, strict=True):
        wanted, _, expected = ran(run, solo, prompt)
        assert error == expected == "" and tracer.receipt.lowered
        assert torch.equal(found["out"], wanted["out"]) and len(found["kept"]) == len(wanted["kept"])
        torch.testing.assert_close(found["kept"], wanted["kept"], rtol=1e-4, atol=1e-4)  # products differ by the batch
    assert not left_behind(lm)


def test_an_early_end_and_several_answers(lms):
    found = []
    for lm in lms:
        tokens = None
        for words in ({"max_new_tokens": 8}, {"max_new_tokens": 8, "stop": True}, {"max_new_tokens": 1}):
            if words.pop("stop", False):
                words["stop_token_ids"] = [int(tokens[0, len(PROMPT) + 2])]
            with lm.generate(PROMPT, **words) as tracer:
                kept = list().save()
                for _ in tracer.iter[:]:
                    h = lm.model.layers[0].output
                    h[:] *= 1.5
                    kept.append(h[0, -1])
                out = tracer.result.save()
            tokens = out
            found.append((lm is lms[0], tracer.receipt.lowered, kept, out))
        with lm.generate(PROMPT, max_new_tokens=3, temperature=1.0, seed=1, n=2) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[0].output[:] /= 3
        assert not tracer.receipt.lowered
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert ours[:2] == (True, True) and theirs[:2] == (False, False)
        assert_equal(ours[2:], theirs[2:], "generation")


def test_a_vector_that_changes_afterwards_has_the_value_of_its_submission(lms):
    found = []
    for lm in lms:
        v = torch.ones(lm.cfg.hidden_size, dtype=lm.dtype)
        with lm.generate(PROMPT, max_new_tokens=4, ignore_eos=True) as tracer:
            kept = list().save()
            for _ in tracer.iter[:]:
                lm.model.layers[0].output[:] += v
                kept.append(lm.model.layers[0].output[0, -1])
        v.fill_(9)
        assert tracer.receipt.lowered == (lm is lms[0])
        found.append(kept)
    assert_equal(*found, "rows")


KEPT = {
    "a norm": ["h = {x}", "h[:] = h / h.norm(dim=-1, keepdim=True)"],
    "a vector by its row": ["h = {x}", "h[:] = h - (h * known['V'][0]).sum(-1, keepdim=True) * known['V'][1]"],
    "a vector": ["{x}[:, -1] *= known['V'][5]"],
    "a division": ["{x}[:] /= 3"],
    "a bound": ["h = {x}", "h[:, -1] = h[:, -1].clamp(-0.5, 0.25)"],
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


@pytest.mark.thin(4)
@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("opening", [ONE_PASS, GENERATION])
def test_edits_by_their_own_values_give_the_same(lm_of, what, opening):
    lms = lm_of("llama", lower_traces="auto"), lm_of("llama", lower_traces="off")
    lines = [line.format(x="lm.model.layers[1].output") for line in KEPT[what]]
    after = "lm.model.layers[2].output[0, -1]"
    after = "lm.model.layers[1].output[0, -1]" if what == "infinity" else after
    same(lms, [*lines, f"z = {after}.save()"], opening)
    body = [f"    {line}" for line in (*lines, f"kept.append({after})") if ".save()" not in line]
    if opening is GENERATION:
        same(lms, ["kept = list().save()", "for s in tracer.iter[:]:", *body], opening)

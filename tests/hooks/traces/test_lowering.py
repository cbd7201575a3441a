"""Blocks that run after their request give what they give in its forward passes: the same bits, names, shapes and errors.

The oracle of each block is the same block on an engine with ``lower_traces="off"``.
"""

from __future__ import annotations

import gc
import linecache
import pickle
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import einops  # blocks use it
import nnsight
import pytest
import torch
from helpers_outputs import sharing_of

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lowered import LoweringError

PROMPT = [5, 17, 3, 80, 44, 9, 61]
FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "gemma3_text", "qwen2", "mistral")
pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]
_files = count()


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, lm_of: Callable[..., LM]) -> tuple[LM, LM]:
    """An engine that must lower, and one that lowers nothing."""
    return lm_of(request.param, lower_traces="require"), lm_of(request.param, lower_traces="off")


@pytest.fixture
def lms(lm_of: Callable[..., LM]) -> tuple[LM, LM]:
    return lm_of("llama", lower_traces="auto"), lm_of("llama", lower_traces="off")


def script(lines: list[str], opening: str) -> Callable[..., dict[str, Any]]:
    """A function of an LM that runs the block, and returns the names that it saved and its tracer."""
    body = "\n".join(f"        {line}" for line in lines)
    source = f"def run(lm, prompt, W, known):\n    with {opening} as tracer:\n{body}\n    return dict(locals())\n"
    name = f"<lowering {next(_files)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "nnsight": nnsight, "einops": einops, "made": defaultdict(int)}
    exec(compile(source, name, "exec"), scope)
    return scope["run"]


def ran(run: Callable[..., dict[str, Any]], lm: LM, prompt: list[int] = PROMPT) -> tuple[dict[str, Any], Any, str]:
    """(saved names, tracer, the error's type and text)."""
    weights = torch.randn(lm.cfg.hidden_size, 3, generator=torch.Generator().manual_seed(0)).to(device_of(lm), lm.dtype)
    try:
        found = run(lm, prompt, weights, {"layer": 1, "rows": [0, -1], "V": vectors_of(lm), "Z": vectors_by_width(lm)})
    except Exception as error:
        return {}, None, f"{type(error).__name__}: {str(error).partition(':')[2] or error}"
    return {k: v for k, v in found.items() if k not in ("lm", "prompt", "W", "known", "tracer")}, found["tracer"], ""


def vectors_of(lm: LM) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    return [torch.randn(lm.cfg.hidden_size, generator=noise).to(device_of(lm)) for _ in range(8)]


def vectors_by_width(lm: LM) -> dict[str, list[torch.Tensor]]:
    """Vectors of the states' width, by kind of site."""
    widths, noise = lm.backend.lowered.model.widths, torch.Generator().manual_seed(2)
    return {
        kind: [torch.randn(size, generator=noise).to(device_of(lm)) for _ in range(3)] for kind, size in widths.items()
    }


def device_of(lm: LM) -> Any:
    """Where a block's tensors are: on this machine, where the model is a server's."""
    return lm.device if lm.backend.in_process else "cpu"


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, where
        assert ours.stride() == theirs.stride() and ours.is_contiguous() == theirs.is_contiguous(), where
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes(), where
        assert ours.grad_fn is None and ours.is_inference() == theirs.is_inference(), where
        assert torch.equal(ours, theirs), f"{where}: {(ours.double() - theirs.double()).abs().max()}"
        if ours.is_contiguous() and ours.is_floating_point():  # what its reader does next
            assert torch.equal(ours.view(-1).sum(), theirs.view(-1).sum()) or bool(theirs.sum().isnan()), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert ours == theirs, where


def same(pair: tuple[LM, LM], lines: list[str], opening: str, prompt: list[int] = PROMPT) -> Any:
    """Run the block on both, compare, and return the first one's receipt."""
    run = script(lines, opening)
    (ours, tracer, error), (theirs, other, expected) = ran(run, pair[0], prompt), ran(run, pair[1], prompt)
    assert error == expected, lines
    if (
        pair[0].device.type == "cuda"
    ):  # there the passes copy what a block reads: one tensor in two places is two tensors
        ours = {name: ours[name] for name in theirs}
    else:
        assert ours.keys() == theirs.keys(), (ours.keys() ^ theirs.keys(), lines)
        assert sharing_of(ours) == sharing_of(theirs), lines
    assert_equal(ours, theirs, "saved")
    if tracer is None:
        return None
    assert not other.receipt.lowered and not other.receipt.not_lowered
    return tracer.receipt


ONE_PASS = "lm.trace(prompt)"
GENERATION = "lm.generate(prompt, max_new_tokens=6, ignore_eos=True)"


def modules_of(lm: LM) -> list[str]:
    """What a block may read, in the order of the pass."""
    points = lm.backend.lowered.model.points
    return [f"lm.{name.removeprefix('model.')}" for name, point in points.items() if point.end]


def test_every_site_reads_as_in_the_pass(pair):
    names = [_indexed(name) for name in modules_of(pair[0])]
    lines = [f"x{i} = {name}" for i, name in enumerate(names)] + [f"s{i} = x{i}.save()" for i in range(len(names))]
    receipt = same(pair, lines, ONE_PASS)
    assert receipt.lowered and set(receipt.steps) <= {"plain", "replay"}


def _indexed(line: str) -> str:
    """``layers.3.mlp`` as ``layers[3].mlp``."""
    parts = line.split(".")
    return ".".join(f"[{part}]" if part.isdigit() else part for part in parts).replace(".[", "[")


def test_every_site_reads_in_each_step(pair):
    names = [_indexed(name) for name in modules_of(pair[0])]
    lines = ["found = list().save()", "for step in tracer.iter[:]:"] + [f"    found.append({name})" for name in names]
    receipt = same(pair, lines, GENERATION)
    assert receipt.lowered and receipt.steps.total() == 6


VALUES = (
    "{x}", "{x}[0, -1]", "{x}[:, -1]", "{x}[0, 0]", "{x}[0, 2]", "{x}.norm(dim=-1)", "{x}[0].float().mean(0)", "{x} @ W",
    "{x}.argmax(-1)",
    "torch.stack([{x}[0, 0], {x}[0, -1]])", "{x}[0, known['rows']]", "{x}[..., :2]", "{x}.clone() * 2 + 1", "{x}[0, -1].tolist()",
    "{x}.view(-1)", "{x}.sum()", "{x}.mean()", "{x}.norm()", "{x}.std()", "{x}.view(-1, 2).sum(0)", "{x}", "{x}.transpose(1, 2)",
    "{x}.reshape(-1)[:5]", "{x}[0].T", "{x}[:, :, ::2]", "{x}.detach()", "{x}.contiguous()", "{x}.float()", "{x}[:, None]",
    "{x}[..., :5]", "{x}.mean(dim=(0, 1))", "torch.linalg.norm({x})", "{x}.clone()", "{x}[0, -1].contiguous()",
    "{x}.shape", "{x}[0, -1].max().item()", "einops.rearrange({x}, 'a b c -> b (a c)')", "nnsight.save({x}[0, -1])", "{x}[0][1:3]",
)  # fmt: skip


def random_block(rng: random.Random, layers: int, layer: str, single: bool) -> list[str]:
    """A block that reads places of the model in order, with values made of them."""
    places = sorted(rng.sample(range(layers * 2), rng.randint(2, min(5, layers * 2))))
    reads = [(f"{layer}[{place // 2}].output" if place % 2 else f"{layer}[{place // 2}].input") for place in places]
    if rng.random() < 0.2:
        reads.insert(1, reads[0])  # one tensor, as are the output of a layer and the input of the next one
    if rng.random() < 0.3:
        reads[0] = reads[0].replace(f"[{places[0] // 2}]", "[known['layer']]") if places[0] // 2 == 1 else reads[0]
    lines, inside = ["kept = list().save()", "by = {}", "nnsight.save(by)"], []
    for i, read in enumerate(reads):
        value = rng.choice(VALUES).format(x=f"h{i}")
        inside += [f"h{i} = {read}", f"v{i} = {value}"]
        inside.append(rng.choice([f"kept.append(v{i})", f"by[{i}] = v{i}", f"kept.append((v{i}, h{i}[0, -1]))"]))
        inside += rng.choice([[], [f"h{i}.save()"], [f"kept.append(h{i})"]])
    if single:
        lines += [*inside, f"v{len(reads) - 1}.save()" if rng.random() < 0.5 else "pass"]
        return lines + (["out = tracer.result.save()"] if rng.random() < 0.3 else [])
    steps = rng.choice(
        ["[:]", "[:3]", "[1:4]", "[2]", "[0]", "[3:]", "[:9]", "[[0, 2]]", "[[1, 3, 4]]", "[1, 2]", "[[5]]"]
    )
    if rng.random() < 0.2:
        inside = ["if step < 3:", *(f"    {line}" for line in inside)]
    if rng.random() < 0.4:
        inside.append("kept.append(lm.logits)")
    if rng.random() < 0.3:
        inside.append("kept.append(lm.samples)")
    lines += [f"for step in tracer.iter{steps}:", *(f"    {line}" for line in inside)]
    return lines + (["out = tracer.result.save()"] if rng.random() < 0.5 else [])


def compared(lms: tuple[LM, LM], seed: int, tries: int) -> int:
    """Compare random blocks. Returns the number that were lowered."""
    rng, lowered = random.Random(seed), 0
    for _ in range(tries):
        single = rng.random() < 0.5
        lines = random_block(rng, lms[0].cfg.num_hidden_layers, "lm.model.layers", single)
        prompt = [rng.randrange(1, 90) for _ in range(rng.choice([1, 2, 3, 7, 16, 17, 40]))]
        receipt = same(lms, lines, ONE_PASS if single else GENERATION, prompt)
        lowered += receipt is not None and receipt.lowered
    return lowered


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_give_the_same_bits(lms, seed):
    assert compared(lms, seed, 40) > 20


APPENDS = {
    "one read": (["    kept.append(lm.model.layers[1].output[0, -1])"], True),
    "all rows": (["    kept.append(lm.model.layers[1].output)"], True),
    "several layers": (["    for i in (0, 2):", "        kept.append(lm.model.layers[i].output[0, -1])"], True),
    "modules": (["    for layer in lm.model.layers:", "        kept.append(layer.output[:, -1])"], True),
    "names": (
        ["    h = lm.model.layers[1].output", "    x = h[0, -1].float()", "    kept.append(x)", "    kept.append(h[0, 0])"], True),
    "one value in two lists": (
        ["    x = lm.model.layers[1].output[0, -1]", "    kept.append(x)", "    other.append(x)", "    kept.append(x)"], True,
    ),
    "one place twice": (["    h = lm.model.layers[1].output", "    kept.append(h[0, -1])", "    kept.append(h[0])"], True),
    "a saved value": (["    kept.append(lm.model.layers[0].input[0, -1].save())"], True),
    "copies": (["    kept.append(lm.lm_head.output[0, -1, ::2].clone().detach().cpu().double())"], True),
    "attention": (["    kept.append(lm.model.layers[2].self_attn.output[0][0, -1])"], True),
    "an edit": (["    lm.model.layers[0].output[:] += known['V'][0]", "    kept.append(lm.model.layers[1].output[0, -1])"], True),
    "an edit by name": (["    h = lm.model.layers[1].output", "    h[:, -1] += known['V'][0]", "    kept.append(h[0, -1])"], True),
    "a known branch": (["    if known['layer'] == 1:", "        kept.append(lm.model.layers[1].output[0, -1])"], True),
    "a constant": (["    'a step'", "    kept.append(lm.model.layers[1].output[0, -1])", "    pass"], True),
    "a number of the step": (["    kept.append(lm.model.layers[1].output[0, -1])", "    other.append(step)"], False),
    "a branch on the step": (["    if step > 1:", "        kept.append(lm.model.layers[1].output[0, -1])"], False),
    "an earlier step's value": (["    h = lm.model.layers[1].output", "    kept.append(last)", "    last = h[0, -1]"], False),
    "a value of the first step": (["    kept.append(first)", "    g = lm.model.layers[1].output[0, -1]"], False),
    "a computed value": (["    kept.append(lm.model.layers[1].output[0, -1] * 2)"], False),
    "a tuple": (["    kept.append(lm.model.layers[2].self_attn.output)"], False),
    "the step's logits": (["    kept.append(lm.logits)"], False),
    "tokens": (["    kept.append(lm.samples)"], False),
    "a nested append": (["    kept.append(other.append(lm.model.layers[1].output[0, -1]))"], False),
    "an entry": (["    kept.append(lm.model.layers[1].output[0][-1])"], False),
}  # fmt: skip


@pytest.mark.thin(12)
@pytest.mark.parametrize("steps", ["[:]", "[1:]", "[:4]", "[2:5]", "[:9]", "[5:]", "[6:]"])
@pytest.mark.parametrize("what", APPENDS)
def test_steps_that_only_append_are_taken_at_once(what, steps, lms):
    body, taken = APPENDS[what]
    lines = ["kept = list().save()", "other = list().save()", "last = 0", f"for step in tracer.iter{steps}:", *body]
    if "first" in body[0]:
        if steps == "[:]" or steps.startswith("[:"):
            return  # the step cannot be looked at twice
        lines.insert(3, "first = lm.model.layers[1].output[0, -1]")
    lines.append("pass" if steps == "[6:]" else "ended = [step].save()")
    run = script(lines, GENERATION)
    (ours, tracer, error), (theirs, other, expected) = ran(run, lms[0]), ran(run, lms[1])
    assert error == expected and ours.keys() == theirs.keys()
    assert_equal(ours, theirs, what)
    if tracer is None:
        return
    assert tracer.receipt.lowered, tracer.receipt.not_lowered
    assert (tracer.plans[0].loop is not None) == taken
    assert tracer.receipt.reads == other.receipt.reads
    shared = [[any(x is y for y in found["other"]) for x in found["kept"]] for found in (ours, theirs)]
    assert shared[0] == shared[1]


@pytest.mark.parametrize(
    "steps", ["[[0, 2]]", "[[0, 1, 2, 3, 4, 5]]", "[1, 4]", "[[3]]", "[[0, 9]]", "[[2, 1]]", "[[]]", "[[-1]]"]
)
@pytest.mark.parametrize("what", ["read", "edit"])
def test_lists_of_steps_are_lowered_where_they_are_in_order(what, steps, lms):
    body = {
        "read": ["h = lm.model.layers[1].output[0, -1].norm()", "kept.append(h)", "kept.append(step)"],
        "edit": ["lm.model.layers[1].output[:, -1] += known['V'][0]", "kept.append(lm.model.layers[2].output[:, -1])"],
    }[what]
    lines = ["kept = list().save()", f"for step in tracer.iter{steps}:", *(f"    {line}" for line in body)]
    run = script([*lines, "out = tracer.result.save()"], GENERATION)
    (ours, tracer, error), (theirs, other, expected) = ran(run, lms[0]), ran(run, lms[1])
    assert error == expected and ours.keys() == theirs.keys()
    assert_equal(ours, theirs, steps)
    if tracer is not None:
        # A site takes four ops: six steps of edits run in the passes.
        in_order = steps not in ("[[2, 1]]", "[[]]", "[[-1]]") and not (what == "edit" and steps.count(",") == 5)
        assert tracer.receipt.lowered == in_order, tracer.receipt.not_lowered
        assert tracer.receipt.reads == other.receipt.reads


def test_what_a_loop_kept_is_apart_from_all_else(lms):
    """The values are parts of one memory, and nobody sees that: not by an edit, by a pickle, or by autograd's count of edits."""
    with lms[0].generate(PROMPT, max_new_tokens=9, ignore_eos=True) as tracer:
        kept = list().save()
        for _ in tracer.iter[:]:
            for layer in lms[0].model.layers:
                h = layer.output
                kept.append(h[0, -1])
                kept.append(h[0])
    assert tracer.plans[0].loop is not None
    before = [value.clone() for value in kept]
    for i, value in enumerate(kept):
        assert value._base is None and value.is_contiguous()
        assert value.untyped_storage().nbytes() == value.nbytes
        assert len(pickle.dumps(value)) < value.nbytes + 2000
        assert torch.equal(pickle.loads(pickle.dumps(value)), value)
        value.fill_(-1.0)
        assert all(torch.equal(x, y) for x, y in zip(kept[i + 1 :], before[i + 1 :], strict=True))
    values = kept[40].requires_grad_() * 2
    kept[41].fill_(0)
    values.sum().backward()
    assert torch.equal(kept[40].grad, torch.full_like(kept[40], 2))
    last = [kept[-1]]
    del kept, tracer
    gc.collect()
    assert torch.equal(last[0], torch.full_like(last[0], -1))


SWEEPS = {
    "one place": (["above.append(lm.model.layers[1].output[0, -1])"], True),
    "several places": (
        ["above.append(lm.model.layers[0].output[0, -1])", "other.append(lm.model.layers[2].output[:, -1].float())",
         "above.append(lm.lm_head.output[0, -1, :5].clone())"], True,
    ),
    "a row of the prompt": (["above.append(lm.model.layers[1].output[0, 2])"], True),
    "the whole": (["above.append(lm.model.layers[1].output[:])"], True),
    "a constant": (["'a block'", "above.append(lm.model.layers[1].output[0, -1].save())"], True),
    "one place twice": (["above.append(lm.model.layers[1].output[0, -1])", "above.append(lm.model.layers[1].output[0])"], True),
    "an index out of range": (["above.append(lm.model.layers[1].output[0, 4])"], True),
    "a name": (["h = lm.model.layers[1].output[0, -1]", "above.append(h)"], False),
    "a loop": (["for i in (0, 2):", "    above.append(lm.model.layers[i].output[0, -1])"], False),
    "a computed value": (["above.append(lm.model.layers[1].output[0, -1].norm())"], False),
    "an edit": (["lm.model.layers[0].output[:] += known['V'][0]", "above.append(lm.model.layers[1].output[0, -1])"], False),
    "a tuple": (["above.append((lm.model.layers[1].output[0, -1], 1))"], False),
    "the result": (["above.append(lm.model.layers[1].output[0, -1])", "other.append(tracer.result)"], False),
}  # fmt: skip


@pytest.mark.parametrize("call", ["trace()", "generate(max_new_tokens=3, ignore_eos=True)"])
@pytest.mark.parametrize("what", SWEEPS)
def test_invokes_that_only_append_do_what_they_do_in_the_pass(what, call, lms):
    """Blocks of one code that only append are not run: their values are put into the lists, in the order of the pass."""
    body, taken = SWEEPS[what]
    lines = [
        "above = list().save()", "other = list().save()", "for i in range(5):",
        "    with tracer.invoke([1 + i + j for j in range(4 + i)]):", *(f"        {line}" for line in body),
    ]  # fmt: skip
    run = script(lines, f"lm.{call}")
    (ours, tracer, error), (theirs, other, expected) = ran(run, lms[0]), ran(run, lms[1])
    assert error == expected and (error != "") == (what == "an index out of range")
    assert_equal({k: ours.get(k) for k in ("above", "other")}, {k: theirs.get(k) for k in ("above", "other")}, what)
    if tracer is not None:
        made = [plan is not None and plan.appends is not None for plan in tracer.plans]
        assert made == [taken] * 5, [receipt.not_lowered for receipt in tracer.receipts]
        assert [r.reads for r in tracer.receipts] == [r.reads for r in other.receipts]


@pytest.mark.parametrize("shared", [False, True])
def test_the_loops_of_many_invokes_are_taken_together(shared, lms):
    """Threads copy what they read. A list above the invokes is filled step by step, as in the passes."""
    found = []
    for lm in lms:
        known = vectors_of(lm)
        with lm.generate(max_new_tokens=7, ignore_eos=True) as tracer:
            above = list().save()
            for i in range(12):
                with tracer.invoke([1 + i + j for j in range(3 + i)]):
                    own = list().save()
                    for _ in tracer.iter[:]:
                        lm.model.layers[0].output[:] += known[i % 8]
                        own.append(lm.model.layers[1].output[0, -1])
                        if shared:
                            above.append(lm.model.layers[2].output[0, -1])
        found.append((own, above, [receipt.reads for receipt in tracer.receipts]))
        assert len(above) == (12 * 7 if shared else 0)
        assert all((plan is not None) == (lm is lms[0]) for plan in tracer.plans)
    assert_equal(found[0], found[1], "saved")


CLONES = ("h.clone()", "h[:, -1:].clone()", "h[:, :1, :4].clone()", "h.double()", "h[:, :1].transpose(1, 2).clone()")


@pytest.mark.parametrize("call", ["trace()", "generate(max_new_tokens=3, ignore_eos=True)"])
def test_a_clone_does_not_tell_how_many_rows_others_had(call, lms):
    """`clone` keeps the stride of the leading 1. It is the one of a request alone, lowered and in the passes."""
    reads = ["h = lm.model.layers[1].output", *(f"above.append({clone}.save())" for clone in CLONES)]
    if "generate" in call:
        reads = ["for step in tracer.iter[:]:", *(f"    {line}" for line in reads)]
    lines = ["    with tracer.invoke(own):", *(f"        {line}" for line in reads)]
    run = script(["above = list().save()", "for own in prompt:", *lines], f"lm.{call}")
    prompts = [[5, 17, 3], [5, 17, 3, 80, 44], [7], *([8 + i] for i in range(6))]
    alone = [tuple(tensor.stride() for tensor in ran(run, lms[1], [prompt])[0]["above"]) for prompt in prompts]  # pyright: ignore
    for lm in lms:
        together = [tensor.stride() for tensor in ran(run, lm, prompts)[0]["above"]]  # pyright: ignore[reportArgumentType]
        assert sorted(together) == sorted(stride for strides in alone for stride in strides)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_blocks_give_the_same_bits(lms, seed):
    assert compared(lms, seed, 400) > 200


@pytest.mark.parametrize("seed", range(2))
def test_random_blocks_in_a_small_pool_give_the_same_bits(lm_of, seed):
    """Chunks of 16 tokens, preemptions and swaps."""
    small = {"kv_cache_tokens": 96, "page_size": 4, "max_num_tokens": 48, "max_running_requests": 4}
    lms = lm_of("llama", lower_traces="auto", **small), lm_of("llama", lower_traces="off")
    assert compared(lms, 50 + seed, 20) > 8


OUT = "o = lm.lm_head.output.save()"
IN_THE_PASS = {
    "an edit after a read": (["h = lm.model.layers[0].output.clone().save()", "lm.model.layers[0].output[:] = 0"], "after a use"),
    "two edits of one place": (
        ["lm.model.layers[0].output[:] += 1", "lm.model.layers[0].output[:] += 2", "h = lm.lm_head.output.save()"], "a second edit",
    ),
    "an edit by a value of the pass": (["lm.model.layers[1].output[:] = lm.model.layers[0].output"], "edit"),
    "an edit of another shape": (["lm.model.layers[1].output[0, :2] += torch.ones(2, 72)", OUT], "edit"),
    "an edit of a norm": (["lm.model.layers[1].input_layernorm.output[:] = 0", OUT], "an edit of"),
    "an in-place method": (["h = lm.model.layers[0].output", "h.zero_()", OUT], "zero_"),
    "by name after a part": (["h = lm.model.layers[0].output", "a = h[0, -1]", "h += 1", "a.save()"], "after a use"),
    "by name after a copy": (["h = lm.model.layers[0].output", "a = h.clone().save()", "h[:] += 1"], "after a use"),
    "by name, late": (
        ["h = lm.model.layers[0].output", "g = lm.model.layers[1].output", "h += 1", OUT], "after a use",
    ),
    "two edits by name": (["h = lm.model.layers[0].output", "h += 1", "h += 2", OUT], r"a second edit of resid_post\.0: inter"),
    "a directional ablation": (
        ["h = lm.model.layers[1].output", "h[:] = h - (h @ W[:, 0])[..., None] * W[:, 0]", OUT],
        r"^line 4: `h @ W\[:, 0\]` is a product: Ablate\('resid_post\.1', directions\)",
    ),
    "a vector of the block": (
        ["v = torch.ones(72)", "lm.model.layers[1].output[:] += v", OUT], "^line 4: `v` is made in the block: above the `with`"
    ),
    "a value of another place": (
        ["g = lm.model.layers[0].output", "h = lm.model.layers[1].output", "h[:] = h * g", OUT],
        "^line 5: `g` is a value of the pass at another place",
    ),
    "some channels": (["lm.model.layers[1].output[:, :, 5] = 0", OUT], "^line 3: an edit of some channels"),
    "an edit of a part by name": (["h = lm.model.layers[0].output[0]", "h += 1", OUT], "edited in place"),
    "an edit of a norm's input by name": (["h = lm.model.layers[1].post_attention_layernorm.input", "h += 1", OUT], "an edit of"),
    "a branch on a value": (["h = lm.model.layers[0].output.save()", "if h.sum() > 0:", "    g = h.clone().save()"], "branch"),
    "a module that is no site": (["g = lm.model.layers[0].mlp.act_fn.output.save()"], "no site"),
    "a call of a module": (["h = lm.lm_head(lm.model.layers[0].output).save()"], "call"),
    "a function of the caller": (["h = known_function(lm.model.layers[0].output).save()"], "exist|call"),
    "a source": (["h = lm.model.layers[0].mlp.source.self_down_proj_0.output.save()"], "not lowered"),
    "randomness": (["h = (lm.model.layers[0].output.sum() * 0 + torch.rand(1) * 0).save()"], "call of"),
    "a function with out=": (["h = lm.model.layers[0].output", "g = torch.abs(h, out=torch.empty_like(h)).save()"], "call|out="),
    "a stop": (["h = lm.model.layers[0].output.save()", "tracer.stop()"], "stop"),
    "inputs": (["h = lm.model.layers[0].inputs.save()"], "not lowered"),
    "an edit of a norm's input": (
        ["lm.model.layers[0].post_attention_layernorm.input[:] = 0", "h = lm.model.layers[1].output.save()"], "an edit of",
    ),
    "an edit of an input that was an output": (
        ["h = lm.model.layers[0].output", "lm.model.layers[1].input[:] = 0", "h.save()"], "output before it",
    ),
    "a long loop": (["for i in range(10**9):", "    break", "h = lm.model.layers[1].output.save()"], "not known"),
    "a dict that makes its values": (["n = made[3]", "h = lm.model.layers[n].output.save()"], "defaultdict"),
    "a while": (["n = 0", "while n < 2:", "    n += 1", "h = lm.model.layers[0].output.save()"], "while"),
    "a lambda": (["f = lambda x: x", "h = f(lm.model.layers[0].output).save()"], "lambda"),
    "a print": (["h = lm.model.layers[0].output.save()", "print(h.shape)"], "call"),
    "an object of the caller": (["known['h'] = lm.model.layers[0].output.save()"], "in place"),
    "an append to a list of the caller": (["known['rows'].append(lm.model.layers[0].output.save())"], "fills"),
    "late reads": (["h = lm.model.layers[1].output.save()", "g = lm.model.layers[0].output.save()"], "late"),
    "a name that does not exist": (["h = nothing.save()", "g = lm.model.layers[0].output.save()"], "exist"),
    "a cache": (["c = tracer.cache(modules=[lm.model.layers[0]]).save()"], "cache"),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_THE_PASS)
def test_other_blocks_run_in_the_pass_with_a_reason(what, lms):
    lines, reason = IN_THE_PASS[what]
    run = script(lines, ONE_PASS)
    (ours, tracer, error), (theirs, _, expected) = ran(run, lms[0]), ran(run, lms[1])
    assert error == expected
    if tracer is not None:
        assert not tracer.receipt.lowered
        assert re.search(reason, tracer.receipt.not_lowered), tracer.receipt.not_lowered
        assert tracer.receipt.not_lowered.startswith("line ")
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert_equal(ours[name], value, name)


def test_require_names_what_is_wrong_with_the_request(lm_of):
    lm = lm_of("llama", lower_traces="require")
    with pytest.raises(ValueError, match=r"holds token id 10{18}, but the vocabulary") as raised:
        with lm.trace([5, 10**18]):
            h = lm.model.layers[0].output.save()
    assert not isinstance(raised.value, LoweringError)
    with pytest.raises(LoweringError, match=r"cannot be captured: .*beyond the prompt"):
        with lm.trace(PROMPT):
            h = lm.model.layers[0].output[0, 10**6].save()  # noqa: F841
    assert lm.engine.stats()["running"] == 0


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["    lm.model.layers[1].output[:, -1] += known['V'][0] * 0.9 ** step"], r"line 5: `step` depends .*Steer\("),
        (["    a = 0.5 * step", "    lm.model.layers[1].output[:] += a * known['V'][0]"], r"line 6: `a` depends on the step"),
        (["    if step > 0:", "        lm.model.layers[1].output[:] += known['V'][0]"], r"line 6: .*positions=Generated\(0\)\)"),
    ],
)  # fmt: skip
def test_an_edit_that_depends_on_the_step_names_the_declared_one(lms, lines, reason):
    receipt = same(
        lms, ["kept = list().save()", "for step in tracer.iter[:]:", *lines, "out = tracer.result.save()"], GENERATION
    )
    assert re.match(reason, receipt.not_lowered), receipt.not_lowered


def test_a_plan_of_a_matrix_is_not_the_plan_of_a_shorter_one(lms):
    for rows in (1, 3, 2):
        found = []
        for lm in lms:
            matrix = torch.stack(vectors_of(lm)[:rows])
            with lm.trace(PROMPT) as tracer:
                products = list().save()
                for layer, v in zip(lm.model.layers, matrix, strict=False):
                    products.append(layer.output[0, -1] * v)
            found.append(list(products))
            assert len(products) == rows and tracer.receipt.lowered == (lm is lms[0]), tracer.receipt.not_lowered
        assert_equal(*found, f"{rows} rows")


STEP_EDIT = [
    "for step in tracer.iter[:]:", "    if step > 0:", "        if step > 2:", "            pass",
    "        lm.model.layers[0].output[:] = 0", "    h = lm.model.layers[1].output.save()",
]  # fmt: skip


def test_an_edit_behind_a_branch_of_a_branch_is_not_lowered(lms):
    receipt = same(lms, STEP_EDIT, GENERATION)
    assert not receipt.lowered and "in a branch" in receipt.not_lowered


def test_the_analysis_computes_no_large_number(lms):
    lines = ["if 3 < known['layer']:", "    n = 2147483647 ** 2147483647", "h = lm.model.layers[1].output.save()"]
    assert same(lms, lines, ONE_PASS).lowered, "a branch that is not taken is not computed"
    run = script(["h = lm.model.layers[1].output.save()", "f = lambda: 2147483647 ** 2147483647"], ONE_PASS)
    assert not ran(run, lms[0])[1].receipt.lowered


def test_an_error_of_the_analysis_leaves_the_block_to_the_pass(lms, monkeypatch):
    from pymllm_interp.hooks.traces.lowering.analysis import Walk

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(Walk, "_Expr", fails)
    monkeypatch.setattr(lms[0].backend.lowered, "_known", {})
    receipt = same(lms, ["lm.model.layers[1].output.save()"], ONE_PASS)
    assert "cannot be analysed: ZeroDivisionError: of a test" in receipt.not_lowered


def test_lowered_traces_leave_nothing_behind(lms):
    from helpers_idle import left_behind

    run = script(
        ["kept = list().save()", "for step in tracer.iter[:]:", "    kept.append(lm.model.layers[1].output[0, -1])"],
        GENERATION,
    )
    for _ in range(50):
        assert ran(run, lms[0])[1].receipt.lowered
    assert left_behind(lms[0]) == {}


def test_require_refuses_with_the_line(lm_of):
    lm = lm_of("llama", lower_traces="require")
    with pytest.raises(LoweringError, match=r"line \d+: an edit in place"):
        with lm.trace(PROMPT):
            h = lm.model.layers[0].output.save()  # noqa: F841
            lm.model.layers[1].output[:] **= 2


EDITS = (
    "{x} += V[{i}]", "{x} -= V[{i}]", "{x} *= 1.5", "{x} = V[{i}]", "{x} = 0", "{x} += 0.25", "{x} *= 0", "{x} -= 3",
)  # fmt: skip
PLACES = (
    "lm.model.layers[{i}].output", "lm.model.layers[{i}].output", "lm.model.layers[{i}].mlp.output",
    "lm.model.embed_tokens.output", "lm.model.layers[{i}].self_attn.output[0]",
)  # fmt: skip
INNER_PLACES = {
    "q": "lm.model.layers[{i}].self_attn.q_proj.output", "k": "lm.model.layers[{i}].self_attn.k_proj.output",
    "v": "lm.model.layers[{i}].self_attn.v_proj.output", "z": "lm.model.layers[{i}].self_attn.o_proj.input",
    "mlp_act": "lm.model.layers[{i}].mlp.down_proj.input", "resid_pre": "lm.model.layers[{i}].input",
    "final_norm": "lm.model.norm.output", "logits": "lm.lm_head.output",
}  # fmt: skip


def random_edits(rng: random.Random, layers: int, single: bool, rows: int) -> list[str]:
    """A block that edits places of the model, and reads what comes of it."""
    i = rng.randrange(layers - 1)
    kind = rng.choice(list(INNER_PLACES)) if rng.random() < 0.6 else ""
    module = place = INNER_PLACES[kind].format(i=i) if kind else rng.choice(PLACES).format(i=i)
    vectors = f"V = known['Z']['{kind}']" if kind else "V = known['V']"
    v = i % 3
    before = []
    if rng.random() < 0.4:  # by a name
        before, place = [f"e = {module}", *(["f = e"] if rng.random() < 0.2 else [])], "e"
    index = rng.choice(
        ["[:]", "[:, -1]", "[0, -1]", "[0]", "[:, :]", "[:, -1, :]", "[...]"] + (["[0, 1]", "[:, 0]"] if single else [])
    )
    edit = rng.choice(EDITS).format(x=place + index, i=v)
    if rng.random() < 0.2 and place == "e":
        edit = f"e {rng.choice(['+', '-'])}= V[{v}]"
    elif rng.random() < 0.2 and "self_attn" not in place and place != "e":
        edit = f"{place} = {place} {rng.choice(['+', '-'])} V[{v}]"
    after = [f"a = {place}.clone()"] if rng.random() < 0.4 else []
    last = kind in ("final_norm", "logits")
    part = rng.choice(["[0, -1]", "[0, -1]", "", ".view(-1)", ".norm()", ".mean()"])
    reads = [
        *before,
        edit,
        *after,
        *([] if last else [f"n = lm.model.layers[{i + 1}].input{part}"]),
        f"h = lm.lm_head.output{part}" if last else f"h = lm.model.layers[{i + 1}].output{part}",
    ]
    if single:
        return [
            vectors,
            *reads,
            *(["a.save()"] if after else []),
            "h.save()",
            *([] if last else ["n.save()", "out = lm.lm_head.output.save()"]),
        ]
    steps = rng.choice(["[:]", "[:3]", "[1:4]", "[2]", "[0]", "[3:]", "[[0, 2]]", "[[1, 3]]"])
    kept = ["kept.append(h)", *(["kept.append(a)"] if after else [])]
    lines = [
        vectors,
        "kept = list().save()",
        f"for step in tracer.iter{steps}:",
        *(f"    {line}" for line in (*reads, *kept)),
    ]
    return [*lines, "out = tracer.result.save()"]


def compared_edits(lms: tuple[LM, LM], seed: int, tries: int) -> int:
    rng, lowered = random.Random(seed), 0
    for _ in range(tries):
        single = rng.random() < 0.5
        prompt = [rng.randrange(1, 90) for _ in range(rng.choice([2, 3, 7, 16, 17]))]
        lines = random_edits(rng, lms[0].cfg.num_hidden_layers, single, len(prompt))
        receipt = same(lms, lines, ONE_PASS if single else GENERATION, prompt)
        lowered += receipt is not None and receipt.lowered
    return lowered


@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", "float32"), ("gemma2", "bfloat16"), pytest.param("qwen3", "float32", marks=pytest.mark.slow),
    pytest.param("qwen3", "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("tries", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_random_edits_give_the_same_bits(lm_of, family, dtype, tries):
    lms = lm_of(family, lower_traces="auto", dtype=dtype), lm_of(family, lower_traces="off", dtype=dtype)
    assert compared_edits(lms, 7, tries) > tries // 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_on_cuda_give_the_same_bits(lm_of, dtype):
    """Replayed graphs on one side, passes with blocks on the other."""
    lms = tuple(lm_of("llama", device="cuda", dtype=dtype, lower_traces=mode) for mode in ("auto", "off"))
    assert compared(lms, 3, 40) > 20
    assert compared_edits(lms, 4, 40) > 10


@pytest.fixture
def late() -> Iterator[list[int]]:
    yield [1, 2, 3]


def test_an_index_out_of_range_is_raised_at_its_line(lms, late):
    messages = []
    for lm in lms:
        with pytest.raises(IndexError) as raised:
            with lm.trace(late):
                h = lm.model.layers[0].output[0, 7].save()  # noqa: F841
        messages.append(str(raised.value))
        assert raised.traceback[-1].path.name == "test_lowering.py"
    assert messages[0] == messages[1]


def test_invokes_share_a_list_and_each_has_its_own_constants(lms):
    found = []
    for lm in lms:
        with lm.trace() as tracer:
            rows, saved = list().save(), list().save()
            for row, layer in ((0, 1), (1, 0), (2, 1)):
                with tracer.invoke(PROMPT[: row + 3]):
                    rows.append(lm.model.layers[layer].output[0, row])
                    saved.append(lm.lm_head.output[0, -1])
        found.append((rows, saved))
        assert [receipt.lowered for receipt in tracer.receipts] == [lm is lms[0]] * 3
    assert_equal(*found, "lists")


def test_a_block_beside_edits_of_other_invokes_runs_with_them(lms):
    found = []
    for lm in lms:
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                lm.model.layers[0].output[:] **= 2
                first = lm.lm_head.output[0, -1].save()
            with tracer.invoke(PROMPT):
                second = lm.lm_head.output[0, -1].save()
        found.append((first, second))
        assert [receipt.lowered for receipt in tracer.receipts] == [False, False]
    assert_equal(*found, "logits")
    assert not torch.equal(*found[0])


def test_an_early_end_cuts_loops_short_with_a_warning(lms):
    outs = []
    for lm in lms:
        first = lm.generate([PROMPT], lm_greedy(8))[0].token_ids
        with pytest.warns(UserWarning, match="asked for more steps than the 3 that ran"):
            with lm.generate(PROMPT, max_new_tokens=8, stop_token_ids=[first[2]]) as tracer:
                steps = list().save()
                for step in tracer.iter[:7]:
                    steps.append((step, lm.model.layers[1].output[0, -1]))
                out = tracer.result.save()
        outs.append((steps, out))
        assert len(steps) == 3 and tracer.receipt.lowered == (lm is lms[0])
    assert_equal(*outs, "steps")


def lm_greedy(n: int) -> Any:
    from pymllm_interp import SamplingParams

    return SamplingParams(temperature=0, max_tokens=n)


def test_a_step_that_never_comes_is_the_same_error(lms):
    messages = []
    for lm in lms:
        with pytest.raises(Exception) as raised:
            with lm.generate(PROMPT, max_new_tokens=3) as tracer:
                for _ in tracer.iter[7]:
                    h = lm.model.layers[1].output.save()  # noqa: F841
        messages.append((type(raised.value), str(raised.value).partition(":")[2]))
    assert messages[0] == messages[1]
    del tracer


def test_sampled_generations_and_their_tokens_are_the_same(lms):
    found = []
    for lm in lms:
        with lm.generate(PROMPT, max_new_tokens=5, temperature=0.9, seed=3, ignore_eos=True) as tracer:
            tokens, logits = list().save(), list().save()
            for _ in tracer.iter[:]:
                logits.append(lm.logits)
                tokens.append(lm.samples)
            out = tracer.result.save()
        found.append((tokens, logits, out))
    assert_equal(*found, "generation")


def test_a_block_that_only_edits_and_reads_the_result(lms):
    lines = [
        "for _ in tracer.iter[:]:",
        "    lm.model.layers[0].output[:] += known['V'][0]",
        "out = tracer.result.save()",
    ]
    assert same(lms, lines, GENERATION).lowered
    receipt = same(lms, ["out = tracer.result.save()"], GENERATION)
    assert receipt.lowered and receipt.steps.total() == 6 and set(receipt.steps) <= {"plain", "replay"}


def test_threads_and_coroutines(lms):
    import asyncio

    lm, other = lms

    async def states(model: LM, prompt: list[int]) -> torch.Tensor:
        async with model.trace(prompt):
            h = model.model.layers[1].output[0, -1].save()
        return h

    async def both(model: LM) -> list[torch.Tensor]:
        return await asyncio.gather(*(states(model, PROMPT[: n + 1]) for n in range(6)))

    assert_equal(asyncio.run(both(lm)), asyncio.run(both(other)), "states")


@pytest.mark.local
def test_a_block_that_only_reads_the_result_has_cached_tokens_and_drafts_in_its_receipt(model_folder):
    """Its request declares nothing: what happened to it is the same as without a block."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_tokens": 2048}
    options["speculative"] = {"method": "draft_model", "model": str(model_folder("llama")), "num_speculative_tokens": 3}
    prompt, params = [3, 14, 15, 9, 2, 6] * 12, SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
    run = script(["out = tracer.result.save()"], "lm.generate(prompt, max_new_tokens=24, ignore_eos=True)")
    with LM(model_folder("llama"), lower_traces="require", **options) as lm:
        plain = [lm.generate([prompt], params)[0] for _ in range(2)][1]  # which finds what the first has left
        found = run(lm, prompt, None, None)
    with LM(model_folder("llama"), lower_traces="off", **options) as lm:
        expected = run(lm, prompt, None, None)
    receipt, drafts = found["tracer"].receipt, plain.outputs[0].drafts
    assert receipt.lowered and receipt.num_cached_tokens == plain.num_cached_tokens > 0
    assert (receipt.drafted, receipt.accepted) == (drafts.drafted, drafts.accepted) and drafts.drafted > 0
    assert torch.equal(found["out"], expected["out"]) and receipt.reads == expected["tracer"].receipt.reads

"""Traces of `LM.connect` as declared requests: a key without the right `code` has them, and nothing of a block is sent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_served import served
from helpers_server import KEYS, Server
from test_lowering import GENERATION, ONE_PASS, PROMPT, random_block, random_edits, same, script
from test_lowering import ran as run_block

from pymllm_interp import LM
from pymllm_interp.client.calls.lowered import LoweringError
from pymllm_interp.client.remote import remote_tracer
from pymllm_interp.interventions import Monitor

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def local(served_folder: Path) -> Iterator[LM]:
    """The oracle: the same weights in this process, with each block in the passes."""
    with LM(served_folder, dtype="float32", device="cpu", lower_traces="off") as lm:
        yield lm


@pytest.fixture(scope="module")
def declared(server: Server) -> Iterator[LM]:
    """A client that may not run code."""
    with LM.connect(server.url, api_key=KEYS["declared"], lower_traces="require") as lm:
        yield lm


@pytest.fixture(scope="module")
def code(server: Server) -> Iterator[LM]:
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        yield lm


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The blocks that are sent."""
    sent: list[bytes] = []
    post = remote_tracer.post
    monkeypatch.setattr(remote_tracer, "post", lambda engine, payload: sent.append(payload) or post(engine, payload))
    return sent


@pytest.mark.few("seed", 0, 1, 2)
@pytest.mark.parametrize("seed", range(6))
def test_blocks_give_what_they_give_in_the_pass_without_the_right_to_run_code(local, declared, posts, seed):
    rng, compared = random.Random(seed), 0
    for make in (random_block, random_edits):
        for _ in range(12):
            single = rng.random() < 0.5
            prompt = [rng.randrange(1, 90) for _ in range(rng.choice([2, 3, 7, 16, 17]))]
            layers = local.cfg.num_hidden_layers
            lines = (
                random_block(rng, layers, "lm.model.layers", single)
                if make is random_block
                else random_edits(rng, layers, single, len(prompt))
            )
            try:
                receipt = same((declared, local), lines, ONE_PASS if single else GENERATION, prompt)
            except AssertionError as error:
                if "LoweringErr" in str(error):  # a form of the random blocks that no engine lowers
                    continue
                raise
            assert receipt is None or receipt.lowered
            compared += 1
    assert posts == [] and compared >= 12


def test_most_random_blocks_are_declared(declared):
    rng, ran = random.Random(1), 0
    for _ in range(30):
        single = rng.random() < 0.5
        lines = random_block(rng, declared.cfg.num_hidden_layers, "lm.model.layers", single)
        _, tracer, error = run_block(script(lines, ONE_PASS if single else GENERATION), declared)
        ran += tracer is not None and tracer.receipt.lowered
        assert tracer is not None or "LoweringError" in error or "IndexError" in error, error
    assert ran >= 20


@pytest.mark.parametrize("length", [1, 3, 33])
def test_all_logits_of_a_prompt_and_single_ones(local, declared, posts, length):
    rng = random.Random(length)
    for lines, opening in (
        (["a = lm.lm_head.output.save()"], ONE_PASS),
        (["a = lm.lm_head.output[0, -1].save()"], ONE_PASS),
        (["a = lm.logits.save()", "b = lm.samples.save()"], GENERATION),
    ):
        # Of tokens that the prefix cache does not have: it would compute the rest as a batch of another shape.
        same((declared, local), lines, opening, [rng.randrange(1, 90) for _ in range(length)])
    assert posts == []


def test_invokes_are_one_submission(local, declared, posts):
    def run(lm: Any) -> Any:
        prompts = [[5, 17, 3], [9], [80, 44, 9, 61]]
        v = torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(0))
        with lm.generate(max_new_tokens=4, ignore_eos=True) as tracer:
            kept = list().save()
            for i, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    lm.model.layers[0].output[:] += v
                    kept.append(lm.model.layers[1].output[0, -1])
                    kept.append(i)
        return kept, tracer.receipts

    (ours, receipts), (theirs, _) = run(declared), run(local)
    assert all(receipt.lowered for receipt in receipts) and len(receipts) == 3 and posts == []
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)  # batches of other shapes


def test_code_around_invokes_runs_once(code, posts):
    """It would run here, to collect the blocks, and on the server."""
    drawn = iter([[5, 17], [9, 3]])
    with code.trace() as tracer:
        for prompt in drawn:
            with tracer.invoke(prompt):
                h = code.model.layers[0].output.save()
    assert len(posts) == 1 and h.shape == (1, 2, code.hidden_size)
    log: list[int] = []
    with code.trace() as tracer:
        log.append(1)
        with tracer.invoke([5]):
            h = code.model.layers[0].output.save()
    assert len(posts) == 2


def test_require_refuses_what_would_be_sent(declared, posts):
    with pytest.raises(LoweringError, match="a branch on a value"):
        with declared.trace(PROMPT):
            if declared.model.layers[0].output.sum() > 0:
                h = declared.model.layers[1].output.save()
    log: list[int] = []
    with pytest.raises(LoweringError, match="the code around its invokes"):
        with declared.trace() as tracer:
            log.append(1)
            with tracer.invoke(PROMPT):
                h = declared.model.layers[1].output.save()  # noqa: F841
    assert posts == [] and log == []


def test_a_key_without_the_right_is_told_which_line_needs_it(server, posts):
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        with lm.trace(PROMPT):
            h = lm.model.layers[0].output.norm().save()
        assert h.ndim == 0 and posts == []
        with pytest.raises(PermissionError) as refused:
            with lm.trace(PROMPT):
                if lm.model.layers[0].output.sum() > 0:
                    h = lm.model.layers[1].output.save()
        assert "a branch on a value" in refused.value.__notes__[0] and len(posts) == 1


def test_what_computes_runs_where_it_may(code, local, posts):
    """Its result is smaller than what it is made of."""
    receipt = same((code, local), ["h = lm.model.layers[0].output.norm(dim=-1).save()"], ONE_PASS)
    assert len(posts) == 1 and receipt.lowered  # by the server
    same((code, local), ["h = lm.model.layers[0].output[0, -1].save()"], ONE_PASS)
    assert len(posts) == 1


def test_off_sends_each_block(server, local, posts):
    with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm:
        same((lm, local), ["h = lm.model.layers[0].output[0, -1].save()"], ONE_PASS)
    assert len(posts) == 1
    with pytest.raises(ValueError, match="lower_traces='yes'"):
        LM.connect(server.url, api_key=KEYS["code"], lower_traces="yes")


@pytest.mark.parametrize("value", ["[3]", "[0, -1].view(5, 5)", "[0, -1] @ known['V'][0][:3]"])
def test_errors_are_those_of_the_pass(declared, local, value):
    same((declared, local), [f"h = lm.model.layers[0].output{value}.save()"], ONE_PASS)


def test_a_wrong_prompt_or_keyword_is_refused_as_by_a_local_engine(declared, local):
    def told(lm: Any, **kwargs: Any) -> tuple[type, str]:
        prompt = kwargs.pop("prompt", PROMPT)
        with pytest.raises((TypeError, ValueError)) as refused:
            with lm.generate(prompt, **kwargs):
                h = lm.model.layers[0].output.save()  # noqa: F841
        return type(refused.value), str(refused.value).replace("lower_traces='require', but what this block reads ", "")

    for kwargs in ({"prompt": [10**6]}, {"prompt": []}, {"max_new_tokens": 0}, {"temperatur": 1.0}):
        ours, theirs = told(declared, **dict(kwargs)), told(local, **dict(kwargs))
        assert issubclass(ours[0], (TypeError, ValueError)) and theirs[1] in ours[1]


@pytest.mark.slow
def test_captures_above_the_servers_limit_are_sent_as_code(served_folder, local, posts, tmp_path):
    limits = ["--allow-code-from", "code", "--option", "max_capture_bytes=2000"]
    with served(served_folder, *limits, folder=tmp_path) as small:
        with LM.connect(small.url, api_key=KEYS["code"]) as lm:
            same((lm, local), ["h = lm.model.layers[0].output.save()"], ONE_PASS, [7] * 30)
            assert len(posts) == 1
        with LM.connect(small.url, api_key=KEYS["declared"]) as lm, pytest.raises(ValueError) as refused:
            with lm.trace([7] * 30):
                h = lm.model.layers[0].output.save()  # noqa: F841
        assert "max_capture_bytes" in str(refused.value) and "right 'code'" in refused.value.__notes__[0]
    assert len(posts) == 1


def test_more_invokes_than_a_key_may_have_requests(served_folder, local, tmp_path):
    """They go in portions; a trace that is sent as code counts as one."""

    def run(lm: Any) -> Any:
        with lm.trace() as tracer:
            kept = list().save()
            for i in range(1, 20):
                with tracer.invoke([i, i + 1]):
                    kept.append(lm.model.layers[1].output[0, -1])
        return torch.stack(kept), tracer.receipts

    limits, (theirs, _) = ["--allow-code-from", "code", "--max-concurrent", "4"], run(local)
    with served(served_folder, *limits, folder=tmp_path) as small:
        for key in ("declared", "code"):
            with LM.connect(small.url, api_key=KEYS[key]) as lm:
                ours, receipts = run(lm)
            assert len(receipts) == 19 and all(receipt.lowered for receipt in receipts)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_timeout_ends_it(declared):
    with pytest.raises(TimeoutError, match="timeout"):
        with declared.generate(PROMPT, max_new_tokens=80, ignore_eos=True, timeout=1e-4) as tracer:
            kept = list().save()
            for _ in tracer.iter[:]:
                kept.append(declared.model.layers[0].output[0, -1])


def test_async_with_leaves_the_loop_free(declared, local):
    def opened(lm: Any) -> Any:
        async def run() -> Any:
            async with lm.trace(PROMPT):
                h = lm.model.layers[1].output.save()
            return h

        return asyncio.run(run())

    assert torch.equal(opened(declared), opened(local))


def test_persistent_edits_and_sessions_are_code(code, posts):
    with code.session():
        with code.trace(PROMPT):
            a = code.model.layers[0].output.save()
    with code.edit() as (_, edited):
        edited.model.layers[0].output[:] *= 0
    with edited.trace(PROMPT):
        b = edited.model.layers[0].output.save()
    assert a.any() and not b.any() and len(posts) == 2


@pytest.mark.parametrize(
    "config",
    [
        {"max_length": 12},
        pytest.param({"do_sample": True, "top_k": 1, "min_new_tokens": 3, "max_new_tokens": 5}, marks=pytest.mark.slow),
        pytest.param({"max_new_tokens": 7}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_generations_have_the_models_own_lengths_and_sampling(
    tmp_path: Path, model_folder: Callable[[str], Path], config: dict[str, Any]
):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder("llama").iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 2}))

    def ids(lm: Any) -> list[int]:
        with lm.generate(PROMPT) as tracer:
            out = tracer.result.save()
        assert tracer.receipt.steps.total() == out.shape[1] - len(PROMPT)  # the block declares nothing
        return out.tolist()

    with served(folder, keys=None) as found, LM.connect(found.url, lower_traces="require") as remote:
        ours = ids(remote)
    with LM(folder, dtype="float32", device="cpu", lower_traces="off") as lm:
        assert ours == ids(lm)


def test_scores_of_monitors_come_with_declared_blocks_and_with_sent_ones(local, declared, code, posts):
    prompt, probe = [5, 17, 3], torch.randn(local.hidden_size, generator=torch.Generator().manual_seed(0))
    wanted = local.forward([prompt], capture=["resid_post.1"])[0].activations["resid_post.1"] @ probe
    watch, stop = (Monitor("resid_post.1", probe, -1e9, then=then, name=then) for then in ("record", "stop"))
    code.monitors["kept"] = watch
    for lm, monitors, sent in ((declared, [watch], 0), (code, ["kept"], 0), (code, ["kept", stop], 1)):
        with lm.trace(prompt, monitors=monitors) as tracer:
            lm.model.layers[0].output.save()
        assert len(posts) == sent
        for scores in tracer.monitors.values():
            torch.testing.assert_close(scores.scores, wanted, rtol=1e-4, atol=1e-4)
        assert [scores.stopped for scores in tracer.monitors.values()] == [False, True][: len(monitors)]

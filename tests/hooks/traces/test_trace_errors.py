"""What goes wrong in a trace: raised in the right caller, at the line of its block, and nobody else notices."""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pymllm_interp import LM, SamplingParams
from pymllm_interp.hooks.traces.blocks.errors import EditError, TraceTimeoutError
from pymllm_interp.hooks.traces.nnsight_compat import OutOfOrderError
from pymllm_interp.utils.arguments import PromptError

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture()
def lm(lm_of) -> LM:
    return lm_of("llama")


def lines_of(error: BaseException) -> list[str]:
    """The lines of this file in an error's traceback."""
    return [frame.line or "" for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]


DROPPED = {
    "the logits of a router": ("glm4_moe", "mlp.gate", 0, r"mlp\.gate\.output`: .* output\[0\], .*Steer\('router\.1'"),
    "the logits of another router": (
        "gpt_oss",
        "mlp.router",
        0,
        r"Steer\('router\.1', \.\.\.\) edits the logits",
    ),
    "the scores of an MLP": (
        "gpt_oss",
        "mlp",
        1,
        r"not read output\[1\], so nothing would change; the scores are output\[1\]",
    ),
    "attention weights": ("llama", "self_attn", 1, r"output\[1\], .*`\.source`"),
}


@pytest.mark.parametrize("how", ["in place", "by assignment"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("what", DROPPED)
def test_an_edit_of_an_output_that_the_model_does_not_read_is_refused(lm_of, what: str, how: str, beside: bool) -> None:
    family, path, entry, message = DROPPED[what]
    lm = lm_of(family)
    module: Any = lm.get(f"model.layers.1.{path}")
    words = {"attn_implementation": "eager"} if path == "self_attn" else {}
    with pytest.raises(EditError, match=message):
        with lm.trace(**words) as tracer:
            with tracer.invoke(PROMPT):
                found = module.output
                if how == "in place":
                    found[entry][:] = 3
                else:
                    module.output = (*found[:entry], found[entry] * 2 + 1, *found[entry + 1 :])
            if beside:
                with tracer.invoke(PROMPT[:2]):
                    lm.model.norm.output.save()
    with lm.trace(PROMPT, **words):
        before = lm.lm_head.output.save()
    with lm.trace(PROMPT, **words):  # what is read is edited, and the rest may be assigned as it is
        found = module.output
        other = 1 - entry
        module.output = tuple(part * 1.5 if i == other else part for i, part in enumerate(found))
        after = lm.lm_head.output.save()
    assert not torch.equal(before, after)


def test_an_exception_is_raised_in_the_caller_at_its_line(lm: LM) -> None:
    with pytest.raises(ZeroDivisionError) as caught, lm.trace(PROMPT):
        h = lm.model.layers[0].output
        h.sum() / (1 // 0)
    assert any("1 // 0" in line for line in lines_of(caught.value))
    inside = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
    assert not any(name.endswith(("interleaver.py", "block_runner.py", "engine/engine.py")) for name in inside), inside


def test_an_error_before_the_first_read_is_raised_too(lm: LM) -> None:
    with pytest.raises(KeyError, match="early"), lm.trace(PROMPT):
        raise KeyError("early")


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        (torch.zeros(1, 4, 72), r"expected a tensor \[1, 5, 72\] of float32 on cpu, got a tensor \[1, 4, 72\]"),
        (torch.zeros(1, 5, 72, dtype=torch.float64), r"expected .* of float32 .*, got .* of float64"),
        (torch.zeros(72), r"expected a tensor \[1, 5, 72\].*, got a tensor \[72\]"),
        (None, r"expected a tensor \[1, 5, 72\].*, got NoneType"),
        ((torch.zeros(1, 5, 72), None), r"expected a tensor \[1, 5, 72\].*, got a tuple of 2 values"),
    ],
)
def test_an_edit_that_does_not_fit_says_what_was_expected(lm: LM, replacement: Any, expected: str) -> None:
    with (
        pytest.raises(EditError, match=r"request \d+: edit of `model\.model\.layers\.1\.mlp\.output`: " + expected),
        lm.trace(PROMPT),
    ):
        lm.model.layers[1].mlp.output = replacement


def test_an_edit_that_does_not_fit_is_raised_at_its_line_and_can_be_caught_there(lm: LM) -> None:
    with lm.trace(PROMPT):
        text = "nothing"
        try:
            lm.model.layers[1].mlp.output = torch.zeros(1)
        except ValueError as error:
            text = str(error).save()  # pyright: ignore
        h = lm.model.layers[1].output.save()
    assert "got a tensor [1]" in text and h.shape == (1, 5, 72)


def test_an_attention_output_must_stay_a_pair(lm: LM) -> None:
    with pytest.raises(EditError, match=r"expected a tuple of 2 values, got a tensor"), lm.trace(PROMPT):
        lm.model.layers[0].self_attn.output = torch.zeros(1, 5, 72)


def test_a_nan_edit_is_allowed_and_counted(lm: LM) -> None:
    with pytest.warns(UserWarning, match="1 edit held NaN") as caught, lm.trace(PROMPT) as tracer:
        lm.model.layers[1].output = lm.model.layers[1].output * float("nan")
        logits = lm.lm_head.output.save()
    assert caught[0].filename == __file__
    assert logits.isnan().all() and tracer.receipt.nan_edits == 1
    with pytest.warns(UserWarning, match="1 edit held NaN"), lm.trace(PROMPT) as tracer:
        lm.model.layers[1].output[:] = float("nan")
    assert tracer.receipt.nan_edits == 1 and tracer.receipt.edits == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lm.trace(PROMPT) as tracer:
            lm.model.layers[1].output = lm.model.layers[1].output * 2
    assert tracer.receipt.nan_edits == 0 and tracer.receipt.edits == 1


def test_what_is_written_into_an_input_or_a_tuple_is_counted_as_an_edit(lm: LM) -> None:
    prompts, receipts = [PROMPT, PROMPT[:2]], []
    for number in (1, 2):  # alone, and beside another, which edits nothing
        with lm.trace() as tracer:
            for i, prompt in enumerate(prompts[:number]):
                with tracer.invoke(prompt):
                    read = lm.model.layers[0].self_attn.o_proj.input
                    if not i:
                        read[0, -1] = 0
                        lm.model.layers[1].self_attn.output[0][:] *= 2
                        lm.model.layers[2].mlp.input[:] = 0.5
                    read = lm.model.layers[2].mlp.output
        receipts += tracer.receipts
    assert [receipt.edits for receipt in receipts] == [3, 3, 0]
    with pytest.warns(UserWarning, match="1 edit held NaN"), lm.trace(PROMPT) as tracer:
        lm.model.layers[1].self_attn.o_proj.input[:] = float("nan")
    assert tracer.receipt.nan_edits == tracer.receipt.edits == 1


def test_an_unknown_module_is_named_with_what_there_is(lm: LM) -> None:
    with pytest.raises(AttributeError, match=r"no module or attribute `mpl`; did you mean `mlp`\?"), lm.trace(PROMPT):
        lm.model.layers[0].mpl.output.save()
    with pytest.raises(AttributeError, match=r"has no entry 99: it holds 3 modules, 0 to 2"), lm.trace(PROMPT):
        lm.model.layers[99].output.save()


def test_reads_out_of_order_are_refused(lm: LM) -> None:
    with pytest.raises(
        OutOfOrderError,
        match=r"request \d+: `model\.model\.layers\.0\.output` .*already ran past it: the block was at `.*\.2\.output` before",
    ) as caught:
        with lm.trace(PROMPT):
            late = lm.model.layers[2].output
            early = lm.model.layers[0].output
            print(late, early)
    assert any("early =" in line for line in lines_of(caught.value))


def test_a_first_read_that_nothing_comes_of_names_no_other(lm_of) -> None:
    lm = lm_of("llama", kv_cache_tokens=64)  # a model of its own, to attach a module to that is never called
    lm.adapter = torch.nn.Identity()
    with (
        pytest.raises(OutOfOrderError, match=r"`model\.adapter\.output` .*already ran past it; a block"),
        lm.trace(PROMPT),
    ):
        print(lm.adapter.output)


def test_a_value_outside_of_a_block_is_refused_with_where_it_belongs(lm: LM) -> None:
    where = r"layers\.0\.output` outside of interleaving.*`with lm\.trace\(prompt\):`.*`with tracer\.invoke\(prompt\):`"
    with pytest.raises(ValueError, match=where):
        _ = lm.model.layers[0].output
    with pytest.raises(ValueError, match=where):
        lm.model.layers[0].output = torch.zeros(1)
    with pytest.raises(ValueError, match=where), lm.trace():  # no prompt, and no invoke
        _ = lm.model.layers[0].output


def test_a_name_of_another_invoke_that_is_not_there_yet_says_how_to_wait_for_it(lm: LM) -> None:
    with pytest.raises(NameError, match="name 'state' is not defined") as caught:
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                state = lm.model.layers[1].output[0, -1]
            with tracer.invoke(PROMPT):
                lm.model.layers[0].output[0, -1] = state  # it is read before the block waits for anything
    note, _ = caught.value.__notes__
    assert "`state` is bound by another invoke" in note and "tracer.barrier(2)" in note
    with pytest.raises(NameError) as caught, lm.trace(PROMPT):
        print(nobodys)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    assert not hasattr(caught.value, "__notes__")


def test_a_step_that_never_comes_ends_its_loop_with_a_warning(lm: LM) -> None:
    with pytest.warns(UserWarning, match=r"tracer\.iter\[3:100\] asked for more steps than the 5 that ran"):
        with lm.generate(PROMPT, max_new_tokens=5) as tracer:
            for _ in tracer.iter[3:100]:
                lm.model.layers[0].output.save()
            after = tracer.result.save()
    assert after.shape == (1, 10)


def test_step_100_of_5_is_refused_where_it_is_named(lm: LM) -> None:
    with pytest.raises(
        OutOfOrderError, match=r"iter\[100\] asks for step 100, but there are at most 5 \(0 to 4\)"
    ) as caught:
        with lm.generate(PROMPT, max_new_tokens=5) as tracer:
            for _ in tracer.iter[100]:
                lm.model.layers[0].output.save()
    assert any("tracer.iter[100]" in line for line in lines_of(caught.value))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda lm: lm.trace([]), PromptError, "the prompt is empty"),
        (lambda lm: lm.trace([1, 97]), PromptError, "token id 97, but the vocabulary goes from 0 to 96"),
        (lambda lm: lm.trace([1.5]), PromptError, "expected text, or token ids"),
        (lambda lm: lm.trace([[1, 2], []]), PromptError, "prompt 1 of the list is empty"),
        (lambda lm: lm.trace([[1]] * 600), PromptError, "600 prompts .* max_running_requests of at least 600"),
        (
            lambda lm: lm.trace([[1]] * 500),
            PromptError,
            "500 prompts .* kv_cache_tokens of at least 8000, and it is \\d+",
        ),
        (lambda lm: lm.trace([1, 2], labels=[1, 2]), PromptError, "labels: compute the loss in the block"),
        (
            lambda lm: lm.trace({"input_ids": [1, 2], "pixel_values": 1}),
            PromptError,
            "the prompt has images, and .* takes text only",
        ),
        (lambda lm: lm.trace([1, 2, 3], attention_mask=[1, 0, 1]), PromptError, "has a hole at position 1"),
        (lambda lm: lm.trace([1, 2], attention_mask=[0, 0]), PromptError, "keeps no token"),
        (lambda lm: lm.trace([1, 2], attention_mask=[1]), PromptError, "another shape"),
        (lambda lm: lm.trace([1, 2], position_ids=[3, 4]), PromptError, "do not count its tokens from 0"),
        (lambda lm: lm.trace([1] * 129), PromptError, r"129 tokens .* context holds 128"),
        (lambda lm: lm.trace([1, 2], max_new_tokens=3), TypeError, r"lm\.trace\(\) got max_new_tokens"),
        (lambda lm: lm.trace([1, 2], scan=True), TypeError, r"got scan: .* takes interventions, .*lm\.scan\("),
        (lambda lm: lm.trace([1, 2], n=3), TypeError, r"lm\.trace\(\).* n"),
        (lambda lm: lm.trace([1, 2], edits=["nope"]), KeyError, "no edit is named"),
    ],
)
def test_a_wrong_call_teaches(lm: LM, call: Any, error: type[Exception], message: str) -> None:
    steps = lm.engine.num_steps
    with pytest.raises(error, match=message), call(lm):
        lm.model.layers[0].output.save()
    assert lm.engine.num_steps == steps, "something was scheduled"


def test_what_earlier_nnsight_switched_off_is_off(lm: LM) -> None:
    with lm.trace([1, 2], scan=False, validate=False):
        logits = lm.lm_head.output.save()
    assert logits.shape[:2] == (1, 2)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"max_new_tokens": 500}, PromptError, r"2 tokens and asks for 500 .* context holds 128"),
        (
            {"max_newtokens": 5},
            TypeError,
            r"lm\.generate\(\) has no argument 'max_newtokens': did you mean max_new_tokens\?",
        ),
        ({"num_beams": 4}, TypeError, r"lm\.generate\(\) has no argument 'num_beams': there is no beam search"),
        ({"temperature": -1.0}, ValueError, "temperature=-1.0"),
        ({"n": 2, "num_return_sequences": 2}, TypeError, "n and num_return_sequences are the same"),
        ({"n": 0}, PromptError, "num_return_sequences=0: a whole number above 0"),
        ({"sampling_params": SamplingParams(n=2)}, PromptError, "n=2: a trace follows one generation"),
    ],
)
def test_a_wrong_traced_generation_teaches(lm: LM, kwargs: Any, error: type[Exception], message: str) -> None:
    steps = lm.engine.num_steps
    with pytest.raises(error, match=message), lm.generate([1, 2], **kwargs):
        lm.model.layers[0].output.save()
    assert lm.engine.num_steps == steps, "something was scheduled"


def test_keywords_of_a_plain_call_are_refused_with_their_place(lm: LM) -> None:
    with pytest.raises(TypeError, match=r"got max_new_tokens: .* SamplingParams"):
        lm.generate([1, 2], max_new_tokens=3)


def test_one_bad_invoke_schedules_none_of_them(lm: LM) -> None:
    steps = lm.engine.num_steps
    with pytest.raises(PromptError, match="invoke 1 is empty"), lm.trace() as tracer:
        with tracer.invoke([1, 2]):
            lm.model.layers[0].output.save()
        with tracer.invoke([]):
            lm.model.layers[0].output.save()
    assert lm.engine.num_steps == steps


def test_an_invoke_without_a_prompt_needs_another_with_one(lm: LM) -> None:
    with pytest.raises(ValueError, match="sees those of the other invokes"), lm.trace() as tracer:
        with tracer.invoke():
            lm.model.layers[0].output.save()


@pytest.mark.parametrize(
    "given", [{"max_new_tokens": 2}, {"temperature": 0.5, "seed": 1}, {"edits": ["a"]}, {"nonsense": 1}]
)
def test_parameters_of_an_invoke_without_a_prompt_are_refused(lm: LM, given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, KeyError), match=next(iter(given))), lm.generate(max_new_tokens=2) as tracer:
        with tracer.invoke(PROMPT):
            pass
        with tracer.invoke(**given):
            lm.model.layers[0].output.save()
    with lm.generate(max_new_tokens=2) as tracer:  # the trace's own are its prompts'
        with tracer.invoke(PROMPT):
            pass
        with tracer.invoke():
            h = lm.model.layers[0].output.save()
    assert h.shape == (1, 5, 72)


def test_a_trace_inside_of_a_block_is_refused_and_the_engine_lives(lm: LM) -> None:
    with pytest.raises(RuntimeError, match="cannot be opened inside the block of another"), lm.trace(PROMPT):
        h = lm.model.layers[0].output
        with lm.trace(PROMPT):
            g = lm.model.layers[0].output
        print(h, g)
    assert lm.generate([PROMPT], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_a_block_that_never_returns_is_reported_and_ended_while_others_go_on(lm_of) -> None:
    lm = lm_of("llama", trace_step_warning=0.05, trace_step_timeout=2.0)
    wanted = lm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))[0].token_ids
    handle = lm.submit(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    with (
        pytest.warns(UserWarning, match="held up the engine"),
        pytest.raises(TraceTimeoutError, match=r"trace_step_timeout=2\.0") as caught,
    ):
        with lm.trace(PROMPT):
            h = lm.model.layers[0].output
            while h is not None:
                pass
    assert any("while h" in line or "pass" in line for line in lines_of(caught.value))
    assert handle.result(timeout=600).token_ids == wanted
    with lm.trace(PROMPT):
        h = lm.model.layers[0].output.save()
    assert h.shape == (1, 5, 72)


def test_a_slow_block_that_ends_is_only_reported(lm_of) -> None:
    lm = lm_of("llama", trace_step_warning=0.05, trace_step_timeout=600.0)
    with pytest.warns(UserWarning, match="held up the engine"), lm.trace(PROMPT):
        h = lm.model.layers[0].output.save()
        time.sleep(0.2)
    assert h.shape == (1, 5, 72)


def test_a_timeout_ends_a_traced_request(lm: LM) -> None:
    with pytest.raises(TimeoutError, match="ran into its timeout"):
        with lm.generate(PROMPT, max_new_tokens=100, timeout=0.05) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[0].output.save()
                time.sleep(0.01)


def test_an_interrupted_caller_leaves_nothing_behind(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a trace runs: the request is ended, its greenlet is freed."""
    from pymllm_interp.client.handle import RequestHandle

    wait, calls = RequestHandle.wait, []

    def interrupted(self: RequestHandle, timeout: float | None = None) -> None:
        if not calls:
            calls.append(1)
            raise KeyboardInterrupt
        wait(self, timeout)

    monkeypatch.setattr(RequestHandle, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), lm.generate(PROMPT, max_new_tokens=60) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[0].output.save()
    monkeypatch.undo()
    lm.engine.call(lm.engine.scheduler.check_integrity)
    assert not lm.engine.ends.subscribers and not lm.runner.nnsight_request_helper.attached


def test_shutdown_ends_a_trace_in_flight(model_folder) -> None:
    lm = LM(model_folder("llama"), dtype="float32", device="cpu")
    started, caught = threading.Event(), []

    def client() -> None:
        try:
            with lm.generate(PROMPT, max_new_tokens=100) as tracer:
                for _ in tracer.iter[:]:
                    lm.model.layers[0].output.save()
                    started.set()
                    time.sleep(0.005)
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    assert started.wait(600)
    lm.shutdown()
    thread.join(600)
    assert not thread.is_alive() and isinstance(caught[0], RuntimeError) and "shut down" in str(caught[0])
    with pytest.raises(RuntimeError, match="takes no more requests"), lm.trace(PROMPT):
        lm.model.layers[0].output.save()


def test_a_block_that_saves_past_its_request_keeps_values_of_an_error_free_sibling(lm: LM) -> None:
    """One invoke fails: the other's saves arrive, and the error is raised."""
    x = None
    with pytest.raises(KeyError, match="mine"), lm.trace() as tracer:
        with tracer.invoke([1, 2]):
            x = lm.model.layers[0].output.save()
        with tracer.invoke([3, 4]):
            y = lm.model.layers[1].output
            raise KeyError("mine", y.shape)
    assert x is not None and x.shape == (1, 2, 72)


def test_a_block_that_reads_and_keeps_nothing_is_warned_of(lm: LM) -> None:
    with pytest.warns(UserWarning, match=r"saved none: after its block there is no h, last; \.save\(\) keeps a value"):
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            last = h[0, -1] * 2
    with pytest.warns(UserWarning, match="there is no h") as caught:
        with lm.trace() as tracer:
            for _ in range(3):
                with tracer.invoke(PROMPT):
                    h = lm.model.layers[1].output
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(UserWarning, match="there is no h"), lm.generate(PROMPT, max_new_tokens=2) as tracer:
        for _ in tracer.iter[:]:
            h = lm.model.layers[1].output
    with pytest.raises(UnboundLocalError):
        print(h, last)


def test_names_that_keep_their_old_value_are_warned_of(lm: LM) -> None:
    """`total += x` and a placeholder of None: without a save, the block's value is gone, and the old one is not noticed."""
    total, best, used, mutable = 0, None, 1, torch.zeros(())
    with (
        pytest.warns(UserWarning, match=r"gave best, total a new value and did not save it: .* old one") as caught,
        lm.trace(PROMPT),
    ):
        for layer in lm.model.layers:
            total += layer.output.norm()
            mutable += 1
        best = lm.lm_head.output[0, -1].argmax()
        used = (1 + best).save()
    assert len(caught) == 1 and (total, best) == (0, None) and used > 0 and mutable == len(lm.model.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lm.trace(PROMPT):
            total += lm.model.layers[0].output.norm()
            total, used = total.save(), 2 * total
            best = used.save()
    assert total > 0 and best == 2 * total


def test_a_container_of_saves_that_is_not_saved_is_warned_of(lm: LM) -> None:
    match = r"saved values are in pair, states, which was not saved: .* list\(\)\.save\(\)"
    outer = []
    with pytest.warns(UserWarning, match=match) as caught, lm.trace(PROMPT):
        states = [layer.output.save() for layer in lm.model.layers]
        pair = {"head": lm.lm_head.output.save()}
    with pytest.raises(UnboundLocalError):
        print(states, pair)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lm.trace(PROMPT):
            kept = [layer.output.save() for layer in lm.model.layers].save()
            outer.extend([lm.model.norm.output.save()])
        with lm.session():  # a session's traces are statements of its block
            with lm.trace(PROMPT):
                in_session = [layer.output.save() for layer in lm.model.layers]
            last = in_session[-1].save()
    assert len(kept) == len(lm.model.layers) and len(outer) == 1 and last.shape[-1] == 72


def test_a_block_that_may_have_done_something_is_not_warned_of(lm: LM) -> None:
    seen, box, total = [None], SimpleNamespace(), torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            print(h.shape)
        with lm.trace(PROMPT):
            seen[0] = lm.model.layers[1].output
        with lm.trace(PROMPT):
            box.h = lm.model.layers[1].output
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output[0, -1, 0]
            total += h
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            assert h.shape == (1, 5, 72)
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            h[:] = 0
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            lm.model.layers[1].output = h
        with lm.trace(PROMPT, capture=["embed"]):
            h = lm.model.layers[1].output
        with lm.generate(PROMPT, max_new_tokens=2, on_step=lambda step, saved: None):
            h = lm.model.layers[1].output
        with lm.trace(PROMPT):
            pass
        with lm.trace(PROMPT):
            lm.model.layers[1].output  # noqa: B018
        with lm.trace() as tracer:  # a name of another invoke's, which saves
            with tracer.invoke(PROMPT):
                h = lm.model.layers[1].output
            with tracer.invoke(PROMPT):
                g = lm.model.layers[2].output.save()
        with lm.session():
            with lm.trace(PROMPT):
                h = lm.model.layers[1].output
            kept = h.sum().save()
    assert len(g) == 1 and kept.ndim == 0 and seen[0] is not None and box.h is not None and total.item()


def test_a_session_and_its_trace_are_two_statements(lm: LM) -> None:
    with pytest.raises(ValueError, match="begin it with `with lm"), lm.session(), lm.trace(PROMPT):
        lm.model.layers[1].output.save()
    with nullcontext(3) as number, lm.session():
        with lm.trace(PROMPT):
            found = (lm.model.layers[1].output.sum() * number).save()
    assert found.ndim == 0

"""torch code beside an `LM`: `Tensor.backward` and `Tensor.grad` are torch's own, but for ``with loss.backward():``."""

from __future__ import annotations

import _thread
import code
import contextlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nnsight import NNsight

from pymllm_interp import LM

PROMPT = [5, 17, 3, 80]


def test_a_gradient_of_a_gradient_is_transformers(lm_of, oracle) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    with lm.trace(PROMPT, attn_implementation="eager"):
        h = lm.model.layers[1].output
        with lm.output.logits[0, -1].square().sum().backward(create_graph=True):
            first = h.grad
        with first.square().sum().backward():
            second = h.grad.save()
    found: list[torch.Tensor] = []
    hook = model.model.layers[1].register_forward_hook(lambda module, args, out: found.append(out))
    loss = model(torch.tensor([PROMPT])).logits[0, -1].square().sum()
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, found[0], create_graph=True)
    (wanted,) = torch.autograd.grad(gradient.square().sum(), found[0])
    torch.testing.assert_close(second, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_a_gradient_of_a_gradient_says_what_it_needs(lm_of) -> None:
    lm = lm_of("llama")
    with pytest.raises(RuntimeError) as fused:
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            (first,) = torch.autograd.grad(lm.output.logits[0, -1].square().sum(), h, create_graph=True)
            torch.autograd.grad(first.square().sum(), h)
    assert any("attn_implementation='eager'" in note for note in fused.value.__notes__)
    with pytest.raises(NotImplementedError) as detached:
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            with lm.output.logits[0, -1].square().sum().backward():
                first = h.grad
            with first.square().sum().backward():
                h.grad.save()
    assert any("create_graph=True" in note for note in detached.value.__notes__)
    with pytest.raises(RuntimeError, match=r"inside the block of another one: open the second one behind"):
        with lm.trace(PROMPT, attn_implementation="eager"):
            h = lm.model.layers[1].output
            with lm.output.logits[0, -1].square().sum().backward(create_graph=True):
                first = h.grad
                with first.square().sum().backward():
                    h.grad.save()


def leaf() -> torch.Tensor:
    return torch.arange(3.0).requires_grad_()


def in_one_line() -> torch.Tensor:
    x = leaf()
    with torch.enable_grad(): x.square().sum().backward()  # fmt: skip # noqa: E701
    return x


def in_one_line_of_two_contexts() -> torch.Tensor:
    x = leaf()
    with torch.autocast("cpu"), contextlib.suppress(ValueError): x.square().sum().backward()  # fmt: skip # noqa: E701
    return x


def in_a_header() -> torch.Tensor:
    x = leaf()
    with contextlib.nullcontext(x.square().sum().backward()):
        pass
    return x


def in_a_header_of_several_lines() -> torch.Tensor:
    x = leaf()
    with contextlib.nullcontext(
        x.square().sum().backward(),
    ) as nothing:
        assert nothing is None
    return x


def in_an_expression_that_is_entered() -> torch.Tensor:
    x = leaf()
    with x.square().sum().backward() or contextlib.nullcontext():
        pass
    return x


def in_a_loop_in_one_line() -> torch.Tensor:
    x = leaf()
    with torch.enable_grad(): [loss.backward() for loss in (x.square().sum(),)]  # fmt: skip # noqa: E701
    return x


def nested_in_one_line() -> torch.Tensor:
    x = leaf()
    with torch.enable_grad():
        with torch.autograd.set_detect_anomaly(True): x.square().sum().backward()  # fmt: skip # noqa: E701
    return x


def as_a_callback() -> torch.Tensor:
    x = leaf()
    with contextlib.ExitStack() as stack: stack.callback(x.square().sum().backward)  # fmt: skip # noqa: E701
    return x


def through_map() -> torch.Tensor:
    x = leaf()
    with torch.enable_grad(): list(map(torch.Tensor.backward, [x.square().sum()]))  # fmt: skip # noqa: E701
    return x


def without_source() -> torch.Tensor:
    x = leaf()
    exec("with torch.enable_grad(): x.square().sum().backward()", {"torch": torch, "x": x})
    return x


def in_a_console() -> torch.Tensor:
    x = leaf()
    console = code.InteractiveConsole({"torch": torch, "x": x})
    assert not console.push("with torch.enable_grad(): x.square().sum().backward()\n")
    return x


def in_a_thread() -> torch.Tensor:
    x = leaf()
    with torch.enable_grad(): thread = threading.Thread(target=x.square().sum().backward); thread.start()  # fmt: skip # noqa: E701, E702
    thread.join()
    return x


def in_a_thread_without_a_frame() -> torch.Tensor:
    x, ended = leaf(), threading.Event()
    x.register_post_accumulate_grad_hook(lambda _: ended.set())
    _thread.start_new_thread(x.square().sum().backward, ())
    assert ended.wait(30)
    return x


def in_a_subclass() -> torch.Tensor:
    x = leaf()
    with torch.enable_grad(): (x.square().sum().as_subclass(Named)).backward()  # fmt: skip # noqa: E701
    return x


class Named(torch.Tensor):
    pass


SHAPES = [
    in_one_line, in_one_line_of_two_contexts, in_a_header, in_a_header_of_several_lines, in_an_expression_that_is_entered,
    in_a_loop_in_one_line, nested_in_one_line, as_a_callback, through_map, without_source, in_a_console, in_a_thread,
    in_a_thread_without_a_frame, in_a_subclass,
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plain_backward_runs_wherever_it_stands(shape: Callable[[], torch.Tensor]) -> None:
    assert LM.__name__ == "LM"
    x = shape()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_a_process_that_only_imports_lm_has_torchs_backward() -> None:
    script = """
        from pymllm_interp import LM
        LM
        import torch
        x = torch.ones(2, requires_grad=True)
        with torch.enable_grad(): x.sum().backward()
        print(x.grad.tolist(), "grad" in vars(torch.Tensor))
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300)
    assert ran.stdout.split("\n")[0] == "[1.0, 1.0] False", ran.stderr


def test_a_plain_backward_in_a_block_runs_in_one_line_too(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    with lm.trace(PROMPT):
        h = lm.model.layers[0].output
        h.retain_grad()
        with torch.enable_grad(): lm.lm_head.output.sum().backward()  # fmt: skip # noqa: E701
        found = h.grad.save()
    assert found.abs().sum() > 0


def test_a_block_of_backward_needs_no_trace() -> None:
    """nnsight's own use, in the process of an `LM`."""
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)))
    with torch.enable_grad(), model.trace(torch.ones(1, 3)):
        hidden = model[0].output
        loss = model.output.sum()
        with loss.backward():
            gradient = hidden.grad.save()
    assert torch.equal(gradient, model[1]._module.weight.detach())


def test_other_code_has_torchs_grad_while_a_block_reads_gradients() -> None:
    """Hooks of the same pass and other threads: they read, assign and delete `.grad` as ever."""
    parameter, seen, x = torch.ones(3, requires_grad=True), list[Any](), torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), 5.0)

    def beside() -> None:
        seen.append(x.grad)
        x.grad = torch.zeros(3)
        seen.append(x.grad)
        del x.grad
        seen.append(x.grad)

    def hook(_: torch.Tensor) -> None:
        seen.append(parameter.grad)
        beside()
        x.grad = torch.full((3,), 5.0)
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    hidden = parameter * 2
    hidden.register_hook(hook)
    model = NNsight(torch.nn.Identity())
    with torch.enable_grad(), model.trace(hidden):
        h = model.output * 1
        loss = h.sum()
        with loss.backward():
            gradient = h.grad.save()
    wanted = [None, *[torch.full((3,), 5.0), torch.zeros(3), None] * 2]
    assert len(seen) == len(wanted) and torch.equal(gradient, torch.ones(3))
    for found, expected in zip(seen, wanted, strict=True):
        assert found is None if expected is None else torch.equal(found, expected)


def test_backward_passes_of_two_threads_keep_their_gradients_apart() -> None:
    """Each ends while the other is open; `Tensor.grad` is torch's afterwards."""
    first_is_open, second_is_over, found, errors = threading.Event(), threading.Event(), {}, list[BaseException]()

    def first() -> None:
        x = torch.ones(2, requires_grad=True)
        early = x * 3
        late = early * 5
        late.register_hook(lambda _: (first_is_open.set(), second_is_over.wait(30))[0])
        loss = late.sum()
        with loss.backward():
            first_gradient = early.grad.save()
        found["first"] = first_gradient

    def second() -> None:
        assert first_is_open.wait(30)
        x = torch.ones(2, requires_grad=True)
        h = x * 7
        loss = h.sum()
        with loss.backward():
            second_gradient = h.grad.save()
        found["second"] = second_gradient
        second_is_over.set()

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)
            first_is_open.set()
            second_is_over.set()

    threads = [threading.Thread(target=guarded, args=(run,)) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found["first"].tolist() == [5.0, 5.0] and found["second"].tolist() == [1.0, 1.0]
    x = leaf()
    x.sum().backward()
    assert x.grad is not None and "grad" not in vars(torch.Tensor)

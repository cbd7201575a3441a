"""What a trace can do beyond the scripts of test_trace_parity.py: gangs, gradients, edits by name, streamed saves."""

from __future__ import annotations

import contextlib
import copy
import gc
import queue
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from conftest import held, tiny_tokenizer
from nnsight.modeling.transformers import TransformersModel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pymllm_interp import LM, SamplingParams
from pymllm_interp.hooks.traces.blocks.errors import EditError, GangError
from pymllm_interp.hooks.traces.blocks.trace import RequestTrace
from pymllm_interp.hooks.traces.saves import save_transfer
from pymllm_interp.hooks.traces.saves import saved as saves
from pymllm_interp.hooks.traces.saves.save_pieces import PieceCutter
from pymllm_interp.hooks.traces.saves.save_transfer import SaveTransfer
from pymllm_interp.hooks.traces.saves.saved import batch_views, find_tensors, give_own_storage
from pymllm_interp.hooks.traces.serving.rows import RowSpan
from pymllm_interp.hooks.traces.serving.shared_value import SharedValue
from pymllm_interp.utils.arguments import PromptError

A, B = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3]


@pytest.fixture(params=["llama", "qwen3"])
def pair(request: Any, lm_of: Any, oracle: Any) -> tuple[LM, TransformersModel]:
    model = TransformersModel(copy.deepcopy(oracle(request.param)), tokenizer=tiny_tokenizer())
    return lm_of(request.param), model


@pytest.fixture()
def lm(lm_of: Any) -> LM:
    return lm_of("llama")


def as_prompt(ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids])


# -- gangs ---------------------------------------------------------------------------------------


def patched_through_a_barrier(model: Any) -> Any:
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(as_prompt(A)):
            taken = model.model.layers[0].output
            barrier()
            clean = model.lm_head.output.save()
        with tracer.invoke(as_prompt(B)):
            barrier()
            model.model.layers[0].output = taken
            patched = model.lm_head.output.save()
    return clean, patched


def generated_through_a_barrier(model: Any) -> Any:
    with model.generate(max_new_tokens=4) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(as_prompt(A)):
            embeddings = model.model.embed_tokens.output
            barrier()
            first = tracer.result.save()
        with tracer.invoke(as_prompt(B)):
            barrier()
            model.model.embed_tokens.output = embeddings
            second = tracer.result.save()
    return first, second


def a_name_of_the_sibling(model: Any) -> Any:
    with model.trace() as tracer:
        with tracer.invoke(as_prompt(A)):
            taken = model.model.layers[0].output
        with tracer.invoke(as_prompt(B)):
            value = model.model.layers[1].output
            value[:] = taken
            patched = model.lm_head.output.save()
    return patched


@pytest.mark.parametrize("script", [patched_through_a_barrier, a_name_of_the_sibling])
def test_invokes_that_need_each_other_run_together_as_in_nnsight(pair: Any, script: Any) -> None:
    ours, theirs = script(pair[0]), script(pair[1])
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_gang_generates_as_in_nnsight(pair: Any) -> None:
    (first, second), (their_first, their_second) = (generated_through_a_barrier(model) for model in pair)
    # nnsight's result holds both prompts' rows in both blocks' slices
    assert torch.equal(first, their_first[:1]) and torch.equal(second, their_second[-1:])


def test_a_gang_survives_a_full_pool(lm_of: Any) -> None:
    """Its members are moved to host memory together, and come back together."""
    lm = lm_of("llama", kv_cache_tokens=48, page_size=4)
    moved = lm.engine.stats()["moved_to_host"]

    def gang(tokens: int, out: list) -> None:
        with lm.generate(max_new_tokens=tokens) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(A):
                barrier()
                out.append(tracer.result)
            with tracer.invoke(B):
                barrier()
                out.append(tracer.result)

    alone: list = []
    gang(12, alone)
    results: list[list] = [[], [], []]
    threads = [threading.Thread(target=gang, args=(12, out)) for out in results]
    with held(lm) as arrived:
        for thread in threads:
            thread.start()
        arrived(3)
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    for out in results:
        assert sorted(t.tolist() for t in out) == sorted(t.tolist() for t in alone)
    assert lm.engine.stats()["moved_to_host"] > moved
    lm.engine.call(lm.engine.scheduler.check_integrity)


def test_one_failing_fails_the_gang_and_the_cause_is_raised(lm: LM) -> None:
    with pytest.raises(KeyError, match="cause"), lm.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(A):
            barrier()
            lm.model.layers[1].output.save()
        with tracer.invoke(B):
            barrier()
            raise KeyError("cause")
    assert any(isinstance(r, type(tracer.receipts[0])) for r in tracer.receipts)


def test_a_loop_in_a_function_ends_its_block_with_a_warning_and_nobody_else(lm: LM) -> None:
    def read_nine_steps(tracer: Any, out: list[torch.Tensor]) -> None:
        for _ in tracer.iter[:9]:
            out.append(lm.model.layers[0].output[0, -1])

    ended = "the generation was over, and the block ended inside the function that holds"
    with pytest.warns(UserWarning, match=ended), pytest.warns(UserWarning, match="asked for more steps than the 3"):
        with lm.generate(max_new_tokens=3, ignore_eos=True) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(A):
                first = list().save()
                barrier()
                read_nine_steps(tracer, first)
                first.append("after")  # pyright: ignore[reportArgumentType]
            with tracer.invoke(B):
                barrier()
                second = list().save()
                for _ in tracer.iter[:]:
                    second.append(lm.model.layers[0].output[0, -1])
                second.append("after")  # pyright: ignore[reportArgumentType]
    assert len(first) == 3 and len(second) == 4 and second[-1] == "after"


def test_a_gang_that_cannot_fit_one_step_is_refused_with_the_setting(lm_of: Any) -> None:
    lm = lm_of("llama", max_running_requests=1)
    with pytest.raises(
        PromptError, match=r"2 prompts .* same steps .* max_running_requests of at least 2, and it is 1"
    ):
        with lm.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(A):
                barrier()
            with tracer.invoke(B):
                barrier()
    with lm.trace() as tracer:  # without the barrier they are independent, and need not run together
        with tracer.invoke(A):
            x = lm.model.layers[0].output.save()
        with tracer.invoke(B):
            y = lm.model.layers[0].output.save()
    assert x.shape == y.shape == (1, 5, 72)


def test_a_barrier_that_too_few_reach_says_so(lm: LM) -> None:
    with pytest.raises(ValueError, match="barrier was never reached by every block"), lm.trace() as tracer:
        barrier = tracer.barrier(3)
        with tracer.invoke(A):
            barrier()
        with tracer.invoke(B):
            barrier()
    assert GangError is not None


# -- gradients -------------------------------------------------------------------------------------


def gradients(model: Any) -> Any:
    with model.trace(as_prompt(A)):
        embeddings = model.model.embed_tokens.output
        middle = model.model.layers[1].output
        loss = model.lm_head.output[0, -1].logsumexp(0)
        with loss.backward():
            late = middle.grad.save()
            early = embeddings.grad.save()
    return early, late


def edited_gradient(model: Any) -> Any:
    with model.trace(as_prompt(A)):
        embeddings = model.model.embed_tokens.output
        middle = model.model.layers[1].output
        loss = model.lm_head.output[0, -1, 7]
        with loss.backward():
            middle.grad = middle.grad * 2
            early = embeddings.grad.save()
    return early


def attribution(model: Any) -> Any:
    """Attribution patching: gradient times activation, of values inside the layer."""
    with model.trace(as_prompt(A)):
        z = model.model.layers[0].self_attn.o_proj.input
        act = model.model.layers[1].mlp.down_proj.input
        loss = model.lm_head.output[0, -1, 3] - model.lm_head.output[0, -1, 4]
        with loss.backward():
            act_score = (act.grad * act).sum(-1).save()
            z_score = (z.grad * z).sum(-1).save()
    return act_score, z_score


def one_read_attribution(model: Any) -> Any:
    with model.trace(as_prompt(A)):
        z = model.model.layers[0].self_attn.o_proj.input
        logits = model.lm_head.output
        loss = logits[0, -1, 3] - logits[0, -1, 4]
        with loss.backward():
            score = (z.grad * z).sum(-1).save()
    return score


@pytest.mark.parametrize("script", [gradients, edited_gradient, one_read_attribution])
def test_gradients_equal_nnsights(pair: Any, script: Any) -> None:
    with torch.enable_grad():
        theirs = script(pair[1])
    ours = script(pair[0])
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, atol=1e-4), (a - b).abs().max()
        assert not a.requires_grad, "a save is detached"


def test_gradients_run_alone_and_others_are_bit_equal(lm: LM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    wanted = lm.generate([A, B], params)
    handles = [lm.submit(p, params) for p in (A, B)]
    early, _ = gradients(lm)
    assert early.abs().sum() > 0
    for handle, reference in zip(handles, wanted, strict=True):
        assert handle.result(600).token_ids == reference.token_ids


def test_grad_is_asked_for_by_name_or_by_argument(lm: LM) -> None:
    with lm.trace(A, grad=True):
        h = lm.model.layers[0].output
        asked = h.requires_grad
        nnsight_saved = [asked].save()  # pyright: ignore
    assert nnsight_saved == [True]
    with lm.trace(A):
        h = lm.model.layers[0].output
        plain = [h.is_leaf, "x"].save()  # pyright: ignore
    assert plain[0] is True, "no graph without need"


def test_gradients_of_a_generation_are_refused(lm: LM) -> None:
    with pytest.raises(PromptError, match=r"gradients need a single forward pass: use `with lm\.trace"):
        with lm.generate(A, max_new_tokens=2):
            loss = lm.lm_head.output.sum()
            loss.backward()


# -- edits by name ---------------------------------------------------------------------------------


def test_named_edits_apply_to_those_who_ask_and_by_default_to_all(model_folder: Any) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        params = SamplingParams(temperature=0, max_tokens=3)
        plain = lm.generate([A], params)[0].token_ids
        with lm.edit(name="seven") as tracer:
            for _ in tracer.iter[:]:
                lm.lm_head.output[..., 7] = 1e4
        with lm.edit(name="eight") as tracer:
            for _ in tracer.iter[:]:
                lm.lm_head.output[..., 8] = 2e4
        assert lm.generate([A], params, edits=[])[0].token_ids == plain
        assert lm.generate([A], params, edits=["seven"])[0].token_ids == [7, 7, 7]
        assert lm.generate([A], params)[0].token_ids == [8, 8, 8]
        with lm.generate(A, max_new_tokens=3, edits=["seven"]) as tracer:
            ids = tracer.result.save()
        assert ids[0, -3:].tolist() == [7, 7, 7]
        assert "".join(lm.stream(A, params, edits=["seven"])) == "w7w7w7"
        lm.clear_edits("eight")
        assert lm.generate([A], params)[0].token_ids == [7, 7, 7]
        with lm.edit(name="seven"):
            lm.lm_head.output[..., 9] = 1e4
        assert lm.generate([A], params)[0].token_ids[0] == 9, "the same name replaces"
        lm.clear_edits()
        assert lm.generate([A], params)[0].token_ids == plain


# -- saves -----------------------------------------------------------------------------------------


def test_saves_are_streamed_while_the_request_runs(lm: LM) -> None:
    seen: list[tuple[int, torch.Size]] = []
    with lm.generate(A, max_new_tokens=4, on_step=lambda step, saved: seen.append((step, saved["h"].shape))) as tracer:
        for _ in tracer.iter[:]:
            h = lm.model.layers[0].output.save()
    assert seen == [(0, (1, 5, 72)), (1, (1, 1, 72)), (2, (1, 1, 72)), (3, (1, 1, 72))]
    assert h.shape == (1, 1, 72)


@pytest.mark.local
def test_a_block_writes_to_the_callers_own_queue(lm: LM) -> None:
    out: queue.Queue = queue.Queue()
    first = threading.Event()

    def client() -> None:
        with lm.generate(A, max_new_tokens=6) as tracer:
            for step in tracer.iter[:]:
                out.put((step, lm.model.layers[1].output[0, -1].clone()))
                if step == 1:
                    assert first.wait(600), "the consumer saw nothing while the request ran"

    thread = threading.Thread(target=client)
    thread.start()
    assert out.get(timeout=600)[0] == 0
    first.set()
    thread.join(600)
    assert not thread.is_alive() and out.qsize() == 5


def test_a_callback_that_raises_ends_its_own_request(lm: LM) -> None:
    def fails(step: int, saved: dict) -> None:
        raise LookupError(step)

    with pytest.raises(LookupError, match="0"), lm.generate(A, max_new_tokens=4, on_step=fails):
        lm.model.layers[0].output.save()


def test_saves_never_pin_the_batch(lm: LM) -> None:
    """Beside 20 other requests, what is kept is as large as it looks, in lists and dicts too."""
    handles = [lm.submit([i, i + 1], SamplingParams(max_tokens=20)) for i in range(20)]
    with lm.generate(A, max_new_tokens=6) as tracer:
        rows, named = list().save(), dict().save()
        for step in tracer.iter[:]:
            h = lm.model.layers[1].output
            rows.append([h[0, -1], h])
            named[step] = (h[..., :3],)
    for handle in handles:
        handle.result(600)
    kept = [t for pair in rows for t in pair] + [t for (t,) in named.values()]
    assert len(kept) == 18
    for tensor in kept:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor._base is None, "a view keeps its base alive, and with it the whole batch"


def test_what_a_request_saves_alone_is_a_tensor_of_its_own_each(lm: LM) -> None:
    """Also where the one row that it is served is all there is, and a view of it is as large."""
    with lm.generate(A, max_new_tokens=3) as tracer:
        rows = list().save()
        for _ in tracer.iter[:]:
            h = lm.model.layers[1].output
            rows.append((h[0, -1], h))
    for row, h in rows:
        before = h.clone()
        row.zero_()
        assert torch.equal(h, before)


def everything_saved(lm: LM, **device: Any) -> tuple[Any, ...]:
    """A generation whose block saves a tensor under two names, and tensors in nested containers."""
    with lm.generate(A, max_new_tokens=3, **device) as tracer:
        rows, named = list().save(), dict().save()
        inside = list().save()
        for step in tracer.iter[:]:
            h = lm.model.layers[1].output
            rows.append([h, (h[0, -1], step)])
            named[step] = {"h": h}
            inside.append((rows[0][0].device.type, (rows[0][0][:, -1:] + h).device.type))
        first = rows[0][0].save()
        same = first.save()
        pair = (first, "text").save()
        ids = tracer.result.save()
    return rows, named, inside, first, same, pair, ids


def test_saves_land_on_the_device_that_was_asked_for(lm: LM) -> None:
    """Without a GPU the meta device stands for the other one; the block goes on with its values where they are."""
    rows, named, inside, first, same, pair, ids = everything_saved(lm, device="meta")
    assert inside == [("cpu", "cpu")] * 3
    tensors = [first, pair[0], ids, *(h for h, _ in rows), *(last for _, (last, _) in rows)]
    tensors += [entry["h"] for entry in named.values()]
    assert len(tensors) == 12 and {tensor.device.type for tensor in tensors} == {"meta"}
    assert first is same is pair[0] is rows[0][0] is named[0]["h"], "one tensor stays one"
    assert [step for _, (_, step) in rows] == [0, 1, 2] and pair[1] == "text" and first.shape == (1, 5, 72)
    rows, _, _, first, _, pair, ids = everything_saved(lm)
    assert {tensor.device.type for tensor in (first, pair[0], ids, rows[2][0])} == {"cpu"}


@pytest.mark.gpu
def test_saves_of_a_gpu_model_land_on_the_cpu_unless_told_otherwise(lm_of: Any) -> None:
    lm = lm_of("llama", device="cuda")
    rows, named, inside, first, same, pair, ids = everything_saved(lm)
    assert inside == [("cuda", "cuda")] * 3
    tensors = [first, pair[0], ids, *(last for _, (last, _) in rows), *(entry["h"] for entry in named.values())]
    assert {tensor.device.type for tensor in tensors} == {"cpu"} and first is same is rows[0][0]
    kept, _, _, _, _, _, kept_ids = everything_saved(lm, device="cuda")
    assert {tensor.device.type for tensor in (kept_ids, *(h for h, _ in kept), *(t for _, (t, _) in kept))} == {"cuda"}
    for (h, (last, _)), (kept_h, (kept_last, _)) in zip(rows, kept, strict=True):
        assert torch.equal(h, kept_h.cpu()) and torch.equal(last, kept_last.cpu())
    with lm.trace(A):
        weight = lm.model.norm.weight.save()
    assert weight.device.type == "cpu" and lm.model.norm.weight.device.type == "cuda", "the model keeps its own"


@pytest.mark.parametrize("device", ["gpu", "cuda:77", 3.5])
def test_a_device_that_is_not_there_is_refused_before_anything_runs(lm: LM, device: Any) -> None:
    steps = lm.engine.num_steps
    for opened in (lm.trace, lm.generate):
        with pytest.raises(ValueError, match=r"device=.* says where the saves of a trace go: 'cpu' \(the default\)"):
            with opened(A, device=device):
                lm.model.layers[0].output.save()
    with pytest.raises(TypeError, match=r"device= belongs to `with lm\.trace\(device=\.\.\.\)`"):
        with lm.trace() as tracer:
            with tracer.invoke(A, device="cpu"):
                lm.model.layers[0].output.save()
    assert lm.engine.num_steps == steps


def test_saves_of_several_invokes_are_handed_over_once(lm: LM) -> None:
    with lm.trace(device="meta") as tracer:
        last = list().save()
        for prompt in (A, B):
            with tracer.invoke(prompt):
                last.append(lm.model.layers[-1].output[0, -1])
    assert [tensor.device.type for tensor in last] == ["meta", "meta"]


class CountedList(list):
    """Counts how many of its items are looked at."""

    looked = 0

    def __iter__(self) -> Any:
        self.looked += len(self)
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.looked += len(found) if isinstance(key, slice) else 1
        return found


class CountedDict(dict):
    """The same of its values."""

    looked = 0

    def values(self) -> Any:
        self.looked += len(self)
        return super().values()

    def items(self) -> Any:
        self.looked += len(self)
        return super().items()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_many_invokes_fill_is_gone_through_for_all_of_them_together(lm: LM, device: str) -> None:
    count = 64
    with lm.generate(max_new_tokens=2, ignore_eos=True, device=device) as tracer:
        listed, named = CountedList().save(), CountedDict().save()  # pyright: ignore[reportAttributeAccessIssue]
        for i in range(count):
            with tracer.invoke([i, i + 1]):
                for step in tracer.iter[:]:
                    h = lm.model.layers[0].output[0, -1]
                    listed.append(h)
                    named[i, step] = h
                tracer.result.save()
    assert len(listed) == len(named) == 2 * count
    assert {tensor.device.type for tensor in listed} == {device} and all(named[i, 1] is not None for i in range(count))
    assert max(listed.looked, named.looked) < 20 * 2 * count, "for each invoke, it would be 64 times or more"


def test_what_a_block_puts_into_a_shared_dict_behind_its_last_pass_is_its_own(lm: LM) -> None:
    with lm.generate(max_new_tokens=2, ignore_eos=True) as tracer:
        late = dict().save()
        for i, prompt in enumerate((A, B)):
            with tracer.invoke(prompt):
                h = lm.model.layers[1].output
                tracer.result.save()
                late[i] = [h, h[0, -1]]
    for tensor in (*late[0], *late[1]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor._base is None


def test_one_list_holds_parts_of_a_graph_and_states_without_one(lm: LM) -> None:
    with lm.trace() as tracer:
        kept = list().save()
        with tracer.invoke(A):
            kept.append(lm.model.layers[0].output)
        with tracer.invoke(B, grad=True):
            kept.append(lm.model.layers[0].output.requires_grad_())
            kept.append(lm.lm_head.output[0, -1])
    assert len(kept) == 3 and {tensor.requires_grad for tensor in kept} == {False, True}
    assert all(torch.isfinite(tensor).all() for tensor in kept)


def test_the_last_block_that_saves_a_name_gives_it_its_value(lm: LM) -> None:
    h = "before"
    with lm.trace() as tracer:
        for i in range(3):
            with tracer.invoke(A):
                layer = lm.model.layers[0].output
                h = (layer if i == 2 else torch.full((1,), float(i)).save()) if i else torch.zeros(1).save()
    assert torch.equal(h, torch.ones(1)), "what the third one bound, it did not save"  # pyright: ignore


class Marker:
    """Something that a block holds."""


def test_a_trace_leaves_nothing_for_the_cycle_collector(lm: LM) -> None:
    gc.collect()
    gc.disable()
    try:
        with lm.trace() as tracer:
            held = list().save()
            for prompt in (A, B):
                with tracer.invoke(prompt):
                    marker = Marker()
                    held.append(weakref.ref(marker))
                    lm.model.layers[0].output.save()
        del tracer
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_the_collector_has_its_threshold_back_when_a_trace_is_over(lm: LM) -> None:
    gc.collect()  # requests of other tests raise it while they live
    usual, seen = gc.get_threshold(), []
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError):
            with lm.trace() as tracer:
                for prompt in (A, B):
                    with tracer.invoke(prompt):
                        lm.model.layers[0].output  # noqa: B018
                        seen.append(gc.get_threshold()[0])
                        1 / (0 if fails else 1)
        assert gc.get_threshold() == usual
    with pytest.raises(PromptError):
        with lm.trace() as tracer:
            with tracer.invoke([]):
                lm.model.layers[0].output.save()
    assert gc.get_threshold() == usual and len(seen) == 4 and min(seen) > usual[0]


def test_the_collector_makes_room_for_saves_until_they_are_handed_over(lm: LM) -> None:
    gc.collect()  # requests of other tests raise it while they live
    usual, seen = gc.get_threshold(), []
    with lm.generate(max_new_tokens=5, ignore_eos=True) as tracer:
        for prompt in (A, B):
            with tracer.invoke(prompt):
                kept = list().save()
                for _ in tracer.iter[:]:
                    kept.append(lm.model.layers[0].output[0, -1])
                    seen.append(gc.get_threshold()[0])
    assert seen == sorted(seen) and seen[-1] - seen[0] == 8, "two saves a step"
    assert gc.get_threshold() == usual

    transfer = SaveTransfer(torch.device("cpu"))
    transfer.raise_gc_threshold(5)
    assert gc.get_threshold()[0] == usual[0] + 5
    transfer.close()
    transfer.raise_gc_threshold(5)  # of a pass that was under way when the caller left
    assert gc.get_threshold() == usual


def test_a_session_hands_over_at_its_end(lm: LM) -> None:
    """What one of its traces saved is used by the next, where the batch is."""
    with lm.session(device="meta"):
        with lm.trace(A):
            taken = lm.model.layers[0].output.save()
        with lm.trace(B):
            lm.model.layers[0].output = taken
            patched = [lm.lm_head.output].save()
    assert taken.device.type == "meta" and patched[0].device.type == "meta"
    with pytest.raises(ValueError, match=r"inside a session: give it to `with lm\.session\(device='meta'\)`"):
        with lm.session():
            with lm.trace(A, device="meta"):
                lm.model.layers[0].output.save()


def test_streamed_saves_are_copies_on_the_callers_device(lm: LM) -> None:
    seen: list[list[torch.Tensor]] = []
    with lm.generate(A, max_new_tokens=3, device="meta", on_step=lambda _, saved: seen.append(saved["rows"])) as tracer:
        rows, inside = list().save(), list().save()
        for _ in tracer.iter[:]:
            rows.append(lm.model.layers[0].output)
            inside.append(rows[0].device.type)
    assert inside == ["cpu"] * 3 and [len(rows) for rows in seen] == [1, 2, 3]
    assert {tensor.device.type for tensor in seen[-1]} == {"meta"}
    assert seen[2][0] is seen[0][0] and rows[0] is seen[0][0], "copied once"


def test_a_view_that_was_saved_shows_an_edit_of_what_it_is_a_view_of(lm: LM) -> None:
    with lm.trace() as tracer:
        with tracer.invoke(A):
            h = lm.model.layers[0].output.save()
            last = h[0, -1].save()
            h[:] = 7
        with tracer.invoke(B):
            other = lm.model.layers[0].output.save()
    assert (h == 7).all() and (last == 7).all() and not (other == 7).any()


def test_inference_tensors_and_those_with_weak_references_can_be_saved(lm: LM) -> None:
    with lm.trace() as tracer:
        with tracer.invoke(A):
            h = lm.model.layers[0].output
            with torch.inference_mode():
                doubled = (h * 2)[0, -1].save()
            row = h[0, -1].save()
            reference = weakref.ref(row).save()
        with tracer.invoke(B):
            lm.model.layers[0].output.save()
    assert doubled.untyped_storage().nbytes() == doubled.nbytes
    assert reference() is row and torch.equal(doubled, row * 2)


def test_torch_modes_that_a_block_is_in_while_it_waits_are_its_own(lm: LM) -> None:
    """The engine's thread serves everybody: a mode that one block left on would be on for all."""
    expected = lm.generate([B], SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    plain = lm.submit(B, SamplingParams(temperature=0, max_tokens=6))
    with lm.generate(max_new_tokens=4) as tracer:
        with tracer.invoke(A):
            within = list().save()
            for _ in tracer.iter[:2]:
                with torch.inference_mode():
                    h = lm.model.layers[0].output
                    lm.model.layers[1].output.save()
                    within.append((h * 2).is_inference() and torch.is_inference_mode_enabled())
                with torch.autocast("cpu", torch.bfloat16):
                    lm.model.layers[2].mlp.output.save()
                    within.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16)
                within.append(not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu"))
        with tracer.invoke(B):
            others = list().save()
            for _ in tracer.iter[:]:
                with torch.enable_grad():
                    others.append(lm.model.layers[1].output)
                    w = torch.ones(1, requires_grad=True)
                    others.append((w * 2).requires_grad)
                others.append(lm.model.layers[2].output)
            ids = tracer.result.save()
    assert within == [True] * 6 and others[1::3] == [True] * 4
    assert not any(h.is_inference() or h.requires_grad for h in others if isinstance(h, torch.Tensor))
    assert {h.dtype for h in others if isinstance(h, torch.Tensor)} == {torch.float32}
    assert ids[0, -4:].tolist() == expected[:4] and plain.result().token_ids == expected
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


class CountsCalls(TorchFunctionMode):
    """Counts torch's functions, and makes tensors larger by 1 in `ones`."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        found = func(*args, **(kwargs or {}))
        return found + 1 if func is torch.ones else found


def test_function_modes_dispatch_modes_and_defaults_of_a_block_are_its_own(lm: LM) -> None:
    """Left on at the block's end, too: a default device would be every request's."""
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = lm.generate([B], params)[0].token_ids
    plain = lm.submit(B, params)
    with lm.generate(max_new_tokens=4) as tracer:
        with tracer.invoke(A):
            within, counted = list().save(), CountsCalls()
            with counted, FlopCounterMode(display=False) as flops:
                lm.model.layers[0].output.save()
                before = counted.calls, flops.get_total_flops()
                lm.model.layers[1].output.save()
                within += [before == (counted.calls, flops.get_total_flops()), torch.ones(1).item() == 2]
            with torch.device("meta"):
                lm.model.layers[2].output.save()
                within.append(torch.ones(1).is_meta)
            within.append(not torch.ones(1).is_meta)
            torch.set_default_device("meta")
            torch.set_default_dtype(torch.float64)
            with tracer.iter[1]:
                lm.model.layers[0].output.save()
            within += [torch.ones(1).is_meta, torch.ones(1).dtype == torch.float64]
        with tracer.invoke(B):
            others = list().save()
            for _ in tracer.iter[:]:
                others.append(torch.ones(1) + lm.model.layers[1].output[:1, 0, :1].cpu().float() * 0)
            ids = tracer.result.save()
    assert within == [True] * 6
    assert all(one.dtype is torch.float32 and one.item() == 1 for one in others)
    assert ids[0, -4:].tolist() == expected[:4] and plain.result().token_ids == expected
    with lm.trace(A):
        device, dtype = str(torch.get_default_device()).save(), torch.ones(1).dtype.save()
    assert (device, dtype, torch.get_default_dtype()) == ("cpu", torch.float32, torch.float32)


def test_an_assigned_input_leaves_the_saved_output_of_the_layer_before(lm: LM) -> None:
    """Both are one tensor in the model; beside another request, whose rows it holds too, it must not be written to."""
    with lm.trace() as tracer:
        with tracer.invoke(A):
            before = lm.model.layers[0].output.save()
            copied = before.clone().save()
            lm.model.layers[1].input = torch.zeros_like(before)
        with tracer.invoke(B):
            lm.model.layers[1].output.save()
    assert torch.equal(before, copied) and before.abs().sum() > 0


def test_two_traces_with_the_same_names_do_not_collide(lm: LM) -> None:
    results: dict[int, torch.Tensor] = {}

    def client(i: int) -> None:
        with lm.trace([i + 1] * (i + 1)):
            h = lm.model.layers[1].output.save()
        results[i] = h

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert [results[i].shape[1] for i in range(8)] == list(range(1, 9))


def test_a_value_that_was_not_saved_does_not_leave_the_trace(lm: LM) -> None:
    kept = other = None
    with pytest.warns(UserWarning, match="gave other a new value and did not save it"), lm.trace(A):
        other = lm.model.layers[0].output
        kept = lm.model.layers[1].output.save()
    assert kept is not None and other is None


# -- many at one place, and what they keep -------------------------------------------------------------


def test_lists_that_grow_inside_of_a_list_keep_only_what_they_hold(lm: LM) -> None:
    with lm.generate(max_new_tokens=4, ignore_eos=True) as tracer:
        with tracer.invoke(A):
            by_layer = [[], [], {}].save()  # pyright: ignore
            for step in tracer.iter[:]:
                for layer in range(2):
                    by_layer[layer].append(lm.model.layers[layer].output)
                by_layer[2][step] = by_layer[0][-1][0, -1]
        with tracer.invoke(B):
            for _ in tracer.iter[:]:
                lm.model.layers[0].output  # noqa: B018
    kept = [*by_layer[0], *by_layer[1], *by_layer[2].values()]
    assert len(kept) == 12
    for tensor in kept:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor._base is None


def elsewhere(count: int) -> list[torch.Tensor]:
    """Rows of one larger tensor, as a block is served them, and other things that it makes of them."""
    batch = torch.arange(count * 8.0).view(1, count, 8)
    return [batch[:, i : i + 1].detach() for i in range(count)]


def test_own_gives_each_tensor_just_its_own_memory_in_place() -> None:
    rows = elsewhere(6)
    strided = rows[4][..., ::2]
    integers = torch.arange(10)[3:5].detach()
    with torch.inference_mode():
        inference = torch.ones(4, 4)[1]
    tensors = [*rows[:3], rows[3][0, -1], strided, integers, inference]
    expected = [tensor.clone() for tensor in tensors]
    rows[0].note = "kept"  # pyright: ignore[reportAttributeAccessIssue]
    give_own_storage(tensors)
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor._base is None
    assert rows[0].note == "kept"  # pyright: ignore[reportAttributeAccessIssue]
    rows[1].zero_()
    assert torch.equal(rows[0], expected[0]) and torch.equal(tensors[3], expected[3]), "nobody shares"


def test_tensors_are_exchanged_as_by_torchs_public_function() -> None:
    """`swap_tensor` is what `torch.utils.swap_tensors` does, without its refusal of tensors with weak references."""
    sides = []
    for swap in (saves.swap_tensor, torch.utils.swap_tensors):
        view, other = torch.arange(8.0)[2:4], torch.zeros(3)
        addresses = view.data_ptr(), other.data_ptr()
        swap(view, other)
        assert (other.data_ptr(), view.data_ptr()) == addresses
        sides.append((view.tolist(), other.tolist(), view._base is None, other._base is not None))
    assert sides[0] == sides[1] == ([0, 0, 0], [2, 3], True, True)


def test_what_is_not_the_batchs_stays_where_it_is() -> None:
    whole, weight, row = torch.ones(3), torch.nn.Parameter(torch.ones(4, 4)[0], requires_grad=False), elsewhere(2)[1]
    growing: list[Any] = [row]
    found: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    find_tensors({"a": (whole, weight), "b": growing}, found, seen)
    assert list(map(id, found)) == list(map(id, (whole, weight, row)))
    assert list(map(id, batch_views([*found, row]))) == [id(row)]
    give_own_storage([row])
    assert not batch_views([row])
    growing += [[row], elsewhere(2)[0]]
    found.clear()
    find_tensors(growing, found, seen)
    assert list(map(id, found)) == [id(row), id(growing[2])]
    growing.append([])
    found.clear()
    find_tensors(growing, found, seen)
    growing[-1].append(row)
    find_tensors(growing, found, seen)
    assert list(map(id, found)) == [id(row)], "the last item may be a list that grows"


def test_saves_that_are_alike_travel_in_one_piece_and_are_cut_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, pieces = SaveTransfer(torch.device("meta")), []
    moved = transfer._moved
    monkeypatch.setattr(transfer, "_moved", lambda piece: pieces.append(piece) or moved(piece))
    rows = [torch.full((1, 1, 8), float(i)) for i in range(5)]
    integers, large = [torch.arange(3), torch.arange(3)], torch.zeros(SaveTransfer.MAX_TENSOR // 4 + 1)
    saved = {"rows": rows, "pairs": [(rows[0], integers[0]), (rows[1], integers[1])], "large": large}
    transfer.queue(saved)
    transfer.flush()
    assert sorted(piece.shape for piece in pieces) == [(2, 3), (5, 1, 1, 8)]
    assert torch.equal(next(p for p in pieces if p.dim() == 4), torch.stack(rows)), "in the order of the saves"
    rows[4].zero_()  # after it was sent
    first = rows[0]
    transfer.deliver(saved)
    assert len(pieces) == 4, "the large one by itself, and the one that was changed once more"
    assert saved["rows"][0] is saved["pairs"][0][0] is not first, "one tensor stays one"
    assert {tensor.device.type for tensor in (*saved["rows"], *saved["pairs"][1], saved["large"])} == {"meta"}


def test_saves_that_travelled_together_own_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SaveTransfer, "MAX_PIECE", 100)  # three rows
    transfer, rows = SaveTransfer(torch.device("cpu")), elsewhere(8)
    transfer._queued = {id(row): row for row in rows}
    transfer.flush()
    for row in rows:
        _, _, copied = transfer._copies[id(row)]
        assert torch.equal(copied, row) and copied.data_ptr() != row.data_ptr()
        assert copied.untyped_storage().nbytes() == copied.nbytes


@pytest.fixture()
def far(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The CPU stands for a GPU and for the CPU beside it: what is handed over is copied. Lists the shapes that were."""
    moved: list[torch.Size] = []
    monkeypatch.setattr(SaveTransfer, "_is_on_device", lambda self, tensor: self.device is None)
    monkeypatch.setattr(SaveTransfer, "_moved", lambda self, tensor: (moved.append(tensor.shape), tensor.clone())[1])
    return moved


def saved_by_many(lm: LM, count: int = 20, tokens: int = 4) -> tuple[list[Any], list[Any], list[int]]:
    """Saves in lists, dicts and names; blocks that read, edit and drop in a later step what they have saved."""
    out: list[Any] = []
    with lm.generate(max_new_tokens=tokens, ignore_eos=True) as tracer:
        means, sizes = list().save(), list().save()
        for i in range(count):
            with tracer.invoke([i, i + 1, 5]):
                kept, named = list().save(), dict().save()
                for step in tracer.iter[:]:
                    h = lm.model.layers[0].output
                    row = h[0, -1].save()
                    kept.append(row)
                    named[step] = [row, lm.model.layers[1].output[0, -1]]
                    if step == tokens - 1:
                        means.append(torch.stack(kept).mean(0))
                    if step and i == 3:
                        kept[0] += step
                    if step and i == 4:
                        kept[-2][:3].zero_()
                    if i == 5:
                        sizes.append(kept[0].untyped_storage().nbytes() // kept[0].nbytes)
                out.append((kept, named, row))
        out = out.save()  # pyright: ignore
    return out, means, sizes


def test_what_many_save_in_a_pass_leaves_at_its_end(lm: LM, far: list[torch.Size], monkeypatch: Any) -> None:
    ends, end_pass = [], lm.interleaver.end_pass
    monkeypatch.setattr(lm.interleaver, "end_pass", lambda: (end_pass(), ends.append(len(far)))[0])
    packed, packed_means, sizes = saved_by_many(lm)
    assert far[0] == (40, 72) and ends == [1, 2, 3, 4], "one piece for all that is alike"
    # Later steps' travel as they lie in the batch, which captured passes pad.
    assert all(shape in ((40, 72), (48, 72)) for shape in far[1:4])
    assert sizes in ([60, 40, 40, 40], [64, 40, 40, 40]), (
        "the block goes on with the piece: before its end, with the batch"
    )
    assert sum(shape[0] for shape in far[4:] if len(shape) == 2) == 24, "what was edited since, and the means"
    monkeypatch.undo()
    kept, means, _ = saved_by_many(lm)
    for (ours, ours_named, ours_row), (theirs, theirs_named, row) in zip(packed, kept, strict=True):
        pairs = [*zip(ours, theirs, strict=True), (ours_row, row)]
        pairs += [pair for step in range(4) for pair in zip(ours_named[step], theirs_named[step], strict=True)]
        for a, b in pairs:
            assert torch.equal(a, b) and a._base is None and a.untyped_storage().nbytes() == a.nbytes
        assert ours_row is ours[-1] is ours_named[3][0], "one tensor stays one"
    assert all(map(torch.equal, packed_means, means))


def test_what_a_block_drops_is_kept_nowhere(lm: LM, far: list[torch.Size]) -> None:
    pieces: list[int] = []
    with lm.generate(max_new_tokens=5, ignore_eos=True) as tracer:
        for i in range(20):
            with tracer.invoke([i, i + 1]):
                for _ in tracer.iter[:]:
                    last = lm.model.layers[0].output[0, -1].save()
                    pieces.append(len(lm.interleaver.blocks.serving.saves.transfer.pieces))  # pyright: ignore
    assert max(pieces) <= 2 and last.shape == (72,)
    assert len(far) == 5 and all(shape in ((20, 72), (24, 72)) for shape in far)


def test_a_pass_is_packed_by_kind_and_few_or_large_ones_are_left(far: list[torch.Size]) -> None:
    transfer, rows = SaveTransfer(torch.device("cpu")), elsewhere(20)
    half = [row.half() for row in rows]
    large = [torch.zeros(SaveTransfer.MAX_TENSOR // 4 + 1) for _ in range(SaveTransfer.MIN_TENSORS)]
    few = [row[..., :2] for row in elsewhere(SaveTransfer.MIN_TENSORS - 1)]
    expected = [tensor.clone() for tensor in (*rows, *half)]
    assert list(map(id, transfer.pack([*rows, *few, *large, *half]))) == list(map(id, [*few, *large]))
    assert far == [(20, 1, 1, 8)] * 2
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*rows, *half)}) == len(transfer.pieces) == 2
    assert all(tensor._base is None and tensor._version == 0 for tensor in rows)
    assert not batch_views(rows, transfer.pieces), "a piece is theirs"
    rows[3] += 1
    rows[5].view(-1)[:2].zero_()
    expected[3] += 1
    expected[5].view(-1)[:2].zero_()
    saved = [*rows, *half]
    transfer.collect()
    transfer.queue(saved)
    transfer.flush()
    assert far[2:] == [(2, 1, 1, 8)], "those that were edited since, and no other"
    transfer.deliver(saved)
    for tensor, value in zip(saved, expected, strict=True):
        assert torch.equal(tensor, value) and tensor.untyped_storage().nbytes() == tensor.nbytes
    transfer.close()


def test_memory_whose_rows_are_saved_leaves_as_it_is(far: list[torch.Size]) -> None:
    """Neither the tensors nor what lies in them is moved; the rows count their edits by themselves."""
    transfer = SaveTransfer(torch.device("cpu"))
    batches = [torch.arange(20 * 8.0).view(1, 20, 8) + i for i in range(2)]
    served = [rows[0, -1] for batch in batches for rows in batch.unsafe_split(1, 1)]
    served[3] += 1
    del served[7]  # nobody's
    expected = [row.clone() for row in served]
    kept = list(served)
    few = elsewhere(2)
    assert transfer.leave_batch([*kept, kept[0], *few], [batch[0] for batch in batches]) == few, (
        "twice, and of other memory"
    )
    assert far == [(40, 8)] and len(transfer.pieces) == 2
    assert {row.untyped_storage().data_ptr() for row in kept} == {batch.data_ptr() for batch in batches}
    assert transfer.leave_batch(kept, []) == [] and far == [(40, 8)], "found again, it is where it belongs"
    kept[5] += 1
    expected[5] += 1
    del served, batches
    gone = weakref.ref(kept.pop(9))
    del expected[9]
    assert gone() is None
    transfer.collect()
    transfer.deliver(kept)
    assert far[1:] == [(8,)], "what was edited since, and no other"
    for row, value in zip(kept, expected, strict=True):
        assert torch.equal(row, value) and row.untyped_storage().nbytes() == row.nbytes and row._base is None
    transfer.close()


@pytest.mark.parametrize(
    "saved",
    [
        lambda rows: [row[0, -1] for row in rows[:14]],
        lambda rows: [row[0, -1, :4] for row in rows],
        lambda rows: [row[0, -1].view(2, 4).T for row in rows],
        lambda rows: [row[0, -1].view(torch.int32) for row in rows],
        lambda rows: [*rows, rows[0][0, -1]],
        lambda rows: [*rows[:10], *(row[0, -1] for row in rows[10:])],
        lambda rows: [torch.nn.Parameter(row, requires_grad=False) for row in rows],
        lambda rows: [*rows, torch.eye(3).to_sparse()],
    ],
    ids=["few", "parts", "transposed", "of-another-dtype", "two-at-a-place", "shapes", "parameters", "sparse"],
)
def test_memory_of_which_something_else_was_saved_is_the_batchs(saved: Any, far: list[torch.Size]) -> None:
    transfer = SaveTransfer(torch.device("cpu"))
    batch = torch.arange(20 * 8.0).view(1, 20, 8)
    tensors = saved(batch.unsafe_split(1, 1))
    assert transfer.adopt(tensors, [batch[0]]) == tensors and not far and not transfer.pieces


def test_the_model_knows_of_edits_of_rows_that_count_their_own(lm: LM) -> None:
    """What lies between blocks is loaded anew where it was edited."""
    rows = [RowSpan(row, 1, 4, row, 1, 4) for row in range(4)]
    trace = RequestTrace(None, [])
    for hidden in (
        torch.zeros(1, 4, 8),
        torch.zeros(1, 4, 16)[..., :8],
    ):  # in memory of its own, and a part of another's
        shared, before = SharedValue(hidden, of_logits=False, readers=4), hidden._version
        served = [shared.rows_of(own) for own in rows]
        served[1] += 1
        assert [row._version for row in served] == [0, 1, 0, 0]
        assert hidden._version == before
        shared.count_edit(trace)
        assert shared.settle() is hidden and hidden._version == before + 1 and hidden[0, 1].sum() == 8
    pair = SharedValue((torch.zeros(4, 8), torch.zeros(4, 8)), of_logits=False, readers=4)
    first, _ = pair.rows_of(rows[0])
    first += 1
    assert pair.value[0]._version == 1, "of what it passes along, the model asks that at any time"


def test_blocks_that_read_one_place_wait_each_for_its_own_visit(lm_of: Any) -> None:
    """Requests that began in different steps, some of which skip a layer, are served by one pass."""
    lm = lm_of("llama", max_num_tokens=24)  # two prompts a step

    def script(tracer: Any, how: int, out: list[Any]) -> None:
        for step in tracer.iter[2:] if how == 1 else tracer.iter[:]:
            out.append(lm.model.layers[0].output[0, -1])
            if how == 2 and step == 1:
                lm.model.layers[1].skip(lm.model.layers[0].output)
            else:
                out.append(lm.model.layers[1].mlp.output[0, -1])
                out.append(lm.model.layers[1].output[0, -1])
            out.append(lm.model.layers[2].output[0, -1])
            out.append(lm.model.layers[2].output[0, -1] * 2)

    prompts = [[i, 3, 5, 7, 9, 1, 2, 4, 6 + i] for i in range(6)]
    together = [list() for _ in prompts]
    with lm.generate(max_new_tokens=8, ignore_eos=True) as tracer:
        for i, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                script(tracer, i % 3, together[i])
    for i, prompt in enumerate(prompts):
        alone: list[Any] = []
        with lm.generate(max_new_tokens=8, ignore_eos=True) as tracer:
            with tracer.invoke(prompt):
                script(tracer, i % 3, alone)
            with tracer.invoke([7, 7]):  # a layer that is skipped runs where others share the batch
                for _ in tracer.iter[:]:
                    lm.logits  # noqa: B018
        assert len(together[i]) == len(alone) == (40, 30, 38)[i % 3]
        for a, b in zip(together[i], alone, strict=True):
            assert torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.1.self_attn"])
def test_what_a_lone_request_skips_leaves_nobody_elses_states_in_its_cache(path: str, lm_of: Any) -> None:
    """Later positions attend to this one: they find in each layer what they find in a shared batch."""
    lm = lm_of("llama", max_num_tokens=24)

    def states(others: list[list[int]]) -> list[Any]:
        seen: list[Any] = []
        with lm.generate(max_new_tokens=6, ignore_eos=True) as tracer:
            with tracer.invoke([3, 1, 4, 1, 5]):
                for step in tracer.iter[:]:
                    if step == 2:
                        before = lm.model.layers[0].output
                        lm.get(path).skip(before if path.endswith("1") else (before * 0.5, None))
                    seen.append(lm.model.norm.output[0, -1])
            for other in others:
                with tracer.invoke(other):
                    for _ in tracer.iter[:]:
                        lm.logits  # noqa: B018
        return seen

    beside = states([[7, 7]])
    for seed in range(3):  # each leaves other states in the slots
        lm.generate([[i + seed for i in range(40)]] * 2, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        for a, b in zip(states([]), beside, strict=True):
            assert torch.allclose(a, b, atol=1e-4)


def test_one_that_waits_for_a_later_step_is_no_measure_for_the_next(lm: LM) -> None:
    with lm.generate(max_new_tokens=5, ignore_eos=True) as tracer:
        early, late, every = list().save(), list().save(), list().save()
        with tracer.invoke(A):
            for _ in tracer.iter[[1, 3]]:
                late.append(lm.model.layers[0].output[0, -1])
                lm.model.norm.output  # noqa: B018
        with tracer.invoke(A):
            for step in tracer.iter[[1, 2]]:
                seen = lm.model.layers[0].output[0, -1]
                if step == 1:
                    lm.model.norm.output  # noqa: B018
                else:
                    early.append(seen)
        with tracer.invoke(A):
            for _ in tracer.iter[:]:
                lm.model.embed_tokens.output  # noqa: B018
                every.append(lm.model.layers[0].output[0, -1])
    assert not torch.allclose(every[2], every[3], atol=1e-3)
    assert torch.allclose(early[0], every[2], atol=1e-5)
    assert all(torch.allclose(seen, every[step], atol=1e-5) for step, seen in zip((1, 3), late, strict=True))


def test_blocks_of_different_steps_wait_for_one_number_of_their_own(lm_of: Any) -> None:
    lm, prompts = lm_of("llama", max_num_tokens=16), [[i, 3, 5, 7, 9, 1, 2, 4, 6] for i in range(3)]
    with lm.generate(max_new_tokens=8, ignore_eos=True) as tracer:
        seen = dict().save()
        for i, prompt in enumerate(prompts):  # which begin one after the other, and come to their first number together
            with tracer.invoke(prompt):
                seen[i] = list()
                for _ in tracer.iter[[2 - i, 6]]:
                    seen[i].append(lm.model.layers[0].output[0, -1])
    for i, prompt in enumerate(prompts):
        with lm.generate(prompt, max_new_tokens=8, ignore_eos=True) as tracer:
            every = list().save()
            for _ in tracer.iter[:]:
                every.append(lm.model.layers[0].output[0, -1])
        assert torch.allclose(torch.stack(seen[i]), torch.stack([every[2 - i], every[6]]), atol=1e-3)


def test_a_tensor_that_torch_does_not_move_is_left(far: list[torch.Size], monkeypatch: Any) -> None:
    transfer, rows = SaveTransfer(torch.device("cpu")), elsewhere(20)
    stays, moves = rows[:2], saves.swap_tensor

    def swap(tensor: torch.Tensor, memory: torch.Tensor) -> None:
        if any(tensor is one for one in stays):
            raise RuntimeError("another holds it")  # as some versions of torch do, of the base of views
        moves(tensor, memory)

    monkeypatch.setattr(saves, "swap_tensor", swap)
    assert list(map(id, transfer.pack(rows))) == list(map(id, stays))
    give_own_storage(stays)
    rows[1] += 1
    transfer.collect()
    saved = list(rows)
    transfer.deliver(saved)
    assert all(map(torch.equal, saved, rows)) and far == [(20, 1, 1, 8), (1, 1, 8), (1, 1, 8)]
    transfer.close()


def test_where_pinned_memory_is_full_saves_wait_for_the_end(far: list[torch.Size], monkeypatch: Any) -> None:
    monkeypatch.setattr(PieceCutter, "MAX_IN_FLIGHT", 20 * 32)
    transfer, rows = SaveTransfer(torch.device("cpu")), elsewhere(21)
    expected = [row.clone() for row in rows]
    assert transfer.pack(rows) == [] and far == [] and len(transfer.pieces) == 1
    transfer.collect()
    transfer.queue(rows)
    transfer.flush()
    transfer.deliver(rows)
    assert far == [(21, 1, 1, 8)] and all(map(torch.equal, rows, expected))
    transfer.close()


def test_a_piece_is_cut_when_it_has_arrived_and_its_room_is_free_then() -> None:
    piece, may_arrive = torch.zeros(3, 8), threading.Event()

    class Arrival:
        """In place of a copy stream's event: the values are there when it has been waited for."""

        def synchronize(self) -> None:
            assert may_arrive.wait(600)
            piece.fill_(1)

    cutter = PieceCutter()
    cutter.MAX_IN_FLIGHT = 100
    assert cutter.reserve(96) and not cutter.reserve(96)
    copies = cutter.cut(piece, Arrival())  # pyright: ignore[reportArgumentType]
    assert not copies.done()
    may_arrive.set()
    assert [copied.sum() for copied in copies.result(600)] == [8, 8, 8] and cutter.reserve(96)


@pytest.mark.gpu
def test_what_many_save_in_a_pass_leaves_a_gpu_as_it_was(lm_of: Any) -> None:
    lm = lm_of("llama", device="cuda")
    packed, means, sizes = saved_by_many(lm)
    assert sizes == [64, 40, 40, 40]  # captured prefills are padded
    for kept, named, row in packed:
        assert row is kept[-1] is named[3][0]
        for tensor in (*kept, *(t for pair in named.values() for t in pair)):
            assert tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes
    for i, ((kept, _, _), mean) in enumerate(zip(packed, means, strict=True)):
        if i not in (3, 4):
            assert torch.allclose(torch.stack(kept).mean(0), mean, atol=1e-5)


def test_rows_that_many_read_and_edit_at_once_stay_each_requests_own(lm: LM) -> None:
    """Cut, edited and put back together; each request gets what it gets alone."""
    prompts = [[i, 2 * i + 1] for i in range(12)]

    def run(prompts: list[list[int]]) -> list[Any]:
        out: list[Any] = []
        with lm.generate(max_new_tokens=4, ignore_eos=True) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    kept, how = list().save(), prompt[0] % 4
                    for step in tracer.iter[:]:
                        h = lm.model.layers[1].output
                        if how == 1:
                            h[:] *= 0.5
                        elif how == 2:
                            lm.model.layers[1].output = h * 0.5
                            kept.append(lm.model.layers[1].output)  # what it has assigned
                        elif how == 3 and step % 2:
                            lm.model.layers[1].output = torch.zeros_like(h)
                        kept.append((h[0, -1], lm.logits))
                    out.append((prompt[0], kept, tracer.result[0].tolist()))
            out = out.save()  # pyright: ignore
        assert [receipt.edits for receipt in tracer.receipts] == [{0: 0, 1: 4, 2: 4, 3: 2}[p[0] % 4] for p in prompts]
        return sorted(out, key=lambda entry: entry[0])

    together, alone = run(prompts), [entry for prompt in prompts for entry in run([prompt])]
    for (_, kept, ids), (_, kept_alone, ids_alone) in zip(together, alone, strict=True):
        assert ids == ids_alone
        for ours, theirs in zip(kept, kept_alone, strict=True):
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, theirs)), strict=True):
                assert torch.allclose(a, b, atol=1e-4) and a.untyped_storage().nbytes() == a.nbytes


@pytest.mark.parametrize("others", [0, 1, 6])
def test_an_edit_in_place_of_a_value_from_before_reaches_the_model(lm: LM, others: int) -> None:
    """The residual stream is read again after the attention: an edit of it in between counts, beside others too."""

    def run(edit: bool, others: int) -> torch.Tensor:
        with lm.generate(max_new_tokens=3, ignore_eos=True) as tracer:
            with tracer.invoke(A):
                seen = list().save()
                for _ in tracer.iter[:]:
                    h = lm.model.layers[0].output
                    lm.model.layers[1].self_attn.output  # noqa: B018
                    if edit:
                        h[:] = 1
                    seen.append(lm.model.layers[1].output[0, -1])
            for prompt in [B] * others:
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        lm.model.layers[0].output  # noqa: B018
        return torch.stack(seen)

    edited = run(True, others)
    assert torch.allclose(edited, run(True, 0), atol=1e-4)
    assert not torch.allclose(edited[0], run(False, 0)[0], atol=1e-2)


def test_a_tensor_that_a_module_gets_twice_is_replaced_in_one_place() -> None:
    twice = torch.arange(6.0).view(3, 2)
    shared, rows = SharedValue(((twice, twice), {}), of_logits=False), [RowSpan(i, 1, 3, i, 1, 3) for i in range(3)]
    (first, second), _ = shared.rows_of(rows[1])
    shared.replace(rows[1], ((first * 10, second), {}))
    (a, b), _ = shared.settle()
    assert a.tolist() == [[0, 1], [20, 30], [4, 5]] and torch.equal(b, twice)


def test_an_assignment_that_does_not_fit_changes_nothing() -> None:
    pair = torch.zeros(3, 2), torch.zeros(3, 4)
    shared, rows = SharedValue(pair, of_logits=False), RowSpan(2, 1, 3, 2, 1, 3)
    with pytest.raises(EditError, match=r"expected a tensor \[1, 4\]"):
        shared.replace(rows, (torch.ones(1, 2), torch.ones(1, 3)))
    assert shared.settle() == pair
    shared.replace(rows, (torch.ones(1, 2), torch.ones(1, 4)))
    a, b = shared.settle()
    assert a.sum() == 2 and b.sum() == 4 and a[2].all() and b[2].all() and not pair[0].any()


def test_edits_that_hold_nan_are_counted_for_their_own_request(lm: LM) -> None:
    with pytest.warns(UserWarning, match="edits held NaN"), lm.generate(max_new_tokens=4, ignore_eos=True) as tracer:
        for how in range(4):
            with tracer.invoke([how, 1, 2][how % 2 :]):
                for step in tracer.iter[:]:
                    h = lm.model.layers[0].output
                    if how == 1 and step != 2:
                        lm.model.layers[0].output = h * float("nan")
                    elif how == 2 and step > 1:
                        h[..., 3] = float("nan")
                    elif how == 3:
                        lm.model.layers[0].output = h * 1.0
                        lm.logits[:] = 0
    assert [receipt.edits for receipt in tracer.receipts] == [0, 3, 2, 8]
    assert [receipt.nan_edits for receipt in tracer.receipts] == [0, 3, 2, 0]


def test_nan_is_counted_where_one_request_edits_and_where_several_do(lm: LM) -> None:
    """The edits of one pass are looked at by request at one module, and as a whole at the other."""
    with pytest.warns(UserWarning, match="edits? held NaN"), lm.generate(max_new_tokens=4, ignore_eos=True) as tracer:
        for how in range(3):
            with tracer.invoke([[1, 2, 3], [4], [5, 6]][how]):
                for step in tracer.iter[:]:
                    if how != 2:
                        lm.model.layers[0].output *= float("nan") if how == 0 and step == 1 else 1.0
                    else:
                        lm.model.layers[1].output = lm.model.layers[1].output + (float("nan") if step > 1 else 0.0)
    assert [receipt.nan_edits for receipt in tracer.receipts] == [2, 0, 2]
    assert [receipt.edits for receipt in tracer.receipts] == [8, 8, 4]


def test_assignments_in_a_loop_meet_their_own_steps_whichever_blocks_wait_beside_them(lm: LM) -> None:
    """Blocks at one module ask for different steps of it, and in different ways: each gets what it gets alone."""

    def run(which: list[int]) -> list[torch.Tensor]:
        with lm.generate(max_new_tokens=6, ignore_eos=True) as tracer:
            found = dict().save()  # pyright: ignore[reportAttributeAccessIssue]
            for how in which:
                with tracer.invoke([[1, 2, 3], [4], [5, 6], [7]][how]):
                    layer, kept = lm.model.layers[1], []
                    found[how] = kept
                    for step in tracer.iter[how : 6 - how]:
                        if how != 1:
                            layer.output = layer.output * (1 + step + how)
                        else:
                            layer.output[:] = step + 0.5
                        kept.append(layer.output.clone())
                        kept.append(lm.logits.clone())
        return [torch.cat([part.flatten() for part in found[how]]) for how in which]

    together = run([0, 1, 2])
    for how in range(3):
        assert torch.allclose(together[how], run([how])[0], rtol=1e-3, atol=1e-4), how


def test_an_edit_of_the_result_that_holds_nan_is_counted(lm: LM) -> None:
    with pytest.warns(UserWarning, match="2 edits held NaN"), lm.trace(A) as tracer:
        tracer.result.logits[:] = float("nan")
        tracer.result = torch.full((1, 2), float("nan"))
    assert tracer.receipt.nan_edits == tracer.receipt.edits == 2


# -- what a step costs those who do not look ----------------------------------------------------------


def test_a_step_without_a_live_block_calls_no_module(lm: LM, monkeypatch) -> None:
    """Only the steps that a block waits for go module by module; iter[3] of 6 tokens is one of six."""
    monkeypatch.setattr(lm.backend.lowered, "mode", "off")
    with lm.generate(A, max_new_tokens=6) as tracer:
        for _ in tracer.iter[3]:
            h = lm.model.layers[1].output.save()
    fused = {"plain", "replay"}
    hooked = {how: steps for how, steps in tracer.receipt.steps.items() if how not in fused}
    assert h.shape == (1, 1, 72) and sum(hooked.values()) == 1 and tracer.receipt.steps.total() == 6
    with lm.generate(A, max_new_tokens=6) as tracer:
        logits = list().save()
        for _ in tracer.iter[:]:
            logits.append(lm.logits)
    assert len(logits) == 6 and set(tracer.receipt.steps) <= fused and tracer.receipt.steps.total() == 6


def test_samples_and_logits_are_read_and_forced(lm: LM) -> None:
    with lm.generate(A, max_new_tokens=3) as tracer:
        drawn = list().save()
        for step in tracer.iter[:]:
            scores = lm.logits
            if step == 1:
                lm.logits = torch.where(torch.arange(97) == 11, 1e4, scores)
            drawn.append(lm.samples.clone())
            if step == 2:
                lm.samples = torch.full_like(drawn[-1], 12)
        ids = tracer.result.save()
    assert drawn[0].shape == (1, 1) and ids[0, -2:].tolist() == [11, 12]
    with pytest.raises(ValueError, match="token ids go from 0 to 96"), lm.generate(A, max_new_tokens=2):
        lm.samples = torch.tensor([[97]])


def test_a_piece_that_finds_no_pinned_memory_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, rows = SaveTransfer(torch.device("cpu")), torch.zeros(SaveTransfer.MIN_TENSORS, 4)

    def without_memory(*args: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(save_transfer, "cutter", PieceCutter())
    monkeypatch.setattr(transfer, "_is_on_device", lambda tensor: False)
    monkeypatch.setattr(transfer, "_moved", without_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        transfer.pack(rows.unbind())
    assert save_transfer.cutter._in_flight == 0
    transfer.close()


def test_the_time_for_which_steps_wait_for_blocks_is_counted(lm: LM) -> None:
    before = lm.engine.stats()["block_seconds"]
    lm.generate([A], SamplingParams(max_tokens=2))
    assert lm.engine.stats()["block_seconds"] == before, "plain requests have no blocks"
    with lm.trace(A):
        h = lm.model.layers[0].output.save()
        time.sleep(0.05)
    after = lm.engine.stats()["block_seconds"]
    assert before + 0.05 <= after < before + 30 and h.shape[1] == len(A)

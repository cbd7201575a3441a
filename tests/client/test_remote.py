"""`LM.connect`: the calls of a local LM, over HTTP, beside the local ones on the same weights."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import traceback
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from helpers_server import CLOSE, KEYS
from registry_configs import registry_config

from pymllm_interp import LM, SAE, Ablate, Capture, Gate, SamplingParams, Steer
from pymllm_interp.captures import SavedSteps
from pymllm_interp.client.remote.remote_backend import config_of
from pymllm_interp.interventions import Generated, SetFeature
from pymllm_interp.toolkit import contrast
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire import trace_payload

PROMPT = "w3 w14 w15 w9"


@pytest.fixture(scope="module")
def local(lm_of) -> LM:
    return lm_of("llama")


@pytest.fixture(scope="module")
def lm(server):
    with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as found:
        yield found


def test_what_is_generated_is_the_local_output(lm, local):
    params = SamplingParams(n=2, seed=3, max_tokens=7, logprobs=2, prompt_logprobs=1)
    (found,), (own,) = lm.generate([PROMPT], params), local.generate([PROMPT], params)
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in own.outputs]
    assert [one.text for one in found.outputs] == [one.text for one in own.outputs]
    assert found.prompt_token_ids == own.prompt_token_ids
    for one, other in zip(found.outputs, own.outputs, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-5)
    assert found.perplexity == pytest.approx(own.perplexity, rel=1e-5)


def test_interventions_and_captures_are_the_local_ones(lm, local):
    torch.manual_seed(1)
    ops = [
        Steer("resid_post.0", torch.randn(72), 2.0, positions=Generated(1, 4)),
        Ablate("z.1", torch.randn(2, 16), heads=[0, 5]),
    ]
    arguments = {"interventions": ops, "capture": ["resid_post.*", Capture("q.1", positions=[0, -1], heads=[2])]}
    params = SamplingParams(temperature=0, max_tokens=6)
    (found,), (own,) = lm.generate([PROMPT], params, **arguments), local.generate([PROMPT], params, **arguments)
    assert found.token_ids == own.token_ids
    assert list(found.activations) == list(own.activations)
    for site in own.activations:
        torch.testing.assert_close(found.activations[site], own.activations[site], atol=CLOSE, rtol=CLOSE)
        assert torch.equal(found.activations.positions[site], own.activations.positions[site])
    assert found.receipt.interventions == own.receipt.interventions and found.receipt.spec == own.receipt.spec
    torch.testing.assert_close(
        found.activations.stack("resid_post"), own.activations.stack("resid_post"), atol=1e-5, rtol=1e-5
    )


def test_gates_patterns_and_vectors_by_position_are_the_local_ones(lm, local):
    torch.manual_seed(2)
    gate = Gate(torch.randn(72), 0.0, site="resid_post.0", scope="prompt")
    ops = [
        Steer("resid_post.1", torch.randn(72), 2.0, when=gate),
        Steer("v.1", torch.randn(2, 1, 8), positions=[2, 0], heads=[1]),
    ]
    arguments = {"interventions": ops, "capture": [Capture("pattern.2", heads=[0, 5]), "final_norm"]}
    params = SamplingParams(temperature=0, max_tokens=6)
    (found,), (own,) = lm.generate([PROMPT], params, **arguments), local.generate([PROMPT], params, **arguments)
    assert found.token_ids == own.token_ids and found.receipt.spec == own.receipt.spec
    assert found.receipt.interventions == own.receipt.interventions and found.receipt.captures == own.receipt.captures
    for site in ("pattern.2", "final_norm"):
        torch.testing.assert_close(found.activations[site], own.activations[site], atol=1e-5, rtol=1e-5)


def test_saes_are_named_and_not_sent(lm):
    with pytest.raises(PromptError, match=r"no SAE 'sea'.*lm.saes\['sea'\] = SAE.load"):
        lm.generate([PROMPT], interventions=[SetFeature("sea", {3: 1.0})])
    sae = SAE(
        W_enc=torch.randn(72, 4),
        b_enc=torch.zeros(4),
        W_dec=torch.randn(4, 72),
        b_dec=torch.zeros(72),
        site="resid_post.1",
    )
    with pytest.raises(PromptError, match="SAE is not sent to a server; give the name"):
        lm.generate([PROMPT], interventions=[SetFeature(sae, {3: 1.0})])


def test_a_trace_saves_what_the_local_one_saves(lm, local):
    saved = []
    for model in (lm, local):
        scale = 1.5
        with model.trace(PROMPT) as tracer:
            h = model.model.layers[1].output.save()
            model.model.layers[1].output[:] *= scale
            parts = {"norm": h.norm(), "list": [h[0, -1], 3, "w"], "shape": h.shape}.save()
            logits = model.lm_head.output.save()
        saved.append((h, parts, logits, tracer.receipt))
    (h, parts, logits, receipt), (own, own_parts, own_logits, own_receipt) = saved
    torch.testing.assert_close(h, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, own_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts["list"][0], own_parts["list"][0], atol=1e-5, rtol=1e-5)
    assert parts["list"][1:] == [3, "w"] and parts["shape"] == own_parts["shape"] == own.shape
    assert (receipt.reads, receipt.edits) == (own_receipt.reads, own_receipt.edits)


def helper(h):
    return h * FACTOR


FACTOR = 0.5


def test_functions_and_values_around_the_block_travel(lm, local):
    bias = torch.arange(72.0)
    found = []
    for model in (lm, local):
        layer = model.model.layers[2]
        with model.generate(PROMPT, max_new_tokens=4) as tracer:
            steps = list().save()
            for _ in tracer.iter[:]:
                layer.output[:] = helper(layer.output) + bias.to(layer.output.device)
                steps.append(model.lm_head.output[0, -1].argmax())
            ids = tracer.result.save()
        found.append((torch.stack(steps), ids))
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][0], found[1][0])


def test_invokes_gangs_gradients_and_caches(lm, local):
    found = []
    for model in (lm, local):
        with model.trace() as tracer:
            last = list().save()
            barrier = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                taken = model.model.layers[0].output[:, -1]
                barrier()
                last.append(model.lm_head.output[0, -1])
            with tracer.invoke("w7 w8"):
                barrier()
                model.model.layers[0].output[:, -1] = taken
                last.append(model.lm_head.output[0, -1])
        with model.trace(PROMPT):
            h = model.model.layers[0].output
            loss = model.lm_head.output[0, -1].logsumexp(0)
            with loss.backward():
                gradient = h.grad.save()
        with model.trace(PROMPT) as tracer:
            cache = tracer.cache(modules=[model.model.layers[1]], include_inputs=True)
        found.append((*last, gradient, cache.model.model.layers[1].output, cache["model.model.layers.1"].inputs[0][0]))
    for one, own in zip(*found, strict=True):
        torch.testing.assert_close(one, own, atol=1e-4, rtol=1e-4)


def test_changed_copies_of_the_clients_objects_are_named(lm):
    rows, sums, by_name, read = [None] * 2, torch.zeros(2), {}, [1, 2]
    for session in (False, True):
        with pytest.warns(
            UserWarning, match="a copy of (`rows`|`sums`|`by_name`|, )+ there, which is not sent back"
        ) as found:
            if session:
                with lm.session():
                    with lm.trace(PROMPT):
                        rows[0] = lm.model.layers[0].output.save()
                        by_name["a"] = sums[1] = rows[0].sum()
            else:
                with lm.trace(PROMPT):
                    rows[0] = lm.model.layers[0].output.save()
                    by_name["a"] = sums[1] = rows[0].sum() + read[0]
        assert len(found) == 1 and str(found[0].message).count("`") == 6 and "test_remote" in found[0].filename
    assert rows == [None, None] and not by_name and not sums.any()


def test_a_session_passes_values_between_its_traces(lm, local):
    found = []
    for model in (lm, local):
        with model.session():
            with model.trace(PROMPT):
                h = model.model.layers[0].output[:, -1]
            with model.trace("w1 w2"):
                model.model.layers[0].output[:, -1] = h
                logits = model.lm_head.output[0, -1].save()
        found.append(logits)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_edits_belong_to_the_client_that_made_them(lm, local, server):
    found = []
    params = SamplingParams(temperature=0, max_tokens=5)
    for model in (lm, local):
        with model.edit() as (_, edited):
            edited.model.layers[0].output[:] = 0
        with edited.trace(PROMPT):
            logits = model.lm_head.output.save()
        found.append(
            (logits, edited.generate([PROMPT], params)[0].token_ids, model.generate([PROMPT], params)[0].token_ids)
        )
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    assert found[0][1:] == found[1][1:] and found[0][1] != found[0][2]


def test_saves_come_step_by_step(lm):
    seen = []
    with lm.generate(
        PROMPT, max_new_tokens=4, on_step=lambda step, saved: seen.append((step, saved["h"].shape))
    ) as tracer:
        for _ in tracer.iter[:]:
            h = lm.model.layers[0].output.save()
    assert [step for step, _ in seen] == [0, 1, 2, 3] and seen[0][1] == (1, 4, 72) and seen[1][1] == (1, 1, 72)
    assert h.shape == (1, 1, 72)


def test_an_error_has_the_blocks_line_and_class(lm):
    with pytest.raises(ZeroDivisionError) as failure, lm.trace(PROMPT):
        h = lm.model.layers[0].output
        kept = h.save()
        h / (1 // 0)  # the line that fails
    shown = "".join(traceback.format_exception(failure.value))
    assert (
        "the line that fails" in shown
        and 'test_remote.py", line' in shown
        and "[" not in shown.partition("test_remote.py")[2][:12]
    )
    assert kept.shape == (1, 4, 72)


def test_saved_steps_are_read_while_the_trace_runs(lm, local):
    async def followed(model) -> list[tuple[int, torch.Size]]:
        steps = SavedSteps()

        async def run() -> None:
            async with model.generate(PROMPT, max_new_tokens=3, ignore_eos=True, on_step=steps) as tracer:
                for _ in tracer.iter[:]:
                    h = model.model.layers[0].output.save()  # noqa: F841

        task = asyncio.create_task(run())
        found = [(step, saved["h"].shape) async for step, saved in steps]
        await task
        return found

    for model in (lm, local):
        assert asyncio.run(followed(model)) == [(0, (1, 4, 72)), (1, (1, 1, 72)), (2, (1, 1, 72))]


class OwnError(LookupError):
    pass


def test_errors_of_unknown_classes_are_their_nearest_builtin(lm):
    with pytest.raises(LookupError, match="OwnError: own"), lm.trace(PROMPT):
        if lm.model.layers[0].output.numel():
            raise OwnError("own")


Pair = namedtuple("Pair", "first second")


def test_dicts_keep_their_class(lm, local):
    given = [defaultdict(list, a=[1]), defaultdict(lambda: 3, b=4), Counter("aab"), OrderedDict(z=1, a=2), {"k": 1}]
    for model in (lm, local):
        with model.trace(PROMPT):
            counts = Counter(model.lm_head.output[0].argmax(-1).tolist())
            by_size, found = defaultdict(list), list(given).save()
            for token, count in counts.items():
                by_size[count].append(token)
            counts.save(), by_size.save()
        assert found == given and [type(one) for one in found] == [type(one) for one in given]
        assert type(counts) is Counter and counts["none"] == 0
        assert type(by_size) is defaultdict and by_size[0] == [] and found[0]["new"] == []
        assert list(found[3]) == ["z", "a"]


def test_values_keep_their_kind_there_and_back(lm, local):
    given = [
        torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn), torch.tensor([2**16 - 1], dtype=torch.uint16),
        torch.tensor(2**64 - 1, dtype=torch.uint64), torch.tensor([[1 + 2j], [3j]], dtype=torch.complex32).conj(),
        torch.zeros(0, 3, dtype=torch.float8_e5m2), Pair(torch.ones(2), 3), 1 - 2j, np.arange(4, dtype=np.uint16)[::2],
    ]  # fmt: skip
    found = []
    for model in (lm, local):
        with model.trace(PROMPT):
            top = model.lm_head.output[0, -1].topk(2).save()
            turned = torch.complex(model.lm_head.output[0], model.lm_head.output[0]).conj()
            saves = {
                "given": given,
                "turned": [turned, turned],
                "backwards": turned.abs().argmax(-1).numpy()[::-1],
            }.save()
        found.append((top, saves))
    (top, saves), (own_top, own) = found
    assert torch.equal(top.indices, own_top.indices) and type(top) is type(own_top)
    assert saves["turned"][0] is saves["turned"][1]
    torch.testing.assert_close(saves["turned"][0], own["turned"][0], atol=1e-5, rtol=1e-5)
    assert saves["backwards"].tolist() == own["backwards"].tolist()
    for back, value in zip(saves["given"][:5], given[:5], strict=True):
        assert back.dtype is value.dtype and back.shape == value.shape
        assert back.resolve_conj().flatten().tolist() == value.flatten().tolist()
    assert saves["given"][5].second == 3 and saves["given"][5].first.tolist() == [1, 1] and saves["given"][6] == 1 - 2j
    assert saves["given"][7].tolist() == [0, 2] and saves["given"][7].dtype == np.uint16


def test_what_cannot_be_sent_is_named(lm):
    with pytest.raises(TypeError, match=r"names\[0\] is an array of <U1"), lm.trace(PROMPT):
        lm.model.layers[0].output.sum()
        names = [np.array(["a"])].save()
    with pytest.raises(TypeError, match=r"thing\['x'\] is a object"), lm.trace(PROMPT):
        lm.model.layers[0].output.sum()
        thing = {"x": object()}.save()
    assert "thing" not in locals()


def test_streams_handles_and_chats(lm, local):
    params = SamplingParams(temperature=0, max_tokens=6)
    (own,) = local.generate([PROMPT], params)
    assert "".join(lm.stream(PROMPT, params)) == own.text
    assert lm.submit(PROMPT, params).result().text == own.text

    async def pieces() -> tuple[str, str]:
        text = "".join([piece async for piece in lm.astream(PROMPT, params)])
        return text, (await lm.agenerate([PROMPT], params))[0].text

    assert asyncio.run(pieces()) == (own.text, own.text)
    assert [out.text for out in lm.imap([PROMPT] * 5, params, max_in_flight=2)] == [own.text] * 5
    chat = lm.chat([{"role": "user", "content": "w3 w14 w15"}], params)
    assert chat[0].prompt_token_ids == lm.token_ids("w3 w14 w15 w1")
    handle = lm.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    handle.cancel()
    assert handle.result().finish_reason in ("abort", "length")


def test_forward_passes_and_transformer_lens_calls(lm, local):
    logits, cache = lm.run_with_cache(PROMPT)
    own, own_cache = local.run_with_cache(PROMPT)
    torch.testing.assert_close(logits, own, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache["resid_post", 1], own_cache["resid_post", 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lm(PROMPT).logits, local(PROMPT).logits, atol=1e-4, rtol=1e-4)

    def halve(value, hook):
        return value * 0.5

    hooked = lm.run_with_hooks(PROMPT, [("resid_post.0", halve)])
    torch.testing.assert_close(hooked, local.run_with_hooks(PROMPT, [("resid_post.0", halve)]), atol=1e-4, rtol=1e-4)


def test_modules_and_weights_are_used_in_blocks_only(lm, local):
    """The client's tree has no values: products of torch with a meta tensor return memory that nobody wrote."""
    down = lm.model.layers[0].mlp.down_proj
    own = local.model.layers[0].mlp.down_proj.weight
    assert (down.weight.shape, down.weight.dtype, len(down.weight)) == (own.shape, own.dtype, len(own))
    rows = torch.ones(1, own.shape[1])
    for call in (lm.lm_head, lm.model.norm, lm.lm_head._module, down):
        with pytest.raises(NotImplementedError, match="runs in the model's process"):
            call(rows)
    for use in (
        lambda: rows @ down.weight.T, lambda: down.weight.mul_(2), lambda: down.weight[0], lambda: down.weight.sum(),
        lambda: torch.nn.functional.linear(rows, down.weight), lambda: torch.cat([down.weight, down.weight]),
        lambda: setattr(down.weight, "data", own),
    ):  # fmt: skip
        with pytest.raises((NotImplementedError, ValueError), match=r"weight.* has"):
            use()
    with lm.trace(PROMPT):
        row = lm.model.layers[0].mlp.down_proj.weight[0].save()
    assert torch.equal(row, own[0])


def test_sweeps_run_as_requests_and_attribution_is_refused(lm, local):
    arguments = {"metric": ("w7", "w11"), "site": "z", "heads": [0, 4], "positions": [1, -1]}
    found, own = (each.patch_sweep(PROMPT, "w3 w2 w15 w9", **arguments) for each in (lm, local))
    assert (found.how, own.how) == ("requests (the engine is a server's)", "wavefront")
    torch.testing.assert_close(found.values, own.values, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="how='requests'"):
        lm.patch_sweep(PROMPT, PROMPT, metric="w7", how="wavefront")
    with pytest.raises(NotImplementedError, match="make a local LM there"):
        lm.attribute(PROMPT, PROMPT, metric="w7", sites="z.*")
    pairs = [(PROMPT, "w2 w8"), ("w5", "w6")]
    ours, theirs = (contrast(each, pairs, "resid_post.*") for each in (local, lm))
    for layer, vector in ours.items():
        torch.testing.assert_close(theirs[layer], vector, atol=1e-5, rtol=1e-4)


def test_vectors_live_on_the_server(lm, server):
    lm.vectors["sky"] = torch.ones(72)
    lm.vectors["layers"] = {0: torch.ones(72), 2: -torch.ones(72)}
    assert set(lm.vectors) == {"sky", "layers"}
    assert torch.equal(lm.vectors["sky"], torch.ones(72)) and list(lm.vectors["layers"]) == [0, 2]
    params = SamplingParams(temperature=0, max_tokens=6)
    named = lm.generate([PROMPT], params, interventions=[Steer("resid_post.1", "sky", 5)])[0]
    inline = lm.generate([PROMPT], params, interventions=[Steer("resid_post.1", torch.ones(72), 5)])[0]
    assert named.token_ids == inline.token_ids
    del lm.vectors["sky"]
    with pytest.raises(KeyError, match="sky"):
        lm.vectors["sky"]
    with pytest.raises(PromptError, match="no vector 'sky'"):
        lm.generate([PROMPT], params, interventions=[Steer("resid_post.1", "sky", 5)])
    del lm.vectors["layers"]


def test_asynchronous_traces_and_their_cancelling(lm, server):
    async def read(prompt: str) -> torch.Tensor:
        async with lm.trace(prompt):
            h = lm.model.layers[1].output[0, -1].save()
        return h

    async def both() -> list[torch.Tensor]:
        return await asyncio.gather(read(PROMPT), read("w1 w2"))

    assert [h.shape for h in asyncio.run(both())] == [(72,), (72,)]

    async def cancelled() -> None:
        first = asyncio.Event()
        steps = SavedSteps()

        async def look() -> None:
            async for _ in steps:
                first.set()

        async def long() -> None:  # 20 s of it, were it not cancelled
            async with lm.generate(PROMPT, max_new_tokens=100, ignore_eos=True, on_step=steps) as tracer:
                for _ in tracer.iter[:]:
                    __import__("time").sleep(0.2)
                    total = lm.model.layers[0].output.sum().save()  # noqa: F841

        looking, task = asyncio.create_task(look()), asyncio.create_task(long())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        looking.cancel()

    before = server.metric("steps_total")
    asyncio.run(cancelled())
    server.wait_until_idle()
    assert server.metric("steps_total") - before < 100


def test_who_may_connect(server):
    with pytest.raises(PermissionError, match="key is needed"):
        LM.connect(server.url)
    with pytest.raises(PermissionError, match="not known"):
        LM.connect(server.url, api_key="wrong")
    with pytest.raises(ConnectionError, match="no answer"):
        LM.connect("http://127.0.0.1:9")
    with LM.connect(server.url, api_key=KEYS["plain"]) as plain:
        assert plain.generate("w1", SamplingParams(max_tokens=1))[0].token_ids
        with pytest.raises(PermissionError, match="'declared'"):
            plain.generate("w1", SamplingParams(max_tokens=1), capture=["resid_post.0"])
        with pytest.raises(PermissionError, match="'declared'"), plain.trace("w1"):  # a declared request
            plain.model.layers[0].output.save()
        with pytest.raises(PermissionError, match="--allow-code-from plain"), plain.trace("w1"):
            print(plain.model.layers[0].output)


class Doubler:
    def change(self, state):
        return state * 2


class Plus(Doubler):
    def change(self, state):
        with self.lm.trace(PROMPT):
            changed = super().change(self.lm.model.layers[0].output).save()
        return changed


def test_super_without_arguments_is_that_of_the_method_around_the_block(lm):
    plus = Plus()
    plus.lm = lm
    with lm.trace(PROMPT):
        state = lm.model.layers[0].output.save()
    torch.testing.assert_close(plus.change(None), state * 2)


def test_functions_of_installed_packages_travel_by_name(tmp_path, monkeypatch):
    """Also of packages in a folder of their own (`pip install --target`): the server has these, but not the caller's files."""
    for folder in ("installed", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}_module.py").write_text("def double(x):\n    return 2 * x\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    (tmp_path / "installed" / "installed_module-1.0.dist-info").mkdir()
    installed, own = importlib.import_module("installed_module"), importlib.import_module("own_module")
    assert b"installed_module" in trace_payload.dump({"f": installed.double}, lambda obj: None)
    payloads = [trace_payload.dump({"f": module.double}, lambda obj: None) for module in (installed, own)]
    for name in ("installed_module", "own_module"):
        monkeypatch.setitem(sys.modules, name, None)
    assert trace_payload.load(payloads[1], lambda pid: None)["f"](4) == 8
    with pytest.raises(ImportError):
        trace_payload.load(payloads[0], lambda pid: None)


@pytest.mark.parametrize("name", ["nemotron_h", "llama"])
def test_a_config_with_infinities_arrives_as_it_is(name: str) -> None:
    """Nemotron-H's `time_step_limit` ends with one, which JSON does not have."""
    config = registry_config(name)
    with LM(hf_config=config, load_format="dummy", device="cpu", kv_cache_tokens=64) as lm:
        sent = json.dumps(lm.backend.describe()["hf_config"], allow_nan=False)
    found = config_of(json.loads(sent))
    assert found.to_dict() == config.to_dict()

"""`lm.scan`: shapes and dtypes without a pass of the engine. The oracles are nnsight's scan, and `lm.trace` of the same prompt."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from family_configs import tiny_config
from helpers_server import KEYS
from nnsight import Envoy
from nnsight.intervention.eproperty import eproperty
from nnsight.modeling.transformers import TransformersModel
from torch._subclasses.fake_tensor import FakeTensor

from pymllm_interp import LM
from pymllm_interp.utils.arguments import PromptError

TEXT = "w5 w17 w3"
OTHER = "w7 w2 w9 w1 w80"


@pytest.fixture(scope="module")
def lm(lm_of: Callable[..., LM]) -> LM:
    return lm_of("llama")


@pytest.fixture(scope="module")
def nnsight() -> TransformersModel:
    return nnsights("llama")


def nnsights(family: str) -> TransformersModel:
    model = random_model(CONFIGS[family]())
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")  # as a loaded model has it
    return TransformersModel(model, tokenizer=tiny_tokenizer())


def described(value: Any, fake: bool = True) -> Any:
    """Shape, dtype and device of each tensor, with the containers around them."""
    if isinstance(value, torch.Tensor):
        assert isinstance(value, FakeTensor) == fake, type(value)
        return tuple(value.shape), value.dtype, value.device.type
    if isinstance(value, dict):
        return {key: described(one, fake) for key, one in value.items() if key not in ("cache", "past_key_values")}
    if isinstance(value, (list, tuple)):
        return [described(one, fake) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def first_layer(lm: Any) -> Any:
    return lm.transformer.h[0] if hasattr(lm, "transformer") else lm.model.layers[0]


# -- as in nnsight ---------------------------------------------------------------------------------


def every_module(lm: Any) -> Any:
    """Outputs and inputs by path."""
    with lm.scan(TEXT) as tracer:
        cache = tracer.cache(include_inputs=True)
    return {path: (cache[path].output, cache[path].inputs) for path in sorted(cache.keys())}


def reads_in_order(lm: Any) -> Any:
    layer = first_layer(lm)
    with lm.scan(TEXT) as tracer:
        whole = lm.inputs.save()
        first, given, out = layer.input.save(), layer.inputs.save(), layer.output.save()
        logits = lm.lm_head.output.save()
        unsaved = lm.output.logits + 1
        result = tracer.result.save()
        dim = out.shape[-1]
        width = [dim, out.dtype].save()
    assert "unsaved" not in locals() and "dim" not in locals()
    return [whole, first, given, out, logits, result, width[0], str(width[1])]


def edits(lm: Any) -> Any:
    with lm.scan(TEXT):
        layer = first_layer(lm)
        layer.mlp.output[:] = 0
        layer.output = layer.output * 2
        before = lm.lm_head.input.save()
        lm.lm_head.input = before[:, -1:]
        logits = lm.lm_head.output.save()
    return [before, logits]


def skipped(lm: Any) -> Any:
    with lm.scan(TEXT):
        layer = first_layer(lm)
        layer.skip(layer.input)
        out = layer.output.save()
        logits = lm.output.logits.save()
    return [out, logits]


def called(lm: Any) -> Any:
    """A module that is called, a weight that is read, and a tensor of the block's own."""
    with lm.scan(TEXT):
        h = first_layer(lm).output
        logits = lm.lm_head(h[:, -1]).save()
        weight = lm.lm_head.weight
        size = list(weight.shape).save()
        product = (h @ weight.T + torch.ones(weight.shape[0])).save()
    return [logits, size, product]


def stopped(lm: Any) -> Any:
    with lm.scan(TEXT) as tracer:
        out = first_layer(lm).output.save()
        tracer.stop()
    return out


def steps(lm: Any) -> Any:
    with lm.scan(TEXT) as tracer:
        found = list().save()
        for _ in tracer.iter[:1]:
            found.append(first_layer(lm).output)
    return found


def operations(lm: Any) -> Any:
    with lm.scan(TEXT):
        layer = first_layer(lm)
        operation = layer.self_attn.source.attention_interface_1.output.save()
        act = layer.mlp.source.self_act_fn_0.output.save()
    return [operation[0], act]


def a_list(lm: Any) -> Any:
    with lm.scan([TEXT, OTHER]):
        states = first_layer(lm).output.save()
        logits = lm.lm_head.output.save()
    return [states, logits]


def joined_invokes(lm: Any) -> Any:
    with lm.scan() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(TEXT):
            taken = first_layer(lm).output
            barrier()
        with tracer.invoke(TEXT):
            barrier()
            first_layer(lm).output = taken
            patched = lm.lm_head.output.save()
        with tracer.invoke():
            every = lm.lm_head.output.save()
    return [patched, every]


def hidden_states(lm: Any) -> Any:
    with lm.scan(TEXT, output_hidden_states=True) as tracer:
        result = tracer.result.save()
    return list(result.hidden_states)


def of_other_inputs(lm: Any) -> Any:
    ids, found = torch.tensor([[5, 17, 3], [7, 2, 0]]), []
    for given in (ids, [5, 17, 3], {"input_ids": ids}):
        with lm.scan(given):
            out = first_layer(lm).output.save()
        found.append(out)
    with lm.scan(input_ids=ids, attention_mask=torch.ones_like(ids)):
        out = first_layer(lm).output.save()
    return [*found, out]


def gradients(lm: Any) -> Any:
    with lm.scan(TEXT):
        h = first_layer(lm).output
        loss = lm.lm_head.output.sum()
        with loss.backward():
            gradient = h.grad.save()
    return gradient


SCRIPTS = [
    reads_in_order, edits, skipped, called, stopped, steps, a_list, joined_invokes, hidden_states, of_other_inputs, gradients,
]  # fmt: skip


@pytest.mark.thin(12)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_scan_has_what_nnsights_scan_has(family, script, lm_of):
    assert described(script(lm_of(family))) == described(script(nnsights(family)))


@pytest.mark.thin(12)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
def test_every_module_has_what_nnsights_scan_has(family, impl, lm_of):
    reference = nnsights(family)
    ours, theirs = described(every_module(lm_of(family, impl=impl))), described(every_module(reference))
    if not reference._module._supports_sdpa:  # its modules return weights of attention, which the engine does not
        for path, (output, _) in theirs.items():
            if path.endswith(".self_attn"):
                output[1] = None
    assert ours == theirs


def test_the_source_of_a_module_has_transformers_operations(lm):
    reference = nnsights("llama")
    reference._module.set_attn_implementation("eager")  # what `.source` of an attention means here
    assert described(operations(lm)) == described(operations(reference))


@pytest.mark.thin(12)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe"])
def test_mixtures_of_experts_are_scanned(family, dtype):
    config = tiny_config(family)
    with LM(hf_config=config, load_format="dummy", device="cpu", dtype=dtype, kv_cache_tokens=512) as lm:
        with lm.scan([5, 17, 3]):
            experts = lm.model.layers[0].mlp.output.save()
            out = lm.model.layers[1].output.save()
            logits = lm.lm_head.output.save()
        with lm.trace([5, 17, 3]):
            real = [lm.model.layers[0].mlp.output, lm.model.layers[1].output, lm.lm_head.output].save()
    assert described([experts, out, logits]) == described(real, fake=False)


def test_a_scan_without_tokenizer_takes_ids_and_refuses_text():
    config = CONFIGS["gpt2"]()
    with LM(hf_config=config, load_format="dummy", device="cpu", dtype="float16", kv_cache_tokens=512) as lm:
        with lm.scan([5, 17, 3]):
            out = lm.transformer.h[0].output.save()
        assert described(out) == ((1, 3, 64), torch.float16, "cpu")
        with pytest.raises(PromptError):
            with lm.scan(TEXT):
                out = lm.transformer.h[0].output.save()


# -- as in a trace ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
def test_modules_have_the_shapes_that_a_trace_gives(family, lm_of):
    lm = lm_of(family)
    with lm.scan(TEXT) as tracer:
        scanned = tracer.cache()
    with lm.trace(TEXT) as tracer:
        traced = tracer.cache()
    assert {*traced.keys()} <= {*scanned.keys()} and len(traced.keys()) > 20
    for path in traced.keys():
        if path != "model":  # gpt2's whole output is of another class
            assert described(scanned[path].output) == described(traced[path].output, fake=False), path


def invokes(call: Any, lm: Any, **kwargs: Any) -> Any:
    with call(**kwargs) as tracer:
        found = list().save()
        for text in (TEXT, OTHER):
            with tracer.invoke(text):
                found.append(lm.model.layers[1].output)
    return found


@pytest.mark.parametrize("padding", [False, True])
def test_invokes_are_padded_where_those_of_a_trace_are(lm, padding):
    found, real = (invokes(call, lm, padding=padding) for call in (lm.scan, lm.trace))
    assert described(found) == described(real, fake=False)
    assert [tuple(one.shape) for one in found] == [(1, 5 if padding else 3, 72), (1, 5, 72)]


def test_eager_attention_has_weights(lm):
    with lm.scan(TEXT, attn_implementation="eager"):
        weights = lm.model.layers[0].self_attn.output[1].save()
    with lm.trace(TEXT, attn_implementation="eager"):
        real = lm.model.layers[0].self_attn.output[1].save()
    with lm.scan(TEXT):
        none = [lm.model.layers[0].self_attn.output[1]].save()
    assert described(weights) == described(real, fake=False) and none == [None]


def test_persistent_edits_run_in_a_scan(lm):
    with lm.edit() as (_, edited):
        edited.lm_head.input = edited.lm_head.input[:, -1:]
    with edited.scan(TEXT):
        short = lm.lm_head.output.save()
    with lm.scan(TEXT):
        whole = lm.lm_head.output.save()
    assert (short.shape[1], whole.shape[1]) == (1, 3)


def test_aliases_name_the_same_modules(lm_of):
    class Named(dict):
        def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            return 1

    lm = lm_of("llama", rename=Named({"model.layers": "blocks"}))
    with lm.scan(TEXT):
        out = lm.blocks[1].output.save()
        again = lm.blocks[2](out, position_embeddings=lm.blocks[2].inputs[1]["position_embeddings"]).save()
    assert out.shape == again.shape == (1, 3, 72)


class Heads(Envoy):
    @eproperty(key="output")
    def heads(self, value: Any) -> Any:
        return value[0].unflatten(-1, (9, 8))

    @heads.transform
    def heads(self, value: Any, raw: Any) -> Any:
        return (value.flatten(-2), *raw[1:])


def test_custom_envoys_serve_fake_values(model_folder):
    options = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 512}
    with LM(model_folder("llama"), envoys={"self_attn": Heads}, **options) as lm:
        with lm.scan(TEXT):
            attention = lm.model.layers[0].self_attn
            attention.heads[:, :, 3] = 0
            heads = attention.heads.save()
            weight = attention.q_proj.weight.save()
    assert described([heads, weight]) == [((1, 3, 9, 8), torch.float32, "cpu"), ((72, 72), torch.float32, "cpu")]


def test_a_module_that_was_attached_is_called_with_its_own_weights(model_folder):
    with LM(model_folder("llama"), device="cpu", dtype="float32", kv_cache_tokens=512) as lm:
        layer, sae = lm.model.layers[0], torch.nn.Linear(72, 200)
        layer.sae, before = sae, sae.weight.detach().clone()
        with lm.scan(TEXT):
            features = layer.sae(layer.output).save()
    assert described(features) == ((1, 3, 200), torch.float32, "cpu") and torch.equal(sae.weight, before)


def test_modules_of_another_model_are_that_models(lm, lm_of):
    other = lm_of("llama-rope")
    with lm.scan(TEXT):
        h = lm.model.layers[0].output
        own, theirs = lm.model.norm(h).save(), other.model.layers[0].mlp.down_proj.weight
        shape = list(theirs.shape).save()
        with pytest.raises(RuntimeError):
            other.lm_head(h)
    assert own.shape == (1, 3, 72) and shape == list(other.model.layers[0].mlp.down_proj.weight.shape)


# -- what is refused -------------------------------------------------------------------------------


def out_of_order(lm: Any) -> None:
    with lm.scan(TEXT):
        late = lm.model.layers[1].output.save()  # noqa: F841
        early = lm.model.layers[0].output.save()  # noqa: F841


def of_the_block(lm: Any) -> None:
    with lm.scan(TEXT):
        kept = lm.model.layers[0].output.save()  # noqa: F841
        raise LookupError("mine")


def unknown_module(lm: Any) -> None:
    with lm.scan(TEXT):
        lm.model.layer[0].output.save()


def wrong_shape(lm: Any) -> None:
    with lm.scan(TEXT):
        out = lm.model.layers[0].output
        lm.model.layers[0].output = out[..., :-1]


def a_value(lm: Any) -> None:
    with lm.scan(TEXT):
        lm.model.layers[0].output[0, 0, 0].item() + 1
        float(lm.model.layers[0].output.sum())


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # nnsight's
@pytest.mark.parametrize("script", [out_of_order, of_the_block, unknown_module, wrong_shape, a_value])
def test_errors_are_nnsights_and_the_next_scan_runs(lm, nnsight, script):
    raised = []
    for model in (lm, nnsight):
        with pytest.raises(Exception) as error:
            script(model)
        raised.append(error.value)
        assert stopped(model).shape == (1, 3, 72)
    assert type(raised[0]) is type(raised[1])
    if script not in (a_value, wrong_shape):  # these end in torch
        assert traceback.extract_tb(raised[0].__traceback__)[-1].name == script.__name__


def test_a_scan_needs_a_prompt(lm):
    with pytest.raises(ValueError, match=r"lm\.scan\(\) needs a prompt"):
        with lm.scan():
            assert lm.tokenizer is not None
    with pytest.raises(ValueError, match="a prompt is needed"), lm.scan() as tracer:
        with tracer.invoke():
            lm.model.layers[0].output.save()
    with pytest.raises(PromptError, match="vocabulary"):
        with lm.scan([100000]):
            lm.model.layers[0].output.save()


@pytest.mark.parametrize(
    "given",
    [{"capture": ["resid_post.0"]}, {"interventions": []}, {"on_step": print}],
    ids=lambda given: next(iter(given)),
)
def test_what_asks_for_values_is_refused(lm, given):
    with pytest.raises(TypeError, match=f"takes no {next(iter(given))}"):
        with lm.scan(TEXT, **given):
            lm.model.layers[0].output.save()


@pytest.mark.local
def test_blocks_are_not_opened_inside_of_each_other(lm):
    with pytest.raises(RuntimeError, match="cannot be opened inside"):
        with lm.trace(TEXT):
            lm.model.layers[0].output  # noqa: B018
            with lm.scan(TEXT):
                inner = lm.model.layers[0].output.save()
    with pytest.raises(RuntimeError, match="cannot be opened inside"):
        with lm.scan(TEXT):
            lm.model.layers[0].output  # noqa: B018
            with lm.scan(TEXT):
                inner = lm.model.layers[0].output.save()
    with pytest.raises(RuntimeError, match="cannot be opened inside"):
        with lm.scan(TEXT):
            lm.model.layers[0].output  # noqa: B018
            with lm.trace(TEXT):
                inner = lm.model.layers[0].output.save()  # noqa: F841
    assert stopped(lm).shape == (1, 3, 72)


# -- the engine ------------------------------------------------------------------------------------


@pytest.mark.local
def test_the_engine_runs_nothing_and_keeps_its_weights(lm):
    with lm.trace(TEXT):
        before = lm.lm_head.output.save()
    counts, fingerprint, version = lm.engine.stats(), lm.weights.fingerprint, lm.weights.version
    with lm.scan(TEXT):
        lm.model.layers[0].mlp.down_proj.weight.zero_()
        lm.model.layers[0].mlp.down_proj.weight.data[:] = 0
        lm.model.layers[0].output[:] = 0
        lm.lm_head(lm.model.norm(lm.model.layers[1].output)).save()
    for name in ("execution", "eager_parts"):
        assert lm.engine.stats()[name] == counts[name]
    assert (lm.weights.fingerprint, lm.weights.version) == (fingerprint, version)
    with pytest.raises(ValueError, match="cannot be assigned in the block of a scan"):
        with lm.scan(TEXT):
            lm.model.norm.weight = torch.ones(72)
    assert lm.weights.fingerprint == fingerprint
    with lm.trace(TEXT):
        after = lm.lm_head.output.save()
    assert torch.equal(before, after)


@pytest.mark.local
def test_a_scan_runs_while_the_engine_is_in_a_block(lm):
    """The block of a trace waits on the engine's thread until the scan of another thread has ended."""
    entered, scanned = threading.Event(), threading.Event()
    found: list[Any] = []

    def trace() -> None:
        with lm.trace(TEXT):
            h = lm.model.layers[0].output
            entered.set()
            assert scanned.wait(60)
            again = lm.model.layers[0].mlp(h).save()
            logits = lm.lm_head.output.save()
        found.extend([again, logits])

    thread = threading.Thread(target=trace)
    thread.start()
    assert entered.wait(60)
    shapes = described(called(lm))
    scanned.set()
    thread.join()
    assert shapes == described(called(lm))
    with lm.trace(TEXT):
        logits = lm.lm_head.output.save()
    assert found[0].shape == (1, 3, 72) and torch.equal(found[1], logits)


def test_scans_of_several_threads_have_their_own_shapes(lm):
    found: dict[int, Any] = {}

    def scan(tokens: int) -> None:
        for _ in range(5):
            with lm.scan([3] * tokens):
                states = list().save()
                for layer in lm.model.layers:
                    states.append(layer.output)
            found.setdefault(tokens, set()).update(tuple(state.shape) for state in states)

    threads = [threading.Thread(target=scan, args=(tokens,)) for tokens in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {tokens: {(1, tokens, 72)} for tokens in range(1, 7)}


@pytest.mark.local
def test_a_session_and_a_coroutine_may_scan(lm):
    with lm.session():
        with lm.scan(TEXT):
            width = lm.model.layers[0].output.shape[-1]
        with lm.trace(TEXT):
            lm.model.layers[0].output[:] = torch.zeros(width)
            zeros = lm.model.layers[0].output.save()
    assert not zeros.any() and zeros.shape[-1] == 72

    async def scan() -> Any:
        async with lm.scan(TEXT):
            out = lm.model.layers[0].output.save()
        return out

    assert described(asyncio.run(scan())) == ((1, 3, 72), torch.float32, "cpu")


def test_a_model_goes_with_its_fake_weights(model_folder):
    lm = LM(model_folder("llama"), device="cpu", dtype="float32", kv_cache_tokens=512)
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    assert stopped(lm).shape == (1, 3, 72)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == dtype
    fake = weakref.ref(lm._fake_model)
    lm.shutdown()
    del lm
    gc.collect()
    assert fake() is None


@pytest.mark.gpu
def test_a_scan_on_cuda_takes_no_device_memory(lm_of):
    lm = lm_of("llama", device="cuda", dtype="bfloat16")
    stopped(lm)
    before = torch.cuda.memory_allocated()
    with lm.scan([3] * 100):
        h = lm.model.layers[1].output
        logits = (lm.lm_head(h) + torch.ones(97, device=h.device)).save()
        weight = lm.lm_head.weight.save()
    assert torch.cuda.memory_allocated() == before
    assert described([logits, weight]) == [((1, 100, 97), torch.float32, "cuda"), ((97, 72), torch.bfloat16, "cuda")]
    with lm.scan(TEXT) as tracer:
        scanned = tracer.cache(device=None)
    with lm.trace(TEXT) as tracer:
        traced = tracer.cache(device=None)
    for path in traced.keys():
        assert described(scanned[path].output) == described(traced[path].output, fake=False), path


@pytest.fixture(scope="module")
def remote(server: Any) -> Iterator[LM]:
    with LM.connect(server.url, api_key=KEYS["code"]) as found:
        yield found


def test_a_remote_model_is_scanned_by_its_client(remote, nnsight):
    for script in (reads_in_order, edits, called, a_list):
        found, expected = described(script(remote)), described(script(nnsight))
        assert found == expected
    with remote.session():
        with remote.scan(TEXT):
            shape = list(remote.model.layers[0].output.shape).save()
        with remote.trace(TEXT):
            real = remote.model.layers[0].output.save()
    assert shape == list(real.shape)
    with pytest.raises(RuntimeError, match="cannot be opened inside the block of a scan"):
        with remote.scan(TEXT):
            remote.model.layers[0].output  # noqa: B018
            with remote.trace(TEXT):
                inner = remote.model.layers[0].output.save()  # noqa: F841

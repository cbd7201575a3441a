"""transformers' own attention in a traced pass: its operations, weights and outputs, against nnsight over the same weights."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held, random_model, tiny_tokenizer
from helpers_parity import assert_same, beside_plain_requests, plain_beside, same
from nnsight.modeling.transformers import TransformersModel

from pymllm_interp import LM, Capture, Patch, SamplingParams, Scale, Steer
from pymllm_interp.hooks.traces.syntax.source import attention_words, reads_attention_source, source_uses

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FAMILIES = ("llama", "llama-rope", "mistral", "qwen2", "qwen3")
HERE = ("llama-rope", "qwen2", "qwen3")
"""Scaled rotation with biases, windows of some layers, norms of q and k. The others run at night."""
PROMPT = [5, 17, 3, 80, 44, 9, 61]  # longer than the sliding windows
OTHER = [7, 2, 93]
LONG = list(range(1, 40))

Pair = tuple[LM, TransformersModel]


@pytest.fixture(scope="session")
def pair_of(lm_of: Callable[..., LM]) -> Callable[[str], Pair]:
    made: dict[str, TransformersModel] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            made[family] = TransformersModel(random_model(CONFIGS[family]()), tokenizer=tiny_tokenizer())
        return lm_of(family), made[family]

    return pair


@pytest.fixture(params=[pytest.param(one, marks=[] if one in HERE else pytest.mark.slow) for one in FAMILIES])
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of(request.param)


@pytest.fixture
def lm(pair_of: Callable[[str], Pair]) -> LM:
    return pair_of("llama")[0]


def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with model.trace(prompt):
        logits = model.lm_head.output.save()
    return logits


# -- reads -------------------------------------------------------------------------------------


def operations(model: Any, prompt: list[int], layer: int) -> Any:
    names = [name for name in model.model.layers[layer].self_attn.source.names if "interface" not in name]
    with model.trace(prompt):
        values = dict().save()
        for name in names:
            values[name] = getattr(model.model.layers[layer].self_attn.source, name).output
        logits = model.lm_head.output.save()
    return dict(values), logits


def test_every_operation_of_an_attention_has_transformers_value(pair: Pair) -> None:
    values, _ = same(pair, operations, PROMPT, 1)
    assert {
        "query_states_0",
        "key_states_0",
        "apply_rotary_pos_emb_0",
        "self_o_proj_0",
        "attn_output_1",
    } <= values.keys()


def inner_operations(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        values = dict().save()
        inner = model.model.layers[1].self_attn.source.attention_interface_1.source
        for name in inner.names:
            if name != "nn_functional_dropout_0":
                values[name] = getattr(inner, name).output
        out = model.model.layers[1].self_attn.source.attention_interface_1.output.save()
        returned = model.model.layers[1].self_attn.output.save()
    return dict(values), out, returned


def test_operations_inside_of_eager_attention_have_transformers_values(pair: Pair) -> None:
    values, out, returned = same(pair, inner_operations, PROMPT)
    assert values["nn_functional_softmax_0"].shape[-2:] == (7, 7)
    assert torch.equal(returned[1], out[1])


def arguments(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        given = model.model.layers[1].self_attn.inputs.save()
        args = model.model.layers[1].self_attn.source.attention_interface_1.inputs.save()
    return given[1]["hidden_states"], given[1]["attention_mask"], list(args[0][1:5]), args[1]["scaling"]


def test_an_attention_gets_transformers_arguments(pair: Pair) -> None:
    same(pair, arguments, PROMPT)


def with_outputs(model: Any, prompt: list[int], **asked: bool) -> Any:
    with model.trace(prompt, **asked) as tracer:
        model.model.layers[0].output[:] *= 2
        attn = model.model.layers[1].self_attn.output.save()
        output = model.output.save()
        result = tracer.result.save()
    return attn[1], output.attentions, output.hidden_states, result.attentions, result.hidden_states, result.logits


@pytest.mark.parametrize(
    "asked", [("output_attentions",), ("output_hidden_states",), ("output_attentions", "output_hidden_states")]
)
def test_outputs_that_are_asked_for_are_transformers(pair: Pair, asked: tuple[str, ...]) -> None:
    lm, reference = pair
    keywords = dict.fromkeys(asked, True)
    theirs = with_outputs(reference, PROMPT, **keywords)
    ours = with_outputs(lm, PROMPT, **keywords)
    assert_same(ours[1:], theirs[1:])
    assert (ours[3] is not None, ours[4] is not None) == ("output_attentions" in asked, "output_hidden_states" in asked)
    with beside_plain_requests(lm):
        assert_same(with_outputs(lm, PROMPT, **keywords)[1:], theirs[1:])


def test_outputs_that_are_not_asked_for_are_not_there(lm: LM) -> None:
    assert with_outputs(lm, PROMPT)[:5] == (None, None, None, None, None)


# -- edits -------------------------------------------------------------------------------------


def softmax(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn.source.attention_interface_1.source.nn_functional_softmax_0


def edit_weights_in_place(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        model.model.layers[0].self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output[:, 1, -1] = (
            0.25
        )
        z = model.model.layers[0].self_attn.o_proj.input.save()
        logits = model.lm_head.output.save()
    return z, logits


def assign_weights(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        inner = model.model.layers[1].self_attn.source.attention_interface_1.source
        weights = inner.nn_functional_softmax_0.output
        uniform = torch.ones_like(weights).tril()
        inner.nn_functional_softmax_0.output = uniform / uniform.sum(-1, keepdim=True)
        z = model.model.layers[1].self_attn.o_proj.input.save()
        logits = model.lm_head.output.save()
    return z, logits


def cut_by_mask(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        args, kwargs = model.model.layers[0].self_attn.source.attention_interface_1.inputs
        mask = args[4].clone()
        mask[..., -1, 4] = torch.finfo(mask.dtype).min
        model.model.layers[0].self_attn.source.attention_interface_1.inputs = ((*args[:4], mask), kwargs)
        z = model.model.layers[0].self_attn.o_proj.input.save()
        logits = model.lm_head.output.save()
    return z, logits


def edit_queries(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        source = model.model.layers[0].self_attn.source
        source.query_states_0.output = source.query_states_0.output * 2
        logits = model.lm_head.output.save()
    return logits, logits


def zero_a_head(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        model.model.layers[0].self_attn.source.attention_interface_1.output[0][:, :, 2] = 0
        z = model.model.layers[0].self_attn.o_proj.input.save()
        logits = model.lm_head.output.save()
    return z, logits


def edit_keys_in_the_cache(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt):
        source = model.model.layers[0].self_attn.source
        name = next(name for name in source.names if name.endswith("update_0"))  # of `cache`, or `past_key_values`
        k, v = getattr(source, name).output
        getattr(source, name).output = (k.clone(), v * 0.5)
        logits = model.lm_head.output.save()
    return logits, logits


EDITS = [edit_weights_in_place, assign_weights, cut_by_mask, edit_queries, zero_a_head, edit_keys_in_the_cache]


@pytest.mark.thin(4)
@pytest.mark.parametrize("script", EDITS, ids=lambda s: s.__name__)
def test_an_edit_inside_of_attention_does_what_it_does_in_transformers(pair: Pair, script: Callable[..., Any]) -> None:
    *_, logits = same(pair, script, PROMPT)
    assert not torch.allclose(logits, logits_of(pair[0], PROMPT), atol=1e-3)


def gradients(model: Any, prompt: list[int]) -> Any:
    with model.trace(prompt, **({"attn_implementation": "eager"} if isinstance(model, LM) else {})):
        weights = model.model.layers[0].self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output
        z = model.model.layers[1].self_attn.o_proj.input
        loss = model.lm_head.output[0, -1].logsumexp(0)
        with loss.backward():
            of_z = z.grad.save()
            of_weights = weights.grad.save()
    return of_weights, of_z


def test_gradients_of_attention_weights_are_transformers(pair: Pair) -> None:
    of_weights, _ = same(pair, gradients, PROMPT)
    assert of_weights.abs().sum() > 0


# -- generation --------------------------------------------------------------------------------


def generate_reading(model: Any, prompt: list[int]) -> Any:
    with model.generate(prompt, max_new_tokens=5) as tracer:
        weights = list().save()
        for _ in tracer.iter[0:5]:
            weights.append(
                model.model.layers[1].self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output
            )
        tokens = tracer.result.save()
    return list(weights), tokens


def generate_reading_one_step(model: Any, prompt: list[int]) -> Any:
    with model.generate(prompt, max_new_tokens=5) as tracer:
        for _ in tracer.iter[3]:
            inner = model.model.layers[1].self_attn.source.attention_interface_1.source
            weights = inner.nn_functional_softmax_0.output.save()
        tokens = tracer.result.save()
    return weights, tokens


def generate_editing(model: Any, prompt: list[int]) -> Any:
    with model.generate(prompt, max_new_tokens=6) as tracer:
        for _ in tracer.iter[0:6]:
            model.model.layers[0].self_attn.source.attention_interface_1.output[0][:, -1] *= -3
        tokens = tracer.result.save()
    return tokens


@pytest.mark.parametrize("script", [generate_reading, generate_reading_one_step], ids=lambda s: s.__name__)
def test_attention_weights_of_a_generation_are_transformers(pair: Pair, script: Callable[..., Any]) -> None:
    *_, tokens = same(pair, script, PROMPT)
    plain = pair[0].generate(PROMPT, SamplingParams(temperature=0, max_tokens=5))[0].token_ids
    assert tokens[0, len(PROMPT) :].tolist() == plain


def test_an_edit_at_every_step_of_a_generation_is_transformers(pair: Pair) -> None:
    tokens = same(pair, generate_editing, PROMPT)
    plain = pair[0].generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    assert tokens[0, len(PROMPT) :].tolist() != plain


def generate_with_outputs(lm: LM, prompt: list[int]) -> list[list[torch.Tensor]]:
    with lm.generate(prompt, max_new_tokens=4, output_attentions=True, output_hidden_states=True) as tracer:
        outputs = list().save()
        for _ in tracer.iter[0:4]:
            outputs.append([*lm.output.attentions, *lm.output.hidden_states])
    return list(outputs)


def test_the_outputs_of_each_step_of_a_generation_are_those_of_one_pass(pair: Pair) -> None:
    lm, reference = pair
    steps = generate_with_outputs(lm, PROMPT)
    tokens = lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))[0].token_ids
    layers = lm.model_spec.num_hidden_layers
    assert [len(step) for step in steps] == [2 * layers + 1] * 4
    with reference.trace([*PROMPT, *tokens[:3]], output_attentions=True, output_hidden_states=True) as tracer:
        whole = tracer.result.save()
    for step, found in enumerate(steps):
        last = len(PROMPT) + step - 1
        for layer, weights in enumerate(found[:layers]):
            keys = weights.shape[-1]
            expected = whole.attentions[layer][:, :, last, last + 1 - keys : last + 1]
            torch.testing.assert_close(weights[:, :, -1], expected, atol=1e-5, rtol=1e-4)
        for layer, states in enumerate(found[layers:]):
            torch.testing.assert_close(states[:, -1], whole.hidden_states[layer][:, last], atol=1e-4, rtol=1e-4)


# -- how a trace asks for it ---------------------------------------------------------------------


def weights_in_a_helper(model: Any) -> torch.Tensor:
    return softmax(model, 0).output


def test_a_helper_that_hides_the_source_is_told_what_to_write(lm: LM) -> None:
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        with lm.trace(PROMPT):
            weights = weights_in_a_helper(lm).save()
    with lm.trace(PROMPT, attn_implementation="eager") as tracer:
        weights = weights_in_a_helper(lm).save()
    with lm.trace(PROMPT):
        direct = lm.model.layers[0].self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output.save()
    assert torch.equal(weights, direct) and tracer.receipt.steps == {"modules": 1}
    reasons = {reason for _, reason in lm.runner.partition.counts}
    assert "a trace asks for transformers' own attention" in reasons


def test_an_attention_is_found_under_other_names(lm: LM) -> None:
    attention = lm.model.layers[0].self_attn
    with lm.trace(PROMPT):
        found = attention.source.query_states_0.output.save()
    with lm.trace(PROMPT):
        source = lm.model.layers[0].self_attn.source
        query = source.query_states_0.output.save()
    assert torch.equal(found, query)


def uses_of(text: str) -> set[tuple[str, str]]:
    return set(source_uses(compile(text, "block", "exec")))


def test_what_the_code_of_a_block_says_about_sources(lm: LM) -> None:
    assert uses_of("a.b[0].self_attn.source.x_0.output") == {("self_attn", "x_0")}
    assert uses_of("def f(m):\n    return m.self_attn.source") == {("self_attn", "")}
    assert uses_of("a.source_of; b.sources") == set()
    code = [
        compile(text, "block", "exec")
        for text in ("h.mlp.source.self_act_fn_0", "layer.source.hidden_states_0", "x.source.y")
    ]
    assert not reads_attention_source(lambda: attention_words(lm), code)
    assert reads_attention_source(
        lambda: attention_words(lm), [compile("whatever.source.key_states_0", "block", "exec")]
    )


def test_an_alias_of_the_attention_is_its_source(lm_of: Callable[..., LM], model_folder: Callable[..., Any]) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu", rename={"self_attn": "heads"}) as lm:
        with lm.trace(PROMPT):
            last = lm.model.layers[0].heads.source
            query = last.query_states_0.output.save()
    with lm_of("llama").trace(PROMPT):
        expected = lm_of("llama").model.layers[0].self_attn.source.query_states_0.output.save()
    assert torch.equal(query, expected)


def test_other_attention_implementations_are_refused(lm: LM) -> None:
    with pytest.raises(ValueError, match=r"flash_attention_2.*'eager'"):
        with lm.trace(PROMPT, attn_implementation="flash_attention_2"):
            lm.logits.save()
    with pytest.raises(ValueError, match="sdpa"):
        LM("demo", attn_implementation="sdpa")


def test_a_model_with_eager_attention_runs_every_trace_with_it(lm: LM, model_folder: Callable[..., Any]) -> None:
    plain = lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    with LM(model_folder("llama"), dtype="float32", device="cpu", attn_implementation="eager") as eager:
        with eager.trace(PROMPT) as tracer:
            hidden = weights_in_a_helper(eager).save()
            returned = eager.model.layers[0].self_attn.output.save()
            result = tracer.result.save()
        assert torch.equal(returned[1], hidden) and result.attentions is None
        assert eager.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))[0].token_ids == plain[0].token_ids


def test_invokes_that_need_each_other_are_refused(lm: LM) -> None:
    with pytest.raises(ValueError, match="session"):
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                taken = softmax(lm, 0).output
                _ = lm.model.layers[0].self_attn.source.attn_output_0.output
            with tracer.invoke(OTHER):
                lm.model.layers[1].output[:] = taken
    assert_same(logits_of(lm, PROMPT), logits_of(lm, PROMPT))


def test_invokes_that_need_each_other_get_their_own_hidden_states(lm: LM) -> None:
    with lm.trace(output_hidden_states=True) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            barrier()
            first = tracer.result.save()
        with tracer.invoke(OTHER):
            barrier()
            second = tracer.result.save()
    for found, prompt in ((first, PROMPT), (second, OTHER)):
        with lm.trace(prompt, output_hidden_states=True) as tracer:
            alone = tracer.result.save()
        assert found.attentions is None
        assert_same(found.hidden_states, alone.hidden_states)


def patch_weights(model: Any, prompts: list[list[int]]) -> Any:
    with model.session():
        with model.trace(prompts[0]):
            weights = model.model.layers[1].self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output
        with model.trace(prompts[1]):
            inner = model.model.layers[1].self_attn.source.attention_interface_1.source
            inner.nn_functional_softmax_0.output = weights
            logits = model.lm_head.output.save()
    return logits


def test_weights_of_one_prompt_patch_another_in_a_session(pair: Pair) -> None:
    logits = same(pair, patch_weights, [PROMPT, PROMPT[::-1]])
    assert not torch.allclose(logits, logits_of(pair[0], PROMPT[::-1]), atol=1e-3)


def test_independent_invokes_run_one_by_one(pair: Pair) -> None:
    lm, reference = pair
    with lm.trace() as tracer:
        found = list().save()
        for prompt in (PROMPT, OTHER, LONG):
            with tracer.invoke(prompt):
                inner = lm.model.layers[0].self_attn.source.attention_interface_1.source
                found.append(inner.nn_functional_softmax_0.output)
    for prompt, ours in zip((PROMPT, OTHER, LONG), found, strict=True):
        with reference.trace(prompt):
            inner = reference.model.layers[0].self_attn.source.attention_interface_1.source
            theirs = inner.nn_functional_softmax_0.output.save()
        assert_same(ours, theirs)


# -- beside others, and with all else ------------------------------------------------------------


def two_plain(lm: LM, third: Callable[[], Any] | None) -> list[Any]:
    """Tokens and log probabilities of two plain requests, beside `third` if there is one."""
    if third is not None:
        return plain_beside(lm, third)[0]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=64, prompt_logprobs=64)
    with held(lm) as arrived:
        handles = [lm.submit(prompt, params) for prompt in (OTHER, list(range(1, 18)))]
        arrived(2)
    return [(out.token_ids, out.logprobs, out.prompt_logprobs) for out in (h.result() for h in handles)]


@pytest.mark.thin(4)
@pytest.mark.parametrize("script", [generate_editing, generate_reading, assign_weights, generate_with_outputs])
def test_plain_requests_beside_it_are_bit_equal(pair: Pair, script: Callable[..., Any]) -> None:
    expected = two_plain(pair[0], None)
    assert two_plain(pair[0], lambda: script(pair[0], PROMPT)) == expected
    pair[0].engine.call(pair[0].engine.scheduler.check_integrity)


def test_steps_of_others_run_fused_afterwards(lm: LM) -> None:
    generate_editing(lm, PROMPT)
    before = dict(lm.runner.partition.counts)
    lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    now = lm.runner.partition.counts
    assert {how for how, reason in now if now[how, reason] > before.get((how, reason), 0)} <= {"plain", "replay"}


def test_many_such_generations_at_once_beside_plain_ones_end_as_they_do_alone(pair: Pair) -> None:
    lm, _ = pair
    prompts = [PROMPT, OTHER, LONG[:20], PROMPT[::-1]]
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = [generate_editing(lm, prompt) for prompt in prompts]
    plain = [out.token_ids for out in lm.generate(prompts, params)]
    found: list[Any] = [None] * len(prompts)

    def run(i: int) -> None:
        found[i] = generate_editing(lm, prompts[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    with held(lm) as arrived:
        for thread in threads:
            thread.start()
        handles = [lm.submit(prompt, params) for prompt in prompts]
        arrived(2 * len(prompts))
    for thread in threads:
        thread.join(600)
    assert all(map(torch.equal, found, expected))
    assert [handle.result().token_ids for handle in handles] == plain


def test_it_survives_a_full_pool(model_folder: Callable[..., Any]) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=64, max_model_len=64) as lm:
        expected = generate_reading_long(lm)
        plain = lm.generate(OTHER, SamplingParams(temperature=0, max_tokens=40))[0].token_ids
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(generate_reading_long(lm))) for _ in range(2)]
        with held(lm) as arrived:
            for thread in threads:
                thread.start()
            handle = lm.submit(OTHER, SamplingParams(temperature=0, max_tokens=40))
            arrived(3)
        for thread in threads:
            thread.join(600)
        assert handle.result().token_ids == plain
        assert len(found) == 2
        for weights, tokens in found:
            assert torch.equal(tokens, expected[1])
            for ours, theirs in zip(weights, expected[0], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert lm.engine.scheduler.num_swapped > 0


def generate_reading_long(lm: LM) -> Any:
    with lm.generate(PROMPT, max_new_tokens=30) as tracer:
        weights = list().save()
        for _ in tracer.iter[0:30]:
            weights.append(
                lm.model.layers[1].self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output
            )
        tokens = tracer.result.save()
    return list(weights), tokens


def test_declared_ops_and_captures_act_in_such_a_pass(pair: Pair) -> None:
    lm, _ = pair
    torch.manual_seed(0)
    spec = lm.model_spec
    ops = [
        Steer("z.1", torch.randn(spec.width("z")), 2.0),
        Scale("q.0", 1.5),
        Steer("attn_out.0", torch.randn(spec.hidden_size), 1.0, positions=[2, -1]),
    ]
    sites = [
        "q.0",
        "k.1",
        "v.1",
        "z.1",
        "attn_out.0",
        "attn_out.1",
        "resid_mid.1",
        "resid_post.*",
        "mlp_out.0",
        "final_norm",
    ]
    params = SamplingParams(temperature=0, max_tokens=4)
    (plain,) = lm.generate(PROMPT, params, interventions=ops, capture=sites)
    with lm.generate(PROMPT, max_new_tokens=4, attn_implementation="eager", interventions=ops, capture=sites) as tracer:
        tokens = tracer.result.save()
    assert tokens[0, len(PROMPT) :].tolist() == plain.token_ids
    assert tracer.activations.keys() == plain.activations.keys()
    for site, states in plain.activations.items():
        torch.testing.assert_close(tracer.activations[site], states, atol=1e-4, rtol=1e-4)
    assert [str(a) for a in tracer.receipt.interventions] == [str(a) for a in plain.receipt.interventions]


def test_a_stored_edit_inside_of_attention_reaches_plain_generations(pair: Pair) -> None:
    lm, _ = pair
    params = SamplingParams(temperature=0, max_tokens=6)
    clean = lm.generate([PROMPT, OTHER], params)
    with lm.edit(inplace=True) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[0].self_attn.source.attention_interface_1.output[0][:, -1] *= -3
    changed = lm.generate([PROMPT, OTHER], params)
    lm.clear_edits()
    expected = [generate_editing(lm, prompt)[0, len(prompt) :].tolist() for prompt in (PROMPT, OTHER)]
    assert [out.token_ids for out in changed] == expected
    assert [out.token_ids for out in lm.generate([PROMPT, OTHER], params)] == [out.token_ids for out in clean]


# -- names outside of attention -----------------------------------------------------------------------


def operation(model: Any, prompt: list[int], path: str, name: str) -> Any:
    with model.trace(prompt, **({"attn_implementation": "eager"} if isinstance(model, LM) else {})):
        value = getattr((model.get(path) if path else model).source, name).output.save()
    return value


def test_a_name_of_transformers_has_transformers_value_or_an_error(pair: Pair) -> None:
    lm, reference = pair
    layer = [p.path.removeprefix("model.") for p in lm.model.layers[1].modules()]
    shared = []
    for path in ["", "model", "model.norm", "model.rotary_emb", "model.embed_tokens", "lm_head", *layer]:
        envoy, theirs = (lm.get(path), reference.get(path)) if path else (lm, reference)
        try:
            names = theirs.source.names
        except Exception as error:
            assert "source" in str(error).lower()
            continue
        for name in names:
            if name not in envoy.source.names:
                with pytest.raises(AttributeError, match="differs from transformers'"):
                    getattr(envoy.source, name)
            elif "interface" not in name:
                shared.append(f"{path}.{name}")
                assert_same(operation(lm, PROMPT, path, name), operation(reference, PROMPT, path, name), shared[-1])
    assert {".self_model_0", ".logits_0"} <= set(shared)
    for i in range(5):
        assert f"model.layers.1.hidden_states_{i}" in shared
    assert {
        "model.layers.1.residual_1",
        "model.layers.1.mlp.self_act_fn_0",
        "model.layers.1.self_attn.query_states_0",
    } <= set(shared)


def test_an_intervention_at_a_pattern_says_where_they_are_edited(lm: LM) -> None:
    with pytest.raises(ValueError, match="Inside attention"):
        Capture("blocks.1.attn.hook_attn_scores")
    with pytest.raises(ValueError, match="Inside attention"):
        Patch("pattern.1", torch.zeros(3))


def use_once(folder: Any) -> weakref.ref[torch.nn.Module]:
    lm = LM(folder, dtype="float32", device="cpu")
    inner_operations(lm, PROMPT)
    lm.shutdown()
    return weakref.ref(lm.model.layers[1].self_attn._module)


def test_a_source_inside_of_a_source_keeps_no_model_alive(model_folder: Callable[..., Any]) -> None:
    gc.disable()
    try:
        assert use_once(model_folder("llama"))() is None
    finally:
        gc.enable()

"""A script for nnsight's LanguageModel gives the same values here: tests/support/parity_scripts.py, run over both.

Where nnsight has no answer (row-wise skips, plain requests beside a trace), a request's solo run is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity_scripts as scripts
import pytest
import torch
from conftest import tiny_tokenizer
from helpers_parity import (  # noqa: F401
    OTHER,
    PAGE_PLUS_ONE,
    PROMPT,
    Pair,
    assert_same,
    pair_of,
    plain_beside,
    same,
)

from pymllm_interp import LM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FAMILIES = ("llama", "qwen3")
PROMPTS = [PROMPT, OTHER, PAGE_PLUS_ONE]
LENGTHS = [len(p) for p in PROMPTS]


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, pair_of: Callable[..., Pair]) -> Pair:
    return pair_of(request.param)


def assert_edited(pair: Pair, logits: torch.Tensor) -> None:
    """The edit reached the model: a comparison of two that both ignored it would hold for nothing."""
    assert not torch.allclose(logits[:, -1], scripts.plain(pair[0], PROMPT), atol=1e-3)


def module_paths(lm: LM) -> list[str]:
    """Every module that computes something and that transformers has, in the order of the pass."""
    ours = [module.path.removeprefix("model.") for module in lm.modules() if module is not lm]
    return [path for path in ours if "generator" not in path and not path.endswith("layers")]


# -- reads ------------------------------------------------------------------------------------


def test_every_module_reads_as_in_transformers(pair: Pair) -> None:
    for path in module_paths(pair[0]):
        same(pair, scripts.read_module, PROMPT, path)


def test_the_trees_have_the_same_modules(pair: Pair) -> None:
    lm, reference = pair
    assert sorted(m.path for m in lm.modules()) == sorted(m.path for m in reference.modules())


def test_many_modules_read_in_order_in_one_trace(pair: Pair) -> None:
    layer = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    layer += ("self_attn", "post_attention_layernorm", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj")
    layer += ("mlp.down_proj", "mlp", "")
    layers = [f"model.layers.{i}.{name}".rstrip(".") for i in range(2) for name in layer]
    values = same(pair, scripts.read_in_order, PROMPT, ["model.embed_tokens", *layers, "model.norm", "lm_head"])
    assert len(values) == 29


@pytest.mark.parametrize("prompt", [[11], list(range(1, 17)), PAGE_PLUS_ONE], ids=["one token", "a page", "one more"])
def test_odd_prompt_lengths_read_as_in_transformers(pair: Pair, prompt: list[int]) -> None:
    same(pair, scripts.read_in_order, prompt, ["model.layers.0.self_attn", "model.layers.1", "lm_head"])


@pytest.mark.parametrize("script", [scripts.read_root, scripts.edit_root, scripts.assign_root, scripts.fill_root])
def test_model_outputs_read_and_edit_as_in_transformers(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


# -- edits ------------------------------------------------------------------------------------

LAYER = "model.layers.1"
SITES = {
    "embed_tokens": "model.embed_tokens",
    "layer": LAYER,
    "self_attn": f"{LAYER}.self_attn",
    "mlp": f"{LAYER}.mlp",
    "q_proj": f"{LAYER}.self_attn.q_proj",
    "k_proj": f"{LAYER}.self_attn.k_proj",
    "v_proj": f"{LAYER}.self_attn.v_proj",
    "o_proj": f"{LAYER}.self_attn.o_proj",
    "gate_proj": f"{LAYER}.mlp.gate_proj",
    "up_proj": f"{LAYER}.mlp.up_proj",
    "down_proj": f"{LAYER}.mlp.down_proj",
    "act_fn": f"{LAYER}.mlp.act_fn",
    "input_layernorm": f"{LAYER}.input_layernorm",
    "post_attention_layernorm": f"{LAYER}.post_attention_layernorm",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
NORMS = {"q_norm": f"{LAYER}.self_attn.q_norm", "k_norm": f"{LAYER}.self_attn.k_norm"}
EDITS = [scripts.edit_output_in_place, scripts.assign_output, scripts.edit_input_in_place, scripts.assign_input]


@pytest.mark.thin(3)
@pytest.mark.parametrize("script", EDITS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("site", SITES)
def test_an_edit_does_what_it_does_in_transformers(pair: Pair, site: str, script: Callable[..., Any]) -> None:
    *_, logits = same(pair, script, PROMPT, SITES[site])
    assert_edited(pair, logits)


@pytest.mark.parametrize("script", EDITS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("site", NORMS)
def test_an_edit_of_a_head_norm_does_what_it_does_in_transformers(
    pair_of: Callable[..., Pair], site: str, script: Callable[..., Any]
) -> None:
    *_, logits = same(pair_of("qwen3"), script, PROMPT, NORMS[site])
    assert_edited(pair_of("qwen3"), logits)


@pytest.mark.parametrize("script", EDITS[:2], ids=lambda s: s.__name__)
def test_an_edit_of_the_rotation_reaches_every_layer(pair: Pair, script: Callable[..., Any]) -> None:
    *_, logits = same(pair, script, PROMPT, "model.rotary_emb")
    assert_edited(pair, logits)


def test_assigned_inputs_reach_the_layer(pair: Pair) -> None:
    assert_edited(pair, same(pair, scripts.assign_inputs, PROMPT, 1))


def test_what_is_put_into_a_modules_keyword_arguments_reaches_it(pair: Pair) -> None:
    assert_edited(pair, same(pair, scripts.fill_inputs, PROMPT))


@pytest.mark.parametrize("site", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
def test_an_input_edited_in_place_reaches_the_projections_that_read_it_later(pair: Pair, site: str) -> None:
    _, logits = same(pair, scripts.projections_after_input_edit, PROMPT, SITES[site])
    assert_edited(pair, logits)


def test_a_layers_input_is_the_output_of_the_layer_before(pair: Pair) -> None:
    output, *_ = same(pair, scripts.input_aliases_output, PROMPT)
    assert output[:, -1].abs().sum() == 0


def test_a_saved_tensor_shows_a_later_edit_and_a_clone_does_not(pair: Pair) -> None:
    shown, copied = same(pair, scripts.saved_then_edited, PROMPT)
    assert torch.all(shown == 1) and not torch.all(copied == 1)


def test_several_edits_in_one_trace_compose(pair: Pair) -> None:
    same(pair, scripts.several_edits, PROMPT)


def test_a_value_saved_in_one_trace_patches_another(pair: Pair) -> None:
    same(pair, scripts.patch_from_another_prompt, PROMPT, OTHER)


# -- generation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        scripts.generate_all_steps,
        scripts.generate_all,
        scripts.generate_without_iter,
        scripts.generate_forced,
        scripts.generator_output,
        scripts.generator_streamer,
        scripts.generate_inputs,
        scripts.stop_generation,
        scripts.stop_early,
    ],
    ids=lambda s: s.__name__,
)
def test_generation_is_served_as_in_transformers(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


STEPS = {"1": 1, "1:3": slice(1, 3), "2:": slice(2, None), ":2": slice(None, 2), "[0, 2]": [0, 2], "0": 0, "4": 4}


@pytest.mark.parametrize("steps", STEPS)
def test_iter_picks_steps_as_in_nnsight(pair: Pair, steps: str) -> None:
    same(pair, scripts.generate_some_steps, PROMPT, STEPS[steps])


@pytest.mark.filterwarnings("ignore:The `with tracer.iter")
@pytest.mark.parametrize("steps", [2, slice(1, 3), slice(None), [0, 2]], ids=str)
def test_a_with_block_over_steps_keeps_what_it_saves_as_in_nnsight(pair: Pair, steps: Any) -> None:
    same(pair, scripts.generate_with_block_per_step, PROMPT, steps)


@pytest.mark.parametrize("steps", [0, 2, slice(1, 4), [1, 3]], ids=str)
def test_edits_of_some_steps_change_the_tokens_as_in_nnsight(pair: Pair, steps: Any) -> None:
    tokens = same(pair, scripts.generate_with_edit_at, PROMPT, steps)
    plain = pair[0].generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    assert tokens[0, len(PROMPT) :].tolist() != plain


@pytest.mark.parametrize("site", ["layer", "self_attn", "mlp", "q_proj", "v_proj", "down_proj", "norm", "lm_head"])
def test_edits_of_every_step_change_the_tokens_as_in_nnsight(pair: Pair, site: str) -> None:
    same(pair, scripts.generate_with_edit_at_every_step, PROMPT, SITES[site])


def test_several_generations_are_served_each_its_own_steps(pair: Pair) -> None:
    same(pair, scripts.generate_several, [PROMPT, OTHER])


def test_what_follows_an_open_loop_runs_here(pair: Pair) -> None:
    lm, _ = pair
    with lm.generate(PROMPT, max_new_tokens=4) as tracer:
        states = list().save()
        for _ in tracer.iter[:]:
            states.append(lm.model.layers[1].output)
        tokens = tracer.result.save()
    assert (
        tokens[0, len(PROMPT) :].tolist()
        == lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))[0].token_ids
    )
    assert [s.shape[1] for s in states] == [len(PROMPT), 1, 1, 1]


# -- prompts, invokes -------------------------------------------------------------------------

TEXT = "w5 w17 w3 w80"
FORMS: dict[str, Callable[[], Any]] = {
    "text": lambda: TEXT,
    "ids": lambda: [5, 17, 3, 80],
    "nested ids": lambda: [[5, 17, 3, 80]],
    "list of one text": lambda: [TEXT],
    "tensor": lambda: torch.tensor([[5, 17, 3, 80]]),
    "flat tensor": lambda: torch.tensor([5, 17, 3, 80]),
    "tokenizer's dict": lambda: tiny_tokenizer()(TEXT, return_tensors="pt"),
    "tokenizer's dict of lists": lambda: dict(tiny_tokenizer()(TEXT)),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_of_every_form_are_the_same_prompt(pair: Pair, form: str) -> None:
    lm, reference = pair
    expected = scripts.plain(reference, torch.tensor([[5, 17, 3, 80]]))
    assert_same(scripts.plain(lm, FORMS[form]()), expected)
    assert_same(scripts.plain(reference, FORMS[form]()), expected)


def keyword_prompt(model: Any, ids: torch.Tensor) -> Any:
    with model.trace(input_ids=ids, attention_mask=torch.ones_like(ids)):
        logits = model.lm_head.output.save()
    return logits


def test_a_prompt_given_by_keyword_is_the_same_prompt(pair: Pair) -> None:
    same(pair, keyword_prompt, torch.tensor([PROMPT]))


def test_invokes_of_ragged_prompts_see_their_own_rows(pair: Pair) -> None:
    same(pair, scripts.invokes, PROMPTS, LENGTHS)


def test_invokes_opened_in_a_loop_fill_containers_saved_above(pair: Pair) -> None:
    same(pair, scripts.invokes_in_a_loop, PROMPTS, LENGTHS)


def test_invokes_of_mixed_forms_are_batched(pair: Pair) -> None:
    same(
        pair, scripts.invokes, [TEXT, torch.tensor([OTHER]), tiny_tokenizer()("w1 w2", return_tensors="pt")], [4, 3, 2]
    )


# -- modules called by the block, skip, cache, source -------------------------------------------


@pytest.mark.parametrize(
    "script",
    [scripts.logit_lens, scripts.logit_lens_while_generating, scripts.call_of_projection, scripts.call_with_hook],
    ids=lambda s: s.__name__,
)
def test_a_block_calls_modules_as_in_nnsight(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


@pytest.mark.parametrize(
    "script",
    [scripts.skip_layer, scripts.skip_mlp, scripts.skip_attention, scripts.skip_at_every_step],
    ids=lambda s: s.__name__,
)
def test_a_skipped_module_is_replaced_as_in_nnsight(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


@pytest.mark.parametrize("path", [LAYER, f"{LAYER}.mlp"], ids=["layer", "mlp"])
def test_a_skip_in_a_shared_batch_is_the_skippers_alone(pair: Pair, path: str) -> None:
    lm, reference = pair
    output, skipped, inner, kept = scripts.skip_by_one_of_two(lm, [PROMPT, OTHER], path)
    assert_same((output, skipped), scripts.skip_alone(reference, PROMPT, path))
    assert_same((inner, kept), scripts.no_skip(reference, OTHER))


@pytest.mark.parametrize(
    "script", [scripts.cache_all, scripts.cache_some, scripts.cache_while_generating], ids=lambda s: s.__name__
)
def test_a_cache_holds_what_nnsights_holds(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


@pytest.mark.parametrize(
    "script",
    [scripts.source_of_mlp, scripts.source_assigned, scripts.source_of_layer, scripts.source_while_generating],
    ids=lambda s: s.__name__,
)
def test_source_operations_that_both_have_are_served_alike(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


# -- sessions, renames, edits that stay ---------------------------------------------------------


def test_values_flow_between_the_traces_of_a_session(pair: Pair) -> None:
    same(pair, scripts.session, PROMPT, OTHER)


def test_a_session_runs_loops_of_traces(pair: Pair) -> None:
    same(pair, scripts.session_with_loop, PROMPTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_renamed_modules_answer_to_both_names(pair_of: Callable[..., Pair], family: str) -> None:
    same(pair_of(family, rename=(("model.layers", "layers"),)), scripts.renamed, PROMPT)


@pytest.mark.parametrize(
    "script", [scripts.edited_copy, scripts.edited_in_place, scripts.edited_generation], ids=lambda s: s.__name__
)
def test_stored_edits_apply_as_in_nnsight(pair: Pair, script: Callable[..., Any]) -> None:
    changed, clean = same(pair, script, PROMPT)[-2:]
    assert not torch.equal(changed, clean)


def test_stored_edits_apply_to_plain_generation_too(pair: Pair) -> None:
    lm, _ = pair
    params = SamplingParams(temperature=0, max_tokens=5)
    clean = lm.generate(PROMPT, params)[0].token_ids
    with lm.edit(inplace=True) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[0].mlp.output[:, -1] = 0.5
    changed = lm.generate([PROMPT, PROMPT], params)
    lm.clear_edits()
    expected = scripts.edited_generation(pair[1], PROMPT)[0][0, len(PROMPT) :].tolist()
    assert [out.token_ids for out in changed] == [expected, expected] and expected != clean
    assert lm.generate(PROMPT, params)[0].token_ids == clean


# -- Python in a block ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        scripts.branches,
        scripts.handlers,
        scripts.functions,
        scripts.reads_in_a_function,
        scripts.saved_values,
        scripts.unsaved_values,
    ],
    ids=lambda s: s.__name__,
)
def test_python_in_a_block_runs_as_in_nnsight(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


@pytest.mark.local
def test_a_block_reaches_the_callers_names(pair: Pair) -> None:
    torch.manual_seed(0)
    delta = torch.randn(pair[0].hf_config.hidden_size)
    same(pair, scripts.names_from_outside, PROMPT, delta)


# -- beside other requests --------------------------------------------------------------------------


def third_plain(lm: LM) -> Any:
    return lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))[0].token_ids


def third_traced(lm: LM) -> Any:
    return scripts.generate_with_edit_at_every_step(lm, PROMPT, "model.layers.1.self_attn.q_proj")


def third_edits_inputs(lm: LM) -> Any:
    with lm.generate(PROMPT, max_new_tokens=6) as tracer:
        for _ in tracer.iter[0:6]:
            lm.model.layers[0].self_attn.k_proj.input[:] *= -1
            lm.model.layers[1].input[:] = 0.5
            lm.model.norm.input = lm.model.norm.input * 2
        tokens = tracer.result.save()
    return tokens


def third_skips(lm: LM) -> Any:
    return scripts.skip_at_every_step(lm, PROMPT)


def third_touches_everything(lm: LM) -> Any:
    return scripts.identity_edits(lm, PROMPT)


def needs_one_shape(lm: LM) -> None:
    """Skip where the traced request is computed apart from the others: the last bits go by the batch's shape."""
    if lm.runner.partition.hook_execution == "split":
        pytest.skip(
            "hook_execution='split' computes hooked requests in a batch of their own, whose shape the last bits go by"
        )


@pytest.mark.local
@pytest.mark.parametrize(
    "third",
    [third_traced, third_edits_inputs, third_touches_everything],
    ids=lambda f: f.__name__.removeprefix("third_"),
)
def test_a_trace_changes_nothing_for_plain_requests_bit_for_bit(pair: Pair, third: Callable[[LM], Any]) -> None:
    lm, _ = pair
    needs_one_shape(lm)
    expected, _ = plain_beside(lm, lambda: third_plain(lm))
    found, _ = plain_beside(lm, lambda: third(lm))
    assert found == expected


@pytest.mark.local
def test_a_skip_changes_nothing_for_plain_requests_bit_for_bit(pair: Pair) -> None:
    lm, _ = pair
    needs_one_shape(lm)
    params = SamplingParams(temperature=0, max_tokens=4)
    expected, _ = plain_beside(lm, lambda: lm.generate(PROMPT, params))
    found, _ = plain_beside(lm, lambda: third_skips(lm))
    assert found == expected


@pytest.mark.local
def test_a_forward_pass_of_all_positions_changes_nothing_for_plain_requests_bit_for_bit(pair: Pair) -> None:
    lm, _ = pair
    expected, _ = plain_beside(lm, lambda: lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1)))
    found, _ = plain_beside(lm, lambda: scripts.logit_lens(lm, PROMPT))
    assert found == expected


@pytest.mark.local
def test_edits_that_change_nothing_are_bit_equal(pair: Pair) -> None:
    lm, _ = pair
    needs_one_shape(lm)
    _, untouched = plain_beside(lm, lambda: scripts.step_logits(lm, PROMPT))
    _, touched = plain_beside(lm, lambda: scripts.identity_edits(lm, PROMPT))
    assert len(untouched) == 6 and all(map(torch.equal, touched, untouched))


def fails_at_step_two(lm: LM, how: str) -> Any:
    try:
        with lm.generate(PROMPT, max_new_tokens=6) as tracer:
            for step in tracer.iter[0:6]:
                h = lm.model.layers[0].output
                if step == 2:
                    if how == "stop":
                        tracer.stop()
                    elif how == "shape":
                        lm.model.layers[0].output = h[:, :, :3]
                    elif how == "module":
                        h = lm.model.layers[99].output
                    else:
                        raise KeyError("mine")
    except Exception as error:
        return error
    return None


@pytest.mark.local
@pytest.mark.parametrize("how", ["raise", "shape", "module"])
def test_an_error_in_a_trace_leaves_the_rest_bit_equal(pair: Pair, how: str) -> None:
    lm, _ = pair
    expected, none = plain_beside(lm, lambda: fails_at_step_two(lm, "stop"))
    found, error = plain_beside(lm, lambda: fails_at_step_two(lm, how))
    assert none is None and isinstance(error, {"raise": KeyError, "shape": ValueError, "module": AttributeError}[how])
    assert found == expected
    lm.engine.call(lm.engine.scheduler.check_integrity)


# -- corners --------------------------------------------------------------------------------------

CORNERS = [
    scripts.negative_and_sliced_layers, scripts.weights_in_block, scripts.heads_of_z, scripts.heads_of_q,
    scripts.sequential_loops, scripts.break_and_else, scripts.comprehension_over_steps, scripts.enumerate_steps,
    scripts.left_enumerate_and_zip,
    scripts.bounded_loop_outruns, scripts.a_later_step_after_the_first, scripts.save_model_output,
    scripts.edited_copy_generates, scripts.session_generate, scripts.statements, scripts.several_contexts,
    scripts.embed_ids_in_place_generate, scripts.input_kwargs_read, scripts.accumulated_over_steps,
    scripts.call_plain_outside, scripts.caught_inside, scripts.caught_outside,
]  # fmt: skip


@pytest.mark.thin(4)
@pytest.mark.parametrize("script", CORNERS, ids=lambda s: s.__name__)
def test_a_notebooks_other_habits_work_as_in_nnsight(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


@pytest.mark.parametrize("script", [scripts.flat_heads_of_q, scripts.reshaped_k], ids=lambda s: s.__name__)
def test_projections_are_contiguous_as_in_transformers(pair: Pair, script: Callable[..., Any]) -> None:
    same(pair, script, PROMPT)


def test_a_generation_that_ends_early_ends_its_loops(pair: Pair) -> None:
    tokens = pair[0].generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    _, out = same(pair, scripts.eos_ends, PROMPT, tokens[3])
    assert out.shape[1] == len(PROMPT) + tokens.index(tokens[3]) + 1


def test_values_flow_from_invokes_of_a_session(pair: Pair) -> None:
    same(pair, scripts.session_with_invokes, [PROMPT, PROMPT[::-1]])


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_renamed_at_every_layer_answer_to_their_aliases(pair_of: Callable[..., Pair], family: str) -> None:
    aliases = (("model.layers", "layers"), ("self_attn", "attention"), ("mlp", "ffn"))
    same(pair_of(family, rename=aliases), scripts.rename_many, PROMPT)


MISTAKES = [
    scripts.raise_value, scripts.unknown_module, scripts.unknown_layer, scripts.out_of_order, scripts.inside_skipped,
    scripts.invoke_in_prompted, scripts.empty_trace, scripts.negative_step, scripts.read_outside,
    scripts.source_unknown, scripts.cache_late,
]  # fmt: skip


@pytest.mark.parametrize("script", MISTAKES, ids=lambda s: s.__name__)
def test_a_mistake_raises_what_nnsight_raises(pair: Pair, script: Callable[..., Any]) -> None:
    lm, reference = pair
    with pytest.raises(Exception) as theirs:
        script(reference, PROMPT)
    with pytest.raises(theirs.type):
        script(lm, PROMPT)
    assert_same(scripts.plain(lm, PROMPT), scripts.plain(reference, PROMPT))


def test_a_cache_holds_what_the_module_went_on_with_and_not_a_later_edit(pair: Pair) -> None:
    """nnsight's holds the tensor itself on the CPU, and a copy on a GPU; ours is a copy always."""
    lm, _ = pair
    with lm.trace(PROMPT) as tracer:
        cache = tracer.cache(modules=[lm.model.layers[0].mlp.down_proj])
        lm.model.layers[0].mlp.output[:] = 0
    assert cache["model.model.layers.0.mlp.down_proj"].output.abs().sum() > 0

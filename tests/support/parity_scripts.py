"""Scripts for nnsight's LanguageModel, as a researcher writes them: `model` is that, or ours (test_trace_parity.py).

Each takes the model and its prompt (or prompts) and returns what it saved.
"""

# Variables of a block are bound by nnsight, in the caller's frame.
# pyright: reportPossiblyUnboundVariable=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import nnsight
import torch


def hidden(value: Any) -> torch.Tensor:
    """The tensor that an edit goes for: the value, or the first of a tuple."""
    return value[0] if isinstance(value, tuple) else value


def repacked(value: Any, tensor: torch.Tensor) -> Any:
    """`value` with its first tensor replaced."""
    return (tensor, *value[1:]) if isinstance(value, tuple) else tensor


def nudged(x: torch.Tensor) -> torch.Tensor:
    """Another value that fits where `x` stands."""
    return (x + 3) % 50 if x.dtype == torch.int64 else x * 0.5 + 0.25


def tensors(inputs: Any) -> list[torch.Tensor]:
    """The hidden states of a module's ``(args, kwargs)``: no mask, no cache, nothing else that has no counterpart."""
    args, kwargs = inputs
    values = [*args[:1], *(v for k, v in kwargs.items() if k in ("hidden_states", "input_ids"))]
    return [value for value in values if isinstance(value, torch.Tensor)]


def plain(model: Any, prompt: Any) -> Any:
    """The last position's logits, without an edit."""
    with model.trace(prompt):
        logits = model.lm_head.output[:, -1].save()
    return logits


# -- reads ----------------------------------------------------------------------------------


def read_module(model: Any, prompt: Any, path: str) -> Any:
    with model.trace(prompt):
        module = model.get(path)
        first = module.input.save()
        inputs = module.inputs.save()
        output = module.output.save()
    return first, tensors(inputs), output


def read_in_order(model: Any, prompt: Any, paths: list[str]) -> Any:
    with model.trace(prompt):
        values = list().save()
        for path in paths:
            values.append(hidden(model.get(path).output))
    return values


def read_root(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        ids = model.input.save()
        last = model.model.output.last_hidden_state.save()
        logits = model.output.logits.save()
        result = tracer.result.logits.save()
    return ids, last, logits, result


def edit_root(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        model.model.output.last_hidden_state[:, -1] = 0.5
        seen = model.lm_head.input.save()
        model.output.logits[:, 0] = 7.0
        result = tracer.result.logits.save()
    return seen, result


def assign_root(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        output = model.model.output
        output.last_hidden_state = output.last_hidden_state * 2
        model.model.output = output
        whole = model.output
        whole.logits = whole.logits + 1
        model.output = whole
        logits = tracer.result.logits.save()
    return logits


def fill_root(model: Any, prompt: Any) -> Any:
    """Other values in the containers that were read, which nobody assigns."""
    with model.trace(prompt) as tracer:
        model.model.output.last_hidden_state = model.model.output.last_hidden_state * 2
        seen = model.lm_head.input.save()
        model.output["logits"] = model.output["logits"] + 1
        logits = tracer.result.logits.save()
    return seen, logits


# -- edits ----------------------------------------------------------------------------------


def edit_output_in_place(model: Any, prompt: Any, path: str) -> Any:
    with model.trace(prompt):
        value = hidden(model.get(path).output)
        value[:, -1] = nudged(value[:, -1])
        after = value.save()
        logits = model.output.logits.save()
    return after, logits


def assign_output(model: Any, prompt: Any, path: str) -> Any:
    with model.trace(prompt):
        module = model.get(path)
        before = module.output
        module.output = repacked(before, nudged(hidden(before)))
        after = hidden(module.output).save()
        logits = model.output.logits.save()
    return after, logits


def edit_input_in_place(model: Any, prompt: Any, path: str) -> Any:
    with model.trace(prompt):
        module = model.get(path)
        value = module.input.save()
        value[:, -1] = nudged(value[:, -1])
        output = hidden(module.output).save()
        logits = model.output.logits.save()
    return value, output, logits


def assign_input(model: Any, prompt: Any, path: str) -> Any:
    with model.trace(prompt):
        module = model.get(path)
        module.input = nudged(module.input)
        seen = module.input.save()
        output = hidden(module.output).save()
        logits = model.output.logits.save()
    return seen, output, logits


def assign_inputs(model: Any, prompt: Any, layer: int) -> Any:
    with model.trace(prompt):
        args, kwargs = model.model.layers[layer].inputs
        cos, sin = kwargs["position_embeddings"]
        model.model.layers[layer].inputs = (nudged(args[0]),), {**kwargs, "position_embeddings": (cos * 0.5, sin)}
        logits = model.output.logits.save()
    return logits


def fill_inputs(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        _, kwargs = model.model.layers[0].inputs
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = cos * 0.5, sin
        _, kwargs = model.model.layers[1].self_attn.inputs
        kwargs["hidden_states"] = nudged(kwargs["hidden_states"])
        logits = model.output.logits.save()
    return logits


def projections_after_input_edit(model: Any, prompt: Any, path: str) -> Any:
    """q, k and v (or gate and up) read one tensor: what is written into it between them reaches the later ones."""
    with model.trace(prompt):
        parent = model.get(path.rpartition(".")[0])
        names = ("q_proj", "k_proj", "v_proj") if hasattr(parent, "q_proj") else ("gate_proj", "up_proj")
        values = list().save()
        for name in names:
            projection = getattr(parent, name)
            if path.endswith(name):
                projection.input[:, -1] *= 2
            values.append(projection.output)
        logits = model.output.logits.save()
    return values, logits


def several_edits(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        model.model.embed_tokens.output[:, 0] = 0
        model.model.layers[0].self_attn.q_proj.output += 0.5
        model.model.layers[0].self_attn.o_proj.output = model.model.layers[0].self_attn.o_proj.output * 2
        model.model.layers[0].mlp.output[:, :, ::2] = 0.1
        first = model.model.layers[0].output.clone().save()
        model.model.layers[1].input[:] = first.flip(1)
        model.model.layers[1].mlp.down_proj.output *= 0.5
        logits = model.lm_head.output.save()
    return first, logits


def input_aliases_output(model: Any, prompt: Any) -> Any:
    """A layer's input is the tensor that the layer before returned: written to in place, both show it."""
    with model.trace(prompt):
        output = model.model.layers[0].output.save()
        model.model.layers[1].input[:, -1] = 0
        residual = model.model.layers[1].input_layernorm.input.save()
        end = model.model.layers[1].output.save()
    return output, residual, end


def saved_then_edited(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        shown = model.model.layers[0].output.save()
        copied = model.model.layers[0].output.clone().save()
        model.model.layers[0].output[:] = 1.0
    return shown, copied


def patch_from_another_prompt(model: Any, clean: Any, corrupted: Any) -> Any:
    with model.trace(clean):
        h = model.model.layers[0].output[:, -1].save()
    with model.trace(corrupted):
        model.model.layers[0].output[:, -1] = h
        logits = model.lm_head.output[:, -1].save()
    return h, logits


# -- generation -----------------------------------------------------------------------------


def generate_all_steps(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=5) as tracer:
        states, logits = list().save(), list().save()
        for _ in tracer.iter[:]:
            states.append(model.model.layers[1].output)
            logits.append(model.lm_head.output)
    return states, logits


def generate_all(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=4) as tracer:
        states = list().save()
        for step in tracer.all():
            states.append((step, model.model.layers[0].mlp.output))
    return states


def generate_some_steps(model: Any, prompt: Any, steps: Any) -> Any:
    with model.generate(prompt, max_new_tokens=5) as tracer:
        states = list().save()
        for step in tracer.iter[steps]:
            states.append((step, hidden(model.model.layers[0].self_attn.output), model.lm_head.output))
    return states


def generate_with_block_per_step(model: Any, prompt: Any, steps: Any) -> Any:
    """nnsight's deprecated form, which older scripts have."""
    with model.generate(prompt, max_new_tokens=4) as tracer:
        states, last = list().save(), None
        with tracer.iter[steps]:
            last = model.model.layers[1].output
            states.append((last, model.lm_head.output))
        last = last.save()
    return states, last


def generate_without_iter(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        first = model.model.layers[0].output.save()
        tokens = tracer.result.save()
    return first, tokens


def generate_with_edit_at(model: Any, prompt: Any, steps: Any) -> Any:
    with model.generate(prompt, max_new_tokens=6) as tracer:
        for _ in tracer.iter[steps]:
            model.model.layers[0].output[:, -1] *= -2
        tokens = tracer.result.save()
    return tokens


def generate_with_edit_at_every_step(model: Any, prompt: Any, path: str) -> Any:
    with model.generate(prompt, max_new_tokens=6) as tracer:
        tokens = list().save()
        for _ in tracer.iter[0:6]:
            module = model.get(path)
            module.output = repacked(module.output, nudged(hidden(module.output)))
            tokens.append(model.lm_head.output[:, -1].argmax(-1))
        result = tracer.result.save()
    return tokens, result


def generate_forced(model: Any, prompt: Any) -> Any:
    """Logits edited so that each step's token is known."""
    with model.generate(prompt, max_new_tokens=4) as tracer:
        for step in tracer.iter[0:4]:
            model.lm_head.output[:, -1, 10 + step] = 1e4
        tokens = tracer.result.save()
    return tokens


def generator_output(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=4):
        tokens = model.generator.output.save()
    return tokens


def generator_streamer(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=4) as tracer:
        tokens = list().save()
        for _ in tracer.iter[0:5]:
            tokens.append(model.generator.streamer.output)
    return tokens


def generate_inputs(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        ids, states = list().save(), list().save()
        for _ in tracer.iter[0:3]:
            ids.append(model.model.embed_tokens.input)
            states.append(model.model.layers[1].self_attn.o_proj.input)
    return ids, states


def generate_several(model: Any, prompts: list[Any]) -> Any:
    with model.generate(max_new_tokens=3) as tracer:
        tokens, states = list().save(), list().save()
        with tracer.invoke(prompts[0]):
            for _ in tracer.iter[0:3]:
                states.append(model.model.layers[1].output[:, -1])
                tokens.append(model.lm_head.output[:, -1].argmax(-1))
        with tracer.invoke(prompts[1]):
            for _ in tracer.iter[0:3]:
                model.model.layers[0].mlp.output[:, -1] = 0
                states.append(model.model.layers[1].output[:, -1])
                tokens.append(model.lm_head.output[:, -1].argmax(-1))
    return sorted(t.item() for t in tokens), sorted(s.sum().item() for s in states)


def stop_early(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        h = model.model.layers[0].output.save()
        tracer.stop()
        h = model.model.layers[1].output.save()
    return h


def stop_generation(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=8) as tracer:
        states = list().save()
        for step in tracer.iter[:]:
            states.append(model.model.layers[0].output)
            if step == 2:
                tracer.stop()
    return states


def step_logits(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=6) as tracer:
        logits = list().save()
        for _ in tracer.iter[0:6]:
            logits.append(model.lm_head.output)
    return logits


def identity_edits(model: Any, prompt: Any) -> Any:
    """Every kind of edit, each writing what was there."""
    with model.generate(prompt, max_new_tokens=6) as tracer:
        logits = list().save()
        for _ in tracer.iter[0:6]:
            model.model.embed_tokens.output[:] = model.model.embed_tokens.output
            for layer in model.model.layers:
                layer.input = layer.input.clone()
                layer.self_attn.q_proj.input = layer.self_attn.q_proj.input.clone()
                layer.self_attn.q_proj.output[:] = layer.self_attn.q_proj.output.clone()
                layer.self_attn.k_proj.input[:] = layer.self_attn.k_proj.input.clone()
                layer.self_attn.v_proj.output = layer.self_attn.v_proj.output.clone()
                layer.self_attn.o_proj.input[:] = layer.self_attn.o_proj.input.clone()
                layer.self_attn.output = layer.self_attn.output
                layer.mlp.gate_proj.input = layer.mlp.gate_proj.input.clone()
                layer.mlp.act_fn.output += 0
                layer.mlp.down_proj.output *= 1
                layer.output = layer.output.clone()
            model.model.norm.output = model.model.norm.output.clone()
            logits.append(model.lm_head.output)
    return logits


# -- prompts, invokes -----------------------------------------------------------------------


def invokes(model: Any, prompts: list[Any], lengths: list[int]) -> Any:
    with model.trace() as tracer:
        out = list().save()
        with tracer.invoke(prompts[0]):
            out.append(model.model.layers[0].self_attn.output[0][:, -lengths[0] :])
            model.model.layers[0].mlp.output[:, -1] = 0
            first = model.lm_head.output[:, -lengths[0] :].save()
        with tracer.invoke(prompts[1]):
            out.append(model.model.layers[0].self_attn.output[0][:, -lengths[1] :])
            model.model.layers[1].output = model.model.layers[1].output * 0.5
            second = model.lm_head.output[:, -lengths[1] :].save()
        with tracer.invoke(prompts[2]):
            third = model.lm_head.output[:, -lengths[2] :].save()
    return out, first, second, third


def invokes_in_a_loop(model: Any, prompts: list[Any], lengths: list[int]) -> Any:
    with model.trace() as tracer:
        states, logits = list().save(), {}
        nnsight.save(logits)
        for i, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                states.append(hidden(model.model.layers[1].self_attn.output)[:, -lengths[i] :])
                logits[i] = model.output.logits[:, -1]
    return states, logits


# -- modules called by the block, skip, cache, source -----------------------------------------


def logit_lens(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        lens = list().save()
        for layer in model.model.layers:
            lens.append(model.lm_head(model.model.norm(layer.output)))
        logits = model.output.logits.save()
    return lens, logits


def logit_lens_while_generating(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=4) as tracer:
        lens = list().save()
        for _ in tracer.iter[0:4]:
            for layer in model.model.layers:
                lens.append(model.lm_head(model.model.norm(layer.output[:, -1])).argmax(-1))
        tokens = tracer.result.save()
    return lens, tokens


def call_of_projection(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        attn, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
        x = attn.q_proj.input
        called = attn.k_proj(x * 2).save()
        inside = attn.k_proj.output.save()
        gated = mlp(model.model.layers[1].post_attention_layernorm.output).save()
        own = mlp.output.save()
    return called, inside, gated, own


def call_with_hook(model: Any, prompt: Any) -> Any:
    """Inside of a block's own call, modules have hooks only if asked."""
    with model.trace(prompt):
        h = model.model.layers[0].output
        normed = model.model.norm(h, hook=False).save()
        logits = model.output.logits.save()
    return normed, logits


def skip_layer(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        layer = model.model.layers[1]
        layer.skip(layer.input)
        output = layer.output.save()
        logits = model.output.logits.save()
    return output, logits


def skip_mlp(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        layer = model.model.layers[0]
        layer.mlp.skip(layer.mlp.input * 0)
        output = layer.output.save()
        logits = model.output.logits.save()
    return output, logits


def skip_attention(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        layer = model.model.layers[0]
        normed = layer.input_layernorm.output
        layer.self_attn.skip((normed, None))
        logits = model.output.logits.save()
    return logits


def skip_by_one_of_two(model: Any, prompts: list[Any], path: str) -> Any:
    with model.trace() as tracer:
        with tracer.invoke(prompts[0]):
            model.get(path).skip(model.get(path).input * 0.5)
            output = model.get(path).output.save()
            skipped = model.output.logits.save()
        with tracer.invoke(prompts[1]):
            inner = model.model.layers[1].mlp.down_proj.output.save()
            kept = model.output.logits.save()
    return output, skipped, inner, kept


def skip_alone(model: Any, prompt: Any, path: str) -> Any:
    with model.trace(prompt):
        model.get(path).skip(model.get(path).input * 0.5)
        output = model.get(path).output.save()
        skipped = model.output.logits.save()
    return output, skipped


def no_skip(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        inner = model.model.layers[1].mlp.down_proj.output.save()
        kept = model.output.logits.save()
    return inner, kept


def skip_at_every_step(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=4) as tracer:
        for _ in tracer.iter[0:4]:
            model.model.layers[0].mlp.skip(model.model.layers[0].mlp.input * 0.5)
        tokens = tracer.result.save()
    return tokens


def cache_all(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        cache = tracer.cache()
        model.model.layers[0].mlp.output = model.model.layers[0].mlp.output * 0
    return {path: cache[path].output for path in cache.keys()}


def cache_some(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        cache = tracer.cache(
            modules=[model.model.layers[0].mlp, "model.model.layers.1.self_attn.q_proj"], include_inputs=True
        )
        model.model.layers[0].mlp.output += 1
    mlp, q = cache.model.model.layers[0].mlp, cache["model.model.layers.1.self_attn.q_proj"]
    return sorted(cache.keys()), mlp.output, mlp.inputs, q.output, q.input


def cache_while_generating(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        cache = tracer.cache(modules=[model.model.layers[1]])
        tokens = tracer.result.save()
    view = cache["model.model.layers.1"]
    return len(view), view.output, tokens


def source_of_mlp(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        source = model.model.layers[0].mlp.source
        gate = source.self_gate_proj_0.output.save()
        act = source.self_act_fn_0.output
        act[:, -1] = 0
        product = source.self_down_proj_0.input.save()
        down = source.self_down_proj_0.output.save()
        logits = model.output.logits.save()
    return gate, product, down, logits


def source_assigned(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        source = model.model.layers[0].mlp.source
        source.self_down_proj_0.output = source.self_down_proj_0.output * 2
        logits = model.output.logits.save()
    return logits


def source_of_layer(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        source = model.model.layers[1].source
        attn = source.self_self_attn_0.output[0].save()
        mlp = source.self_mlp_0.output.save()
    return attn, mlp


def source_while_generating(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        states = list().save()
        for _ in tracer.iter[0:3]:
            states.append(model.model.layers[0].mlp.source.self_act_fn_0.output)
    return states


# -- sessions, renames, edits that stay -------------------------------------------------------


def session(model: Any, clean: Any, corrupted: Any) -> Any:
    with model.session():
        with model.trace(clean):
            h = model.model.layers[0].output[:, -1]
        with model.trace(corrupted):
            model.model.layers[0].output[:, -1] = h
            logits = model.lm_head.output[:, -1].save()
    return logits


def session_with_loop(model: Any, prompts: list[Any]) -> Any:
    with model.session():
        total = 0
        found = list().save()
        for prompt in prompts:
            with model.trace(prompt):
                total = total + model.model.layers[1].output[:, -1]
        found.append(total)
    return found


def renamed(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        same = model.model.layers[0].mlp.output.save()
        h = model.layers[0].output.save()
        model.layers[1].mlp.output[:] = 0
        logits = model.output.logits.save()
    return h, same, logits


def edited_copy(model: Any, prompt: Any) -> Any:
    with model.edit() as (_, edited):
        edited.model.layers[0].mlp.output[:] = 0
    with model.trace(prompt):
        clean = model.lm_head.output.save()
    with edited.trace(prompt):
        changed = edited.lm_head.output.save()
    return clean, changed


def edited_in_place(model: Any, prompt: Any) -> Any:
    with model.edit(inplace=True):
        model.model.layers[0].output[:, -1] *= 2
    with model.edit(inplace=True):
        model.model.layers[0].output = model.model.layers[0].output + 1
    with model.trace(prompt):
        seen = model.model.layers[0].output.save()
        model.model.layers[1].output[:] *= 0.5
        changed = model.lm_head.output.save()
    model.clear_edits()
    with model.trace(prompt):
        clean = model.lm_head.output.save()
    return seen, changed, clean


def edited_generation(model: Any, prompt: Any) -> Any:
    with model.edit(inplace=True) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[0].mlp.output[:, -1] = 0.5
    with model.generate(prompt, max_new_tokens=5) as tracer:
        changed = tracer.result.save()
    model.clear_edits()
    with model.generate(prompt, max_new_tokens=5) as tracer:
        clean = tracer.result.save()
    return changed, clean


# -- Python in a block -------------------------------------------------------------------------


def branches(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        h = model.model.layers[0].output
        if h.sum() > 0:
            model.model.layers[1].output[:] = 0
            taken = "positive"
        else:
            model.model.layers[1].output[:] = 1
            taken = "negative"
        nnsight.save(taken)
        logits = model.output.logits.save()
    return taken, logits


def handlers(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        steps = list().save()
        try:
            h = model.model.layers[0].output
            raise KeyError("mine")
        except KeyError as error:
            steps.append(str(error))
            h = h + 1
        finally:
            steps.append("finally")
        with torch.no_grad():
            h = (h * 2).save()
    return steps, h


def functions(model: Any, prompt: Any) -> Any:
    scale = 3.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    with model.trace(prompt):

        def last(layer: Any) -> torch.Tensor:
            return layer.output[:, -1]

        factor = 2.0
        states = [last(layer) for layer in model.model.layers].save()
        double = [x * factor for x in states].save()
        scaled_one = scaled(states[0]).save()
        norms = {i: (x.norm() * factor).item() for i, x in enumerate(states)}
        nnsight.save(norms)
    return states, double, scaled_one, norms


def helper_reads(layer: Any, found: list) -> None:
    found.append(layer.mlp.output)
    layer.mlp.output[:] = 0


def reads_in_a_function(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        found = list().save()
        for layer in model.model.layers:
            helper_reads(layer, found)
        logits = model.output.logits.save()
    return found, logits


def saved_values(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        h = model.model.layers[0].output
        count = h.shape[1].save()
        best = h[0, -1].argmax().item().save()
        nested = {"shape": list(h.shape), "parts": [h[:, :1], {"last": h[:, -1]}]}.save()
        pair = (h.mean(), "text").save()
        function = nnsight.save(h.std())
    return count, best, nested, pair, function


def unsaved_values(model: Any, prompt: Any) -> Any:
    kept = lost = None
    with model.trace(prompt):
        kept = model.model.layers[0].output.save()
        lost = model.model.layers[1].output
    return kept, lost is None


def names_from_outside(model: Any, prompt: Any, delta: torch.Tensor) -> Any:
    collected: list = []
    with model.trace(prompt):
        model.model.layers[0].output[:, -1] += delta
        collected.append(model.model.layers[1].output.clone())
        count = nnsight.save(len(collected))
    return collected, count


# -- corners ------------------------------------------------------------------------------------


def negative_and_sliced_layers(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        found = list().save()
        for layer in model.model.layers[1:]:
            found.append(layer.output)
        last = model.model.layers[-1].output.save()
    return found, last


def weights_in_block(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        attn = model.model.layers[0].self_attn
        x = attn.v_proj.input
        v = (x @ attn.v_proj.weight.T).save()
        unembed = (model.model.norm.output @ model.lm_head.weight.T).save()
        n = nnsight.save(model.config.num_hidden_layers)
    return v, unembed, n


def heads_of_z(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        z = model.model.layers[0].self_attn.o_proj.input
        heads = z.view(z.shape[0], z.shape[1], -1, 8)
        heads[:, :, 3] = 0
        logits = model.output.logits.save()
    return logits


def heads_of_q(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        q = model.model.layers[0].self_attn.q_proj.output
        q.view(q.shape[0], q.shape[1], -1, 8)[:, :, 1] = 0
        logits = model.output.logits.save()
    return logits


def flat_heads_of_q(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        q = model.model.layers[0].self_attn.q_proj.output
        q.view(-1, 8)[::2] = 0
        logits = model.output.logits.save()
    return logits


def reshaped_k(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        k = model.model.layers[0].self_attn.k_proj.output
        k.reshape(-1, 8)[::2] = 0
        logits = model.output.logits.save()
    return logits


def sequential_loops(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=5) as tracer:
        a, b = list().save(), dict().save()
        first = model.model.layers[0].output.save()
        for _ in tracer.iter[1:3]:
            a.append(model.model.layers[0].output)
        for step in tracer.iter[3:5]:
            b[step] = model.lm_head.output
        out = tracer.result.save()
    return first, a, b, out


def break_and_else(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=5) as tracer:
        a = list().save()
        for step in tracer.iter[:]:
            h = model.model.layers[0].output
            if step == 1:
                continue
            a.append(h)
            if step == 3:
                break
        else:
            a.append("else")
        for _ in tracer.iter[4:5]:
            a.append(model.lm_head.output)
        else:
            a.append("else2")
        out = tracer.result.save()
    return a, out


def comprehension_over_steps(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=4) as tracer:
        a = [model.lm_head.output.argmax(-1).item() for _ in tracer.iter[0:3]].save()
    return a


def enumerate_steps(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=4) as tracer:
        a = list().save()
        for i, step in enumerate(tracer.iter[:]):
            a.append((i, step, model.lm_head.output))
    return a


def left_enumerate_and_zip(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=5) as tracer:
        a = list().save()
        for i, step in enumerate(tracer.iter[1:]):
            a.append((i, step, model.model.layers[0].output))
            if step == 2:
                break
        for step, scale in zip(tracer.iter[3:5], [0.5]):  # noqa: B905
            model.model.layers[1].output *= scale
            a.append((step, model.lm_head.output))
        out = tracer.result.save()
    return a, out


def bounded_loop_outruns(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=2) as tracer:
        a = list().save()
        for _ in tracer.iter[0:5]:
            a.append(model.lm_head.output)
    return a


def eos_ends(model: Any, prompt: Any, eos: int) -> Any:
    with model.generate(prompt, max_new_tokens=8, eos_token_id=eos) as tracer:
        a = list().save()
        for _ in tracer.iter[:]:
            a.append(model.lm_head.output.argmax(-1))
    with model.generate(prompt, max_new_tokens=8, eos_token_id=eos) as tracer:
        out = tracer.result.save()
    return a, out


def a_later_step_after_the_first(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        a = model.lm_head.output.save()
        for _ in tracer.iter[2]:
            c = model.lm_head.output.save()
    return a, c


def save_model_output(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        out = model.output.save()
    with model.trace(prompt) as tracer:
        res = tracer.result.save()
    return out.logits, res.logits, type(out).__name__, out["logits"], out[0]


def edited_copy_generates(model: Any, prompt: Any) -> Any:
    with model.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            edited.model.layers[0].mlp.output[:, -1] = 0.5
    with edited.generate(prompt, max_new_tokens=4) as tracer:
        a = tracer.result.save()
    with model.generate(prompt, max_new_tokens=4) as tracer:
        b = tracer.result.save()
    with edited.edit() as (tracer, twice):
        twice.model.layers[1].output[:] = 0
    with twice.trace(prompt):
        c = twice.output.logits.save()
    with edited.trace(prompt):
        d = edited.output.logits.save()
    return a, b, c, d


def session_generate(model: Any, prompt: Any) -> Any:
    with model.session():
        with model.generate(prompt, max_new_tokens=3) as tracer:
            hs = list()
            for _ in tracer.iter[0:3]:
                hs.append(model.model.layers[0].output[:, -1])
            tokens = tracer.result
        with model.trace(tokens):
            model.model.layers[0].output[:, -1] = hs[0]
            logits = model.output.logits.save()
        final = nnsight.save(len(hs))
    return logits, final


def statements(model: Any, prompt: Any) -> Any:
    outer = 1
    with model.trace(prompt):
        import math

        class Box:
            def __init__(self, x):
                self.x = x

            def double(self):
                return self.x * 2

        if (h := model.model.layers[0].output).shape[1] > 2:
            box = Box(h)
        del h
        a, *rest = [box.double(), 1, 2]
        match len(rest):
            case 2:
                word = f"two {math.pi:.2f}"
            case _:
                word = "other"
        outer += 1
        gen = sum(x for x in rest)
        n = 0
        while n < 3:
            n += 1
        nnsight.save(word)
        nnsight.save(outer)
        nnsight.save(gen)
        nnsight.save(n)
        a.save()
    return a, word, outer, gen, n


def several_contexts(model: Any, prompt: Any) -> Any:
    with torch.no_grad(), model.trace(prompt):
        h = model.model.layers[0].output.save()
    return h


def embed_ids_in_place_generate(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        model.model.embed_tokens.input[:, -1] = 3
        out = tracer.result.save()
    return out


def rename_many(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        a = model.layers[0].attention.output[0].save()
        m = model.layers[0].ffn.output.save()
        model.layers[1].ffn.output[:] = 0
        o = model.output.logits.save()
    return a, m, o


def input_kwargs_read(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        args, kwargs = model.model.layers[0].self_attn.inputs
        h = kwargs["hidden_states"].save()
        n = nnsight.save(len(args))
    return h, n


def accumulated_over_steps(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        acc = torch.zeros(1, model.config.hidden_size).save()
        for _ in tracer.iter[0:3]:
            acc += model.model.layers[0].output[:, -1].detach()
    return acc


def session_with_invokes(model: Any, prompts: list[Any]) -> Any:
    with model.session():
        with model.trace() as tracer:
            with tracer.invoke(prompts[0]):
                h = model.model.layers[0].output[:, -1].clone()
            with tracer.invoke(prompts[1]):
                h2 = model.model.layers[0].output[:, -1].clone()
        with model.trace(prompts[0]):
            model.model.layers[0].output[:, -1] = h + h2
            logits = model.output.logits.save()
    return logits


def call_plain_outside(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        h = model.model.layers[1].output.save()
    return model.lm_head(model.model.norm(h))


def caught_inside(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        got = "no"
        try:
            model.model.layers[0].output[:, 99] = 0
        except IndexError:
            got = "yes"
        nnsight.save(got)
        h = model.model.layers[1].output.save()
    return got, h


def caught_outside(model: Any, prompt: Any) -> Any:
    try:
        with model.trace(prompt):
            model.model.layers[0].output.save()
            raise KeyError("x")
    except KeyError:
        return "caught"


# -- mistakes: both raise -------------------------------------------------------------------------


def raise_value(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        _ = model.model.layers[0].output
        raise ValueError("mine")


def unknown_module(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        model.model.layerz[0].output.save()


def unknown_layer(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        model.model.layers[99].output.save()


def out_of_order(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        model.model.layers[1].output.save()
        model.model.layers[0].output.save()


def inside_skipped(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        model.model.layers[0].mlp.skip(model.model.layers[0].mlp.input)
        model.model.layers[0].mlp.down_proj.output.save()


def invoke_in_prompted(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        with tracer.invoke(prompt):
            model.model.layers[0].output.save()


def empty_trace(model: Any, prompt: Any) -> Any:
    with model.trace():
        pass


def negative_step(model: Any, prompt: Any) -> Any:
    with model.generate(prompt, max_new_tokens=3) as tracer:
        for _ in tracer.iter[-1]:
            model.lm_head.output.save()


def read_outside(model: Any, prompt: Any) -> Any:
    return model.model.layers[0].output


def source_unknown(model: Any, prompt: Any) -> Any:
    with model.trace(prompt):
        model.model.layers[0].mlp.source.nothing_0.output.save()


def cache_late(model: Any, prompt: Any) -> Any:
    with model.trace(prompt) as tracer:
        _ = model.model.layers[0].output
        cache = tracer.cache()
    return len(cache.keys())

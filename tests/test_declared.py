"""Declared interventions through the engine: transformers' hooks that do the same maths are the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import VOCAB, held

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Generated, Patch, SamplingParams, Scale, Steer
from pymllm_interp.hooks.intervention import Intervention, Project, apply, bind, ordinals_of
from pymllm_interp.hooks.site import ModelInfo

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
SITES = [
    "embed",
    "resid_pre.1",
    "attn_out.0",
    "resid_mid.1",
    "mlp_out.1",
    "resid_post.0",
    "resid_post.-1",
    "final_norm",
]
WAIT = 60.0


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(VOCAB - 2) for _ in range(length)]


def vector(width: int, seed: int, *rows: int) -> torch.Tensor:
    return torch.randn(*rows, width, generator=torch.Generator().manual_seed(seed))


def ops_at(site: str, width: int) -> list[Intervention]:
    v, probe = vector(width, 1), vector(width, 2)
    return [
        Steer(site, v, scale=1.5, positions="generated"),
        Steer(site, v, positions=slice(0, None, 3), norm="preserve"),
        Steer(site, v, scale=0.4, norm="match", when=Gate(probe, 0.0)),
        Ablate(site, vector(width, 3, 3)),
        Clamp(site, probe, low=-0.2, high=0.2, positions="prompt"),
        Scale(site, 0.7, positions=Generated(1, 5, 2)),
        Patch(site, vector(width, 4, 2), positions=[0, -1]),
    ]


@contextmanager
def hooked(
    model: Any, specs: list[Intervention], prompt_len: int, positions: Callable[[], torch.Tensor]
) -> Iterator[None]:
    """transformers' model with hooks at the modules that the sites are, each applying its specs in order."""
    info, handles = ModelInfo.of(model.config, torch.float32), []
    layers = model.model.layers
    for spec in specs:
        for bound in bind(spec, info, prompt_len):
            kind, i = bound.site.kind, bound.site.layer or 0

            def edit(state: torch.Tensor, bound: Any = bound) -> torch.Tensor:
                return apply(bound.spec, state[0], ordinals_of(bound.windows, positions()))[None]

            def output(module: Any, args: Any, out: Any, edit: Any = edit) -> Any:
                return (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)

            def first(module: Any, args: Any, kwargs: Any, edit: Any = edit) -> Any:
                if args:
                    return (edit(args[0]), *args[1:]), kwargs
                return args, kwargs | {"hidden_states": edit(kwargs["hidden_states"])}

            module = {
                "embed": model.model.embed_tokens, "attn_out": layers[i].self_attn, "mlp_out": layers[i].mlp,
                "resid_post": layers[i], "final_norm": model.model.norm,
            }.get(kind)  # fmt: skip
            if kind == "resid_pre":
                handles.append(layers[i].register_forward_pre_hook(first, with_kwargs=True))
            elif kind == "resid_mid":
                handles += resid_mid(layers[i], edit)
            else:
                assert module is not None
                handles.append(module.register_forward_hook(output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def resid_mid(layer: Any, edit: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The sum after the attention is no module's output: what the attention adds is changed so that the sum is the edited one."""
    before: list[torch.Tensor] = []

    def remember(module: Any, args: Any, kwargs: Any) -> None:
        before[:] = [args[0] if args else kwargs["hidden_states"]]

    def shift(module: Any, args: Any, out: Any) -> Any:
        return (edit(before[0] + out[0]) - before[0], *out[1:])

    return [
        layer.register_forward_pre_hook(remember, with_kwargs=True),
        layer.self_attn.register_forward_hook(shift),
    ]


@torch.no_grad()
def reference(
    model: Any, prompt: list[int], specs: list[Intervention], new_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits that they come from, by a cached generation under hooks."""
    now = torch.arange(len(prompt))
    ids, cache, rows = list(prompt), None, []
    with hooked(model, specs, len(prompt), lambda: now):
        inputs = torch.tensor([prompt])
        for _ in range(new_tokens):
            out = model(inputs, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
            ids.append(int(rows[-1].argmax()))
            now, inputs = torch.tensor([len(ids) - 1]), torch.tensor([[ids[-1]]])
    return ids[len(prompt) :], torch.stack(rows)


def logits_of(lm: LM, prompt: list[int], specs: list[Intervention], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The same by a trace that carries the interventions: it reads what the head makes of them."""
    with lm.generate(prompt, max_new_tokens=new_tokens, interventions=specs) as tracer:
        rows = list().save()
        for _ in tracer.iter[:]:
            rows.append(lm.logits)
        ids = tracer.result.save()
    return ids[0, len(prompt) :].tolist(), torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", SITES)
def test_each_op_at_each_site_equals_a_hook_on_transformers(family: str, site: str, lm_of: Any, oracle: Any) -> None:
    lm, model, prompt = lm_of(family), oracle(family), prompt_of(9, 3)
    plain = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    changed = 0
    for spec in ops_at(site, model.config.hidden_size):
        wanted, rows = reference(model, prompt, [spec], 6)
        found, logits = logits_of(lm, prompt, [spec], 6)
        torch.testing.assert_close(logits, rows, rtol=1e-4, atol=1e-4)
        out = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=6), interventions=[spec])[0]
        assert out.token_ids == found == wanted, spec
        changed += wanted != plain
    assert changed, "ops that change no token show little"


def random_specs(rng: random.Random, width: int) -> list[Intervention]:
    specs = [
        spec
        for site in rng.sample(SITES, rng.randrange(0, 4))
        for spec in rng.sample(ops_at(site, width), rng.randrange(1, 3))
    ]
    rng.shuffle(specs)
    return [spec for spec in specs if not isinstance(spec, Patch)]


@pytest.mark.parametrize(
    "server", [{}, {"async_scheduling": True}, {"schedule_policy": "prefill_first", "hook_execution": "split"}]
)
def test_mixed_requests_in_a_tight_pool_equal_their_solo_runs(server: dict[str, Any], lm_of: Any, oracle: Any) -> None:
    """Chunked prompts, requests that give way and come back, traces beside them: each has its own ops and nobody else's."""
    rng, model = random.Random(7), oracle("llama")
    lm = lm_of("llama", kv_cache_tokens=80, page_size=4, max_num_tokens=16, **server)
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(16)]
    specs = [random_specs(rng, model.config.hidden_size) for _ in prompts]
    wanted = [reference(model, p, s, 10)[0] for p, s in zip(prompts, specs, strict=True)]
    before = lm.engine.stats()
    params = SamplingParams(temperature=0, max_tokens=10)
    with held(lm, until=len(prompts)):
        handles = [lm.submit(p, params, interventions=s) for p, s in zip(prompts, specs, strict=True)]
    with lm.generate(prompts[3], max_new_tokens=10, interventions=specs[3]) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[1].output.save()
        traced = tracer.result.save()
    assert traced[0, len(prompts[3]) :].tolist() == wanted[3]
    assert [h.result(WAIT).token_ids for h in handles] == wanted
    assert lm.engine.stats()["preempted"] > before["preempted"]
    one_call = lm.generate(prompts, params, interventions=specs)
    assert [out.token_ids for out in one_call] == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ops_that_change_nothing_change_no_bit(family: str, lm_of: Any) -> None:
    lm, prompt = lm_of(family), prompt_of(8, 1)
    width = lm.hf_config.hidden_size
    never = Gate(vector(width, 5), 1e30)
    nothing = [
        Steer("resid_post.*", vector(width, 6), scale=0),
        Scale("mlp_out.0", 1),
        Steer("embed", vector(width, 6), when=never),
    ]
    (_, plain), (_, same) = logits_of(lm, prompt, [], 4), logits_of(lm, prompt, nothing, 4)
    assert torch.equal(plain, same)


def test_a_trace_sees_a_sites_own_module_after_the_ops_and_what_is_inside_before(lm_of: Any) -> None:
    """Section 3's order of effects: the declared op, then the block, then what the model goes on with."""
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    specs = [
        Scale("attn_out.1", 0.0),
        Scale("mlp_out.0", 3.0),
        Scale("resid_post.0", 2.0),
        Scale("final_norm", 0.0),
        Scale("embed", 0.5),
    ]

    def read(interventions: list[Intervention]) -> dict[str, torch.Tensor]:
        with lm.trace(prompt, interventions=interventions):
            seen = dict().save()
            seen["embed"] = lm.model.embed_tokens.output.clone()
            seen["down"] = lm.model.layers[0].mlp.down_proj.output.clone()
            seen["mlp"] = lm.model.layers[0].mlp.output.clone()
            seen["layer"] = lm.model.layers[0].output.clone()
            seen["next"] = lm.model.layers[1].input.clone()
            seen["o"] = lm.model.layers[1].self_attn.o_proj.output.clone()
            seen["attn"] = lm.model.layers[1].self_attn.output[0].clone()
            seen["norm_in"] = lm.model.norm.input.clone()
            seen["norm"] = lm.model.norm.output.clone()
            again = lm.model.norm(seen["norm_in"])
            seen["again"] = again.clone()
        return seen

    plain, seen = read([]), read(specs)
    assert torch.equal(seen["embed"], plain["embed"] * 0.5)
    assert torch.equal(seen["mlp"], seen["down"] * 3)
    assert torch.equal(seen["layer"], seen["next"]) and not torch.allclose(seen["layer"], plain["layer"])
    assert seen["o"].abs().max() > 0 and seen["attn"].abs().max() == 0
    assert seen["norm"].abs().max() == 0 and seen["again"].abs().max() > 0, (
        "a block's own call of a module is not the pass's"
    )


def test_each_invoke_of_a_trace_has_its_own_interventions(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    with lm.trace() as tracer:
        with tracer.invoke(prompt, interventions=[Scale("resid_post.0", 0.0)]):
            off = lm.model.layers[0].output.save()
        with tracer.invoke(prompt):
            on = lm.model.layers[0].output.save()
    assert off.abs().max() == 0 and on.abs().max() > 0
    assert [len(receipt.interventions) for receipt in tracer.receipts] == [1, 0]


def test_receipts_count_rows_by_phase_gates_and_how_steps_ran(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(7, 4)
    width = lm.hf_config.hidden_size
    always, never = Gate(torch.ones(width), -1e9), Gate(torch.ones(width), 1e9)
    specs = [
        Steer("resid_post.{0,2}", vector(width, 1), positions="all"),
        Scale("mlp_out.1", 0.5, positions="generated", when=always),
        Ablate("attn_out.0", vector(width, 2), positions=[0, -1], when=never),
        Scale("resid_mid.0", 1),
    ]
    out = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=5), interventions=specs)[0]
    found = {
        entry.site: (entry.intervention, entry.prompt_rows, entry.generated_rows, entry.gate_fires)
        for entry in out.receipt.interventions
    }
    assert found == {
        "attn_out.0": ("Ablate", 2, 0, 0),
        "resid_post.0": ("Steer", 7, 4, None),
        "mlp_out.1": ("Scale", 0, 4, 4),
        "resid_post.2": ("Steer", 7, 4, None),
    }
    assert sum(out.receipt.steps.values()) == 5
    assert lm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))[0].receipt is None


def test_completions_of_one_prompt_share_their_interventions(lm_of: Any, oracle: Any) -> None:
    lm, prompt = lm_of("qwen3"), prompt_of(9, 6)
    specs = [Steer("resid_post.0", vector(lm.hf_config.hidden_size, 1), scale=2.0)]
    wanted = reference(oracle("qwen3"), prompt, specs, 5)[0]
    (out,) = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, n=3), interventions=specs)
    assert [completion.token_ids for completion in out.outputs] == [wanted] * 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda w: Steer("resid_post.0", torch.ones(w + 1)), r"vector has \d+ values"),
        (lambda w: Steer("resid_post.99", torch.ones(w)), "99"),
        (lambda w: Scale("resid_post.0", 2.0, positions=[40]), "beyond the prompt"),
        (lambda w: Scale("z.0", 2.0), "interventions act at embed"),
        (lambda w: [Scale("resid_post.0", 2.0)] * 5, "max_interventions_per_site"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_scheduled(spec: Any, message: str, lm_of: Any) -> None:
    lm = lm_of("llama")
    made = spec(lm.hf_config.hidden_size)
    before = lm.engine.num_steps
    with pytest.raises(ValueError, match=message):
        lm.generate([[1, 2, 3]], interventions=made if isinstance(made, list) else [made])
    assert lm.engine.num_steps == before


# -- captures --------------------------------------------------------------------------------------


@torch.no_grad()
def states_of(model: Any, ids: list[int], specs: list[Intervention], prompt_len: int) -> dict[str, torch.Tensor]:
    """Every site's state at each of `ids`, from one pass under hooks: what goes on, after the specs."""
    at, found, handles = torch.arange(len(ids)), {}, []
    with hooked(model, specs, prompt_len, lambda: at):
        layers = model.model.layers

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, out: Any) -> None:
                found[name] = (out[0] if isinstance(out, tuple) else out)[0]

            return hook

        def keep_input(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                found[name] = (args[0] if args else kwargs["hidden_states"])[0]

            return hook

        # What goes on from a layer is what the next one reads: `resid_pre` ops act at the same place.
        for i, layer in enumerate(layers):
            handles.append(
                layer.register_forward_pre_hook(
                    keep_input("embed" if i == 0 else f"resid_post.{i - 1}"), with_kwargs=True
                )
            )
        handles.append(model.model.norm.register_forward_hook(keep("final_norm")))
        for i, layer in enumerate(layers):
            handles.append(layer.self_attn.register_forward_hook(keep(f"attn_out.{i}")))
            handles.append(layer.mlp.register_forward_hook(keep(f"mlp_out.{i}")))
        handles.append(layers[-1].register_forward_hook(keep(f"resid_post.{len(layers) - 1}")))
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_captures_are_the_states_that_the_model_goes_on_with(family: str, lm_of: Any, oracle: Any) -> None:
    """Beside others, in chunks, and after giving way: each position once, in order, with its token."""
    model, rng = oracle(family), random.Random(3)
    lm = lm_of(family, kv_cache_tokens=80, page_size=4, max_num_tokens=16)
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(12)]
    # The oracle edits resid_mid through what the attention adds, which is then not what attn_out is.
    specs = [[op for op in random_specs(rng, model.config.hidden_size) if "mid" not in str(op.site)] for _ in prompts]
    before = lm.engine.stats()["preempted"]
    wanted = ["embed", "attn_out.*", "mlp_out.1", "resid_post.*", Capture("final_norm", positions="generated")]
    outs = lm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), interventions=specs, capture=wanted)
    assert lm.engine.stats()["preempted"] > before
    layers = model.config.num_hidden_layers
    for prompt, spec, out in zip(prompts, specs, outs, strict=True):
        ids = (prompt + out.token_ids)[:-1]
        states, got = states_of(model, ids, spec, len(prompt)), out.activations
        assert len(got) == 3 + 2 * layers and set(got) <= set(states)
        for site, rows in got.items():
            first = len(prompt) if site == "final_norm" else 0
            assert got.positions[site].tolist() == list(range(first, len(ids))), site
            assert got.token_ids[site].tolist() == ids[first:]
            torch.testing.assert_close(rows, states[site][first:], rtol=1e-4, atol=1e-4, msg=site)


def test_what_flows_in_a_layer_adds_up(lm_of: Any) -> None:
    lm = lm_of("llama")
    (out,) = lm.generate([prompt_of(9, 1)], SamplingParams(temperature=0, max_tokens=5), capture=[
        "resid_pre.1", "attn_out.1", "resid_mid.1", "mlp_out.1", "resid_post.1", "resid_post.0"
    ])  # fmt: skip
    got = out.activations
    assert torch.equal(got["resid_pre.1"], got["resid_post.0"])
    torch.testing.assert_close(got["resid_pre.1"] + got["attn_out.1"], got["resid_mid.1"])
    torch.testing.assert_close(got["resid_mid.1"] + got["mlp_out.1"], got["resid_post.1"])
    with pytest.raises(KeyError, match=r"not captured; there is resid_pre\.1"):
        got["mlp_out.0"]


def test_captures_select_convert_and_reduce(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(8, 2)
    params = SamplingParams(temperature=0, max_tokens=4)
    probes = vector(lm.hf_config.hidden_size, 3, 5)

    def capture(*specs: Any) -> Any:
        return lm.generate([prompt], params, capture=list(specs))[0].activations

    whole = capture("resid_post.1")["resid_post.1"]
    assert whole.shape == (11, lm.hf_config.hidden_size)
    last = capture(Capture("resid_post.1", positions=[-1, 0]))
    assert torch.equal(last["resid_post.1"], whole[[0, 7]]) and last.positions["resid_post.1"].tolist() == [0, 7]
    half = capture(Capture("resid_post.1", dtype="float16"))["resid_post.1"]
    assert torch.equal(half, whole.half())
    torch.testing.assert_close(
        capture(Capture("resid_post.1", reduce="mean"))["resid_post.1"], whole.mean(0, keepdim=True)
    )
    end = capture(Capture("resid_post.1", reduce="last"))
    assert torch.equal(end["resid_post.1"], whole[-1:]) and end.positions["resid_post.1"].tolist() == [10]
    torch.testing.assert_close(
        capture(Capture("resid_post.1", reduce=Project(probes)))["resid_post.1"], whole @ probes.T
    )
    top = capture(Capture("resid_post.1", reduce=Project(probes, top_k=2)))
    best = (whole @ probes.T).topk(2)
    torch.testing.assert_close(top["resid_post.1"], best.values)
    assert torch.equal(top.indexes["resid_post.1"], best.indices)
    never = capture(Capture("resid_post.1", positions=Generated(50)))
    assert never["resid_post.1"].shape == (0, lm.hf_config.hidden_size) and never.token_ids["resid_post.1"].numel() == 0


def test_a_row_that_was_computed_after_the_end_is_not_captured(lm_of: Any) -> None:
    """With steps launched ahead, a request that stops has run a step too many."""
    late, prompt = lm_of("llama", async_scheduling=True), prompt_of(6, 5)
    ids = late.generate([prompt], SamplingParams(temperature=0, max_tokens=9))[0].token_ids
    stop = next(i for i in range(2, 9) if ids[i] not in ids[:i])
    params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[ids[stop]])
    (out,) = late.generate([prompt], params, capture=["resid_post.0"])
    assert out.token_ids == ids[: stop + 1]
    assert out.activations.token_ids["resid_post.0"].tolist() == prompt + ids[:stop]


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (["resid_post.1", "resid_post.*"], "resid_post.1 is captured twice"),
        (["z.0"], "interventions act at|act at embed"),
        ([3], "capture: 3 is none"),
        ([["resid_post.0"], ["resid_post.1"]], "one list for each of the 1"),
    ],
)
def test_captures_that_cannot_be_served_are_refused(capture: Any, message: str, lm_of: Any) -> None:
    with pytest.raises(ValueError, match=message):
        lm_of("llama").generate([[1, 2, 3]], capture=capture)


def test_captures_that_would_outgrow_the_host_and_those_of_traces_are_refused(lm_of: Any) -> None:
    small = lm_of("llama", max_capture_bytes=4000)
    with pytest.raises(ValueError, match=r"12 positions.*max_capture_bytes"):
        small.generate([prompt_of(9, 1)], SamplingParams(max_tokens=4), capture=["resid_post.0", "mlp_out.0"])
    with pytest.raises(TypeError, match="capture"):
        with small.trace([1, 2, 3], capture=["resid_post.0"]):
            small.model.layers[0].output.save()

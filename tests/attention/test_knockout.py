"""`Knockout`, against transformers' model with the same edges hidden by its attention mask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import held
from helpers_graphs import use_eager_graphs
from transformers import PreTrainedModel

from pymllm_interp import LM, Ablate, SamplingParams, Steer
from pymllm_interp.attention import cut_edges
from pymllm_interp.core.model_spec import FAMILIES as FAMILY_ROWS
from pymllm_interp.harvest import open_harvest
from pymllm_interp.hooks.positions import ordinals_of, windows_of
from pymllm_interp.interventions import Generated, Knockout

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "gpt_oss")
PROMPT = [5, 17, 3, 80, 44, 9, 61]
OTHER = [7, 2, 93]
LONG = [(7 * i) % 90 for i in range(1, 31)]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SITES = ["resid_post.*", "z.*", "final_norm"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def hidden_edges(spec: Knockout, prompt_len: int, length: int) -> torch.Tensor:
    """[length, length] bool."""
    queries, keys = (
        ordinals_of(windows_of(positions, prompt_len), torch.arange(length)) >= 0 for positions in (spec.from_, spec.to)
    )
    return queries[:, None] & keys


@contextmanager
def knocked_out(model: PreTrainedModel, specs: list[Knockout], prompt_len: int) -> Iterator[None]:
    """transformers' model, whose attention masks hide the edges."""
    family = FAMILY_ROWS[model.config.model_type]
    layers: Any = model.get_submodule(family.layers)
    count, heads = len(layers), model.config.num_attention_heads

    def hide(layer: int) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            mask = kwargs["attention_mask"].clone().expand(1, heads, -1, -1).contiguous()
            for spec in specs:
                if spec.layer == "*" or layer in [index % count for index in spec.layer]:
                    for head in range(heads) if spec.heads is None else spec.heads:
                        hidden = hidden_edges(spec, prompt_len, mask.shape[-1])
                        mask[0, head].masked_fill_(hidden, torch.finfo(mask.dtype).min)
            return args, {**kwargs, "attention_mask": mask}

        return hook

    handles = [
        layer.get_submodule(family.attention).register_forward_pre_hook(hide(i), with_kwargs=True)
        for i, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def expected(
    model: PreTrainedModel, prompt: list[int], specs: list[Knockout], steps: int
) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """Greedy tokens, and the hidden states of all positions but the last token's. No cache: each step computes all positions."""
    ids = list(prompt)
    with knocked_out(model, specs, len(prompt)):
        for step in range(steps):
            out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
            if step == steps - 1:
                break
            ids.append(int(out.logits[0, -1].argmax()))
    return [*ids[len(prompt) :], int(out.logits[0, -1].argmax())], out.hidden_states


def assert_as_in_transformers(lm: LM, model: PreTrainedModel, prompt: list[int], specs: list[Knockout]) -> None:
    """Tokens and states are equal, and the knockouts change something."""
    steps = 6
    (out,) = lm.generate([prompt], GREEDY, interventions=specs, capture=SITES)
    tokens, states = expected(model, prompt, specs, steps)
    assert out.token_ids == tokens
    for layer in range(lm.model_spec.num_hidden_layers - 1):
        torch.testing.assert_close(out.activations[f"resid_post.{layer}"], states[layer + 1][0], **CLOSE)
    torch.testing.assert_close(out.activations["final_norm"], states[-1][0], **CLOSE)
    _, clean = expected(model, [*prompt, *tokens[:-1]], [], 1)
    assert not torch.allclose(out.activations["final_norm"], clean[-1][0], atol=1e-3)


CASES: dict[str, list[Knockout]] = {
    "last token to one key": [Knockout("*", from_=-1, to=5)],
    "one layer": [Knockout(1, from_=[-1, 4], to=[3, 5, 2])],
    "last layer, by a negative number": [Knockout(-1, from_="all", to=4)],
    "some heads": [Knockout([0, 1], from_=-1, to=[3, 4, 5], heads=[1, 3])],
    "itself": [Knockout("*", from_=5, to=5)],
    "generated to prompt": [Knockout("*", from_="generated", to="prompt")],
    "one head of generated": [Knockout("*", from_="generated", to=[0, 1, 5, 6], heads=0)],
    "generated to one key": [Knockout("*", from_=Generated(1, 4), to=-1)],
    "generated to generated": [Knockout(0, from_="generated", to=Generated(0, 2), heads=range(1, 3))],
    "a slice": [Knockout("*", from_=slice(3, None), to=slice(1, None, 2), heads=[2])],
    "several": [
        Knockout("*", from_=-1, to=3, heads=[0, 2]), Knockout(1, from_=[5, 6], to=4), Knockout(0, from_="generated", to=[-1, -2]),
    ],
}  # fmt: skip


@pytest.mark.thin(6)
@pytest.mark.parametrize("case", CASES)
def test_cut_edges_are_hidden_as_by_transformers_mask(
    family: str, case: str, lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    assert_as_in_transformers(lm_of(family), oracle(family), PROMPT, CASES[case])


@pytest.mark.thin(3)
def test_a_prompt_in_chunks_is_cut_as_a_whole_one(
    family: str, lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm = lm_of(family, max_num_tokens=8)
    specs = [
        Knockout("*", from_=[9, 20, -1], to=[5, 8, 9, 18, 19, 28]),
        Knockout(0, from_="generated", to=-1, heads=[1]),
    ]
    assert_as_in_transformers(lm, oracle(family), LONG, specs)


def test_large_attention_is_computed_in_parts(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_edges, "MAX_SCORES", 200)  # one head, and 6 queries of it
    specs = [Knockout("*", from_=slice(5, None), to=[1, 2, 3]), Knockout(1, from_=-1, to=8, heads=[4, 5])]
    assert_as_in_transformers(lm_of("llama"), oracle("llama"), LONG, specs)


def test_bfloat16_is_cut_within_its_rounding(lm_of: Callable[..., LM], model_folder: Callable[[str], Path]) -> None:
    specs = [Knockout("*", from_=-1, to=[4, 5])]
    full = lm_of("llama").generate([PROMPT], GREEDY, interventions=specs, capture=["z.1"])[0].activations["z.1"]
    with LM(model_folder("llama"), dtype="bfloat16", device="cpu") as lm:
        half = lm.generate([PROMPT], GREEDY, interventions=specs, capture=["z.1"])[0].activations["z.1"]
    similar = torch.cosine_similarity(half[: len(PROMPT)].float(), full[: len(PROMPT)], dim=-1)
    assert half.dtype == torch.bfloat16 and similar.min() > 0.99


# -- beside others -----------------------------------------------------------------------------


def three_at_once(lm: LM, specs: list[Knockout]) -> tuple[list[Any], Any]:
    """What two plain requests return, bit for bit, and the output of a third with knockouts."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=64, prompt_logprobs=64)
    with held(lm) as arrived:
        handles = [lm.submit(prompt, params) for prompt in (OTHER, LONG[:17])]
        third = lm.submit(PROMPT, GREEDY, interventions=specs)
        arrived(3)
    outs = [handle.result() for handle in handles]
    return [(out.token_ids, out.logprobs, out.prompt_logprobs) for out in outs], third.result()


@pytest.mark.thin(6)
@pytest.mark.parametrize("case", ["last token to one key", "generated to prompt", "several"])
def test_plain_requests_beside_it_are_bit_equal(
    family: str, case: str, lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm = lm_of(family)
    plain, _ = three_at_once(lm, [])
    found, third = three_at_once(lm, CASES[case])
    assert found == plain
    assert third.token_ids == expected(oracle(family), PROMPT, CASES[case], 6)[0]


def test_many_requests_are_cut_each_its_own_edges(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    specs = [CASES["some heads"], [], CASES["generated to prompt"], CASES["several"]]
    prompts = [PROMPT, OTHER, PROMPT[::-1], LONG[:20]]
    outs = lm.generate(prompts, GREEDY, interventions=specs)
    for out, prompt, own in zip(outs, prompts, specs, strict=True):
        assert out.token_ids == expected(model, prompt, own, 6)[0]


def test_completions_of_one_prompt_are_cut_alike(lm_of: Callable[..., LM]) -> None:
    lm, params = lm_of("llama"), SamplingParams(temperature=0, max_tokens=6, n=3)
    (out,) = lm.generate([PROMPT], params, interventions=CASES["several"])
    (one,) = lm.generate([PROMPT], GREEDY, interventions=CASES["several"])
    assert [completion.token_ids for completion in out.outputs] == [one.token_ids] * 3


def test_a_request_that_is_computed_again_is_cut_again(model_folder: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    specs = [Knockout("*", from_=Generated(2, 20), to=[1, 2, -1]), Knockout(1, from_=-1, to=3)]
    with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=64, max_model_len=64) as lm:
        (alone,) = lm.generate([PROMPT], params, interventions=specs)
        outs = lm.generate([OTHER, PROMPT, PROMPT], params, interventions=[[], specs, specs])
        assert [out.token_ids for out in outs[1:]] == [alone.token_ids] * 2
        assert lm.engine.scheduler.num_preempted > 0
        assert [str(a) for a in outs[2].receipt.interventions] == [str(a) for a in alone.receipt.interventions]


# -- with traces -------------------------------------------------------------------------------


@pytest.mark.thin(3)
def test_a_trace_sees_the_cut_attention(
    family: str, lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm, specs = lm_of(family), CASES["several"]
    heads = lm.model_spec.family.points["z"].module.format(1)
    with lm.generate(PROMPT, max_new_tokens=6, interventions=specs, capture=["z.1"]) as tracer:
        z = list().save()
        for _ in tracer.iter[0:6]:
            z.append(lm.get(heads).input[0])
        tokens = tracer.result.save()
    assert tokens[0, len(PROMPT) :].tolist() == expected(oracle(family), PROMPT, specs, 6)[0]
    torch.testing.assert_close(torch.cat(list(z)), tracer.activations["z.1"].flatten(1))


@pytest.mark.thin(3)
def test_transformers_attention_is_cut_by_its_mask(
    family: str, lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm, specs = lm_of(family), CASES["several"]
    with lm.generate(PROMPT, max_new_tokens=6, interventions=specs, output_attentions=True) as tracer:
        weights = list().save()
        for _ in tracer.iter[0:6]:
            weights.append(lm.output.attentions[1])
        tokens = tracer.result.save()
    assert tokens[0, len(PROMPT) :].tolist() == expected(oracle(family), PROMPT, specs, 6)[0]
    assert weights[0][0, 0, -1, -4] == 0 and weights[0][0, 1, -1, -3] == 0 and weights[0][0, 3, -1, -1] > 0
    sums = weights[0].sum(-1)
    assert sums.max() < 1 if family == "gpt_oss" else torch.allclose(sums, torch.ones(()))


def test_gradients_flow_past_the_cut_edges(lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]) -> None:
    lm, model, specs = lm_of("llama"), oracle("llama"), CASES["some heads"]
    for eager in (None, "eager"):
        with lm.trace(PROMPT, interventions=specs, attn_implementation=eager):
            h = lm.model.layers[0].output
            loss = lm.lm_head.output[0, -1].logsumexp(0)
            with loss.backward():
                ours = h.grad.save()
        with knocked_out(model, specs, len(PROMPT)), torch.enable_grad():
            embedded = model.get_input_embeddings()(torch.tensor([PROMPT])).detach().requires_grad_()
            out = model(inputs_embeds=embedded, use_cache=False, output_hidden_states=True)
            (theirs,) = torch.autograd.grad(out.logits[0, -1].logsumexp(0), out.hidden_states[1])
        torch.testing.assert_close(ours, theirs, **CLOSE)


# -- receipts, how steps run, harvests -----------------------------------------------------------


def test_a_receipt_counts_the_rows_that_lost_edges(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    specs = [
        Knockout([0, 2], from_=[2, 4, -1], to=[3]),
        Steer("resid_post.0", torch.zeros(72) + 1),
        Knockout(1, from_="all", to=2),
    ]
    (out,) = lm.generate([PROMPT], GREEDY, interventions=specs)
    found = {(a.intervention, a.site): (a.prompt_rows, a.generated_rows) for a in out.receipt.interventions}
    assert found == {
        ("Steer", "resid_post.0"): (7, 5),
        ("Knockout", "pattern.0"): (2, 0),  # position 2 has no key at 3
        ("Knockout", "pattern.2"): (2, 0),
        ("Knockout", "pattern.1"): (5, 5),
    }
    assert out.receipt.spec != lm.generate([PROMPT], GREEDY, interventions=specs[1:])[0].receipt.spec


def test_only_steps_with_cut_edges_leave_the_graph(model_folder: Callable[[str], Path]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            use_eager_graphs(monkeypatch)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with LM(
            model_folder("llama"),
            dtype="float32",
            device=device,
            kv_cache_tokens=2048,
            max_running_requests=8,
            inner_sites=("z",),
        ) as lm:

            def steps_of(specs: list[Knockout]) -> tuple[dict[tuple[str, str], int], list[int]]:
                before = dict(lm.runner.partition.counts)
                (out,) = lm.generate([PROMPT], GREEDY, interventions=specs)
                now = lm.runner.partition.counts
                return {key: n - before.get(key, 0) for key, n in now.items() if n > before.get(key, 0)}, out.token_ids

            prompt_cut, cut, replay = (
                ("plain", "edges of attention are cut"),
                ("segments", "edges of attention are cut"),
                ("replay", "nobody waits for a module, and the pass was captured"),
            )
            assert steps_of([])[0] == {replay: 6}
            assert steps_of([Knockout("*", from_=-1, to=5)])[0] == {prompt_cut: 1, replay: 5}
            assert steps_of([Knockout("*", from_=Generated(1, 3), to=5)])[0] == {cut: 2, replay: 4}
            with lm.generate(
                PROMPT, max_new_tokens=6, interventions=[Knockout("*", from_=Generated(1, 3), to=5)]
            ) as tracer:
                for _ in tracer.iter[:]:
                    lm.model.layers[1].output[:] *= 1
                tokens = tracer.result.save()
            assert tokens[0, 7:].tolist() == steps_of([Knockout("*", from_=Generated(1, 3), to=5)])[1]
            assert tracer.receipt.steps == {"segments": 6}
            assert set(tracer.receipt.eager_parts) == set()


def generate_inside_attention(lm: LM) -> torch.Tensor:
    with lm.generate(OTHER, max_new_tokens=8, attn_implementation="eager") as tracer:
        tokens = tracer.result.save()
    return tokens


def one_pass_inside_attention(lm: LM) -> None:
    with lm.trace(OTHER, attn_implementation="eager"):
        lm.logits.save()


def test_segments_with_cut_edges_take_turns_with_a_trace_that_runs_alone(model_folder: Callable[[str], Path]) -> None:
    specs = [Knockout("*", from_="generated", to=5)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            use_eager_graphs(monkeypatch)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with LM(
            model_folder("llama"), dtype="float32", device=device, kv_cache_tokens=2048, max_running_requests=8
        ) as lm:
            alone, (cut,) = generate_inside_attention(lm), lm.generate([PROMPT], GREEDY, interventions=specs)
            found: list[torch.Tensor] = []
            threads = [threading.Thread(target=lambda: found.append(generate_inside_attention(lm))) for _ in range(2)]
            later = [threading.Thread(target=one_pass_inside_attention, args=(lm,)) for _ in range(2)]
            with held(lm) as arrived:
                for thread in threads:
                    thread.start()
                arrived(2)
                handles = [lm.submit(PROMPT, GREEDY, interventions=specs) for _ in range(2)]
                arrived(4)
                for thread in later:
                    thread.start()
                arrived(6)
            for thread in [*threads, *later]:
                thread.join(600)
            assert [handle.result().token_ids for handle in handles] == [cut.token_ids] * 2
            assert len(found) == 2 and all(torch.equal(tokens, alone) for tokens in found)
            assert cut.receipt.steps == {"replay": 1, "segments": 5}


def test_split_steps_are_cut(lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]) -> None:
    lm, specs = lm_of("llama", hook_execution="split"), CASES["generated to prompt"]
    with held(lm) as arrived:
        handle = lm.submit(OTHER, GREEDY, interventions=specs)
        found: list[Any] = []

        def trace() -> None:
            with lm.generate(PROMPT, max_new_tokens=6, interventions=specs) as tracer:
                for _ in tracer.iter[:]:
                    lm.model.layers[1].output[:] *= 1
                tokens = tracer.result.save()
            found.append((tokens[0, 7:].tolist(), tracer.receipt.steps))

        thread = threading.Thread(target=trace)
        thread.start()
        arrived(2)
    thread.join(600)
    assert handle.result().token_ids == expected(oracle("llama"), OTHER, specs, 6)[0]
    assert found[0][0] == expected(oracle("llama"), PROMPT, specs, 6)[0] and found[0][1]["split"] == 5


def test_a_harvest_is_cut(lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], tmp_path: Path) -> None:
    specs = [Knockout("*", from_=-1, to=[0, 1])]
    lm_of("llama").harvest([PROMPT, OTHER], capture=["final_norm"], out=tmp_path / "h", interventions=specs)
    harvest = open_harvest(tmp_path / "h")
    for i, prompt in enumerate((PROMPT, OTHER)):
        states = expected(oracle("llama"), prompt, specs, 1)[1][-1][0]
        torch.testing.assert_close(harvest["final_norm"][harvest.document_ids()[:] == i], states, **CLOSE)


# -- what is refused -----------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "layer": (lambda: Knockout(3, from_=-1, to=0), r"Knockout\('pattern.3'\): layer=3; the model has 3 layers"),
    "layers": (lambda: Knockout("all", from_=-1, to=0), r"layer='all'; expected a layer, a list of layers, or \"\*\""),
    "no layers": (lambda: Knockout([], from_=-1, to=0), r"layer=\[\]; expected"),
    "head": (lambda: Knockout(1, from_=-1, to=0, heads=[0, 9]), r"heads=9; the model has 9 heads"),
    "heads": (lambda: Knockout(1, from_=-1, to=0, heads="first"), r"heads='first'; expected a head"),
    "from": (lambda: Knockout(1, from_=[7], to=0), r"from_: positions \[7\] are beyond the prompt"),
    "to": (lambda: Knockout(1, from_=-1, to="last"), r"to: positions='last'.*-1"),
    "later keys": (lambda: Knockout(1, from_=2, to=[3, 4]), r"no token at from_=\(2,\) attends to one at to=\(3, 4\)"),
    "all keys": (lambda: Knockout(1, from_="all", to="all"), r"position 0 would attend to nothing at layer 1"),
    "the first": (lambda: Knockout(1, from_="all", to=0), r"position 0 would attend to nothing"),
    "its keys": (lambda: Knockout(2, from_=3, to=range(4), heads=2), r"position 3 would attend to nothing at layer 2"),
    "new": (lambda: Knockout(0, from_="generated", to="all"), r"position 7 would attend to nothing at layer 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_cut_is_refused(case: str, lm_of: Callable[..., LM]) -> None:
    make, message = WRONG[case]
    lm = lm_of("llama")
    with pytest.raises(ValueError, match=message):
        lm.generate([PROMPT], GREEDY, interventions=[make()])


def test_knockouts_that_together_leave_nothing_are_refused(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    halves = [Knockout("*", from_=3, to=[0, 1]), Knockout([1, 2], from_=[3, 4], to=[2, 3], heads=[4])]
    with pytest.raises(ValueError, match="position 3 would attend to nothing at layer 1"):
        lm.generate([PROMPT], GREEDY, interventions=halves)
    lm.generate([PROMPT], GREEDY, interventions=[halves[0], Knockout([1, 2], from_=4, to=[2, 3], heads=[4])])
    with pytest.raises(ValueError, match="position 6 would attend to nothing"):  # mistral's window of 5 holds 2 to 6
        lm_of("mistral").generate([PROMPT], GREEDY, interventions=[Knockout(0, from_=6, to=range(2, 7))])


def test_knockouts_are_equal_by_content_and_declared_with_others(lm_of: Callable[..., LM]) -> None:
    assert Knockout(1, from_=[2], to=3) == Knockout([1], from_=2, to=(3,)) != Knockout(1, from_=2, to=3, heads=0)
    with pytest.raises(ValueError, match="is not one"):
        lm_of("llama").generate([PROMPT], GREEDY, interventions=["pattern.1"])
    (out,) = lm_of("llama").generate(
        [PROMPT], GREEDY, interventions=[Ablate("resid_post.1", torch.ones(72)), Knockout(1, from_=-1, to=0)]
    )
    assert len(out.receipt.interventions) == 2

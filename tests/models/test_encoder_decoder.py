"""T5, BART and Whisper by transformers' classes: tokens, states and ops are those of transformers, in any company."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_encoder_decoder import CONFIGS, POSITIONS, RATE, VOCAB, audio, greedy, modules_of, saved, states_of
from transformers import PreTrainedModel

from pymllm_interp import LM, Ablate, Capture, Patch, SamplingParams, Steer
from pymllm_interp.client.handle import RequestError
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.engine.warm_up import warm_up
from pymllm_interp.interventions import Monitor
from pymllm_interp.runner.stages.declared_stage import DeclaredStage
from pymllm_interp.utils.arguments import PromptError

PAGE = 4
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []
KINDS = ["bart", "t5", "whisper", pytest.param("t5_gated", marks=pytest.mark.slow)]
WAYS = [(kind, "functions") for kind in ("bart", "t5", "whisper")] + [("t5", "tables")]
"""Kinds, and how hooks run (`helpers_declared.WAYS`). On CUDA both are tables."""
TEXT = {"bart": [2], "t5": [0], "t5_gated": [0], "whisper": [2]}
"""The decoder's first tokens."""
SMALL: dict[str, Any] = {
    "dtype": "float32", "device": DEVICE, "page_size": PAGE, "max_model_len": 64, "max_num_tokens": 24,
    "max_running_requests": 4, "kv_cache_tokens": 256, "cross_cache_tokens": 96, "inner_sites": ("cross_attn_out",),
}  # fmt: skip
"""Settings with few pages, so that requests wait and are preempted."""
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
Both = tuple[LM, PreTrainedModel]
Pair = Callable[..., Both]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The engine's model and transformers', of a kind. Hooks run in a way."""
    made: dict[tuple[str, str], Both] = {}

    def load(kind: str, way: str = "functions") -> Both:
        if (kind, way) not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = saved(kind, folder)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DeclaredStage, "has_tables", CUDA or way == "tables")
                made[kind, way] = LM(str(folder), **SMALL), model
        return made[kind, way]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)  # Whisper's convolutions
        yield load
    for lm, _ in made.values():
        lm.shutdown()


def sources(seed: int, *lengths: int, kind: str = "t5") -> list[Any]:
    """Inputs of an encoder: token ids, or audio of 200 samples for each."""
    if kind == "whisper":
        return [
            {"multi_modal_data": {"audio": (audio(seed + i, min(200 * length, 6400)), RATE)}}
            for i, length in enumerate(lengths)
        ]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def engine_of(lm: LM) -> Any:
    return lm.backend.engine


@pytest.mark.parametrize(("kind", "way"), [*WAYS, pytest.param("t5_gated", "functions", marks=pytest.mark.slow)])
def test_generations_are_those_of_transformers(both: Pair, kind: str, way: str) -> None:
    lm, model = both(kind, way)
    given = sources(1, 1, PAGE, PAGE + 1, 33, 16, 7, kind=kind)
    outs = lm.generate(given, GREEDY)
    for source, out in zip(given, outs, strict=True):
        assert out.token_ids == greedy(model, source, TEXT[kind], 14)
    engine_of(lm).scheduler.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_decoder_prompts_of_mixed_lengths_run_in_chunks(both: Pair, kind: str) -> None:
    lm, model = both(kind)
    given, starts = sources(2, 5, 30, 2, 12, kind=kind), [TEXT[kind] + ids for ids in sources(3, 1, 30, 8, 27)]
    prompts = [{"encoder_prompt": source, "decoder_prompt": start} for source, start in zip(given, starts, strict=True)]
    for out, source, start in zip(lm.generate(prompts, GREEDY), given, starts, strict=True):
        assert out.token_ids == greedy(model, source, start, 14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_pool_preempts_and_changes_nothing(both: Pair, kind: str, tmp_path: Path) -> None:
    _, model = both(kind)
    model.save_pretrained(tmp_path)
    lm = LM(str(tmp_path), **{**SMALL, "kv_cache_tokens": 40, "cross_cache_tokens": 64})
    try:
        given = sources(4, 20, 31, 9, 15, kind=kind)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        outs = lm.generate(given, params)
        assert engine_of(lm).scheduler.num_preempted > 0
        for source, out in zip(given, outs, strict=True):
            assert out.token_ids == greedy(model, source, TEXT[kind], 20)
        engine_of(lm).scheduler.check_integrity()
        cross = engine_of(lm).scheduler.kv.cross
        assert cross.num_free_tokens == 64  # all of it was given back
    finally:
        lm.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_engine_holds_no_pages(both: Pair, kind: str) -> None:
    lm, model = both(kind)
    engine, (source,) = engine_of(lm), sources(18, 9, kind=kind)
    cross = engine.scheduler.kv.cross
    lm.engine.call(lambda: warm_up(lm.runner))
    lm.engine.call(engine.scheduler.check_integrity)
    assert cross.num_free_tokens == SMALL["cross_cache_tokens"]
    assert lm.generate([source], GREEDY)[0].token_ids == greedy(model, source, TEXT[kind], 14)


@pytest.mark.parametrize("mixes", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_random_mixes_with_aborts_leave_no_pages(both: Pair, tmp_path: Path, mixes: int) -> None:
    """Requests of few encoder inputs, plain and edited, some of which are cancelled, in an engine with few pages."""
    _, model = both("t5")
    model.save_pretrained(tmp_path)
    rng, vector = random.Random(19), torch.randn(36, generator=torch.Generator().manual_seed(19))
    with LM(str(tmp_path), **{**SMALL, "kv_cache_tokens": 48, "cross_cache_tokens": 64}) as lm:
        scheduler, wanted = engine_of(lm).scheduler, {}
        for _ in range(mixes):
            given = [sources(rng.randrange(20, 24), rng.randrange(1, 33))[0] for _ in range(rng.randrange(1, 7))]
            params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 18), ignore_eos=True)
            ops = [[Steer("encoder.resid_post.0", vector)] if rng.random() < 0.3 else [] for _ in given]
            salt = rng.choice([None, None, "a", "b"])
            handles = [
                lm.submit(each, params, interventions=own, cache_salt=salt)
                for each, own in zip(given, ops, strict=True)
            ]
            for source, own, handle in zip(given, ops, handles, strict=True):
                if rng.random() < 0.3:
                    handle.cancel()
                elif found := handle.result().token_ids:
                    key = tuple(source)
                    if not own and key not in wanted:
                        wanted[key] = greedy(model, source, TEXT["t5"], 18)
                    assert own or found == wanted[key][: len(found)]
        lm.generate([[5, 6]], GREEDY)
        assert scheduler.num_preempted > 0
        lm.engine.call(scheduler.check_integrity)
        assert scheduler.kv.cross.num_free_tokens == 64


def test_samples_follow_their_seed_in_any_company(both: Pair) -> None:
    lm, _ = both("t5")
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=9, n=3)
    (alone,) = lm.generate(sources(5, 9), params)
    together = lm.generate(sources(5, 9) + sources(6, 12, 3), params)
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in together[0].outputs]


@pytest.mark.parametrize(("kind", "way"), [*WAYS, pytest.param("t5_gated", "functions", marks=pytest.mark.slow)])
def test_captures_at_every_site_are_those_of_hooks(both: Pair, kind: str, way: str) -> None:
    lm, model = both(kind, way)
    given, sites = sources(7, 17, 6, kind=kind), list(modules_of(kind, model))
    outs = lm.generate(given, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), capture=sites)
    for source, out in zip(given, outs, strict=True):
        wanted, _ = states_of(kind, model, source, TEXT[kind] + out.token_ids[:-1])
        for site in sites:
            scale = wanted[site].abs().max()
            torch.testing.assert_close(out.activations[site] / scale, wanted[site] / scale, rtol=0, atol=2e-5)
            if site.startswith("encoder."):
                assert out.activations.token_ids[site].tolist() == (source if kind != "whisper" else [0] * POSITIONS)
    text = repr(outs[0].activations)
    assert "encoder.resid_post.{0" in text and "cross_attn_out.{0" in text


@pytest.mark.parametrize(("kind", "way"), [*WAYS, pytest.param("t5_gated", "functions", marks=pytest.mark.slow)])
def test_ops_are_those_of_edited_hooks(both: Pair, kind: str, way: str) -> None:
    lm, model = both(kind, way)
    generator = torch.Generator().manual_seed(8)
    first, second, rows = (torch.randn(shape, generator=generator) for shape in ((36,), (36,), (2, 36)))

    def steered(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        state[0, [1, 4]] += 3 * first
        return state

    def patched(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        state[0, :2] = rows
        return state

    unit = second / second.norm()
    edits = {
        "encoder.resid_post.0": steered,
        "encoder.mlp_out.1": patched,
        "cross_attn_out.1": lambda state: state - (state @ unit)[..., None] * unit,
    }
    ops = [
        Steer("encoder.resid_post.0", first, scale=3, positions=[1, 4]),
        Patch("encoder.mlp_out.1", rows, positions=[0, 1]),
        Ablate("cross_attn_out.1", second),
    ]
    sites = ["encoder.resid_post.1", "resid_post.1", "logits"]
    given = sources(9, 8, 19, kind=kind)
    outs = lm.generate(given, GREEDY, interventions=[ops, []], capture=sites)
    plain = lm.generate(given, GREEDY)
    assert outs[1].token_ids == plain[1].token_ids  # its neighbour's ops act on the neighbour only
    wanted, logits = states_of(kind, model, given[0], TEXT[kind] + outs[0].token_ids[:-1], edits)
    for site in sites[:2]:
        scale = wanted[site].abs().max()
        torch.testing.assert_close(outs[0].activations[site] / scale, wanted[site] / scale, rtol=0, atol=2e-5)
    assert outs[0].token_ids == logits.argmax(-1).tolist()
    applied = {each.site: each.prompt_rows for each in outs[0].receipt.interventions}
    assert applied["encoder.resid_post.0"] == 2 and applied["encoder.mlp_out.1"] == 2


def test_a_preempted_request_captures_and_edits_its_encoder_once(both: Pair, tmp_path: Path) -> None:
    _, model = both("t5")
    model.save_pretrained(tmp_path)
    lm = LM(str(tmp_path), **{**SMALL, "kv_cache_tokens": 40})
    try:
        given, vector = sources(10, 11, 12, 13, 14), torch.randn(36)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        how: Any = {"interventions": [Steer("encoder.resid_post.0", vector)], "capture": ["encoder.final_norm"]}
        outs = lm.generate(given, params, **how)
        assert engine_of(lm).scheduler.num_preempted > 0
        for source, out in zip(given, outs, strict=True):
            (single,) = lm.generate([source], params, **how)
            assert single.token_ids == out.token_ids
            site = "encoder.final_norm"
            torch.testing.assert_close(out.activations[site], single.activations[site], rtol=1e-5, atol=1e-5)
            assert out.receipt.interventions == single.receipt.interventions
    finally:
        lm.shutdown()


def test_decoder_prompts_of_different_sources_share_no_kv(both: Pair) -> None:
    lm, model = both("bart")
    one, other = sources(11, 9, 9)
    start = TEXT["bart"] + sources(12, 20)[0]
    prompts = [{"encoder_prompt": source, "decoder_prompt": start} for source in (one, other, one)]
    outs = [lm.generate([prompt], GREEDY)[0] for prompt in prompts]
    for source, out in zip((one, other, one), outs, strict=True):
        assert out.token_ids == greedy(model, source, start, 14)
    assert [out.num_cached_tokens for out in outs] == [0, 0, 20]
    steered = lm.generate([prompts[0]], GREEDY, interventions=[Steer("encoder.resid_post.0", torch.randn(36) * 5)])[0]
    assert steered.num_cached_tokens == 0
    assert lm.generate([prompts[0]], GREEDY)[0].token_ids == outs[0].token_ids


def test_equal_sources_share_one_run_of_the_encoder(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, _ = both("t5")
    ran: list[int] = []
    model = engine_of(lm).runner.get_model()
    encoded = model._encoded
    monkeypatch.setattr(model, "_encoded", lambda run: ran.append(run.input.length) or encoded(run))
    (source, other), params = sources(13, 21, 5), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outs = lm.generate([source, other, source, source], params)
    assert sorted(ran) == [5, 21]
    assert outs[0].token_ids == outs[2].token_ids == outs[3].token_ids


def test_a_failed_encoder_leaves_no_pages(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, model = both("t5")
    served, runs = engine_of(lm).runner.get_model(), [0]
    encoded = served._encoded

    def fails_once(run: Any) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 2:
            raise RuntimeError("no encoder today")
        return encoded(run)

    monkeypatch.setattr(served, "_encoded", fails_once)
    given, failed = sources(20, 12, 7, 9, 12), 0
    handles = [lm.submit(each, GREEDY, capture=[] if i else ["encoder.final_norm"]) for i, each in enumerate(given)]
    for each, handle in zip(given, handles, strict=True):
        try:
            assert handle.result().token_ids == greedy(model, each, TEXT["t5"], 14)
        except RequestError as error:
            assert "no encoder today" in str(error)
            failed += 1
    assert 0 < failed <= len(given)
    assert lm.generate(given, GREEDY)[1].token_ids == greedy(model, given[1], TEXT["t5"], 14)
    lm.engine.call(engine_of(lm).scheduler.check_integrity)
    assert engine_of(lm).scheduler.kv.cross.num_free_tokens == SMALL["cross_cache_tokens"]


def test_an_edited_model_encodes_anew(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, _ = both("t5")
    ran, model = list[int](), engine_of(lm).runner.get_model()
    encoded = model._encoded
    monkeypatch.setattr(model, "_encoded", lambda run: ran.append(run.input.length) or encoded(run))
    (source,) = sources(21, 11)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first = lm.submit(source, params)
    while not ran:
        time.sleep(0.001)
    lm.engine.call(engine_of(lm).scheduler.kv.reset_prefix_cache)
    second = lm.submit(source, params)
    assert first.result().token_ids == second.result().token_ids and len(ran) == 2
    lm.engine.call(engine_of(lm).scheduler.check_integrity)


@pytest.mark.parametrize("kind", KINDS)
def test_traces_read_and_edit_both_sides(both: Pair, kind: str) -> None:
    lm, model = both(kind)
    (source,), vector = sources(14, 13, kind=kind), torch.randn(36, generator=torch.Generator().manual_seed(15))
    with lm.trace(source):
        root: Any = lm if kind.startswith("t5") else lm.model
        encoder = root.encoder.block if kind.startswith("t5") else root.encoder.layers
        decoder = root.decoder.block if kind.startswith("t5") else root.decoder.layers
        out = encoder[0].output
        (out[0] if isinstance(out, tuple) else out)[:, 2] += vector.to(DEVICE)
        after = encoder[1].output.save()
        last = decoder[1].output.save()
        logits = (lm.proj_out if kind == "whisper" else lm.lm_head).output.save()

    def edited(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        state[0, 2] += vector
        return state

    wanted, of_transformers = states_of(kind, model, source, TEXT[kind], {"encoder.resid_post.0": edited})
    for got, site in ((after, "encoder.resid_post.1"), (last, "resid_post.1")):
        state = got[0] if isinstance(got, tuple) else got
        scale = wanted[site].abs().max()
        torch.testing.assert_close(state[0].cpu() / scale, wanted[site] / scale, rtol=0, atol=2e-5)
    bias = getattr(model, "final_logits_bias", torch.zeros(1, 1))
    torch.testing.assert_close(logits[0].cpu() + bias, of_transformers, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_ops_of_an_encoder_act_beside_blocks_of_the_decoder(both: Callable[[str], Both], kind: str) -> None:
    lm, _ = both(kind)
    (source,), how = sources(18, 9), {"interventions": [Steer("encoder.resid_post.0", torch.ones(36), scale=4)]}
    (wanted,), (plain,) = (lm.forward([source], **own) for own in (how, {}))
    with lm.trace(source, **how):
        logits = lm.lm_head.output.save()
    torch.testing.assert_close(logits[0], wanted.logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wanted.logits, plain.logits, atol=1e-3)


def test_two_traced_generations_see_their_own_encoders(both: Pair) -> None:
    lm, model = both("t5")
    first, second = sources(16, 7, 18)
    with lm.generate(max_new_tokens=5, ignore_eos=True) as tracer:
        with tracer.invoke(first):
            one = lm.encoder.block[1].output[0].save()
        with tracer.invoke(second):
            two = lm.encoder.block[1].output[0].save()
    for source, state in ((first, one), (second, two)):
        wanted, _ = states_of("t5", model, source, [0])
        scale = wanted["encoder.resid_post.1"].abs().max()
        torch.testing.assert_close(state[0].cpu() / scale, wanted["encoder.resid_post.1"] / scale, rtol=0, atol=2e-5)


def test_gradients_reach_the_encoder(both: Pair) -> None:
    lm, model = both("t5")
    (source,) = sources(17, 9)
    with lm.trace(source):
        state = lm.encoder.block[0].output[0]
        state.requires_grad_()
        logits = lm.lm_head.output
        with logits[0, -1].sum().backward():
            grad = state.grad.save()
    ids = torch.tensor([source])
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> Any:
        first = output[0].detach().requires_grad_()
        kept.append(first)
        return (first, *output[1:])

    handle = model.get_submodule("encoder.block.0").register_forward_hook(keep)
    with torch.enable_grad():
        model(input_ids=ids, decoder_input_ids=torch.tensor([[0]]), use_cache=False).logits[0, -1].sum().backward()
    handle.remove()
    assert kept[0].grad is not None
    scale = kept[0].grad.abs().max()
    torch.testing.assert_close(grad.cpu() / scale, kept[0].grad / scale, rtol=0, atol=1e-4)
    model.zero_grad()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"decoder_prompt": [2, 5]}, "no encoder_prompt"),
        ({"encoder_prompt": [], "decoder_prompt": [2]}, "empty"),
        ({"encoder_prompt": [5, VOCAB]}, "vocabulary"),
        ({"encoder_prompt": [5], "decoder_prompt": [VOCAB + 3]}, "vocabulary"),
        ({"encoder_prompt": [5], "decoder_prompt": []}, "empty"),
        ({"encoder_prompt": [5], "images": 1}, "images"),
        ({"encoder_prompt": [5] * 65}, "65 positions for the encoder"),
        ({"encoder_prompt": {"prompt_embeds": torch.zeros(2, 36)}}, "embeddings"),
        ({"encoder_prompt": "text"}, "no tokenizer"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(both: Pair, prompt: Any, message: str) -> None:
    lm, _ = both("bart")
    with pytest.raises(PromptError, match=message):
        lm.generate([prompt], GREEDY)
    assert lm.generate([[5, 6]], GREEDY)[0].token_ids


@pytest.mark.parametrize("site", ["encoder.resid_post.3", "encoder.pattern.0", "encoder.logits", "encoder.router.0"])
def test_sites_that_the_encoder_lacks_are_refused(both: Pair, site: str) -> None:
    lm, _ = both("bart")
    with pytest.raises(ValueError, match="encoder"):
        lm.generate([[5, 6]], GREEDY, capture=[Capture(site)])


def test_nothing_is_pooled(both: Pair) -> None:
    lm, _ = both("t5")
    assert lm.backend.facts.tasks == ("generate",)
    for call in (lm.encode, lambda text: lm.score(text, [text]), lm.classify):
        with pytest.raises(PromptError, match=r"encoder-decoder model|head"):
            call([5, 6])  # pyright: ignore[reportArgumentType]


def test_a_model_without_an_encoder_says_so(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    with pytest.raises(PromptError, match="no encoder"):
        lm.generate([{"encoder_prompt": [5], "decoder_prompt": [6]}])
    with pytest.raises(ValueError, match="site of an encoder"):
        lm.generate([[5]], capture=["encoder.resid_post.0"])
    with pytest.raises(ValueError, match="cross_attn_out"):
        lm.generate([[5]], capture=["cross_attn_out.0"])


def test_adapters_and_knockouts_are_refused_by_name(both: Pair, tmp_path: Path) -> None:
    lm, _ = both("t5")
    with pytest.raises(ValueError, match="adapters are not supported in encoder-decoder models"):
        lm.adapters.load("one", str(tmp_path))
    with pytest.raises(ValueError, match="only ops and captures act at the sites of an encoder"):
        lm.generate([[5, 6]], GREEDY, monitors=[Monitor("encoder.resid_post.0", torch.randn(36), 0.0)])
    with pytest.raises(ValueError, match="pattern"):
        lm.generate([[5, 6]], GREEDY, capture=["pattern.0"])


def test_drafts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="drafts are not supported"):
        LM(
            hf_config=CONFIGS["t5"](),
            load_format="dummy",
            speculative={"method": "ngram", "num_speculative_tokens": 2},
            **SMALL,
        )

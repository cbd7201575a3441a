"""Requests with hooks in the vision tower among others: isolation, chunks, preemption, the prefix cache, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_declared import lms
from helpers_images import inputs_of, prompt_of
from torch import Tensor

from pymllm_interp import LM, Capture, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.client.handle import RequestError
from pymllm_interp.config import EngineTuning
from pymllm_interp.core.image_input import ImageInput
from pymllm_interp.interventions import Monitor
from pymllm_interp.models.vision.tower import VisionTower
from pymllm_interp.utils.arguments import PromptError

Folders = Callable[[str], Path]
FAMILIES = ["qwen2_5_vl", pytest.param("llava", marks=pytest.mark.slow), "gemma3"]
GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []
GREEDY = SamplingParams(temperature=0, max_tokens=5)
WIDTH = 32


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def lm(family: str, vision_folder: Folders) -> Iterator[LM]:
    with LM(vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024) as found:
        yield found


def computed(lm: LM) -> int:
    """Images that the cache was given."""
    vision = lm.runner.step_inputs.vision
    assert vision is not None
    return vision.cache.num_computed


def layers_of(lm: LM) -> Any:
    """The tower's list of layers, under transformers' names."""
    found: Any = lm
    assert lm.model_spec.vision is not None
    for name in lm.model_spec.vision.family.layers.split("."):
        found = getattr(found, name)
    return found


STEERS = [Steer("vision.resid_post.0", noise(WIDTH), scale=6), Scale("vision.out", -1.0, positions="image[0]")]
HOOKS: list[tuple[list[Any], list[Any]]] = [
    ([], []), (STEERS[:1], []), (STEERS[1:], ["vision.out"]), ([], ["vision.resid_post.1", "resid_post.1"]),
    (STEERS, ["vision.mlp_out.*", Capture("vision.attn_out.0", positions="image[-1]")]), ([], []),
]  # fmt: skip
"""Interventions and captures of requests."""


def run(lm: LM, prompt: RenderedPrompt, hooks: tuple[list[Any], list[Any]], **params: Any) -> Any:
    return lm.generate([prompt], replace(GREEDY, **params), interventions=hooks[0], capture=hooks[1])[0]


def same(found: Any, wanted: Any) -> None:
    assert found.token_ids == wanted.token_ids
    assert [*found.activations] == [*wanted.activations]
    for site in wanted.activations:
        torch.testing.assert_close(found.activations[site], wanted.activations[site], rtol=1e-4, atol=1e-4)
        assert found.activations.token_ids[site].equal(wanted.activations.token_ids[site])
    if wanted.receipt is not None:
        assert found.receipt.interventions == wanted.receipt.interventions


@pytest.mark.thin(4)
@pytest.mark.parametrize("small", [False, True])
def test_requests_over_one_image_do_not_see_each_other(family: str, vision_folder: Folders, small: bool) -> None:
    """All kinds of hooks over one image in one step, alone and together; in chunks of 7 tokens with preemption, too."""
    prompts = [prompt_of(family, [i + 1], 0, [2, 3], 1, [i + 1] * (1 + i % 3)) for i in range(len(HOOKS))]
    longest = max(len(prompt.token_ids) for prompt in prompts) + 17
    size = {"max_num_tokens": 7, "kv_cache_tokens": longest * 3 // 2} if small else {"kv_cache_tokens": 1024}
    with LM(vision_folder(family), device="cpu", dtype="float32", page_size=4, **size) as lm:

        def result(i: int, fresh: bool = True) -> Any:
            return run(lm, prompts[i], HOOKS[i], max_tokens=16, skip_reading_prefix_cache=fresh)

        each = range(len(HOOKS))
        alone = [result(i) for i in each]
        for fresh in (False, True):
            with ThreadPoolExecutor(len(each)) as threads:
                found = list(threads.map(lambda i: result(i, fresh), each))  # noqa: B023
            for out, wanted in zip(found, alone, strict=True):
                same(out, wanted)
        assert (lm.engine.stats()["preempted"] > 0) == small
        assert computed(lm) == 2
        lm.engine.call(lm.engine.scheduler.check_integrity)
        vision: Any = lm.runner.step_inputs.vision
        run(lm, RenderedPrompt(None, [1], None), HOOKS[0])
        assert not vision._own and not vision._hooked


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=GPU or ([] if way == "graphs" else pytest.mark.slow)) for way in ("tables", "graphs")],
)
def test_hooks_in_the_tower_with_kernels_and_captured_passes(vision_folder: Folders, way: str) -> None:
    """Requests with tables, captured passes and segments are those of functions, ops, captures and blocks."""
    family, texts = "qwen2_5_vl", ([1], [2], [3], [4, 5])
    prompts = [prompt_of(family, text, 0, [2, 3], 1, text) for text in texts]
    steer = Steer("resid_post.1", noise(WIDTH, seed=4))
    hooks = [HOOKS[4], ([*STEERS, steer], ["vision.out", "resid_post.0"]), HOOKS[0], HOOKS[3]]
    found = list[list[Any]]()
    for own in ("functions", way):
        with lms(own, vision_folder) as load:
            lm = load(family, page_size=4, kv_cache_tokens=1024)
            handles = [
                lm.submit(prompt, GREEDY, interventions=each[0], capture=each[1])
                for prompt, each in zip(prompts, hooks, strict=True)
            ]
            with lm.generate(prompts[0], max_new_tokens=3, temperature=0):
                layers_of(lm)[0].output[:] *= 2
                state = layers_of(lm)[1].output.save()
                logits = lm.lm_head.output.save()
            found.append([state.cpu(), logits.cpu(), *(handle.result() for handle in handles)])
    for one, other in zip(*found, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        else:
            same(other, one)


def test_the_prefix_key_has_the_ops_of_the_tower(family: str, lm: LM) -> None:
    """KV behind an edited image is for requests with the same edits. A captured tower runs though its prompt is cached."""
    prompt = prompt_of(family, [1, 2, 3, 4, 5], 0, [6, 7, 8, 9])
    most, cached = (len(prompt.token_ids) - 1) // 4 * 4, list[int]()
    fresh = [run(lm, prompt, hooks, skip_reading_prefix_cache=True) for hooks in HOOKS[:5]]
    for wanted, hooks in [*zip(fresh, HOOKS, strict=False)] * 2:
        out = run(lm, prompt, hooks)
        same(out, wanted)
        cached.append(out.num_cached_tokens)
    # Captures at resid_post.1 compute the prompt anew.
    assert cached == [most, most, most, 0, most, most, most, most, 0, most]
    other = Steer("vision.resid_post.0", noise(WIDTH), scale=6, positions=[1])
    assert run(lm, prompt, ([other], [])).num_cached_tokens == 4
    moved = Steer("vision.resid_post.1", noise(WIDTH), scale=6)
    assert run(lm, prompt, ([moved], [])).num_cached_tokens == 4
    assert fresh[1].token_ids != fresh[0].token_ids or fresh[2].token_ids != fresh[0].token_ids


def test_positions_are_rows_of_an_image(family: str, lm: LM) -> None:
    prompt = prompt_of(family, [1], 0, [2], 1, [3])
    (whole,) = lm.forward([prompt], capture=["vision.resid_post.1", "vision.out"])
    ids = whole.activations.token_ids
    with pytest.raises(KeyError, match=r"vision.resid_post.-1' was not captured"):
        whole.activations["vision.resid_post.-1"]  # the layers are the tower's, not the language model's
    some = [Capture(site, positions="image[1]") for site in ("vision.resid_post.1", "vision.out")]
    (out,) = lm.forward([prompt], capture=some)
    for site in ("vision.resid_post.1", "vision.out"):
        rows = (ids[site] == 1).nonzero()[:, 0]
        assert out.activations.positions[site].equal(rows)
        assert out.activations[site].equal(whole.activations[site][rows])
    steer = Steer("vision.out", noise(WIDTH), positions="image[1]", when=Gate(noise(WIDTH, seed=3), 0.0))
    (gated,) = lm.forward([prompt], interventions=[steer], capture=["vision.out"])
    changed = (gated.activations["vision.out"] != whole.activations["vision.out"]).any(-1)
    rows = ids["vision.out"] == 1
    wanted = rows & (whole.activations["vision.out"] @ noise(WIDTH, seed=3) > 0)
    assert changed.equal(wanted) and gated.receipt.interventions[0].gate_fires == int(wanted.sum())


REFUSED: list[tuple[Any, Any, str]] = [
    ([Steer("vision.resid_post.3", noise(WIDTH))], [], r"at the sites of a vision tower: .*there is no layer 3"),
    ([], ["vision.attn_out.7"], "there is no layer 7"),
    ([Steer("vision.out", noise(WIDTH), positions=[4096])], [], "4096"),
    ([], [Capture("vision.resid_post.0", positions=[-9999])], "-9999"),
    ([], [Capture("vision.resid_post.0", positions="image[2]")], "2 images"),
    ([Steer("vision.mlp_out.0", noise(WIDTH + 1))], [], f"{WIDTH + 1} values"),
    ([Patch("vision.out", noise(3, WIDTH), positions=[0, 1])], [], "3"),
    ([Monitor("vision.resid_post.0", noise(WIDTH), 0.0)], [], "only ops and captures act at the sites of a vision tower"),
    ([Steer("vision.out", noise(WIDTH), when=Gate(noise(WIDTH), 0.0, site="vision.resid_post.0"))], [], "reads the op's site"),
    ([Steer("resid_post.0", noise(WIDTH), when=Gate(noise(WIDTH), 0.0, site="vision.out"))], [], "vision.out"),
    ([], [Capture("vision.out", stream=True)], "do not stream"),
]  # fmt: skip


def test_what_the_tower_cannot_do_is_refused_before_scheduling(
    vision_folder: Folders, lm_of: Callable[..., LM]
) -> None:
    with LM(vision_folder("qwen2_5_vl"), device="cpu", dtype="float32") as lm:
        prompt = prompt_of("qwen2_5_vl", [1], 0, [2], 1)
        for interventions, captures, message in REFUSED:
            with pytest.raises(ValueError, match=message):
                lm.generate([prompt], GREEDY, interventions=interventions, capture=captures)
        for site in ("vision.pattern.0", "vision.logits", "vision.resid_post", "vision.out.0", "vision.q.1"):
            with pytest.raises(ValueError, match=r"vision"):
                lm.generate([prompt], GREEDY, capture=[site])
        for hooks in HOOKS[1:4]:
            with pytest.raises(PromptError, match="the prompt has no image"):
                run(lm, RenderedPrompt(None, [1, 2, 3], None), hooks)
        with pytest.raises(ValueError, match="vision tower"):
            lm.run_with_cache(prompt, names_filter=["vision.resid_post.0"])
        assert not lm.runner.partition.counts  # no step was run
        assert run(lm, prompt, HOOKS[0]).token_ids
    text = lm_of("llama")
    with pytest.raises(ValueError, match="site of a vision tower"):
        text.generate([[5]], GREEDY, capture=["vision.resid_post.0"])
    with pytest.raises(ValueError, match="site of a vision tower"):
        text.generate([[5]], GREEDY, interventions=[Steer("vision.out", torch.ones(text.hidden_size))])


def test_an_unreadable_image_ends_its_own_request(family: str, lm: LM) -> None:
    """Requests with ops, captures and blocks in the tower go on beside it."""
    good = prompt_of(family, [1, 2], 0, [3])
    (image,) = good.images
    cut = {name: x[..., :-1] if name == "pixel_values" else x for name, x in image.features.items()}
    few = ImageInput(image.positions[:-1], image.features, b"other")
    bad = [RenderedPrompt(None, good.token_ids, None, (own,)) for own in (ImageInput.of(image.positions, cut), few)]
    wanted = run(lm, good, HOOKS[4])
    for prompt in bad:
        handles = [
            lm.submit(each, GREEDY, interventions=HOOKS[4][0], capture=HOOKS[4][1])
            for each in (prompt, good, prompt, good)
        ]
        for handle in handles[::2]:
            with pytest.raises(RequestError, match=r"ImageError: .*(cannot read|placeholders)"):
                handle.result()
        for handle in handles[1::2]:
            same(handle.result(), wanted)


def test_hooked_images_are_computed_in_parts(
    family: str, vision_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the tower has no more tokens than the bound, or one image; values, counts and rows are those of one for all."""
    prompt, calls = prompt_of(family, [1], 0, [2], 1, [3], 0, [4], 2), list[int]()
    real, found = VisionTower._states, list[Any]()

    def counted(self: VisionTower, images: Any, *rest: Any) -> list[Tensor]:
        calls.append(sum(image.num_tokens for image in images))
        return real(self, images, *rest)

    some = Steer("vision.resid_post.0", noise(WIDTH, seed=5), positions=["image[1]", "image[-1]"])
    when = Scale("vision.out", 3.0, when=Gate(noise(WIDTH, seed=3), 0.0))
    hooks = [*STEERS, some, when], ["vision.attn_out.*", "vision.resid_post.*", "vision.out", "resid_post.1"]
    bounds, sizes = (None, 7), [image.num_tokens for image in prompt.images]
    for most in bounds:
        tuning = EngineTuning(max_num_encoder_tokens=most)
        with LM(
            vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024, tuning=tuning
        ) as lm, monkeypatch.context() as patch:  # fmt: skip
            patch.setattr(VisionTower, "_states", counted)
            calls.clear()
            found.append(run(lm, prompt, hooks))
            if most is None:
                assert calls == [sum(sizes)]
                continue
            assert sum(calls) == sum(sizes) and len(calls) > 1 and all(size <= most or size in sizes for size in calls)
            with pytest.raises(
                Exception, match=r"a block in the vision tower sees the 4 images .*max_num_encoder_tokens"
            ):
                with lm.trace(prompt):
                    layers_of(lm)[0].output.save()
            with lm.trace(prompt_of(family, [1], 0)):
                layers_of(lm)[0].output.save()
    same(found[1], found[0])


def test_an_error_of_an_op_in_the_tower_is_not_the_images(lm: LM) -> None:
    @dataclass(frozen=True, eq=False)
    class Broken(Scale):
        """Fails."""

        def act(self, *given: Any) -> Tensor:
            raise RuntimeError("an op of mine")

    prompt = prompt_of("qwen2_5_vl" if lm.model_spec.mrope_merge else "gemma3", [1, 2], 0, [3])
    wanted = run(lm, prompt, HOOKS[4])
    for site in ("vision.resid_post.1", "vision.out"):
        handle = lm.submit(prompt, GREEDY, interventions=HOOKS[4][0], capture=HOOKS[4][1])
        with pytest.raises(RequestError, match="an op in the vision tower failed: RuntimeError: an op of mine"):
            run(lm, prompt, ([Broken(site, 2.0)], []))
        same(handle.result(), wanted)


# -- blocks ------------------------------------------------------------------------------------------


def test_blocks_of_several_requests_run_the_tower_each(family: str, lm: LM) -> None:
    """Two that edit, one that reads the language model only, a declared op beside a block, over the same images."""
    prompts = [
        prompt_of(family, [1, 2], 0, [3, 4], 1),
        prompt_of(family, [1, 2, 3], 1, [4]),
        prompt_of(family, [9], 0, [4]),
    ]
    plain = lm.forward(prompts, capture=["vision.resid_post.1", "resid_post.1"])
    lm.forward(prompts)
    before = computed(lm)
    path = lm.model_spec.family.layers.removesuffix(".layers").split(".")[-1]
    with lm.trace() as tracer:
        with tracer.invoke(prompts[0]):
            layers_of(lm)[0].output[:] = 0
            one = layers_of(lm)[1].output.save()
            first = lm.lm_head.output.save()
        with tracer.invoke(prompts[1]):
            two = layers_of(lm)[1].output.save()
            layers_of(lm)[1].output = two * 3
            second = lm.lm_head.output.save()
        with tracer.invoke(prompts[2]):
            three = getattr(lm.model, path).layers[1].output.save()
    assert computed(lm) == before
    torch.testing.assert_close(
        two.reshape(-1, WIDTH), plain[1].activations["vision.resid_post.1"], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(three[0], plain[2].activations["resid_post.1"], rtol=1e-4, atol=1e-4)
    zero = [Scale("vision.resid_post.0", 0.0)], ["vision.resid_post.1"]
    (out,) = lm.forward([prompts[0]], interventions=zero[0], capture=zero[1])
    torch.testing.assert_close(one.reshape(-1, WIDTH), out.activations["vision.resid_post.1"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first[0], out.logits, rtol=1e-4, atol=1e-4)
    (out,) = lm.forward([prompts[1]], interventions=[Scale("vision.resid_post.1", 3.0)])
    torch.testing.assert_close(second[0], out.logits, rtol=1e-4, atol=1e-4)
    with lm.trace(prompts[0], interventions=zero[0]):  # ops come before a block
        zeros = layers_of(lm)[0].output.save()
    assert not zeros.any()
    with lm.trace(prompts[0], interventions=zero[0]):  # and act where blocks read the language model only
        logits = lm.lm_head.output.save()
    torch.testing.assert_close(logits, first, rtol=1e-4, atol=1e-4)


def test_a_block_that_fails_in_the_tower_ends_its_own_request(family: str, lm: LM) -> None:
    prompt = prompt_of(family, [1, 2], 0, [3])
    wanted = run(lm, prompt, HOOKS[4])
    handle = lm.submit(prompt, GREEDY, interventions=HOOKS[4][0], capture=HOOKS[4][1])
    with pytest.raises(Exception, match="expected a tensor"), lm.trace(prompt):
        layers_of(lm)[0].output = torch.zeros(3, 3)
    with pytest.raises(ZeroDivisionError), lm.generate(prompt, max_new_tokens=3):
        layers_of(lm)[0].output.save()
        1 / 0  # noqa: B018
    same(handle.result(), wanted)
    same(run(lm, prompt, HOOKS[4]), wanted)


def test_a_generation_runs_the_tower_in_its_first_pass(family: str, lm: LM) -> None:
    prompt, text = prompt_of(family, [1, 2], 0, [3]), RenderedPrompt(None, [1, 2, 3], None)
    with lm.generate(prompt, max_new_tokens=4, temperature=0) as tracer:
        state = layers_of(lm)[1].output.save()
        tokens = list().save()
        for _ in tracer.iter[:4]:
            tokens.append(lm.samples.clone())
    (plain,) = lm.generate([prompt], replace(GREEDY, max_tokens=4), capture=["vision.resid_post.1"])
    torch.testing.assert_close(state.reshape(-1, WIDTH), plain.activations["vision.resid_post.1"], rtol=1e-4, atol=1e-4)
    assert [int(token) for token in tokens] == plain.token_ids
    with pytest.raises(Exception, match="the vision tower runs once, in the first pass"):
        with lm.generate(prompt, max_new_tokens=4) as tracer:
            for _ in tracer.iter[:3]:
                layers_of(lm)[0].output.save()
    with pytest.raises(Exception, match="the vision tower runs once, in the first pass"), lm.trace(text):
        layers_of(lm)[0].output.save()
    with pytest.raises(Exception, match="give each prompt an invoke of its own"), lm.trace([prompt, prompt]):
        layers_of(lm)[0].output.save()


def test_a_cache_of_all_modules_has_the_tower(family: str, lm: LM) -> None:
    prompt = prompt_of(family, [1, 2], 0, [3])
    with lm.trace(prompt) as tracer:
        cache = tracer.cache().save()
    assert lm.model_spec.vision is not None
    path = f"model.{lm.model_spec.vision.family.layers}.1"
    (out,) = lm.forward([prompt], capture=["vision.resid_post.1"])
    torch.testing.assert_close(
        cache[path].output.reshape(-1, WIDTH), out.activations["vision.resid_post.1"], rtol=1e-4, atol=1e-4
    )
    with lm.trace([RenderedPrompt(None, [1, 2, 3], None), RenderedPrompt(None, [1, 2, 3, 4], None)]) as tracer:
        cache = tracer.cache().save()
    assert not [key for key in cache.keys() if key.startswith(path)]


def test_gradients_reach_the_tower(family: str, lm: LM, vision_oracle: Callable[[str], Any]) -> None:
    prompt, model = prompt_of(family, [1, 2], 0, [3]), vision_oracle(family)
    with lm.trace(prompt):
        state = layers_of(lm)[0].output
        logits = lm.lm_head.output
        with logits[0, -1].sum().backward():
            grad = state.grad.save()
    kept = list[Tensor]()

    def keep(module: Any, args: Any, output: Any) -> Any:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    assert lm.model_spec.vision is not None
    handle = model.get_submodule(f"{lm.model_spec.vision.family.layers}.0").register_forward_hook(keep, prepend=True)
    with torch.enable_grad():
        model.model.rope_deltas = None
        model(**inputs_of(family, prompt), use_cache=False).logits[0, -1].sum().backward()
    handle.remove()
    model.zero_grad()
    wanted = kept[0].grad
    assert wanted is not None
    scale = wanted.abs().max()
    torch.testing.assert_close(grad / scale, wanted / scale, rtol=0, atol=1e-4)

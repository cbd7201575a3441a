"""Hooks of requests with images beside others: rings, chunks, small pools, preemption, prefix hits. transformers is the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers_declared import INNER, SITES, hooked, lms, ops_at
from helpers_images import PICTURES, prompt_of, random_prompt, reference
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, Patch, SamplingParams
from pymllm_interp.captures import Site
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.config import EngineTuning
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.positions import located, selected, windows_of
from pymllm_interp.interventions import Generated, Knockout
from pymllm_interp.utils.arguments import PromptError

Folders = Callable[[str], Path]
Oracle = Callable[[str], PreTrainedModel]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
POSITION_BYTES = 3 * 32 * 4
"""Of three layers' states in the ring."""


def states_of(family: str, model: PreTrainedModel, prompt: RenderedPrompt, tokens: list[int]) -> list[torch.Tensor]:
    """transformers' hidden states of a prompt with its new tokens, [positions, width] a layer."""
    whole = prompt._replace(token_ids=[*prompt.token_ids, *tokens[:-1]])
    return [state[0] for state in reference(family, model, whole, output_hidden_states=True).hidden_states]


# -- Gemma 3's spans and the ring ----------------------------------------------------------------


@pytest.mark.parametrize("positions", [5, 16])
def test_a_ring_cuts_no_image(positions: int, vision_folder: Folders, vision_oracle: Oracle) -> None:
    """A chunk may end anywhere between images, and never in one: the ring of 5 positions holds one image of 4 and little else."""
    prompts = [random_prompt("gemma3", seed) for seed in range(4)]
    with lms("tables", vision_folder) as load:
        lm = load("gemma3", page_size=4, max_num_tokens=11, capture_ring_bytes=positions * POSITION_BYTES)
        with ThreadPoolExecutor(3) as threads:
            outs = list(threads.map(lambda p: lm.generate([p], GREEDY, capture=["resid_post.*"])[0], prompts))
        lm.engine.call(lm.engine.scheduler.check_integrity)
    for prompt, out in zip(prompts, outs, strict=True):
        wanted = states_of("gemma3", vision_oracle("gemma3"), prompt, out.token_ids)
        for layer in range(2):
            torch.testing.assert_close(out.activations[f"resid_post.{layer}"], wanted[layer + 1], **CLOSE)


def test_a_ring_without_room_for_an_image_refuses_it_by_name(vision_folder: Folders) -> None:
    prompt, text = prompt_of("gemma3", [1, 2], 0, [3]), [5, 6, 7, 8, 9, 10]
    with lms("tables", vision_folder) as load:
        lm = load("gemma3", capture_ring_bytes=3 * POSITION_BYTES)
        for _ in range(2):
            lm.generate([text], GREEDY, capture=["resid_post.*"])
            with pytest.raises(PromptError, match="in one step, and the ring that they leave the device through"):
                lm.generate([prompt], GREEDY, capture=["resid_post.*"])
        (out,) = lm.generate([prompt], GREEDY, capture=[Capture("resid_post.*", "text")])
    assert len(out.activations["resid_post.1"]) == len(prompt.token_ids) - 4


# -- each op at each site ------------------------------------------------------------------------


def hooked_run(
    family: str, model: PreTrainedModel, prompt: RenderedPrompt, specs: list[Any], count: int
) -> tuple[list[int], torch.Tensor, dict[str, torch.Tensor]]:
    """Greedy tokens of transformers under hooks, their logits [tokens, vocab], and the states of some sites.

    Each token is a pass over the whole sequence. Modules of the tower have no hooks.
    """
    length, tokens, rows = len(prompt.token_ids), list[int](), list[torch.Tensor]()
    images = [image.positions.tolist() for image in prompt.images]
    specs = [spec.located(images, length) for spec in specs]
    found: dict[str, torch.Tensor] = {}
    info = ModelSpec.of(model.config, torch.float32)
    for _ in range(count):
        whole = prompt._replace(token_ids=[*prompt.token_ids, *tokens])
        now = torch.arange(len(whole.token_ids))
        with hooked(model, specs, length, lambda now=now: now):
            handles = [_keep(model, info, site, found) for site in READ]
            logits = reference(family, model, whole).logits[0, -1]
            for handle in handles:
                handle.remove()
        rows.append(logits)
        tokens.append(int(logits.argmax()))
        if tokens[-1] == PICTURES[family].pad:
            break  # a generated placeholder, which transformers would look for an image of
    return tokens, torch.stack(rows), found


def _keep(model: PreTrainedModel, info: ModelSpec, site: str, found: dict[str, torch.Tensor]) -> Any:
    path, end = info.family.point(Site.parse(site))

    def keep(module: Any, args: Any, out: Any) -> None:
        state = args[0] if end == "input" else out[0] if isinstance(out, tuple) else out
        found[site] = state.reshape(-1, state.shape[-1]) if state.dim() != 3 else state[0]

    return model.get_submodule(path).register_forward_hook(keep)


READ = ("q.1", "attn_out.2", "mlp_out.1", "mlp_out.2", "final_norm")
PLACES: list[Any] = ["image", "text", ["image[0]", -1], "generated", "all", slice(1, None, 3)]
CONFORMING: list[Any] = [
    "qwen2_5_vl",
    "gemma3",
    *[pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_vl", "smolvlm")],
]


def check_ops(family: str, lm: LM, model: PreTrainedModel, site: str, seed: int) -> None:
    """Random ops of a site, at images and text, beside a text request: tokens, logits and states are transformers' under hooks."""
    if family == "qwen3_vl" and site == "resid_pre.1":
        site = "resid_post.0"  # the same place: DeepStack's states come behind it, and before transformers' input of the layer
    rng = random.Random(f"{site} {seed}")
    kinds = [op for op in ops_at(site, model.config) if not isinstance(op, Patch)]
    specs: list[Any] = [replace(rng.choice(kinds), positions=rng.choice(PLACES)) for _ in range(2)]
    prompt = prompt_of(family, [1, 2, 3], rng.randrange(3), [4, 5], *[rng.randrange(3), [6]] * rng.randrange(2))
    text = RenderedPrompt(None, [rng.randrange(1, 250) for _ in range(9)])
    params = SamplingParams(temperature=0, max_tokens=3)
    of_text = [spec for spec in specs if "image" not in str(spec.positions)]
    outs = lm.generate(
        [prompt, text],
        params,
        interventions=[specs, of_text],
        capture=[*READ, Capture("logits", positions=Generated(-1))],
    )
    for own, ops, out in ((prompt, specs, outs[0]), (text, of_text, outs[1])):
        tokens, logits, states = hooked_run(family, model, own, ops, 3)
        torch.testing.assert_close(out.activations["logits"], logits, rtol=2e-4, atol=5e-4)
        assert out.token_ids == tokens, specs
        for name, wanted in states.items():
            torch.testing.assert_close(out.activations[name].flatten(1), wanted, rtol=2e-4, atol=5e-4)


@pytest.fixture(scope="module", params=CONFORMING)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lm(family: str, vision_folder: Folders) -> Iterator[LM]:
    with LM(
        vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=2048, max_num_tokens=16,
        max_interventions_per_site=64,
    ) as found:  # fmt: skip
        yield found


ALL_SITES = ["resid_pre.0", *[site for site in SITES if site != "embed"], *INNER]


@pytest.mark.thin(24)
@pytest.mark.parametrize("site", ALL_SITES)
def test_ops_at_images_are_hooks_on_transformers(family: str, lm: LM, vision_oracle: Oracle, site: str) -> None:
    check_ops(family, lm, vision_oracle(family), site, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("site", ALL_SITES)
def test_more_ops_at_images(family: str, lm: LM, vision_oracle: Oracle, site: str, seed: int) -> None:
    check_ops(family, lm, vision_oracle(family), site, seed)


@pytest.mark.parametrize("way", ["tables", pytest.param("graphs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_ops_at_images_in_device_tables_and_graphs(
    of: str, way: str, vision_folder: Folders, vision_oracle: Oracle
) -> None:
    sites = ALL_SITES if way == "graphs" else ["resid_post.0", "z.1"]
    with lms(way, vision_folder) as load:
        lm = load(
            of,
            page_size=4,
            max_num_tokens=16,
            max_interventions_per_site=64,
            inner_sites=("q", "k", "v", "z", "mlp_act"),
        )
        for site in sites:
            check_ops(of, lm, vision_oracle(of), site, 0)


# -- heads, patterns and knockouts between image and text --------------------------------------------


@contextmanager
def cut_edges(
    model: PreTrainedModel, cuts: list[tuple[list[int], list[int], list[int], list[int] | None]]
) -> Iterator[None]:
    """transformers' eager attention with edges cut by its mask: (layers, queries, keys, heads or None for all)."""
    info, handles = ModelSpec.of(model.config, torch.float32), []

    def cut_in(layer: int) -> Callable[..., Any]:
        def cut(module: Any, args: Any, kwargs: Any) -> Any:
            mask = kwargs["attention_mask"].expand(-1, info.num_attention_heads, -1, -1).clone()
            for layers, queries, keys, heads in cuts:
                if layer in layers:
                    for head in range(info.num_attention_heads) if heads is None else heads:
                        mask[0, head, torch.tensor(queries)[:, None], torch.tensor(keys)[None]] = torch.finfo(
                            mask.dtype
                        ).min
            return args, kwargs | {"attention_mask": mask}

        return cut

    for layer in range(info.num_hidden_layers):
        attention = model.get_submodule(f"{info.family.layers}.{layer}.{info.family.attention}")
        handles.append(attention.register_forward_pre_hook(cut_in(layer), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_knockouts(family: str, lm: LM, model: PreTrainedModel, seed: int) -> bool:
    """Random cuts between image and text: logits and patterns are transformers' with a mask. False: no edge could be cut."""
    rng = random.Random(seed)
    prompt = prompt_of(family, [1, 2, 3], rng.randrange(3), [4, 5], *[rng.randrange(3), [6, 7]] * rng.randrange(2))
    length, images = len(prompt.token_ids), [image.positions.tolist() for image in prompt.images]
    pairs: list[Any] = [
        ("text", "image"),
        (["image", -1], "text"),
        (-1, "image[0]"),
        ("image[-1]", [0, "image[0]"]),
        ("image", [1]),
    ]
    specs, cuts = list[Any](), list[Any]()
    for from_, to in rng.sample(pairs, rng.randrange(1, 3)):
        layers, heads = rng.choice([[0], [1, 2], [0, 1, 2]]), rng.choice([None, [1], [0, 3]])
        queries, keys = (
            [*selected(windows_of(located(at, images, length), length), length).nonzero()[0]] for at in (from_, to)
        )
        if any(set(range(query + 1)) <= set(keys) for query in queries):
            continue  # a token that sees nothing is refused
        specs.append(Knockout(layers, from_=from_, to=to, heads=heads))
        cuts.append((layers, queries, keys, heads))
    try:
        (out,) = lm.forward([prompt], interventions=specs, capture=["pattern.*", "resid_post.1"])
    except PromptError as error:
        assert "attends to" in str(error) or "attend to nothing" in str(error)
        return False
    with cut_edges(model, cuts):
        wanted = reference(family, model, prompt, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(out.logits, wanted.logits[0], **CLOSE)
    torch.testing.assert_close(out.activations["resid_post.1"], wanted.hidden_states[2][0], **CLOSE)
    for layer, weights in enumerate(wanted.attentions):
        found = out.activations[f"pattern.{layer}"].transpose(0, 1)
        torch.testing.assert_close(found, weights[0], rtol=1e-4, atol=1e-5)
    return bool(cuts)


def test_knockouts_between_images_and_text_are_a_mask(family: str, lm: LM, vision_oracle: Oracle) -> None:
    assert sum(check_knockouts(family, lm, vision_oracle(family), seed) for seed in range(8)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 400, 50))
def test_more_knockouts(family: str, lm: LM, vision_oracle: Oracle, start: int) -> None:
    assert sum(check_knockouts(family, lm, vision_oracle(family), seed) for seed in range(start, start + 50)) > 25


# -- beside each other ---------------------------------------------------------------------------


class Run(NamedTuple):
    """A request of the fuzz."""

    prompt: RenderedPrompt
    params: SamplingParams
    specs: list[Any]
    captures: list[Any]


def random_run(family: str, config: Any, rng: random.Random) -> Run:
    prompt = random_prompt(family, rng.randrange(12), most=2)
    places = PLACES if prompt.images else ["text", "generated", "all", [0, -1]]
    specs: list[Any] = []
    for site in rng.sample([site for site in ALL_SITES if site != "resid_pre.1"], rng.randrange(3)):
        op = rng.choice([op for op in ops_at(site, config) if not isinstance(op, Patch)])
        specs.append(replace(op, positions=rng.choice(places)))
    captures = [
        Capture(site, rng.choice(places)) for site in rng.sample(["resid_post.1", "z.0", "mlp_out.2"], rng.randrange(3))
    ]
    return Run(prompt, SamplingParams(temperature=0, max_tokens=rng.randrange(1, 7)), specs, captures)


def check_fuzz(family: str, folder: Path, model: PreTrainedModel, seed: int) -> None:
    """Hooked and plain requests with images and text, at once, in a pool of three: each is its run without others."""
    rng = random.Random(seed)
    runs = [random_run(family, model.config, rng) for _ in range(12)]
    lm = LM(
        folder, device="cpu", dtype="float32", page_size=4, kv_cache_tokens=192, max_num_tokens=rng.choice([7, 16]),
        max_running_requests=5, max_interventions_per_site=64, tuning=EngineTuning(encoder_cache_tokens=8),
    )  # fmt: skip
    with lm, ThreadPoolExecutor(5) as threads:
        outs = list(
            threads.map(
                lambda run: lm.generate([run.prompt], run.params, interventions=run.specs, capture=run.captures)[0],
                runs,
            )
        )
        lm.engine.call(lm.engine.scheduler.check_integrity)
        for run, out in zip(runs, outs, strict=True):
            tokens, logits, _ = hooked_run(family, model, run.prompt, run.specs, run.params.max_tokens or 1)
            near = (logits.topk(2).values.diff().abs() < 1e-3).any()
            assert near or out.token_ids[: len(tokens)] == tokens, (seed, run)
            fresh = replace(run.params, skip_reading_prefix_cache=True)
            (alone,) = lm.generate([run.prompt], fresh, interventions=run.specs, capture=run.captures)
            for site in alone.activations if out.token_ids == alone.token_ids else ():
                torch.testing.assert_close(out.activations[site], alone.activations[site], **CLOSE)
                assert torch.equal(out.activations.positions[site], alone.activations.positions[site])


def test_hooked_requests_with_images_do_not_see_each_other(
    family: str, vision_folder: Folders, vision_oracle: Oracle
) -> None:
    check_fuzz(family, vision_folder(family), vision_oracle(family), 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_more_mixes(family: str, vision_folder: Folders, vision_oracle: Oracle, seed: int) -> None:
    check_fuzz(family, vision_folder(family), vision_oracle(family), seed)

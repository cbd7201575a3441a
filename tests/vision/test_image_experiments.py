"""Harvests, sweeps and attribution over prompts with images; the oracle is transformers, or each run as its own request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers_images import inputs_of, prompt_of, random_prompt, reference
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, Patch, SamplingParams, Steer
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.harvest.inputs import document_key
from pymllm_interp.harvest.progress import HarvestError
from pymllm_interp.harvest.reader import open_harvest
from pymllm_interp.interventions import Monitor
from pymllm_interp.utils.arguments import PromptError

Folders = Callable[[str], Path]
Oracle = Callable[[str], PreTrainedModel]
ONE = SamplingParams(temperature=0, max_tokens=1)
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
METRIC = (7, 11)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3", "smolvlm"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lm(family: str, vision_folder: Folders) -> Iterator[LM]:
    with LM(
        vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=2048, max_num_tokens=24,
        max_interventions_per_site=32,
    ) as found:  # fmt: skip
        yield found


def places(prompt: RenderedPrompt) -> list[int]:
    return [place for image in prompt.images for place in image.positions.tolist()]


# -- harvests ----------------------------------------------------------------------------------


def test_a_harvest_of_images_and_text_has_the_states_of_transformers(
    family: str, lm: LM, vision_oracle: Oracle, tmp_path: Path
) -> None:
    """Text between documents with images, in chunks; one with no image in a capture of images; killed and resumed."""
    documents = [random_prompt(family, seed) for seed in range(10)]
    captures = ["resid_post.1", Capture("resid_post.0", "image", missing="skip"), Capture("embed", "text")]
    whole = lm.harvest(documents, capture=captures, out=tmp_path / "whole", shard_bytes=20_000, progress=False)
    assert whole.documents == 10 and whole.shards > 1
    found = open_harvest(tmp_path / "whole")
    for number, prompt in enumerate(documents):
        states = reference(family, vision_oracle(family), prompt, output_hidden_states=True).hidden_states
        for site, layer, at in (
            ("resid_post.1", 2, range(len(prompt.token_ids))), ("resid_post.0", 1, places(prompt)),
            ("embed", 0, [p for p in range(len(prompt.token_ids)) if p not in places(prompt)]),
        ):  # fmt: skip
            own = (found.document_ids(site)[:] == number).nonzero()[:, 0]
            assert found.positions(site)[own].tolist() == list(at), (number, site)
            torch.testing.assert_close(found[site][own], states[layer][0][list(at)], rtol=1e-4, atol=2e-4)
    first = lm.harvest(documents[:6], capture=captures, out=tmp_path / "parts", shard_bytes=20_000, progress=False)
    again = lm.harvest(iter(documents), capture=captures, out=tmp_path / "parts", shard_bytes=20_000, progress=False)
    assert first.documents + again.new_documents == 10 and again.bytes > first.bytes
    parts = open_harvest(tmp_path / "parts")
    for site in ("resid_post.1", "resid_post.0", "embed"):
        torch.testing.assert_close(parts[site][:], found[site][:], **CLOSE)
        assert torch.equal(parts.document_ids(site)[:], found.document_ids(site)[:])
    changed = [prompt_of(family, [1, 2], 5, [3]), *documents[1:]]
    with pytest.raises(ValueError, match="this input are not the same"):
        lm.harvest(changed, capture=captures, out=tmp_path / "parts", shard_bytes=20_000, progress=False)


def test_the_images_are_in_a_documents_key(family: str) -> None:
    one, other = prompt_of(family, [1, 2], 0, [3]), prompt_of(family, [1, 2], 3, [3])
    keys = {document_key(prompt, lambda prompt=prompt: prompt) for prompt in (one, other)}
    text = RenderedPrompt(None, one.token_ids)
    assert one.token_ids == other.token_ids and len(keys | {document_key(text, lambda: text)}) == 3


def test_long_documents_are_cut_beside_images_and_never_in_one(
    family: str, lm: LM, vision_oracle: Oracle, tmp_path: Path
) -> None:
    prompt = prompt_of(family, [1, 2, 3], 1, [4, 5, 6, 7], 1, [8])
    first, second = (image.positions.tolist() for image in prompt.images)
    cut = second[0] - 2
    lm.harvest(
        [prompt], capture=["resid_post.1"], out=tmp_path / "t", max_length=cut, too_long="truncate", progress=False
    )
    part = RenderedPrompt(None, prompt.token_ids[:cut], None, prompt.images[:1])
    wanted = reference(family, vision_oracle(family), part, output_hidden_states=True).hidden_states[2][0]
    torch.testing.assert_close(open_harvest(tmp_path / "t")["resid_post.1"][:], wanted, **CLOSE)
    lm.harvest([prompt], capture=["resid_post.1"], out=tmp_path / "s", max_length=cut, too_long="split", progress=False)
    rest = prompt.part(cut, len(prompt.token_ids))
    assert rest.images[0].positions.tolist() == [place - cut for place in second]
    wanted = reference(family, vision_oracle(family), rest, output_hidden_states=True).hidden_states[2][0]
    torch.testing.assert_close(open_harvest(tmp_path / "s")["resid_post.1"][cut:], wanted, **CLOSE)
    for how in ("truncate", "split"):
        with pytest.raises(HarvestError, match=r"document 0 has .*an image has tokens on both sides of position"):
            lm.harvest(
                [prompt], capture=["embed"], out=tmp_path / how, max_length=first[1], too_long=how, progress=False
            )
    skipped = lm.harvest(
        [prompt, [1, 2]], capture=["embed"], out=tmp_path / "skip", max_length=first[1], too_long="split", on_error="skip",
        progress=False,
    )  # fmt: skip
    assert skipped.documents == 1 and "both sides" in skipped.skipped[0]


def test_ops_and_monitors_of_a_harvest_act_at_images(family: str, lm: LM, tmp_path: Path) -> None:
    documents, vector = [prompt_of(family, [1], seed, [2, 3]) for seed in (0, 1)], torch.linspace(-1, 1, lm.hidden_size)
    watch = Monitor("resid_post.1", vector, 0.0, name="seen", positions="image")
    lm.harvest(
        documents, capture=[Capture("resid_post.0", "image")], out=tmp_path / "h", progress=False,
        interventions=[Steer("resid_post.0", vector, positions="image")], monitors=[watch],
    )  # fmt: skip
    found = open_harvest(tmp_path / "h")
    plain = torch.cat(
        [lm.forward([p], capture=[Capture("resid_post.0", "image")])[0].activations["resid_post.0"] for p in documents]
    )
    torch.testing.assert_close(found["resid_post.0"][:], plain + vector, **CLOSE)
    assert len(found["scores.seen"][:]) == sum(len(places(p)) for p in documents)


def test_a_corpus_in_units_refuses_images_by_name(family: str, lm: LM, tmp_path: Path) -> None:
    prompt = prompt_of(family, [1], 0, [2])
    encoding = {name: value for name, value in inputs_of(family, prompt).items() if not name.endswith("type_ids")}
    for document in (prompt, encoding):
        with pytest.raises((TypeError, HarvestError), match=r"document 0 (has images|is a RenderedPrompt)"):
            lm.generate_corpus([document], ONE, out=tmp_path / "g", progress=False)


# -- sweeps ------------------------------------------------------------------------------------


def test_a_sweep_runs_one_prompt_with_its_images(family: str, lm: LM) -> None:
    prompt, vector = prompt_of(family, [1, 2], 1, [3, 4]), torch.linspace(-2, 2, lm.hidden_size)
    runs = [[], [Steer("resid_post.0", vector, positions="image")], [Steer("resid_post.1", vector, positions="text")]]
    outs = lm.sweep(prompt, runs, ONE, capture=["logits"], progress=False)
    for run, out in zip(runs, outs, strict=True):
        (wanted,) = lm.generate([prompt], ONE, interventions=run, capture=["logits"])
        torch.testing.assert_close(out.activations["logits"], wanted.activations["logits"], **CLOSE)
    assert outs[0].token_ids == lm.generate([prompt], ONE)[0].token_ids


@pytest.mark.parametrize("kind", ["resid_post", "z"])
def test_a_patch_sweep_patches_images_one_by_one(family: str, lm: LM, kind: str) -> None:
    """Each cell is its `Patch` as a request; the two prompts differ in the picture only."""
    base, source = prompt_of(family, [1, 2], 0, [3, 4]), prompt_of(family, [1, 2], 3, [3, 4])
    assert base.token_ids == source.token_ids
    sweep = lm.patch_sweep(
        base, source, site=kind, metric=METRIC, positions=["image", -1], layers=[0, 1], progress=False
    )
    assert sweep.how == "requests (the prompts have images)"
    at = [*places(base), len(base.token_ids) - 1]
    assert sweep.positions == at
    (run,) = lm.generate([source], ONE, capture=[f"{kind}.*"])
    patches = [
        [Patch(f"{kind}.{layer}", run.activations[f"{kind}.{layer}"][place].flatten(), [place])]
        for layer in (0, 1)
        for place in at
    ]
    outs = lm.generate([base] * len(patches), ONE, interventions=patches, capture=["logits"])
    logits = torch.cat([out.activations["logits"] for out in outs])
    wanted = (logits[:, METRIC[0]] - logits[:, METRIC[1]]).view(2, -1)
    torch.testing.assert_close(sweep.values, wanted, **CLOSE)
    assert sweep.effects.abs().max() > 1e-3 > sweep.noise_floor


def test_sweeps_refuse_images_that_do_not_match(family: str, lm: LM) -> None:
    base = prompt_of(family, [1, 2], 0, [3, 4])
    length = len(base.token_ids)
    for source, positions, message in (
        (prompt_of(family, [1], 0, [3, 4, 5]), "image", "in the base prompt, and"),
        (RenderedPrompt(None, [1] * length), "image", "the prompt has no images"),
        (prompt_of(family, [1, 2], 0, [3]), "prompt", "equally many"),
        (prompt_of(family, [1, 2], 3, [3, 4]), "image[1]", r"the prompt has 1 images"),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            lm.patch_sweep(base, source, metric=METRIC, positions=positions, progress=False)
    with pytest.raises(NotImplementedError, match="how='wavefront': the prompts have images"):
        lm.patch_sweep(base, base, metric=METRIC, how="wavefront")


# -- attribution -------------------------------------------------------------------------------


def test_attribution_over_images_is_the_gradient_of_transformers(family: str, lm: LM, vision_oracle: Oracle) -> None:
    clean, corrupted = prompt_of(family, [1, 2], 0, [3, 4]), prompt_of(family, [1, 2], 3, [3, 4])
    found = lm.attribute(clean, corrupted, metric=METRIC, sites=["resid_post.0", "resid_post.1"], progress=False)
    model = vision_oracle(family)
    wanted = {}
    with torch.no_grad():
        target = reference(family, model, clean, output_hidden_states=True).hidden_states
    model.model.rope_deltas = None  # pyright: ignore
    output = model(**inputs_of(family, corrupted), use_cache=False, output_hidden_states=True)
    logits = output.logits[0, -1]
    gradients = torch.autograd.grad(logits[METRIC[0]] - logits[METRIC[1]], output.hidden_states[1:3])
    for layer, gradient in enumerate(gradients):
        wanted[f"resid_post.{layer}"] = (
            ((target[layer + 1] - output.hidden_states[layer + 1]) * gradient)[0].sum(-1).detach()
        )
    for site, values in wanted.items():
        torch.testing.assert_close(found[site], values, rtol=1e-3, atol=1e-4)
    integrated = lm.attribute(clean, corrupted, metric=METRIC, sites="resid_post.0", steps=8, progress=False)
    done = integrated.completeness["resid_post.0"]
    assert abs(done.error) < 0.1 * abs(done.difference) + 1e-3

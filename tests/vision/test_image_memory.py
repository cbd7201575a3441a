"""Fields of the seeds for images: freed states of images, and positions of decode passes by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_images import continued, prompt_of
from helpers_runner import ByHand, make_runner
from transformers import PreTrainedModel

from pymllm_interp import LM, SamplingParams, Scale
from pymllm_interp.client.local_backend import LocalBackend
from pymllm_interp.core.current_pass import current_batch
from pymllm_interp.core.forward_batch import ForwardMode

FAMILY = "qwen2_5_vl"
GREEDY = SamplingParams(temperature=0, max_tokens=3)
FRESH = SamplingParams(temperature=0, max_tokens=3, skip_reading_prefix_cache=True)
Folders = Callable[[str], Path]
Oracle = Callable[[str], PreTrainedModel]


def test_images_of_salted_requests_leave_the_encoder_cache(vision_folder: Folders, vision_oracle: Oracle) -> None:
    """`SchedulerOutput.free_encoder_mm_hashes`: at the first step after their requests; other images stay, and answers too."""
    secret, other = prompt_of(FAMILY, [1, 2], 0, [3]), prompt_of(FAMILY, [1, 2], 1, [3])
    salted = secret.images[0].scoped("mine", None)
    with LM(vision_folder(FAMILY), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=512) as lm:
        vision = lm.runner.step_inputs.vision
        assert vision is not None
        lm.generate([other], GREEDY)
        lm.generate([secret], GREEDY, cache_salt="mine")
        lm.generate([[5, 6]], GREEDY)
        assert other.images[0].content in vision.cache and salted.content not in vision.cache
        assert vision.cache.stats()["images"] == 1
        outs = lm.generate([secret, secret], GREEDY, cache_salt="mine")
        assert vision.cache.num_computed == 3, "one run for both"
        (plain,) = lm.generate([secret], GREEDY)
        lm.generate([[5, 6]], GREEDY)
        assert secret.images[0].content in vision.cache and salted.content not in vision.cache
    wanted = continued(FAMILY, vision_oracle(FAMILY), secret, 3)
    assert [out.token_ids for out in (*outs, plain)] == [list(wanted)] * 3


def test_owners_and_salts_share_no_state_of_an_image(vision_folder: Folders) -> None:
    """As with the prefix cache: the time of a request tells an owner nothing of images that others have sent."""
    prompt = prompt_of(FAMILY, [1, 2], 0, [3])
    with LM(vision_folder(FAMILY), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=512) as lm:
        vision, found = lm.runner.step_inputs.vision, list[int]()
        assert vision is not None and isinstance(lm.backend, LocalBackend)
        tokens = list[list[int]]()
        for owner in (None, "a", "b", "a", None):
            view: Any = lm._shallow_copy()
            view.backend = lm.backend.view(lm.backend.factory.for_owner(owner))
            for salt in (None, "mine"):
                (out,) = view.generate([prompt], FRESH, cache_salt=salt)
                found.append(vision.cache.num_computed)
                tokens.append(out.token_ids)
        assert found == [1, 2, 3, 4, 5, 6, 6, 7, 7, 8], "salted images left at the end of their requests"
        assert tokens == tokens[:1] * 10


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_the_pass_of_hooks_in_a_tower_has_its_images(vision_folder: Folders, family: str) -> None:
    """`ForwardBatch.pixel_values` and `image_grid_thw` (seed F8) are what the tower reads, for ops in it."""
    seen, prompt = list[Any](), prompt_of(family, [1, 2], 0, [3], 2)

    @dataclass(frozen=True, eq=False)
    class Reads(Scale):
        """Keeps the images of its pass."""

        def act(self, x: Any, *rest: Any) -> Any:
            batch = current_batch()
            assert batch is not None
            seen.append((batch.pixel_values, batch.image_grid_thw))
            return super().act(x, *rest)

    with LM(vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=512) as lm:
        lm.generate([prompt], GREEDY, interventions=[Reads("vision.resid_post.0", 1.5)])
    ((pixels, grid),) = seen
    for found, name in ((pixels, "pixel_values"), (grid, "image_grid_thw")):
        parts = [image.features[name] for image in prompt.images if name in image.features]
        assert (found is None and not parts) or found.equal(torch.cat(parts))


def test_mrope_position_deltas_turn_decode_passes_by_hand(vision_folder: Folders, vision_oracle: Oracle) -> None:
    """`ForwardBatch.mrope_position_deltas`: the next token is that many positions after the last one."""
    ids, model = [5, 6, 7, 8], vision_oracle(FAMILY)
    for delta in (0, -2, 3):
        hand = ByHand(make_runner(vision_folder(FAMILY)))
        hand.extend({0: ids})
        batch = hand.batch({0: [9]}, ForwardMode.DECODE)
        given = (batch.input_ids, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc)
        turned = hand.runner.prepare_forward_batch_decode(*given, mrope_position_deltas=torch.tensor([delta]))
        assert turned.mrope_positions is not None and turned.mrope_positions.tolist() == [[4 + delta]] * 3
        found = hand.runner.forward(turned).next_token_logits[0]
        positions = torch.tensor([0, 1, 2, 3, 4 + delta]).expand(3, 1, -1)
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([[*ids, 9]]), position_ids=positions, use_cache=False).logits[0, -1]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)

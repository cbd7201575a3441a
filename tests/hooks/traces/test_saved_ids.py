"""What a block saves is what it marked, and no later object in the same memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pymllm_interp.hooks.traces.saves.block_saves import SavedIds


def test_an_id_that_is_used_again_is_no_saved_one():
    ids = SavedIds()
    for _ in range(1000):
        saved = torch.ones(1)
        ids.add(number := id(saved))
        assert number in ids
        del saved
        other = torch.zeros(1)
        assert number not in ids
        if id(other) == number:
            return
    pytest.fail("no id was used again")


def test_objects_without_weak_references_are_held():
    ids = SavedIds()
    ids.add(number := id([]))
    assert all(id([]) != number for _ in range(1000)) and number in ids


@pytest.mark.parametrize("family", ["llama"])
def test_a_name_that_was_not_saved_is_not_bound(lm_of, family):
    """The value saved at the step before is gone, and its id is free."""
    lm = lm_of(family)
    for _ in range(20):
        with lm.generate([5, 17, 3], max_new_tokens=30, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                saved = (lm.model.layers[0].output[0, -1] * 1).save()
                a = lm.model.layers[1].output[0, -1] * 1
                b = lm.model.layers[1].output[0, -1] * 2
                c = lm.lm_head.output[0, -1] * 1
        assert saved is not None  # pyright: ignore[reportPossiblyUnboundVariable]
        assert not {"a", "b", "c"} & locals().keys(), "a name that nobody saved"


def test_ids_that_were_cleared_leave_nothing_to_the_collector():
    ids, saved, lists = SavedIds(), [torch.ones(1) for _ in range(3)], [[], []]
    for value in (*saved, *lists):
        ids.add(id(value))
    ids.clear()
    gone = weakref.ref(ids)
    gc.disable()
    try:
        del ids
        assert gone() is None
        del saved  # their callbacks find no set
    finally:
        gc.enable()

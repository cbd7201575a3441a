"""Activations of pieces: sites are divided at the first read, and then as if they had been added one by one."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from pymllm_interp.hooks.captures.activations import Activations
from pymllm_interp.hooks.captures.by_site import SitePiece

ROWS, WIDTH = 6, 5
AT, TOKENS = torch.arange(ROWS), torch.arange(ROWS) + 10
ORDER = ("resid_post.0", "mlp_out.0", "resid_post.1", "mlp_out.1", "logits")


def pieces() -> list[SitePiece]:
    states = torch.arange(ROWS * 2 * WIDTH, dtype=torch.float32).view(ROWS, -1)
    few = slice(0, 2)
    return [
        SitePiece(("resid_post.0", "resid_post.1"), states, AT, TOKENS, {}),
        SitePiece(("mlp_out.0", "mlp_out.1"), -states, AT, TOKENS, {}),
        SitePiece(("logits",), states[few, :3], AT[few], TOKENS[few], {}),
    ]


def made() -> Activations:
    return Activations(2, pieces(), ORDER)


def added() -> Activations:
    found, by_site = Activations(2), {}
    for piece in pieces():
        width = piece.rows.shape[1] // len(piece.sites)
        for i, site in enumerate(piece.sites):
            by_site[site] = piece.rows[:, i * width : (i + 1) * width], piece.positions, piece.token_ids
    for site in ORDER:
        found.add(site, *by_site[site])
    return found


def assert_same(found: Activations, wanted: Activations) -> None:
    assert list(found) == list(wanted) == list(found.positions) == list(found.token_ids)
    for site in wanted:
        assert torch.equal(found[site], wanted[site])
        assert torch.equal(found.positions[site], wanted.positions[site])
        assert torch.equal(found.token_ids[site], wanted.token_ids[site])
    assert repr(found) == repr(wanted) and not found.indexes


def test_sites_are_as_if_added() -> None:
    assert_same(made(), added())
    assert len(made()) == len(made().positions) == 5 and "mlp_out.1" in made().token_ids
    assert torch.equal(made().stack("resid_post"), added().stack("resid_post"))
    assert torch.equal(made().positions.stack("mlp_out"), added().positions.stack("mlp_out"))


@pytest.mark.parametrize("read", [False, True])
def test_they_travel_undivided_and_divided(read: bool) -> None:
    sent = made()
    if read:
        assert len(sent)
    count = len(sent.as_pieces()[1])
    assert count == (5 if read else 3)  # divided, no two neighbours of the order are columns side by side
    assert_same(Activations(*sent.as_pieces()), added())


@pytest.mark.parametrize("way", [lambda found: pickle.loads(pickle.dumps(found)), copy.deepcopy, copy.copy])
def test_copies_are_whole(way) -> None:
    assert_same(way(made()), added())
    twice = way(way(made()))
    twice.add("embed", torch.ones(ROWS, WIDTH), AT, TOKENS)
    assert list(twice) == [*ORDER, "embed"] and torch.equal(twice.positions["embed"], AT)


def test_a_site_that_is_added_comes_behind_those_of_the_pieces() -> None:
    found = made()
    found.add("embed", torch.ones(ROWS, WIDTH), AT, TOKENS)
    assert list(found) == [*ORDER, "embed"]


def test_threads_that_read_at_once_get_one_tensor() -> None:
    for _ in range(50):
        found, start, read = made(), threading.Barrier(4), []

        def look(found: Activations = found, start: threading.Barrier = start, read: list[torch.Tensor] = read) -> None:
            start.wait()
            read.append(found.as_arrived("resid_post.1"))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(read) == 4 and len({id(rows) for rows in read}) == 1


def test_memory_goes_with_the_last_reference() -> None:
    """Without a collection: the client gives blocks back to the rank by it."""
    gc.collect()
    gc.disable()
    try:
        for read in (False, True):
            found = made()
            rows = weakref.ref(found.as_pieces()[1][0].rows)
            if read:
                assert len(found["resid_post.0"]) == len(found.positions["mlp_out.1"])
            del found
            assert rows() is None
    finally:
        gc.enable()

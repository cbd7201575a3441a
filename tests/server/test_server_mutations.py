"""Requests of all real shapes, changed at random: none is a 5xx, none hangs, and nothing is left behind."""

from __future__ import annotations

import pytest
from helpers_mutation import mutations
from helpers_server import Server, text_of


def check(server: Server, count: int, seed: int) -> None:
    before, pid = text_of(server), server.engine_pid()
    found = mutations(server, count, seed)
    with server.client("declared") as client:
        client.delete("/v1/interp/vectors/mutant")
    server.wait_until_idle()
    print(dict(found.statuses), f"slowest {found.slowest:.1f} s", [size >> 20 for size in found.rss])
    assert not found.problems, (len(found.problems), found.problems[:5])
    assert {200, 400} <= found.statuses.keys()  # some changes leave a request that is right
    assert text_of(server) == before and server.engine_pid() == pid
    assert server.metric("kv_tokens_free") == server.metric("kv_tokens")
    if len(found.rss) > 4:
        assert found.rss[-1] < 1.1 * found.rss[2], [size >> 20 for size in found.rss]


def test_changed_requests_are_answered_and_leave_nothing(server: Server):
    check(server, 150, seed=11)


@pytest.mark.slow
def test_ten_thousand_changed_requests(server: Server):
    check(server, 10_000, seed=12)

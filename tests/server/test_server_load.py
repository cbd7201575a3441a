"""Many clients of all kinds at once: no error, no wrong text, and no memory that grows."""

from __future__ import annotations

import pytest
from helpers_load import KINDS, load
from helpers_server import Server, serving

PROMPTS = ["w1 w2 w3", "w5", "w8 w9 w10 w11 w12", "w30 w31 " * 8, "w60 w3 w60"]


def test_a_mix_of_clients_gets_what_each_gets_alone(server: Server):
    report = load(server, PROMPTS, clients=12, seconds=2, jobs=20, max_tokens=12)
    assert not report.problems, report.problems[:5]
    assert set(report.answers) == set(KINDS)
    server.wait_until_idle()
    assert server.metric("kv_tokens_free") == server.metric("kv_tokens")
    assert server.metric("store_files") == 0


@pytest.mark.slow
def test_64_clients_for_five_minutes_of_the_demo_model(tmp_path):
    options = ["--allow-code-from", "code", "--max-traces", "64", "--option", "max_model_len=512"]
    with serving("demo", *options, folder=tmp_path) as server:
        prompts = ["Once upon a time", "The capital of France is", "My neighbour told me that", "Two plus two is"]
        report = load(server, prompts, clients=64, seconds=300, jobs=30, max_tokens=16)
        server.wait_until_idle()
        warm = [size for at, size in report.rss if at > 60]
        print(len(report.problems), dict(report.answers), f"{warm[0] / 2**20:.0f} -> {warm[-1] / 2**20:.0f} MiB")
        assert max(warm) < 1.05 * warm[0]
        assert not report.problems, report.problems[:10]

"""Load on a server: many clients at once, each of whose answers is compared with its solo run."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import httpx
import torch
from helpers_server import KEYS, Server

from pymllm_interp import LM
from pymllm_interp.hooks.captures.activations import Activations

CLEAR = 2e-3
"""Requests whose tokens are nearer to a tie are left out: their greedy text may depend on the batch (README, limits)."""
KINDS = ("plain", "plain", "steered", "capturing", "traced", "lens")


@dataclass
class Report:
    """What a load came to."""

    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, resident bytes of both processes)."""


def rss_of(server: Server) -> int:
    """Resident bytes of the server's two processes."""
    pids = (server.process.pid, server.engine_pid())
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * 4096


class Job:
    """A request of one kind, its answer, and the comparison of two."""

    def __init__(self, number: int, prompts: list[str], max_tokens: int) -> None:
        rng = random.Random(number)
        self.kind, self.prompt = KINDS[number % len(KINDS)], rng.choice(prompts)
        self.seed, self.max_tokens = number, rng.randint(max_tokens // 2, max_tokens)
        self.layer = rng.randrange(2)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": True}
        if self.kind == "steered":
            op = {"op": "scale", "site": f"resid_post.{self.layer}", "factor": 1.2 + 0.1 * (self.seed % 5)}
            body["interventions"] = [op | {"positions": "generated"}]
        if self.kind == "capturing":
            body["capture"] = [f"resid_post.{self.layer}"]
        return body

    def margin(self, client: httpx.Client, lm: LM) -> float:
        """The least distance, in log probability, of a token to the next best: how far the last bits are from changing it."""
        if self.kind == "lens":
            return inf  # its probabilities are compared, not its tokens
        if self.kind == "traced":
            layer = self.layer
            with lm.generate(self.prompt, max_new_tokens=self.max_tokens, ignore_eos=True) as tracer:
                margins = list().save()
                for _ in tracer.iter[:]:
                    lm.model.layers[layer].output[:] *= 1.1
                    best = lm.logits[0].float().topk(2).values
                    margins.append(best[0] - best[1])
            return float(min(margins))
        body = {name: value for name, value in self.body().items() if name not in ("stream", "capture")}
        entries = client.post("/v1/completions", json=body | {"logprobs": 2}).json()["choices"][0]["logprobs"][
            "top_logprobs"
        ]
        tops = [sorted(entry.values(), reverse=True) for entry in entries]
        return min((top[0] - top[1] for top in tops if len(top) > 1), default=0.0)

    def run(self, client: httpx.Client, lm: LM) -> Any:
        """The answer: text and states."""
        if self.kind == "lens":
            return self._lens(client)
        return self._trace(lm) if self.kind == "traced" else self._stream(client)

    def _lens(self, client: httpx.Client) -> Any:
        answer = client.post("/v1/interp/lens", json={"prompt": self.prompt, "top": 2})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found["tokens"], torch.tensor([[[t["prob"] for t in top] for top in row] for row in found["layers"]])

    def _stream(self, client: httpx.Client) -> Any:
        text, states, done = "", None, False
        with client.stream("POST", "/v1/completions", json=self.body()) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    if "activations" in choice:
                        states = self._states(client, choice["activations"])
        assert done
        return text, states

    def _states(self, client: httpx.Client, found: dict[str, Any]) -> torch.Tensor:
        data = base64.b64decode(found["data"]) if "data" in found else client.get(found["url"]).content
        if "url" in found:
            client.delete(found["url"])
        return Activations.from_bytes(data)[f"resid_post.{self.layer}"]

    def _trace(self, lm: LM) -> Any:
        layer = self.layer
        with lm.generate(self.prompt, max_new_tokens=self.max_tokens, ignore_eos=True) as tracer:
            rows = list().save()
            for _ in tracer.iter[:]:
                lm.model.layers[layer].output[:] *= 1.1
                rows.append(lm.model.layers[layer].output[0, -1])
            ids = tracer.result.save()
        return ids.tolist(), torch.stack(rows)


def same(found: Any, expected: Any) -> bool:
    """Equal texts or tokens, and equal states but for the last bits."""
    if found[0] != expected[0] or (found[1] is None) != (expected[1] is None):
        return False
    return found[1] is None or torch.allclose(found[1], expected[1], atol=1e-3, rtol=1e-3)


def load(
    server: Server, prompts: list[str], clients: int, seconds: float, jobs: int = 40, max_tokens: int = 24
) -> Report:
    """Let clients send jobs for so many seconds. Each job's answer is known from a run of its own, before."""
    report, lock = Report(), threading.Lock()
    with server.client("code") as client, LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm:
        work = [Job(number, prompts, max_tokens) for number in range(jobs)]
        work = [job for job in work if job.margin(client, lm) > CLEAR]
        expected = [job.run(client, lm) for job in work]
        begun = time.monotonic()

        def run(number: int) -> None:
            rng = random.Random(1000 + number)
            with server.client("code") as own:
                while time.monotonic() - begun < seconds:
                    index = rng.randrange(len(work))
                    try:
                        good = same(work[index].run(own, lm), expected[index])
                        problem = "" if good else f"job {index} ({work[index].kind}) differs from its solo run"
                    except Exception as error:
                        problem = f"job {index} ({work[index].kind}): {error!r}"
                    with lock:
                        report.answers[work[index].kind] += 1
                        if problem:
                            report.problems.append(problem)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            report.rss.append((time.monotonic() - begun, rss_of(server)))
            time.sleep(min(2.0, seconds / 10))
        for thread in threads:
            thread.join()
    return report

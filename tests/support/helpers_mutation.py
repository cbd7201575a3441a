"""Requests of real shapes, changed at random: of the tree, and of the bytes."""

from __future__ import annotations

import base64
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from helpers_load import rss_of
from helpers_server import Server
from safetensors.torch import save

WIDTH = 72
VECTOR = {"dtype": "float32", "shape": [WIDTH], "data": base64.b64encode(b"\0\0\x80?" * WIDTH).decode()}
OPS: list[dict[str, Any]] = [
    {"op": "steer", "site": "resid_post.0", "vector": VECTOR, "scale": 2, "positions": "generated", "norm": "match"},
    {"op": "ablate", "site": "resid_post.*", "directions": [[1.0] * WIDTH], "when": {"probe": VECTOR, "threshold": 0.5}},
    {"op": "clamp", "site": "mlp_out.1", "direction": VECTOR, "low": -1, "high": 1, "positions": {"slice": [0, None, 2]}},
    {"op": "scale", "site": "z.1", "factor": 0.5, "heads": [0], "positions": [0, -1]},
    {"op": "patch", "site": "resid_mid.1", "values": VECTOR, "positions": {"range": [0, 2]}, "missing": "skip"},
    {"op": "knockout", "layer": [0, 1], "heads": 0, "from_": -1, "to": [0]},
    {"op": "scale", "site": "attn_out.0", "factor": 2, "positions": {"generated": {"start": 1, "stop": 3, "step": 1}}},
]  # fmt: skip
CAPTURES: list[Any] = [
    "resid_post.1", {"site": "resid_post.*", "reduce": "mean"}, {"site": "z.0", "heads": 1, "positions": [0, 1]},
    {"site": "resid_post.1", "reduce": {"type": "lens", "top_k": 3, "tokens": [4]}}, {"site": "logits", "positions": -1},
    {"site": "mlp_out.0", "reduce": {"directions": [[0.5] * WIDTH], "top_k": 1}, "dtype": "float32"},
]  # fmt: skip
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1.2, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 7}, {"n": 2, "logprobs": 2},
    {"stop": ["w9", "w1"], "min_tokens": 1}, {"logit_bias": {"3": -100, "4": 5}}, {"prompt_logprobs": 1, "timeout": 20},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5, "stop_token_ids": [5]},
    {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "salt", "priority": 1},
]  # fmt: skip
CHAT = [{"role": "system", "content": "w1"}, {"role": "user", "content": [{"type": "text", "text": "w2 w3"}]}]
TEXT_ITEM = {"role": "user", "content": [{"type": "input_text", "text": "w2 w3"}]}
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 10**6, 2**31, 2**63, 10**18, 10**30, -(10**18), 1e308, 1e-320, "", "w1", "é", "\ud800", "a" * 5000, [],
    {},     [[]], [None], [{}], [1] * 300, {"range": [0, 10**18]}, {"slice": [0, 10**18, 1]}, {"generated": {"stop": 10**18}},
    [[[[[[1]]]]]], {"dtype": "float32", "shape": [1 << 40, 0], "data": ""}, {"layers": {"9" * 400: [1.0]}},
    "resid_post.{0..99999999}",
    "../../etc/passwd", "\x00", {"op": {"op": {}}}, [True] * 64, "blocks.99999999999999999999.hook_resid_post",
)  # fmt: skip


def shapes(rng: random.Random) -> tuple[str, str, Any]:
    """(method, path, body) of a valid request."""
    body: dict[str, Any] = {"max_tokens": 3} | rng.choice(SAMPLING)
    if rng.random() < 0.5:
        body["interventions"] = rng.sample(OPS, rng.randint(1, 3))
    if rng.random() < 0.4:
        body["capture"] = rng.sample(CAPTURES, rng.randint(1, 2))
    kind = rng.randrange(10)
    if kind < 4:
        prompt = rng.choice(["w1 w2 w3", ["w4", "w5 w6"], [1, 2, 3], [[1, 2], [3]]])
        return "POST", "/v1/completions", body | {"prompt": prompt}
    if kind == 5:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        items = [TEXT_ITEM, call, {"type": "function_call_output", "call_id": "c", "output": "w1"}]
        asked = {
            "instructions": "w2",
            "max_output_tokens": 3,
            "text": {"format": {"type": "text"}},
            "metadata": {"a": "b"},
        }
        return (
            "POST",
            "/v1/responses",
            asked | {"input": items, "stream": rng.random() < 0.5, "capture": ["resid_post.0"]},
        )
    if kind < 6:
        del body["prompt_logprobs" if "prompt_logprobs" in body else "max_tokens"]
        if isinstance(body.pop("logprobs", None), int):
            body |= {"logprobs": True, "top_logprobs": 2}
        return "POST", "/v1/chat/completions", body | {"messages": CHAT, "max_completion_tokens": 3}
    if kind == 6:
        params = [{"max_tokens": 2, "temperature": 0.5}, None]
        return "POST", "/v1/interp/generate", {
            "prompts": [[1, 2, 3], [4]], "params": params, "interventions": [[rng.choice(OPS)], []],
            "captures": [[], ["resid_post.0"]], "priority": [0, 1], "names": ["a", "b"], "stream": True,
        }  # fmt: skip
    if kind == 7:
        return "POST", "/v1/interp/lens", {"prompt": "w1 w2 w3", "top": 2}
    if kind == 8:
        return "PUT", "/v1/interp/vectors/mutant", save({"v": torch.ones(WIDTH)})
    path = rng.choice(["/tokenize", "/detokenize", "/v1/interp/reset_prefix_cache", "/v1/interp/abort"])
    return "POST", path, {
        "/tokenize": {"prompt": "w1 w2"}, "/detokenize": {"tokens": [1, 2]}, "/v1/interp/abort": {"call": 1, "requests": [0]},
    }.get(path, {})  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all parts of a JSON value."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(tree: Any, rng: random.Random) -> Any:
    """A JSON value with one part replaced, dropped, doubled, renamed or nested."""
    path = rng.choice([path for path in places(tree) if path] or [()])
    if not path:
        return rng.choice(JUNK)
    tree = deepcopy(tree)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, how = path[-1], rng.randrange(8)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, list):
        parent.extend([parent[key]] * rng.choice((1, 70, 3000)))
    elif how == 2 and isinstance(parent, dict):
        parent[rng.choice(("prompt", "site", "x" * 300, "positions", "n"))] = parent.pop(key)
    elif how == 3:
        deep: Any = parent[key]
        for _ in range(rng.choice((3, 60, 120))):
            deep = [deep]
        parent[key] = deep
    else:
        parent[key] = deepcopy(rng.choice(JUNK))
    return tree


def bytes_of(body: Any, rng: random.Random) -> bytes:
    """A request's body, whose bytes may be changed, too."""
    data = bytearray(body if isinstance(body, bytes) else json.dumps(body).encode())
    if rng.random() < (0.8 if isinstance(body, bytes) else 0.15) and data:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
    return bytes(data)


@dataclass
class Campaign:
    """What became of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    slowest: float = 0.0


def mutations(server: Server, count: int, seed: int) -> Campaign:
    """Send so many changed requests, one after the other. Each is answered, with no 5xx, and errors have OpenAI's shape."""
    rng, found = random.Random(seed), Campaign()
    with server.client("declared") as client:
        for number in range(count):
            method, path, body = shapes(rng)
            if not isinstance(body, bytes):
                for _ in range(rng.randint(1, 3)):
                    body = changed(body, rng)
            kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
            data, begun = bytes_of(body, rng), time.monotonic()
            try:
                answer = client.request(method, path, content=data, headers={"Content-Type": kind})
            except httpx.HTTPError as error:
                found.problems.append(f"{number} {path}: {error!r} {data[:300]!r}")
                continue
            found.slowest = max(found.slowest, time.monotonic() - begun)
            found.statuses[answer.status_code] += 1
            good = answer.status_code < 500
            if 400 <= answer.status_code < 500:
                good = set(answer.json().get("error", ())) == {"message", "type", "param", "code"}
            if not good:
                found.problems.append(f"{number} {path}: {answer.status_code} {answer.text[:300]} {data[:300]!r}")
            if number % 500 == 0:
                found.rss.append(rss_of(server))
    return found

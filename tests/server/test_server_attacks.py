"""What a hostile client sends: files whose headers hide their counts, and numbers, names and patterns at their limits."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
import torch
from helpers_server import Server
from safetensors.torch import save

from pymllm_interp.server.process.engine_server import _vectors_of
from pymllm_interp.utils.arguments import PromptError

ENTRY = '"%d":{"dtype":"F32","shape":[0],"%s":[0,0]}'
MANY = 8_000


def safetensors(*entries: str) -> bytes:
    header = ("{" + ",".join(entries) + "}").encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize("name", ["data_offsets", "data_offset\\u0073", "\\u0064ata_offsets"])
@pytest.mark.parametrize("before", [(), ('"__metadata__":{"x":"%s"}' % ("x" * (1 << 18)),)])
def test_a_vector_file_of_many_tensors_is_refused_before_they_are_made(name, before):
    """However its header writes them, and wherever in it they are."""
    body = safetensors(*before, *(ENTRY % (number, name) for number in range(MANY)))
    with pytest.raises(PromptError, match=f"header has {MANY + 1 + len(before)} objects"):
        _vectors_of(body, "vector 'x'")


def test_a_vector_file_of_many_texts_is_refused_before_they_are_made():
    texts = '"__metadata__":{' + ",".join(f'"{i:x}":""' for i in range(150_000)) + "}"
    body = safetensors(texts, ENTRY % (0, "data_offsets"))
    with pytest.raises(PromptError, match=r"header has 1.* bytes; at most 1048576"):
        _vectors_of(body, "vector 'x'")


def test_json_is_no_vector_file():
    with pytest.raises(PromptError, match="vector 'x': the body is no safetensors file and no GGUF file"):
        _vectors_of(b'{"vector": [1.0, 2.0]}', "vector 'x'")


@pytest.mark.parametrize("text", ["{" * 3000, '"{' * 3000, "\\{" * 3000])
def test_braces_in_the_metadata_of_a_vector_file_are_no_tensors(text: str):
    assert _vectors_of(save({"v": torch.ones(4)}, {"made": text, text: "by hand"}), "x").shape == (4,)


def test_a_vector_file_whose_text_does_not_end_is_refused_at_once():
    began = time.monotonic()
    with pytest.raises(PromptError, match="no safetensors file"):
        _vectors_of(safetensors('"' + '\\"' * 400_000), "x")
    assert time.monotonic() - began < 5  # quadratic it takes minutes


def test_a_vector_file_of_many_layers_is_read_and_two_of_one_layer_are_refused():
    assert len(_vectors_of(save({f"layer.{i}": torch.ones(4) for i in range(1024)}, {"made": "by hand"}), "x")) == 1024
    for other in ("layer.01", "direction.1", "layer.\u0661"):
        with pytest.raises(PromptError, match="two vectors for one layer"):
            _vectors_of(save({"layer.1": torch.ones(4), other: torch.ones(4)}), "x")


NUMBERS = ("1e999", "-1e999", "1e308", "-1e308", "1" + "0" * 30, "-1" + "0" * 30, "9" * 4301, "1e-400", "NaN", "Infinity",
           "2.5", "true", "null", '"1"', "[1]", "18446744073709551615", "9223372036854775808", "-0.0")  # fmt: skip
FIELDS = ("max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "prompt_logprobs", "priority", "timeout",
          "presence_penalty", "repetition_penalty", "min_tokens", "truncate_prompt_tokens")  # fmt: skip
NESTED = (
    '{"prompt": [%s]}', '{"prompt": [[%s]]}', '{"stop_token_ids": [%s]}', '{"allowed_token_ids": [%s]}',
    '{"logit_bias": {"1": %s}}',
    '{"interventions": [{"op": "scale", "site": "resid_post.0", "factor": %s}]}',
    '{"interventions": [{"op": "clamp", "site": "resid_post.0", "low": %s, "high": %s}]}',
    '{"interventions": [{"op": "scale", "site": "resid_post.0", "factor": 2.0, "positions": [%s]}]}',
    '{"interventions": [{"op": "steer", "site": "resid_post.0", "vector": [%s], "scale": %s}]}',
    '{"interventions": [{"op": "scale", "site": "resid_post.0", "factor": 2.0, "when": {"probe": [1.0], "above": %s}}]}',
    '{"capture": [{"site": "resid_post.0", "positions": {"range": [0, %s]}}]}',
)  # fmt: skip


def test_numbers_at_their_limits_are_answered_without_a_fault(server: Server):
    """A whole number beyond 64 bits, or one that no float holds, is refused or served in every field: never a 500."""
    found: dict[int, int] = {}
    with server.client() as client:
        for number in NUMBERS:
            bodies = [f'{{"{name}": {number}}}' for name in FIELDS]
            bodies += [form.replace("%s", number) for form in NESTED]
            for body in bodies:
                sent = '{"prompt": "w1", "max_tokens": 1, ' + body[1:]
                answer = client.post("/v1/completions", content=sent, headers={"Content-Type": "application/json"})
                assert answer.status_code in (200, 400), (sent, answer.text)
                if answer.status_code == 200 and "prompt" not in body:
                    assert answer.json()["choices"][0]["finish_reason"] in ("length", "stop"), (sent, answer.text)
                found[answer.status_code] = found.get(answer.status_code, 0) + 1
    assert found[200] > 20 and found[400] > 200, found
    server.wait_until_idle()


TEXTS = ("\x00", "\u202e", "a\u0301" * 500, "\U0001f468\u200d\U0001f469" * 200, "w1\r\nX-Evil: 1", "../../etc/passwd", "%00",
         "\ufeffw1", "<|endoftext|>", "{{ 7 * 7 }}", "{% for x in range(10**9) %}x{% endfor %}", "$(id)", "'; DROP")  # fmt: skip


def test_texts_of_any_kind_are_data_in_every_field(server: Server):
    with server.client() as client:
        for text in TEXTS:
            for body in (
                {"prompt": text}, {"prompt": "w1", "stop": [text]}, {"prompt": "w1", "user": text},
                {"prompt": "w1", "cache_salt": text},
                {"prompt": "w1", "model": text}, {"prompt": "w1", "capture": [text]}, {"prompt": "w1", "suffix": text},
                {"messages": [{"role": "user", "content": text}]}, {"messages": [{"role": text, "content": "w1"}]},
            ):  # fmt: skip
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                answer = client.post(path, json=body | {"max_tokens": 1})
                assert answer.status_code in (200, 400, 404), (body, answer.text)
                assert "X-Evil" not in answer.headers and "49" not in answer.text.split('"content":')[-1][:8]


WIDE = {"type": "string", "pattern": "(a|b)*c{1,50}"}
SLOW: dict[str, dict[str, Any]] = {
    "nested repeats": {"regex": "((((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99})"},
    "alternatives": {"regex": "(a|a|a|a)*" * 200 + "b"}, "optional": {"regex": "(a?){500}" + "a{500}"},
    "classic": {"regex": "^(a+)+$"}, "unicode": {"regex": "[\\u0000-\\U0010ffff]{1,5000}"},
    "long choice": {"choice": ["a" * 1000 + str(i) for i in range(1000)]},
    "recursive": {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"}},
    "wide": {"json": {"type": "object", "properties": {f"p{i}": WIDE for i in range(400)}}},
    "grammar": {"grammar": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(60)) + 'a60 ::= "x"'},
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW)
def test_a_grammar_of_exponential_cost_ends_within_its_time_and_others_are_served(server: Server, case):
    with server.client() as client:
        started = time.monotonic()
        answer = client.post(
            "/v1/completions", json={"prompt": "w1", "max_tokens": 2, "structured_outputs": SLOW[case]}
        )
        assert answer.status_code in (200, 400), answer.text
        assert time.monotonic() - started < 60
        if answer.status_code == 400:
            assert len(answer.text) < 2000
        assert client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200
    assert server.metric("engine_restarts") == 0


def test_many_long_stop_strings_cost_little(server: Server):
    """Each is a prefix of what may come, so that all are looked for at each token."""
    stop = [("w1 " * 200)[: 100 + i] for i in range(16)]
    with server.client() as client:
        body = {"prompt": "w1 " * 50, "max_tokens": 60, "ignore_eos": True, "stop": stop}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text

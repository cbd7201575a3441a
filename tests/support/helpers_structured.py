"""A tiny random model with a byte-level tokenizer, and random schemas and patterns for its structured outputs."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = (
    '{"', '":', '": "', '",', '"}', '"]', "[{", "}]", "true", "false", "null", "12", "007", "ab", "abc", "yes", "no", "the", " a",
    "\n  ", "  ", "é", "日本", '","', "-1", ".5", "e3", "_x", "Az", "name", '"name"', "<tool_call>\n", "</tool_call>",
)  # fmt: skip
"""Tokens of several bytes."""
SPECIAL = ("<eos>", "<|im_start|>", "[TOOL_CALLS]")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 256 bytes, `WORDS` and `SPECIAL`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab, merges = {letter: i for i, letter in enumerate(alphabet)}, []
    for word in WORDS:
        letters = byte_level.pre_tokenize_str(word)[0][0]
        for i in range(2, len(letters) + 1):
            if letters[:i] not in vocab:
                vocab[letters[:i]] = len(vocab)
                merges.append((letters[: i - 1], letters[i - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], chat_template=CHAT_TEMPLATE)


def save_model(folder: Path, *, seed: int = 0) -> Path:
    """A random model with this tokenizer, in `folder`."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ending_bias(tokenizer: Any) -> dict[int, float]:
    """A logit bias by which a random text ends soon, where it may."""
    closing = {'"': 4.0, "}": 2.0, "]": 3.0, " ": -6.0, "\n": -6.0, "\t": -6.0}
    ids = tokenizer.get_vocab()
    letters = {" ": "Ġ", "\n": "Ċ", "\t": "ĉ"}
    return {tokenizer.eos_token_id: 6.0} | {ids[letters.get(text, text)]: bias for text, bias in closing.items()}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of what structured outputs support."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "length", "pattern", "types"]
    kinds += ["object", "array", "anyOf", "prefixItems"] * 2 if depth else []
    kind = rng.choice(kinds)
    if kind in ("string", "boolean", "null"):
        return {"type": kind, "description": "of a test"}
    if kind in ("integer", "number"):
        low = rng.randrange(-500, 500)
        bounds = rng.choice(
            [{}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + rng.randrange(99)}]
        )
        bounds |= rng.choice([{}, {"exclusiveMinimum": low - 1}]) if "maximum" not in bounds else {}
        return {"type": kind, **bounds}
    if kind == "enum":
        return {"enum": rng.sample(["red", "é\n", 'a"b', 3, -1.5, True, None, {"a": [1]}], rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["x y", 0, False, [1, "2"]])}
    if kind == "length":
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^{json_pattern(rng)}$"}
    if kind == "types":
        return {"type": rng.sample(["string", "integer", "null", "boolean"], 2)}
    if kind == "anyOf":
        return {rng.choice(["anyOf", "anyOf"]): [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "prefixItems":
        items = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": items, "items": rng.choice([False, random_schema(rng, 0)])}
    if kind == "array":
        low = rng.randrange(3)
        bounds = rng.choice([{}, {"minItems": low}, {"minItems": low, "maxItems": low + rng.randrange(3)}])
        return {"type": "array", "items": random_schema(rng, depth - 1), **bounds}
    names = rng.sample(["a", "b c", "naïve", "d_1", 'q"', "name"], rng.randrange(1, 5))
    more = rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": random_schema(rng, 0)}])
    required = {"required": rng.sample(names, rng.randrange(len(names) + 1))}
    return {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}, **required, **more}


def json_pattern(rng: random.Random) -> str:
    """A pattern of characters that JSON does not escape."""
    return "".join(
        rng.choice(["[a-c]+", "x{1,3}", "(ab|c)?", "[0-9]{2}", "é", '[^a-z\\x00-\\x1f"\\\\]']) for _ in range(3)
    )


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    """A regular expression."""
    atoms = [*string.ascii_letters[:6], "[a-f]", "[^a-z]", r"\d", r"\w", r"\.", r"\+", "é", "[0-9_]", r"\s", "."]
    parts = []
    for _ in range(rng.randrange(1, 5)):
        atom, counts = rng.choice(atoms), ["", "", "?", "*", "+", "{2}", "{1,3}"]
        if depth and rng.random() < 0.4:  # repeated once at most: re tries all readings of nested repetitions
            atom, counts = f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})", ["", "?", "{2}"]
        parts.append(atom + rng.choice(counts))
    return "".join(parts)


def dumped(schema: Any) -> str:
    """A schema for messages."""
    return json.dumps(schema, ensure_ascii=False)

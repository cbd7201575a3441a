"""The tokenizer in a GGUF file.

Byte-level BPE ("gpt2" in the file) is built here from the file's vocabulary and merges. The reader of transformers ignores
`tokenizer.ggml.pre`, which selects the pre-tokenizer. It also reads the wrong end-of-sequence token of Llama files. Other kinds
(SentencePiece) are read by transformers, and get the file's special tokens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL, USER_DEFINED = 3, 4
"""Token types: special tokens, and words that are never split."""
ADDS_BOS = {"llama-bpe"}
"""Pre-tokenizers of models that add the bos token by default, if the file does not say."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_tokenizer(reader: GGUFReader, path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the open GGUF file at `path`, with its special tokens and chat template."""
    prefix = "tokenizer.ggml."
    wanted = {name: field for name, field in reader.fields.items() if name.startswith(prefix)}
    fields = {name.removeprefix(prefix): field.contents() for name, field in wanted.items()}
    pre = _pre_tokenizer(fields.get("pre", "gpt-2"))
    byte_level = fields.get("model") == "gpt2"
    if byte_level and pre is not None:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=_byte_level_bpe(fields, pre), clean_up_tokenization_spaces=False
        )
    else:
        if byte_level:
            warnings.warn(
                f"{path.name}: the pre-tokenizer {fields['pre']!r} is not known, so some text may be split differently "
                "than in training; use the model's own tokenizer (a folder or a hub id) where that matters",
                stacklevel=2,
            )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, clean_up_tokenization_spaces=False)
    _add_special_tokens(tokenizer, fields)
    template = reader.fields.get("tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template.contents()
    return tokenizer


def _pre_tokenizer(name: str) -> PreTokenizer | None:
    """Pre-tokenizer by llama.cpp's name; None for an unknown one."""
    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return gpt2
        case "smollm":
            return Sequence([Digits(individual_digits=True), gpt2])
        case "llama-bpe":
            return Sequence([Split(Regex(WORDS.format(digits="{1,3}")), "isolated"), bytes_only])
        case "qwen2":
            return Sequence([Split(Regex(WORDS.format(digits="")), "isolated"), bytes_only])
    return None


def _byte_level_bpe(fields: dict[str, Any], pre: PreTokenizer) -> Tokenizer:
    tokens: list[str] = fields["tokens"]
    model = BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in fields["merges"]],
        ignore_merges=fields.get("pre") == "llama-bpe",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, fields.get("token_type", []), strict=False))
    tokenizer.add_special_tokens([_whole(token, True) for token, kind in kinds if kind == CONTROL])
    tokenizer.add_tokens([_whole(token, False) for token, kind in kinds if kind == USER_DEFINED])
    return tokenizer


def _whole(token: str, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def _add_special_tokens(tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any]) -> None:
    """The file's special tokens, and its BOS token before each text, if the file asks for it."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for key, attribute in names.items():
        index = fields.get(f"{key}_token_id")
        if index is not None:
            setattr(tokenizer, attribute, _whole(fields["tokens"][index], True))
    by_default = fields.get("model") != "gpt2" or fields.get("pre") in ADDS_BOS
    if fields.get("add_bos_token", by_default) and tokenizer.bos_token is not None:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A <bos> $B",
            special_tokens=[{"id": "<bos>", "ids": [tokenizer.bos_token_id], "tokens": [tokenizer.bos_token]}],
        )

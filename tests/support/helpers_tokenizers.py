"""Tiny tokenizers of the four kinds, with their own account of the text of any token ids."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from pathlib import Path

from conftest import COMMON, random_model
from helpers_structured import CHAT_TEMPLATE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

Parts = Callable[[int], tuple[str, str]]
"""The first so many pieces -> (their whole characters, the bytes of one that has begun, as U+FFFD)."""
SMILE, YOU = "😀", "你"
SPECIAL = ("<s>", "</s>")
WORDS = (
    "▁The",
    "▁capital",
    "▁of",
    "▁France",
    "▁is",
    "▁and",
    "and",
    "▁Fran",
    "Fran",
    "▁",
    "▁▁",
    "a",
    "b",
    "é",
    YOU,
    "\n",
)


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's: 256 bytes, and tokens of several bytes that end or begin within a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    (whole,) = (piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(SMILE))
    merges = [(whole[0], whole[1]), (whole[2], whole[3])]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def sentencepiece() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback, as Llama 2's and Mistral's: its decoder strips the text's first space."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys("".join(WORDS)), "▁▁"]
    merges: list[tuple[str, str]] = [("▁", "▁")]
    for word in WORDS:
        for size in range(2, len(word) + 1):
            if word[:size] not in pieces:
                pieces.append(word[:size])
                merges.append((word[: size - 1], word[size - 1]))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _wrapped(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """Unigram with Metaspace, as T5's: words begin with a space, and the first one's is left out."""
    pieces = ["<unk>", *dict.fromkeys([*WORDS, *"".join(WORDS)])]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _wrapped(tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    """WordPiece, as BERT's: words are joined by spaces, and "##" continues one."""
    words = ["[UNK]", "the", "capital", "of", "france", "is", "and", "fran", ".", ",", "'", "s", "a", "é", YOU]
    pieces = [*words, *(f"##{piece}" for piece in ("ce", "s", "and", "a", "é", YOU))]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=CHAT_TEMPLATE
    )


TOKENIZERS = {
    "byte-level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace, "wordpiece": wordpiece
}  # fmt: skip


def text_after(kind: str, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to the prompt's, special tokens left out: by the rules of the kind, and not by its decoder.

    A character that begins in the prompt and ends in `ids` is theirs. Bytes that are no character are U+FFFD, as decoders
    write them; those of the prompt are the prompt's.
    """
    special = set(tokenizer.all_special_ids)
    before, after = ([t for t in part if t not in special] for part in (prompt, ids))
    pieces = [str(tokenizer.convert_ids_to_tokens(token)) for token in [*before, *after]]
    parts = _PARTS[kind](pieces)
    (text, pending), (whole, rest) = parts(len(before)), parts(len(pieces))
    return (whole[len(text) :] + rest).removeprefix(pending)


def _byte_level(pieces: list[str]) -> Parts:
    table = {v: k for k, v in _bytes_to_unicode().items()}

    def parts(count: int) -> tuple[str, str]:
        decoder = getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(bytes(table[character] for piece in pieces[:count] for character in piece))
        return text, decoder.decode(b"", final=True)

    return parts


def _bytes_to_unicode() -> dict[int, str]:
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _sentencepiece(pieces: list[str]) -> Parts:
    def shown(held: bytes) -> str:
        try:
            return held.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(held)

    def parts(count: int) -> tuple[str, str]:
        text, held = "", b""
        for piece in pieces[:count]:
            found = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
            if found is None:
                text, held = text + shown(held) + piece.replace("▁", " "), b""
                continue
            held += bytes([int(found[1], 16)])
            more = (text + shown(held)).removeprefix(" ")
            if more and not more.endswith("\ufffd"):  # a whole one may yet turn out to be none
                text, held = text + shown(held), b""
        return text.removeprefix(" "), shown(held)

    return parts


def _metaspace(pieces: list[str]) -> Parts:
    words = [piece.replace("▁", " " if i else "") for i, piece in enumerate(pieces)]
    return lambda count: ("".join(words[:count]), "")


def _wordpiece(pieces: list[str]) -> Parts:
    words = [piece[2:] if i and piece.startswith("##") else " " * (i > 0) + piece for i, piece in enumerate(pieces)]
    return lambda count: ("".join(words[:count]), "")


_PARTS = {"byte-level": _byte_level, "sentencepiece": _sentencepiece, "metaspace": _metaspace, "wordpiece": _wordpiece}


def save_model(kind: str, folder: Path) -> Path:
    """A random model with a tokenizer of this kind, in `folder`."""
    tokenizer = TOKENIZERS[kind]()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "hidden_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**{**COMMON, **sizes}, num_attention_heads=4, num_key_value_heads=2)
    random_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

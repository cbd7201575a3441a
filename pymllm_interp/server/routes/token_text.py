"""Single tokens as text and bytes. A token may be a part of a character, which is not text."""

from __future__ import annotations

import re
from typing import Any

from ...client.detokenizer import token_text

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""Characters that stand for bytes in the vocabulary of a byte-level BPE tokenizer (GPT-2's)."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A single byte in the vocabulary of a SentencePiece tokenizer."""


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """A token's own bytes, which need not be whole characters.

    Args:
        tokenizer: a transformers tokenizer; None: the text is the token id.
    """
    if tokenizer is None:
        return str(token).encode()
    text = token_text(tokenizer, token)
    if "\ufffd" not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if byte := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    found = [_BYTE_LEVEL.get(character) for character in piece]
    return bytes(byte for byte in found if byte is not None) if None not in found else text.encode()


def is_text(data: bytes) -> bool:
    """Whether the bytes are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def token_word(data: bytes, prefix: str = "") -> str:
    """A token's text; for a part of a character its bytes, as OpenAI writes them: `\\xf0\\x9f`.

    Args:
        prefix: text before such bytes; completions have "bytes:".
    """
    if is_text(data):
        return data.decode()
    return prefix + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)

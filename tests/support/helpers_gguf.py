"""GGUF files that announce more than they hold."""

from __future__ import annotations

import struct


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def announcing(items: int, kind: int = 4) -> bytes:
    """A GGUF file of about a hundred bytes, whose only field is an array that announces `items`."""
    field = text("controlvector.layers") + struct.pack("<IIQ", 9, kind, items)
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + field + bytes(26)

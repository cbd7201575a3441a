"""GGUF files that announce more than they hold."""

from __future__ import annotations

import struct


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def announcing(items: int, kind: int = 4) -> bytes:
    """A GGUF file of about a hundred bytes, whose only field is an array that announces `items`."""
    field = text("controlvector.layers") + struct.pack("<IIQ", 9, kind, items)
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + field + bytes(26)


def overlapping(count: int, size: int) -> bytes:
    """A control vector file with `count` tensors in F16, all of them the same `size` bytes."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, count, 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("controlvector")
    for layer in range(1, count + 1):
        head += text(f"direction.{layer}") + struct.pack("<IQIQ", 1, size // 2, 1, 0)
    return head + bytes(-len(head) % 32) + bytes(size)

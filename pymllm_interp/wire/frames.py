"""Frames: a JSON header and a body each, as they travel over HTTP."""

from __future__ import annotations

import struct


def framed(header: bytes, body: bytes) -> bytes:
    """A frame as it travels over HTTP: both lengths (little-endian, 4 and 8 bytes), the header, the body."""
    return frame_start(header, len(body)) + body


def frame_start(header: bytes, size: int) -> bytes:
    """A frame without its body of `size` bytes."""
    return struct.pack("<IQ", len(header), size) + header


FRAME_PREFIX = 12
"""Bytes of a frame before its header."""


def frame_sizes(prefix: bytes) -> tuple[int, int]:
    """Lengths of a frame's header and body."""
    return struct.unpack("<IQ", prefix)

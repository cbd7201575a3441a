"""Images as files, recognised without decoding: data URLs and formats. Imports neither torch nor Pillow."""

from __future__ import annotations

import base64
import re

from ..utils.arguments import PromptError

READ = "PNG, JPEG, WebP and GIF (its first frame) are read"
_MAGIC = (
    ("PNG", rb"\x89PNG\r\n\x1a\n"),
    ("JPEG", rb"\xff\xd8\xff"),
    ("WEBP", rb"RIFF....WEBP"),
    ("GIF", rb"GIF8[79]a"),
)
_OTHERS = (
    ("SVG", rb"\s*(?:\xef\xbb\xbf)?\s*<(?:\?xml|!DOCTYPE svg|!--|svg)"),
    ("TIFF", rb"II\*\x00|MM\x00\*|II\+\x00|MM\x00\+"),
    ("BMP", rb"BM"),
    ("HEIC or AVIF", rb"....ftyp"),
    ("PDF", rb"%PDF"),
    ("HTML", rb"\s*<(?:!DOCTYPE html|html)"),
)


def format_of(body: bytes) -> str | None:
    """Name of an image file's format, by its first bytes; None for formats that are not read."""
    start = bytes(body[:16])
    return next((name for name, magic in _MAGIC if re.match(magic, start, re.DOTALL)), None)


def check_format(body: bytes, what: str) -> str:
    """Name of an image file's format. Raises PromptError: another format than those that are read."""
    if (found := format_of(body)) is not None:
        return found
    start = bytes(body[:256])
    known = next((name for name, magic in _OTHERS if re.match(magic, start, re.DOTALL | re.IGNORECASE)), None)
    raise PromptError(f"{what} is {known or 'no image file of a known format'}: {READ}")


def body_of_data_url(url: str, what: str) -> bytes:
    """The file in a data URL, which must be base64. Raises PromptError: another URL, or another format than those that are read."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PromptError(f"{what}: expected a data URL such as data:image/png;base64,...")
    try:
        body = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PromptError(f"{what}: its data URL is not base64 ({error})") from None
    check_format(body, what)
    return body

"""Images as callers give them, decoded by Pillow within bounds."""

from __future__ import annotations

import hashlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...utils.arguments import PromptError
from ...utils.extras import library_of_extra
from ...wire.images import body_of_data_url, check_format

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 1 << 26
"""Most pixels of an image, decoded."""
EXPECTED = "expected a Pillow image, a uint8 array [height, width, 3], a path, a data URL, or the bytes of a file"


def file_of(source: Any, what: str) -> bytes | Image.Image:
    """An image as the bytes of its file, or as a Pillow image.
    Raises PromptError: another type, an unreadable file, or an address of the web."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return body_of_data_url(source, what)
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        raise PromptError(
            f"{what} is an address: pass the image itself; a server fetches addresses of hosts that it is started with "
            "(serve --allowed-media-domains)"
        )
    if isinstance(source, str | Path):
        path = Path(str(source).removeprefix("file://")).expanduser()
        try:
            return path.read_bytes()
        except (OSError, ValueError) as error:
            raise PromptError(f"{what}: {str(path)[:200]!r} is no readable file ({error})") from None
    with library_of_extra("an image in a prompt", "PIL", "images"):
        from PIL import Image
    if isinstance(source, Image.Image):
        _check_pixels(source.size, what)
        return source
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().numpy()
    if not isinstance(source, np.ndarray):
        raise PromptError(f"{what} is a {type(source).__name__}: {EXPECTED}")
    if source.ndim == 3 and source.shape[0] == 3 and source.shape[2] != 3:
        source = source.transpose(1, 2, 0)
    if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or 0 in source.shape:
        raise PromptError(f"{what} is an array of {source.dtype} {list(source.shape)}: {EXPECTED}")
    _check_pixels(source.shape[:2], what)
    return Image.fromarray(np.ascontiguousarray(source))


def digest_of(file: bytes | Image.Image) -> bytes:
    """Digest of a file, or of a Pillow image's pixels."""
    if isinstance(file, bytes):
        return hashlib.sha256(file).digest()
    digest = hashlib.sha256(f"{file.mode} {file.size} {file.getpalette() if file.mode == 'P' else ''}".encode())
    digest.update(file.tobytes())
    return digest.digest()


def decoded(file: bytes | Image.Image, what: str) -> Image.Image:
    """An image in RGB: the first frame, turned as its EXIF data say.
    Raises PromptError: another format, a broken file, or too many pixels."""
    if not isinstance(file, bytes):
        return file.convert("RGB")
    kind = check_format(file, what)
    with library_of_extra("an image in a prompt", "PIL", "images"):
        from PIL import Image, ImageOps
    try:
        with Image.open(BytesIO(file), formats=[kind]) as image:
            _check_pixels(image.size, what)
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except PromptError:
        raise
    except Image.DecompressionBombError:
        raise PromptError(f"{what} has more than {MAX_PIXELS} pixels, the most that are read") from None
    except Exception as error:  # decoders of strangers' files raise whatever they like
        raise PromptError(f"{what} is a broken {kind} file: {type(error).__name__}: {str(error)[:200]}") from None


def encoded(file: bytes | Image.Image, what: str) -> bytes:
    """The bytes of an image's file; a Pillow image becomes a PNG."""
    if isinstance(file, bytes):
        check_format(file, what)
        return file
    buffer = BytesIO()
    file.convert("RGB").save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _check_pixels(size: tuple[int, ...], what: str) -> None:
    width, height = size
    if not 0 < width * height <= MAX_PIXELS:
        raise PromptError(f"{what} has {width} x {height} pixels; at least 1, and at most {MAX_PIXELS} in all")

"""Embeddings of prompts as safetensors, read without torch and without pickle.

A prompt has one file, with `prompt_embeds` [n, width]. With `positions` [n] int64, its other positions have token ids.

vLLM's clients send `torch.save` of a tensor: a zip with a pickle. The opcodes of the pickle are read here. None is executed.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickletools
import zipfile
from typing import Any, NamedTuple

from ..utils.arguments import PromptError

NAME, POSITIONS = "prompt_embeds", "positions"
STORAGES = {
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
}
"""torch's name of a storage -> the dtype in safetensors, and its bytes."""
EXPECTED = "expected base64 of safetensors, or of torch.save, with one tensor [tokens, width]"
MAX_HEADER = 4096
"""Most bytes of a header, or of a pickle, of one tensor."""


class SentEmbeds(NamedTuple):
    """The embeddings of a whole prompt."""

    tokens: int
    body: bytes
    """safetensors with one tensor."""


def embeds_of(text: str, what: str) -> SentEmbeds:
    """Embeddings as clients send them.

    Raises:
        PromptError: not base64, or another file than one with one tensor of two dimensions.
    """
    try:
        body = base64.b64decode(text, validate=True)
        body = _from_torch(body) if body.startswith(b"PK") else body
        (shape,) = (entry["shape"] for name, entry in _header(body).items() if name != "__metadata__")
        tokens, _ = shape
    except (
        binascii.Error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
        zipfile.BadZipFile,
    ) as error:
        raise PromptError(f"{what}: {EXPECTED} ({str(error)[:200]})") from None
    if type(tokens) is not int or tokens < 0:
        raise PromptError(f"{what}: {EXPECTED}")
    return SentEmbeds(tokens, body)


def _header(body: bytes) -> Any:
    size = int.from_bytes(body[:8], "little")
    if not 2 <= size <= min(MAX_HEADER, len(body) - 8):
        raise ValueError("no header of one tensor")
    return json.loads(body[8 : 8 + size])


def _from_torch(body: bytes) -> bytes:
    """A tensor of `torch.save` as safetensors."""
    with zipfile.ZipFile(io.BytesIO(body)) as files:
        names = {info.filename.partition("/")[2]: info for info in files.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in names.values()):
            raise ValueError("a compressed file")
        if names["data.pkl"].file_size > MAX_HEADER:
            raise ValueError("more than one tensor")
        if "byteorder" in names and files.read(names["byteorder"]) != b"little":
            raise ValueError("big-endian numbers")
        (_, storage, key, _, _), offset, shape, stride = _tensor_of(files.read(names["data.pkl"]))
        dtype, size = STORAGES[storage]
        rows, width = shape
        if stride != (width, 1) and rows > 1:
            raise ValueError("a tensor that is not contiguous")
        data = files.read(names[f"data/{key}"])[offset * size :][: rows * width * size]
    if min(offset, rows, width) < 0 or len(data) != rows * width * size:
        raise ValueError("fewer bytes than the shape says")
    header = json.dumps({NAME: {"dtype": dtype, "shape": [rows, width], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def _tensor_of(pickled: bytes) -> tuple[tuple, int, tuple, tuple]:
    """(storage, offset, shape, stride) of the tensor that a pickle would rebuild: the arguments of its one call."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, given, _ in pickletools.genops(pickled):
        argument: Any = given
        match opcode.name:
            case "PROTO" | "STOP":
                pass
            case "GLOBAL":
                stack.append(argument.split(" ")[1])
            case "MARK" | "EMPTY_TUPLE":
                stack.append(() if opcode.name == "EMPTY_TUPLE" else pickletools.markobject)
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWFALSE" | "NEWTRUE":
                stack.append(opcode.name == "NEWTRUE")
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "TUPLE":
                start = max(i for i, each in enumerate(stack) if each is pickletools.markobject)
                stack[start:] = [tuple(stack[start + 1 :])]
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "BINPERSID":
                pass  # the description of the storage stands for it
            case "REDUCE":
                *_, function, arguments = stack
                stack[-2:] = [(function, arguments)]
            case other:
                raise ValueError(f"a pickle with {other}, which is no tensor")
    ((function, arguments),) = stack
    storage, offset, shape, stride = arguments[:4]
    if function != "_rebuild_tensor_v2" or len(storage) != 5:
        raise ValueError(f"a {function}, and no tensor")
    return storage, offset, shape, stride

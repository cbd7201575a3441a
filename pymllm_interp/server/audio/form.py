"""Forms of requests (multipart/form-data): fields with texts, and one file. The gate has bounded the body's size."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..http.errors import ApiError

MAX_FIELDS = 64
"""Most parts of a form."""
MAX_HEADERS = 4096
"""Most bytes of a part's headers."""
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))')
_NAME = re.compile(rb'^content-disposition:[^\r\n]*?[;\s]name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE)
_FILE = re.compile(rb"^content-disposition:[^\r\n]*?[;\s]filename\*?=", re.IGNORECASE | re.MULTILINE)


class Form(NamedTuple):
    """The parts of a form.

    Attributes:
        fields: name -> texts, in order.
        files: name -> the file's bytes.
    """

    fields: dict[str, list[str]]
    files: dict[str, bytes]


def form_of(body: bytes, content_type: str) -> Form:
    """The form in a body. Raises ApiError for another body, or too many parts."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ApiError(400, "the body's content type is no multipart/form-data with a boundary")
    mark = b"\r\n--" + (found[1] or found[2]).encode()
    body = b"\r\n" + body
    parts, form = body.count(mark), Form({}, {})
    if not 2 <= parts <= MAX_FIELDS + 1:
        raise ApiError(400, f"the form has {max(parts - 1, 0)} parts; 1 to {MAX_FIELDS} are expected, and an end")
    _, *inner, last = body.split(mark)
    if not last.startswith(b"--"):
        raise ApiError(400, "the form has no end: the last boundary with -- behind it")
    for part in inner:
        headers, gap, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(headers) if len(headers) <= MAX_HEADERS else None
        if not gap or name is None or not part.startswith(b"\r\n"):
            raise ApiError(400, "a part of the form has no header Content-Disposition with a name")
        try:
            key = name[1].decode()
            if _FILE.search(headers):
                if key in form.files:
                    raise ApiError(400, f"the form has several files {key[:40]!r}; one is expected")
                form.files[key] = content
            else:
                form.fields.setdefault(key.removesuffix("[]"), []).append(content.decode())
        except UnicodeDecodeError:
            raise ApiError(400, "a field of the form is no text in UTF-8") from None
    return form

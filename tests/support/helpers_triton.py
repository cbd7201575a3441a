"""Triton's interpreter, which runs the kernels where there is no GPU, without what it does again and again."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any


def quicken_the_interpreter() -> None:
    """Have the interpreter know which names of ``triton.language`` are its own to replace.

    It goes through all that these modules hold, at each launch and at each call from one kernel to another. The names are always
    the same; whether one is replaced already is asked as before.
    """
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {place: [name for name in dir(place) if tl.core.is_builtin(getattr(place, name))] for place in places}
    patch_all = interpreter._patch_builtin

    def patch_builtin(place: Any, *how: Any) -> None:
        if place not in names:
            return patch_all(place, *how)
        for name in names[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(place, name, member, *how)

    interpreter._patch_builtin = patch_builtin

"""Triton's interpreter, which runs the kernels where there is no GPU, without what it does again and again."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from types import FunctionType


def quicken_the_interpreter() -> None:
    """Have the interpreter replace the functions of ``triton.language`` once, and not at each call of a kernel.

    It puts them back after each call, for kernels that are compiled. Under `TRITON_INTERPRET` none is.
    """
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()

    dtype_of = cache(interpreter._get_np_dtype)
    interpreter._patch_lang = lambda fn: nothing
    interpreter._get_np_dtype = lambda found: dtype_of(tl.uint64 if found.scalar.is_ptr() else found.scalar)

"""Functions, methods and attributes that a lowered block may use: they change nothing, and depend on their arguments only."""

from __future__ import annotations

from typing import Any

import einops
import torch

METHODS = frozenset(
    {
        "abs", "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "bfloat16", "bool", "chunk", "clamp", "clone",
        "contiguous", "cos", "count", "cpu", "cumsum", "detach", "diff", "dim", "div", "dot", "double", "eq", "exp", "expand",
        "flatten", "flip", "float", "gather", "ge", "get", "gt", "half", "index", "index_select", "int", "isfinite", "isnan",
        "item", "items", "keys", "kthvalue", "le", "log", "log10", "log2", "log_softmax", "logsumexp", "long", "lt", "masked_fill",
        "matmul", "max", "mean", "median", "min", "mm", "movedim", "mul", "narrow", "ndimension", "ne", "neg", "norm", "numel",
        "permute", "pow", "reciprocal", "relu", "repeat", "reshape", "round", "rsqrt", "select", "sigmoid", "sign", "sin", "size",
        "softmax", "split", "sqrt", "square", "squeeze", "std", "sub", "sum", "swapaxes", "t", "tanh", "to", "tolist",
        "topk", "transpose", "tril", "triu", "type", "unbind", "unflatten", "unsqueeze", "values", "var", "view", "view_as",
        "where",
    }
)  # fmt: skip
"""Methods of tensors and of containers."""
COPIES = frozenset({"bfloat16", "clone", "contiguous", "cpu", "detach", "double", "float", "half"})
"""Methods without arguments that copy or convert each element: of many values at once they give the same."""
MOVES = COPIES | {"dim", "numel", "size", "squeeze", "unsqueeze", "view", "reshape"}
"""Methods that compute nothing: their result is the same on every device."""
FILLS = frozenset({"append", "extend", "insert", "setdefault", "update"})
"""Methods that fill a container."""
ATTRIBUTES = frozenset({"T", "mT", "dtype", "indices", "logits", "ndim", "shape", "values"})
"""Attributes of tensors, of their functions' results, and of a pass's output."""
_TORCH = (
    "abs", "allclose", "amax", "amin", "arange", "argmax", "argmin", "argsort", "bmm", "cat", "clamp", "clone", "concat", "cos",
    "cosine_similarity", "cross", "cumsum", "diff", "div", "dot", "einsum", "equal", "exp", "eye", "flatten", "full", "gather",
    "index_select", "inner", "isfinite", "isnan", "kthvalue", "log", "log_softmax", "logsumexp", "masked_fill", "matmul", "max",
    "maximum", "mean", "median", "min", "minimum", "mm", "mul", "mv", "narrow", "norm", "ones", "ones_like", "outer", "permute",
    "pow", "reciprocal", "relu", "reshape", "round", "rsqrt", "sigmoid", "sign", "sin", "softmax", "sort", "sqrt", "square",
    "squeeze", "stack", "std", "sub", "sum", "tanh", "tensor", "topk", "transpose", "tril", "triu", "unbind", "unsqueeze", "var",
    "where", "zeros", "zeros_like",
)  # fmt: skip
_FUNCTIONAL = ("cosine_similarity", "cross_entropy", "gelu", "kl_div", "log_softmax", "mse_loss", "softmax")
_LINALG = ("norm", "vector_norm")
BUILTINS = (
    abs,
    bool,
    dict,
    enumerate,
    float,
    int,
    len,
    list,
    max,
    min,
    range,
    reversed,
    round,
    sorted,
    str,
    sum,
    tuple,
    zip,
)
FUNCTIONS: frozenset[Any] = frozenset(
    [
        *(getattr(torch, name) for name in _TORCH),
        *(getattr(torch.nn.functional, name) for name in _FUNCTIONAL),
        *(getattr(torch.linalg, name) for name in _LINALG),
        *BUILTINS,
        einops.rearrange, einops.reduce, einops.repeat, einops.einsum,
    ]
)  # fmt: skip
MOVING: frozenset[Any] = frozenset([torch.stack, torch.cat, torch.concat, einops.rearrange, *BUILTINS])
"""Those that compute nothing of a tensor's values."""

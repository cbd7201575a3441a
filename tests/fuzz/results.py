"""What jobs return, as plain values, and how two of them are compared."""

from __future__ import annotations

from typing import Any

import torch

from pymllm_interp.client.completion import CompletionOutput, RequestOutput

TOLERANCE = 1e-3
"""Of the largest value of a tensor: sums depend on the rows beside them."""


class Differs(AssertionError):
    """A result under pressure is not that of a run by itself."""


def of_output(out: RequestOutput) -> dict[str, Any]:
    """A request's results: all but what depends on how its steps ran."""
    return {
        "prompt": out.prompt_token_ids,
        "prompt_logprobs": out.prompt_logprobs and [entry and of_logprobs(entry) for entry in out.prompt_logprobs],
        "completions": [of_completion(one) for one in out.outputs],
    }


def of_completion(one: CompletionOutput) -> dict[str, Any]:
    return {
        "tokens": one.token_ids, "text": one.text, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason,
        "error": repr(one.error), "logprobs": one.logprobs and [of_logprobs(entry) for entry in one.logprobs],
        "activations": of_activations(one.activations), "receipt": of_receipt(one.receipt),
    }  # fmt: skip


def of_logprobs(entry: dict[int, Any]) -> dict[str, Any]:
    """The first token is the sampled one; equal values may come in any order."""
    token, first = next(iter(entry.items()))
    return {
        "token": token,
        "first": torch.tensor(first.logprob),
        "all": torch.tensor(sorted(e.logprob for e in entry.values())),
    }


def of_activations(found: Any) -> dict[str, Any]:
    return {
        site: {"rows": found[site], "positions": found.positions[site], "token_ids": found.token_ids[site], **found.others(site)}
        for site in sorted(found)
    }  # fmt: skip


def of_receipt(receipt: Any) -> dict[str, Any] | None:
    """All but steps and preemptions; a gate counts rows that are computed again."""
    if receipt is None:
        return None
    return {
        "model": receipt.model, "spec": receipt.spec, "reads": receipt.reads, "edits": receipt.edits,
        "nan_edits": receipt.nan_edits,
        "interventions": [(a.intervention, a.site, a.prompt_rows, a.generated_rows, a.missing) for a in receipt.interventions],
        "captures": [(c.site, c.prompt_rows, c.generated_rows, c.missing, c.cut) for c in receipt.captures],
    }  # fmt: skip


def compare(got: Any, wanted: Any, where: str = "result") -> None:
    """Raises Differs where two results are not equal; tensors, but for rounding."""
    if isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor):
        return compare_tensors(got, wanted, where)
    if type(got) is not type(wanted):
        raise Differs(f"{where}: {short(got)}, alone {short(wanted)}")
    if isinstance(wanted, dict):
        if list(got) != list(wanted):
            raise Differs(f"{where}: {list(got)}, alone {list(wanted)}")
        for key, value in wanted.items():
            compare(got[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        if len(got) != len(wanted):
            raise Differs(f"{where}: {len(got)} items, alone {len(wanted)}: {short(got)}, alone {short(wanted)}")
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            compare(one, other, f"{where}[{i}]")
    elif got != wanted:
        raise Differs(f"{where}: {short(got)}, alone {short(wanted)}")


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a reader can tell of a tensor besides its values."""
    steps = [
        step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ]  # others depend on the batch
    storage = tensor.untyped_storage().nbytes() if tensor.numel() else 0
    return tensor.dtype, list(tensor.shape), steps, tensor.is_contiguous(), storage, tensor.requires_grad


def compare_tensors(got: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    if (ours := layout_of(got)) != (other := layout_of(wanted)):
        raise Differs(f"{where}: {ours}, alone {other}")
    if not wanted.numel():
        return
    if not wanted.is_floating_point():
        if not torch.equal(got, wanted):
            raise Differs(f"{where}: {short(got.tolist())}, alone {short(wanted.tolist())}")
        return
    allowed = TOLERANCE * max(1.0, wanted[wanted.isfinite()].abs().max().item() if wanted.isfinite().any() else 1.0)
    if not torch.allclose(got, wanted, atol=allowed, rtol=0, equal_nan=True):
        wrong = ~torch.isclose(got, wanted, atol=allowed, rtol=0, equal_nan=True)
        raise Differs(
            f"{where} {list(got.shape)}: {int(wrong.sum())} values differ by up to {(got - wanted)[wrong].abs().max():.3g}"
        )


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."

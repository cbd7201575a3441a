"""Receipts as JSON, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..core.receipt import Applied, Captured, Receipt

_ENTRIES = {"interventions": Applied, "captures": Captured}


def receipt_to_json(receipt: Receipt) -> dict[str, Any]:
    """All fields of a receipt; `replica` only in a cluster. Its lists leave out entries with their defaults (None, 0 and "")."""
    found: dict[str, Any] = {}
    for field in fields(receipt):
        value = getattr(receipt, field.name)
        if field.name in _ENTRIES:
            value = [{f.name: v for f in fields(e) if (v := getattr(e, f.name)) not in (None, 0, "")} for e in value]
        found[field.name] = dict(value) if isinstance(value, Counter) else value
    if not receipt.replica:
        del found["replica"]
    return found


def receipt_of(value: Mapping[str, Any]) -> Receipt:
    """The receipt from its JSON."""
    found = dict(value)
    for name, cls in _ENTRIES.items():
        found[name] = [cls(**entry) for entry in found.get(name, ())]
    for name in ("steps", "eager_parts"):
        found[name] = Counter(found.get(name, {}))
    return Receipt(**found)

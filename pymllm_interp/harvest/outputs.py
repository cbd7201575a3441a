"""Generation over a corpus: units of documents in, Parquet files of completions out. `LM.generate_corpus` calls it.

The folder is that of a harvest in units (`plan`): each document has its rows once.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..core.sampling_params import SamplingParams
from ..hooks.bind import fingerprint_of
from ..hooks.interventions.knockout import Intervention
from ..hooks.spec import described
from .folder import Identity
from .inputs import tokenizer_fingerprint
from .plan import HarvestPlan, Unit
from .sources import pyarrow, read_portion
from .units import UnitFolder

OUTPUTS_FORMAT = "pymllm-interp outputs 1"


class AskedOutputs(NamedTuple):
    """Checked options of generated outputs."""

    params: SamplingParams
    interventions: list[Intervention]
    identity: Identity
    description: dict[str, Any]


def asked_outputs(
    model: Any, params: SamplingParams | None, interventions: Sequence[Intervention] | None
) -> AskedOutputs:
    """The arguments of `LM.generate_corpus`, checked.
    Raises ValueError: parameters with a constraint, which is an object of one process."""
    params = params or SamplingParams()
    if params.constraint is not None:
        raise ValueError(
            "generate_corpus: SamplingParams(constraint=...) belongs to one process; use allowed_token_ids"
        )
    specs = [] if interventions is None else model._requests.resolved(["resid_post.0"], interventions)[1]
    spec = hashlib.sha256(f"{params!r} {fingerprint_of(specs, [])}".encode()).hexdigest()
    identity = Identity(
        model.weights.fingerprint,
        tokenizer_fingerprint(model.tokenizer),
        spec,
        0,
        model.limits.max_model_len,
        "",
        False,
    )
    description = {"params": repr(params), "interventions": [described(one) for one in specs]}
    return AskedOutputs(params, specs, identity, description)


def generate_unit(model: Any, folder: Path, plan: HarvestPlan, unit: Unit, asked: AskedOutputs) -> bool:
    """Generate from a unit's documents, unless it is done. Returns whether this attempt's result counts.
    Raises Exception: a document cannot be served, or the engine or the disk failed."""
    own = UnitFolder(folder, plan, unit)
    if own.record.exists():
        own.close()
        return False
    documents = read_portion(plan.sources[unit.portion.file], unit.portion, plan.column)
    numbers = range(unit.first, unit.first + len(documents))
    first = asked.params.seed or 0  # of the document, whoever computes it, and in whatever unit
    params = [replace(asked.params, seed=first + number) for number in numbers]
    try:
        with own.attempted():
            found = model.generate(documents, params, interventions=asked.interventions or None)
            rows = [
                _row(number, sample, one)
                for number, output in zip(numbers, found, strict=True)
                for sample, one in enumerate(output.outputs)
            ]
            entry = {
                "rows": {"outputs": len(rows)}, "tokens": sum(len(row["token_ids"]) for row in rows), "first_document": numbers[0],
                "last_document": numbers[-1], "inputs": "", "engine": model.backend.facts.engine_name, "skipped": {},
            }  # fmt: skip
            own.add_bytes(_parquet(rows), "parquet", entry)
            own.finish()
    finally:
        own.close()
    return bool(own.won)


def _row(document: int, sample: int, found: Any) -> dict[str, Any]:
    ids, text, reason = found.token_ids, found.text, found.finish_reason
    return {"document": document, "sample": sample, "token_ids": ids, "text": text, "finish_reason": reason}


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    arrow, parquet = pyarrow("outputs are Parquet files, which")
    types = {"document": arrow.int64(), "sample": arrow.int32(), "token_ids": arrow.list_(arrow.int32())}
    schema = arrow.schema(types | {"text": arrow.string(), "finish_reason": arrow.string()})
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows, schema), file)
    return file.getvalue()

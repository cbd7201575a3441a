"""`HarvestPlan`: which documents a harvest has, and which units compute them. It is written once, and never changed.

A folder with ``plan.json`` is harvested by units, by any number of processes on any machines that share it:

    plan.json                          the documents' files, their units, and the identity of the harvest
    documents.jsonl                    the documents of an iterable, which is no file of its own
    unit-000007-000-3f2a9c01.safetensors   a shard, under the name of its unit and of the attempt that wrote it
    units/000007.json                  the record of a unit that is done, and of its attempt's shards
    manifest.json                      as of every harvest: what `open_harvest` reads
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .folder import FORMAT, MANIFEST, Identity
from .sources import Portion, SourceFile, check_unchanged, portions_of, source_of, write_jsonl

PLAN = "plan.json"
PLAN_FORMAT = "pymllm-interp harvest plan 1"
UNITS = "units"
DOCUMENTS, STAGED = "documents.jsonl", "documents."


@dataclass(frozen=True)
class Unit:
    """Documents that are computed together, by one worker."""

    number: int
    first: int
    """Number of its first document."""
    portion: Portion


@dataclass(frozen=True)
class HarvestPlan:
    """All units of a harvest."""

    identity: Identity
    description: Mapping[str, Any]
    column: str | None
    sources: list[SourceFile]
    units: list[Unit]
    manifest: str = FORMAT
    """The format that the manifest names."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(unit.portion.documents for unit in self.units)

    def check_sources(self) -> None:
        """Raise ValueError if an input file has changed."""
        for source in self.sources:
            check_unchanged(source)

    def to_json(self) -> bytes:
        """Content of `plan.json`."""
        return json.dumps({"format": PLAN_FORMAT, **asdict(self)}).encode()

    @classmethod
    def of_json(cls, data: bytes) -> HarvestPlan:
        """The plan of a file's content. Raises ValueError: it has another format, or is damaged."""
        try:
            found = json.loads(data)
            if found.pop("format") != PLAN_FORMAT:
                raise ValueError("another format")
            units = [Unit(one["number"], one["first"], Portion(**one["portion"])) for one in found["units"]]
            sources = [SourceFile(**one) for one in found["sources"]]
            return cls(
                Identity(**found["identity"]), found["description"], found["column"], sources, units, found["manifest"]
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{PLAN} is not the plan of a harvest ({error})") from None


def read_plan(folder: Path) -> HarvestPlan:
    """The plan of a folder. Raises FileNotFoundError, ValueError: it has none."""
    return HarvestPlan.of_json((folder / PLAN).read_bytes())


def make_plan(
    folder: Path, identity: Identity, description: Mapping[str, Any], inputs: Iterable[Any], column: str | None,
    unit_documents: int, manifest: str = FORMAT,
) -> HarvestPlan:  # fmt: skip
    """The folder's plan, which is written if the folder has no plan yet.

    Args:
        inputs: paths of files (`pathlib.Path`), or documents.
        manifest: the format that the manifest names.

    Raises:
        ValueError: the folder has a plan of another harvest, or of other documents.
        FileExistsError: the folder holds other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planned = (folder / PLAN).exists()
    if not planned and (others := sorted({path.name for path in folder.iterdir()} - {UNITS} - set(_own(folder)))):
        what = "a harvest without units: call without cluster=" if MANIFEST in others else "not a harvest's folder"
        raise FileExistsError(f"{folder} holds {', '.join(others[:5])} and no {PLAN}: it is {what}, or name a new one")
    (folder / UNITS).mkdir(exist_ok=True)
    given = list(inputs) if isinstance(inputs, list | tuple) else inputs
    if isinstance(given, list) and given and all(isinstance(one, Path) for one in given):
        files, staged = [one.resolve() for one in given], None
    else:
        staged = folder / f"{STAGED}{uuid.uuid4().hex[:8]}.jsonl"
        write_jsonl(given, staged)
        files = [staged]
    try:
        plan = _plan_of(folder, identity, description, files, column, unit_documents, staged, manifest)
        if staged is not None and not planned:
            with contextlib.suppress(FileExistsError):
                os.link(staged, folder / DOCUMENTS)
        put_once(folder, PLAN, plan.to_json())
    finally:
        if staged is not None:
            staged.unlink(missing_ok=True)
    there = read_plan(folder)
    if difference := _difference(there, plan):
        raise ValueError(f"{folder} has the plan of another harvest; name a new folder\n{difference}")
    there.check_sources()
    return there


def _own(folder: Path) -> list[str]:
    """Files that an interrupted `make_plan` leaves."""
    return [path.name for path in folder.iterdir() if path.name.startswith((STAGED, f"{PLAN}."))]


def _plan_of(
    folder: Path, identity: Identity, description: Mapping[str, Any], files: list[Path], column: str | None, unit_documents: int,
    staged: Path | None, manifest: str,
) -> HarvestPlan:  # fmt: skip
    sources, units, first = [], list[Unit](), 0
    for number, path in enumerate(files):
        source = source_of(path)
        for portion in portions_of(number, source, unit_documents):
            units.append(Unit(len(units), first, portion))
            first += portion.documents
        if staged is not None:
            source = SourceFile(str((folder / DOCUMENTS).resolve()), source.kind, source.bytes, source.digest)
        sources.append(source)
    return HarvestPlan(identity, description, column, sources, units, manifest)


def _difference(there: HarvestPlan, now: HarvestPlan) -> str:
    """Differences of two plans as text, or ""."""
    lines = []
    for name, before in asdict(there.identity).items():
        if before != (after := getattr(now.identity, name)):
            lines.append(f"  {name}: {before}, and now {after}")
    if there.manifest != now.manifest:
        lines.append(f"  {there.manifest}, and now {now.manifest}")
    if there.sources != now.sources or there.column != now.column:
        lines.append(f"  other documents: {_named(there.sources)}, and now {_named(now.sources)}")
    elif there.units != now.units:
        lines.append(f"  units: {len(there.units)}, and now {len(now.units)} (unit_documents)")
    return "\n".join(lines)


def _named(sources: list[SourceFile]) -> str:
    return ", ".join(f"{Path(one.path).name} ({one.bytes} bytes)" for one in sources[:4])


def put_once(folder: Path, name: str, content: bytes) -> None:
    """Write a file whole, or leave one that is there: of several that write, the first wins.
    Raises OSError: it cannot be written; nothing is left of it."""
    own = folder / f"{name}.{uuid.uuid4().hex[:8]}"
    try:
        with open(own, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # even if the answer to this link was lost
            os.link(own, folder / name)
        sync_folder(folder)
    finally:
        own.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

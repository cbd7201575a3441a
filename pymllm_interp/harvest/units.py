"""Units of a harvest: each is computed by an attempt, or by several at once, and one of them counts.

A unit may be given out twice: a lost worker may come back. So an attempt writes its shards under a unique name. Then it makes
its record by ``link()``, which fails if the unit has a record. The attempt in the record counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..client.calls.model import ClientModel
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from .feed.documents import Document
from .folder import MANIFEST, TEMPORARY, HarvestFolder, ShardEntry
from .inputs import Settings
from .plan import DOCUMENTS, PLAN, STAGED, UNITS, HarvestPlan, Unit, put_once, read_plan, sync_folder
from .progress import HarvestProgress
from .run import HarvestRun
from .sources import read_portion

RECORD = re.compile(r"\d{6}\.json")
ATTEMPT_FILE = re.compile(r"unit-(\d{6})-\d{3}-[0-9a-f]{8}\.(safetensors|parquet)(\.tmp)?")
RECORD_FILE = re.compile(r"(\d{6})\.json\.[0-9a-f]{8}")


@dataclass(frozen=True)
class UnitRecord:
    """Record of one attempt at a unit."""

    unit: int
    attempt: str
    documents: int
    """Kept ones."""
    tokens: int
    shards: list[ShardEntry]
    skipped: dict[str, str] = field(default_factory=dict)
    """Skipped documents behind the last shard: number -> the error."""

    @classmethod
    def read(cls, path: Path) -> UnitRecord:
        """The record of a file."""
        found = json.loads(path.read_bytes())
        return cls(**found | {"shards": [ShardEntry(**shard) for shard in found["shards"]]})


class UnitFolder(HarvestFolder):
    """A harvest's folder as one attempt at one unit sees it.

    Attributes:
        won: whether this attempt's record counts; None before `finish`.
    """

    def __init__(self, folder: Path, plan: HarvestPlan, unit: Unit) -> None:
        self.folder, self.identity, self.description, self.unit = folder, plan.identity, plan.description, unit
        self.attempt = uuid.uuid4().hex[:8]
        self.shards, self.complete = [], False
        self.won: bool | None = None
        self.left_out: dict[str, str] = {}
        self._fd = os.open(folder, os.O_RDONLY)

    @property
    def num_documents(self) -> int:
        return self.shards[-1].last_document + 1 if self.shards else self.unit.first

    @property
    def record(self) -> Path:
        """The file of the unit's record."""
        return self.folder / UNITS / f"{self.unit.number:06}.json"

    def add(self, tensors: Mapping[str, Sequence[Tensor]], entry: dict[str, Any]) -> None:
        self.shards.append(self._put_shard(self._name("safetensors"), tensors, entry))

    def add_bytes(self, content: bytes, suffix: str, entry: dict[str, Any]) -> None:
        """Write a file of another type. See `add`."""
        self.shards.append(self._put_file(self._name(suffix), [content], entry))

    def _name(self, suffix: str) -> str:
        return f"unit-{self.unit.number:06}-{len(self.shards):03}-{self.attempt}.{suffix}"

    def finish(self) -> None:
        """Commit the attempt. If another one was first, remove this attempt's files."""
        skipped = len(self.skipped) + len(self.left_out)
        found = UnitRecord(
            self.unit.number, self.attempt, self.unit.portion.documents - skipped, sum(s.tokens for s in self.shards), self.shards,
            self.left_out,
        )  # fmt: skip
        put_once(self.record.parent, self.record.name, json.dumps(asdict(found)).encode())
        self.won = UnitRecord.read(self.record).attempt == self.attempt
        if not self.won:
            self.discard()
        self.complete = True

    def discard(self) -> None:
        """Remove this attempt's shards, unless its record counts."""
        if self.record.exists() and UnitRecord.read(self.record).attempt == self.attempt:
            return
        for shard in self.shards:
            (self.folder / shard.file).unlink(missing_ok=True)

    @contextlib.contextmanager
    def attempted(self) -> Iterator[None]:
        """The body is this attempt. If it fails, its shards are removed.

        An attempt that fails once another one's record is there is lost only: `settle` may have removed its files.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.discard()
            if not (isinstance(error, OSError) and self.record.exists()):
                raise
            self.won = False


class UnitRun(HarvestRun):
    """`HarvestRun` over the documents of one unit."""

    folder: UnitFolder

    def run_unit(self, documents: Sequence[Any]) -> UnitFolder:
        """Compute and commit the unit.
        Raises Exception: a document, the engine or the disk failed. Nothing of this attempt is left, if that can be."""
        try:
            with HarvestProgress(False, None, 0) as progress, self.folder.attempted():
                try:
                    self._harvest(enumerate(documents, self.folder.unit.first), progress)
                finally:
                    self._writer.shutdown()  # before its files are removed
        finally:
            self._stop()
        return self.folder

    def _finish(self) -> None:
        left: list[Document] = self._shard
        self.folder.left_out = {str(document.number): str(document.error) for document in left}
        self.folder.finish()


def run_unit(
    model: ClientModel, folder: Path, plan: HarvestPlan, unit: Unit, captures: Sequence[Capture],
    interventions: Sequence[Intervention], skip: bool,
) -> bool:  # fmt: skip
    """Compute a unit of a plan, unless it is done. Returns whether this attempt's result counts.

    Raises:
        ValueError: the unit's file was changed.
        Exception: as `UnitRun.run_unit`.
    """
    own = UnitFolder(folder, plan, unit)
    if own.record.exists():
        own.close()
        return False
    identity = plan.identity
    settings = Settings(identity.max_length, identity.too_long, identity.shard_bytes)
    documents = read_portion(plan.sources[unit.portion.file], unit.portion, plan.column)
    run = UnitRun(model, model.weights.version, own, settings, captures, interventions, skip, False)
    return bool(run.run_unit(documents).won)


def done_units(folder: Path) -> set[int]:
    """Numbers of the units with a record."""
    return {int(name[:6]) for name in os.listdir(folder / UNITS) if RECORD.fullmatch(name)}


def settle(folder: Path) -> bool:
    """Bring the manifest up to the records, and remove files of lost attempts. Returns whether all units are done.

    Any process may do it, at any time, also several: it adds nothing that is not in the records.
    """
    plan = read_plan(folder)
    done = done_units(folder)
    records = [UnitRecord.read(folder / UNITS / f"{number:06}.json") for number in sorted(done)]
    shards = list(_shards_of(records))
    complete = len(done) == len(plan.units)
    manifest = {
        "format": plan.manifest, "description": plan.description, "identity": asdict(plan.identity), "complete": complete,
        "shards": [asdict(shard) for shard in shards],
    }  # fmt: skip
    temporary = folder / f"{MANIFEST}.{uuid.uuid4().hex[:8]}{TEMPORARY}"
    try:
        with open(temporary, "wb") as file:
            file.write(json.dumps(manifest, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MANIFEST)
    except FileNotFoundError:  # another process found all units done, and removed these files
        return settle(folder)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(folder)
    _remove_strays(folder, done, {shard.file for shard in shards}, complete)
    return complete


def _shards_of(records: Sequence[UnitRecord]) -> list[ShardEntry]:
    """All shards in the order of their documents. Skipped documents belong to the next shard, as in a harvest without units."""
    shards, waiting = list[ShardEntry](), dict[str, str]()
    for record in records:
        for shard in record.shards:
            if waiting:
                first = min(shard.first_document, *map(int, waiting))
                shard, waiting = replace(shard, first_document=first, skipped=waiting | shard.skipped), {}
            shards.append(shard)
        waiting |= record.skipped
    return shards


def _remove_strays(folder: Path, done: set[int], named: set[str], complete: bool) -> None:
    """Remove files of attempts at units that are done: a later attempt finds the record. Others may still be written."""
    for name in os.listdir(folder):
        found = ATTEMPT_FILE.fullmatch(name)
        left = complete and name != DOCUMENTS and name.startswith((STAGED, f"{MANIFEST}.", f"{PLAN}."))
        if left or (found and int(found[1]) in done and name not in named):
            (folder / name).unlink(missing_ok=True)
    for name in os.listdir(folder / UNITS):
        found = RECORD_FILE.fullmatch(name)
        if found and int(found[1]) in done:
            (folder / UNITS / name).unlink(missing_ok=True)

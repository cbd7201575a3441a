"""`AdapterSlots`: the adapters that are loaded, and which of them are in the device's slots.

An adapter is in host memory from `install` to `remove`. A request *holds* its adapter from its submission to its end. A held
adapter has a slot, and keeps it. Another one takes a free slot, or the slot of the least recently used unheld adapter.
Weights are written to their slots by the runner's thread, before the next step.

Memory for the slots is there from the first adapter to the last. It is laid out for the modules that adapters target, and for the
largest rank among them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from ...layers.invariant import invariant_device
from ...layers.lora import LoRASlots, padded_rank
from ...utils.arguments import shown
from ..base import CausalLM
from .adapter import Adapter, read_adapter
from .peft_config import AdapterError
from .targets import AdaptedProduct, Target, targets_of


@dataclass(eq=False)
class _Entry:
    """A loaded adapter."""

    adapter: Adapter
    slot: int | None = None
    users: int = 0
    """Requests that hold it."""
    used: int = 0
    """Grows with each use."""


class AdapterHold:
    """A request's hold on its adapter. `let_go` is called once."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go = let_go
        self._held = True

    def release(self) -> None:
        """Let go of it. A second call does nothing."""
        if self._held:
            self._held = False
            self._let_go()


class AdapterSlots:
    """The loaded adapters of one model. Any thread may call `hold`; writes to the device run on the runner's thread.

    Args:
        model: model with its weights.
        max_rank: largest rank of an adapter.
        digests: kept up to date: name -> digest of each loaded adapter (`ModelState.adapters`).

    Attributes:
        version: version of the slots' memory. Passes captured with another version are stale.
    """

    def __init__(self, model: CausalLM, max_loras: int, max_rank: int, digests: MutableMapping[str, str]) -> None:
        self._model, self.max_loras, self.max_rank, self._digests = model, max_loras, max_rank, digests
        self.version = 0
        self._refuses = invariant_device() == "cuda"
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._pending: dict[int, _Entry] = {}  # slots to write before the next step
        self._products: dict[int, AdaptedProduct] = {}  # with memory for adapters, by id
        self._clock = itertools.count(1)

    @property
    def names(self) -> list[str]:
        """Names of loaded adapters."""
        return sorted(self._entries)

    def folder_of(self, name: str) -> str:
        """Folder that a loaded adapter came from."""
        return self._entries[name].adapter.folder

    @property
    def any_loaded(self) -> bool:
        """Whether an adapter is loaded."""
        return bool(self._entries)

    @cached_property
    def targets(self) -> dict[str, Target]:
        """The modules that adapters can target."""
        return targets_of(self._model)

    def read(self, name: str, folder: str | Path) -> Adapter:
        """An adapter from a folder, checked against the model; see `read_adapter`."""
        if not isinstance(name, str) or not name:
            raise AdapterError(f"load_adapter({name!r}, ...): the name is a string that is not empty")
        if name in self._entries:
            raise AdapterError(f"an adapter {name!r} is loaded already: unload it first, or give another name")
        if self._refuses:
            raise AdapterError(
                f"load_adapter({name!r}, ...): adapters are not served with batch_invariant=True on CUDA"
            )
        if self._model.spec.source is not None:
            raise AdapterError(f"load_adapter({name!r}, ...): adapters are not supported in encoder-decoder models")
        return read_adapter(name, folder, self._model, self.targets, self.max_rank)

    # -- loading, on the runner's thread -----------------------------------------------------

    def install(self, adapter: Adapter) -> None:
        """Load an adapter, in a slot if one is not held.

        Raises:
            AdapterError: the name is taken.
            torch.OutOfMemoryError: no memory for the slots; nothing has changed then.
        """
        with self._lock:
            if adapter.name in self._entries:
                raise AdapterError(
                    f"an adapter {adapter.name!r} is loaded already: unload it first, or give another name"
                )
            entry = _Entry(adapter)
            self._take_slot(entry)
            self._entries[adapter.name] = entry
        try:
            self._lay_out(adapter)
        except BaseException:
            with self._lock:
                self._forget(entry)
            raise
        self._digests[adapter.name] = adapter.digest
        self.write_pending()

    def remove(self, name: str) -> None:
        """Unload an adapter. Raises AdapterError: no adapter has this name, or requests hold it."""
        with self._lock:
            entry = self._entry(name)
            if entry.users:
                raise AdapterError(
                    f"adapter {name!r} is in use by {entry.users} requests: wait for them, or cancel them, and unload it then"
                )
            self._forget(entry)
            self._digests.pop(name, None)
            if not self._entries:
                self._pending.clear()
                self._release_memory()

    def close(self) -> None:
        """Release all memory, and let go of the model."""
        del self._model
        self._entries.clear()
        self._digests.clear()
        self._pending.clear()
        self._release_memory()
        self.__dict__.pop("targets", None)

    def write_pending(self) -> None:
        """Write the weights of adapters that got a slot since the last call."""
        if not self._pending:
            return
        with self._lock:
            pending, self._pending = self._pending, {}
        for slot, entry in pending.items():
            for product in self._products.values():
                assert product.lora is not None
                product.lora.clear(slot)
            for path, (a, b) in entry.adapter.weights.items():
                target = self.targets[path]
                assert target.product.lora is not None
                target.product.lora.write(slot, target.part, a, b)

    def _lay_out(self, adapter: Adapter) -> None:
        """Make the memory that an adapter lacks."""
        rank = max(entry.adapter.rank for entry in self._entries.values())
        found = {id(self.targets[path].product): self.targets[path] for path in adapter.weights}
        grown = [target for key, target in found.items() if key not in self._products]
        if any(
            product.lora is not None and product.lora.rank < padded_rank(rank) for product in self._products.values()
        ):
            every = {id(target.product): target for target in self.targets.values()}
            grown += [every[key] for key in self._products]
        if not grown:
            return
        made = [LoRASlots(t.in_features, t.sizes, self.max_loras, rank, t.weight) for t in grown]
        self.version += 1
        for target, lora in zip(grown, made, strict=True):
            target.product.lora = lora
            self._products[id(target.product)] = target.product
        with self._lock:
            self._pending |= {entry.slot: entry for entry in self._entries.values() if entry.slot is not None}

    def _release_memory(self) -> None:
        for product in self._products.values():
            product.lora = None
        self._products.clear()
        self.version += 1

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.adapter.name]
        if entry.slot is not None:
            self._pending.pop(entry.slot, None)

    # -- use -----------------------------------------------------------------------------

    def hold(self, name: str) -> AdapterHold:
        """Pin an adapter to a slot until the hold is released.

        Raises:
            ValueError: an unknown adapter.
            AdapterError: all slots are held.
        """
        with self._lock:
            entry = self._entry(name)
            if entry.slot is None and not self._take_slot(entry):
                names = ", ".join(sorted(other.adapter.name for other in self._entries.values() if other.users))
                raise AdapterError(
                    f"adapter {name!r} has no slot: requests in flight use all {self.max_loras} ({names}). Wait for "
                    f"them, or raise max_loras: LM(..., max_loras={self.max_loras + 1})"
                )
            entry.users += 1
            entry.used = next(self._clock)
            return AdapterHold(partial(self._release, entry))

    def slot_of(self, name: str | None) -> int:
        """The slot of a held adapter; -1 for None."""
        if name is None:
            return -1
        slot = self._entries[name].slot
        assert slot is not None, "the adapter of a scheduled request is held"
        return slot

    def _release(self, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise AdapterError(unknown_adapter(name, self.names))
        return entry

    def _take_slot(self, entry: _Entry) -> bool:
        """Give an adapter a slot. False: all are held."""
        taken = {other.slot: other for other in self._entries.values() if other.slot is not None}
        slot = next((slot for slot in range(self.max_loras) if slot not in taken), None)
        if slot is None:
            idle = [other for other in taken.values() if not other.users]
            if not idle:
                return False
            last = min(idle, key=lambda other: other.used)
            slot, last.slot = last.slot, None
        assert slot is not None
        entry.slot, entry.used = slot, next(self._clock)
        self._pending[slot] = entry
        return True


def unknown_adapter(name: object, names: list[str]) -> str:
    """Error message for the name of an adapter that is not loaded."""
    known = f"loaded are {', '.join(names)}" if names else "none is loaded"
    return f"there is no adapter {shown(name)} ({known}): lm.adapters.load(name, folder) loads one"

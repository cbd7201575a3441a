"""`VllmAdapters`: LoRA adapters that vLLM loads, by name."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...models.adapters.adapter import WEIGHTS_FILE
from ...models.adapters.peft_config import CONFIG_FILE, AdapterError, PeftConfig
from ...models.adapters.slots import AdapterHold, unknown_adapter
from .core import VllmCore

NUMBERS = itertools.count(1 << 24)
"""Numbers of adapters. vLLM takes equal numbers for one adapter. A user of a `vllm.LLM` numbers from 1, and may attach again."""


@dataclass(eq=False)
class _Loaded:
    """A loaded adapter.

    Attributes:
        request: vLLM's `LoRARequest`.
        users: number of requests that hold it.
    """

    folder: str
    request: Any
    users: int = 0


class VllmAdapters:
    """The loaded adapters of an engine. A request may wait: vLLM's scheduler limits the adapters of a step.

    Args:
        core: vLLM.
        digests: kept up to date: name -> digest of each loaded adapter (`ModelState.adapters`).
    """

    def __init__(self, core: VllmCore, digests: MutableMapping[str, str]) -> None:
        self._core, self._digests = core, digests
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._loaded: dict[str, _Loaded] = {}

    @property
    def folders(self) -> dict[str, str]:
        """Name -> folder of the loaded adapters."""
        return {name: self._loaded[name].folder for name in sorted(self._loaded)}

    def load(self, name: str, folder: str) -> None:
        """Load an adapter of PEFT's format on all ranks.
        Raises AdapterError: vLLM was started without `enable_lora`, the name is taken, or an adapter that vLLM cannot apply."""
        if self._core.config.lora_config is None:
            raise AdapterError(f"adapter {name!r}: LM(..., engine='vllm', enable_lora=True) starts vLLM with LoRA")
        if not isinstance(name, str) or not name:
            raise AdapterError(f"load_adapter({name!r}, ...): the name is a string that is not empty")
        with self._loading:  # one after another: the second of two equal names is refused
            self._load(name, folder)

    def _load(self, name: str, folder: str) -> None:
        if name in self._loaded:
            raise AdapterError(f"an adapter {name!r} is loaded already: unload it first, or give another name")
        config = PeftConfig.read(Path(folder))
        if config.rank_pattern or config.alpha_pattern:
            raise AdapterError(
                f"{folder}: rank_pattern and alpha_pattern are not read by vLLM: use LM(model), whose engine is our own"
            )
        digest = _digest(Path(folder))
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        # vLLM's prefix cache knows adapters by name. An adapter under a used name must not read that KV.
        number = next(NUMBERS)
        found = _Loaded(folder, LoRARequest(f"{name} {digest[:16]}", number, folder))
        try:
            added = self._core.ask(self._core.llm.add_lora(found.request))
        except Exception as error:
            raise AdapterError(f"{folder}: vLLM cannot load this adapter: {error}") from error
        if not added:
            raise AdapterError(f"{folder}: vLLM has not loaded this adapter; its log says why")
        self._loaded[name], self._digests[name] = found, digest

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises AdapterError: no adapter has this name, or requests hold it."""
        with self._lock:
            found = self._entry(name)
            if found.users:
                raise AdapterError(
                    f"adapter {name!r} is in use by {found.users} requests: wait for them, or cancel them, and unload it then"
                )
            del self._loaded[name], self._digests[name]
        self._core.ask(self._core.llm.remove_lora(found.request.lora_int_id))

    def hold(self, name: str) -> AdapterHold:
        """Keep an adapter loaded until the hold is released. Raises AdapterError for an unknown one."""
        with self._lock:
            found = self._entry(name)
            found.users += 1
        return AdapterHold(partial(self._release, found))

    def request_of(self, name: str | None) -> Any:
        """vLLM's `LoRARequest` of a held adapter; None for None."""
        return None if name is None else self._loaded[name].request

    def _release(self, found: _Loaded) -> None:
        with self._lock:
            found.users -= 1

    def _entry(self, name: str) -> _Loaded:
        if name not in self._loaded:
            raise AdapterError(unknown_adapter(name, sorted(self._loaded)))
        return self._loaded[name]


def _digest(folder: Path) -> str:
    try:
        data = [(folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError as error:
        raise AdapterError(f"{error.filename} cannot be read: expected a folder of PEFT's save_pretrained") from error
    return hashlib.sha256(b"|".join(hashlib.sha256(one).digest() for one in data)).hexdigest()

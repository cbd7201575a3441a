"""``lm.weights`` and ``lm.adapters``: the state of an `LM`'s weights, and the LoRA adapters beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath

from ..backend import Backend


class ModelWeights:
    """Identity of a model's weights, as they are now."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __repr__(self) -> str:
        return f"weights of {self._backend.facts.name}, version {self.version}"

    @property
    def fingerprint(self) -> str:
        """Hash of config, dtype and weights. It follows edits of the weights (models/weights/model_state.py)."""
        return self._backend.fingerprint()

    def fingerprint_with(self, lora: str | None) -> str:
        """Hash with a LoRA adapter's weights, which receipts name. Raises ValueError: there is no such adapter."""
        return self._backend.fingerprint(lora)

    @property
    def version(self) -> int:
        """Number that grows with every edit of the weights. Cheap: nothing is read from the device."""
        return self._backend.weights_version

    def check_version(self, version: int, call: str) -> None:
        """Raise RuntimeError: the weights were edited since a call began, with this version."""
        if self.version != version:
            raise RuntimeError(f"the weights of the model were edited since {call} began: call it again")


class LoadedAdapters(Mapping[str, str]):
    """LoRA adapters for requests with ``lora=name``: name -> folder. The model itself serves all other requests.

    Requests with adapters and without share steps. `max_loras` adapters are on the device at a time. A request holds a slot
    from its submission to its end. A new adapter takes the slot that was least recently used.

    Args:
        backend: loads them.
        check: raises where a call cannot run: inside a block, or after `shutdown`.
    """

    def __init__(self, backend: Backend, check: Callable[[], None]) -> None:
        self._backend, self._check = backend, check

    def load(self, name: str, folder: str | PathLike[str]) -> None:
        """Load an adapter of PEFT's format.

        Args:
            folder: has adapter_config.json and adapter_model.safetensors, as PEFT's `save_pretrained` writes them. On a server,
                a folder of its machine; only operators load adapters there.

        Raises:
            ValueError: no LoRA of this model's linear layers; `AdapterError` names the field, module or tensor. Or the name is
                taken.
            torch.OutOfMemoryError: no memory for the slots.
        """
        self._check()
        self._backend.load_adapter(name, fspath(folder))

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises ValueError: no adapter has this name, or requests in flight use it."""
        self._check()
        self._backend.unload_adapter(name)

    def __getitem__(self, name: str) -> str:
        return self._backend.adapters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backend.adapters)

    def __len__(self) -> int:
        return len(self._backend.adapters)

    def __repr__(self) -> str:
        return repr(self._backend.adapters)

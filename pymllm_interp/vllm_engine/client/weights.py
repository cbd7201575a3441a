"""`VllmWeights`: the `ModelState` of a model that vLLM has loaded. `VllmUpdate`: new weights for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from ...config import ModelConfig
from ...core.events import EngineSleepingError
from ...models.updates import NamedTensors, WeightUpdate
from ...models.weights.loading import WeightsError, iter_safetensors
from ...models.weights.model_state import ModelState, settings_of

EXPERTS = ".experts."


class VllmWeights(ModelState):
    """State of the served weights: a hash of each rank's parameters, and of the config.

    Args:
        checksums: the checksums of the ranks' weights, in rank order.
    """

    def __init__(self, config: Any, checksums: Callable[[], list[int]]) -> None:
        super().__init__(nn.Module(), config)
        self._config, self._checksums_of_ranks = config, checksums
        self._version, self._hash = 0, self._hashed()

    def _hashed(self) -> str:
        text = json.dumps([settings_of(self._config), self._checksums_of_ranks()], sort_keys=True, default=str)
        return hashlib.sha256(f"vllm {text}".encode()).hexdigest()

    @property
    def version(self) -> int:
        """Number of updates."""
        return self._version

    def changed(self) -> None:
        """The ranks have other weights."""
        self._version, self._hash = self._version + 1, ""

    def fingerprint(self, adapter: str | None = None) -> str:
        """64 hexadecimal digits. They differ for another layout of the same weights, such as the native engine's."""
        namespace = self.namespace(adapter)
        if self.asleep:
            raise EngineSleepingError("the weights are asleep: lm.wake() wakes them")
        self._hash = found = self._hash or self._hashed()
        return found if namespace is None else hashlib.sha256(f"{found}|{namespace}".encode()).hexdigest()


class VllmUpdate(WeightUpdate):
    """New weights by the names of the served checkpoint. vLLM's loader on each rank writes them.

    Args:
        tree: the client's module tree.
        hf_config, config: see `WeightUpdate`.
        folder: the served checkpoint.
        merged: modules of vLLM -> the checkpoint's modules that they hold as one (`packed_modules_mapping`).

    Attributes:
        folder: folder with all new weights, or None.
    """

    any_quantised = True

    def __init__(
        self, tree: Any, hf_config: PretrainedConfig, config: ModelConfig, folder: Path, merged: Mapping[str, Sequence[str]]
    ) -> None:  # fmt: skip
        super().__init__(tree, hf_config, config)
        self._served, self._merged = folder, {part: whole for whole, parts in merged.items() for part in parts}
        self.folder: Path | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The given tensors by name."""
        return self._given

    def add(self, weights: NamedTensors | str | Path) -> None:
        """Collect tensors, see `WeightUpdate.add`. Raises WeightsError: a folder beside others. Ranks read it themselves."""
        if self.folder is not None or (self._given and isinstance(weights, str | Path)):
            raise WeightsError("the ranks of vLLM read a folder themselves: give it alone, with all weights")
        super().add(weights)

    def _of_folder(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        source, _ = self._source_of(folder)
        assert source.folder is not None
        self._casts, self.folder = True, source.folder
        return iter_safetensors(source.folder)

    def check(self, whole: bool = False) -> None:
        """Compare the tensors with the served checkpoint's.

        vLLM loads a module anew if it gets any of its tensors. So each module's are given together.

        Raises:
            WeightsError: unknown, misshapen or missing tensors, or other dtypes, all in one message. Nothing was written.
        """
        if not self._given:
            raise WeightsError("no weights were given")
        self._problems, groups, touched = {}, dict[str, list[str]](), set[str]()
        known = {name: tensor for name, tensor in iter_safetensors(self._served) if not self._may_ignore(name, False)}
        for name in known:
            groups.setdefault(self._group(name), []).append(name)
        for name, tensor in list(self._given.items()):
            if self._may_ignore(name, False):
                del self._given[name]
            elif name not in known:
                self._problem("unknown", name)
            elif tensor.shape != known[name].shape:
                self._problem("misshapen", f"{name} is {list(tensor.shape)}, the model's is {list(known[name].shape)}")
            elif self._has_dtype(name, tensor, known[name]):
                touched.add(self._group(name))
        for group, names in groups.items():
            missing = [name for name in names if name not in self._given]
            if missing and (whole or self._casts):
                for name in missing:
                    self._problem("missing", name)
            elif missing and group in touched:
                self._problem("incomplete", f"vLLM holds {group} as one: give {', '.join(missing)}, too")
        if self._problems:
            raise WeightsError(self._message())

    def _group(self, name: str) -> str:
        """The module of vLLM that holds a tensor of the checkpoint."""
        if EXPERTS in name:
            return name[: name.index(EXPERTS) + len(EXPERTS) - 1]
        path, _, module = name.rpartition(".")[0].rpartition(".")
        return f"{path}.{self._merged.get(module, module)}"

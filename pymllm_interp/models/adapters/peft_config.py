"""`PeftConfig`: an adapter_config.json of PEFT, checked. Everything except LoRA over linear layers is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import regex

from ...utils.arguments import shown
from ...utils.files.checked_files import read_json

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
MERGE = "merge it into the weights (PEFT: model.merge_and_unload(), save_pretrained) and load that folder as a model"
REFUSED: dict[str, str] = {
    "use_dora": f"DoRA scales whole columns of the weights: {MERGE}",
    "modules_to_save": "modules_to_save replaces whole modules, which all requests share: " + MERGE,
    "trainable_token_indices": f"it changes embeddings, and adapters change linear layers only: {MERGE}",
    "target_parameters": f"it adapts parameters of experts, and adapters change linear layers only: {MERGE}",
    "layer_replication": f"it changes the number of layers: {MERGE}",
    "alora_invocation_tokens": "aLoRA begins at a token of the prompt, and adapters here act on all positions: train a LoRA",
    "lora_bias": f"biases of lora_B are not supported: {MERGE}",
    "use_qalora": f"QALoRA pools the input: {MERGE}",
    "use_bdlora": f"block-diagonal LoRA is not supported: {MERGE}",
    "arrow_config": "Arrow routes between adapters by token: load the adapters one by one",
    "kasa_config": f"KaSA is not supported: {MERGE}",
    "velora_config": f"VeLoRA is not supported: {MERGE}",
    "monteclora_config": f"MonteCLoRA is not supported: {MERGE}",
    "megatron_config": f"Megatron's layers are not supported: {MERGE}",
}
"""Fields of a config that must be empty -> why, and what to do."""
HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
        "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
"""Fields without influence on an adapter's results."""
READ = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
        "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
    }
)  # fmt: skip
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations of PEFT that write to the base weights, too."""


_NAMES = ((str, list), "a pattern, or a list of names")
EXPECTED: dict[str, tuple[type | tuple[type, ...], str]] = {
    "target_modules": _NAMES, "exclude_modules": _NAMES, "layers_pattern": _NAMES,
    "layers_to_transform": ((int, list), "a whole number, or a list of them"),
    "rank_pattern": (dict, "an object"), "alpha_pattern": (dict, "an object"), "auto_mapping": (dict, "an object"),
    "base_model_name_or_path": (str, "a name"),
}  # fmt: skip
"""Fields of a config -> their types in JSON, and descriptions for messages."""
MAX_NAMES = 4096
"""Most names or patterns of a field."""
MAX_ALPHA = 1e30
MATCH_SECONDS = 1.0
"""Timeout of matching a pattern with a module. Patterns such as `(a+)+b` need exponential time."""


class AdapterError(ValueError):
    """An adapter that cannot be served."""


@dataclass(frozen=True)
class PeftConfig:
    """Targets and scaling of a LoRA adapter. Fields have PEFT's names."""

    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...]
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    base: str = ""
    """The base model's name, for messages."""
    base_class: str = ""
    """The base model's class, if the config has it."""

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """The config in `folder`. Raises AdapterError: a missing file, another format than LoRA, or a field that is refused."""
        path = folder / CONFIG_FILE
        try:
            given = read_json(path)
        except FileNotFoundError:
            raise AdapterError(
                f"{folder} has no {CONFIG_FILE}: expected a folder that PEFT's save_pretrained wrote"
            ) from None
        except (OSError, ValueError) as error:
            raise AdapterError(f"{path} cannot be read: {error}") from error
        _check_fields(path, given)
        return cls._of(path, given)

    @classmethod
    def _of(cls, path: Path, given: dict[str, Any]) -> PeftConfig:
        for name, (kinds, expected) in EXPECTED.items():
            value = given.get(name)
            wrong = value is not None and not isinstance(value, kinds)
            if isinstance(value, list | dict):
                items = int if name == "layers_to_transform" else str
                wrong |= len(value) > MAX_NAMES or not all(isinstance(item, items) for item in value)
            if wrong:
                raise AdapterError(f"{path}: {name} is {shown(value)}: expected {expected}, {MAX_NAMES} at most")
        targets, layers = given.get("target_modules"), given.get("layers_to_transform")
        if not targets:
            raise AdapterError(f"{path}: target_modules is {shown(targets)}: expected names, or a pattern")
        found = cls(
            r=given.get("r", 8),
            lora_alpha=given.get("lora_alpha", 8),
            target_modules=_names(targets),
            use_rslora=bool(given.get("use_rslora")),
            rank_pattern=given.get("rank_pattern") or {},
            alpha_pattern=given.get("alpha_pattern") or {},
            exclude_modules=_names(given.get("exclude_modules") or ()),
            layers_to_transform=(layers,) if isinstance(layers, int) else tuple(layers) if layers else None,
            layers_pattern=_tuple(given.get("layers_pattern") or ()),
            base=given.get("base_model_name_or_path") or "",
            base_class=(given.get("auto_mapping") or {}).get("base_model_class") or "",
        )
        for name, value in [("r", found.r), *found.rank_pattern.items()]:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise AdapterError(f"{path}: the rank of {name} is {shown(value)}: expected a whole number above 0")
        for name, value in [("lora_alpha", found.lora_alpha), *found.alpha_pattern.items()]:
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_ALPHA:
                raise AdapterError(f"{path}: the alpha of {name} is {shown(value)}: expected a number")
        for pattern in (*found.rank_pattern, *found.alpha_pattern, *found._patterns(), *found.layers_pattern):
            try:
                _compiled(pattern)
            except regex.error as error:
                raise AdapterError(f"{path}: {pattern!r} is not a regular expression: {error}") from error
        return found

    def _patterns(self) -> list[str]:
        given = (self.target_modules, self.exclude_modules)
        return [pattern for pattern in given if isinstance(pattern, str)]

    def rank(self, module: str) -> int:
        """The rank at a module, by its path."""
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """Factor of the product of A and B at a module: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        alpha = self.alpha_pattern.get(_pattern_key(self.alpha_pattern, module), self.lora_alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether the adapter has weights for a linear module that is not the head, by its path."""
        if _named(self.exclude_modules, module):
            return False
        given = self.target_modules
        if isinstance(given, str) and given.lower() == ALL_LINEAR:
            return True
        return _named(given, module) and (isinstance(given, str) or module in given or self._layer_fits(module))

    def _layer_fits(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := _match(pattern, module))), None)
        return found is not None and int(found[1]) in self.layers_to_transform


def _check_fields(path: Path, given: dict[str, Any]) -> None:
    kind = given.get("peft_type")
    if str(kind).upper() != "LORA":
        raise AdapterError(f"{path}: peft_type is {shown(kind)}: only LORA is supported; {MERGE}")
    for name, why in REFUSED.items():
        if given.get(name):
            raise AdapterError(f"{path}: {name}={shown(given[name])} is not supported: {why}")
    if given.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias={shown(given['bias'])} is not supported: biases were trained, too; {MERGE}")
    init = given.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASES):
        raise AdapterError(
            f"{path}: init_lora_weights={init!r} changed the base weights, too: save the adapter as a LoRA of the unchanged ones "
            "(PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)), or merge it"
        )
    unknown = [name for name, value in given.items() if value and name not in READ | HARMLESS | REFUSED.keys()]
    if unknown:
        raise AdapterError(f"{path}: {', '.join(sorted(unknown))} is unknown, and may change the result: {MERGE}")


def _pattern_key(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the end of a module's path, as PEFT's `get_pattern_key`; else the path."""
    return next((key for key in patterns if _match(rf"(.*\.)?({key})$", module)), module)


def _named(given: str | tuple[str, ...], module: str) -> bool:
    """Whether a regular expression matches the module's whole path, or a name of a list its end."""
    if isinstance(given, str):
        return _match(rf"(?:{given})\Z", module) is not None
    return module in given or any(module.endswith(f".{name}") for name in given)


@lru_cache(maxsize=4 * MAX_NAMES)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)


def _match(pattern: str, module: str) -> Any:
    """A match at the start of a module's path. A pattern that backtracks for ever is refused."""
    try:
        return _compiled(pattern).match(module, timeout=MATCH_SECONDS)
    except TimeoutError:
        raise AdapterError(
            f"the pattern {shown(pattern)} takes more than {MATCH_SECONDS} s at {module}: simplify it"
        ) from None


def _names(given: Any) -> str | tuple[str, ...]:
    return given if isinstance(given, str) else tuple(map(str, given))


def _tuple(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(map(str, given))

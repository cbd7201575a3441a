"""Detection of vLLM architectures with supported decoder layers, without loading or importing a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from transformers import PretrainedConfig

from ..core.model_spec import has_images
from ..models.registry import architecture_of
from .refusals import VllmRefusalError
from .settings import OURS
from .structures import IMAGES, LAYERS, PLAIN

KNOWN = LAYERS.keys() | PLAIN.keys()
"""Decoder layers with sites."""


@cache
def _modules() -> dict[str, str]:
    """Architecture -> module of vLLM that implements it."""
    from vllm.model_executor.models import registry  # pyright: ignore[reportMissingImports]

    return {name: entry[0] for name, entry in registry._TEXT_GENERATION_MODELS.items()}


@cache
def _folder() -> Path:
    import vllm  # pyright: ignore[reportMissingImports]

    assert vllm.__file__ is not None
    return Path(vllm.__file__).parent / "model_executor" / "models"


@cache
def _layers_in(module: str, deeper: bool = True) -> frozenset[str]:
    """Known layers named by a module's source; else those named by the modules that it imports from its folder."""
    path = _folder() / f"{module}.py"
    if not path.is_file():
        return frozenset()
    source = path.read_text()
    found = KNOWN & set(re.findall(r"\w+", source))
    if not found and deeper:
        for other in re.findall(r"^from \.(\w+) import", source, flags=re.MULTILINE):
            found |= _layers_in(other, deeper=False)
    return frozenset(found)


def layers_of(architecture: str) -> frozenset[str]:
    """The known decoder layers of an architecture: empty where vLLM has it with others, or not at all."""
    module = _modules().get(architecture)
    return frozenset() if module is None else _layers_in(module)


def check_architecture(config: PretrainedConfig) -> frozenset[str]:
    """The decoder layers of a model. Refuses it before it is loaded.
    Raises VllmRefusalError: vLLM does not have it, or its decoder layers are not known here."""
    architecture = architecture_of(config)
    if has_images(config):
        if architecture not in IMAGES:
            raise VllmRefusalError(
                f"vLLM's {architecture} reads images, and its states are not known here; those with images are "
                f"{', '.join(IMAGES)}. {OURS}"
            )
        architecture = IMAGES[architecture] or architecture_of(config.get_text_config())
    if architecture not in _modules():
        raise VllmRefusalError(f"vLLM has no {architecture} among its models that generate text. {OURS}")
    if not (found := layers_of(architecture)):
        raise VllmRefusalError(
            f"vLLM's {architecture} has decoder layers, and their norms are not known to get a pair of delta and stream. Known are "
            f"{', '.join(sorted(KNOWN))}. {OURS}"
        )
    return found


def table() -> Iterator[str]:
    """The rows of the table in docs/engine/vllm.md: decoder layers, and the architectures that have them."""
    rows: dict[str, list[str]] = {name: [] for name in KNOWN}
    for architecture in sorted(_modules()):
        for layer in layers_of(architecture):
            rows[layer].append(architecture)
    for layer, architectures in sorted(rows.items()):
        if architectures:
            yield f"| `{layer}` | {', '.join(f'`{name}`' for name in architectures)} |"

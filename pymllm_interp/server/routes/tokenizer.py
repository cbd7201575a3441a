"""The served model's tokenizer in the HTTP process, without torch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def import_library() -> Any:
    """transformers; its tokenizers need no torch."""
    import transformers

    return transformers


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder that `save_pretrained` wrote.

    `AutoTokenizer` imports torch (seconds, and 0.3 GB): it is the last resort, for tokenizers that are Python code.
    """
    transformers = import_library()
    name = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    cls = getattr(transformers, str(name), None)
    if cls is None or not issubclass(cls, transformers.PreTrainedTokenizerFast):
        logger.warning("the tokenizer %s is loaded by transformers.AutoTokenizer, which imports torch", name)
        cls = transformers.AutoTokenizer
    return cls.from_pretrained(folder, local_files_only=True)

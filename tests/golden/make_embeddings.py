"""Writes embeddings.json: sentence-transformers' embeddings of a tiny random model, in an environment with it (6.2.0).

    python -m venv stenv
    stenv/bin/pip install torch==2.13.0 sentence-transformers==6.2.0
    stenv/bin/python tests/golden/make_embeddings.py

The model is that of tests/support/helpers_st.py: mean and last pooling side by side, a dense layer, a prompt that is not pooled.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent)]

from helpers_st import TEXTS, folder_of_modules  # noqa: E402


def main() -> None:
    """Encode the texts with and without the prompt, and with fewer dimensions."""
    from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory() as folder:
        folder_of_modules(Path(folder))
        model = SentenceTransformer(folder, device="cpu", local_files_only=True)
        found = {
            "plain": model.encode(TEXTS).tolist(),
            "query": model.encode(TEXTS, prompt_name="query").tolist(),
            "short": model.encode(TEXTS, truncate_dim=5, normalize_embeddings=True).tolist(),
        }
    found |= {"made_by": f"sentence-transformers {version('sentence-transformers')}"}
    (HERE / "embeddings.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

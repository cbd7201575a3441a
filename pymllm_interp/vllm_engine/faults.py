"""Start errors of ranks, passed on to the client. vLLM itself refers only to its log."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .refusals import VllmRefusalError

VARIABLE = "PYMLLM_INTERP_VLLM_FAULTS"
"""Environment variable with the file that ranks write to. Ranks on other hosts do not have it: their log has the cause."""


@contextmanager
def told(rank: int) -> Iterator[None]:
    """Write an error of the block to the client's file."""
    try:
        yield
    except BaseException as error:
        if name := os.environ.get(VARIABLE):
            kind = "refused" if isinstance(error, NotImplementedError) else "failed"
            with open(name, "a") as file:
                file.write(f"{kind} rank {rank}: {type(error).__name__}: {error}\n")
        raise


@contextmanager
def with_causes() -> Iterator[None]:
    """Raise the errors that ranks have written instead of an error of the block.

    Raises:
        VllmRefusalError: a rank has refused the model or a setting.
        RuntimeError: a rank has failed.
    """
    with tempfile.TemporaryDirectory(prefix="pymllm-interp-") as folder:
        file = Path(folder) / "faults"
        os.environ[VARIABLE] = str(file)
        try:
            yield
        except Exception as error:
            causes = file.read_text().splitlines() if file.is_file() else []
            refused = [line.removeprefix("refused ") for line in causes if line.startswith("refused ")]
            if refused:
                raise VllmRefusalError(refused[0]) from error
            if causes:
                raise RuntimeError(
                    "vLLM did not start: " + "; ".join(causes[:4]).replace("failed rank", "rank")
                ) from error
            raise
        finally:
            os.environ.pop(VARIABLE, None)

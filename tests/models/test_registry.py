"""Every name in transformers' registry of causal language models: right, or refused by name: docs/reference/models.md.

`PYTHONPATH=tests:tests/support python tests/models/test_registry.py [NAME ...]` writes the rows of all names, or of these. The
tests compare each row.
"""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import transformers
from helpers_families import points_of, states_of
from helpers_paths import ROOT
from helpers_runner import part_of
from registry_configs import NAMES, registry_config
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.core.model_spec import NUMBERED_SITES
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.models.registry import is_native

DOCUMENT = ROOT / "docs" / "reference" / "models.md"
AT_LEAST = 154
"""Names that are right."""
LENGTHS = 5, 2, 37
HOW, ERROR = 2, 4
"""Columns of a row: how a name runs, and the error, which may differ from machine to machine."""
NOT_SERVED = " refused ", " untried "
IS_WRITTEN_WITH = f"transformers {transformers.__version__}" in DOCUMENT.read_text()
"""Whether the installed transformers is the one of the document."""
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
MAX_ERROR = 1e-4
"""Largest difference of a state, over its largest value."""
NO_CONFIG = "no tiny config"
FIRST = "|---|---|---|---|---|\n"
"""The line before the rows."""


def row(name: str) -> str:
    """The row of a name. A name whose tokens differ from transformers' is "wrong", which no row of the document may be."""
    try:
        config = registry_config(name)
    except Exception:
        return f"| {name} | untried | | | {NO_CONFIG} |"
    try:
        lm = LM(
            hf_config=config, load_format="dummy", impl="auto", device="cpu", dtype="float32", kv_cache_tokens=256,
            page_size=4, max_num_tokens=16, max_running_requests=4, max_model_len=64,
        )  # fmt: skip
    except UnsupportedModelError as error:
        return f"| {name} | refused | | | {str(error).partition(': ')[2] or error} |".replace("\n", " ")
    except Exception as error:
        return f"| {name} | untried | | | {type(error).__name__} when it was built |"
    try:
        generator = torch.Generator().manual_seed(len(name))
        prompts = [torch.randint(5, 97, (n,), generator=generator).tolist() for n in LENGTHS]
        spec, points = lm.model_spec, points_of(lm.model_spec)
        outs = lm.generate(prompts, GREEDY, capture=[*points, "logits"])
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        oracle.load_state_dict(lm.runner.get_model().state_dict())
        error = 0.0
        for ids, out in zip(prompts, outs, strict=True):
            found, logits = states_of(oracle, points, ids + out.token_ids[:-1])
            if logits[len(ids) - 1 :].argmax(-1).tolist() != out.token_ids:
                return f"| {name} | wrong | | | |"
            expected = {site: part_of(spec, site.partition(".")[0], state) for site, state in found.items()}
            expected["logits"] = logits[-len(out.activations["logits"]) :]
            for site, state in expected.items():
                difference = (out.activations[site].flatten(1) - state).abs().max() / state.abs().max()
                error = max(error, float(difference))
        how = "native" if is_native(config, "auto") else "transformers"
        graph = lm.runner.get_model().why_no_graphs or "yes"
        sites = ", ".join(kind for kind in spec.family.points if kind in NUMBERED_SITES)
        return f"| {name} | {how} | {graph} | {error:.0e} | {sites} |"
    finally:
        lm.shutdown()


def rows() -> dict[str, str]:
    """Name -> row, of the document."""
    lines = DOCUMENT.read_text().splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ") and " | " in line}


def test_the_document_has_each_name_of_the_version_that_it_names() -> None:
    """And each name of a version before it: none is dropped without a word."""
    assert not set(NAMES) - rows().keys()


@pytest.mark.thin(8)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_registry_runs_as_its_row_says(name: str) -> None:
    found, written = (line.split("|") for line in (row(name), rows()[name]))
    if not IS_WRITTEN_WITH and written[HOW] in NOT_SERVED:  # other versions fail elsewhere
        assert found[HOW] in NOT_SERVED
        return
    assert found[:ERROR] + found[ERROR + 1 :] == written[:ERROR] + written[ERROR + 1 :]
    if found[ERROR].strip():
        assert float(found[ERROR]) < MAX_ERROR > float(written[ERROR])


def test_the_document_has_no_wrong_row_and_enough_right_ones() -> None:
    how = [line.split(" | ")[1] for name, line in rows().items() if name in NAMES]
    assert "wrong" not in how and how.count("native") + how.count("transformers") >= AT_LEAST


if __name__ == "__main__":
    written, text = rows(), DOCUMENT.read_text()
    table = {name: row(name) if name in (sys.argv[1:] or NAMES) else written[name] for name in sorted(NAMES)}
    DOCUMENT.write_text(text[: text.index(FIRST) + len(FIRST)] + "\n".join(table.values()) + "\n")

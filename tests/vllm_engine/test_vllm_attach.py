"""`LM.attach`: a user's own `vllm.LLM` with hooks, beside its own calls."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from helpers_processes import pidfds
from helpers_vllm import assert_close, needs_vllm, own_lm, prompt, save_model, vector
from helpers_vllm_start import fork_engines

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.vllm_engine import llm_arguments
from pymllm_interp.vllm_engine.refusals import VllmRefusalError

PROMPTS = [prompt(30, 1), prompt(9, 2), prompt(17, 3)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
OPS: list[Any] = [[Steer("resid_post.1", vector(1), 2.0)], None, [Steer("z.0", vector(2, 128))]]


@needs_vllm
def test_an_llm_with_hooks_serves_its_user_and_an_lm(tmp_path: Path) -> None:
    """Values are our engine's; calls of both at a time get their own outputs; `shutdown` gives the engine back."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm import SamplingParams as Params  # pyright: ignore[reportMissingImports]

    fork_engines()
    folder = save_model("llama", tmp_path / "llama")
    llm = LLM(
        str(folder), dtype="float32", max_model_len=128, enforce_eager=True, gpu_memory_utilization=0.05, block_size=32,
        num_gpu_blocks_override=64, max_num_seqs=8, **llm_arguments(inner_sites=("z",)),
    )  # fmt: skip
    given = [{"prompt_token_ids": ids} for ids in PROMPTS]
    params = Params(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def tokens() -> list[list[int]]:
        return [list(out.outputs[0].token_ids) for out in llm.generate(given, params, use_tqdm=False)]

    before, files = tokens(), pidfds()
    LM.attach(llm).shutdown()
    assert pidfds() == files
    lm = LM.attach(llm)
    with own_lm(folder) as oracle:
        wanted = oracle.generate(PROMPTS, PARAMS, interventions=OPS, capture=["resid_post.*", "z.1"])
    users: list[Any] = []
    beside = threading.Thread(target=lambda: users.extend(tokens() for _ in range(3)))
    beside.start()
    for _ in range(3):
        for one, other in zip(
            lm.generate(PROMPTS, PARAMS, interventions=OPS, capture=["resid_post.*", "z.1"]), wanted, strict=True
        ):
            assert_close(one, other)
    pieces = list(lm.stream(PROMPTS[0], PARAMS, interventions=OPS[0]))
    assert [token for piece in pieces for token in piece.token_ids] == wanted[0].token_ids
    beside.join(300)
    assert users == [before] * 3
    handle = lm.submit(PROMPTS[0], SamplingParams(max_tokens=90, ignore_eos=True))
    handle.cancel()
    assert handle.result(60).finish_reason in ("abort", "length")
    with pytest.raises(ValueError, match="another LM is attached"):
        LM.attach(llm)
    assert lm.generate(PROMPTS[:1], PARAMS)[0].token_ids == before[0] and pidfds() > files
    lm.shutdown()
    assert tokens() == before and pidfds() == files
    llm.llm_engine.vllm_config.parallel_config.worker_cls = "auto"
    with pytest.raises(VllmRefusalError, match=r"vllm.LLM\(model, \*\*llm_arguments\(\)\)"):
        LM.attach(llm)


@needs_vllm
def test_settings_that_ranks_do_not_read_are_named() -> None:
    with pytest.raises(TypeError, match=r"llm_arguments\(page_size\): ranks read .*inner_sites"):
        llm_arguments(page_size=3)

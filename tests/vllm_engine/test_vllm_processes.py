"""vLLM's processes: plain vLLM gives the same bits. The canary, a rank of another version, and a rank that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_vllm import WIDTH, needs_vllm, prompt, ranks_of, save_model, vector, vllm_lm
from helpers_vllm_start import fork_engines

from pymllm_interp import LM, Ablate, SamplingParams, Steer
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.vllm_engine.refusals import VllmRefusalError
from pymllm_interp.vllm_engine.settings import KEY
from pymllm_interp.vllm_engine.worker.worker import WITHOUT_OP

pytestmark = needs_vllm
PROMPTS = [prompt(9, 1), prompt(40, 2), prompt(23, 3), prompt(31, 4)]
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def vanilla(folder: Path) -> list[Any]:
    """Tokens and log probabilities of vLLM as it is."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams as Params  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    fork_engines()

    async def main() -> list[Any]:
        arguments = AsyncEngineArgs(
            str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128, max_num_seqs=8, enforce_eager=True,
            gpu_memory_utilization=0.05, num_gpu_blocks_override=64, block_size=32, disable_log_stats=True,
        )  # fmt: skip
        llm = AsyncLLM.from_engine_args(arguments)
        params = Params(
            temperature=0,
            max_tokens=LENGTH,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(number: int, ids: list[int]) -> Any:
            async for out in llm.generate({"prompt_token_ids": ids}, params, str(number)):
                (found,) = out.outputs
                return [
                    (token, step[token].logprob) for token, step in zip(found.token_ids, found.logprobs, strict=True)
                ]

        try:
            return await asyncio.gather(*(one(i, ids) for i, ids in enumerate(PROMPTS)))
        finally:
            llm.shutdown()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def lm(vanilla: list[Any], folder: Path) -> Iterator[LM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "30")
        with vllm_lm(folder) as found:
            yield found


def bits_of(outs: list[Any]) -> list[Any]:
    return [
        [(token, step[token].logprob) for token, step in zip(out.token_ids, out.outputs[0].logprobs, strict=True)]
        for out in outs
    ]


PARAMS = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=1)


def test_idle_tables_change_no_bit_of_vllm(lm: LM, vanilla: list[Any]) -> None:
    assert bits_of(lm.generate(PROMPTS, PARAMS)) == vanilla


def test_nor_do_steered_neighbours(lm: LM, vanilla: list[Any]) -> None:
    lm.reset_prefix_cache()
    ops = [[Steer("resid_post.*", vector(1), 3.0)], None, [Steer("mlp_out.1", vector(2))], None]
    found = bits_of(lm.generate(PROMPTS, PARAMS, interventions=ops, capture=[None, None, ["resid_post.*"], None]))
    for i in (1, 3):
        assert found[i] == vanilla[i]
    for i in (0, 2):
        assert found[i] != vanilla[i]


def test_compiled_code_of_a_vanilla_vllm_has_another_key(lm: LM, folder: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    own: Any = lm.backend
    config = own.core.config
    assert config.additional_config[KEY]["version"]
    plain = AsyncEngineArgs(
        str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128
    ).create_engine_config()
    before = plain.compute_hash()
    plain.additional_config = config.additional_config
    assert plain.compute_hash() != before


def test_another_version_on_a_rank_is_named(lm: LM) -> None:
    from pymllm_interp.vllm_engine.settings import server_config_of

    own: Any = lm.backend
    told = {KEY: own.core.config.additional_config[KEY] | {"version": "0.0.9"}}
    with pytest.raises(ValueError, match=r"this rank has pymllm-interp .*the client has 0\.0\.9"):
        server_config_of(told)


def test_without_the_op_the_canary_refuses_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_OP, "1")
    with pytest.raises(VllmRefusalError, match="the canary failed"):
        vllm_lm(folder)


def test_a_client_of_another_version_is_refused_by_its_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pymllm_interp.vllm_engine import settings

    monkeypatch.setattr(settings, "__version__", "0.0.9")  # of this process; ranks import the package themselves
    with pytest.raises(RuntimeError, match=r"rank 0: .*this rank has pymllm-interp .*the client has 0\.0\.9"):
        vllm_lm(folder)


def test_a_rank_that_hangs_ends_what_waits(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of this engine."""
    from pymllm_interp.vllm_engine.client import core

    monkeypatch.setattr(core, "CALL_SECONDS", 2.0)
    (rank,) = ranks_of(lm)
    rank.suspend()
    try:
        fresh = [Ablate("resid_mid.1", vector(77, 3, WIDTH))]  # large enough to be sent before the request
        handle = lm.submit(PROMPTS[0], PARAMS, interventions=fresh, capture=["resid_post.*"])
        handle.wait(120)
        (end,) = handle.ends
        # The call's own limit, or the watch over ranks, whichever comes first.
        late = isinstance(end.error, TimeoutError) and "has not answered interp_put within 2 s" in str(end.error)
        assert late or (isinstance(end.error, EngineClosedError) and "rank 0 of 1" in str(end.error))
        with pytest.raises(EngineClosedError, match="vLLM's engine has ended"):
            for _ in range(100):
                lm.generate([PROMPTS[0]], PARAMS)
    finally:
        rank.resume()

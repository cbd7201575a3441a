"""Pipeline ranks and data parallel engines of vLLM against our own engine, and ranks that are stopped, or lose their client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_saes import random_sae
from helpers_vllm import (
    LAYERS,
    WIDTH,
    assert_close,
    assert_close_tensor,
    assert_ends_with_a_rank,
    assert_same_scores,
    engine_of,
    needs_runner,
    needs_vllm,
    own_lm,
    prompt,
    ranks_of,
    save_model,
    shared_files,
    since,
    two_ranks,
    vector,
    vllm_lm,
)
from safetensors.torch import load_file

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.captures import Features, Lens, Project
from pymllm_interp.interventions import Generated, Monitor
from pymllm_interp.vllm_engine.orphans import shared_by
from pymllm_interp.vllm_engine.refusals import VllmRefusalError

pytestmark = needs_vllm
INNER = ("q", "k", "v", "z", "mlp_act")
PROMPTS = [prompt(30, 1), prompt(45, 2), prompt(17, 3), prompt(52, 4), prompt(1, 5), prompt(33, 6)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
OPS: list[Any] = [
    [Steer("resid_post.*", vector(1), 0.5), Scale("mlp_out.*", 0.7, positions=slice(3, None, 2))],
    None,
    [Ablate("resid_mid.*", vector(3, 2, WIDTH)), Scale("attn_out.2", 0.5, positions="generated"), Scale("z.*", 0.0, heads=[0, 2])],
    [Patch("resid_pre.2", vector(4, 3, WIDTH), positions=[0, 2, -1]), Clamp(f"resid_post.{LAYERS - 1}", vector(5), high=0.5)],
    [Steer("embed", vector(6), 0.3), Steer("final_norm", vector(7), positions=Generated(1, 6, 2))],
    [Steer(f"resid_post.{layer}", vector(8), when=Gate(vector(9), 0.0, site=f"resid_pre.{layer}")) for layer in (0, 2)],
]  # fmt: skip
CAPTURED: list[Any] = [
    [f"{kind}.*" for kind in ("attn_out", "resid_mid", "mlp_out", "resid_post", *INNER)],
    None,
    [Capture("resid_post.*", reduce="mean"), Capture("resid_mid.1", positions=[0, -1]), Capture("resid_mid.3", dtype="float16")],
    ["attn_out.3", Capture("resid_pre.*", reduce=Project(vector(11, 3, WIDTH)))],
    ["embed", "final_norm", "logits"],
    [Capture("mlp_out.*", reduce="last"), "attn_in.*", "mlp_in.*"],
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Iterator[LM]:
    with own_lm(folder) as found:
        yield found


def engine(folder: Path, **options: Any) -> Iterator[LM]:
    with pytest.MonkeyPatch.context() as patch:
        two_ranks(patch, options)
        with vllm_lm(folder, max_num_tokens=48, inner_sites=INNER, **options) as found:
            yield found


GRID = "V1, two by two"


@pytest.fixture(scope="module", params=["V1", *(pytest.param(one, marks=pytest.mark.slow) for one in ("V2", GRID))])
def stages(request: pytest.FixtureRequest, folder: Path) -> Iterator[LM]:
    """Two pipeline stages, with two layers each; of one rank, or of two tensor-parallel ones."""
    needs_runner(request.param == "V2")
    yield from engine(folder, pipeline_parallel_size=2, tensor_parallel_size=2 if request.param == GRID else 1)


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[LM]:
    """Two data parallel engines."""
    yield from engine(folder, data_parallel_size=2)


def runner_of(lm: LM) -> str:
    backend: Any = lm.backend
    return backend.core.ranks[0]["runner"]


def assert_same(lm: LM, oracle: LM) -> list[Any]:
    """Different requests at once, in chunks of 48, twice: the second time behind cached pages."""
    for captured in (CAPTURED, None):
        found, wanted = (model.generate(PROMPTS, PARAMS, interventions=OPS, capture=captured) for model in (lm, oracle))
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    return found


def test_stages_have_the_states_of_one_rank(stages: LM, oracle: LM) -> None:
    found = assert_same(stages, oracle)
    assert {mode for out in found if out.receipt for mode in out.receipt.steps} == {f"vllm {runner_of(stages)} none"}
    assert f"{len(ranks_of(stages))} ranks" in stages.backend.facts.engine_name


def test_captures_of_all_stages_stream(stages: LM, oracle: LM) -> None:
    captures = [
        Capture("resid_post.*", stream=True),
        Capture("attn_out.0", reduce="mean", stream=True),
        Capture("final_norm"),
    ]
    pieces = list(stages.stream(PROMPTS[1], PARAMS, capture=captures))
    (wanted,) = oracle.generate([PROMPTS[1]], PARAMS, capture=captures)
    parts, whole = [piece.captures for piece in pieces if piece.captures is not None], pieces[-1].activations
    assert list(whole) == list(wanted.activations) and len(parts) > 1
    for site in set(whole) - {"final_norm"}:
        assert torch.equal(torch.cat([part[site] for part in parts if site in part]), whole[site]), site
        assert_close_tensor(whole[site], wanted.activations[site], site)


def monitors_of(oracle: LM) -> list[Any]:
    """For each prompt two monitors, one of each stage. They record, stop, or begin ops in both stages; two prompts have none."""
    ops = {0: [Steer("resid_post.2", vector(14), 4.0)], 3: [Ablate("mlp_out.0", vector(15)), Scale("attn_out.3", 0.3)]}
    found: list[Any] = []
    for i, out in enumerate(oracle.generate(PROMPTS, PARAMS, interventions=OPS, capture=["resid_post.{0,3}"])):
        own = []
        for layer, then in ops.items():
            scores = sorted((out.activations[f"resid_post.{layer}"][-6:] @ vector(12)).tolist())
            low, high = max(pairwise(scores), key=lambda gap: gap[1] - gap[0])
            acts = {0: "record", 1: "stop" if layer else "record", 2: then, 5: then if layer else "stop"}.get(
                i, "record"
            )
            own.append(Monitor(f"resid_post.{layer}", vector(12), (low + high) / 2, then=acts, name=f"layer {layer}"))
        found.append(None if i in (3, 4) else own)
    return found


def test_monitors_of_all_stages_record_stop_and_act(stages: LM, oracle: LM) -> None:
    monitors = monitors_of(oracle)
    wanted = oracle.generate(PROMPTS, PARAMS, interventions=OPS, monitors=monitors, capture=CAPTURED)
    assert {out.finish_reason for out in wanted} == {"monitor", "length"}
    assert any(one.monitor and one.generated_rows for out in wanted for one in out.receipt.interventions)
    for _ in range(2):
        found = stages.generate(PROMPTS, PARAMS, interventions=OPS, monitors=monitors, capture=CAPTURED)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
            assert one.finish_reason == other.finish_reason
            assert_same_scores(one, other)
    pieces = list(stages.stream(PROMPTS[1], PARAMS, interventions=OPS[1], monitors=monitors[1]))
    assert [token for piece in pieces for token in piece.token_ids] == wanted[1].token_ids
    assert_same_scores(pieces[-1], wanted[1])


def test_an_abort_leaves_the_others_as_they_are(stages: LM, oracle: LM) -> None:
    options: Any = {
        "interventions": OPS[0],
        "capture": ["resid_post.*"],
        "monitors": [Monitor("resid_mid.3", vector(1))],
    }
    ended = [stages.submit(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True), **options) for _ in range(2)]
    kept = stages.submit(PROMPTS[2], PARAMS, **options)
    for handle in ended:
        handle.cancel()
    for out in (handle.result(600) for handle in ended):
        states = out.outputs[0].activations
        assert len(states["resid_post.0"]) == len(states["resid_post.3"])
    assert_close(kept.result(600), oracle.generate([PROMPTS[2]], PARAMS, **options)[0])


def test_what_needs_several_stages_is_refused_by_name(stages: LM) -> None:
    crosscoder = random_sae(2 * WIDTH, "resid_post.{0,3}")
    crossing = Steer("resid_post.2", vector(8), when=Gate(vector(9), 0.0, site="resid_post.0"))
    for options, message in (
        ({"interventions": [crossing]}, "another pipeline rank"),
        ({"capture": [Capture("resid_post.1", reduce=Lens(top_k=2))]}, "other ranks have it"),
        (
            {"capture": [Capture("resid_post.{0,3}", reduce=Features(crosscoder, top_k=2))]},
            "a crosscoder reads all its sites",
        ),
    ):
        with pytest.raises(ValueError, match=f"{message}|(pipeline|tensor)_parallel_size=2"):
            stages.generate([PROMPTS[0]], PARAMS, **options)
    with pytest.raises(VllmRefusalError, match="no pipeline ranks"), stages.trace(PROMPTS[0]):
        for i in range(3):  # a loop does not lower
            if stages.model.layers[i].output.sum() > 0:
                stages.model.layers[i].output[:] = 0
    assert stages.generate([PROMPTS[0]], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def assert_new_weights(lm: LM, oracle: LM, folder: Path) -> None:
    """New weights in the first and the last layer reach all ranks; then the old ones."""
    old = load_file(folder / "model.safetensors")
    own = {
        name: value for name, value in old.items() if "layers.0.mlp.down" in name or "layers.3.input_layernorm" in name
    }
    assert len(own) == 2
    for weights in ({name: 1.5 * value for name, value in own.items()}, own):
        found = []
        for model in (lm, oracle):
            model.update_weights(weights)
            found += model.generate(PROMPTS, PARAMS, interventions=OPS, capture=["resid_post.*"])
        for one, other in zip(found[: len(PROMPTS)], found[len(PROMPTS) :], strict=True):
            assert_close(one, other)


def test_new_weights_reach_all_stages(stages: LM, oracle: LM, folder: Path) -> None:
    assert_new_weights(stages, oracle, folder)


def test_a_stopped_rank_or_killed_engine_is_named(stages: LM) -> None:
    """The last test of this engine."""
    files, ranks = shared_files(stages), ranks_of(stages)
    handles = [
        stages.submit(ids, SamplingParams(max_tokens=70, ignore_eos=True), capture=["resid_post.*"])
        for ids in PROMPTS[:3]
    ]
    if len(ranks) == 2:
        ranks[1].suspend()
        message = r"rank 1 of 2 \(process \d+\) is stopped \(SIGSTOP\)"
    else:
        engine_of(stages).kill()
        message = r"the process of engine 0 of 1, above its ranks, \(process \d+\) (was ended by SIGKILL|has ended)"
    assert_ends_with_a_rank(stages, handles, message, files)


def test_engines_share_the_requests(replicas: LM, oracle: LM) -> None:
    found = assert_same(replicas, oracle)
    used = {mode for out in found if out.receipt for mode in out.receipt.steps}
    assert used == {"vllm V1 none, engine 0", "vllm V1 none, engine 1"}
    handles = [
        replicas.submit(ids, SamplingParams(max_tokens=60, ignore_eos=True), capture=["mlp_out.1"]) for ids in PROMPTS
    ]
    handles[0].cancel()
    for handle in handles:
        assert handle.result(600).finish_reason in ("abort", "length")
    engine: Any = replicas.backend.engine
    stats = engine.stats()
    assert (replicas.limits.kv_tokens, stats["kv_tokens"], stats["free_kv_tokens"]) == (
        2048,
        4096,
        4096,
    )  # of one pool; of all
    assert engine.stats()["running"] == 0 and not any(engine._loads)


def test_blocks_run_on_each_engine(replicas: LM, oracle: LM) -> None:
    def read(lm: LM, ids: list[int]) -> Any:
        with lm.trace(ids):
            layer = lm.model.layers[1]
            layer.mlp.output[:] *= 0.5 if layer.output.sum() > 0 else 0.25
            found = lm.model.layers[3].output.save()
        return found

    for ids in PROMPTS[:3]:
        assert_close_tensor(read(replicas, ids), read(oracle, ids))


def test_new_weights_reach_all_engines(replicas: LM, oracle: LM, folder: Path) -> None:
    assert_new_weights(replicas, oracle, folder)


@since("0.30", "its kernel for CPUs chooses experts by itself")
def test_experts_that_move_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With EPLB, which runs on GPUs only, a router ends with the numbers of copies. `experts.i` has those of the model."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter  # pyright: ignore[reportMissingImports]

    from pymllm_interp.vllm_engine.worker import op
    from pymllm_interp.vllm_engine.worker.taps import _choosing_class

    class Balanced(CPURouter):
        moved = torch.arange(6)

        def _apply_eplb_mapping(self, topk_ids: torch.Tensor) -> torch.Tensor:
            return self.moved[topk_ids.long()].to(topk_ids.dtype)

    found: list[torch.Tensor] = []
    handle = len(op.STAGES)
    monkeypatch.setitem(
        op.STAGES, handle, SimpleNamespace(inner=lambda rows, sites, widths: found.append(rows.clone()))
    )
    router: Any = Balanced(top_k=2, global_num_experts=6, renormalize=True)
    router.__class__ = _choosing_class(Balanced)
    router.tap_dtype, router.tap_sites, router.tap_widths, router.tap_handle = torch.float32, [7], [4], handle
    states, scores = vector(1, 5, 8), vector(2, 5, 6)
    _, before = router.select_experts(states, scores)
    router.moved = torch.tensor([5, 3, 4, 0, 1, 2])  # between two steps
    _, after = router.select_experts(states, scores)
    assert torch.equal(after.long(), router.moved[before.long()]) and not torch.equal(after, before)
    assert torch.equal(found[0], found[1]) and torch.equal(
        found[0][:, :2].sort(-1)[0].long(), scores.topk(2)[1].sort(-1)[0]
    )


CLIENT = """
import sys
from pymllm_interp import LM, SamplingParams

if __name__ == "__main__":
    small = dict(dtype="float32", max_model_len=128, kv_cache_tokens=2048, disable_cuda_graph=True, gpu_memory_utilization=0.05)
    with LM(sys.argv[1], engine="vllm", tensor_parallel_size=int(sys.argv[2]), **small) as lm:
        print("serves", flush=True)
        while True:
            lm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, ignore_eos=True))
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_end_after_a_client_that_was_killed(ranks: int, tmp_path: Path) -> None:
    import psutil  # pyright: ignore[reportMissingModuleSource]

    (tmp_path / "client.py").write_text(CLIENT)
    command = [sys.executable, str(tmp_path / "client.py"), str(save_model("llama", tmp_path / "model")), str(ranks)]
    bound = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[:ranks])}
    with subprocess.Popen(command, env=bound, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None and any(line == "serves\n" for line in client.stdout)
        left = psutil.Process(client.pid).children(recursive=True)
        segments = {Path("/dev/shm", name) for one in left for name in shared_by(one.pid)}
        assert len(left) >= ranks and (segments or ranks == 1)
        client.kill()
        assert not psutil.wait_procs(left, 30)[1], "processes that nobody can reach any more"
    assert not [segment for segment in segments if segment.exists()]

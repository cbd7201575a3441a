"""Decode passes of transformers' own classes as CUDA graphs: what is captured, what is not and why."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_configs import VOCAB, tiny_config
from helpers_graphs import use_eager_graphs
from helpers_runner import ByHand
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.current_pass import current_pass
from pymllm_interp.core.forward_batch import ForwardBatch, ForwardMode
from pymllm_interp.core.model_spec import num_sites
from pymllm_interp.layers.edits.host import HostOps, RowCapture
from pymllm_interp.models.transformers.fused_parts import fuse_parts
from pymllm_interp.models.transformers.probe import WaitsForDevice
from pymllm_interp.runner.graphs.captured_passes import DECLARED, PLAIN
from pymllm_interp.runner.graphs.cuda_graph_runner import CudaGraphRunner
from pymllm_interp.runner.interp_model_runner import InterpModelRunner

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 17, 3], [80, 44, 9, 61, 2], [7]]
CAPTURED = ("llama", "gpt2", "gpt_neox", "gemma2", "phi3", "gptj", "olmo2", "deepseek_v2", "gpt_oss")
EXPERTS = ("deepseek_v2", "gpt_oss")
SIZES: dict[str, Any] = {"kv_cache_tokens": 512, "page_size": 4, "max_num_tokens": 16, "max_running_requests": 4}


def load(family: str, **options: Any) -> LM:
    given = {"load_format": "dummy", "impl": "transformers", "device": "cpu", "dtype": "float32", **SIZES, **options}
    return LM(hf_config=tiny_config(family), **given)


@pytest.mark.parametrize("family", CAPTURED)
def test_captured_passes_are_those_that_run_eagerly(family, monkeypatch):
    eager = load(family)
    expected = [out.token_ids for out in eager.generate(PROMPTS, GREEDY)]
    use_eager_graphs(monkeypatch)
    captured = load(family)
    runner = captured.runner
    assert set(runner.graphs.decoders) == {DECLARED, PLAIN} and runner.graphs.prefill is None
    replays: list[CudaGraphRunner] = []
    replay = CudaGraphRunner.replay
    monkeypatch.setattr(CudaGraphRunner, "replay", lambda self, *args: replays.append(self) or replay(self, *args))
    captured.runner.get_model().load_state_dict(eager.runner.get_model().state_dict())
    assert [out.token_ids for out in captured.generate(PROMPTS, GREEDY)] == expected
    assert replays and set(replays) == {runner.graphs.decoders[PLAIN]}, "without ops, their kernels are left out"
    eager.shutdown()
    captured.shutdown()
    assert PLAIN not in runner.graphs.decoders


def test_requests_with_ops_and_traces_beside_captured_passes(monkeypatch):
    use_eager_graphs(monkeypatch)
    lm = load("llama")
    alone = lm.generate(PROMPTS, GREEDY)
    steer = Steer("resid_post.0", torch.linspace(-1, 1, 32))
    mixed = lm.generate(PROMPTS, GREEDY, interventions=[None, [steer], None])
    assert [mixed[i].token_ids for i in (0, 2)] == [alone[i].token_ids for i in (0, 2)]
    with lm.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True) as tracer:
        states = list().save()
        for _ in tracer.iter[:]:
            states.append(lm.model.layers[0].output.clone())
    captured = lm.generate([PROMPTS[0]], GREEDY, capture=["resid_post.0"])[0].activations["resid_post.0"]
    torch.testing.assert_close(torch.cat([state[0] for state in states]), captured, rtol=1e-4, atol=1e-4)
    lm.shutdown()


@pytest.mark.parametrize("family", CAPTURED)
def test_ops_act_in_passes_from_before_there_is_a_tree(family):
    """As when an engine captures its graphs: the envoys, whose controllers call the sites later, are made afterwards."""

    def run(**wrap: Any) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        model = ModelConfig(hf_config=tiny_config(family), impl="transformers", load_format="dummy", dtype="float32")
        runner = InterpModelRunner(ServerConfig(device="cpu", **SIZES), model, **wrap)
        runner.initialize()
        seen: dict[int, torch.Tensor] = {}
        batch, rows = ByHand(runner).batch({0: [5, 6, 7]}), (0, 3)
        sites = range(num_sites(runner.num_hidden_layers))
        ops: dict[int, Any] = {site: [(rows, lambda x, site=site: x * (1 + 0.01 * site) + 0.1)] for site in sites}
        taker = SimpleNamespace(put=lambda site, first, states, *_: seen.__setitem__(site, states[:3].clone()))
        captures = {site: [RowCapture(*rows, 0, taker, site)] for site in sites}
        batch.site_ops = HostOps(ops, captures, runner.num_hidden_layers)
        logits = runner.forward(batch).next_token_logits
        runner.shutdown()
        return seen, logits

    (wanted, logits), (found, own) = run(), run(wrap=None)
    assert found.keys() == wanted.keys() and len(found) >= 9
    torch.testing.assert_close(own, logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("falcon", "over the lengths in the batch"), ("llama4_text", "chunked")],
)
def test_what_is_not_captured_says_why(family, reason, monkeypatch):
    use_eager_graphs(monkeypatch)
    lm = load(family)
    assert reason in lm.runner.get_model().why_no_graphs and lm.runner.graph_runner is None
    lm.generate(PROMPTS, GREEDY)
    lm.shutdown()


def test_modules_that_cannot_be_captured_run_eagerly(monkeypatch, caplog):
    use_eager_graphs(monkeypatch)

    def fail(runner: CudaGraphRunner, lazily: bool) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CudaGraphRunner, "capture", fail)
    lm = load("llama")
    assert not lm.runner.graphs.decoders
    assert "not permitted" in lm.runner.get_model().why_no_graphs and "run eagerly" in caplog.text
    lm.generate(PROMPTS, GREEDY)
    lm.shutdown()
    with pytest.raises(RuntimeError, match="not permitted"):  # a native model's capture is to be repaired
        LM(hf_config=tiny_config("llama"), load_format="dummy", device="cpu", dtype="float32", **SIZES)


def test_the_check_finds_what_waits_for_the_device():
    x = torch.randn(4)
    for wait in (lambda: x[0].item(), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.unique()):
        with WaitsForDevice() as check:
            wait()
        assert check.found
    with WaitsForDevice() as check:
        (x * x).sum() + x[torch.tensor([0, 1])].max()
    assert not check.found


# -- kernels in place of parts --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_kernels_in_a_pass_give_what_transformers_code_gives(dtype, tokens):
    config = tiny_config("llama")
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    fused = copy.deepcopy(model)
    fuse_parts(fused)
    layer, theirs = fused.model.layers[0], model.model.layers[0]
    assert type(layer.input_layernorm) is LlamaRMSNorm and layer.self_attn.forward.__code__ is not None
    with torch.no_grad():
        for norm in (layer.input_layernorm, theirs.input_layernorm):
            norm.weight.copy_(torch.linspace(0.5, 1.5, 32))
        x = torch.randn(1, tokens, 32, dtype=dtype)
        q, k = torch.randn(1, 4, tokens, 8, dtype=dtype), torch.randn(1, 2, tokens, 8, dtype=dtype)
        cos, sin = model.model.rotary_emb(x, torch.arange(tokens)[None] + 3)
        rotate = layer.self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
        assert rotate is not apply_rotary_pos_emb
        with current_pass(batch_of(tokens)):
            torch.testing.assert_close(layer.input_layernorm(x), theirs.input_layernorm(x), rtol=1e-2, atol=1e-6)
            for ours, expected in zip(rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
                assert torch.equal(ours, expected)
        assert torch.equal(layer.input_layernorm(x), theirs.input_layernorm(x)), "outside of passes: transformers' own"


def batch_of(tokens: int) -> ForwardBatch:
    ids = torch.zeros(tokens, dtype=torch.int64)
    return ForwardBatch(
        ForwardMode.EXTEND, 1, ids, torch.zeros(1, dtype=torch.int64), torch.tensor([tokens]), ids, tokens
    )


def test_other_norms_and_rotations_keep_their_code():
    for family in ("gemma2", "cohere", "olmo2", "gpt2"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
        fuse_parts(model)
        assert not [name for name, module in model.named_modules() if "norm" in name and "forward" in vars(module)]
    assert "forward" not in vars(AutoModelForCausalLM.from_config(tiny_config("llama")).model.norm)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CAPTURED)
def test_graphs_of_the_device_are_the_eager_passes(family):
    config = tiny_config(family)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "impl": "transformers",
        "device": "cuda",
        "dtype": "float32",  # the torch backend sums over other shapes in a graph
        **SIZES,
    }
    captured = LM(hf_config=config, attention_backend="torch", **options)
    eager = LM(hf_config=config, attention_backend="torch", disable_cuda_graph=True, **options)
    if family in EXPERTS and not captured.runner.graphs.decoders:  # transformers' float32 experts wait for the device
        assert "cannot be captured" in captured.runner.get_model().why_no_graphs
        with LM(hf_config=config, attention_backend="torch", **options | {"dtype": "bfloat16"}) as lm:
            assert set(lm.runner.graphs.decoders) == {DECLARED, PLAIN}
    else:
        assert set(captured.runner.graphs.decoders) == {DECLARED, PLAIN}
    prompts = [torch.randint(3, VOCAB, (n,)).tolist() for n in (5, 1, 9, 2)]
    steer = [[Steer("resid_post.0", torch.linspace(-1, 1, 32))], None, None, None]
    plain = [[out.token_ids for out in lm.generate(prompts, GREEDY)] for lm in (captured, eager)]
    assert plain[0] == plain[1]
    for ops in (None, steer):
        outs = [lm.generate(prompts, GREEDY, interventions=ops, capture=["logits"]) for lm in (captured, eager)]
        for ours, expected in zip(*outs, strict=True):
            assert ours.token_ids == expected.token_ids
            own, other = (out.activations["logits"] for out in (ours, expected))
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    captured.shutdown()
    eager.shutdown()

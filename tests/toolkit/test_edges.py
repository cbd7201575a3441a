"""`lm.edge_attribution` equals derivatives by transformers' modules, transformer-lens' scores, and ablations of linear models."""

from __future__ import annotations

import json
import random
from io import StringIO
from typing import Any

import pytest
import torch
from conftest import VOCAB
from family_configs import tiny_config
from helpers_edges import EdgeOracle
from helpers_paths import GOLDEN
from rich.console import Console
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.toolkit.edges import run
from pymllm_interp.toolkit.edges.graph import EdgeGraph
from pymllm_interp.toolkit.edges.scores import EdgeScores
from pymllm_interp.utils.arguments import PromptError

pytestmark = pytest.mark.local
METRIC = (7, 11)
CLOSE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-3}


def prompts(seed: int, length: int = 6) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    first = [rng.randrange(VOCAB) for _ in range(length)]
    return first, [token if i % 3 else rng.randrange(VOCAB) for i, token in enumerate(first)]


def dummy(config: Any, **options: Any) -> LM:
    return LM(
        "edges", hf_config=config, load_format="dummy", dtype="float32", device="cpu", kv_cache_tokens=512, **options
    )


def oracle_of(lm: LM, config: Any, clean: list[int], corrupted: list[int]) -> EdgeOracle:
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(lm.runner.get_model().state_dict(), strict=False)
    model.tie_weights()
    return EdgeOracle(model, lm.model_spec, clean, corrupted, METRIC)


def some_edges(scores: EdgeScores, seed: int) -> list[str]:
    """One edge into each kind of target, and others."""
    rng, found = random.Random(seed), []
    for kind in ("<q>", "<k>", "<v>", "m", "logits"):
        columns = [
            j for j, name in enumerate(scores.targets) if (kind in name if "<" in kind else name.startswith(kind))
        ]
        rows = [(i, j) for j in columns for i in scores.real[:, j].nonzero()[:, 0].tolist()]
        found += [f"{scores.sources[i]}->{scores.targets[j]}" for i, j in rng.sample(rows, 2)]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "olmo", "olmo2"])
def test_scores_are_derivatives_and_patched_edges_are_ablations(family, lm_of):
    """By transformers' modules: 9 heads over 3, norms of heads, behind them or nowhere, one projection for q, k, v."""
    clean, corrupted = prompts(3)
    own = family.startswith("olmo")
    lm = dummy(tiny_config(family)) if own else lm_of(family)
    oracle = oracle_of(lm, AutoConfig.for_model(**lm.hf_config.to_dict()), clean, corrupted)
    scores = lm.edge_attribution(clean, corrupted, metric=METRIC)
    edges = some_edges(scores, 1)
    for edge in edges:
        assert scores[edge] == pytest.approx(oracle.slope(edge), abs=2e-4, rel=1e-3), edge
    every = [(scores.sources[i], scores.targets[j]) for i, j in scores.real.nonzero().tolist()]
    rest = [[pair for pair in every if "->".join(pair) != edge] for edge in edges]
    found = scores.faithfulness([*rest, every, []])
    wanted = [oracle.run(edge, 1.0).item() for edge in edges] + [oracle.run(edges[0], 0.0).item(), scores.corrupted]
    torch.testing.assert_close(found.metric, torch.tensor(wanted), **CLOSE)
    assert found.edges.tolist() == [len(every) - 1] * len(edges) + [len(every), 0] and len(every) == len(scores)
    assert found.values[-2:].tolist() == pytest.approx([1.0, 0.0], abs=1e-3)
    if own:
        lm.shutdown()


def test_integrated_gradients_are_means_of_derivatives(lm_of):
    """At steps 0 to n - 1 of the embeddings; at steps 1 to n of each output; in both runs. Also in passes of few rows."""
    clean, corrupted = prompts(5)
    lm = lm_of("llama", max_num_tokens=24)
    oracle = oracle_of(lm, AutoConfig.for_model(**lm.hf_config.to_dict()), clean, corrupted)
    steps, layers = 2, 3
    inputs = lm.edge_attribution(clean, corrupted, metric=METRIC, method="eap-ig-inputs", steps=steps)
    outputs = lm.edge_attribution(clean, corrupted, metric=METRIC, method="eap-ig-activations", steps=steps)
    both = lm.edge_attribution(clean, corrupted, metric=METRIC, method="clean-corrupted")
    sites = ["resid_pre.0", *(f"{kind}.{i}" for i in range(layers) for kind in ("attn_out", "mlp_out"))]
    for edge in some_edges(inputs, 2)[::2]:
        wanted = [oracle.slope(edge, step / steps) for step in range(steps)]
        assert inputs[edge] == pytest.approx(sum(wanted) / steps, abs=2e-4, rel=1e-3), edge
        assert both[edge] == pytest.approx((oracle.slope(edge) + oracle.slope(edge, 0.0)) / 2, abs=2e-4, rel=1e-3)
        wanted = [oracle.slope(edge, step / steps) for step in range(1, steps + 1)]
        wanted += [oracle.slope(edge, 1.0, (site, step / steps)) for site in sites[1:] for step in range(1, steps + 1)]
        assert outputs[edge] == pytest.approx(sum(wanted) / len(wanted), abs=2e-4, rel=1e-3), edge
    batched = lm_of("llama").edge_attribution(clean, corrupted, metric=METRIC, method="eap-ig-activations", steps=steps)
    torch.testing.assert_close(batched.values, outputs.values, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_scores_and_circuits_of_transformer_lens(family):
    """Those of `attribution_patch` and `faithfulness` of transformer-lens 4.3 (golden/make_edges.py)."""
    golden = json.loads((GOLDEN / "edges.json").read_text())[family]
    with safe_open(GOLDEN / "attribution.safetensors", framework="pt") as file:
        config = AutoConfig.for_model(**json.loads(file.metadata()[family]))
        prefix = f"{family}/weights/"
        weights = {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}
    with dummy(config) as lm:
        lm.load_state_dict(weights, strict=False)
        scores = lm.edge_attribution([3, 7, 1, 14, 5, 9], [3, 8, 1, 14, 2, 9], metric=(4, 11))
        found = scores.faithfulness([circuit["edges"] for circuit in golden["circuits"]])
        wanted = torch.tensor([golden["scores"][f"{s}->{t}"] for s, t in named(scores)])
        torch.testing.assert_close(scores.values[scores.real], wanted, atol=1e-4, rtol=1e-3)
        recovered = torch.tensor([circuit["recovered"] for circuit in golden["circuits"]])
        torch.testing.assert_close(found.values, recovered, atol=1e-4, rtol=1e-3)
        assert {str(edge) for edge in scores.top(8)} == set(golden["circuits"][1]["edges"])


def named(scores: EdgeScores) -> list[tuple[str, str]]:
    return [(scores.sources[i], scores.targets[j]) for i, j in scores.real.nonzero().tolist()]


def test_scores_of_a_linear_model_are_its_ablations():
    """No MLPs, patterns that are the same for all queries, and norms with a scale that hardly depends on the stream."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=36, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3, head_dim=6,
        intermediate_size=8, rms_norm_eps=1e8, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    clean, corrupted = prompts(1, 5)
    with dummy(config) as lm:
        weights = {}
        for name, value in lm.runner.get_model().state_dict().items():
            value = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(weights))) * 0.3
            zero = any(part in name for part in ("q_proj", "down_proj"))
            weights[name] = torch.zeros_like(value) if zero else 1e4 + value if "norm" in name else value
        lm.load_state_dict(weights)
        scores = lm.edge_attribution(clean, corrupted, metric=METRIC)
        found = scores.faithfulness(all_but_one(scores))
    effects = found.metric - scores.clean
    assert effects.abs().max() > 0.1
    torch.testing.assert_close(scores.values[scores.real], effects, atol=1e-4 * effects.abs().max().item(), rtol=1e-3)
    assert (
        scores.values[:, [i for i, name in enumerate(scores.targets) if "v" not in name[3:] and name != "logits"]] == 0
    ).all()


def all_but_one(scores: EdgeScores) -> list[torch.Tensor]:
    """A circuit without each edge."""
    places = scores.real.nonzero().tolist()
    return [scores.real.index_put(tuple(torch.tensor(place)), torch.tensor(False)) for place in places]


def ranks(values: torch.Tensor) -> torch.Tensor:
    return values.argsort().argsort().double()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_rank_edges_as_ablations_do(family, lm_of):
    """All edges of a tiny model: rank correlation of sizes."""
    lm = lm_of(family)
    clean, _ = prompts(7)
    corrupted = [*clean[:3], (clean[3] + 1) % VOCAB, *clean[4:]]
    scores = lm.edge_attribution(clean, corrupted, metric=METRIC, method="eap-ig-inputs")
    edges = named(scores)
    effects = scores.faithfulness(all_but_one(scores)).metric - scores.clean
    pair = torch.stack([ranks(scores.values[scores.real].abs()), ranks(effects.abs())])
    assert torch.corrcoef(pair)[0, 1] > 0.7, torch.corrcoef(pair)
    picked = scores.faithfulness([len(edges) // 2, len(edges)])
    assert picked.values[1] == pytest.approx(1, abs=1e-3)


def test_circuits_grow_from_the_logits(lm_of):
    lm = lm_of("llama")
    scores = lm.edge_attribution(*prompts(4), metric=METRIC)
    known = {"logits"}
    sizes = []
    for edge in scores.greedy(40):
        assert edge.target in known, edge
        row = scores.sources.index(edge.source)
        known |= {scores.targets[j] for j in EdgeGraph(3, 9, 3, False).inputs_of(row)}
        sizes.append(abs(edge.score))
    first = max(abs(scores[source, target]) for source, target in named(scores) if target == "logits")
    assert sizes[0] == pytest.approx(first)
    assert len(scores.greedy(len(scores))) == len(scores) == len({str(edge) for edge in scores.top(10**6)})
    assert "a1.h4->a2.kv1<v>" in {str(edge) for edge in scores.top(len(scores))} and scores.greedy(0) == []
    again = EdgeScores.load(scores.to_json())
    assert torch.equal(again.values, scores.values) and again.top(5) == scores.top(5) and again.clean == scores.clean
    with pytest.raises(RuntimeError, match="loaded from a file"):
        again.faithfulness([3])
    with pytest.raises(ValueError, match="not the scores"):
        EdgeScores.load('{"graph": {}}')
    given = json.loads(scores.to_json())
    given["scores"].popitem()
    with pytest.raises(ValueError, match="not the scores of edges: 585"):
        EdgeScores.load(json.dumps(given))
    for sizes in ((10**9, 1, 1), (1, 10**9, 1), (3, 9.0, 3), (3, 9, 0), (3, True, 3), (3, 800, 800)):
        graph = dict(zip(("layers", "heads", "kv_heads"), sizes, strict=True), parallel=False)
        with pytest.raises(ValueError, match="not the scores of edges"):
            EdgeScores.load(json.dumps({**given, "graph": graph}))
    console = Console(file=StringIO(), width=100)
    console.print(scores)
    assert str(scores.top(1)[0].source) in console.file.getvalue()  # pyright: ignore


def test_pairs_are_averaged_and_requests_run_between(lm_of):
    """Pairs of different lengths, each with a metric; other requests' outputs are those alone."""
    lm = lm_of("qwen3")
    sampling = SamplingParams(max_tokens=8, temperature=0)
    alone = [out.token_ids for out in lm.generate([[5, 6], [9, 8, 7]], sampling)]
    pairs, metrics = [prompts(1, 5), prompts(2, 8)], [(3, 4), (7, 11)]
    handles = [lm.submit(prompt, sampling) for prompt in ([5, 6], [9, 8, 7])]
    both = lm.edge_attribution([one for one, _ in pairs], [other for _, other in pairs], metric=metrics)
    assert [handle.result().token_ids for handle in handles] == alone
    single = [lm.edge_attribution(*pair, metric=own) for pair, own in zip(pairs, metrics, strict=True)]
    torch.testing.assert_close(both.values, (single[0].values + single[1].values) / 2, atol=1e-5, rtol=1e-4)
    assert both.clean == pytest.approx((single[0].clean + single[1].clean) / 2, abs=1e-5)
    circuits = [scores.faithfulness([both.top(9)]).metric for scores in single]
    torch.testing.assert_close(both.faithfulness([both.top(9)]).metric, sum(circuits) / 2, atol=1e-5, rtol=1e-4)


def test_scores_of_edited_weights_have_no_faithfulness(lm_of):
    """Norms and metrics of the scores are those of the former weights."""
    lm = lm_of("llama")
    scores = lm.edge_attribution(*prompts(4), metric=METRIC)
    assert scores.faithfulness([3]).edges.tolist() == [3]
    lm.runner.get_model().model.norm.weight.add_(0)
    with pytest.raises(RuntimeError, match="the weights of the model were edited after these scores"):
        scores.faithfulness([3])


def test_weights_that_are_edited_meanwhile_end_it_by_name(lm_of):
    """Between two passes, by `update_weights` of another thread. The next call runs."""
    lm = lm_of("llama")
    calls, name = [], "model.norm.weight"
    before = lm.runner.get_model().state_dict()[name].clone()

    def metric(logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == change:
            lm.update_weights({name: before * 1.5})
        return logits[..., METRIC[0]] - logits[..., METRIC[1]]

    scores = lm.edge_attribution(*prompts(4), metric=METRIC)
    for call, change in (
        (lambda: lm.edge_attribution(*prompts(4), metric=metric), 1),
        (lambda: lm.path_patching(*prompts(4), receivers="m2", senders=["a0.h1", "m0"], metric=metric), 1),
    ):
        calls.clear()
        with pytest.raises(RuntimeError, match=r"were edited since lm\.\w+ began: call it again"):
            call()
        assert len(calls) >= change
        lm.update_weights({name: before})  # other tests have this model, too
        torch.testing.assert_close(lm.edge_attribution(*prompts(4), metric=METRIC).values, scores.values, **CLOSE)


def test_equal_metrics_have_no_faithfulness(lm_of):
    lm = lm_of("llama")
    one = [3, 4, 5, 6]
    scores = lm.edge_attribution(one, one, metric=METRIC)
    assert scores.clean == scores.corrupted and not scores.values.any()
    with pytest.raises(
        ValueError, match=r"the clean and the corrupted runs have the same metric, .* Choose other prompts"
    ):
        scores.faithfulness([3])
    scores = lm.edge_attribution(*prompts(4), metric=lambda logits: (logits[..., METRIC[0]] - 1e9).sqrt())
    with pytest.raises(ValueError, match=r"runs have no finite metrics, nan and nan: faithfulness is a share"):
        scores.faithfulness([3])


def test_outputs_beyond_the_memory_are_refused_by_name(lm_of, monkeypatch):
    lm, need = lm_of("llama"), 4 * (1 + 3 * 10) * 6 * 72 * 3
    for call in (  # 2 x 6 and 9 tokens, with a copy of one prompt
        lambda: lm.edge_attribution(*prompts(4), metric=METRIC),
        lambda: lm.logit_attribution(list(range(3, 12)), METRIC),
    ):
        monkeypatch.setattr(run, "host_bytes", lambda: need)
        call()
        monkeypatch.setattr(run, "host_bytes", lambda: need - 1)
        with pytest.raises(PromptError, match=r"outputs of all heads at \d tokens take 0 MiB, .* shorten the prompt"):
            call()


def test_models_with_experts_have_edges_to_their_mlps():
    clean, corrupted = prompts(6)
    with dummy(tiny_config("mixtral")) as lm:
        scores = lm.edge_attribution(clean, corrupted, metric=METRIC)
        assert scores.faithfulness([0, len(scores)]).values.tolist() == pytest.approx([0, 1], abs=1e-3)


def test_what_cannot_be_attributed_is_refused(lm_of):
    lm = lm_of("llama")
    one, other = [1, 2, 3], [1, 5, 3]
    for error, text, clean, corrupted, options in [
        (PromptError, "the clean prompt has 2 tokens", [1, 2], other, {}),
        (PromptError, "pair 1 has 2 tokens", [one, [1, 2]], [other, other], {}),
        (PromptError, "1 clean prompts and 2", [one], [other, other], {}),
        (PromptError, "two lists", one, [other], {}),
        (PromptError, "3 metrics for 2 pairs", [one, one], [other, other], {"metric": [3, 4, 5]}),
        (PromptError, "from 0 to 96", one, other, {"metric": 400}),
        (PromptError, "token ids only", {"prompt_token_ids": one, "embeds": {1: torch.zeros(72)}}, other, {}),
        (ValueError, "expected one of eap, eap-ig-inputs", one, other, {"method": "acdc"}),
        (ValueError, "has no steps", one, other, {"steps": 3}),
        (ValueError, "from 1 on", one, other, {"method": "eap-ig-inputs", "steps": 0}),
        (PromptError, "a traced pass of this model takes 127", [3] * 128, [4] * 128, {}),
    ]:
        with pytest.raises(error, match=text):
            lm.edge_attribution(clean, corrupted, **{"metric": METRIC, **options})
    scores = lm.edge_attribution(one, other, metric=METRIC)
    for edge in ("m0->a0.h1<q>", "a0.h9->logits", "a0.h1->a1.h2<k>", "logits", 3, ("m0",)):
        with pytest.raises(PromptError, match="is no edge of this model"):
            scores.faithfulness([[edge]])
    for arguments in (([],), ([-1],), ([torch.ones(2)],), ([3], "best")):
        with pytest.raises((PromptError, ValueError)):
            scores.faithfulness(*arguments)
    with (
        dummy(tiny_config("llama"), quantize="fp8") as refused,
        pytest.raises(NotImplementedError, match="is quantised"),
    ):
        refused.edge_attribution(one, other, metric=METRIC)
    unread = [(family, f"{family} .* cannot be read in a batch") for family in ("bloom", "falcon", "mpt", "xglm")]
    for family, text in (("granite", "granite has no site attn_out"), *unread):
        with dummy(tiny_config(family)) as refused, pytest.raises(NotImplementedError, match=text):
            refused.edge_attribution(one, other, metric=METRIC)
    assert len(lm.generate([one], SamplingParams(max_tokens=2))[0].token_ids) == 2


@pytest.mark.gpu
def test_scores_on_cuda_equal_those_on_the_cpu(lm_of):
    found = [lm_of("llama", device=device).edge_attribution(*prompts(3), metric=METRIC) for device in ("cpu", "cuda")]
    torch.testing.assert_close(found[0].values, found[1].values, atol=1e-3, rtol=1e-2)
    circuits = [scores.faithfulness([20]).metric for scores in found]
    torch.testing.assert_close(*circuits, atol=1e-3, rtol=1e-2)

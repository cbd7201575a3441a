"""`lm.patch_sweep`: each cell equals the `Patch` that it stands for, whatever runs it."""

from __future__ import annotations

import json
import random
import threading
from io import StringIO
from typing import Any

import pytest
import torch
from conftest import COMMON, CONFIGS, VOCAB, random_model
from helpers_paths import ROOT
from rich.console import Console
from transformers import LlamaConfig

from pymllm_interp import LM, Patch, SamplingParams, Steer
from pymllm_interp.captures import Site
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.plots import Plot
from pymllm_interp.toolkit.wavefront import WaveCell, Wavefront
from pymllm_interp.utils.arguments import PromptError

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
ONE = SamplingParams(temperature=0, max_tokens=1)
WITHIN = ("q", "k", "v", "z", "attn_out", "resid_mid", "mlp_act", "mlp_out")
METRIC = (7, 11)


def prompts(seed: int, length: int, first_change: int = 0) -> tuple[list[int], list[int]]:
    """Two prompts of `length` tokens that share those before `first_change`."""
    rng = random.Random(seed)
    base = [rng.randrange(VOCAB) for _ in range(length)]
    source = [rng.randrange(VOCAB) for _ in range(length)]
    source[:first_change] = base[:first_change]
    source[first_change] = (base[first_change] + 1) % VOCAB
    return base, source


def gap(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, METRIC[0]] - logits[:, METRIC[1]]


def one_by_one(lm: LM, base: list[int], source: list[int], kind: str, places: list[tuple[int, int, int | None]]) -> Any:
    """The metric of a `Patch` request for each (layer, position, head)."""
    (run,) = lm.generate([source], ONE, capture=[f"{kind}.*"])
    patches = []
    for layer, position, head in places:
        state = run.activations[f"{kind}.{layer}"][position]
        value = state.flatten() if head is None else state[head]
        patches.append([Patch(f"{kind}.{layer}", value, [position], heads=None if head is None else [head])])
    outs = lm.generate([base] * len(places), ONE, interventions=patches, capture=["logits"])
    return gap(torch.cat([out.activations["logits"] for out in outs]))


@pytest.mark.local
@pytest.mark.few("family", "llama", "gpt2", "gemma2", "gpt_neox", "gpt_oss", "glm4_moe")
@pytest.mark.parametrize("family", CONFIGS)
def test_each_cell_equals_its_patch_as_a_request(lm_of, family):
    """Random sites, positions and page borders, in every native family."""
    rng = random.Random(family)
    lm = lm_of(family, page_size=rng.choice([1, 4]), max_num_tokens=24)
    spec = lm.model_spec
    kinds = [kind for kind in ("resid_pre", "resid_post", *rng.sample(WITHIN, 3)) if kind in spec.family.points]
    for kind in kinds:
        base, source = prompts(rng.randrange(1000), rng.randrange(6, 14))
        positions = [*sorted(rng.sample(range(len(base) - 1), rng.randrange(1, 4))), len(base) - 1]
        sweep = lm.patch_sweep(base, source, site=kind, metric=METRIC, positions=positions)
        assert sweep.how == "wavefront"
        places = [(layer, position, None) for layer in range(spec.num_hidden_layers) for position in positions]
        wanted = one_by_one(lm, base, source, kind, places)
        torch.testing.assert_close(sweep.values, wanted.view(sweep.values.shape), **CLOSE)
        assert sweep.noise_floor < 1e-5 < sweep.effects.abs().max()


@pytest.mark.local
@pytest.mark.parametrize(("family", "kind"), [("llama", "z"), ("gpt2", "z"), ("gemma2", "v"), ("gpt_neox", "k")])
def test_heads_are_patched_one_by_one(lm_of, family, kind):
    lm = lm_of(family)
    base, source = prompts(3, 9)
    sweep = lm.patch_sweep(base, source, site=kind, metric=METRIC, positions=[2, -1], heads=[0, -1])
    count = lm.model_spec.shape(kind)[0]
    assert sweep.heads == [0, count - 1] and sweep.positions == [2, 8]
    places = [(i, p, h) for i in range(lm.model_spec.num_hidden_layers) for p in (2, 8) for h in (0, count - 1)]
    wanted = one_by_one(lm, base, source, kind, places)
    torch.testing.assert_close(sweep.values, wanted.view(sweep.values.shape), **CLOSE)
    (every,) = lm.patch_sweep(base, source, site=f"{kind}.1", metric=METRIC, positions=2, heads="all").values
    assert every.shape == (1, count)
    torch.testing.assert_close(every[0, 0], sweep.values[1, 0, 0], **CLOSE)


def test_requests_give_the_same_values(lm_of):
    lm = lm_of("qwen3")
    base, source = prompts(5, 8)
    for kind in ("resid_post", "k"):
        sweep = lm.patch_sweep(base, source, site=kind, metric=METRIC, how="requests")
        assert sweep.how.startswith("requests (")
        places = [(layer, p, None) for layer in range(2) for p in range(8)]
        wanted = one_by_one(lm, base, source, kind, places).view(2, 8)
        torch.testing.assert_close(sweep.values, wanted, **CLOSE)


@pytest.mark.local
def test_prompts_with_embeddings_are_swept_by_requests(lm_of):
    """Two that differ in vectors only: each patch is transformers' `inputs_embeds` with the state put in."""
    lm = lm_of("llama")
    table = lm.model.embed_tokens.weight.detach()
    ids = prompts(5, 6)[0]
    base: dict[str, Any] = {"prompt_token_ids": ids, "embeds": {1: table[3], 4: table[9]}}
    source = {"prompt_embeds": table[ids] + 0.3 * torch.randn(6, table.shape[1])}
    same = list(ids)
    same[1], same[4] = 3, 9  # the vectors of `base` are those of tokens
    sweep = lm.patch_sweep(base, source, site="resid_post", metric=METRIC, positions=[1, 4, 5])
    assert sweep.how == "requests (the prompts have embeddings)"
    assert sweep.tokens[1] == "[vector]" != sweep.tokens[0] and sweep.source_tokens == ["[vector]"] * 6
    places = [(layer, p, None) for layer in range(lm.num_layers) for p in (1, 4, 5)]
    wanted = one_by_one(lm, same, source, "resid_post", places)
    torch.testing.assert_close(sweep.values.flatten(), wanted, **CLOSE)
    plain = lm.patch_sweep(same, source, site="resid_post", metric=METRIC, positions=[1, 4, 5])
    torch.testing.assert_close(plain.values, sweep.values, **CLOSE)
    with pytest.raises(NotImplementedError, match="how='wavefront': the prompts have embeddings"):
        lm.patch_sweep(base, source, site="resid_post", metric=METRIC, how="wavefront")
    with pytest.raises(PromptError, match="equally many"):
        lm.patch_sweep(base, ids[:3], site="resid_post", metric=METRIC)


def test_a_model_that_runs_by_its_class_in_transformers_is_swept_by_requests(lm_of):
    native, lm = lm_of("llama"), lm_of("llama", impl="transformers")
    base, source = prompts(8, 7)
    one, other = (each.patch_sweep(base, source, metric=METRIC) for each in (native, lm))
    assert (one.how, other.how) == ("wavefront", "requests (the model runs by its class in transformers)")
    torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="how='requests'"):
        lm.patch_sweep(base, source, metric=METRIC, how="wavefront")


@pytest.mark.local
def test_a_sweep_runs_beside_other_traffic(lm_of):
    """Steps of other requests run between the sweep's layers, and neither changes the other."""
    lm = lm_of("llama", page_size=4)
    base, source = prompts(21, 40)
    params = SamplingParams(temperature=0, max_tokens=30)
    alone = lm.patch_sweep(base, source, metric=METRIC)
    direction = torch.ones(72)
    asked = [(base[:5], []), (source[:17], [Steer("resid_post.1", direction, scale=2.0)])]
    wanted = [lm.generate([ids], params, interventions=ops)[0].token_ids for ids, ops in asked]
    found: list[list[list[int]]] = []
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            outs = [lm.submit(ids, params, interventions=ops) for ids, ops in asked]
            found.append([out.result().token_ids for out in outs])

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        beside = lm.patch_sweep(base, source, metric=METRIC)
    finally:
        stop.set()
        thread.join()
    torch.testing.assert_close(beside.values, alone.values, **CLOSE)
    assert found and all(tokens == wanted for tokens in found)
    lm.engine.call(lm.engine.scheduler.check_integrity)


@pytest.mark.local
def test_the_bound_of_rows_changes_nothing(lm_of):
    """Passes of at most 8 rows, where each cell is nearly alone, and one pass for all."""
    lm = lm_of("gemma3_text")
    base, _ = prompts(2, 7)
    logits = []
    for most in (1, 8, 500):
        front = Wavefront(lm.engine.run, lm.engine.post, base, lm.model_spec.num_hidden_layers, max_rows=most)
        sites = [Site("resid_pre", 0), Site("attn_out", 1), Site("k", 2), Site("z", 2), Site("resid_post", 2)]
        widths = [lm.model_spec.width(site.kind) for site in sites]
        cells = [
            WaveCell(site, p, torch.full((width,), 0.1 * (i + p)))
            for i, (site, width) in enumerate(zip(sites, widths, strict=True))
            for p in (0, 3, 6)
        ]
        rows = torch.empty(len(cells), VOCAB)
        for indexes, found in front.logits(cells):
            rows[indexes] = found
        logits.append(rows)
    torch.testing.assert_close(logits[0], logits[1], **CLOSE)
    torch.testing.assert_close(logits[0], logits[2], **CLOSE)
    lm.engine.call(int)  # behind the message that ends the sweep
    assert not lm.runner.kept, "the worker forgets a sweep that has ended"


def test_a_run_patched_with_itself_stays_under_the_noise_floor(lm_of):
    lm = lm_of("llama")
    base, _ = prompts(4, 9)
    itself = lm.patch_sweep(base, base, metric=METRIC)
    other = lm.patch_sweep(*prompts(4, 9), metric=METRIC)
    assert itself.effects.abs().max() < 1e-5 and itself.noise_floor < 1e-5
    assert itself.effects.abs().max() <= 10 * max(itself.noise_floor, 1e-7)
    assert other.effects.abs().max() > 100 * other.noise_floor
    with pytest.raises(ValueError, match="equal up to rounding"):
        itself.normalized  # noqa: B018


def test_baselines_and_normalized_values(lm_of):
    lm = lm_of("llama")
    base, source = prompts(6, 8, first_change=3)
    sweep = lm.patch_sweep(base, source, metric=METRIC)
    logits = torch.stack([out.logits[-1] for out in lm.forward([base, source])]).float()
    torch.testing.assert_close(torch.tensor([sweep.base, sweep.source]), gap(logits), **CLOSE)
    last = sweep.normalized[-1, -1]  # the whole stream at the last position
    torch.testing.assert_close(last, torch.tensor(1.0), atol=1e-4, rtol=0)
    assert (sweep.values[:, :3] == sweep.base).all()  # equal tokens, equal states
    assert sweep.effects[:, 3:].abs().max() > 0.01
    probability = lm.patch_sweep(base, source, metric=5, layers=[-1], positions=[-1])
    torch.testing.assert_close(probability.source, logits[1].log_softmax(-1)[5].item(), **CLOSE)
    function = lm.patch_sweep(base, source, metric=lambda rows: rows[:, 7] - rows[:, 11])
    torch.testing.assert_close(function.values, sweep.values, **CLOSE)
    assert lm.patch_sweep(base, source, metric=("w7", "w11")).base == sweep.base


def test_cells_stream_as_they_come(lm_of):
    lm = lm_of("llama")
    base, source = prompts(9, 6)
    whole = lm.patch_sweep(base, source, metric=METRIC)
    sweep = lm.patch_sweep(base, source, metric=METRIC, stream=True)
    assert not sweep.done and len(sweep) == 18
    cells = iter(sweep)
    first = next(cells)
    assert not sweep.done
    seen = [first, *cells]
    assert sweep.done and len(seen) == 18 == len({cell[:3] for cell in seen})
    for cell in seen:
        assert cell.value == pytest.approx(whole.values[cell.layer, cell.position].item(), abs=1e-5)
    assert list(sweep) == seen
    assert sweep.top(1)[0].value == max(seen, key=lambda cell: abs(cell.value - sweep.base)).value


def test_it_shows_itself(lm_of):
    lm = lm_of("llama")
    base, source = prompts(1, 6)
    for heads in (None, [1, 2]):
        sweep = lm.patch_sweep(base, source, site="z", metric=METRIC, heads=heads)
        console = Console(width=120, file=StringIO())
        console.print(sweep)
        assert "noise floor" in console.file.getvalue()  # pyright: ignore
        page = sweep._repr_html_()
        assert page.count("<tr>") == 4 and page.count("<td") == 18 and f"w{base[0]}" in page
        assert repr(sweep).startswith("PatchSweep(z, [3, 6")
    pytest.importorskip("plotly")
    plot = sweep.plot()
    assert isinstance(plot, Plot) and torch.tensor(plot.figure.data[0].z).shape == (3, 6)
    assert plot.figure.layout.xaxis.ticktext == tuple(f"w{token} {i}" for i, token in enumerate(base))


def test_the_bar_is_off_without_a_terminal(lm_of, capsys):
    lm = lm_of("llama")
    lm.patch_sweep(*prompts(1, 5), metric=METRIC)
    assert capsys.readouterr() == ("", "")
    lm.patch_sweep(*prompts(1, 5), metric=METRIC, progress=True)
    assert "patching" in capsys.readouterr().err


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"source": [1, 2, 3]}, "4 tokens and the source prompt 3"),
    ({"site": "resid_past"}, "did you mean 'resid_post'"),
    ({"site": "hook_resid_pre"}, "did you mean 'resid_pre'"),
    ({"site": "logits"}, "a sweep patches"),
    ({"site": "resid_post.7"}, "there is no layer 7"),
    ({"site": "resid_post.1", "layers": [0]}, "give site='resid_post'"),
    ({"layers": [3]}, "0 to 2"),
    ({"layers": []}, "0 to 2"),
    ({"layers": [1, -2]}, "twice"),
    ({"positions": [4]}, "beyond the prompt"),
    ({"positions": "generated"}, "beyond the prompt"),
    ({"positions": []}, "selects nothing"),
    ({"heads": [0]}, "resid_post has no heads"),
    ({"heads": "some", "site": "z"}, "'all'"),
    ({"heads": [9], "site": "z"}, "there is no head 9"),
    ({"metric": (1, 97)}, "from 0 to 96"),
    ({"metric": (1, 1)}, "always 0"),
    ({"metric": (1, 2, 3)}, "expected two tokens"),
    ({"metric": None}, "expected two tokens"),
    ({"metric": "w1 w2"}, "2 tokens, not one"),
    ({"metric": lambda logits: logits[0]}, "a value for each row"),
    ({"how": "quickly"}, "'auto', 'wavefront' or 'requests'"),
    ({"base": list(range(64)) * 2, "source": list(range(64)) * 2}, "raise max_model_len"),
    ({"base": [1, 2, 99]}, "token id 99"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_swept_is_refused_with_the_fix(lm_of, change, message):
    arguments: dict[str, Any] = {"base": [1, 2, 3, 4], "source": [1, 2, 9, 4], "metric": METRIC, **change}
    with pytest.raises((PromptError, ValueError), match=message):
        lm_of("llama").patch_sweep(**arguments)


@pytest.mark.local
def test_a_block_and_a_model_with_edits_cannot_sweep(lm_of):
    lm = lm_of("llama")
    base, source = prompts(1, 4)

    def sweep() -> None:
        lm.patch_sweep(base, source, metric=METRIC)

    with pytest.raises(Exception, match="inside the block"), lm.trace(base):
        lm.model.layers[0].output.save()
        sweep()
    with lm.edit(inplace=True):
        lm.model.layers[0].output[:] = 0
    try:
        with pytest.raises(NotImplementedError, match="has edits"):
            sweep()
    finally:
        lm.clear_edits()


@pytest.mark.local
def test_an_error_of_the_metric_ends_the_sweep_and_not_the_engine(lm_of):
    lm = lm_of("llama")
    calls = iter(range(100))

    def metric(logits: torch.Tensor) -> torch.Tensor:
        if next(calls) > 0:
            raise ZeroDivisionError("mine")
        return logits[:, 0]

    sweep = lm.patch_sweep(*prompts(1, 4), metric=metric, stream=True)
    with pytest.raises(ZeroDivisionError, match="mine"):
        sweep.finish()
    with pytest.raises(RuntimeError, match="after 0 of 12 cells"):
        sweep.values  # noqa: B018
    assert len(lm.generate([[1, 2]], ONE)[0].token_ids) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sweep_on_cuda_equals_its_requests(tmp_path, dtype):
    """FlashInfer in bfloat16, where shapes change the last bits; the torch backend in float32."""
    from helpers_gpu import CONFIGS as LARGER

    random_model(LARGER["llama"]()).save_pretrained(tmp_path)
    with LM(tmp_path, dtype=dtype, device="cuda", kv_cache_tokens=4096, max_running_requests=64) as lm:
        base, source = prompts(12, 30)
        wave = lm.patch_sweep(base, source, metric=METRIC, how="wavefront")
        requests = lm.patch_sweep(base, source, metric=METRIC, how="requests")
    close = CLOSE if dtype == "float32" else {"atol": 0.05 * requests.effects.abs().max().item(), "rtol": 0.05}
    torch.testing.assert_close(wave.values, requests.values, **close)


def test_the_recorded_sweeps_are_right_and_within_their_aims() -> None:
    """docs/make_numbers.py writes their table."""
    results = ROOT / "benchmarks" / "results"
    for row in json.loads((results / "toolkit-cpu.json").read_text())["sweeps"]:
        assert row["largest_difference"] < 1e-4 and row["cpu_ratio"] <= 0.4
    for row in json.loads((results / "gpu-sweep-qwen3-0.6b.json").read_text())["sweeps"]:
        assert row["largest_difference"] <= 6 * row["noise_floor"] and row["ratio"] <= 0.35 and row["wavefront_s"] <= 2


@pytest.mark.local
def test_a_rotation_that_depends_on_the_prompts_length(tmp_path):
    """Every cell is rotated for the whole prompt, however few rows it computes."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(
        **{**COMMON, "max_position_embeddings": 8}, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, rope_parameters=rope
    )  # fmt: skip
    random_model(config).save_pretrained(tmp_path)
    with LM(tmp_path, dtype="float32", device="cpu") as lm:
        assert lm.model_spec.rope_depends_on_length
        base, source = prompts(13, 19)
        for kind in ("resid_post", "q", "k"):
            sweep = lm.patch_sweep(base, source, site=kind, metric=METRIC, positions=[2, 9, 18])
            wanted = one_by_one(lm, base, source, kind, [(i, p, None) for i in range(2) for p in (2, 9, 18)])
            torch.testing.assert_close(sweep.values, wanted.view(2, 3), **CLOSE)


@pytest.mark.local
def test_a_sweep_ends_with_its_engine(model_folder):
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        sweep = lm.patch_sweep(*prompts(1, 5), metric=METRIC, stream=True)
        next(iter(sweep))
        later = lm.patch_sweep(*prompts(2, 5), metric=METRIC, stream=True)
    with pytest.raises(EngineClosedError, match="shut down"):
        later.finish()
    with pytest.raises(EngineClosedError, match="shut down"):
        lm.patch_sweep(*prompts(1, 5), metric=METRIC)

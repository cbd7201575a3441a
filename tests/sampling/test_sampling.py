"""Sampling against short loop and numpy references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymllm_interp.core.request import Request
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.sampling import (
    PenaltyBatch,
    Sampler,
    SamplingBatch,
    gather_logprobs,
    prompt_logprobs,
    uniform_noise,
)
from pymllm_interp.sampling.filters import PROBE, filter_width, filtered_weights, kept_tokens
from pymllm_interp.sampling.noise import host_noise

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MASK = 2**64 - 1


@pytest.fixture(autouse=True)
def _skip_without_cuda(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def make_request(
    seed: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    sample_index: int = 0,
    eos: frozenset[int] = frozenset(),
    **params: Any,
) -> Request:
    return Request(
        request_id=f"r{seed}",
        prompt_token_ids=prompt or [1],
        params=SamplingParams(**params),
        max_tokens=16,
        seed=seed,
        sample_index=sample_index,
        eos_token_ids=eos,
        output_token_ids=output or [],
    )


def sample(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    batch = SamplingBatch.from_requests(requests, logits.shape[-1], logits.device)
    return Sampler()(logits, batch).token_ids.tolist()


def reference_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens of one row that the filters keep, by a plain sort (for logits without equals)."""
    order = np.argsort(-logits)
    probs = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = order[probs[order] >= max(min_p, 2.0**-40)]
    if 0 < top_k < len(logits):
        order = order[:top_k]
    probs = probs / probs[order].sum()
    before = np.cumsum(probs[order]) - probs[order]
    return set((order[before < top_p] if top_p < 1 else order).tolist())


# --- noise ---


def reference_noise(seed: int, sample_index: int, gen_index: int) -> float:
    """The same stream with Python's unbounded integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    stream = mix((mix(seed & MASK) + (sample_index + 1) * golden) & MASK)
    return (mix((stream + (gen_index + 1) * golden) & MASK) >> 11) / 2**53


def keys(rows: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    indices = torch.randint(0, 5000, (2, rows), generator=generator)
    return [seeds.to(device), indices[0].to(device), indices[1].to(device)]


@pytest.mark.parametrize("device", DEVICES)
def test_noise_equals_unsigned_reference(device):
    on_device = uniform_noise(*keys(300, device)).tolist()
    assert on_device == [reference_noise(*key) for key in zip(*(k.tolist() for k in keys(300)), strict=True)]
    assert host_noise(np.stack([k.numpy() for k in keys(300)])).tolist() == on_device


def test_noise_is_uniform_and_uncorrelated_along_every_key():
    n = torch.arange(20000)
    zero = torch.zeros_like(n)
    for key in ((n, zero, zero), (zero, n, zero), (zero, zero, n)):
        u = uniform_noise(*key)
        assert 0 <= u.min() and u.max() < 1
        assert u.unique().numel() == u.numel()
        counts = torch.histc(u, bins=50, min=0, max=1)
        assert ((counts - 400) ** 2 / 400).sum() < 99  # chi-square, 49 degrees of freedom, p = 3e-5
        centred = u - 0.5
        assert abs((centred[1:] * centred[:-1]).mean() * 12) < 0.04


# --- the filters and the distribution ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [-1, 0, 1, 9])
def test_top_k_off_samples_softmax_and_one_is_argmax(top_k, device):
    row = random_logits(1, 9, scale=1.0)[0]
    draws = 20000
    logits = row.expand(draws, 9).to(device)
    tokens = sample(logits, [make_request(seed=seed, top_k=top_k) for seed in range(draws)])
    counts = torch.bincount(torch.tensor(tokens), minlength=9)
    if top_k == 1:
        assert counts[row.argmax()] == draws
        return
    expected = row.softmax(-1) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 31.8  # chi-square, 8 degrees of freedom, p = 1e-4


def test_temperature_and_filters_together_sample_the_renormalised_distribution():
    row = random_logits(1, 40)[0]
    draws = 20000
    params: dict[str, Any] = {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    kept = sorted(reference_kept(row.numpy(), **params))
    requests = [make_request(seed=3, sample_index=i, **params) for i in range(draws)]
    counts = torch.bincount(torch.tensor(sample(row.expand(draws, 40), requests)), minlength=40)
    assert counts.nonzero().flatten().tolist() == kept
    expected = torch.zeros(40)
    expected[kept] = (row[kept] / 1.7).softmax(-1) * draws
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert 4 < len(kept) < 12 and chi_square < 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 2, 9, 257, PROBE + 1, 5003])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_kept_tokens_equal_numpy_reference_in_mixed_batches(vocab, scale, device):
    options = [(k, p, m) for k in (-1, 0, 1, 7, 1500, vocab) for p in (1.0, 0.3, 0.97) for m in (0.0, 0.15)]
    logits = random_logits(len(options), vocab, seed=vocab, scale=scale)
    requests = [make_request(top_k=k, top_p=p, min_p=m, temperature=0.8) for k, p, m in options]
    batch = SamplingBatch.from_requests(requests, vocab, device)
    cooled = (logits - logits.amax(-1, keepdim=True)) / 0.8
    weights = filtered_weights(cooled.to(device), batch.top_ks, batch.top_ps, batch.min_ps, batch.filter_width)
    for row, (k, p, m) in enumerate(options):
        kept = set(weights[row].nonzero().flatten().tolist())
        assert kept == reference_kept(logits[row].numpy(), 0.8, k, p, m), (k, p, m)


def test_top_p_counts_the_tokens_that_min_p_leaves() -> None:
    """As in vLLM: of 0.5, 0.3, 0.1, 0.1 min_p keeps two, 0.625 and 0.375 of what is left, and 0.6 is reached by the first."""
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).div(0.5).log()
    limits = {"top_ps": torch.tensor([0.6]), "min_ps": torch.tensor([0.3])}
    assert filtered_weights(scores, **limits).gt(0).tolist() == [[True, False, False, False]]
    assert kept_tokens(scores, **limits).tolist() == [[True, False, False, False]]
    assert filtered_weights(scores, top_ps=limits["top_ps"]).gt(0).tolist() == [[True, True, False, False]]


def test_filters_keep_all_equals_of_the_last_token_kept():
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    by_count, by_mass = filtered_weights(scores, torch.tensor([2])), filtered_weights(scores, None, torch.tensor([0.5]))
    assert by_count.gt(0).tolist() == by_mass.gt(0).tolist() == [[True, True, True, True, False]]
    equals = torch.zeros(1, 2 * PROBE)
    for width in (3, None):
        both = filtered_weights(equals, torch.tensor([3]), torch.tensor([0.9]), width=width)
        assert (both > 0).all()


def test_width_covers_every_row_that_filters():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert filter_width([5, 40, 0], [0.9, 1.0, 1.0], 5000, cpu) == 40
    assert filter_width([5, 0], [0.9, 0.9], 5000, cpu) == PROBE
    assert filter_width([5, -1], [0.9, 0.9], 5000, cuda) == 5000
    assert filter_width([5, 3000], [0.9, 1.0], 5000, cuda) == 3000
    assert filter_width([], [], 5000, cuda) == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_drawn_token_is_always_one_that_the_reference_keeps(data):
    vocab = data.draw(st.integers(1, 60))
    rows = data.draw(st.integers(1, 6))
    logits = random_logits(rows, vocab, seed=data.draw(st.integers(0, 10**6)), scale=data.draw(st.floats(0.01, 30)))
    temperature = st.one_of(st.just(0.0), st.floats(0.05, 5))
    params = [
        {
            "temperature": data.draw(temperature),
            "top_k": data.draw(st.integers(-1, vocab + 2)),
            "top_p": data.draw(st.floats(0.01, 1)),
            "min_p": data.draw(st.floats(0, 1)),
        }
        for _ in range(rows)
    ]
    seeds = [data.draw(st.integers(-(2**70), 2**70)) for _ in range(rows)]
    tokens = sample(logits, [make_request(seed=s, **p) for s, p in zip(seeds, params, strict=True)])
    for row, (token, p) in enumerate(zip(tokens, params, strict=True)):
        if p["temperature"] == 0:
            assert token == logits[row].argmax()
            continue
        # A hair of slack: the reference sums in another precision.
        loose = {**p, "top_p": min(1.0, p["top_p"] * (1 + 1e-5)), "min_p": p["min_p"] * (1 - 1e-5)}
        assert token in reference_kept(logits[row].numpy(), **loose)


# --- keys, rows and batches ---


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.3, "top_k": 30, "top_p": 0.5},
    {"repetition_penalty": 1.3, "output": [3, 4, 3]},
    {"logit_bias": {7: 5.0}, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 1.0, "output": [5] * 4},
]


def mixed_requests(rows: int) -> list[Request]:
    return [make_request(seed=row, **MIXED[row % len(MIXED)]) for row in range(rows)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [77, 3001])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_a_rows_token_does_not_depend_on_its_batch(vocab, scale, device):
    logits = random_logits(27, vocab, scale=scale).to(device)
    requests = mixed_requests(27)
    together = sample(logits, requests)
    alone = [sample(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)]
    assert together == alone
    order = torch.randperm(27, generator=torch.Generator().manual_seed(2)).tolist()
    assert sample(logits[order], [requests[row] for row in order]) == [together[row] for row in order]


@pytest.mark.parametrize("device", DEVICES)
def test_draws_are_exact_where_float_sums_are_not(device):
    # Every row has the same 30011 nearly equal logits, so a rounding error in any prefix sum would move some draw.
    rows = 64
    row = random_logits(1, 30011, scale=0.05).to(device)
    requests = [make_request(seed=5, top_p=0.9, output=[0] * step) for step in range(rows)]
    together = sample(row.expand(rows, -1).contiguous(), requests)
    assert together == [sample(row, [request])[0] for request in requests]
    assert len(set(together)) > rows // 2


def test_the_key_is_seed_sample_index_and_generated_index():
    logits = torch.zeros(1, 100_000)
    base = sample(logits, [make_request(seed=1)])
    assert base == sample(logits, [make_request(seed=1, prompt=[4, 5, 6])])
    others = [make_request(seed=2), make_request(seed=1, sample_index=1), make_request(seed=1, output=[9])]
    assert all(sample(logits, [other]) != base for other in others)


def test_greedy_rows_in_a_mixed_batch_take_the_argmax():
    logits = random_logits(10, 33, scale=0.1)
    requests = [make_request(seed=row, temperature=row % 2) for row in range(10)]
    tokens = sample(logits, requests)
    assert tokens[::2] == logits.argmax(-1).tolist()[::2]
    assert tokens[1::2] != logits.argmax(-1).tolist()[1::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_token_ids_are_int32_for_any_logits_dtype(dtype):
    logits = random_logits(3, 50).to(dtype)
    before = logits.clone()
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.9, "repetition_penalty": 2.0, "logprobs": 2}]
    for params in kinds:
        batch = SamplingBatch.from_requests([make_request(seed=s, **params) for s in range(3)], 50, "cpu")
        output = Sampler()(logits, batch)
        assert output.token_ids.dtype == torch.int32 and output.token_ids.shape == (3,)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_distribution_leave_the_others_alone(device):
    logits = random_logits(6, 50).to(device)
    requests = [make_request(seed=row, top_p=0.9, min_p=0.01) for row in range(6)]
    clean = sample(logits, requests)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[4, 9] = torch.inf
    broken = sample(logits, requests)
    assert [broken[row] for row in (1, 2, 4)] == [7, 0, 9]
    assert [broken[row] for row in (0, 3, 5)] == [clean[row] for row in (0, 3, 5)]


def test_top_k_one_takes_the_first_of_equals_as_greedy_does():
    logits = torch.zeros(20, 50)
    logits[:, 7:9] = 2.0
    assert sample(logits, [make_request(seed=s, top_k=1) for s in range(20)]) == [7] * 20


def test_tiny_temperatures_are_greedy_and_do_not_overflow():
    logits = random_logits(3, 50)
    requests = [make_request(temperature=t) for t in (1e-30, 1e-42, 1e-300)]
    assert sample(logits, requests) == logits.argmax(-1).tolist()


def test_a_batch_holds_only_what_a_row_asks_for():
    greedy = SamplingBatch.from_requests([make_request(temperature=0.0, top_k=5, top_p=0.5)] * 3, 50, "cpu")
    assert greedy == SamplingBatch(rows=3)
    assert greedy.temperatures is None and not greedy.any_logprobs
    greedy_row = make_request(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)
    plain = SamplingBatch.from_requests([make_request(top_k=50), greedy_row], 50, "cpu")
    assert plain.temperatures is not None
    assert plain.top_ks is None and plain.top_ps is None and plain.min_ps is None
    assert plain.penalties is None and plain.logit_bias is None
    full = SamplingBatch.from_requests([make_request(top_k=5, top_p=0.5, min_p=0.5, logprobs=0)], 50, "cpu")
    assert full.top_ks is not None and full.top_ps is not None and full.min_ps is not None and full.any_logprobs


def test_empty_batches():
    assert sample(torch.empty(0, 50), []) == []
    assert gather_logprobs(torch.empty(0, 50), torch.empty(0, dtype=torch.int32), []).tolists() == []
    tokens = Sampler()(torch.empty(0, 50), SamplingBatch(rows=0)).token_ids
    assert tokens.shape == (0,) and tokens.dtype == torch.int32


def test_a_batch_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"logits has shape \(3, 5\), expected \(2, vocab\)"):
        Sampler()(torch.zeros(3, 5), SamplingBatch(rows=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_as_the_cpu_does_and_waits_for_nothing():
    logits = random_logits(27, 3001)
    requests = mixed_requests(27)
    expected = sample(logits, requests)
    on_device = logits.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = Sampler()(on_device, SamplingBatch.from_requests(requests, 3001, "cuda")).token_ids
        asking = [replace(request, params=replace(request.params, logprobs=3)) for request in requests]
        for mode in MODES:
            Sampler(mode)(on_device, SamplingBatch.from_requests(asking, 3001, "cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.tolist() == expected


# --- draws at the ends of the noise ---


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53, 1.0])
def test_a_token_without_probability_is_never_drawn(u, monkeypatch):
    monkeypatch.setattr(
        "pymllm_interp.sampling.sampler.host_noise",
        lambda keys: np.full(keys.shape[1], u),
    )
    logits = torch.full((3, 11), -torch.inf)
    logits[0, 4] = logits[1, 2] = logits[1, 9] = logits[2, 10] = 1.5
    assert sample(logits, [make_request(seed=s) for s in range(3)]) == ([4, 2, 10] if u == 0 else [4, 9, 10])
    spread = random_logits(3, 2000)
    kept = sample(spread, [make_request(seed=k, top_p=0.5, top_k=k) for k in (5, 0, 1)])
    for row, (k, token) in enumerate(zip((5, 0, 1), kept, strict=True)):
        support = reference_kept(spread[row].numpy(), 1.0, k, 0.5, 0.0)
        assert token == (min(support) if u == 0 else max(support))


# --- bias, min_tokens, penalties ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_moves_only_its_own_row(temperature):
    logits = random_logits(4, 30, scale=0.2)
    plain = [make_request(seed=s, temperature=temperature) for s in range(4)]
    biased = list(plain)
    biased[2] = make_request(seed=2, temperature=temperature, logit_bias={11: 100.0, 12: -100.0})
    expected = sample(logits, plain)
    expected[2] = 11
    assert sample(logits, biased) == expected


def test_min_tokens_blocks_what_ends_a_generation_until_it_is_long_enough():
    logits = random_logits(1, 10)
    logits[0, 3], logits[0, 8] = 50.0, 60.0
    eos = frozenset({3, 8, 10_000})
    best_other = int(logits[0].masked_fill(torch.tensor([i in eos for i in range(10)]), -100).argmax())
    for temperature in (0.0, 1e-3):
        params: dict[str, Any] = {"eos": eos, "temperature": temperature, "min_tokens": 2, "logit_bias": {8: 5.0}}
        assert [sample(logits, [make_request(output=[5] * n, **params)])[0] for n in (0, 1, 2)] == [
            best_other,
            best_other,
            8,
        ]


def reference_penalties(row, prompt, output, repetition, frequency, presence):
    result = row.tolist()
    for token in set(prompt) | set(output):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * output.count(token) + presence
    return torch.tensor(result)


PENALTIES = [(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (0.7, 0.4, 0.0), (1.0, -0.5, 0.3), (1.2, 0.1, -1.5), (1.0, 0.0, 2.0)]


def test_penalty_batch_equals_loop_reference_on_its_rows_alone():
    generator = torch.Generator().manual_seed(4)
    requests, expected = [], []
    logits = random_logits(len(PENALTIES), 23)
    for row, (repetition, frequency, presence) in enumerate(PENALTIES):
        prompt = torch.randint(0, 23, (9,), generator=generator).tolist()
        output = torch.randint(0, 23, (7 * (row % 4),), generator=generator).tolist()
        requests.append(
            make_request(
                prompt=prompt,
                output=output,
                repetition_penalty=repetition,
                frequency_penalty=frequency,
                presence_penalty=presence,
            )
        )
        expected.append(reference_penalties(logits[row], prompt, output, repetition, frequency, presence))
    penalties = PenaltyBatch.from_requests(requests, 23, "cpu")
    assert penalties is not None and penalties.rows.tolist() == [1, 2, 3, 4, 5]
    scores = logits.clone()
    penalties.apply_(scores)
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-6, atol=1e-6)
    assert torch.equal(scores[0], logits[0])


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_of_histories_equal_the_loop_reference(device):
    logits = random_logits(6, 23).to(device)
    histories = [[], [0], [22, 22, 22, 1], [5, 6, 5], list(range(23)), [7] * 40]
    strengths, rows = torch.tensor(PENALTIES, device=device), torch.arange(6, device=device)
    scores = logits.clone()
    PenaltyBatch.of_tokens(rows, strengths, [[]] * 6, histories, 23).apply_(scores)
    expected = [
        reference_penalties(row, [], history, *penalties)
        for row, history, penalties in zip(logits.cpu(), histories, PENALTIES, strict=True)
    ]
    torch.testing.assert_close(scores.cpu(), torch.stack(expected), rtol=1e-6, atol=1e-5)
    scores = logits.clone()
    off = torch.tensor([[1.0, 0.0, 0.0]], device=device).repeat(6, 1)
    PenaltyBatch.of_tokens(rows, off, [[]] * 6, histories, 23).apply_(scores)
    assert torch.equal(scores, logits)


def test_penalties_reach_the_sampled_token():
    logits = torch.tensor([[3.0, 2.5, 1.0]]).repeat(2, 1)
    penalised = make_request(prompt=[0], temperature=0.0, repetition_penalty=2.0)
    assert sample(logits, [make_request(temperature=0.0), penalised]) == [0, 1]


def test_what_lies_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="token 23; expected 0 to 22"):
        PenaltyBatch.of_tokens(torch.arange(1), torch.ones(1, 3), [[]], [[4, 23]], 23)
    with pytest.raises(ValueError, match="token -1; expected 0 to 22"):
        PenaltyBatch.of_tokens(torch.arange(1), torch.ones(1, 3), [[-1]], [[]], 23)
    with pytest.raises(ValueError, match="request 'r6': logit_bias names token 23"):
        SamplingBatch.from_requests([make_request(seed=6, logit_bias={23: 1.0})], 23, "cpu")


# --- log probabilities ---


@pytest.mark.parametrize("rows,vocab", [(1, 1), (5, 23), (300, 40)])
def test_logprobs_equal_log_softmax_and_ranks_equal_a_sort(rows, vocab):
    logits = random_logits(rows, vocab, seed=rows)
    tokens = torch.randint(0, vocab, (rows,), dtype=torch.int32)
    num = [(None, 0, 3, 64)[row % 4] for row in range(rows)]
    reference = logits.log_softmax(-1)
    order = logits.argsort(dim=-1, descending=True)
    for row, entry in enumerate(gather_logprobs(logits, tokens, num).tolists()):
        count, token = num[row], int(tokens[row])
        if count is None:
            assert entry is None
            continue
        assert entry is not None
        assert entry.token_ids == [token, *order[row, :count].tolist()]
        assert entry.logprobs == reference[row, entry.token_ids].tolist()
        own_rank = order[row].tolist().index(token) + 1
        assert entry.ranks == [own_rank, *range(1, min(count, vocab) + 1)]


def test_equal_logits_share_a_rank():
    logits = torch.tensor([[1.0, 5.0, 1.0, 5.0, 0.0]], dtype=torch.bfloat16)
    (entry,) = gather_logprobs(logits, torch.tensor([2]), [5]).tolists()
    assert entry is not None
    assert entry.ranks == [3, 1, 1, 3, 3, 5]
    assert entry.logprobs[0] == pytest.approx(float(logits[0].float().log_softmax(-1)[2]))


def test_sampler_logprobs_are_of_the_raw_logits():
    logits = random_logits(3, 40)
    edits: dict[str, Any] = {"repetition_penalty": 1.9, "logit_bias": {5: 30.0}, "top_k": 3, "prompt": [1, 2]}
    asked = (2, None, 0)
    requests = [make_request(seed=s, logprobs=n, temperature=0.7, **edits) for s, n in enumerate(asked)]
    output = Sampler()(logits, SamplingBatch.from_requests(requests, 40, "cpu"))
    assert output.token_ids.tolist() == [5, 5, 5]
    assert output.logprobs is not None
    assert output.logprobs.tolists() == gather_logprobs(logits, torch.full((3,), 5), list(asked)).tolists()
    silent = Sampler()(logits, SamplingBatch.from_requests([make_request()] * 3, 40, "cpu"))
    assert silent.logprobs is None


MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
PROCESSED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "top_k": 4},  # greedy: no filters
    {"temperature": 0.7},
    {"temperature": 1.9, "top_k": 6},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2, "top_k": 9},
    {"temperature": 0.9, "logit_bias": {3: 4.0, 8: -9.0}, "top_p": 0.95, "repetition_penalty": 0.8},
]


def reference_values(logits: torch.Tensor, request: Request, mode: str) -> torch.Tensor:
    """One row's values, a step at a time, by plain torch."""
    params, row = request.params, logits.clone()
    if mode.startswith("processed"):
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        row = reference_penalties(
            row, request.prompt_token_ids, request.output_token_ids, params.repetition_penalty,
            params.frequency_penalty, params.presence_penalty,
        )  # fmt: skip
        if not params.greedy:
            options = (params.temperature, params.top_k, params.top_p, params.min_p)
            kept = sorted(reference_kept(row.numpy(), *options))
            row = row / params.temperature
            row = torch.full_like(row, -torch.inf).index_copy(0, torch.tensor(kept), row[kept])
    return row.log_softmax(-1) if mode.endswith("logprobs") else row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("together", [True, False])
def test_v18_logprobs_of_each_mode_equal_a_plain_torch_reference(mode, together):
    """V18: with penalties, temperature and filters, in one batch and one by one."""
    logits, vocab = random_logits(len(PROCESSED), 41, seed=9), 41
    requests = [
        make_request(seed=i, prompt=[1, 2, i], output=[4, 4, i], logprobs=(5, 0, 41)[i % 3], **params)
        for i, params in enumerate(PROCESSED)
    ]
    batches = [range(len(requests))] if together else [[row] for row in range(len(requests))]
    for rows in batches:
        batch = SamplingBatch.from_requests([requests[row] for row in rows], vocab, "cpu")
        output = Sampler(mode)(logits[list(rows)], batch)
        assert output.logprobs is not None
        entries = output.logprobs.tolists()
        for row, token, entry in zip(rows, output.token_ids.tolist(), entries, strict=True):
            expected = reference_values(logits[row], requests[row], mode)
            assert entry is not None and entry.token_ids[0] == token
            torch.testing.assert_close(
                torch.tensor(entry.logprobs), expected[entry.token_ids], rtol=1e-5, atol=1e-5, msg=str(PROCESSED[row])
            )
            assert entry.ranks[0] == 1 + int((expected > expected[token]).sum())
            best = expected.sort(descending=True).values[: requests[row].params.logprobs]
            torch.testing.assert_close(torch.tensor(entry.logprobs[1:]), best, rtol=1e-5, atol=1e-5)


def test_v18_prompt_logprobs_are_logits_where_asked_for():
    """V18."""
    logits, following = random_logits(5, 11), torch.tensor([3, 1, 4, 1, 5])
    entries = prompt_logprobs(logits, following, 2, as_logits=True).tolists()
    for row, entry in enumerate(entries):
        assert entry is not None and entry.logprobs == logits[row, entry.token_ids].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_logprob_tensors_have_a_row_for_each_that_asks_and_are_on_the_device(device):
    logits, tokens = random_logits(4, 30).to(device), torch.tensor([3, 1, 4, 1], device=device)
    found = gather_logprobs(logits, tokens, [None, 2, None, 7])
    assert all(tensor.shape == (2, 8) and tensor.device.type == device for tensor in found.tensors)
    assert (found.rows, found.num, found.num_rows) == ([1, 3], [2, 7], 4)
    lists = found.tolists()
    assert lists[0] is None and lists[2] is None
    assert [len(entry.token_ids) for entry in lists if entry is not None] == [3, 8]


@pytest.mark.parametrize("chunk", [1, 7, 64, 601])
def test_chunked_prompt_logprobs_equal_the_shifted_log_softmax(chunk):
    n, vocab = 601, 31
    logits = random_logits(n, vocab)
    prompt = torch.randint(0, vocab, (n + 1,), generator=torch.Generator().manual_seed(3))
    entries = []
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        entries += prompt_logprobs(logits[rows], prompt[1:][rows], 2).tolists()
    expected = logits.log_softmax(-1).gather(1, prompt[1:, None]).flatten()
    assert [entry.logprobs[0] for entry in entries] == expected.tolist()
    assert [entry.token_ids[0] for entry in entries] == prompt[1:].tolist()
    assert all(len(entry.token_ids) == len(entry.ranks) == 3 for entry in entries)


def test_logprobs_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"token_ids has shape \(2,\) and num 3 entries; logits has 3 rows"):
        gather_logprobs(torch.zeros(3, 5), torch.zeros(2, dtype=torch.int64), [1, 1, 1])


# --- allowed tokens and bad words ---


@pytest.mark.parametrize("device", DEVICES)
def test_only_allowed_tokens_are_sampled(device):
    logits = random_logits(4, 50, seed=3).to(device)
    requests = [
        make_request(temperature=0, allowed_token_ids=[7, 3, 7]),
        make_request(temperature=0),
        make_request(seed=4, temperature=5.0, allowed_token_ids=[0, 49, 20, 21], top_k=3),
        make_request(seed=9, temperature=1.0),
    ]
    free = sample(logits, [requests[1], make_request(seed=9, temperature=1.0)][:1] * 4)
    found = sample(logits, requests)
    assert found[0] == (7 if logits[0, 7] > logits[0, 3] else 3)
    assert found[1] == free[1]
    assert found[2] in (0, 49, 20, 21)
    assert found[3] == sample(logits[3:], requests[3:])[0]


def test_allowed_tokens_hold_whatever_bias_and_penalties_say():
    logits = random_logits(1, 30)
    request = make_request(
        output=[4, 4, 5], temperature=0, allowed_token_ids=[4, 5], logit_bias={9: 1e9, 5: 1.0}, repetition_penalty=1.2,
        presence_penalty=2,
    )  # fmt: skip
    assert sample(logits, [request])[0] in (4, 5)
    with pytest.raises(ValueError, match="allowed_token_ids names a token outside 0 to 29"):
        sample(logits, [make_request(allowed_token_ids=[30])])


def test_allowed_tokens_leave_the_draw_to_the_seed():
    """A row draws what it would draw if the others had no probability: the same noise, inverted over the same weights."""
    logits = random_logits(1, 40, seed=8)
    allowed = [1, 5, 9, 13, 30]
    masked = torch.full_like(logits, -torch.inf)
    masked[:, allowed] = logits[:, allowed]
    for seed in range(20):
        request = make_request(seed=seed, temperature=1.3)
        assert sample(logits, [make_request(seed=seed, temperature=1.3, allowed_token_ids=allowed)]) == sample(
            masked, [request]
        )


def test_a_bad_word_is_not_completed():
    logits = torch.zeros(1, 20)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    words = ((7,), (3, 4, 8), (9, 8))

    def next_token(output: list[int], words: tuple[tuple[int, ...], ...] = words) -> int:
        request = make_request(output=output, temperature=0, bad_words=["x"])
        request.bad_words = words
        return sample(logits, [request])[0]

    assert next_token([]) == 8
    assert next_token([4]) == 8
    assert next_token([3, 4]) == 0
    assert next_token([3, 3, 4]) == 0
    assert next_token([4, 3]) == 8
    assert next_token([9]) == 0
    assert next_token([9, 1]) == 8
    assert next_token([], words[1:]) == 7


def test_requests_without_token_sets_have_none_in_the_batch():
    plain = [make_request(temperature=1.0), make_request(temperature=0)]
    batch = SamplingBatch.from_requests(plain, 50, "cpu")
    assert batch.allowed is None and batch.logit_bias is None
    assert not plain[0].needs_tokens
    single, double = make_request(bad_words=["a"]), make_request(bad_words=["a"])
    single.bad_words, double.bad_words = ((3,),), ((3, 4),)
    assert (single.needs_tokens, double.needs_tokens) == (False, True)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": []}, "at least one token id"),
        ({"allowed_token_ids": [1.5]}, "at least one token id"),
        ({"allowed_token_ids": 3}, "at least one token id"),
        ({"bad_words": "word"}, "a list of strings"),
        ({"bad_words": [""]}, "not only spaces"),
        ({"bad_words": ["  "]}, "not only spaces"),
        ({"bad_words": ["a" * 257]}, "1 to 256 characters"),
        ({"bad_words": ["a"] * 1025}, "1025 entries; expected at most 1024"),
        ({"truncate_prompt_tokens": 0}, "-1, at least 1, or None"),
        ({"truncate_prompt_tokens": -2}, "-1, at least 1, or None"),
        ({"truncate_prompt_tokens": True}, "a whole number, or None"),
    ],
)
def test_token_sets_that_cannot_be(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)

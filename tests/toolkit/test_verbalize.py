"""`lm.verbalize`: PEFT with hooks for activation oracles, transformers' `inputs_embeds` for natural-language autoencoders."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers_adapters import adapted, write_adapter
from helpers_embeds import generated, vectors_of
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams
from pymllm_interp.toolkit import fve
from pymllm_interp.utils.arguments import PromptError

TEMPLATE = " ".join(f"w{i}" for i in [*range(20, 40), 7, 7, 7, 41, 42])
"""Three placeholders, w7, behind a page of tokens."""
PLACES, TOKENS = [20, 21, 22], 6


def oracle_tokens(reader: Any, layer: Any, ids: list[int], vectors: torch.Tensor, count: int) -> list[int]:
    """An activation oracle by a hook: norm-matched addition at the output of layer 1, then greedy tokens."""

    def inject(module: Any, args: Any, output: Any) -> Any:
        h = (output[0] if isinstance(output, tuple) else output).clone()
        old = h[0, PLACES]
        h[0, PLACES] = old + old.norm(dim=-1, keepdim=True) * torch.nn.functional.normalize(vectors, dim=-1)
        return (h, *output[1:]) if isinstance(output, tuple) else h

    handle, found = layer.register_forward_hook(inject), list(ids)
    with torch.no_grad():
        for _ in range(count):
            found.append(int(reader(input_ids=torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
    handle.remove()
    return found[len(ids) :]


@pytest.mark.parametrize("by", ["formula", "peft"])
def test_an_activation_oracle_is_peft_with_a_hook(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], tmp_path: Path, by: str
) -> None:
    """States of the model itself, captured at three positions each, read under a LoRA adapter at layer 1."""
    lm, model = lm_of("llama"), oracle("llama")
    folder = write_adapter(tmp_path / "reader", model, scale=0.4, seed=3)
    if by == "peft":  # where it is installed; the other case is its formula
        peft = pytest.importorskip("peft")
        reader = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
        layer = reader.base_model.model.model.layers[1]
    else:
        reader = adapted(model, folder)
        layer = reader.model.layers[1]
    lm.adapters.load("reader", folder)
    try:
        outs = lm.generate(
            [[5, 9, 11, 60], [8, 3, 77], [1, 2, 3, 4, 5]], SamplingParams(max_tokens=1, temperature=0),
            capture=[Capture("resid_post.2", positions=range(-3, 0))],
        )  # fmt: skip
        states = torch.stack([out.activations["resid_post.2"] for out in outs])
        found = lm.verbalize(
            states,
            reader="reader",
            template=TEMPLATE,
            placeholder="w7",
            site="resid_post.1",
            norm="match",
            max_tokens=TOKENS,
        )
    finally:
        lm.adapters.unload("reader")
    wanted = [oracle_tokens(reader, layer, found.token_ids, own, TOKENS) for own in states]
    assert found.positions == PLACES and [out.token_ids for out in found.outputs] == wanted
    assert len({tuple(tokens) for tokens in wanted}) > 1
    assert all(out.num_cached_tokens == 16 for out in found.outputs), "the template's first page is computed once"


@pytest.mark.parametrize("norm", [None, 3.5, "match"])
def test_an_autoencoder_reads_by_the_placeholders_embedding(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], norm: Any
) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    states = vectors_of(model, 12, 1).view(4, 3, -1)
    found = lm.verbalize(states, template=TEMPLATE, placeholder="w7", norm=norm, max_tokens=TOKENS)
    plain = model.get_input_embeddings()(torch.tensor([found.token_ids])).detach()
    lengths = {
        None: states.norm(dim=-1),
        3.5: torch.full((4, 3), 3.5),
        "match": plain[0, PLACES].norm(dim=-1).expand(4, 3),
    }
    for own, length, out in zip(states, lengths[norm], found.outputs, strict=True):
        whole = plain.clone()
        whole[0, PLACES] = torch.nn.functional.normalize(own, dim=-1) * length[:, None]
        assert out.token_ids == generated(model, whole, TOKENS)


def test_another_model_reads_at_one_placeholder_and_replaces_a_state(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    """A state of `gemma` in the stream of `qwen3`, whose width is the same: the state behind layer 0 is the given one."""
    target, reader, model = lm_of("gemma"), lm_of("qwen3"), oracle("qwen3")
    (out,) = target.forward([[4, 5, 6]], capture=["resid_post.0"])
    states = out.activations["resid_post.0"]
    ids = [1, 2, 3, 7, 9]
    how: dict[str, Any] = {"reader": reader, "template": ids, "placeholder": 7, "max_tokens": 1, "replace": True}
    found = target.verbalize(states, site="resid_post.0", norm=2.0, **how)
    for own, reading in zip(states, found.outputs, strict=True):

        def put(module: Any, args: Any, output: Any, own: Any = own) -> Any:
            h = (output[0] if isinstance(output, tuple) else output).clone()
            h[0, 3] = own * (2 / own.norm())
            return (h, *output[1:]) if isinstance(output, tuple) else h

        handle = model.model.layers[0].register_forward_hook(put)
        with torch.no_grad():
            assert reading.token_ids == [int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        handle.remove()


def test_samples_are_a_table(lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]) -> None:
    lm = lm_of("llama")
    states = vectors_of(oracle("llama"), 3, 2)
    found = lm.verbalize(list(states), template=[1, 7, 2], placeholder=7, samples=2, max_tokens=4, seed=5)
    again = lm.verbalize(states, template=[1, 7, 2], placeholder=7, samples=2, max_tokens=4, seed=5)
    table = pandas.DataFrame(found.rows())
    assert list(table["state"]) == [0, 0, 1, 1, 2, 2] and list(table["sample"]) == [0, 1] * 3
    assert len(found) == 3 and found[1] == [one.text for one in found.outputs[1].outputs]
    assert found.rows() == again.rows() and found[0:2] == [found[0], found[1]] and found.texts[2] == found[2][0]
    assert found.table().rows[3] == (1, 1, found[1][1]) and "3 states, 2 samples" in repr(found)
    (one,) = lm.verbalize(states[0], template=[1, 7, 2], placeholder=7, max_tokens=4)
    assert one == lm.verbalize(states[:1], template=[1, 7, 2], placeholder=7, max_tokens=4)[0]


def test_more_states_than_the_pool_of_vectors_holds(
    model_folder: Callable[[str], Path], oracle: Callable[[str], PreTrainedModel], lm_of: Callable[..., LM]
) -> None:
    states = vectors_of(oracle("llama"), 21, 4).view(7, 3, -1)
    how: dict[str, Any] = {"template": TEMPLATE, "placeholder": "w7", "site": "resid_post.1", "max_tokens": 3}
    with LM(
        model_folder("llama"), device="cpu", dtype="float32", kv_cache_tokens=512, max_intervention_vectors=6
    ) as lm:
        found = lm.verbalize(states, **how)
    assert found.rows() == lm_of("llama").verbalize(states, **how).rows()


def test_fve_is_the_explained_part_of_the_variance() -> None:
    torch.manual_seed(0)
    states = torch.randn(50, 8) * torch.arange(1, 9)
    close = states + 0.1 * torch.randn(50, 8)
    wanted = 1 - float(((states - close) ** 2).sum() / ((states - states.mean(0)) ** 2).sum())
    assert fve(states, close, normalize=False) == pytest.approx(wanted, abs=1e-6)
    assert fve(states, states.mean(0).expand(50, 8), normalize=False) == pytest.approx(0, abs=1e-6)
    assert fve(states, 7 * states) == pytest.approx(1) and fve(states, 7 * states, normalize=False) < -30
    with pytest.raises(ValueError, match="no variance"):
        fve(states[:1], states[:1])
    with pytest.raises(ValueError, match="expected"):
        fve(states, states[:, :4])
    with pytest.raises(ValueError, match="expected real numbers"):
        fve(states * 1j, states)


def test_bad_input_is_refused_before_anything_runs(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    width, before = lm.hidden_size, lm.engine.stats()["steps"]
    good = torch.ones(2, width)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"template": "w1 w2"}, "no placeholder 'w7' among its 2 tokens"),
        ({"template": "w1 w7 w7"}, rf"expected \[n, 2, {width}\]: the template has 2 placeholders"),
        ({"placeholder": "w7 w8"}, "is 2 tokens"),
        ({"states": good[:, 1:]}, rf"states \[2, {width - 1}\]: expected \[n, {width}\]"),
        ({"states": good / 0}, "NaN"),
        ({"states": good.long()}, "real numbers"),
        ({"states": good * 0, "norm": 1.0}, "state 0 is zero"),
        ({"states": good * 0, "norm": "match", "site": "resid_post.1"}, "state 0 is zero"),
        ({"norm": -1.0}, "norm=-1.0"),
        ({"norm": float("nan")}, "norm=nan"),
        ({"norm": "other"}, "norm='other'"),
        ({"replace": False}, "leave out replace=False"),
        ({"site": "resid_post.1", "norm": "match", "replace": True}, "leave out replace=True"),
        ({"site": "resid_post.99"}, "resid_post.99"),
        ({"reader": "nobody"}, "nobody"),
        ({"samples": 0}, "n=0"),
        ({"max_tokens": -1}, "max_tokens"),
    ]  # fmt: skip
    bad += [
        ({"reader": junk}, "reader=.*: expected the name of a LoRA adapter")
        for junk in (5, [], object(), torch.ones(1))
    ]
    junk = (None, 5, "abc", [], object(), [None], ["a"], [torch.ones(width), torch.ones(3)], [good[0], None])
    bad += [({"states": states}, "states: expected a tensor, or vectors of one width") for states in junk]
    bad += [({"states": states}, "states: expected real") for states in (good.to_sparse(), good.to("meta"), good * 1j)]
    bad.append(({"n": 3}, "samples= is the number"))
    for given, message in bad:
        arguments = {"states": good, "template": "w1 w7", "placeholder": "w7", **given}
        with pytest.raises((PromptError, ValueError), match=message):
            lm.verbalize(arguments.pop("states"), **arguments)
    assert lm.is_remote or lm.engine.stats()["steps"] == before

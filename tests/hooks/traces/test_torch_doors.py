"""Torch's own ways to a model's modules and weights: what works is used by every pass, what is not used is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.utils.parametrize
from helpers_graphs import use_eager_graphs
from torch import nn
from torch.nn.utils import prune
from transformers import PreTrainedModel

from pymllm_interp import LM, SamplingParams

PROMPT = [5, 17, 3, 41, 8]
STEPS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=0)
FAMILIES = ["llama", "llama-rope", "qwen2", "qwen3"]
"""Tied embeddings; biases everywhere; biases on q, k and v; norms of heads."""


@pytest.fixture
def make(model_folder: Callable[[str], Path]) -> Any:
    made: list[LM] = []

    def make(family: str = "llama", **options: Any) -> LM:
        made.append(LM(model_folder(family), device="cpu", **{"dtype": "float32", "max_num_tokens": 64} | options))
        return made[-1]

    yield make
    for lm in made:
        lm.shutdown()


def logprobs_of(lm: LM) -> torch.Tensor:
    """[1 + steps]: of a plain request, whose passes run fused; the prompt's logits are in it, as its tokens follow from them."""
    (out,) = lm.generate([PROMPT], GREEDY)
    return torch.tensor([entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids, strict=True)])


def in_every_pass(lm: Any) -> list[torch.Tensor]:
    """Logits of the prompt's last token: fused, module by module, and with gradients."""
    with lm.trace(PROMPT):
        fused = lm.logits.save()
    with lm.trace(PROMPT):
        lm.model.layers[0].self_attn.q_proj.output  # noqa: B018
        lm.model.layers[0].mlp.up_proj.output  # noqa: B018
        modules = lm.lm_head.output[:, -1].save()
    with lm.trace(PROMPT):
        state = lm.model.layers[0].output
        last = lm.lm_head.output[:, -1]
        with last.sum().backward():
            state.grad  # noqa: B018
        with_gradients = last.save()
    return [fused, modules, with_gradients]


def expected(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        outputs: Any = model(torch.tensor([PROMPT]))  # pyright: ignore[reportCallIssue]
        return outputs.logits[:, -1]


def assert_serves(lm: LM, model: PreTrainedModel) -> None:
    """Every kind of pass of the LM has transformers' logits, on the same weights; decode steps its tokens."""
    for logits in in_every_pass(lm):
        torch.testing.assert_close(logits.float(), expected(model), rtol=0, atol=2e-4)
    transformers_model: Any = model
    tokens = transformers_model.generate(torch.tensor([PROMPT]), max_new_tokens=STEPS, do_sample=False)[
        0, len(PROMPT) :
    ].tolist()
    (out,) = lm.generate([PROMPT], GREEDY)
    assert out.token_ids == tokens


# -- hooks -------------------------------------------------------------------------------------

HOOKS = [
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_backward_hook",
]  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "path", ["", "model", "model.layers", "model.layers.1", "model.layers.1.mlp.act_fn", "lm_head"]
)
def test_a_torch_hook_is_refused_where_it_is_registered_with_what_serves_instead(
    name: str, path: str, lm_of: Callable[..., LM]
) -> None:
    lm = lm_of("llama")
    envoy: Any = lm.get(path) if path else lm
    for target in (envoy, envoy._module):
        with pytest.raises(NotImplementedError, match=r"lm\.trace") as caught:
            getattr(target, name)(lambda *args: None)
        assert f"`{path or 'the model'}`" in str(caught.value) and "lm.run_with_hooks" in str(caught.value)
    assert not envoy._module._forward_hooks and not envoy._module._backward_hooks


def test_a_torch_hook_on_a_module_that_the_user_attached_fires(make: Callable[..., LM]) -> None:
    lm, calls = make(), []
    lm.model.layers[1].probe = nn.Linear(72, 2)
    lm.model.layers[1].probe.register_forward_hook(lambda *_: calls.append("probe"))
    with lm.trace(PROMPT):
        out = lm.model.layers[1].probe(lm.model.layers[1].output).save()
    assert out.shape == (1, len(PROMPT), 2) and calls == ["probe"]


# -- weights -----------------------------------------------------------------------------------


def in_place_copy(weight: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(value)


def by_index(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight[:] = value


def by_add(weight: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(value - weight)


def data_copy(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.data.copy_(value)


def data_index(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.data[:] = value


def data_assigned(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.data = value


def weights_of(module: Any) -> list[str]:
    return [
        f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")
    ] + ["input_layernorm", "post_attention_layernorm"]  # fmt: skip


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    "write", [in_place_copy, by_index, by_add, data_copy, data_index, data_assigned], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_that_is_written_is_used_by_every_pass(
    write: Callable[..., None], family: str, make: Callable[..., LM], oracle: Callable[..., PreTrainedModel]
) -> None:
    lm, model = make(family), copy.deepcopy(oracle(family))
    logprobs_of(lm)  # what is kept from a first use is given up
    for path in weights_of(lm):
        ours, theirs = lm.get(f"model.layers.1.{path}"), model.get_submodule(f"model.layers.1.{path}")
        for name, parameter in theirs.named_parameters():
            new = parameter.detach() + torch.randn(parameter.shape) * 0.1
            parameter.data = new.clone()
            write(getattr(ours, name), new)
            assert torch.equal(getattr(ours._module, name), new)
    assert_serves(lm, model)


@pytest.mark.parametrize("through", ["envoy", "module"])
def test_an_assigned_parameter_is_written_into_the_weight_that_passes_read(
    through: str, make: Callable[..., LM], oracle: Callable[..., PreTrainedModel]
) -> None:
    lm, model = make("llama-rope"), copy.deepcopy(oracle("llama-rope"))
    logprobs_of(lm)
    for path in (*weights_of(lm)[:7], "input_layernorm"):
        ours, theirs = lm.get(f"model.layers.0.{path}"), cast(Any, model.get_submodule(f"model.layers.0.{path}"))
        before = ours._module.weight
        theirs.weight = nn.Parameter(theirs.weight * 1.2 + 0.01)
        target = ours if through == "envoy" else ours._module
        target.weight = nn.Parameter(theirs.weight.detach().clone())
        assert ours.weight is before and torch.equal(ours.weight, theirs.weight) and "weight" not in vars(ours)
        assert not ours.weight.requires_grad
    assert_serves(lm, model)


def test_the_projections_weights_are_views_of_the_merged_weight(make: Callable[..., LM]) -> None:
    lm = make()
    attention, mlp = lm.model.layers[0].self_attn._module, lm.model.layers[0].mlp._module
    for names, merged in (("qkv", attention._qkv), (("gate", "up"), mlp._gate_up)):
        parts = [getattr(attention if merged is attention._qkv else mlp, f"{name}_proj").weight for name in names]
        memory = merged.gemm.weight.untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == memory for part in parts)
        assert sum(part.numel() for part in parts) == merged.gemm.weight.numel()


@pytest.mark.parametrize("write", [by_index, data_copy, data_assigned], ids=lambda f: f.__name__)
def test_a_write_reaches_the_packed_copies_of_bfloat16_products(
    write: Callable[..., None], make: Callable[..., LM]
) -> None:
    lm, other = make(dtype="bfloat16"), make(dtype="bfloat16")
    first = logprobs_of(lm)  # packs every weight
    new = {name: p * 1.25 for name, p in lm._module.named_parameters() if p.ndim == 2 and "embed" not in name}
    for name, value in new.items():
        write(lm._module.get_parameter(name), value)
        with torch.no_grad():
            other._module.get_parameter(name).copy_(value)  # before its first use
    assert torch.equal(logprobs_of(lm), logprobs_of(other)) and not torch.equal(logprobs_of(lm), first)


def test_a_write_reaches_decode_passes_that_were_captured(
    make: Callable[..., LM], monkeypatch: pytest.MonkeyPatch, oracle: Callable[..., PreTrainedModel]
) -> None:
    use_eager_graphs(monkeypatch)
    lm, model = make("llama-rope"), copy.deepcopy(oracle("llama-rope"))
    logprobs_of(lm)
    for name, parameter in model.named_parameters():
        parameter.data = parameter * 1.1
        lm._module.get_parameter(name).data = parameter.detach()
    assert_serves(lm, model)
    assert any(how.startswith("replay") for how in lm.engine.stats()["execution"])


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_loaded_into_the_weights_that_passes_read(
    assign: bool, make: Callable[..., LM], oracle: Callable[..., PreTrainedModel]
) -> None:
    lm, model = make("llama-rope"), copy.deepcopy(oracle("llama-rope"))
    logprobs_of(lm)
    for parameter in model.parameters():
        parameter.data = parameter * 1.1
    lm.load_state_dict(model.state_dict(), assign=assign)
    assert_serves(lm, model)


def test_a_tied_weight_is_written_for_both_of_its_modules_or_not_at_all(
    make: Callable[..., LM], oracle: Callable[..., PreTrainedModel]
) -> None:
    lm, model = make(), copy.deepcopy(oracle("llama"))
    new = model.lm_head.weight.detach() * 1.1
    for module in (lm.lm_head, lm.model.embed_tokens, lm.lm_head._module):
        with pytest.raises(
            NotImplementedError, match=r"`model.embed_tokens.weight` is tied.*tie_word_embeddings=False"
        ):
            module.weight = nn.Parameter(new)
    assert_serves(lm, model)
    lm.lm_head.weight.data = new
    model.lm_head.weight.data = new.clone()
    assert model.model.embed_tokens.weight is model.lm_head.weight
    assert_serves(lm, model)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            torch.zeros(3, 4),
            r"`model.layers.0.self_attn.q_proj.weight` has shape \[72, 72\], and the assigned tensor has \[3, 4\]",
        ),
        (
            torch.zeros(72, 72, dtype=torch.float64),
            r"has dtype torch.float32, and .* torch.float64; write `x.to\(weight\)`",
        ),
        (torch.zeros(72, 72, device="meta"), r"has device cpu, and .* meta; write `x.to\(weight\)`"),
        ([1.0], "expected a tensor, got list"),
        (None, "expected a tensor, got NoneType"),
    ],
)
def test_a_value_that_does_not_fit_a_weight_is_refused_at_the_assignment(
    value: Any, says: str, lm_of: Callable[..., LM]
) -> None:
    projection = lm_of("llama").model.layers[0].self_attn.q_proj
    before = projection.weight.clone()
    assignments: list[Any] = [lambda: setattr(projection.weight, "data", value)]
    given = nn.Parameter(value, False) if isinstance(value, torch.Tensor) else value
    assignments += [lambda: setattr(projection, "weight", given), lambda: setattr(projection._module, "weight", given)]
    for assign in assignments:
        with pytest.raises(ValueError, match=says):
            assign()
    assert torch.equal(projection.weight, before)


def test_a_weight_becomes_its_own_transpose(make: Callable[..., LM]) -> None:
    weight = make().model.layers[0].self_attn.q_proj.weight
    transposed = weight.t().clone()
    weight.data = weight.data.t()
    assert torch.equal(weight, transposed)


def test_memory_and_gradients_of_a_weight_cannot_be_changed(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    weight = lm.model.layers[0].mlp.up_proj.weight
    for change in (
        lambda: weight.requires_grad_(),
        lambda: setattr(weight, "requires_grad", True),
        lambda: lm.model.layers[0].mlp.requires_grad_(),
        lambda: lm.requires_grad_(True),
    ):
        with pytest.raises(NotImplementedError, match="cannot require gradients"):
            change()
    with pytest.raises(NotImplementedError, match=r"`model\.layers\.0\.mlp.up_proj.weight` keeps its memory"):
        weight.set_(torch.zeros(2))
    assert not any(p.requires_grad for p in lm.requires_grad_(False).parameters())
    with pytest.raises(NotImplementedError, match="cannot require gradients"), lm.trace(PROMPT):
        lm.model.layers[0].mlp.up_proj.weight.requires_grad_()


# -- modules -----------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


REPLACEMENTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("model.layers.1.mlp", lambda lm: setattr(lm.model.layers[1], "mlp", Doubled())),
    ("model.layers.1.mlp", lambda lm: setattr(lm.model.layers[1]._module, "mlp", Doubled())),
    ("model.layers.1.mlp", lambda lm: lm.model.layers[1]._module.add_module("mlp", Doubled())),
    ("model.layers.1.mlp", lambda lm: lm.model.layers[1]._module.register_module("mlp", Doubled())),
    ("model.layers.1.mlp", lambda lm: delattr(lm.model.layers[1]._module, "mlp")),
    ("model.layers.1.mlp", lambda lm: delattr(lm.model.layers[1], "mlp")),
    ("model.layers.1.mlp.act_fn", lambda lm: setattr(lm.model.layers[1].mlp, "act_fn", nn.GELU())),
    ("model.layers.1", lambda lm: lm.model.layers._module.__setitem__(1, Doubled())),
    ("model.layers.3", lambda lm: lm.model.layers._module.append(Doubled())),
    ("model.layers.0", lambda lm: lm.model.layers._module.insert(0, Doubled())),
    ("model.layers.3", lambda lm: lm.model.layers._module.extend([Doubled()])),
    ("model.layers.2", lambda lm: lm.model.layers._module.pop(-1)),
    ("model.layers.2", lambda lm: lm.model.layers._module.__delitem__(-1)),
    ("model.layers", lambda lm: setattr(lm.model, "layers", nn.ModuleList(list(lm.model.layers._module)[:2]))),
    ("lm_head", lambda lm: setattr(lm, "lm_head", nn.Linear(72, 97))),
]


@pytest.mark.parametrize(("path", "replace"), REPLACEMENTS)
def test_a_module_of_the_model_cannot_be_replaced_or_removed(
    path: str, replace: Callable[[Any], Any], lm_of: Callable[..., LM]
) -> None:
    lm = lm_of("llama")
    before, modules = logprobs_of(lm), list(lm._module.modules())
    with pytest.raises(NotImplementedError, match=f"`{path}` cannot be replaced or removed.*lm.edit"):
        replace(lm)
    assert list(lm._module.modules()) == modules and torch.equal(logprobs_of(lm), before)
    assert len(lm.model.layers) == 3


def test_what_the_error_names_does_what_a_replaced_module_would(
    make: Callable[..., LM], oracle: Callable[..., PreTrainedModel]
) -> None:
    lm, model = make(), copy.deepcopy(oracle("llama"))
    model.model.layers[1].mlp = Doubled()
    lm.model.layers[1].doubled = Doubled()
    with lm.edit(inplace=True):
        lm.model.layers[1].mlp.output = lm.model.layers[1].doubled(lm.model.layers[1].mlp.input)
    with lm.trace(PROMPT):
        logits = lm.lm_head.output[:, -1].save()
    torch.testing.assert_close(logits, expected(model), rtol=0, atol=2e-4)


def test_forward_and_settings_of_a_module_cannot_be_changed(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    layer: Any = lm.model.layers[1]
    for target in (layer.mlp, layer.mlp._module):
        with pytest.raises(
            NotImplementedError, match=r"`model\.layers\.1\.mlp`: `forward` cannot be replaced.*lm\.trace"
        ):
            target.forward = lambda x: x
    for target in (layer.input_layernorm, layer.input_layernorm._module):
        with pytest.raises(NotImplementedError, match="`variance_epsilon` cannot be changed"):
            target.variance_epsilon = 1.0
        with pytest.raises(NotImplementedError, match=r"model\.layers\.1\.input_layernorm"):
            target.variance_epsilon = 1.0
    with pytest.raises(NotImplementedError, match="`bias` cannot be changed"):
        layer.mlp.up_proj.bias = nn.Parameter(torch.zeros(56))
    with pytest.raises(NotImplementedError, match="enable_torch_compile"):
        layer.compile()


def test_conversions_work_where_they_change_nothing_and_are_refused_elsewhere(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    for same in (
        lm.float,
        lm.cpu,
        lm._module.eval,
        lambda: lm._module.to(lm.device),
        lambda: lm._module.to(torch.float32),
    ):
        assert same() is not None
    lm.model.layers[1].to("cpu")
    for other in (
        lm.half, lm.bfloat16, lm.double, lambda: lm._module.to("meta"), lambda: lm.model.layers[1].to("meta"),
        lambda: lm._module.to_empty(device="cpu"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"its weights stay torch.float32 on cpu.*LM\(\.\.\., dtype="):
            other()
    with pytest.raises(NotImplementedError, match="cannot be trained"):
        lm._module.train()
    assert not lm._module.training and {p.dtype for p in lm._module.parameters()} == {torch.float32}


def test_libraries_that_change_a_modules_weights_by_hooks_or_parametrizations_are_refused(
    make: Callable[..., LM],
) -> None:
    lm = make()
    before, module = logprobs_of(lm), lm.model.layers[0].mlp.up_proj._module
    for change in (
        lambda: nn.utils.parametrize.register_parametrization(module, "weight", Doubled()),
        lambda: nn.utils.parametrizations.weight_norm(module),
        lambda: prune.l1_unstructured(lm.model.layers[0].mlp.gate_proj._module, "weight", 0.5),
    ):
        with pytest.raises(
            (NotImplementedError, RuntimeError), match=r"keeps its memory|type Weight|under another name"
        ):
            change()
    assert torch.equal(logprobs_of(lm), before) and isinstance(lm.model.layers[0].mlp.gate_proj.weight, nn.Parameter)


def test_a_function_is_applied_to_all_modules_and_its_writes_are_used(
    make: Callable[..., LM], oracle: Callable[..., PreTrainedModel]
) -> None:
    lm, model = make("llama-rope"), copy.deepcopy(oracle("llama-rope"))

    def scale(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(1.1)

    lm.apply(scale)
    model.apply(scale)
    assert_serves(lm, model)


@pytest.mark.parametrize(
    "path", ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.mlp", "model.norm", "model.embed_tokens"]
)
def test_a_copy_of_a_module_is_torchs_with_weights_of_its_own(path: str, make: Callable[..., LM]) -> None:
    lm = make("llama-rope")
    before, served = logprobs_of(lm), lm.get(path)._module
    copied = copy.deepcopy(served)
    x = torch.randint(90, (1, 3)) if path.endswith("embed_tokens") else torch.randn(1, 3, 64)
    torch.testing.assert_close(copied(x), served(x))
    calls: list[str] = []
    copied.register_forward_hook(lambda *_: calls.append("copy"))
    copied.requires_grad_().train()
    copied(x).square().sum().backward()
    assert calls == ["copy"] and all(p.grad is not None and p.grad.any() for p in copied.parameters())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any() and served(x).any() and torch.equal(logprobs_of(lm), before)
    assert type(nn.Parameter(next(served.parameters()).data)) is nn.Parameter


# -- classes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_answer_to_torchs_classes_as_transformers_modules_do(
    family: str, lm_of: Callable[..., LM], oracle: Callable[..., PreTrainedModel]
) -> None:
    lm, model = lm_of(family), oracle(family)
    ours = {envoy.path.removeprefix("model").lstrip("."): envoy._module for envoy in lm.modules()}
    for kind in (nn.Linear, nn.Embedding, nn.ModuleList):
        theirs = {path for path, module in model.named_modules() if isinstance(module, kind)}
        assert {path for path, module in ours.items() if isinstance(module, kind)} == theirs, kind
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            facts = (
                ("in_features", "out_features")
                if isinstance(module, nn.Linear)
                else ("num_embeddings", "embedding_dim")
            )
            assert [getattr(ours[path], fact) for fact in facts] == [getattr(module, fact) for fact in facts]
            assert ours[path].extra_repr() == module.extra_repr() and ours[path].weight.shape == module.weight.shape
            assert isinstance(ours[path].weight, nn.Parameter) and {*ours[path]._parameters} == {*module._parameters}
            bias = getattr(module, "bias", None)
            assert (getattr(ours[path], "bias", None) is None) == (bias is None)

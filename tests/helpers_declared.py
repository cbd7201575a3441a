"""Declared interventions on transformers' model: the oracle of test_declared.py and test_captures.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB
from helpers_graphs import use_eager_graphs

from pymllm_interp import LM, Ablate, Clamp, Gate, Generated, Patch, Scale, Steer
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.binding import bind
from pymllm_interp.hooks.declared_stage import DeclaredStage
from pymllm_interp.hooks.interventions.op import Op
from pymllm_interp.hooks.interventions.reference import apply
from pymllm_interp.hooks.positions import ordinals_of
from pymllm_interp.hooks.site import Site

SITES = [
    "embed",
    "resid_pre.1",
    "attn_out.0",
    "resid_mid.1",
    "mlp_out.1",
    "resid_post.0",
    "resid_post.-1",
    "final_norm",
]
INNER = ["q.1", "k.0", "v.-1", "z.1", "mlp_act.0", "logits"]


WAYS = ["functions", "tables", "graphs"]
"""How hooks run: as functions, on the CPU; as on CUDA; and that with steps that are replayed, whole or from block to block."""


@contextmanager
def lms(way: str, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM in float32 whose hooks run in that way; off CUDA, with functions in place of graphs."""
    made: dict[tuple, LM] = {}
    cuda = torch.cuda.is_available()
    defaults = {
        "dtype": "float32", "max_running_requests": 16, "device": "cuda" if cuda and way != "functions" else "cpu",
        "disable_cuda_graph": way != "graphs", "hook_execution": "segments" if way == "graphs" else "auto",
        "kv_cache_tokens": 4096,
    }  # fmt: skip

    def load(family: str, **kwargs: Any) -> LM:
        key = (family, *sorted(kwargs.items()))
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DeclaredStage, "has_tables", way != "functions")
                made[key] = LM(model_folder(family), **{**defaults, **kwargs})
        return made[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        if way == "graphs" and not cuda:
            use_eager_graphs(monkeypatch)
        yield load
        for lm in made.values():
            lm.shutdown()


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(VOCAB - 2) for _ in range(length)]


def vector(width: int, seed: int, *rows: int) -> torch.Tensor:
    return torch.randn(*rows, width, generator=torch.Generator().manual_seed(seed))


def ops_at(site: str, config: Any) -> list[Op]:
    width = ModelSpec.of(config, torch.float32).width(Site.parse(site).kind)
    v, probe = vector(width, 1), vector(width, 2)
    return [
        Steer(site, v, scale=1.5, positions="generated"),
        Steer(site, v, positions=slice(0, None, 3), norm="preserve"),
        Steer(site, v, scale=0.4, norm="match", when=Gate(probe, 0.0)),
        Ablate(site, vector(width, 3, 3)),
        Clamp(site, probe, low=-0.2, high=0.2, positions="prompt"),
        Scale(site, 0.7, positions=Generated(1, 5, 2)),
        Patch(site, vector(width, 4, 2), positions=[0, -1]),
    ]


@contextmanager
def hooked(model: Any, specs: list[Op], prompt_len: int, positions: Callable[[], torch.Tensor]) -> Iterator[None]:
    """transformers' model with hooks at the modules that the sites are, each applying its specs in order."""
    info, handles = ModelSpec.of(model.config, torch.float32), []
    layers = model.model.layers
    # What `resid_mid` remembers of a layer's input is what its other hooks have left.
    for spec in sorted(specs, key=lambda spec: str(spec.site).startswith("resid_mid")):
        for bound in bind(spec, info, prompt_len):
            kind, i = bound.site.kind, bound.site.layer or 0

            def edit(state: torch.Tensor, bound: Any = bound) -> torch.Tensor:
                return apply(bound.spec, state[0], ordinals_of(bound.windows, positions()))[None]

            def output(module: Any, args: Any, out: Any, edit: Any = edit) -> Any:
                return (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)

            def first(module: Any, args: Any, kwargs: Any, edit: Any = edit) -> Any:
                if args:
                    return (edit(args[0]), *args[1:]), kwargs
                return args, kwargs | {"hidden_states": edit(kwargs["hidden_states"])}

            attn, mlp = layers[i].self_attn, layers[i].mlp
            module = {
                "embed": model.model.embed_tokens, "attn_out": attn, "mlp_out": mlp, "resid_post": layers[i],
                "final_norm": model.model.norm, "q": attn.q_proj, "k": attn.k_proj, "v": attn.v_proj, "logits": model.lm_head,
            }.get(kind)  # fmt: skip
            reader = {"resid_pre": layers[i], "z": attn.o_proj, "mlp_act": mlp.down_proj}.get(kind)
            if reader is not None:
                handles.append(reader.register_forward_pre_hook(first, with_kwargs=True))
            elif kind == "resid_mid":
                handles += resid_mid(layers[i], edit)
            else:
                assert module is not None
                handles.append(module.register_forward_hook(output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def resid_mid(layer: Any, edit: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The sum after the attention is no module's output: what the attention adds is changed so that the sum is the edited one."""
    before: list[torch.Tensor] = []

    def remember(module: Any, args: Any, kwargs: Any) -> None:
        before[:] = [args[0] if args else kwargs["hidden_states"]]

    def shift(module: Any, args: Any, out: Any) -> Any:
        return (edit(before[0] + out[0]) - before[0], *out[1:])

    return [
        layer.register_forward_pre_hook(remember, with_kwargs=True),
        layer.self_attn.register_forward_hook(shift),
    ]


def random_specs(rng: random.Random, config: Any, sites: list[str] = SITES) -> list[Op]:
    specs = [
        spec
        for site in rng.sample(sites, rng.randrange(0, 4))
        for spec in rng.sample(ops_at(site, config), rng.randrange(1, 3))
    ]
    rng.shuffle(specs)
    return [spec for spec in specs if not isinstance(spec, Patch)]


@torch.no_grad()
def states_of(model: Any, ids: list[int], specs: list[Op], prompt_len: int) -> dict[str, torch.Tensor]:
    """Every site's state at each of `ids`, from one pass under hooks: what goes on, after the specs."""
    at, found, handles = torch.arange(len(ids)), {}, []
    with hooked(model, specs, prompt_len, lambda: at):
        layers = model.model.layers

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, out: Any) -> None:
                found[name] = (out[0] if isinstance(out, tuple) else out)[0]

            return hook

        def keep_input(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                found[name] = (args[0] if args else kwargs["hidden_states"])[0]

            return hook

        # What goes on from a layer is what the next one reads: `resid_pre` ops act at the same place.
        for i, layer in enumerate(layers):
            handles.append(
                layer.register_forward_pre_hook(
                    keep_input("embed" if i == 0 else f"resid_post.{i - 1}"), with_kwargs=True
                )
            )
        handles.append(model.model.norm.register_forward_hook(keep("final_norm")))
        for i, layer in enumerate(layers):
            attn, mlp = layer.self_attn, layer.mlp
            for kind in "qkv":
                handles.append(getattr(attn, f"{kind}_proj").register_forward_hook(keep(f"{kind}.{i}")))
            handles.append(attn.o_proj.register_forward_pre_hook(keep_input(f"z.{i}"), with_kwargs=True))
            handles.append(mlp.down_proj.register_forward_pre_hook(keep_input(f"mlp_act.{i}"), with_kwargs=True))
            handles.append(layer.self_attn.register_forward_hook(keep(f"attn_out.{i}")))
            handles.append(layer.mlp.register_forward_hook(keep(f"mlp_out.{i}")))
        handles.append(layers[-1].register_forward_hook(keep(f"resid_post.{len(layers) - 1}")))
        handles.append(model.lm_head.register_forward_hook(keep("logits")))
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found

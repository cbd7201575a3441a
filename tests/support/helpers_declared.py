"""Declared interventions on transformers' model: the oracle of test_declared.py and test_captures.py."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB
from helpers_graphs import use_eager_graphs
from helpers_runner import part_of

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, Scale, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.core.model_spec import Family, ModelSpec
from pymllm_interp.hooks.bind import bind
from pymllm_interp.hooks.captures.egress.copier import BlockCopies
from pymllm_interp.hooks.captures.egress.device_memory import DeviceMemory
from pymllm_interp.hooks.captures.layout import layout_of
from pymllm_interp.hooks.captures.rows import CapturedRows
from pymllm_interp.hooks.interventions.op import Op, apply
from pymllm_interp.hooks.positions import ordinals_of
from pymllm_interp.hooks.site import WITHOUT_LAYER, Site, expand
from pymllm_interp.interventions import Generated
from pymllm_interp.kernels.cpu.block_copies import load_block_copies
from pymllm_interp.runner.graphs import graph_capture
from pymllm_interp.runner.stages.declared_stage import DeclaredStage

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
        "kv_cache_tokens": 4096, "capture_ring_bytes": 64 << 20,
    }  # fmt: skip

    def load(family: str, **kwargs: Any) -> LM:
        key = (family, *((name, id(v) if isinstance(v, dict) else v) for name, v in sorted(kwargs.items())))
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DeclaredStage, "has_tables", way != "functions")
                made[key] = LM(model_folder(family), **with_tuning(**{**defaults, **kwargs}))
        return made[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        if way == "graphs" and not cuda:
            use_eager_graphs(monkeypatch)
            monkeypatch.setattr(graph_capture, "capture_batch_sizes", lambda most: sorted({1, 4, 8, most}))  # a few
        yield load
        for lm in made.values():
            lm.shutdown()


def is_freed(memory: DeviceMemory, held: int = 0) -> bool:
    """Whether no more than `held` bytes stay on the device, once threads have let go of ended requests."""
    for _ in range(200):
        gc.collect()
        if memory.used <= held:
            return True
        time.sleep(0.05)
    return False


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


def place_of(site: str, family: Family) -> str | None:
    """The site, or `resid_pre.0` where the family's stream begins behind `embed`; None where the family has no such site."""
    kind = site.partition(".")[0]
    if kind == "embed" and kind in family.missing:
        return "resid_pre.0"
    return None if kind in family.missing else site


@contextmanager
def hooked(model: Any, specs: list[Op], prompt_len: int, positions: Callable[[], torch.Tensor]) -> Iterator[None]:
    """transformers' model with hooks at the modules that the sites are, each applying its specs in order."""
    info, handles = ModelSpec.of(model.config, torch.float32), []
    family = info.family
    # What `resid_mid` remembers of a layer's input is what its other hooks have left.
    for spec in sorted(specs, key=lambda spec: str(spec.site).startswith("resid_mid")):
        for bound in bind(spec, info, prompt_len):
            kind = bound.site.kind

            def edit(state: torch.Tensor, bound: Any = bound, kind: str = kind) -> torch.Tensor:
                part = part_of(info, kind, state[0])
                edited = apply(bound.spec, part, ordinals_of(bound.windows, positions()))[None]
                return with_part(info, kind, state, edited) if family.is_slice(kind) else edited

            def output(module: Any, args: Any, out: Any, edit: Any = edit) -> Any:
                if hasattr(out, "logits"):
                    out.logits = edit(out.logits)
                    return out
                return (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)

            def first(module: Any, args: Any, kwargs: Any, edit: Any = edit) -> Any:
                if args:
                    return (edit(args[0]), *args[1:]), kwargs
                return args, kwargs | {"hidden_states": edit(kwargs["hidden_states"])}

            path, end = family.point(bound.site)
            module = model if kind == "logits" else model.get_submodule(path)  # a soft-cap is behind the head
            if kind == "resid_mid":
                handles += resid_mid(model, family, bound.site.layer or 0, edit)
            elif end == "input":
                handles.append(module.register_forward_pre_hook(first, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_part(info: ModelSpec, kind: str, state: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`state` with `part` in the place of what `part_of` takes from it."""
    state = state.clone()
    heads = state[0].unflatten(-1, (-1, 3, info.head_dim) if info.family.by_head else (3, -1, info.head_dim))
    place = heads.select(-2 if info.family.by_head else -3, "qkv".index(kind))
    place.copy_(part[0].view(place.shape))
    return state


def resid_mid(model: Any, family: Family, layer: int, edit: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The sum after the attention is no module's output: what the attention adds is changed so that the sum is the edited one."""
    before: list[torch.Tensor] = []

    def remember(module: Any, args: Any, kwargs: Any) -> None:
        before[:] = [args[0] if args else kwargs["hidden_states"]]

    def shift(module: Any, args: Any, out: Any) -> Any:
        added, *others = out if isinstance(out, tuple) else (out,)
        added = edit(before[0] + added) - before[0]
        return (added, *others) if isinstance(out, tuple) else added

    attn_out = family.point(Site("attn_out", layer)).module
    return [
        model.get_submodule(f"{family.layers}.{layer}").register_forward_pre_hook(remember, with_kwargs=True),
        model.get_submodule(attn_out).register_forward_hook(shift),
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
    info = ModelSpec.of(model.config, torch.float32)
    family, num_layers = info.family, info.num_hidden_layers
    with hooked(model, specs, prompt_len, lambda: at):

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, out: Any) -> None:
                state = (out.logits if hasattr(out, "logits") else out[0] if isinstance(out, tuple) else out)[0]
                found[name] = part_of(info, name.partition(".")[0], state)

            return hook

        def keep_input(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                found[name] = (args[0] if args else kwargs["hidden_states"])[0]

            return hook

        # What goes on from a layer is what the next one reads: `resid_pre` ops act at the same place.
        for i in range(num_layers):
            name = f"resid_post.{i - 1}" if i else "resid_pre.0" if "embed" in family.missing else "embed"
            layer = model.get_submodule(f"{family.layers}.{i}")
            handles.append(layer.register_forward_pre_hook(keep_input(name), with_kwargs=True))
        for kind in ("final_norm", "q", "k", "v", "z", "mlp_act", "attn_out", "mlp_out"):
            for site in expand(kind if kind in WITHOUT_LAYER else f"{kind}.*", num_layers, family):
                path, end = family.point(site)
                module = model.get_submodule(path)
                if end == "input":
                    handles.append(module.register_forward_pre_hook(keep_input(str(site)), with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(keep(str(site))))
        last = model.get_submodule(f"{family.layers}.{num_layers - 1}")
        handles.append(last.register_forward_hook(keep(f"resid_post.{num_layers - 1}")))
        handles.append(model.register_forward_hook(keep("logits")))
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


def captured_rows(
    specs: list[Any],
    model: ModelSpec,
    prompt_len: int,
    longest: int,
    dtype: torch.dtype | None = None,
    readout: Any = None,
) -> CapturedRows:
    """The rows of a request with these captures."""
    model = replace(model, dtype=dtype or model.dtype)
    wanted = [Capture(spec) if isinstance(spec, str) else spec for spec in specs]
    return CapturedRows(layout_of(wanted, model, prompt_len, longest, readout=readout))


def copy_records(
    captures: CapturedRows, records: torch.Tensor, first: int, sizes: np.ndarray, packed: bool = False
) -> None:
    """Copy records [elements] on the host to the rows, as the ring's thread does."""
    copies = BlockCopies(records, load_block_copies())
    captures.copy_rows(copies, first, sizes, 0, packed)
    copies.make()

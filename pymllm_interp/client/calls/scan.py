"""`ScanTracer`: ``with lm.scan(prompt):`` runs its block over fake tensors, which have a shape and a dtype and no values."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import transformers
from greenlet import getcurrent
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from ...hooks.traces.blocks.block_analysis import depend_on_each_other, want_gradients
from ...hooks.traces.nnsight_compat import Barrier, Batcher, Envoy, Interleaver, Iterations, Mediator, push_result
from ...hooks.traces.syntax.pass_options import PassOptions
from ...hooks.traces.syntax.scanned import ScanInterleaver
from ...hooks.traces.syntax.tracer import EngineTracer
from ..prompt_batch import prompts_of

ENGINE = "pymllm_interp_scan"
"""Attention of scans for families with eager attention only: its modules return no weights, like the engine's."""
WITHOUT_VALUES = ("interventions", "capture", "on_step")
"""Keywords of a trace that a scan refuses."""
OF_ENGINE = ("timeout", "priority", "cache_salt")
"""Keywords of a trace that have no effect on shapes."""

Scanned = tuple[list[Mediator], list[int], dict[str, Any]]
"""The blocks of an invoke, the tokens of each of its rows, padding included, and keywords of the model's forward."""


class FakeModel(Envoy):
    """The model by its class in transformers, with fake weights: shapes, dtypes and devices without memory.

    Args:
        config: config of the model. Attributes of quantized weights are omitted.
        dtype, device: dtype and device of weights and states.
        served: the interleaver of the model that is scanned.

    Attributes:
        mode: makes all tensors of its scans fake.
        lock: held by the one scan that runs.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, served: Interleaver) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # which imports sympy

        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)
        config._attn_implementation = None
        config._experts_implementation = "batched_mm"  # "grouped_mm" refuses fake tensors of float32
        config.dtype = None  # transformers would set torch's default dtype, which the engine's thread reads
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(assume_static_by_default=True))
        self.lock = threading.Lock()
        auto = transformers.AutoModelForCausalLM
        with self.mode, torch.device(device):
            model = auto.from_config(config)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        interleaver = ScanInterleaver(served)
        own = model.config._attn_implementation
        self._attention = ENGINE if own == "eager" else own
        super().__init__(model.eval(), interleaver=interleaver)
        interleaver.doubles.update(self.modules(names=True))

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        return len(inputs[0]) if inputs else 0

    def _batch(self, invokes: list[tuple], fn: Any) -> tuple[tuple, dict[str, Any]]:
        lengths = [length for (rows,), _ in invokes for length in rows]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for _, kwargs in invokes:
            found |= kwargs
        return (), found

    @contextmanager
    def scanning(self, options: PassOptions, grad: bool) -> Iterator[None]:
        """Make tensors fake, and run attention as a trace with these options does. `grad` keeps the graph of the pass."""
        attention = "eager" if options.eager_attention else self._attention
        module: Any = self._module
        from transformers.masking_utils import eager_mask

        from ...models.transformers.probe import use_attention  # which imports transformers' models

        transformers.AttentionInterface.register(ENGINE, _attend)
        transformers.AttentionMaskInterface.register(ENGINE, eager_mask)
        with self.lock, self.mode:
            if module.config._attn_implementation != attention:
                use_attention(module, attention)
            module.requires_grad_(grad)
            yield

    def run(self, invokes: Sequence[Scanned]) -> None:
        """One forward pass over these invokes, padded to each other, with their blocks."""
        batcher = Batcher(self)
        mediators: list[Mediator] = []
        for blocks, lengths, kwargs in invokes:
            group = batcher.add(*([lengths] if lengths else []), **kwargs)
            for block in blocks:
                block.batch_group = group
            mediators += blocks
        self.interleaver.mediators = mediators
        self.interleave("__call__", batcher=batcher)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Fake attention of the right shape: [batch, heads, tokens, head_dim] -> [batch, tokens, heads, head_dim]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return (query @ key.transpose(2, 3) @ value).transpose(1, 2).contiguous(), None


class ScanTracer(EngineTracer):
    """A ``with lm.scan(...)`` block. It runs in the caller's thread, and the engine does not know of it."""

    @property
    def iter(self) -> Iterations:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Steps: a scan has one."""
        return Iterations()

    def barrier(self, n: int) -> Barrier:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A barrier for `n` blocks of this scan, which then share one forward pass."""
        self.barriers += 1
        return Barrier(n)

    def _serve(self, code: CodeType) -> None:
        if hasattr(getcurrent(), "mediator"):
            raise RuntimeError("a scan cannot be opened inside the block of a trace or of another scan: use a session")
        self._collect(code)
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        model: Any = self._model
        scans, options, grad = list[Scanned](), PassOptions(), False
        joined = self.barriers > 0 or depend_on_each_other([block for block, *_ in self._invocations])
        for i, (block, args, kwargs, _) in enumerate(self._invocations):
            what = f"invoke {i}" if len(self._invocations) > 1 else "the prompt"
            batch, kwargs = prompts_of(args, kwargs, what)
            lengths = [len(model.token_ids(prompt, what)) for prompt in batch.prompts]
            width = batch.padding.width if batch.padding else max(lengths, default=0)
            edits = model._edits_of(kwargs.pop("edits", None)) if lengths else []
            joined = bool(kwargs.pop("padding", False)) or not lengths or joined
            own = model._pass_options([block, *edits], kwargs)
            options = PassOptions(*map(any, zip(options, own, strict=True)))
            grad = kwargs.pop("grad", None) or want_gradients([block, *edits]) or grad
            copies = [Mediator(edit.code, edit.glbls, edit.lcls, copy=True) for edit in edits]
            scans.append(([*copies, block], [width] * len(lengths), _of_forward(kwargs, own)))
        if not any(lengths for _, lengths, _ in scans):
            raise ValueError("a prompt is needed: an invoke without one sees those of the other invokes")
        fake: FakeModel = model._fake_model
        with fake.scanning(options, grad):
            for together in [scans] if joined else [[scan] for scan in scans]:
                fake.run(together)
        for block, *_ in self._invocations:
            push_result(frame, block.lcls.writes())


def _of_forward(kwargs: dict[str, Any], options: PassOptions) -> dict[str, Any]:
    """The keywords of the model's forward among the keywords of a scan. Raises TypeError: a keyword that needs values."""
    refused = [name for name in WITHOUT_VALUES if kwargs.pop(name, None) is not None]
    if refused:
        raise TypeError(f"lm.scan has shapes and no values, so it takes no {' or '.join(refused)}: use lm.trace")
    asked = {"output_attentions": options.output_attentions, "output_hidden_states": options.output_hidden_states}
    kept = {name: value for name, value in kwargs.items() if name not in OF_ENGINE}
    return kept | {name: True for name, on in asked.items() if on}

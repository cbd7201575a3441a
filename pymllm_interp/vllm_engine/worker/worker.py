"""The worker classes that vLLM is given by name: ``worker_cls="pymllm_interp.vllm_engine.worker.worker.InterpGPUWorker"``.

Each is vLLM's own worker of the platform. Its runner, whichever vLLM chose, gets a subclass of its class.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any, cast

import torch

from ... import __version__
from ...config import ModelConfig
from ...models.weights.loading import iter_safetensors
from ...models.weights.model_state import checksum
from ...models.weights.source import load_tokenizer, resolve_model
from ...utils.stage_times import TIMES
from ...wire.weights import received
from ..faults import told
from ..orphans import ClientProcess, end_with
from ..payloads import TensorKey
from ..refusals import refuse_config
from ..results import host_name, pid_space
from ..settings import KEY, served_spec, server_config_of
from ..structures import structure_of
from ..versions import installed_version
from . import op
from .blocks.row_adapters import keep_rows_plain
from .blocks.traces import RankTraces
from .egress.egress import Egress
from .hooks_of import HooksOf
from .readout import VllmReadout, head_of, without_adapters
from .rows_v1 import RowsOfV1
from .rows_v2 import RowsOfV2
from .split_rows import SplitRows
from .stage import RankStage
from .taps import put_inner_taps, put_taps

PADDING = 1024
"""Rows of a pass beyond max_num_batched_tokens: captured graphs are padded."""
SPARE_ROWS = 64
"""Rows of the tables for requests that have ended, until their results were read."""
SWITCH_SECONDS = 5e-4
"""Longest time that a copying thread may delay the thread that launches passes."""
WITHOUT_OP = "PYMLLM_INTERP_VLLM_WITHOUT_OP"
"""Environment variable that disables the taps, for the canary's test."""


class InterpWorker:
    """A mixin in front of a worker's class. Methods that begin with ``interp_`` are called by the client, on all ranks."""

    rank: int
    vllm_config: Any
    model_runner: Any
    device: torch.device
    egress: Egress | None = None
    _sums: dict[str, int]
    _sites: frozenset[int] | None = None

    def init_device(self) -> None:
        """Refuse unsupported settings, then make the runner, and put the mixin in front of its class."""
        with told(self.rank):
            self._init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the weights, then tap the norms. Compilation and graphs come later."""
        with told(self.rank):
            return self._load_model(*args, **kwargs)

    def _init_device(self) -> None:
        installed_version()
        self._sums = {}
        refuse_config(self.vllm_config)
        super().init_device()  # pyright: ignore[reportAttributeAccessIssue]
        runner = self.model_runner
        second = any(cls.__module__ == "vllm.v1.worker.gpu.model_runner" for cls in type(runner).__mro__)
        mixin = RowsOfV2 if second else RowsOfV1
        own = (name for name, method in vars(mixin).items() if isfunction(method) and name not in mixin.OWN)
        if missing := [name for name in own if not hasattr(runner, name)]:
            raise NotImplementedError(
                f"hooks need {', '.join(missing)} of vLLM's runner, which this version does not have"
            )
        runner.__class__ = type(f"Interp{type(runner).__name__}", (mixin, type(runner)), {})

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        found = super().load_model(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        config, model = self.vllm_config, self.model_runner.get_model()
        structure = structure_of(model)
        settings = server_config_of(config.additional_config)
        spec = served_spec(config.model_config.hf_config, config.model_config.dtype)
        scheduler = config.scheduler_config
        parallel = config.parallel_config
        tensor_ranks, several = parallel.tensor_parallel_size, parallel.pipeline_parallel_size > 1
        head = head_of(model, config.model_config.hf_config)
        readout = VllmReadout(without_adapters(model, head), structure, tensor_ranks)
        tokens, rows = scheduler.max_num_batched_tokens + PADDING, scheduler.max_num_seqs + SPARE_ROWS
        device = torch.device(self.device)
        split = SplitRows(spec, tensor_ranks, self.rank % tensor_ranks)
        stage = RankStage(settings, spec, device, tokens, rows, structure.taps, split, readout)
        if os.environ.get(WITHOUT_OP) != "1":
            within = stage.in_tables and config.additional_config[KEY]["taps"] == "norm"
            put_taps(structure, handle := op.register(stage.taps), within)
            stage.num_taps += put_inner_taps(structure, spec, stage.stage.limits.inner_sites, split, handle)
        named = ModelConfig(model=config.model_config.model, load_format="dummy")
        adapters = None if config.lora_config is None else self.model_runner.lora_manager._adapter_manager
        if adapters is not None and device.type == "cpu":
            keep_rows_plain(adapters)
        traces = RankTraces(
            model, config.model_config.hf_config, spec, device, _tensor_parallel_group, settings,
            lambda: load_tokenizer(resolve_model(named, quantised=True)), stage,
            (adapters, scheduler.max_num_batched_tokens), partial(_context, config),
        )  # fmt: skip
        drafts = config.speculative_config
        num_drafts = 0 if drafts is None else drafts.num_speculative_tokens
        sites = self._sites = structure.sites if several else None
        if several:
            stage.scores.add_up = _add_up
        self.model_runner.interp = HooksOf(stage, model, head, traces, num_drafts, sites)
        sys.setswitchinterval(SWITCH_SECONDS)
        return found

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, then the monitors' scores of all stages: the next stage has got its input by then."""
        found = super().execute_model(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self._sites is not None:
            stage = self._hooks.stage
            with stage.lock:
                stage.scores.join(stage.step)
        return found

    @property
    def _hooks(self) -> HooksOf:
        return self.model_runner.interp

    def interp_open(self, key: bytes, client: Sequence[Any] | None = None) -> dict[str, Any]:
        """Take hooks that were sealed with this key.

        Args:
            client: the fields of the `ClientProcess` that this rank ends with, or None.

        Returns:
            the properties of this rank. The first rank of each pipeline stage has an address of results.
        """
        self._hooks.open(key)
        if client is not None:
            end_with(ClientProcess(*client))
        own, model = self._hooks.stage, cast(Any, self.model_runner).get_model()
        if own.rank == 0 and self.egress is None:
            self.egress = Egress(key, own.finish, own.rows, own.arena)
            self._hooks.traces.tell = self.egress.tell
            if own.scores.add_up is None or _pipeline().is_first_rank:
                own.scores.tell = self.egress.tell
        if self.egress is not None:
            self.egress.key = key
        return {
            "rank": self.rank, "version": __version__, "vllm": installed_version(), "host": host_name(), "pid": os.getpid(),
            "pid_space": pid_space(),
            "address": None if self.egress is None else self.egress.address, "sites": self._sites,
            "runner": "V2" if isinstance(self.model_runner, RowsOfV2) else "V1",
            "merged": dict(getattr(model, "packed_modules_mapping", None) or {}),
        }  # fmt: skip

    def interp_put(self, packed: list[Any]) -> tuple[int, list[TensorKey]]:
        """Keep tensors. Says which rank this is, and the keys that it has got now."""
        self._hooks.put(packed)
        return self.rank, [one[0] for one in packed if one[0] in self._hooks.tensors]

    def interp_drop(self, keys: list[TensorKey]) -> None:
        """Forget tensors."""
        self._hooks.drop(keys)

    def interp_traces(self, sealed: bytes) -> bytes | None:
        """Make blocks known, before the requests that name them. Returns a pickled `Failure` of this rank, or None."""
        return self._hooks.open_traces(sealed)

    def interp_end_trace(self, end: bytes) -> bytes | None:
        """The outcome of an ended request's blocks (`blocks.packed`), from rank 0."""
        return self._hooks.traces.finish(pickle.loads(end))

    def interp_update(self, info: dict[str, Any] | None, folder: str | None) -> None:
        """Load weights of the client (`SentWeights.info`), or of a folder, by vLLM's loader."""
        weights = None if info is None else self._summed(received(info, "cpu"))
        if folder is not None and self._packs:
            deque(self._summed(iter_safetensors(Path(folder))), 0)
        self.reload_weights(weights_iterator=weights, weights_path=folder)  # pyright: ignore[reportAttributeAccessIssue]
        if (
            torch.device(self.device).type == "cpu"
        ):  # a head that is tied to the embedding has packed weights of its own
            for module in self.model_runner.get_model().modules():
                if "ParallelLMHead" in {cls.__name__ for cls in type(module).__mro__}:
                    module.quant_method.process_weights_after_loading(module)

    def interp_checksum(self) -> int:
        """A checksum of this rank's weights."""
        config = self.vllm_config
        if self._packs and not self._sums and config.load_config.load_format != "dummy":
            deque(self._summed(iter_safetensors(Path(config.model_config.model))), 0)
        named = sorted(self.model_runner.get_model().named_parameters())
        parts, total = [(name, _checksum_of(parameter)) for name, parameter in named], 0
        for name, part in (*parts, *sorted(self._sums.items())):
            total = (total * 31 + sum(name.encode()) + part) % 2**64
        return total

    @property
    def _packs(self) -> bool:
        """Whether this is rank 0 on a CPU: vLLM packs products there, which are no parameters. So their tensors are summed."""
        return torch.device(self.device).type == "cpu" and not self.rank

    def _summed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, after their checksums were noted."""
        for name, tensor in weights:
            if self._packs:
                kept = tensor.to(self.vllm_config.model_config.dtype) if tensor.is_floating_point() else tensor
                self._sums[name] = _checksum_of(kept)
            yield name, tensor

    def interp_stats(self) -> dict[str, int]:
        """Steps so far, and calls of the op on a CPU."""
        stage = self._hooks.stage
        return {"rank": self.rank, "steps": stage.num_steps, "calls": stage.taps.calls}

    def interp_stages(self) -> dict[str, dict[str, float]]:
        """Stage times since the last call (`utils.stage_times`), and memory of results; empty if not measured."""
        arena = self._hooks.stage.arena
        memory: dict[str, dict[str, float]] = {
            "results: kept": {"bytes": arena.kept}, "results: live": {"bytes": arena.live}
        }  # fmt: skip
        return TIMES.taken() | memory if TIMES.on else {}


def _tensor_parallel_group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

    return get_tp_group()


def _context(config: Any) -> AbstractContextManager[Any]:
    """The forward context of a pass, or one without attention behind it: experts look for their layer there."""
    from vllm.forward_context import (  # pyright: ignore[reportMissingImports]
        is_forward_context_available,
        set_forward_context,
    )

    return nullcontext() if is_forward_context_available() else set_forward_context(None, config)


def _pipeline() -> Any:
    from vllm.distributed.parallel_state import get_pp_group  # pyright: ignore[reportMissingImports]

    return get_pp_group()


def _add_up(scores: torch.Tensor) -> None:
    """Add a tensor up over the pipeline stages, on their hosts: each has a device of its own."""
    torch.distributed.all_reduce(scores, group=_pipeline().cpu_group)


def _checksum_of(parameter: torch.Tensor) -> int:
    flat = parameter.detach().contiguous().view(-1)
    return checksum(flat if flat.itemsize in (1, 2, 4, 8) else flat.view(torch.uint8))


def _made(base: type) -> type:
    return type(f"Interp{base.__name__}", (InterpWorker, base), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """`InterpCPUWorker` and `InterpGPUWorker`, made when they are asked for: their bases import the platform's code."""
    if name == "InterpCPUWorker":
        from vllm.v1.worker.cpu_worker import CPUWorker as Base  # pyright: ignore[reportMissingImports]
    elif name == "InterpGPUWorker":
        from vllm.v1.worker.gpu_worker import Worker as Base  # pyright: ignore[reportMissingImports]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = _made(Base)
    return found

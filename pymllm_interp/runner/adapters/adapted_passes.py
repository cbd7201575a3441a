"""`AdaptedPasses`: the part of a `ModelRunner` that loads LoRA adapters, and captures decode passes with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...config import ServerConfig
from ...core.forward_batch import ForwardBatch
from ...core.pass_parts import AdapterRows
from ...models.adapters.adapter import Adapter
from ...models.adapters.slots import AdapterSlots
from ...utils.out_of_memory import within_memory
from ..device_memory import memory_left
from ..forward_passes import ForwardPasses
from ..graphs.cuda_graph_runner import CudaGraphRunner
from ..input_batch import InputBuffers


class AdapterGraphs(NamedTuple):
    """Captured decode passes with adapters, over one layout of the adapters' memory."""

    version: int
    """`AdapterSlots.version` of the layout."""
    declared: CudaGraphRunner
    """With declared ops."""
    plain: CudaGraphRunner | None
    """Without, where such passes have graphs of their own."""


class AdaptedPasses(ForwardPasses):
    """Forward passes with adapters.

    Attributes:
        adapters: the loaded LoRA adapters, and their slots; None where no model is loaded.
        adapter_graphs: of decode passes with adapters, from the first adapter to the last; else None.
    """

    server_config: ServerConfig
    gpu_id: int
    adapters: AdapterSlots | None = None
    adapter_graphs: AdapterGraphs | None = None
    input_buffers: InputBuffers

    def install_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter. The first one captures decode passes with adapters, where passes are captured.

        Raises:
            AdapterError: the name is taken, or all slots are in use.
            torch.OutOfMemoryError: no memory for the slots or the graphs.
        """
        config = self.server_config
        within_memory(
            lambda: self._install(adapter),
            f"no memory for LoRA adapters of rank {adapter.rank} in {config.max_loras} slots on {self.device}"
            f"{memory_left(self.device, self.gpu_id)}; what helps: a lower max_loras, a lower gpu_memory_utilization, or fewer "
            "kv_cache_tokens",
        )

    def _install(self, adapter: Adapter) -> None:
        assert self.adapters is not None, "call initialize() first"
        self.adapters.install(adapter)
        try:
            self._capture_adapters(self.adapters)
        except BaseException:
            self.remove_adapter(adapter.name)
            raise

    def remove_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. The last one takes the graphs with it.

        Raises:
            AdapterError: no adapter has this name, or requests use it.
        """
        assert self.adapters is not None, "call initialize() first"
        self.adapters.remove(name)
        if not self.adapters.any_loaded:
            self.release_adapter_graphs()

    def release_adapter_graphs(self) -> None:
        """Release the graphs of passes with adapters."""
        graphs, self.adapter_graphs = self.adapter_graphs, None
        for runner in (None, None) if graphs is None else (graphs.declared, graphs.plain):
            if runner is not None:
                runner.shutdown()

    def _capture_adapters(self, adapters: AdapterSlots) -> None:
        """Capture decode passes over the adapters' memory, unless they are captured already."""
        if self.graph_runner is None and not self.device.startswith("cuda"):
            return
        self.input_buffers.open_adapters(adapters.max_loras)
        if self.graph_runner is None or (
            self.adapter_graphs is not None and self.adapter_graphs.version == adapters.version
        ):
            return
        self.release_adapter_graphs()
        owner: Any = self
        plain = self.plain_graphs
        declared = CudaGraphRunner(owner, adapted=self.graph_runner)
        try:
            without = None if plain is None else CudaGraphRunner(owner, declares=False, adapted=plain)
        except BaseException:
            declared.shutdown()
            raise
        self.adapter_graphs = AdapterGraphs(adapters.version, declared, without)

    def captured_adapters(self, rows: int) -> AdapterRows:
        """`ForwardBatch.adapters` of a decode pass that is captured for so many rows of the input buffers."""
        assert self.adapters is not None, "call initialize() first"
        return AdapterRows(tiles=self.input_buffers.adapter_memory(rows), version=self.adapters.version)

    def decode_graphs(self, batch: ForwardBatch) -> CudaGraphRunner | None:
        rows, graphs = batch.adapters, self.adapter_graphs
        if rows is None:
            return super().decode_graphs(batch)
        if graphs is None or graphs.version != rows.version or not self.is_laid_out(batch):
            return None
        return (graphs.plain if batch.site_ops is None else None) or graphs.declared

    def is_laid_out(self, batch: ForwardBatch) -> bool:
        rows, graphs = batch.adapters, self.graph_runner
        if rows is None or graphs is None or batch.batch_size > graphs.max_bs:
            return True
        return rows.tiles is not None and len(rows.tiles.order) == graphs.padded_size(batch.batch_size)

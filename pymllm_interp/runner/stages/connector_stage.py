"""`ConnectorStage`: a KV connector around the passes of steps, and the connector that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from ...config import ServerConfig
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ...core.step import LogitsProcessorOutput, SchedulerOutput
from ...mem_cache.kv_connector import NO_CONNECTOR, KVConnector
from ...mem_cache.memory_pool import KVPool
from ...mem_cache.spill_connector import SpillConnector
from ...models.weights.model_state import ModelState
from .stage import PassDemands, Stage


class ConnectorStage(Stage):
    """Calls a connector before and behind each pass. Runners without a connector do not have this stage."""

    def __init__(self, connector: KVConnector) -> None:
        self._connector, self._step = connector, SchedulerOutput()

    def close(self) -> None:
        """Close the connector."""
        self._connector.close()

    def begin(self, step: SchedulerOutput, demands: PassDemands) -> None:
        """The connector's `pre_forward`, or `no_forward` of a step without tokens."""
        self._step = step
        if step.total_num_scheduled_tokens:
            self._connector.pre_forward(step)
        else:
            self._connector.no_forward(step)

    def ran(self, batch: ForwardBatch, output: LogitsProcessorOutput) -> None:
        """The connector's `post_forward`."""
        self._connector.post_forward(self._step)


def make_kv_connector(
    config: ServerConfig, spec: ModelSpec, pool: KVPool, state: ModelState, kernels: str = ""
) -> KVConnector:
    """The connector that the configuration asks for. `kernels`: their hash in batch-invariant mode, which takes no KV of others.
    Raises ValueError: K and V of a prefix are not enough to continue a sequence of the model."""
    if not config.kv_spill_bytes and config.kv_spill_folder is None:
        return NO_CONNECTOR
    if spec.has_states or spec.bidirectional or spec.rope_boundary or spec.rope_depends_on_length:
        raise ValueError(
            f"kv_spill_bytes, kv_spill_folder: {spec.family.name} models need more than K and V to continue a prefix"
        )
    folder = None if config.kv_spill_folder is None else Path(config.kv_spill_folder)
    return SpillConnector(
        pool, lambda: f"{state.fingerprint()} {kernels}", config.kv_spill_bytes, folder, config.kv_spill_disk_bytes
    )

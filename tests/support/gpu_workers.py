"""How many pytest workers share the CUDA devices, which device each takes, and how much of its memory.

Usage: python tests/support/gpu_workers.py    prints pytest's options for this machine; nothing for one worker
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping

import torch

WORKER_BYTES = 15 << 30
"""Device memory that a worker needs: several small engines, their rings of captured states, graphs and workspaces."""
CONTEXT_BYTES = 1 << 30
"""Device memory of a process that torch's allocator does not manage: the CUDA context and loaded kernels."""
SHARERS = "PYMLLM_TEST_DEVICE_WORKERS"
"""The environment variable that says how many workers share this process's device."""


def num_workers(device_bytes: int, cores: int, devices: int = 1) -> int:
    """Workers that fit on all devices; two cores for each."""
    return max(1, min(device_bytes // WORKER_BYTES * devices, cores // 2))


def share_of(device_bytes: int, workers: int) -> int:
    """Bytes of device memory that the allocator of each worker may take."""
    return device_bytes // workers - CONTEXT_BYTES


def take_device(environment: MutableMapping[str, str], devices: int) -> None:
    """Show a worker of pytest-xdist one of several devices. CUDA reads the choice once, when it is first used."""
    workers = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    environment[SHARERS] = str(-(-workers // max(devices, 1)))
    if workers > 1 and devices > 1 and "CUDA_VISIBLE_DEVICES" not in environment:
        environment["CUDA_VISIBLE_DEVICES"] = str(int(environment["PYTEST_XDIST_WORKER"].removeprefix("gw")) % devices)


def options() -> str:
    """Options for pytest-xdist; empty for one worker, without a device, or without xdist."""
    if not torch.cuda.is_available() or importlib.util.find_spec("xdist") is None:
        return ""
    workers = num_workers(torch.cuda.mem_get_info()[1], os.cpu_count() or 1, torch.cuda.device_count())
    return f"-n {workers} --dist worksteal" if workers > 1 else ""


if __name__ == "__main__":
    print(options())

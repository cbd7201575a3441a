"""How many pytest workers share a CUDA device, and how much of its memory each gets.

Usage: python tests/support/gpu_workers.py    prints pytest's options for this machine; nothing for one worker
"""

from __future__ import annotations

import importlib.util
import os

import torch

WORKER_BYTES = 34 << 30
"""Device memory that a worker needs: several small engines, their rings of captured states, graphs and workspaces."""
CONTEXT_BYTES = 1 << 30
"""Device memory of a process that torch's allocator does not manage: the CUDA context and loaded kernels."""


def num_workers(device_bytes: int, cores: int) -> int:
    """Workers that fit; two cores for each."""
    return max(1, min(device_bytes // WORKER_BYTES, cores // 2))


def share_of(device_bytes: int, workers: int) -> int:
    """Bytes of device memory that the allocator of each worker may take."""
    return device_bytes // workers - CONTEXT_BYTES


def options() -> str:
    """Options for pytest-xdist; empty for one worker, without a device, or without xdist."""
    if not torch.cuda.is_available() or importlib.util.find_spec("xdist") is None:
        return ""
    workers = num_workers(torch.cuda.mem_get_info()[1], os.cpu_count() or 1)
    return f"-n {workers} --dist loadfile --no-loadscope-reorder" if workers > 1 else ""


if __name__ == "__main__":
    print(options())

"""Ray, if it is installed in a tested version. Only this folder and `cluster` use it."""

from __future__ import annotations

import os
import re
import socket
from importlib import import_module
from typing import Any

from ...utils.extras import install_command

TESTED = (2, 60), (2, 61)
"""The first tested version, and the first one that is not."""
CONNECT_SECONDS = 10.0
"""Timeout of a connection to an address."""
NAMESPACE = "pymllm-interp"
"""Ray namespace of the actors."""


def load_ray() -> Any:
    """The module `ray`. Raises ImportError: it is missing, or its version is not tested."""
    wanted = f"ray>={_text(TESTED[0])},<{_text(TESTED[1])}: {install_command('ray')}"
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError as error:
        raise ImportError(f"a cluster needs {wanted} ({error})") from error
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if not TESTED[0] <= version < TESTED[1]:
        raise ImportError(f"ray {ray.__version__} is installed, which is not tested; a cluster needs {wanted}")
    return ray


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def connect_to_ray(address: str) -> tuple[Any, bool]:
    """The module `ray`, connected to a cluster that runs. Returns also whether this call connected it.

    Args:
        address: "auto" (the cluster of this machine, or of RAY_ADDRESS), HOST:PORT, or ray://HOST:PORT.

    Raises:
        ImportError: as `load_ray`.
        ConnectionError: no Ray cluster runs there.
    """
    ray = load_ray()
    if ray.is_initialized():
        return ray, False
    try:
        if found := re.fullmatch(r"([^:/]+):(\d+)", address):  # Ray itself would wait for minutes
            socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        token = (
            "" if "RAY_AUTH_MODE" in os.environ else ", and RAY_AUTH_MODE=token is needed for one that asks for a token"
        )
        raise ConnectionError(
            f"no Ray cluster answers at {address!r} ({error}); `ray start --head` starts one of this machine{token}"
        ) from error
    return ray, True

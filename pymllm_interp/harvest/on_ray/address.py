"""Addresses of the form ``ray:NAME``: a front of a cluster that runs on Ray."""

from __future__ import annotations

import random
import re

from .ray_version import NAMESPACE, connect_to_ray

SCHEME = "ray:"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
ANSWER_SECONDS = 60.0
"""Timeout of a cluster's answer with its fronts."""


def check_name(name: str) -> None:
    """Refuse an invalid name of a cluster.
    Raises ValueError: it is empty, or has other characters than letters, digits, and ``.-_``."""
    if not NAME.fullmatch(name):
        raise ValueError(f"the cluster's name {name!r}: expected up to 64 letters, digits, and . - _")


def url_of(address: str) -> str:
    """The URL of one of a cluster's fronts.

    Args:
        address: "ray:NAME" on the Ray cluster of this machine or of RAY_ADDRESS, or "ray:NAME@HOST:PORT".

    Raises:
        ValueError: NAME is invalid.
        ImportError: Ray is missing, or not tested.
        ConnectionError: the cluster does not exist, or none of its fronts serves.
    """
    name, _, where = address.removeprefix(SCHEME).partition("@")
    check_name(name)
    ray, ours = connect_to_ray(where or "auto")
    try:
        try:
            director = ray.get_actor(f"{name}/director", namespace=NAMESPACE)
            urls = ray.get(director.urls.remote(), timeout=ANSWER_SECONDS)
        except ValueError as error:
            raise ConnectionError(
                f"no cluster {name!r} runs on this Ray cluster: `pymllm-interp cluster` starts one"
            ) from error
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"cluster {name!r} does not answer: {error}") from error
    finally:
        if ours:
            ray.shutdown()
    if not urls:
        raise ConnectionError(f"no front of cluster {name!r} serves yet: `pymllm-interp cluster status` says why")
    return random.choice(urls)

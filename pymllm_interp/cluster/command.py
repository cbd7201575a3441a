"""`pymllm-interp cluster`: starts a cluster on Ray, or asks one that runs."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from typing import Any

from ..harvest.on_ray.address import check_name
from ..harvest.on_ray.ray_version import NAMESPACE, connect_to_ray
from ..server.command import settings_of
from ..server.engines.replica_process import ReplicaSettings
from ..server.engines.roster import LinkKeys
from .director import ClusterPlan, Director

POLL_SECONDS = 0.25
MOST_PORT = 65535
MOST = 1024
"""Replicas, and fronts."""
SHOW_SECONDS = 30.0
"""Seconds between status lines while the cluster starts."""
ANSWER_SECONDS = 30.0
"""Timeout of an answer from the director."""


def run_cluster(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status.
    Raises ValueError, OSError, ImportError: it cannot be done; ConnectionError without a running Ray or cluster."""
    actions = {"status": _status, "scale": _scale, "drain": _drain, "restart": _restart, "stop": _stop}
    action = actions.get(args.model)
    if action is None and args.argument is not None:
        raise ValueError(f"{args.argument!r} after the model {args.model!r}: expected options only")
    check_name(args.name)
    _check(args, starts=action is None)
    ray, ours = connect_to_ray(args.address)
    try:
        return _start(ray, args) if action is None else action(ray, _director(ray, args.name), args)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:  # Ray starts the director again
        raise ConnectionError(
            f"cluster {args.name!r} does not answer now; try again in some seconds ({error})"
        ) from error
    finally:
        if ours:
            ray.shutdown()


def _director(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(f"{name}/director", namespace=NAMESPACE)
    except ValueError:
        raise ConnectionError(f"no cluster {name!r} runs on this Ray cluster (--name)") from None


def _start(ray: Any, args: argparse.Namespace) -> int:
    serve = settings_of(args)
    settings = ReplicaSettings.of(serve, LinkKeys.new())
    gpus = args.replica_gpus
    if gpus is None:
        gpus = 0.0 if args.device == "cpu" else float(ray.cluster_resources().get("GPU", 0) >= args.replicas)
    plan = ClusterPlan(
        args.name,
        settings,
        serve,
        args.replicas,
        args.fronts,
        args.replica_cpus,
        gpus,
        ray.get_runtime_context().get_node_id(),
    )
    try:
        director = ray.remote(Director).options(
            name=f"{args.name}/director", namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0
        ).remote(plan)  # fmt: skip
    except ValueError:
        raise ValueError(
            f"a cluster {args.name!r} runs already: `pymllm-interp cluster stop`, or another --name"
        ) from None
    shown = time.monotonic()
    while True:
        found = _answer(ray, director.status.remote())
        if time.monotonic() - shown > SHOW_SECONDS:  # Ray may wait for nodes
            print(_table(found), file=sys.stderr, flush=True)
            shown = time.monotonic()
        if failures := _failures(found):
            print(_table(found), file=sys.stderr)
            _stop(ray, director, args)
            raise ValueError(failures[0])
        if len(_answer(ray, director.urls.remote())) == args.fronts and all(
            one.get("replica") for one in found["replicas"].values()
        ):
            break
        time.sleep(POLL_SECONDS)
    for url in _answer(ray, director.urls.remote()):
        print(f"{serve.name} is served at {url}    (docs: {url}/docs)", flush=True)
    print(
        f'  python -c \'from pymllm_interp import LM; print(LM.connect("ray:{args.name}").generate("Once upon a time")[0].text)\''
    )
    return 0


def _check(args: argparse.Namespace, starts: bool) -> None:
    word, given = args.model, args.argument or ""
    if word == "scale" and not (re.fullmatch("[0-9]{1,9}", given) and 0 < int(given) <= MOST):
        raise ValueError(f"cluster scale {given}: expected the number of replicas, 1 to {MOST}")
    if word == "drain" and not given:
        raise ValueError("cluster drain: expected the name of a replica, as `cluster status` shows it")
    if not starts:
        return
    for option, count in (("--replicas", args.replicas), ("--fronts", args.fronts)):
        if not 1 <= count <= MOST:
            raise ValueError(f"{option} {count}: expected 1 to {MOST}")
    for option, amount in (("--replica-cpus", args.replica_cpus), ("--replica-gpus", args.replica_gpus or 0.0)):
        if not 0 <= amount < math.inf:
            raise ValueError(f"{option} {amount}: expected a number from 0")
    if args.port and args.port + args.fronts - 1 > MOST_PORT:
        raise ValueError(f"--port {args.port} --fronts {args.fronts}: the last port would be above {MOST_PORT}")


def _answer(ray: Any, ref: Any) -> Any:
    return ray.get(ref, timeout=ANSWER_SECONDS)


def _wait(ray: Any, director: Any, ref: Any) -> Any:
    """Result of a long director call. Checks that the director still answers."""
    while not ray.wait([ref], timeout=ANSWER_SECONDS)[0]:
        _answer(ray, director.status.remote())
    return ray.get(ref)


def _failures(found: dict[str, Any]) -> list[str]:
    """Reasons that the cluster cannot start: a front ended, or every replica failed to load its model."""
    fronts = [one["failure"] for one in found["fronts"].values() if one.get("failure")]
    replicas = [one.get("failure", "") for one in found["replicas"].values()]
    return fronts or (replicas if all(replicas) else [])


def _status(ray: Any, director: Any, args: argparse.Namespace) -> int:
    print(_table(_answer(ray, director.status.remote())))
    return 0


def _table(found: dict[str, Any]) -> str:
    lines = []
    for name, one in sorted(found["fronts"].items()):
        lines.append(f"{name:8} {one.get('url') or one['lost'] or one.get('failure') or 'starting'}")
    for name, one in sorted(found["replicas"].items()):
        replica = one.get("replica")
        said = (one["lost"] and f"lost ({one['lost']})") or one.get("failure") or "starting"
        word = said if one["lost"] or not replica else "draining" if one["draining"] else "serves"
        place = f"{replica['address']}, weights {replica['fingerprint'][:8]}" if replica else ""
        lines.append(
            f"{name:8} {word:9} {place}  starts: {one.get('starts', 0)}, node {str(one.get('node', ''))[:8]}".rstrip()
        )
    return "\n".join(lines)


def _scale(ray: Any, director: Any, args: argparse.Namespace) -> int:
    _wait(ray, director, director.scale.remote(int(args.argument)))
    return _status(ray, director, args)


def _drain(ray: Any, director: Any, args: argparse.Namespace) -> int:
    if failure := _wait(ray, director, director.drain.remote(args.argument)):
        raise ValueError(f"cluster drain {args.argument}: {failure}")
    return _status(ray, director, args)


def _restart(ray: Any, director: Any, args: argparse.Namespace) -> int:
    failure = _wait(ray, director, director.restart.remote())
    _status(ray, director, args)
    if failure:
        raise ValueError(failure)
    return 0


def _stop(ray: Any, director: Any, args: argparse.Namespace) -> int:
    _wait(ray, director, director.stop.remote())
    ray.kill(director)
    return 0

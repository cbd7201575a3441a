"""Clusters and harvests on a Ray cluster of this machine: a head and two nodes, which are killed and stopped. One for all tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_harvest import corpus
from helpers_server import SECONDS, Server

from pymllm_interp import LM, SamplingParams, Scale
from pymllm_interp.cluster.ray_version import NAMESPACE
from pymllm_interp.harvest.reader import open_harvest

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")

NAME = "tests"
MARK = f"PYMLLM_TEST_CLUSTER={os.getpid()}".encode()
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all ports on the loopback interface
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(sys.path), "PYMLLM_TEST_CLUSTER": str(os.getpid()),
}  # fmt: skip
QUICK = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}  # fmt: skip
"""A node that is lost is noticed within seconds."""
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """The Ray cluster, and this process as a driver of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster  # not before: it reads the environment then

        found = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": QUICK}
        )
        try:
            for _ in range(2):
                found.add_node(**NODE)
            patch.setenv("RAY_ADDRESS", found.address)
            ray.init(address=found.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


def is_ours(pid: str, title: bytes) -> bool:
    """Whether it is a process of this file's Ray cluster with such a title: another cluster may run on the machine.

    Ray writes the title over a worker's environment; the raylet that started it has its own.
    """
    try:
        if title not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return MARK in Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- harvests ------------------------------------------------------------------------------------

HARVEST = """
import sys
from pathlib import Path
from pymllm_interp import LM

lm = LM(sys.argv[1], dtype="float32", device="cpu")
lm.harvest([Path(sys.argv[2])], capture=["resid_post.*"], out=sys.argv[3], max_length=32, too_long="truncate",
           cluster="auto", workers=2, unit_documents=5, progress=False)
"""


def equal(one: Path, other: Path) -> None:
    a, b = open_harvest(one), open_harvest(other)
    assert a.manifest["complete"] and b.manifest["complete"]
    assert torch.equal(a.document_ids(), b.document_ids()) and torch.equal(a.positions(), b.positions())
    for site in a.sites:
        states = a[site][:]
        assert ((b[site][:] - states).norm(dim=-1) <= 1e-5 * states.norm(dim=-1)).all()
    named = {shard.path.name for shard in b.shards}
    assert {path.name for path in other.iterdir()} - named <= {"manifest.json", "plan.json", "documents.jsonl", "units"}


@pytest.mark.slow
def test_a_harvest_equals_the_local_one_whatever_is_killed_or_stopped(nodes, served_folder, tmp_path):
    """SIGKILL of its driver; then two drivers in one folder, SIGKILL of a worker, and SIGSTOP of another."""
    documents = corpus(120, seed=9)
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, documents)))
    line = [sys.executable, "-c", HARVEST, str(served_folder), str(path), str(tmp_path / "out")]
    records = tmp_path / "out" / "units"
    with LM(str(served_folder), dtype="float32", device="cpu") as lm:
        how: dict[str, Any] = {"capture": ["resid_post.*"], "max_length": 32, "too_long": "truncate", "progress": False}
        lm.harvest(documents, out=tmp_path / "local", **how)
        driver = subprocess.Popen(line)
        wait_for(lambda: records.is_dir() and len(list(records.glob("??????.json"))) >= 2)
        driver.kill()
        driver.wait()
        hurt, over = list[int](), threading.Event()

        def hurt_two() -> None:
            """The drivers may be done before a second worker is there."""
            signals = [signal.SIGKILL, signal.SIGSTOP]
            while signals and not over.wait(0.02):
                for pid in sorted(set(workers()) - set(hurt))[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signals[0])
                        hurt.append(pid)
                        del signals[0]

        thread = threading.Thread(target=hurt_two)
        thread.start()
        other = subprocess.Popen(line)
        try:
            found = lm.harvest([path], out=tmp_path / "out", cluster="auto", workers=2, unit_documents=5, **how)
            assert other.wait(SECONDS) == 0
        finally:
            over.set()
            thread.join()
            for pid in hurt[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert hurt, "no worker was seen"
        assert found.documents == 120 and found.new_documents < 120
        equal(tmp_path / "local", tmp_path / "out")
        with pytest.raises(ValueError, match="another harvest"):
            lm.harvest([path], out=tmp_path / "out", cluster="auto", unit_documents=6, **how)


@pytest.mark.slow
def test_a_dataset_is_written_as_files_and_harvested(nodes, served_folder, tmp_path):
    import ray.data

    documents = corpus(12, seed=3)
    found = ray.data.from_items([{"input_ids": one} for one in documents], override_num_blocks=2)
    with LM(str(served_folder), dtype="float32", device="cpu") as lm:
        how: dict[str, Any] = {"capture": ["resid_post.*"], "max_length": 32, "too_long": "truncate", "progress": False}
        lm.harvest(documents, out=tmp_path / "local", **how)
        lm.harvest(found, out=tmp_path / "out", cluster="auto", workers=1, unit_documents=5, **how)
    equal(tmp_path / "local", tmp_path / "out")
    assert sorted(path.suffix for path in (tmp_path / "out.documents").iterdir()) == [".parquet"] * 2


def workers() -> list[int]:
    """Process ids of harvests' workers."""
    return [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if is_ours(pid, b"ray::HarvestWorker")]


# -- serving -------------------------------------------------------------------------------------


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """`pymllm-interp cluster ...`, in a process of its own: what it starts outlives it."""
    line = [sys.executable, "-m", "pymllm_interp.cli", "cluster", *args, "--name", NAME]
    return subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def cluster(nodes: Any, served_folder: Path) -> Iterator[Any]:
    """Two replicas and a front; the director's actor."""
    import ray

    options = ("--dtype", "float32", "--device", "cpu", "--port", "0", "--allow-code-from", "anybody")
    silence = ("--replica-silence-seconds", "5")
    done = command(str(served_folder), "--replicas", "2", *options, *silence)
    assert done.returncode == 0, done.stderr
    assert "is served at http://127.0.0.1:" in done.stdout
    yield ray.get_actor(f"{NAME}/director", namespace=NAMESPACE)
    done = command("stop")
    assert done.returncode == 0, done.stderr
    assert "no cluster 'tests' runs" in command("status").stderr
    assert NAMESPACE not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def ask(actor: Any, method: str) -> Any:
    """An answer of the director, also where it is being started again: it may have been on a node that is lost."""
    import ray

    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return ray.get(getattr(actor, method).remote(), timeout=SECONDS)
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def serving(cluster: Any, count: int = 2) -> dict[str, Any]:
    """Status of the replicas, once so many serve, for the fronts too."""
    front = front_of(cluster)
    wait_for(lambda: len(ask(cluster, "roster") or ()) == count and front.metric("replica_up") == count)
    return ask(cluster, "status")["replicas"]


def front_of(cluster: Any) -> Server:
    wait_for(lambda: bool(ask(cluster, "urls")))
    return Server(ask(cluster, "urls")[0], None, None)  # pyright: ignore[reportArgumentType]


class Load:
    """Short requests, until its end; all of them must be answered."""

    def __init__(self, url: str) -> None:
        self.done, self.failed, self._over = 0, list[str](), threading.Event()
        self._server = Server(url, None, None)  # pyright: ignore[reportArgumentType]
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        rng = random.Random(1)
        with self._server.client(None) as client:
            while not self._over.is_set():
                body = {"prompt": [rng.randrange(90) for _ in range(5)], "max_tokens": 4, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                self.failed += [answer.text] if answer.status_code != 200 else []
                self.done += 1

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        assert self.done > 3 and not self.failed, self.failed[:3]


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def engine_of(keeper: int) -> int:
    (found,) = [pid for pid in children(keeper) if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def test_a_cluster_by_its_name_is_an_lm(cluster, served_folder):
    serving(cluster)
    with (
        LM.connect(f"ray:{NAME}", lower_traces="off") as lm,
        LM(str(served_folder), dtype="float32", device="cpu") as solo,
    ):
        for prompt in ([1, 2, 3], [4, 5]):
            greedy, ops = SamplingParams(temperature=0.0, max_tokens=8), [Scale("resid_post.0", 0.5)]
            wanted = solo.generate(prompt, greedy, interventions=ops)[0]
            found = lm.generate(prompt, greedy, interventions=ops)[0]
            assert found.token_ids == wanted.token_ids and found.receipt.replica in ("r0", "r1")
            with lm.trace(prompt):
                states = lm.model.layers[1].output.save()
            with solo.trace(prompt):
                wanted_states = solo.model.layers[1].output.save()
            assert torch.allclose(states, wanted_states, atol=1e-4)
    with pytest.raises(ConnectionError, match="no cluster 'other' runs"):
        LM.connect("ray:other")


def test_status_names_fronts_and_replicas(cluster):
    serving(cluster)
    lines = command("status").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["r0", "serves"], ["r1", "serves"]]
    assert lines[0].startswith("front0   http://127.0.0.1:")


def test_engines_have_no_environment_of_ray(cluster):
    state = serving(cluster)["r0"]
    variables = Path(f"/proc/{engine_of(state['pid'])}/environ").read_bytes().split(b"\0")
    assert not [one for one in variables if one.startswith(b"RAY_")]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["keeper", "front"])
def test_what_is_killed_is_started_again_and_no_short_request_is_lost(cluster, what):
    before = serving(cluster)
    url = front_of(cluster).url
    if what == "front":
        state = ask(cluster, "status")["fronts"]["front0"]
        os.kill(children(state["pid"])[0], signal.SIGKILL)
        wait_for(lambda: ask(cluster, "status")["fronts"]["front0"]["starts"] > state["starts"])
        assert front_of(cluster).url == url, "a front that is started again keeps its address"
    else:
        pid = before["r1"]["pid"]
        with Load(url):
            os.kill(pid, signal.SIGSTOP)  # its engine serves on
            time.sleep(1)
            os.kill(pid, signal.SIGKILL)
            key = (before["r1"]["replica"] or {})["key"]
            wait_for(lambda: (ask(cluster, "status")["replicas"]["r1"].get("replica") or {"key": key})["key"] != key)
            serving(cluster)
    with Load(url):
        time.sleep(0.5)


@pytest.mark.slow
def test_a_director_that_is_killed_finds_the_same_replicas_again(cluster):
    """Keepers that answer late do not make it tell the fronts that there are no replicas."""
    found = serving(cluster)
    before, keepers = {name: state["replica"] for name, state in found.items()}, [one["pid"] for one in found.values()]
    (pid,) = {pid for pid in filter(str.isdigit, os.listdir("/proc")) if is_ours(pid, b"ray::Director")}
    with Load(front_of(cluster).url):
        for keeper in keepers:
            os.kill(keeper, signal.SIGSTOP)
        os.kill(int(pid), signal.SIGKILL)
        try:
            wait_for(lambda: _answers(cluster))
            for _ in range(8):  # several questions of the front
                assert front_of(cluster).metric("replica_up") == 2
                time.sleep(0.25)
        finally:
            for keeper in keepers:
                os.kill(keeper, signal.SIGCONT)
        assert {name: state["replica"] for name, state in serving(cluster).items()} == before


def _answers(cluster: Any) -> bool:
    import ray

    try:
        return bool(ray.get(cluster.urls.remote(), timeout=SECONDS))
    except ray.exceptions.RayError:
        return False


@pytest.mark.slow
def test_a_rolling_restart_loses_no_request(cluster):
    before = serving(cluster)
    with Load(front_of(cluster).url):
        assert ask(cluster, "restart") == ""
    after = serving(cluster)
    assert all(after[name]["starts"] == before[name]["starts"] + 1 for name in before)


@pytest.mark.slow
def test_a_node_that_is_lost_takes_its_replica_and_another_node_brings_it_back(nodes, cluster):
    state = serving(cluster)
    head = nodes.head_node.node_id
    name, lost = next((name, one["node"]) for name, one in state.items() if one["node"] != head)
    with Load(front_of(cluster).url):
        nodes.remove_node(next(node for node in nodes.worker_nodes if node.node_id == lost), allow_graceful=False)
        nodes.add_node(**NODE)
        wait_for(lambda: ask(cluster, "status")["replicas"][name].get("node", lost) not in ("", lost))
        serving(cluster)


@pytest.mark.slow
def test_drain_and_scale(cluster):
    import ray

    serving(cluster)
    with Load(front_of(cluster).url):
        done = command("drain", "r0")
        assert done.returncode == 0, done.stderr
        assert list(serving(cluster, 1)) == ["r1"]
    ray.get(cluster.scale.remote(2), timeout=SECONDS)
    assert sorted(serving(cluster)) == ["r0", "r1"]
    assert "expected one of the replicas r0, r1" in command("drain", "r7").stderr

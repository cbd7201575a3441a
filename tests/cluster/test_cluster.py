"""Clusters and harvests on a Ray cluster of this machine: a head and two nodes, which are killed and stopped. One for all tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_cluster import (
    ENVIRONMENT,
    HARVEST,
    NAME,
    NODE,
    QUICK,
    Load,
    Streams,
    answers,
    ask,
    children,
    command,
    engine_of,
    equal,
    front_of,
    is_ours,
    serving,
    wait_for,
    workers,
)  # fmt: skip
from helpers_harvest import corpus
from helpers_server import SECONDS, Server
from safetensors.torch import load, save

from pymllm_interp import LM, SamplingParams, Scale
from pymllm_interp.harvest.on_ray.ray_version import NAMESPACE
from pymllm_interp.harvest.progress import HarvestError

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    """How many replicas there are. Two, and two nodes beside the head, are for slow tests."""
    return 2 if any(item.get_closest_marker("slow") for item in request.session.items) else 1


@pytest.fixture(scope="module")
def nodes(count: int) -> Iterator[Any]:
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
            for _ in range(count if count > 1 else 0):
                found.add_node(**NODE)
            patch.setenv("RAY_ADDRESS", found.address)
            ray.init(address=found.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


# -- harvests ------------------------------------------------------------------------------------


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
def test_a_driver_and_a_node_that_hang_and_come_back_late_change_nothing(nodes, served_folder, tmp_path):
    """The units of both are done elsewhere meanwhile. SIGSTOP of a driver; of a raylet and the workers of its node."""
    documents = corpus(500, seed=11)
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, documents)))
    line = [sys.executable, "-c", HARVEST, str(served_folder), str(path), str(tmp_path / "out")]
    records, stopped = tmp_path / "out" / "units", list[int]()
    raylets = {node: node.all_processes["raylet"][0].process for node in nodes.worker_nodes}

    def its_workers(raylet: Any) -> list[int]:
        return [pid for pid in workers() if pid in children(raylet.pid)]

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    with LM(str(served_folder), dtype="float32", device="cpu") as lm:
        how: dict[str, Any] = {"capture": ["resid_post.*"], "max_length": 32, "too_long": "truncate", "progress": False}
        lm.harvest(documents, out=tmp_path / "local", **how)
        driver = subprocess.Popen(line)
        try:
            while not (
                records.is_dir() and any(records.glob("??????.json")) and any(map(its_workers, raylets.values()))
            ):
                assert driver.poll() is None, "the harvest ended before a node had a worker"
                time.sleep(0.05)
            stop(driver.pid)
            node, raylet = next((node, raylet) for node, raylet in raylets.items() if its_workers(raylet))
            for pid in (raylet.pid, *its_workers(raylet)):
                stop(pid)
            found = lm.harvest([path], out=tmp_path / "out", cluster="auto", workers=2, unit_documents=5, **how)
            assert found.documents == 500 and found.new_documents > 0
            equal(tmp_path / "local", tmp_path / "out")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert driver.wait(SECONDS) == 0
        wait_for(lambda: not workers())  # of the node, too, whether or not the cluster had given it up
    equal(tmp_path / "local", tmp_path / "out")
    nodes.remove_node(node, allow_graceful=False)
    nodes.add_node(**NODE)


@pytest.mark.slow
def test_a_disk_that_is_full_ends_a_harvest_and_the_same_call_goes_on_when_it_is_not(nodes, served_folder, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        documents = corpus(60, seed=12)
        with LM(str(served_folder), dtype="float32", device="cpu") as lm:
            how: dict[str, Any] = {
                "capture": ["resid_post.*"],
                "max_length": 32,
                "too_long": "truncate",
                "progress": False,
            }
            lm.harvest(documents, out=tmp_path / "local", **how)
            how |= {"out": disk / "out", "cluster": "auto", "workers": 1, "unit_documents": 10}
            with pytest.raises(HarvestError, match=r"No space left on device(.|\n)*the same call goes on"):
                lm.harvest(documents, **how)
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            done = len(list((disk / "out" / "units").glob("??????.json")))
            assert 0 < done < 6 and lm.harvest(documents, **how).documents == 60
        equal(tmp_path / "local", disk / "out")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


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


# -- serving -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(nodes: Any, count: int, served_folder: Path) -> Iterator[Any]:
    """Replicas and two fronts; the director's actor."""
    import ray

    options = ("--dtype", "float32", "--device", "cpu", "--port", "0", "--allow-code-from", "anybody")
    limits = ("--replica-silence-seconds", "5", "--engine-message-seconds", "12", "--inline-bytes", "4000")
    done = command(str(served_folder), "--replicas", f"{count}", "--fronts", "2", *options, *limits)
    assert done.returncode == 0, done.stderr
    assert "is served at http://127.0.0.1:" in done.stdout
    found = ray.get_actor(f"{NAME}/director", namespace=NAMESPACE)
    yield found
    with Streams(ask(found, "urls")):  # they end first
        done = command("stop")
    assert done.returncode == 0, done.stderr
    assert "no cluster 'tests' runs" in command("status").stderr
    assert NAMESPACE not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def test_a_cluster_by_its_name_is_an_lm(cluster, count, served_folder):
    serving(cluster, count)
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


def test_status_names_fronts_and_replicas(nodes, cluster, count):
    serving(cluster, count)
    lines = command("status").stdout.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["r0", "serves"], ["r1", "serves"]][:count]
    assert lines[0].startswith("front0   http://127.0.0.1:") and lines[1].startswith("front1   http://127.0.0.1:")
    fronts = ask(cluster, "status")["fronts"].values()
    assert {one["node"] for one in fronts} == {nodes.head_node.node_id}, "where the command was run"


def test_what_one_front_has_taken_or_kept_is_at_the_other(cluster, count, served_folder):
    """Vectors, stored activations, and responses that are continued; each is deleted by the other front."""
    serving(cluster, count)
    wait_for(lambda: len(ask(cluster, "urls")) == 2)
    one, other = (Server(url, None, None).client(None) for url in ask(cluster, "urls"))  # pyright: ignore[reportArgumentType]
    with one, other:
        body = {"prompt": "w1 w2", "max_tokens": 6, "temperature": 0}
        plain = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for client in (one, other)}
        reply = one.put("/v1/interp/vectors/v", content=save({"vector": torch.full((72,), 5.0)}))
        assert reply.status_code == 200, reply.text
        body["interventions"] = [{"op": "steer", "site": "resid_post.1", "vector": "v", "scale": 4.0}]
        texts = set()
        for number in range(8):
            for client in (one, other):
                reply = client.post("/v1/completions", json=body | {"cache_salt": f"{number}"})
                assert reply.status_code == 200, reply.text
                texts.add(reply.json()["choices"][0]["text"])
        assert len(plain) == 1 and len(texts) == 1 and texts != plain
        assert other.delete("/v1/interp/vectors/v").status_code == 200
        assert one.post("/v1/completions", json=body).status_code == 400

        wide = {"prompt": "w1 w2 " * 30, "max_tokens": 1, "capture": ["resid_post.*"]}
        where = one.post("/v1/completions", json=wide).json()["choices"][0]["activations"]["url"]
        found = [client.get(where) for client in (one, other)]
        assert found[0].content == found[1].content and load(found[1].content)
        assert other.delete(where).status_code == 200
        assert [client.get(where).status_code for client in (one, other)] == [404, 404]

        asked = {"model": served_folder.name, "input": "w3", "max_output_tokens": 4}
        reply = one.post("/v1/responses", json=asked)
        assert reply.status_code == 200, reply.text
        first = reply.json()
        more = asked | {"previous_response_id": first["id"]}
        assert other.post("/v1/responses", json=more).status_code == 200
        assert other.get(f"/v1/responses/{first['id']}").json() == first
        assert other.delete(f"/v1/responses/{first['id']}").status_code == 200
        assert other.get(f"/v1/responses/{first['id']}").status_code == 404


def test_engines_have_no_environment_of_ray(cluster, count):
    state = serving(cluster, count)["r0"]
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
            wait_for(lambda: answers(cluster))
            for _ in range(8):  # several questions of the front
                assert front_of(cluster).metric("replica_up") == 2
                time.sleep(0.25)
        finally:
            for keeper in keepers:
                os.kill(keeper, signal.SIGCONT)
        assert {name: state["replica"] for name, state in serving(cluster).items()} == before


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
    for name, message in (("r1", "r1 is the last replica"), ("r7", "expected one of the replicas r1")):
        done = command("drain", name)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    ray.get(cluster.scale.remote(2), timeout=SECONDS)
    assert sorted(serving(cluster)) == ["r0", "r1"]


@pytest.mark.slow
def test_an_engine_that_is_stopped_is_ended_by_its_keeper_and_short_requests_run_elsewhere(cluster):
    before = serving(cluster)
    key = before["r0"]["replica"]["key"]
    with Load(front_of(cluster).url):
        os.kill(engine_of(before["r0"]["pid"]), signal.SIGSTOP)
        wait_for(lambda: (ask(cluster, "status")["replicas"]["r0"].get("replica") or {"key": key})["key"] != key)
        serving(cluster)


@pytest.mark.slow
def test_a_front_that_is_stopped_is_ended_by_its_keeper_and_started_again(cluster):
    """Nobody waits for ever: its clients' connections break, and the other front serves meanwhile."""
    serving(cluster)
    wait_for(lambda: len(ask(cluster, "urls")) == 2)
    urls, state = ask(cluster, "urls"), ask(cluster, "status")["fronts"]["front1"]
    os.kill(children(state["pid"])[0], signal.SIGSTOP)
    with Load(urls[0]), Server(urls[1], None, None).client(None) as client:  # pyright: ignore[reportArgumentType]
        with pytest.raises(httpx.TransportError):
            client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 2})
        wait_for(lambda: ask(cluster, "status")["fronts"]["front1"]["starts"] > state["starts"])
        assert ask(cluster, "urls") == urls
    with Load(urls[1]):
        time.sleep(0.5)


@pytest.mark.slow
def test_a_director_that_is_stopped_is_told_in_time_and_the_fronts_serve_on(cluster):
    url = front_of(cluster).url
    serving(cluster)
    (pid,) = {pid for pid in filter(str.isdigit, os.listdir("/proc")) if is_ours(pid, b"ray::Director")}
    os.kill(int(pid), signal.SIGSTOP)
    try:
        with Load(url):
            done = command("status")
        assert done.returncode == 2 and "does not answer now" in done.stderr, done.stderr
    finally:
        os.kill(int(pid), signal.SIGCONT)
    serving(cluster)


@pytest.mark.slow
def test_a_node_that_hangs_loses_its_replica_to_another_node_and_its_engine_when_it_comes_back(nodes, cluster):
    """SIGSTOP of its raylet alone: its keeper and engine live until it comes back, and finds that it was given up."""
    state = serving(cluster)
    name, one = next((name, one) for name, one in state.items() if one["node"] != nodes.head_node.node_id)
    node = next(node for node in nodes.worker_nodes if node.node_id == one["node"])
    raylet, engine = node.all_processes["raylet"][0].process, engine_of(one["pid"])
    raylet.send_signal(signal.SIGSTOP)
    nodes.add_node(**NODE)
    with Load(front_of(cluster).url):
        wait_for(lambda: ask(cluster, "status")["replicas"][name].get("node") not in ("", one["node"]))
        serving(cluster)
    assert ask(cluster, "status")["replicas"][name]["replica"]["key"] != one["replica"]["key"]
    raylet.send_signal(signal.SIGCONT)
    raylet.wait(SECONDS)
    wait_for(lambda: not Path(f"/proc/{engine}").exists())
    nodes.remove_node(node, allow_graceful=False)
    with Load(front_of(cluster).url):
        serving(cluster)


@pytest.mark.slow
def test_a_second_cluster_has_a_port_and_a_name_of_its_own(cluster, served_folder):
    """What its front said when it ended is told, and nothing is left of it."""
    import ray

    url = front_of(cluster).url
    for words, message in (((), f"a cluster '{NAME}' runs already"), (("--name", "second"), "Address already in use")):
        done = command(str(served_folder), "--device", "cpu", "--port", url.rpartition(":")[2], *words)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    named = ray.util.list_named_actors(all_namespaces=True)  # Ray Data has some of its own
    assert {actor["name"].partition("/")[0] for actor in named if actor["namespace"] == NAMESPACE} == {NAME}

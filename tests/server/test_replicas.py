"""Two replicas behind fronts, over TCP with CURVE: results, vectors, what a kill or a stop costs, and who may connect."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import zmq
import zmq.asyncio
from helpers_replicas import SILENCE, Replicas, greeted, replicas_of
from helpers_server import CLOSE, KEYS, SECONDS, Server
from safetensors.torch import save, save_file

from pymllm_interp import LM, Capture, SamplingParams, Scale, Steer
from pymllm_interp.captures import Features
from pymllm_interp.interventions import Monitor, SetFeature
from pymllm_interp.server.engines.roster import LinkKeys, Replica
from pymllm_interp.wire import messages as m

HIDDEN = 72
MANY = 100


@pytest.fixture(scope="module")
def sae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sae")
    generator = torch.Generator().manual_seed(3)
    encoder = torch.randn(HIDDEN, 20, generator=generator)
    made = {"W_enc": encoder, "b_enc": torch.zeros(20), "W_dec": encoder.T.contiguous(), "b_dec": torch.zeros(HIDDEN)}
    save_file(made, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text('{"architecture": "standard", "hook_name": "blocks.1.hook_resid_post"}')
    return folder


@pytest.fixture(scope="module")
def replicas(served_folder: Path, sae_folder: Path) -> Iterator[Replicas]:
    with replicas_of(served_folder, 2, {"sea": str(sae_folder)}, inline_bytes=4000) as found:
        yield found


@pytest.fixture(scope="module")
def front(replicas: Replicas) -> Server:
    return replicas.front()


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> None:
    """Each test begins with all replicas up."""
    if "front" in request.fixturenames:
        replicas, front = request.getfixturevalue("replicas"), request.getfixturevalue("front")
        for name in list(replicas.processes):
            replicas.signal_quietly(name, signal.SIGCONT)
        replicas.wait_until_up(front)


def connected(front: Server, **options: Any) -> LM:
    return LM.connect(front.url, api_key=KEYS["code"], **options)


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(90) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def answer(lm: LM, number: int, prompt: list[int]) -> dict[str, Any]:
    """One request, of a kind that follows from its number."""
    params = SamplingParams(temperature=0.0, max_tokens=1 + number % 6, ignore_eos=True)
    if number % 25 == 7:
        with lm.trace(prompt):
            states = lm.model.layers[1].output.save()
        return {"states": states.reshape(-1, states.shape[-1])}
    steps: list[list[Any]] = [[], [Scale("resid_post.0", 0.5)], [Steer("resid_post.1", torch.ones(HIDDEN), scale=0.3)]]
    edits = steps[number % 3]
    capture = [Capture("resid_post.1")] if number % 5 == 0 else []
    (out,) = lm.generate([prompt], params, interventions=edits, capture=capture)
    found: dict[str, Any] = {"ids": out.outputs[0].token_ids}
    if capture:
        found["states"] = out.outputs[0].activations["resid_post.1"]
    if edits or capture:
        found["replica"] = out.outputs[0].receipt.replica
    return found


def test_mixed_requests_over_two_replicas_equal_their_solo_runs(replicas, front, served_folder):
    given = prompts(MANY, 1)
    with connected(front, lower_traces="off") as lm, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: answer(lm, i, given[i]), range(MANY)))
    with LM(str(served_folder), dtype="float32", device="cpu") as solo:
        for number, one in enumerate(found):
            alone = answer(solo, number, given[number])
            assert one.get("ids") == alone.get("ids"), number
            if "states" in alone:
                difference = (one["states"] - alone["states"]).norm(dim=-1)
                assert (difference <= CLOSE * alone["states"].norm(dim=-1)).all(), number
    assert {one["replica"] for one in found if "replica" in one} == {"r0", "r1"}


def replica_of(lm: LM, prompt: list[int], factor: float) -> tuple[str, int]:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (out,) = lm.generate([prompt], params, interventions=[Scale("resid_post.0", factor)])
    receipt = out.outputs[0].receipt
    return receipt.replica, receipt.num_cached_tokens


def test_equal_prompts_with_equal_edits_meet_and_other_edits_reuse_none_of_their_kv(front):
    rng = random.Random(5)
    with connected(front) as lm:
        for _ in range(8):
            prompt = [rng.randrange(90) for _ in range(60)]
            first = replica_of(lm, prompt, 0.5)
            again = replica_of(lm, prompt, 0.5)
            assert first[0] == again[0] and first[1] == 0 < again[1]
            other = replica_of(lm, prompt, 2.0)
            assert other[1] == 0, "the prompt's KV with another edit was reused"


def test_saes_are_used_by_name_on_every_replica(front, served_folder, sae_folder):
    params, used = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), set()
    ops, capture = [SetFeature("sea", {3: 4.0})], [Capture("resid_post.1", reduce=Features("sea", top_k=3))]
    with connected(front) as lm, LM(str(served_folder), dtype="float32", device="cpu") as solo:
        solo.saes["sea"] = sae_folder
        for prompt in prompts(12, 4):
            how: dict[str, Any] = {"interventions": ops, "capture": capture}
            (found,), (wanted,) = (one.generate([prompt], params, **how) for one in (lm, solo))
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
            torch.testing.assert_close(
                found.outputs[0].activations["resid_post.1"], wanted.outputs[0].activations["resid_post.1"], rtol=1e-4, atol=1e-4
            )  # fmt: skip
            used.add(found.outputs[0].receipt.replica)
    assert used == {"r0", "r1"}


def test_stops_scores_and_streamed_rows_come_through_a_replica(front, served_folder):
    site, probe, used = "resid_post.1", torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)), set()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with connected(front) as lm, LM(str(served_folder), dtype="float32", device="cpu") as solo:
        for prompt in prompts(10, 6):
            (plain,) = solo.generate([prompt], params, capture=[site])
            scores = plain.activations[site][len(prompt) :] @ probe
            ranked = scores.sort().values
            threshold = float(ranked[3:5].mean())
            assert ranked[4] - ranked[3] > 1e-4
            first = int((scores > threshold).nonzero()[0])
            monitors = [
                Monitor(site, -probe, 1e9, name="record"),
                Monitor(site, probe, threshold, then="stop", name="stop", positions="generated"),
            ]
            options: dict[str, Any] = {"monitors": monitors, "capture": [Capture(site, stream=True), "resid_post.0"]}
            pieces, wanted = (list(one.stream(prompt, params, **options)) for one in (lm, solo))
            last, rows = pieces[-1], [piece.captures for piece in pieces if piece.captures is not None]
            assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids[: first + 1]
            assert last.finish_reason == "monitor" and last.monitors["stop"].fired == [len(prompt) + first]
            for name, own in wanted[-1].monitors.items():
                found = [pair for piece in pieces for pair in piece.scores.get(name, [])]
                assert [position for position, _ in found] == own.positions.tolist()
                torch.testing.assert_close(last.monitors[name].scores, own.scores, rtol=1e-4, atol=1e-4)
                assert [score for _, score in found] == last.monitors[name].scores.tolist()
            assert len(rows) > 1 and all(set(part) == {site} for part in rows)
            assert torch.equal(torch.cat([part[site] for part in rows]), last.activations[site])
            assert torch.cat([part.positions[site] for part in rows]).tolist() == list(range(len(prompt) + first + 1))
            used.add(last.receipt.replica)
    assert used == {"r0", "r1"}


def test_metrics_are_labelled_with_the_replica(front):
    with front.client() as client:
        text, stats = client.get("/metrics").text, client.get("/v1/interp/stats").json()
    assert 'pymllm_interp_replica_up{replica="r0",' in text and 'pymllm_interp_steps_total{replica="r1",' in text
    assert text.count("# TYPE pymllm_interp_kv_tokens gauge") == 1 and stats["kv_tokens"] == front.metric("kv_tokens")


def test_large_captures_come_over_the_link_and_wait_in_the_fronts_store(front):
    body = {"prompt": "w1 w2 " * 30, "max_tokens": 1, "capture": ["resid_post.*"]}
    with front.client() as client:
        found = client.post("/v1/completions", json=body).json()["choices"][0]["activations"]
        states = client.get(found["url"])
    assert states.status_code == 200 and len(states.content) == found["bytes"] > 4000


def put(front: Server, name: str, value: float, key: str = "code") -> dict[str, Any]:
    with front.client(key) as client:
        reply = client.put(f"/v1/interp/vectors/{name}", content=save({"vector": torch.full((HIDDEN,), value)}))
        assert reply.status_code == 200, reply.text
        return reply.json()


def steered(front: Server, name: str, count: int = 6) -> set[str]:
    """Texts of one prompt, steered by name, on all replicas: salts spread it."""
    ops = [{"op": "steer", "site": "resid_post.1", "vector": name, "scale": 4.0}]
    body = {"prompt": "w1 w2", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "interventions": ops}
    texts, used = set(), set()
    with front.client() as client:
        for i in range(count * 2):
            reply = client.post("/v1/completions", json=body | {"cache_salt": f"{i}"})
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            texts.add(choice["text"])
            used.add(choice["receipt"]["replica"])
    assert len(used) == 2
    return texts


def test_a_vector_is_on_every_replica_of_every_front_before_its_put_answers(replicas, front):
    other = replicas.front("other")
    for number in range(3):
        found = put(front if number % 2 else other, "v", float(number))
        assert found == {"name": "v", "shape": [HIDDEN]}
        assert len(steered(other if number % 2 else front, "v") | steered(front, "v")) == 1
    with front.client() as client:
        assert client.delete("/v1/interp/vectors/v").status_code == 200
        body = {"prompt": "w1", "interventions": [{"op": "steer", "site": "resid_post.1", "vector": "v"}]}
        for salt in "abcdef":
            assert client.post("/v1/completions", json=body | {"cache_salt": salt}).status_code == 400
    assert other.end() == 0


@pytest.mark.slow
def test_a_replica_that_is_born_again_has_the_vectors_before_it_takes_calls(replicas, front):
    put(front, "kept", 1.0)
    texts = steered(front, "kept")
    replicas.signal("r0", signal.SIGKILL)
    replicas.wait_for(lambda: front.metric("replica_up") == 1)
    assert re.search(r'replica_up{replica="r0",.*} 0\n', httpx.get(f"{front.url}/metrics").text)
    replicas.wait_until_up(front)
    assert steered(front, "kept") == texts and len(texts) == 1


def test_a_vector_that_one_front_could_not_bring_everywhere_is_brought_by_the_others(replicas, front):
    """SIGKILL of a front between its PUT and the last acknowledgement: r1 is stopped, and has not seen it."""
    other = replicas.front("killed")
    replicas.signal("r1", signal.SIGSTOP)

    def try_to_put() -> None:
        with pytest.raises(httpx.TransportError):
            put(other, "half", 3.0)

    thread = threading.Thread(target=try_to_put)
    thread.start()
    with front.client() as client:
        replicas.wait_for(
            lambda: "half" in {v["name"] for v in client.get("/v1/interp/vectors").json()["vectors"]}
        )  # r0 told it
    other.process.kill()
    thread.join()
    replicas.signal("r1", signal.SIGCONT)
    replicas.wait_until_up(front)
    replicas.wait_for(lambda: len(steered(front, "half")) == 1)


def test_what_a_front_refuses_is_not_stored_anywhere(front):
    with front.client() as client:
        reply = client.put("/v1/interp/vectors/bad", content=b"no safetensors")
        assert reply.status_code == 400, reply.text
        assert "bad" not in {v["name"] for v in client.get("/v1/interp/vectors").json()["vectors"]}


# -- faults ------------------------------------------------------------------------------------


def on_both(count: int) -> list[dict[str, Any]]:
    """Completions that the routing spreads."""
    return [{"prompt": "w1 w2 w3", "max_tokens": 4, "temperature": 0, "cache_salt": f"{i}"} for i in range(count)]


def test_a_put_awaits_a_stopped_replica_or_its_end_and_requests_without_output_run_on_another_one(replicas, front):
    """The replica has the vector when it serves again."""
    replicas.signal("r0", signal.SIGSTOP)
    started, ended = time.monotonic(), list[float]()

    def try_to_put() -> None:
        put(front, "late", 2.0)
        ended.append(time.monotonic())

    with front.client() as client, ThreadPoolExecutor(13) as pool:
        late = pool.submit(try_to_put)
        replies = waiting(replicas, client, pool)
        found = [reply.result(SECONDS) for reply in replies]
        late.result(SECONDS)
    assert ended[0] - started > SILENCE / 2, "it answered before the stopped replica had the vector or was given up"
    check_texts(found)
    replicas.signal("r0", signal.SIGCONT)
    replicas.wait_until_up(front)
    assert len(steered(front, "late")) == 1


def waiting(replicas: Replicas, client: httpx.Client, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Requests, some of which are at a stopped replica."""
    replies = [pool.submit(client.post, "/v1/completions", json=body) for body in on_both(12)]
    replicas.wait_for(lambda: sum(reply.done() for reply in replies) >= 1)
    time.sleep(0.3)
    assert sum(not reply.done() for reply in replies) >= 1, "none was sent to the stopped replica"
    return replies


def check_texts(replies: list[httpx.Response]) -> None:
    assert [reply.status_code for reply in replies] == [200] * 12
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


def streams(front: Server, count: int) -> list[dict[str, Any]]:
    """Long streams, each read on a thread: its number of events, and its last ones."""
    found: list[dict[str, Any]] = [{"events": 0, "last": "", "error": ""} for _ in range(count)]

    def read(one: dict[str, Any], salt: str) -> None:
        body = {"prompt": "w3 w1", "max_tokens": 120, "ignore_eos": True, "stream": True, "cache_salt": salt, "n": 2}
        with (
            contextlib.suppress(httpx.TransportError),  # its front was killed
            front.client() as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    one["events"] += 1
                    one["error"] = line if '"error"' in line else one["error"]
                    one["last"] = line

    for number, one in enumerate(found):
        threading.Thread(target=read, args=(one, f"{number}"), daemon=True).start()
    return found


@contextlib.contextmanager
def left_out(replicas: Replicas, name: str) -> Iterator[None]:
    """A replica is taken from the roster, as before its process is ended in order."""
    gone = replicas.live.pop(name)
    replicas.stopped.add(name)
    replicas.tell()
    yield
    replicas.live[name] = gone
    replicas.stopped.clear()
    replicas.draining.clear()
    replicas.tell()


def test_streams_of_a_replica_that_is_stopped_end_with_an_error_that_names_it_and_others_finish(replicas, front):
    found = streams(front, 8)
    replicas.wait_for(lambda: all(one["events"] > 2 for one in found))
    with left_out(replicas, "r1"):
        replicas.wait_for(lambda: all(one["last"] == "data: [DONE]" for one in found))
    check_streams(found, "replica r1 ended", "it was stopped")
    replicas.wait_until_up(front)
    front.wait_until_idle()


def check_streams(found: list[dict[str, Any]], *why: str) -> int:
    """How many streams ended with an error, which has these words: others are whole."""
    errors = [one["error"] for one in found if one["error"]]
    assert all(word in error for error in errors for word in why), errors
    assert len(errors) < 8 and all(one["events"] > 200 for one in found if not one["error"])
    return len(errors)


def test_a_killed_replica_ends_its_streams_and_its_trace_and_what_had_no_output_runs_on_another_one(replicas, front):
    """A trace is not run again: its code may have acted on the world."""
    with connected(front, lower_traces="off") as lm, front.client() as client, ThreadPoolExecutor(13) as pool:

        def trace() -> None:
            with lm.generate([1, 2], max_new_tokens=100, ignore_eos=True) as tracer:
                for _ in tracer.iter[:]:
                    __import__("time").sleep(0.1)  # the replica's streams are as slow
                    lm.model.layers[0].output.sum()

        running = pool.submit(trace)
        replicas.wait_for(lambda: front.metric("requests_traces") == 1)
        text = client.get("/metrics").text
        name = next(name for name in ("r0", "r1") if re.search(rf'requests_traces{{replica="{name}",.*}} 1\n', text))
        found = streams(front, 8)
        replicas.wait_for(lambda: all(one["events"] > 2 for one in found))
        replicas.signal(name, signal.SIGSTOP)
        replies = waiting(replicas, client, pool)
        replicas.signal(name, signal.SIGKILL)
        check_texts([reply.result(SECONDS) for reply in replies])
        assert f"replica {name} ended" in str(running.exception(SECONDS))
        replicas.wait_for(lambda: all(one["last"] == "data: [DONE]" for one in found))
        assert check_streams(found, f"replica {name} ended")
    replicas.wait_until_up(front)
    front.wait_until_idle()


def test_a_front_that_is_stopped_or_killed_loses_its_calls_on_the_replicas(replicas, front):
    other = replicas.front("stopped")
    for how in (signal.SIGSTOP, signal.SIGKILL):
        found = streams(other, 2)
        replicas.wait_for(lambda found=found: all(one["events"] > 1 for one in found))
        other.process.send_signal(how)
        replicas.wait_for(lambda: front.metric("num_requests_running") == 0)  # asked by another front
        if how == signal.SIGSTOP:
            other.process.send_signal(signal.SIGCONT)
            replicas.wait_until_up(other)  # a new session
            replicas.wait_for(lambda found=found: all(one["last"] == "data: [DONE]" for one in found))


def test_an_abort_right_behind_its_submit_ends_it(replicas, front):
    with front.client() as client:
        for _ in range(30):
            body = {"prompts": [[1, 2, 3]], "params": [{"max_tokens": 100, "ignore_eos": True}], "stream": True}
            with client.stream("POST", "/v1/interp/generate", json=body) as reply:
                assert reply.status_code == 200
    front.wait_until_idle()
    assert front.metric("kv_tokens_free") == front.metric("kv_tokens")


def test_no_request_is_lost_while_a_replica_is_drained_and_ended(replicas, front):
    failed, done, ended = [], [], threading.Event()

    def load() -> None:
        number = 0
        with front.client() as client:
            while not ended.is_set():
                number += 1
                reply = client.post("/v1/completions", json={"prompt": f"w{number % 50}", "max_tokens": 8})
                (done if reply.status_code == 200 else failed).append(reply)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    replicas.drain("r0")
    replicas.wait_for(lambda: front.metric("replica_draining") == 1)
    while replicas.run(replicas.processes["r0"].num_running()):
        time.sleep(0.05)
    with left_out(replicas, "r0"):
        count = len(done)
        replicas.wait_for(lambda: len(done) > count + 10)
        ended.set()
        for thread in threads:
            thread.join()
    assert not failed


# -- who may connect -----------------------------------------------------------------------------


def test_a_link_needs_the_clusters_key(replicas, front):
    replica, stranger = replicas.live["r0"], LinkKeys.new()
    assert asyncio.run(greeted(replica.address, replica.key, replicas.keys, True, SECONDS)), "the fronts' key"
    for keys, server_key, curve in (
        (stranger, replica.key, True), (replicas.keys, stranger.public, True), (stranger, replica.key, False),
    ):  # fmt: skip
        assert not asyncio.run(greeted(replica.address, server_key, keys, curve, 0.4))
    host, port = replica.address.removeprefix("tcp://").split(":")
    curve = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01CURVE" + random.randbytes(5000)
    junk = (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), curve)
    with contextlib.ExitStack() as stack:
        for data in junk * 25:  # as many connections, which stay
            raw = stack.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(ConnectionError):
                raw.sendall(data)
        assert steered_once(front) == 200 and front.metric("replica_up") == 2
    with front.client() as client:
        assert client.get("/health").status_code == 200


def test_junk_from_one_that_has_the_key_ends_its_session_only(replicas, front):
    replica = replicas.live["r0"]

    async def talk() -> m.FromEngine:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        keys = replicas.keys
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.curve_serverkey = replica.key.encode()
        socket.connect(replica.address)
        try:
            socket.send(m.encoder.encode(m.Hello(0)))
            while not isinstance(m.from_engine.decode(await socket.recv())[0], m.Ready):
                pass
            socket.send(b"\xc1 junk")
            while not isinstance(message := m.from_engine.decode(await socket.recv())[0], m.Gone):
                pass
            return message
        finally:
            context.destroy(linger=0)

    assert "cannot be read" in asyncio.run(talk()).why
    assert steered_once(front) == 200


def test_a_replica_that_sends_junk_loses_its_session_and_is_asked_again(replicas, front):
    """Something that has a replica's place and key, but is none."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
        port = router.bind_to_random_port("tcp://127.0.0.1")
        place = {"name": "fake", "address": f"tcp://127.0.0.1:{port}", "key": public.decode()}
        replicas.live["fake"] = Replica(**vars(replicas.live["r0"]) | place)
        replicas.tell()
        try:
            hellos = 0
            while hellos < 3:
                assert router.poll(1000 * SECONDS)
                identity, data = router.recv_multipart()
                if isinstance(m.to_engine.decode(data), m.Hello):
                    hellos += 1
                    router.send_multipart([identity, (b"junk", b"\xc1", b"[[1, 2]]")[hellos - 1]])
            assert steered_once(front) == 200 and front.metric("replica_up") == 2
        finally:
            del replicas.live["fake"]
            replicas.tell()
    assert not any("Traceback" in line for line in front.log)


def steered_once(front: Server) -> int:
    with front.client() as client:
        return client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 2}).status_code


def test_a_replica_with_other_weights_is_refused(replicas, front):
    other = {"name": "other", "fingerprint": "0" * 64}
    replicas.live["other"] = Replica(**vars(replicas.live["r0"]) | other)
    replicas.tell()
    try:
        replicas.wait_for(lambda: any("replica other has other weights (00000000)" in line for line in front.log))
        with front.client() as client:
            text = client.get("/metrics").text
        assert front.metric("replica_up") == 2 and re.search(r'replica_up{replica="other",.*} 0\n', text)
    finally:
        del replicas.live["other"]
        replicas.tell()


def test_monitors_and_captured_rows_stream_through_fronts(front: Server) -> None:
    """Of several requests at once, over both replicas: what streams is what the result has."""
    site, params = "resid_post.1", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    probe = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
    with LM.connect(front.url, api_key=KEYS["declared"]) as lm:

        def read(i: int) -> str:
            monitor = Monitor(site, probe, 1e9, name="m")
            pieces = list(
                lm.stream(f"w{i} w3 w{i + 1}", params, capture=[Capture(site, stream=True)], monitors=[monitor])
            )
            whole = pieces[-1].activations[site]
            rows = torch.cat([piece.captures[site] for piece in pieces if piece.captures is not None])
            assert torch.equal(rows, whole) and len(rows) == 8
            scores = torch.tensor([score for piece in pieces for _, score in piece.scores.get("m", ())])
            torch.testing.assert_close(scores, whole.float() @ probe, rtol=CLOSE, atol=CLOSE)
            return pieces[-1].receipt.replica

        with ThreadPoolExecutor(6) as pool:
            assert len(set(pool.map(read, range(1, 13)))) == 2, "both replicas served some"

"""The stores of captured states and of vectors: ids are the server's, bytes are counted by key, and nothing is left behind."""

from __future__ import annotations

import os
import socket
import time

import httpx
import pytest
import torch
from helpers_served import served
from helpers_server import KEYS, Server
from safetensors.torch import save

from pymllm_interp.server.http.errors import ApiError
from pymllm_interp.server.responses.store import ResponseStore
from pymllm_interp.server.settings import ServeLimits
from pymllm_interp.server.store import ActivationStore
from pymllm_interp.wire.messages import CapturedStates

ASK = {"prompt": "w1 " * 60, "max_tokens": 1, "capture": ["resid_post.*"]}
"""Captured states of some 40 kB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def stored(served_folder, folder, tmp_path_factory):
    """A server whose store has files from before: of an earlier server, and the operator's own."""
    for name in ("pymllm-interp-17-2-0.safetensors", "mine.safetensors", "pymllm-interp-17-2-0.safetensors.txt"):
        (folder / name).write_bytes(b"x")
    options = ["--store", str(folder), "--inline-bytes", "1000", "--max-store-bytes-per-key", "60000"]
    options += ["--max-vectors", "3", "--max-vector-bytes", "2000"]
    with served(served_folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


def test_files_of_an_earlier_server_are_deleted_and_no_others(stored: Server, folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"mine.safetensors", "pymllm-interp-17-2-0.safetensors.txt"}


def test_a_folder_is_the_store_of_one_server(stored: Server, folder):
    with pytest.raises(OSError, match="another server"):
        ActivationStore(folder, ServeLimits()).open()


def test_an_id_of_a_client_names_no_file_of_another(stored: Server, folder):
    """Both send the same X-Request-Id: each gets its own states, and no file is left behind."""
    before, found = set(folder.iterdir()), {}
    for key in ("declared", "other", "declared"):
        with stored.client(key, headers={"X-Request-Id": "same"}) as client:
            if key in found:
                assert client.delete(found[key]["url"]).status_code == 200
            answer = client.post("/v1/completions", json=ASK | {"prompt": "w2 " * (60 if key == "other" else 61)})
            assert answer.status_code == 200, answer.text
            assert "same" not in answer.json()["id"] and answer.headers["x-request-id"] == "same"
            found[key] = answer.json()["choices"][0]["activations"]
    assert len(set(folder.iterdir()) - before) == 2 == stored.metric("store_files")
    for key, place in found.items():
        with stored.client(key) as client, stored.client("code") as third:
            assert third.get(place["url"]).status_code == 404 == third.delete(place["url"]).status_code
            assert len(client.get(place["url"]).content) == place["bytes"]
            assert client.delete(place["url"]).status_code == 200
    assert set(folder.iterdir()) == before


def test_a_key_that_stores_much_leaves_room_for_others(stored: Server):
    with stored.client("declared") as client, stored.client("other") as other:
        first = client.post("/v1/completions", json=ASK)
        full = client.post("/v1/completions", json=ASK)
        assert full.status_code == 429 and "max_store_bytes_per_key" in full.json()["error"]["message"]
        second = other.post("/v1/completions", json=ASK)
        for who, answer in ((client, first), (other, second)):
            assert who.delete(answer.json()["choices"][0]["activations"]["url"]).status_code == 200


def test_old_files_that_no_client_was_told_of_are_deleted(tmp_path):
    store = ActivationStore(tmp_path, ServeLimits(store_seconds=100, max_store_bytes_per_key=10))
    store.open()
    for call in range(3):
        path = tmp_path / f"pymllm-interp-1-{call}-0.safetensors"
        path.write_bytes(b"x")
        if call:
            os.utime(path, (time.time() - 200,) * 2)
    store.adopt("kept", CapturedStates(10, {}, file="pymllm-interp-1-1-0.safetensors"), "ada")
    store.sweep_folder()
    assert sorted(path.name[16] for path in tmp_path.iterdir()) == ["0", "1"]
    with pytest.raises(ApiError, match="max_store_bytes_per_key"):
        store.adopt("more", CapturedStates(1, {}, file="pymllm-interp-1-0-0.safetensors"), "ada")
    store.close()


# -- vectors on their way ------------------------------------------------------------------


def begin_upload(server: Server, name: str, head: str) -> socket.socket:
    """A PUT whose body does not come."""
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=600)
    found.sendall(
        f"PUT /v1/interp/vectors/{name} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEYS['declared']}\r\n"
        f"Expect: 100-continue\r\n{head}\r\n\r\n".encode()
    )
    assert b" 100 " in found.recv(1000)  # the route waits for the body
    return found


def put(server: Server, name: str, content, key: str = "declared") -> httpx.Response:
    with server.client(key) as client:
        return client.put(f"/v1/interp/vectors/{name}", content=content)


def client_deletes(server: Server, name: str) -> int:
    with server.client("declared") as client:
        return client.delete(f"/v1/interp/vectors/{name}").status_code


def wait_until_stored(server: Server, name: str, content: bytes) -> None:
    """What an upload that broke had reserved is free again, at some time."""
    for _ in range(600):
        if (answer := put(server, name, content)).status_code == 200:
            return
    raise AssertionError(answer.text)


def test_uploads_at_the_same_time_share_the_limits(stored: Server):
    vector = save({f"layer.{layer}": torch.ones(72) for layer in range(2)})  # some 760 bytes
    for head, sent in (("Content-Length: 1500", b""), ("Transfer-Encoding: chunked", b"5dc\r\n" + bytes(1500))):
        with begin_upload(stored, "slow", head) as slow:
            slow.sendall(sent)
            for _ in range(600):  # the chunk is on its way
                refused = put(stored, "other", vector)
                if refused.status_code != 200:
                    break
            assert refused.status_code == 413 and "max_vector_bytes" in refused.json()["error"]["message"]
            assert put(stored, "other", vector, "other").status_code == 200  # each key has its own
        wait_until_stored(stored, "other", vector)
        assert client_deletes(stored, "other") == 200
    with begin_upload(stored, "a", "Content-Length: 10"), begin_upload(stored, "b", "Content-Length: 10") as b:
        assert put(stored, "other", vector).status_code == 200
        many = put(stored, "c", vector)
        assert many.status_code == 429 and "max_vectors" in many.json()["error"]["message"]
        b.sendall(b"0123456789")
        assert b" 400 " in b.recv(1000)  # no safetensors file; its reservation is over
        assert client_deletes(stored, "other") == 200
        assert put(stored, "c", vector).status_code == 200
    assert client_deletes(stored, "c") == 200


def test_an_upload_of_unknown_length_ends_at_the_limit(stored: Server):
    sent = []

    def parts():
        for number in range(10_000):
            sent.append(number)
            yield bytes(1000)

    try:
        answer = put(stored, "endless", parts())
    except httpx.TransportError:  # the server closed the connection while more was sent
        return
    assert answer.status_code == 413 and "max_vector_bytes" in answer.json()["error"]["message"]


# -- stores that fronts of a cluster share ---------------------------------------------------------


def kept(store: ActivationStore, folder, name: str, owner: str, size: int = 3) -> None:
    file = f"pymllm-interp-{os.getpid()}-{len(list(folder.iterdir()))}-0.safetensors"
    (folder / file).write_bytes(b"abc")
    store.adopt(name, CapturedStates(size, {}, file=file), owner)


def test_a_shared_store_finds_what_others_keep_for_the_same_key_and_survives_them(tmp_path):
    one, other = (ActivationStore(tmp_path, ServeLimits(), shared=True) for _ in range(2))
    for store in (one, other):
        store.open()
    with pytest.raises(OSError, match="another server"):
        ActivationStore(tmp_path, ServeLimits()).open()
    kept(one, tmp_path, "cmpl-1-0", "me")
    kept(one, tmp_path, "cmpl-2-0", "me")
    assert other.find("cmpl-1-0", "me").path.read_bytes() == b"abc"
    for name, owner in (("cmpl-1-0", "you"), ("cmpl-3-0", "me"), ("../cmpl-1-0", "me"), ("x" * 5000, "me"), ("", "me")):
        with pytest.raises(ApiError, match="no activations"):
            other.find(name, owner)
    one.close()  # as if its process had ended
    born_again = ActivationStore(tmp_path, ServeLimits(), shared=True)
    born_again.open()
    assert born_again.find("cmpl-1-0", "me").size == 3
    other.drop("cmpl-1-0")
    with pytest.raises(ApiError):
        born_again.find("cmpl-1-0", "me")
    one.sweep()
    assert one.num_files == 1 and one.num_bytes == 3, "a file that another server deleted counts no more"


def test_cards_of_a_shared_store_go_when_their_time_is_over(tmp_path):
    limits = ServeLimits(store_seconds=0.2, response_seconds=0.2)
    one = ActivationStore(tmp_path, limits, shared=True)
    one.open()
    kept(one, tmp_path, "cmpl-1-0", "me")
    responses = [ResponseStore(limits, folder=tmp_path) for _ in range(2)]
    responses[0].keep("me", "resp_1", b'{"id": 1}', b"[]")
    assert responses[1].find("me", "resp_1").response == b'{"id": 1}'
    with pytest.raises(ApiError):
        responses[1].find("you", "resp_1")
    other = ActivationStore(tmp_path, limits, shared=True)
    other.open()
    (tmp_path / "mine.json").write_text("{}")
    time.sleep(0.3)
    with pytest.raises(ApiError):
        other.find("cmpl-1-0", "me")
    with pytest.raises(ApiError):
        responses[1].find("me", "resp_1")
    other.sweep_folder()  # the first server ended
    responses[1].sweep_folder()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


def test_a_response_that_another_front_deletes_or_that_is_pushed_out_is_gone_everywhere(tmp_path):
    one, other = (ResponseStore(ServeLimits(max_responses=2), folder=tmp_path) for _ in range(2))
    for number in range(3):
        one.keep("me", f"resp_{number}", b"{}", b"[]")
    with pytest.raises(ApiError):
        other.find("me", "resp_0")
    other.drop("me", "resp_1")
    for store in (one, other):
        with pytest.raises(ApiError):
            store.find("me", "resp_1")
    assert other.find("me", "resp_2").messages == b"[]" and one.num_responses == 1

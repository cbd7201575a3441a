"""The store of captured states: ids are the server's, bytes are counted for each key, and nothing is left behind."""

from __future__ import annotations

import os
import time

import pytest
from helpers_server import Server, serving

from pymllm_interp.server.http.errors import ApiError
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
    with serving(served_folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
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

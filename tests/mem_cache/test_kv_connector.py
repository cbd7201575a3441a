"""KV of evicted prefixes: in host memory and files it comes back bit for bit, for the same model, tokens and edits only (V23)."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_devices import DEVICES, lm_on
from safetensors.torch import load_file, save_file

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.config import ServerConfig
from pymllm_interp.core.request import Request
from pymllm_interp.engine.prefix_sharing import PrefixSharing
from pymllm_interp.interventions import PatchKV
from pymllm_interp.mem_cache.kv_connector import page_keys
from pymllm_interp.mem_cache.kv_pool import KVPool
from pymllm_interp.mem_cache.radix_cache import RadixCache
from pymllm_interp.mem_cache.spill_connector import SpillConnector
from pymllm_interp.runner.stages.connector_stage import ConnectorStage, make_kv_connector

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
RNG = random.Random(3)
PROMPT, OTHER = ([RNG.randrange(95) for _ in range(100)] for _ in range(2))
SMALL: dict[str, Any] = {"kv_cache_tokens": 160, "max_model_len": 128}


def connector(lm: LM) -> SpillConnector:
    found = lm.runner.kv_connector
    assert isinstance(found, SpillConnector)
    return found


def push_out(lm: LM) -> None:
    """Fill the pool with another prompt, so that everything else is evicted."""
    lm.generate([OTHER], GREEDY)
    lm.generate([[token + 1 for token in OTHER]], GREEDY)


@pytest.mark.parametrize("device", DEVICES)
def test_an_evicted_prefix_comes_back_bit_for_bit(device: str, model_folder) -> None:
    lm = lm_on(device, model_folder("llama"), kv_spill_bytes=64 << 20, **SMALL)
    first = lm.generate([PROMPT], GREEDY)[0].token_ids
    kept = lm.kv([PROMPT])[0]
    push_out(lm)
    (again,) = lm.generate([PROMPT], GREEDY)
    assert again.token_ids == first and again.num_cached_tokens == 96 and connector(lm).counts["restored"] >= 6
    found = lm.kv([PROMPT])[0]
    assert torch.equal(found.k[:, :96], kept.k[:, :96]) and torch.equal(found.v[:, :96], kept.v[:, :96])
    lm.shutdown()


def test_edits_adapters_salts_and_weights_keep_prefixes_apart(model_folder) -> None:
    lm = lm_on("cpu", model_folder("llama"), kv_spill_bytes=64 << 20, **SMALL)
    steer = [Steer("resid_post.0", torch.ones(72), positions=[20])]
    patch = [PatchKV(1, [20], k=torch.ones(1, 1, 8), heads=[0])]
    wanted: list[Any] = []
    for ops in ([], steer, patch):
        lm.reset_prefix_cache()
        wanted.append(lm.generate([PROMPT], GREEDY, interventions=ops)[0].token_ids)
        push_out(lm)
    for ops, tokens in ((patch, wanted[2]), ([], wanted[0]), (steer, wanted[1])):
        (out,) = lm.generate([PROMPT], GREEDY, interventions=ops)
        assert out.token_ids == tokens and out.num_cached_tokens == 96
        push_out(lm)
    (fresh,) = lm.generate([PROMPT], GREEDY, interventions=[Steer("resid_post.0", torch.ones(72), positions=[21])])
    assert fresh.num_cached_tokens == 16
    push_out(lm)
    assert lm.generate([PROMPT], GREEDY, cache_salt="other")[0].num_cached_tokens == 0
    push_out(lm)
    with torch.no_grad():
        next(lm.runner.get_model().parameters()).mul_(1.01)
    assert lm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 0, "of other weights"
    lm.shutdown()


def test_kv_of_old_weights_is_not_kept_by_the_name_of_new_ones(model_folder) -> None:
    """A running request takes pages of a step before any other request asks whether the weights were edited."""
    lm = lm_on("cpu", model_folder("llama"), kv_spill_bytes=64 << 20, **SMALL)
    lm.generate([PROMPT], GREEDY)

    def edit_and_grow() -> None:
        kv, runs = lm.engine.scheduler.kv, SimpleNamespace(request_id="r", pages=list[int]())
        with torch.no_grad():
            next(lm.runner.get_model().parameters()).mul_(1.01)
        kv.begin()
        assert kv.grow(runs, kv.num_available_pages * kv.page_size)  # pyright: ignore[reportArgumentType]
        del kv._changed["r"]
        kv._free(runs.pages)

    lm.engine.call(edit_and_grow)
    assert lm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 0 == connector(lm).counts["restored"]
    lm.shutdown()


def test_request_ids_of_other_processes_name_other_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> Any:
        request = Request("1", [1] * 8, SamplingParams(), 4, 0)
        request.encoder, request.private_encoder = SimpleNamespace(content=b"input"), True  # pyright: ignore
        state: Any = SimpleNamespace(version=0, namespace=lambda adapter: None)
        return PrefixSharing(RadixCache(4), state).prefix_of(request).namespaces

    first = names()
    assert first == names()
    monkeypatch.setattr("pymllm_interp.engine.prefix_sharing.PROCESS", "another")
    assert first != names()


SCRIPT = """
import json, os, sys, torch
from pymllm_interp import LM, SamplingParams
folder, spill, prompt, other, kill = json.loads(sys.argv[1])
lm = LM(folder, dtype="float32", device="cpu", kv_cache_tokens=2304, max_model_len=2200, kv_spill_bytes=0, kv_spill_folder=spill)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
(out,) = lm.generate([prompt], params)
kv = lm.kv([prompt])[0]
lm.generate([other], params)
lm.generate([other[::-1]], params)
while any(run.file is None for run in lm.runner.kv_connector._runs.values()) or not lm.runner.kv_connector._runs:
    lm.generate([[1]], params)
torch.save((out.token_ids, out.num_cached_tokens, kv.k, kv.v), spill + "/found.pt")
if kill:
    os.kill(os.getpid(), 9)
lm.shutdown()
"""


def test_a_killed_process_leaves_prefixes_to_the_next_one(long_folder: Path, tmp_path: Path) -> None:
    prompt, other = ([RNG.randrange(95) for _ in range(2000)] for _ in range(2))
    found = []
    for kill in (True, False):
        given = json.dumps([str(long_folder), str(tmp_path), prompt, other, kill])
        done = subprocess.run([sys.executable, "-c", SCRIPT, given], capture_output=True, timeout=300, check=False)
        assert (done.returncode == -9) if kill else (done.returncode == 0), done.stderr[-2000:]
        found.append(torch.load(tmp_path / "found.pt"))
    (tokens, _, k, v), (tokens2, cached, k2, v2) = found
    assert (
        tokens == tokens2
        and cached == 1984
        and torch.equal(k[:, :1984], k2[:, :1984])
        and torch.equal(v[:, :1984], v2[:, :1984])
    )


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("long")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# -- the connector alone ---------------------------------------------------------------------


def pool() -> KVPool:
    found = KVPool(2, 64, 2, 4, torch.bfloat16, "cpu", 4)
    torch.manual_seed(1)
    found._kv.copy_(torch.randn(found._kv.shape))
    return found


KEYS = list(page_keys(b"root", [(None, bytes([i])) for i in range(8)]))


def written(folder: Path, model: str = "model") -> SpillConnector:
    made = SpillConnector(pool(), lambda: model, 0, folder, 1 << 20)
    made.save(KEYS[:4], torch.arange(4, 20).numpy())
    made.close()
    return made


def test_pages_are_found_from_any_place_and_only_in_their_order(tmp_path: Path) -> None:
    own = pool()
    made = SpillConnector(own, lambda: "model", 1 << 20, None, 1 << 20)
    made.save(KEYS[:3], torch.arange(4, 16).numpy())
    made.save(KEYS[3:5], torch.arange(20, 28).numpy())
    slots = [*range(8, 16), *range(20, 28)]
    found = made.restore(KEYS[1:7])
    assert found is not None and torch.equal(found.kv, own.swap_out(slots).kv)
    assert made.restore(KEYS[5:]) is None and made.restore([]) is None
    made.set_disabled(True)
    assert made.restore(KEYS) is None
    made.save(KEYS[5:], torch.arange(28, 40).numpy())
    made.set_disabled(False)
    assert made.restore(KEYS[5:]) is None


def test_host_memory_and_files_are_bounded(tmp_path: Path) -> None:
    size = 2 * 2 * 4 * 2 * 4 * 2  # bytes of a page
    made = SpillConnector(pool(), lambda: "model", 2 * size, None, 1)
    for i in range(4):
        made.save(KEYS[i : i + 1], torch.arange(4, 8).numpy())
    assert (
        made.restore(KEYS[:1]) is None and made.restore(KEYS[2:3]) is not None and made.restore(KEYS[3:4]) is not None
    )
    disk = SpillConnector(pool(), lambda: "model", 0, tmp_path, 2 * size)
    for i in range(4):
        disk.save(KEYS[i : i + 1], torch.arange(4, 8).numpy())
        disk.post_forward(None)
        disk._writer.submit(lambda: None).result()
    assert len(list(tmp_path.glob("*"))) == 2 and disk.restore(KEYS[:1]) is None and disk.restore(KEYS[3:4]) is not None


def test_a_file_that_is_not_whole_or_of_another_model_is_a_miss(tmp_path: Path) -> None:
    written(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    good = file.read_bytes()
    again = SpillConnector(pool(), lambda: "model", 0, tmp_path, 1 << 20)
    assert again.restore(KEYS[:4]) is not None
    for bad in (good[:-7], b"", good[:-3] + bytes([good[-3] ^ 1]) + good[-2:], b"\xff" * 100):
        file.write_bytes(bad)
        other = SpillConnector(pool(), lambda: "model", 0, tmp_path, 1 << 20)
        assert other.restore(KEYS[:4]) is None and other.counts["corrupt"]
    file.write_bytes(good)
    save_file(
        {"kv": load_file(file)["kv"].float()}, file, {"keys": json.dumps([key.hex() for key in KEYS[:4]]), "crc": "1"}
    )
    assert SpillConnector(pool(), lambda: "model", 0, tmp_path, 1 << 20).restore(KEYS[:4]) is None
    assert again.root != SpillConnector(pool(), lambda: "another", 0, None, 1).root


def test_a_full_folder_costs_nothing_but_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pymllm_interp.mem_cache.spill_connector.save_file", full)
    made = SpillConnector(pool(), lambda: "model", 1 << 20, tmp_path, 1 << 20)
    made.save(KEYS[:2], torch.arange(4, 12).numpy())
    made.post_forward(None)
    made._writer.submit(lambda: None).result()
    assert made.counts["unwritten"] == 1 and made.restore(KEYS[:2]) is not None and not list(tmp_path.iterdir())


def test_a_slow_folder_holds_a_bounded_amount_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, size = threading.Event(), 2 * 2 * 4 * 2 * 4 * 2
    monkeypatch.setattr("pymllm_interp.mem_cache.spill_connector.MOST_WAITING", 2 * size)
    monkeypatch.setattr(
        "pymllm_interp.mem_cache.spill_connector.save_file", lambda *args: (goes_on.wait(60), save_file(*args))
    )
    made, alive = SpillConnector(pool(), lambda: "model", size, tmp_path, 1 << 20), list[Any]()
    for key in KEYS:
        made.save([key], torch.arange(4, 8).numpy())
        alive.append(weakref.ref(made._places[key][0].kv))  # pyright: ignore
        made.post_forward(None)
    gc.collect()
    assert sum(kv() is not None for kv in alive) <= 4, "one in host memory, two that wait, one that is written"
    goes_on.set()
    made._writer.submit(lambda: None).result()
    assert made.counts["unwritten"] >= 4 and made.restore(KEYS[7:]) is not None and made._beyond == 0


def test_a_folder_that_others_write_to_is_refused_and_odd_entries_are_left_out(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.safetensors")
    made = SpillConnector(pool(), lambda: "model", 0, tmp_path, 1 << 20)
    assert made.counts["corrupt"] == 2 and made.restore(KEYS[:4]) is not None
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="kv_spill_folder: others may write"):
        SpillConnector(pool(), lambda: "model", 0, tmp_path, 1 << 20)


def test_the_runner_calls_a_connector_around_its_passes(lm_of, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: calls.append(name)

    lm = lm_of("llama")
    noted: Any = Noted()
    monkeypatch.setattr(lm.runner, "stages", (*lm.runner.stages, ConnectorStage(noted)))
    lm.generate([[1, 2, 3]], GREEDY)
    assert calls[:4] == ["pre_forward", "post_forward"] * 2 and {*calls} <= {
        "pre_forward",
        "post_forward",
        "no_forward",
    }


def test_models_that_need_more_than_keys_and_values_refuse_it(model_folder, lm_of) -> None:
    with pytest.raises(ValueError, match="kv_spill_bytes"):
        LM(model_folder("llama"), device="cpu", kv_spill_bytes=-1)
    spec = lm_of("llama").model_spec
    with pytest.raises(ValueError, match="need more than K and V"):
        make_kv_connector(ServerConfig(kv_spill_bytes=1), replace(spec, has_states=True), pool(), None)  # pyright: ignore

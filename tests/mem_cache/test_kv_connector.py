"""KV of evicted prefixes: in host memory and files it comes back bit for bit, for the same model, tokens and edits only (V23)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers_devices import DEVICES, lm_on
from helpers_forks import forking

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.config import ServerConfig
from pymllm_interp.core.request import Request
from pymllm_interp.engine.prefix_sharing import PrefixSharing
from pymllm_interp.interventions import PatchKV
from pymllm_interp.mem_cache.kv_connector import _value_of, page_keys
from pymllm_interp.mem_cache.memory_pool import KVPool
from pymllm_interp.mem_cache.radix_cache import RadixCache
from pymllm_interp.mem_cache.spill_connector import SpillConnector
from pymllm_interp.mem_cache.spill_files import SpillFiles
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


@pytest.mark.parametrize("folder", [False, True])
def test_a_reset_of_the_connector_is_asked_for(folder: bool, model_folder, tmp_path: Path) -> None:
    own: dict[str, Any] = {"kv_spill_folder": str(tmp_path)} if folder else {"kv_spill_bytes": 64 << 20}
    lm = lm_on("cpu", model_folder("llama"), **own, **SMALL)
    first = lm.generate([PROMPT], GREEDY)[0].token_ids
    for reset, cached in ((False, 96), (True, 0)):
        push_out(lm)
        lm.reset_prefix_cache(reset_connector=reset)
        (again,) = lm.generate([PROMPT], GREEDY)
        assert again.token_ids == first and again.num_cached_tokens == cached
    lm.shutdown()


def test_batch_invariant_mode_takes_no_kv_of_other_kernels(model_folder, tmp_path: Path) -> None:
    for invariant, cached in ((False, 0), (True, 0), (True, 96), (False, 96)):
        lm = lm_on("cpu", model_folder("llama"), kv_spill_folder=str(tmp_path), batch_invariant=invariant, **SMALL)
        assert lm.generate([PROMPT], GREEDY)[0].num_cached_tokens == cached
        push_out(lm)
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
while lm.runner.kv_connector._waiting or not lm.runner.kv_connector._files._files:
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
        with forking() if kill else nullcontext():  # strings hash otherwise in a new interpreter
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

PAGE = 2 * 2 * 4 * 2 * 4 * 2  # bytes of a page of `pool`


def pool(dtype: torch.dtype = torch.bfloat16) -> KVPool:
    found = KVPool(2, 64, 2, 4, dtype, "cpu", 4)
    torch.manual_seed(1)
    found._kv.copy_(torch.randn(found._kv.shape))
    return found


KEYS = list(page_keys(b"root", [(None, bytes([i])) for i in range(8)]))


def connector_of(
    folder: Path | None, host: int = 0, disk: int = 1 << 20, own: KVPool | None = None, model: str = "model"
) -> SpillConnector:
    return SpillConnector(own or pool(), lambda: model, host, folder, disk)


def settle(made: SpillConnector) -> None:
    made.post_forward(None)
    made._writer.submit(lambda: None).result()


def written(folder: Path, model: str = "model") -> Path:
    """The file of pages 1 to 4."""
    before = {*folder.glob("*.safetensors")}
    made = connector_of(folder, model=model)
    made.save(KEYS[:4], range(1, 5))
    made.close()
    (file,) = {*folder.glob("*.safetensors")} - before
    return file


def restored(made: SpillConnector, keys: list[bytes]) -> int:
    """How many pages came back: to other pages, bit for bit."""
    own = made._pool
    first = own._by_page.clone()
    own._by_page[9:] = 0
    found = made.restore(known := made.known(keys), range(9, 9 + len(known)))
    for i, key in enumerate(keys[:found]):
        assert torch.equal(own._by_page[9 + i], first[1 + KEYS.index(key)])
    assert not own._by_page[9 + found :].any()
    own._by_page.copy_(first)
    return found


@pytest.mark.parametrize("kind", ["host", "files", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_pages_are_found_from_any_place_and_only_in_their_order(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    own = pool(torch.float32 if dtype is torch.float8_e4m3fn else dtype)
    own = KVPool(2, 64, 2, 4, dtype, "cpu", 4) if dtype is torch.float8_e4m3fn else own
    if dtype is torch.float8_e4m3fn:
        own._kv.view(torch.uint8).random_(0, 120)
    made = connector_of(None if kind == "host" else tmp_path, 0 if kind == "files" else 1 << 20, own=own)
    made.save(KEYS[:3], [1, 2, 3])
    made.save(KEYS[:5], [1, 2, 3, 4, 5])  # two of them are new
    settle(made)
    assert made.counts["saved"] == 5
    for _ in range(2):
        assert restored(made, KEYS[1:7]) == 4 and restored(made, KEYS[4:]) == 1
        assert restored(made, KEYS[5:]) == 0 == restored(made, [])
    made.set_disabled(True)
    made.save(KEYS[5:], [6, 7, 8])
    assert restored(made, KEYS) == 0
    made.set_disabled(False)
    assert restored(made, KEYS[5:]) == 0 and restored(made, KEYS) == 5
    made.close()
    assert restored(made, KEYS) == 0


def test_many_pages_come_back_by_less_memory_than_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files through three places in host memory, and over parts on the device; beside pages that stay in host memory."""
    monkeypatch.setattr("pymllm_interp.mem_cache.spill_connector.MOST_WAITING", 3 * PAGE)
    monkeypatch.setattr("pymllm_interp.mem_cache.memory_pool.MOST_STAGED", 2 * PAGE)
    for host in (0, 2 * PAGE):
        made = connector_of(tmp_path / str(host), host)
        for i in range(0, 8, 2):
            made.save(KEYS[i : i + 2], [1 + i, 2 + i])
            settle(made)
        found = [restored(made, KEYS[at:]) for at in (0, 3, 7)]
        assert found == [8, 5, 1]
        made.close()


def test_host_memory_and_files_are_bounded(tmp_path: Path) -> None:
    made = connector_of(None, 2 * PAGE)
    for i in range(4):
        made.save(KEYS[i : i + 1], [1 + i])
    assert [restored(made, KEYS[i : i + 1]) for i in range(4)] == [0, 0, 1, 1]
    one = connector_of(tmp_path / "one")
    one.save(KEYS[:1], [1])
    settle(one)
    (file,) = (tmp_path / "one").iterdir()
    disk = connector_of(tmp_path, 0, 2 * file.stat().st_size + PAGE)
    for i in range(4):
        disk.save(KEYS[i : i + 1], [1 + i])
        settle(disk)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert [restored(disk, KEYS[i : i + 1]) for i in range(4)] == [0, 0, 1, 1]


def test_a_folder_is_bounded_over_all_processes_and_left_parts_are_removed(tmp_path: Path) -> None:
    """Files of another process count, and the least recently used goes first, whoever wrote it. Files of other names stay."""
    one = connector_of(tmp_path)
    one.save(KEYS[:2], [1, 2])
    settle(one)
    left, theirs = tmp_path / f"{'a' * 32}.part", tmp_path / "model.safetensors"
    left.write_bytes(b"x" * 1000)
    theirs.write_bytes(b"y" * 1000)
    with open(tmp_path / f"{'b' * 32}.part", "wb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        locked.write(b"z" * 100)
        locked.flush()
        (file,) = tmp_path.glob("?" * 32 + ".safetensors")
        os.utime(file, (1, 1))
        other = connector_of(tmp_path, disk=file.stat().st_size + 100 + 10)
        assert not left.exists() and restored(other, KEYS[:2]) == 2
        other.save(KEYS[2:4], [3, 4])
        settle(other)
        assert not file.exists() and theirs.exists() and Path(locked.name).exists()
        assert restored(other, KEYS[:4]) == 0 and restored(other, KEYS[2:4]) == 2
    assert one.known(KEYS[:2]) and restored(one, KEYS[:2]) == 0 and one.counts["corrupt"], "its file is gone"
    assert not one.known(KEYS[:1])


def test_a_reset_forgets_this_models_kv_only(tmp_path: Path) -> None:
    another = connector_of(tmp_path, model="another")
    another.save(list(page_keys(b"another", [(None, b"1")])), [1])
    settle(another)
    (other,), made = tmp_path.glob("*.safetensors"), connector_of(tmp_path, 1 << 20)
    made.save(KEYS[:2], [1, 2])
    settle(made)
    third = connector_of(tmp_path, 1 << 20)  # a second process of the model
    third.save(KEYS[2:4], [3, 4])
    settle(third)
    made.save(KEYS[6:], [7, 8])  # is not written yet
    left = made.reset()
    assert left is not None
    left.result()
    assert not made.known(KEYS[:1]) and [*tmp_path.glob("*.safetensors")] == [other] and restored(made, KEYS[6:]) == 0
    made.save(KEYS[:2], [1, 2])
    settle(made)
    assert restored(made, KEYS[:2]) == 2 and len(made._free) + len(made._slots) == made._num_used
    host = connector_of(None, 1 << 20)
    host.save(KEYS[:2], [1, 2])
    assert host.reset() is None and not host.known(KEYS)


def test_a_file_that_is_not_whole_or_of_another_model_is_a_miss(tmp_path: Path) -> None:
    file = written(tmp_path)
    good = file.read_bytes()
    assert restored(connector_of(tmp_path), KEYS[:4]) == 4
    flipped = good[:-3] + bytes([good[-3] ^ 1]) + good[-2:]
    huge = (1 << 62).to_bytes(8, "little") + good[8:]
    for bad, most in ((good[:-7], 0), (b"", 0), (flipped, 3), (b"\xff" * 100, 0), (huge, 0), (good + b"1", 0)):
        file.write_bytes(bad)
        other = connector_of(tmp_path)
        assert restored(other, KEYS[:4]) == most and other.counts["corrupt"]
    for change in (("BF16", "F16"), ('"kv"', '"KV"'), ('"crcs"', '"cccc"'), ("[4, 2, 2", "[2, 2, 4")):
        file.write_bytes(good.replace(change[0].encode(), change[1].encode(), 1))
        assert restored(connector_of(tmp_path), KEYS[:4]) == 0
    file.write_bytes(good)
    wide = connector_of(tmp_path, own=pool(torch.float32))
    assert not wide.known(KEYS) and wide.counts["corrupt"] == 0
    assert connector_of(None).root != connector_of(None, model="another").root != wide.root


def test_files_of_a_read_only_file_system_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    written(tmp_path)
    made = connector_of(tmp_path)
    monkeypatch.setattr(os, "utime", refused)
    assert restored(made, KEYS[:4]) == 4 and made.counts["corrupt"] == 0


def test_a_device_without_memory_for_copies_costs_nothing_but_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    made = connector_of(None, 1 << 20)
    monkeypatch.setattr(KVPool, "pages_out", full)
    made.save(KEYS[:2], [1, 2])
    assert made.counts["unwritten"] == 1 and made.counts["saved"] == 0 and not made.known(KEYS[:2])
    assert len(made._free) + len(made._slots) == made._num_used, "no place in host memory is lost"
    monkeypatch.undo()
    made.save(KEYS[:2], [1, 2])
    monkeypatch.setattr(KVPool, "pages_in", full)
    assert restored(made, KEYS[:2]) == 0
    monkeypatch.undo()
    assert restored(made, KEYS[:2]) == 2


def test_a_full_folder_costs_nothing_but_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    made = connector_of(tmp_path, 1 << 20)
    monkeypatch.setattr(SpillFiles, "_fill", full)
    made.save(KEYS[:2], [1, 2])
    settle(made)
    assert made.counts["unwritten"] == 1 and restored(made, KEYS[:2]) == 2 and not list(tmp_path.iterdir())
    monkeypatch.undo()
    gone = connector_of(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    gone.save(KEYS[:2], [1, 2])
    settle(gone)
    assert gone.counts["unwritten"] == 1 and restored(gone, KEYS[:2]) == 0


def test_a_slow_folder_holds_a_bounded_amount_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, fill = threading.Event(), cast(Any, SpillFiles._fill)
    monkeypatch.setattr("pymllm_interp.mem_cache.spill_connector.MOST_WAITING", 2 * PAGE)
    monkeypatch.setattr(SpillFiles, "_fill", staticmethod(lambda *args: (goes_on.wait(60), fill(*args))))
    made = connector_of(tmp_path, PAGE)
    for i, key in enumerate(KEYS):
        made.save([key], [1 + i])
        made.post_forward(None)
    assert len(made._memory) == 3 == len(made._slots) and made.counts["unwritten"] == 5
    goes_on.set()
    settle(made)
    assert restored(made, KEYS[:3]) == 3 and restored(made, KEYS[3:]) == 0 and len(made._slots) == 1
    made.save(KEYS[7:], [8])
    settle(made)
    assert restored(made, KEYS[7:]) == 1 and not made._waiting


def test_a_folder_that_others_write_to_is_refused_and_odd_entries_are_left_out(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / f"{'a' * 32}.safetensors").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / f"{'b' * 32}.safetensors")
    os.mkfifo(tmp_path / f"{'b' * 32}.part")
    made = connector_of(tmp_path)
    assert made.counts["corrupt"] == 2 and restored(made, KEYS[:4]) == 4
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="kv_spill_folder: others may write"):
        connector_of(tmp_path)


def test_a_folder_named_like_a_file_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / f"{'a' * 32}.safetensors"
    folder.mkdir()
    (tmp_path / f"{'b' * 32}.part").mkdir()
    os.utime(folder, (0, 0))  # it would be the first to go
    size, descriptors = written(tmp_path).stat().st_size, len(os.listdir("/proc/self/fd"))
    made = connector_of(tmp_path, disk=2 * size)
    assert made.counts["corrupt"] == 0
    for _ in range(3):
        made.save(KEYS[4:], range(5, 9))
        settle(made)
        assert made.counts["unwritten"] == 0 and restored(made, KEYS[4:]) == 4
        made.reset().result()
    assert folder.is_dir() and len(os.listdir("/proc/self/fd")) <= descriptors + 1
    made.close()


def test_namespaces_have_names_that_differ_and_hold_in_other_processes() -> None:
    class Local:
        pass

    names: list[Any] = [
        None, "None", b"None", 1, "1", 1.0, (), ((),), (1, 2), (12,), ("1", "2"), ("12",), ("1|2",), (b"1", 2),
        range(3), (0, 1, 2), ((1,), 2), (1, (2,)), "\ud800",
    ]  # fmt: skip
    assert len({_value_of(name) for name in names}) == len(names) and None not in {_value_of(name) for name in names}
    assert _value_of((1, Local())) is None is _value_of((repr(Local()), 2)) is _value_of(frozenset({1}))
    edges: list[Any] = [(None, b"a"), ("x", b"b"), ("x", b"c")]
    whole = list(page_keys(b"root", edges))
    assert whole == [*page_keys(b"root", edges[:2]), *page_keys(whole[1], edges[2:])]
    assert len(list(page_keys(b"root", [*edges, (Local(), b"d"), (None, b"e")]))) == 3


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

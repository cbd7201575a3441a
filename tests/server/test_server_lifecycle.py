"""vLLM's routes for operators: pause and resume, and new weights by shared memory or CUDA IPC."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model
from helpers_devices import DEVICES
from helpers_served import served
from helpers_server import KEYS, Server
from helpers_waits import until
from safetensors.torch import load_file

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.handle import RequestError
from pymllm_interp.engine.lifecycle.lifecycle import Stamps
from pymllm_interp.models.weights.loading import WeightsError
from pymllm_interp.wire.weights import FOLDER, HANDLE, SentWeights, _check_counter, received

OPTIONS = ["--operator", "code", "--allow-code-from", "code"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(served_folder, *OPTIONS, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


@pytest.fixture(scope="module")
def lm(server: Server) -> Iterator[LM]:
    with LM.connect(server.url, api_key=KEYS["code"]) as found:
        yield found


def tokens_of(lm: LM) -> list[int]:
    return lm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids


def test_a_server_is_paused_and_resumed(lm: LM, server: Server):
    lm.pause("keep")
    assert lm.is_paused()
    handle = lm.submit([4, 5], GREEDY)
    waiter = threading.Thread(target=handle.result)
    waiter.start()
    with server.client() as operator:
        until(lambda: operator.get("/v1/interp/stats").json()["waiting"] == 1)
        assert operator.get("/is_paused").json() == {"is_paused": True}
        assert operator.post("/resume").json() == {"status": "resumed"}
        waiter.join(60)
        assert operator.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
        assert operator.post("/pause", params={"mode": "never"}).status_code == 400
    lm.resume()
    assert not lm.is_paused()


def test_a_late_resume_of_a_server_is_answered_as_paused(lm: LM, server: Server, monkeypatch: pytest.MonkeyPatch):
    """As of a front whose pause overtook it on the way to the engine."""
    lm.pause("keep")
    late, is_late = [True], Stamps.is_late
    monkeypatch.setattr(Stamps, "is_late", lambda stamps, stamp: late[0] or is_late(stamps, stamp))
    with server.client("code") as operator:
        assert operator.post("/resume").json() == {"status": "paused"}
        with pytest.raises(RuntimeError, match="the engine is paused"):
            lm.resume()
        late[0] = False
        assert operator.post("/resume").json() == {"status": "resumed"} and not lm.is_paused()


def test_paths_of_a_server_whose_weights_change_meanwhile(lm: LM, model_folder: Callable[[str], Path]):
    """Its receipts tell, without a version of the weights."""
    norm = {"model.norm.weight": torch.full((lm.hidden_size,), 0.5)}

    def metric(logits: torch.Tensor) -> torch.Tensor:
        if changes:
            lm.update_weights(changes.pop())
        return logits[..., 7] - logits[..., 11]

    changes: list[Any] = [norm]
    options: dict[str, Any] = {"receivers": "a2.h4<q>", "senders": ["a0.h1", "m1"], "metric": metric}
    with pytest.raises(RuntimeError, match=r"were edited since lm\.path_patching began: call it again"):
        lm.path_patching([3, 4, 5, 6], [3, 9, 5, 8], **options)
    assert lm.path_patching([3, 4, 5, 6], [3, 9, 5, 8], **options).values.isfinite().all()
    lm.update_weights(str(model_folder("llama")))


def test_a_server_gets_new_weights(lm: LM, model_folder: Callable[[str], Path], tmp_path: Path):
    new = random_model(CONFIGS["llama"](), seed=7)
    before = set(FOLDER.glob("pymllm-interp-weights-*"))
    new.save_pretrained(tmp_path)
    with LM(tmp_path, device="cpu") as other:
        expected = tokens_of(other)
    old = tokens_of(lm)
    first = lm.update_weights(new.named_parameters())
    assert tokens_of(lm) == expected != old
    assert lm.update_weights(str(model_folder("llama"))) > first
    assert tokens_of(lm) == old
    with pytest.raises(ValueError, match="1 unknown: nope"):
        lm.update_weights({"nope": torch.zeros(2)})
    assert tokens_of(lm) == old
    assert set(FOLDER.glob("pymllm-interp-weights-*")) == before


def test_half_an_update_changes_nothing(lm: LM, server: Server):
    old, weights = tokens_of(lm), {"model.norm.weight": torch.zeros(72)}
    with server.client() as operator, SentWeights(weights) as sent:

        def post(route: str, **body: object) -> tuple[int, str]:
            found = operator.post(f"/{route}", json=body)
            return found.status_code, found.text

        assert post("shutdown_weight_transfer_engine")[0] == 200
        assert post("start_weight_update")[0] == 400
        assert post("init_weight_transfer_engine", init_info={"backend": "nccl"})[0] == 400
        assert post("init_weight_transfer_engine", init_info={"backend": "shared_memory"})[0] == 200
        assert post("update_weights", update_info=sent.info)[0] == 400
        assert post("start_weight_update")[0] == 200
        status, text = post("start_weight_update")
        assert status == 400 and "under way" in text
        assert post("update_weights", update_info=sent.info)[0] == 200
        assert tokens_of(lm) == old
        assert post("shutdown_weight_transfer_engine")[0] == 200
        assert post("finish_weight_update")[0] == 400
        assert tokens_of(lm) == old
        for route in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            bodies = {"init_weight_transfer_engine": {"init_info": {}}, "update_weights": {"update_info": sent.info}}
            assert post(route, **bodies.get(route, {}))[0] == 200
        assert operator.get("/weight_info").json()["weight_version"]
        assert tokens_of(lm) != old


def test_a_sleeping_server_answers_503(lm: LM, server: Server):
    old = tokens_of(lm)
    with server.client() as operator:
        assert operator.post("/sleep", params={"level": 1}).json() == {"status": "sleeping", "level": 1}
        found = operator.post("/v1/completions", json={"prompt": [1, 2]})
        assert found.status_code == 503 and "the engine sleeps" in found.json()["error"]["message"]
        assert (
            operator.get("/is_sleeping").json() == {"is_sleeping": True} and operator.get("/health").status_code == 200
        )
        assert operator.post("/wake_up", params={"tags": ["weights"]}).json() == {
            "status": "sleeping",
            "tags": ["weights"],
        }
        assert operator.post("/wake_up").json() == {"status": "awake", "tags": None}
        assert operator.post("/sleep", params={"level": 3}).status_code == 400
        assert operator.post("/sleep", params={"tags": "disk"}).status_code == 400
    lm.sleep(tags=["kv_cache"], drain=True)
    with pytest.raises(RequestError, match="the engine sleeps"):
        tokens_of(lm)
    assert lm.is_sleeping() and lm.wake() and tokens_of(lm) == old


def test_only_operators_give_orders(server: Server):
    with server.client("declared") as client:
        for route in (
            "pause",
            "resume",
            "sleep",
            "wake_up",
            "start_weight_update",
            "finish_weight_update",
            "shutdown_weight_transfer_engine",
        ):
            assert client.post(f"/{route}").status_code == 403, route
        assert client.post("/update_weights", json={"update_info": {}}).status_code == 403
        assert client.get("/is_paused").status_code == 403


# -- handles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_tensors_arrive_as_they_are(dtype: torch.dtype):
    given = {"a": torch.randn(5, 7).to(dtype), "b.c": torch.randn(9, 3).T.to(dtype), "d": torch.zeros(0, 4).to(dtype)}
    with SentWeights(given) as sent:
        found = dict(received(json.loads(json.dumps(sent.info)), "cpu"))
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name].float(), given[name].float()) for name in given)
        for tensor in found.values():
            tensor.zero_()  # a private copy
        assert torch.equal(dict(received(sent.info, "cpu"))["a"].float(), given["a"].float())
    with pytest.raises(WeightsError, match="its process may have ended"):
        list(received(sent.info, "cpu"))


def test_hostile_handles_are_refused_by_name(tmp_path: Path):
    with SentWeights({"a": torch.ones(4, 4)}) as sent:
        for change, message in (
            ({"names": "a"}, "names: expected a list"),
            ({"names": ["a", "b"]}, "lists of one length"),
            ({"dtype_names": ["object"]}, "object.* is no tensor"),
            ({"shapes": [[-1, 4]]}, "is no tensor"),
            ({"shapes": [[1 << 39, 1 << 39]]}, "are not in the segment"),
            ({"offsets": [1]}, "64 bytes at 1 are not in the segment of 64"),
            ({"offsets": [-8]}, "not in the segment"),
            ({"segment": "../../etc/passwd"}, "expected the name of a segment"),
            ({"segment": None}, "expected the name of a segment"),
            ({"ipc_handles_pickled": "gASV"}, "pickles run code, and are not read"),
            ({"ipc_handles": [{}]}, "a CUDA IPC handle, and the model is on cpu"),
        ):
            with pytest.raises(WeightsError, match=message):
                list(received(sent.info | change, "cpu"))
        os.truncate(FOLDER / sent.info["segment"], 8)
        with pytest.raises(WeightsError, match="not in the segment of 8"):
            list(received(sent.info, "cpu"))
    link = FOLDER / sent.info["segment"]
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(WeightsError, match="may have ended"):
            list(received(sent.info, "cpu"))
    finally:
        link.unlink()


@pytest.mark.parametrize("device", [each for each in DEVICES if each != "cpu"])
def test_tensors_of_a_gpu_go_by_ipc(device: str, served_folder: Path, tmp_path: Path):
    """To an engine process; of views too."""
    from helpers_server import serving

    new = {name: t.to(device) for name, t in load_file(served_folder / "model.safetensors").items()}
    new = {name: (tensor * 1.25).T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in new.items()}
    with serving(served_folder, *OPTIONS, "--option", f"device={device!r}", folder=tmp_path) as found:
        with (
            LM.connect(found.url, api_key=KEYS["code"]) as lm,
            LM(served_folder, device=device, dtype="float32", kv_cache_tokens=1024) as other,
        ):
            lm.update_weights(new)
            other.update_weights(new)
            assert tokens_of(lm) == tokens_of(other)
            with SentWeights(new) as sent:
                sent.info["ipc_handles"][0] = {
                    uuid: h | {"storage_handle": "AAAA"} for uuid, h in sent.info["ipc_handles"][0].items()
                }
                with pytest.raises(Exception, match="cannot be opened"):
                    lm.backend._sent_weights("ipc", sent.info, False)
            assert tokens_of(lm) == tokens_of(other)


def test_a_handle_names_no_memory_of_others():
    good = {
        "ref_counter_handle": base64.b64encode(b"/torch_12_345_0").decode(), "ref_counter_offset": 7, "storage_offset_bytes": 512,
    }  # fmt: skip
    _check_counter("w", good)
    for bad in (
        {"ref_counter_offset": 10_000}, {"ref_counter_offset": -1}, {"ref_counter_offset": 1 << 60}, {"ref_counter_offset": True},
        {"storage_offset_bytes": -8}, {"ref_counter_handle": base64.b64encode(b"/pymllm-ring").decode()},
        {"ref_counter_handle": base64.b64encode(b"/torch_1/../x").decode()}, {"ref_counter_handle": 5}, {"ref_counter_handle": "%"},
    ):  # fmt: skip
        with pytest.raises(WeightsError, match="not of torch's making"):
            _check_counter("w", good | bad)


def test_a_handle_that_is_not_opened_is_given_back(monkeypatch: pytest.MonkeyPatch):
    """Torch keeps the sender's memory until a handle's opener drops it. Opened ones are torch's own to end."""
    from types import SimpleNamespace

    from torch.multiprocessing import reductions

    ended, opened = list[int](), list[int]()

    def rebuild(*args: Any) -> torch.Tensor:
        if args[-3] == 1:
            raise RuntimeError("invalid resource handle")
        opened.append(args[-3])
        return torch.zeros(0)

    def handle(i: int, **changed: Any) -> dict[str, Any]:
        fields = dict.fromkeys(HANDLE, 0) | {"storage_size_bytes": 64, "offset": 0, "stride": [1]}
        counter = {"ref_counter_handle": base64.b64encode(b"/torch_1_2_3").decode(), "ref_counter_offset": i}
        return {"gpu": fields | counter | changed}

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu"))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", lambda name, offset: ended.append(offset))
    info: dict[str, Any] = {"names": list("abcd"), "dtype_names": ["float32"] * 4, "shapes": [[4]] * 4}
    info["ipc_handles"] = [handle(i) for i in range(4)]
    with pytest.raises(WeightsError, match="b: its CUDA IPC handle cannot be opened"):
        list(received(info, "cuda:0"))
    assert opened == [0] and ended == [1, 2, 3]
    for change in (
        {"dtype_names": ["complex64"] * 4}, {"names": ["a"]}, {"ipc_handles": [{}, *info["ipc_handles"][1:]]},
        {"ipc_handles": [handle(0, ref_counter_offset=-1), *info["ipc_handles"][1:]]},
    ):  # fmt: skip
        ended.clear()
        with pytest.raises(WeightsError):
            list(received(info | change, "cuda:0"))
        assert ended[-3:] == [1, 2, 3]
    ended.clear()
    first = received(info, "cuda:0")
    next(first)
    first.close()
    assert ended == [1, 2, 3]


@pytest.mark.gpu
def test_memory_of_a_handle_that_fails_to_open_is_free_with_its_tensor():
    before = torch.cuda.memory_allocated()
    with SentWeights({"w": torch.zeros(64 << 20, device="cuda")}) as sent:
        (handles,) = sent.info["ipc_handles"]
        info = sent.info | {"ipc_handles": [{uuid: one | {"storage_handle": "AAAA"} for uuid, one in handles.items()}]}
        with pytest.raises(WeightsError, match="cannot be opened"):
            list(received(info, "cuda"))
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() - before < 1 << 20

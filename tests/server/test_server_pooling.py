"""Embeddings over HTTP: OpenAI's and vLLM's fields, with hooks, and the same values as a local `LM` (V14)."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import tiny_tokenizer
from helpers_app import App, app_over
from helpers_pooling import classifier
from helpers_server import CHAT_TEMPLATE
from safetensors.numpy import load
from safetensors.torch import save_file

from pymllm_interp import LM, Capture, Steer

IDS = [[5, 6, 7], list(range(40)), [9]]


def write_modules(folder: Path) -> None:
    """Mean, a dense layer and a length, with prompts, as sentence-transformers writes them."""
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(types.items())
    ]
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
    torch.manual_seed(0)
    save_file(
        {"linear.weight": torch.randn(16, 72) / 8, "linear.bias": torch.randn(16)}, folder / "2_Dense/model.safetensors"
    )
    contents = {
        "modules": entries, "1_Pooling/config": {"pooling_mode": "mean"}, "2_Dense/config": {"in_features": 72},
        "config_sentence_transformers": {"prompts": {"query": "w1 w2 "}},
        "sentence_bert_config": {"max_seq_length": 50},
    }  # fmt: skip
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folder(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pooled")
    shutil.copytree(served_folder, folder, dirs_exist_ok=True)
    write_modules(folder)
    return folder


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    with app_over(folder, max_prompts=8, inline_bytes=4000) as app:
        yield app


@pytest.fixture(scope="module")
def lm(folder: Path) -> Iterator[LM]:
    lm = LM(folder, dtype="float32", kv_cache_tokens=2048)
    yield lm
    lm.shutdown()


def post(app: App, path: str, key: str = "ada", **body: Any) -> httpx.Response:
    return app.runner.run(app.post(path, json.dumps(body).encode(), key))


def values(answer: httpx.Response, name: str = "embedding") -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([entry[name] for entry in answer.json()["data"]], dtype=np.float32)


def close(found: np.ndarray, outs: list[Any]) -> None:
    np.testing.assert_allclose(found, np.stack([out.data.numpy() for out in outs]), atol=1e-6)


def test_v1_embeddings_are_those_of_a_local_lm(app: App, lm: LM) -> None:
    answer = post(app, "/v1/embeddings", input=IDS, model="served")
    close(values(answer), lm.encode(IDS))
    found = answer.json()
    assert found["object"] == "list" and found["model"] == "served" and found["id"].startswith("embd-")
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2]
    assert {entry["object"] for entry in found["data"]} == {"embedding"}
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == 44
    close(values(post(app, "/v1/embeddings", input=["w5 w6 w7", "w9"])), lm.encode([IDS[0], IDS[2]]))
    close(values(post(app, "/v1/embeddings", input="w5 w6 w7", prompt_name="query")), lm.encode([[1, 2, 5, 6, 7]]))
    close(values(post(app, "/v1/embeddings", input="w5 w6 w7", prompt="w3 ")), lm.encode([[3, 5, 6, 7]]))
    close(values(post(app, "/v1/embeddings", input=[5, 6, 7], dimensions=4)), lm.encode([IDS[0]], dimensions=4))
    close(values(post(app, "/v1/embeddings", input=IDS, pooling="max")), lm.encode(IDS, pooling="max"))
    close(values(post(app, "/v1/embeddings", input=IDS, use_activation=False)), lm.encode(IDS, normalize=False))
    long = "w4 " * 200
    close(values(post(app, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)), lm.encode([[4] * 50]))
    messages = [{"role": "user", "content": "w5 w6"}]
    close(values(post(app, "/v1/embeddings", messages=messages)), lm.encode([[5, 6]]))
    close(values(post(app, "/v1/embeddings", messages=messages)), lm.encode(messages))


def test_base64_is_of_the_same_floats(app: App) -> None:
    floats = values(post(app, "/v1/embeddings", input=IDS))
    answer = post(app, "/v1/embeddings", input=IDS, encoding_format="base64", user="me", embed_dtype="float32")
    found = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in answer.json()["data"]]
    np.testing.assert_array_equal(np.stack(found), floats)


def test_pooling_has_rows_of_tokens_and_of_steps(app: App, lm: LM) -> None:
    answer = post(app, "/pooling", input=IDS)
    close(values(answer, "data"), lm.encode(IDS))
    assert answer.json()["data"][0]["object"] == "pooling" and answer.json()["id"].startswith("pool-")
    (rows,) = values(post(app, "/pooling", input=[5, 6, 7], task="token_embed"), "data")
    np.testing.assert_allclose(rows, lm.encode([IDS[0]], pooling="all")[0].data, atol=1e-6)
    step = {"pooling": "step", "step_tag_id": 6, "returned_token_ids": [3, 4]}
    (rows,) = values(post(app, "/pooling", input=[5, 6, 7, 6], **step), "data")
    np.testing.assert_allclose(rows, lm.encode([[5, 6, 7, 6]], **step)[0].data, atol=1e-6)


def test_hooks_act_and_their_results_stand_in_each_entry(app: App, lm: LM) -> None:
    vector = torch.linspace(-1, 1, 72)
    op = {"op": "steer", "site": "resid_post.1", "vector": vector.tolist(), "scale": 2.0}
    monitor = {"site": "resid_post.0", "probe": vector.tolist(), "threshold": 1e6, "name": "m"}
    body = {"input": IDS, "interventions": [op], "monitors": [monitor], "capture": ["resid_post.2"]}
    answer = post(app, "/v1/embeddings", **body)
    close(values(answer), lm.encode(IDS, interventions=[Steer("resid_post.1", vector, scale=2.0)]))
    for ids, entry in zip(IDS, answer.json()["data"], strict=True):
        assert len(entry["pymllm"]["monitors"]["m"]["scores"]) == len(ids) and entry["receipt"]["interventions"]
        kept = entry["activations"]
        if "data" in kept:
            rows = load(base64.b64decode(kept["data"]))["resid_post.2"]
            assert rows.shape == (len(ids), 72)
    assert "url" in answer.json()["data"][1]["activations"], "40 rows are more than 4,000 bytes"
    assert not any("receipt" in entry for entry in post(app, "/v1/embeddings", input=IDS).json()["data"])
    assert len(list(app.state.store._folder.iterdir())) == app.state.store.num_files, (
        "the files of other inputs are gone"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: a text, token ids, or a list"),
        ({"input": []}, "input is an empty list"),
        ({"input": ""}, "the input is empty"),
        ({"input": [[1], []]}, "input 1 is empty"),
        ({"input": [[1], [97]]}, "token id 97"),
        ({"input": "w1", "messages": [{"role": "user", "content": "w1"}]}, "input: a text"),
        ({"input": "w1", "dimensions": 17}, "dimensions=17: expected a whole number from 1 to 16"),
        ({"input": "w1", "dimensions": 0}, "dimensions=0"),
        ({"input": "w1", "pooling": "median"}, "pooling='median'"),
        ({"input": "w1", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "w1", "embed_dtype": "float16"}, "embed_dtype: values are float32"),
        ({"input": "w1", "prompt_name": "questions"}, "'questions': the model's prompts are 'query'"),
        ({"input": "w1 " * 60}, "60 tokens, .* 50 at most"),
        ({"input": list(range(60))}, "60 tokens, .* 50 at most"),
        ({"input": ["w1"] * 9}, "9 inputs; at most 8"),
        ({"input": "w1", "temperature": 1}, "unknown field"),
        ({"input": "w1", "model": "other"}, "there is no model 'other'"),
        ({"input": "w1", "capture": ["resid_post.9"]}, "resid_post.9"),
        ({"input": ["w1"] * 100_000}, "100000 inputs; at most 8"),
        ({"input": "w1", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: they are of messages"),
        ({"input": "w1", "normalize": True, "use_activation": False}, "one field by two names"),
        ({"input": [1, 2], "prompt_name": "query"}, "prompt_name: it stands before texts"),
        ({"input": "w1", "prompt": "w1 " * 1_000_000, "truncate_prompt_tokens": -1}, "prompt has 3000000 characters"),
        ({"input": "w1", "interventions": [{"op": "no"}]}, "op"),
    ],
)
def test_wrong_bodies_are_refused_by_name(body: dict[str, Any], message: str, app: App) -> None:
    answer = post(app, "/v1/embeddings", **body)
    assert answer.status_code in (400, 404), answer.text
    assert __import__("re").search(message, answer.json()["error"]["message"]), answer.text
    assert post(app, "/v1/embeddings", input=[1]).status_code == 200
    assert not app.state.num_running


def test_a_connected_lm_encodes_as_a_local_one(folder: Path, lm: LM) -> None:
    """Dense layers come with the tokenizer's files."""
    from helpers_served import served

    with served(folder, keys=None) as server, LM.connect(server.url) as remote:
        vector = torch.linspace(-1, 1, 72)
        for how in ({}, {"pooling": "last"}, {"prompt_name": "query"}, {"dimensions": 5, "normalize": False}):
            texts = ["w5 w6", "w7"]
            for here, there in zip(lm.encode(texts, **how), remote.encode(texts, **how), strict=True):
                torch.testing.assert_close(here.data, there.data, atol=1e-6, rtol=1e-5)
                assert here.prompt == there.prompt and here.prompt_token_ids == there.prompt_token_ids
        ops = [Steer("resid_post.1", vector)]
        (out,) = remote.encode([[3, 4]], interventions=ops, capture=[Capture("resid_post.2", positions=-1)])
        torch.testing.assert_close(out.data, lm.encode([[3, 4]], interventions=ops)[0].data, atol=1e-6, rtol=1e-5)
        assert out.activations["resid_post.2"].shape == (1, 72) and out.receipt.interventions


# -- scores and labels -------------------------------------------------------------------------


def scores(answer: httpx.Response, field: str = "data", name: str = "score") -> list[float]:
    assert answer.status_code == 200, answer.text
    return [entry[name] for entry in answer.json()[field]]


def test_pairs_have_the_cosine_of_their_embeddings(app: App, lm: LM) -> None:
    """In all spellings of vLLM's, and for the three rerank routes."""
    documents = ["w5 w6 w7", "w9", "w3 w4"]
    expected = lm.score("w5 w6", documents)
    for one, two in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        for path in ("/score", "/v1/score"):
            answer = post(app, path, **{one: "w5 w6", two: documents})
            np.testing.assert_allclose(scores(answer), expected, atol=1e-6)
    np.testing.assert_allclose(scores(post(app, "/score", text_1=documents, text_2=documents)), [1.0] * 3, atol=1e-6)
    order = sorted(range(3), key=lambda i: -expected[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(app, path, query="w5 w6", documents=[documents[0], {"text": documents[1]}, documents[2]], top_n=2)
        found = answer.json()["results"]
        assert [entry["index"] for entry in found] == order[:2] and answer.json()["id"].startswith("rerank-")
        assert [entry["document"]["text"] for entry in found] == [documents[i] for i in order[:2]]
        np.testing.assert_allclose(
            [entry["relevance_score"] for entry in found], [expected[i] for i in order[:2]], atol=1e-6
        )
    answer = post(app, "/rerank", query="w5 w6", documents=documents, return_documents=False)
    assert len(answer.json()["results"]) == 3 and "document" not in answer.json()["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"input": "w1"}, "no classification head"),
        ("/score", {"text_1": "w1"}, "expected text_1 and text_2"),
        ("/score", {"text_1": "w1", "documents": "w2"}, "expected text_1 and text_2"),
        ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1"] * 3}, "2 and 3 texts"),
        ("/rerank", {"query": "w1", "documents": []}, "documents"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "max_tokens_per_doc": 3}, "max_tokens_per_doc: use truncate"),
        ("/rerank", {"query": "w1", "documents": [f"w{i}" for i in range(2, 11)]}, "at most 8"),
        ("/rerank", {"query": "w1", "documents": ["w2"] * 100_000}, "100000 inputs; at most 8"),
        ("/score", {"text_1": "w1", "text_2": ["w1"] * 100_000}, "100000 inputs; at most 8"),
    ],
)
def test_wrong_pairs_are_refused_by_name(path: str, body: dict[str, Any], message: str, app: App) -> None:
    answer = post(app, path, **body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_a_long_text_is_cut_before_it_is_tokenized(app: App, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer reads the whole of what it is given, and keeps it, before it cuts."""
    tokenizer, read = app.state.tokenizer, list[int]()
    own = type(tokenizer).__call__

    def counted(self: Any, *texts: Any, **how: Any) -> Any:
        read.append(max(len(text) for text in texts))
        return own(self, *texts, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    long = "w7 w8 w9 " * 100_000
    expected = lm.encode([([7, 8, 9] * 17)[:50]])
    close(values(post(app, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)), expected)
    tokenizer.truncation_side = "left"
    try:
        close(
            values(post(app, "/v1/embeddings", input=long, truncate_prompt_tokens=50)),
            lm.encode([([7, 8, 9] * 17)[-50:]]),
        )
    finally:
        tokenizer.truncation_side = "right"
    assert 0 < max(read) < 2000


def test_an_answer_of_too_many_numbers_is_refused_before_the_engine_works(app: App, monkeypatch: Any) -> None:
    monkeypatch.setattr("pymllm_interp.server.pooling.work.MAX_VALUES", 16 * 20)
    assert post(app, "/pooling", input=list(range(20)), task="token_embed").status_code == 200
    answer = post(app, "/pooling", input=list(range(21)), task="token_embed")
    assert answer.status_code == 400 and "the answer has 336 numbers; at most 320" in answer.json()["error"]["message"]
    step = {"pooling": "step", "step_tag_id": 6, "returned_token_ids": list(range(97))}
    assert post(app, "/pooling", input=[6] * 3, **step).status_code == 200
    assert post(app, "/pooling", input=[6] * 4, **step).status_code == 400


def test_pairs_of_embeddings_have_the_results_of_their_second_texts(app: App) -> None:
    """Equal texts, too."""
    monitor = {"site": "resid_post.0", "probe": [1.0] * 72, "threshold": 1e6, "name": "m"}
    texts = ["w5", "w6 w7 w8", "w5"]
    answer = post(app, "/score", text_1="w5", text_2=texts, monitors=[monitor], capture=["resid_post.1"])
    assert answer.status_code == 200, answer.text
    for text, entry in zip(texts, answer.json()["data"], strict=True):
        assert len(entry["pymllm"]["monitors"]["m"]["scores"]) == len(text.split()) and "activations" in entry
    ranked = post(app, "/rerank", query="w5", documents=texts, monitors=[monitor]).json()["results"]
    for entry in ranked:
        assert len(entry["pymllm"]["monitors"]["m"]["scores"]) == len(texts[entry["index"]].split())
    assert len(list(app.state.store._folder.iterdir())) == app.state.store.num_files


def test_each_route_needs_a_key(app: App) -> None:
    for path in (
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    ):
        assert post(app, path, key="nobody", input="w1").status_code == 401, path


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    classifier("llama", 1).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_head_classifies_and_scores_as_a_local_lm_does(reward_folder: Path) -> None:
    lm = LM(reward_folder, dtype="float32", kv_cache_tokens=2048)
    with app_over(reward_folder) as app:
        answer = post(app, "/classify", input=IDS)
        outs = lm.classify(IDS)
        for entry, out in zip(answer.json()["data"], outs, strict=True):
            np.testing.assert_allclose(entry["probs"], out.probs, atol=1e-6)
            assert entry["label"] == out.label and entry["num_classes"] == 1
        logits = post(app, "/classify", input=IDS, use_activation=False)
        np.testing.assert_allclose([p for (p,) in scores(logits, name="probs")], lm.score(IDS), atol=1e-5)
        messages = [{"role": "user", "content": "w5 w6"}]
        assert scores(post(app, "/classify", messages=messages), name="probs")[0] == pytest.approx(
            scores(post(app, "/classify", input=[5, 6]), name="probs")[0]
        )
        pairs = post(app, "/score", text_1="w3 w4", text_2=["w5", "w6 w7"])
        np.testing.assert_allclose(scores(pairs), lm.score("w3 w4", ["w5", "w6 w7"]), atol=1e-6)
        plain = post(app, "/score", text_1="w3 w4", text_2=["w5", "w6 w7"], use_activation=False)
        np.testing.assert_allclose(scores(plain), lm.score("w3 w4", ["w5", "w6 w7"], activation=False), atol=1e-5)
        op = {"op": "scale", "site": "logits", "factor": 2.0}
        hooked = post(app, "/score", text_1="w3 w4", text_2="w5", use_activation=False, interventions=[op])
        assert (
            scores(hooked)[0] == pytest.approx(2 * scores(plain)[0], rel=1e-4) and "receipt" in hooked.json()["data"][0]
        )
        refused = post(app, "/v1/completions", prompt="w1", max_tokens=2)
        assert refused.status_code == 400 and "generates nothing" in refused.json()["error"]["message"]
    lm.shutdown()


def test_a_connected_lm_scores_as_a_local_one(reward_folder: Path) -> None:
    from helpers_served import served

    local = LM(reward_folder, dtype="float32", kv_cache_tokens=2048)
    with served(reward_folder, keys=None) as server, LM.connect(server.url) as remote:
        assert remote.score(IDS) == pytest.approx(local.score(IDS), rel=1e-4)
        assert remote.score("w3", ["w5", "w6"]) == pytest.approx(local.score("w3", ["w5", "w6"]), rel=1e-4)
        assert [out.label for out in remote.classify(IDS)] == [out.label for out in local.classify(IDS)]
        with pytest.raises(ValueError, match="generates nothing"):
            remote.generate([[1]])
        with remote.trace([5, 6]):
            head = remote.lm_head.output.save()
        assert float(head[0, -1]) == pytest.approx(local.score([[5, 6]])[0], rel=1e-4)
    local.shutdown()

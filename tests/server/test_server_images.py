"""Images over HTTP: OpenAI's parts of messages, `LM.connect`, and addresses that a server fetches."""

from __future__ import annotations

import base64
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_served import served
from helpers_server import KEYS, Server
from helpers_vision import encoded, generated, picture, placed, reference_processor
from openai import OpenAI
from safetensors.torch import save
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams, Scale, Steer
from pymllm_interp.interventions import Knockout
from pymllm_interp.server.http import media
from pymllm_interp.server.http.media import Media, is_public
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.specs import to_json

FAMILY = "qwen2_5_vl"
GREEDY = SamplingParams(temperature=0, max_tokens=5)
FIRST, SECOND = picture(40, 28), picture(20, 44, seed=3)


@pytest.fixture(scope="module")
def server(vision_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, allowed = tmp_path_factory.mktemp("keys"), tmp_path_factory.mktemp("media")
    (allowed / "a.png").write_bytes(encoded(FIRST))
    (allowed.parent / "secret.png").write_bytes(encoded(FIRST))
    (allowed / "link.png").symlink_to(allowed.parent / "secret.png")
    options = [
        "--allowed-media-domains",
        "images.test",
        "--allow-code-from",
        "code",
        "--allowed-local-media-path",
        str(allowed),
        "--limit-mm-per-prompt",
    ]
    with served(
        vision_folder(FAMILY), *options, '{"image": 3}', "--image-fetch-seconds", "0.7", folder=folder
    ) as found:
        found.media = allowed  # pyright: ignore[reportAttributeAccessIssue]
        yield found


def url_of(image: Any, kind: str = "PNG") -> str:
    body = image if isinstance(image, bytes) else encoded(image, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(body).decode()}"


def asked(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def wanted(folder: Path, model: PreTrainedModel, *parts: Any) -> tuple[list[int], list[int]]:
    """transformers' token ids of a conversation, and of its answer."""
    processor: Any = reference_processor(FAMILY, folder)
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    images = [part for part in parts if not isinstance(part, str)]
    inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt")
    return inputs["input_ids"][0].tolist(), list(generated(model, dict(inputs), 5))


def chat(server: Server, messages: Any, key: str = "plain", **fields: Any) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "return_token_ids": True, **fields}
    with server.client(key) as client:
        return client.post("/v1/chat/completions", json=body)


def test_openai_clients_send_images(
    server: Server, vision_folder: Callable[[str], Path], vision_oracle: Callable[[str], PreTrainedModel]
) -> None:
    folder, model = vision_folder(FAMILY), vision_oracle(FAMILY)
    for parts in ((FIRST, "what?"), ("these:", FIRST, SECOND, "both?"), ("text alone",)):
        prompt, answer = wanted(folder, model, *parts)
        found = chat(server, asked(*parts)).json()
        choice = found["choices"][0]
        assert choice["token_ids"] == answer and found["usage"]["prompt_tokens"] == len(prompt)
        assert found["prompt_token_ids"] == prompt
    api = OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["plain"], max_retries=0)
    name = api.models.list().data[0].id
    prompt, answer = wanted(folder, model, FIRST, "what?")
    messages: Any = asked(FIRST, "what?")
    pieces = list(api.chat.completions.create(model=name, messages=messages, max_tokens=5, temperature=0, stream=True))
    whole = api.chat.completions.create(model=name, messages=messages, max_tokens=5, temperature=0)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    parts: Any = [
        {"type": "input_image", "image_url": url_of(FIRST), "detail": "auto"},
        {"type": "input_text", "text": "what?"},
    ]
    response = api.responses.create(
        model=name, input=[{"role": "user", "content": parts}], max_output_tokens=5, temperature=0
    )
    assert response.output_text == text and response.usage is not None and response.usage.input_tokens == len(prompt)
    more = api.responses.create(
        model=name, input="and now?", previous_response_id=response.id, max_output_tokens=5, temperature=0
    )
    assert more.usage is not None and more.usage.input_tokens > len(prompt), "the image is a part of what is continued"


def test_a_connected_lm_sends_pictures_and_outputs_of_processors(
    server: Server, vision_folder: Callable[[str], Path], vision_oracle: Callable[[str], PreTrainedModel]
) -> None:
    folder, model = vision_folder(FAMILY), vision_oracle(FAMILY)
    text, images = placed(FAMILY, "a ", FIRST, " b ", SECOND)
    inputs = reference_processor(FAMILY, folder)(text=[text], images=[images], return_tensors="pt")
    ids, tokens = inputs["input_ids"][0].tolist(), list(generated(model, dict(inputs), 5))
    states = model(**inputs, output_hidden_states=True).hidden_states[2][0].detach()
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        media_prompt = {"prompt": text, "multi_modal_data": {"image": [FIRST, encoded(SECOND)]}}
        outs = lm.generate([media_prompt, dict(inputs), "text", media_prompt], GREEDY)
        for out in (outs[0], outs[1], outs[3]):
            assert (out.prompt_token_ids, out.token_ids) == (ids, tokens)
        assert outs[0].prompt == text
        (read,) = lm.forward([media_prompt], capture=["resid_post.1"])
        torch.testing.assert_close(read.activations["resid_post.1"], states, rtol=1e-4, atol=2e-4)
        with lm.trace(text, images=[FIRST, SECOND]):
            hidden = lm.model.language_model.layers[1].output.save()
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        torch.testing.assert_close(hidden.reshape(states.shape), states, rtol=1e-4, atol=2e-4)
        (chatted,) = lm.chat([{"role": "user", "content": [{"type": "image", "image": FIRST}]}], GREEDY)
        assert chatted.token_ids == wanted(folder, model, FIRST)[1]
        for bad, message in (
            ([FIRST] * 4, "has 4 images; at most 3"), ([FIRST], "1 images, and 2 places"), (["/nowhere"] * 2, "no readable file"),
            ([encoded(FIRST)[:-40]] * 2, "broken PNG"),
        ):  # fmt: skip
            with pytest.raises(PromptError, match=message):
                lm.generate({**media_prompt, "multi_modal_data": {"image": bad}}, GREEDY)
        with pytest.raises(PromptError, match="has images, and truncate_prompt_tokens"):
            lm.generate(media_prompt, SamplingParams(max_tokens=1, truncate_prompt_tokens=2))
    with LM.connect(server.url, api_key=KEYS["plain"]) as lm:
        assert lm.generate(media_prompt, GREEDY)[0].token_ids == tokens
        with pytest.raises(PermissionError):
            lm.generate(dict(inputs), GREEDY)


def test_words_for_image_positions_over_http_and_connect(server: Server, vision_folder: Callable[[str], Path]) -> None:
    """Captures, ops and knockouts at "image" are those of a local LM; an image that a prompt lacks is refused by name."""
    vector, said = torch.linspace(-2, 2, 32), [{"role": "user", "content": [{"type": "image", "image": FIRST}]}]
    hooks: dict[str, Any] = {
        "interventions": [
            Steer("resid_post.0", vector, positions="image[0]"),
            Knockout([1], from_="text", to=["image"]),
        ],
        "capture": [Capture("resid_post.1", ["image", -1])],
    }
    pictures, two_sizes = (
        [{"prompt": placed(FAMILY, "a ", image, "b")[0], "multi_modal_data": {"image": image}} for image in images]
        for images in ((FIRST, picture(40, 28, seed=9)), (FIRST, picture(90, 28)))
    )
    asked_sweep: dict[str, Any] = {"metric": (7, 11), "positions": ["image[0]", -1], "layers": [1], "progress": False}
    with LM(vision_folder(FAMILY), device="cpu", dtype="float32", kv_cache_tokens=2048) as lm:
        (local,) = lm.chat(said, GREEDY, **hooks)
        sweep = lm.patch_sweep(*pictures, **asked_sweep)
        (plain,) = lm.chat(said, GREEDY)
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        (far,) = lm.chat(said, GREEDY, **hooks)
        far_sweep = lm.patch_sweep(*pictures, **asked_sweep)
        with pytest.raises(PromptError, match="equally many"):
            lm.patch_sweep(*two_sizes, **asked_sweep)
        with pytest.raises(PromptError, match=r"the prompt has 1 images, image\[0\] to image\[0\]"):
            lm.chat(said, GREEDY, capture=[Capture("embed", "image[3]")])
        with pytest.raises(PromptError, match="has no images"):
            lm.generate(["text"], GREEDY, capture=[Capture("embed", "image")])
        with pytest.raises(ValueError, match="positions"):
            lm.chat(said, GREEDY, capture=[Capture("embed", "image[x]")])
    assert far.token_ids == local.token_ids != plain.token_ids
    assert far_sweep.positions == sweep.positions and len(sweep.positions) > 4 and far_sweep.tokens == sweep.tokens
    torch.testing.assert_close(far_sweep.values, sweep.values, rtol=1e-4, atol=1e-4)
    assert torch.equal(far.activations["resid_post.1"], local.activations["resid_post.1"])
    assert torch.equal(far.activations.positions["resid_post.1"], local.activations.positions["resid_post.1"])
    fields = {name: [to_json(spec) for spec in specs] for name, specs in hooks.items()}
    choice = chat(server, asked(FIRST), "declared", **fields).json()["choices"][0]
    assert choice["token_ids"] == local.token_ids and choice["receipt"]["spec"] == local.receipt.spec
    for words, message in (
        ("image[3]", "the prompt has 1 images"),
        ("pixels", "expected 'all'"),
        (["image", "image"], "twice"),
    ):
        answer = chat(server, asked(FIRST), "declared", capture=[{"site": "embed", "positions": words}])
        assert answer.status_code == 400 and message in answer.text, answer.text
    with server.client("declared") as client:
        text = client.get("/openapi.json").text
        assert r"^(text|image(?:\\[(-?\\d{1,6})\\])?)$" in text


def test_hooks_in_the_tower_over_http_and_connect(server: Server, vision_folder: Callable[[str], Path]) -> None:
    """Sites of the vision tower are those of a local LM; one that the tower lacks is refused by name."""
    said = [{"role": "user", "content": [{"type": "image", "image": FIRST}]}]
    hooks: dict[str, Any] = {
        "interventions": [Steer("vision.resid_post.0", torch.linspace(-9, 9, 32), positions="image[0]")],
        "capture": [Capture("vision.attn_out.*"), Capture("vision.out", positions=[0, -1])],
    }
    with LM(vision_folder(FAMILY), device="cpu", dtype="float32", kv_cache_tokens=2048) as lm:
        (local,), sites = lm.chat(said, GREEDY, **hooks), lm.sites
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        (far,) = lm.chat(said, GREEDY, **hooks)
        assert lm.sites == sites and "vision.resid_post.*" in sites
        with pytest.raises(PromptError, match="there is no layer 3"):
            lm.chat(said, GREEDY, capture=["vision.resid_post.3"])
        with pytest.raises(PromptError, match="the prompt has no image"):
            lm.generate(["text"], GREEDY, capture=["vision.out"])
    assert far.token_ids == local.token_ids and far.receipt.interventions == local.receipt.interventions
    assert [*far.activations] == [*local.activations] and len([*far.activations]) == 4
    for site in local.activations:
        assert torch.equal(far.activations[site], local.activations[site])
        assert torch.equal(far.activations.token_ids[site], local.activations.token_ids[site])
        assert lm.backend.facts.to_json()["sites"]["vision.z"] == {"shape": [4, 8], "layers": True}
    fields = {name: [to_json(spec) for spec in specs] for name, specs in hooks.items()}
    choice = chat(server, asked(FIRST), "declared", **fields).json()["choices"][0]
    assert choice["token_ids"] == local.token_ids and choice["receipt"]["spec"] == local.receipt.spec
    for site, message in (("vision.mlp_out.9", "there is no layer 9"), ("vision.pattern.0", "unknown site")):
        answer = chat(server, asked(FIRST), "declared", capture=[site])
        assert answer.status_code == 400 and message in answer.text, answer.text
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        with pytest.raises(PermissionError, match=r"needs a key with the right 'code'(.|\n)*is no site"):
            with lm.trace(placed(FAMILY, "a ", FIRST, "b")[0], images=[FIRST]):
                lm.model.visual.blocks[0].output.save()
    picture_of = {"prompt": placed(FAMILY, "a ", FIRST, "b")[0], "multi_modal_data": {"image": FIRST}}
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        with lm.trace(picture_of["prompt"], images=[FIRST]):
            lm.model.visual.blocks[0].output *= 2
            state = lm.model.visual.blocks[1].output.save()
        twice = {"interventions": [Scale("vision.resid_post.0", 2.0)], "capture": ["vision.resid_post.1"]}
        (out,) = lm.generate([picture_of], GREEDY, **twice)
    torch.testing.assert_close(state, out.activations["vision.resid_post.1"], rtol=1e-4, atol=1e-4)


BAD = {
    "truncated": (encoded(FIRST)[:-30], "is a broken PNG file"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG"),
    "text": (b"hello", "is no image file"),
    "http": ("http://other.test/a.png", "images of 'other.test' are not fetched here"),
    "ip": ("http://127.0.0.1/a.png", "images of '127.0.0.1' are not fetched here"),
    "user": ("http://me@images.test/a.png", "is no address of the form"),
    "ftp": ("ftp://images.test/a.png", "expected a data URL, or an address"),
    "path": ("/etc/passwd", "expected a data URL, or an address"),
    "secret": ("file:///etc/passwd", "no file of the folder"),
    "plain": ("data:image/png,abc", "expected a data URL"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_400s_and_the_server_lives(server: Server, case: str) -> None:
    source, message = BAD[case]
    part = {"type": "image_url", "image_url": {"url": source if isinstance(source, str) else url_of(source)}}
    for answer in (chat(server, [{"role": "user", "content": [part]}]),):
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]
    assert chat(server, asked(FIRST)).status_code == 200


def test_other_fields_and_routes_refuse_images_by_name(server: Server) -> None:
    low = [{"type": "image_url", "image_url": {"url": url_of(FIRST), "detail": "low"}}]
    for answer, message in (
        (chat(server, [{"role": "user", "content": low}]), "detail='low'"),
        (chat(server, asked(*[FIRST] * 4)), "has 4 images; at most 3"),
        (chat(server, asked(FIRST), truncate_prompt_tokens=2), "has images, and truncate_prompt_tokens"),
        (chat(server, asked("see <|image_pad|>")), "1 image tokens"),
        (chat(server, asked("see <|image_pad|>", FIRST)), "1 images, and 2 places"),
        (chat(server, [{"role": "user", "content": [{"type": "image_url"}]}]), "has 0 images: one is expected"),
        (chat(server, [{"role": "user", "content": [{"type": "image", "image": 5}]}]), "expected a URL"),
    ):  # fmt: skip
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    with server.client("declared") as client:
        answer = client.post("/tokenize", json={"messages": asked(FIRST)})
        assert answer.status_code == 400 and "this route reads text" in answer.text
        fields: dict[str, Any] = {"prompts": [[1, 264]], "params": [{"max_tokens": 1}]}
        for images, message in (
            ([{"bodies": ["%"]}], "not base64"), ([{"bodies": [5]}], "images"), ([None, None], "one for each of the 1 prompts"),
            ([{"bodies": [base64.b64encode(b"hello there").decode()]}], "no image file"),
            ([{"bodies": [base64.b64encode(save({"pixel_values": torch.zeros(3)})).decode()]}], "no outputs of this model"),
            ([{"bodies": []}], "1 image tokens"),
        ):  # fmt: skip
            text = client.post("/v1/interp/generate", json={**fields, "images": images}).text
            assert message in text
    assert chat(server, asked(FIRST)).status_code == 200


def test_files_of_the_allowed_folder_are_read(server: Server) -> None:
    allowed: Path = server.media  # pyright: ignore[reportAttributeAccessIssue]

    def of(url: str) -> httpx.Response:
        return chat(server, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])

    assert of(f"file://{allowed}/a.png").json()["choices"] and of(f"file://{allowed}/a.png").status_code == 200
    for path in (
        f"{allowed}/../secret.png",
        f"{allowed.parent}/secret.png",
        f"{allowed}/link.png",
        f"{allowed}",
        "/dev/zero",
    ):
        answer = of(f"file://{path}")
        assert answer.status_code == 400 and "no file of the folder" in answer.text


def test_random_bytes_end_no_server(server: Server) -> None:
    chance, file = random.Random(1), encoded(FIRST, "JPEG")
    for _ in range(25):
        body = bytearray(file)
        for _ in range(chance.choice((1, 5, 60))):
            body[chance.randrange(len(body))] = chance.randrange(256)
        answer = chat(server, asked(bytes(body[: chance.randrange(1, len(body) + 1)])))
        assert answer.status_code in (200, 400), answer.text
    assert chat(server, asked(FIRST)).status_code == 200


# -- addresses ---------------------------------------------------------------------------------


class Host(BaseHTTPRequestHandler):
    """Answers by the path: an image, redirects, silence, endless bytes."""

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if name == "/slow":
            time.sleep(2)
        if name == "/heads":
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
                for _ in range(60):
                    self.wfile.write(b"a")
                    time.sleep(0.05)
                self.wfile.write(b"\r\n\r\n" + encoded(FIRST))
            return
        if name.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(404 if name == "/none" else 200)
        self.end_headers()
        try:
            for _ in range(10_000 if name in ("/endless", "/drip") else 0):
                self.wfile.write(b"\x89PNG\r\n\x1a\n" * (512 if name == "/endless" else 1))
                time.sleep(0.05 if name == "/drip" else 0)
        except OSError:
            return
        self.wfile.write(b"<svg/>" if name == "/svg" else encoded(FIRST))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[str]]]:
    """A host images.test on this machine, which counts as public here, and the names that were resolved."""
    server, names = ThreadingHTTPServer(("127.0.0.1", 0), Host), list[str]()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    real = socket.getaddrinfo
    public = {"93.184.216.34", "127.0.0.1"}

    def resolve(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name in ("images.test", "moved.test"):
            names.append(name)
            return real("127.0.0.1", *args, **kwargs)
        if name == "private.test":
            return real("10.0.0.7", *args, **kwargs)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(media.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(media, "is_public", lambda address: address in public or is_public(address))
    yield server.server_address[1], names
    server.shutdown()
    server.server_close()


def test_addresses_are_fetched_within_bounds(host: tuple[int, list[str]]) -> None:
    port, names = host
    reader = Media(("images.test", "private.test"), None, 1 << 16, 0.5)
    base = f"http://images.test:{port}"
    assert reader.read(f"{base}/a.png?b=1", "it") == encoded(FIRST)
    assert names == ["images.test"], "a name is resolved once"
    assert reader.read(f"{base}/to/{base}/a.png", "it") == encoded(FIRST) and reader.read(f"{base}/to//a.png", "it")
    for path, message in (
        ("/none", "its host answered 404"), ("/svg", "it is SVG"), ("/slow", "more than 0.5 s"), ("/drip", "more than 0.5 s"),
        ("/heads", "more than 0.5 s"), ("/endless", "more than 65536 bytes"),
        (f"/to/http://moved.test:{port}/a.png", "images of 'moved.test' are not fetched"),
        ("/to/http://127.0.0.1/a", "images of '127.0.0.1' are not"), ("/to/file:///etc/passwd", "is no address of the form"),
        ("/to/http://private.test/a", "'private.test' is not an address of the public web"),
        ("/to//to//to//to//to//a.png", "more than 3 redirects"), ("/ä", "is no address"), ("/a b", "is no address"),
    ):  # fmt: skip
        before = time.monotonic()
        with pytest.raises(PromptError, match=message):
            reader.read(base + path, "it")
        assert time.monotonic() - before < 1.9
    with pytest.raises(PromptError, match=r"could not be fetched"):
        reader.read("http://images.test:1/a.png", "it")
    with pytest.raises(PromptError, match=r"serve --allowed-media-domains\): send the image as a data URL"):
        Media((), None, 1 << 16, 1).read(f"{base}/a.png", "it")
    with pytest.raises(PromptError, match=r"serve --allowed-local-media-path"):
        reader.read("file:///etc/passwd", "it")
    assert Media(("*",), None, 1 << 16, 1).read(f"http://moved.test:{port}/a", "it")
    with pytest.raises(PromptError, match="more than 10 bytes"):
        Media((), None, 10, 1).read(url_of(FIRST), "it")


def test_private_addresses_are_known_in_all_their_forms() -> None:
    for address in (
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2001:db8::1", "198.18.0.1", "192.0.2.1",
    ):  # fmt: skip
        assert not is_public(address), address
    for address in ("93.184.216.34", "8.8.8.8", "2606:4700::1111"):
        assert is_public(address), address


def test_a_text_model_refuses_images(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with served(model_folder("llama"), folder=tmp_path) as server:
        answer = chat(server, asked("a", FIRST))
        assert answer.status_code == 400, answer.text
        body = {
            "prompts": [[1, 2]], "params": [{"max_tokens": 1}],
            "images": [{"bodies": [base64.b64encode(encoded(FIRST)).decode()]}],
        }  # fmt: skip
        with server.client("declared") as client:
            assert "takes text only" in client.post("/v1/interp/generate", json=body).text

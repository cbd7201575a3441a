"""Work on texts: it is off the event loop, its sizes are checked first, and no key holds all of its threads. Then how bodies come,
and answers go.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers_app import App, app_over

from pymllm_interp.server.http import gate
from pymllm_interp.server.http.threads import THREADS, THREADS_EACH, FairThreads, Turns, started_pool
from pymllm_interp.server.process.engine_server import SUBMITTERS, SUBMITTERS_EACH
from pymllm_interp.server.routes import openai_format


@pytest.fixture(scope="module")
def app(served_folder: Path) -> Iterator[App]:
    with app_over(served_folder, inline_bytes=1) as found:
        yield found


def body(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 2} | fields).encode()


def user(content: Any, **fields: Any) -> bytes:
    return body(messages=[{"role": "user", "content": content} | fields])


async def settled() -> None:
    """Wait until everything that can run has run."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_no_client_holds_all_threads_and_those_that_wait_take_turns() -> None:
    threads, order, gates = FairThreads(3, 2), list[str](), dict[str, threading.Event]()

    def work(name: str) -> str:
        order.append(name)
        assert gates[name].wait(600)
        return name

    async def asked() -> None:
        def ask(name: str) -> asyncio.Task[str]:
            gates[name] = threading.Event()
            return asyncio.create_task(threads.run(name[0], work, name))

        async def wait_for(count: int) -> None:
            async with asyncio.timeout(600):
                while len(order) < count:
                    await asyncio.sleep(0.001)

        tasks = {name: ask(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")}
        await wait_for(3)
        await settled()
        assert sorted(order) == ["a1", "a2", "b1"]  # a third one of a waits, though it came before b's
        gates["b1"].set()
        await wait_for(4)
        assert order[3] == "b2"  # a has its two threads
        gates["a1"].set()
        await wait_for(5)
        assert order[4] == "a3"
        gates["b2"].set()
        await wait_for(6)
        assert order[5] == "c1"
        tasks["a4"].cancel()  # it waits, and gives its turn up
        tasks["a2"].cancel()  # it runs on, and holds its thread
        await settled()
        for event in gates.values():
            event.set()
        ends = await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert [end for end in ends if isinstance(end, str)] == ["a1", "a3", "b1", "b2", "c1"]
        async with asyncio.timeout(600):
            while threads._turns._free < 3:
                await asyncio.sleep(0.001)
        assert "a4" not in order and not threads._turns._running and not threads._turns._waiting

    asyncio.run(asked())


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function from which on the system starts no thread."""

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", fails)


def test_texts_are_read_when_the_system_has_no_more_threads(no_more_threads: Callable[[], None]) -> None:
    threads = FairThreads(3, 2)

    async def asked() -> None:
        no_more_threads()
        found = await asyncio.gather(*(threads.run(name, str.upper, name) for name in "abcabcabc"))
        assert found == list("ABCABCABC")
        await settled()
        assert threads._turns._free == 3 and not threads._turns._running

    asyncio.run(asked())


def test_a_pool_whose_threads_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def second_fails(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_pool(3, "few")
    started[0].join(30)
    assert not started[0].is_alive()


def test_a_text_that_comes_as_the_server_ends_holds_no_thread() -> None:
    threads = FairThreads(3, 2)
    threads._pool.shutdown()

    async def asked() -> None:
        with pytest.raises(RuntimeError, match="after shutdown"):
            await threads.run("a", str.upper, "a")

    asyncio.run(asked())
    assert threads._turns._free == 3


def test_a_client_leaves_submitters_to_others() -> None:
    """Calls whose images or audio take long to read: other clients' calls are submitted beside them, in turns."""
    turns, order, pool = Turns(SUBMITTERS, SUBMITTERS_EACH), list[str](), ThreadPoolExecutor(SUBMITTERS)
    gates = {name: threading.Event() for name in [*(f"a{i}" for i in range(9)), "b0", "c0", "d0"]}
    begun = threading.Semaphore(0)

    def work(name: str) -> None:
        order.append(name)
        begun.release()
        assert gates[name].wait(60)
        turns.give_back(name[0])

    def take(name: str) -> None:
        turns.take(name[0], lambda: pool.submit(work, name) is not None)

    def wait_for(count: int) -> None:
        for _ in range(count):
            assert begun.acquire(timeout=60)

    for i in range(9):
        take(f"a{i}")
    wait_for(SUBMITTERS_EACH)
    for name in ("b0", "c0", "d0"):
        take(name)
    wait_for(SUBMITTERS - SUBMITTERS_EACH)
    assert len(order) == SUBMITTERS and {"b0", "c0"} <= {*order}
    gates["a0"].set()
    wait_for(1)
    assert order[-1] in ("d0", "a4"), "a client that waits gets the place"
    for event in gates.values():
        event.set()
    wait_for(12 - SUBMITTERS - 1)
    pool.shutdown()
    assert sorted(order) == sorted(gates) and turns._free == SUBMITTERS and not turns._waiting


def test_long_texts_of_one_key_do_not_stop_another_ones(app: App) -> None:
    """Eve's work stands still; Ada's texts, conversations, bodies and answers go on."""
    begun, go = threading.Semaphore(0), threading.Event()

    def stands() -> None:
        begun.release()
        assert go.wait(600)

    async def both() -> list[int]:
        eve = [asyncio.create_task(app.state.threads.run("eve", stands)) for _ in range(4 * THREADS)]
        for _ in range(THREADS_EACH):
            await asyncio.to_thread(begun.acquire)
        long = body(prompt="w1 w2", user="x" * 100_000)
        found = [
            (await app.post(path, given)).status_code
            for path, given in (
                ("/tokenize", json.dumps({"prompt": "w1"}).encode()), ("/v1/completions", long),
                ("/v1/chat/completions", user("w1")), ("/v1/interp/lens", json.dumps({"prompt": "w1"}).encode()),
                ("/v1/completions", body(prompt=["w1 " * 40], echo=True, logprobs=3)),
            )
        ]  # fmt: skip
        go.set()
        await asyncio.gather(*eve)
        return found

    assert app.runner.run(both()) == [200] * 5


LONG = "w1 " * 100_000
TOO_LONG = "characters; the 128 tokens of the context (max_model_len) hold at most"


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        ("/v1/chat/completions", user("w1", role=LONG), "messages has 3000"),
        ("/v1/chat/completions", user("w1", name=LONG), "messages has 3000"),
        ("/v1/chat/completions", user("w1", reasoning_content=[{"x": [LONG]}]), "messages has 3000"),
        ("/v1/chat/completions", user([{"type": "text", "text": "w1"}] * 2000), "messages"),
        ("/tokenize", json.dumps({"messages": [{"role": LONG, "content": "w1"}]}).encode(), "messages has 3000"),
        ("/v1/responses", json.dumps({"input": "w1", "instructions": LONG}).encode(), "messages has 3000"),
        (
            "/v1/chat/completions",
            body(messages=[{"role": "user", "content": "w1"}], chat_template_kwargs={"m": [LONG]}),
            "chat_template_kwargs has 300001",
        ),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_fit_is_not_rendered(
    app: App, path: str, given: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = list[str]()
    template = app.state.tokenizer.apply_chat_template
    monkeypatch.setattr(
        app.state.tokenizer, "apply_chat_template", lambda *a, **k: rendered.append("") or template(*a, **k)
    )
    answer = app.runner.run(app.post(path, given))
    assert answer.status_code == 400 and message in answer.text and TOO_LONG in answer.text, answer.text
    assert not rendered


def test_a_conversation_is_measured_as_the_template_writes_it(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may write more than it reads."""
    monkeypatch.setattr(
        app.state.tokenizer, "chat_template", "{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}"
    )
    tokenized = list[str]()
    call = type(app.state.tokenizer).__call__
    monkeypatch.setattr(
        type(app.state.tokenizer), "__call__", lambda s, text, **k: tokenized.append(text) or call(s, text, **k)
    )
    answer = app.runner.run(app.post("/v1/chat/completions", user("w1 ")))
    assert answer.status_code == 400 and f"writes it, has 300000 {TOO_LONG}" in answer.text and not tokenized, (
        answer.text
    )


def test_the_first_prompt_that_is_too_long_is_the_last_one_that_is_tokenized(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = list[str]()
    call = type(app.state.tokenizer).__call__
    monkeypatch.setattr(
        type(app.state.tokenizer), "__call__", lambda s, text, **k: tokenized.append(text) or call(s, text, **k)
    )
    prompts = ["w1", "w2 " * 129, *["w3 " * 100] * 50]
    answer = app.runner.run(app.post("/v1/completions", body(prompt=prompts)))
    assert answer.status_code == 400 and "prompt 1 has 129 tokens, but the context holds 128" in answer.text, (
        answer.text
    )
    assert tokenized == prompts[:2]
    counted = app.runner.run(app.post("/tokenize", json.dumps({"prompt": prompts[1]}).encode()))
    assert counted.json()["count"] == 129  # it counts what does not fit, too
    kept = app.runner.run(app.post("/v1/completions", body(prompt=prompts[:2], truncate_prompt_tokens=3)))
    assert kept.status_code == 200, kept.text


def test_the_name_of_a_template_variable_is_compared_not_compiled(app: App) -> None:
    for name in ("(" * 500, "a.b", "message"):
        given = body(messages=[{"role": "user", "content": "w1"}], chat_template_kwargs={name: 1})
        answer = app.runner.run(app.post("/v1/chat/completions", given))
        assert answer.status_code == 400 and "which the chat template does not mention" in answer.text
        assert len(answer.text) < 1000


@pytest.mark.parametrize("stream", [False, True])
def test_many_log_probabilities_are_written_off_the_event_loop(
    app: App, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Each is a token that is decoded: a long prompt's are hundreds of thousands."""
    names = list[str]()
    own = openai_format.token_bytes
    monkeypatch.setattr(
        openai_format, "token_bytes", lambda *a: names.append(threading.current_thread().name) or own(*a)
    )
    given = body(prompt="w1 " * 100, prompt_logprobs=5, stream=stream)
    answer = app.runner.run(app.post("/v1/completions", given))
    assert answer.status_code == 200 and names and all(name.startswith("text") for name in names), answer.text
    assert answer.text.count("decoded_token") > 500


def test_a_captured_file_is_known_before_the_choice_is_written(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may leave meanwhile. What no one knows of would stay in the store for good."""
    begun, go, own = threading.Event(), threading.Event(), openai_format.token_bytes

    def stands(*args: Any) -> bytes:
        begun.set()
        assert go.wait(600)
        return own(*args)

    async def leaves() -> None:
        given = body(prompt="w1 " * 100, prompt_logprobs=5, capture=["resid_post.*"])
        client = asyncio.create_task(app.post("/v1/completions", given))
        await asyncio.to_thread(begun.wait)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        go.set()
        await settled()

    monkeypatch.setattr(openai_format, "token_bytes", stands)
    app.runner.run(leaves())
    assert app.state.store.num_files == 1 == len(list(app.state.engine.store.glob("*.safetensors")))
    assert app.state.num_running == 0


def test_a_body_that_comes_byte_by_byte_is_given_up(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time, and the whole would take for ever."""
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    sent = 0

    async def drip() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            yield b" "
            sent += 1
            await asyncio.sleep(0.02)

    answer = app.runner.run(app.post("/v1/completions", drip()))
    assert answer.status_code == 408 and "less than 8192 bytes a second" in answer.text and sent > 1
    assert app.runner.run(app.post("/v1/completions", body(prompt="w1", user="x" * 100_000))).status_code == 200


def test_an_answer_is_sent_in_parts(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a client that does not read holds a part of it."""
    whole = app.runner.run(app.post("/tokenize", json.dumps({"prompt": "w1 " * 200}).encode()))
    monkeypatch.setattr(gate, "PART", 100)
    parts: list[dict[str, Any]] = []

    async def asked() -> None:
        given = [{"type": "http.request", "body": json.dumps({"prompt": "w1 " * 200}).encode()}]

        async def receive() -> dict[str, Any]:
            if not given:
                await asyncio.Event().wait()  # the client stays
            return given.pop()

        async def send(message: Any) -> None:
            parts.append(message)

        headers = [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            (b"authorization", b"Bearer key-of-ada"),
        ]
        scope = {
            "type": "http", "method": "POST", "path": "/tokenize", "raw_path": b"/tokenize", "query_string": b"",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "http_version": "1.1",
        }  # fmt: skip
        await app.app(scope, receive, send)

    app.runner.run(asked())
    bodies = [part["body"] for part in parts[1:]]
    assert b"".join(bodies) == whole.content and max(map(len, bodies)) == 100
    assert [part.get("more_body", False) for part in parts[1:]] == [True] * (len(bodies) - 1) + [False]


def test_a_range_header_has_few_ranges(app: App) -> None:
    """Starlette before 0.49 compares each with each other, on the event loop."""
    for count, status in ((16, 200), (17, 400), (10_000, 400)):
        ranges = ",".join(f"{i}-{i}" for i in range(0, 2 * count, 2))
        answer = app.runner.run(app.post("/tokenize", json.dumps({"prompt": "w1"}).encode(), Range=f"bytes={ranges}"))
        assert answer.status_code == status, answer.text
        assert status == 200 or f"the header Range has {count} ranges; at most 16" in answer.text

"""The page at `/`, in a headless Chromium."""

from __future__ import annotations

import pytest
from helpers_browser import CHROMIUM, browsing
from helpers_server import KEYS, Server

from pymllm_interp import LM, SamplingParams


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_generates_plain_and_steered_text_and_shows_a_lens(server: Server, tmp_path):
    with browsing(f"{server.url}/", tmp_path / "profile") as page:
        page.wait_for("document.getElementById('busy').textContent.includes('tok/s')")
        assert page.run("document.getElementById('key-field').hidden") is False
        page.run(
            f"""(() => {{
            const set = (id, value) => {{ const one = document.getElementById(id); one.value = value;
                one.dispatchEvent(new Event('input')); one.dispatchEvent(new Event('change')); }};
            set('key', '{KEYS["declared"]}'); set('prompt', 'w3 w14 w15 w9'); set('towards', 'w1 w2'); set('away', 'w40 w50 w60');
            set('max-tokens', 8); set('scale', 30); }})()"""
        )
        page.wait_for("Number(document.getElementById('layer').max) === 2")
        page.run("document.getElementById('layer').value = 1")
        page.run("document.getElementById('run').click()")
        page.wait_for("document.getElementById('receipt').textContent.includes('Steer at resid_post.1')")
        page.wait_for("!document.getElementById('run').disabled")
        plain, steered = (page.run(f"document.getElementById('{name}').textContent") for name in ("plain", "steered"))
        with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
            params = SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=8)
            assert plain == "w3 w14 w15 w9" + lm.generate(["w3 w14 w15 w9"], params)[0].text
        assert steered.startswith("w3 w14 w15 w9") and steered != plain
        page.run("document.getElementById('lens').click()")
        page.wait_for("document.querySelectorAll('#heatmap td').length === 12")  # 3 layers of 4 tokens
        words = page.run(
            "[...document.querySelectorAll('#heatmap tbody tr:first-child td')].map((cell) => cell.textContent)"
        )
        with LM.connect(server.url, api_key=KEYS["code"]) as lm:
            with lm.trace("w3 w14 w15 w9"):
                tops = lm.lm_head.output[0].argmax(-1).save()
            assert words == [lm.tokenizer.decode([token]) for token in tops.tolist()]
        assert page.run("document.getElementById('error').textContent") == ""
        assert page.run(
            "document.getElementById('chart').getContext('2d').getImageData(0, 0, 360, 56).data.some((v) => v > 0)"
        )
        # Until the key is there, the page is told that it is needed: the browser notes these answers.
        assert not [problem for problem in page.problems if "401" not in problem], page.problems


def test_the_page_needs_no_key_and_no_other_server(server: Server):
    with server.client(None) as client:
        index = client.get("/")
        assert index.status_code == 200 and "default-src 'self'" in index.headers["content-security-policy"]
        for name in ("app.js", "style.css"):
            found = client.get(f"/static/{name}")
            assert found.status_code == 200 and "http://" not in found.text and "https://" not in found.text
        assert client.get("/static/..%2fapp.py").status_code == 404
        assert client.get("/status").json()["model"]

"""The page at `/`, in a headless Chromium."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_browser import CHROMIUM, Page, browsing
from helpers_served import served
from helpers_server import KEYS, Server
from helpers_vision import encoded, picture, save_vision_model

from pymllm_interp import LM, SamplingParams

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
PROMPT = "w3 w14 w15 w9"
FILL = f"""(() => {{
    const set = (id, value) => {{ const one = document.getElementById(id); one.value = value;
        one.dispatchEvent(new Event('input')); one.dispatchEvent(new Event('change')); }};
    set('key', '{KEYS["declared"]}'); set('prompt', '{PROMPT}'); set('towards', 'w1 w2'); set('away', 'w40 w50 w60');
    set('max-tokens', 100); set('scale', 30); }})()"""
OBSERVE = """(() => {
    window.shown = { plain: [], steered: [] };
    for (const id of ['plain', 'steered']) {
        const text = document.getElementById(id);
        new MutationObserver(() => { if (text.ariaBusy === 'true') shown[id].push(text.textContent); })
            .observe(text, { childList: true, subtree: true, characterData: true });
    } })()"""
SCORED = """['plain', 'steered'].map((id) => [...document.querySelectorAll(`#${id} .scored`)].map((one) =>
    [Number(one.style.getPropertyValue('--score')), one.title, getComputedStyle(one).backgroundColor]))"""
SHIFTS = """(() => {
    const seen = new PerformanceObserver(() => {});
    seen.observe({ type: 'layout-shift', buffered: true });
    return seen.takeRecords().flatMap((one) => one.sources)
        .filter(({ node }) => !node?.parentElement?.closest('.text .token')) // a word that grows moves to the next line
        .map(({ node }) => `${node?.nodeName}#${node?.id}`);
    })()"""
# WCAG's contrast of each element's text with the nearest background behind it.
CONTRASTS = """(() => {
    const rgb = (color) => {
        const [r, g, b, a] = color.match(/[\\d.e-]+/g).map(Number), unit = color.startsWith('color(') ? 1 : 255;
        return [r / unit, g / unit, b / unit, a ?? 1]; };
    const light = ([r, g, b]) => [r, g, b].map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (one) => { const found = rgb(getComputedStyle(one).backgroundColor);
        return found[3] > 0 ? found : behind(one.parentElement); };
    const texts = document.querySelectorAll('h1, h2, a, label, button, #busy, .text span, .scores, pre, .heat, th, #cell, #error');
    return [...texts].map((one) => {
        const [low, high] = [light(behind(one)), light(rgb(getComputedStyle(one).color))].sort((a, b) => a - b);
        return [one.tagName + '#' + one.id, (high + 0.05) / (low + 0.05)]; }); })()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def page(browser: Page, server: Server) -> Page:
    """The page, loaded, of a server that is ready; the form is filled, and layers are known."""
    browser.send("Fetch.disable")  # what a test that failed may have left
    browser.problems.clear()
    browser.screen(1200, "light")
    browser.open(f"{server.url}/")
    browser.wait_for("document.body.dataset.state === 'ready'")
    assert browser.run("document.getElementById('key').disabled") is False
    assert browser.run("document.getElementById('image-field').hidden") is True
    browser.run(FILL)
    browser.wait_for("document.getElementById('layer').max === '2'")
    browser.run("document.getElementById('layer').value = 1")
    return browser


def done(button: str) -> str:
    return f"document.getElementById('{button}').ariaDisabled === 'false'"


def text_of(page: Page, name: str) -> str:
    return page.run(f"document.getElementById('{name}').textContent")


@in_browser
def test_both_texts_stream_while_a_lens_is_awaited(page: Page, server: Server) -> None:
    page.run(OBSERVE)
    page.send("Fetch.enable", patterns=[{"urlPattern": "*/v1/interp/lens"}])
    page.run("document.getElementById('lens').click()")
    paused = page.event("Fetch.requestPaused")["requestId"]
    page.run("document.getElementById('run').click()")
    page.wait_for(done("run"))
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        params = SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=100)
        plain = PROMPT + lm.generate([PROMPT], params)[0].text
        with lm.trace(PROMPT):
            tops = lm.lm_head.output[0].argmax(-1).save()
        words = [lm.tokenizer.decode([token]) for token in tops.tolist()]
    assert text_of(page, "plain") == plain
    steered = text_of(page, "steered")
    assert steered.startswith(PROMPT) and steered != plain
    assert "Steer at resid_post.1: 4 prompt rows, 99 generated" in text_of(page, "receipt")
    for name, whole in (("plain", plain), ("steered", steered)):
        parts = list(dict.fromkeys(page.run(f"shown.{name}")))
        assert len(set(parts) - {PROMPT, whole}) > 1, parts  # it grew, and not in one step
        assert parts == sorted(parts, key=len) and all(whole.startswith(part) for part in parts)
    scored = page.run(SCORED)
    assert len(scored) == 2 and all(90 < len(found) < 100 for found in scored)  # the last token is no input
    for name, found in zip(("plain", "steered"), scored, strict=True):
        scores = [score for score, _, _ in found]
        line = re.fullmatch("Score along the direction: (.+) to (.+), mean .+", text_of(page, f"{name}-scores"))
        assert line and [float(end) for end in line.groups()] == pytest.approx([min(scores), max(scores)], abs=0.006)
        assert [float(title.removeprefix("score ")) for _, title, _ in found] == pytest.approx(scores, abs=0.006)
        reds = [red_of(color) for _, _, color in sorted(found)]
        assert reds == sorted(reds, reverse=True) and reds[0] - reds[-1] > 0.3
    assert page.run("document.getElementById('lens-section').hidden")
    page.send("Fetch.disable")  # lets it pass
    assert paused
    page.wait_for(done("lens"))
    assert page.run("document.querySelectorAll('#heatmap td').length") == 12  # 3 layers of 4 tokens
    top_row = "[...document.querySelectorAll('#heatmap tbody tr:first-child td')].map((cell) => cell.textContent)"
    assert page.run(top_row) == words
    assert text_of(page, "error") == ""
    page.wait_for(  # the second point of its line, a second after the first one
        "document.getElementById('chart').getContext('2d').getImageData(0, 0, 360, 56).data.some((v) => v > 0)"
    )
    assert page.run(SHIFTS) == []
    assert page.problems == []


@in_browser
@pytest.mark.parametrize("of", ["steered", "plain", "none"])
def test_a_lens_of_a_text_grows_with_its_tokens(of: str, page: Page, server: Server) -> None:
    page.run(f"document.getElementById('live-of').value = '{of}'")
    page.run("""(() => { window.widths = []; const table = document.getElementById('live-lens');
        table.replaceChildren();
        new MutationObserver(() => widths.push(table.rows[0]?.cells.length ?? 0))
            .observe(table, { childList: true, subtree: true });
    })()""")
    page.run("document.getElementById('run').click()")
    page.wait_for(done("run"))
    cells = page.run(
        "[...document.querySelectorAll('#live-lens tr')].map((row) => [...row.cells].map((one) => one.textContent))"
    )
    assert text_of(page, "error") == "" and page.problems == []
    if of == "none":
        assert cells == []
        return
    widths = [width for width in page.run("widths") if width]
    assert widths == sorted(widths) and len(set(widths)) > 10, "columns come with their tokens"
    assert [row[0] for row in cells] == ["layer", "2", "1", "0"] and {len(row) for row in cells} == {101}
    words = page.run(f"[...document.querySelectorAll('#{of} .token')].map((one) => one.textContent)")
    assert cells[0][1:12] == ["prompt", *(word.strip() for word in words[:10])]
    if of == "plain":
        with LM.connect(server.url, api_key=KEYS["code"]) as lm:
            params = SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=100)
            (out,) = lm.generate_with_lens([PROMPT], params)
            for layer in range(3):
                ids = out.activations.indexes[f"resid_post.{layer}"][3:, 0].tolist()
                assert cells[3 - layer][1:] == [lm.tokenizer.decode([token]).strip() for token in ids]
    title = page.run("document.querySelector('#live-lens td').title")
    assert re.fullmatch(r'Layer 2, after "prompt": ("[^"]+" [\d.]+ %(, )?){3}', title)
    page.run("document.querySelector('#live-lens td').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))")
    assert text_of(page, "live-cell") == title


@in_browser
def test_the_lens_legend_has_the_colours_of_the_cells(page: Page) -> None:
    page.run("document.getElementById('lens').click()")
    page.wait_for(done("lens"))
    legend, cells = (
        page.run(
            f"[...document.querySelectorAll('{where}')].map((one) => [one.{field}, getComputedStyle(one).backgroundColor])"
        )
        for where, field in (("#legend span", "textContent"), ("#heatmap td", "title"))
    )
    assert [text for text, _ in legend] == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    reds = [red_of(color) for _, color in legend]
    assert reds == sorted(reds, reverse=True) and reds[0] - reds[-1] > 0.3
    for title, color in cells:
        percent = float(re.findall(r" ([\d.]+) %", title)[0])
        assert red_of(color) == pytest.approx(reds[0] + (reds[-1] - reds[0]) * percent / 100, abs=0.01), title
    assert "Probability of the token" in page.run("document.getElementById('lens-section').innerText")


def red_of(color: str) -> float:
    """Of a computed colour: `color(srgb 1 1 1)`."""
    assert color.startswith("color(srgb "), color
    return float(color.split()[1])


@pytest.mark.thin(99)
@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 375])
def test_the_page_fits_and_is_readable(width: int, scheme: str, page: Page) -> None:
    page.screen(width, scheme)
    for button in ("run", "lens"):
        page.run(f"document.getElementById('{button}').click()")
        page.wait_for(done(button))
    assert page.run("matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
    assert page.run("[innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 40 and not [found for found in contrasts if found[1] < 4.5]


@in_browser
def test_the_page_is_used_by_keyboard_alone(page: Page) -> None:
    fields = "[...document.querySelectorAll('input, select, textarea')]"
    assert page.run(f"{fields}.filter((one) => !one.labels.length).map((one) => one.id)") == []
    order = []
    while (focused := page.run("document.activeElement.id || document.activeElement.href")) != "lens":
        page.press("Tab")
        order.append(focused)
    wanted = ["prompt", "kind", "layer", "scale", "max-tokens", "key", "towards", "away", "vector", "run"]
    assert order[-len(wanted) :] == wanted
    page.press("Enter")
    page.wait_for(done("lens"))
    assert page.run("document.activeElement.id") == "lens"  # a disabled button would have lost it
    page.press("Tab")  # the text whose lens comes with its tokens
    assert page.run("document.activeElement.id") == "live-of"
    page.press("Tab")  # the first cell: the last layer's, of the first token
    page.press("ArrowDown")
    page.press("ArrowRight")
    page.press("ArrowUp")
    page.press("ArrowUp")  # there is nothing above
    shown = text_of(page, "cell")
    assert shown.startswith('Layer 2, after "w14"') and shown == page.run("document.activeElement.title")
    assert page.run("document.querySelectorAll('#heatmap td[tabindex=\"0\"]').length") == 1


@pytest.fixture(scope="module")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a vision-language model."""
    folder = save_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))
    with served(folder, "--max-image-bytes", "4000", folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


@in_browser
def test_an_image_stands_before_the_prompt(
    browser: Page, of_images: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both texts are chats over it; without a file they are completions again. Nothing is loaded from elsewhere."""
    folder = tmp_path_factory.mktemp("files")
    (small := folder / "small.png").write_bytes(encoded(picture()))
    (large := folder / "large.png").write_bytes(bytes(5000))
    browser.problems.clear()
    browser.open(f"{of_images.url}/")
    browser.wait_for("document.body.dataset.state === 'ready'")
    browser.run(FILL)
    browser.wait_for("!document.getElementById('image-field').hidden")
    browser.run("document.getElementById('max-tokens').value = 12")

    def choose(*files: Path) -> None:
        root = browser.send("DOM.getDocument")["root"]["nodeId"]
        node = browser.send("DOM.querySelector", nodeId=root, selector="#image")["nodeId"]
        browser.send("DOM.setFileInputFiles", nodeId=node, files=list(map(str, files)))

    def texts() -> list[str]:
        browser.run("document.getElementById('run').click()")
        browser.wait_for(done("run"))
        return [text_of(browser, name) for name in ("plain", "steered", "error")]

    url = f"data:image/png;base64,{base64.b64encode(small.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}]
    fields = {"max_tokens": 12, "temperature": 0, "repetition_penalty": 1.1}
    with of_images.client("declared") as client:
        asked = {"messages": [{"role": "user", "content": parts}], **fields}
        chat = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        alone = client.post("/v1/completions", json={"prompt": PROMPT, **fields}).json()["choices"][0]["text"]
    choose(small)
    plain, steered, error = texts()
    assert plain == PROMPT + chat and steered.startswith(PROMPT) and steered != plain and error == "", error
    assert browser.run(SCORED)[1]
    choose(large)
    assert texts()[2] == "the image has 5000 bytes; at most 4000 are sent"
    browser.run("document.getElementById('image').value = ''")
    assert texts()[::2] == [PROMPT + alone, ""]
    assert browser.problems == []


@in_browser
def test_a_key_that_is_not_known_is_said_once(browser: Page, server: Server) -> None:
    browser.open(f"{server.url}/")
    browser.wait_for("document.body.dataset.state === 'ready'")
    browser.run("document.getElementById('key').value = 'wrong'")
    browser.run("document.getElementById('key').dispatchEvent(new Event('change'))")
    browser.wait_for("document.getElementById('error').textContent === 'the key is not known'")
    chart = "history.length"
    looked = browser.run(chart)
    browser.wait_for(f"{chart} > {looked} + 1")
    problems = [browser.problems.pop() for _ in range(len(browser.problems))]
    assert len(problems) == 1 and "401" in problems[0]


def test_the_page_needs_no_key_and_no_other_server(server: Server):
    with server.client(None) as client:
        index = client.get("/")
        policy = index.headers["content-security-policy"]
        assert index.status_code == 200 and "default-src 'self'" in policy and "unsafe" not in policy
        for name in ("app.js", "style.css"):
            found = client.get(f"/static/{name}")
            assert found.status_code == 200 and "http://" not in found.text and "https://" not in found.text
        assert client.get("/static/..%2fapp.py").status_code == 404
        assert client.get("/status").json()["model"]
        for path in ("/favicon.ico", "/static/favicon.svg"):
            icon = client.get(path)
            assert icon.status_code == 200 and icon.headers["content-type"].startswith("image/svg+xml")
            assert icon.content.startswith(b"<svg ") and len(icon.content) < 1000
        assert 'rel="icon" href="favicon.ico"' in index.text

"use strict";
const $ = (id) => document.getElementById(id);

function headers() {
  const found = { "Content-Type": "application/json" };
  if ($("key").value) found.Authorization = `Bearer ${$("key").value}`;
  return found;
}

async function call(path, body) {
  const options = body === undefined ? { headers: headers() } : { method: "POST", headers: headers(), body: JSON.stringify(body) };
  const response = await fetch(path, options);
  if (!response.ok) {
    let message = `${response.status}`;
    try { message = (await response.json()).error.message; } catch { /* no JSON */ }
    throw Object.assign(new Error(message), { status: response.status });
  }
  return response;
}

// What a button starts, once at a time. A button that is disabled would lose the keyboard's focus.
async function once(button, work) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true");
  $("error").textContent = "";
  try {
    await work();
  } catch (error) {
    $("error").textContent = error.message;
  } finally {
    button.setAttribute("aria-disabled", "false");
  }
}

// -- how busy the server is ---------------------------------------------------------------

const history = [];

async function watch() {
  for (;;) {
    await refresh();
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function refresh() {
  try {
    const status = await (await fetch("status")).json();
    $("model").textContent = status.model;
    const used = status.kv_tokens ? Math.round(100 * (1 - status.free_kv_tokens / status.kv_tokens)) : 0;
    $("busy").textContent = status.ready
      ? `${status.running} running, ${status.waiting} waiting · ${status.tokens_per_second} tok/s · KV ${used} % · ` +
        `${status.steps} steps, ${status.hooked_steps} with traces`
      : "the engine is starting";
    $("key").disabled = !status.keys;
    if (status.keys) $("key").placeholder = "needed";
    history.push(status.tokens_per_second);
    if (history.length > 120) history.shift();
    draw();
    if (status.ready && (!status.keys || $("key").value)) await describe();
    document.body.dataset.state = status.ready ? "ready" : "starting";
  } catch {
    $("busy").textContent = "no answer";
    document.body.dataset.state = "no-answer";
  }
}

function draw() {
  const canvas = $("chart"), pen = canvas.getContext("2d");
  const most = Math.max(1, ...history), step = canvas.width / 119;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  pen.lineWidth = 2;
  pen.beginPath();
  history.forEach((value, i) => pen.lineTo(i * step, canvas.height - 3 - (canvas.height - 8) * value / most));
  pen.stroke();
}

let mostImageBytes = 0;
let describedFor = null; // the key that the server was asked with: once, unless it could not answer

async function describe() {
  const key = $("key").value;
  if (key === describedFor) return;
  describedFor = key;
  try {
    const { num_layers: count, images, limits, saes } = await (await call("v1/interp/capabilities")).json();
    const stored = await (await call("v1/interp/vectors")).json();
    if (key !== describedFor) return; // of an earlier key
    if (Number($("layer").max) !== count - 1) setLayers(count);
    $("image-field").hidden = !images;
    mostImageBytes = limits.max_image_bytes;
    const names = Object.keys(saes), sets = names.filter((name) => name.includes("/")).map((name) => name.split("/")[0]);
    $("circuit-section").hidden = !names.length;
    $("saes").replaceChildren(...[...new Set([...sets, ...names])].map((name) => new Option(name)));
    if (!$("transcoders").value) $("transcoders").value = sets[0] ?? names[0] ?? "";
    $("vectors").replaceChildren(...stored.vectors.map((vector) => new Option(vector.name)));
  } catch (error) {
    if (key !== describedFor) return;
    if (error.status === 401 || error.status === 403) $("error").textContent = error.message;
    else describedFor = null;
  }
}

function setLayers(count) {
  $("layer").max = count - 1;
  $("layer-shown").textContent = $("layer").value = Math.floor(count / 2);
}

// -- vectors --------------------------------------------------------------------------------

const ARRAYS = { F32: Float32Array, I64: BigInt64Array };

// The values of a safetensors file's tensors, by name.
function tensorsOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const first = 8 + Number(new DataView(bytes.buffer).getBigUint64(0, true));
  const { __metadata__, ...entries } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, first)));
  return Object.fromEntries(Object.entries(entries).map(([name, { dtype, data_offsets: [start, end] }]) =>
    [name, new ARRAYS[dtype](bytes.slice(first + start, first + end).buffer)]));
}

async function meanState(text, site) {
  const body = { prompt: text, max_tokens: 0, capture: [{ site, positions: "prompt", reduce: "mean", dtype: "float32" }] };
  const found = (await (await call("v1/completions", body)).json()).choices[0].activations;
  return tensorsOf(found.data)[site];
}

async function direction(site) {
  if ($("vector").value) return $("vector").value;
  const [towards, away] = await Promise.all([meanState($("towards").value, site), meanState($("away").value, site)]);
  const bytes = new Uint8Array(towards.map((value, i) => value - away[i]).buffer);
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return { dtype: "float32", shape: [towards.length], data: btoa(text) };
}

// -- both texts, as they come -----------------------------------------------------------------

function stream(body, onChoice) {
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  const onEvent = ({ prompt_token_ids, choices }) => choices.forEach((choice) => onChoice({ prompt_token_ids, ...choice }));
  return events(path, { ...body, stream: true }, onEvent);
}

async function events(path, body, onEvent) {
  const reader = (await call(path, body)).body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const whole = waiting.split("\n\n");
    waiting = whole.pop();
    for (const event of whole) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      onEvent(data);
    }
  }
}

function span(text, kind) {
  const found = document.createElement("span");
  found.textContent = text;
  found.className = kind;
  return found;
}

// Tokens as they come. The score of a token comes a step later, and shades it: from none at the text's lowest to the highest so far.
function show(id, prompt) {
  const text = $(id), tokens = new Map(), scores = [];
  const lens = $("live-of").value === id ? lensTable($("live-lens")) : null;
  let position = 0;
  text.replaceChildren(span(prompt, "prompt"));
  $(`${id}-scores`).textContent = "";
  return (choice) => {
    if (choice.prompt_token_ids) position = choice.prompt_token_ids.length;
    const unwhole = text.lastChild.textContent === "" && text.lastChild.className === "token"; // a part of a character
    const token = unwhole ? text.lastChild : text.appendChild(span("", "token"));
    token.textContent = choice.text ?? choice.delta.content ?? "";
    for (const _ of choice.token_ids) tokens.set(position++, token);
    for (const [place, score] of choice.pymllm?.scores?.direction ?? []) {
      const scored = tokens.get(place);
      if (!scored || score === null) continue;
      scores.push(score);
      scored.style.setProperty("--score", score);
      scored.title = `score ${score.toFixed(2)}`;
      scored.classList.add("scored");
    }
    if (scores.length) shade(text, $(`${id}-scores`), scores);
    if (choice.pymllm?.captures) lens(choice.pymllm.captures, (place) => tokens.get(place)?.textContent ?? "prompt");
  };
}

function shade(text, line, scores) {
  const low = Math.min(...scores), high = Math.max(...scores), mean = scores.reduce((sum, one) => sum + one, 0) / scores.length;
  text.style.setProperty("--low", low);
  text.style.setProperty("--range", high - low || 1);
  line.textContent = `Score along the direction: ${low.toFixed(2)} to ${high.toFixed(2)}, mean ${mean.toFixed(2)}`;
}

// The fields of a request with the prompt, and with the image before it. The server alone is sent the image.
async function asked(prompt) {
  const file = $("image").files[0];
  if (!file) return { prompt };
  if (file.size > mostImageBytes) throw new Error(`the image has ${file.size} bytes; at most ${mostImageBytes} are sent`);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  return { messages: [{ role: "user", content: [{ type: "image_url", image_url: { url } }, { type: "text", text: prompt }] }] };
}

async function generate() {
  $("receipt").textContent = "";
  const prompt = $("prompt").value, site = `${$("kind").value}.${$("layer").value}`;
  const body = {
    ...await asked(prompt), max_tokens: Number($("max-tokens").value), temperature: 0, repetition_penalty: 1.1, return_token_ids: true,
  };
  const texts = [$("plain"), $("steered")];
  const plain = show("plain", prompt), steered = show("steered", prompt);
  texts.forEach((text) => text.setAttribute("aria-busy", "true")); // read aloud when it is whole
  try {
    const vector = await direction(site), op = { op: "steer", site, vector, scale: Number($("scale").value) };
    body.monitors = [{ name: "direction", site, probe: vector, positions: "generated" }];
    const lens = (id) => ($("live-of").value === id ? { capture: [LENS] } : {});
    await Promise.all([
      stream({ ...body, ...lens("plain") }, plain),
      stream({ ...body, ...lens("steered"), interventions: [op] }, (choice) => {
        steered(choice);
        if (choice.receipt) $("receipt").textContent = receipt(choice.receipt);
      }),
    ]);
  } finally {
    texts.forEach((text) => text.setAttribute("aria-busy", "false"));
  }
}

function receipt(found) {
  const applied = found.interventions.map(
    (one) => `${one.intervention} at ${one.site}: ${one.prompt_rows || 0} prompt rows, ${one.generated_rows || 0} generated`);
  return [...applied, `steps: ${JSON.stringify(found.steps)}`].join("\n");
}

// -- logit lens ---------------------------------------------------------------------------------

const LENS = { site: "resid_post.*", reduce: { type: "lens", top_k: 3 }, positions: { generated: { start: -1 } }, stream: true };

// A table of layers: each piece of a stream with captured rows adds a column for each position.
function lensTable(table) {
  table.replaceChildren();
  return (captures, tokenAt) => {
    const found = tensorsOf(captures.data), count = Object.keys(captures.sites).length;
    if (!table.rows.length) {
      const body = document.createElement("tbody");
      body.append(...[...Array(count).keys()].reverse().map((layer) => line(cell("th", String(layer)), [])));
      const head = document.createElement("thead");
      head.append(line(cell("th", "layer"), []));
      table.append(head, body);
    }
    found["positions.resid_post.0"].forEach((position, i) => {
      const after = tokenAt(Number(position));
      table.tHead.rows[0].append(cell("th", after));
      for (let layer = 0; layer < count; layer++) {
        const ids = found[`indexes.resid_post.${layer}`], values = found[`resid_post.${layer}`];
        const top = [0, 1, 2].map((k) => ({ token: captures.tokens[ids[3 * i + k]], prob: Math.exp(values[3 * i + k]) }));
        table.tBodies[0].rows[count - 1 - layer].append(lensCell(top, layer, after));
      }
    });
    table.tBodies[0].rows[0].cells[1].tabIndex = 0;
    table.parentElement.scrollLeft = table.parentElement.scrollWidth;
  };
}

function lensCell(top, layer, after) {
  const one = shaded(cell("td", top[0].token), top[0].prob);
  const tops = top.map(({ token, prob }) => `${JSON.stringify(token)} ${(100 * prob).toFixed(1)} %`);
  one.title = `Layer ${layer}, after ${JSON.stringify(after)}: ${tops.join(", ")}`;
  one.tabIndex = -1;
  return one;
}

async function lens() {
  const found = await (await call("v1/interp/lens", { prompt: $("prompt").value, top: 3 })).json();
  const head = document.createElement("thead"), body = document.createElement("tbody");
  head.append(line(cell("th", "layer"), found.tokens.map((token) => cell("th", token))));
  body.append(...found.layers.map((row, layer) => line(cell("th", String(layer)),
    row.map((top, position) => lensCell(top, layer, found.tokens[position])))).reverse());
  body.rows[0].cells[1].tabIndex = 0;
  $("heatmap").replaceChildren(head, body);
  $("lens-section").hidden = false;
}

function line(first, others) {
  const found = document.createElement("tr");
  found.append(first, ...others);
  return found;
}

function cell(kind, text) {
  const found = document.createElement(kind);
  found.textContent = text.trim() ? text.replaceAll("\n", "⏎") : text.replaceAll("\n", "⏎").replaceAll(" ", "␣");
  return found;
}

function shaded(element, probability) {
  element.classList.add("heat");
  element.style.setProperty("--percent", 100 * probability);
  return element;
}

$("legend").append(...[0, 0.25, 0.5, 0.75, 1].map((probability) => shaded(cell("span", `${100 * probability} %`), probability)));

// One cell is in the order of Tab; the arrow keys move from there.
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function move(event) {
  const from = event.target.closest("td"), step = MOVES[event.key];
  if (!from || !step) return;
  event.preventDefault();
  const to = from.closest("tbody").rows[from.parentElement.sectionRowIndex + step[0]]?.cells[from.cellIndex + step[1]];
  if (to?.tagName !== "TD") return;
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

function explain(event) {
  const one = event.target.closest("td");
  if (one) $(one.closest("table").dataset.shownIn).textContent = one.title;
}

// -- circuit --------------------------------------------------------------------------------------

async function circuit() {
  const body = { prompt: $("prompt").value, transcoders: $("transcoders").value, max_features: 300, form: "figure" };
  await events("v1/interp/circuit", body, (event) => {
    if (event.type === "progress") $("circuit-node").textContent = `${event.rows} of ${event.of} rows`;
    if (event.type !== "circuit") return;
    drawFigure($("graph"), event.figure);
    const { replacement, completeness } = event.scores, percent = (share) => `${(100 * share).toFixed(0)} %`;
    $("circuit-node").textContent = `${event.summary}. Replacement ${percent(replacement)}, completeness ${percent(completeness)}.`;
  });
}

function drawn(kind, attributes, text) {
  const found = document.createElementNS($("graph").namespaceURI, kind);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

// The text of a label of plotly's, in which tokens are escaped.
const plainText = (html) => new DOMParser().parseFromString(html.replaceAll("<br>", ", "), "text/html").body.textContent;

// A figure of lines and markers, in plotly's form.
function drawFigure(svg, { data, layout: { width, height, xaxis, yaxis } }) {
  const low = yaxis.tickvals[0] - 0.5, high = yaxis.tickvals.at(-1) + 0.5, count = xaxis.tickvals.length;
  const x = (value) => 90 + (width - 110) * (value + 0.6) / (count + 0.2), y = (value) => 10 + (height - 80) * (high - value) / (high - low);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  xaxis.tickvals.forEach((value, i) => svg.append(
    drawn("text", { x: x(value), y: height - 45, "text-anchor": "middle" }, plainText(xaxis.ticktext[i]))));
  yaxis.tickvals.forEach((value, i) => svg.append(
    drawn("text", { x: 80, y: y(value) + 4, "text-anchor": "end" }, yaxis.ticktext[i])));
  for (const trace of data) {
    if (trace.mode === "lines") {
      const path = trace.x.map((value, i) => (value === null ? "" : `${i % 3 ? "L" : "M"}${x(value)} ${y(trace.y[i])}`)).join("");
      svg.append(drawn("path", { d: path, stroke: trace.line.color, "stroke-opacity": trace.opacity, fill: "none" }));
      continue;
    }
    trace.x.forEach((value, i) => {
      const text = plainText(trace.text[i]), place = { cx: x(value), cy: y(trace.y[i]), r: trace.marker.size[i] / 2 };
      const node = drawn("circle", { ...place, fill: trace.marker.color, role: "img", "aria-label": text, tabindex: -1 });
      node.append(drawn("title", {}, text));
      svg.append(node);
    });
  }
  svg.querySelector("circle")?.setAttribute("tabindex", 0);
}

function moveInGraph(event) {
  const nodes = [...$("graph").querySelectorAll("circle")], at = nodes.indexOf(event.target);
  const to = nodes[at + { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key]];
  if (at < 0 || !to) return;
  event.preventDefault();
  event.target.setAttribute("tabindex", -1);
  to.setAttribute("tabindex", 0);
  to.focus();
}

$("circuit-form").addEventListener("submit", (event) => { event.preventDefault(); once($("circuit"), circuit); });
const around = $("graph").parentElement; // a graphic with such listeners would take the focus itself
around.addEventListener("keydown", moveInGraph);
for (const kind of ["focusin", "mouseover"]) {
  around.addEventListener(kind, ({ target }) => {
    if (target.tagName === "circle") $("circuit-node").textContent = target.getAttribute("aria-label");
  });
}
$("form").addEventListener("submit", (event) => { event.preventDefault(); once($("run"), generate); });
$("lens").addEventListener("click", () => once($("lens"), lens));
for (const table of [$("heatmap"), $("live-lens")]) {
  table.addEventListener("keydown", move);
  for (const kind of ["focusin", "mouseover", "click"]) table.addEventListener(kind, explain);
}
$("layer").addEventListener("input", () => { $("layer-shown").textContent = $("layer").value; });
$("key").addEventListener("change", () => { $("error").textContent = ""; describe(); });
watch();

"use strict";
const $ = (id) => document.getElementById(id);
let capabilities = null;

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
    throw new Error(message);
  }
  return response;
}

// -- how busy the server is ---------------------------------------------------------------

const history = [];

async function refresh() {
  try {
    const status = await (await fetch("status")).json();
    $("model").textContent = status.model;
    const used = status.kv_tokens ? Math.round(100 * (1 - status.free_kv_tokens / status.kv_tokens)) : 0;
    $("busy").textContent = status.ready
      ? `${status.running} running, ${status.waiting} waiting · ${status.tokens_per_second} tok/s · KV ${used} % · ` +
        `${status.steps} steps, ${status.hooked_steps} with traces`
      : "the engine is starting";
    $("key-field").hidden = !status.keys;
    history.push(status.tokens_per_second);
    if (history.length > 120) history.shift();
    draw();
    if (status.ready && capabilities === null) await describe();
  } catch {
    $("busy").textContent = "no answer";
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

async function describe() {
  try {
    capabilities = await (await call("v1/interp/capabilities")).json();
  } catch {
    return; // a key is needed
  }
  $("layer").max = capabilities.num_layers - 1;
  $("layer").value = Math.floor(capabilities.num_layers / 2);
  $("layer-shown").textContent = $("layer").value;
  const stored = await (await call("v1/interp/vectors")).json();
  $("vectors").replaceChildren(...stored.vectors.map((vector) => new Option(vector.name)));
}

// -- vectors --------------------------------------------------------------------------------

function tensorOf(base64, name) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const size = Number(new DataView(bytes.buffer).getBigUint64(0, true));
  const entry = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + size)))[name];
  const [start, end] = entry.data_offsets;
  return new Float32Array(bytes.slice(8 + size + start, 8 + size + end).buffer);
}

async function meanState(text, site) {
  const body = { prompt: text, max_tokens: 0, capture: [{ site, positions: "prompt", reduce: "mean", dtype: "float32" }] };
  const found = (await (await call("v1/completions", body)).json()).choices[0].activations;
  return tensorOf(found.data, site);
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

async function stream(body, onChoice) {
  const reader = (await call("v1/completions", { ...body, stream: true })).body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      data.choices.forEach(onChoice);
    }
  }
}

function show(id, prompt) {
  const before = document.createElement("span"), after = document.createElement("span");
  before.className = "prompt";
  before.textContent = prompt;
  $(id).replaceChildren(before, after);
  return (choice) => { after.textContent += choice.text; };
}

async function generate(event) {
  event.preventDefault();
  $("error").textContent = $("receipt").textContent = "";
  $("run").disabled = true;
  try {
    const prompt = $("prompt").value, site = `${$("kind").value}.${$("layer").value}`;
    const body = { prompt, max_tokens: Number($("max-tokens").value), temperature: 0, repetition_penalty: 1.1 };
    const plain = show("plain", prompt), steered = show("steered", prompt);
    const op = { op: "steer", site, vector: await direction(site), scale: Number($("scale").value) };
    await Promise.all([
      stream(body, plain),
      stream({ ...body, interventions: [op] }, (choice) => {
        steered(choice);
        if (choice.receipt) $("receipt").textContent = receipt(choice.receipt);
      }),
    ]);
  } catch (error) {
    $("error").textContent = error.message;
  } finally {
    $("run").disabled = false;
  }
}

function receipt(found) {
  const applied = found.interventions.map(
    (one) => `${one.intervention} at ${one.site}: ${one.prompt_rows || 0} prompt rows, ${one.generated_rows || 0} generated`);
  return [...applied, `steps: ${JSON.stringify(found.steps)}`].join("\n");
}

// -- logit lens ---------------------------------------------------------------------------------

async function lens() {
  $("error").textContent = "";
  $("lens").disabled = true;
  try {
    const found = await (await call("v1/interp/lens", { prompt: $("prompt").value, top: 3 })).json();
    const head = document.createElement("tr");
    head.append(cell("th", "layer"), ...found.tokens.map((token) => cell("th", token)));
    const rows = found.layers.map((row, layer) => {
      const line = document.createElement("tr");
      line.append(cell("th", String(layer)), ...row.map((top) => {
        const one = cell("td", top[0].token);
        one.style.background = `rgb(40 103 178 / ${Math.round(90 * top[0].prob)}%)`;
        one.title = top.map(({ token, prob }) => `${JSON.stringify(token)} ${(100 * prob).toFixed(1)} %`).join("\n");
        return one;
      }));
      return line;
    });
    const body = document.createElement("tbody");
    body.append(...rows.reverse());
    $("heatmap").replaceChildren(head, body);
    $("lens-section").hidden = false;
  } catch (error) {
    $("error").textContent = error.message;
  } finally {
    $("lens").disabled = false;
  }
}

function cell(kind, text) {
  const found = document.createElement(kind);
  found.textContent = text.replace("\n", "⏎");
  return found;
}

$("form").addEventListener("submit", generate);
$("lens").addEventListener("click", lens);
$("layer").addEventListener("input", () => { $("layer-shown").textContent = $("layer").value; });
$("key").addEventListener("change", () => { capabilities = null; refresh(); });
refresh();
setInterval(refresh, 1000);

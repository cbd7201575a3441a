"""`pymllm-interp demo`: plain prompts, a logit lens and a steered request, all on one engine, with real weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .client.detokenizer import token_text
from .client.handle import RequestHandle
from .core.sampling_params import SamplingParams
from .lm import LM

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the moon.",
    "Name three fruits.",
    "Why is the sky blue?",
]
LENS_PROMPT = "The Eiffel Tower is in the city of"
LENS_TOKENS = 3
LENS_COLUMNS = 5
"""Positions in the terminal's table; the heatmap has all."""

STEER_PROMPT = "My neighbour told me that"
TOWARDS = "The ocean, the sea, waves, ships, sailors, whales and the deep blue water"
AWAY = "The office, the desk, papers, clerks, managers, meetings and the long grey hours"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.1}


@dataclass
class LensTable:
    """Likeliest next token of each layer, at each position."""

    tokens: list[str]
    """The token that each position read."""
    words: list[list[str]]
    """[layers][positions]: the most likely next token, if the model ended at that layer."""
    probs: torch.Tensor
    """[layers, positions]: its probability."""
    receipt: Any


def run_demo(model: str = "demo", dtype: str = "auto", out: Path = Path("demo_out"), max_tokens: int = 40) -> None:
    """Run all parts and print them; the heatmap goes to `out`. Raises FileNotFoundError, ValueError: no such model; see `LM`."""
    console, started = Console(), time.perf_counter()
    console.print(f"Loading {model} ...")  # no spinner: the conversion of a GGUF file has its own
    lm = LM(model, dtype=dtype)
    if lm.tokenizer is None:
        lm.shutdown()
        raise ValueError(f"{model} has no tokenizer, and the demo's prompts are text")
    with lm:
        _show_batch(lm, console, out, max_tokens)
        _show_steering(lm, console, max_tokens)
    console.print(f"Done in {time.perf_counter() - started:.0f} s, imports not counted.")


# -- a logit lens beside plain requests ---------------------------------------------------


def logit_lens(lm: LM, prompt: str, max_tokens: int) -> LensTable:
    """Generate from `prompt`, and read every layer at every position through the model's own final norm and head."""
    with lm.generate(prompt, max_new_tokens=max_tokens) as tracer:
        tops = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[:]:
            states = torch.stack([layer.output[0] for layer in lm.model.layers])  # [layers, positions, hidden]
            logits = lm.lm_head(lm.model.norm(states))  # [layers, positions, vocab]
            tops.append(logits.float().softmax(-1).max(-1))
        ids = tracer.result.save()
    probs = torch.cat([top.values for top in tops], dim=1)
    top_ids = torch.cat([top.indices for top in tops], dim=1)
    return LensTable(
        tokens=[token_text(lm.tokenizer, token) for token in ids[0, : probs.shape[1]].tolist()],
        words=[[token_text(lm.tokenizer, token) for token in row] for row in top_ids.tolist()],
        probs=probs.cpu(),
        receipt=tracer.receipt,
    )


def _show_batch(lm: LM, console: Console, out: Path, max_tokens: int) -> None:
    console.rule("[bold]1. Four plain requests and a logit lens, generated together")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [[{"role": "user", "content": text}] if _chats(lm) else text for text in QUESTIONS]
    handles = [lm.submit(prompt, params) for prompt in prompts]
    with _bars(console, QUESTIONS, handles, max_tokens):
        _wait_for_first_tokens(handles)
        before = _generated(handles)
        lens = logit_lens(lm, LENS_PROMPT, LENS_TOKENS)
        beside = _generated(handles) - before
        outputs = [handle.result() for handle in handles]
    for text, output in zip(QUESTIONS, outputs, strict=True):
        console.print(Text.assemble((f"{text} ", "bold"), output.text.strip().replace("\n", " ")))
    console.print(_lens_table(lens))
    steps = lens.receipt.steps
    console.print(
        f"The trace was served {lens.receipt.reads} values in {steps['modules']} steps. Meanwhile, in the same batch, the "
        f"plain requests made {beside} tokens."
    )
    console.print(_heatmap_line(lens, out))
    console.print()


def _wait_for_first_tokens(handles: list[RequestHandle]) -> None:
    """Until each plain request generates, so that the trace joins a running batch."""
    while not all(handle.done or handle.requests[0].output_token_ids for handle in handles):
        time.sleep(0.01)


def _generated(handles: list[RequestHandle]) -> int:
    return sum(len(handle.requests[0].output_token_ids) for handle in handles)


@contextmanager
def _bars(console: Console, names: list[str], handles: list[RequestHandle], total: int) -> Iterator[None]:
    """A progress bar for each request, until the block ends."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    stop = threading.Event()
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = [progress.add_task(name, total=total) for name in names]

        def follow() -> None:
            while not stop.wait(0.1):
                for task, handle in zip(tasks, handles, strict=True):
                    progress.update(task, completed=total if handle.done else _generated([handle]))

        thread = threading.Thread(target=follow, name="demo-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _lens_table(lens: LensTable) -> Table:
    first = max(0, len(lens.tokens) - LENS_COLUMNS)
    table = Table(
        title=f"Logit lens of {LENS_PROMPT!r}: what each layer would say next, after ...", title_justify="left"
    )
    table.add_column("layer", justify="right")
    for token in lens.tokens[first:]:
        table.add_column(_quoted(token), no_wrap=True)
    for layer, words in enumerate(lens.words):
        cells = [_cell(word, lens.probs[layer, first + i].item()) for i, word in enumerate(words[first:])]
        table.add_row(str(layer), *cells)
    return table


def _cell(word: str, prob: float) -> Text:
    style = "bold green" if prob >= 0.5 else "green" if prob >= 0.2 else "dim"
    return Text(f"{_quoted(word)[:12]} {prob:.0%}", style=style)


def _quoted(token: str) -> str:
    return repr(token)[1:-1].replace(" ", "·")


def _heatmap_line(lens: LensTable, out: Path) -> str:
    try:
        path = draw_heatmap(lens, out)
    except ImportError:
        return "No heatmap was drawn: it needs matplotlib (pip install matplotlib)."
    return f"The whole lens, all positions: {path}"


def draw_heatmap(lens: LensTable, out: Path) -> Path:
    """Write the lens as a PNG: layers upwards, positions to the right. Returns its path.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    layers, positions = lens.probs.shape
    figure = Figure(figsize=(1.0 + 0.8 * positions, 1.2 + 0.24 * layers), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(lens.probs.numpy(), origin="lower", aspect="auto", cmap="YlGn", vmin=0, vmax=1)
    for layer in range(layers):
        for position in range(positions):
            dark = lens.probs[layer, position] > 0.6
            word = _plain(lens.words[layer][position])[:9]
            axes.text(position, layer, word, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    axes.set_xticks(range(positions), [_plain(token) for token in lens.tokens], rotation=45)
    axes.set_yticks(range(0, layers, max(1, layers // 10)))
    axes.set_xlabel("token that was read")
    axes.set_ylabel("layer")
    axes.set_title("What each layer would say next")
    figure.colorbar(image, label="probability", shrink=0.6)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "logit_lens.png"
    figure.savefig(path, dpi=150)
    return path


def _plain(token: str) -> str:
    """A token as a figure's font can show it."""
    text = _quoted(token).replace("$", r"\$")
    return text if text.isascii() or all(ord(char) < 0x250 for char in text) else ascii(text)[1:-1]


# -- a steered request beside its twin -------------------------------------------------------


def steering_vector(lm: Any, layer: int) -> torch.Tensor:
    """[hidden]: the mean state of one text minus that of another. The first token's, unlike all others, is left out."""
    with lm.trace() as tracer:
        with tracer.invoke(TOWARDS):
            towards = lm.model.layers[layer].output[0, 1:].mean(0).save()
        with tracer.invoke(AWAY):
            away = lm.model.layers[layer].output[0, 1:].mean(0).save()
    return towards - away


def _show_steering(lm: LM, console: Console, max_tokens: int) -> None:
    console.rule("[bold]2. A steered request beside its unsteered twin")
    layer = len(lm.model.layers) // 2
    vector = steering_vector(lm, layer)
    twin = lm.submit(STEER_PROMPT, SamplingParams(max_tokens=max_tokens, **SAMPLING))
    with _bars(console, ["unsteered twin"], [twin], max_tokens):
        with lm.generate(STEER_PROMPT, max_new_tokens=max_tokens, **SAMPLING) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[layer].output = lm.model.layers[layer].output + vector
            ids = tracer.result.save()
        plain = twin.result()
    tokenizer: Any = lm.tokenizer
    steered = tokenizer.decode(ids[0, len(plain.prompt_token_ids) :], skip_special_tokens=True)
    width = max(24, (console.width - 2) // 2)
    console.print(f"Prompt: [bold]{STEER_PROMPT}[/]")
    console.print(
        Columns(
            [
                Panel(Text(plain.text.strip()), title="unsteered", width=width),
                Panel(Text(steered.strip()), title="steered towards the sea", width=width, border_style="green"),
            ]
        )
    )
    console.print(
        f"Both ran in the same batch. The trace added (mean of an ocean text - mean of an office text) to the output of "
        f"layer {layer}, {tracer.receipt.edits} times."
    )
    alone = lm.generate([STEER_PROMPT], SamplingParams(max_tokens=max_tokens, **SAMPLING))[0]
    same = "the same tokens" if alone.token_ids == plain.token_ids else "[red]other tokens[/]"
    console.print(f"The twin, generated once more with nobody beside it: {same}.")
    console.print()


def _chats(lm: LM) -> bool:
    return bool(getattr(lm.tokenizer, "chat_template", None))

"""Several servers on one machine, started one after the other and measured by turns under the same traffic.

    python benchmarks/serving_turns.py --out FILE --server 'NAME=COMMAND {model} {port}' --server 'OTHER=...'

A command of the shell serves the model folder {model} under the name "m", at {port} of 127.0.0.1, with `/health`. All servers stay
up, and an idle one does nothing. Of each load (see `http_traffic.py`) every server has a turn, the first one's alternating. The
folder has the config.json of --config with 49,152 tokens, and a byte-level tokenizer; weights are to be random ones.
After --seconds no further load begins. The record grows by each turn: p50, p90 and p99 of the time to the first token
(`ttft_ms`), of the gaps between tokens (`itl_ms`) and of the time a token of each request (`tpot_ms`). `mix` and `interference`
run whole, whatever --scale says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from cold_start import TINY
from http_traffic import measure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LOADS = ("interference", "clients-256", "poisson-10", "clients-32", "poisson-25", "mix")
WHOLE = ("interference", "mix")
VOCAB = 49152
FIRST_PORT = 8471


def write_model(config: Path, folder: Path, tiny: bool) -> None:
    """The config with `VOCAB` tokens, and a tokenizer whose tokens are bytes and words."""
    settings = json.loads((config / "config.json").read_text())
    if tiny:
        settings |= TINY
        settings.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": VOCAB}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"\u0120w{i}" for i in range(VOCAB - len(letters)))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[2]).save_pretrained(folder)


@contextlib.contextmanager
def serving(command: str, model: Path, port: int, log: Path, until: float) -> Iterator[float]:
    """A running server: the seconds of its start. Raises RuntimeError, with the end of its log, if it does not answer."""
    started = time.monotonic()
    text = command.replace("{model}", str(model)).replace("{port}", str(port))
    with log.open("wb") as file:
        process = subprocess.Popen(["bash", "-c", text], stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[:60]!r} does not serve:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield round(time.monotonic() - started, 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measured(pool: ProcessPoolExecutor, args: argparse.Namespace, load: str, turn: int) -> dict[str, Any]:
    """A turn of one server. Token ids differ between turns; lengths and arrivals do not."""
    if load == "warm-up":
        args.scale = min(0.1, args.scale)
        measure(pool, args, "clients-64", 1000)
        return measure(pool, args, "interference", 1001)
    if load in WHOLE and not args.tiny:
        args.scale = max(1.0, args.scale)
    return measure(pool, args, load, turn)


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    if "error" in row:
        return row["error"]
    times = ("/".join(f"{value:.1f}" for value in row[key].values()) for key in ("ttft_ms", "itl_ms", "tpot_ms"))
    return f"{row['tokens_per_s']:,.0f} tok/s, first token, between tokens, a token: {'  '.join(times)} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--config", type=Path, default=Path("benchmarks/configs/llama8b"))
    parser.add_argument("--load", nargs="+", default=LOADS)
    parser.add_argument("--scale", type=float, default=0.4, help="fraction of the requests, or of the 20 seconds")
    parser.add_argument("--processes", type=int, default=8, help="of clients")
    parser.add_argument("--tiny", action="store_true", help="a small model and short workloads, to try the script")
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=225.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.model, args.vocab_size = "m", VOCAB
    began = time.monotonic()
    record: dict[str, Any] = {
        "config": args.config.name,
        "scale": args.scale,
        "servers": args.server,
        "starts": {},
        "rows": [],
    }
    logs = args.out.resolve().parent
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(args.processes))
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(args.config, model, args.tiny)
        urls: dict[str, str] = {}
        for port, given in enumerate(args.server, FIRST_PORT):
            name, _, command = given.partition("=")
            log = logs / f"server-{name}.log"
            server = serving(command, model, port, log, began + args.seconds)
            record["starts"][name] = stack.enter_context(server)
            urls[name] = f"http://127.0.0.1:{port}"
            print(name, "serves after", record["starts"][name], "s", flush=True)
        for turn, load in enumerate(("warm-up", *args.load)):
            for name in list(urls)[:: 1 if turn % 2 else -1]:
                if (left := began + args.seconds - time.monotonic()) < 0:
                    record.setdefault("left_out", []).append([name, load])
                    continue
                settings = argparse.Namespace(**vars(args) | {"url": urls[name]})
                try:
                    row = {"name": name, **measured(pool, settings, load, turn)}
                except (RuntimeError, OSError) as error:
                    row = {
                        "name": name,
                        "load": load,
                        "error": f"{error!r}; {(logs / f'server-{name}.log').read_text()[-1000:]}",
                    }
                record["rows"].append(row)
                print(f"{left:4.0f} s left ", name, load, shown(row), flush=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""Counts the ways in which the package does one thing, and prints them as a table.

    python tools/ways.py             # the table
    python tools/ways.py --measure   # also the files that a plain request enters (needs torch)

`WAYS` names each way by its place in the code. A removed way leaves the table, because its place is gone. A new way is added
here, with a reason in its own file. Numbers of `AT_MOST` may only fall (tests/test_ways.py).
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pymllm_interp"


@dataclass(frozen=True)
class Concept:
    """One thing that the package does, and the ways in which it does it.

    Attributes:
        name: of the concept.
        target: number of ways that remain at the end.
        ways: "file:Name" or "file:Class.method", relative to the package.
    """

    name: str
    target: int
    ways: tuple[str, ...]


WAYS = (
    Concept("keep a captured row", 3, (
        "hooks/captures/rows.py:GroupRows.put", "hooks/captures/egress/copier.py:BlockCopies",
        "hooks/captures/rows.py:GroupRows.keep",
    )),
    Concept("run a block", 3, (  # `TakenLoop` is a part of a replay, with its gain in its file
        "hooks/traces/blocks/block_runner.py:BlockRunner", "hooks/traces/lowering/replay.py:Replay",
        "hooks/traces/lowering/step_loop.py:TakenLoop",
        "client/remote/remote_tracer.py:RemoteTracer._send",
    )),
    Concept("serve a `with`", 2, (
        "client/calls/traces.py:run", "client/remote/remote_tracer.py:RemoteTracer",
    )),
    Concept("compute an op", 3, (
        "layers/edits/host.py:HostOps", "kernels/edit_ops.py", "kernels/edit_pair.py",
    )),
    Concept("captured graphs", 5, (
        "runner/graphs/cuda_graph_runner.py:CudaGraphRunner", "runner/graphs/prefill_graphs.py:PrefillGraphs",
        "runner/graphs/segments.py:DecodeSegments", "runner/graphs/prompt_segments.py:PromptSegments",
        "runner/drafting/draft_graphs.py:DraftGraphs",
    )),
    Concept("facts of a model for clients", 1, (
        "client/facts.py:ModelFacts",
    )),
    Concept("reach an engine process", 2, (
        "server/engines/process_door.py:ProcessDoor", "server/engines/replicas_door.py:ReplicasDoor",
    )),
)  # fmt: skip
AT_MOST = {
    "keep a captured row": 3,
    "run a block": 4,
    "serve a `with`": 2,
    "compute an op": 3,
    "captured graphs": 5,
    "facts of a model for clients": 1,
    "reach an engine process": 2,
    "protocols of the runner": 3,
    "base classes of LM, ModelRunner, Engine and EngineTracer": 4,
    "functions of more than 80 lines": 2,
    "functions of more than 20 parameters": 10,
    "host files that a plain request enters": 40,
    "files of hooks/ among them": 1,
}
"""Row of the table -> its number today, which may only fall."""
TARGETS = {
    "protocols of the runner": 3,  # `Stage`, `RunnerCommand` and `Replayable`, which have several classes
    "base classes of LM, ModelRunner, Engine and EngineTracer": 4,  # calls, tree and node of an LM; parts of a runner
    "functions of more than 20 parameters": 10,  # `LM`, and Triton kernels launched by position: see kernels/edit_ops.py
    "lines of the package": 72_000,  # an estimate by reading. Functions of five lines with one syntax tree, names aside, are layers
    # (`.source` names their operations), kernels and their launches: 100 lines. Fewer lines are fewer features, or wider ones.
    "lines of the tests": 48_000,  # likewise, fewer lines would be fewer tests: 28 pairs in a file are alike by two thirds
    "decisions": 42,  # tests/docs/test_decisions.py holds it
    "host files that a plain request enters": 40,
    "files of hooks/ among them": 2,
}
MANY_PARAMETERS, MANY_LINES = 20, 80
KERNEL_ROOMS = ("attention", "kernels", "layers", "models")
"""Folders that are not host code: they compute."""


@cache
def tree_of(file: str) -> ast.Module:
    """The syntax tree of a file of the package."""
    return ast.parse((PACKAGE / file).read_text())


def stands(place: str) -> bool:
    """Whether a place of `WAYS` is in the code."""
    file, _, name = place.partition(":")
    if not (PACKAGE / file).exists():
        return False
    body: list[ast.stmt] = tree_of(file).body
    for part in name.split(".") if name else ():
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def _bases(name: str) -> set[str]:
    """Names of all classes of the package that a class has above it."""
    found: set[str] = set()
    for node in _classes().get(name, ()):
        for base in node.bases:
            own = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            if own in _classes():
                found |= {own} | _bases(own)
    return found


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for file in _files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@cache
def _files() -> tuple[str, ...]:
    return tuple(str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")))


def _functions() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for file in _files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


@cache
def counts() -> dict[str, int]:
    """Row of the table -> its number."""
    runner = [node for file in _files() if file.startswith("runner/") for node in ast.walk(tree_of(file))]
    protocols = [
        node for node in runner
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases)
    ]  # fmt: skip
    functions = list(_functions())
    return {
        **{concept.name: len(concept.ways) for concept in WAYS},
        "protocols of the runner": len(protocols),
        "base classes of LM, ModelRunner, Engine and EngineTracer": sum(
            len(_bases(name)) for name in ("LM", "ModelRunner", "Engine", "EngineTracer")
        ),
        "functions of more than 80 lines": sum((f.end_lineno or 0) - f.lineno >= MANY_LINES for f in functions),
        "functions of more than 20 parameters": sum(_parameters(f) > MANY_PARAMETERS for f in functions),
        "lines of the package": _lines(PACKAGE),
        "lines of the tests": _lines(ROOT / "tests"),
        "decisions": len(list((ROOT / "docs" / "decisions").glob("[0-9]*.md"))),
    }


def targets() -> dict[str, int]:
    """Row of the table -> the number that is aimed at."""
    return {**{concept.name: concept.target for concept in WAYS}, **TARGETS}


def entered_files() -> list[str]:
    """Files of the package that a plain request on a CPU enters after the first one, without those that compute."""
    import sys

    from transformers import LlamaConfig

    from pymllm_interp import LM, SamplingParams

    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    lm = LM("tiny", hf_config=config, load_format="dummy", device="cpu", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts: list[list[int]] = [[1, 2, 3]]
    lm.generate(prompts, params)
    found: set[str] = set()

    def enter(frame: object, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)  # pyright: ignore[reportAttributeAccessIssue]

    lm.engine.call(lambda: sys.setprofile(enter))
    sys.setprofile(enter)
    try:
        lm.generate(prompts, params)
    finally:
        sys.setprofile(None)
        lm.engine.call(lambda: sys.setprofile(None))
        lm.shutdown()
    own = [str(Path(file).relative_to(PACKAGE)) for file in found if Path(file).is_relative_to(PACKAGE)]
    return sorted(file for file in own if file.partition("/")[0] not in KERNEL_ROOMS)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="run a plain request, and list the files that it enters")
    asked = parser.parse_args()
    found = counts()
    if asked.measure:
        files = entered_files()
        found["host files that a plain request enters"] = len(files)
        found["files of hooks/ among them"] = sum(file.startswith("hooks/") for file in files)
        print(*files, "", sep="\n")
    aimed = targets()
    width = max(map(len, found))
    print(f"{'':{width}}  {'now':>7}  {'target':>7}")
    for name, count in found.items():
        print(f"{name:{width}}  {count:>7,}  {aimed.get(name, ''):>7}")


if __name__ == "__main__":
    main()

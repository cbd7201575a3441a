"""nnsight 0.8.1's own tests, run over nnsight's model and over `LM`, on the same weights.

Usage: python benchmarks/nnsight_suite.py [--sdist nnsight-0.8.1.tar.gz] [--only test_language.py] [-k expression]

The source distribution comes from PyPI; no part of it is kept. Its tests are ported by `nnsight_suite_rules` to the demo model,
and run twice: with nnsight's model, the control, and with ours. Tests without a language model, which try nnsight's own classes
on bare modules, run with the control only. The results go to benchmarks/results/nnsight-suite.json and nnsight-suite.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import nnsight_suite_rules as rules

from pymllm_interp.bench import describe_machine

VERSION = "0.8.1"
HERE = Path(__file__).parent
RESULTS = HERE / "results"
PASSES, FAILS, DIFFERS, NOT_APPLICABLE, NO_MODEL = "passes", "fails", "differs", "not applicable", "no model"
VERDICTS = (PASSES, FAILS, DIFFERS, NOT_APPLICABLE, NO_MODEL)
"""`DIFFERS` are failures that `rules.DIFFERENCES` explains. `NO_MODEL` are tests on bare modules, run with nnsight only."""


def fetch_sdist() -> bytes:
    """nnsight's source distribution, as pip gets it: from PyPI, or the index that pip is set to."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", folder]
        subprocess.run([*command, f"nnsight=={VERSION}"], check=True, stdout=subprocess.DEVNULL)
        (sdist,) = Path(folder).glob("nnsight-*.tar.gz")
        return sdist.read_bytes()


def unpack_tests(sdist: bytes) -> dict[str, str]:
    """name, relative to nnsight's tests -> text, of every Python file."""
    start = f"nnsight-{VERSION}/tests/"
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        names = [name for name in archive.getnames() if name.startswith(start) and name.endswith(".py")]
        return {name.removeprefix(start): archive.extractfile(name).read().decode() for name in names}  # pyright: ignore


def reason_left_out(name: str) -> str | None:
    for start, reason in rules.FILES_LEFT_OUT.items():
        if name == start or (start.endswith("/") and name.startswith(start)):
            return reason
    return None


def write_ported(tests: dict[str, str], folder: Path) -> None:
    for name, text in tests.items():
        path = folder / name.replace("vllm/test_", "vllm/test_vllm_")  # pytest wants each file's name once
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rules.port(name, text))


def run_tests(folder: Path, model: str, only: list[str] | None, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Run the ported tests in a process of their own.

    Args:
        model: "nnsight" or "LM".
        only: ids of tests; None runs all.

    Returns:
        id -> outcome ("passed", "failed", "error", "skipped"), reason, whether the test used a model.
    """
    out, wanted = folder / f"{model}.json", folder / "only.json"
    environment = {
        **os.environ, "NNSIGHT_SUITE_MODEL": model, "NNSIGHT_SUITE_OUT": str(out), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "TOKENIZERS_PARALLELISM": "false",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    if only is not None:
        wanted.write_text(json.dumps(only))
        environment["NNSIGHT_SUITE_ONLY"] = str(wanted)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "nnsight_suite_plugin",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    ran = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not out.is_file() or ran.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended before its results:\n{ran.stdout[-5000:]}")
    return json.loads(out.read_text())


def judge(test: str, control: dict[str, Any], ours: dict[str, Any] | None) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"nnsight": control["outcome"]}
    if ours is None:
        verdict = NO_MODEL if control["outcome"] == "passed" else NOT_APPLICABLE
        return {**row, "verdict": verdict, "reason": first_line(control)}
    row["LM"] = ours["outcome"]
    not_ours, differs = rules.reason_in(rules.NOT_OURS, test), rules.reason_in(rules.DIFFERENCES, test)
    if ours["outcome"] == "passed":
        return {**row, "verdict": PASSES}
    if ours["outcome"] == "skipped" or not_ours is not None:
        return {**row, "verdict": NOT_APPLICABLE, "reason": not_ours or first_line(ours)}
    if control["outcome"] in ("failed", "error"):
        return {
            **row,
            "verdict": NOT_APPLICABLE,
            "reason": f"fails with nnsight on this model, too: {first_line(control)}",
        }
    if differs is not None:
        return {**row, "verdict": DIFFERS, "reason": differs, "error": first_line(ours)}
    return {**row, "verdict": FAILS, "reason": first_line(ours), "where": ours.get("where", [])}


def first_line(result: dict[str, Any]) -> str:
    """The first line of the reason, without paths of this machine."""
    line = str(result.get("reason", "")).split("\n", 1)[0]
    return re.sub(r"(/[\w.~-]+){2,}", "...", line)[:200]


def write_report(table: dict[str, dict[str, Any]], left_out: dict[str, str], folder: Path) -> None:
    """nnsight-suite.json, and nnsight-suite.md with counts by file, and each failure and difference."""
    record = {"nnsight": VERSION, "machine": describe_machine(), "tests": table, "files_left_out": left_out}
    (folder / "nnsight-suite.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "nnsight-suite.md").write_text(markdown(table, left_out))


def markdown(table: dict[str, dict[str, Any]], left_out: dict[str, str]) -> str:
    files: dict[str, Counter[str]] = {}
    for test, row in table.items():
        files.setdefault(test.partition("::")[0], Counter())[row["verdict"]] += 1
    lines = [
        f"# nnsight {VERSION}'s own tests",
        "",
        "Made by `python benchmarks/nnsight_suite.py`; each test is in [nnsight-suite.json](nnsight-suite.json). The tests are",
        'ported to SmolLM2-135M, and run with nnsight\'s model and with `LM`; those of `vllm/` with `LM` alone. "No model" are',
        "tests of nnsight's own classes on bare modules, which an `LM` uses as they are.",
        "",
        f"| file | {' | '.join(VERDICTS)} |",
        "|---" * (len(VERDICTS) + 1) + "|",
    ]
    total = sum(files.values(), Counter())
    for name, counts in [*sorted(files.items()), ("all", total)]:
        lines.append(f"| {name} | " + " | ".join(str(counts[verdict] or "") for verdict in VERDICTS) + " |")
    for verdict in (FAILS, DIFFERS, NOT_APPLICABLE):
        reasons: dict[str, list[str]] = {}
        for test, row in table.items():
            if row["verdict"] == verdict:
                reasons.setdefault(row["reason"], []).append(test.rpartition("::")[2])
        lines += ["", f"## {verdict.capitalize()}", ""]
        lines += [
            f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in sorted(reasons.items())
        ]
        lines += [] if reasons else ["None."]
    lines += ["", "## Files left out", "", *(f"- `{name}`: {reason}" for name, reason in sorted(left_out.items()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sdist", type=Path, help="a downloaded source distribution; without it, from PyPI")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="FILE", help="these files; nothing is written to results"
    )
    parser.add_argument("-k", default="", help="pytest's -k; nothing is written to results")
    parser.add_argument("--control", type=Path, help="file that keeps the control's results for later runs")
    options = parser.parse_args()

    tests = unpack_tests(options.sdist.read_bytes() if options.sdist else fetch_sdist())
    left_out = {name: reason for name in tests if (reason := reason_left_out(name)) is not None}
    tests = {name: text for name, text in tests.items() if name not in left_out}
    if options.only:
        tests = {name: text for name, text in tests.items() if name in options.only or "conftest" in name}
    arguments = ["-k", options.k] if options.k else []
    with tempfile.TemporaryDirectory(prefix="nnsight-suite-") as temporary:
        folder = Path(temporary)
        write_ported(tests, folder)
        if options.control and options.control.is_file():
            control = json.loads(options.control.read_text())
        else:
            control = run_tests(folder, "nnsight", None, arguments)
            if options.control:
                options.control.write_text(json.dumps(control))
        ours = run_tests(folder, "LM", [test for test, result in control.items() if result["model"]], arguments)
    table = {test: judge(test, result, ours.get(test)) for test, result in sorted(control.items())}
    for test, row in table.items():
        if row["verdict"] == FAILS:
            print(f"{test}\n    {row['reason']}\n    " + "\n    ".join(row["where"]))
    print(dict(Counter(row["verdict"] for row in table.values())))
    if not options.only and not options.k:
        write_report(table, left_out, RESULTS)


if __name__ == "__main__":
    main()

"""Writes docs/reference/api.md, which git ignores, from the docstrings.

Usage: make api, or python docs/make_api.py [FILE]

A public class is shown with its signature, summary and arguments, then its fields, properties and methods: those with a
docstring and without a leading underscore, of the class and of its base classes in this package.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "reference" / "api.md"
PACKAGE = "pymllm_interp"


@dataclass(frozen=True)
class Section:
    """A heading of the page, and the names under it: the package's own, and others as "module:name".

    `hidden` are members for other modules only.
    """

    title: str
    text: str
    names: tuple[str, ...]
    hidden: tuple[str, ...] = ()


PLUMBING = (
    "act", "addend", "basis", "channels", "encodes", "filled", "fit", "identity", "name", "named", "names", "operands",
    "sites_in", "tensors", "unit", "vectors", "whole", "words", "written",
)  # fmt: skip
"""Members of specs that only the engine uses."""

SECTIONS = [
    Section(
        "LM", "Prompts in, outputs out; and the tree that traces are written against ([traces](../use/trace.md)).",
        ("LM", "client.request_options:RequestOptions", "config:ServerConfig", "config:EngineTuning"),
        ("interleave", "interleaver", "source", "input", "inputs", "output"),
    ),
    Section(
        "Backends", "What `LM(backend=...)` asks of an engine.",
        ("client.backend:Backend", "client.facts:ModelFacts", "client.backend:Submission", "client.handle:RequestEngine"),
    ),
    Section(
        "Traces", "What a `with` binds: `with lm.trace(prompt) as tracer:` ([traces](../use/trace.md)).",
        ("hooks.traces.syntax.tracer:EngineTracer", "hooks.traces.syntax.tracer:EngineInvoker", "captures:SavedSteps"),
        ("execute",),
    ),
    Section(
        "Sampling", "", ("SamplingParams", "core.structured.token_constraint:ConstraintSpec",
        "core.structured.token_constraint:TokenConstraint",
        "sampling:StructuredOutputs", "sampling:allow_only", "sampling:ConstraintError"),
        ("greedy", "stop_strings"),
    ),
    Section(
        "Outputs", "", ("RequestOutput", "client.completion:CompletionOutput", "core.events:Logprob",
        "client.calls.forward_calls:ForwardOutput", "client.calls.activation_cache:ActivationCache",
        "client.calls.site_hooks:HookPoint",
        "client.handle:RequestHandle", "client.completion:StreamPiece"), ("put", "of"),
    ),
    Section(
        "Receipts", "What was applied to a request, and how its steps ran.",
        ("core.receipt:Receipt", "core.receipt:Applied", "core.receipt:Captured"),
    ),
    Section(
        "Sites and positions", "Where a capture reads and an intervention acts.",
        ("captures:Site", "interventions:Generated"),
    ),
    Section(
        "Captures", "Declared reads ([captures](../use/capture.md)).",
        ("Capture", "captures:Project", "Activations"), ("add", "as_arrived", *PLUMBING),
    ),
    Section(
        "SAEs and lenses", "Reductions of captures, and the files that they read ([captures](../use/capture.md)).",
        ("SAE", "captures:Features", "captures:Lens", "captures:TunedLens", "captures:JacobianLens"), PLUMBING,
    ),
    Section(
        "Interventions", "Declared edits ([interventions](../use/intervene.md)).",
        ("hooks.interventions.op:Op", "Steer", "Ablate", "Clamp",
        "Scale", "Patch", "interventions:Knockout", "Gate", "interventions:SetFeature",
        "interventions:Reconstruct"),
        PLUMBING,
    ),
    Section(
        "Harvests", "Captures of a corpus on disk ([harvest](../guides/harvest.md)).",
        ("harvest:open_harvest", "harvest:Harvest", "harvest.reader:Shard", "harvest.reader:ShardedRows",
        "harvest.run:HarvestResult", "harvest.feed.batches:ActivationBatches", "harvest.feed.batches:StateBatch"),
    ),
    Section(
        "Toolkit", "What the experiments of an `LM` return, and `contrast` ([toolkit](../guides/toolkit.md)).",
        ("toolkit.sweep_result:PatchSweep", "toolkit.sweep_result:SweepCell", "toolkit.attribution_result:Attribution",
        "toolkit.attribution_result:Completeness", "toolkit.attribution_result:Attributed", "toolkit:contrast",
        "toolkit:ControlVectors", "toolkit:loss_recovered", "toolkit:LossRecovered", "toolkit:Circuit"),
    ),
    Section(
        "Plots", "`from pymllm_interp import plots` ([other libraries](../guides/libraries.md)).",
        ("plots.figure:Plot", "plots.heatmaps:attention_patterns", "plots.heatmaps:lens_heatmap", "plots.heatmaps:sweep_heatmap",
        "plots.heatmaps:image_heatmap", "plots.heatmaps:feature_activations", "plots.bars:attribution_bars"),
    ),
    Section(
        "Errors", "What is raised, beside Python's own errors.",
        ("utils.arguments:PromptError", "models.registry:UnsupportedModelError", "models.weights.loading:WeightsError",
        "client.handle:RequestError",
        "client.handle:EngineClosedError", "captures:CaptureError", "harvest:HarvestError",
        "hooks.traces.blocks.errors:TraceError", "hooks.traces.blocks.errors:EditError", "hooks.traces.blocks.errors:GangError",
        "hooks.traces.blocks.errors:MixedRowsError",
        "hooks.traces.blocks.errors:TraceTimeoutError"),
    ),
    Section(
        "Runners", "The forward passes of an engine ([how a step runs](../internals/step.md)).",
        ("runner:ModelRunner", "runner:InterpModelRunner"),
    ),
]  # fmt: skip


def make_page() -> str:
    """The page's text."""
    lines = ["# API", "", "Made from the docstrings by `make api`."]
    names = [entry.split(":")[-1] for section in SECTIONS for entry in section.names]
    lines += ["", " · ".join(f"[{name}](#{name.lower()})" for name in names)]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", *(["", section.text] if section.text else [])]
        for entry in section.names:
            module, _, name = entry.rpartition(":")
            home = f"{PACKAGE}.{module}" if module else PACKAGE
            thing = getattr(import_module(home), name)
            lines += ["", f"### {name}", "", f"`from {home} import {name}`"]
            lines += [""] + (show_class(thing, section) if inspect.isclass(thing) else show_function(thing))
    return "\n".join(lines).rstrip() + "\n"


# -- one entry ------------------------------------------------------------------------------------


def show_class(cls: type, section: Section) -> list[str]:
    """A class with its members, each name once, as the most derived class defines it."""
    trees = [tree_of(base) for base in inspect.getmro(cls) if base.__module__.startswith(PACKAGE)]
    init = next((node for node in functions(trees[0]) if node.name == "__init__"), None)
    lines = fenced(f"{cls.__name__}{signature(init)}") if init is not None else []
    lines += markdown(ast.get_docstring(trees[0]))
    fields, properties, methods, seen = [], [], [], set(section.hidden)
    inherited = {name: text for tree in reversed(trees) for name, _, text in described_fields(tree) if text}
    for tree in trees:
        for name, type_and_default, text in described_fields(tree):
            if name not in seen:
                text = text or inherited.get(name, "")
                fields.append(f"- `{name}{type_and_default}`" + (f": {text}" if text else ""))
                seen.add(name)
        for node in functions(tree):
            text = ast.get_docstring(node)
            if text is None or node.name.startswith("_") or node.name in seen:
                continue
            seen.add(node.name)
            if any(decorator.endswith("property") for decorator in decorators(node)):
                properties.append(f"- `{node.name}`: {inline(text)}")
            else:
                methods += ["", f"#### {cls.__name__}.{node.name}", "", *fenced(f"{node.name}{signature(node)}")]
                methods += markdown(text)
    for title, items in (("Fields", fields), ("Properties", properties)):
        lines += ["", f"{title}:", "", *items] if items else []
    return lines + methods


def show_function(function: Any) -> list[str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    return fenced(f"{node.name}{signature(node)}") + markdown(ast.get_docstring(node))


def tree_of(cls: type) -> ast.ClassDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def functions(tree: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """A setter of a property counts as the property; nnsight's `eproperty` is one, too."""
    return [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]


def described_fields(tree: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """(name, its type and default, docstring) of each annotated field."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if (
            not isinstance(node, ast.AnnAssign)
            or not isinstance(node.target, ast.Name)
            or node.target.id.startswith("_")
        ):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = inline(inspect.cleandoc(after.value.value))
        yield node.target.id, f": {ast.unparse(node.annotation)}{default_of(node.value)}", text


def default_of(value: ast.expr | None) -> str:
    if value is None or (isinstance(value, ast.Call) and not value.keywords):
        return ""
    if isinstance(value, ast.Call):
        factories = {word.arg: ast.unparse(word.value) for word in value.keywords}
        made = factories.get("default_factory")
        return f" = {factories['default']}" if "default" in factories else (f" = {made}()" if made else "")
    return f" = {ast.unparse(value)}"


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | None) -> str:
    """Arguments, a line each where they do not fit in one, without `self` and with the result's type."""
    if node is None:
        return "()"
    parts = arguments(node.args)
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    line = f"({', '.join(parts)}){result}"
    return line if len(line) <= 90 else "(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def arguments(args: ast.arguments) -> list[str]:
    """Each argument with its type and its default; the star before keyword-only arguments is one, too."""
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parts = [
        argument(arg, default)
        for arg, default in zip(positional, defaults, strict=True)
        if arg.arg not in ("self", "cls")
    ]
    if args.vararg is not None:
        parts.append("*" + argument(args.vararg, None))
    elif args.kwonlyargs:
        parts.append("*")
    parts += [argument(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*parts, "**" + argument(args.kwarg, None)] if args.kwarg is not None else parts


def argument(arg: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {ast.unparse(arg.annotation)}" if arg.annotation is not None else ""
    equals = " = " if annotation else "="
    return f"{arg.arg}{annotation}" + (f"{equals}{ast.unparse(default)}" if default is not None else "")


# -- docstrings --------------------------------------------------------------------------------------

HEADINGS = ("Args", "Attributes", "Raises", "Returns", "Yields")


def fenced(code: str) -> list[str]:
    return ["```text", *code.splitlines(), "```", ""]


def inline(text: str) -> str:
    return " ".join(code_marks(text).split())


def code_marks(text: str) -> str:
    """reStructuredText's double backticks -> Markdown's single ones."""
    return text.replace("``", "`")


def markdown(text: str | None) -> list[str]:
    """A docstring as Markdown: paragraphs, lists of arguments, code where the docstring indents it."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text or ""):
        heading, _, rest = block.partition(":\n")
        if heading in HEADINGS:
            lines += [f"{heading}:", "", *items(textwrap.dedent(rest)), ""]
        elif block.startswith("- "):
            lines += [f"- {inline(entry)}" for entry in re.split(r"(?:^|\n)- ", block)[1:]] + [""]
        elif all(line.startswith("    ") for line in block.splitlines()):
            lines += fenced(textwrap.dedent(block))
        else:
            lines += [inline(block.removesuffix("::") + (":" if block.endswith("::") else "")), ""]
    return lines[:-1] if lines else lines


def items(text: str) -> list[str]:
    """The entries of a list such as "Args:", a bullet each; text without names stays one paragraph."""
    entries = re.split(r"\n(?=\S)", text)
    named = [re.match(r"(\*{0,2}[\w., ]+): (.*)", inline(entry)) for entry in entries]
    if not all(named):
        return [inline(text)]
    return [f"- `{found[1]}`: {found[2]}" for found in named if found is not None]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(make_page())


if __name__ == "__main__":
    main()

"""The rules of the code base, read from its syntax trees."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import pymllm_interp
from pymllm_interp import captures, harvest, interventions, runner, toolkit
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.runner.executions import WAYS
from pymllm_interp.runner.partition import Execution

ROOT = Path(pymllm_interp.__file__).parent
ORDER = (
    ("utils",), ("core",), ("speculative",), ("config",),
    ("kernels",), ("mem_cache",), ("attention",), ("layers",), ("sampling",), ("hooks",), ("interventions", "captures"),
    ("models",), ("runner",), ("engine",), ("wire",), ("client",), ("harvest",), ("vllm_engine",), ("plots",), ("toolkit",),
    ("lens",), ("lm",), ("server",), ("cluster",),
    ("__main__", "cli", "bench", "cache_cli", "demo", "doctor", "evals", "nnterp"),
)  # fmt: skip
"""An import goes to an earlier place, or stays in its own."""
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
FILES = {
    ".".join(("pymllm_interp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
LOADERS = {
    "pymllm_interp.hooks.catalogue": ("hooks.interventions", "hooks.captures", "hooks.captures.reductions"),
    "pymllm_interp.utils.extras": (),
}
"""Modules that import others by a computed name -> the folders of ours that they import so. Each ``__init__`` with `lazy_names` or
`names_of_extra` names what stands beside or below it, which type checkers see, too."""
CONFIG_FIELDS = [(cls, field.name) for cls in (ModelConfig, ServerConfig) for field in dataclasses.fields(cls)]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(module)))


@cache
def run_time_nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(at_run_time(tree_of(module)))


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for what stands under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from at_run_time(other)
            continue
        yield child
        yield from at_run_time(child)


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """(module of ours that `module` imports, line), wherever the import stands; the package's version may be anybody's."""
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    for node in run_time_nodes_of(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            whole = [f"{base}.{alias.name}" for alias in node.names if alias.name != "__version__"]
            names = [name if name in FILES else base for name in whole]
        elif isinstance(node, ast.Call):
            names = list(by_name(node, package))
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "pymllm_interp")
    folders = tuple(f"pymllm_interp.{folder}" for folder in LOADERS.get(module, ()))
    yield from ((name, 0) for name in FILES if name.rpartition(".")[0] in folders and FILES[name].name != "__init__.py")


def by_name(call: ast.Call, package: Sequence[str]) -> Iterator[str]:
    """The module that a call of `import_module` or ``__import__`` names; nothing for other calls, and for computed names."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function in ("import_module", "__import__") and call.args and isinstance(call.args[0], ast.Constant):
        name = str(call.args[0].value)
        level = len(name) - len(name.lstrip("."))
        yield ".".join((*package[: len(package) - level + 1], name[level:])) if level else name


def place(module: str) -> str:
    """The folder, or the file at the top, that the module belongs to; "" is the package itself."""
    return module.partition(".")[2].partition(".")[0]


def test_every_module_has_a_place_in_the_order():
    places = {place(module) for module in FILES} - {""}
    assert places <= LEVEL.keys(), f"no place in ORDER for {sorted(places - LEVEL.keys())}"


def allowed(importer: str, imported: str) -> bool:
    """The commands of the last place stand beside each other, and take the package as a user does."""
    if LEVEL[importer] == len(ORDER) - 1:
        return True
    return imported in LEVEL and LEVEL[imported] < LEVEL[importer]


def test_an_import_goes_to_the_left_only():
    wrong = [
        f"{FILES[module].name}:{line} imports {imported}"
        for module in FILES
        if place(module)
        for imported, line in imports_of(module)
        if place(imported) != place(module) and not allowed(place(module), place(imported))
    ]
    wrong += [
        f"{FILES[module].name} imports {imported} for type checkers"
        for module in FILES
        if place(module)
        for imported in all_imports_of(module)
        if place(imported) != place(module) and not allowed(place(module), place(imported))
    ]
    assert not wrong, wrong


def all_imports_of(module: str) -> set[str]:
    """Modules of ours that `module` imports, those for type checkers included."""
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in nodes_of(module):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            found |= {name if (name := f"{base}.{alias.name}") in FILES else base for alias in node.names}
    found |= {name for name, _ in imports_of(module)}
    return {name for name in found if name in FILES and name != module and place(name)}


def test_no_imports_go_in_circles_type_checkers_included():
    """Files that import each other cannot be read one after the other."""
    left = {module: all_imports_of(module) for module in FILES if place(module)}
    assert "pymllm_interp.core.forward_batch" in left["pymllm_interp.attention.attention_backend"]
    while ready := [module for module, imports in left.items() if not imports & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"imports in circles, or on the way to one: {sorted(left)}"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (
            ("site", "positions", "heads", "spec", "vectors"),
            ("captures", "interventions"),
        ),
        (("captures", "interventions.op", "interventions.specs", "interventions.projections"), ("declared",)),
        (("captures", "interventions", "declared"), ("traces",)),
    ],
)
def test_the_rooms_of_hooks_have_an_order(first, then):
    """Shared words, then captures and interventions, then what binds them, then traces, which only know shared words."""
    hooks = "pymllm_interp.hooks."
    for room in (*first, *then):
        assert any(f"{module}.".startswith(f"{hooks}{room}.") for module in FILES), f"{hooks}{room} is gone"
    wrong = [
        (module, name)
        for module in FILES
        if any(f"{module}.".startswith(f"{hooks}{room}.") for room in first)
        for name in all_imports_of(module)
        if any(f"{name}.".startswith(f"{hooks}{room}.") for room in then)
    ]
    allowed = {
        (hooks + "interventions." + name, hooks + "declared") for name in ("device_tables", "host_ops", "vector_pool")
    }
    assert not set(wrong) - allowed, wrong


def test_files_are_small():
    """No file over 500 lines, and seven of eight at most 300."""
    lengths = sorted((len(path.read_text().splitlines()), module) for module, path in FILES.items())
    assert lengths[-1][0] <= 500, lengths[-3:]
    assert lengths[int(0.875 * len(lengths))][0] <= 300, lengths[int(0.875 * len(lengths)) :]


def test_no_two_classes_have_one_name():
    """A name in a message or a traceback says which class it is."""
    homes: dict[str, list[str]] = {}
    for module in FILES:
        for node in nodes_of(module):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(f"{module}:{node.lineno}")
    assert len(homes) > 300
    assert not {name: found for name, found in homes.items() if len(found) > 1}


LINES = {
    "attention": 1950, "bench": 600, "client": 10100, "cluster": 700, "core": 3950, "engine": 4750, "evals": 500,
    "harvest": 3500, "hooks": 20950, "kernels": 4950, "layers": 3750, "lens": 1600, "mem_cache": 1750, "models": 10750,
    "plots": 650, "runner": 6750, "sampling": 1050, "server": 12350, "speculative": 250, "toolkit": 6300, "top": 1850,
    "utils": 1200, "vllm_engine": 8800, "wire": 2100,
}  # fmt: skip
"""Most lines of each folder, to the next 50: what grows is seen here. See docs/decisions, 137."""


def test_growth_is_seen():
    counts: Counter[str] = Counter()
    for path in FILES.values():
        counts["top" if path.parent == ROOT else path.relative_to(ROOT).parts[0]] += len(path.read_text().splitlines())
    assert not {room: (count, LINES[room]) for room, count in counts.items() if count > LINES[room]}


def test_the_import_reader_reads_imports():
    """It would see a wrong one: known imports are found, and what is for type checkers only is left out."""
    found = {name for name, _ in imports_of("pymllm_interp.runner.interp_model_runner")}
    assert {
        "pymllm_interp.hooks.traces.syntax.envoy",
        "pymllm_interp.runner.model_runner",
        "pymllm_interp.config",
    } <= found
    assert not any(place(name) == "attention" for name, _ in imports_of("pymllm_interp.core.forward_batch"))


def test_n01_the_plain_runner_reaches_no_hooks_by_any_way():
    """N1: plain serving has no interpretability code on its path."""
    seen, todo = set(), ["pymllm_interp.runner.model_runner"]
    while todo:
        module = todo.pop()
        if module not in seen and place(module):
            seen.add(module)
            todo += [name for name, _ in imports_of(module) if name in FILES]
    assert {place(module) for module in seen} >= {"config", "core", "models", "sampling"}
    assert not [module for module in seen if place(module) == "hooks"]
    assert not any(name.startswith("nnsight") for module in seen for name in outside_imports(module))


def test_only_its_folder_imports_vllm():
    """The package works without vLLM, and one folder knows its insides."""
    importing = {module for module in FILES for name in outside_imports(module) if name.split(".")[0] == "vllm"}
    assert {place(module) for module in importing} == {"vllm_engine"} and len(importing) > 3


def methods_of(module: str, cls: str) -> set[str]:
    """Names of the methods and properties that a class defines."""
    (found,) = (n for n in tree_of(module).body if isinstance(n, ast.ClassDef) and n.name == cls)
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


def test_hooks_enter_a_runner_by_its_stages():
    """`InterpModelRunner` overrides at most five methods; the rest of a step's hooks is what its stages do."""
    runner = "pymllm_interp.runner."
    plain = methods_of(runner + "model_runner", "ModelRunner") | methods_of(runner + "parts", "RunnerParts")
    overridden = (methods_of(runner + "interp_model_runner", "InterpModelRunner") & plain) - {"__init__"}
    assert {"load_model", "execute_model"} <= overridden and len(overridden) <= 5, sorted(overridden)


def test_each_execution_is_a_row_of_one_table():
    assert set(WAYS) == set(Execution)


def outside_imports(module: str) -> Iterator[str]:
    for node in run_time_nodes_of(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_two_folders_import_ray():
    """The engine, its server and its fronts run without it."""
    found = {module for module in FILES for name in outside_imports(module) if name.partition(".")[0] == "ray"}
    by_call = {
        module
        for module in FILES
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and "ray" in list(by_name(node, ()))
    }
    assert by_call == {"pymllm_interp.harvest.on_ray.ray_version"}
    assert all(module.startswith(("pymllm_interp.cluster.", "pymllm_interp.harvest.on_ray.")) for module in found)


def test_core_imports_utils_only():
    ours = [(module, name) for module in FILES if place(module) == "core" for name, _ in imports_of(module)]
    assert not [pair for pair in ours if place(pair[1]) not in ("core", "utils")]


def test_folders_are_small():
    """At most 15 files each."""
    folders = Counter(path.parent for path in FILES.values() if path.name != "__init__.py")
    assert not {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > 15}


def test_names_of_imported_modules_are_read():
    """`import_module` counts as an import: by its name, or, where the name is computed, as a row of `LOADERS` says."""
    computed = {
        module
        for module in FILES
        for node in run_time_nodes_of(module)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("import_module", "__import__")
        and not isinstance(node.args[0], ast.Constant)
    }
    assert (
        computed - {"pymllm_interp.models.transformers.transformers_pass"} == LOADERS.keys()
    )  # a module of transformers
    package = ("pymllm_interp", "client", "calls")
    for text, name in (("'pymllm_interp.lens'", "pymllm_interp.lens"), ("'..handle'", "pymllm_interp.client.handle")):
        (call,) = [node for node in ast.walk(ast.parse(f"import_module({text})")) if isinstance(node, ast.Call)]
        assert list(by_name(call, package)) == [name]


def test_a_runner_is_asked_by_its_client_only():
    """What builds on `LM` reads its facts and sends commands: the engine may be in another process."""
    wrong = [
        f"{FILES[module].relative_to(ROOT)}:{node.lineno}"
        for module in FILES
        if place(module) in ("bench", "evals", "harvest", "lens", "server", "toolkit")
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and node.attr == "runner"
    ]
    assert not wrong, wrong


@cache
def fields_that_are_read() -> set[str]:
    """Attributes of something that is called a config, outside of config.py."""

    def is_config(node: ast.expr) -> bool:
        last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return last.endswith("config")

    return {
        node.attr
        for module in FILES
        if place(module) != "config"
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_config(node.value)
    }


def test_v01_every_config_field_is_read_by_somebody():
    """V1."""
    unread = [f"{cls.__name__}.{name}" for cls, name in CONFIG_FIELDS if name not in fields_that_are_read()]
    assert not unread, f"read by nobody: {unread}"


def test_modules_classes_and_functions_that_are_public_are_documented():
    missing = []
    for module, path in FILES.items():
        tree = tree_of(module)
        if tree.body and ast.get_docstring(tree) is None:
            missing.append(str(path.relative_to(ROOT)))
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith(
                "_"
            ):
                inherits = isinstance(node, ast.ClassDef) and any(
                    isinstance(base, ast.Name) and base.id.startswith(("Llama", "Mistral", "Qwen"))
                    for base in node.bases
                )  # a family's parts: what they are stands at the head of their file
                if ast.get_docstring(node) is None and not inherits:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not missing, missing


def test_the_public_surface_is_small_and_each_of_its_names_and_methods_is_documented():
    names = pymllm_interp.__all__
    assert len(names) == len(set(names)) == 12
    values = {name: getattr(pymllm_interp, name) for name in names}
    for home in (captures, harvest, interventions, runner, toolkit):
        values |= {name: getattr(home, name) for name in home.__all__}
    missing = []
    for name, value in values.items():
        if not inspect.getdoc(value):
            missing.append(name)
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            if attribute.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            if not inspect.getdoc(getattr(value, attribute)):
                missing.append(f"{name}.{attribute}")
    overridden = {"InterpModelRunner.shutdown", "InterpModelRunner.sample_tokens", "InterpModelRunner.dispatch"}
    assert not set(missing) - overridden, missing


def test_no_module_is_called_through_forward():
    """Hooks hang on ``module(x)``. What is not a module: attention backends, a runner itself, `LM.forward`, and super()."""
    wrong = []
    for module in FILES:
        for node in nodes_of(module):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "forward"
            ):
                continue
            receiver = node.func.value
            is_super = (
                isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Name) and receiver.func.id == "super"
            )
            name = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
            own = name == "self" and module == "pymllm_interp.runner.model_runner"
            if not (is_super or own or name.endswith(("backend", "runner")) or name == "lm"):
                wrong.append(f"{FILES[module].relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


def test_no_except_exception_around_computation():
    """Some folders deal with users' code; elsewhere a broad handler must raise again. `plain_text` calls users' methods."""
    wrong = []
    for module in FILES:
        for node in nodes_of(module):
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"Exception"}
            again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if (
                names & {"Exception", "BaseException"}
                and not again
                and place(module)
                not in ("client", "cluster", "ray", "engine", "hooks", "harvest", "server", "vllm_engine")
                and module != "pymllm_interp.utils.arguments"
            ):
                wrong.append(f"{FILES[module].relative_to(ROOT)}:{node.lineno}")
            if node.type is None:
                wrong.append(f"{FILES[module].relative_to(ROOT)}:{node.lineno} (bare except)")
    assert not wrong, wrong


def test_importing_the_package_touches_no_environment_and_no_device():
    """No import-time ``os.environ`` and ``torch.cuda`` work: only inside of functions."""
    wrong = []
    for module in FILES:
        for statement in tree_of(module).body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "cuda"):
                    wrong.append(f"{FILES[module].relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong

"""The import rules, checked in the sources, and that importing fusewise has no side effects."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fusewise

PACKAGE = Path(fusewise.__file__).parent
SOURCE = PACKAGE.parent

# Which other parts each part may import. _shared holds what all parts use, and imports none of them.
ALLOWED: dict[str, set[str]] = {
    "_shared": set(),
    "ops": {"_shared"},
    "nn": {"ops"},
    "compat": {"ops"},
    "distributed": {"ops"},
    "integrations": {"ops", "nn", "compat"},
    "lab": {"ops", "_shared", "nn", "compat"},
    "native": {"ops", "_shared"},
    "cli": {"lab", "native"},
}
# What the package itself exports: the operators, and what explains them.
PUBLIC = {
    "", "rope", "rope_", "rope_and_cache_", "qk_norm_rope", "geglu_linear", "gated_linear", "gated_mlp", "explain_dispatch",
    "Dispatch", "__version__",
}  # fmt: skip
# Besides its own parts, an operator may import torch; triton only in the files of its Triton implementation.
OUTSIDE_OF_OPS = {"torch", "triton"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def seen_by_type_checkers(tree: ast.Module) -> ast.If:
    """What is imported for type checkers alone."""
    return next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


@functools.cache
def imports(module: str, path: Path) -> set[str]:
    """The absolute names of all modules that a file imports, anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    tree = ast.parse(path.read_text())
    if module == "fusewise":
        seen_by_type_checkers(tree).body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level else base
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def part(name: str) -> str:
    """The first name below fusewise; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


MODULES = list(modules())
every_module = pytest.mark.parametrize(("module", "path"), MODULES, ids=[name for name, _ in MODULES])
OF_OPS = [(name, path) for name, path in MODULES if part(name) == "ops"]
every_module_of_ops = pytest.mark.parametrize(("module", "path"), OF_OPS, ids=[name for name, _ in OF_OPS])


def test_every_module_is_seen() -> None:
    names = {name for name, _ in MODULES}
    assert {"fusewise", "fusewise.cli", "fusewise.ops.rope.api", "fusewise.ops.rope._cpu"} <= names
    assert {part(name) for name in names} <= {*ALLOWED, "", "__main__"}


@every_module
def test_the_import_law(module: str, path: Path) -> None:
    own = part(module)
    for name in imports(module, path):
        if name == "fusewise" or name.startswith("fusewise."):
            other = part(name)
            allowed = {"ops"} if own == "" else {"cli"} if own == "__main__" else ALLOWED[own]
            # The package itself exports the operators: parts that may use those may import it.
            if other in PUBLIC:
                assert own == "" or "ops" in allowed or own in ("cli", "__main__"), f"{module} imports {name}"
            else:
                assert other in allowed | {own}, f"{module} imports {name}"
        elif own == "ops" and name.partition(".")[0] not in OUTSIDE_OF_OPS:
            assert name.partition(".")[0] in sys.stdlib_module_names, f"{module} imports {name}"


@every_module_of_ops
def test_implementations_import_no_sibling(module: str, path: Path) -> None:
    """_triton, _cpu, _cuda, ... of one operator do not import each other, and no module above them imports one."""
    implementations = ("_triton", "_cpu", "_cuda", "_gluon")
    words = module.split(".")
    own = next((i for i in implementations for word in words if word == i or word.startswith(f"{i}_")), None)
    for name in imports(module, path):
        if name.startswith("fusewise.ops."):
            other = next(
                (i for i in implementations for word in name.split(".") if word == i or word.startswith(f"{i}_")), None
            )
            assert other is None or other == own, f"{module} imports {name}"
        if name.partition(".")[0] == "triton":
            assert own in ("_triton", "_gluon"), f"{module} imports {name}"


# Operators built on another operator, beyond its public functions.
BUILT_ON = {"qk_norm_rope": {"rope"}, "rope_and_cache": {"rope"}, "rope": set(), "gated_linear": set()}


@every_module_of_ops
def test_an_operation_is_built_on_none_but_rope(module: str, path: Path) -> None:
    """Exception: the fast path on the host, shared by everything that rotates, asks `rope_and_cache` for its plans."""
    operation = ".".join(module.split(".")[2:3])
    if operation not in BUILT_ON or module == "fusewise.ops.rope._host":
        return
    for name in imports(module, path):
        _, _, other, *inner = [*name.split("."), "", ""] if name.startswith("fusewise.ops.") else [""] * 5
        if other in BUILT_ON and other != operation:
            assert other in BUILT_ON[operation], f"{module} imports {name}"
            assert not inner[1].startswith("_"), (
                f"{module} imports {name}"
            )  # an inner module is allowed, its private names are not


def test_a_type_checker_sees_the_parts_that_are_imported_when_they_are_asked_for() -> None:
    block = seen_by_type_checkers(ast.parse((PACKAGE / "__init__.py").read_text()))
    # `x as x`: without it, a strict checker takes a name for one that is not exported.
    assert [ast.unparse(line) for line in block.body] == [f"from . import {x} as {x}" for x in fusewise._SUBMODULES]


def fresh(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


STARS = {
    "fusewise": PUBLIC - {"", "__version__"},
    "fusewise.nn": {"GatedLinear", "GatedMLP", "QKNormRope", "RotaryEmbedding"},
    "fusewise.distributed": {"register_sharding_rules"},
    "fusewise.lab": {"Missing", "Problem", "Program", "Provider", "Run", "Target", "Unsupported", "require"},
}


@pytest.mark.parametrize("module", STARS)
def test_a_star_brings_what_is_offered_and_no_module(module: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from {module} import *", names)
    assert names.keys() - {"__builtins__"} == STARS[module]
    assert not any(isinstance(value, ModuleType) for value in names.values())


EFFECTS = """
import json, os, sys, warnings
import torch
before = dict(os.environ), set(sys.modules), torch.get_default_dtype(), torch.get_num_threads(), list(warnings.filters)
functions = {name: id(getattr(torch, name)) for name in dir(torch)}
import fusewise
added = sorted(set(sys.modules) - before[1])
print(json.dumps({
    "environment": dict(os.environ) == before[0],
    "triton": any(name.partition(".")[0] == "triton" for name in added),
    "foreign": [n for n in added if n.partition(".")[0] not in ("fusewise", "torch") and n.partition(".")[0] not in sys.stdlib_module_names],
    "lab": [n for n in added if n.startswith(("fusewise.lab", "fusewise.cli", "fusewise.nn", "fusewise.compat"))],
    "cuda": torch.cuda.is_initialized(),
    "settings": (torch.get_default_dtype(), torch.get_num_threads(), list(warnings.filters)) == before[2:],
    "patched": [name for name in functions if id(getattr(torch, name, None)) != functions[name]],
}))
"""


def test_importing_does_nothing_else() -> None:
    """In a fresh process, the only output is one line of JSON."""
    found = json.loads(fresh(EFFECTS))
    assert found == {
        "environment": True, "triton": False, "foreign": [], "lab": [], "cuda": False, "settings": True, "patched": [],
    }  # fmt: skip


def test_using_an_operation_on_the_cpu_does_not_import_triton_nor_counting_its_operators_dynamo() -> None:
    code = """
import sys, torch
before = "triton" in sys.modules
import fusewise
def both():
    fusewise.rope(torch.ones(1, 1, 1, 2), inv_freq=torch.ones(1))
    torch.ops.fusewise.gated_linear_copy_(torch.ones(1, 3), torch.ones(1, 4))  # of backward
    return fusewise.geglu_linear(torch.ones(1, 3), torch.ones(4, 3))
both()
print(("triton" in sys.modules) == before)
from fusewise.lab.counting import counted
print(counted(both)[1].terms > 1, "torch._dynamo" in sys.modules)
"""
    assert fresh(code) == "True\nTrue False\n"


TIMED = """
import gc, time, torch
gc.disable()  # it looks at all that torch has made, in whichever import its turn falls
start = time.process_time()
import fusewise
print(time.process_time() - start)
"""


def test_importing_is_quick() -> None:
    """At most 0.1 s of CPU time on top of torch, at once or in one of five attempts, since other load only adds.

    Bytecode may be written whatever the environment says: an installed package has it, and without it most of the time
    is the compiler's.
    """
    assert any(float(fresh(TIMED, PYTHONDONTWRITEBYTECODE="")) <= 0.1 for _ in range(5))


PARTS = """
import os, sys, fusewise
for name in ("compat", "distributed", "integrations", "native", "nn"):
    if not os.fork():  # each is the first that this process asks for
        assert f"fusewise.{name}" not in sys.modules
        assert getattr(fusewise, name).__name__ == f"fusewise.{name}"
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_importing_prints_nothing_and_parts_are_there_when_they_are_asked_for() -> None:
    assert fresh(PARTS) == ""

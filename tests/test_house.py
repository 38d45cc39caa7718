"""The house rules, held by parsing: the import law, no circles, no import-time heaviness, size budgets."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "steelyard"

BOOKKEEPING = {"errors", "core"}
LAW: dict[str, set[str]] = {
    "errors": set(),
    "config": BOOKKEEPING,
    "core": BOOKKEEPING,
    "plan": BOOKKEEPING | {"checkpoint"},
    "checkpoint": BOOKKEEPING,
    "text": BOOKKEEPING | {"checkpoint"},
    "wire": BOOKKEEPING,
    "grammar": BOOKKEEPING,
    "cache": BOOKKEEPING,
    "ledger": BOOKKEEPING | {"plan"},
    "scheduler": BOOKKEEPING | {"cache", "ledger"},
    "sim": BOOKKEEPING | {"cache", "scheduler"},
    "kernels": {"errors"},
    "layers": {"errors", "kernels"},
    "models": {"errors", "layers", "checkpoint", "plan.shape"},
    "runner": BOOKKEEPING | {"models", "layers", "kernels", "plan", "checkpoint"},
    "engine": BOOKKEEPING
    | {"scheduler", "cache", "ledger", "runner", "wire", "plan", "grammar", "config", "checkpoint", "sim"},
    "server": BOOKKEEPING | {"wire", "text", "grammar", "ledger.states", "checkpoint", "config"},
    "llm": BOOKKEEPING | {"engine", "text", "grammar", "checkpoint", "config", "wire"},
    "bench": BOOKKEEPING | {"plan", "text"},
    "diagnose": BOOKKEEPING | {"plan", "text"},
    "quality": BOOKKEEPING | {"plan", "text"},
    "perf": BOOKKEEPING | {"llm", "kernels", "plan"},
}
TORCH_ROOMS = {"kernels", "layers", "models", "runner", "engine", "llm", "perf", "cli"}
CLOCKLESS_ROOMS = {"core", "config", "cache", "ledger", "scheduler"}
LAZY_ALLOWED = {"cli", "__init__"}

FILES = sorted(p for p in SRC.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[0]


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """(imported module, whether at module level) for every import statement; TYPE_CHECKING blocks count."""
    tree = ast.parse(path.read_text())
    nested = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in nested) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(f"{node.module}.{alias.name}", id(node) not in nested) for alias in node.names]
    return found


def allowed(room: str, module: str) -> bool:
    inside = module.removeprefix("steelyard.")
    target = inside.split(".")[0]
    return target in {room, "__version__"} or any(inside == a or inside.startswith(a + ".") for a in LAW[room])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_file_obeys_the_import_law(path: Path) -> None:
    room = room_of(path)
    for module, top_level in imports_of(path):
        if not top_level and room not in LAZY_ALLOWED and not _optional(module):
            raise AssertionError(f"{path}: import of {module} inside a function")
        if module.startswith("steelyard.") and room not in {"cli", "__init__"}:
            assert allowed(room, module), f"{path}: {room} may not import {module}"
        outside = module.split(".")[0]
        if outside in {"torch", "triton"}:
            assert room in TORCH_ROOMS, f"{path}: {room} may not import {outside}"
        if outside == "time":
            assert room not in CLOCKLESS_ROOMS, f"{path}: {room} may not import time"


def _optional(module: str) -> bool:
    """Libraries that may be absent or are only for some devices are imported where they are used."""
    return module.split(".")[0] in {"flashinfer", "huggingface_hub", "opentelemetry"}


def test_rooms_form_no_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        room = room_of(path)
        targets = {m.split(".")[1] for m, _ in imports_of(path) if m.startswith("steelyard.")}
        edges.setdefault(room, set()).update(t for t in targets if (SRC / t).is_dir() or (SRC / f"{t}.py").exists())
    edges.pop("__init__", None)
    done: set[str] = set()

    def visit(room: str, trail: tuple[str, ...]) -> None:
        assert room not in trail, f"circle: {' -> '.join((*trail, room))}"
        if room in done:
            return
        for target in edges.get(room, set()) - {room, "__init__"}:
            visit(target, (*trail, room))
        done.add(room)

    for room in edges:
        visit(room, ())


def test_no_environment_variable_of_ours_is_read() -> None:
    for path in FILES:
        text = path.read_text()
        assert "STEELYARD_" not in text, f"{path} reads an environment variable of ours"


@pytest.mark.parametrize("module", ["steelyard", "steelyard.cli.main", "steelyard.server.app"])
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'triton', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_functions_keep_their_size_budget() -> None:
    over = [f"{p.relative_to(SRC)}: {n} lines" for p in FILES if (n := p.read_text().count("\n")) > 350]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 50 and not _is_kernel(node):
                    over.append(f"{path.relative_to(SRC)}:{node.lineno} {node.name}: {length} lines")
    assert not over, "\n".join(over)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A compiled GPU kernel is one function by nature; its file's budget still holds."""
    return any("jit" in ast.unparse(d) for d in node.decorator_list)

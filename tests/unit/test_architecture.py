"""The laws of the house that can be read from the code: arrows, circles, the only door to ComfyUI, size."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROOMS = ("nodes", "cli", "host", "scheduler", "backends", "capture", "cache")
"""Folders of the package. Files at the root are rooms of their own."""

ARROWS: dict[str, set[str]] = {
    "__init__": {"nodes", "host"},
    "nodes": {"host", "scheduler", "cache", "config", "journal", "errors"},
    "cli": {"host", "scheduler", "cache", "config", "journal", "errors"},
    "host": {"scheduler", "capture.families", "cache", "backends.base", "config", "journal", "errors"},
    "scheduler": {"backends", "backends.base", "capture.families", "cache", "config", "journal", "errors", "version"},
    "backends": {"backends.base", "capture", "errors"},
    "capture": {"backends.base", "errors"},
    "cache": {"backends.base", "errors"},
    "config": {"backends.base", "errors", "strict_yaml"},
    "strict_yaml": {"errors"},
    "journal": {"errors"},
    "errors": set(),
    "version": set(),
}
"""`room: rooms it may import`. README's "How it is built" draws the same picture."""

HOST_MODULES = {
    "comfy", "comfy_api", "comfy_config", "comfy_execution", "comfy_extras", "comfyui_version", "execution",
    "folder_paths", "latent_preview", "node_helpers", "server",
}  # fmt: skip
"""ComfyUI's own top-level modules (and `nodes`, which is also a room of ours, hence relative there)."""

HEAVY = {"torch", "numpy", "openvino", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "safetensors"}
"""Imported inside functions only: nothing is probed at import."""


def package_files() -> list[Path]:
    found = [p for p in ROOT.glob("*.py") if p.name != "dev.py"]
    for room in ROOMS:
        found.extend((ROOT / room).rglob("*.py"))
    return sorted(found)


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def room_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(path: Path) -> list[tuple[str, str, int, bool]]:
    """(module of ours or "", absolute module or "", line, at top level) of every import statement in `path`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = list(path.relative_to(ROOT).parts[:-1])
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside.update(ast.walk(node))
    found: list[tuple[str, str, int, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.extend(("", alias.name, node.lineno, node not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(("", node.module or "", node.lineno, node not in inside))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)]
            target = [*base, *(node.module or "").split(".")] if node.module else base
            names = [".".join([*target, alias.name]) for alias in node.names]
            for name in names:
                module = name if is_module(name) else ".".join(target)
                found.append((module or "__init__", "", node.lineno, node not in inside))
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


FILES = package_files()
IDS = [name_of(p) for p in FILES]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_arrows(path: Path) -> None:
    room = room_of(name_of(path))
    for module, _, line, _ in imports_of(path):
        if not module or room_of(module) == room:
            continue
        allowed = ARROWS[room]
        fits = module in allowed or room_of(module) in allowed
        assert fits, f"{path.name}:{line}: {room} may not import {module}"


def test_backends_do_not_import_each_other() -> None:
    for path in (ROOT / "backends").glob("*.py"):
        for module, _, line, _ in imports_of(path):
            if room_of(module) == "backends":
                assert module == "backends.base", f"{path.name}:{line} imports {module}"


def test_no_circle() -> None:
    """No circle between files, imports inside functions and for typing included."""
    graph = {name_of(p): {m for m, _, _, _ in imports_of(p) if m} for p in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for target in sorted(graph.get(module, ())):
            visit(target, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_host_imports_comfyui(path: Path) -> None:
    if room_of(name_of(path)) == "host":
        return
    for _, module, line, _ in imports_of(path):
        assert room_of(module) not in HOST_MODULES, f"{path.name}:{line}: {module} belongs to host/"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_nothing_heavy_at_import(path: Path) -> None:
    """Optional and heavy libraries, and ComfyUI itself, are imported inside functions only."""
    for _, module, line, at_top in imports_of(path):
        if at_top:
            assert room_of(module) not in HEAVY | HOST_MODULES, f"{path.name}:{line}: {module} at import"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_absolute_imports_are_libraries(path: Path) -> None:
    """Relative imports only: ComfyUI owns the top-level name `nodes`, and the folder may have any name."""
    if path.name == "build_child.py":
        return  # a script: it makes the package importable itself
    ours = {room_of(name) for name in IDS}
    for _, module, line, _ in imports_of(path):
        if module:
            assert room_of(module) not in ours - set(sys.stdlib_module_names), f"{path.name}:{line}: {module}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_size(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 500, f"{path.name} has {lines} lines: is it still one room with one purpose?"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_loggers_have_fixed_names(path: Path) -> None:
    """ComfyUI's loader makes `__name__` a file path, so a logger named after it could not be configured."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("logging.getLogger", "getLogger"):
            assert node.args, f"{path.name}:{node.lineno}: the root logger is not ours"
            assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}"
            assert str(node.args[0].value).split(".")[0] == "kitchen_accel", f"{path.name}:{node.lineno}"


def test_version_is_one() -> None:
    from kitchen_accel.version import VERSION

    line = next(x for x in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines() if "version =" in x)
    assert line == f'version = "{VERSION}"'

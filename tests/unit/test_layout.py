"""The package keeps to its layout: imports point down, and each effect names both its spellings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "retaining_saver"
ROOT = Path(__file__).parents[2] / PACKAGE

# From the top down; the modules of one line do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__",),
    ("cli",),
    ("saver",),
    ("annotations",),
    ("interception",),
    ("retention", "recording"),
    ("admission",),
    ("delta_history",),
    ("listing",),
    ("state",),
    ("plan",),
    ("cut", "selection", "recorded"),
    ("annotated",),
    ("branches",),
    ("policy",),
    ("lineage",),
    ("tree",),
    ("puts",),
    ("parts",),
    ("leaves",),
    ("known",),
    ("pins", "locks", "modes", "hooks"),
    ("backends", "caches"),
    # What backends and the planner hand to each other.
    ("planned",),
    ("entries",),
    ("folds",),
    ("records",),
    ("events",),
    ("_steps",),
    ("errors",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Whoever decides does not reach storage, also not through a layer below.
PURE = (
    "plan",
    "cut",
    "selection",
    "recorded",
    "annotated",
    "branches",
    "planned",
    "policy",
    "lineage",
    "tree",
    "entries",
    "leaves",
    "known",
    "folds",
    "records",
    "events",
    "errors",
)
STORAGE = (f"{PACKAGE}.backends", f"{PACKAGE}.caches")
# Shapes without effects.
SHAPES = (f"{PACKAGE}.backends.base",)


def _sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def _module(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts)


def _part(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def _imports(path: Path) -> Iterator[str]:
    """Name every module of the package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PACKAGE))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                yield _imported(node.module or "", alias.name)


def _imported(module: str, name: str) -> str:
    path = ROOT.parent.joinpath(*module.split("."), name)
    is_module = path.with_suffix(".py").exists() or path.is_dir()
    return f"{module}.{name}" if is_module else module


def test_every_module_has_its_place() -> None:
    parts = {_part(_module(path)) for path in _sources()}
    assert set() == parts - set(LEVEL), "Give the new module a place in LAYERS."


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_imports_point_down(path: Path) -> None:
    own = _part(_module(path))
    upward = [
        module
        for module in _imports(path)
        if _part(module) != own and LEVEL[_part(module)] <= LEVEL[own]
    ]
    assert [] == upward


@pytest.mark.parametrize("path", sorted(ROOT.rglob("base.py")), ids=_module)
def test_a_protocol_does_not_import_what_fulfils_it(path: Path) -> None:
    own = _module(path)
    siblings = {_module(p): set(_imports(p)) for p in path.parent.glob("*.py") if p != path}
    imported = set(_imports(path)) & set(siblings)
    assert [] == [module for module in imported if own in siblings[module]]


@pytest.mark.parametrize("path", [p for p in _sources() if _part(_module(p)) in PURE], ids=_module)
def test_who_decides_does_not_act(path: Path) -> None:
    reached = [m for m in _imports(path) if m.startswith(STORAGE) and m not in SHAPES]
    assert [] == reached


def _effects() -> Iterator[tuple[str, ast.Call]]:
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _name(node.func) == "call":
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def _name(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _is_paired(effect: ast.Call) -> bool:
    if len(effect.args) < 2:
        return False
    blocking, awaitable = effect.args[:2]
    if not (isinstance(blocking, ast.Attribute) and isinstance(awaitable, ast.Attribute)):
        return False
    same_owner = ast.dump(blocking.value) == ast.dump(awaitable.value)
    return same_owner and awaitable.attr == _twin(blocking.attr)


def _twin(name: str) -> str:
    public = name.lstrip("_")
    return f"{name[: len(name) - len(public)]}a{public}"


def test_each_effect_pairs_a_method_with_its_own_twin() -> None:
    effects = list(_effects())
    assert [] == [where for where, effect in effects if not _is_paired(effect)]
    if (ROOT / "admission.py").exists():
        assert effects, "No effect was found: the search has gone blind."


@pytest.mark.parametrize(
    ("source", "paired"),
    [
        ("call(x.row, x.arow, 1)", True),
        ("call(x.y._row, x.y._arow)", True),
        ("call(x.row, x.ahead)", False),
        ("call(x.row, y.arow)", False),
        ("call(x.row, x.row)", False),
        ("call(x.row)", False),
        ("call(row, arow)", False),
    ],
)
def test_the_search_for_twins_can_tell_a_pair(source: str, paired: bool) -> None:
    expression = ast.parse(source, mode="eval").body
    assert isinstance(expression, ast.Call)
    assert paired == _is_paired(expression)

"""Private parts of other libraries (`library._part`) are used only where docs/design.md says so."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLIC = {"_replace", "_asdict", "_make", "_fields", "_exit", "_repr_png_"}
"""Documented, although their names begin with an underscore: of named tuples, `os` and IPython."""


def is_private(name: object) -> bool:
    return re.fullmatch(r"_[a-z]\w*", str(name)) is not None and name not in PUBLIC


def is_own(value: ast.expr) -> bool:
    """Return whether a name belongs to the object itself: `self._name`, `cls._name` or `super()._name`."""
    name = value.func if isinstance(value, ast.Call) else value
    return isinstance(name, ast.Name) and name.id in ("self", "cls", "super")


def defined(tree: ast.Module) -> set[str]:
    """Return the names of functions, classes, variables, fields and attributes that a file defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "vars(self)"
        ):
            found.add(key_of(node))
    return found


def key_of(node: ast.Subscript) -> str:
    return str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""


def foreign(tree: ast.Module, all_own: set[str]) -> Iterator[str]:
    """Yield the private names that a file uses of other libraries, also by `getattr` and as keys of `__dict__`."""
    own = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in (all_own if is_own(node.value) else own):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("fl_lightning"):
            yield from [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Subscript) and key_of(node) not in own:
            yield key_of(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def test_private_parts_of_other_libraries_are_those_of_the_design():
    files = [path for folder in ("fl_lightning", "callbacks") for path in (ROOT / folder).rglob("*.py")]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}
    all_own = set().union(*map(defined, trees.values()))
    found = {(file, name) for file, tree in trees.items() for name in foreign(tree, all_own) if is_private(name)}
    table = re.findall(r"^\| `([\w/]+\.py)` \| (`_.*?`) \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert found == {(file, name) for file, names in table for name in re.findall(r"`(\w+)`", names)}

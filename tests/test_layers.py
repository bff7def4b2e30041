"""Each folder of the package imports only the folders before it, and no files import each other in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("core", "evaluation", "data", "attacks", "models", "privacy", "compression", "client", "scheduling"),
    *("algorithms", "engines", "loggers", "runs", "callbacks", "orchestrator", "flower", "analysis", "cli"),
)


def modules():
    """Yield each module of the package, without `fl_lightning.`, and its file."""
    for folder, prefix in ((ROOT / "fl_lightning", ""), (ROOT / "callbacks", "callbacks.")):
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            yield f"{prefix}{name}".removesuffix("__init__").rstrip("."), path


def imports(text):
    """Yield the modules of the package that a source imports, also in functions, for types, or with `load`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fl_lightning."):
            inside = {f"{node.module}.{one.name}" for one in node.names} & KNOWN
            yield from inside or {node.module}
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("fl_lightning."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KNOWN:
            yield node.value


KNOWN = {f"fl_lightning.{name}" for name, _ in modules() if name}


def backwards(name, text):
    """Return the imports of a module from packages after its own."""
    package = PACKAGES.index(name.partition(".")[0])
    found = {one.removeprefix("fl_lightning.") for one in imports(text)}
    return {f"{name} -> {one}" for one in found if PACKAGES.index(one.partition(".")[0]) > package}


def test_only_the_orchestrator_is_outside_of_a_folder():
    loose = {path.stem for path in (ROOT / "fl_lightning").glob("*.py")}
    assert loose == {"__init__", "__main__", "orchestrator"}
    folders = [path.parent for path in (ROOT / "fl_lightning").glob("*/__init__.py")]
    assert {path.name for path in folders if not path.is_symlink()} | {"orchestrator", "callbacks"} == {*PACKAGES}
    links = {path.name: path.readlink().as_posix() for path in folders if path.is_symlink()}
    assert links == {name: f"../{name}" for name in ("callbacks", "configs", "papers", "sweeps")}


def test_the_wheel_contains_every_folder():
    packages = {f"fl_lightning.{name}" for name, path in modules() if path.name == "__init__.py" and name}
    project = (ROOT / "pyproject.toml").read_text()
    assert not [name for name in packages if f'"{name}",' not in project]


def test_a_folder_imports_only_folders_before_it():
    found = set()
    for name, path in modules():
        if name not in ("", "__main__"):
            found |= backwards(name, path.read_text())
    assert not found


def test_no_files_import_each_other_in_a_circle():
    graph = {name: {one.removeprefix("fl_lightning.") for one in imports(path.read_text())} for name, path in modules()}
    for name in ("client.knowledge", "client.loss_term"):
        graph[name] -= {"client.module", "client.loss_term"}  # only the types of arguments
    TopologicalSorter({name: found - {name} for name, found in graph.items() if name not in ("", "__main__")}).prepare()


@pytest.mark.parametrize(
    "line",
    [
        "from fl_lightning.cli import main",
        "from fl_lightning.cli.main import run",
        "import fl_lightning.cli.main",
        "def f():\n    from fl_lightning.cli import main",
        "if TYPE_CHECKING:\n    from fl_lightning.cli import main",
        "load('fl_lightning.cli.main')",
    ],
)
def test_an_import_of_a_later_folder_is_detected(line):
    assert backwards("core.files", line) == {"core.files -> cli.main"}

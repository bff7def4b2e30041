"""The declared dependencies are the packages that are imported."""

import ast
import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("fl_lightning", "callbacks") for path in (ROOT / folder).rglob("*.py")]
WHERE_IT_IS = {"IPython"}  # Jupyter, which brings it


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


def test_each_imported_package_is_declared_and_each_declared_one_imported():
    lines = requires("fl-lightning") or []
    declared = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines}
    always = {re.split(r"[^\w.-]", line)[0].lower() for line in lines if "extra ==" not in line}
    owners = packages_distributions()
    names = (
        set().union(*(imported(path) for path in SOURCES if "templates" not in path.parts))
        - set(sys.stdlib_module_names)
        - {"fl_lightning"}
        - WHERE_IT_IS
    )
    imports = {name: {each.lower().replace("_", "-") for each in owners.get(name, [name])} for name in names}
    assert {name for name, found in imports.items() if not found & declared} == set()
    assert always - set().union(*imports.values()) == set()

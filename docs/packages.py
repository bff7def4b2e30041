"""Draw the imports between the packages for docs/design.md: `python docs/packages.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "images" / "packages.svg"


def package_order() -> list[str]:
    """Return the packages in the order of the table in docs/design.md."""
    page = (ROOT / "docs" / "design.md").read_text()
    return re.findall(r"^\| `(\w+)` \|", page.partition("## Packages")[2].partition("## One round")[0], re.M)


def imported_packages(path: Path) -> set[str]:
    """Return the packages from which a module imports."""
    modules = (node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return {name.split(".")[1] for name in modules if name.startswith("fl_lightning.")}


def import_counts(packages: list[str]) -> np.ndarray:
    """Return how many modules of each package (rows) import from each package (columns), `(P, P)`."""
    counts = np.zeros((len(packages), len(packages)), dtype=int)
    for path in [*(ROOT / "fl_lightning").glob("**/*.py"), *(ROOT / "callbacks").glob("*.py")]:
        own = path.relative_to(ROOT).as_posix().removeprefix("fl_lightning/").removesuffix(".py").partition("/")[0]
        for name in imported_packages(path) if own in packages else ():
            if name in packages:
                counts[packages.index(own), packages.index(name)] += 1
    return counts


def draw(packages: list[str], counts: np.ndarray) -> Figure:
    """Return a figure with a row and a column for each package, and the number of importing modules in each cell."""
    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.log1p(np.where(np.eye(len(packages), dtype=bool), 0, counts)), cmap="Blues")
    for (row, column), count in np.ndenumerate(counts):
        if count and row != column:
            color = "white" if count > 30 else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontsize=7, color=color)
    places = range(len(packages))
    axes.set_xticks(places, packages, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(places, packages, fontsize=8)
    axes.set_xlabel("imported package")
    axes.set_ylabel("modules of")
    axes.spines[:].set_visible(False)
    return figure


if __name__ == "__main__":
    order = package_order()
    with matplotlib.rc_context({"svg.hashsalt": "fl-lightning", "svg.fonttype": "none"}):
        draw(order, import_counts(order)).savefig(OUT, metadata={"Date": None})

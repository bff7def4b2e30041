"""Find the public algorithm classes of this package by reading their source, without importing it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ALGORITHMS = Path(__file__).parents[1] / "algorithms"
BASES = {
    *("Aggregator", "Algorithm", "ClassMeans", "ClientSampler"),
    *("Graph", "LogitAdjustment", "LossTerm", "SharedKnowledge"),
}
"""A class in the algorithms folder is public if it is one of these or derives from one."""

CLASS = re.compile(r"^class ([A-Za-z]\w*)(?:\(([^)]*)\))?:", re.MULTILINE)


@cache
def public_classes(base: str | None = None) -> dict[str, str]:
    """Return a dict from each public class in the folder `algorithms` to its module, relative to that folder.

    Args:
        base: Only this class and those that derive from it.
    """
    modules: dict[str, str] = {}
    bases: dict[str, list[str]] = {}
    for path in sorted(ALGORITHMS.rglob("*.py")):
        module = ".".join(path.relative_to(ALGORITHMS).with_suffix("").parts)
        for name, parents in CLASS.findall(path.read_text(encoding="utf-8")):
            modules[name], bases[name] = module, [one.strip() for one in parents.split(",")]
    roots = {base} if base else BASES
    return {name: module for name, module in sorted(modules.items()) if _derives(name, roots, bases)}


def _derives(name: str, roots: set[str], bases: dict[str, list[str]]) -> bool:
    return name in roots or any(_derives(base, roots, bases) for base in bases.get(name, ()))

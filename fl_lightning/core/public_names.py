"""Find the algorithm classes that the package exports. Reads their source and imports nothing."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ALGORITHMS = Path(__file__).parents[1] / "algorithms"
BASES = {"Aggregator", "Algorithm", "ClassMeans", "Graph", "LossTerm", "SharedKnowledge"}
"""A class in the algorithms folder is public if it is one of these or derives from one."""

CLASS = re.compile(r"^class ([A-Za-z]\w*)(?:\(([^)]*)\))?:", re.MULTILINE)


class Definition(NamedTuple):
    """The location of a class definition.

    Attributes:
        module: Its module below `fl_lightning.algorithms`.
        bases: The names of its base classes.
    """

    module: str
    bases: list[str]


@cache
def public_classes(base: str | None = None) -> dict[str, str]:
    """Return the module, below `fl_lightning.algorithms`, of each public class, by the class's name.

    Args:
        base: Only this class and those that derive from it.
    """
    definitions = {}
    for path in sorted(ALGORITHMS.rglob("*.py")):
        module = ".".join(path.relative_to(ALGORITHMS).with_suffix("").parts)
        for name, bases in CLASS.findall(path.read_text(encoding="utf-8")):
            definitions[name] = Definition(module, [one.strip() for one in bases.split(",")])
    roots = {base} if base else BASES
    return {name: one.module for name, one in sorted(definitions.items()) if _derives(name, roots, definitions)}


def _derives(name: str, roots: set[str], definitions: dict[str, Definition]) -> bool:
    bases = definitions[name].bases if name in definitions else []
    return name in roots or any(_derives(base, roots, definitions) for base in bases)

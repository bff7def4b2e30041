"""Names of clients and classes from the data, as tables, figures and messages show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fl_lightning.core.errors import one_line

MOST_LETTERS = 40
"""Maximum length of a name in tables and figures."""


class Names(NamedTuple):
    """Display names of clients and of classes: two sequences, empty where the data contain no names.

    Attributes:
        clients: A name per client.
        classes: A name per class.
    """

    clients: Sequence[str] = ()
    classes: Sequence[str] = ()

    def client(self, index: int) -> str:
        """Return the text for a client in messages: `client 3 (north)`, or `client 3` without names."""
        return f"client {index} ({self.clients[index]})" if index < len(self.clients) else f"client {index}"


def shown_names(values: Iterable[object] | None) -> Sequence[str]:
    """Convert names from the data to display names: one short line each, all different.

    If two names become equal, their indices are added. Names that only repeat the indices (0, 1, 2) are left out.

    Example:
        >>> shown_names(["north", "a b", "a  b"]), shown_names([0, 1])
        (['north', 'a b #1', 'a b #2'], ())
    """
    names = [shorten_name(str(value)) for value in values or ()]
    count = Counter(names)
    if names == [str(index) for index in range(len(names))]:
        return ()
    return [name if count[name] == 1 else f"{name} #{index}" for index, name in enumerate(names)]


def labels(names: Sequence[str], indices: Iterable[int]) -> list[str]:
    """Return the labels of some clients or classes: their names or, without names, their indices."""
    return [names[index] if index < len(names) else str(index) for index in indices]


def shorten_name(name: str, most: int = MOST_LETTERS) -> str:
    """Return a name on one line, cut off with `…` if it is longer than `most` characters."""
    line = one_line(name)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def join_names(names: Iterable[Any]) -> str:
    """Return names separated by commas. If there are more than six, return the first five and how many remain."""
    names = list(map(str, names))
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"{len(names) - 5} more"])

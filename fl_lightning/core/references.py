"""The papers that methods, datasets and other parts come from, read from `references.bib`. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parents[1] / "references.bib"
PACKAGE = "fl_lightning"
"""The keyword of the entry for this package."""

VENUE_FIELDS = {"article": "journal", "inproceedings": "booktitle", "misc": "howpublished"}
"""For each kind of entry: the field that says where it was published."""

_HEAD = re.compile(r"@(\w+)\{(\w+),")
_FIELD = re.compile(r"  (\w+) = \{(.+)\},")


@dataclass(frozen=True)
class Reference:
    """An entry of `references.bib`.

    Args:
        key: Its BibTeX key, such as `li2020federated`.
        kind: `article`, `inproceedings` or `misc`.
        fields: Its fields as they are in the file, by name, without `keywords`.
        names: What it is a source of: names of classes, and of keys such as `dp_sgd`. The entry's `keywords`.
    """

    key: str
    kind: str
    fields: dict[str, str]
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        """The title without the braces that keep BibTeX from changing capital letters."""
        return re.sub("[{}]", "", self.fields["title"])

    @property
    def authors(self) -> tuple[str, ...]:
        """The authors' names in their usual order, such as `Tian Li`; `others` stands for those that are left out."""
        names = (name.strip("{}").partition(", ") for name in self.fields["author"].split(" and "))
        return tuple(f"{first} {last}".strip() for last, _, first in names)

    @property
    def year(self) -> int:
        """The year of publication."""
        return int(self.fields["year"])

    @property
    def venue(self) -> str:
        """The conference or journal, such as `Nature Communications`; for preprints the number, `arXiv:1909.06335`."""
        return self.fields[VENUE_FIELDS[self.kind]]

    @property
    def url(self) -> str | None:
        """The address of the paper; None for this package."""
        return self.fields.get("url")

    def bibtex(self) -> str:
        """Return the entry as BibTeX, without its keywords."""
        lines = [f"  {name} = {{{value}}}," for name, value in self.fields.items()]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])


@cache
def all_references() -> tuple[Reference, ...]:
    """Return all entries of `references.bib` in the order of the file."""
    return tuple(parse_references(FILE.read_text(encoding="utf-8").splitlines()))


def read_references() -> dict[str, Reference]:
    """Return the main source of each class or key by its name. Those without a paper are left out.

    Example:
        >>> one = read_references()["FedProx"]
        >>> one.authors[0], one.year, one.venue
        ('Tian Li', 2020, 'Conference on Machine Learning and Systems (MLSys)')
    """
    return {name: one for one in reversed(all_references()) for name in one.names}


def sources(name: str) -> list[Reference]:
    """Return all sources of a class or key, the main one first; an empty list if it has no paper.

    Example:
        >>> [one.key for one in sources("FedDistill")]
        ['jeong2018communication', 'seo2020federated']
    """
    return [one for one in all_references() if name in one.names]


def parse_references(lines: Iterable[str]) -> list[Reference]:
    """Parse BibTeX in the form of `references.bib`: one field a line, values in braces, comments after `%`.

    Raises:
        ValueError: A line has another form, an entry is not closed, or a field or key occurs twice. The message has the
            line's number.
    """
    found: dict[str, Reference] = {}
    entry: tuple[str, str, dict[str, str]] | None = None
    number = 0
    for number, line in enumerate(lines, 1):
        head, field = _HEAD.fullmatch(line), _FIELD.fullmatch(line)
        if entry is None and head and head[2] not in found:
            entry = (head[1], head[2], {})
        elif entry and field and field[1] not in entry[2]:
            entry[2][field[1]] = field[2]
        elif entry and line == "}":
            found[entry[1]] = _reference(*entry)
            entry = None
        elif entry or (line and not line.startswith("%")):
            raise ValueError(f"references.bib, line {number}: not expected here: {line!r}")
    if entry:
        raise ValueError(f"references.bib, line {number}: the entry {entry[1]} is not closed")
    return list(found.values())


def _reference(kind: str, key: str, fields: dict[str, str]) -> Reference:
    words = fields.pop("keywords", "")
    return Reference(key, kind, fields, tuple(word.strip() for word in words.split(",") if word.strip()))

"""SHA-256 digest of a run's rows of metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping


class Digest:
    """SHA-256 digest of table rows that ignores empty cells and the order of columns."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    @classmethod
    def over(cls, rows: Iterable[Mapping[str, object]]) -> Digest:
        """Return the digest of table rows in the given order."""
        digest = cls()
        for row in rows:
            digest.add(row)
        return digest

    def add(self, row: Mapping[str, object]) -> None:
        """Update the digest with the next table row, a mapping from column to value."""
        cells = sorted((name, str(value)) for name, value in row.items() if value not in ("", None))
        self._sum.update(json.dumps(cells).encode() + b"\n")

    def __str__(self) -> str:
        return f"sha256:{self._sum.hexdigest()}"

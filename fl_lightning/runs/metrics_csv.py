"""Write `metrics.csv` and `clients.csv`, the metrics of a run by round, and continue them after a resume."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fl_lightning.core.errors import CheckpointError, Damaged
from fl_lightning.core.files import flush, open_file, open_to_append, replace_atomically, write_atomically
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.evaluation.summary import Row
from fl_lightning.runs.csv_reader import CLIENT_NAME, read_rows

GROUPS = (
    *("round", "global/", "personal_on_global/", "client/", "architecture/", "trained_client/", "new_client/"),
    *("attack/", "comm/", "time/"),
)
"""Prefixes of columns in the order in which the files have them. Other columns follow."""


class MetricsCsv:
    """Writes the metrics of a run to `metrics.csv`, and the metrics of single clients to `clients.csv`.

    `metrics.csv` has a row per round and a column per metric, blank if a round has no value. `clients.csv` is in the
    same folder.

    Args:
        path: The file.

    Attributes:
        rows: All rows so far, without metrics of single clients.
        clients: Writes `clients.csv`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.clients = ClientsCsv(path.with_name("clients.csv"))
        self._columns: list[str] = []
        self._digest = Digest()

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 digests of the rows written so far, by file name."""
        return {self.path.name: str(self._digest), self.clients.path.name: str(self.clients.digest)}

    def check(self, round: int, digests: Mapping[str, str]) -> None:
        """Check by digests that the rows up to a round in `metrics.csv` and `clients.csv` are unchanged.

        Args:
            round: The round.
            digests: The value of `digests` after that round.

        Raises:
            Damaged: Rows are missing or were changed.
        """
        rows = self._rows_until(round)
        if len(rows) < round:
            raise Damaged(f"{self.path} holds {len(rows)} of rounds 1 to {round}")
        try:
            clients = Digest.over(self.clients.rows(round))
        except csv.Error as error:
            raise Damaged(f"{self.clients.path} is damaged: {error}") from error
        for name, digest in ((self.path.name, Digest.over(rows)), (self.clients.path.name, clients)):
            if str(digest) != digests.get(name):
                raise Damaged(f"{self.path.with_name(name)} is not as it was after round {round}")

    def rewind(self, round: int) -> None:
        """Remove rows after a round from `metrics.csv` and `clients.csv`. A resumed run computes these rounds again.

        Raises:
            Damaged: A round up to this one is missing in `metrics.csv`.
        """
        self.rows = self._rows_until(round)
        if len(self.rows) < round:
            raise Damaged(f"{self.path} does not hold rounds 1 to {round}. Restore it, or start the run again.")
        self._digest = Digest.over(self.rows)
        self.clients.rewind(round)
        if self.rows:
            self._rewrite(self.rows)
        else:
            self._columns = []
            self.path.unlink(missing_ok=True)

    def append(self, metrics: RoundMetrics) -> None:
        """Append a round's metrics to `clients.csv`, then to `metrics.csv`. The new rows survive a kill of the process.

        Raises:
            CheckpointError: Writing fails, for example because the run folder was moved since the round before.
        """
        row = dict(metrics)
        try:
            self.clients.append(int(row["round"]), metrics.clients)
            if row.keys() <= set(self._columns):
                with open_to_append(self.path, "a", create=False, newline="") as file:
                    csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
            else:
                self._rewrite([*self.rows, row])
        except OSError as error:
            raise CheckpointError(f"cannot write round {row['round']} to {self.path.parent}: {error}") from error
        self.rows.append(row)  # only after it is written: `rows` must never be ahead of the file
        self._digest.add(row)

    def flush(self) -> None:
        """Flush all rows of `metrics.csv` and `clients.csv` to disk, so that they survive a power failure.

        Raises:
            CheckpointError: Writing fails.
        """
        try:
            for path in filter(Path.exists, (self.clients.path, self.path)):
                flush(path)
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.path.parent}: {error}") from error

    def _rows_until(self, round: int) -> list[Row]:
        """Return the rows of `metrics.csv` from round 1 to `round`. If a round is missing, the rows end before it."""
        try:
            rows = [row for row in read_rows(self.path) if row] if self.path.exists() else []
        except ValueError as error:
            raise Damaged(f"{self.path} is damaged: {error}") from error
        return [row for n, row in enumerate(rows[:round], 1) if row.get("round") == n]

    def _rewrite(self, rows: Sequence[Row]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns = sorted(names, key=_column_order)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, text.getvalue())


class ClientsCsv:
    """Writes `clients.csv`: a line for each round and client with metrics, and a column per metric.

    Lines are appended. A new metric becomes the last column, for which the file is copied once. The content is not kept
    in memory.

    Args:
        path: The file, created with the first line.

    Attributes:
        names: The clients' names, for the column `name`; empty for no such column.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = Digest()
        self.names: Sequence[str] = ()
        self._columns = self._keys

    @property
    def _keys(self) -> list[str]:
        return ["round", "client", *[CLIENT_NAME] * bool(self.names)]

    def set_names(self, names: Sequence[str]) -> None:
        """Set the clients' names. A file that was begun without names, by an older version, continues without them."""
        header = self._header()
        self.names = () if header and CLIENT_NAME not in header else names

    def rows(self, round: int) -> Iterator[dict[str, str]]:
        """Return an iterator over the complete lines of the file up to a round, as dicts from column to cell."""
        header = self._header()
        return (dict(zip(header, cells, strict=False)) for cells in self._lines(round))

    def rewind(self, round: int) -> None:
        """Remove the lines after a round, and the columns that are then empty."""
        filled = max((i for cells in self._lines(round) for i, cell in enumerate(cells, 1) if cell), default=0)
        self._columns = self._header()[:filled] or self._keys
        self.digest = Digest.over(self.rows(round))
        if filled:
            self._copy(round)
        else:
            self.path.unlink(missing_ok=True)

    def append(self, round: int, clients: Mapping[int, Row]) -> None:
        """Append the clients' metrics of one round to the file, a line per client with metrics."""
        new = {name for row in clients.values() for name in row}.difference(self._columns)
        if new:
            self._columns += sorted(new, key=_column_order)
            self._copy(round)
        name = {k: {CLIENT_NAME: self.names[k]} if self.names else {} for k in clients}
        rows = [{"round": round, "client": k, **name[k], **row} for k, row in sorted(clients.items()) if row]
        if rows:
            with open_to_append(self.path, "a", create=False, newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerows(rows)
        for each in rows:
            self.digest.add(each)

    def _header(self) -> list[str]:
        if not self.path.exists():
            return []
        with self._open() as file:
            return next(csv.reader(file), [])

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        with open_file(self.path) as file:
            yield io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")

    def _lines(self, round: int) -> Iterator[list[str]]:
        """Yield the cells of each complete line of the file, up to a round."""
        if not self.path.exists():
            return
        with self._open() as file:
            whole = csv.reader(line for line in file if line.endswith("\n"))
            next(whole, None)
            for cells in whole:
                if not cells or not cells[0].isdigit() or int(cells[0]) > round:
                    return
                yield cells

    def _copy(self, round: int) -> None:
        """Rewrite the file with the lines up to a round and the current columns."""
        with replace_atomically(self.path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            for cells in self._lines(round):
                writer.writerow([*cells, *[""] * len(self._columns)][: len(self._columns)])


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


def _column_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    parts = re.split(r"(\d+)", name)
    return group, [(int(part) if part.isdigit() else -1, part) for part in parts]

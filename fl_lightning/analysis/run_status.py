"""A run's folder, looked at again and again while the run may be under way; it is only read, and nothing stays open."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fl_lightning.core.errors import one_line
from fl_lightning.core.files import open_file
from fl_lightning.evaluation.metrics import Row, parse_rows
from fl_lightning.runs.reader import DamagedRun, Run, read_config, read_final, whole_rounds

TAIL = 2**16
"""So much of a file's end is read first, in bytes; a round of more clients than fit takes more."""


@dataclass(frozen=True)
class Look:
    """What a run's folder held at one moment.

    Args:
        run: The run as far as it had come; no round may have ended yet.
        clients: `clients.csv` of the last round in which clients' accuracies were measured.
        warnings: The last lines of `warnings.txt`.
        ended: Whether the run has come to its end.
        silence: Seconds since anything in the folder changed.
        since_round: Seconds since the last round ended or, before the first, since the run began.
    """

    run: Run
    clients: list[Row]
    warnings: list[str]
    ended: bool
    silence: float
    since_round: float

    @property
    def total(self) -> int | None:
        """Rounds the run is to have, if its config says so."""
        rounds = self.run.config.get("rounds")
        return rounds if isinstance(rounds, int) and rounds > 0 else None

    @property
    def round_seconds(self) -> float | None:
        """How long a round takes: the mean of the last ten, or of as many as lie between evaluations."""
        every = (self.run.config.get("evaluation") or {}).get("every")
        last = self.run.rounds[-max(10, every if isinstance(every, int) else 1) :]
        times = [row["time/round_s"] for row in last if math.isfinite(row.get("time/round_s", math.nan))]
        return sum(times) / len(times) if times else None

    @property
    def seconds_left(self) -> float | None:
        """What the rounds to come take if they take as long as the last ones, less what the one under way has had."""
        if self.total is None or self.round_seconds is None or self.ended:
            return None
        left = max(self.total - len(self.run.rounds), 0)
        return left * self.round_seconds - min(self.since_round, self.round_seconds) if left else 0.0


class Follower:
    """Looks at a run's folder; what has not changed since the last look is not read again.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = GrowingCsv(folder / "metrics.csv")
        self._config: dict[str, Any] = {}
        self._clients: list[Row] = []
        self._seen: dict[str, object] = {}

    def look(self) -> Look:
        """The folder as it is.

        Raises:
            DamagedRun: It holds no run, or one that cannot be read; the message says what and why.
        """
        try:
            rows = whole_rounds(self._metrics.read())
            last_round = self._metrics.path.stat().st_mtime
        except FileNotFoundError as error:
            raise DamagedRun(f"{self.folder}: no run: it holds no metrics.csv") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise DamagedRun(f"{self.folder}: metrics.csv cannot be read: {reason}") from error
        if self._is_new("config.yaml"):
            self._config = read_config(self.folder)
        if self._is_new("clients.csv", len(rows)):
            self._clients = last_measured(self.folder / "clients.csv", len(rows))
        run, now = Run(self.folder, self._config, rows, read_final(self.folder)), time.time()
        return Look(
            run,
            self._clients,
            last_lines(self.folder / "warnings.txt", 3),
            self._ended(run, last_round),
            max(now - self._last_change(), 0.0),
            max(now - last_round, 0.0),
        )

    def _ended(self, run: Run, last_round: float) -> bool:
        """Whether the summary is of all the rounds there are: one of a run that goes on is left from its first end."""
        if not run.final or run.final["rounds"] != len(run.rounds):
            return False
        stopped_early = (self.folder / "final" / "summary.json").stat().st_mtime >= last_round
        return stopped_early or run.config.get("rounds") == len(run.rounds)

    def _is_new(self, name: str, beside: object = None) -> bool:
        """Whether a file, or what is looked at with it, is another than at the last look."""
        try:
            file = (self.folder / name).stat()
            now: object = file.st_ino, file.st_size, file.st_mtime_ns, beside
        except OSError:
            now = None
        before, self._seen[name] = self._seen.get(name, ()), now
        return before != now

    def _last_change(self) -> float:
        times = [0.0]
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # a file that is written beside its place has gone there
                times.append(entry.stat().st_mtime)
        return max(times)


class GrowingCsv:
    """The rows of a CSV file that grows: a read takes up what was added since the last, or all if the file is another.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Row] = []
        self._header = self._last = b""
        self._end = 0

    def read(self) -> list[Row]:
        """All rows so far; a line that is half written is left for the next read.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no CSV.
        """
        with open_file(self.path) as file:
            file.seek(self._end - len(self._last))
            text = file.read()
            if not text.startswith(self._last):  # the run was resumed, or has a new column
                self._forget()
                file.seek(0)
                text = file.read()
        added = text[len(self._last) : text.rfind(b"\n") + 1]
        if added:
            self._rows += parse_rows(self._header + added)
            self._header = self._header or added[: added.index(b"\n") + 1]
            self._last = added.splitlines(keepends=True)[-1]
            self._end += len(added)
        return self._rows


def last_measured(path: Path, round: int) -> list[Row]:
    """The lines of a `clients.csv` for the last round, up to a given one, in which accuracies were measured."""
    size = TAIL
    with suppress(OSError, ValueError), open_file(path) as file:
        header, length = file.readline(TAIL), os.fstat(file.fileno()).st_size
        while header:
            rows = parse_rows(header + _lines_from(file, max(length - size, len(header))))
            measured = [row for row in rows if "acc" in row and row.get("round", math.inf) <= round]
            last = measured[-1]["round"] if measured else 0
            if size >= min(length, 2**8 * TAIL) or (rows and rows[0].get("round", last) < last):
                return [row for row in measured if row["round"] == last]
            size *= 4
    return []


def last_lines(path: Path, number: int) -> list[str]:
    """The last lines of a text file; none where there is no file."""
    with suppress(OSError), open_file(path) as file:
        text = _lines_from(file, os.fstat(file.fileno()).st_size - TAIL)
        return text[: text.rfind(b"\n") + 1].decode(errors="replace").splitlines()[-number:]
    return []


def _lines_from(file: BinaryIO, start: int) -> bytes:
    """What follows a place in a file, from the first line that begins there or later."""
    file.seek(max(start - 1, 0))
    text = file.read()
    return text[text.find(b"\n") + 1 :] if start > 0 else text

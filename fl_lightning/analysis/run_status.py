"""Read the status of a run that may be in progress, without writing to its files or keeping them open."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import reason_of
from fl_lightning.core.files import lines_from, open_file, read_last_bytes
from fl_lightning.core.names import Names
from fl_lightning.evaluation.summary import Row
from fl_lightning.runs.csv_reader import parse_rows, read_rows
from fl_lightning.runs.folder import is_locked
from fl_lightning.runs.partition import read_names
from fl_lightning.runs.reader import DamagedRun, Run, complete_rounds, read_config, read_final

TAIL = 2**16
"""Number of bytes at the end of a file that are read first. More are read if the last round does not fit."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at the time of a poll: its rounds, last client metrics, warnings and idle time.

    Args:
        run: The run so far, maybe without any round.
        clients: The rows of `clients.csv` for the last round in which the clients were evaluated.
        names: The names of the clients.
        warnings: The last lines of `warnings.txt`.
        ended: Whether the run has finished.
        silence: Seconds since the last change in the folder.
        since_round: Seconds since the last round ended. Before the first round, seconds since the run began.
        stopped: Whether the run's process has gone before the run's end.
    """

    run: Run
    clients: list[Row]
    names: Names
    warnings: list[str]
    ended: bool
    silence: float
    since_round: float
    stopped: bool = False

    @property
    def total(self) -> int | None:
        """The planned number of rounds of the run; None if the config does not give it."""
        rounds = self.run.config.get("rounds")
        return rounds if isinstance(rounds, int) and rounds > 0 else None

    @property
    def round_seconds(self) -> float | None:
        """The mean duration in seconds of the last rounds: 10 rounds, or `evaluation.every` rounds if that is more."""
        every = (self.run.config.get("evaluation") or {}).get("every")
        last = self.run.rounds[-max(10, every if isinstance(every, int) else 1) :]
        times = [row["time/round_s"] for row in last if math.isfinite(row.get("time/round_s", math.nan))]
        return sum(times) / len(times) if times else None

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds left: remaining rounds times `round_seconds`, minus the time since the last round."""
        if self.total is None or self.round_seconds is None or self.ended or self.stopped:
            return None
        left = max(self.total - len(self.run.rounds), 0)
        return left * self.round_seconds - min(self.since_round, self.round_seconds) if left else 0.0


class RunMonitor:
    """Reads the status of a run from its folder repeatedly. Files that have not changed are not read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: list[Row] = []
        self._clients: list[Row] = []
        self._names = Names()
        self._config: dict[str, Any] = {}
        self._seen: dict[str, object] = {}

    def poll(self) -> RunStatus:
        """Read the run's folder, and return the present status of the run.

        Raises:
            DamagedRun: The folder is not a run, or cannot be read.
        """
        try:
            if self._has_changed("metrics.csv"):
                self._rows = complete_rounds(read_rows(self.folder / "metrics.csv"))
            rows, last_round = self._rows, (self.folder / "metrics.csv").stat().st_mtime
        except FileNotFoundError as error:
            raise DamagedRun(
                f"{self.folder}: not a run, or its first round has not ended: metrics.csv not found"
            ) from error
        except (OSError, ValueError) as error:
            raise DamagedRun(f"{self.folder}: metrics.csv cannot be read: {reason_of(error)}") from error
        if self._has_changed("config.yaml"):
            self._config = read_config(self.folder)
        if self._has_changed("clients.csv", len(rows)):
            self._clients = last_measured(self.folder / "clients.csv", len(rows))
        if self._has_changed("partition.csv"):
            self._names = read_names(self.folder)
        has_process = is_locked(self.folder)  # before the summary is read: a run writes it, then releases the lock
        run, now = Run(self.folder, self._config, rows, read_final(self.folder)), time.time()
        ended = self._ended(run, last_round)
        return RunStatus(
            run,
            clients=self._clients,
            names=self._names,
            warnings=last_lines(self.folder / "warnings.txt", 3),
            ended=ended,
            silence=max(now - self._last_change(), 0.0),
            since_round=max(now - last_round, 0.0),
            stopped=has_process is False and not ended,
        )

    def _ended(self, run: Run, last_round: float) -> bool:
        """Return whether the run has ended: its final summary exists, and the run was not resumed after writing it."""
        if not run.final or run.final["rounds"] != len(run.rounds):
            return False
        stopped_early = (self.folder / "final" / "summary.json").stat().st_mtime >= last_round
        return stopped_early or run.config.get("rounds") == len(run.rounds)

    def _has_changed(self, name: str, number: int = 0) -> bool:
        """Return whether a file of the run, or the number of rounds to read from it, changed since the last call."""
        try:
            file = (self.folder / name).stat()
            now: object = file.st_ino, file.st_size, file.st_mtime_ns, number
        except OSError:
            now = None
        before, self._seen[name] = self._seen.get(name, ()), now
        return before != now

    def _last_change(self) -> float:
        times = [0.0]
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # a temporary file was renamed meanwhile
                times.append(entry.stat().st_mtime)
        return max(times)


def last_measured(path: Path, round: int) -> list[Row]:
    """Return the rows of a `clients.csv` for the last evaluated round that is not after `round`. Reads only its end."""
    size = TAIL
    with suppress(OSError, ValueError), open_file(path) as file:
        header, length = file.readline(TAIL), os.fstat(file.fileno()).st_size
        while header:
            rows = parse_rows(header + lines_from(file, max(length - size, len(header))))
            measured = [row for row in rows if "acc" in row and row.get("round", math.inf) <= round]
            last = measured[-1]["round"] if measured else 0
            if size >= min(length, 2**8 * TAIL) or (rows and rows[0].get("round", last) < last):
                return [row for row in measured if row["round"] == last]
            size *= 4
    return []


def last_lines(path: Path, number: int) -> list[str]:
    """Return the last lines of a text file; none if the file does not exist."""
    with suppress(OSError):
        text = read_last_bytes(path, TAIL)
        return text[: text.rfind(b"\n") + 1].decode(errors="replace").splitlines()[-number:]
    return []

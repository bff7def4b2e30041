"""Where a run's numbers go: `metrics.csv`, `clients.csv` and Lightning's loggers; and its warnings: `warnings.txt`."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import numpy as np
from lightning.pytorch.loggers import Logger

from fl_lightning.core.digest import Digest
from fl_lightning.core.errors import CheckpointError, ConfigError, Damaged, blame, one_line
from fl_lightning.core.files import read_file, replacing, write_atomically
from fl_lightning.evaluation.metrics import Row, lowest_losses, read_rows, summarize
from fl_lightning.loggers.base import Beginning, Labels, RoundLogger
from fl_lightning.loggers.files import CSVLogger as CSVLogger
from fl_lightning.loggers.files import MLFlowLogger as MLFlowLogger
from fl_lightning.loggers.files import TensorBoardLogger as TensorBoardLogger
from fl_lightning.loggers.wandb import WandbRoundLogger as WandbRoundLogger

GROUPS = ("round", "global/", "personal_on_global/", "client/", "comm/", "time/")
CLIENT_SERIES = re.compile(r"client_(\d+)/(.+)")
FEW_CLIENTS = 1000
"""Up to so many clients have series of their own in the logs, and a row each in W&B's table of the partition."""


def has_few_clients(clients: int) -> bool:
    """Whether clients are few enough for series of their own; warns where they are not."""
    if clients > FEW_CLIENTS:
        mend = "log_clients: true logs them all the same"
        warnings.warn(
            f"log_clients: more than {FEW_CLIENTS:,} clients have no series of their own; {mend}", stacklevel=2
        )
    return clients <= FEW_CLIENTS


def split_series(row: Row) -> tuple[Row, dict[int, Row]]:
    """A round's metrics less those of single clients, `client_<id>/<name>`, and these by client and name."""
    own: dict[int, Row] = {}
    for key, value in row.items():
        if match := CLIENT_SERIES.fullmatch(key):
            own.setdefault(int(match[1]), {})[match[2]] = value
    return {key: value for key, value in row.items() if not CLIENT_SERIES.fullmatch(key)}, own


class MetricsCsv:
    """A run's `metrics.csv`: one row a round, one column a metric, blank where a round has no value.

    What a round has of single clients, `client_<id>/<name>`, goes into `clients.csv` beside it.

    Args:
        path: The file.

    Attributes:
        rows: All rows so far, without the single clients'.
        clients: The single clients' series.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.clients = ClientsCsv(path.with_name("clients.csv"))
        self._columns: list[str] = []
        self._digest = Digest()

    @property
    def digests(self) -> dict[str, str]:
        """Digests of what has been written so far, by file."""
        return {self.path.name: str(self._digest), self.clients.path.name: str(self.clients.digest)}

    def check(self, round: int, digests: Mapping[str, str]) -> None:
        """See whether the files still hold what they held after a round.

        Args:
            round: The round.
            digests: `digests` as they were then.

        Raises:
            Damaged: They do not.
        """
        rows = self._held(round)
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
        """Take up existing files as they stood after a round: what came later will be computed again.

        Raises:
            Damaged: The file does not hold every round up to that one.
        """
        self.rows = self._held(round)
        if len(self.rows) < round:
            raise Damaged(f"{self.path} does not hold rounds 1 to {round}: put it back, or start the run again")
        self._digest = Digest.over(self.rows)
        self.clients.rewind(round)
        if self.rows:
            self._rewrite(self.rows)
        else:
            self._columns = []
            self.path.unlink(missing_ok=True)

    def append(self, row: Row) -> None:
        """Add one round; it is on disk when this returns, the clients' part first.

        Raises:
            CheckpointError: The disk refuses.
        """
        shared, own = split_series(row)
        try:
            self.clients.append(int(row["round"]), own)
            if shared.keys() <= set(self._columns):
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns, lineterminator="\n").writerow(shared)
                    _flush(file)
            else:
                self._rewrite([*self.rows, shared])
        except OSError as error:
            raise CheckpointError(f"cannot write round {row['round']} to {self.path.parent}: {error}") from error
        self.rows.append(shared)  # not before it is on disk: what is here counts as measured
        self._digest.add(shared)

    def _held(self, round: int) -> list[Row]:
        """The rows of rounds 1 to n that the file holds, as far as none is missing; n is at most the given round."""
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
    """A run's `clients.csv`: a line for each round and client that has a value, one column a metric, blank where not.

    Lines are only added at the end, whichever clients come; a metric that no client had before takes a new last column,
    for which the file is copied once. None of it is held in memory.

    Args:
        path: The file; made with the first line.
    """

    keys = ("round", "client")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = Digest()
        self._columns = list(self.keys)

    def rows(self, round: int) -> Iterator[dict[str, str]]:
        """The lines up to a round as they stand in the file, by column; one that a kill cut short is none."""
        header = self._header()
        return (dict(zip(header, cells, strict=False)) for cells in self._lines(round))

    def rewind(self, round: int) -> None:
        """Cut the file back to how it stood after a round; columns that only later rounds filled go."""
        filled = max((i for cells in self._lines(round) for i, cell in enumerate(cells, 1) if cell), default=0)
        self._columns = self._header()[:filled] or list(self.keys)
        self.digest = Digest.over(self.rows(round))
        if filled:
            self._copy(round)
        else:
            self.path.unlink(missing_ok=True)

    def append(self, round: int, series: Mapping[int, Row]) -> None:
        """Add one round's metrics by client and name; they are on disk when this returns."""
        new = {name for row in series.values() for name in row}.difference(self._columns)
        if new:
            self._columns += sorted(new, key=_column_order)
            self._copy(round)
        rows = [{"round": round, "client": k, **row} for k, row in sorted(series.items())]
        if rows:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerows(rows)
                _flush(file)
        for each in rows:
            self.digest.add(each)

    def _header(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", errors="replace") as file:
            return next(csv.reader(file), [])

    def _lines(self, round: int) -> Iterator[list[str]]:
        """The lines up to a round, in their order; one that a kill cut short is none."""
        if not self.path.exists():
            return
        with self.path.open(newline="", errors="replace") as file:
            whole = csv.reader(line for line in file if line.endswith("\n"))
            next(whole, None)
            for cells in whole:
                if not cells or not cells[0].isdigit() or int(cells[0]) > round:
                    return
                yield cells

    def _copy(self, round: int) -> None:
        """Write the lines up to a round anew, cut or filled up to the columns there are now."""
        with replacing(self.path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            for cells in self._lines(round):
                writer.writerow([*cells, *[""] * len(self._columns)][: len(self._columns)])


class WarningsTxt:
    """A run's `warnings.txt`: a line for each warning, `round <n>: <text>`, n being the round that was under way.

    Used as a context, it notes what is warned of inside; that is shown as ever. The file holds the newest 1,000
    warnings, with up to as many before them, each cut to 500 characters; without a warning there is none. What goes
    wrong in writing it is passed over: no run ends for it.

    Args:
        path: The file.
        round: The round under way.
    """

    most, longest = 1000, 500

    def __init__(self, path: Path, round: Callable[[], int]) -> None:
        self.path, self.round = path, round
        self._lines: deque[bytes] = deque(maxlen=self.most)
        self._waiting: list[str] | None = None
        self._on_disk = 0

    def __enter__(self) -> WarningsTxt:
        self._shown = warnings.showwarning
        self._waiting = []  # whether the folder is this run's is not known yet
        warnings.showwarning = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        warnings.showwarning = self._shown

    @property
    def digest(self) -> str:
        """The digest of all warnings before the round under way."""
        return self._digest([line for line in self._lines if self._round_of(line) < self.round()])

    def check(self, round: int, digest: str) -> None:
        """Warn if the file does not hold what it held after a round; nothing is worked out from it.

        Args:
            round: The round.
            digest: `digest` as it was then.
        """
        held = self._held(round)
        if len(held) < self.most and self._digest(held) != digest:  # of more, some may have gone since
            warnings.warn(f"{self.path} is not as it was after round {round}", stacklevel=2)

    def rewind(self, round: int) -> None:
        """Take up the file as it stood after a round, and add what was warned of before its folder was there."""
        waiting, self._waiting = self._waiting or [], None
        with suppress(OSError):
            before, kept = self._on_file(), self._held(round)
            self._lines = deque([*kept, *map(self._line, waiting)], self.most)
            self._on_disk = len(before)
            if waiting or kept != before:
                self._rewrite()

    def _on_file(self) -> list[bytes]:
        return read_file(self.path).splitlines(keepends=True) if self.path.exists() else []

    def _held(self, round: int) -> list[bytes]:
        return [line for line in self._on_file() if 0 <= self._round_of(line) <= round]

    @staticmethod
    def _round_of(line: bytes) -> int:
        """The round that was under way; -1 of a line that a kill cut short."""
        of = re.match(rb"round ([0-9]{1,18}): .*\n$", line)
        return int(of[1]) if of else -1

    @staticmethod
    def _digest(lines: Iterable[bytes]) -> str:
        return f"sha256:{hashlib.sha256(b''.join(lines)).hexdigest()}"

    def _note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        self._shown(message, *args, **kwargs)
        text = one_line(message)[: self.longest]
        if self._waiting is not None:
            self._waiting.append(text)
            return
        self._lines.append(line := self._line(text))
        with suppress(OSError):
            if self._on_disk >= 2 * self.most:
                self._rewrite()
            else:
                with self.path.open("ab") as file:
                    file.write(line)
                self._on_disk += 1

    def _line(self, text: str) -> bytes:
        return f"round {self.round()}: {text}\n".encode(errors="replace")

    def _rewrite(self) -> None:
        if self._lines:
            write_atomically(self.path, b"".join(self._lines))
        else:
            self.path.unlink()
        self._on_disk = len(self._lines)


def _flush(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class Loggers:
    """A run's Lightning loggers, told the same one after another; falsy where there are none.

    Args:
        given: A logger, a list of them, or False or None for none.

    Raises:
        ConfigError: Something else is among them, or two would write to one place.
    """

    def __init__(self, given: Logger | Sequence[Logger] | Literal[False] | None) -> None:
        self._all: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if given is None or given is False:
            self._all = []
        for n, one in enumerate(self._all):
            if not isinstance(one, Logger):
                raise ConfigError(f"logger: {one!r} is no Lightning logger; give one, a list of them, or false")
            if isinstance(one, RoundLogger) and type(one) in map(type, self._all[:n]):
                raise ConfigError(f"logger: {type(one).__name__} is there twice; list it once")
        self._begun: list[Logger] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def mute(self) -> None:
        """Tell none of them anything, from here on."""
        self._all = []

    def check(self, run_dir: Path) -> None:
        """Refuse what cannot work; nothing is written yet.

        Raises:
            ConfigError: It cannot.
        """
        for one in self._all:
            if isinstance(one, RoundLogger):
                one.check(run_dir)

    def begin(
        self, run_dir: Path, config: dict[str, Any] | None, labels: Labels, counts: np.ndarray, round: int
    ) -> None:
        """A run begins, or goes on after a round.

        Args:
            run_dir: The run's folder.
            config: The resolved config, if there is one.
            labels: What to call the run.
            counts: Samples a client and class, `(clients, C)`.
            round: The last finished round.

        Raises:
            ConfigError: A logger fails.
        """
        shown = counts.tolist() if len(counts) <= FEW_CLIENTS else None
        beginning = Beginning(run_dir, config or {}, labels, round, shown)
        try:
            with blame("logger"):
                for one in self._all:
                    if isinstance(one, RoundLogger):
                        one.begin(beginning)
                    elif config:
                        one.log_hyperparams(config)
                    self._begun.append(one)
        except BaseException:
            self.finalize("failed")
            raise

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to a round's row."""
        for one in self._all:
            one.log_metrics(dict(metrics), step)

    def log_image(self, key: str, images: Sequence[str], **options: Any) -> None:
        """Log pictures from their files, with the loggers that take them."""
        for one in self._all:
            if log_image := getattr(one, "log_image", None):
                log_image(key, list(images), **options)

    def end_round(self, rows: Sequence[Row], targets: Sequence[float]) -> None:
        """A round is over, of which everything has been logged.

        Args:
            rows: All rounds' metrics so far.
            targets: The accuracies of R_acc.
        """
        for one in self._all:
            one.save()
            if isinstance(one, RoundLogger):
                one.log_summary(summarize(rows, targets) | lowest_losses(rows))

    def log_files(self) -> None:
        """The run's files are all there."""
        for one in self._all:
            if isinstance(one, RoundLogger):
                one.log_files()

    def finalize(self, status: str) -> None:
        """The run is over, or broken off: close what was begun."""
        begun, self._begun = self._begun, []
        for one in begun:
            one.finalize(status)


def _column_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    parts = re.split(r"(\d+)", name)
    return group, [(int(part) if part.isdigit() else -1, part) for part in parts]

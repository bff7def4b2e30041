"""Write `metrics.csv`, `clients.csv` and `warnings.txt`, and call the loggers of a run."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from lightning.pytorch.loggers import Logger

from fl_lightning.core.digest import Digest
from fl_lightning.core.errors import CheckpointError, ConfigError, Damaged, blame, one_line
from fl_lightning.core.files import flush, read_file, replace_atomically, write_atomically
from fl_lightning.core.names import Names
from fl_lightning.evaluation.summary import CLIENT_NAME, Row, lowest_losses, read_rows, summarize
from fl_lightning.loggers.base import Beginning, Labels, RoundLogger
from fl_lightning.loggers.files import CSVLogger as CSVLogger
from fl_lightning.loggers.files import MLFlowLogger as MLFlowLogger
from fl_lightning.loggers.files import TensorBoardLogger as TensorBoardLogger
from fl_lightning.loggers.wandb import WandbRoundLogger as WandbRoundLogger

GROUPS = ("round", "global/", "personal_on_global/", "client/", "new_client/", "comm/", "time/")
CLIENT_SERIES = re.compile(r"client_(\d+)/(.+)")
FEW_CLIENTS = 1000
"""Maximum number of clients for which each client's metrics, and the partition in W&B, are logged by default."""


def has_few_clients(clients: int) -> bool:
    """Return whether a run has few enough clients to log each client's metrics by default. Warn if it has too many."""
    if clients > FEW_CLIENTS:
        message = f"log_clients: metrics of single clients are not logged ({clients:,} clients)."
        warnings.warn(f"{message} Set log_clients: true to log them.", stacklevel=2)
    return clients <= FEW_CLIENTS


def split_series(row: Row) -> tuple[Row, dict[int, Row]]:
    """Split a round's metrics into those of the whole run and those of each client, named `client_<id>/<name>`."""
    shared: Row = {}
    by_client: dict[int, Row] = {}
    for key, value in row.items():
        if match := CLIENT_SERIES.fullmatch(key):
            by_client.setdefault(int(match[1]), {})[match[2]] = value
        else:
            shared[key] = value
    return shared, by_client


def named_key(key: str, names: Sequence[str]) -> str:
    """Return the key of a metric in loggers, with the client's name if clients have names: `client_3_north/acc`.

    Characters that a logger may refuse become `_`.
    """
    match = CLIENT_SERIES.fullmatch(key)
    if not match or int(match[1]) >= len(names):
        return key
    name = re.sub(r"[^\w.-]+", "_", names[int(match[1])])
    return f"client_{match[1]}_{name}/{match[2]}"


class MetricsCsv:
    """Writes the metrics of a run to `metrics.csv`, and the metrics of single clients to `clients.csv`.

    `metrics.csv` has a row per round and a column per metric, blank if a round has no value. `clients.csv` is in the
    same folder. Metrics of single clients are named `client_<id>/<name>`.

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
        """Check by digests that both files still contain the rows up to a round unchanged.

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
        """Remove the rows after a round from both files. A resumed run computes these rounds again.

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

    def append(self, row: Row) -> None:
        """Append a round's metrics to `clients.csv`, then to `metrics.csv`. The new rows survive a kill of the process.

        Raises:
            CheckpointError: Writing fails.
        """
        shared, by_client = split_series(row)
        try:
            self.clients.append(int(row["round"]), by_client)
            if shared.keys() <= set(self._columns):
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns, lineterminator="\n").writerow(shared)
            else:
                self._rewrite([*self.rows, shared])
        except OSError as error:
            raise CheckpointError(f"cannot write round {row['round']} to {self.path.parent}: {error}") from error
        self.rows.append(shared)  # only after it is written: `rows` must never be ahead of the file
        self._digest.add(shared)

    def flush(self) -> None:
        """Flush all rows of both files to disk, so that they survive a power failure.

        Raises:
            CheckpointError: Writing fails.
        """
        try:
            for path in filter(Path.exists, (self.clients.path, self.path)):
                flush(path)
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.path.parent}: {error}") from error

    def _rows_until(self, round: int) -> list[Row]:
        """Return the rows of `metrics.csv` from round 1 to `round`, or to the round before the first missing one."""
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
        """Return an iterator over the complete lines up to a round, as mappings from column to cell."""
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

    def append(self, round: int, series: Mapping[int, Row]) -> None:
        """Append the clients' metrics of one round to the file, a line per client."""
        new = {name for row in series.values() for name in row}.difference(self._columns)
        if new:
            self._columns += sorted(new, key=_column_order)
            self._copy(round)
        name = {k: {CLIENT_NAME: self.names[k]} if self.names else {} for k in series}
        rows = [{"round": round, "client": k, **name[k], **row} for k, row in sorted(series.items())]
        if rows:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerows(rows)
        for each in rows:
            self.digest.add(each)

    def _header(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            return next(csv.reader(file), [])

    def _lines(self, round: int) -> Iterator[list[str]]:
        """Yield the cells of each complete line of the file, up to a round."""
        if not self.path.exists():
            return
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
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


class WarningsTxt:
    """Context that records warnings in `warnings.txt`: a line `round <n>: <text>` for each warning.

    Warnings are also shown as usual. The file keeps the newest 1,000 to 2,000 warnings, each cut to 500 characters.
    Without warnings there is no file. Errors in writing the file are ignored.

    Args:
        path: The file.
        round: Returns the current round.
    """

    most, longest = 1000, 500

    def __init__(self, path: Path, round: Callable[[], int]) -> None:
        self.path, self.round = path, round
        self._lines: deque[bytes] = deque(maxlen=self.most)
        self._waiting: list[str] | None = None
        self._on_disk = 0

    def __enter__(self) -> WarningsTxt:
        self._shown = warnings.showwarning
        self._waiting = []  # the run folder is not locked yet
        warnings.showwarning = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        warnings.showwarning = self._shown

    @property
    def digest(self) -> str:
        """SHA-256 digest of all warnings before the current round."""
        return self._digest([line for line in self._lines if self._round_of(line) < self.round()])

    def check(self, round: int, digest: str) -> None:
        """Warn if the file of warnings has changed since the end of a round; results do not depend on this file.

        Args:
            round: The round.
            digest: The value of `digest` after that round.
        """
        lines = self._lines_until(round)
        if len(lines) < self.most and self._digest(lines) != digest:  # a longer file may have dropped old lines
            warnings.warn(f"{self.path} is not as it was after round {round}", stacklevel=2)

    def rewind(self, round: int) -> None:
        """Remove warnings of later rounds from the file, and append those raised before the run folder was locked."""
        waiting, self._waiting = self._waiting or [], None
        with suppress(OSError):
            before, kept = self._on_file(), self._lines_until(round)
            self._lines = deque([*kept, *map(self._line, waiting)], self.most)
            self._on_disk = len(before)
            if waiting or kept != before:
                self._rewrite()

    def _on_file(self) -> list[bytes]:
        return read_file(self.path).splitlines(keepends=True) if self.path.exists() else []

    def _lines_until(self, round: int) -> list[bytes]:
        return [line for line in self._on_file() if 0 <= self._round_of(line) <= round]

    @staticmethod
    def _round_of(line: bytes) -> int:
        """Return the round that a line of the file begins with; -1 for an incomplete line."""
        match = re.match(rb"round ([0-9]{1,18}): .*\n$", line)
        return int(match[1]) if match else -1

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


class Loggers:
    """The loggers of a run as one object, which passes each call to every logger. `len` is the number of loggers.

    Args:
        given: A logger, a list of loggers, or False or None for none.

    Raises:
        ConfigError: An element is not a logger, or two would write to the same place.
    """

    def __init__(self, given: Logger | Sequence[Logger] | Literal[False] | None) -> None:
        self._all: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if given is None or given is False:
            self._all = []
        for n, one in enumerate(self._all):
            if not isinstance(one, Logger):
                raise ConfigError(f"logger: {one!r} is not a Lightning logger. Give one, a list of them, or false.")
            if isinstance(one, RoundLogger) and type(one) in map(type, self._all[:n]):
                raise ConfigError(f"logger: {type(one).__name__} is listed twice. List it once.")
        self._begun: list[Logger] = []
        self._client_names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def mute(self) -> None:
        """Remove all loggers, so that nothing is logged from here on."""
        self._all = []

    def check(self, run_dir: Path) -> None:
        """Check the options of all loggers before the run writes any file.

        Raises:
            ConfigError: An option is not valid.
        """
        for one in self._all:
            if isinstance(one, RoundLogger):
                one.check(run_dir)

    def begin(
        self,
        run_dir: Path,
        config: dict[str, Any] | None,
        labels: Labels,
        counts: np.ndarray,
        round: int,
        names: Names = Names(),
    ) -> None:
        """Begin logging a run in all loggers, or continue logging a resumed run.

        Args:
            run_dir: The run folder.
            config: The resolved config, if there is one.
            labels: Default names of the run.
            counts: Number of samples of each client and class, `(clients, C)`.
            round: The last finished round.
            names: The names of the clients and classes.

        Raises:
            ConfigError: A logger fails.
        """
        shown = counts.tolist() if len(counts) <= FEW_CLIENTS else None
        beginning = Beginning(run_dir, config or {}, labels, round, shown, names)
        self._client_names = names.clients
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
        """Log the metrics of round `step` in all loggers. The key of a client's metric includes its name, if any."""
        named = {named_key(key, self._client_names): value for key, value in metrics.items()}
        for one in self._all:
            one.log_metrics(dict(named), step)

    def log_image(self, key: str, images: Sequence[str], **options: Any) -> None:
        """Log image files in all loggers that support images."""
        for one in self._all:
            if log_image := getattr(one, "log_image", None):
                log_image(key, list(images), **options)

    def end_round(self, rows: Sequence[Row], targets: Sequence[float]) -> None:
        """Finish a round in all loggers, and log the summary of the rounds so far.

        Args:
            rows: The metrics of all rounds so far.
            targets: Accuracies for which the summary has the first round that reaches them (R_acc).
        """
        for one in self._all:
            one.save()
            if isinstance(one, RoundLogger):
                one.log_summary(summarize(rows, targets) | lowest_losses(rows))

    def log_files(self) -> None:
        """Log files of the run in all loggers. Called when the run folder is complete."""
        for one in self._all:
            if isinstance(one, RoundLogger):
                one.log_files()

    def finalize(self, status: str) -> None:
        """Close all loggers on which `begin` was called."""
        begun, self._begun = self._begun, []
        for one in begun:
            one.finalize(status)


def _column_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    parts = re.split(r"(\d+)", name)
    return group, [(int(part) if part.isdigit() else -1, part) for part in parts]

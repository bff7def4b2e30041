"""Where a run's numbers go: `metrics.csv` and `clients.csv`, and W&B or any other Lightning logger beside them."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import wandb
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

from fl_lightning.errors import CheckpointError, blame
from fl_lightning.files import write_atomically
from fl_lightning.metrics import Row, read_rows

GROUPS = ("round", "global/", "personal_on_global/", "client/", "comm/", "time/")
CLIENT_SERIES = re.compile(r"client_(\d+)/(.+)")
FEW_CLIENTS = 1000
"""Up to so many clients have series of their own in the logs, and a row each in W&B's table of the partition."""


def few_enough(clients: int) -> bool:
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

    def rewind(self, round: int) -> None:
        """Take up existing files as they stood after a round: what came later will be computed again.

        Raises:
            CheckpointError: The file does not hold every round up to that one.
        """
        rows = read_rows(self.path) if self.path.exists() else []
        self.rows = [row for row in rows if 0 < row.get("round", 0) <= round]
        if [row["round"] for row in self.rows] != list(range(1, round + 1)):
            raise CheckpointError(f"{self.path} does not hold rounds 1 to {round}: put it back, or start the run again")
        self.clients.rewind(round)
        self._rewrite()

    def append(self, row: Row) -> None:
        """Add one round; it is on disk when this returns, the clients' part first."""
        shared, own = split_series(row)
        self.clients.append(int(row["round"]), own)
        self.rows.append(shared)
        if shared.keys() <= set(self._columns):
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(shared)
                _flush(file)
        else:
            self._rewrite()

    def _rewrite(self) -> None:
        names = dict.fromkeys(name for row in self.rows for name in row)
        self._columns = sorted(names, key=_column_order)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
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
        self._columns = list(self.keys)

    def rewind(self, round: int) -> None:
        """Cut the file back to how it stood after a round; columns that only later rounds filled go."""
        filled = max((i for cells in self._lines(round) for i, cell in enumerate(cells, 1) if cell), default=0)
        self._columns = self._header()[:filled] or list(self.keys)
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
        if series:
            with self.path.open("a", newline="") as file:
                writer = csv.DictWriter(file, self._columns, lineterminator="\n")
                writer.writerows({"round": round, "client": k, **row} for k, row in sorted(series.items()))
                _flush(file)

    def _header(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return next(csv.reader(file), [])

    def _lines(self, round: int) -> Iterator[list[str]]:
        """The lines up to a round, in their order; one that a kill cut short is none."""
        if not self.path.exists():
            return
        with self.path.open(newline="", errors="replace") as file:
            whole = csv.reader(line for line in file if line.endswith("\n"))
            next(whole, None)
            for cells in whole:
                if not cells[0].isdigit() or int(cells[0]) > round:
                    return
                yield cells

    def _copy(self, round: int) -> None:
        """Write the lines up to a round anew, cut or filled up to the columns there are now."""
        partial = self.path.with_name(f".{self.path.name}.writing")
        with partial.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            for cells in self._lines(round):
                writer.writerow([*cells, *[""] * len(self._columns)][: len(self._columns)])
            _flush(file)
        partial.replace(self.path)


class WandbRoundLogger(LightningWandbLogger):
    """Weights & Biases: one run an experiment, `round` as the step of every metric, offline unless told otherwise.

    The files lie in the run's folder; a resumed experiment goes on in the same W&B run.

    Args:
        project: W&B project.
        name: Name of the run; by default W&B invents one.
        offline: Keep everything on disk (`wandb sync` uploads it later); false needs an account.
        entity: W&B user or team.
        group: Name under which W&B groups runs, such as seeds of one setting.
        tags: Tags of the run.
    """

    def __init__(
        self,
        project: str = "fl-lightning",
        name: str | None = None,
        offline: bool = True,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        settings = wandb.Settings(console="off", silent=offline)
        super().__init__(
            name=name,
            project=project,
            offline=offline,
            entity=entity,
            group=group,
            tags=tags,
            settings=settings,
        )
        self._wandb_init.pop("anonymous", None)  # W&B warns about it, even when it is None

    def attach(self, run_dir: Path) -> None:
        """Tie the W&B run to a run folder: files go there, and the folder's name is the run's id."""
        (run_dir / "wandb").mkdir(exist_ok=True)
        self._wandb_init |= {
            "dir": str(run_dir),
            "id": re.sub(r"[^A-Za-z0-9_-]", "-", run_dir.name),
            "resume": "allow",
        }

    @property
    def experiment(self) -> Any:
        """The W&B run; made at the first call.

        Not by Lightning's property: that makes `trainer/global_step` the step of every metric, and sets `WANDB_MODE`
        for whatever else this process may run.
        """
        if self._experiment is None:
            self._experiment = wandb.init(mode="offline" if self._offline else None, **self._wandb_init)
            self._experiment.define_metric("round")
            self._experiment.define_metric("*", step_metric="round")
        return self._experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one round's metrics under `round`."""
        self.experiment.log({**metrics, **({} if step is None else {"round": step})})

    def log_summary(self, summary: dict[str, Any]) -> None:
        """Put final figures into the run's summary."""
        self.experiment.summary.update({name: value for name, value in summary.items() if value is not None})

    def log_counts(self, key: str, counts: Sequence[Sequence[int]]) -> None:
        """Log a clients x classes table, where clients are few enough for a row each."""
        if len(counts) > FEW_CLIENTS:
            return
        columns = ["client", *(f"class {j}" for j in range(len(counts[0])))]
        self.log_table(key, columns, [[k, *map(int, row)] for k, row in enumerate(counts)])

    def finalize(self, status: str) -> None:
        """Close the W&B run."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


def _flush(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def begin_logging(logger: Logger, run_dir: Path, config: dict[str, Any] | None, counts: np.ndarray) -> None:
    """Show a logger the run's config and, to W&B, who holds what.

    Args:
        logger: The run's logger.
        run_dir: The run's folder, where W&B leaves its files.
        config: The resolved config, if there is one.
        counts: Samples a client and class, `(clients, C)`.

    Raises:
        ConfigError: The logger fails.
    """
    if isinstance(logger, WandbRoundLogger):
        logger.attach(run_dir)
    if config:
        with blame("logger"):
            logger.log_hyperparams(config)
    if isinstance(logger, WandbRoundLogger):
        logger.log_counts("partition", counts.tolist())


def _column_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    parts = re.split(r"(\d+)", name)
    return group, [(int(part) if part.isdigit() else -1, part) for part in parts]

"""Where a run's numbers go: `metrics.csv`, always, and W&B or any other Lightning logger beside it."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

from fl_lightning.checkpoint import write_atomically
from fl_lightning.errors import CheckpointError
from fl_lightning.evaluation import Row

GROUPS = ("round", "global/", "personal_on_global/", "client/", "comm/", "time/", "client_")


class MetricsCsv:
    """A run's `metrics.csv`: one row a round, one column a metric, blank where a round has no value.

    Args:
        path: The file.

    Attributes:
        rows: All rows so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._columns: list[str] = []

    def rewind(self, round: int) -> None:
        """Take up an existing file as it stood after a round: what came later will be computed again.

        Raises:
            CheckpointError: The file does not hold every round up to that one.
        """
        text = self.path.read_bytes().decode(errors="replace") if self.path.exists() else ""
        text = text[: text.rfind("\n") + 1]  # a kill may have cut the last line short
        rows = [_parse(row) for row in csv.DictReader(io.StringIO(text))]
        self.rows = [row for row in rows if 0 < row.get("round", 0) <= round]
        if [row["round"] for row in self.rows] != list(range(1, round + 1)):
            raise CheckpointError(f"{self.path} does not hold rounds 1 to {round}: put it back, or start the run again")
        self._rewrite()

    def append(self, row: Row) -> None:
        """Add one round; the file is on disk when this returns."""
        self.rows.append(row)
        if row.keys() <= set(self._columns):
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
                file.flush()
                os.fsync(file.fileno())
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
        """Log a clients x classes table."""
        columns = ["client", *(f"class {j}" for j in range(len(counts[0])))]
        self.log_table(key, columns, [[k, *map(int, row)] for k, row in enumerate(counts)])

    def finalize(self, status: str) -> None:
        """Close the W&B run."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


def _parse(row: dict[str, str]) -> Row:
    """A row of numbers; one that a kill cut short comes back empty."""
    try:
        return {name: _number(text) for name, text in row.items() if text}
    except (TypeError, ValueError):
        return {}


def _number(text: str) -> float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _column_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    parts = re.split(r"(\d+)", name)
    return group, [(int(part) if part.isdigit() else -1, part) for part in parts]

"""Lightning's CSV, TensorBoard and MLflow loggers, with their files in the run's folder, and going on after a kill."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers as lightnings
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from matplotlib.image import imread

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import write_atomically
from fl_lightning.core.gate import require_trust
from fl_lightning.loggers.base import Beginning, RoundLogger

TRACKING = "MLFLOW_TRACKING_URI"
"""MLflow's environment variable for where its runs are."""


def need(package: str) -> None:
    """Refuse a logger whose package is missing.

    Raises:
        ConfigError: Names the command that installs it.
    """
    if find_spec(package) is None:
        raise ConfigError(f"logger: it needs {package}; pip install 'fl-lightning[{package}]'")


def refuse_places(**options: Any) -> None:
    """Refuse options that say where below `save_dir` Lightning's loggers write, where there is none.

    Raises:
        ConfigError: Names the option.
    """
    for name, value in options.items():
        if value not in (None, "lightning_logs"):
            raise ConfigError(f"logger.{name}: it names a place below logger.save_dir; give that too, or leave it out")


class CSVLogger(RoundLogger, lightnings.CSVLogger):
    """Lightning's CSV file: a row a round, by default in `csv_logs/metrics.csv` in the run's folder.

    Args:
        save_dir: Another folder, in which Lightning makes one for each sitting, `<name>/version_<n>`.
        name: In that folder.
        version: In that folder.
        prefix: Begins the names of metrics.

    Raises:
        ConfigError: `name` or `version` is given without `save_dir`.
    """

    def __init__(
        self,
        save_dir: str | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        require_trust("logger.save_dir", save_dir)
        super().__init__(save_dir or "", name, version, prefix)
        self._in_run = save_dir is None
        if self._in_run:
            refuse_places(name=name, version=version)

    def begin(self, run: Beginning) -> None:
        """Begin a file, or go on with the run's own as it stood after a round."""
        if self._in_run:
            self._save_dir, self._name, self._version = str(run.run_dir), "csv_logs", ""
            _cut_back(run.run_dir / "csv_logs" / "metrics.csv", run.round)
            self._experiment = _Continued(self.log_dir)
        super().begin(run)


class _Continued(ExperimentWriter):
    """Goes on with the file there is, which Lightning's own would remove."""

    def _check_log_dir_exists(self) -> None:
        if os.path.exists(self.metrics_file_path):
            with open(self.metrics_file_path, newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])


def _cut_back(path: Path, round: int) -> None:
    """Cut a CSV file with a column `step` back to the rows up to a round, less what a kill cut short."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = csv.DictReader(line for line in text.splitlines(keepends=True) if line.endswith("\n"))
    kept = [row for row in rows if (row.get("step") or "").isdigit() and int(row["step"]) <= round]
    if not kept:
        path.unlink()
        return
    writer = csv.DictWriter(out := io.StringIO(), rows.fieldnames or [], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(kept)
    write_atomically(path, out.getvalue())


class TensorBoardLogger(RoundLogger, lightnings.TensorBoardLogger):
    """TensorBoard: a step a round, by default in `tensorboard/` in the run's folder; see `tensorboard --logdir runs`.

    Args:
        save_dir: Another folder, in which Lightning makes one for each sitting, `<name>/version_<n>`.
        name: In that folder.
        version: In that folder.
        sub_dir: In that of the version.
        prefix: Begins the names of metrics.
        default_hp_metric: Log `hp_metric`, which TensorBoard's table of hyperparameters needs.

    Raises:
        ConfigError: `tensorboard` is not installed, or `name`, `version` or `sub_dir` is given without `save_dir`.
    """

    def __init__(
        self,
        save_dir: str | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        sub_dir: str | None = None,
        prefix: str = "",
        default_hp_metric: bool = True,
    ) -> None:
        need("tensorboard")
        require_trust("logger.save_dir", save_dir)
        super().__init__(
            save_dir or "", name, version, default_hp_metric=default_hp_metric, prefix=prefix, sub_dir=sub_dir
        )
        self._in_run = save_dir is None
        if self._in_run:
            refuse_places(name=name, version=version, sub_dir=sub_dir)

    def begin(self, run: Beginning) -> None:
        """Begin, or go on after a round: what was logged of later ones is not shown."""
        if self._in_run:
            self._root_dir, self._name, self._version = str(run.run_dir), "tensorboard", ""
            self._kwargs["purge_step"] = run.round + 1
        super().begin(run._replace(config={}) if self._in_run and run.round else run)

    def log_image(
        self, key: str, images: Sequence[str], step: int | None = None, caption: Sequence[str] | None = None
    ) -> None:
        """Log pictures from their files."""
        for number, path in enumerate(images):
            name = f"{key}-{number + 1}" if number else key
            self.experiment.add_image(name, imread(path), step, dataformats="HWC")


class MLFlowLogger(RoundLogger, lightnings.MLFlowLogger):
    """MLflow: a run an experiment, a step a round, by default in the database `mlflow/mlflow.db` in the run's folder.

    `mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db` shows it. A resumed experiment goes on in the same
    MLflow run, which `mlflow/run_id` in the run's folder names.

    Args:
        experiment_name: MLflow's experiment.
        run_name: Name of the run; by default as for W&B, `<config>-<changes>-seed<seed>`.
        tracking_uri: Another database or server, or `MLFLOW_TRACKING_URI`.
        tags: Tags of the run; `algorithm`, `dataset` and `partition` are added.
        prefix: Begins the names of metrics.
        artifact_location: Where files belong that you log by `experiment`; none are by themselves.

    Raises:
        ConfigError: `mlflow` is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "fl-lightning",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
        prefix: str = "",
        artifact_location: str | None = None,
    ) -> None:
        need("mlflow")
        require_trust("logger.tracking_uri", tracking_uri)
        require_trust("logger.artifact_location", artifact_location)
        self._options: dict[str, Any] = {
            "experiment_name": experiment_name,
            "prefix": prefix,
            "artifact_location": artifact_location,
        }
        self._named, self._uri = run_name, tracking_uri or os.environ.get(TRACKING)
        self._own_tags = tags or {}
        self._held = -1  # the last round that the MLflow run held when this folder's run was resumed

    def check(self, run_dir: Path | None = None) -> None:
        """Refuse a note of another kind than this leaves."""
        if run_dir:
            _noted(run_dir)

    def begin(self, run: Beginning) -> None:
        """Begin an MLflow run, or go on with the one that is noted in the run's folder."""
        place = run.run_dir.resolve() / "mlflow"
        place.mkdir(exist_ok=True)
        if not self._uri:
            self._options["artifact_location"] = self._options["artifact_location"] or (place / "artifacts").as_uri()
        noted = _noted(run.run_dir) if run.round else None
        if run.round and not noted:
            warnings.warn(f"{place / 'run_id'} is gone: another MLflow run begins", stacklevel=2)
        kinds = dict(zip(("algorithm", "dataset", "partition"), run.labels.tags, strict=False))
        super().__init__(
            **self._options,
            run_name=self._named or run.labels.name,
            tracking_uri=self._uri or f"sqlite:///{place / 'mlflow.db'}",
            tags=kinds | self._own_tags,
            run_id=noted,
        )
        with _tracking_elsewhere():
            _ = self.experiment
        if noted:
            key = "-".join(filter(None, (self._prefix, "time/round_s")))
            self._held = max((one.step for one in self.experiment.get_metric_history(noted, key)), default=-1)
            self.experiment.update_run(noted, status="RUNNING")
        else:
            write_atomically(place / "run_id", f"{self.run_id}\n")
            super().begin(run)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a round, unless the MLflow run holds it already."""
        if step is None or step > self._held:
            super().log_metrics(metrics, step)


@contextmanager
def _tracking_elsewhere() -> Iterator[None]:
    """Leave the environment as it was: Lightning has MLflow set its variable, which the next run would read."""
    before = os.environ.get(TRACKING)
    try:
        yield
    finally:
        os.environ.pop(TRACKING, None)
        if before is not None:
            os.environ[TRACKING] = before


def _noted(run_dir: Path) -> str | None:
    """The id of a run folder's MLflow run, if there is one.

    Raises:
        ConfigError: It is none.
    """
    place = run_dir / "mlflow" / "run_id"
    if not place.is_file():
        return None
    found = place.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{32}", found):
        raise ConfigError(f"{place} is damaged: put it back, or remove it to begin another MLflow run")
    return found

"""Lightning's CSV, TensorBoard and MLflow loggers, writing to the run folder and continuing after a resume."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers as lightnings
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from matplotlib.image import imread

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import open_file, read_file, write_atomically
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.evaluation.summary import main_metrics
from fl_lightning.loggers.base import Beginning, RoundLogger

TRACKING = "MLFLOW_TRACKING_URI"
"""Environment variable with the database or server of MLflow's runs."""


def require_package(package: str) -> None:
    """Check that the package that a logger needs is installed.

    Raises:
        ConfigError: The package is not installed; the message names the command that installs it.
    """
    if find_spec(package) is None:
        raise ConfigError(f"logger: {package} is not installed. Run: pip install 'fl-lightning[{package}]'")


def writes_to_run_folder(save_dir: str | None, **subfolders: Any) -> bool:
    """Return whether a logger writes to the run folder, which is the case if `save_dir` is not given.

    Raises:
        ConfigError: A subfolder is given without `save_dir`, or an untrusted config gives a folder.
    """
    require_trust("logger.save_dir", save_dir)
    for name, value in subfolders.items():
        if save_dir is None and value not in (None, "lightning_logs"):
            fix = "Give both or neither."
            raise ConfigError(f"logger.{name}: it names a subfolder of logger.save_dir, which is not given. {fix}")
    return save_dir is None


class CSVLogger(RoundLogger, lightnings.CSVLogger):
    """Log metrics to Lightning's CSV file, a row per round, by default in `csv_logs/` in the run folder.

    Args:
        save_dir: Another folder, in which Lightning creates `<name>/version_<n>` each time `fit` starts or resumes.
        name: Name of the subfolder of `save_dir`.
        version: Version of the subfolder.
        prefix: Prefix of metric names.

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
        self._in_run = writes_to_run_folder(save_dir, name=name, version=version)
        super().__init__(save_dir or "", name, version, prefix)

    def begin(self, run: Beginning) -> None:
        """Begin a CSV file; for a resumed run, continue the file in the run folder after the last finished round."""
        if self._in_run:
            self._save_dir, self._name, self._version = str(run.run_dir), "csv_logs", ""
            _truncate_csv(run.run_dir / "csv_logs" / "metrics.csv", run.round)
            self._experiment = _AppendingWriter(self.log_dir)
        super().begin(run)


class _AppendingWriter(ExperimentWriter):
    """Lightning's CSV writer, changed to append to an existing file instead of removing it."""

    def _check_log_dir_exists(self) -> None:
        if os.path.exists(self.metrics_file_path):
            with open_file(Path(self.metrics_file_path)) as file, io.TextIOWrapper(file, newline="") as text:
                self.metrics_keys = next(csv.reader(text), [])


def _truncate_csv(path: Path, round: int) -> None:
    """Remove the rows of a CSV file that are incomplete, or whose `step` is greater than `round`."""
    if not path.exists():
        return
    text = read_file(path).decode(errors="replace")
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
    """Log to TensorBoard, a step per round, by default in `tensorboard/` in the run folder.

    Open it with `tensorboard --logdir runs`. Its table of hyperparameters shows the run's main metrics, such as
    `global/acc`, unless there is a prefix. Lightning's placeholder `hp_metric` is not logged.

    Args:
        save_dir: Another folder, in which Lightning creates `<name>/version_<n>` each time `fit` starts or resumes.
        name: Name of the subfolder of `save_dir`.
        version: Version of the subfolder.
        sub_dir: Subfolder of the version.
        prefix: Prefix of metric names.

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
    ) -> None:
        require_package("tensorboard")
        self._in_run = writes_to_run_folder(save_dir, name=name, version=version, sub_dir=sub_dir)
        self._options: dict[str, Any] = {"default_hp_metric": False, "prefix": prefix}
        self._needs_table = not prefix  # Lightning's table of hyperparameters ignores the prefix
        super().__init__(save_dir or "", name, version, sub_dir=sub_dir, **self._options)

    def begin(self, run: Beginning) -> None:
        """Begin logging, or continue the log of a resumed run.

        In the log of a resumed run in its run folder, TensorBoard hides entries after the last finished round.
        """
        if self._in_run:
            place = str(run.run_dir), "tensorboard", ""
            lightnings.TensorBoardLogger.__init__(self, *place, purge_step=run.round + 1, **self._options)
        super().begin(run._replace(config={}) if self._in_run and run.round else run)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a round's metrics. The first main metrics become columns of TensorBoard's table of hyperparameters."""
        main = {name: metrics[name] for name in main_metrics([dict(metrics)])}
        if self._needs_table and self.hparams and main:
            self._needs_table = False
            self.log_hyperparams(dict(self.hparams), main, step)  # logs these metrics, too
            metrics = {name: value for name, value in metrics.items() if name not in main}
        super().log_metrics(dict(metrics), step)

    def log_image(
        self, key: str, images: Sequence[str], step: int | None = None, caption: Sequence[str] | None = None
    ) -> None:
        """Log image files to TensorBoard."""
        for number, path in enumerate(images):
            name = f"{key}-{number + 1}" if number else key
            self.experiment.add_image(name, imread(path), step, dataformats="HWC")


class MLFlowLogger(RoundLogger, lightnings.MLFlowLogger):
    """Log to MLflow, a step per round, by default in the database `mlflow/mlflow.db` in the run folder.

    Open it with `mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db`. A resumed run continues its MLflow run,
    whose id is in `mlflow/run_id`.

    Args:
        experiment_name: Name of the MLflow experiment.
        run_name: Name of the run. By default `<config>-<changes>-seed<seed>`, as for W&B.
        tracking_uri: Another database or server. By default `MLFLOW_TRACKING_URI`, if it is set.
        tags: Tags of the run; `algorithm`, `dataset` and `partition` are added.
        prefix: Prefix of metric names.
        artifact_location: Folder of the files that you log with `experiment`. No files are logged by default.

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
        require_package("mlflow")
        require_trust("logger.tracking_uri", tracking_uri)
        require_trust("logger.artifact_location", artifact_location)
        self._options: dict[str, Any] = {
            "experiment_name": experiment_name,
            "prefix": prefix,
            "artifact_location": artifact_location,
        }
        self._named, self._uri = run_name, tracking_uri or os.environ.get(TRACKING)
        self._own_tags = tags or {}
        self._last_round = -1  # the last round in the MLflow run when the run was resumed

    def check(self, run_dir: Path | None = None) -> None:
        """Check the file `mlflow/run_id` in the run folder: if it exists, it must contain a valid MLflow run id."""
        if run_dir:
            _run_id(run_dir)

    def begin(self, run: Beginning) -> None:
        """Begin an MLflow run; for a resumed run, continue its MLflow run."""
        place = run.run_dir.resolve() / "mlflow"
        place.mkdir(exist_ok=True)
        if not self._uri:
            self._options["artifact_location"] = self._options["artifact_location"] or (place / "artifacts").as_uri()
        run_id = _run_id(run.run_dir) if run.round else None
        if run.round and not run_id:
            warnings.warn(f"{place / 'run_id'} not found: a new MLflow run begins", stacklevel=2)
        kinds = dict(zip(("algorithm", "dataset", "partition"), run.labels.tags, strict=False))
        super().__init__(
            **self._options,
            run_name=self._named or run.labels.name,
            tracking_uri=self._uri or f"sqlite:///{place / 'mlflow.db'}",
            tags=kinds | self._own_tags,
            run_id=run_id,
        )
        variable = os.environ.get(TRACKING)
        _ = self.experiment
        os.environ.pop(TRACKING, None)  # MLflow sets it for Lightning, which would affect the next run
        if variable is not None:
            os.environ[TRACKING] = variable
        if run_id:
            key = "-".join(filter(None, (self._prefix, "time/round_s")))
            self._last_round = max((one.step for one in self.experiment.get_metric_history(run_id, key)), default=-1)
            self.experiment.update_run(run_id, status="RUNNING")
        else:
            write_atomically(place / "run_id", f"{self.run_id}\n")
            super().begin(run)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a round's metrics, unless the MLflow run has them already."""
        if step is None or step > self._last_round:
            super().log_metrics(metrics, step)


def _run_id(run_dir: Path) -> str | None:
    """Return the id of a run's MLflow run from `mlflow/run_id`; None if the file does not exist."""
    place = run_dir / "mlflow" / "run_id"
    if not place.is_file():
        return None
    run_id = read_file(place).decode(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{32}", run_id):
        raise ConfigError(f"{place} is damaged. Restore it, or remove it to begin a new MLflow run.")
    return run_id

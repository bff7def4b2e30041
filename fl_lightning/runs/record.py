"""Write a run folder and call the loggers, in an order that allows resuming after a kill at any point."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import yaml

from fl_lightning.core.config import flatten
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import write_atomically
from fl_lightning.core.message import Tensors
from fl_lightning.data import FederatedData
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.evaluation.summary import summarize
from fl_lightning.loggers.base import Labels
from fl_lightning.loggers.collection import Loggers, logs_clients_by_default
from fl_lightning.runs.axis_labels import evaluated_split
from fl_lightning.runs.background_writer import Writer
from fl_lightning.runs.checkpoint import Checkpoint, CheckpointFolder
from fl_lightning.runs.client_store import ClientStore, StoredState
from fl_lightning.runs.fingerprint import Fingerprint, environment, settings
from fl_lightning.runs.folder import (
    lock_run_dir,
    refuse_existing_run,
    refuse_lost_checkpoints,
    refuse_special_files,
    remove_on_failure,
)
from fl_lightning.runs.metrics_csv import MetricsCsv
from fl_lightning.runs.partition import PartitionCounts, write_counts
from fl_lightning.runs.reader import Figures
from fl_lightning.runs.trust import DESCRIPTION, sign
from fl_lightning.runs.warnings_txt import WarningsTxt

Keep = Callable[[list[int]], set[int]]
"""A function that takes the rounds that have a checkpoint, newest first, and returns the rounds to keep."""


class RecordedRun(Protocol):
    """Protocol of a run that `Record` can write to a run folder: the last finished round, and the checkpoint content.

    Attributes:
        round: The last finished round.
    """

    round: int

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the run's state for a checkpoint: numbers, strings, and tensors that are never modified."""


class Record:
    """Writes a run's files: config, partition, metrics, warnings, checkpoints and final results. Calls the loggers.

    Args:
        run: The run.
        run_dir: The run folder.
        client_store: Where client state is kept: in `memory`, or only on `disk`.
        logger: The run's loggers.
        log_clients: Whether to log every client's metrics. None means: if there are at most 1,000 clients.

    Attributes:
        first_round: The last finished round when the run began or was resumed.
        csv: `metrics.csv` and `clients.csv`.
        warned: `warnings.txt`.
        memory: The clients' states and their files.
        checkpoints: The checkpoints.
        writer: The background writer of client states and checkpoints.
    """

    def __init__(
        self,
        run: RecordedRun,
        run_dir: Path,
        client_store: Literal["memory", "disk"],
        logger: Loggers,
        log_clients: bool | None,
    ) -> None:
        self.run, self.run_dir, self.logger, self.log_clients = run, run_dir, logger, log_clients
        self.csv = MetricsCsv(run_dir / "metrics.csv")
        self.warned = WarningsTxt(run_dir / "warnings.txt", lambda: len(self.csv.rows) + 1)
        self.writer = Writer()
        self.memory = ClientStore(run_dir, client_store, self.writer)
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints")
        self.first_round = 0
        self._settings: dict[str, Any] = {}
        self._split = "test"
        self._restored_from: Fingerprint | None = None
        self._contexts = ExitStack()
        self._created_folders: list[Path] | None = None  # by the lock; None before the folder is locked

    # --- Start or resume ---

    @contextmanager
    def open(self, resume: bool) -> Iterator[None]:
        """Context around a whole run that records its warnings, and unlocks the run folder at its end.

        Args:
            resume: Lock the folder at once. For a new run, `begin` locks it after all checks.

        Raises:
            ConfigError: Another process uses the folder, or it holds a run already and `resume` is false.
        """
        self._created_folders = None
        with self.warned, ExitStack() as self._contexts:
            if resume:
                self._lock()
            else:
                refuse_existing_run(self.run_dir)
            yield

    def _lock(self) -> list[Path]:
        self._created_folders = self._contexts.enter_context(lock_run_dir(self.run_dir))
        return self._created_folders

    @property
    def has_config(self) -> bool:
        """Whether the run has a resolved config, from which the command line can rebuild it."""
        return bool(self._settings)

    def set_inputs(
        self, data: FederatedData, device: torch.device, fixed: str, architectures: Sequence[str] = ()
    ) -> None:
        """Set what the fingerprint in each checkpoint describes: the data, the device and fixed tensors.

        Args:
            data: The data.
            device: The training device.
            fixed: Digest of the fixed tensors of the clients' networks; empty if there are none.
            architectures: The name of each client's architecture, if clients have different networks.
        """
        self._data, self._digest, self._device = data, data.digest(), device
        self._fixed = fixed
        self._architectures = architectures

    def find_checkpoint(self, round: int | None, config: Mapping[str, Any] | None) -> Checkpoint | None:
        """Return the checkpoint to resume from; None if the folder contains no run.

        Args:
            round: The checkpoint's round; by default the newest valid one.
            config: The resolved config of the resumed run, if there is one.

        Raises:
            CheckpointError: The checkpoint is missing or damaged, does not fit the metrics, or no checkpoint is valid.
            ConfigError: The config is that of another experiment, or the folder holds links or special files.
        """
        refuse_special_files(self.run_dir)
        checkpoints = self.checkpoints
        saved = checkpoints.read(round) if round else checkpoints.read_newest(warnings.warn, self._check_metrics)
        if saved is None:
            refuse_lost_checkpoints(self.run_dir)
        else:
            saved.fingerprint.check_config(config)
        return saved

    def _check_metrics(self, saved: Checkpoint) -> None:
        self.csv.check(saved.round, saved.fingerprint.rows)

    def restore(self, saved: Checkpoint) -> None:
        """Restore the clients' states from a checkpoint, after checking that the data have not changed.

        Raises:
            ConfigError: The data changed since the run began.
        """
        saved.fingerprint.check_data(self._digest)
        saved.fingerprint.check_fixed(self._fixed)
        self.memory.load(saved.files)
        self._restored_from, self._settings = saved.fingerprint, saved.fingerprint.config

    # --- During the run ---

    def begin(self, config: dict[str, Any] | None, labels: Labels, description: dict[str, Any]) -> None:
        """Begin or resume writing: lock the run folder, start the loggers, and write the config and the partition.

        Metrics and warnings after the last finished round are removed. For a resumed run, warn of changes since its
        checkpoint. If a new run cannot begin, remove its folder.

        Args:
            config: The resolved config, if there is one. By default that of the resumed run.
            labels: Names of the run for loggers.
            description: The config for the loggers. If there is no `config`, it is also written to the folder of a new
                run, unless it is empty.

        Raises:
            ConfigError: The folder is in use or cannot be written to, or a logger fails.
            CheckpointError: The checkpoint cannot be written, or rounds are missing in the metrics.
        """
        created = self._created_folders
        if created is None:
            created = self._lock()
            refuse_existing_run(self.run_dir)
        with remove_on_failure(created):
            self._begin(config, labels, description)

    def _begin(self, config: dict[str, Any] | None, labels: Labels, description: dict[str, Any]) -> None:
        """Do what `begin` says in the locked folder. If the files cannot be written, the loggers end as failed."""
        round = self.first_round = self.run.round
        if self.log_clients is None:
            self.log_clients = logs_clients_by_default(len(self._data.shards))
        self._settings = settings(config) if config else self._settings
        self._split = evaluated_split(flatten(description))
        if before := self._restored_from:
            before.warn_of_environment(environment(self._device))
            before.warn_of_edits(self.run_dir / "config.yaml", self._settings)
            self.warned.check(round, before.rows[self.warned.path.name])
        self.csv.clients.set_names(self._data.names.clients)
        names = self._data.names._replace(clients=self.csv.clients.names)
        self.logger.begin(self.run_dir, description, labels, self._data.class_counts(), round, names)
        try:
            self._write_beginning(round, config, description)
        except BaseException as error:
            self.logger.finalize("failed")
            if isinstance(error, OSError):
                raise ConfigError(f"run_dir: {self.run_dir} cannot be written to: {error}") from error
            raise

    def _write_beginning(self, round: int, config: dict[str, Any] | None, description: dict[str, Any]) -> None:
        before = self._restored_from
        if not before:
            self.checkpoint()  # from here on the run can be resumed
            self.writer.wait()
        elif before.config != self._settings:
            self.checkpoints.replace_fingerprint(round, replace(before, config=self._settings))
        if config:
            content = yaml.safe_dump(config, sort_keys=False)
            sign(self.run_dir, content, config)
            write_atomically(self.run_dir / "config.yaml", content)
        elif description and not before:
            write_atomically(self.run_dir / "config.yaml", DESCRIPTION + yaml.safe_dump(description, sort_keys=False))
        self.csv.rewind(round)
        self.warned.rewind(round)
        write_counts(self.run_dir / "partition.csv", self._data, self._architectures)
        if schema := self._data.data.schema:
            write_atomically(self.run_dir / "schema.json", schema.to_json())

    def log(self, metrics: RoundMetrics) -> None:
        """Append a round's metrics to `metrics.csv` and `clients.csv`, then pass them to the loggers.

        Raises:
            CheckpointError: Writing fails.
        """
        metrics = metrics if self.log_clients else RoundMetrics(shared=metrics)
        self.csv.append(metrics)
        self.logger.log_round(metrics)

    def log_images(self) -> None:
        """Log images of the partition and the learning curves with the last round, in loggers that show images."""
        if not self.logger.take_images:
            return
        from fl_lightning.runs.run_images import run_images  # imports matplotlib

        partition = PartitionCounts(self._data.class_counts(), self._data.names)
        with run_images(self.csv.rows, partition, self._split) as paths:
            for name, path in paths.items():
                self.logger.log_image(f"figures/{name}", [path], step=self.run.round, caption=[name])

    def checkpoint(self, keep: Keep | None = None) -> None:
        """Write a checkpoint of the last finished round in the background, after the previous one is on disk.

        Args:
            keep: Returns which checkpoints to keep; all by default.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        self.writer.wait()
        rows = self.csv.digests | {self.warned.path.name: self.warned.digest}
        fingerprint = Fingerprint(self._settings, self._digest, rows, environment(self._device), self._fixed)
        content = self.run.round, self.run.checkpoint_state(), fingerprint, self.memory.snapshot()
        self.writer.submit(partial(self._write, *content, keep))

    def _write(
        self, round: int, state: dict[str, Any], fingerprint: Fingerprint, clients: list[StoredState], keep: Keep | None
    ) -> None:
        self.csv.flush()
        self.checkpoints.write(round, state, self.memory.write(clients), fingerprint)
        if keep:
            self.checkpoints.prune(keep(self.checkpoints.rounds()))
            self.memory.prune(self.checkpoints.named_files)

    def ensure_checkpoint(self) -> None:
        """Write a checkpoint of the last finished round, unless there is one already.

        Nothing is written for round 0, or if the round's metrics are not in `metrics.csv` yet.

        Raises:
            CheckpointError: This checkpoint or an earlier one could not be written.
        """
        self.writer.wait()
        round = self.run.round
        if len(self.csv.rows) == round and round not in {0, *self.checkpoints.rounds()}:
            self.checkpoint()
            self.writer.wait()

    @contextmanager
    def close_at_end(self, release: Callable[[], None]) -> Iterator[None]:
        """Context around a run's rounds that closes the loggers at its end. After an error it first saves a checkpoint.

        Args:
            release: Called after the checkpoint is on disk and before the loggers are closed.
        """
        status = "failed"
        try:
            yield
            status = "success"
        except BaseException:
            self.ensure_checkpoint()
            raise
        finally:
            self.writer.close()
            release()
            self.logger.finalize(status)

    def finish(self, targets: Sequence[float], model: Tensors | None) -> Figures:
        """Complete the run folder with `final/` (summary and global model). Then the loggers log files of the run.

        Args:
            targets: The accuracies for which the summary gives the first round that reaches them (R_acc).
            model: The global model's weights without fixed tensors, if there is one.

        Returns:
            The summary of the run.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        self.writer.wait()
        summary = summarize(self.csv.rows, targets)
        if model is not None:
            torch.save(model, io := BytesIO())
            write_atomically(self.run_dir / "final" / "model.pt", io.getvalue())
        if self._fixed:
            note = {"fixed_tensors": self._fixed, "merge": f"fl-lightning export {self.run_dir} -o model.pt"}
            write_atomically(self.run_dir / "final" / "base.json", json.dumps(note, indent=1) + "\n")
        write_atomically(self.run_dir / "final" / "summary.json", json.dumps(summary, indent=1) + "\n")
        self.logger.log_files()
        return summary

"""`Record`: all that is kept of a run, in its folder and by its loggers, in an order that a kill cannot harm."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import write_atomically
from fl_lightning.core.message import Tensors
from fl_lightning.data import FederatedData
from fl_lightning.evaluation.metrics import Row, summarize
from fl_lightning.loggers.base import Labels
from fl_lightning.loggers.collection import Loggers, MetricsCsv, WarningsTxt, few_enough, split_series
from fl_lightning.runs.checkpoint import Checkpoint, CheckpointFolder
from fl_lightning.runs.folder import refuse_lost_checkpoints, refuse_strange
from fl_lightning.runs.partition import write_counts
from fl_lightning.runs.reader import Figures
from fl_lightning.runs.seal import Seal, made_with, settings
from fl_lightning.runs.store import ClientStore, Kept
from fl_lightning.runs.trust import sign
from fl_lightning.runs.writer import Writer

Keep = Callable[[list[int]], set[int]]
"""Which of the rounds that have a checkpoint keep it; they are given newest first."""


class Record:
    """What is kept of a run: what it was started from, its measurements, warnings and checkpoints, its end.

    Args:
        run_dir: The run's folder.
        client_store: Where what clients keep is held: in `memory`, or on `disk` alone.
        logger: The run's loggers.
        log_clients: Whether clients have series of their own; if None, unless they are many.
        round: Gives the round under way, which warnings are noted with.

    Attributes:
        csv: `metrics.csv` and `clients.csv`.
        warned: `warnings.txt`.
        memory: What clients keep, and their files.
        checkpoints: The checkpoints.
        writer: The thread that writes both.
    """

    def __init__(
        self,
        run_dir: Path,
        client_store: Literal["memory", "disk"],
        logger: Loggers,
        log_clients: bool | None,
        round: Callable[[], int],
    ) -> None:
        self.run_dir, self.logger, self.log_clients = run_dir, logger, log_clients
        self.csv = MetricsCsv(run_dir / "metrics.csv")
        self.warned = WarningsTxt(run_dir / "warnings.txt", round)
        self.writer = Writer()
        self.memory = ClientStore(run_dir, client_store, self.writer)
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints")
        self._settings: dict[str, Any] = {}
        self._taken_up: Seal | None = None

    # --- What the run is started from, or goes on from ---

    def started_with(self, data: FederatedData, device: torch.device) -> None:
        """Take note of the data and the device that the run is started with, or goes on with."""
        self._data, self._digest, self._device = data, data.digest(), device

    def found(self, round: int | None, config: Mapping[str, Any] | None) -> Checkpoint | None:
        """The checkpoint to go on from: a given round's, or the newest sound one; None if no run has begun here.

        Args:
            round: The round.
            config: The resolved config that the run is to go on with, if there is one.

        Raises:
            CheckpointError: It is missing, damaged, or does not fit the measurements; for the newest, none is sound.
            ConfigError: The config is another experiment's, or something in the folder leads elsewhere.
        """
        refuse_strange(self.run_dir)
        checkpoints = self.checkpoints
        saved = checkpoints.read(round) if round else checkpoints.newest(warnings.warn, self._refuse_other_rows)
        if saved is None:
            refuse_lost_checkpoints(self.run_dir)
        else:
            saved.seal.refuse_another_config(config)
        return saved

    def _refuse_other_rows(self, saved: Checkpoint) -> None:
        self.csv.check(saved.round, saved.seal.rows)

    def take_up(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, and with what clients kept then.

        Raises:
            ConfigError: The data are not what the run began with.
        """
        saved.seal.refuse_other_data(self._digest)
        self.memory.load(saved.files)
        self._taken_up, self._settings = saved.seal, saved.seal.config

    # --- From the beginning to the end ---

    def begin(
        self, round: int, state: Callable[[], dict[str, Any]], config: dict[str, Any] | None, labels: Labels
    ) -> None:
        """Tell loggers, and write what a run's folder holds from the start; it is a run's own once it has a config.

        Where a run goes on, warns of what was another when its checkpoint was written.

        Args:
            round: The last finished round, back to which measurements and warnings are cut.
            state: Gives what the checkpoint is to hold that a run begins with; not called where one goes on.
            config: The resolved config, if there is one; where a run goes on it is its own by default.
            labels: What to call the run.

        Raises:
            ConfigError: The folder cannot be written to, or a logger fails.
            CheckpointError: The disk refuses the checkpoint, or the measurements are not those up to the round.
        """
        if self.log_clients is None:
            self.log_clients = few_enough(len(self._data.shards))
        self._settings = settings(config) if config else self._settings
        self._tell_of_changes(round)
        self.logger.begin(self.run_dir, config, labels, self._data.class_counts(), round)
        try:
            self._write_beginning(round, state, config)
        except BaseException as error:
            self.logger.finalize("failed")
            if isinstance(error, OSError):
                raise ConfigError(f"run_dir: {self.run_dir} cannot be written to: {error}") from error
            raise

    def _tell_of_changes(self, round: int) -> None:
        if before := self._taken_up:
            before.tell_of_another_machine(made_with(self._device))
            before.tell_of_edits(self.run_dir / "config.yaml", self._settings)
            self.warned.check(round, before.rows[self.warned.path.name])

    def _write_beginning(self, round: int, state: Callable[[], dict[str, Any]], config: dict[str, Any] | None) -> None:
        before = self._taken_up
        if not before:
            self.checkpoint(round, state())  # what the run was started from is on record from here on
            self.writer.wait()
        elif before.config != self._settings:
            self.checkpoints.reseal(round, replace(before, config=self._settings))
        if config:
            content = yaml.safe_dump(config, sort_keys=False)
            sign(self.run_dir, content, config)
            write_atomically(self.run_dir / "config.yaml", content)
        self.csv.rewind(round)
        self.warned.rewind(round)
        write_counts(self.run_dir / "partition.csv", self._data)
        if schema := self._data.data.schema:
            write_atomically(self.run_dir / "schema.json", schema.to_json())

    def log(self, metrics: Row) -> None:
        """Add a round's metrics, to the files first: what is there counts as measured.

        Raises:
            CheckpointError: The disk refuses.
        """
        metrics = metrics if self.log_clients else split_series(metrics)[0]
        self.csv.append(metrics)
        self.logger.log_metrics({k: v for k, v in metrics.items() if k != "round"}, step=int(metrics["round"]))

    def checkpoint(self, round: int, state: dict[str, Any], keep: Keep | None = None) -> None:
        """Have a checkpoint of a finished round written while the run goes on, once the one before it is on disk.

        Args:
            round: The round; its measurements are on disk already.
            state: What it is to hold: tensors that are not written into any more, numbers and strings.
            keep: Which of the rounds that then have a checkpoint keep it; all by default.

        Raises:
            CheckpointError: The disk refused the one before.
        """
        self.writer.wait()
        rows = self.csv.digests | {self.warned.path.name: self.warned.digest}
        seal = Seal(self._settings, self._digest, rows, made_with(self._device))
        self.writer.submit(partial(self._write, round, state, seal, self.memory.snapshot(), keep))

    def _write(self, round: int, state: dict[str, Any], seal: Seal, kept: list[Kept], keep: Keep | None) -> None:
        self.checkpoints.write(round, state, self.memory.write(kept), seal)
        if keep:
            self.checkpoints.prune(keep(self.checkpoints.rounds()))
            self.memory.prune(self.checkpoints.named())

    def make_sure_of(self, round: int, state: Callable[[], dict[str, Any]]) -> None:
        """See to it that the last finished round has a checkpoint on disk, if it is measured.

        Args:
            round: The round.
            state: Gives what the checkpoint is to hold; not called where there is one.

        Raises:
            CheckpointError: The disk refused it, or one before.
        """
        self.writer.wait()
        if len(self.csv.rows) == round and round not in {0, *self.checkpoints.rounds()}:
            self.checkpoint(round, state())
            self.writer.wait()

    def end(self, targets: Sequence[float], model: Tensors | None) -> Figures:
        """Write what a run ends with, once all before it is on disk, and tell loggers.

        Args:
            targets: The accuracies of R_acc.
            model: The global model's weights, if there is one.

        Returns:
            The run's figures.

        Raises:
            CheckpointError: The disk refused a checkpoint.
        """
        self.writer.wait()
        summary = summarize(self.csv.rows, targets)
        if model is not None:
            torch.save(model, io := BytesIO())
            write_atomically(self.run_dir / "final" / "model.pt", io.getvalue())
        write_atomically(self.run_dir / "final" / "summary.json", json.dumps(summary, indent=1) + "\n")
        self.logger.log_files()
        return summary

"""Base class of callbacks that measure a run, and write arrays and figures such as those of a paper."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from matplotlib.figure import Figure

from fl_lightning.algorithms.base import OWN
from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.callbacks.plots import to_png
from fl_lightning.client.weights import load_weights
from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.files import write_atomically
from fl_lightning.core.message import Message
from fl_lightning.core.names import Names
from fl_lightning.core.task import Task
from fl_lightning.engines.trainer import inference

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.client.module import ClientModule
    from fl_lightning.core.message import Tensors
    from fl_lightning.engines import Result
    from fl_lightning.evaluation.round_metrics import RoundMetrics
    from fl_lightning.evaluation.summary import Row

Arrays = dict[str, np.ndarray]


class RoundFigure(RoundCallback):
    """Base class of callbacks that write arrays and a figure every few rounds and after the last planned round.

    Each time, numbers are added to the round's metrics, and arrays and figure are written to the run folder as
    `figures/<name>/round-<n>.npz` and `.png`. Loggers that support images get the figure as `figures/<name>`.
    Subclasses set `name`, override `measure`, `numbers` and `draw`, and name their numbers in `metrics`. To use data of
    single clients, they also override `observe`.

    The files are written once. Checkpoints hold their SHA-256, and a resumed run warns of files that were changed or
    removed.

    Args:
        every: Rounds between measurements. By default only the last round.

    Attributes:
        name: Name of the figure and its folder. A second figure with this name is called `<name>-2`.
        looks_at_clients: Whether it needs the clients' trained models, by `trained_model`.
        needs_classes: Whether it needs targets that are classes.
        needs_test_classes: Whether it needs a global test set with the classes of the training samples.
        names: The names of the clients and classes, for `draw`. Set before `measure`.

    Raises:
        ConfigError: `every` is below 1, or two figures of a run would log the same numbers.
    """

    capabilities: ClassVar = {"keeps_no_uploads": ("on_client_end", "observe")}
    keeps_no_uploads = True
    name: str
    _written: str = ""
    _has_observed: bool = False
    looks_at_clients: bool = False
    needs_classes: bool = False
    needs_test_classes: bool = False
    names: Names = Names()

    def __init__(self, every: int | None = None) -> None:
        check_positive(f"callbacks: {type(self).__name__}.", every=every)
        self.every = every
        self._arrays: Arrays | None = None

    def check(self, run: FederatedRun) -> None:
        """Check that the run can produce the figure, and warn if files written before a resume were changed or removed.

        Raises:
            ConfigError: The method does not reveal the clients' models, there are no classes, another figure logs the
                same numbers, or the folder is a link.
        """
        owner = f"callbacks: {type(self).__name__}"
        if self.looks_at_clients and not run.algorithm.whole:
            method = type(run.algorithm).__name__
            raise ConfigError(f"{owner}: {method} does not reveal the clients' trained models. Leave it out.")
        if self.needs_classes and not run.data.objective.classes:
            raise ConfigError(f"{owner}: it needs classes, but {run.data.objective.no_classes}. Leave it out.")
        if self.needs_test_classes and run.data.data.evaluate is not None:
            dataset = type(run.scenario.dataset).__name__
            raise ConfigError(f"{owner}: the global test set of {dataset} has other classes. Leave it out.")
        before = [one for one in run.callbacks[: run.callbacks.index(self)] if isinstance(one, RoundFigure)]
        for other in before:
            if shared := {*self.metrics(run)}.intersection(other.metrics(run)):
                raise ConfigError(f"{owner}: another callback logs {min(shared)} too. List it once.")
        folder = run.run_dir / "figures"
        for place in (folder, folder / self._place(run)):
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise ConfigError(f"run_dir: {place} is not a folder. Move it; figures are written there.")
        self._warn_of_changes(run)

    def is_due(self, run: FederatedRun, round: int) -> bool:
        """Whether the figure is measured and drawn in a round."""
        return round == run.rounds or (self.every is not None and round % self.every == 0)

    def on_client_end(self, run: FederatedRun, result: Result) -> None:
        """In a round with a figure, call `observe` with the client's result, unless the client failed or attacks."""
        honest = result.client not in run.adversary.attackers
        if result.upload is not None and honest and self.is_due(run, run.round + 1):
            self._has_observed = True
            self.observe(run, result)

    def observe(self, run: FederatedRun, result: Result) -> None:
        """Store the data that `measure` needs from one trained client. The base class stores nothing."""

    def measure(self, run: FederatedRun) -> Arrays:
        """Return this round's data as named arrays. They are written to disk and passed to `numbers` and `draw`.

        Called after the round's aggregation. Without arrays, nothing is drawn.
        """
        raise NotImplementedError

    def numbers(self, arrays: Arrays) -> Row:
        """Return the numbers to add to the round's metrics, computed from the measured arrays.

        With numbers of single clients, return a `RoundMetrics`.
        """
        return {}

    def draw(self, arrays: Arrays) -> Figure:
        """Return the Matplotlib figure that shows the measured arrays."""
        raise NotImplementedError

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """If a figure is due in this round, call `measure`, and add the result of `numbers` to the round's metrics.

        Figures of clients' models are not due in a round without a client to observe.
        """
        self.names = run.data.names
        can_measure, self._has_observed = self._has_observed or not self.looks_at_clients, False
        self._arrays = self.measure(run) if can_measure and self.is_due(run, run.round) else None
        if self._arrays:
            metrics |= self.numbers(self._arrays)

    def on_round_end(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Write the measured arrays and the figure to the run folder, and log the figure."""
        if not self._arrays:
            return
        name = self._place(run)
        folder, stem = run.run_dir / "figures" / name, f"round-{run.round:06d}"
        np.savez_compressed(content := BytesIO(), **cast(dict[str, Any], self._arrays))
        self._write(folder / f"{stem}.npz", content.getvalue())
        self._write(folder / f"{stem}.png", to_png(self.draw(self._arrays)))
        caption = [f"round {run.round}"]
        run.logger.log_image(f"figures/{name}", [str(folder / f"{stem}.png")], step=run.round, caption=caption)
        self._arrays = None

    def state_dict(self) -> dict[str, Any]:
        """Return the names and SHA-256 digests of the files that this callback has written so far."""
        return {"written": self._written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the names and SHA-256 digests of the files that were written before the resume."""
        self._written = state.get("written", "")

    def _place(self, run: FederatedRun) -> str:
        """Return the name of the figure's folder below `figures/`."""
        number = [one for one in run.callbacks if isinstance(one, RoundFigure) and one.name == self.name].index(self)
        return f"{self.name}-{number + 1}" if number else self.name

    def _write(self, path: Path, content: bytes) -> None:
        write_atomically(path, content)
        self._written += f"{checksum(content)} {path.name}\n"  # one string, which is cheap to copy for a checkpoint

    def _warn_of_changes(self, run: FederatedRun) -> None:
        """Warn about the files that this callback wrote before a resume and that were changed or removed since."""
        folder = run.run_dir / "figures" / self._place(run)
        lines = self._written.splitlines()
        if lines and not folder.exists():
            warnings.warn(f"{folder} not found, with {len(lines)} files. They are not drawn again.", stacklevel=2)
            return
        for digest, _, name in (line.partition(" ") for line in lines):
            path = folder / name
            if not path.exists():
                warnings.warn(f"{path} not found. It is not drawn again.", stacklevel=2)
            elif not _is_unchanged(path, digest):
                warnings.warn(f"{path} was changed. It is not drawn again.", stacklevel=2)


def trained_model(run: FederatedRun, result: Result) -> Tensors:
    """Return the trained model of a client that has just finished its fit, on the CPU.

    It consists of the upload, the personal part and, for tensors in neither, the values that the client started from.
    """
    upload = run.evaluator.server.restore(result).on_cpu()
    known = result.memory.get(OWN, {}) | upload.section("model")
    if run.worker.for_client(result.client).template.backbone.state_dict().keys() <= known.keys():
        return known
    return run.starting_module(result.client).backbone.state_dict() | known


def scored_module(run: FederatedRun, result: Result) -> ClientModule:
    """Return the personalised module of a client that has just finished its fit.

    It is the module whose metrics the client reports with `evaluation.client_model: trained`.
    """
    server, worker, round = run.evaluator.server, run.worker.for_client(result.client), run.round + 1
    if not run.algorithm.server:  # the model that a client offers to its peers is the one that it has trained
        scale = server.lr_scales.of(round)
        return worker.modules.personalize(Task(round, result.client, Message(), result.memory, scale))
    task = server.task(round, result.client, server.download(round, result.client), upload=False)
    module = worker.modules.receive(replace(task, memory=result.memory))
    load_weights(module.backbone, trained_model(run, result))
    with inference(module, worker.idle_trainer):
        run.algorithm.personalize(module, worker.client_data.training_batches(result.client))
    return module


def received_module(run: FederatedRun, client: int) -> ClientModule:
    """Return a client's personalised module after the round's aggregation, as the client receives it next.

    It is the module whose metrics are reported with `evaluation.client_model: received`.
    """
    server, round = run.evaluator.server, run.round
    download, scale = server.download(round + 1, client), server.lr_scales.of(round)
    task = Task(round, client, download, server.memory.get(client, {}), scale)
    return run.worker.for_client(client).modules.personalize(task)


def _is_unchanged(path: Path, digest: str) -> bool:
    try:
        return path.is_file() and not path.is_symlink() and checksum(path.read_bytes()) == digest
    except OSError:
        return False


def checksum(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()

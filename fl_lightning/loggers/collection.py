"""All loggers of a run as one object."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.loggers import Logger

from fl_lightning.core.errors import ConfigError, blame, check_number
from fl_lightning.core.names import Names
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.evaluation.summary import Row, lowest_losses, summarize
from fl_lightning.loggers.base import Beginning, Labels, RoundLogger
from fl_lightning.loggers.client_metrics import client_distributions, client_labels, client_series

MAX_LOGGED_CLIENTS = 20
"""Default for the largest number of clients with one series each in loggers. More are logged as distributions."""

FEW_CLIENTS = 1000
"""Maximum number of clients for which each client's metrics, and the partition in W&B, are logged by default."""


def logs_clients_by_default(clients: int) -> bool:
    """Return whether a run has few enough clients to log each client's metrics by default. Warn if it has too many."""
    if clients > FEW_CLIENTS:
        message = f"log_clients: metrics of single clients are not logged ({clients:,} clients)."
        warnings.warn(f"{message} Set log_clients: true to log them.", stacklevel=2)
    return clients <= FEW_CLIENTS


def _logs_to_wandb(logger: Logger) -> bool:
    return any(kind.__name__ == "WandbLogger" for kind in type(logger).__mro__)  # without importing W&B


class Loggers:
    """The loggers of a run as one object, which passes each call to every logger. `len` is the number of loggers.

    Args:
        given: A logger, a list of loggers, or False or None for none.
        max_clients: The largest number of clients whose metrics are logged one by one. With more clients, loggers get
            the distribution of each metric over the clients.

    Raises:
        ConfigError: An element is not a logger, two would write to the same place, or `max_clients` is below 0.
    """

    def __init__(
        self, given: Logger | Sequence[Logger] | Literal[False] | None, max_clients: int = MAX_LOGGED_CLIENTS
    ) -> None:
        self._all: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if given is None or given is False:
            self._all = []
        for n, one in enumerate(self._all):
            if not isinstance(one, Logger):
                raise ConfigError(f"logger: {one!r} is not a Lightning logger. Give one, a list of them, or false.")
            if isinstance(one, RoundLogger) and type(one) in map(type, self._all[:n]):
                raise ConfigError(f"logger: {type(one).__name__} is listed twice. List it once.")
        check_number("max_logged_clients", max_clients, "[0, inf)")
        self._begun: list[Logger] = []
        self._max_clients, self._labels = max_clients, client_labels(0)

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
        if os.environ.get("WANDB_SWEEP_ID") and not any(map(_logs_to_wandb, self._all)):
            what = "this is a run of a W&B sweep, which gets no metrics without a W&B logger"
            warnings.warn(f"logger: {what}. Use --logger WandbRoundLogger.", stacklevel=2)

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
        self._labels = client_labels(len(counts), names.clients)
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

    def log_round(self, metrics: RoundMetrics) -> None:
        """Log the metrics of a round in all loggers: those of single clients as `client_acc/03`.

        If clients have names, the key of a client's metric includes the client's name: `client_acc/3_north`. Of many
        clients, the distribution of each metric is logged, as `client_acc/median`.
        """
        shared = {name: value for name, value in metrics.items() if name != "round"}
        many = len(self._labels) > self._max_clients
        own = client_distributions(metrics.clients) if many else client_series(metrics.clients, self._labels)
        self.log_metrics(shared | own, step=int(metrics["round"]))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics of round `step` by name in all loggers."""
        for one in self._all:
            one.log_metrics(dict(metrics), step)

    @property
    def take_images(self) -> bool:
        """Whether a logger supports images."""
        return any(hasattr(one, "log_image") for one in self._all)

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
        """Pass the files of the finished run folder to all loggers, which may upload them."""
        for one in self._all:
            if isinstance(one, RoundLogger):
                one.log_files()

    def finalize(self, status: str) -> None:
        """Close all loggers on which `begin` was called."""
        begun, self._begun = self._begun, []
        for one in begun:
            one.finalize(status)

"""Base class of loggers with hooks for federated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.loggers import Logger

from fl_lightning.core.names import Names


class Labels(NamedTuple):
    """Default name, group and tags of a run in loggers. Options and environment variables of a logger override them.

    Attributes:
        name: Name of the run.
        group: Name of the group, which runs that differ only in the seed share.
        tags: Names of the algorithm, the dataset and the partition.
    """

    name: str | None
    group: str | None
    tags: Sequence[str]


class Beginning(NamedTuple):
    """The argument of `RoundLogger.begin`: the folder, config, names and number of finished rounds of a run.

    Attributes:
        run_dir: The run folder.
        config: The resolved config. For a run from Python without one, the arguments of its orchestrator.
        labels: Default names of the run.
        round: The last finished round. Later rounds that were logged already will be logged again.
        counts: Number of samples of each client and class, `(clients, C)`; None for more than 1,000 clients.
        names: The names of the clients and classes.
    """

    run_dir: Path
    config: Mapping[str, Any]
    labels: Labels
    round: int = 0
    counts: Sequence[Sequence[int]] | None = None
    names: Names = Names()


class RoundLogger(Logger):
    """Base class of Lightning loggers with hooks for the stages of a federated run.

    Unless a logger is given its own folder, it writes to the run folder, under a name listed in
    `runs.folder.WRITTEN_NAMES`.
    """

    def check(self, run_dir: Path | None = None) -> None:
        """Check the logger's options before the run writes any file.

        Args:
            run_dir: The run folder, if it exists.

        Raises:
            ConfigError: An option is not valid.
        """

    def begin(self, run: Beginning) -> None:
        """Begin logging a run, or continue logging a resumed run.

        Raises:
            Exception: The logger cannot begin. It has removed what it has written.
        """
        if run.config:
            self.log_hyperparams(dict(run.config))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log the summary of the rounds so far, with values such as the best accuracy. Called after each round.

        Values that are also in `final/summary.json` have the same names.
        """

    def log_files(self) -> None:
        """Log files of the run, such as the final model. Called when the run folder is complete."""

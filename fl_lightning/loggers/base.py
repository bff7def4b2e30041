"""Base class of loggers that know about federated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.loggers import Logger


class Labels(NamedTuple):
    """Default name, group and tags of a run for loggers; config and environment variables take precedence.

    Attributes:
        name: Name of the run.
        group: Name of the group; runs that differ only in the seed share it.
        tags: Names of the algorithm, the dataset and the partition.
    """

    name: str | None
    group: str | None
    tags: Sequence[str]


class Beginning(NamedTuple):
    """The data that loggers get when a run begins or is resumed: run folder, config, names and last round.

    Attributes:
        run_dir: The run folder.
        config: The resolved config; empty if there is none.
        labels: Default names of the run.
        round: The last finished round. Later rounds that were logged already will be logged again.
        counts: Samples of each client and class, `(clients, C)`; None if there are many clients.
    """

    run_dir: Path
    config: Mapping[str, Any]
    labels: Labels
    round: int = 0
    counts: Sequence[Sequence[int]] | None = None


class RoundLogger(Logger):
    """A Lightning logger with hooks for the stages of a run. Subclasses override the hooks they need.

    Unless a logger is given its own folder, it writes to the run folder, under a name listed in
    `runs.folder.WRITTEN_NAMES`.
    """

    def check(self, run_dir: Path | None = None) -> None:
        """Check the logger's options before anything is written.

        Args:
            run_dir: The run folder, if it exists.

        Raises:
            ConfigError: An option is not valid.
        """

    def begin(self, run: Beginning) -> None:
        """Begin logging a run, or continue logging a resumed run.

        Raises:
            Exception: The logger cannot begin. It has undone what it began.
        """
        if run.config:
            self.log_hyperparams(dict(run.config))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log the run's summary so far, with the names of `final/summary.json`. Called after each round."""

    def log_files(self) -> None:
        """Log files of the run, such as its final model. Called when the run folder is complete."""

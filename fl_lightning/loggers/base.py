"""A logger that knows of runs: what a run's loggers are told beside its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.loggers import Logger


class Labels(NamedTuple):
    """What a run is called where neither its config nor the environment says.

    Attributes:
        name: Its own name.
        group: The name of its setting, which other seeds share.
        tags: Names of the algorithm, the dataset and the partition.
    """

    name: str | None
    group: str | None
    tags: Sequence[str]


class Beginning(NamedTuple):
    """What a logger is told when a run begins, or goes on after a round.

    Attributes:
        run_dir: The run's folder.
        config: The resolved config; empty if there is none.
        labels: What to call the run.
        round: The last finished round; later ones that were logged already will come again.
        counts: Samples a client and class, `(clients, C)`, where clients are few enough to show.
    """

    run_dir: Path
    config: Mapping[str, Any]
    labels: Labels
    round: int = 0
    counts: Sequence[Sequence[int]] | None = None


class RoundLogger(Logger):
    """A Lightning logger that is told of a run's moments; subclasses override those they care for.

    One that is given no folder of its own leaves its files in the run's, under a name that `run_folder.WRITTEN` knows.
    """

    def check(self, run_dir: Path | None = None) -> None:
        """Refuse what cannot work; nothing is written yet.

        Args:
            run_dir: The run's folder, if there is one yet.

        Raises:
            ConfigError: It cannot.
        """

    def begin(self, run: Beginning) -> None:
        """A run begins, or goes on after a round.

        Raises:
            Exception: It cannot; what it has begun is undone.
        """
        if run.config:
            self.log_hyperparams(dict(run.config))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """What the run has come to so far, named as in `final/summary.json`; told after each round."""

    def log_files(self) -> None:
        """The run's files are all there."""

"""The results of one setting of a study: its runs, one per seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.analysis.statistics import Spread, spread
from fl_lightning.analysis.study.executor import Job, earlier_result, is_finished
from fl_lightning.runs.reader import DamagedRun, Run, open_run_folder

Seed = int | None
"""The seed of a run; None if the settings contain it."""


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one setting of a study, by seed. Runs that have not finished are left out.

    Args:
        runs: The finished runs.
        failures: Why runs failed or cannot be read.
    """

    runs: Mapping[Seed, Run] = field(default_factory=dict)
    failures: Mapping[Seed, str] = field(default_factory=dict)

    def values(self, read: Callable[[Run], float | None]) -> dict[Seed, float]:
        """Return a number of each run by seed, without the runs for which `read` returns None."""
        return {seed: value for seed, run in self.runs.items() if (value := read(run)) is not None}

    def spread(self, read: Callable[[Run], float | None]) -> Spread | None:
        """Return the mean and standard deviation of a number over seeds; None if no run has it."""
        return spread(self.values(read).values())


def read_runs(jobs: Mapping[Any, Job]) -> SeedRuns:
    """Read the runs of one setting from their folders."""
    runs: dict[Seed, Run] = {}
    failures: dict[Seed, str] = {}
    for seed, job in jobs.items():
        try:
            if is_finished(job.folder):
                runs[seed] = open_run_folder(job.folder)
            elif ended := earlier_result(job):
                failures[seed] = ended.reason
        except DamagedRun as error:
            failures[seed] = str(error)
    return SeedRuns(runs, failures)

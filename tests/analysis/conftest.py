"""Fixtures of commands that make many runs."""

import pytest
from commands import run

from fl_lightning.analysis.study.executor import FAILED, JobResult, earlier_result
from fl_lightning.cli import jobs


@pytest.fixture
def started(monkeypatch):
    """Run jobs in this process; return the started jobs, in order."""
    found = []

    def run_jobs(missing, program, workers, threads):
        for job in missing:
            if earlier := earlier_result(job):
                yield earlier
                continue
            found.append((job, workers, threads))
            outcome = run("fit", *job.words, "--run_dir", job.folder)
            reason = outcome.err.strip().removeprefix("fl-lightning: error: ")
            if outcome.code == 1:
                (job.folder / FAILED).write_text(f"{reason}\n")
            yield JobResult(job, outcome.code, reason)

    monkeypatch.setattr(jobs, "run_jobs", run_jobs)
    return found

"""Runs of a sweep or a benchmark without training."""

import json
import re

from fl_lightning.analysis.study.executor import FAILED, JobResult


def numbers(words):
    """Return the numbers on a trial's command line, by key."""
    pairs = (word.removeprefix("--").split("=") for word in words if "=" in word)
    return {key: float(value) for key, value in pairs if re.fullmatch(r"[-+.\de]+", value)}


class Killed(BaseException):
    """Simulates that the sweep is killed."""


class FakeRuns:
    """Replaces `run_jobs`: a function returns the metrics of a trial.

    Args:
        figure: Takes a trial's values by key; returns the metric by round, or a reason to fail.
        kill: The step at which the sweep is killed; each trial has one step before it runs and one after.
        seconds: Processor time of each round, if it is recorded.
        summary: Entries of each trial's `final/summary.json`.
    """

    def __init__(self, figure, kill=None, seconds=None, **summary):
        self.figure, self.kill, self.seconds, self.summary = figure, kill, seconds, summary
        self.steps, self.ran = 0, []

    def step(self):
        self.steps += 1
        if self.steps == self.kill:
            raise Killed

    def __call__(self, jobs, should_stop, **_):
        for job in jobs:
            self.step()
            if (job.folder / "final/summary.json").exists():
                yield JobResult(job, 0, "")
                continue
            self.ran.append(job.words)
            metrics = self.figure(numbers(job.words))
            job.folder.mkdir(parents=True, exist_ok=True)
            if isinstance(metrics, str):
                (job.folder / FAILED).write_text(metrics)
                yield JobResult(job, 1, metrics)
                continue
            (job.folder / "config.yaml").write_text(f"rounds: {len(metrics)}\n")
            header = "round,global/acc\n" if self.seconds is None else "round,global/acc,time/processor_s\n"
            for end in range(1, len(metrics) + 1):
                end_of_line = "\n" if self.seconds is None else f",{self.seconds}\n"
                lines = [f"{number},{value!r}{end_of_line}" for number, value in enumerate(metrics[:end], 1)]
                (job.folder / "metrics.csv").write_text(header + "".join(lines))
                if should_stop and should_stop(job):
                    yield JobResult(job, 143, "stopped by SIGTERM")
                    break
            else:
                (job.folder / "final").mkdir()
                (job.folder / "final/summary.json").write_text(json.dumps({"rounds": len(metrics)} | self.summary))
                self.step()
                yield JobResult(job, 0, "")

"""Run or check `fit` command lines in separate processes (job processes), for commands such as `sweep`."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from fl_lightning.analysis.study.checks import errors_at
from fl_lightning.analysis.study.executor import (
    Job,
    JobResult,
    Program,
    follow_parent,
    is_finished,
    process_context,
    run_jobs,
)
from fl_lightning.cli.main import describe_error, main
from fl_lightning.core.durations import format_duration
from fl_lightning.core.errors import ConfigError, FLError
from fl_lightning.core.lazy_import import skip_working_folder
from fl_lightning.core.temporary_folders import temporary_files
from fl_lightning.core.terminal import echo
from fl_lightning.evaluation.summary import label_of, main_metrics
from fl_lightning.runs.reader import read_final

if TYPE_CHECKING:
    from fl_lightning.orchestrator import FederatedOrchestrator

Words = Sequence[str]
"""The words of a `fit` command line that follow the word `fit`."""

Environment = Mapping[str, str]
"""Environment variables."""

Result = TypeVar("Result")

FIT = Program(main, preload=["fl_lightning.cli.commands.fit"])


def run_missing(jobs: Sequence[Job], out: Path, workers: int, threads: int | None) -> list[JobResult]:
    """Run the jobs of a study that have not finished, and report each on stderr as it ends.

    Args:
        jobs: The runs.
        out: The folder of the study, which the caller has locked.
        workers: Number of runs at a time.
        threads: Number of torch threads of each run; by default the cores are divided among the workers.

    Returns:
        The results of those that failed.
    """
    missing = [job for job in jobs if not is_finished(job.folder)]
    echo(f"{len(missing)} of {len(jobs)} runs to do, in {out}", to_stderr=True)
    failed, started = [], time.monotonic()
    for number, ended in enumerate(run_jobs(missing, FIT, workers, threads), start=1):
        left = (time.monotonic() - started) / number * (len(missing) - number)
        line = f"{number} of {len(missing)}, {ended.job.folder.relative_to(out)}: {describe_job(ended)}"
        echo(line + (f"; left {format_duration(left)}" if left else ""), to_stderr=True)
        failed += [ended] if ended.code else []
    return failed


def describe_job(ended: JobResult) -> str:
    """Return a text that says how a job ended, how long it took, and the last value of its main metrics."""
    time_taken = format_duration(ended.seconds) if ended.seconds else ""
    if ended.code:
        return f"failed{time_taken and f' after {time_taken}'}: {ended.reason}"
    final = read_final(ended.job.folder) or {}
    last = {
        name.removesuffix("_last"): value
        for name, value in final.items()
        if value is not None and name.endswith("_last")
    }
    scores = [f"{label_of(name)} {last[name]:.4f}" for name in main_metrics([last])]
    return ", ".join([f"done{time_taken and f' in {time_taken}'}", *scores])


def in_job_processes(
    function: Callable[[Words, Environment], Result], command_lines: Sequence[Words], workers: int = 1
) -> Iterator[Result]:
    """Call a function with each of several command lines, in job processes, and yield the results in order.

    Only the job processes import torch, not this process.

    Args:
        function: Takes a command line, and the environment variables of this process.
        command_lines: The command lines.
        workers: Number of processes.
    """
    pool = ProcessPoolExecutor(workers, process_context(FIT.preload), follow_parent)
    try:
        with temporary_files(), skip_working_folder():
            futures = [pool.submit(function, words, dict(os.environ)) for words in command_lines]
        yield from (future.result() for future in futures)
    finally:
        pool.shutdown(cancel_futures=True)


def in_each(
    function: Callable[[Words, Environment], Result], command_lines: Sequence[tuple[str, Words]], workers: int
) -> list[Result]:
    """Call a function with each of several named command lines, in job processes, and return the results in order.

    Raises:
        ConfigError: The function raised one; the message begins with the name of the command line.
    """
    results = in_job_processes(function, [words for _, words in command_lines], workers)
    found = []
    for name, _ in command_lines:
        with errors_at(name):
            found.append(next(results))
    return found


# --- In a job process ---


def resolve_config(words: Words, environment: Environment) -> dict[str, Any]:
    """Return the resolved config of a command line. The data are not loaded.

    Raises:
        ConfigError: A value is wrong.
    """
    with open_experiment(words, environment) as (_, config):
        return config


def check_experiment(words: Words, environment: Environment) -> None:
    """Check an experiment as `fit` does before its first round. Errors of unexpected types are ignored.

    The run itself reports these errors.

    Raises:
        ConfigError: A setting is wrong, or does not fit the data or the other settings.
    """
    with open_experiment(words, environment) as (run, _):
        try:
            run.check()
        except FLError:
            raise
        except Exception:
            return


@contextmanager
def open_experiment(words: Words, environment: Environment) -> Iterator[tuple[FederatedOrchestrator, dict[str, Any]]]:
    """Context manager: build the experiment of a command line in a temporary folder; yield it and its resolved config.

    Raises:
        ConfigError: A value is wrong, or the code inside raised an `FLError`.
    """
    os.environ.clear()
    os.environ.update(environment)
    from fl_lightning.cli.command_line import read_command_line
    from fl_lightning.cli.commands import fit
    from fl_lightning.cli.errors import readable_errors
    from fl_lightning.cli.experiment import build, plain_config
    from fl_lightning.cli.options import command_parser

    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # the run itself shows them
        parser = command_parser("fit")
        try:
            with readable_errors(parser):
                given = parser.parse_args(fit.expand(read_command_line("fit", words)).words)
            yield build(given, parser, Path(folder) / "run"), plain_config(given, parser)
        except FLError as error:
            raise ConfigError(describe_error(error)[1]) from None

"""Run many experiments in parallel, each in its own process and folder.

The folders record the progress, so an interrupted call can be repeated: a finished job is not run again, a job that
began resumes from its last checkpoint, and a failed job keeps its reason.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from filelock import FileLock

from fl_lightning.core.errors import ConfigError, FLError, Interrupted, check_positive, one_line, reason_of
from fl_lightning.core.files import open_file, open_to_append, path_below, read_file, read_last_bytes, write_atomically
from fl_lightning.core.interrupt import DeferredSignals
from fl_lightning.core.lazy_import import skip_working_folder
from fl_lightning.core.temporary_folders import temporary_files
from fl_lightning.runs.folder import LOCK, refuse_special_files

LOG = "log.txt"
FAILED = "failed.txt"
JOB_FILES = (LOG, FAILED)
"""Files in a job's folder, in addition to those of its run."""

POLL_SECONDS = 0.5
"""Seconds between two checks of the running jobs."""


class Program(NamedTuple):
    """A command-line program to run in job processes, and the modules to import once for all of these processes.

    Args:
        main: Takes a command line without the program's name, and returns the exit code. Job processes import it.
        preload: Modules that `main` needs; they are imported once for all jobs.
    """

    main: Callable[[list[str]], int]
    preload: Sequence[str] = ()


class Job(NamedTuple):
    """An experiment to run: the folder of its run, and the command line of `fit`.

    Args:
        folder: The run's folder, a different one for each job.
        words: The command line of `fit` without `fit` and `--run_dir`.
    """

    folder: Path
    words: tuple[str, ...]


FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
"""Messages of errors about a full disk, a used up quota, and the maximum size of a file (`ulimit -f`)."""


class DiskFull(FLError):
    """Error: a job ran out of disk space. All other jobs are stopped, because they would run out of disk space, too."""

    exit_code = 1


class JobResult(NamedTuple):
    """The result of a job that ended: its exit code, and the reason of a failure.

    Args:
        job: The job.
        code: The exit code: 0 if the job finished, 1 if it failed, 2 for bad input, 128 + n if signal n stopped it at a
            checkpoint; -n if signal n killed it.
        reason: The last line that the job printed; empty if it finished.
        seconds: How long the job's process ran; 0 if it was not started.
    """

    job: Job
    code: int
    reason: str
    seconds: float = 0.0


class RunJobs(Protocol):
    """Type of a function that takes jobs and runs them, such as `partial(run_jobs, program=..., workers=...)`."""

    def __call__(self, jobs: Iterable[Job], *, should_stop: Callable[[Job], bool] | None = None) -> Iterator[JobResult]:
        """Yield the result of each job when it ends."""


def run_jobs(
    jobs: Iterable[Job],
    program: Program,
    workers: int = 1,
    threads: int | None = None,
    should_stop: Callable[[Job], bool] | None = None,
) -> Iterator[JobResult]:
    """Run jobs in parallel, and yield the result of each when it ends.

    A job whose folder holds a finished run is not run again; a job that began resumes from its last checkpoint. A job
    that fails (exit code 1) writes the reason to `failed.txt` in its folder, and is not run again until that file is
    removed. A job that had bad input or was killed is run again. `log.txt` in the folder holds the output of a job. All
    jobs end when this process ends, even if it is killed; on SIGINT and SIGTERM each job first writes a checkpoint.

    Args:
        jobs: The jobs. The next one is requested when a worker is free, so it may depend on earlier results.
        program: Runs `fit` with a job's command line.
        workers: Number of jobs that run at a time.
        threads: Number of torch threads of each job; by default `OMP_NUM_THREADS` if it is set, else the number of
            cores divided by `workers`.
        should_stop: Called for each running job every half second; if true, the job stops at its next checkpoint.

    Yields:
        Results in the order in which the jobs end.

    Raises:
        ConfigError: A number is below 1, or a folder cannot be created.
        DiskFull: A job ran out of disk space.
        Interrupted: SIGINT or SIGTERM was received, and the running jobs wrote their checkpoints.
    """
    check_positive(workers=workers, threads=threads)
    queue, running = iter(jobs), list[RunningJob]()
    with DeferredSignals() as signals:
        try:
            while not signals.received:
                if len(running) < workers and (job := next(queue, None)):
                    if result := earlier_result(job):
                        yield result
                    else:
                        running.append(_start_job(job, program, workers, threads))
                    continue
                if not running:
                    return
                for ended_job in _ended_jobs(running):
                    running.remove(ended_job)
                    yield ended_job.result()
                for running_job in running:
                    if should_stop and not running_job.asked_to_stop and should_stop(running_job.job):
                        running_job.ask_to_stop()
            name = signal.Signals(signals.received).name
            raise Interrupted(signals.received, f"stopped by {name}. Run the same command to continue")
        finally:
            _stop_jobs(running)


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a finished run."""
    with suppress(OSError), open_file(path_below(folder, "final/summary.json")):
        return True
    return False


def earlier_result(job: Job) -> JobResult | None:
    """Return the result of a job that an earlier call of `run_jobs` finished or marked as failed; otherwise None."""
    if is_finished(job.folder):
        return JobResult(job, 0, "")
    try:
        return JobResult(job, 1, one_line(read_file(job.folder / FAILED).decode(errors="replace")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{job.folder / FAILED} cannot be read: {reason_of(error)}. Remove it") from error


@dataclass(eq=False)
class RunningJob:
    """A job that has begun, and its process."""

    job: Job
    process: BaseProcess
    asked_to_stop: bool = False
    started: float = field(default_factory=time.monotonic)

    def ask_to_stop(self) -> None:
        """Ask the job to end at its next checkpoint, but only once: a second signal would end the job immediately."""
        if not self.asked_to_stop:
            self.asked_to_stop = True
            self.process.terminate()

    def result(self) -> JobResult:
        """Return the result of this job, which has ended. The reason of a failure is also written to the job's folder.

        Raises:
            DiskFull: The job ran out of disk space.
        """
        self.process.join()
        code, seconds = self.process.exitcode, time.monotonic() - self.started
        assert code is not None
        if code < 0:
            cause = " (likely out of memory: fewer workers need less)" if code == -signal.SIGKILL else ""
            return JobResult(self.job, code, f"killed by {signal.Signals(-code).name}{cause}", seconds)
        reason = _last_line(self.job.folder / LOG) if code else ""
        if code in (1, 2) and (full := next((text for text in FULL if text in reason), None)):
            fix = "Free disk space or raise the limit, then run the same command to continue."
            raise DiskFull(f"{self.job.folder}: {full}. {fix}")
        if code == 1:
            write_atomically(self.job.folder / FAILED, reason + "\n")
        return JobResult(self.job, code, reason, seconds)


def _start_job(job: Job, program: Program, workers: int, threads: int | None) -> RunningJob:
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        refuse_special_files(job.folder, JOB_FILES)
    except OSError as error:
        raise ConfigError(f"{job.folder} cannot be written to: {error}") from error
    process = process_context(program.preload).Process(
        target=_run_job, args=(job, program.main, workers, threads, dict(os.environ)), name=job.folder.name
    )
    with temporary_files(), skip_working_folder():
        process.start()
    return RunningJob(job, process)


def process_context(preload: Sequence[str]) -> Any:
    """Return a multiprocessing context in which a fork server starts the job processes.

    Args:
        preload: Modules that the fork server imports once for all processes.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _ended_jobs(running: Sequence[RunningJob]) -> list[RunningJob]:
    """Wait up to `POLL_SECONDS` for a job to end, and return all jobs that have ended."""
    ready = connection.wait([each.process.sentinel for each in running], timeout=POLL_SECONDS)
    return [each for each in running if each.process.sentinel in ready]


def _stop_jobs(running: Sequence[RunningJob]) -> None:
    """Ask all jobs to write a checkpoint and end, and wait for them. If a signal arrives meanwhile, kill the jobs."""
    try:
        for each in running:
            each.ask_to_stop()
        for each in running:
            each.process.join()
    finally:
        for each in running:
            each.process.kill()
            each.process.join()


def _last_line(log: Path) -> str:
    try:
        lines = read_last_bytes(log).decode(errors="replace").split("\n")
    except OSError as error:
        return f"{log} cannot be read: {reason_of(error)}"
    last = one_line(next((line for line in reversed(lines) if line.strip()), ""))
    return last.removeprefix("fl-lightning: ").removeprefix("error: ")


# --- In the job's process ------------------------------------------------------------------------------------------


def _run_job(
    job: Job, main: Callable[[list[str]], int], workers: int, threads: int | None, environment: dict[str, str]
) -> None:
    """Run a job in this job process, and exit with the exit code of `fit`."""
    follow_parent()
    with FileLock(job.folder / LOCK):
        pass  # waits for a process of a killed call that still runs; then the run locks its folder itself
    _redirect_output(job.folder / LOG)
    if is_finished(job.folder):
        return
    set_environment(environment, workers, threads)
    option = "--resume" if (job.folder / "config.yaml").exists() else "--run_dir"
    code = main(["fit", *job.words, option, str(job.folder)])
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # its service process would outlive this one
    sys.exit(code)


def follow_parent() -> None:
    """End this process when its parent process ends. Ctrl-C reaches only the parent, which then stops this one."""
    os.setpgrp()
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _redirect_output(log: Path) -> None:
    """Redirect this process's stdout and stderr to the end of a log file, and its stdin to the null device."""
    with open(os.devnull) as nothing, open_to_append(log) as file:
        os.dup2(nothing.fileno(), 0)
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]  # keeps the lines' order


def set_environment(environment: dict[str, str], workers: int, threads: int | None) -> None:
    """Copy the environment variables of the parent process, and limit torch to this job's threads.

    By default these are `OMP_NUM_THREADS` if it is set, else the job's share of the cores.
    """
    import torch  # the parent process does not need it

    from fl_lightning.engines.processes import usable_cores

    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0]  # it may list a number for each nesting level
    threads = threads or (int(given) if given.isdigit() else 0) or max(1, usable_cores() // workers)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS=str(threads))
    os.environ.pop("WANDB_SERVICE", None)  # the parent's W&B service would not wait for this run's end
    torch.set_num_threads(threads)

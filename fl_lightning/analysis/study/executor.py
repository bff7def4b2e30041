"""Points carried out side by side: a run each, in a process of its own, in a folder of its own.

Folders say how far points have come, so a call that was cut short is gone on with by the same call: a point that has
ended well is not run again, one that had begun goes on from its last checkpoint, one that failed keeps its reason.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from fl_lightning.cli import main as cli
from fl_lightning.core.errors import ConfigError, FLError, Interrupted, check_positive
from fl_lightning.core.files import write_atomically
from fl_lightning.core.interrupt import DeferredSignals
from fl_lightning.core.lazy import away_from_here
from fl_lightning.core.temporary import temporary_files
from fl_lightning.runs.folder import LOCK

LOG = "log.txt"
FAILED = "failed.txt"

BETWEEN_LOOKS = 0.5  # seconds


class Point(NamedTuple):
    """A run that is wanted.

    Args:
        folder: The run's folder; no other point has it.
        words: The command line of `fit`, less that word and less `--run_dir`.
    """

    folder: Path
    words: tuple[str, ...]


class DiskFull(FLError):
    """A point's run has no room on the disk; the others would not have any either."""

    exit_code = 1


class Outcome(NamedTuple):
    """How a point's run ended.

    Args:
        point: The point.
        code: Its exit code: 0 when it came to its end, 1 when it failed, 2 for bad input, 128 + n when signal n made
            it stop at a checkpoint; negative when that signal killed it.
        reason: What it said last, on one line; empty when it came to its end.
    """

    point: Point
    code: int
    reason: str


def carry_out(
    points: Iterable[Point],
    workers: int = 1,
    threads: int | None = None,
    unwanted: Callable[[Point], bool] | None = None,
) -> Iterator[Outcome]:
    """Run points side by side; yield what came of each as it ends.

    A point whose folder holds a finished run is not run, and one that had begun goes on where its last checkpoint left
    it. One that fails (exit code 1) leaves its reason in its folder's `failed.txt`, and is not run again until that
    file is removed; after bad input, which is mended elsewhere, and after a kill it is. What a run prints is in its
    folder's `log.txt`. All of them end with this process, however that ends; SIGINT and SIGTERM let each come to its
    checkpoint.

    Args:
        points: The points; the next is asked for when there is a worker for it, so it may depend on what came before.
        workers: How many run at a time.
        threads: Torch's threads in each; by default the cores there are, shared out among the workers.
        unwanted: Asked every half second about each that runs: true ends it early, at a checkpoint.

    Yields:
        Outcomes in the order of their ends.

    Raises:
        ConfigError: A number is below 1, or a folder cannot be made.
        DiskFull: A point's run has no room on the disk.
        Interrupted: SIGINT or SIGTERM came, and what was under way is checkpointed.
    """
    check_positive(workers=workers, threads=threads)
    arriving, running = iter(points), list[_Running]()
    with DeferredSignals() as signals:
        try:
            while not signals.received:
                if len(running) < workers and (point := next(arriving, None)):
                    if earlier := outcome_before(point):
                        yield earlier
                    else:
                        running.append(_start(point, workers, threads))
                    continue
                if not running:
                    return
                for ended in _ended(running):
                    running.remove(ended)
                    yield ended.outcome()
                for one in running:
                    if unwanted and not one.asked_to_end and unwanted(one.point):
                        one.ask_to_end()
            name = signal.Signals(signals.received).name
            raise Interrupted(signals.received, f"stopped by {name}; the same command goes on from here")
        finally:
            _end(running)


def finished(folder: Path) -> bool:
    """Whether a folder holds a run that has come to its end."""
    return (folder / "final" / "summary.json").is_file()


def outcome_before(point: Point) -> Outcome | None:
    """What came of a point in an earlier call, if it is not to be run again."""
    if finished(point.folder):
        return Outcome(point, 0, "")
    failed = point.folder / FAILED
    return Outcome(point, 1, failed.read_text().strip()) if failed.is_file() else None


@dataclass(eq=False)
class _Running:
    point: Point
    process: BaseProcess
    asked_to_end: bool = False

    def ask_to_end(self) -> None:
        """Have it end at its next checkpoint; asked twice it would end at once."""
        if not self.asked_to_end:
            self.asked_to_end = True
            self.process.terminate()

    def outcome(self) -> Outcome:
        """Return what came of it, and leave a failure in its folder.

        Raises:
            DiskFull: That is why it failed, so it is no failure of its own.
        """
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        if code < 0:
            likely = " (likely out of memory: fewer workers need less)" if code == -signal.SIGKILL else ""
            return Outcome(self.point, code, f"killed by {signal.Signals(-code).name}{likely}")
        reason = _last_line(self.point.folder / LOG) if code else ""
        if code in (1, 2) and os.strerror(errno.ENOSPC) in reason:
            mend = "Free disk space; the same command goes on from here."
            raise DiskFull(f"{self.point.folder}: {os.strerror(errno.ENOSPC)}. {mend}")
        if code == 1:
            write_atomically(self.point.folder / FAILED, reason + "\n")
        return Outcome(self.point, code, reason)


def _start(point: Point, workers: int, threads: int | None) -> _Running:
    try:
        point.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{point.folder} cannot be written to: {error}") from error
    process = process_context().Process(
        target=_run, args=(point, workers, threads, dict(os.environ)), name=point.folder.name
    )
    with temporary_files(), away_from_here():
        process.start()
    return _Running(point, process)


def process_context() -> Any:
    """Return how processes are started: out of one that has imported what a run needs, where the system can do that."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["fl_lightning.cli.commands.fit"])
    return context


def _ended(running: Sequence[_Running]) -> list[_Running]:
    by_sentinel = {one.process.sentinel: one for one in running}
    ready = connection.wait(list(by_sentinel), timeout=BETWEEN_LOOKS)
    return [one for sentinel, one in by_sentinel.items() if sentinel in ready]


def _end(running: Sequence[_Running]) -> None:
    """Let all come to a checkpoint; a signal meanwhile ends them at once."""
    try:
        for one in running:
            one.ask_to_end()
        for one in running:
            one.process.join()
    finally:
        for one in running:
            one.process.kill()
            one.process.join()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "").strip().removeprefix("fl-lightning: error: ")


# --- The other end -------------------------------------------------------------------------------------------------


def _run(point: Point, workers: int, threads: int | None, environment: dict[str, str]) -> None:
    """A point's process."""
    os.setpgrp()  # what the terminal's keys send is for the process that leads: it asks each to end, once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with FileLock(point.folder / LOCK):
        pass  # the process of a call that was killed may not have noticed yet; a run holds its folder itself
    _print_into(point.folder / LOG)
    if (known := outcome_before(point)) and known.code == 0:
        return
    _adopt(environment, workers, threads)
    begun = (point.folder / "config.yaml").exists()
    code = cli.main(["fit", *point.words, "--resume" if begun else "--run_dir", str(point.folder)])
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # its own process would outlive this one
    sys.exit(code)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _print_into(log: Path) -> None:
    for path, mode, numbers in ((os.devnull, os.O_RDONLY, [0]), (log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, [1, 2])):
        opened = os.open(path, mode, 0o666)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]  # what was said last stands last


def _adopt(environment: dict[str, str], workers: int, threads: int | None) -> None:
    """Take the environment of the process that leads, as it is now, and a share of the cores."""
    import torch  # which the process that leads has no need of

    from fl_lightning.engines.processes import usable_cores

    threads = threads or max(1, usable_cores() // workers)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS=str(threads))
    os.environ.pop("WANDB_SERVICE", None)  # the leader's, which would not wait for this one's end
    torch.set_num_threads(threads)

"""`fl-lightning watch`: follow a running experiment in the terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.live import Live

from fl_lightning.analysis.run_screen import RunScreen
from fl_lightning.analysis.run_status import RunMonitor
from fl_lightning.core.console import SafeConsole
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.runs.reader import DamagedRun
from fl_lightning.runs.search import find


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Show a running experiment until it ends or stops, or the user presses `q` or Ctrl-C. Return exit code 0."""
    check_number("--every", given.every, "[0, 86400]")
    monitor, console = RunMonitor(find_run(Path(given.run))), SafeConsole()
    if not given.once and sys.stdout.isatty() and not console.is_dumb_terminal:
        follow(monitor, console, given.every)
    console.print(RunScreen(monitor.poll()))
    return 0


def find_run(path: Path) -> Path:
    """Return the folder of the run to show: the path itself, or the latest unfinished run in a folder of runs.

    Raises:
        ConfigError: No run found.
    """
    found = find([path])
    if found == [path]:
        return path
    ended = []
    for folder in sorted(found, key=last_write_time, reverse=True):
        try:
            if not RunMonitor(folder).poll().ended:
                return folder
            ended.append(folder)
        except DamagedRun as error:
            warnings.warn(f"{error}; left out", stacklevel=2)
    if not ended:
        raise ConfigError(f"{path}: no run found")
    return ended[0]


def last_write_time(folder: Path) -> float:
    """Return the modification time of a run's `metrics.csv` or `config.yaml`, whichever is newer."""
    return max(file.stat().st_mtime for name in ("metrics.csv", "config.yaml") if (file := folder / name).exists())


def follow(monitor: RunMonitor, console: SafeConsole, every: float) -> None:
    """Show a run on a full screen until it ends, its process has gone, or the user presses `q`."""
    with stopped_by_signals(), Live(console=console, screen=True, auto_refresh=False) as live, read_keys() as pressed:
        while True:
            status = monitor.poll()
            live.update(RunScreen(status, console.height), refresh=True)
            if status.ended or status.stopped or pressed(every) == "q":
                return


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Context manager: SIGINT or SIGTERM ends its block early, without an error."""
    both = (signal.SIGINT, signal.SIGTERM)  # SIGINT too: background processes of a shell ignore it
    before = [signal.signal(one, signal.default_int_handler) for one in both]
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for one, handler in zip(both, before, strict=True):
            signal.signal(one, handler)


@contextmanager
def read_keys() -> Iterator[Callable[[float], str]]:
    """Context manager: yield a function `pressed(seconds)` that waits for a key and returns it, or empty text."""
    keyboard = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select(keyboard, [], [], seconds)
        return os.read(ready[0], 1).decode(errors="replace") or "q" if ready else ""  # empty input: terminal closed

    before = [termios.tcgetattr(one) for one in keyboard]
    try:
        for one in keyboard:
            tty.setcbreak(one)
        yield pressed
    finally:
        for one, settings in zip(keyboard, before, strict=True):
            termios.tcsetattr(one, termios.TCSADRAIN, settings)

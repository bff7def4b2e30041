"""Runs of the command line that are killed and resumed."""

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from commands import rows, untimed_rows
from methods import elements

from fl_lightning.cli.main import main

FIVE = ["fedskc", "feddw", "fedsiam_da", "cwfedavg", "ua_pdfl"]
FIRST_ROUND = "checkpoints/round-000001"


def command_line(method: str, *words: str) -> list[str]:
    every_round = ["--callbacks+=Checkpointing", "--callbacks.every=1"]
    return ["fit", "--config", f"digits_{method}.yaml", "--rounds", "6", "--logger", "null", *every_round, *words]


def kill_and_resume(command: Sequence[str], folder: Path, begun: str, delay: float, fork: bool) -> bool:
    """Kill a run some time after a file exists, and resume it. Return False if it had ended before.

    Args:
        command: The command.
        folder: The run folder.
        begun: The file.
        delay: Seconds after which the run is killed.
        fork: Run the command in a fork of this process, which has no imports to wait for, not in a new process.
    """
    words = [*command, "--run_dir", str(folder)]
    pid = fork_command(words) if fork else start_command(words)
    while not (folder / begun).exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the command has failed"
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert main(["fit", "--resume", str(folder)]) == 0
    return os.WIFSIGNALED(status)


def start_command(words: Sequence[str]) -> int:
    """Run a command in a new process. Return the process's id."""
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as here: it decides how sums round
    command = [sys.executable, "-m", "fl_lightning", *words]
    return os.posix_spawn(sys.executable, command, environment)


def fork_command(words: Sequence[str]) -> int:
    """Run a command in a fork of this process. Return the fork's id."""
    if not (child := os.fork()):
        try:
            os._exit(main(words))
        finally:
            os._exit(1)
    return child


def results_of(folder: Path) -> dict[str, bytes | list[bytes]]:
    """Return the models, client states and metrics of a finished run, without times."""
    kept = [path for pattern in ("final/*", "clients/*", "clients.csv") for path in folder.glob(pattern)]
    state = max(folder.glob("checkpoints/*/state.pt"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept} | {"state": elements(state)}


def survive_kills(
    command: Sequence[str], tmp_path: Path, kills: int, *words: str, begun: str = "config.yaml", fork: bool = False
) -> None:
    """Kill and resume runs, and compare them with a run that was not killed.

    Args:
        command: The command.
        tmp_path: The parent of the run folders.
        kills: Number of runs to kill.
        words: More words for the commands that are killed.
        begun: A file of the run. The run is killed at any time after it exists.
        fork: Run the commands that are killed in forks of this process.
    """
    whole = tmp_path / "whole"
    assert main([*command, "--run_dir", str(whole)]) == 0
    duration = sum(float(row["time/round_s"]) for row in rows(whole))
    chance, survived, tried = random.Random(0), 0, 0
    while survived < kills:
        tried += 1
        folder = tmp_path / f"killed-{tried}"
        survived += kill_and_resume([*command, *words], folder, begun, chance.uniform(0, duration), fork)
        assert results_of(folder) == results_of(whole)
        assert untimed_rows(folder) == untimed_rows(whole)
        assert tried < 3 * kills + 5, "the run ends before it can be killed"

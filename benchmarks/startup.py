"""Measure how long the commands take to answer, and how long `fit` takes until the end of its first round.

    python benchmarks/startup.py [--repeats 10] [--against OTHER/bin/python]

Prints the median (min - max) of the wall time and of the CPU time of new processes. CPU time depends less on other jobs
of the machine. `--against` measures the fl-lightning of another environment in alternation with this one.

`fit` is measured until it prints the line of round 1. Its CPU time is read from /proc, so this needs Linux. All other
commands are measured until they end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODULE = ["-m", "fl_lightning"]
FIT = [*MODULE, "fit", "--config", "digits_fedskc.yaml", "--rounds", "1"]
PYTHON = """
from fl_lightning import MLP, Digits, Dirichlet, FederatedOrchestrator, FedSKC, Scenario
FederatedOrchestrator(Scenario(Digits(), Dirichlet(0.2, min_samples=20), clients=10), MLP, FedSKC(), rounds=1).fit()
"""
TAB = "fl-lightning fit --algorithm Fed"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import fl_lightning": ["-c", "import fl_lightning"],
    "import lightning.pytorch": ["-c", "import lightning.pytorch"],
    "fl-lightning": MODULE,
    "fl-lightning --help": [*MODULE, "--help"],
    "fl-lightning --version": [*MODULE, "--version"],
    "fl-lightning list": [*MODULE, "list"],
    "fl-lightning fti": [*MODULE, "fti"],
    "fl-lightning fit --help": [*MODULE, "fit", "--help"],
    "fl-lightning compare --help": [*MODULE, "compare", "--help"],
    "fl-lightning fit --algorithm.help FedSKC": [*MODULE, "fit", "--algorithm.help", "FedSKC"],
    f"{TAB}<Tab>": MODULE,
    "fit --config digits_fedskc.yaml, to its first round": FIT,
    "fit --config digits_fedskc.yaml --logger false, to its first round": [*FIT, "--logger", "false"],
    "python -c 'FederatedOrchestrator(...).fit()', to its first round": ["-c", PYTHON],
}


def timed(python: str, name: str, folder: Path) -> tuple[float, float]:
    """Return the wall time and the CPU time of a command in seconds."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "answer"),
        "COMP_LINE": TAB,
        "COMP_POINT": str(len(TAB)),
    }
    env = os.environ | (asked if name.endswith("<Tab>") else {})
    started = time.monotonic()
    process = subprocess.Popen(
        [python, *COMMANDS[name]], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    if name.endswith("first round"):
        while not process.stdout.readline().startswith("round 1/"):
            assert process.poll() is None, process.stderr.read()
        seconds, worked = time.monotonic() - started, of_processor(process.pid)
        process.communicate()
        return seconds, worked
    process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # `os.wait4` has already waited for it
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime


def of_processor(pid: int) -> float:
    """Return the CPU time of a running process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def interval(figures: list[float]) -> str:
    """Format the median, minimum and maximum."""
    return f"{statistics.median(figures):.2f} ({min(figures):.2f} - {max(figures):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--against", help="The Python of an environment with another fl-lightning.")
    parser.add_argument("--only", default="", help="Only commands that hold this text.")
    given = parser.parse_args()
    pythons = {"here": sys.executable} | ({"there": given.against} if given.against else {})
    print("| command | | s | s of the processor |", "|---|---|---|---|", sep="\n", flush=True)
    for name in (name for name in COMMANDS if given.only in name):
        figures: dict[str, list[tuple[float, float]]] = {place: [] for place in pythons}
        for turn in range(given.repeats + 1):
            for place, python in pythons.items():
                with tempfile.TemporaryDirectory() as folder:
                    one = timed(python, name, Path(folder))
                if turn:  # the first turn reads files that are not in the page cache yet
                    figures[place].append(one)
        for place, found in figures.items():
            wall, worked = zip(*found, strict=True)
            print(f"| `{name}` | {place} | {interval(list(wall))} | {interval(list(worked))} |", flush=True)


if __name__ == "__main__":
    main()

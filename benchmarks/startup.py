"""How soon the command line answers, and how soon `fit` has its first round behind it.

    python benchmarks/startup.py [--repeats 10] [--against OTHER/bin/python]

Medians (least - most) of new processes, in turn: seconds on the wall, and of the processor, which a busy machine alters
less. With --against, the fl-lightning of another environment takes turns with this one's. The rounds are timed to the
line that tells of the first one, by way of /proc, so on Linux; all else to the process's end.
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
}


def timed(python: str, name: str, folder: Path) -> tuple[float, float]:
    """Seconds on the wall and of the processor that a command takes."""
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
    process.returncode = 0  # it is waited for already
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime


def of_processor(pid: int) -> float:
    """Seconds that a process has worked so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def told(figures: list[float]) -> str:
    """Median, least and most."""
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
                if turn:  # the first one finds files that are not in memory yet
                    figures[place].append(one)
        for place, found in figures.items():
            wall, worked = zip(*found, strict=True)
            print(f"| `{name}` | {place} | {told(list(wall))} | {told(list(worked))} |", flush=True)


if __name__ == "__main__":
    main()

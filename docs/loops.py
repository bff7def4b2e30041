"""Compare every method with its loop by hand, and write the table of docs/correctness.md: `python docs/loops.py`."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from reference import page_of

from fl_lightning.cli.catalogue import FAMILIES, classes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "correctness.md"
BEGIN, END = "<!-- from the tests -->", "<!-- end -->"
TESTS = ("tests/algorithms", "-q", "-m", "not slow", "-k", "test_a_run_equals_a_loop_by_hand")


def compare() -> dict[str, tuple[float, str]]:
    """Run the loops, and return each method's largest relative difference and the file of its test."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "differences"
        run = [sys.executable, "-m", "pytest", *TESTS]
        subprocess.run(run, check=True, cwd=ROOT, env=os.environ | {"FL_LIGHTNING_LOOPS": str(record)})
        lines = [line.split() for line in record.read_text().splitlines()]
    largest: dict[str, tuple[float, str]] = {}
    for method, difference, test in lines:
        largest[method] = max(largest.get(method, (0.0, "")), (float(difference), test))
    return largest


def table(largest: dict[str, tuple[float, str]]) -> str:
    """Return a table of all methods, with a dash for a method without a loop."""
    lines = ["| method | family | largest relative difference | test |", "|---|---|---|---|"]
    for family in FAMILIES:
        for kind in classes("algorithms"):
            if kind.family() == family:
                difference, test = largest.get(kind.__name__, (None, ""))
                shown = "-" if difference is None else f"{difference:.0e}"
                name = f"[{kind.__name__}](methods/{page_of(kind)})"
                lines.append(f"| {name} | {family.replace('_', ' ')} | {shown} | {f'`{test}`' if test else ''} |")
    measured = f"Measured on {datetime.date.today()} with torch {torch.__version__} on a CPU."
    return "\n".join([*lines, "", measured])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(compare())}\n{END}{rest.partition(END)[2]}")

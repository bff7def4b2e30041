"""`fl-lightning test`: evaluate a checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from fl_lightning.analysis.summary_tables import test_table
from fl_lightning.cli.experiment import load_run


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Evaluate a checkpoint of a finished or unfinished run, and print a table of the metrics."""
    run = load_run(Path(given.run), given.checkpoint, given.trust)
    Console().print(test_table(run.test(), run.algorithm.server))
    return 0

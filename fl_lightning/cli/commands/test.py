"""`fl-lightning test`: evaluate a run's checkpoint again."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from fl_lightning.analysis.summary_tables import test_table
from fl_lightning.cli.experiment import load_run


def parser() -> ArgumentParser:
    """A run and one of its checkpoints."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("run", type=str, help="Folder of the run.")
    parser.add_argument("--checkpoint", type=str, default="last", help="last, best, or the number of a round.")
    parser.add_argument("--trust", action="store_true", help="Run the code that somebody else's run names.")
    return parser


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Evaluate a checkpoint of a finished or half-finished run."""
    run = load_run(Path(given.run), given.checkpoint, given.trust)
    Console().print(test_table(run.test(), run.algorithm.server))
    return 0

"""`fl-lightning test`: evaluate a checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.summary_tables import clients_table, test_table
from fl_lightning.cli.experiment import load_run
from fl_lightning.core.console import SafeConsole


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Evaluate a checkpoint of a finished or unfinished run, and print tables of its metrics and of its clients."""
    run, console = load_run(Path(given.run), given.checkpoint, given.trust), SafeConsole()
    validation = run.scenario.validation_share is not None
    if validation and given.test_set:
        run.use_test_set()
        validation = False
    metrics = run.test()
    console.print(test_table(metrics, run.algorithm.server, validation))
    rows = {client: {"round": metrics["round"], **own} for client, own in metrics.clients.items()}
    if table := clients_table(run.data, rows):
        console.print(table)
    return 0

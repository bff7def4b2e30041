"""`fl-lightning cluster-check`: check the machines of a Ray cluster, and train one short round on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.table import Table

from fl_lightning.cli.commands.fit import expand
from fl_lightning.cli.experiment import build
from fl_lightning.core.console import table_console
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.terminal import echo, print_to_stderr
from fl_lightning.engines import RayEngine
from fl_lightning.engines.data_source import DataSource
from fl_lightning.engines.ray_cluster import PACKAGES, Machine, inspect_machines, version_finder
from fl_lightning.orchestrator import FederatedOrchestrator

__all__ = ["expand", "main"]


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Print a table of the machines and a line for each problem, and make a dry run on the cluster.

    Returns:
        0 if there is no problem, otherwise 1.
    """
    orchestrator = build(given, parser, Path("unused"))  # a dry run has a folder of its own
    engine = orchestrator.engine
    if not isinstance(engine, RayEngine):
        raise ConfigError("engine: cluster-check needs a Ray cluster. Add --engine ray, and --engine.address.")
    machines = find_machines(engine, DataSource(orchestrator.scenario, orchestrator.seed))
    ours = version_finder()(PACKAGES)
    table_console().print(machines_table(machines))
    problems = [line for machine in machines for line in machine.problems(ours)]
    for line in problems:
        print_to_stderr(f"problem: {line}")
    if all(machine.is_usable for machine in machines):
        train_short_round(orchestrator, engine)
    return int(bool(problems))


def find_machines(engine: RayEngine, source: DataSource) -> list[Machine]:
    """Connect to the cluster, return what was found on each machine, and end the connection."""
    try:
        engine.connect()
        return inspect_machines(source, engine.data_dir)
    finally:
        engine.close()


def machines_table(machines: Sequence[Machine]) -> Table:
    """Return a table with a row for each machine of a cluster."""
    shown = ("python", "torch", "fl-lightning")  # of the others, only differences
    table = Table("machine", "CPUs", "GPUs", *shown, "dataset", box=None)
    for one in machines:
        versions = [one.versions.get(name) or "missing" for name in shown]
        data = "sent" if one.dataset is None else "not opened" if one.dataset else "same values"
        table.add_row(one.address, f"{one.cpus:g}", f"{one.gpus:g}", *versions, data)
    return table


def train_short_round(orchestrator: FederatedOrchestrator, engine: RayEngine) -> None:
    """Make a dry run on the cluster, and print how long it took."""
    started = time.monotonic()
    orchestrator.fit(fast=True)
    workers = engine.workers or "all possible"
    echo(f"dry run passed in {time.monotonic() - started:.1f} s, with {workers} workers")

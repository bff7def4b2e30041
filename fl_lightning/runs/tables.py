"""Read several runs as pandas tables of settings, rounds and clients."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_lightning.runs.csv_reader import CLIENT_NAME
from fl_lightning.runs.partition import ARCHITECTURE, read_architectures, read_names
from fl_lightning.runs.reader import DamagedRun, Run, read_clients
from fl_lightning.runs.search import Paths, Where, open_runs

if TYPE_CHECKING:
    import pandas as pd


class Tables(NamedTuple):
    """Several runs as tables of settings, rounds and clients. Each table has a column `run`: the run folder's path.

    Attributes:
        runs: A row per run: `run`, `finished`, the settings by full key (lists as JSON) and the summary figures,
            including `rounds`, the number of rounds.
        rounds: A row per run and round: `run`, `round` and the round's metrics.
        clients: A row per run, round and client with a value: `run`, `round`, `client`, `architecture` if clients have
            different networks, `name` if clients have names, and the client's metrics.
    """

    runs: pd.DataFrame
    rounds: pd.DataFrame
    clients: pd.DataFrame


def load(paths: Paths, where: Where = ()) -> Tables:
    """Read all runs in these folders as tables. A run that cannot be read is left out with a warning.

    Args:
        paths: Run folders, or folders of such.
        where: Settings they must have, by key or the end of one: `{"algorithm": "FedSKC"}` or `["alpha=0.1"]`.

    Raises:
        ConfigError: No run is left, or a path is not a folder.
    """
    import pandas as pd  # not at the top: importing it takes a second, and opening a run does not need it

    runs = open_runs(paths, where)
    names: list[dict[str, Any]] = [{"run": str(run.run_dir)} for run in runs]
    rounds = pd.DataFrame([name | row | name for name, run in zip(names, runs, strict=True) for row in run.rounds])
    clients = [_clients(run) for run in runs]
    tables = [table for table in clients if len(table)] or clients[:1]
    return Tables(pd.DataFrame([_run_row(run) for run in runs]), rounds, pd.concat(tables, ignore_index=True))


def _run_row(run: Run) -> dict[str, Any]:
    fixed = {"run": str(run.run_dir), "finished": run.finished}  # settings of these names do not replace them
    settings = {
        key: json.dumps(value, default=str, skipkeys=True) if isinstance(value, list | dict) else value
        for key, value in run.settings.items()
    }
    return fixed | settings | fixed | run.summary


def _clients(run: Run) -> pd.DataFrame:
    """Read a run's `clients.csv` as a table; empty if the file is missing or, with a warning, unreadable."""
    import pandas as pd

    columns: Mapping[str, Any] = {"round": [], "client": []}
    try:
        columns = read_clients(run.run_dir) or columns
    except DamagedRun as error:
        warnings.warn(f"{error}; its clients are left out", stacklevel=3)
    name = {"run": str(run.run_dir)}
    table = pd.DataFrame({**name, **columns, **name}).astype({"run": "str", "round": "int64", "client": "int64"})
    if len(table) and (names := read_names(run.run_dir).clients):
        table.insert(3, CLIENT_NAME, table["client"].map(dict(enumerate(names))))
    if len(table) and (architectures := read_architectures(run.run_dir)):
        table.insert(3, ARCHITECTURE, table["client"].map(dict(enumerate(architectures))))
    return table

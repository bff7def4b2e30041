"""Tables for the terminal: the results of `fit`, the metrics of `test`, and a partition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from fl_lightning.core.names import Names, labels, shorten_name
from fl_lightning.data import FederatedData
from fl_lightning.evaluation.summary import EPSILON, Row, human_bytes, label_of, model_metrics

SHADES = " ░▒▓█"
MOST_CLIENTS, ENDS = 100, 20
"""Number of clients up to which a table shows all, and number of clients at each end that it shows otherwise."""
MOST_NAMED = 20
"""Maximum number of clients in the table of the metrics of named clients."""
HEADER_LETTERS = 12
"""Maximum number of characters of a class name in the header of a table."""


def summary_table(
    summary: dict[str, Any], clients: Literal["trained", "received", "both"] = "trained", validation: bool = False
) -> Table:
    """Return the table printed after a run: last and best metrics, rounds to target accuracies (R_acc), bytes sent.

    Args:
        summary: The run's summary, as `summarize` returns it.
        clients: The evaluated model of a client, as in `Evaluation`.
        validation: Whether validation samples replaced the test samples (`scenario.validation_share`).
    """
    table = Table("", "last", "best", "best round", title=f"{summary['rounds']} rounds", caption_justify="left")
    for name in (key.removesuffix("_last") for key in summary if key.endswith("_last")):
        figures = (f"{summary[f'{name}_{what}']:.4f}" for what in ("last", "best"))
        table.add_row(label_of(name), *figures, str(summary[f"{name}_best_round"]))
    table.add_section()
    whose = "global" if "global/acc_last" in summary else "client"
    for name, value in summary.items():
        if name.startswith("R_"):
            table.add_row(f"{name} ({whose})", "not reached" if value is None else f"round {value}")
    for name, value in summary.items():
        if EPSILON.fullmatch(name):
            table.add_row(label_of(name), f"{value:.4f}")
    table.add_section()
    table.add_row("bytes up", human_bytes(summary["comm/total_up_bytes"]))
    table.add_row("bytes down", human_bytes(summary["comm/total_down_bytes"]))
    model = "as trained in the round" if clients == "trained" else "as received after the round"
    table.caption = _caption({name.partition("/")[0] for name in summary}, model, validation)
    return table


def test_table(metrics: Row, server: bool, validation: bool) -> Table:
    """Return the table that the command `test` prints: the metrics, and which models were evaluated.

    Args:
        metrics: The metrics, as `FederatedOrchestrator.test` returns them.
        server: Whether the method has a server that clients receive models from.
        validation: Whether validation samples replaced the test samples (`scenario.validation_share`).
    """
    table = Table("metric", "value", title=f"after round {int(metrics['round'])}", caption_justify="left")
    for name, value in metrics.items():
        if name != "round" and not name.startswith("client_"):
            table.add_row(name, f"{value:.4f}")
    model = "as received after the round" if server else "as it was trained last"
    table.caption = _caption({name.partition("/")[0] for name in metrics}, model, validation)
    return table


def clients_table(data: FederatedData, rows: Mapping[int, Row]) -> Table | None:
    """Return the table of each client's samples and metrics that `fit` and `test` print.

    Args:
        data: The data of the run.
        rows: The last metrics of each evaluated client, and their round.

    Returns:
        The table; None if clients have no names or no metrics, or if there are more than 20 clients.
    """
    metrics = list(dict.fromkeys(name for row in rows.values() for name in row if name != "round"))
    names = data.names.clients
    if not names or len(names) > MOST_NAMED or not metrics:
        return None
    rounds = {int(row["round"]) for row in rows.values()}
    title = "clients" if len(rounds) > 1 else f"clients after round {min(rounds)}"
    table = Table("client", "name", "train", "test", title=title)
    for header in [*["round"] * (len(rounds) > 1), *metrics]:
        table.add_column(Text(header))
    for client, row in sorted(rows.items()):
        shard = data.shards[client]
        figures = (f"{row[name]:.4f}" if name in row else "" for name in metrics)
        round = [str(int(row["round"]))] * (len(rounds) > 1)
        table.add_row(
            *(str(client), Text(names[client]), str(len(shard.train)), str(len(shard.test))), *round, *figures
        )
    return table


def last_metrics(rounds: Sequence[Row], columns: Mapping[str, np.ndarray]) -> dict[int, Row]:
    """Return the last evaluation of each client's model, by client id: a row with the round and the metrics.

    Args:
        rounds: The rows of the run's `metrics.csv`.
        columns: The columns of its `clients.csv`.
    """
    names = [name for name in model_metrics(rounds) if name in columns]
    rows: dict[int, Row] = {}
    for values in zip(*(columns[name].tolist() for name in ("round", "client", *names)), strict=True) if names else ():
        round, client, *figures = values
        row = {name: figure for name, figure in zip(names, figures, strict=True) if not math.isnan(figure)}
        if row:
            rows[int(client)] = {"round": round, **row}
    return rows


def _caption(families: set[str], model: str, validation: bool) -> str:
    """Return the caption of a table of metrics: which models were evaluated on which data.

    It has one line for each group of metrics, such as `global` and `client`.
    """
    everybody, own = "the global test set", "its own test split"
    if validation:
        everybody, own = "the validation samples of all clients", "its own validation samples"
    lines = {
        "global": f"global: the global model, on {everybody}",
        "client": f"client: each client's model {model}, on {own}",
        "architecture": "client acc, NETWORK: the mean over the clients with this network",
        "trained_client": f"trained client: each participant's model as trained in the round, on {own}",
        "new_client": f"new client: what a client that was held out of the training gets, on {own}",
        "personal_on_global": f"personal: clients' models as trained, on {everybody}",
    }
    return "\n".join(line for family, line in lines.items() if family in families)


def partition_table(counts: np.ndarray, test_counts: np.ndarray, names: Names = Names()) -> Table:
    """Return the table of a partition: training samples by client and class, shaded relative to the largest cell.

    With more than 20 classes it shows only shades; with more than 100 clients only the first and the last 20. A line
    ends with the client's name if the data have one. Without classes (one column), only the totals are shown.
    """
    wide, by_class = counts.shape[1] > 20, counts.shape[1] > 1
    table = Table("client", box=None, padding=(0, 0 if wide else 1, 0, 0))
    for label in labels(names.classes, range(counts.shape[1])) if by_class else ():
        table.add_column(Text("" if wide else shorten_name(label, HEADER_LETTERS)), justify="right", no_wrap=True)
    table.add_column(" train", justify="right", no_wrap=True)
    table.add_column(" test", justify="right", no_wrap=True)
    if names.clients:
        table.add_column(" name", no_wrap=True)
    darkness = np.ceil(counts / max(counts.max(), 1) * (len(SHADES) - 1)).astype(int)
    clients = len(counts)
    many = clients > MOST_CLIENTS
    for client in [*range(ENDS), *range(clients - ENDS, clients)] if many else range(clients):
        if many and client == clients - ENDS:
            table.add_row(f"... {clients - 2 * ENDS:,} more")
        row = counts[client]
        shades = (SHADES[level] for level in darkness[client])
        cells = shades if wide else (f"{n or ''}{shade}" for n, shade in zip(row, shades, strict=True))
        name = [Text(f" {name}") for name in names.clients[client : client + 1]]
        table.add_row(str(client), *(cells if by_class else ()), str(row.sum()), str(test_counts[client].sum()), *name)
    return table

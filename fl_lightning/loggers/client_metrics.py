"""Metrics of single clients in loggers: one series per client, or the distribution over many clients."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

REFUSED = re.compile(r"[^\w.-]+")
"""Matches characters that a logger may refuse in a key."""

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
"""The parts of a distribution over clients by name, as quantiles."""


def client_labels(clients: int, names: Sequence[str] = ()) -> list[str]:
    """Return the label of each client in keys: its id with leading zeros, followed by its name if it has one.

    Sorted labels are in the order of the ids.

    Args:
        clients: Number of clients.
        names: The clients' names; empty if they have none.

    Example:
        >>> client_labels(11)[:2], client_labels(2, ["north west", "south"])
        (['00', '01'], ['0_north_west', '1_south'])
    """
    digits = len(str(max(clients - 1, 0)))
    ids = [f"{client:0{digits}}" for client in range(clients)]
    return [f"{id}_{REFUSED.sub('_', names[i])}" if i < len(names) else id for i, id in enumerate(ids)]


def client_series(clients: Mapping[int, Mapping[str, float]], labels: Sequence[str] = ()) -> dict[str, float]:
    """Return each client's metrics as `client_<metric>/<client>`.

    W&B, TensorBoard and MLflow group metrics by the part before the slash, so each metric is one group of all clients.

    Args:
        clients: The metrics of each client by name, by client id.
        labels: The labels of the clients; a client without one has its id.

    Example:
        >>> client_series({3: {"acc": 0.5, "loss": 1.0}}, client_labels(100))
        {'client_acc/03': 0.5, 'client_loss/03': 1.0}
    """
    label = {client: labels[client] if client < len(labels) else str(client) for client in clients}
    return {f"client_{name}/{label[client]}": value for client, own in clients.items() for name, value in own.items()}


def client_distributions(clients: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the distribution of each metric over the clients that have it, as `client_<metric>/<part>`.

    The parts are those of `QUANTILES`, interpolated linearly. NaN values are left out, unless all are NaN.

    Args:
        clients: The metrics of each client by name, by client id.

    Example:
        >>> client_distributions({0: {"acc": 0.0}, 1: {"acc": 1.0}})["client_acc/p10"]
        0.1
    """
    values: dict[str, list[float]] = defaultdict(list)
    for own in clients.values():
        for name, value in own.items():
            values[name].append(value)
    return {
        f"client_{name}/{part}": float(figure)
        for name, each in values.items()
        for part, figure in zip(QUANTILES, _quantiles(np.array(each, dtype=float)), strict=True)
    }


def _quantiles(values: np.ndarray) -> np.ndarray:
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return np.full(len(QUANTILES), np.nan)
    places = np.array(list(QUANTILES.values())) * (len(known) - 1)
    low, high = known[np.floor(places).astype(int)], known[np.ceil(places).astype(int)]
    with np.errstate(invalid="ignore"):  # between two infinite values
        return np.where(low == high, low, low + (places % 1) * (high - low))

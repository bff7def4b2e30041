"""The metrics of one round: those of the run, and those of single clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


class RoundMetrics(dict[str, float]):
    """A dict of the metrics of a round by name. The metrics of single clients are in `clients`.

    `|=` adds all metrics of another `RoundMetrics`, or the metrics of a plain dict.

    Args:
        shared: Metrics of the run, which are the columns of `metrics.csv`.
        clients: Metrics of single clients by name, by client id.

    Attributes:
        clients: Metrics of single clients by name, by client id. A client without metrics has an empty dict.

    Example:
        >>> metrics = RoundMetrics({"client/acc_mean": 0.5})
        >>> metrics["spread/all"] = 0.25
        >>> metrics.clients[3]["acc"] = 0.75
        >>> metrics.flat()
        {'client/acc_mean': 0.5, 'spread/all': 0.25, 'client_3/acc': 0.75}
    """

    def __init__(self, shared: Mapping[str, float] = {}, clients: Mapping[int, Mapping[str, float]] = {}) -> None:
        super().__init__(shared)
        self.clients: dict[int, dict[str, float]] = defaultdict(dict)
        for client, own in clients.items():
            self.clients[client] |= own

    def __ior__(self, other: Mapping[str, float]) -> RoundMetrics:  # type: ignore[override, misc]
        self.update(other)
        if isinstance(other, RoundMetrics):
            for client, own in other.clients.items():
                self.clients[client] |= own
        return self

    def flat(self) -> dict[str, float]:
        """Return all metrics in one dict, for the option `monitor`. Those of clients follow, as `client_3/acc`."""
        flat = dict(self)
        for client, own in self.clients.items():
            flat |= {client_key(client, name): value for name, value in own.items()}
        return flat


def client_key(client: int | str, name: str) -> str:
    """Return the name of a client's metric among all metrics of a round, such as `client_3/acc`."""
    return f"client_{client}/{name}"

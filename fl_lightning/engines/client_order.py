"""The order in which the results of a round are aggregated: that of the clients, in whatever order they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from fl_lightning.core.task import Result

Done = Callable[[Result], object]
"""A function that receives the results of tasks, one at a time."""


class ClientOrder:
    """Receives results as they arrive, and passes them on in the order of the clients.

    Each round has one, which the caller of `Engine.run` makes and the engine calls like a function. The order of
    floating-point sums is then the same with all engines. A result waits until those of all clients before it arrive.

    Args:
        clients: The ids of the clients, in order.
        done: Receives the results in this order.
        arrived: Called for each result as soon as it arrives. By default nothing is called.

    Attributes:
        waiting_bytes: Bytes of the uploads and client states of the results that wait.
    """

    def __init__(self, clients: Iterable[int], done: Done, arrived: Callable[[], object] | None = None) -> None:
        self._expected, self._done, self._arrived = deque(clients), done, arrived
        self._waiting: dict[int, Result] = {}
        self.waiting_bytes = 0

    def __call__(self, result: Result) -> None:
        """Receive a result, and pass on those that no longer wait."""
        if self._arrived:
            self._arrived()
        if result.client != self.next_client:
            self._waiting[result.client] = result
            self.waiting_bytes += result.nbytes
            return
        self._pass_on(result)
        while self.next_client in self._waiting:
            self.waiting_bytes -= self._waiting[self._expected[0]].nbytes
            self._pass_on(self._waiting.pop(self._expected[0]))

    def _pass_on(self, result: Result) -> None:
        self._expected.popleft()
        self._done(result)

    def __len__(self) -> int:
        """Return the number of results that wait for a result of another client."""
        return len(self._waiting)

    @property
    def next_client(self) -> int | None:
        """The client whose result is passed on next; None after the last one."""
        return self._expected[0] if self._expected else None

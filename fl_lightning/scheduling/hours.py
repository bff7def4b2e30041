"""The hours of a day in which clients are online."""

from __future__ import annotations

import math

import numpy as np

DAY = 86400.0
"""Seconds in a day."""


class Hours:
    """Each client is online once a day, for an interval that is the same every day.

    Args:
        begin: The clients' times of day at which they come online, in seconds, `(N,)`.
        length: How long they stay online, in seconds, above 0 and at most a day, `(N,)`.
    """

    def __init__(self, begin: np.ndarray, length: np.ndarray) -> None:
        self.begin, self.length = begin % DAY, length

    def wait(self, client: int, time: float) -> float:
        """Return how long it takes until a client is online: 0 if it is.

        Args:
            client: The client's id.
            time: Seconds since midnight before the run.
        """
        passed = self._passed(client, time)
        return 0.0 if passed < self.length[client] else float(DAY - passed)

    def _passed(self, client: int, time: float) -> float:
        """Return the time since a client came online last, in whole microseconds.

        Exact differences could be a rounding error short of a day when the client has just come online.
        """
        return round(float(time - self.begin[client]), 6) % DAY

    def end(self, client: int, time: float, seconds: float) -> float:
        """Return when a client has been online for a number of seconds since a time at which it is online.

        Args:
            client: The client's id.
            time: When it begins.
            seconds: How long it works. It pauses while it is offline.
        """
        length = self.length[client]
        if length >= DAY:
            return time + seconds
        nights = math.ceil((self._passed(client, time) + seconds) / length) - 1
        return float(time + seconds + max(nights, 0) * (DAY - length))

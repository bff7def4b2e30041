"""Writing to disk while the run goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

ROOM = 4  # jobs handed over and not yet done: what they hold is held in memory


class Writer:
    """A thread that carries out jobs in the order they are handed over.

    What goes wrong in a job is raised in the caller's own thread, by whichever method is called next.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[object]] = deque()

    def submit(self, job: Callable[[], object]) -> None:
        """Hand a job over; waits while there is no room for it."""
        while len(self._jobs) >= ROOM:
            self._jobs.popleft().result()
        self.check()
        self._thread = self._thread or ThreadPoolExecutor(1, "fl-lightning-writer")
        self._jobs.append(self._thread.submit(job))

    def check(self) -> None:
        """Raise what went wrong in the jobs that are done."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    def wait(self) -> None:
        """Return when every job is done."""
        while self._jobs:
            self._jobs.popleft().result()

    def close(self) -> None:
        """Wait, whatever goes wrong, and end the thread; `submit` may follow all the same."""
        if self._thread:
            self._thread.shutdown()
        self._thread = None
        self._jobs.clear()

"""Background thread that writes client states and checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MAX_JOBS = 4  # each waiting job keeps its data in memory


class Writer:
    """A background thread that runs writing jobs in the order in which they are submitted.

    An exception in a job is raised in the caller's thread by the next call of `submit`, `check` or `wait`.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[object]] = deque()

    def submit(self, job: Callable[[], object]) -> None:
        """Submit a job to the background thread. Waits while too many jobs are pending."""
        while len(self._jobs) >= MAX_JOBS:
            self._jobs.popleft().result()
        self.check()
        self._thread = self._thread or ThreadPoolExecutor(1, "fl-lightning-writer")
        self._jobs.append(self._thread.submit(job))

    def check(self) -> None:
        """Raise the exception of a job that has failed, if any."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    def wait(self) -> None:
        """Wait until all submitted jobs are done, and raise the exception of a job that failed."""
        while self._jobs:
            self._jobs.popleft().result()

    def close(self) -> None:
        """Wait for all submitted jobs, ignore exceptions, and end the thread. A later `submit` starts a new thread."""
        if self._thread:
            self._thread.shutdown()
        self._thread = None
        self._jobs.clear()

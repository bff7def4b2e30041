"""A lost worker process: its client is trained again, fails, or the run ends."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from fl_lightning.core.task import Result, failed_result
from fl_lightning.engines.pool_worker import PoolWorker, WorkerLost

ATTEMPTS = 3  # workers that may be lost in a round before they are ready


class LostWorkers:
    """Counts the workers that are lost in a round, and decides what happens to the client that each has trained.

    The client is trained again by another worker. After too many losses, it has failed. If workers are lost before they
    can begin, the run ends. Workers that exceed `engine.timeout` are killed (`PoolEngine`) and count as lost.

    Args:
        retries: How many times a client is trained again.
    """

    def __init__(self, retries: int) -> None:
        self.retries = retries
        self._lost: Counter[int | None] = Counter()  # by client; None: lost before it was ready

    def add(self, pool_worker: PoolWorker, loss: WorkerLost) -> Result | None:
        """Count a lost worker. Return the failed result of its client after the last retry, else None.

        Raises:
            WorkerLost: The third worker was lost before it was ready.
        """
        task = pool_worker.tasks[0] if pool_worker.tasks else None
        if task or not pool_worker.ready:
            self._lost[task.client if task else None] += 1
        if self._lost[None] == ATTEMPTS:
            fix = '; a script that runs an experiment with this engine must do so under `if __name__ == "__main__":`'
            shown = fix if loss.exited and runs_script() else ""
            raise WorkerLost(
                f"engine: {ATTEMPTS} workers ended before they could begin, the last of them {loss}{shown}"
            )
        if not task or (lost := self._lost[task.client]) <= self.retries:
            return None
        pool_worker.tasks.popleft()
        what = f"{lost} worker processes died running it, the last of them" if lost > 1 else "its worker process died"
        return failed_result(task, WorkerLost(f"{what} {loss}"))


def runs_script() -> bool:
    """Return whether this process runs a script of the user, and not the command line."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    return file is not None and Path(file).stem != "fl-lightning" and not (spec and spec.parent == "fl_lightning")

"""Engines that run the tasks of a round in another order."""

from fl_lightning.engines import Engine


class Backwards(Engine):
    """An engine that runs tasks from the last to the first."""

    def run(self, worker, tasks):
        return map(worker.run, reversed(list(tasks)))


def run_tasks(engine, worker, tasks):
    """Return the results of tasks as in a round of a run."""
    return engine.in_one_fit(worker, lambda: list(engine.run(worker, tasks)))

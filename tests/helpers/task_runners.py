"""Engines that run the tasks of a round in another order."""

from fl_lightning.core.task import Tasks
from fl_lightning.engines import Engine
from fl_lightning.engines.client_order import ClientOrder


class Backwards(Engine):
    """An engine that runs tasks from the last to the first."""

    def run(self, worker, tasks, done):
        for task in reversed(list(tasks)):
            done(worker.run(task))


def tasks_in(tasks):
    """Return a list of tasks in the form that engines take."""
    return Tasks([task.client for task in tasks], tasks, all(task.fit for task in tasks))


def run_tasks(engine, worker, tasks):
    """Return the results of tasks as in a round of a run."""
    results = []
    engine.run(worker, tasks_in(tasks), ClientOrder([task.client for task in tasks], results.append))
    return results

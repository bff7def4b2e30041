"""Ways to carry out a round's tasks that must not change its results."""

import pickle

import torch

from fl_lightning.engines import Engine


class Backwards(Engine):
    """Carries tasks out from the last to the first."""

    def run(self, worker, tasks):
        return map(worker.run, reversed(list(tasks)))


def run_pickled(pickled, threads):
    """In the other process: unpickle worker and task, run, send the result back pickled."""
    torch.set_num_threads(threads)  # sums are split among threads, which rounds them differently
    worker, task = pickle.loads(pickled)
    return pickle.dumps(worker.run(task))

"""Publications of peers, and the means that they mix, for tests of methods without a server."""

import torch

from fl_lightning.algorithms.decentralized.peers import publication
from fl_lightning.engines import Engine


class Watching(Engine):
    """Record the tasks in which clients train."""

    def __init__(self):
        self.tasks = []

    def run(self, worker, tasks, done):
        for task in tasks:
            self.tasks += [task] if task.fit else []
            done(worker.run(task))

    def of_round(self, round):
        return {task.client: task for task in self.tasks if task.round == round}


def peers_in(message):
    """Return the ids of the peers in a download."""
    return sorted({int(name.split("/")[0].removeprefix("peer_")) for name in [*message.tensors, *message.numbers]})


def published(run, client):
    """Return the tensors of a client's publication and its number of samples."""
    message = publication(run.server.visible_state, client)
    return message.tensors, message.numbers["n_samples"]


def model_of(tensors):
    return {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}


def mean_by_hand(models, samples):
    """Return the weighted mean of each entry in Python's floats, or the largest of integers."""
    mean = {}
    for name, first in models[0].items():
        columns = zip(*(model[name].flatten().tolist() for model in models), strict=True)
        if first.is_floating_point():
            values = [sum(n * v for n, v in zip(samples, c, strict=True)) / sum(samples) for c in columns]
        else:
            values = [max(column) for column in columns]
        mean[name] = torch.tensor(values, dtype=first.dtype).view(first.shape)
    return mean

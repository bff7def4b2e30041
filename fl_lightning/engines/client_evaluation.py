"""Evaluation of clients without training. Clients that share one model are evaluated in common batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import OWN
from fl_lightning.client.module import ClientModule
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.task import Result, Task, is_interrupt
from fl_lightning.engines.base import Engine, in_client_order
from fl_lightning.engines.trainer import inference
from fl_lightning.engines.worker import Worker

SAMPLES, CHUNK, TOLERANCE = 8, 2, 0.05
"""Number of samples that a network is tried on, size of parts, and how close the outputs of whole and parts must be.
Half precision needs some tolerance; outputs that depend on the batch are far off."""


def evaluate_untrained(
    engine: Engine, worker: Worker, tasks: Iterable[Task], clients: Iterable[int]
) -> Iterator[Result]:
    """Yield the results of tasks without training, in the order of these clients.

    Raises:
        ClientFailure: One of them fails.
    """
    for result in in_client_order(evaluate_clients(engine, worker, tasks), clients):
        if result.failure:
            raise result.failure
        yield result


def evaluate_clients(engine: Engine, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
    """Yield the results of tasks in any order. Tasks that only score the same model are run together, in this process.

    For a thousand small test splits this takes a tenth of the time. It applies with every engine if the algorithm sends
    all clients the same model and does not change it, to clients that keep no part of the network. The scores are the
    same except for rounding. Client states are not part of these results.

    Args:
        engine: Carries out the other tasks.
        worker: The worker object.
        tasks: The tasks.
    """
    one_model = sends_one_model(worker)
    first: Task | None = None
    clients: list[int] = []

    def others() -> Iterator[Task]:
        nonlocal first
        for task in tasks:
            only_scores = task.evaluate and not (task.fit or task.upload or task.evaluate_globally)
            if one_model and only_scores and not task.memory.get(OWN):
                first = first or replace(task, memory={})
                clients.append(task.client)
            else:
                yield task

    yield from engine.run(worker, others())
    if first:
        results = score_together(worker, first, clients)
        yield from results or engine.run(worker, (replace(first, client=client) for client in clients))


def sends_one_model(worker: Worker) -> bool:
    """Return whether all clients that keep no part of the network are scored with the same model."""
    algorithm = worker.algorithm
    return algorithm.starts_alike and algorithm.aggregator.sends_one_model and algorithm.module_class is ClientModule


def score_together(worker: Worker, task: Task, clients: Sequence[int]) -> list[Result]:
    """Return the results of a task for each of these clients, or an empty list if they must be scored one by one."""
    try:
        module = worker.modules.receive(task)
        with inference(module, worker.idle_trainer):
            x, _ = next(iter(worker.client_data.test_batches()))
            if not is_per_sample(module, x[:SAMPLES]):
                return []
            scores = worker.scorer.local_scores(module, clients)
    except BaseException as error:  # of no client in particular: one by one, the client is known
        if is_interrupt(error):
            raise
        return []
    nbytes = task.download.nbytes
    return [Result(client, nbytes, local=score) for client, score in zip(clients, scores, strict=True)]


def is_per_sample(module: nn.Module, x: Tensor) -> bool:
    """Return whether a network's output for a sample depends on that sample alone and draws no random numbers.

    This is false for BatchNorm without running statistics and for dropout in eval mode.
    """
    states = RandomStates(x.device)
    whole, parts = module(x), torch.cat([module(part) for part in x.split(CHUNK)])
    return bool((whole - parts).abs().max() <= TOLERANCE * whole.abs().max()) and states.unmoved()

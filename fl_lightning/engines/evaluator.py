"""Evaluation between rounds: the global model, and the clients' models as trained or as received."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import OWN
from fl_lightning.algorithms.server import Server
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Message
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.task import Result, Score, Task, is_interrupt
from fl_lightning.engines.base import Engine, in_client_order
from fl_lightning.engines.trainer import inference
from fl_lightning.engines.worker import Worker
from fl_lightning.evaluation.evaluation import Evaluation, measured
from fl_lightning.evaluation.summary import Row

SAMPLES, CHUNK, TOLERANCE = 8, 2, 0.05
"""Numbers for `is_per_sample`: samples in the batch, samples in each part of the batch, and relative tolerance.

Half precision needs some tolerance. Outputs that depend on the batch differ by much more."""


class Evaluator:
    """Evaluates the global model and the clients' models between the rounds of a run.

    Args:
        evaluation: The options `evaluation` of the run.
        rounds: Number of rounds of the run.
        engine: Runs the clients' tasks.
        worker: Builds and evaluates client modules.
        server: Provides the global model and the downloads.

    Attributes:
        scored: Ids of the clients to evaluate when every client can be evaluated, not only those that trained.
    """

    def __init__(self, evaluation: Evaluation, rounds: int, engine: Engine, worker: Worker, server: Server) -> None:
        self.evaluation, self.rounds = evaluation, rounds
        self.engine, self.worker, self.server = engine, worker, server
        self.scored = evaluation.chosen(server.clients, server.seed)

    def scores_wanted(self, round: int) -> dict[str, bool]:
        """Return the `Task` fields that say how a round's tasks evaluate the clients' models after training."""
        due, how = self.evaluation.is_due(round, self.rounds), self.evaluation
        return {
            "evaluate": due and how.client_model == "trained",
            "evaluate_globally": due and how.personal_on_global,
        }

    def after_round(self, round: int, results: Sequence[Result]) -> Row:
        """Return the evaluation metrics of a finished round, empty if `evaluation.every` skips the round.

        Args:
            round: The round. Its uploads have been aggregated.
            results: The results of the clients that trained.
        """
        if not self.evaluation.is_due(round, self.rounds):
            return {}
        clients: Iterable[Result] = results
        if self.evaluation.client_model == "received":
            downloads = self.server.downloads(round + 1, self.scored)
            clients = self.without_training(round, self.scored, downloads, evaluate=True)
        metrics = self._measure(clients, [result.on_global for result in results if result.on_global])
        return metrics | {f"client_{r.client}/train_loss": r.losses["loss"] for r in results if r.losses}

    def test(self, round: int) -> Row:
        """Return metrics after a round: of the global model, and of each client's model on the client's test split."""
        server = self.server
        downloads = server.downloads(round + 1, self.scored) if server.algorithm.server else repeat(Message())
        return {"round": round, **self._measure(self.without_training(round, self.scored, downloads, evaluate=True))}

    def without_training(
        self, round: int, clients: Sequence[int], downloads: Iterable[Message], **wanted: Any
    ) -> Iterator[Result]:
        """Yield the results of clients' tasks without training, such as the test metrics of the received model.

        Args:
            round: The last finished round.
            clients: The ids of the clients.
            downloads: A message for each client, possibly an endless iterator.
            **wanted: Fields of `Task`; by default nothing is uploaded or evaluated.
        """
        options = {"fit": False, "upload": False, **wanted}
        memory = self.server.memory
        arriving = zip(clients, downloads, strict=False)
        tasks = (Task(round, client, download, memory.get(client, {}), **options) for client, download in arriving)
        return evaluate_untrained(self.engine, self.worker, tasks, clients)

    def _measure(self, clients: Iterable[Result], on_global: Sequence[Score] = ()) -> Row:
        scores, shared = {result.client: result.local for result in clients if result.local}, None
        if self.server.algorithm.one_model:
            module = self.worker.modules.build_shared(self.server.state["model"])
            with inference(module, self.worker.idle_trainer):
                shared = self.worker.scorer.score(module)
        return measured(shared, scores, on_global)


def evaluate_untrained(
    engine: Engine, worker: Worker, tasks: Iterable[Task], clients: Iterable[int]
) -> Iterator[Result]:
    """Run clients' tasks that do not train, and yield the results in the order of `clients`.

    Raises:
        ClientFailure: A task fails.
    """
    for result in in_client_order(evaluate_clients(engine, worker, tasks), clients):
        if result.failure:
            result.failure.label = worker.data.names.client(result.client)
            raise result.failure
        yield result


def evaluate_clients(engine: Engine, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
    """Run clients' tasks and yield the results in any order. Tasks that only evaluate the same model run together.

    For a thousand small test splits this takes a tenth of the time. It is done in this process, with every engine, if
    the algorithm sends all clients the same model and does not change it, for clients that keep no part of the network.
    The metrics are the same except for rounding. Client states are not part of these results.

    Args:
        engine: Runs the other tasks.
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
    """Return whether every client is evaluated with the same model, except clients that keep layers of their own."""
    algorithm = worker.algorithm
    return algorithm.starts_alike and algorithm.aggregator.sends_one_model and algorithm.module_class is ClientModule


def score_together(worker: Worker, task: Task, clients: Sequence[int]) -> list[Result]:
    """Evaluate one model on these clients' test splits in common batches; return no results if that is impossible."""
    try:
        module = worker.modules.receive(task)
        with inference(module, worker.idle_trainer):
            x, _ = next(iter(worker.client_data.test_batches()))
            if not is_per_sample(module, x[:SAMPLES]):
                return []
            scores = worker.scorer.local_scores(module, clients)
    except BaseException as error:  # separate tasks will show which client fails
        if is_interrupt(error):
            raise
        return []
    nbytes = task.download.nbytes
    return [Result(client, nbytes, local=score) for client, score in zip(clients, scores, strict=True)]


def is_per_sample(module: nn.Module, x: Tensor) -> bool:
    """Return whether a network's output for a sample does not depend on the rest of the batch or on random numbers.

    This is false for BatchNorm without running statistics and for dropout that stays active in eval mode.
    """
    states = RandomStates(x.device)
    whole, parts = module(x), torch.cat([module(part) for part in x.split(CHUNK)])
    return bool((whole - parts).abs().max() <= TOLERANCE * whole.abs().max()) and states.unmoved()

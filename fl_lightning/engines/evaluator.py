"""Evaluation between rounds: the global model, and the clients' models as trained or as received."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from fl_lightning.algorithms.server import Server
from fl_lightning.core.message import Message
from fl_lightning.core.task import Result, Score, Task
from fl_lightning.engines.base import Engine
from fl_lightning.engines.client_evaluation import evaluate_untrained
from fl_lightning.engines.trainer import inference
from fl_lightning.engines.worker import Worker
from fl_lightning.evaluation.evaluation import Evaluation, measured
from fl_lightning.evaluation.metrics import Row


class Evaluator:
    """Evaluate a run between its rounds.

    Args:
        evaluation: What is evaluated, and how often.
        rounds: Number of rounds of the run.
        engine: Carries out the clients' tasks.
        worker: Builds and scores client modules.
        server: Gives the global model and the downloads.

    Attributes:
        scored: Ids of the clients that are evaluated if all could be.
    """

    def __init__(self, evaluation: Evaluation, rounds: int, engine: Engine, worker: Worker, server: Server) -> None:
        self.evaluation, self.rounds = evaluation, rounds
        self.engine, self.worker, self.server = engine, worker, server
        self.scored = evaluation.chosen(server.clients, server.seed)

    def scores_wanted(self, round: int) -> dict[str, bool]:
        """Return which scores of a client's trained model are wanted in a round, as arguments of `Server.task`."""
        due, how = self.evaluation.is_due(round, self.rounds), self.evaluation
        return {"evaluate": due and how.client_model == "trained", "on_global": due and how.personal_on_global}

    def after_round(self, round: int, results: Sequence[Result]) -> Row:
        """Return the metrics of a round, or none if it is not evaluated.

        Args:
            round: The round. Its uploads are aggregated.
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
        """Evaluate the global model, and each client's model as it is after a round on its own test split."""
        server = self.server
        downloads = server.downloads(round + 1, self.scored) if server.algorithm.server else repeat(Message())
        return {"round": round, **self._measure(self.without_training(round, self.scored, downloads, evaluate=True))}

    def without_training(
        self, round: int, clients: Sequence[int], downloads: Iterable[Message], **wanted: Any
    ) -> Iterator[Result]:
        """Yield the results of clients that process their downloads without training.

        Args:
            round: The last finished round.
            clients: Their ids.
            downloads: A message for each of them, possibly without end.
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

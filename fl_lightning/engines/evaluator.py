"""Evaluation of the global model and of the clients' models between the rounds of a run.

A client's model is evaluated as the client has trained it, or as the client receives it for the next round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count, repeat
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import OWN
from fl_lightning.algorithms.protocols import Calibrates
from fl_lightning.algorithms.server import ClientStates, Server
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import to_cpu
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message
from fl_lightning.core.round_progress import report_evaluated
from fl_lightning.core.seeding import RandomStates, Stream, seed_everything
from fl_lightning.core.state_dicts import State
from fl_lightning.core.task import Result, Score, Task, Tasks, is_interrupt
from fl_lightning.engines.base import Engine
from fl_lightning.engines.client_order import ClientOrder, Done
from fl_lightning.engines.trainer import inference
from fl_lightning.engines.worker import Worker
from fl_lightning.evaluation.evaluation import Evaluation, architecture_means, evaluation_metrics
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.evaluation.summary import Row
from fl_lightning.models.mixed import networks_of

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
        new_clients: Ids of the held-out clients to evaluate.
        warned: `client` and `new_client`, once a warning has said that some of their models are untrained.

    Raises:
        ConfigError: Clients have no global test set to be evaluated on.
    """

    def __init__(self, evaluation: Evaluation, rounds: int, engine: Engine, worker: Worker, server: Server) -> None:
        if evaluation.personal_on_global and worker.data.is_remote:
            raise ConfigError("evaluation.personal_on_global: clients' machines have no global test set. Set it false")
        self.evaluation, self.rounds = evaluation, rounds
        self.engine, self.worker, self.server = engine, worker, server
        attackers = server.adversary.attackers
        self.scored = [client for client in evaluation.chosen(server.clients, server.seed) if client not in attackers]
        held_out = worker.data.held_out_clients
        self.new_clients = [held_out[i] for i in evaluation.chosen(len(held_out), server.seed)]
        self.warned: set[str] = set()

    def scores_wanted(self, round: int) -> dict[str, bool]:
        """Return the `Task` fields that request an evaluation of the clients' models after training in a round."""
        due, how = self.evaluation.is_due(round, self.rounds), self.evaluation
        return {
            "evaluate": due and how.client_model != "received",
            "evaluate_globally": due and how.personal_on_global,
        }

    def after_round(self, round: int, results: Sequence[Result]) -> RoundMetrics:
        """Return the evaluation metrics of a finished round, empty if `evaluation.every` skips the round.

        Args:
            round: The round. Its uploads have been aggregated.
            results: The results of the clients that trained.
        """
        if not self.evaluation.is_due(round, self.rounds):
            return RoundMetrics()
        received = self.evaluation.of_received
        clients = self._evaluate_received(round, self.server.downloads) if received else results
        trained = [result.local for result in results if result.local] if received else []
        on_global = [result.on_global for result in results if result.on_global]
        metrics = self._measure(round, clients, on_global, trained)
        metrics |= self._count_untrained(clients) if received else {}
        for result in results:
            if result.losses:
                metrics.clients[result.client]["train_loss"] = result.losses["loss"]
        return metrics

    def test(self, round: int) -> RoundMetrics:
        """Return metrics after a round: of the global model, and of each client's model on the client's test split.

        Raises:
            ConfigError: The clients' data are elsewhere, and there is no global test set or no global model.
        """
        server, data = self.server, self.worker.data
        if data.is_remote:
            if not server.algorithm.one_model:
                name, where = type(server.algorithm).__name__, "The clients' metrics are in metrics.csv and clients.csv"
                raise ConfigError(f"algorithm: {name} has no global model to test. {where}")
            if not data.has_global_test:
                raise ConfigError("scenario.dataset: all test samples are on the clients' machines. See metrics.csv")
        clients = [] if data.is_remote else self._evaluate_received(round, self._downloads)
        metrics = RoundMetrics({"round": round})
        metrics |= self._measure(round, clients)
        metrics |= self._count_untrained(clients)
        return metrics

    def deliver_models(self, round: int) -> None:
        """Send each client's final model to the client's own machine, which stores the model.

        If a machine cannot store it, a warning names the client and the reason.
        """
        clients = range(self.server.clients)
        tasks = self._tasks(round, clients, self._downloads(round + 1, clients), keep_model=True)

        def warn_of_failure(result: Result) -> None:
            if result.failure:
                who = self.worker.data.names.client(result.client)
                warnings.warn(f"{who}: its model was not stored there: {result.failure.reason}", stacklevel=2)

        self.engine.run(self.worker, Tasks(clients, tasks, fit=False), ClientOrder(clients, warn_of_failure))

    def initial_uploads(self, clients: Sequence[int], done: Done) -> None:
        """Let clients upload their untrained models before round 1, and call `done` with the results, also failed ones.

        Only methods without a server need these uploads.
        """
        tasks = self._tasks(0, clients, repeat(Message()), upload=True)
        self.engine.run(self.worker, Tasks(clients, tasks, fit=False), ClientOrder(clients, done))

    def _evaluate_received(
        self, round: int, downloads: Callable[[int, Sequence[int]], Iterable[Message]]
    ) -> list[Result]:
        """Evaluate the models with which clients would start the next round, and return the results.

        Only the clients in `self.scored` are evaluated.

        Args:
            round: The last finished round.
            downloads: Returns the messages that clients receive at the start of a round.
        """

        def tasks(clients: Sequence[int]) -> Iterator[Task]:
            return self._tasks(round, clients, downloads(round + 1, clients), evaluate=True)

        return evaluate_clients(self.engine, self.worker, self.scored, self.server.memory, tasks)

    def _downloads(self, round: int, clients: Sequence[int]) -> Iterable[Message]:
        """Return the server's message to each client in a round. If there is no server, the messages are empty."""
        return self.server.downloads(round, clients) if self.server.algorithm.server else repeat(Message())

    def _tasks(self, round: int, clients: Sequence[int], downloads: Iterable[Message], **wanted: Any) -> Iterator[Task]:
        """Yield one task without training for each client. `wanted` sets more fields of `Task`, such as `evaluate`."""
        options = {"lr_scale": self.server.lr_scales.of(round), "fit": False, "upload": False, **wanted}
        for client, download in zip(clients, downloads, strict=False):
            yield Task(round, client, download, self.server.memory.get(client, {}), **options)

    def global_module(self, round: int) -> ClientModule:
        """Build the module of the global model after a round. Algorithms such as CCVR calibrate it."""
        worker, algorithm = self.worker, self.server.algorithm
        module = worker.modules.build_shared(self.server.state["model"])
        if isinstance(algorithm, Calibrates):
            scale = self.server.lr_scales.of(round)
            module.context = FitContext(round, scale, worker.training.batch_size)
            seed_everything(self.server.seed, Stream.CALIBRATION, round)
            data, classes = worker.client_data, worker.data.data.num_classes
            every = (data.training_batches(client) for client in range(self.server.clients))
            with inference(module, worker.idle_trainer):
                algorithm.calibrate(module, (algorithm.statistics(module, batches, classes) for batches in every))
        return module

    def _measure(
        self,
        round: int,
        clients: Sequence[Result],
        on_global: Sequence[Score] = (),
        trained: Sequence[Score] = (),
    ) -> RoundMetrics:
        scores = {result.client: result.local for result in clients if result.local}
        has_one = self.server.algorithm.one_model and self.worker.data.has_global_test
        module = self.global_module(round) if has_one else None
        shared = self._score(module) if module else None
        new = self._new_client_results(round, module)
        on_new = [result.local for result in new if result.local]
        row = evaluation_metrics(shared, scores, on_global, on_new, trained)
        row |= self._architecture_means(scores)
        row |= {} if self.trains_new_clients else self._count_untrained(new, "new_client")
        if shared and isinstance(self.server.algorithm, Calibrates):
            plain = self._score(self.worker.modules.build_shared(self.server.state["model"]))
            row |= {f"global/uncalibrated_{name}": value for name, value in plain.values.items() if name != "loss"}
        rates = [self._success_rate(module)] if module else [result.attack_success for result in clients]
        if known := [rate for rate in rates if rate is not None]:
            row["attack/success_rate"] = fmean(known)
        return row

    def _success_rate(self, module: ClientModule) -> float | None:
        """Return the share of predictions of the global model that attackers want; None if they have no such goal."""
        with inference(module, self.worker.idle_trainer):
            return self.worker.scorer.success_rate(module)

    def _architecture_means(self, scores: Mapping[int, Score]) -> Row:
        """Return the mean metrics of the clients with each architecture; empty if all have the same network."""
        by_name: dict[str, list[Score]] = {}
        for client, score in scores.items():
            if name := self.worker.architecture_of(client):
                by_name.setdefault(name, []).append(score)
        return architecture_means(by_name)

    def _count_untrained(self, results: Iterable[Result], group: str = "client") -> Row:
        """Return how many of the received models that were evaluated contain initial weights, by column.

        The first time that there are any, a warning says so.
        """
        scored = [result for result in results if result.local]
        count = sum(result.untrained for result in scored)
        if count and group not in self.warned:
            self.warned.add(group)
            option = "client_model" if group == "client" else "new_client_model"
            what = f"{count} of {len(scored)} evaluated models contain initial weights"
            why = f"their clients have not trained yet. The column {group}/untrained counts them"
            warnings.warn(f"evaluation.{option}: {what}, because {why}", stacklevel=2)
        return {f"{group}/untrained": count} if scored else {}

    @property
    def trains_new_clients(self) -> bool:
        """Whether held-out clients train before they are evaluated."""
        wanted = self.evaluation.new_client_model
        return wanted == "trained" if wanted else self.server.algorithm.trains_new_clients

    def _new_client_results(self, round: int, shared: ClientModule | None) -> list[Result]:
        """Return the results of evaluating the held-out clients after a round.

        Args:
            round: The round.
            shared: A module with the global model; None if there is no global model or no global test set.
        """
        if not self.new_clients:
            return []
        algorithm, state = self.server.algorithm, self.server.state
        if shared and isinstance(algorithm, Calibrates):
            weights = shared.backbone.state_dict()
            state = state | {"model": to_cpu({"model": {name: weights[name] for name in state["model"]}})["model"]}
        fit = self.trains_new_clients
        scale = self.server.lr_scales.of(min(round + 1, self.rounds))
        memories = self._new_client_memories

        def tasks(clients: Sequence[int]) -> Iterator[Task]:
            chosen = {client: memories[client] for client in clients}
            return self.server.new_client_tasks(round + 1, state, chosen, scale, fit)

        if fit:
            return results_of(self.engine, self.worker, Tasks(self.new_clients, tasks(self.new_clients)))
        return evaluate_clients(self.engine, self.worker, self.new_clients, memories, tasks)

    @cached_property
    def _new_client_memories(self) -> dict[int, State]:
        """Initial states of the held-out clients, by client id. With a central server, each state is empty.

        Without a server, a state contains the tensors that other clients may read.
        """
        if self.server.algorithm.server:
            return {client: {} for client in self.new_clients}
        found: dict[int, State] = {}
        keep = require_success(self.worker, lambda result: found.update({result.client: result.memory}))
        self.initial_uploads(self.new_clients, keep)
        return found

    def _score(self, module: ClientModule) -> Score:
        with inference(module, self.worker.idle_trainer):
            return self.worker.scorer.score(module)


def run_successfully(
    engine: Engine, worker: Worker, tasks: Tasks, done: Done, arrived: Callable[[], object] | None = None
) -> None:
    """Run tasks, and call `done` with their results in the order of clients. Raise an error if a task failed.

    This is for tasks that must not fail, such as evaluation. `arrived` is called for each result when it arrives.

    Raises:
        ClientFailure: A task failed.
    """
    engine.run(worker, tasks, ClientOrder(tasks.clients, require_success(worker, done), arrived))


def require_success(worker: Worker, done: Done) -> Done:
    """Return a function that calls `done` with a result, or raises the `ClientFailure` of a task that failed."""

    def check(result: Result) -> None:
        if result.failure:
            result.failure.label = worker.data.names.client(result.client)
            raise result.failure
        done(result)

    return check


def results_of(engine: Engine, worker: Worker, tasks: Tasks) -> list[Result]:
    """Run tasks that must not fail, and return their results in the order of clients, without the clients' states.

    Raises:
        ClientFailure: A task failed.
    """
    results, evaluated = list[Result](), count(1)
    run_successfully(
        engine,
        worker,
        tasks,
        lambda result: results.append(replace(result, memory={})),
        lambda: report_evaluated(next(evaluated), len(tasks)),
    )
    return results


def evaluate_clients(
    engine: Engine,
    worker: Worker,
    clients: Sequence[int],
    memories: ClientStates | Mapping[int, State],
    tasks: Callable[[Sequence[int]], Iterator[Task]],
) -> list[Result]:
    """Evaluate clients' models on their own test splits, and return the results in the order of `clients`.

    The results do not contain the clients' states.

    Clients with the same model are evaluated together, which takes a tenth of the time for a thousand small test
    splits. This is done in this process, with every engine, if the algorithm sends all clients the same model and does
    not change it, for clients that keep no part of the network. The metrics are the same except for rounding.

    Args:
        engine: Runs the tasks of the other clients.
        worker: The worker object.
        clients: The ids of the clients.
        memories: The clients' states, by client id.
        tasks: Yields the tasks of the clients that it is given, which evaluate and do nothing else.

    Raises:
        ClientFailure: The evaluation of a client failed.
    """
    one_network = len(networks_of(worker.model)) == 1
    one_model = one_network and sends_one_model(worker) and not worker.data.is_remote
    alike = [client for client in clients if one_model and not memories.get(client, {}).get(OWN)]
    together = score_together(worker, next(tasks(alike)), alike) if alike else []
    scored = {result.client for result in together}
    others = [client for client in clients if client not in scored]
    alone = results_of(engine, worker, Tasks(others, tasks(others), fit=False))
    found = {result.client: result for result in (*together, *alone)}
    return [found[client] for client in clients]


def sends_one_model(worker: Worker) -> bool:
    """Return whether all clients get the same model, except for layers that a client keeps for itself."""
    algorithm = worker.algorithm
    return algorithm.starts_alike and algorithm.aggregator.sends_one_model and algorithm.module_class is ClientModule


def score_together(worker: Worker, task: Task, clients: Sequence[int]) -> list[Result]:
    """Evaluate one model on the test splits of several clients at once. Return an empty list if that is impossible.

    Args:
        worker: The worker object.
        task: The task of one of the clients.
        clients: The ids of the clients.
    """
    try:
        module = worker.modules.receive(replace(task, memory={}))
        with inference(module, worker.idle_trainer):
            x, _ = next(iter(worker.client_data.test_batches()))
            if not is_per_sample(module, x[:SAMPLES]):
                return []
            scores = worker.scorer.local_scores(module, clients)
            success = worker.attack_success(module)
    except BaseException as error:  # separate tasks will show which client fails
        if is_interrupt(error):
            raise
        return []
    nbytes, untrained = task.download.nbytes, worker.algorithm.is_untrained(module, {})
    return [
        Result(client, nbytes, local=score, untrained=untrained, attack_success=success)
        for client, score in zip(clients, scores, strict=True)
    ]


def is_per_sample(module: nn.Module, x: Tensor) -> bool:
    """Return whether a network's output for a sample does not depend on the rest of the batch or on random numbers.

    This is false for BatchNorm without running statistics and for dropout that stays active in eval mode.
    """
    states = RandomStates(x.device)
    whole, parts = module(x), torch.cat([module(part) for part in x.split(CHUNK)])
    return bool((whole - parts).abs().max() <= TOLERANCE * whole.abs().max()) and states.unmoved()

"""`FederatedOrchestrator`: the round loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from signal import Signals
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.loggers import Logger

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.callbacks import Checkpointing, RoundCallback
from fl_lightning.callbacks.defaults import refuse_misplaced, restore, states, with_defaults
from fl_lightning.callbacks.monitor import refuse_taken
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LRScales
from fl_lightning.core.errors import ConfigError, Interrupted, TooFewClients, blame, check_number, check_positive
from fl_lightning.core.interrupt import DeferredSignals
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.core.state import State
from fl_lightning.core.task import Score
from fl_lightning.data import Scenario
from fl_lightning.data.truncation import truncate_dataset
from fl_lightning.engines import Engine, EngineName, Result, Task, Worker, engine_of
from fl_lightning.engines.base import in_client_order
from fl_lightning.engines.scoring import untrained
from fl_lightning.engines.trainer import cheap_collections
from fl_lightning.evaluation.evaluation import Evaluation, logged_metrics, measured, train_metrics
from fl_lightning.evaluation.metrics import Row
from fl_lightning.loggers.base import Labels, RoundLogger
from fl_lightning.loggers.collection import Loggers
from fl_lightning.models import ModelFactory
from fl_lightning.runs import dry_run
from fl_lightning.runs.checkpoint import Checkpoint
from fl_lightning.runs.folder import alone, fresh, missing, refuse_occupied, undone_on_failure
from fl_lightning.runs.reader import Figures, Run
from fl_lightning.runs.record import Keep, Record


class FederatedOrchestrator:
    """Runs an experiment: sample clients, send, fit, collect, aggregate, evaluate, log, checkpoint, round by round.

    Args:
        scenario: The dataset and who holds what.
        model: Builds the backbone; its `in_shape` and `num_classes` come from the dataset.
        algorithm: The federated method.
        rounds: Communication rounds.
        clients_per_round: How many clients take part in a round, drawn anew each time; all by default.
        seed: Everything random derives from it.
        training: How each client trains: optimizer, batch size, local epochs, precision, ...
        round_lr_scheduler: A torch scheduler over rounds, given an optimizer of learning rate 1; what it makes of
            that rate multiplies the clients' learning rates (`ExponentialLR` with `gamma: 0.95`, say).
        engine: How a round's client fits are carried out: `sequential`, one after another, `stacked`, `processes`,
            `ray`, `auto` for the fastest of the first three, or an engine with arguments of its own.
        evaluation: What is measured beside the global model, and how often.
        client_store: Where what clients keep between their rounds is held: in `memory`, or on `disk` alone.
        on_client_failure: When a client fails, `raise` ends the run, `drop` goes on without its upload.
        min_clients: With `drop`, the fewest uploads a round may be left with.
        logger: A Lightning logger beside `metrics.csv`, or a list of them; none with `false` or `null`. Those of this
            package (`WandbRoundLogger`, `CSVLogger`, `TensorBoardLogger`, `MLFlowLogger`) write to the run's folder.
        log_clients: Log every client's own series, in `clients.csv` and the logger; up to 1,000 clients by default.
        callbacks: What watches the rounds; progress, communication and checkpointing are added unless there is one of
            their class.
        run_dir: The folder the run leaves everything in; by default a new one, `runs/<algorithm>/<time>-<id>`, from the
            command line `runs/<config>/<time>-<id>`. It is made when the run begins.

    Attributes:
        clients: How many clients there are; known when the data are loaded, where `scenario.clients` does not say.
        round: The last finished round.
        state: The shared state after it.
        memory: What each client keeps, by its id, as it was when the round under way began.
        csv: The measurements; `csv.rows` are those of all rounds so far.
        record: What is kept of the run, on disk and by its loggers.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        scenario: Scenario,
        model: ModelFactory,
        algorithm: Algorithm,
        rounds: int = 10,
        clients_per_round: int | None = None,
        training: LocalTraining = LocalTraining(),
        seed: int = 0,
        round_lr_scheduler: LRSchedulerCallable | None = None,
        engine: Engine | EngineName = "sequential",
        evaluation: Evaluation = Evaluation(),
        client_store: Literal["memory", "disk"] = "memory",
        on_client_failure: Literal["raise", "drop"] = "raise",
        min_clients: int = 1,
        logger: RoundLogger | Logger | list[RoundLogger | Logger] | Literal[False] | None = None,
        log_clients: bool | None = None,
        callbacks: list[RoundCallback] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        check_positive(rounds=rounds, min_clients=min_clients)
        check_number("seed", seed, "[0, inf)")
        self.scenario, self.algorithm, self.rounds = scenario, algorithm, rounds
        self.seed, self._asked_per_round = seed, clients_per_round
        self.round_lr_scheduler, self.engine = round_lr_scheduler, engine_of(engine)
        self.evaluation, self.training = evaluation, training
        self.on_client_failure, self.min_clients = on_client_failure, min_clients
        if scenario.clients is not None:  # else the data say it
            self._count(scenario.clients)
        self.logger, self._log_clients, self._client_store = Loggers(logger), log_clients, client_store
        refuse_misplaced(callbacks or [], training.client_callbacks)
        self.callbacks = with_defaults(callbacks or [])
        self.round = 0
        self.state: State = {}
        self._lie_in(Path(run_dir) if run_dir else fresh(type(algorithm).__name__))
        self._model = model
        self._signals = DeferredSignals()
        self._tried = False
        self._begun_at = 0

    def _lie_in(self, run_dir: Path) -> None:
        self.record = Record(run_dir, self._client_store, self.logger, self._log_clients, lambda: self.round + 1)
        self.run_dir, self.checkpoints = run_dir, self.record.checkpoints
        self.csv, self.memory = self.record.csv, self.record.memory

    def _count(self, clients: int) -> None:
        """Settle how many clients there are, and how many of them take part in a round."""
        per_round = clients if self._asked_per_round is None else self._asked_per_round
        if not 1 <= per_round <= clients:
            raise ConfigError(f"clients_per_round: {per_round} is not between 1 and scenario.clients, {clients}")
        if self.min_clients > per_round:
            raise ConfigError(f"min_clients: {self.min_clients} is above the {per_round} clients of a round")
        self.clients, self.clients_per_round = clients, per_round

    # --- The loop ---

    def fit(
        self,
        resume: bool = False,
        config: dict[str, Any] | None = None,
        name: str | None = None,
        group: str | None = None,
        fast: bool = False,
    ) -> Run:
        """Run the rounds, or go on after the last checkpoint.

        Args:
            resume: Go on with the run in `run_dir`.
            config: The resolved config: the run's `config.yaml`, what a resume is compared with, and the logger's.
            name: What to call the run, for the logger.
            group: What to call its setting, of which runs with other seeds have it too.
            fast: Only try it all out (a dry run): two rounds of two clients with two batches each and some of the test
                data, with a resume between them, in a folder that is removed; no logger. An orchestrator that was tried
                out cannot be used again, so build another one for the run itself.

        Returns:
            The run, with its `summary`, `history` and `run_dir`.

        Raises:
            ConfigError: Something in the experiment cannot work, another process is at the folder, or the config or the
                data are not what the run began with.
            CheckpointError: There is nothing sound to resume from.
            ClientFailure: A client failed and `on_client_failure` is `raise`.
            Interrupted: SIGINT or SIGTERM came; the last finished round is checkpointed.
        """
        with ExitStack() as held:
            if self._tried:
                raise ConfigError("fast: this orchestrator was tried out, which leaves its mark; build another one")
            if fast:
                self._lie_in(held.enter_context(dry_run.temporary_run_dir(resume)))
                self._tried, config = True, None
            held.enter_context(self.record.warned)
            if resume:
                held.enter_context(alone(self.run_dir))
                self.load(config=config)
            else:
                refuse_occupied(self.run_dir)
                self._build()
            self._notify("check")
            self.logger.check(self.run_dir)
            if fast:
                self._shorten()
            made = missing(self.run_dir)
            if not resume:
                held.enter_context(alone(self.run_dir))
                refuse_occupied(self.run_dir)
            self._begun_at = self.round
            with undone_on_failure(made):
                self._begin(config, name, group)
            with self._running():
                if not self.algorithm.server and not self.round:  # every client lays its untrained model out
                    self._aggregate(0, self._untrained(range(self.clients), repeat(Message()), upload=True))
                while not self.is_over:
                    metrics = self._run_round(self.round + 1)
                    self._notify("on_round_metrics", metrics)
                    self.record.log(metrics)
                    self._notify("on_round_end", metrics)
                    self.logger.end_round(self.csv.rows, self.evaluation.target_accuracies)
                    if fast and not self.is_over:
                        self._restart()
                return Run(self.run_dir, config or {}, self.csv.rows, self._finish())

    def _shorten(self) -> None:
        """Cut a run that was built and checked down to a dry run."""
        self.rounds, self.clients_per_round = dry_run.ROUNDS, min(dry_run.CLIENTS, self.clients_per_round)
        self.min_clients, self.on_client_failure = 1, "raise"
        self.logger.mute()
        scored = min(self.evaluation.max_clients or dry_run.CLIENTS, dry_run.CLIENTS)
        self.evaluation = replace(self.evaluation, max_clients=scored)
        self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, Checkpointing)]
        samples = dry_run.train_samples(self.worker.batch_size, self.algorithm.validation)
        data, trainer = truncate_dataset(self.data, samples), dry_run.shorten_fit(self.worker.trainer)
        self._set_up(replace(self.worker, data=data, trainer=trainer))

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done, or a callback has ended the run."""
        return self.round >= self.rounds or any(callback.stops for callback in self.callbacks)

    @property
    def ending(self) -> str:
        """Why the run is over, for the user: all rounds are done, or which callback stopped it and why."""
        callback = next((each for each in self.callbacks if each.stops), None)
        reason = f"all {self.rounds} rounds are done"
        if self.round < self.rounds and callback:
            name, why = type(callback).__name__, callback.stop_reason
            reason = f"stopped after round {self.round} of {self.rounds} by {name}{why and f': {why}'}"
        return f"nothing was left to do, {reason}" if self.round == self._begun_at else reason

    def _run_round(self, round: int) -> Row:
        started = time.monotonic()
        participants = self.participants(round)
        self._notify("on_round_start", participants)
        results: list[Result] = []
        self._aggregate(round, self._fitted(round, participants, results))
        self.round = round
        fitted = time.monotonic()
        metrics = {"round": round, **train_metrics(results), **self._evaluate(results)}
        metrics |= (logged := logged_metrics(results))
        refuse_taken(self, logged)
        if self.on_client_failure == "drop":
            metrics["client/failed"] = len(participants) - len(results)
        return metrics | {"time/fit_s": fitted - started, "time/round_s": time.monotonic() - started}

    def participants(self, round: int) -> list[int]:
        """Ids of the clients that take part in a round, ascending; the same for every method with this seed.

        But for a method that decides how many take part, from the state as it is.
        """
        rng, clients = generator(self.seed, Stream.PARTICIPANTS, round), self.clients
        cohort = self.algorithm.cohort(self.state, self.clients_per_round, clients)
        return sorted(rng.choice(clients, cohort, replace=False).tolist())

    def _aggregate(self, round: int, results: Iterable[Result]) -> None:
        """Make the next state of what clients send, and put away what they keep."""

        def uploads() -> Iterator[Upload]:
            for result in results:
                assert result.upload
                self.memory.put(result.client, round, result.memory)
                yield Upload(result.client, result.upload)

        self.state = self.algorithm.aggregate(self._visible, uploads())
        self.memory.turn()

    def _fitted(self, round: int, participants: Sequence[int], results: list[Result]) -> Iterator[Result]:
        """Fit the participants, in ascending client id; leave in `results` what is not for the server or kept."""
        due, how = self.evaluation.is_due(round, self.rounds), self.evaluation
        wanted = {
            "evaluate": due and how.client_model == "trained",
            "evaluate_globally": due and how.personal_on_global,
        }
        downloads = zip(participants, self.downloads(round, participants), strict=True)
        tasks = (self._task(round, client, download, **wanted) for client, download in downloads)
        for result in in_client_order(self.engine.run(self.worker, tasks), participants):
            if self._signals.received:
                raise self._interrupted(self._signals.received)
            self.record.writer.check()
            self._notify("on_client_end", result)
            if not result.failure:
                results.append(replace(result, upload=None, memory={}))
                yield result
            elif self.on_client_failure == "drop":
                warnings.warn(f"{result.failure}; dropped from this round", stacklevel=2)
            else:
                raise result.failure
        if len(results) < self.min_clients:
            left = f"{len(results)} of {len(participants)} clients were left"
            raise TooFewClients(f"round {round}: {left}, min_clients is {self.min_clients}")

    def _task(self, round: int, client: int, download: Message, **wanted: bool) -> Task:
        return Task(round, client, download, self.memory.get(client, {}), self.lr_scales.of(round), **wanted)

    def download(self, round: int, client: int) -> Message:
        """What a client is sent at the start of a round that follows the state as it is."""
        return next(self.downloads(round, [client]))

    def downloads(self, round: int, clients: Sequence[int]) -> Iterator[Message]:
        """What each of these clients is sent, in their order: the same as one by one, and made only when asked for."""
        for client, state in zip(clients, self.algorithm.aggregator.ahead(self._visible, clients), strict=True):
            yield self.algorithm.download(state, client, generator(self.seed, Stream.DOWNLOAD, round, client))

    @property
    def _visible(self) -> State:
        """The shared state and, without a server, what clients have laid out for each other."""
        return self.memory.beside(self.state, self.algorithm.public)

    def starting_module(self, client: int) -> ClientModule:
        """A client's module as it starts on the round under way, on the CPU, for callbacks that compare."""
        return self.worker.received(self._task(self.round + 1, client, self.download(self.round + 1, client))).cpu()

    # --- Evaluation and logging ---

    def _evaluate(self, results: Sequence[Result]) -> Row:
        if not self.evaluation.is_due(self.round, self.rounds):
            return {}
        clients: Iterable[Result] = results
        if self.evaluation.client_model == "received":
            clients = self._untrained(self.scored, self.downloads(self.round + 1, self.scored), evaluate=True)
        metrics = self._measured(clients, [result.on_global for result in results if result.on_global])
        return metrics | {f"client_{r.client}/train_loss": r.losses["loss"] for r in results if r.losses}

    def _measured(self, clients: Iterable[Result], on_global: Sequence[Score] = ()) -> Row:
        scores = {result.client: result.local for result in clients if result.local}
        shared = self.worker.score(self.state["model"]) if self.algorithm.one_model else None
        return measured(shared, scores, on_global)

    def _untrained(self, clients: Sequence[int], downloads: Iterable[Message], **wanted: bool) -> Iterator[Result]:
        """What clients make of their downloads without training on them."""
        options = {"fit": False, "upload": False, **wanted}
        arriving = zip(clients, downloads, strict=False)  # where all are sent nothing, there is no end of that
        tasks = (Task(self.round, k, download, self.memory.get(k, {}), **options) for k, download in arriving)
        return untrained(self.engine, self.worker, tasks, clients)

    def _notify(self, moment: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self, *args)

    # --- Start, stop, and start again ---

    def load(self, round: int | None = None, config: dict[str, Any] | None = None) -> None:
        """Take up a checkpoint: of a given round, or the newest sound one; round 0 if no run has begun here.

        Args:
            round: The round.
            config: The resolved config, to be compared with the run's.

        Raises:
            CheckpointError: It is missing, damaged, or does not fit the measurements; for the newest, none is sound.
            ConfigError: The config or the data are not what the run began with.
        """
        saved = self.record.found(round, config)
        self._build()
        if saved:
            self._restore(saved)

    def _restore(self, saved: Checkpoint) -> None:
        self.record.take_up(saved)
        self.round, self.state = saved.round, saved.state["state"]
        self.engine.load_state_dict(saved.state["engine"])
        restore(self.callbacks, saved.state["callbacks"])

    def _restart(self) -> None:
        """Write a checkpoint and go on from it, as a killed run does."""
        self.record.make_sure_of(self.round, self._saved)
        self._restore(self.checkpoints.read(self.round))

    def test(self) -> Row:
        """Evaluate the loaded state: the global model, and each client's `client_module` on its own test split."""
        downloads = self.downloads(self.round + 1, self.scored) if self.algorithm.server else repeat(Message())
        return {"round": self.round, **self._measured(self._untrained(self.scored, downloads, evaluate=True))}

    def client_module(self, client: int) -> ClientModule:
        """Return a client's module as the last round left it, in train mode.

        Its weights are those that the server would send next or, without a server, those that the client trained last.
        It is ready for a `Trainer.fit` of your own; call `eval()` before you predict.

        Raises:
            ConfigError: There is no such client.
        """
        if not 0 <= client < len(self.data.shards):
            raise ConfigError(f"client: there is no client {client}; the run has 0 to {len(self.data.shards) - 1}")
        held = self.download(self.round + 1, client) if self.algorithm.server else Message()
        return self.worker.personal(Task(self.round, client, held, self.memory.get(client, {}))).train()

    def save_checkpoint(self, keep: Keep | None = None) -> None:
        """Have a checkpoint of the last finished round written while the run goes on; call it between rounds.

        Args:
            keep: Once it is on disk, which of the rounds that have a checkpoint keep it, of all of them, newest first.

        Raises:
            CheckpointError: The disk refused the one before.
        """
        self.record.checkpoint(self.round, self._saved(), keep)

    def _saved(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"state": self.state, "callbacks": states(self.callbacks), "engine": self.engine.state_dict()}

    def _build(self) -> None:
        data = self.scenario.build(self.seed)
        self._count(len(data.shards))
        options: dict[str, Any] = dict(vars(self.training))
        options |= {"metrics": self.evaluation.metrics, "positive_class": self.evaluation.positive_class}
        self._set_up(Worker(self.seed, self.algorithm, self._model, data, **options))

    def _set_up(self, worker: Worker) -> None:
        """Take a worker and its data, once they are checked, and begin at the state that the method begins at."""
        self.worker, self.data, self.engine.fits = worker, worker.data, self.rounds * self.clients_per_round
        self.scored = self.evaluation.chosen(self.clients, self.seed)
        worker.check()
        self.record.started_with(self.data, self.worker.device)
        self.engine.check(worker)
        self.lr_scales = LRScales(self.round_lr_scheduler, self.rounds)
        backbone, classes, clients = self.worker.template.backbone, self.data.data.num_classes, self.clients
        self.algorithm.samples = [self.worker.samples(client) for client in range(clients)]
        with blame("algorithm"):
            self.state = self.algorithm.initial_state(backbone, classes, clients, generator(self.seed, Stream.RUN))

    def _begin(self, config: dict[str, Any] | None, name: str | None, group: str | None) -> None:
        kinds = [type(kind).__name__ for kind in (self.algorithm, self.scenario.dataset, self.scenario.partition)]
        self.record.begin(self.round, self._saved, config, Labels(name, group, kinds))
        if schema := self.data.data.schema:
            print(schema.summary(), flush=True)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Signals wait for a safe point; whatever ends the run, finished rounds are on disk and loggers closed."""
        status = "failed"
        self._signals = DeferredSignals()
        try:
            with cheap_collections(), self._signals:
                self._notify("on_fit_start")
                yield
            status = "success"
        except BaseException as error:
            self.record.make_sure_of(self.round, self._saved)
            if isinstance(error, SystemExit) and self._signals.received:  # Lightning's answer to a SIGTERM in a fit
                raise self._interrupted(self._signals.received) from error
            raise
        finally:
            self.record.writer.close()
            self.engine.close()
            self._notify("on_fit_end")
            self.logger.finalize(status)

    def _finish(self) -> Figures:
        one = self.worker.shared_module(self.state["model"]).backbone.cpu() if self.algorithm.one_model else None
        return self.record.end(self.evaluation.target_accuracies, None if one is None else one.state_dict())

    def _interrupted(self, signum: int) -> Interrupted:
        done = f"stopped by {Signals(signum).name} after round {self.round} of {self.rounds}"
        rest = "nothing is left" if self._tried else f"go on with: fl-lightning fit --resume {self.run_dir}"
        return Interrupted(signum, f"{done}; {rest}")

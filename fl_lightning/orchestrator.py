"""`FederatedOrchestrator`: the round loop."""

from __future__ import annotations

import copy
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import repeat
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.loggers import Logger

from fl_lightning import trial
from fl_lightning.algorithms.base import Algorithm, OptimizerState, State
from fl_lightning.callbacks import Checkpointing, RoundCallback
from fl_lightning.callbacks.defaults import by_name, refuse_misplaced, with_defaults
from fl_lightning.callbacks.monitor import round_metrics
from fl_lightning.checkpoint import Checkpoint, CheckpointFolder
from fl_lightning.client import ClientModule, LRScales
from fl_lightning.data import FederatedData, Scenario
from fl_lightning.engines import Engine, EngineName, Result, Task, Worker, engine_of
from fl_lightning.engines.base import in_client_order
from fl_lightning.engines.scoring import scored
from fl_lightning.errors import ClientFailure, ConfigError, Interrupted, TooFewClients, blame, check_positive
from fl_lightning.evaluation import (
    Evaluation,
    Score,
    client_summary,
    logged_metrics,
    own_series,
    personal_means,
    train_metrics,
)
from fl_lightning.files import write_atomically
from fl_lightning.interrupt import DeferredSignals
from fl_lightning.loggers import Loggers, MetricsCsv, WarningsTxt, few_enough, split_series
from fl_lightning.message import Message, Upload
from fl_lightning.metrics import Row, summarize
from fl_lightning.models import ModelFactory
from fl_lightning.report.tables import write_counts
from fl_lightning.round_logger import Labels, RoundLogger
from fl_lightning.run_folder import (
    alone,
    fresh,
    missing,
    refuse_lost_checkpoints,
    refuse_occupied,
    refuse_strange,
    undone_on_failure,
)
from fl_lightning.runs import Figures, Run
from fl_lightning.seal import Seal, made_with, settings
from fl_lightning.seeding import Stream, generator
from fl_lightning.store import ClientStore, Kept
from fl_lightning.trust import sign
from fl_lightning.writer import Writer


class FederatedOrchestrator:
    """Runs an experiment: sample clients, send, fit, collect, aggregate, evaluate, log, checkpoint, round by round.

    Args:
        scenario: The dataset and who holds what.
        model: Builds the backbone; its `in_shape` and `num_classes` come from the dataset.
        algorithm: The federated method.
        rounds: Communication rounds.
        clients_per_round: How many clients take part in a round, drawn anew each time; all by default.
        batch_size: Samples a training batch.
        seed: Everything random derives from it.
        optimizer: A torch optimizer; each client fit makes one.
        optimizer_state: A client's optimizer is `fresh` each round or `kept`: it then goes on with the state (momentum,
            step counts, ...) that it ended the client's last round with, at this round's learning rate; the algorithm's
            own by default, which is `fresh` but for presets that say otherwise.
        lr_scheduler: A torch scheduler within one client fit, stepped once an epoch.
        round_lr_scheduler: A torch scheduler over rounds, given an optimizer of learning rate 1; what it makes of
            that rate multiplies the clients' learning rates (`ExponentialLR` with `gamma: 0.95`, say).
        trainer: Keyword arguments of Lightning's `Trainer` for each client fit: `accelerator`, `precision`,
            `max_epochs` or `max_steps` (the local work, one epoch by default), `gradient_clip_val`, ...
        compile: Compile the network, once for all clients and rounds; worth it where a step is long.
        channels_last: Lay images and convolutions out with their channels side by side; GPUs want it in mixed
            precision.
        engine: How a round's client fits are carried out: `sequential`, one after another, `stacked`, `processes`,
            `ray`, `auto` for the fastest of the first three, or an engine with arguments of its own.
        evaluation: What is measured beside the global model.
        evaluate_every: Rounds between evaluations; the last round always has one.
        checkpoint_every: Rounds between checkpoints.
        keep_checkpoints: How many of the newest checkpoints to keep, beside the best.
        client_store: Where what clients keep between their rounds is held: in `memory`, or on `disk` alone.
        on_client_failure: When a client fails, `raise` ends the run, `drop` goes on without its upload.
        min_clients: With `drop`, the fewest uploads a round may be left with.
        logger: A Lightning logger beside `metrics.csv`, or a list of them; none with `false` or `null`. Those of this
            package (`WandbRoundLogger`, `CSVLogger`, `TensorBoardLogger`, `MLFlowLogger`) write to the run's folder.
        log_clients: Log every client's own series, in `clients.csv` and the logger; up to 1,000 clients by default.
        client_callbacks: Lightning's callbacks for each client fit, which gets copies of them: `LearningRateMonitor`,
            `EarlyStopping` on `train_loss`, your own. What they log joins the round's metrics, `client/<name>` being
            the mean over the round's clients.
        callbacks: What watches the rounds; progress, communication and checkpointing are added unless there is one of
            their class.
        run_dir: The folder the run leaves everything in; by default a new one, `runs/<algorithm>/<time>-<id>`, from the
            command line `runs/<config>/<time>-<id>`. It is made when the run begins.

    Attributes:
        clients: How many clients there are; known when the data are loaded, where `scenario.clients` does not say.
        round: The last finished round.
        state: The shared state after it.
        memory: What each client keeps, by its id, as it was when the round under way began.

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
        batch_size: int = 64,
        seed: int = 0,
        optimizer: OptimizerCallable = torch.optim.SGD,
        optimizer_state: OptimizerState | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        round_lr_scheduler: LRSchedulerCallable | None = None,
        trainer: dict[str, Any] | None = None,
        compile: bool = False,
        channels_last: bool = False,
        engine: Engine | EngineName = "sequential",
        evaluation: Evaluation = Evaluation(),
        evaluate_every: int = 1,
        checkpoint_every: int = 1,
        keep_checkpoints: int = 2,
        client_store: Literal["memory", "disk"] = "memory",
        on_client_failure: Literal["raise", "drop"] = "raise",
        min_clients: int = 1,
        logger: RoundLogger | Logger | list[RoundLogger | Logger] | Literal[False] | None = None,
        log_clients: bool | None = None,
        client_callbacks: list[Callback] | None = None,
        callbacks: list[RoundCallback] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        check_positive(rounds=rounds, batch_size=batch_size, evaluate_every=evaluate_every, min_clients=min_clients)
        if seed < 0:
            raise ConfigError(f"seed: {seed} is below 0")
        self.scenario, self.algorithm, self.rounds = scenario, algorithm, rounds
        self.seed, self._asked_per_round = seed, clients_per_round
        self.round_lr_scheduler, self.engine = round_lr_scheduler, engine_of(engine)
        self.evaluation, self.evaluate_every = evaluation, evaluate_every
        self.on_client_failure, self.min_clients = on_client_failure, min_clients
        if scenario.clients is not None:  # else the data say it
            self._count(scenario.clients)
        self.logger, self.log_clients, self.client_store = Loggers(logger), log_clients, client_store
        refuse_misplaced(callbacks or [], client_callbacks or [])
        self.callbacks = with_defaults(callbacks or [], checkpoint_every, keep_checkpoints)
        self._named_callbacks = by_name(self.callbacks)
        self.round = 0
        self.state: State = {}
        self.writer = Writer()
        self._lie_in(Path(run_dir) if run_dir else fresh(type(algorithm).__name__))
        self._worker_options: dict[str, Any] = {
            "model": model,
            "batch_size": batch_size,
            "trainer": trainer or {},
            "optimizer": optimizer,
            "optimizer_state": optimizer_state,
            "lr_scheduler": lr_scheduler,
            "compile": compile,
            "channels_last": channels_last,
            "metrics": evaluation.metrics,
            "client_callbacks": client_callbacks or [],
        }
        self._settings: dict[str, Any] = {}
        self._taken_up: Seal | None = None
        self._signals = DeferredSignals()
        self._tried = False

    def _lie_in(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints")
        self.csv = MetricsCsv(run_dir / "metrics.csv")
        self.warned = WarningsTxt(run_dir / "warnings.txt", lambda: self.round + 1)
        self.memory = ClientStore(run_dir, self.client_store, self.writer)

    def _count(self, clients: int) -> None:
        """Settle how many clients there are, and how many of them take part in a round."""
        per_round = clients if self._asked_per_round is None else self._asked_per_round
        if not 1 <= per_round <= clients:
            raise ConfigError(f"clients_per_round: {per_round} is not between 1 and scenario.clients, {clients}")
        if self.min_clients > per_round:
            raise ConfigError(f"min_clients: {self.min_clients} is above the {per_round} clients of a round")
        self.clients, self.clients_per_round = clients, per_round
        self.engine.fits = self.rounds * per_round

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
            fast: Only try it all out: one round of two clients with two batches each and some of the test data, last
                round's figures included, in a folder that is removed; no logger, no checkpoints. An orchestrator that
                was tried out is spent, so build another one for the run itself.

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
                if resume:
                    raise ConfigError("fast: a run is tried out from its start; leave out either this or resume")
                self._tried, config = True, None
                self._lie_in(Path(held.enter_context(TemporaryDirectory(prefix="fl-lightning-"))))
            held.enter_context(self.warned)
            if resume:
                held.enter_context(alone(self.run_dir))
                self.load(config=config)
            else:
                refuse_occupied(self.run_dir)
                self._build()
            self._notify("check")
            self.logger.check(self.run_dir)
            if fast:
                self._cut_down()
            made = missing(self.run_dir)
            if not resume:
                held.enter_context(alone(self.run_dir))
                refuse_occupied(self.run_dir)
            with undone_on_failure(made):
                self._begin(config, name, group)
            with self._running():
                if not self.algorithm.server and not self.round:
                    self._publish()
                while not self.is_over:
                    metrics = self._run_round(self.round + 1)
                    self._notify("on_round_metrics", metrics)
                    self._log(metrics)
                    self._end_round(metrics)
                return Run(self.run_dir, config or {}, self.csv.rows, self._finish())

    def _cut_down(self) -> None:
        """Make what was checked a round that tries everything in little time."""
        self.rounds, self._asked_per_round = 1, min(trial.CLIENTS, self.clients_per_round)
        self.min_clients, self.on_client_failure, self.logger = 1, "raise", Loggers(None)
        scored = min(self.evaluation.max_clients or trial.CLIENTS, trial.CLIENTS)
        self.evaluation = replace(self.evaluation, max_clients=scored)
        self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, Checkpointing)]
        options = self._worker_options
        options["trainer"] = trial.short(options["trainer"])
        self._build(trial.few(self.data, trial.enough(options["batch_size"], self.algorithm.validation)))

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done, or a callback has ended the run."""
        return self.round >= self.rounds or any(callback.stops for callback in self.callbacks)

    def _run_round(self, round: int) -> Row:
        started = time.monotonic()
        participants = self.participants(round)
        self._notify("on_round_start", participants)
        results: list[Result] = []
        self.state = self.algorithm.aggregate(self._visible, self._uploads(round, participants, results))
        self.memory.turn()
        self.round = round
        fitted = time.monotonic()
        metrics = {"round": round, **train_metrics(results), **self._evaluate(results)}
        metrics |= self._logged(results)
        failed = len(participants) - len(results)
        if self.on_client_failure == "drop":
            metrics["client/failed"] = failed
        return metrics | {"time/fit_s": fitted - started, "time/round_s": time.monotonic() - started}

    def participants(self, round: int) -> list[int]:
        """Ids of the clients that take part in a round, ascending; the same for every method with this seed.

        But for a method that decides how many take part, from the state as it is.
        """
        rng, clients = generator(self.seed, Stream.PARTICIPANTS, round), self.clients
        cohort = self.algorithm.cohort(self.state, self.clients_per_round, clients)
        return sorted(rng.choice(clients, cohort, replace=False).tolist())

    def _uploads(self, round: int, participants: Sequence[int], results: list[Result]) -> Iterator[Upload]:
        """Fit the participants; yield uploads in ascending client id, leave the rest of each result in `results`."""
        downloads = zip(participants, self.downloads(round, participants), strict=True)
        tasks = (self._task(round, client, download) for client, download in downloads)
        for result in in_client_order(self.engine.run(self.worker, tasks), participants):
            if self._signals.received:
                raise self._interrupted(self._signals.received)
            self.writer.check()
            self._notify("on_client_end", result)
            if result.upload is None:
                self._drop(result.failure)
                continue
            self.memory.put(result.client, round, result.memory)
            results.append(replace(result, upload=None, memory={}))
            yield Upload(result.client, result.upload)
        if len(results) < self.min_clients:
            left = f"{len(results)} of {len(participants)} clients were left"
            raise TooFewClients(f"round {round}: {left}, min_clients is {self.min_clients}")

    def _task(self, round: int, client: int, download: Message) -> Task:
        due, how = self._evaluation_due(round), self.evaluation
        return Task(
            round,
            client,
            download,
            self.memory.get(client, {}),
            self.lr_scales.of(round),
            evaluate=due and how.clients == "trained",
            evaluate_globally=due and how.personal_on_global,
        )

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
        """A client's module as it starts on the round under way, for callbacks that compare."""
        return self.worker.received(self._task(self.round + 1, client, self.download(self.round + 1, client)))

    def _drop(self, failure: ClientFailure | None) -> None:
        assert failure is not None
        if self.on_client_failure == "raise":
            raise failure
        warnings.warn(f"{failure}; dropped from this round", stacklevel=2)

    # --- Evaluation and logging ---

    def _evaluation_due(self, round: int) -> bool:
        return round % self.evaluate_every == 0 or round == self.rounds

    def _evaluate(self, results: Sequence[Result]) -> Row:
        if not self._evaluation_due(self.round):
            return {}
        scores = {r.client: r.local for r in results if r.local}
        if self.evaluation.clients == "received":
            scores = self._received_scores()
        personal = [r.on_global for r in results if r.on_global]
        metrics = self._global_metrics() | client_summary(list(scores.values())) | personal_means(personal)
        return metrics | own_series(scores) | {f"client_{r.client}/train_loss": r.losses["loss"] for r in results}

    def _global_metrics(self) -> Row:
        if not self.algorithm.one_model:
            return {}
        score = self.worker.score(self.state["model"])
        return {f"global/{name}": value for name, value in score.values.items()}

    def _received_scores(self) -> dict[int, Score]:
        """Score on each client's own test split the model it would start the next round from."""
        return self._scores(self.downloads(self.round + 1, self.scored))

    def _scores(self, downloads: Iterable[Message]) -> dict[int, Score]:
        results = self._untrained(self.scored, downloads, evaluate=True)
        return {result.client: result.local for result in results if result.local}

    def _untrained(self, clients: Sequence[int], downloads: Iterable[Message], **wanted: bool) -> Iterator[Result]:
        """What clients make of their downloads without training on them."""
        options = {"fit": False, "upload": False, **wanted}
        arriving = zip(clients, downloads, strict=False)  # where all are sent nothing, there is no end of that
        tasks = (Task(self.round, k, download, self.memory.get(k, {}), **options) for k, download in arriving)
        for result in in_client_order(scored(self.engine, self.worker, tasks), clients):
            if result.failure:
                raise result.failure
            yield result

    def _logged(self, results: Sequence[Result]) -> Row:
        metrics = logged_metrics(results)
        if taken := metrics.keys() & set(round_metrics(self) if metrics else ()):
            name = min(taken).partition("/")[2]
            raise ConfigError(f"client_callbacks: one logs {name!r}, which the run has a metric of; name it otherwise")
        return metrics

    def _log(self, metrics: Row) -> None:
        metrics = metrics if self.log_clients else split_series(metrics)[0]
        self.csv.append(metrics)
        self.logger.log_metrics({k: v for k, v in metrics.items() if k != "round"}, step=self.round)

    def _end_round(self, metrics: Row) -> None:
        self._notify("on_round_end", metrics)
        self.logger.end_round(self.csv.rows, self.evaluation.targets)

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
        refuse_strange(self.run_dir)
        saved = self.checkpoints.read(round) if round else self.checkpoints.newest(self._warn, self._refuse_other_rows)
        if saved is None:
            refuse_lost_checkpoints(self.run_dir)
            self._build()
            return
        saved.seal.refuse_another_config(config)
        self._build()
        saved.seal.refuse_other_data(self._data_digest)
        self.memory.load(saved.files)
        self._taken_up, self._settings = saved.seal, saved.seal.config
        self.round, self.state = saved.round, saved.state["state"]
        self.engine.load_state_dict(saved.state["engine"])
        for name, callback in self._named_callbacks.items():
            if name in saved.state["callbacks"]:
                callback.load_state_dict(saved.state["callbacks"][name])

    def _refuse_other_rows(self, saved: Checkpoint) -> None:
        self.csv.check(saved.round, saved.seal.rows)

    def test(self) -> Row:
        """Evaluate the loaded state: the global model, and each client's `client_module` on its own test split."""
        scores = self._received_scores() if self.algorithm.server else self._scores(repeat(Message()))
        metrics = {"round": self.round, **self._global_metrics(), **client_summary(list(scores.values()))}
        return metrics | own_series(scores)

    def client_module(self, client: int) -> ClientModule:
        """A client's module as it stands: what the server would send it or, without one, what it trained last.

        Raises:
            ConfigError: There is no such client.
        """
        if not 0 <= client < len(self.data.shards):
            raise ConfigError(f"client: there is no client {client}; the run has 0 to {len(self.data.shards) - 1}")
        held = self.download(self.round + 1, client) if self.algorithm.server else Message()
        return self.worker.personal(Task(self.round, client, held, self.memory.get(client, {})))

    def save_checkpoint(self, keep: Callable[[list[int]], set[int]] | None = None) -> None:
        """Have a checkpoint of the last finished round written while the run goes on; call it between rounds.

        Args:
            keep: Once it is on disk, which of the rounds that have a checkpoint keep it, of all of them, newest first.

        Raises:
            CheckpointError: The disk refused the one before.
        """
        self.writer.wait()
        callbacks = {name: copy.deepcopy(callback.state_dict()) for name, callback in self._named_callbacks.items()}
        saved = {"state": self.state, "callbacks": callbacks, "engine": self.engine.state_dict()}
        rows = self.csv.digests | {self.warned.path.name: self.warned.digest}
        seal = Seal(self._settings, self._data_digest, rows, made_with(self.worker.device))
        self.writer.submit(partial(self._write, self.round, saved, seal, self.memory.snapshot(), keep))

    def _write(
        self,
        round: int,
        saved: dict[str, Any],
        seal: Seal,
        kept: list[Kept],
        keep: Callable[[list[int]], set[int]] | None,
    ) -> None:
        self.checkpoints.write(round, saved, self.memory.write(kept), seal)
        if keep:
            self.checkpoints.prune(keep(self.checkpoints.rounds()))
            self.memory.prune(self.checkpoints.named())

    def _build(self, data: FederatedData | None = None) -> None:
        self.data = data or self.scenario.build(self.seed)
        self._count(len(self.data.shards))
        self._data_digest = self.data.digest()
        self.scored = self.evaluation.chosen(self.clients, self.seed)
        self.worker = Worker(self.seed, self.algorithm, data=self.data, **self._worker_options)
        self.worker.check()
        self.engine.check(self.worker)
        self.lr_scales = LRScales(self.round_lr_scheduler, self.rounds)
        backbone, classes, clients = self.worker.template.backbone, self.data.data.num_classes, self.clients
        self.algorithm.samples = [self.worker.samples(client) for client in range(clients)]
        with blame("algorithm"):
            self.state = self.algorithm.initial_state(backbone, classes, clients, generator(self.seed, Stream.RUN))

    def _publish(self) -> None:
        """Without a server: every client lays its untrained model out, for its peers to collect in round 1."""

        def uploads() -> Iterator[Upload]:
            for result in self._untrained(range(self.clients), repeat(Message()), upload=True):
                assert result.upload
                self.memory.put(result.client, 0, result.memory)
                yield Upload(result.client, result.upload)

        self.state = self.algorithm.aggregate(self._visible, uploads())
        self.memory.turn()

    def _begin(self, config: dict[str, Any] | None, name: str | None, group: str | None) -> None:
        """Write what a run's folder holds from the start; a folder is a run's own once it has a config."""
        self.log_clients = few_enough(self.clients) if self.log_clients is None else self.log_clients
        before, self._settings = self._taken_up, settings(config) if config else self._settings
        if before:
            before.tell_of_another_machine(made_with(self.worker.device))
            before.tell_of_edits(self.run_dir / "config.yaml", self._settings)
            self.warned.check(self.round, before.rows[self.warned.path.name])
        kinds = (self.algorithm, self.scenario.dataset, self.scenario.partition)
        labels = Labels(name, group, [type(kind).__name__ for kind in kinds])
        self.logger.begin(self.run_dir, config, labels, self.data.class_counts(), self.round)
        try:
            if not before:
                self.save_checkpoint()  # what the run was started from is on record from here on
                self.writer.wait()
            elif before.config != self._settings:
                self.checkpoints.reseal(self.round, replace(before, config=self._settings))
            if config:
                sign(self.run_dir, config)
                write_atomically(self.run_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))
            self.csv.rewind(self.round)
            self.warned.rewind(self.round)
            write_counts(self.run_dir / "partition.csv", self.data)
        except BaseException as error:
            self.logger.finalize("failed")
            if isinstance(error, OSError):
                raise ConfigError(f"run_dir: {self.run_dir} cannot be written to: {error}") from error
            raise

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Signals wait for a safe point; whatever ends the run, finished rounds are on disk and loggers closed."""
        status = "failed"
        self._signals = DeferredSignals()
        gc.collect()
        gc.freeze()  # what is here stays: a collection then looks only at what a client's fit has made
        try:
            with self._signals:
                self._notify("on_fit_start")
                yield
            status = "success"
        except BaseException as error:
            self.writer.wait()
            if len(self.csv.rows) == self.round and self.round not in {0, *self.checkpoints.rounds()}:
                self.save_checkpoint()
                self.writer.wait()
            if isinstance(error, SystemExit) and self._signals.received:  # Lightning's answer to a SIGTERM in a fit
                raise self._interrupted(self._signals.received) from error
            raise
        finally:
            gc.unfreeze()
            self.writer.close()
            self.engine.close()
            self._notify("on_fit_end")
            self.logger.finalize(status)

    def _finish(self) -> Figures:
        self.writer.wait()
        summary = summarize(self.csv.rows, self.evaluation.targets)
        if self.algorithm.one_model:
            torch.save(self.worker.shared_module(self.state["model"]).backbone.state_dict(), io := BytesIO())
            write_atomically(self.run_dir / "final" / "model.pt", io.getvalue())
        write_atomically(self.run_dir / "final" / "summary.json", json.dumps(summary, indent=1) + "\n")
        self.logger.log_files()
        return summary

    def _interrupted(self, signum: int) -> Interrupted:
        done = f"stopped by {Signals(signum).name} after round {self.round} of {self.rounds}"
        rest = "nothing is left" if self._tried else f"go on with: fl-lightning fit --resume {self.run_dir}"
        return Interrupted(signum, f"{done}; {rest}")

    @staticmethod
    def _warn(message: str) -> None:
        warnings.warn(message, stacklevel=2)

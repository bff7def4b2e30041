"""The round loop of a federated experiment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.loggers import Logger

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.client_sampling import ClientSampler
from fl_lightning.attacks import Adversary
from fl_lightning.callbacks import Checkpointing, RoundCallback
from fl_lightning.callbacks.defaults import keep_initial_states, refuse_misplaced, reset, restore, states, with_defaults
from fl_lightning.callbacks.monitor import logged_by_clients
from fl_lightning.callbacks.progress import describe_end, describe_progress
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.compression import Compressor
from fl_lightning.core.arguments import ArgumentsMixin, describe
from fl_lightning.core.errors import ConfigError, check_instance
from fl_lightning.core.processor_time import processor_seconds
from fl_lightning.core.round_progress import report_client, report_waiting
from fl_lightning.data import Scenario
from fl_lightning.engines import Engine, EngineName, Result, Tasks, Worker
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.experiment import Experiment
from fl_lightning.engines.trainer import limited_garbage_collection
from fl_lightning.evaluation.evaluation import Evaluation, train_metrics
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.loggers.base import Labels, RoundLogger
from fl_lightning.loggers.collection import MAX_LOGGED_CLIENTS, Loggers
from fl_lightning.loggers.naming import run_names, setting_of
from fl_lightning.models import Mixed, ModelFactory, NetworkFactory
from fl_lightning.runs import dry_run
from fl_lightning.runs.checkpoint import Checkpoint
from fl_lightning.runs.failed_clients import accept_result, require_uploads, warn_of_dropped_uploads
from fl_lightning.runs.folder import new_run_dir
from fl_lightning.runs.reader import Figures, Run, read_config
from fl_lightning.runs.record import Keep, Record
from fl_lightning.runs.signals import RunSignals
from fl_lightning.scheduling import Clock, RoundPolicy


class FederatedOrchestrator(Experiment, ArgumentsMixin):
    """Run a federated experiment: build the data and the clients, run the rounds, and write everything to a run folder.

    Each round samples clients, sends them messages, trains them, aggregates their uploads, evaluates and logs the
    result, and writes a checkpoint.

    Args:
        scenario: Dataset, partition and local train/test split: which client holds which samples.
        model: Builds the backbone. Its `in_shape` and `num_classes` come from the dataset. `Mixed` gives clients
            different networks.
        algorithm: The federated method.
        rounds: Number of communication rounds.
        clients_per_round: Number of clients that take part in a round, sampled anew each round. All by default.
        client_sampler: How the participants of a round are sampled; `UniformSampling` by default.
        training: How each client trains: optimizer, batch size, local epochs, precision, ...
        seed: Seed of all randomness: partition, initial weights, participants, batch order, dropout.
        round_lr_scheduler: A torch scheduler that is stepped once a round, on an optimizer with learning rate 1. The
            clients' learning rates are multiplied by its rate, as with `ExponentialLR` and `gamma: 0.95`.
        engine: How the clients of a round are trained: `sequential` (one after another), `stacked` (vectorised),
            `processes` (in parallel), `ray`, `auto` (the fastest of the first three), or an engine with its options.
            Results are the same except for rounding.
        evaluation: What is evaluated besides the global model, and how often.
        client_store: Where the clients' state is kept between rounds: in `memory`, or only on `disk`.
        on_client_failure: What happens if a client fails: `raise` ends the run, `drop` continues without its upload.
        min_clients: Smallest number of uploads that a round may be left with if failed clients are dropped. With 0, a
            round may be empty, and changes nothing then.
        logger: A Lightning logger, or a list of them, in addition to `metrics.csv`. `false` or `null` for none. The
            loggers of this package (`WandbRoundLogger`, `CSVLogger`, `TensorBoardLogger`, `MLFlowLogger`) write to the
            run folder.
        log_clients: Log the metrics of every client to `clients.csv` and the loggers. By default, only if there are at
            most 1,000 clients.
        callbacks: Round callbacks. `RoundProgress`, `CommunicationMeter` and `Checkpointing` are added if missing.
        run_dir: The run folder, created when the run begins. By default `runs/<algorithm>/<time>-<id>`, or
            `runs/<config>/<time>-<id>` from the command line.
        clock: Simulates how long clients take. The simulated time of a round is the metric `time/simulated_s`.
        round_policy: Which uploads a round waits for on the simulated clock: all (`Synchronous`, the default), those
            before a `Deadline`, or the next ones (`Buffered`: asynchronous rounds).
        adversary: Which clients attack, and how. None by default.
        compression: Compresses the clients' updates, such as `TopK`. By default, whole models are uploaded.
        download_compression: Compresses the weights that clients receive: `Float16` or `QSGD`.
        max_logged_clients: Loggers get the metrics of each client if there are at most this many clients. With more,
            they get the distribution of each metric over the clients. `clients.csv` has all of them.

    Attributes:
        is_dry_run: Whether `fit` makes a dry run.
        clients: Number of clients, without those held out of the training. If `scenario.clients` does not give it, it
            is known once the data are loaded.
        round: Number of finished rounds.
        server: Makes downloads and aggregates uploads; `server.state` is the shared state after the last round.
        evaluator: Evaluates the global model and the clients.
        memory: Each client's state by its id, as of the end of the last finished round.
        csv: The metrics; `csv.rows` holds those of all finished rounds.
        record: Writes the run folder and calls the loggers.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        scenario: Scenario,
        model: ModelFactory | NetworkFactory | Mixed,
        algorithm: Algorithm,
        rounds: int = 10,
        clients_per_round: int | None = None,
        client_sampler: ClientSampler | None = None,
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
        clock: Clock | None = None,
        round_policy: RoundPolicy | None = None,
        adversary: Adversary | None = None,
        compression: Compressor | None = None,
        download_compression: Compressor | None = None,
        max_logged_clients: int = MAX_LOGGED_CLIENTS,
    ) -> None:
        check_instance("training", training, LocalTraining, "Give LocalTraining(batch_size=64)")
        refuse_misplaced(callbacks or [], training.client_callbacks or [])
        super().__init__(
            scenario,
            model,
            algorithm,
            rounds=rounds,
            clients_per_round=clients_per_round,
            client_sampler=client_sampler,
            clock=clock,
            round_policy=round_policy,
            training=training,
            seed=seed,
            round_lr_scheduler=round_lr_scheduler,
            engine=engine,
            evaluation=evaluation,
            min_clients=min_clients,
            adversary=adversary,
            compression=compression,
            download_compression=download_compression,
        )
        self.on_client_failure = on_client_failure
        self.callbacks = with_defaults(callbacks or [], private=training.dp_sgd is not None)
        keep_initial_states(self.callbacks)
        self.logger = Loggers(logger, max_logged_clients)
        self._log_clients, self._client_store = log_clients, client_store
        self._set_run_dir(Path(run_dir) if run_dir else new_run_dir(type(algorithm).__name__))
        self._signals = RunSignals(lambda: describe_progress(self, self.record.has_config))
        self.engine.check_interrupt = self._while_waiting
        self.is_dry_run = False

    def _set_run_dir(self, run_dir: Path) -> None:
        self.record = Record(self, run_dir, self._client_store, self.logger, self._log_clients)
        self.run_dir, self.checkpoints = run_dir, self.record.checkpoints
        self.csv, self.memory = self.record.csv, self.record.memory

    def fit(
        self,
        resume: bool = False,
        config: dict[str, Any] | None = None,
        name: str | None = None,
        group: str | None = None,
        fast: bool = False,
    ) -> Run:
        """Run the experiment, or resume it from its last checkpoint.

        Args:
            resume: Resume the run in `run_dir`.
            config: The resolved config. It is written to `config.yaml`, passed to the loggers and compared on resume.
                By default, the file and the loggers get the class and the arguments of each of this run's objects.
            name: Name of the run in the loggers. By default the name of the method and the seed.
            group: Name of the group in the loggers, which runs that differ only in the seed share. By default the name
                of the method and a digest of the settings.
            fast: Make a dry run in a temporary folder, without loggers: two rounds of two clients with two batches
                each, and a resume in between. Build a new orchestrator for the real run.

        Returns:
            The run, with its `summary`, `history` and `run_dir`.

        Raises:
            ConfigError: An option does not fit the others, another process uses the run folder, or the config or the
                data changed since the run began.
            CheckpointError: No valid checkpoint was found to resume from.
            ClientFailure: A client failed and `on_client_failure` is `raise`.
            Interrupted: SIGINT or SIGTERM arrived. A checkpoint of the last finished round is on disk.
        """
        if self.is_dry_run:
            raise ConfigError("fast: this orchestrator has made a dry run. Build a new one for the real run.")
        with ExitStack() as contexts:
            if fast:
                self._set_run_dir(contexts.enter_context(dry_run.temporary_run_dir(resume)))
                self.is_dry_run, config = True, None
            contexts.enter_context(self.record.open(resume))
            if resume:
                self.load(config=config)
                self._check()
            else:
                reset(self.callbacks)
                self.check()
            if fast:
                self._reduce_to_dry_run()
            self._begin(config, name, group)
            with self.record.close_at_end(self._release), limited_garbage_collection(), self._signals:
                self._notify("on_fit_start")
                self._run_rounds()
                finals = self._finish()
                return Run(self.run_dir, config or read_config(self.run_dir), self.csv.rows, finals, fast)

    def check(self) -> None:
        """Load the data, and make all checks that precede the first round. `fit` does this, too.

        Raises:
            ConfigError: An option does not fit the data or the other options.
        """
        self._build()
        self._check()

    def _check(self) -> None:
        self._notify("check")
        self.logger.check(self.run_dir)

    def _run_rounds(self) -> None:
        """Run the rounds until the last one is done or a callback stops the run."""
        if not self.algorithm.server and not self.round:  # peers start from each other's untrained models
            self._publish_initial_models()
        while not self.is_over:
            metrics = self._run_round(self.round + 1)
            self._notify("on_round_metrics", metrics)
            self.record.log(metrics)
            self._notify("on_round_end", metrics)
            if self.is_over:
                self.record.log_images()
            self.logger.end_round(self.csv.rows, self.evaluation.target_accuracies)
            if self.is_dry_run and not self.is_over:  # resume, as a killed run would
                self.record.ensure_checkpoint()
                self._restore(self.checkpoints.read(self.round))

    def _publish_initial_models(self) -> None:
        """Let all clients publish their untrained models, which their peers start from. Failed clients publish none."""
        published = 0

        def done(result: Result) -> None:
            nonlocal published
            if accept_result(result, self.on_client_failure, self.data):
                self.server.add(result)
                published += 1

        self.server.begin_round(0)
        self.evaluator.initial_uploads(range(self.clients), done)
        require_uploads(0, published, self.clients, max(1, self.min_clients))
        self.server.end_round()

    def _run_round(self, round: int) -> RoundMetrics:
        started, processor_started = time.monotonic(), processor_seconds()
        participants = self.server.participants(round)
        self._notify("on_round_start", participants)
        self.server.begin_round(round)
        results = self._fit_clients(round, participants)
        reported = {name if "/" in name else f"server/{name}": value for name, value in self.server.end_round().items()}
        self.round = round
        fitted = time.monotonic()
        honest = [result for result in results if result.client not in self.adversary.attackers]
        metrics = RoundMetrics({"round": round, **train_metrics(honest), **reported})
        metrics |= self.evaluator.after_round(round, honest)
        metrics |= logged_by_clients(self, honest)
        metrics |= self.server.attack_metrics([result.client for result in results])
        if self.on_client_failure == "drop":
            metrics["client/failed"] = len(participants) - len(results)
        seconds, processor = time.monotonic() - started, processor_seconds() - processor_started
        metrics |= {"time/fit_s": fitted - started, "time/round_s": seconds, "time/processor_s": processor}
        metrics |= self.server.plan.metrics
        return metrics

    def _fit_clients(self, round: int, participants: Sequence[int]) -> list[Result]:
        """Train the participants of a round, and give the server their uploads by ascending client id.

        The results of the clients that succeeded are returned without upload and client state.
        """
        messages = self.server.downloads(round, participants, self.server.plan.versions)
        downloads = zip(participants, messages, strict=True)
        averages = self.algorithm.only_averages and all(callback.keeps_no_uploads for callback in self.callbacks)
        keep = self.server.holds_uploads or not averages
        options = self.evaluator.scores_wanted(round) | {"keep_upload": keep}
        tasks = (self.server.task(round, client, download, **options) for client, download in downloads)
        results: list[Result] = []

        def done(result: Result) -> None:
            self._signals.check()
            self.record.writer.check()
            self._notify("on_client_end", result)
            if accept_result(result, self.on_client_failure, self.data):
                results.append(replace(result, upload=None, memory={}))
                self.server.add(result)

        if participants:
            self.engine.run(self.worker, Tasks(participants, tasks), ClientOrder(participants, done, report_client))
        self.server.add_held_uploads()
        warn_of_dropped_uploads(round, self.server.dropped, self.data)
        uploads = len(results) - len(self.server.dropped)
        require_uploads(round, uploads, len(participants), self.min_clients)
        return results

    def _while_waiting(self) -> None:
        report_waiting()
        self._signals.check()

    def _notify(self, moment: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self, *args)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done or a callback has stopped the run."""
        return self.round >= self.rounds or any(callback.stops for callback in self.callbacks)

    @property
    def ending(self) -> str:
        """Message that says why the run is over: all rounds are done, or which callback stopped it and why."""
        return describe_end(self, self.record.first_round)

    def load(self, round: int | None = None, config: dict[str, Any] | None = None) -> None:
        """Build the experiment, and restore a checkpoint or, if the run has none, start at round 0.

        Args:
            round: The checkpoint's round; by default the newest valid one.
            config: The resolved config, which must agree with that of the run.

        Raises:
            CheckpointError: The checkpoint is missing or damaged, does not fit the metrics, or no checkpoint is valid.
            ConfigError: The config or the data changed since the run began.
        """
        saved = self.record.find_checkpoint(round, config)
        self._build()
        if saved:
            self._restore(saved)

    def _restore(self, saved: Checkpoint) -> None:
        saved.require_sections(self.server.state)
        self.record.restore(saved)
        self.round, self.server.state = saved.round, saved.state["state"]
        earlier = saved.state.get("earlier_states", {})
        self.server.earlier_states = {int(version): state for version, state in earlier.items()}
        self.engine.load_state_dict(saved.state["engine"])
        restore(self.callbacks, saved.state["callbacks"])

    def save_checkpoint(self, keep: Keep | None = None) -> None:
        """Write a checkpoint of the last finished round in the background. Call it between rounds.

        Args:
            keep: Is given the rounds that have a checkpoint, newest first, and returns those to keep. By default all.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        self.record.checkpoint(keep)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the content of a checkpoint: the states of the server, the callbacks and the engine.

        The server's state contains, for example, the global model. With stale uploads, the states that clients at work
        have received are needed, too.
        """
        found = {"state": self.state, "callbacks": states(self.callbacks), "engine": self.engine.state_dict()}
        earlier = {str(version): state for version, state in self.server.earlier_states.items()}
        return found | ({"earlier_states": earlier} if earlier else {})

    def _set_up(self, worker: Worker) -> None:
        super()._set_up(worker)
        clients = range(len(self.data.shards) + len(self.data.held_out))
        architectures = [name for client in clients if (name := worker.architecture_of(client))]
        fixed = " ".join(filter(None, (each.fixed_digest for each in worker.groups)))
        self.record.set_inputs(self.data, worker.device, fixed, architectures)

    def _reduce_to_dry_run(self) -> None:
        """Limit the built and checked experiment to a dry run: few rounds, clients, samples and training steps."""
        self.rounds, self.clients_per_round = dry_run.ROUNDS, min(dry_run.CLIENTS, self.clients_per_round)
        self.min_clients, self.on_client_failure = min(1, self.min_clients), "raise"
        self.logger.mute()
        self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, Checkpointing)]
        self.evaluation = dry_run.reduce_evaluation(self.evaluation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the complete experiment have been shown
            self._set_up(dry_run.reduce_worker(self.worker))
            self.engine.data_source = None  # the few samples are sent
        self.evaluator.warned = {"client", "new_client"}  # two rounds of two clients say nothing about the real run

    def _begin(self, config: dict[str, Any] | None, name: str | None, group: str | None) -> None:
        kinds = [type(kind).__name__ for kind in (self.algorithm, self.scenario.dataset, self.scenario.partition)]
        described = config or ({} if self.is_dry_run else self._description())
        setting = setting_of(described)
        default_name, default_group = run_names(kinds[0], self.seed, setting, setting)
        self.record.begin(config, Labels(name or default_name, group or default_group, kinds), described)

    def _description(self) -> dict[str, Any]:
        """Return the arguments of this orchestrator as a config, without `run_dir` and `logger`."""
        arguments = describe(self)["init_args"]
        arguments |= arguments.pop("training")
        return {key: value for key, value in arguments.items() if key not in ("run_dir", "logger")}

    def _release(self) -> None:
        self.engine.close()
        self._notify("on_fit_end")

    def _finish(self) -> Figures:
        one = self.evaluator.global_module(self.round).backbone.cpu() if self.algorithm.one_model else None
        fixed = self.worker.fixed
        model = {name: value for name, value in one.state_dict().items() if name not in fixed} if one else None
        finals = self.record.finish(self.evaluation.target_accuracies, model)
        if self.data.is_remote:
            self.evaluator.deliver_models(self.round)
        return finals

"""Build a federated experiment from its options: data, worker, server and evaluator. Rounds are run elsewhere."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch.cli import LRSchedulerCallable

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.client_sampling import ClientSampler, UniformSampling
from fl_lightning.algorithms.protocols import RunPlan, StartsRun
from fl_lightning.algorithms.server import ClientStates, Server, participants_per_round
from fl_lightning.attacks import Adversary
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LRScales
from fl_lightning.client.weights import buffer_names
from fl_lightning.compression import Compressor
from fl_lightning.core.errors import ConfigError, blame, check_instance, check_number, check_positive
from fl_lightning.core.fixed_tensors import copy_shared_tensors
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import State
from fl_lightning.core.task import Task
from fl_lightning.data import FederatedData, Scenario
from fl_lightning.engines import Engine, EngineName, Worker, engine_of
from fl_lightning.engines.compression_checks import check_compression
from fl_lightning.engines.data_source import DataSource
from fl_lightning.engines.evaluator import Evaluator
from fl_lightning.engines.exchange import check_exchange
from fl_lightning.engines.private_noise import with_noise
from fl_lightning.engines.schedule_checks import check_rounds_of_schedule
from fl_lightning.engines.simulated_time import check_round_policy, planned_work
from fl_lightning.engines.worker_checks import check_worker
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.models import Mixed, ModelFactory, NetworkFactory
from fl_lightning.scheduling import Clock, RoundPolicy, Schedule, Synchronous


class Experiment:
    """The parts of a federated experiment: data, server, evaluator, the object that trains clients, their states.

    `FederatedOrchestrator` derives from it and runs the rounds. It explains the arguments.

    Attributes:
        memory: Each client's state by its id. Subclasses set it before the experiment is built.
    """

    memory: ClientStates

    def __init__(
        self,
        scenario: Scenario,
        model: ModelFactory | NetworkFactory | Mixed,
        algorithm: Algorithm,
        *,
        rounds: int,
        clients_per_round: int | None,
        client_sampler: ClientSampler | None,
        clock: Clock | None,
        round_policy: RoundPolicy | None,
        training: LocalTraining,
        seed: int,
        round_lr_scheduler: LRSchedulerCallable | None,
        engine: Engine | EngineName,
        evaluation: Evaluation,
        min_clients: int,
        adversary: Adversary | None,
        compression: Compressor | None,
        download_compression: Compressor | None,
    ) -> None:
        fix = "Give Scenario(dataset, partition). For one dataset per client, join them and use the partition ByClient"
        check_instance("scenario", scenario, Scenario, fix)
        check_instance("algorithm", algorithm, Algorithm, "Give a method, such as FedAvg()")
        check_instance("evaluation", evaluation, Evaluation, "Give Evaluation(client_model='received')")
        check_positive(rounds=rounds)
        check_number("min_clients", min_clients, "[0, inf)")
        check_number("seed", seed, "[0, inf)")
        self.scenario, self.algorithm, self.rounds, self.seed = scenario, algorithm, rounds, seed
        self.training, self.evaluation, self.engine = training, evaluation, engine_of(engine)
        self._model, self._wanted_per_round, self.round_lr_scheduler = model, clients_per_round, round_lr_scheduler
        self.client_sampler, self.min_clients = client_sampler or UniformSampling(), min_clients
        self.clock, self.round_policy = clock, round_policy
        self.adversary = adversary or Adversary(clients=0)
        self.compression, self.download_compression = compression, download_compression
        self.round = 0
        if scenario.clients is not None:  # otherwise the number comes from the data
            self._set_clients(scenario.training_clients(scenario.clients))

    def _set_clients(self, clients: int) -> None:
        self.clients = clients
        self.clients_per_round = participants_per_round(self._wanted_per_round, clients, self.min_clients)

    def _build(self) -> None:
        data = self._load_data()
        metrics, positive_class = self.evaluation.metrics, self.evaluation.positive_class
        common = (self.seed, self.algorithm, self._model, data, self.training, metrics, positive_class)
        up, down = self.compression, self.download_compression
        self._set_up(Worker(*common, compression=up, download_compression=down))

    def _load_data(self, test_set: bool = False) -> FederatedData:
        """Load the data, split them among the clients, choose the attackers, and let them change their samples.

        `test_set` is that of `Scenario.build`.
        """
        data = self.scenario.build(self.seed, test_set=True) if test_set else self.scenario.build(self.seed)
        self.engine.data_source = DataSource(self.scenario, self.seed, test_set)
        self._set_clients(len(data.shards))
        self.adversary.start(self.clients, self.seed)
        if data.is_remote and self.adversary.attackers:
            raise ConfigError("adversary: attacks are simulated, but clients train on their own machines. Remove it.")
        data = self.adversary.poison(data)
        if self.adversary.attackers:
            data = replace(data, wanted_predictions=self.adversary.wanted_predictions(data.data))
        return data

    def _set_up(self, worker: Worker) -> None:
        """Check the `Worker` (model, data, options), and build the server and the evaluator. Nothing is trained yet."""
        self.worker, self.data, self.engine.fits = worker, worker.data, self.rounds * self.clients_per_round
        with blame("model"):
            fixed, buffers = frozenset(worker.fixed), frozenset(buffer_names(worker.template.backbone))
        self.algorithm.start([len(shard.train) for shard in self.data.shards], fixed, buffers)
        scaled = self.round_lr_scheduler is not None
        check_rounds_of_schedule(self.training, self.rounds, scaled)
        check_worker(worker, scaled)
        self.worker = worker = with_noise(worker, self.rounds)
        check_exchange(worker)
        for each in worker.groups if self.round_lr_scheduler else ():
            each.template.require_optimizer("round_lr_scheduler")
        self.engine.check(worker)
        scales = LRScales(self.round_lr_scheduler, self.rounds)
        sampler, per_round = self.client_sampler, self.clients_per_round
        sampler.start(self.algorithm, self.seed, self.min_clients)
        plan = RunPlan(self.algorithm, sampler, per_round, self.rounds, self.seed, self.data.is_remote)
        for aggregator in self.algorithm.aggregator.chain():
            if isinstance(aggregator, StartsRun):
                aggregator.start_run(plan)
        common = (self.algorithm, self.clients, per_round, sampler, self.seed, self.memory, scales)
        self.server = Server(*common, self.adversary, worker.codec)
        self.server.start(worker.template.backbone, self.data.data.num_classes)
        self.engine.try_upload = self.server.try_upload
        check_compression(worker, self.server)
        if self.clock or self.round_policy:
            self.server.schedule = self._build_schedule()
        self.evaluator = Evaluator(self.evaluation, self.rounds, self.engine, worker, self.server)

    def _build_schedule(self) -> Schedule:
        """Return the schedule of the rounds on the simulated clock.

        Raises:
            ConfigError: There is no clock, the method has no server, or the method, its aggregator or the sampler does
                not fit the round policy.
        """
        policy, clock = self.round_policy or Synchronous(), self.clock
        if clock is None:
            name = type(policy).__name__
            fix = "Set clock, for example to DeviceClock. For real seconds, set engine.timeout instead"
            raise ConfigError(f"round_policy: {name} needs simulated times. {fix}.")
        if self.data.is_remote:
            raise ConfigError("clock: it simulates times, but the clients are machines of their own. Leave it out.")
        if not self.algorithm.server:
            what = f"the messages between the peers of {type(self.algorithm).__name__} have no simulated time"
            raise ConfigError(f"clock: {what}. Leave it out.")
        clock.start(self.seed, self.clients)
        check_round_policy(policy, clock, self.worker, self.client_sampler)
        work = list(planned_work(self.worker, self.server))
        return Schedule(policy, clock, self.client_sampler.sample, work, self.seed, self.min_clients)

    def worker_of(self, data: FederatedData) -> Worker:
        """Return the `Worker` (model, data, options) that trains and evaluates a client on the client's own machine.

        Args:
            data: The client's data. The scenario's dataset is a `RemoteClients`.

        Raises:
            ConfigError: An option of the experiment does not fit.
        """
        self._build()
        return replace(self.worker, data=data, own_machine=True)

    def use_test_set(self) -> None:
        """Evaluate on the test samples from now on, even if `scenario.validation_share` is set.

        With that option, evaluation uses held-out training samples until this method is called.

        The clients' training samples, the round and the shared state stay the same.
        """
        state, data = self.state, self._load_data(test_set=True)
        self._set_up(replace(self.worker, data=data))
        self.server.state = state

    @property
    def state(self) -> State:
        """The shared state on the server, such as the global weights, after the last finished round."""
        return self.server.state

    def starting_module(self, client: int) -> ClientModule:
        """Return a client's module, on the CPU, as it starts to train in the next round."""
        round = self.round + 1
        task = self.server.task(round, client, self.server.download(round, client), upload=False)
        return self.worker.for_client(client).modules.receive(task).cpu()

    def client_module(self, client: int) -> ClientModule:
        """Return a client's module as it is after the last finished round, in train mode.

        With a server it has the weights that the server would send next, otherwise those that the client trained last.
        Use it in a `Trainer.fit` of your own, or call `eval()` before you predict.

        Raises:
            ConfigError: No client has this id.
        """
        if not 0 <= client < self.clients:
            raise ConfigError(f"client: client {client} not found. Clients are 0 to {self.clients - 1}.")
        download = self.server.download(self.round + 1, client) if self.algorithm.server else Message()
        scale = self.server.lr_scales.of(self.round)
        task = Task(self.round, client, download, self.memory.get(client, {}), scale)
        module = self.worker.for_client(client).modules.personalize(task).train()
        copy_shared_tensors(module)
        return module

    def test(self) -> RoundMetrics:
        """Evaluate the global model, and each client's `client_module` on its own test split."""
        return self.evaluator.test(self.round)

"""The server's side of a run: sampling of participants, downloads, tasks and aggregation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import nn

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.client_sampling import ClientSampler
from fl_lightning.algorithms.protocols import SizesCohort
from fl_lightning.attacks.base import Adversary, fault_of, no_weights
from fl_lightning.client.optimizers import LRScales
from fl_lightning.compression.codec import Codec
from fl_lightning.core.errors import ConfigError, blame
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.seeding import Stream, derive, generator
from fl_lightning.core.state_dicts import State, VisibleState, parameter_names
from fl_lightning.core.task import Result, Task
from fl_lightning.scheduling import RoundPlan, Schedule


class ClientStates(Protocol):
    """Interface of the store that holds each client's state from one round to the next."""

    def get(self, client: int, default: State, /) -> State:
        """Return the state that a client has kept from its last round, or the default if it has none."""

    def put(self, client: int, round: int, memory: State) -> None:
        """Store the state that a client keeps after a round. It can be read after `end_round`."""

    def end_round(self) -> None:
        """Make the client states that were stored during the round available to `get`."""


class Server:
    """The server: samples participants, builds downloads, and turns uploads into the next shared state.

    For decentralised methods it stands for the exchange between peers: downloads are made from what peers have
    published.

    Args:
        algorithm: The federated method.
        clients: Number of clients.
        clients_per_round: Number of clients that take part in a round, unless the algorithm chooses another.
        sampler: Chooses the participants of a round.
        seed: Seed of the run.
        memory: The clients' states. They are kept here, but only the client itself and, for `Algorithm.public`, its
            peers read them.
        lr_scales: The factor on the clients' learning rates in each round.
        adversary: Which clients attack, and what they send. It has been started.
        codec: Compresses downloads and restores uploads. By default, messages are not compressed.

    Attributes:
        state: The shared state after the last finished round.
        schedule: When uploads arrive on a simulated clock; None without a clock.
        plan: The round in progress on this clock; empty without a clock.
        earlier_states: The shared states of earlier rounds that clients at work have received, by number of the round.
        dropped: Why crafted uploads of the current round were not aggregated, by client id.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: int,
        clients_per_round: int,
        sampler: ClientSampler,
        seed: int,
        memory: ClientStates,
        lr_scales: LRScales,
        adversary: Adversary,
        codec: Codec | None = None,
    ) -> None:
        self.algorithm, self.clients, self.clients_per_round = algorithm, clients, clients_per_round
        self.sampler, self.seed, self.memory, self.lr_scales = sampler, seed, memory, lr_scales
        self.adversary, self.dropped = adversary, dict[int, str]()
        self.codec = codec or Codec()
        self.state: State = {}
        self.schedule: Schedule | None = None
        self.earlier_states: dict[int, State] = {}
        self.plan = RoundPlan([], {})
        self._sent: dict[int, Tensors] = {}
        self._held: list[Upload] = []

    def start(self, backbone: nn.Module, num_classes: int) -> None:
        """Set the shared state before round 1, from the initial backbone.

        Raises:
            ConfigError: The algorithm cannot start with this backbone or these clients.
        """
        with blame("algorithm"):
            rng = generator(self.seed, Stream.RUN)
            self.state = self.algorithm.initial_state(backbone, num_classes, self.clients, rng)
            if self.algorithm.server:
                self.algorithm.aggregator.require_uploads(self.clients_per_round)
        if self.holds_uploads:
            self._check_adversary(backbone)

    @property
    def holds_uploads(self) -> bool:
        """Whether a round's uploads are held until all have arrived, because attackers replace theirs."""
        return self.adversary.changes_updates and bool(self.adversary.attackers)

    def _check_adversary(self, backbone: nn.Module) -> None:
        """Check that attackers can replace what the server aggregates: weights that clients receive and upload.

        Raises:
            ConfigError: They cannot.
        """
        method, client = self.algorithm, min(self.adversary.attackers)
        if method.public is not None:
            what = f"{type(self.adversary).__name__} replaces what a server aggregates"
            why = f"with {type(method).__name__}, clients' models are used directly"
            raise ConfigError(f"adversary: {what}, but {why}. Use LabelFlip or Backdoor, or another method.")
        received = parameter_names(next(self.dense_downloads(1, [client])).section("model"))
        if not (method.uploads_weights and {*received} & {*method.shared_names(backbone)}):
            raise ConfigError(no_weights(self.adversary, client))

    @property
    def visible_state(self) -> State:
        """The server's state, as a dict that also gives access to the tensors that clients make public.

        Downloads are built from it. `Algorithm.public` names these tensors, if any.
        """
        return self._visible(self.state, {})

    def _visible(self, state: State, new_client: State) -> State:
        """Return a server state as a dict that also gives access to the tensors that clients make public.

        `Algorithm.public` names these tensors. Without it, the state is returned as it is.

        Args:
            state: The shared state.
            new_client: The state of a client that was added after the training's clients; empty if none was added.
        """
        public = self.algorithm.public
        if public is None:
            return state

        def peer(client: int) -> Tensors:
            memory = self.memory.get(client, {}) if client < self.clients else new_client
            return memory[public]

        return VisibleState(state, peer)

    def participants(self, round: int) -> list[int]:
        """Sample the clients that take part in a round, and return their ids in ascending order.

        All methods with the same seed see the same clients, except methods that choose the number of clients from
        their state.
        """
        method, cohort = self.algorithm, self.clients_per_round
        if isinstance(method, SizesCohort):
            cohort = method.cohort(self.state, cohort, self.clients)
        if not self.schedule:
            return self.sampler.sample(round, cohort)
        self.plan = self.schedule.plan(round, cohort)
        return list(self.plan.versions)

    def download(self, round: int, client: int) -> Message:
        """Return the message that a client receives at the start of a round, from the current state.

        In the round in progress on a simulated clock, it may be from an earlier state, which the client has received.
        """
        versions = self.plan.versions if self.schedule and self.schedule.round == round else {}
        return next(self.downloads(round, [client], versions))

    def downloads(self, round: int, clients: Sequence[int], versions: Mapping[int, int] = {}) -> Iterator[Message]:
        """Yield the message that each client in turn receives. A message is built only when it is requested.

        Args:
            round: The round.
            clients: The clients' ids.
            versions: The round whose state a client receives, by client id, if it is not the last finished round.
        """
        return (self.codec.compress_download(each, round) for each in self.dense_downloads(round, clients, versions))

    def dense_downloads(
        self, round: int, clients: Sequence[int], versions: Mapping[int, int] = {}
    ) -> Iterator[Message]:
        """Yield the message to each client in turn before its compression. The arguments are those of `downloads`."""
        draws = type(self.algorithm).download is not Algorithm.download  # the base method draws nothing
        unused = generator(self.seed, Stream.DOWNLOAD, round)
        for client, state in zip(clients, self.algorithm.aggregator.ahead(self.visible_state, clients), strict=True):
            rng = generator(self.seed, Stream.DOWNLOAD, round, client) if draws else unused
            yield self.algorithm.download(self.earlier_states.get(versions.get(client, round - 1), state), client, rng)

    def task(self, round: int, client: int, download: Message, **options: bool) -> Task:
        """Return the task to train one client in a round: the client's download, its state, and what to evaluate.

        Args:
            round: The round.
            client: The client's id.
            download: The message it receives.
            **options: Further fields of the task, such as `evaluate`; by default nothing is evaluated.
        """
        memory, lr_scale, limit = self.memory.get(client, {}), self.lr_scales.of(round), self.plan.steps.get(client)
        task = Task(round, client, download, memory, lr_scale, max_steps=limit, **options)
        if task.upload:
            self._sent[client] = self.codec.restore_download(download, client).section("model")
        return task

    def new_client_tasks(
        self, round: int, state: State, memories: Mapping[int, State], lr_scale: float, fit: bool
    ) -> Iterator[Task]:
        """Yield a `Task` for each client held out of the training: to evaluate it as a client that has just joined.

        Each client gets a message as the only new client, in addition to the clients of the training.

        Args:
            round: The round in which the clients would take part.
            state: The shared state after the previous round.
            memories: The state that each of the clients keeps, by client id.
            lr_scale: Factor on the learning rates.
            fit: Whether the clients train before they are evaluated.

        Raises:
            ConfigError: The method cannot make a message to a new client.
        """
        algorithm = self.algorithm
        refusal = f"{type(algorithm).__name__} has no message for a new client. Override its add_client"
        for client, memory in memories.items():
            rng = generator(self.seed, Stream.DOWNLOAD, round, client)
            with blame(f"scenario.held_out_clients: {refusal}"):
                visible = self._visible(algorithm.add_client(state, memory), memory)
                dense = algorithm.download(visible, self.clients, rng)
            download = self.codec.compress_download(dense, round)
            options = {"fit": fit, "upload": False, "evaluate": True, "new_client": True}
            yield Task(round, client, download, memory, lr_scale, **options)

    def begin_round(self, round: int) -> None:
        """Begin the aggregation of a round, to which `add` adds the clients' results."""
        seed, self._is_empty = derive(self.seed, Stream.AGGREGATION, round), True
        self._held, self.dropped = [], {}
        tier, tiers = self.plan.tier, self.schedule.policy.tiers if self.schedule else 1
        self._aggregation = self.algorithm.aggregation(Round(round, self.visible_state, seed, tier=tier, tiers=tiers))

    def restore(self, result: Result) -> Message:
        """Return the upload of a client that has just finished its task, with dense weights."""
        assert result.upload
        round = self._aggregation.round.number
        return self.codec.restore_upload(result.upload, self._sent.get(result.client), round, result.client)

    def try_upload(self, result: Result, model: Tensors) -> None:
        """Raise an error if a client's upload, with dense weights, cannot be aggregated. Nothing is changed.

        Args:
            result: The client's result.
            model: The shared entries of the client's network, with any values.
        """
        assert result.upload
        round = Round(self._aggregation.round.number, self.visible_state, self._aggregation.round.seed)
        upload = Upload(result.client, result.upload, self._sent.get(result.client))
        self.algorithm.try_upload(round, upload, result.memory, model)

    def add(self, result: Result) -> None:
        """Add a client's upload to the round's aggregation, and store the client's state.

        Results are added in ascending order of client ids. If an adversary needs the uploads, they are only stored.
        """
        message = self.restore(result)
        self.memory.put(result.client, self._aggregation.round.number, result.memory)
        received, newest = self._sent.pop(result.client, None), self._aggregation.round.number - 1
        staleness = newest - self.plan.versions.get(result.client, newest)
        upload = Upload(result.client, message, received, staleness)
        if self.holds_uploads:
            self._held.append(upload._replace(message=message.on_cpu()))
        else:
            self._aggregate(upload)

    def _aggregate(self, upload: Upload) -> None:
        self._is_empty = False
        self._aggregation.add(upload)

    def add_held_uploads(self) -> None:
        """Let the adversary replace its clients' uploads, and add all stored uploads to the round's aggregation.

        Crafted uploads with NaN, Inf or other names, shapes or dtypes are not added, but recorded in `dropped`.
        """
        held, self._held = self._held, []
        if not held:
            return
        number, buffers = self._aggregation.round.number, self.algorithm.aggregator.buffers
        received = self.adversary.replace_uploads(held, number, buffers)
        for honest, upload in zip(held, received, strict=True):
            fault = None if upload is honest else fault_of(upload.message, honest.message)
            if self.codec.upload and upload is not honest and not fault:
                upload = self._as_restored(upload)
                fault = fault_of(upload.message, honest.message)
            if fault:
                self.dropped[upload.client] = fault
            else:
                self._aggregate(upload)

    def _as_restored(self, upload: Upload) -> Upload:
        """Return a crafted upload as the server gets it: compressed and restored, as those of all clients."""
        client, received, round = upload.client, upload.received or {}, self._aggregation.round.number
        sent, _ = self.codec.compress_upload(upload.message, received, {}, round, client)
        return upload._replace(message=self.codec.restore_upload(sent, received, round, client))

    def attack_metrics(self, participants: Sequence[int]) -> dict[str, float]:
        """Return how many attackers took part in a round, and how many of their uploads were dropped.

        Without attackers, there are no such metrics.

        Args:
            participants: Ids of the clients whose uploads arrived.
        """
        attackers, found = self.adversary.attackers, dict[str, float]()
        if attackers:
            found["attack/participants"] = len(attackers.intersection(participants))
        if self.holds_uploads:
            found["attack/dropped"] = len(self.dropped)
        return found

    def end_round(self) -> dict[str, float]:
        """Make the aggregated state the server's state. Return the metrics that the aggregation has reported.

        A round without uploads changes nothing, unless the aggregator asks for it.
        """
        self._sent.clear()
        if self.schedule:
            at_work = {one.version for one in self.schedule.running}
            states = self.earlier_states | {self._aggregation.round.number - 1: self.state}
            self.earlier_states = {version: state for version, state in states.items() if version in at_work}
        if not self._is_empty or self.algorithm.aggregator.finishes_empty_rounds:
            self.state = self._aggregation.finish()
        self.memory.end_round()
        return self._aggregation.round.metrics


def participants_per_round(wanted: int | None, clients: int, min_clients: int) -> int:
    """Return the number of clients that train in each round: `wanted` or, by default, all clients.

    Raises:
        ConfigError: The number is not between 1 and `clients`, or is below `min_clients`.
    """
    per_round = clients if wanted is None else wanted
    if not 1 <= per_round <= clients:
        what = "the number of clients that train (scenario.clients without scenario.held_out_clients)"
        raise ConfigError(f"clients_per_round: {per_round} is not between 1 and {clients}, {what}")
    if min_clients > per_round:
        raise ConfigError(f"min_clients: {min_clients} is above the {per_round} clients of a round")
    return per_round

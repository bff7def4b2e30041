"""`Algorithm`: a federated method.

A method is a list of loss terms (what clients add to their loss), the shared knowledge those terms and the aggregator
ask for, and an aggregator (how uploads become the next shared state). Most methods are a constructor that puts such
parts together; `Algorithm`'s methods are overridden only where a paper changes what travels or what a client keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean
from fl_lightning.client.knowledge import SharedKnowledge, unique_knowledge
from fl_lightning.client.module import ClientModule, LossTerm
from fl_lightning.client.optimizers import OptimizerFactory, SchedulerFactory
from fl_lightning.client.weights import buffer_names, detached, load_weights, require_parts, to_cpu
from fl_lightning.core.capabilities import Capable
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.state import State

OWN = "personal"
"""The section of a client's memory that holds the part of the model which never leaves it."""


Batches = Iterable[tuple[Tensor, Tensor]]
Buffers = Literal["average", "local", "drop"]
OptimizerState = Literal["fresh", "kept"]


class Algorithm(Capable):
    """A federated method: loss terms, shared knowledge and an aggregator, bound together.

    Args:
        loss_terms: Loss terms to add to the method's own.
        aggregator: Replaces the method's own aggregator.
        buffers: BatchNorm's running statistics: `average` them with the weights, keep each client's own (`local`), or
            `drop` them (they start afresh with each fit; the shared model keeps its initial ones).

    Raises:
        ConfigError: Two loss terms have one name.

    Attributes:
        server: Whether there is one. Without it, what a client uploads stays there for its peers to collect.
        public: The section of a client's memory that its peers can read, if any: the state that `download` and
            `aggregate` are handed has client `k`'s as `peer_<k>`, as it was when the round began.
        optimizer_state: What becomes of a client's optimizer between its rounds, unless the orchestrator is told.
        drop_last: Whether clients leave out a last training batch with fewer samples than the others.
        one_model: Whether the state's `model` is one for everybody, to be measured as the global model.
        personal: Entries of the backbone's state dict that never leave their client, which keeps them from round to
            round: all whose names begin with one of these. `("head.",)` is the head, `("",)` the whole model.
        validation: Share of a client's training data that it does not train on, for `prepare` to look at.
        whole: Whether a client's model as trained is what it uploads of it, with its personal part and, of what is in
            neither, what it started from. Callbacks that look at what clients train need that.
        needs_classes: Whether the method itself compares classes, beside its terms, shared knowledge and aggregator.
        module_class: Makes a client's module of what `ClientModule` takes; another where the training step is another.
        samples: How many training samples each client holds, by id, as a server can ask before round 1; the
            orchestrator sets it before it asks for the initial state.
        fixed: Names of the parameters that the model itself freezes (`requires_grad=False` as built). They are the same
            everywhere, so they are neither sent nor kept; the worker sets it.
        receives_by_loading: Whether `receive` only loads the download and the client's state into the module, which may
            then have no weights before.
        uploads_by_copying: Whether `upload` and `remember` only copy tensors of the module, which nobody needs after
            them.
        aggregates_by_parts: Whether `aggregate` leaves the uploads' weights to the aggregator.
        starts_alike: Whether all clients that keep no part of the network start from the same model, if the aggregator
            sends one.
    """

    capabilities: ClassVar = {
        "receives_by_loading": ("receive",),
        "uploads_by_copying": ("upload", "remember"),
        "aggregates_by_parts": ("aggregate",),
        "starts_alike": ("client_module", "download", "receive", "prepare", "personalize"),
    }
    receives_by_loading: bool = True
    uploads_by_copying: bool = True
    aggregates_by_parts: bool = True
    starts_alike: bool = True
    server: bool = True
    public: str | None = None
    optimizer_state: OptimizerState = "fresh"
    drop_last: bool = False
    one_model: bool = True
    personal: tuple[str, ...] = ()
    validation: float = 0.0
    whole: bool = True
    needs_classes: bool = False
    module_class: Callable[..., ClientModule] = ClientModule
    samples: Sequence[int] = ()
    fixed: frozenset[str] = frozenset()

    def __init__(
        self,
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        self.loss_terms: Sequence[LossTerm] = list(loss_terms or [])
        self.aggregator: Aggregator = aggregator or WeightedMean()
        self.buffers: Buffers = buffers
        names = [term.name for term in self.loss_terms]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"algorithm.loss_terms: {name!r} is there twice; list each loss term once")

    @classmethod
    def family(cls) -> str:
        """The family a method belongs to, from the folder it is in: `personalized`, say; `own` for a user's own."""
        package = __name__.rpartition(".")[0]
        inside, _, rest = cls.__module__.partition(f"{package}.")
        return rest.partition(".")[0] if not inside and "." in rest else "own"

    @property
    def knowledge(self) -> list[SharedKnowledge]:
        """Every piece of shared knowledge that the loss terms and the aggregator ask for."""
        return unique_knowledge([*(p for term in self.loss_terms for p in term.knowledge), *self.aggregator.knowledge])

    @property
    def only_averages(self) -> bool:
        """Whether uploads' weights are only averaged. Otherwise the methods that handle them get them on the CPU."""
        return self.aggregator.only_averages and self.uploads_by_copying and self.aggregates_by_parts

    @property
    def of_classes(self) -> Iterator[str]:
        """Names of the parts of the method that need classes, and so keep it from another objective."""
        parts: Iterable[Any] = (self, *self.loss_terms, *self.knowledge, self.aggregator)
        return (type(part).__name__ for part in parts if part.needs_classes)

    def client_module(
        self,
        backbone: nn.Module,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
    ) -> ClientModule:
        """A client's LightningModule around a backbone; it works under a plain `Trainer.fit` too.

        Raises:
            ConfigError: A personal part is none of the backbone's.
        """
        require_parts("personal", self.personal, backbone)
        terms, knowledge = copy.deepcopy((list(self.loss_terms), self.knowledge))
        return self.module_class(backbone, terms, knowledge, optimizer, lr_scheduler)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """The shared state before round 1, from a freshly initialised backbone.

        Args:
            backbone: It is left as it is.
            num_classes: Number of classes, `C`.
            clients: Number of clients of the experiment.
            rng: For what is drawn once a run.
        """
        self.aggregator.clients = clients
        model = {name: value.clone() for name, value in self._shared(backbone).items()}
        knowledge = {piece.name: piece.initial(num_classes) for piece in self.knowledge}
        return {"model": model} | self.aggregator.initial(model, num_classes) | knowledge

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """What a client is sent at the start of a round: weights and shared knowledge.

        Args:
            state: The state after the round before.
            client: Who is sent it.
            rng: For what is drawn anew for each client and round.
        """
        knowledge = {piece.name: state[piece.name] for piece in self.knowledge}
        return Message.pack({"model": self.aggregator.model_for(state, client)} | knowledge)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Client: take in a download and what the client itself kept from its last round.

        Args:
            module: As initialised, the client's own: what is neither sent nor kept stays so.
            download: What was sent.
            memory: What `remember` gave.
        """
        load_weights(module.backbone, download.section("model") | memory.get(OWN, {}))
        for piece in module.pieces():
            piece.load(download.section(piece.name))
        recall(module, memory)

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Client, after `receive`, before it trains or is measured: look at its own data, and change the module by it.

        The module is in eval mode on the training device; random numbers drawn here move none of the training's.

        Args:
            module: The module as `receive` left it.
            batches: The client's training data, prepared, in fixed order, not augmented.
            validation: Likewise, the share that it does not train on; no batch where there is none.
        """

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Client, before its model is measured or handed to the user: make it the client's own, in place.

        The module is in eval mode, without gradients; nothing done here is uploaded or kept.

        Args:
            module: The trained module, or as received where that is what is measured.
            batches: The client's training data, prepared, in fixed order, not augmented.
        """

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Client, after training, in eval mode without gradients: what goes up.

        Args:
            module: The trained module.
            batches: The client's training data, prepared, in fixed order, not augmented.
            n_samples: How many training samples the client holds, `N_k`.
            num_classes: Number of classes, `C`.
        """
        weights = self._shared(module.backbone)
        knowledge = {piece.name: piece.summarize(module, batches, num_classes) for piece in module.pieces()}
        model = detached({"model": weights}, None if module.stays else "cpu", copy=not module.spent)
        return Message.pack(model | to_cpu(knowledge), n_samples=n_samples)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Client, after training and its upload: what it keeps for its next round. It never leaves the client."""
        kept = {term_section(term): term.remember(module) for term in module.terms()}
        kept[OWN] = self._own(module.backbone)
        return to_cpu({name: tensors for name, tensors in kept.items() if tensors})

    def cohort(self, state: State, participants: int, clients: int) -> int:
        """Server: how many clients take part in the round that follows a state.

        Args:
            state: The state.
            participants: What the experiment asks for, `clients_per_round`.
            clients: All clients.
        """
        return participants

    def aggregate(self, state: State, uploads: Iterable[Upload]) -> State:
        """Server: the next shared state, from uploads that arrive in ascending client id.

        Its tensors are new ones where they differ: the state before may be on its way to the disk.
        """
        seen: list[Upload] = []

        def arriving() -> Iterator[Upload]:
            for client, message in uploads:
                seen.append(Upload(client, message.without("model")))
                yield Upload(client, message)

        folded = self.aggregator.fold(arriving())
        knowledge = {piece.name: piece.merge(state[piece.name], seen) for piece in self.knowledge}
        return state | knowledge | self.aggregator.finish(folded, state, knowledge)

    def _shared(self, backbone: nn.Module) -> Tensors:
        """The entries that are sent."""
        own = self._own(backbone).keys() | self.fixed | (buffer_names(backbone) if self.buffers == "drop" else set())
        return {name: value for name, value in backbone.state_dict().items() if name not in own}

    def _own(self, backbone: nn.Module) -> Tensors:
        """The entries that a client keeps to itself."""
        if not self.personal and self.buffers == "average":
            return {}
        buffers = buffer_names(backbone)
        own = buffers if self.buffers == "local" else set()
        dropped = self.fixed | (buffers if self.buffers == "drop" else set())
        entries = backbone.state_dict().items()
        return {
            name: value
            for name, value in entries
            if (name in own or name.startswith(self.personal)) and name not in dropped
        }


def term_section(term: LossTerm) -> str:
    """The section of a client's memory that a loss term's own memory is in."""
    return f"term_{term.name}"


def recall(module: ClientModule, memory: State) -> None:
    """Give each loss term back what it kept from the client's last round."""
    for term in module.terms():
        term.recall(memory.get(term_section(term), {}))

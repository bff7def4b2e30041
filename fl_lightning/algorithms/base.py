"""`Algorithm`: the base class of federated methods.

A method consists of loss terms (what clients add to their loss), shared knowledge (what is exchanged besides weights)
and an aggregator (how uploads become the next shared state). Most methods are a list of options and the parts that they
add. `Algorithm`'s other methods are overridden if a paper changes what is sent or what a client keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean, Weighting
from fl_lightning.client.knowledge import SharedKnowledge, unique_knowledge
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import OptimizerFactory, SchedulerFactory
from fl_lightning.client.weights import belongs_to, buffer_names, detached, load_weights, require_parts, to_cpu
from fl_lightning.core.arguments import FieldsMixin, describe
from fl_lightning.core.capabilities import Capable
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State

OWN = "personal"
"""The section of the client state with the part of the model that never leaves the client."""


Batches = Iterable[tuple[Tensor, Tensor]]
Buffers = Literal["average", "local", "drop"]
OptimizerState = Literal["fresh", "kept"]
UNSET: Any = None
"""Default of an option that a method replaces by a value of its own."""


class Algorithm(FieldsMixin, Capable):
    """Base class of federated methods, which combine loss terms, shared knowledge and an aggregator.

    A method declares its options as class attributes with a type, and returns its parts from `own_terms` and
    `own_aggregator`. If a part cannot be replaced, its field is declared again with `field(init=False)`.

    Args:
        loss_terms: Loss terms in addition to the method's own.
        aggregator: Replaces the method's own aggregator.
        buffers: BatchNorm's running statistics: `average` them with the weights, keep each client's own (`local`), or
            `drop` them (each fit starts with initial ones, and so does the shared model).

    Raises:
        ConfigError: Two loss terms have one name, a part works only in another method, an option of the method is out
            of its range, or an option of the method's own aggregator is set although `aggregator` replaces it.

    Attributes:
        server: Whether there is a server. Otherwise a client's upload stays with the client, and its peers collect it.
        public: The section of the client state that peers can read, if any. The state in `download` and `Round.before`
            is then a `VisibleState`: `state.peer(k)` is this section of client `k` at the start of the round.
        optimizer_state: Whether a client's optimizer state is `kept` between its rounds or `fresh`, by default.
        drop_last: Whether clients skip a last training batch with fewer samples than the others.
        one_model: Whether the state's `model` is a model for all clients, which is evaluated as the global model.
        personal: Entries of the backbone's state dict that never leave the client, which keeps them between rounds:
            prefixes, or patterns with `*`. `("head.",)` is the head, `("",)` the whole model.
        personal_section: Section of the client state with weights of the client's own model that the method keeps in
            addition to `personal`, if any. A client without this section has not trained its own model.
        validation: Fraction of a client's training data that is left out of training, as validation data for `prepare`.
        whole: Whether a client's trained model consists of its upload, its personal part and the unchanged rest. Some
            callbacks need that.
        uploads_weights: Whether clients receive and upload whole entries of their network's weights, by their names, in
            the section `model`. Otherwise, attacks on updates and compression are refused.
        uploads_vary: Whether the names or sizes of what clients with the same network send in a round can differ.
            Otherwise, the answers of clients' own machines must have those of a client on the server.
        needs_classes: Whether the method itself, apart from its loss terms, knowledge and aggregator, only works with
            class labels.
        module_class: Builds a client's module; a subclass of `ClientModule` if the training step differs.
        samples: Number of training samples of each client. `start` sets it.
        fixed: Names of the parameters that the model freezes (`requires_grad=False` when built), and of the buffers of
            frozen layers. They are equal everywhere, so they are neither sent nor kept. `start` sets it.
        plain_exchange: Whether `receive` only loads tensors into the module, `upload` and `remember` only copy its
            tensors, and `aggregation` leaves the weights to the aggregator. Engines then save copies.
        releases_only_model: Whether uploads consist of the client's weights and shared knowledge, and change nothing
            but what the aggregator and the shared knowledge compute. `PrivateMean` needs it.
        starts_alike: Whether all clients without a personal part start from the same model, if the aggregator sends
            one model.
        only_steps_read_data: Whether a client reads its samples only in training steps, so that private steps
            (`dp_sgd`) make all of its messages private. A method that overrides `upload` without reading samples sets
            it.
        weighting: How the clients weigh in the method's own aggregator. Methods with this option declare it as a field.
        search_space: Ranges of the method's own options for tuning, by name, in the syntax of a sweep file.
        aggregator_options: Names of the method's own options that have no effect if `aggregator` is given.
        corrects_aggregator: Whether a given `aggregator` only replaces the mean in the method's own aggregator:
            `own_aggregator` gets it as `self.aggregator`, and wraps it.
    """

    capabilities: ClassVar = {
        "plain_exchange": ("receive", "upload", "remember", "aggregation"),
        "releases_only_model": ("upload", "aggregation"),
        "starts_alike": (
            "client_module",
            "prepare_network",
            "download",
            "receive",
            "prepare",
            "personalize",
            "is_untrained",
        ),
        "only_steps_read_data": ("prepare", "personalize", "upload"),
    }
    section = "algorithm"
    search_space: ClassVar[dict[str, dict[str, Any]]] = {}
    plain_exchange = True
    releases_only_model = True
    starts_alike = True
    only_steps_read_data = True
    server = True
    drop_last = False
    one_model = True
    validation = 0.0
    whole = True
    uploads_weights = True
    uploads_vary = False
    needs_classes = False
    aggregator_options: ClassVar[tuple[str, ...]] = ("weighting",)
    corrects_aggregator = False
    public: ClassVar[str | None] = None
    personal_section: ClassVar[str | None] = None
    optimizer_state: OptimizerState = field(default="fresh", init=False)
    personal: Sequence[str] = field(default=(), init=False)
    module_class: Callable[..., ClientModule] = field(default=ClientModule, init=False)
    samples: Sequence[int] = field(default=(), init=False)
    fixed: frozenset[str] = field(default=frozenset(), init=False)
    weighting: Weighting = field(default="samples", init=False)

    loss_terms: list[LossTerm] = UNSET
    aggregator: Aggregator = UNSET
    buffers: Buffers = "average"

    def __post_init__(self) -> None:
        """Check the options, and add the method's own parts to the given ones."""
        super().__post_init__()
        self.loss_terms = [*self.own_terms(), *(self.loss_terms or [])]
        if self.corrects_aggregator or not self.aggregator:
            self.aggregator = self.own_aggregator()
        self._refuse_equal_terms()
        self._refuse_parts_of_others()
        self._refuse_unused_options()

    def own_terms(self) -> list[LossTerm]:
        """Return the method's own loss terms. They come before those of the option `loss_terms`."""
        return []

    def own_aggregator(self) -> Aggregator:
        """Return the method's own aggregator, by default the weighted mean of the clients' models."""
        return WeightedMean(self.weighting)

    def _refuse_equal_terms(self) -> None:
        """Raise an error if two loss terms have the same name.

        The message says whether the user listed a term twice, or added a term that the method already has.
        """
        names = [term.name for term in self.loss_terms]
        options = describe(self).get("init_args", {})
        added = names[len(names) - len(options.get("loss_terms") or []) :]
        for term in self.loss_terms:
            if added.count(term.name) > 1:
                raise ConfigError(f"algorithm.loss_terms: {term.name!r} occurs twice. List each loss term once.")
            if names.count(term.name) > 1:
                own = [f"algorithm.{name}" for name in describe(term).get("init_args", {}) if name in options]
                fix = f"Set {', '.join(own)} instead" if own else "Leave it out"
                raise ConfigError(f"algorithm.loss_terms: {type(self).__name__} has {term.name!r} already. {fix}.")

    def _refuse_parts_of_others(self) -> None:
        """Raise an error if a loss term or the aggregator works only in another built-in method.

        A user's own method may use any of them, because it may send what they read.
        """
        methods = {kind.__name__ for kind in type(self).__mro__}
        parts: list[tuple[str, LossTerm | Aggregator]] = [("loss_terms", term) for term in self.loss_terms]
        parts += [("aggregator", aggregator) for aggregator in self.aggregator.chain()]
        for key, part in parts:
            if self.family() != "own" and part.only_in and part.only_in not in methods:
                what = f"{type(part).__name__} works only in {part.only_in}"
                fix = f"Use --algorithm {part.only_in}, to which you can add loss terms."
                raise ConfigError(f"algorithm.{key}: {what}. {fix}")

    def _refuse_unused_options(self) -> None:
        """Raise an error if the user sets an option of the default aggregator and also replaces the aggregator."""
        given, defaults = (describe(each).get("init_args", {}) for each in (self, type(self)))
        for name in self.aggregator_options if given.get("aggregator") else ():
            if name in defaults and given[name] != defaults[name]:
                new = given["aggregator"]["class_path"].rpartition(".")[2]
                method, default = type(self).__name__, defaults[name]
                why = f"{given[name]} has no effect, because {new} replaces the aggregator of {method}"
                fix = f"Set the options of algorithm.aggregator, or remove it. The default of {name} is {default}."
                raise ConfigError(f"algorithm.{name}: {why}. {fix}")

    @classmethod
    def family(cls) -> str:
        """Return the method's family: the name of its folder, such as `personalized`, or `own` for a user's method."""
        package = __name__.rpartition(".")[0]
        inside, _, rest = cls.__module__.partition(f"{package}.")
        return rest.partition(".")[0] if not inside and "." in rest else "own"

    @property
    def knowledge(self) -> list[SharedKnowledge]:
        """All shared knowledge, such as class prototypes, that the loss terms and the aggregator use."""
        return unique_knowledge([*(p for term in self.loss_terms for p in term.knowledge), *self.aggregator.knowledge])

    @property
    def only_averages(self) -> bool:
        """Whether the server only averages the uploaded weights, so that they can stay on the GPU."""
        return self.aggregator.only_averages and self.plain_exchange

    @property
    def of_classes(self) -> Iterator[str]:
        """Names of the method's parts (loss terms, knowledge, aggregator) that only work with class labels."""
        parts: Iterable[Any] = (self, *self.loss_terms, *self.knowledge, self.aggregator)
        return (type(part).__name__ for part in parts if part.needs_classes)

    def prepare_network(self, backbone: nn.Module) -> None:
        """Check a network, or change it in place, before a client's module is built around it.

        Methods override it to freeze or replace layers, or to make some of them `personal`.

        Args:
            backbone: A newly built network.
        """

    def client_module(
        self,
        backbone: nn.Module,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
    ) -> ClientModule:
        """Return a client's LightningModule around a backbone. It also works in a plain `Trainer.fit`.

        Args:
            backbone: The network.
            optimizer: Builds the optimizer from the parameters, such as `partial(torch.optim.SGD, lr=0.1)`. By default
                the optimizer of the backbone, if it is a LightningModule, or SGD with lr 0.01.
            lr_scheduler: Builds a scheduler from the optimizer. It is stepped once per epoch.

        Raises:
            ConfigError: The backbone does not have a part that `personal` names.
        """
        self.prepare_network(backbone)
        require_parts("personal", self.personal, backbone)
        terms, knowledge = copy.deepcopy((list(self.loss_terms), self.knowledge))
        return self.module_class(backbone, terms, knowledge, optimizer, lr_scheduler)

    def start(self, sizes: Sequence[int], fixed: frozenset[str], buffers: frozenset[str] = frozenset()) -> None:
        """Store the clients' sample counts, and names of the model's entries. It is called before `initial_state`.

        Args:
            sizes: Number of samples that each client has for training and `validation`.
            fixed: Names of the parameters that the model freezes, and of the buffers of frozen layers.
            buffers: Names of the model's buffers.
        """
        self.samples, self.fixed = [self.training_samples(size) for size in sizes], fixed
        for aggregator in self.aggregator.chain():
            aggregator.clients, aggregator.buffers = len(sizes), buffers

    def training_samples(self, size: int) -> int:
        """Return how many of a client's samples are for training; the others are its `validation` data."""
        return size - round(self.validation * size)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the server's shared state before round 1.

        Args:
            backbone: A newly initialised backbone. It is not changed.
            num_classes: Number of classes, `C`.
            clients: Number of clients of the experiment.
            rng: Random numbers of the run.
        """
        model = {name: value.clone() for name, value in self._shared(backbone).items()}
        knowledge = {piece.name: piece.initial(num_classes) for piece in self.knowledge}
        return {"model": model} | self.aggregator.initial(model, num_classes) | knowledge

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Server: return the message to a client at the start of a round, with the weights and the shared knowledge.

        Args:
            state: The state after the previous round.
            client: The client's id.
            rng: Random numbers of this client and round.
        """
        knowledge = {piece.name: piece.sent(state[piece.name]) for piece in self.knowledge}
        return Message.pack({"model": self.aggregator.model_for(state, client)} | knowledge)

    @property
    def trains_new_clients(self) -> bool:
        """Whether a new client (held out of all rounds) trains on its own data before it is evaluated.

        Otherwise it only downloads a model. By default it trains if there is no model for all clients.
        """
        return not self.one_model

    def add_client(self, state: State, memory: State) -> State:
        """Server: return the shared state with one more client, which has the highest id and has not taken part yet.

        `download` gets this state to make the first message to a client that was held out of the training. Methods
        whose state has entries for each client override it.

        Args:
            state: The state after the previous round.
            memory: The state that the new client keeps: empty, except in methods without a server.
        """
        return state

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Client: load the server's message, and the state kept from the client's last round, into its module.

        Args:
            module: The client's module with initial weights. What is neither sent nor kept stays initial.
            download: The message from the server.
            memory: The client state from `remember` in its last round.
        """
        module.load_weights(download.section("model"))
        if own := memory.get(OWN):
            load_weights(module.backbone, own)
        for piece in module.pieces():
            piece.load(download.section(piece.name))
        recall(module, memory)

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Client: adapt the module to the client's data after `receive`, before training or evaluation.

        The module is in eval mode on the training device. Random numbers drawn here do not change those of training.

        Args:
            module: The module after `receive`.
            batches: The client's training data in fixed order, without augmentation.
            validation: Its validation data (see `validation`), possibly empty.
        """

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Client: personalise the module in place before it is evaluated or returned to the user.

        The module is in eval mode, without gradients. Changes are neither uploaded nor kept.

        Args:
            module: The trained or received module.
            batches: The client's training data in fixed order, without augmentation.
        """

    def is_untrained(self, module: ClientModule, memory: State) -> bool:
        """Client: return whether a model contains initial weights because the client has never trained its own part.

        Such models are evaluated like all others, and counted in the column `client/untrained`.

        Args:
            module: The module after `receive` and `prepare`.
            memory: The state that the client keeps.
        """
        own = [OWN] if self._own(module.backbone) else []
        return any(section not in memory for section in [*own, self.personal_section] if section)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Client: after training, return the message to the server: weights and contributions to the shared knowledge.

        Args:
            module: The trained module, in eval mode, without gradients.
            batches: The client's training data in fixed order, without augmentation.
            n_samples: Number of the client's training samples, `N_k`.
            num_classes: Number of classes, `C`.
        """
        memory = module.weight_memory
        weights = self._shared(module.backbone) if memory.flat is None else memory.flat
        knowledge = {piece.name: piece.summarize(module, batches, num_classes) for piece in module.pieces()}
        model = detached({"model": weights}, None if memory.stays else "cpu", copy=not memory.spent)
        return Message.pack(model | to_cpu(knowledge), n_samples=n_samples)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Client: after training and upload, return the state that stays on the client for its next round."""
        kept = {term_section(term): term.remember(module) for term in module.terms()}
        kept[OWN] = self._own(module.backbone)
        return to_cpu({name: tensors for name, tensors in kept.items() if tensors})

    def try_upload(self, round: Round, upload: Upload, memory: State, model: Tensors) -> None:
        """Aggregate one client's upload alone, and discard the result, to find out whether that is possible.

        An engine calls it for uploads from other machines if `uploads_vary`, so that their sizes are not known.

        Args:
            round: The round, with the state at its start.
            upload: The upload.
            memory: The client state that came with it.
            model: Entries of the client's network that are shared, with any values.

        Raises:
            ValueError: The result has other entries than the shared model.
            Exception: The upload cannot be aggregated.
        """
        aggregation = self.aggregation(round)
        aggregation.add(upload)
        require_same_entries(aggregation.finish()["model"], round.before["model"])

    def aggregation(self, round: Round) -> Aggregation:
        """Server: return the aggregation of a round, to which its uploads are added as they arrive.

        A method that computes more from the uploads than its aggregator and its shared knowledge do returns a subclass.
        """
        return Aggregation(self, round)

    def shared_names(self, backbone: nn.Module) -> list[str]:
        """Return the names of the state dict entries of a backbone that clients and server exchange."""
        return list(self._shared(backbone))

    def _shared(self, backbone: nn.Module) -> Tensors:
        """Return the state dict entries of a backbone that clients and server exchange."""
        own = self._own(backbone).keys() | self.fixed | (buffer_names(backbone) if self.buffers == "drop" else set())
        return {name: value for name, value in backbone.state_dict().items() if name not in own}

    def _own(self, backbone: nn.Module) -> Tensors:
        """Return the state dict entries of a backbone that stay on their client, such as a personal head."""
        if not self.personal and self.buffers == "average":
            return {}
        buffers = buffer_names(backbone)
        own = buffers if self.buffers == "local" else set()
        dropped = self.fixed | (buffers if self.buffers == "drop" else set())
        entries = backbone.state_dict().items()
        return {
            name: value
            for name, value in entries
            if (name in own or belongs_to(name, self.personal)) and name not in dropped
        }


class Aggregation:
    """The aggregation of one round: `add` each upload, in ascending order of client ids, then `finish`.

    Args:
        algorithm: The method.
        round: The round, with the state at its start.
    """

    def __init__(self, algorithm: Algorithm, round: Round) -> None:
        self.algorithm, self.round = algorithm, round
        self._folded = algorithm.aggregator.begin(round)
        self._without_models: list[Upload] = []

    def add(self, upload: Upload) -> None:
        """Add a client's upload. Its weights are not kept, unless the aggregator keeps them."""
        self._without_models.append(Upload(upload.client, upload.message.without("model")))
        self.algorithm.aggregator.fold(self._folded, upload)

    def finish(self) -> State:
        """Return the next shared state."""
        before, uploads = self.round.before, self._without_models
        merged = {
            piece.name: piece.merge(before[piece.name], uploads, self.round) for piece in self.algorithm.knowledge
        }
        return before | merged | self.algorithm.aggregator.finish(self._folded, self.round, merged)


def require_same_entries(model: Tensors, expected: Tensors) -> None:
    """Raise a `ValueError` if two models have entries of other names or shapes."""
    sizes, wanted = ({name: value.shape for name, value in each.items()} for each in (model, expected))
    if different := sorted({*sizes.items()} ^ {*wanted.items()}):
        raise ValueError(f"the upload does not give the entry {different[0][0]!r} of the shared model")


def term_section(term: LossTerm) -> str:
    """Return the key of a loss term's state within the state that a client keeps between rounds."""
    return f"term_{term.name}"


def recall(module: ClientModule, memory: State) -> None:
    """Restore each loss term of a client's module from the state that the client kept after its last round."""
    for term in module.terms():
        term.recall(memory.get(term_section(term), {}))

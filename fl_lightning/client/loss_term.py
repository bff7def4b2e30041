"""`LossTerm`: the base class of the loss terms that methods add, and what a loss term reads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.schedules import ScheduleStarts
from fl_lightning.core.arguments import PartMixin
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.message import Tensors

if TYPE_CHECKING:
    from fl_lightning.client.module import ClientModule


@dataclass
class Step:
    """The tensors of one training step that loss terms read, such as features and logits.

    Args:
        logits: Outputs of the head, `(B, C)`.
        targets: Class indices `(B,)`, or the targets of another objective.
        features: Outputs of the encoder, `(B, d)`, if the model has one.
        inputs: The batch of inputs: a tensor, or `Inputs`.
        backbone: The network that is being trained, for terms on its weights.
        taps: Inputs of the layers that a term lists in its `taps`, by name.
        loss: The loss that the model's own `training_step` returned, if the model is a LightningModule.
    """

    logits: Tensor
    targets: Tensor
    features: Tensor | None = None
    inputs: Tensor | Inputs | None = None
    backbone: nn.Module | None = None
    taps: Tensors = field(default_factory=dict)
    loss: Tensor | None = None


class FitContext(NamedTuple):
    """The circumstances of a client's fit in one round, which loss terms and methods read.

    Attributes:
        round: The round, from 1, for terms that change over rounds.
        lr_scale: Factor on every learning rate, from the learning-rate schedule over rounds.
        batch_size: Batch size of the fit, for methods that also train outside of it.
        new_client: Whether the client is held out of the training, and only adapts the model to its data.
        class_counts: Number of the client's training samples of each class, `(C,)`, or None if it is unknown. Sent only
            by methods that document it.
        class_weights: Weights of the classes in the objective's training loss, `(C,)`; None for equal weights.
        logs_losses: Whether training losses are logged after each epoch if the `Trainer` has no logger.
        max_steps: Number of training steps after which the fit ends, in addition to the trainer's limits.
        schedule_starts: Brings learning-rate schedules that span several rounds to the start of the round.
    """

    round: int = 1
    lr_scale: float = 1.0
    batch_size: int = 64
    new_client: bool = False
    class_counts: Tensor | None = None
    class_weights: Tensor | None = None
    logs_losses: bool = True
    max_steps: int | None = None
    schedule_starts: ScheduleStarts = ScheduleStarts()


class LossTerm(PartMixin, nn.Module):
    """A term that a method adds to a client's training loss: a scalar that includes its coefficient.

    Subclasses declare their options as annotated class attributes (`mu: float = 0.1`), and override `forward`. A term
    with modules of its own creates them in `__post_init__`, after `super().__post_init__()`. Subclasses override
    `begin` if they need the weights before training, and `remember` and `recall` if a client keeps state from one of
    its rounds to the next.

    A term also works in another LightningModule: `loss = ce + term(Step(logits=logits, targets=y))`. If it needs
    `begin`, call `term.begin(ClientModule(net))` in `on_fit_start`.

    Attributes:
        name: The term's name in logs. By default it comes from the class name.
        knowledge: The shared knowledge that the term reads. It is sent together with the weights.
        active: Whether the term is computed in this fit.
        needs_classes: Whether targets must be classes, so that other objectives are refused.
        only_in: Name of the only method that sends what the term reads, if other methods do not send it. Other methods
            of this package refuse the term.
        objective_weight: Factor on the objective's loss while the term is active. 0 replaces the objective's loss.
        taps: Names of the backbone's layers whose inputs the term reads in `Step.taps`.
    """

    section = "algorithm"
    name = ""
    active = True
    needs_classes = False
    only_in: ClassVar[str | None] = None
    objective_weight = 1.0
    taps: Sequence[str] = field(default=(), init=False)

    def __post_init__(self) -> None:
        """Initialise the module, and check the numbers among the options."""
        nn.Module.__init__(self)
        super().__post_init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The `SharedKnowledge` objects that this loss term reads; by default all those among its attributes."""
        return tuple(piece for piece in self.children() if isinstance(piece, SharedKnowledge))

    def begin(self, module: ClientModule) -> None:
        """Prepare the loss term for a fit. Received weights and shared knowledge are already on the training device.

        Also called once before round 1 with the initial weights, to find errors early. The module's `trainer` has the
        options of the fit.
        """

    def outside_fit(self, value: Tensor) -> Tensor:
        """Return `value` as the term's loss outside of a client's fit. In training, raise an error instead.

        A subclass calls it in `forward` if a tensor of the step, or an attribute that `begin` sets, is missing, such as
        outside of a client's fit.

        Raises:
            ConfigError: The term is active and in train mode.
        """
        if self.training and self.active:
            what = "begin was not called or a tensor of Step is missing, so the term would have no effect"
            fix = "Call begin(ClientModule(net)) in on_fit_start and pass Step(logits, targets, features, inputs, net)"
            raise ConfigError(f"{type(self).__name__}: {what}. {fix}, or train a method's client_module(net).")
        return value

    def begin_epoch(self, module: ClientModule) -> None:
        """Prepare the loss term for an epoch. Called at the start of each epoch of the fit."""

    def remember(self, module: ClientModule) -> Tensors:
        """Return the tensors of this loss term that the client stores until its next fit. Called after each fit."""
        return {}

    def recall(self, kept: Tensors) -> None:
        """Restore the tensors that `remember` returned when this client last trained. Called before the fit.

        Args:
            kept: The tensors; empty in the client's first round.
        """

    def forward(self, step: Step) -> Tensor:
        """Return the scalar that this loss term adds to the loss of a training step."""
        raise NotImplementedError


def objective_weight(terms: Iterable[LossTerm]) -> float:
    """Return the product of the loss terms' `objective_weight`, by which the objective's loss is multiplied."""
    return math.prod(term.objective_weight for term in terms)

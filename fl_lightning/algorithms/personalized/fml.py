"""FML: each client trains a network of its own and a shared network, and each of the two distils the other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: "Federated Mutual Learning", 2020, arXiv:2006.16765, Algorithm 1.

Only the shared network (the paper's "meme" model) is sent and averaged. So the clients' own networks may have different
architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.loss_term import Step
from fl_lightning.client.losses import distillation_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import OptimizerFactory, SchedulerFactory
from fl_lightning.client.own_network import TwoLearners
from fl_lightning.client.weights import kept_model, load_weights
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.state_dicts import State
from fl_lightning.models import ModelFactory, NetworkFactory

OWN_NETWORK = "own_network"
"""The section of the client state with the client's own network."""


def output_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the batch mean of `KL(teacher || network)`. The teacher's logits get no gradient; both are `(B, C)`."""
    return distillation_loss(at_least_float32(logits), at_least_float32(teacher.detach()))


def mutual_losses(task: Mapping[str, Tensor], logits: Tensor, teacher: Tensor, share: float) -> dict[str, Tensor]:
    """Return the parts of the loss of a network that learns from another one, `s L + (1 - s) KL(teacher || network)`.

    With `s = α` it is the loss of the client's own network (`L_local`), with `s = β` that of the shared one (`L_meme`).
    With `s = 1` the distillation is left out.

    Args:
        task: The parts of `L`, the network's loss on the labels, by name.
        logits: The network's logits, `(B, C)`.
        teacher: The other network's logits, `(B, C)`, which get no gradient.
        share: `s`, in [0, 1].

    Returns:
        The parts of `L` times `s`, by name, and `(1 - s) KL(teacher || network)` as `distillation`.
    """
    if share == 1:
        return dict(task)
    return {name: share * value for name, value in task.items()} | {
        "distillation": (1 - share) * output_loss(logits, teacher)
    }


class MutualModule(TwoLearners):
    """A client's module with a shared network (`backbone`) and an own one, which distil each other.

    Loss terms are added to the loss of the shared network on the labels.

    Args:
        parts: The arguments of `ClientModule`; the backbone is the shared network.
        alpha: α.
        beta: β.
    """

    method = "FML"

    def __init__(self, *parts: Any, alpha: float, beta: float) -> None:
        super().__init__(*parts)
        self.alpha, self.beta = alpha, beta

    def own_losses(self, own: Step, shared: Step) -> dict[str, Tensor]:
        """Return the losses of the own network in a training step by name."""
        task = {self.objective.term: self.objective.loss(own.logits, own.targets)}
        return mutual_losses(task, own.logits, shared.logits, self.alpha)

    def shared_losses(self, own: Step, shared: Step) -> dict[str, Tensor]:
        """Return the losses of the shared network in a training step by name."""
        return mutual_losses(self.losses(shared), shared.logits, own.logits, self.beta)

    @property
    def loss_names(self) -> list[str]:
        """Names of the losses that are recorded: those of the shared and of the own network."""
        shared = ["distillation"] * (self.beta < 1)
        own = [self.objective.term, *["distillation"] * (self.alpha < 1)]
        return [*super().loss_names, *shared, *(f"own_{name}" for name in own)]


def two_learners(module: ClientModule) -> TwoLearners:
    """Assert that a client's module is a `TwoLearners`, and return it with this type."""
    assert isinstance(module, TwoLearners)
    return module


class FML(Algorithm):
    """Clients train an own and a shared network, which distil each other. Only the shared network is averaged.

    The client's own network is the experiment's `model`. It never leaves the client, and is evaluated as the client's
    model. The shared network is the global model. With `alpha: 1` the own networks are those of `Local`, and with
    `beta: 1` the shared network is that of FedAvg, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`. `model` is the shared network.

    Kept by a client: its own network.

    Args:
        shared_model: Builds the shared network, such as `MLP`. By default it is a copy of the client's own network,
            with the same initial weights.
        alpha: α, the weight of the labels in the loss of the own network, in [0, 1]. The rest is distillation.
        beta: β, the weight of the labels in the loss of the shared network, in [0, 1].
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    shared_model: ModelFactory | NetworkFactory | None = None
    alpha: float = number(0.5, "[0, 1]")
    beta: float = number(0.5, "[0, 1]")
    weighting: Weighting = "samples"

    search_space: ClassVar = {  # our choice, around the paper's 0.5
        "alpha": {"distribution": "uniform", "min": 0.1, "max": 0.9},
        "beta": {"distribution": "uniform", "min": 0.1, "max": 0.9},
    }
    needs_classes = True
    trains_new_clients = True
    personal_section = OWN_NETWORK

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.module_class = partial(MutualModule, alpha=self.alpha, beta=self.beta)

    def client_module(
        self,
        backbone: nn.Module,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        shared: nn.Module | None = None,
    ) -> ClientModule:
        """Return a client's LightningModule around its own network and the shared one.

        Args:
            backbone: The client's own network.
            optimizer: Builds the optimizers from the parameters of each network.
            lr_scheduler: Builds the schedulers.
            shared: The shared network; by default a copy of the client's own.
        """
        if shared is None:
            return super().client_module(backbone, optimizer, lr_scheduler)
        module = two_learners(super().client_module(shared, optimizer, lr_scheduler))
        module.set_own(backbone)
        return module

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the shared network and the client's own one, which starts with its initial weights."""
        super().receive(module, download, memory)
        if OWN_NETWORK in memory:
            load_weights(two_learners(module).own, memory[OWN_NETWORK])

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state, including its own network.

        Raises:
            NonFiniteError: The own network contains NaN or Inf.
        """
        mutual = two_learners(module)
        kept = kept_model(mutual.own, mutual.fixed, "client's own network", "Lower the learning rate.")
        return super().remember(module, upload) | {OWN_NETWORK: kept}

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Put the client's own network in place of the shared one, for evaluation."""
        module.backbone = two_learners(module).own

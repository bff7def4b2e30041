"""MyMethod: clients keep their mean prediction near the class distribution, and large clients weigh less.

A method has up to three kinds of parts. Replace them by yours, and delete those that you do not need:

- shared knowledge, here `ClassCounts`: tensors that are exchanged in addition to the weights;
- loss terms, here `PriorMatching`: what clients add to their loss;
- an aggregator, here `PowerMean`: how the server computes the next global model.

The page "Your algorithm" of the documentation describes each part, and which method to override for which purpose.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning import Aggregator, Algorithm, ClientModule, LossTerm, Round, SharedKnowledge, Step, Upload
from fl_lightning.core.message import Tensors
from fl_lightning.core.state_dicts import RunningMean, State


class ClassCounts(SharedKnowledge):
    """The number of samples of each class, over the participants of the last round."""

    name = "class_counts"  # the section of the messages
    needs_classes = True  # a dataset without classes is refused

    counts: Tensor  # on clients, each tensor that was sent is an attribute

    def initial(self, num_classes: int) -> Tensors:
        """Return the tensors that the server sends to the clients in round 1."""
        return {"counts": torch.ones(num_classes)}

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the tensors that a client uploads after its training."""
        return {"counts": torch.stack([F.one_hot(y, num_classes).sum(dim=0) for _, y in batches]).sum(dim=0).float()}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Merge the clients' uploads on the server, and return the tensors to send in the next round."""
        return {"counts": torch.stack([one.message.section(self.name)["counts"] for one in uploads]).sum(dim=0)}


class PriorMatching(LossTerm):
    """Loss term: beta · KL(class distribution of all clients ‖ mean prediction of the batch)."""

    needs_classes = True
    beta: float = 0.1

    def __post_init__(self) -> None:
        """Create the shared tensors."""
        super().__post_init__()
        self.class_counts = ClassCounts()

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The tensors that this loss term needs, which clients and server exchange in addition to the weights.

        fl-lightning sends and merges each of them.
        """
        return (self.class_counts,)

    def forward(self, step: Step) -> Tensor:
        """Return the scalar to add to the loss. `step` has the logits, features, targets, batch and network."""
        prior = self.class_counts.counts / self.class_counts.counts.sum()
        log_mean = step.logits.log_softmax(dim=1).logsumexp(dim=0) - math.log(len(step.logits))
        return self.beta * F.kl_div(log_mean, prior, reduction="sum")


class PowerMean(Aggregator):
    """Mean of the clients' models, weighted by `n_samples ** power`: 1 is FedAvg, 0 is the unweighted mean."""

    only_averages = True  # uploads are only averaged, so they may stay on the GPU

    def __init__(self, power: float) -> None:
        self.power = power

    def begin(self, round: Round) -> RunningMean:
        """Return what the uploads of a round are added to."""
        return RunningMean()

    def fold(self, folded: RunningMean, upload: Upload) -> None:
        """Add the model of an upload to the mean, as soon as the upload arrives."""
        folded.add(upload.message.section("model"), upload.n_samples**self.power)

    def finish(self, folded: RunningMean, round: Round, knowledge: State) -> State:
        """Return the next state: the global model, and anything else for the next round. The old is `round.before`."""
        return {"model": folded.value()}


class MyMethod(Algorithm):
    """Example method: FedAvg with an additional loss term on the clients and a different weighted mean on the server.

    The loss term is `PriorMatching`, and the mean is `PowerMean`. With `beta` 0 and `power` 1 it is FedAvg.

    Args:
        beta: Weight of the loss term.
        power: Power of a client's number of samples that is its weight in the mean.
    """

    beta: float = 0.1
    power: float = 0.5

    def own_terms(self) -> list[LossTerm]:
        """Return the loss terms that the method adds on the clients."""
        return [PriorMatching(beta=self.beta)]

    def own_aggregator(self) -> Aggregator:
        """Return how the server computes the next global model."""
        return PowerMean(self.power)

"""RoLoRA: clients train the factors `B` in odd rounds and the factors `A` in even rounds.

Chen, Guo, Ju, Dalal, Zhu, Khisti: "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS
2025, Algorithm 1.

The factor that is not trained in a round is the same on all clients, so the mean of the other factor gives the mean of
the products, as in FFA-LoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from fl_lightning.algorithms.adapters.fedit import FedIT
from fl_lightning.algorithms.adapters.low_rank import belongs_to_a, belongs_to_b, without_entries
from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean
from fl_lightning.algorithms.base import Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Message
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State


def frozen_half(round: int) -> Callable[[str], bool]:
    """Return the function that is true for the names of factors that are not trained in a round, from 1.

    `B` is trained first, because it begins with zeros, so that the gradient of `A` is zero.
    """
    return belongs_to_a if round % 2 else belongs_to_b


class AlternatingMean(WeightedMean):
    """The weighted mean of the entries that clients upload. All other entries of the model do not change."""

    def finish(self, folded: RunningMean, round: Round, knowledge: State) -> State:
        """Return the model with the mean of the uploaded entries."""
        return {"model": round.before["model"] | folded.value()}


class RoLoRA(FedIT):
    """FedAvg of one factor per round: `B` in odd rounds, `A` in even rounds. The other factor is frozen.

    All that is trained besides adapters, such as the head, is trained and averaged in each round.

    Bytes a round, each participant: down `trained`, up `trained - (A if round % 2 else B) + 8`. `round` is the number
    of the round.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    aggregator: Aggregator = field(init=False)

    whole = False
    only_steps_read_data = True

    def own_aggregator(self) -> Aggregator:
        """Return the mean of the entries that are uploaded."""
        return AlternatingMean(self.weighting)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the model, and freeze the factor that is not trained in this round."""
        super().receive(module, download, memory)
        is_frozen = frozen_half(module.context.round)
        for name, parameter in module.backbone.named_parameters():
            if is_frozen(name):
                parameter.requires_grad_(False)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained entries, without the frozen factor."""
        message = super().upload(module, batches, n_samples, num_classes)
        return without_entries(message, frozen_half(module.context.round))

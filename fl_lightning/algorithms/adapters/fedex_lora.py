"""FedEx-LoRA: the mean of the factors, and the error of their product added to the frozen weights.

Singhal, Ponkshe, Vepakomma: "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language
Models", ACL 2025, Section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from torch import Tensor, nn

from fl_lightning.algorithms.adapters.fedit import FedIT
from fl_lightning.algorithms.adapters.low_rank import adapter_layers, is_base_weight, without_entries
from fl_lightning.algorithms.adapters.server import Factors, KeepsFactors
from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.core.fixed_tensors import copy_shared_tensors
from fl_lightning.core.message import Message
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State


def residual(stacked: tuple[Tensor, Tensor], means: tuple[Tensor, Tensor]) -> Tensor:
    """Return `mean(B_k A_k) - mean(B_k) mean(A_k)`, the error of the product of the mean factors, in float64.

    Args:
        stacked: Factors whose product is the mean of the products, `(m, R)` and `(R, n)`.
        means: The means of the factors, `B` `(m, r)` and `A` `(r, n)`, or those of convolutions.

    Returns:
        A tensor `(m, n)`.
    """
    b, a = (mean.double().flatten(1) for mean in means)
    return stacked[0] @ stacked[1] - b @ a


class ResidualServer(KeepsFactors, Aggregator):
    """Average the factors of the adapters, and add the error of their product to the frozen weights.

    The error is computed from the means as they are stored, so it includes their rounding.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    ranks: Sequence[int] = field(default=(), init=False)

    only_in = "FedExLoRA"

    def finish(self, folded: Factors, round: Round, knowledge: State) -> State:
        """Return the model with the mean factors, and with frozen weights to which the errors are added."""
        model = round.before["model"] | folded.others.value() | folded.means()
        for layer in self.layers:
            error = residual(folded.stacked(layer), (model[layer.b], model[layer.a]))
            model[layer.base] = layer.add(model[layer.base], error, folded.dtype)
        return {"model": model}


class FedExLoRA(FedIT):
    """FedAvg of adapters, with the error of the mean factors' product added to the frozen weights of their layers.

    The global model is the frozen weight plus the mean of the clients' products, up to one rounding. The frozen weights
    of layers with adapters change, so they are part of the shared model, and clients receive them. (The paper sends the
    change of each weight as two factors of rank `(K + 1) r`, with `K` participants, to clients that take part in all
    rounds.)

    Bytes a round, each participant: down `trained + base`, up `trained + 8`.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    aggregator: Aggregator = field(init=False)

    whole = False
    only_steps_read_data = True

    def own_aggregator(self) -> Aggregator:
        """Return the mean that corrects the frozen weights."""
        return ResidualServer(self.weighting)

    def prepare_network(self, backbone: nn.Module) -> None:
        """Give the network frozen weights of its own in the layers with adapters, because they are sent.

        Raises:
            ConfigError: The network has no adapters, or others than LoRA's on linear layers and convolutions.
        """
        copy_shared_tensors(backbone, {layer.base for layer in adapter_layers(backbone)})

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained entries. The frozen weights are not uploaded."""
        return without_entries(super().upload(module, batches, n_samples, num_classes), is_base_weight)

"""FLoRA: the clients' factors are stacked, their product is added to the frozen weights, and new adapters begin.

Wang, Shen, He, Sun, Wang, Lyu, Li: "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", NeurIPS 2024, Section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fl_lightning.algorithms.adapters.fedex_lora import FedExLoRA
from fl_lightning.algorithms.adapters.ranks import receive_rank, upload_rank
from fl_lightning.algorithms.adapters.server import Factors, KeepsFactors
from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Message
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State


def new_factor(shape: torch.Size, rng: np.random.Generator) -> Tensor:
    """Return a new random factor `A` in float64, from the distribution with which peft begins.

    It is uniform in `[-1/√n, 1/√n]`, where `n` is the number of inputs.

    Args:
        shape: `(r, n)`, or that of a convolution.
        rng: Random numbers.
    """
    bound = prod(shape[1:]) ** -0.5
    return torch.from_numpy(rng.uniform(-bound, bound, shape))


class StackingServer(KeepsFactors, Aggregator):
    """Add the mean of the clients' products `B_k A_k` to the frozen weights, and begin with new adapters.

    The new `A` is random and the new `B` is zero.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        ranks: Rank of each client's adapters by its id; the list repeats. By default that of the model.
    """

    only_in = "FLoRA"

    def finish(self, folded: Factors, round: Round, knowledge: State) -> State:
        """Return the model with the new frozen weights and new adapters."""
        before = round.before["model"]
        model = before | folded.others.value()
        for layer in self.layers:
            b, a = folded.stacked(layer)
            model[layer.base] = layer.add(before[layer.base], b @ a, folded.dtype)
            model[layer.a] = new_factor(before[layer.a].shape, round.rng).to(folded.dtype)
            model[layer.b] = torch.zeros_like(before[layer.b], dtype=folded.dtype)
        return {"model": model}


class FLoRA(FedExLoRA):
    """Each round trains new adapters, whose mean product is added to the frozen weights of their layers at its end.

    The global model is the frozen weight plus the mean of the clients' products, up to one rounding, also if clients
    have adapters of different ranks. As in FedExLoRA, the frozen weights of layers with adapters are part of the shared
    model. (The paper sends the stacked factors of all participants, and each client adds them to its own copy.)

    Bytes a round, each participant, at most: down `trained + base`, up `trained + 8`. With `ranks`, a client sends and
    receives only the adapters of its own rank.

    Args:
        ranks: Rank of each client's adapters by its id, at most that of the model. The list repeats: `[8, 4]` gives
            client 2 the rank 8. By default all have that of the model. The scaling is that of the model for all.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Raises:
        ConfigError: A rank is below 1, or above that of the model's adapters.
    """

    only_steps_read_data = True
    uploads_vary = True

    ranks: Sequence[int] = ()

    def own_aggregator(self) -> Aggregator:
        """Return the server that stacks the factors."""
        return StackingServer(self.weighting, self.ranks)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the model. Adapters of a smaller rank than the model's are extended by zeros."""
        super().receive(module, receive_rank(module, download), memory)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained entries, with adapters of the client's rank."""
        return upload_rank(module, super().upload(module, batches, n_samples, num_classes))

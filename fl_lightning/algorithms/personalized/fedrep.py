"""FedRep: clients first train their own head on the shared representation, then the representation.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Batches, Buffers
from fl_lightning.algorithms.personalized.fedper import FedPer
from fl_lightning.client.fine_tuning import fine_tune, learn_only, learnable
from fl_lightning.client.module import ClientModule, LossTerm
from fl_lightning.core.errors import ConfigError, check_number


class HeadThenBody(ClientModule):
    """A client that trains the personal parts for some epochs, and then the others.

    What does not learn is in eval mode: its BatchNorm neither adapts nor drifts. It has no gradient, so that momentum
    and weight decay leave it alone.

    Args:
        parts: What `ClientModule` takes.
        personal: What the personal entries' names begin with.
        head_epochs: The epochs of the first phase.
    """

    def __init__(self, *parts: Any, personal: tuple[str, ...], head_epochs: int) -> None:
        super().__init__(*parts)
        self.personal, self.head_epochs = personal, head_epochs
        self.among = learnable(self.backbone)

    def check_fit(self) -> None:
        """Refuse a number of epochs that leaves none for the second phase."""
        last = self.trainer.max_epochs if self.head_epochs else None
        if last is not None and 0 <= last <= self.head_epochs:
            raise ConfigError(
                f"algorithm.head_epochs: {self.head_epochs} of trainer.max_epochs, {self.trainer.max_epochs}, leaves "
                f"the body none; set trainer.max_epochs higher"
            )

    def on_train_epoch_start(self) -> None:
        """Set which parts learn in this epoch."""
        first = self.current_epoch < self.head_epochs
        learn_only(self.backbone, lambda name: name.startswith(self.personal) == first, self.among)
        super().on_train_epoch_start()


class FedRep(FedPer):
    """FedPer with two phases: clients train the head on the received body, then the body under the new head.

    With no personal part and `head_epochs: 0` this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model - head`, up `model - head + 8`.

    Args:
        personal: Parts of the model that stay on their client and make up the head.
        head_epochs: Epochs of a fit that train the head, 0 or more; the rest of `trainer.max_epochs` trains the body.
        final_epochs: Epochs that a client trains its head for, on a body that stays as it is, before its model is
            measured or handed out; nothing of that is kept. The authors do so once, after the last round.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        loss_terms: Loss terms of any paper, added to the cross-entropy.
        aggregator: Any paper's aggregator in place of the mean.
        buffers: The shared part's BatchNorm statistics: `average`, `local` or `drop`.

    Raises:
        ConfigError: A number of epochs is below 0, or there is no personal part to train.
    """

    def __init__(
        self,
        personal: Sequence[str] = ("head",),
        head_epochs: int = 1,
        final_epochs: int = 0,
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__(personal, weighting, loss_terms, aggregator, buffers)
        for name, epochs in {"head_epochs": head_epochs, "final_epochs": final_epochs}.items():
            check_number(f"algorithm.{name}", epochs, "[0, inf)")
            if epochs and not self.personal:
                raise ConfigError(f"algorithm.{name}: {epochs} without a personal part to train; use 0, or name one")
        self.final_epochs = final_epochs
        self.module_class = partial(HeadThenBody, personal=self.personal, head_epochs=head_epochs)

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Train the head for the final epochs."""
        if self.final_epochs:
            assert isinstance(module, HeadThenBody)
            learn_only(module.backbone, lambda name: True, module.among)  # a fit ends with the head frozen
            fine_tune(module, batches, self.final_epochs, lambda name: name.startswith(self.personal))

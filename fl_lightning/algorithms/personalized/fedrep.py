"""FedRep: clients first train their own head on the shared representation, then the representation.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from fl_lightning.algorithms.base import Batches
from fl_lightning.algorithms.personalized.fedper import FedPer
from fl_lightning.client.fine_tuning import fine_tune, learn_only, trainable_names
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import belongs_to
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError


class HeadThenBody(ClientModule):
    """A client's module that trains the personal parts for some epochs, and then all other parts.

    Parts that are not trained are in eval mode, so their BatchNorm statistics do not change. They have no gradient, so
    momentum and weight decay do not change them.

    Args:
        parts: The arguments of `ClientModule`.
        personal: Prefixes or patterns of the names of personal entries.
        head_epochs: Number of epochs of the first phase.
    """

    def __init__(self, *parts: Any, personal: tuple[str, ...], head_epochs: int) -> None:
        super().__init__(*parts)
        self.personal, self.head_epochs = personal, head_epochs
        self.among = trainable_names(self.backbone)

    def check_fit(self) -> None:
        """Raise an error if `head_epochs` leaves no epoch or no step of the fit to train the body.

        Steps are not checked for held-out clients, which train only the head, and with a number of batches as
        `limit_train_batches`, as in a dry run.
        """
        if not self.head_epochs:
            return
        max_epochs, max_steps = self.trainer.max_epochs, self.trainer.max_steps  # -1: no limit
        head_steps = self.head_epochs * self.trainer.num_training_batches  # inf: not known when a Trainer.fit starts
        steps_matter = not self.context.new_client and not isinstance(self.trainer.limit_train_batches, int)
        if steps_matter and 0 < max_steps <= head_steps < inf:
            raise ConfigError(
                f"algorithm.head_epochs: the head takes {head_steps} steps of the client with most samples, and "
                f"trainer.max_steps {max_steps} leaves none for the body. Increase it, or use trainer.max_epochs."
            )
        if max_epochs is not None and 0 <= max_epochs <= self.head_epochs:
            raise ConfigError(
                f"algorithm.head_epochs: {self.head_epochs} of {max_epochs} epochs leave none for the "
                f"body. Increase trainer.max_epochs."
            )

    def on_train_epoch_start(self) -> None:
        """Freeze the body in the first epochs and the head in the later ones. Held-out clients train only the head."""
        first = self.current_epoch < self.head_epochs or (self.context.new_client and self.personal != ())
        learn_only(self, lambda name: belongs_to(name, self.personal) == first, self.among)
        super().on_train_epoch_start()


class FedRep(FedPer):
    """FedPer in two phases: clients train the head on the received body, then the body under the new head.

    With no personal part and `head_epochs: 0` this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model - head`, up `model - head + 8`.

    Kept by a client: its personal layers.

    Args:
        personal: Parts of the model that stay on their client and form the head, or patterns of its entries.
        head_epochs: Number of epochs that train the head, 0 or more. The rest of the fit trains the body.
        final_epochs: Number of epochs that a client trains its head, on a fixed body, before its model is evaluated or
            returned. The result is not kept. The authors do so once, after the last round.

    Raises:
        ConfigError: `head_epochs` or `final_epochs` is above 0, but there is no personal part.
    """

    head_epochs: int = number(1, "[0, inf)")
    final_epochs: int = number(0, "[0, inf)")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        for name, epochs in {"head_epochs": self.head_epochs, "final_epochs": self.final_epochs}.items():
            if epochs and not self.personal:
                raise ConfigError(
                    f"algorithm.{name}: {epochs} needs a personal part to train. Use 0, or set algorithm.personal."
                )
        self.module_class = partial(HeadThenBody, personal=tuple(self.personal), head_epochs=self.head_epochs)

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Train the head for `final_epochs` epochs on the client's data before evaluation."""
        if self.final_epochs:
            assert isinstance(module, HeadThenBody)
            learn_only(module, lambda name: True, module.among)  # a fit ends with the head frozen
            fine_tune(module, batches, self.final_epochs, lambda name: belongs_to(name, self.personal))

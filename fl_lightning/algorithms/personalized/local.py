"""Local: training without federation, a baseline that every method should exceed."""

from __future__ import annotations

from dataclasses import field

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Aggregation, Algorithm, Batches, Buffers
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State


class Local(Algorithm):
    """Each client trains its own model on its own data. Nothing is sent.

    All clients start from the same initial model, and a client trains in the rounds that it is sampled for. With a
    single client this is FedAvg, bit for bit.

    Bytes a round, each participant: down `0`, up `0`.

    Kept by a client: its model.

    Args:
        loss_terms: Loss terms without shared knowledge.

    Raises:
        ConfigError: A loss term needs shared knowledge.
    """

    aggregator: Aggregator = field(init=False)
    buffers: Buffers = field(default="average", init=False)

    personal = ("",)
    one_model = False
    only_steps_read_data = True

    def __post_init__(self) -> None:
        """Refuse loss terms that need shared knowledge."""
        super().__post_init__()
        for term in self.loss_terms:
            if term.knowledge:
                raise ConfigError(
                    f"algorithm.loss_terms: {term.name!r} needs shared knowledge, but Local sends nothing. Remove it."
                )

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return an empty message, because clients do not send their models."""
        return Message()

    def aggregation(self, round: Round) -> Aggregation:
        """Return an aggregation that ignores all uploads."""
        return NoAggregation(self, round)


class NoAggregation(Aggregation):
    """Leaves the server's state unchanged."""

    def add(self, upload: Upload) -> None:
        """Ignore an upload."""

    def finish(self) -> State:
        """Return the state at the start of the round."""
        return self.round.before

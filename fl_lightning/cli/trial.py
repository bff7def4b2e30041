"""A run cut down to what tries everything once: `fit --fast`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.callbacks import Checkpointing
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import FederatedData, LoadedData, Shard
from fl_lightning.engines import Worker

if TYPE_CHECKING:
    from fl_lightning.orchestrator import FederatedOrchestrator

ROUNDS, CLIENTS, BATCHES = 2, 2, 2
"""How many rounds there are, how many clients train in each, and on how many batches at most.

Two rounds: in the first there is no shared knowledge yet, and no client has anything kept.
"""

TESTED = 256
"""Samples of each test set that are looked at."""


@contextmanager
def folder(resume: bool) -> Iterator[Path]:
    """A folder for a run that is only tried out; it is removed in the end.

    Raises:
        ConfigError: The run is to be resumed.
    """
    if resume:
        raise ConfigError("fast: a run is tried out from its start; leave out either this or resume")
    with TemporaryDirectory(prefix="fl-lightning-") as place:
        yield Path(place)


def cut_down(run: FederatedOrchestrator) -> Worker:
    """Cut a run that was built and checked down to two short rounds, and return the worker for it."""
    run.rounds, run.clients_per_round = ROUNDS, min(CLIENTS, run.clients_per_round)
    run.min_clients, run.on_client_failure = 1, "raise"
    run.logger.mute()
    scored = min(run.evaluation.max_clients or CLIENTS, CLIENTS)
    run.evaluation = replace(run.evaluation, max_clients=scored)
    run.callbacks = [callback for callback in run.callbacks if not isinstance(callback, Checkpointing)]
    data = few(run.data, enough(run.worker.batch_size, run.algorithm.validation))
    return replace(run.worker, data=data, trainer=short(run.worker.trainer))


def enough(batch_size: int, validation: float) -> int:
    """Training samples that a client needs for its batches, beside the share that it holds back."""
    return math.ceil(BATCHES * batch_size / (1 - validation))


def short(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's options for that many steps; its epochs stay, since methods go by them."""
    steps, epochs = trainer.get("max_steps", -1), trainer.get("max_epochs")
    limits = {"max_steps": BATCHES if steps == -1 else min(steps, BATCHES), "limit_train_batches": BATCHES}
    return {**trainer, **limits, "max_epochs": 1 if epochs is None and steps == -1 else epochs}


def few(data: FederatedData, train: int) -> FederatedData:
    """Some of each client's samples and of the test set, from all over them; partition and network stay as they are.

    Where batches or scores are made in a way of their own, of episodes say, they get all that they count on.

    Args:
        data: All of it; it is left as it is.
        train: Training samples of each client, at most.
    """
    loaded, shards = data.data, data.shards
    if loaded.cut is LoadedData.cut:
        shards = [Shard(_some(shard.train, train), _some(shard.test, TESTED)) for shard in shards]
    if loaded.evaluate is LoadedData.evaluate:
        loaded = replace(loaded, x_test=_some(loaded.x_test, TESTED), y_test=_some(loaded.y_test, TESTED))
    return replace(data, data=loaded, shards=shards)


def _some(values: Tensor, most: int) -> Tensor:
    """At most so many rows, evenly spread: a test set may be sorted by class."""
    return values if len(values) <= most else values[torch.linspace(0, len(values) - 1, most).long()]


def tried(run: FederatedOrchestrator, seconds: float) -> str:
    """What to say of a run that was tried and in which nothing went wrong."""
    what = f"{type(run.algorithm).__name__} on {type(run.scenario.dataset).__name__}"
    callbacks = ", ".join(type(callback).__name__ for callback in run.callbacks)
    clients = f"{run.clients_per_round} of {len(run.data.shards)} clients"
    return (
        f"all is well: {what}, {ROUNDS} rounds with {clients} and up to {BATCHES} batches each: download, training, "
        f"upload, aggregation, evaluation, checkpoint, resume, {callbacks}, final model and figures in {seconds:.1f} s"
        "; no logger, nothing is left"
    )

"""Limits of a dry run (`fit --fast`), which runs every step of a run on few samples, in a temporary folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fl_lightning.core.errors import ConfigError
from fl_lightning.data.truncation import truncate_dataset
from fl_lightning.engines import Worker
from fl_lightning.evaluation.evaluation import Evaluation

ROUNDS, CLIENTS, BATCHES = 2, 2, 2
"""Number of rounds, number of clients in each round, and maximum number of training batches of a client.

Two rounds are needed because clients use shared knowledge and client state from the second round on.
"""


@contextmanager
def temporary_run_dir(resume: bool) -> Iterator[Path]:
    """Context that yields a temporary run folder for a dry run. The folder is removed on exit.

    Raises:
        ConfigError: `resume` is true.
    """
    if resume:
        raise ConfigError("fast: a dry run cannot resume. Leave out either fast or resume.")
    with TemporaryDirectory(prefix="fl-lightning-") as folder:
        yield Path(folder)


def reduce_evaluation(evaluation: Evaluation) -> Evaluation:
    """Return evaluation options changed for a dry run: few clients are evaluated."""
    return replace(evaluation, max_clients=min(evaluation.max_clients or CLIENTS, CLIENTS))


def reduce_worker(worker: Worker) -> Worker:
    """Return a copy of a `Worker` (model, data, options) for a dry run, with few samples and few training steps."""
    samples = train_samples(worker.training.batch_size, worker.algorithm.validation)
    training = replace(worker.training, trainer=shorten_fit(worker.training.trainer))
    return replace(worker, data=truncate_dataset(worker.data, samples), training=training)


def train_samples(batch_size: int, validation: float) -> int:
    """Return the number of samples of a client in a dry run, for training and validation together."""
    return math.ceil(BATCHES * batch_size / (1 - validation))


def shorten_fit(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of Trainer options that limits training to two batches, for a dry run.

    A given `max_epochs` is kept, because methods depend on it.
    """
    steps, epochs = trainer.get("max_steps", -1), trainer.get("max_epochs")
    limits = {"max_steps": BATCHES if steps == -1 else min(steps, BATCHES), "limit_train_batches": BATCHES}
    return {**trainer, **limits, "max_epochs": 1 if epochs is None and steps == -1 else epochs}

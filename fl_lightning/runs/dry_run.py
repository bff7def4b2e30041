"""Limits of a dry run (`fit --fast`), which tries every part of a run in a temporary folder."""

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
"""Number of rounds, of clients in each round, and largest number of training batches of a client.

Shared knowledge and client state are used from the second round on.
"""


@contextmanager
def temporary_run_dir(resume: bool) -> Iterator[Path]:
    """Context with a temporary run folder for a dry run. The folder is removed at the end.

    Raises:
        ConfigError: The run is to be resumed.
    """
    if resume:
        raise ConfigError("fast: a dry run cannot resume. Leave out either fast or resume.")
    with TemporaryDirectory(prefix="fl-lightning-") as folder:
        yield Path(folder)


def reduce_evaluation(evaluation: Evaluation) -> Evaluation:
    """Return evaluation options for a dry run, in which few clients are evaluated."""
    return replace(evaluation, max_clients=min(evaluation.max_clients or CLIENTS, CLIENTS))


def reduce_worker(worker: Worker) -> Worker:
    """Return a worker for a dry run, in which clients have few samples and few training steps."""
    samples = train_samples(worker.batch_size, worker.algorithm.validation)
    return replace(worker, data=truncate_dataset(worker.data, samples), trainer=shorten_fit(worker.trainer))


def train_samples(batch_size: int, validation: float) -> int:
    """Return the number of training samples that a client needs in a dry run, with its validation split."""
    return math.ceil(BATCHES * batch_size / (1 - validation))


def shorten_fit(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return Trainer options for a dry run, with few steps. Epochs stay, because methods depend on their number."""
    steps, epochs = trainer.get("max_steps", -1), trainer.get("max_epochs")
    limits = {"max_steps": BATCHES if steps == -1 else min(steps, BATCHES), "limit_train_batches": BATCHES}
    return {**trainer, **limits, "max_epochs": 1 if epochs is None and steps == -1 else epochs}

"""The limits of a dry run (`fit --fast`), which tries everything once in a temporary folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fl_lightning.core.errors import ConfigError

ROUNDS, CLIENTS, BATCHES = 2, 2, 2
"""Rounds, clients in each round, and most batches that a client trains on.

A first round alone would show neither shared knowledge nor what clients keep.
"""


@contextmanager
def temporary_run_dir(resume: bool) -> Iterator[Path]:
    """Yield a run folder that is removed in the end.

    Raises:
        ConfigError: The run is to be resumed.
    """
    if resume:
        raise ConfigError("fast: a dry run cannot resume. Leave out either fast or resume.")
    with TemporaryDirectory(prefix="fl-lightning-") as folder:
        yield Path(folder)


def train_samples(batch_size: int, validation: float) -> int:
    """Return how many training samples a client needs for its batches and for the share that it holds back."""
    return math.ceil(BATCHES * batch_size / (1 - validation))


def shorten_fit(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's options with few steps; the number of epochs stays, since methods depend on it."""
    steps, epochs = trainer.get("max_steps", -1), trainer.get("max_epochs")
    limits = {"max_steps": BATCHES if steps == -1 else min(steps, BATCHES), "limit_train_batches": BATCHES}
    return {**trainer, **limits, "max_epochs": 1 if epochs is None and steps == -1 else epochs}

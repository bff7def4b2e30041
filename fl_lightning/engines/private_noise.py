"""The noise of `dp_sgd` for a wanted epsilon."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fl_lightning.core.errors import ConfigError
from fl_lightning.engines.worker import Worker
from fl_lightning.privacy.accountant import poisson_epsilon, smallest_noise


def with_noise(worker: Worker, rounds: int) -> Worker:
    """Return a worker whose `dp_sgd.noise` follows from `dp_sgd.epsilon`; the given one if no epsilon is given.

    It is the smallest noise with which no client's epsilon exceeds that number.

    Args:
        worker: The run's worker.
        rounds: Number of rounds. Each client may take part in all of them.

    Raises:
        ConfigError: The needed noise is too large.
    """
    options = worker.training.dp_sgd
    if options is None or options.epsilon is None:
        return worker
    works = {worker.client_data.private_work(client) for client in range(len(worker.data.shards))}
    functions = [partial(poisson_epsilon, rate=q, steps=n * rounds, delta=options.delta) for q, n in sorted(works)]
    noise = 0.0
    for epsilon_of in sorted(functions, key=lambda function: function(1.0), reverse=True):  # few searches
        if epsilon_of(noise) > options.epsilon:
            try:
                noise = smallest_noise(options.epsilon, epsilon_of)
            except ConfigError as error:
                raise ConfigError(f"dp_sgd.{error}") from error
    return replace(worker, training=replace(worker.training, dp_sgd=replace(options, noise=noise, epsilon=None)))

"""Prepare an experiment for a simulated clock: each client's work, and a check of the round policy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.client_sampling import ClientSampler, UniformSampling
from fl_lightning.algorithms.protocols import SizesCohort
from fl_lightning.algorithms.server import Server
from fl_lightning.client.local_work import LocalWork
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.task import Task
from fl_lightning.engines.worker import Worker
from fl_lightning.scheduling import ClientWork, RoundPolicy


def check_round_policy(policy: RoundPolicy, algorithm: Algorithm, sampler: ClientSampler) -> None:
    """Check that the method can use the uploads that a round policy collects.

    Raises:
        ConfigError: They can be stale, and the method or the sampler does not allow that.
    """
    name, method = type(policy).__name__, type(algorithm).__name__
    if not policy.carries_over:
        return
    fix = "Use --algorithm FedBuff or FedAsync, or another round policy."
    if not algorithm.aggregator.accepts_stale:
        what = f"{name} collects uploads from models of earlier rounds, which {method} would average like new ones"
        raise ConfigError(f"round_policy: {what}. {fix}")
    if isinstance(algorithm, SizesCohort) or algorithm.public:
        raise ConfigError(f"round_policy: {method} needs all clients of a round to have the same model. {fix}")
    if type(sampler) is not UniformSampling:
        what = f"{name} replaces clients within a round by uniform draws"
        raise ConfigError(f"client_sampler: {what}. Leave {type(sampler).__name__} out.")


def planned_work(worker: Worker, server: Server) -> Iterator[ClientWork]:
    """Yield what each client does in a round: its training steps, and the sizes of the messages in both directions.

    The sizes are those of a first message from the server, and of the upload of an untrained client. Clients with the
    same network have the same.

    Raises:
        ClientFailure: The untrained client cannot upload.
    """
    sizes: dict[int, tuple[int, int]] = {}
    for client in range(server.clients):
        own = worker.for_client(client)
        if own.group not in sizes:
            download = server.download(1, client)
            result = worker.run(Task(1, client, download, {}, fit=False))
            if result.failure:
                raise result.failure
            assert result.upload
            sizes[own.group] = download.nbytes, result.upload.nbytes
        batches = max(1, math.ceil(own.client_data.sample_count(client) / own.training.batch_size))
        yield ClientWork(LocalWork.under(own.idle_trainer, batches).steps, *sizes[own.group])

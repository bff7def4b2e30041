"""Prepare an experiment for a simulated clock: each client's work, and a check of the round policy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.client_sampling import ClientSampler, UniformSampling
from fl_lightning.algorithms.protocols import SizesCohort
from fl_lightning.algorithms.server import Server
from fl_lightning.client.local_work import LocalWork
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.task import Task
from fl_lightning.engines.worker import Worker
from fl_lightning.scheduling import ClientWork, Clock, RoundPolicy, Synchronous


def check_round_policy(policy: RoundPolicy, clock: Clock, worker: Worker, sampler: ClientSampler) -> None:
    """Check that the method and the sampler allow a round policy, and a clock with hours in which clients are offline.

    Raises:
        ConfigError: They do not.
    """
    algorithm = worker.algorithm
    name, method = type(policy).__name__, type(algorithm).__name__
    fix = "Use --algorithm FedBuff, FedAsync or FedAT, or another round policy."
    if policy.carries_over and not algorithm.aggregator.accepts_stale:
        what = f"{name} collects uploads from models of earlier rounds, which {method} would average like new ones"
        raise ConfigError(f"round_policy: {what}. {fix}")
    if policy.carries_over and (isinstance(algorithm, SizesCohort) or algorithm.public):
        raise ConfigError(f"round_policy: {method} needs all clients of a round to have the same model. {fix}")
    check_sampled_clients(policy, clock, algorithm.aggregator)
    if policy.tiers > clock.clients:
        raise ConfigError(
            f"round_policy.tiers: {policy.tiers} tiers need as many clients, and there are {clock.clients}"
        )
    if policy.limits_work and worker.training.dp_sgd:
        what = "the noise of dp_sgd is for the whole training of a client"
        raise ConfigError(f"round_policy.late: {what}. Use drop instead of partial.")
    if clock.hours and isinstance(algorithm, SizesCohort):
        raise ConfigError(f"clock: {method} chooses the number of clients itself. All must be online all the time.")
    if (policy.carries_over or clock.hours) and type(sampler) is not UniformSampling:
        what = (
            f"{name} replaces clients within a round"
            if policy.carries_over
            else "clients that are offline are replaced"
        )
        raise ConfigError(f"client_sampler: {what} by uniform draws. Leave {type(sampler).__name__} out.")


def check_sampled_clients(policy: RoundPolicy, clock: Clock, aggregator: Aggregator) -> None:
    """Check that each round has the clients of the client sampler, if the aggregator needs them.

    Raises:
        ConfigError: The policy leaves out some of them, or some are offline.
    """
    part = next((type(part).__name__ for part in aggregator.chain() if part.needs_sampled_clients), None)
    if part and not isinstance(policy, Synchronous):
        what = f"{part} needs rounds of exactly the clients that client_sampler draws"
        raise ConfigError(f"round_policy: {what}. Leave {type(policy).__name__} out.")
    if part and clock.hours:
        what = f"{part} needs the clients that client_sampler draws, but some would be offline"
        raise ConfigError(f"clock: {what}. All must be online all the time.")


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

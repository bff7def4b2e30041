"""Check, before round 1, that a method's messages can be compressed."""

from __future__ import annotations

from fl_lightning.algorithms.server import Server
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.engines.worker import Worker


def check_compression(worker: Worker, server: Server) -> None:
    """Check that the method's messages have weights that the options `compression` and `download_compression` compress.

    Args:
        worker: The run's worker.
        server: The server before round 1.

    Raises:
        ConfigError: Names the option and the method, or the compressor that does not suit downloads.
    """
    algorithm, name = server.algorithm, type(server.algorithm).__name__
    given = {"compression": worker.compression, "download_compression": worker.download_compression}
    for key in (key for key, compressor in given.items() if compressor):
        if not algorithm.server:
            raise ConfigError(f"{key}: {name} has no server, so its messages are not compressed. Set {key} to null.")
        received = next(server.dense_downloads(1, [0])).section("model")
        if not (algorithm.uploads_weights and worker.exchanged and worker.codec.parameters(received)):
            what = f"{name} does not send and receive the weights of a client's network"
            raise ConfigError(f"{key}: {what}. Set {key} to null.")
    if compressor := worker.download_compression:
        if not compressor.suits_weights:
            what = f"{type(compressor).__name__} is made for updates, not for weights"
            raise ConfigError(f"download_compression: {what}. Use Float16 or QSGD.")
        clients = range(server.clients)
        for client, message in zip(clients, server.dense_downloads(1, clients), strict=True):
            if shapes(worker, message.section("model")) != shapes(worker, worker.for_client(client).exchanged):
                what = f"{name} sends other tensors than the weights of a client's network"
                raise ConfigError(f"download_compression: {what}. Set download_compression to null.")


def shapes(worker: Worker, model: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the entries of a state dict that are compressed, by name."""
    return {name: tuple(model[name].shape) for name in worker.codec.parameters(model)}

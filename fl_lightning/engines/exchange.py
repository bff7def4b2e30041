"""Check, before round 1, that clients with different networks (`Mixed`) exchange tensors of the same form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

import fl_lightning.algorithms
from fl_lightning.algorithms import Algorithm
from fl_lightning.algorithms.protocols import SlicesModel
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError, blame
from fl_lightning.core.fixed_tensors import copy_network
from fl_lightning.core.message import Tensors
from fl_lightning.core.public_names import public_classes
from fl_lightning.engines.trainer import inference
from fl_lightning.engines.worker import Worker
from fl_lightning.models import Mixed


def check_exchange(worker: Worker) -> None:
    """Check that the groups of clients in a `Mixed` exchange tensors of equal names, shapes and dtypes.

    These are the weights that are not personal, and the shared knowledge that a client would upload now, such as class
    prototypes. With one network, there is nothing to check.

    Raises:
        ConfigError: Names the first difference, and the methods of this package that work with these networks.
    """
    if not isinstance(worker.model, Mixed):
        return
    found = first_difference(worker)
    if found is None:
        return
    names = ", ".join(methods_that_work(worker)) or "none of this package's"
    size = "" if worker.model.feature_dim else ", or set model.feature_dim, for features and heads of one size"
    raise ConfigError(f"model: {type(worker.algorithm).__name__} {found}. Methods that work: {names}{size}.")


def first_difference(worker: Worker, algorithm: Algorithm | None = None) -> str | None:
    """Return a text about the first tensor that groups exchange in unlike forms; None if all groups agree.

    Args:
        worker: The run's worker.
        algorithm: A method in place of the run's.
    """
    assert isinstance(worker.model, Mixed)
    names, method = worker.model.names, algorithm or worker.algorithm
    exchanges = [exchanged(group, algorithm or group.algorithm) for group in worker.groups]
    if isinstance(method, SlicesModel):
        shapes = [{name: value.shape for name, value in weights.items()} for weights, _ in exchanges]
        clients = range(len(worker.data.shards) + len(worker.data.held_out))
        method.start_slices(shapes, [worker.model.group_of(client, worker.seed) for client in clients])
        exchanges = [({}, knowledge) for _, knowledge in exchanges]
    first, *others = (weights | knowledge for weights, knowledge in exchanges)
    for number, other in enumerate(others, 1):
        for name in {**first, **other}:
            forms = describe_form(first.get(name)), describe_form(other.get(name))
            if forms[0] != forms[1]:
                return f"exchanges {name!r}, which is {forms[0]} in {names[0]} and {forms[1]} in {names[number]}"
    return None


def exchanged(worker: Worker, algorithm: Algorithm) -> tuple[Tensors, Tensors]:
    """Return the shared weights and the shared knowledge that the clients of a group exchange with the server.

    Knowledge is computed on one batch, with the initial weights.

    Args:
        worker: The group's worker.
        algorithm: A method, the worker's own or another one.
    """
    own = algorithm is worker.algorithm
    module = worker.modules.build() if own else algorithm.client_module(copy_network(worker.template.backbone))
    entries = module.backbone.state_dict()
    found = {name: entries[name] for name in algorithm.shared_names(module.backbone) if name not in worker.fixed}
    return found, knowledge_of(module, worker)


def knowledge_of(module: ClientModule, worker: Worker) -> Tensors:
    """Return the shared knowledge that a client's module would upload, from one batch: `<knowledge>/<tensor>`."""
    objective, classes = worker.data.objective, worker.data.data.num_classes
    module.context = FitContext(class_counts=torch.ones(objective.stratum_count(classes)))
    batch = next(iter(worker.client_data.ordered_batches(None)))
    with blame("algorithm"), inference(module, worker.idle_trainer):
        pieces = {piece.name: piece.summarize(module, [batch], classes) for piece in module.pieces()}
    return {f"{piece}/{name}": value for piece, tensors in pieces.items() for name, value in tensors.items()}


def describe_form(value: Tensor | None) -> str:
    """Return a tensor's shape and dtype as text, or `missing` without a tensor."""
    return "missing" if value is None else f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def methods_that_work(worker: Worker) -> Iterator[str]:
    """Yield the names of this package's methods that, with default options, exchange the same from all groups."""
    for name in public_classes("Algorithm"):
        with suppress(Exception):  # it needs options, or does not take these networks
            algorithm = getattr(fl_lightning.algorithms, name)()
            algorithm.start(worker.algorithm.samples, frozenset(worker.fixed))
            if algorithm.server and first_difference(worker, algorithm) is None:
                yield name

"""Whole runs compared with independent loops that are written by hand, in float64.

With `FL_LIGHTNING_LOOPS=FILE`, each comparison appends its method, largest relative difference and test file.
`docs/loops.py` makes the table of docs/correctness.md from them.
"""

import copy
import os
from collections.abc import Callable, Iterator

import torch
from experiments import assert_near, descend, local_batches, samples_of
from peers import mean_by_hand, model_of, published
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import FederatedOrchestrator

State = dict[str, Tensor]


def assert_equals_loop(run: FederatedOrchestrator, weights: State, expected: State, tolerance: float = 1e-12) -> None:
    """Compare final weights of a run with those of a loop by hand, and record their largest relative difference."""
    assert_near(weights, expected, tolerance)
    if path := os.environ.get("FL_LIGHTNING_LOOPS"):
        with open(path, "a") as file:
            test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0].rpartition("/")[2]
            file.write(f"{type(run.algorithm).__name__} {relative_difference(weights, expected)} {test}\n")


def relative_difference(weights: State, expected: State) -> float:
    """Return the largest difference of two models' entries over the largest entry."""
    names = [name for name, value in expected.items() if value.is_floating_point()]
    one, other = (torch.cat([model[name].flatten().double() for name in names]) for model in (weights, expected))
    return float((one - other).abs().max() / other.abs().max())


def steps_of(run: FederatedOrchestrator, round: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs of a client's fit, in the order in which the run trains on them."""
    return ((x.double(), y) for epoch in local_batches(run, round, client) for x, y in epoch)


def cross_entropy_steps(network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], lr: float = 0.2) -> None:
    """Train a network by plain gradient descent on the cross-entropy."""
    for x, y in batches:
        descend(network, F.cross_entropy(network(x), y), lr)


def loss_by_hand(run: FederatedOrchestrator, client: int, network: nn.Module) -> float:
    """Return a network's mean cross-entropy over a client's training data, in eval mode."""
    x, y = samples_of(run, client)
    with torch.no_grad():
        return float(F.cross_entropy(copy.deepcopy(network).eval()(x.double()), y))


def plain_training(network: nn.Module, client: int, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Train a client's network on the cross-entropy alone, as the argument `train` of the loops below."""
    cross_entropy_steps(network, batches)


def rounds_by_hand(
    run: FederatedOrchestrator,
    train: Callable[..., None] = plain_training,
    serve: Callable[[State, State], State] = lambda before, mean: mean,
    weighting: str = "samples",
    personal: str | tuple[str, ...] = (),
) -> tuple[State, dict[int, State]]:
    """Return the global weights after the rounds of a loop that is written by hand, and the clients' personal ones.

    Args:
        run: The experiment. It gives the initial model, the participants and the batches.
        train: Trains a copy of the global model in place. Its arguments are the copy, the client and the batches
            `(x, y)` of its fit.
        serve: Returns the next global weights from the current ones and the mean of the clients'.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        personal: Prefixes of the entries that never leave their client.
    """
    run.load()
    model, own = copy.deepcopy(run.worker.template.backbone).train(), {}
    for round in range(1, run.rounds + 1):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local = copy.deepcopy(model)
            local.load_state_dict(own.get(client, {}), strict=False)
            train(local, client, steps_of(run, round, client))
            end = local.state_dict()
            own[client] = {name: value for name, value in end.items() if name.startswith(personal)}
            ends.append({name: value for name, value in end.items() if name not in own[client]})
            sizes.append(len(run.data.shards[client].train) if weighting == "samples" else 1)
        model.load_state_dict(serve(copy.deepcopy(model.state_dict()), mean_by_hand(ends, sizes)), strict=False)
    return {name: value for name, value in model.state_dict().items() if not name.startswith(personal)}, own


def peers_by_hand(
    run: FederatedOrchestrator,
    train: Callable[..., None] = plain_training,
    weighting: str = "samples",
    personal: str | tuple[str, ...] = (),
) -> dict[int, State]:
    """Return the models that clients on a ring of four publish, after rounds that are written by hand.

    Args:
        run: The experiment. It gives the initial model, the participants and the batches.
        train: Trains a model in place. Its arguments are the model, the client and the batches `(x, y)` of its fit.
        weighting: Weight a client and its two neighbours by their number of `samples`, or equally (`uniform`).
        personal: Prefixes of the entries that a client keeps for itself.
    """
    run.load()
    local = copy.deepcopy(run.worker.template.backbone).train()
    own = [copy.deepcopy(local.state_dict()) for _ in range(4)]
    for round in range(1, run.rounds + 1):
        heard = list(own)
        for client in run.server.participants(round):
            group = [(client + move) % 4 for move in (-1, 0, 1)]
            sizes = [len(run.data.shards[k].train) if weighting == "samples" else 1 for k in group]
            start = mean_by_hand([heard[k] for k in group], sizes)
            start |= {name: value for name, value in own[client].items() if name.startswith(personal)}
            local.load_state_dict(start)
            train(local, client, steps_of(run, round, client))
            own[client] = copy.deepcopy(local.state_dict())
    return dict(enumerate(own))


def assert_publications_equal_loop(run: FederatedOrchestrator, expected: dict[int, State]) -> None:
    """Compare what each client last published with the models of a loop by hand."""
    for client, model in expected.items():
        weights = model_of(published(run, client)[0])
        assert_equals_loop(run, weights, {name: model[name] for name in weights})


def assert_clients_equal_loop(run: FederatedOrchestrator, models: dict[int, nn.Module]) -> None:
    """Compare the clients' own models with those of a loop by hand."""
    for client, model in models.items():
        assert_equals_loop(run, run.client_module(client).backbone.state_dict(), model.state_dict())

"""Whole runs compared with independent loops that are written by hand, in float64.

With `FL_LIGHTNING_LOOPS=FILE`, each comparison appends its method and its largest relative difference to the file.
`docs/loops.py` makes the table of docs/correctness.md from them.
"""

import copy
import os
from collections.abc import Callable, Iterator

from experiments import assert_near, descend, local_batches
from peers import mean_by_hand
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import FederatedOrchestrator

State = dict[str, Tensor]


def assert_equals_loop(run: FederatedOrchestrator, weights: State, expected: State, tolerance: float = 1e-12) -> None:
    """Compare final weights of a run with those of a loop by hand, and record their largest relative difference."""
    assert_near(weights, expected, tolerance)
    if path := os.environ.get("FL_LIGHTNING_LOOPS"):
        with open(path, "a") as file:
            file.write(f"{type(run.algorithm).__name__} {relative_difference(weights, expected)}\n")


def relative_difference(weights: State, expected: State) -> float:
    """Return the largest difference of a tensor's entries over the tensor's largest entry, over all tensors."""
    gaps = [(weights[n].double() - value.double()).abs().max() for n, value in expected.items()]
    sizes = [value.double().abs().max().clamp(min=1e-300) for value in expected.values()]
    return max(float(gap / size) for gap, size in zip(gaps, sizes, strict=True))


def steps_of(run: FederatedOrchestrator, round: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs of a client's fit, in the order in which the run trains on them."""
    return ((x.double(), y) for epoch in local_batches(run, round, client) for x, y in epoch)


def cross_entropy_steps(network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], lr: float = 0.2) -> None:
    """Train a network by plain gradient descent on the cross-entropy."""
    for x, y in batches:
        descend(network, F.cross_entropy(network(x), y), lr)


def rounds_by_hand(
    run: FederatedOrchestrator,
    train: Callable[..., None],
    serve: Callable[[State, State], State] = lambda before, mean: mean,
    weighting: str = "samples",
) -> State:
    """Return the global weights after the rounds of a federated loop that is written by hand.

    Args:
        run: The experiment. It gives the initial model, the participants and the batches.
        train: Trains a copy of the global model in place. Its arguments are the copy, the client and the batches
            `(x, y)` of its fit.
        serve: Returns the next global weights from the current ones and the mean of the clients'.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    for round in range(1, run.rounds + 1):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local = copy.deepcopy(model)
            train(local, client, steps_of(run, round, client))
            ends.append(local.state_dict())
            sizes.append(len(run.data.shards[client].train) if weighting == "samples" else 1)
        model.load_state_dict(serve(copy.deepcopy(model.state_dict()), mean_by_hand(ends, sizes)))
    return model.state_dict()

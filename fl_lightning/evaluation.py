"""How good a model is, and how fair it is to clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.metrics import Row
from fl_lightning.seeding import Stream, generator

if TYPE_CHECKING:
    from fl_lightning.engines import Result


class Score(NamedTuple):
    """A model's result on one set of samples.

    Args:
        acc: Share classified correctly, in [0, 1].
        loss: Mean cross-entropy.
        n: Number of samples, or of episodes.
        interval: Half the width of the accuracy's 95 % interval, where the score is a mean over episodes.
    """

    acc: float
    loss: float
    n: int
    interval: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """What is measured beside the global model on the global test set.

    Args:
        clients: Which model stands for a client on its own test split: the one it `trained` this round, for the
            round's participants, or the one it has `received` after the aggregation, for all clients.
        personal_on_global: Also score the participants' trained models on the global test set.
        max_clients: With `received`, score no more than so many, drawn once by the run's seed; all by default.
        targets: Accuracies for which R_acc, the first round reaching it, is reported: of the global model or, for
            methods without one, of the clients' mean.

    Raises:
        ConfigError: A target is outside (0, 1], or `max_clients` below 1.
    """

    clients: Literal["trained", "received"] = "trained"
    personal_on_global: bool = False
    max_clients: int | None = None
    targets: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9])

    def __post_init__(self) -> None:
        if self.max_clients is not None and self.max_clients < 1:
            raise ConfigError(f"evaluation.max_clients: {self.max_clients} is below 1; leave it out to score all")
        for target in self.targets:
            if not 0 < target <= 1:
                raise ConfigError(f"evaluation.targets: {target} is outside (0, 1]; accuracies are shares, not percent")

    def chosen(self, clients: int, seed: int) -> Sequence[int]:
        """Ids of the clients that are scored where all could be, ascending; the same in every round and method."""
        if self.max_clients is None or self.max_clients >= clients:
            return range(clients)
        return sorted(generator(seed, Stream.EVALUATED).choice(clients, self.max_clients, replace=False).tolist())


def evaluate(module: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Score:
    """Score a module on batches, in the mode and on the device it is in."""
    parts = []  # on the device until the end: reading a number there waits for it
    n = 0
    for x, y in batches:
        logits = module(x).detach().float()
        correct = (logits.argmax(dim=1) == y).sum()
        parts.append(torch.stack([correct.float(), F.cross_entropy(logits, y, reduction="sum")]))
        n += len(y)
    if not n:
        raise ValueError("nothing to evaluate on: no batch")
    correct, loss = torch.stack(parts).cpu().double().sum(dim=0)
    return Score(float(correct) / n, float(loss) / n, n)


def client_summary(scores: Sequence[Score]) -> Row:
    """Over clients: mean accuracy, mean weighted by test samples, standard deviation, worst decile, mean loss.

    The standard deviation is the population's; the worst decile is the mean over the worst tenth of the clients,
    rounded up.
    """
    if not scores:
        return {}
    acc, loss, n = (np.array(values, dtype=np.float64) for values in zip(*(score[:3] for score in scores), strict=True))
    worst = np.sort(acc)[: math.ceil(len(acc) / 10)]
    return {
        "client/acc_mean": float(acc.mean()),
        "client/acc_weighted": float(np.average(acc, weights=n)),
        "client/acc_std": float(acc.std()),
        "client/acc_worst_decile": float(worst.mean()),
        "client/loss_mean": float(loss.mean()),
    }


def train_metrics(results: Sequence[Result]) -> Row:
    """Mean over a round's clients of the training loss and of each of its terms."""
    names = dict.fromkeys(name for result in results for name in result.losses)
    return {f"client/train_{name}": sum(r.losses.get(name, 0.0) for r in results) / len(results) for name in names}


def logged_metrics(results: Sequence[Result]) -> Row:
    """What callbacks logged in clients' fits: each client's, and the mean over the round's clients that have it."""
    own = {f"client_{r.client}/{name}": value for r in results for name, value in r.logged.items()}
    names = dict.fromkeys(name for result in results for name in result.logged)
    means = {name: fmean(r.logged[name] for r in results if name in r.logged) for name in names}
    return {**{f"client/{name}": mean for name, mean in means.items()}, **own}

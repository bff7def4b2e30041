"""Callback that measures how much clients' models differ in their output for a constant input (UA-PDFL, Fig. 12)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fl_lightning.algorithms.decentralized.ua_pdfl import DIVERGENCES, unit_input, unit_representation
from fl_lightning.callbacks.figures import Arrays, RoundFigure, trained_model
from fl_lightning.callbacks.plots import heat_map, lines, panels
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.names import labels
from fl_lightning.engines.trainer import inference

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.engines import Result
    from fl_lightning.evaluation.summary import Row


class UnitDivergence(RoundFigure):
    """Measure how much the outputs of clients' models for a constant input diverge (UA-PDFL, Fig. 12).

    Works with any method. Logs `divergence/mean` over all pairs of the round, and `divergence/<i>-<j>` for `pairs`.

    Args:
        every: Rounds between measurements. By default every round.
        pairs: Pairs of clients to log one by one.
        divergence: `jensen_shannon` or `symmetric_kl`.

    Raises:
        ConfigError: `divergence` is unknown, a pair does not name two clients of the run, or the method does not reveal
            the clients' trained models.
    """

    name = "divergence"
    looks_at_clients = True

    def __init__(
        self,
        every: int = 1,
        pairs: list[tuple[int, int]] | None = None,
        divergence: Literal["jensen_shannon", "symmetric_kl"] = "jensen_shannon",
    ) -> None:
        super().__init__(every)
        if divergence not in DIVERGENCES:
            known = " or ".join(DIVERGENCES)
            raise ConfigError(f"callbacks: UnitDivergence.divergence: {divergence!r} is not {known}")
        self.pairs, self.divergence = list(pairs or []), DIVERGENCES[divergence]
        self._seen: dict[int, Tensor] = {}

    def check(self, run: FederatedRun) -> None:
        """Check that each pair in `pairs` names two different clients of the run."""
        super().check(run)
        clients = run.clients
        for pair in self.pairs:
            if len({*pair}) != 2 or not all(0 <= client < clients for client in pair):
                reason = f"not a pair of different clients from 0 to {clients - 1}"
                raise ConfigError(f"callbacks: UnitDivergence.pairs: {[*pair]} is {reason}")

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the names of the logged divergences: the mean over all pairs, and one for each pair in `pairs`."""
        return ["divergence/mean", *(f"divergence/{i}-{j}" for i, j in self.pairs)]

    def observe(self, run: FederatedRun, result: Result) -> None:
        """Compute and store the output of one client's trained model for the constant input."""
        worker = run.worker.for_client(result.client)
        module = worker.modules.build_shared(trained_model(run, result))
        with inference(module, worker.idle_trainer):
            x, _ = next(iter(worker.client_data.test_batches()))
            self._seen[result.client] = unit_representation(module(unit_input(x))).cpu()

    def measure(self, run: FederatedRun) -> Arrays:
        """Return the client ids `(K,)`, one output vector per client `(K, C)` and the divergences of pairs `(K, K)`."""
        clients = sorted(self._seen)
        units = [self._seen[client] for client in clients]
        self._seen = {}
        gaps = np.array([[self.divergence(one, other) for other in units] for one in units])
        arrays = {"clients": np.array(clients), "units": torch.stack(units).numpy(), "divergence": gaps}
        return arrays | self._history(run, self.numbers(arrays))

    def _history(self, run: FederatedRun, now: Row) -> Arrays:
        """Return all divergences logged so far, including those of this round, as arrays to draw.

        The arrays are `rounds` `(R,)`, `names` of the divergences `(L,)` and `values` `(L, R)`. A value is NaN if the
        divergence was not logged in that round.
        """
        rows = [*(row for row in run.csv.rows if "divergence/mean" in row), now | {"round": run.round}]
        names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("divergence/")))
        values = [[row.get(name, np.nan) for row in rows] for name in names]
        rounds = np.array([row["round"] for row in rows])
        return {"rounds": rounds, "names": np.array(names), "values": np.array(values)}

    def numbers(self, arrays: Arrays) -> Row:
        """Return the mean divergence over all pairs of this round's clients, and that of each pair in `pairs`."""
        gaps, place = arrays["divergence"], {int(client): i for i, client in enumerate(arrays["clients"])}
        pairs = len(gaps) * (len(gaps) - 1)
        row = {"divergence/mean": float(gaps.sum() / pairs) if pairs else 0.0}
        present = [(i, j) for i, j in self.pairs if i in place and j in place]
        return row | {f"divergence/{i}-{j}": float(gaps[place[i], place[j]]) for i, j in present}

    def draw(self, arrays: Arrays) -> Figure:
        """Draw this round's divergences as a heat map, and all divergences logged so far as lines over rounds."""
        figure, (left, right) = panels(2)
        clients = labels(self.names.clients, arrays["clients"])
        heat_map(left, arrays["divergence"], "divergence of the trained models", clients, clients)
        names = [str(name).removeprefix("divergence/") for name in arrays["names"]]
        series = {name: (arrays["rounds"], row) for name, row in zip(names, arrays["values"], strict=True)}
        lines(right, series, "divergence")
        return figure

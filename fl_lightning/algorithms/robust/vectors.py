"""`Vectors`: the models of a round as vectors, which robust rules read in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.state_dicts import PIECE


class Chunk(NamedTuple):
    """The same `c` elements of all vectors, in float64.

    Attributes:
        rows: The clients' elements, `(n, c)`.
        origin: Those of the weights that the clients received, `(c,)`.
        centre: Those of the centre, `(c,)`.
    """

    rows: Tensor
    origin: Tensor
    centre: Tensor

    def combined(self, coefficients: Tensor) -> Tensor:
        """Return a weighted mean of the rows, the origin and the centre; see `Vectors.combine`."""
        chosen = [int(k) for k in coefficients.nonzero()]
        points = (*self.rows, self.origin, self.centre)
        first, *others = chosen
        if not others:  # c x / c may differ from x in float64
            return points[first]
        total = points[first] * coefficients[first]
        for k in others:
            total.add_(points[k], alpha=float(coefficients[k]))
        return total / coefficients.sum()


@dataclass(frozen=True)
class Vectors:
    """The vectors of n clients: the same entries of their models, one after the other, as float64.

    A vector is never built as a whole. Rules read the same few elements of all vectors at a time, so that memory for
    float64 does not grow with the model.

    Args:
        states: The clients' models.
        names: Names of the entries, all floating-point.
        origin: The weights that the clients received. A client's update is its vector minus this one.
        centre: The previous round's aggregated update, for `CenteredClipping`. Missing entries are 0.
        weights: Weight of each client for rules that use one, `(n,)`, float64.
        groups: Averages to take before a rule: for each of the matrices `(m, n)` in turn, vector i becomes the mean of
            the vectors that row i marks with 1.
    """

    states: Sequence[Tensors]
    names: Sequence[str]
    origin: Tensors
    centre: Tensors
    weights: Tensor
    groups: tuple[Tensor, ...] = ()

    @property
    def count(self) -> int:
        """Number of vectors, n."""
        return len(self.groups[-1]) if self.groups else len(self.states)

    @property
    def clients(self) -> int:
        """Number of clients, before averages."""
        return len(self.states)

    def averaged(self, members: Tensor) -> Vectors:
        """Return vectors that are means of several of these each, all with the same weight.

        Args:
            members: 1 where vector j belongs to mean i, else 0, `(m, n)`, float64.
        """
        weights = torch.ones(len(members), dtype=torch.float64)
        return replace(self, groups=(*self.groups, members), weights=weights)

    def chunks(self, name: str) -> Iterator[Chunk]:
        """Yield the elements of one entry of all vectors, at most 2 MiB at a time."""
        size = max(1, PIECE // len(self.states))
        first = self.states[0][name]
        origin = self.origin[name] if name in self.origin else torch.zeros_like(first)
        update = self.centre[name] if name in self.centre else torch.zeros_like(first)
        values = [*(state[name] for state in self.states), origin, update]
        for parts in zip(*(value.flatten().split(size) for value in values), strict=True):
            *own, start, moved = (part.double() for part in parts)
            rows = torch.stack(own)
            for members in self.groups:
                rows = members @ rows / members.sum(dim=1, keepdim=True)
            yield Chunk(rows, start, start + moved)

    def map(self, change: Callable[[Chunk], Tensor]) -> Tensors:
        """Return the vector that `change` computes from each chunk, as a state dict of float64 entries."""
        shapes = {name: self.states[0][name].shape for name in self.names}
        return {name: torch.cat([change(one) for one in self.chunks(name)]).view(shapes[name]) for name in self.names}

    def combine(self, coefficients: Tensor) -> Tensors:
        """Return a weighted mean of the n vectors, the origin and the centre, as a state dict of float64 entries.

        With equal coefficients it is the mean of `RunningMean`, bit for bit.

        Args:
            coefficients: `(n + 2,)`, float64. Their sum is not 0. The last two are those of the origin and the centre.
        """
        return self.map(lambda chunk: chunk.combined(coefficients))

    def squared_distances(self) -> Tensor:
        """Return the squared Euclidean distances between the vectors, `(n, n)`.

        They are sums of squared differences. Inner products would lose the small distances between large vectors.
        """
        total = torch.zeros(self.count, self.count, dtype=torch.float64)
        for name in self.names:
            for rows, _, _ in self.chunks(name):
                total += torch.stack([(rows - row).square().sum(dim=1) for row in rows])
        return total

    def distances_to(self, coefficients: Tensor) -> Tensor:
        """Return each vector's Euclidean distance, `(n,)`, to a weighted mean, given as for `combine`."""
        total = torch.zeros(self.count, dtype=torch.float64)
        for name in self.names:
            for chunk in self.chunks(name):
                total += (chunk.rows - chunk.combined(coefficients)).square().sum(dim=1)
        return total.sqrt()

    def coefficients(self, own: Tensor, origin: float | Tensor = 0.0, centre: float | Tensor = 0.0) -> Tensor:
        """Return coefficients for `combine`: those of the vectors `(n,)`, of the origin and of the centre."""
        return torch.cat([own, torch.as_tensor([float(origin), float(centre)], dtype=torch.float64)])

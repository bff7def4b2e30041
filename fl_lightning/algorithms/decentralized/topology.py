"""Graphs that say which peers each client can collect models from. They stay the same during a run."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path

import numpy as np

from fl_lightning.core.arguments import PartMixin, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import read_file


class Graph(PartMixin):
    """A directed graph over clients, in which edges point to the peers that a client collects from."""

    section = "algorithm.graph"

    def links(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the adjacency matrix `(clients, clients)` bool: row i marks the peers of client i, without itself."""
        raise NotImplementedError


class Complete(Graph):
    """A complete graph: every client is linked to every other."""

    def links(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the adjacency matrix with links between all pairs of clients."""
        return ~np.eye(clients, dtype=bool)


class Ring(Graph):
    """A ring of clients, each linked to its nearest neighbours on both sides.

    Args:
        reach: Number of neighbours on each side, 1 or more.

    Example:
        >>> Ring().links(5, np.random.default_rng(0))[0].nonzero()[0]
        array([1, 4])
    """

    reach: int = number(1, "[1, inf)")

    def links(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the adjacency matrix with links to the clients at most `reach` positions away on the ring."""
        steps = np.abs(np.subtract.outer(np.arange(clients), np.arange(clients)))
        return (np.minimum(steps, clients - steps) <= self.reach) & Complete().links(clients, rng)


class Torus(Graph):
    """A grid of clients with periodic boundaries, each linked to its four neighbours.

    Args:
        rows: Number of rows of the grid, a divisor of the number of clients. By default the grid is as square as
            possible.

    Raises:
        ConfigError: The number of clients is not divisible by `rows`.
    """

    rows: int | None = number(None, "[1, inf)")

    def links(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the adjacency matrix with links to the clients above, below, left and right on the grid.

        The grid wraps around: the first and the last client of a row or column are neighbours, too. By default it is as
        square as possible.
        """
        rows = self.rows or max(n for n in range(1, math.isqrt(clients) + 1) if clients % n == 0)
        if clients % rows:
            raise ConfigError(
                f"algorithm.graph.rows: {clients} clients do not fill {rows} rows of equal length. Use a divisor."
            )
        grid = np.arange(clients).reshape(rows, -1)
        links = np.zeros((clients, clients), dtype=bool)
        for axis in (0, 1):
            for step in (-1, 1):
                neighbours = np.roll(grid, step, axis)
                links[grid.ravel(), neighbours.ravel()] = True
        return links & Complete().links(clients, rng)  # a single row or column links clients to themselves


class ErdosRenyi(Graph):
    """A random graph: each pair of clients is linked with the same probability. It is drawn once per run.

    A client without links trains alone.

    Args:
        p: The probability of a link, in [0, 1].
    """

    p: float = number(0.3, "[0, 1]")

    def links(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return a random symmetric adjacency matrix, drawn from `rng`."""
        above = np.triu(rng.random((clients, clients)) < self.p, k=1)
        return above | above.T


class Adjacency(Graph):
    """A graph from a matrix in a file: a 1 in row i and column j means that client i can collect from client j.

    Args:
        path: A text file with numbers separated by spaces or commas, or a `.npy` file with a matrix.

    Raises:
        ConfigError: The file cannot be read, or is not a square matrix of zeros and ones with one row per client.
    """

    path: str

    def links(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the adjacency matrix stored in the file `path`, with zeros on the diagonal."""
        try:
            matrix = np.asarray(read_matrix(Path(self.path)))
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"algorithm.graph.path: {self.path} cannot be read: {error}") from error
        if matrix.shape != (clients, clients) or not np.isin(matrix, (0, 1)).all():
            raise ConfigError(f"algorithm.graph.path: {self.path} must hold {clients} rows of {clients} zeros and ones")
        return matrix.astype(bool) & Complete().links(clients, rng)


def read_matrix(path: Path) -> np.ndarray | list[list[float]]:
    """Read a matrix from a `.npy` file, or from a text file with one row per line."""
    content = read_file(path, 2**30, links=True)
    if path.suffix == ".npy":
        return np.load(BytesIO(content), allow_pickle=False)
    return [[float(word) for word in line.split()] for line in content.decode().replace(",", " ").splitlines()]

"""How many samples of each class each client gets, and which: the arithmetic of the partitions."""

from __future__ import annotations

import numpy as np


def check_split(parts: list[np.ndarray], clients: int, samples: int, what: str = "sample") -> None:
    """Check that a partition returned valid sample indices for every client, and no index twice.

    Error messages call a sample `what`.

    Raises:
        ValueError: A part is missing, or an index is invalid or in two parts.
    """
    if len(parts) != clients:
        raise ValueError(f"returned {len(parts)} index arrays for {clients} clients")
    held = np.concatenate(parts)
    if held.ndim != 1 or not np.issubdtype(held.dtype, np.integer):
        raise ValueError(f"returned arrays of {held.dtype}. They must be sample indices")
    if len(outside := held[(held < 0) | (held >= samples)]):
        raise ValueError(f"assigned {what} {outside[0]}, but there are {samples}, counted from 0")
    if (twice := np.bincount(held) > 1).any():
        raise ValueError(f"assigned {what} {twice.argmax()} twice. Each belongs to one client")


# --- Parts of the partitions -----------------------------------------------------------------------------------------


def indices_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return the ascending sample indices of each class that occurs in `labels`, with classes in ascending order."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    ends = [*(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(order)]
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]  # np.split is much slower


def assign_samples(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Assign samples to clients at random, given the counts by client and class; return each client's sample indices.

    `counts` has the shape `(clients, C)`, with one column per class that occurs. Samples of a class beyond the sum of
    its column are unused. The returned indices are ascending.
    """
    clients = len(counts)
    owner = np.full(len(labels), clients)
    for members, sizes in zip(indices_by_class(labels), counts.T, strict=True):
        owner[rng.permutation(members)[: sizes.sum()]] = np.repeat(np.arange(clients), sizes)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=clients)))[:clients]


def split_classes(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Split each class among clients in proportion to `shares`; return the sample counts, `(C, clients)`."""
    cuts = (np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
    return np.diff(cuts, axis=1, prepend=0, append=sizes[:, None])


def top_up_clients(counts: np.ndarray, least: int) -> np.ndarray:
    """Move samples from the largest clients to clients with fewer than `least`; return the new counts `(clients, C)`.

    The largest clients are lowered to a common level, each in proportion to its classes, by largest remainder. The
    clients with too few samples take these samples class by class, in the order of their most frequent class. The
    total of each class does not change.
    """
    sizes = counts.sum(axis=1)
    missing = np.maximum(least - sizes, 0)
    given = proportional_counts(counts, excess_above_level(sizes, missing.sum()))
    short = np.flatnonzero(missing)
    short = short[np.argsort(counts[short].argmax(axis=1), kind="stable")]
    takers = np.repeat(short, missing[short])
    taken = np.zeros_like(counts)
    np.add.at(taken, (takers, np.repeat(np.arange(counts.shape[1]), given.sum(axis=0))), 1)
    return counts - given + taken


def excess_above_level(sizes: np.ndarray, total: int) -> np.ndarray:
    """Return the amounts by which to lower the largest sizes to a common level; the amounts add up to `total`."""
    low, high = 0, int(sizes.max())  # the excess is at least `total` at low, less at high
    while high - low > 1:
        level = (low + high) // 2
        low, high = (level, high) if np.maximum(sizes - level, 0).sum() >= total else (low, level)
    above = np.maximum(sizes - low, 0)
    givers = np.flatnonzero(above)
    above[givers[len(givers) - (above.sum() - total) :]] -= 1
    return above


def proportional_counts(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Split each `totals[i]` into C integers in proportion to row i of `counts`. Return them as `(n, C)`.

    Rounds by largest remainder.
    """
    quota, rest = np.divmod(totals[:, None] * counts, np.maximum(counts.sum(axis=1, keepdims=True), 1))
    rank = np.argsort(np.argsort(-rest, axis=1, kind="stable"), axis=1, kind="stable")
    return quota + (rank < (totals - quota.sum(axis=1))[:, None])


def draw_classes(shares: np.ndarray, left: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `size` samples with class probabilities `shares`, at most `left` of each class; return the class counts.

    If a class is used up, the draw continues with the others.
    """
    drawn = np.zeros_like(left)
    while missing := size - drawn.sum():
        weights = np.where(drawn < left, shares, 0)
        if weights.sum() < np.finfo(float).tiny:  # all classes of positive probability are used up
            weights = left - drawn
        drawn = np.minimum(drawn + rng.multinomial(missing, weights / weights.sum()), left)
    return drawn


def equal_sizes(total: int, parts: int) -> np.ndarray:
    """Split `total` into `parts` integers that differ by at most one, the larger integers first."""
    return np.arange(total + parts - 1, total - 1, -1) // parts

"""A dataset that is split among clients: each client's training and test samples, and digests of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.inputs import Inputs
from fl_lightning.core.names import Names, shown_names
from fl_lightning.core.objectives import Classification, Objective
from fl_lightning.data.lazy import LazySamples, Samples
from fl_lightning.data.loaded_data import LoadedData

HASHED = 1 << 24
"""Bytes of a tensor that are hashed at a time, which bounds the memory for copies."""


@dataclass(frozen=True)
class Shard:
    """One client's training and test samples: indices into `x_train`, which contains the samples of both kinds.

    Args:
        train: Samples the client trains on.
        test: Samples it is tested on, disjoint from `train`, possibly none.
    """

    train: Tensor
    test: Tensor


class PackedShards(Sequence[Shard]):
    """The training and test indices of all clients, stored in two tensors. Indexing by client returns a `Shard`.

    The tensors of a `Shard` are views.
    """

    def __init__(self, train: Sequence[np.ndarray | Tensor], test: Sequence[np.ndarray | Tensor]) -> None:
        self._parts = {
            part: (torch.from_numpy(np.concatenate(lists)), [0, *accumulate(map(len, lists))])  # indices, each start
            for part, lists in (("train", train), ("test", test))
        }
        self._last = -1, Shard(torch.empty(0), torch.empty(0))

    @classmethod
    def from_shards(cls, shards: Sequence[Shard]) -> PackedShards:
        """Convert a sequence of one `Shard` per client to a `PackedShards`; a `PackedShards` is returned unchanged."""
        return shards if isinstance(shards, cls) else cls([one.train for one in shards], [one.test for one in shards])

    def concatenate(self, part: str) -> tuple[Tensor, Tensor]:
        """Return the concatenated `train` or `test` indices of all clients, and their number per client, `(K,)`."""
        indices, starts = self._parts[part]
        return indices, torch.tensor(starts).diff()

    def __len__(self) -> int:
        return len(self._parts["train"][1]) - 1

    @overload
    def __getitem__(self, client: int) -> Shard: ...
    @overload
    def __getitem__(self, client: slice) -> list[Shard]: ...
    def __getitem__(self, client: int | slice) -> Shard | list[Shard]:
        chosen = range(len(self))[client]
        return self._shard(chosen) if isinstance(chosen, int) else [self._shard(k) for k in chosen]

    def _shard(self, k: int) -> Shard:
        if self._last[0] != k:  # a client's round asks for its shard many times
            self._last = k, Shard(*(indices[starts[k] : starts[k + 1]] for indices, starts in self._parts.values()))
        return self._last[1]


@dataclass
class FederatedData:
    """A loaded dataset, and the training and test samples of each client.

    Args:
        data: The whole dataset; its test split is the global test set. If clients are tested on parts of the test set,
            its samples also follow the training samples in `x_train` and `y_train`.
        shards: One shard per client, by client index.
        client_ids: The clients' ids in the data, by client index, those of held-out clients last. None if they have
            none.
        objective: The learning task.
        held_out: One shard per client that is held out of the training. Its client index is the position in the shards
            of all clients, those that train first.
        wanted_predictions: Test samples, and for each the class that attackers want; None if they have no such goal.

    Attributes:
        is_remote: Whether the samples are on the clients' machines and those here are placeholders.
    """

    data: LoadedData
    shards: Sequence[Shard]
    client_ids: Sequence[int | str] | None = None
    objective: Objective = field(default_factory=Classification)
    held_out: Sequence[Shard] = ()
    wanted_predictions: tuple[Samples, Tensor] | None = None
    is_remote: ClassVar[bool] = False

    @property
    def has_global_test(self) -> bool:
        """Whether there is a global test set."""
        return True

    @property
    def held_out_clients(self) -> range:
        """The indices of the clients that are held out of the training."""
        return range(len(self.shards), len(self.shards) + len(self.held_out))

    def shard(self, client: int) -> Shard:
        """Return one client's `Shard`: the indices of its training and test samples.

        Clients that are held out of the training have the last client indices.
        """
        trains = client < len(self.shards)
        return self.shards[client] if trains else self.held_out[client - len(self.shards)]

    @cached_property
    def names(self) -> Names:
        """Return the names of the clients and classes to show in tables, figures and messages."""
        classes = self.data.class_names if self.objective.classes else None
        return Names(shown_names(self.client_ids), shown_names(classes))

    def class_counts(self, part: str = "train", held_out: bool = False) -> np.ndarray:
        """Count the `train` or `test` samples by client and class: `(clients, C)`; `C` is 1 without classes.

        Args:
            part: The split.
            held_out: Count the samples of the clients that are held out, instead of those that train.
        """
        classes = self.objective.stratum_count(self.data.num_classes)
        y = self.objective.strata(self.data.y_train)
        shards = self.held_out if held_out else self.shards
        held, sizes = PackedShards.from_shards(shards).concatenate(part)
        cell = (torch.arange(len(sizes)) * classes).repeat_interleave(sizes).add_(y[held])
        return torch.bincount(cell, minlength=len(sizes) * classes).reshape(len(sizes), classes).numpy()

    def all_class_counts(self, part: str = "train") -> np.ndarray:
        """Count as `class_counts` does, with the clients that are held out of the training in the last rows."""
        everybody = (False, True) if self.held_out else (False,)
        return np.concatenate([self.class_counts(part, held_out) for held_out in everybody])

    def concatenate(self, part: str = "train") -> tuple[Tensor, Tensor]:
        """Return the concatenated `train` or `test` indices of all clients, and their number per client, `(K,)`."""
        return PackedShards.from_shards(self.shards).concatenate(part)

    def digest(self) -> dict[str, str]:
        """Return SHA-256 digests of the dataset and of the partition, to compare the data of two runs.

        Returns:
            `sha256:...` of `x_train`, `y_train` (with the number of classes), `x_test`, `y_test` and `partition`
            (each client's indices), over values, shapes, dtypes and order. Run folders record them.
        """
        data = self.data
        held = (indices for shard in (*self.shards, *self.held_out) for indices in (shard.train, shard.test))
        classes = torch.tensor(data.num_classes)
        parts: dict[str, Iterable[Tensor]] = {
            "x_train": _tensors(data.x_train),
            "y_train": [classes, data.y_train],
            "x_test": _tensors(data.x_test),
            "y_test": [data.y_test],
            "partition": held,
        }
        with ThreadPoolExecutor(len(parts)) as pool:  # hashing releases Python's lock
            return dict(zip(parts, pool.map(sha256, parts.values()), strict=True))


def _tensors(x: Samples) -> list[Tensor]:
    """Return inputs as a list of tensors: a single tensor, or several sorted by name.

    Of samples that are read on demand, these are their number and evenly spaced ones.
    """
    if isinstance(x, LazySamples):
        return [torch.tensor(len(x)), x.probe()]
    return [value for _, value in sorted(x.items())] if isinstance(x, Inputs) else [x]


def sha256(tensors: Iterable[Tensor]) -> str:
    """Return one SHA-256 digest of several tensors, computed from dtypes, shapes and values in row-major order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
        large = rows.nbytes > HASHED
        pieces = rows.split(max(1, HASHED // rows[:1].nbytes)) if large else (rows,)
        for piece in pieces:  # copies tensors on a GPU or of another layout
            flat = piece.detach().cpu().contiguous().as_strided((piece.numel(),), (1,))  # one value may have any stride
            digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"

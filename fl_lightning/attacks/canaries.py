"""Canaries: records with random labels. Each is in the training data with the probability 1/2."""

from __future__ import annotations

from dataclasses import field, replace

import torch
from torch import Tensor

from fl_lightning.attacks.base import DataAttack
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data.federated_data import FederatedData, PackedShards, Shard
from fl_lightning.data.loaded_data import LoadedData


class Canaries(DataAttack):
    """Give some training samples random wrong labels, and leave out each of them with the probability 1/2.

    These samples are canaries: a model can only learn their labels by memorising them. `MembershipAudit` guesses from
    the trained model which of them were left out (Steinke, Nasr and Jagielski 2023, Algorithm 1). The numbers of
    samples of their clients become smaller.

    Args:
        clients: The clients whose data contain canaries, as for attacks. They are left out of the clients' metrics.
        share: Share of the training samples of these clients that become canaries. A client keeps at least one sample.

    Raises:
        ConfigError: `share` is out of range, or a client is left without samples.

    Attributes:
        rows: Indices of all canaries in the training data, `(m,)`. `poison` sets them.
        included: Whether each canary is in its client's training data, `(m,)` bool. `poison` sets it.
    """

    share: float = number(0.5, "(0, 1]")
    rows: Tensor = field(default=torch.empty(0, dtype=torch.long), init=False)
    included: Tensor = field(default=torch.empty(0, dtype=torch.bool), init=False)

    def change(self, data: LoadedData, rows: Tensor) -> LoadedData:
        """Return the data with random wrong labels of the canaries. Labels do not depend on who is left out."""
        rng = generator(self.seed, Stream.ATTACKS, 0)
        shift = torch.from_numpy(rng.integers(1, data.num_classes, len(rows)))
        self.rows, self.included = rows, torch.from_numpy(rng.random(len(rows)) < 0.5)
        y = data.y_train.clone()
        y[rows] = ((y[rows] + shift) % data.num_classes).to(y.dtype)
        return replace(data, y_train=y)

    def poison(self, data: FederatedData) -> FederatedData:
        """Return the data with the canaries' labels, and without the canaries that are left out."""
        poisoned = super().poison(data)
        out = self.rows[~self.included]
        shards = [Shard(one.train[~torch.isin(one.train, out)], one.test) for one in poisoned.shards]
        if empty := [client for client in sorted(self.attackers) if not len(shards[client].train)]:
            raise ConfigError(f"adversary.share: client {empty[0]} is left without samples. Decrease it.")
        return replace(poisoned, shards=PackedShards.from_shards(shards)) if self.attackers else poisoned

"""Canaries: samples with random wrong labels. A random half of them is left out of the training data."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from experiments import digits

from fl_lightning.attacks import Canaries
from fl_lightning.core.errors import ConfigError
from fl_lightning.data.federated_data import Shard

CLEAN = digits(4).build(0)


def planted(seed=0, clients=(1, 2), share=0.5):
    attack = Canaries(clients=[*clients], share=share)
    attack.start(4, seed)
    return attack, attack.poison(CLEAN)


def test_a_random_half_of_the_canaries_is_left_out_and_nothing_else():
    attack, data = planted()
    kept, out = attack.rows[attack.included], attack.rows[~attack.included]
    for client, (before, after) in enumerate(zip(CLEAN.shards, data.shards, strict=True)):
        assert torch.equal(before.test, after.test)
        missing = np.setdiff1d(before.train, after.train)
        assert set(missing) == set(before.train.tolist()) & set(out.tolist())
        if client in (1, 2):
            own = np.isin(before.train, attack.rows).sum()
            assert own == round(0.5 * len(before.train))
            assert np.isin(kept, after.train).sum() + len(missing) >= own
        else:
            assert not len(missing)
    assert abs(len(kept) - len(out)) < 4 * len(attack.rows) ** 0.5


def test_all_canaries_have_wrong_labels_of_which_each_is_as_likely():
    attack, data = planted(clients=(0, 1, 2, 3), share=0.9)
    shift = (data.data.y_train - CLEAN.data.y_train) % 10
    assert set(shift.nonzero().flatten().tolist()) == set(attack.rows.tolist())
    counts = torch.bincount(shift[attack.rows], minlength=10)[1:]
    assert (counts - len(attack.rows) / 9).abs().max() < 5 * (len(attack.rows) / 9) ** 0.5
    assert torch.equal(data.data.x_train, CLEAN.data.x_train)


def test_labels_and_coins_are_independent_and_drawn_by_the_seed():
    (first, one), (again, two), (other, _) = planted(), planted(), planted(seed=1)
    assert torch.equal(first.included, again.included)
    assert torch.equal(one.data.y_train, two.data.y_train)
    assert not torch.equal(first.rows, other.rows)
    shift = (one.data.y_train - CLEAN.data.y_train)[first.rows] % 10
    assert abs(np.corrcoef(shift.double(), first.included.double())[0, 1]) < 4 / len(shift) ** 0.5


def test_no_clients_with_canaries_change_nothing():
    attack = Canaries(clients=0)
    attack.start(4, 0)
    assert attack.poison(CLEAN) is CLEAN


def test_a_client_without_samples_is_refused():
    shards = [Shard(CLEAN.shards[0].train[:1], CLEAN.shards[0].test), *CLEAN.shards[1:]]
    refused = 0
    for seed in range(8):
        attack = Canaries(clients=[0], share=1.0)
        attack.start(4, seed)
        try:
            attack.poison(replace(CLEAN, shards=shards))
        except ConfigError as error:
            assert str(error).startswith("adversary.share: client 0 ")  # noqa: PT017
            refused += 1
    assert 0 < refused < 8


def test_a_share_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"^adversary\.share: "):
        Canaries(share=0.0)

"""A run whose random numbers are all derived by hand, as docs/design.md says. Other loops take some from the run."""

import random

import numpy as np
import torch
from experiments import UNEQUAL, NormMLP, descend, experiment, in_float64
from loops import assert_equals_loop
from peers import mean_by_hand
from torch.nn import functional as F


def derived(stream: int, *key: int) -> int:
    """Return the seed of a purpose, which torch takes."""
    sequence = np.random.SeedSequence(7, spawn_key=(stream, *key))
    return int(sequence.generate_state(1, np.uint64)[0]) // 2


def seed_all(value: int) -> None:
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


@in_float64
def test_a_run_equals_a_loop_that_draws_everything_itself(tmp_path):
    """Initial weights, participants, batches and dropout."""
    run = experiment(tmp_path, model=NormMLP, seed=7, **UNEQUAL)
    run.fit()
    x, y = run.data.data.x_train.double(), run.data.data.y_train

    seed_all(derived(2))
    model = NormMLP((1, 8, 8), 10).double()
    for round in range(1, 4):
        rng = np.random.default_rng(np.random.SeedSequence(7, spawn_key=(3, round)))
        ends, sizes = [], []
        for client in sorted(rng.choice(4, 3, replace=False).tolist()):
            index = run.data.shards[client].train
            shuffle = torch.Generator().manual_seed(derived(4, round, client))
            local = NormMLP((1, 8, 8), 10).double()
            local.load_state_dict(model.state_dict())
            seed_all(derived(5, round, client))
            for _ in range(2):
                batches = index[torch.randperm(len(index), generator=shuffle)].split(64)
                for batch in (batch for batch in batches if len(batch) > 1):
                    descend(local, F.cross_entropy(local(x[batch]), y[batch]), 0.2)
            ends.append(local.state_dict())
            sizes.append(len(index))
        model.load_state_dict(mean_by_hand(ends, sizes))
    assert_equals_loop(run, run.state["model"], model.state_dict())

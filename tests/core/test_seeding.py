import random
from itertools import product

import numpy as np
import pytest
import torch

from fl_lightning.core.seeding import Stream, derive, generator, seed_everything


def spawned(seed: int, *key: int) -> np.random.SeedSequence:
    sequence = np.random.SeedSequence(seed)
    for number in key:
        sequence = sequence.spawn(number + 1)[number]
    return sequence


def test_streams_keep_their_numbers() -> None:
    numbers = {"PARTITION": 0, "LOCAL_SPLIT": 1, "INITIAL_WEIGHTS": 2, "PARTICIPANTS": 3, "BATCHES": 4, "TRAINING": 5}
    assert numbers.items() <= {stream.name: stream.value for stream in Stream}.items()


@pytest.mark.parametrize("key", [(), (3,), (3, 7)])
@pytest.mark.parametrize("stream", Stream)
def test_numbers_come_from_numpys_tree_of_seed_sequences(stream: Stream, key: tuple[int, ...]) -> None:
    expected = np.random.default_rng(spawned(11, stream, *key)).integers(0, 2**60, size=5)
    assert generator(11, stream, *key).integers(0, 2**60, size=5).tolist() == expected.tolist()
    assert derive(11, stream, *key) == int(spawned(11, stream, *key).generate_state(1, np.uint64)[0]) // 2


def test_seeds_of_published_runs_do_not_move() -> None:
    assert derive(0, Stream.INITIAL_WEIGHTS) == 8_226_343_694_796_210_948
    assert derive(1, Stream.BATCHES, 2, 3) == 6_892_763_258_755_775_067


def test_no_two_keys_share_a_seed() -> None:
    keys = [(*key, *place) for key in product(range(3), Stream) for place in ((), *product(range(8), range(8)))]
    assert len({derive(*key) for key in keys}) == len(keys)


def test_derived_seeds_fill_63_bits_and_torch_takes_them() -> None:
    seeds = [derive(0, Stream.BATCHES, round) for round in range(200)]
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63
    assert torch.Generator().manual_seed(max(seeds)).initial_seed() == max(seeds)
    assert {seed % 2 for seed in seeds} == {0, 1}


def test_generators_leave_the_global_state_alone() -> None:
    np.random.seed(0)
    expected = np.random.random()
    np.random.seed(0)
    generator(5, Stream.PARTITION).random(10)
    derive(5, Stream.PARTITION)
    assert np.random.random() == expected


def draws() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(()).item()


def test_seed_everything_seeds_python_numpy_and_torch_by_the_whole_key() -> None:
    seen = set()
    for key in product(range(2), [Stream.TRAINING, Stream.BATCHES], range(2), range(2)):
        seed_everything(*key)
        first = draws()
        seed_everything(*key)
        assert draws() == first
        seen.add(first)
    for column in zip(*seen, strict=True):
        assert len(set(column)) == 16

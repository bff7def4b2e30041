"""Attacks on data: what changes in the attackers' training samples, and that nothing else does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_lightning import Dataset, Inputs, LoadedData, MultiLabel, Regression
from fl_lightning.attacks import Adversary, Backdoor, LabelFlip, ModelReplacement
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data import IID, Scenario
from fl_lightning.data.lazy import LazySamples

CLIENTS, CLASSES = 5, 10


class Images(Dataset):
    """Images of random pixels with random labels: 200 for training and 60 for testing."""

    def __init__(self, dtype):
        self.dtype = dtype

    def load(self):
        rng = torch.Generator().manual_seed(0)
        x = torch.randint(200, (260, 2, 6, 5), generator=rng, dtype=torch.uint8)
        x = x if self.dtype == torch.uint8 else x / 100 - 1
        y = torch.randint(CLASSES, (260,), generator=rng)
        return LoadedData(x[:200], y[:200], x[200:], y[200:], CLASSES, prepare=torch.Tensor.float)


def data(dtype=torch.uint8):
    """Return images of five clients with 40 samples each, 10 of them for testing."""
    return Scenario(Images(dtype), IID(), CLIENTS).build(0)


def poisoned(attack, clean, attackers=(1, 3), seed=0):
    attack.clients = [*attackers]
    attack.start(len(clean.shards), seed)
    return attack.poison(clean)


def changed_rows(clean, after):
    """Return a mask of the training samples whose inputs or labels differ."""
    x = (clean.data.x_train != after.data.x_train).flatten(1).any(dim=1)
    return x | (clean.data.y_train != after.data.y_train)


ATTACKS = [
    lambda: LabelFlip(share=0.3),
    lambda: LabelFlip(source=2, target=7, share=0.5),
    lambda: Backdoor(share=0.4),
    lambda: Backdoor(trigger="blend"),
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_only_training_samples_of_attackers_change(attack):
    clean = data()
    before = clean.data.x_train.clone(), clean.data.y_train.clone()
    after = poisoned(attack(), clean)
    allowed = torch.zeros(len(clean.data.y_train), dtype=torch.bool)
    for k in (1, 3):
        allowed[clean.shards[k].train] = True
    changed = changed_rows(clean, after)
    assert changed.any()
    assert not (changed & ~allowed).any()
    assert torch.equal(clean.data.x_train, before[0])
    assert torch.equal(clean.data.y_train, before[1])
    assert after.data.x_test is clean.data.x_test
    assert after.data.y_test is clean.data.y_test
    digests = [each.digest() for each in (clean, after)]
    assert {part for part in digests[0] if digests[0][part] != digests[1][part]} <= {"x_train", "y_train"}


@pytest.mark.parametrize("attack", ATTACKS)
def test_without_attackers_the_data_are_the_same_object(attack):
    clean = data()
    assert poisoned(attack(), clean, ()) is clean
    assert Adversary(clients=[0]).poison(clean) is clean


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("attack", [LabelFlip, Backdoor])
def test_exactly_the_share_of_each_attackers_samples_changes(attack, share):
    clean = data()
    changed = changed_rows(clean, poisoned(attack(share=share), clean))
    for k in (1, 3):
        train = clean.shards[k].train
        assert len(train) == 30
        assert int(changed[train].sum()) == max(1, round(share * 30))


def test_the_samples_are_drawn_by_seed_and_client():
    clean = data()
    changed = changed_rows(clean, poisoned(LabelFlip(share=0.3), clean, seed=5))
    for k in (1, 3):
        order = generator(5, Stream.ATTACKS, 0, k).permutation(30)[:9]
        expected = torch.zeros(30, dtype=torch.bool)
        expected[torch.from_numpy(order)] = True
        assert torch.equal(changed[clean.shards[k].train], expected)
    alone = changed_rows(clean, poisoned(LabelFlip(share=0.3), clean, (3,), seed=5))
    assert torch.equal(alone[clean.shards[3].train], changed[clean.shards[3].train])


def test_all_labels_are_flipped_to_the_opposite_class():
    clean = data()
    after = poisoned(LabelFlip(), clean)
    for k in range(CLIENTS):
        rows = clean.shards[k].train
        y = clean.data.y_train[rows]
        assert torch.equal(after.data.y_train[rows], 9 - y if k in (1, 3) else y)


def test_one_class_gets_another_label():
    clean = data()
    after = poisoned(LabelFlip(source=2, target=7), clean)
    rows = clean.shards[1].train
    y = clean.data.y_train[rows]
    assert (y == 2).any()
    assert torch.equal(after.data.y_train[rows], torch.where(y == 2, 7, y))
    x, wanted = LabelFlip(source=2, target=7).wanted_predictions(clean.data)
    assert torch.equal(x, clean.data.x_test[clean.data.y_test == 2])
    assert wanted.tolist() == [7] * len(x)
    assert LabelFlip().wanted_predictions(clean.data) is None


def test_an_attacker_without_samples_of_the_class_changes_none():
    clean = data()
    y = clean.data.y_train.clone()
    y[clean.shards[1].train] = 0
    clean = replace(clean, data=replace(clean.data, y_train=y))
    changed = changed_rows(clean, poisoned(LabelFlip(source=2, target=7), clean))
    assert not changed[clean.shards[1].train].any()
    assert changed[clean.shards[3].train].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_pixel_trigger_is_a_square_of_the_largest_value(dtype):
    clean, attack = data(dtype), Backdoor(target=4, size=2, share=1.0)
    after = poisoned(attack, clean)
    rows = clean.shards[1].train
    expected = clean.data.x_train[rows].clone()
    expected[:, :, 4:6, 3:5] = 255 if dtype == torch.uint8 else clean.data.x_train.max()
    assert torch.equal(after.data.x_train[rows], expected)
    assert after.data.x_train.dtype == dtype
    assert (after.data.y_train[rows] == 4).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_blended_trigger_is_one_random_image(dtype):
    clean, attack = data(dtype), Backdoor(trigger="blend", alpha=0.25, share=1.0)
    after = poisoned(attack, clean, seed=3)
    low, high = (0, 255) if dtype == torch.uint8 else (float(v) for v in clean.data.x_train.aminmax())
    noise = low + (high - low) * generator(3, Stream.ATTACKS, 0).random((2, 6, 5))
    rows = torch.cat([clean.shards[k].train for k in (1, 3)])
    mixed = 0.75 * clean.data.x_train[rows].double().numpy() + 0.25 * noise
    expected = mixed.round().astype(np.uint8) if dtype == torch.uint8 else mixed.astype(np.float32)
    np.testing.assert_array_equal(after.data.x_train[rows].numpy(), expected)
    assert after.data.x_train.dtype == dtype


@pytest.mark.parametrize("trigger", ["pixel", "blend"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tested_images_have_the_trigger_of_the_training_images(trigger, dtype):
    clean, attack = data(dtype), Backdoor(target=4, trigger=trigger, share=1.0)
    after = poisoned(attack, clean)
    x, wanted = attack.wanted_predictions(after.data)
    others = clean.data.y_test != 4
    assert 0 < others.sum() < len(others)
    assert wanted.tolist() == [4] * int(others.sum())
    assert torch.equal(x, attack.triggered(clean.data.x_test[others]))
    rows = clean.shards[1].train
    assert torch.equal(after.data.x_train[rows], attack.triggered(clean.data.x_train[rows]))


def test_model_replacement_trains_on_the_data_of_its_attack():
    clean = data()
    one = poisoned(ModelReplacement(data=Backdoor(target=2)), clean)
    other = poisoned(Backdoor(target=2), clean)
    assert one.digest() == other.digest()
    assert poisoned(ModelReplacement(), clean) is clean
    assert ModelReplacement().wanted_predictions(clean.data) is None


def test_labels_of_several_inputs_and_of_lazy_samples_can_be_flipped():
    clean = data()
    several = replace(clean.data, x_train=Inputs({"a": clean.data.x_train}), x_test=Inputs({"a": clean.data.x_test}))
    after = poisoned(LabelFlip(), replace(clean, data=several))
    assert torch.equal(after.data.y_train, poisoned(LabelFlip(), clean).data.y_train)
    x, wanted = LabelFlip(source=2, target=7).wanted_predictions(after.data)
    assert len(x) == len(wanted) > 0


class Reader:
    who = "reader"

    def __len__(self):
        return 200

    def read(self, item):
        return torch.zeros(2, 6, 5, dtype=torch.uint8)


def without(clean, **changes):
    return replace(clean, data=replace(clean.data, **changes))


REFUSED = {
    "table": lambda c: without(c, x_train=c.data.x_train.flatten(1), x_test=c.data.x_test.flatten(1)),
    "several inputs": lambda c: without(c, x_train=Inputs({"a": c.data.x_train})),
    "lazy": lambda c: without(c, x_train=LazySamples([Reader()])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_backdoor_refuses_what_is_no_image_in_memory(name):
    with pytest.raises(ConfigError, match=r"^adversary: Backdoor changes images, but "):
        poisoned(Backdoor(), REFUSED[name](data()))


@pytest.mark.parametrize("attack", [LabelFlip, Backdoor])
def test_labels_other_than_one_class_per_sample_are_refused(attack):
    clean = data()
    masks = without(clean, y_train=torch.zeros(200, 6, 5, dtype=torch.long))
    numbers = replace(without(clean, y_train=torch.zeros(200)), objective=Regression())
    several = replace(without(clean, y_train=torch.zeros(200, 3, dtype=torch.long)), objective=MultiLabel())
    episodes = without(clean, evaluate=lambda module, batches: None)
    for other in (masks, numbers, several, episodes):
        with pytest.raises(ConfigError, match=f"^adversary: {attack.__name__} changes classes, but "):
            poisoned(attack(), other)


@pytest.mark.parametrize(
    ("attack", "key"),
    [
        (lambda: LabelFlip(source=1), "source"),
        (lambda: LabelFlip(target=1), "source"),
        (lambda: LabelFlip(source=1, target=1), "target"),
        (lambda: LabelFlip(share=0.0), "share"),
        (lambda: Backdoor(share=1.5), "share"),
        (lambda: Backdoor(alpha=0.0), "alpha"),
        (lambda: Backdoor(size=0), "size"),
        (lambda: Backdoor(target=-1), "target"),
        (lambda: Backdoor(trigger="sticker"), "trigger"),
        (lambda: ModelReplacement(data=LabelFlip(clients=[1])), "data.clients"),
    ],
)
def test_bad_options_are_refused(attack, key):
    with pytest.raises(ConfigError, match=f"^adversary.{key}: "):
        attack()


@pytest.mark.parametrize(
    ("attack", "key"),
    [
        (lambda: LabelFlip(source=10, target=1), "source"),
        (lambda: LabelFlip(source=1, target=10), "target"),
        (lambda: Backdoor(target=10), "target"),
        (lambda: Backdoor(size=6), "size"),
    ],
)
def test_options_that_do_not_fit_the_data_are_refused(attack, key):
    with pytest.raises(ConfigError, match=f"^adversary.{key}: "):
        poisoned(attack(), data())

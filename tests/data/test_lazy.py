"""`TorchDataset` with a dataset for each client, and samples that are read when a batch needs them."""

import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from experiments import experiment, same_bytes, untimed
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data import Dataset as MapStyle

from fl_lightning import ConfigError, Scenario, TorchDataset
from fl_lightning.core.seeding import Stream, derive
from fl_lightning.data import IID, ByClient, Digits, Dirichlet
from fl_lightning.data.lazy import LazySamples
from fl_lightning.data.loaders import Batches
from fl_lightning.data.torch_dataset import Items
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine

CPU = {"accelerator": "cpu", "max_epochs": 2}


def load_digits():
    data = Digits().load()
    return data.x_train.float() / 16, data.y_train, data.x_test.float() / 16, data.y_test


class Images(MapStyle):
    """Digits as a map-style dataset that counts what is read; `noise` is a random transform."""

    def __init__(self, x, y, noise=0.0, targets=True):
        self.x, self.y, self.noise, self.read = x, y, noise, []
        if targets:
            self.targets = y.tolist()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        self.read.append(i)
        x = self.x[i]
        if self.noise:
            x = x + self.noise * (torch.randn_like(x) + random.random() + np.random.rand())
        return x, int(self.y[i])


def pair(noise=0.0, targets=True):
    x, y, x_test, y_test = load_digits()
    return Images(x, y, noise, targets), Images(x_test, y_test, 0.0, targets)


def split(noise=0.0, clients=4):
    train, test = pair(noise)
    return [(Subset(train, range(k, 200, clients)), Subset(test, range(k, 60, clients))) for k in range(clients)]


def run_of(tmp_path, dataset, **options):
    scenario = Scenario(dataset, Dirichlet(0.3, min_samples=10), 4) if dataset.clients is None else None
    options = {"scenario": scenario or Scenario(dataset, ByClient()), "trainer": CPU, "clients_per_round": 3} | options
    return experiment(tmp_path, rounds=2, **options)


# --- One dataset for each client ---


def test_each_pair_of_datasets_is_a_client():
    pairs = split()
    data = Scenario(TorchDataset(clients=pairs), ByClient()).build(seed=0)
    assert len(data.shards) == 4
    for (train, test), shard in zip(pairs, data.shards, strict=True):
        for own, index in ((train, shard.train), (test, shard.test)):
            assert torch.equal(data.data.x_train[index], torch.stack([x for x, _ in own]))
            assert data.data.y_train[index].tolist() == [y for _, y in own]
    assert len(data.data.y_test) == 60  # the global test set: everybody's


def test_functions_make_the_datasets_and_sizes_may_differ():
    x, y, x_test, y_test = load_digits()
    sizes = (30, 50, 70)
    pairs = [(partial(TensorDataset, x[:n], y[:n]), partial(TensorDataset, x_test[:9], y_test[:9])) for n in sizes]
    data = Scenario(TorchDataset(clients=pairs), ByClient()).build(seed=0)
    assert tuple(len(shard.train) for shard in data.shards) == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"train: it is missing"),
        ({"train": TensorDataset}, r"test: it is missing"),
        ({"clients": []}, r"clients: it is no list of pairs"),
        ({"clients": [(1, 2, 3)]}, r"clients: it is no list of pairs"),
        ({"clients": [(1, 2)], "train": TensorDataset}, r"clients: it takes the place of train and test"),
    ],
)
def test_what_does_not_say_which_data_is_refused(options, message):
    with pytest.raises(ConfigError, match=rf"^scenario\.dataset\.{message}"):
        TorchDataset(**options)


def test_a_loader_is_answered_with_its_dataset():
    train, test = pair()
    with pytest.raises(ConfigError, match=r"^scenario\.dataset\.clients\[0\]\[1\]: .*DataLoader"):
        TorchDataset(clients=[(train, DataLoader(test))]).checked()


def test_clients_of_different_shapes_or_classes_are_refused():
    x, y, *_ = load_digits()
    small, large = TensorDataset(x[:9], y[:9]), TensorDataset(x[:9, :, :4], y[:9])
    with pytest.raises(ConfigError, match=r"^scenario\.dataset\.clients\[1\]\[0\]: TensorDataset: x is float32"):
        TorchDataset(clients=[(small, small), (large, small)]).checked()
    small.classes, other = ["a", "b"], TensorDataset(x[:9], y[:9])
    other.classes = ["b", "a"]
    with pytest.raises(ConfigError, match=r"^scenario\.dataset\.clients\[1\]\[0\]: .*classes"):
        TorchDataset(clients=[(small, small), (other, small)]).checked()


# --- Samples that are read on demand ---


ENGINES = {
    "loop": SequentialEngine,
    "fits": partial(SequentialEngine, local_loop=False),
    "processes": partial(ProcessesEngine, workers=2),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", [*ENGINES, "stacked"])
@pytest.mark.parametrize("clients", [False, True], ids=["one dataset", "own datasets"])
def test_deterministic_samples_give_the_bytes_of_the_eager_path(tmp_path, clients, engine):
    options = {"engine": (ENGINES | {"stacked": StackedEngine})[engine]()}
    runs = []
    for lazy in (False, True):
        data = TorchDataset(clients=split(), lazy=lazy) if clients else TorchDataset(*pair(), lazy=lazy)
        runs.append(run_of(tmp_path / str(lazy), data, **options))
        runs[-1].fit()
    eager, lazy = runs
    assert isinstance(lazy.data.data.x_train, LazySamples)
    assert same_bytes(eager.state["model"], lazy.state["model"])
    one, other = (untimed(run.csv.rows) for run in runs)
    assert one == other


@pytest.mark.parametrize("sampler", ["shuffle", "balanced"])
def test_a_sample_is_read_when_its_batch_is_needed(sampler):
    train, test = pair()
    data = TorchDataset(train, test, lazy=True).checked()
    train.read.clear()
    batches = Batches(data.x_train, data.y_train, torch.arange(100), 10, seed=0)
    eager = Batches(train.x, train.y, torch.arange(100), 10, seed=0)
    train.read.clear()
    for number, ((x, y), (x_eager, y_eager)) in enumerate(zip(batches, eager, strict=True), 1):
        assert torch.equal(x, x_eager)
        assert torch.equal(y, y_eager)
        assert len(train.read) <= 10 * (number + 1)  # this batch, and at most the next
    assert len(train.read) == 100


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_random_transforms_do_not_depend_on_the_engine(tmp_path, engine):
    def run(name, **options):
        return run_of(tmp_path / name, TorchDataset(*pair(noise=0.1), lazy=True), **options)

    alone, other = run("alone"), run("other", engine=ENGINES[engine]())
    plain = run_of(tmp_path / "plain", TorchDataset(*pair(), lazy=True))
    for one in (alone, other, plain):
        one.fit()
    assert same_bytes(alone.state["model"], other.state["model"])
    assert not same_bytes(alone.state["model"], plain.state["model"])


def test_each_sample_and_epoch_has_its_own_seed():
    """An independent loop with the documented seeds reads the same inputs."""
    train, test = pair(noise=0.5)
    data = TorchDataset(train, test, lazy=True).checked()
    assert data.x_train.draws
    assert not data.x_test.draws
    seed, index = derive(3, Stream.BATCHES, 2, 1), torch.arange(50, 73)
    batches = Batches(data.x_train, data.y_train, index, 8, seed)
    torch.manual_seed(7)
    passes = [torch.cat([x for x, _ in batches]) for _ in range(2)]
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))  # the global random states are left alone
    shuffle = torch.Generator().manual_seed(seed)
    for epoch, found in enumerate(passes):
        for place, i in enumerate(index[torch.randperm(len(index), generator=shuffle)].tolist()):
            own = np.random.SeedSequence(seed, spawn_key=(epoch, place)).generate_state(1, np.uint64)
            own = int(own[0]) >> 1
            random.seed(own)
            np.random.seed(own % 2**32)
            torch.manual_seed(own)
            assert torch.equal(found[place], train[i][0])


def test_evaluation_reads_the_same_inputs_each_time():
    train, test = pair(noise=0.5)
    x = TorchDataset(train, test, lazy=True).checked().x_train
    assert torch.equal(x.read(torch.tensor([3, 9])), x.read(torch.tensor([9, 3])).flip(0))


def test_the_labels_are_read_from_targets_or_from_each_item():
    train, test = pair()
    TorchDataset(train, test, lazy=True).checked()
    assert len(set(train.read)) <= 70 < len(train)
    without, test = pair(targets=False)
    data = TorchDataset(without, test, lazy=True).checked()
    assert set(without.read) == set(range(len(without)))
    assert torch.equal(data.y_train, train.y)
    part = Subset(train, [5, 7, 2])
    assert Items("", part).labels().tolist() == train.y[[5, 7, 2]].tolist()


def test_targets_that_are_other_labels_are_refused():
    train, test = pair()
    train.targets[0] = (train.targets[0] + 1) % 10
    with pytest.raises(ConfigError, match=r"targets\[0\] is \d, but item 0 has the label \d"):
        TorchDataset(train, test, lazy=True).checked()


class Pairs(Images):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return {"image": x}, y


def test_several_inputs_are_refused():
    x, y, *_ = load_digits()
    with pytest.raises(ConfigError, match=r"^scenario\.dataset\.lazy: item 0 has several inputs"):
        TorchDataset(Pairs(x, y), Pairs(x, y), lazy=True).checked()


class Ragged(Images):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x[:, :4] if i == 77 else x), y


def test_an_odd_shape_names_the_item():
    x, y, *_ = load_digits()
    samples = LazySamples([Items("train", Ragged(x, y))])
    with pytest.raises(ConfigError, match=r"^train: x is .* in item 77"):
        samples.read(torch.arange(70, 80))


def test_one_client_with_a_random_transform_is_noticed():
    train, _ = pair()
    parts = [Items("", Subset(Images(train.x, train.y, noise), [1])) for noise in [0.0] * 150 + [0.1] + [0.0] * 50]
    assert LazySamples(parts).draws
    assert not LazySamples(parts[:150]).draws


def test_views_concatenation_and_pickles_read_nothing():
    train, _ = pair()
    samples = LazySamples([Items("train", train)])
    train.read.clear()
    both = torch.cat([samples[10:20], samples[torch.tensor([5, 3])]])
    assert both.shape == (12, 1, 8, 8)
    assert both.nbytes == 12 * 64 * 4
    assert train.read == []
    again = pickle.loads(pickle.dumps(both))
    assert torch.equal(again.read(torch.tensor([11, 0])), train.x[[3, 10]])
    with pytest.raises(TypeError, match="on demand"):
        torch.stack([samples])


def test_the_digest_sees_the_number_and_the_probed_samples():
    train, test = pair()
    digests = []
    for change in (None, "label", "first"):
        x, y = train.x.clone(), train.y.clone()
        if change == "label":
            y[1] = (y[1] + 1) % 10
        if change == "first":
            x[0] += 1
        data = Scenario(TorchDataset(Images(x, y), test, lazy=True), IID(), 2).build(seed=0)
        digests.append(data.digest())
    plain, label, first = digests
    assert {key for key in plain if plain[key] != label[key]} >= {"y_train"}
    assert {key for key in plain if plain[key] != first[key]} == {"x_train"}


def test_stacked_clients_refuse_random_transforms(tmp_path):
    run = run_of(tmp_path, TorchDataset(*pair(noise=0.1), lazy=True), engine=StackedEngine())
    with pytest.raises(ConfigError, match=r"^engine: StackedEngine .* random"):
        run.check()

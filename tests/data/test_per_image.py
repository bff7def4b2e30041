"""Random transforms of single images, such as RandAugment, named in the dataset's `augment`."""

import copy
from functools import partial

import pytest
import torch
from experiments import experiment
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

from fl_lightning import ConfigError, Dirichlet, LoadedData, Normalize, Scenario
from fl_lightning.core.seeding import Stream, derive, seed_everything
from fl_lightning.data import Dataset, Digits
from fl_lightning.data.images import make_augment
from fl_lightning.data.transforms import PerImage
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine

DOUBLE = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 2}
ENGINES = {
    "loop": SequentialEngine,
    "stacked": StackedEngine,
    "fits": partial(SequentialEngine, local_loop=False),
    "processes": partial(ProcessesEngine, workers=2),
}
RANDOM = {
    "RandAugment": v2.RandAugment(),
    "TrivialAugmentWide": v2.TrivialAugmentWide(),
    "AutoAugment": v2.AutoAugment(),
    "AugMix": v2.AugMix(),
    "Compose": v2.Compose([v2.RandomCrop(8, padding=1), v2.RandomErasing(0.5)]),
    "to float": v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]),
}


class Images(Dataset):
    """Digits as stored images of three channels."""

    def __init__(self, augment):
        self.augment = augment

    def load(self):
        data = Digits().load()
        splits, scale = (data.x_train, data.x_test), 255 / float(data.x_train.max())
        x, x_test = ((images.float() * scale).to(torch.uint8).repeat(1, 3, 1, 1) for images in splits)
        prepare = Normalize((0.3, 0.3, 0.4), (0.4, 0.5, 0.4))
        return LoadedData(x, data.y_train, x_test, data.y_test, 10, prepare, make_augment(self.augment))


def run_of(tmp_path, augment, **options):
    scenario = Scenario(Images(augment), Dirichlet(0.3, min_samples=10), 3)
    options = {"clients_per_round": 3, "optimizer": partial(torch.optim.SGD, lr=0.1), "rounds": 1} | options
    return experiment(tmp_path, scenario=scenario, trainer=DOUBLE, **options)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_image_is_changed_before_it_is_normalized(tmp_path, engine):
    """A plain loop that draws from each client's seed in the order of its batches."""
    augment = RANDOM["RandAugment"]
    run = run_of(tmp_path, augment, engine=ENGINES[engine]())
    run.load()
    data, sums, total = run.data.data, {}, 0
    for client, shard in enumerate(run.data.shards):
        network = copy.deepcopy(run.worker.template.backbone).double()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        shuffle = torch.Generator().manual_seed(derive(run.seed, Stream.BATCHES, 1, client))
        seed_everything(run.seed, Stream.TRAINING, 1, client)
        for _ in range(2):
            for chosen in shard.train[torch.randperm(len(shard.train), generator=shuffle)].split(64):
                x = torch.stack([augment(image) for image in data.x_train[chosen]])
                optimizer.zero_grad()
                cross_entropy(network(data.prepare(x).double()), data.y_train[chosen]).backward()
                optimizer.step()
        total += len(shard.train)
        for name, value in network.state_dict().items():
            sums[name] = sums.get(name, 0) + len(shard.train) * value
    run.fit()
    expected = {name: value / total for name, value in sums.items()}
    torch.testing.assert_close(dict(run.state["model"]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RANDOM)
def test_images_of_a_batch_draw_their_own_numbers(name):
    images = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8).expand(20, 3, 8, 8)
    torch.manual_seed(0)
    changed = make_augment(RANDOM[name])(images)
    assert changed.shape == images.shape
    assert len({image.numpy().tobytes() for image in changed}) > 1
    Images(RANDOM[name]).checked()


@pytest.mark.parametrize("augment", [v2.RandomCrop(6), v2.Grayscale(), v2.Normalize([0.5], [0.5]), nn.Softmax(0)])
def test_a_transform_that_does_not_fit_the_images_is_refused(augment):
    with pytest.raises(ConfigError, match=r"^scenario\.dataset: Images: augment "):
        Images(augment).checked()


def test_the_words_are_as_before():
    assert make_augment("none") is None
    assert make_augment("per_batch").per_sample is False
    assert isinstance(make_augment(v2.RandAugment()), PerImage)

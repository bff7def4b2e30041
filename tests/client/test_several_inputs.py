"""Samples of several inputs: networks whose `forward` takes a dict, a tuple, or several tensors."""

from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from experiments import SGD, digits, experiment, in_float64, same_bytes
from test_client import quiet_trainer
from test_lightning_model import federated_by_hand
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import MOON, UAPDFL, FedALA, FedAvg, FedBABU, FedProto, FedRep, PerFedAvg
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.data import Dataset, Dirichlet, LoadedData, Scenario
from fl_lightning.data.transforms import CropFlip, Normalize
from fl_lightning.models import MLP, Backbone, FromModule
from fl_lightning.models.wrapped import original_of

N, LENGTH = 240, 5


class Patients(Dataset):
    """An image, an age and the ids of some words of each patient, by name or in this order."""

    def __init__(self, named=True, **changes):
        self.named, self.changes = named, changes

    def load(self):
        drawn = torch.Generator().manual_seed(0)
        image = torch.randint(256, (N, 1, 4, 4), dtype=torch.uint8, generator=drawn)
        age = torch.rand(N, generator=drawn)
        words = torch.randint(7, (N, LENGTH), generator=drawn)
        y = (age * 2 + (words[:, 0] > 2)).long()
        x = Inputs({"image": image, "age": age, "words": words} if self.named else (image, age, words))
        fields = {"x_train": x[:180], "y_train": y[:180], "x_test": x[180:], "y_test": y[180:], "num_classes": 3}
        return LoadedData(**fields | {"prepare": Normalize()} | self.changes)


class Net(nn.Module):
    """Takes three inputs."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 4), nn.Linear(16 + 1 + 4, 12)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, image, age, words):
        return self.fc(F.relu(self.body(torch.cat([image.flatten(1), age[:, None], self.embed(words).mean(dim=1)], 1))))


class TakesAll(Net):
    """Takes the dict or tuple of inputs as one argument."""

    def forward(self, batch):
        return super().forward(**batch) if isinstance(batch, dict) else super().forward(*batch)


class Encoder(Net):
    """Returns features."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Identity()


class OwnBackbone(Backbone):
    """An encoder with three inputs, and a head."""

    def __init__(self):
        super().__init__(Encoder(), nn.Linear(12, 3), 12)


class LitNet(L.LightningModule):
    """Gets the batch in its training step and hooks."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, batch):
        return self.net(**batch)

    def on_train_batch_start(self, batch, batch_idx):
        assert type(batch[0]) is dict

    def training_step(self, batch, batch_idx):
        inputs, y = batch
        assert type(inputs) is dict
        assert list(inputs) == ["image", "age", "words"]
        loss = F.cross_entropy(self(inputs), y)
        self.log("own", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def patients(named=True, **options):
    return Scenario(Patients(named, **options), Dirichlet(1.0, min_samples=10), 3)


def own(tmp_path, model=Net, algorithm=None, named=True, **options):
    """Return an experiment on data with several inputs."""
    settings = {"scenario": patients(named), "clients_per_round": 3, "rounds": 2, "batch_size": 16}
    return experiment(tmp_path, algorithm, model=model, **settings | options)


def train_by_hand(net, batches):
    """Train a network on prepared batches, with plain calls of its `forward`."""
    optimizer = SGD(net.parameters())
    for _ in range(2):
        for x, y in batches:
            image, age, words = x.tensors.values() if isinstance(x.tensors, dict) else x.tensors
            optimizer.zero_grad()
            F.cross_entropy(net(image.float() / 255, age, words), y).backward()
            optimizer.step()


@pytest.mark.parametrize("model", [Net, TakesAll, partial(FromModule, module=f"{__name__}.Net", head="fc"), OwnBackbone])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("shared_fit", [True, False])
def test_fedavg_equals_a_loop_bit_for_bit(model, named, shared_fit, tmp_path):
    from fl_lightning.engines import SequentialEngine
    run = own(tmp_path, model, named=named, engine=SequentialEngine(shared_fit))
    run.fit()
    expected = federated_by_hand(run, Net, train_by_hand)
    trained = original_of(run.worker.modules.build_shared(run.state["model"]).backbone)
    if model is OwnBackbone:
        return
    assert same_bytes(trained.state_dict(), expected)


@pytest.mark.parametrize("algorithm", [MOON, partial(UAPDFL, n_com=2), FedALA, FedBABU, FedProto, FedRep, PerFedAvg])
def test_methods(algorithm, tmp_path):
    run = own(tmp_path, partial(FromModule, module=f"{__name__}.Net", head="fc"), algorithm())
    run.fit()
    print(run.csv.rows[-1])

def test_lit(tmp_path):
    run = own(tmp_path, LitNet, optimizer=None)
    run.fit()
    def train(net, batches):
        quiet_trainer(max_epochs=2).fit(net, [({**x.tensors, "image": x.tensors["image"]/255}, y) for x, y in batches])
    print(run.csv.rows[-1])

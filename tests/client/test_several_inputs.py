"""Samples of several inputs: networks whose `forward` takes a dict, a tuple, or several tensors."""

from functools import partial

import lightning as L
import pytest
import torch
from experiments import SGD, experiment, same_bytes
from test_client import quiet_trainer
from test_lightning_model import federated_by_hand
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import MOON, UAPDFL, FedALA, FedBABU, FedProto, FedProx, PerFedAvg
from fl_lightning.analysis.export import FORMATS, network_of, write_network
from fl_lightning.client.exported import rebuilt
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.data import Dataset, Dirichlet, FederatedData, LoadedData, Scenario
from fl_lightning.data.transforms import CropFlip, Normalize
from fl_lightning.data.truncation import truncate_dataset
from fl_lightning.engines import SequentialEngine
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

    def __init__(self, num_classes=3, in_shape=()):
        super().__init__()
        self.in_shape = in_shape
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


def tensors_of(x):
    """Return the prepared image, age and words of a stored batch."""
    image, age, words = x.tensors.values() if isinstance(x.tensors, dict) else x.tensors
    return image.float() / 255, age, words


def train_by_hand(net, batches):
    """Train a network by plain calls of its `forward` or of the parts of a backbone."""
    optimizer = SGD(net.parameters())
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            logits = net.head(net.encoder(*tensors_of(x))) if isinstance(net, Backbone) else net(*tensors_of(x))
            F.cross_entropy(logits, y).backward()
            optimizer.step()


WITH_HEAD = partial(FromModule, module=f"{__name__}.Net", head="fc")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("model", [Net, TakesAll, WITH_HEAD, OwnBackbone])
@pytest.mark.parametrize("engine", [SequentialEngine(), SequentialEngine(local_loop=False)])
@pytest.mark.fast_cases(4)
def test_fedavg_equals_a_loop_bit_for_bit(engine, model, named, tmp_path):
    run = own(tmp_path, model, named=named, engine=engine)
    run.fit()
    expected = federated_by_hand(run, OwnBackbone if model is OwnBackbone else Net, train_by_hand)
    trained = original_of(run.worker.modules.build_shared(run.state["model"]).backbone)
    assert same_bytes(trained.state_dict(), expected)


class AsLoader:
    """Yields batches as a `DataLoader` of her dataset does."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return ((dict(zip(x.tensors, tensors_of(x), strict=True)), y) for x, y in self.batches)


@pytest.mark.thorough
def test_a_lightning_module_gets_the_batches_of_a_loader_of_its_own(tmp_path):
    run = own(tmp_path, LitNet, optimizer=None)
    run.fit()

    def train(net, batches):
        quiet_trainer(max_epochs=2).fit(net, AsLoader(batches))

    assert same_bytes(run.state["model"], federated_by_hand(run, LitNet, train))
    assert run.csv.rows[-1]["client/own"] > 0


@pytest.mark.parametrize("algorithm", [MOON(), FedALA(), UAPDFL(n_com=2), FedProto(), FedBABU(), PerFedAvg()])
@pytest.mark.fast_cases(2)
def test_methods_pass_several_inputs_through_the_network(algorithm, tmp_path):
    run = own(tmp_path, WITH_HEAD, algorithm)
    run.fit()
    assert run.csv.rows[-1]["client/acc_mean"] > 0.4


def test_a_loss_term_is_added_to_the_loss_of_a_lightning_module(tmp_path):
    run = own(tmp_path, LitNet, FedProx(mu=0.1), optimizer=None)
    run.fit()
    assert run.csv.rows[-1]["client/train_proximal"] > 0


@pytest.mark.thorough
def test_worker_processes_train_alike_in_float64(tmp_path):
    trainer, weights = {"accelerator": "cpu", "max_epochs": 1, "precision": "64-true"}, []
    for engine in ("sequential", "processes"):
        run = own(tmp_path / engine, engine=engine, trainer=trainer)
        run.fit()
        weights.append(run.state["model"])
    assert weights[0]["fc.weight"].dtype == torch.float64
    assert same_bytes(*weights)


def test_clients_can_be_tested_on_the_official_test_set_and_a_dry_run_uses_few_samples():
    scenario = Scenario(Patients(), Dirichlet(1.0, min_samples=10), 3, local_test="official", train_samples=150)
    data = scenario.build(0)
    assert len(data.data.x_train) == len(data.data.y_train) == 150 + 60
    shard = data.shards[0].test
    words = Patients().load().x_test.tensors["words"]
    assert torch.equal(data.data.x_train[shard].tensors["words"], words[shard - 150])
    few = truncate_dataset(data, 4)
    assert max(len(own.train) for own in few.shards) == 4


def test_the_digest_depends_on_every_input_and_its_name():
    swapped = Inputs({"left": torch.zeros(3, 2), "right": torch.ones(3, 2)})
    digests = set()
    for x in (swapped, Inputs({"right": torch.zeros(3, 2), "left": torch.ones(3, 2)}), swapped[:2]):
        loaded = LoadedData(x, torch.zeros(3), x, torch.zeros(3), 2, Normalize())
        digests.add(FederatedData(loaded, []).digest()["x_train"])
    assert len(digests) == 3


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.fast_cases(2)
@pytest.mark.filterwarnings("ignore")
def test_a_network_of_several_inputs_is_exported(suffix, named, tmp_path):
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
        runtime = pytest.importorskip("onnxruntime")
    run = own(tmp_path / "run", named=named, rounds=1)
    run.fit()
    network = network_of(run, {"class_path": f"{__name__}.Net"})
    write_network(network, path := tmp_path / f"net{suffix}")  # it compares the outputs
    if suffix == ".onnx":
        names = [one.name for one in runtime.InferenceSession(str(path)).get_inputs()]
        assert names == (["image", "age", "words"] if named else ["input_0", "input_1", "input_2"])
    if suffix == ".ckpt":
        built = rebuilt(torch.load(path, weights_only=True)["hyper_parameters"]["backbone"], trust=True)
        assert built.in_shape == run.data.data.in_shape
        assert built(network.samples).shape == (5, 3)
    with pytest.raises(ConfigError, match=r"^--prepare: a sample has several inputs"):
        network_of(run, {"class_path": f"{__name__}.Net"}, prepare=True)


# --- Refusals ---


class OtherNames(Net):
    """Has another name for the words."""

    def forward(self, image, age, ids):
        return super().forward(image, age, ids)


FIX = r"Give a function that takes a batch of inputs \(Inputs\) and returns it changed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "stacked"}, r"engine: StackedEngine cannot stack several inputs \(its batches are one tensor\)"),
        ({"model": MLP}, r"model: MLP takes one tensor, and a sample of this dataset has 3 inputs\. Name a network"),
        ({"model": partial(MLP, hidden=[4])}, r"model: MLP takes one tensor, and a sample of this dataset has 3"),
        (
            {"model": OtherNames},
            r"model: OtherNames\.forward takes \(image, age, ids\), and the inputs of a sample are image, age, w",
        ),
        (
            {"scenario": patients(augment=CropFlip(1))},
            rf"scenario\.dataset: Patients: augment failed on a batch of inputs \(.*\)\. {FIX}",
        ),
        (
            {"scenario": patients(prepare=Normalize([0.5], [0.5]))},
            rf"scenario\.dataset: Patients: prepare failed on a batch of inputs \(mean and std are .*\)\. {FIX}",
        ),
        (
            {"scenario": patients(prepare=lambda x: x.tensors)},
            r"scenario\.dataset: Patients: prepare returned dict for a batch",
        ),
        (
            {"scenario": patients(x_train={"image": torch.zeros(180, 2)})},
            r"scenario\.dataset: Patients: x_train is of type dict, not a torch\.Tensor\. Give several inputs as",
        ),
        ({"scenario": patients(x_train=Inputs(()))}, r"scenario\.dataset: Patients: a sample has no input"),
        (
            {"scenario": patients(x_test=Inputs({"image": torch.zeros(60, 2)}))},
            r"scenario\.dataset: Patients: the inputs are x_train\['image'\], .* and x_test\['image'\]\. Both need the",
        ),
        (
            {"scenario": patients(x_train=Inputs({"ids": torch.zeros(180, 2), "mask": torch.zeros(179, 2)}))},
            r"scenario\.dataset: Patients: x_train\['mask'\] has 179 rows and y_train 180\. They need equally many",
        ),
        (
            {"scenario": patients(x_train=Inputs({"ids": torch.zeros(180, 2, dtype=torch.int32)}))},
            r"scenario\.dataset: Patients: x_train\['ids'\] is int32 of shape .*; it needs uint8, float32, int64 or",
        ),
    ],
)
def test_what_several_inputs_cannot_do_is_refused_before_round_1(options, message, tmp_path):
    with pytest.raises(ConfigError, match=f"^{message}"):
        own(tmp_path, **options).fit()
    assert not list(tmp_path.glob("checkpoints/*"))

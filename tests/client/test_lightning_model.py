"""A LightningModule as the model: its training step, optimizer, hooks and metrics are used as they are."""

from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from experiments import digits, experiment, same_bytes
from lightning.pytorch.demos.lstm import LightningLSTM
from test_client import WeightNorm, quiet_trainer
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import APPLE, FedAvg, FedProto, FedProx, FedRep
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message
from fl_lightning.core.seeding import Stream, seed_everything
from fl_lightning.core.state_dicts import RunningMean
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.engines import Task
from fl_lightning.models import FromModule
from fl_lightning.models.wrapped import original_of


class LSTM(LightningLSTM):
    """Lightning's own example, which predicts the next token, with the `forward` that evaluation needs."""

    def __init__(self):
        super().__init__(vocab_size=10)

    def forward(self, ids):
        return self.model(ids, self.model.init_hidden(len(ids)))[0]


class Classifier(L.LightningModule):
    """A LightningModule in the style of Lightning's documentation, with a metric and a schedule in steps."""

    def __init__(self, hidden=16, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2))
        self.fc = nn.Linear(hidden, 10)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.fc(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"batch": float(batch_idx)}, on_step=False, on_epoch=True)
        return {"loss": F.cross_entropy(logits, y, label_smoothing=0.1)}

    def on_before_optimizer_step(self, optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def own(model, tmp_path, algorithm=None, **options):
    """Return an experiment with the optimizer of the model."""
    settings = {"model": model, "optimizer": None, "clients_per_round": 3, "scenario": digits(3), "rounds": 2}
    return experiment(tmp_path, algorithm, **settings | options)


def federated_by_hand(run, build, train):
    """Return the weights after FedAvg, in which `train` trains the network of a client on its batches."""
    seed_everything(run.seed, Stream.INITIAL_WEIGHTS)
    weights, worker = build().state_dict(), run.worker
    for round in range(1, run.rounds + 1):
        mean = RunningMean()
        for client in range(run.clients):
            net = build()
            net.load_state_dict(weights)
            seed_everything(run.seed, Stream.TRAINING, round, client)
            train(net.train(), worker.client_data.batches(Task(round, client, Message(), {})))
            mean.add(net.state_dict(), worker.client_data.sample_count(client))
        weights = mean.value()
    return weights


@pytest.mark.thorough
def test_a_lightning_module_of_lightning_equals_a_loop_over_its_training_step_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    x = {name: rng.integers(0, 10, (n, 1)) for name, n in (("x_train", 80), ("x_test", 10))}
    np.savez(tmp_path / "a.npz", **x, **{name.replace("x", "y"): (ids[:, 0] + 1) % 10 for name, ids in x.items()})
    data = Scenario(Arrays(str(tmp_path / "a.npz")), IID(), 2, local_test=0.0)
    run = own(LSTM, tmp_path / "run", scenario=data, batch_size=20, clients_per_round=2)
    run.fit()

    def train(net, batches):
        net.log = lambda *args, **options: None
        optimizer = net.configure_optimizers()
        for _ in range(2):
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                net.training_step(batch, number).backward()
                optimizer.step()
            net.on_train_epoch_end()

    assert same_bytes(run.state["model"], federated_by_hand(run, LSTM, train))


@pytest.mark.parametrize("head", ["fc", None])
@pytest.mark.fast_cases(1)
def test_a_client_is_trained_as_by_lightning_alone_bit_for_bit(head, tmp_path):
    path = f"{__name__}.Classifier"
    model = partial(FromModule, module=path, head=head, module_args={"hidden": 12}) if head else Classifier
    run = own(model, tmp_path)
    run.fit()

    def train(net, batches):
        quiet_trainer(max_epochs=2).fit(net, batches)

    expected = federated_by_hand(run, partial(Classifier, hidden=12) if head else Classifier, train)
    trained = original_of(run.worker.modules.build_shared(run.state["model"]).backbone)
    assert same_bytes(trained.state_dict(), expected)


def test_metrics_that_the_module_logs_are_metrics_of_the_round(tmp_path):
    run = own(Classifier, tmp_path, rounds=1)
    run.fit()
    assert 0 < run.csv.rows[0]["client/accuracy"] < 1
    assert run.csv.rows[0]["client/train_training_step"] == run.csv.rows[0]["client/train_loss"] > 0


# --- With the loss terms of a method ---


def batch():
    return torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6)


def in_train_mode(module):
    module.log = lambda *args, **options: None
    return module.train()


class CountsCalls(Classifier):
    """Counts its forward passes."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class CallsLayers(Classifier):
    """Does not call its `forward` in its training step."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.fc(self.body(batch[0])), batch[1])


@pytest.mark.parametrize("kind", [CountsCalls, CallsLayers])
def test_loss_terms_are_added_to_the_returned_loss(kind):
    module = in_train_mode(ClientModule(kind(), [WeightNorm(0.3)]))
    torch.manual_seed(0)
    loss = module.training_step(batch(), 0)
    net = kind()
    net.load_state_dict(module.backbone.state_dict())
    net.log = module.log
    torch.manual_seed(0)
    returned = net.train().training_step(batch(), 0)
    expected = returned["loss"] if isinstance(returned, dict) else returned
    assert torch.equal(loss, expected + 0.3 * sum((p**2).sum() for p in net.parameters()) / 2)
    assert module.loss_names == ["training_step", "weight_norm"]
    assert module.step(batch()).logits.shape == (6, 10)


def test_terms_read_the_outputs_of_the_same_forward_pass():
    backbone = FromModule((1, 8, 8), 10, f"{__name__}.CountsCalls", "fc")
    module = in_train_mode(ClientModule(backbone, [WeightNorm(0.3)]))
    before, entries = backbone.network.calls, set(backbone.state_dict())
    step = module.step(batch())
    assert backbone.network.calls == before + 1
    assert torch.equal(step.logits, backbone.head(step.features))
    assert torch.equal(step.loss, F.cross_entropy(step.logits, step.targets, label_smoothing=0.1))
    assert set(backbone.state_dict()) == entries
    assert {name.partition(".")[0] for name in entries} == {"encoder", "head"}


@pytest.mark.parametrize("algorithm", [FedProx(mu=0.1), FedRep()])
@pytest.mark.thorough
def test_methods_train_a_lightning_module_with_a_named_head(algorithm, tmp_path):
    run = own(partial(FromModule, module=f"{__name__}.Classifier", head="fc"), tmp_path, algorithm)
    run.fit()
    assert run.csv.rows[-1]["client/acc_mean"] > 0.3


@pytest.mark.thorough
def test_worker_processes_train_it_alike(tmp_path):
    weights = []
    for engine in ("sequential", "processes"):
        run = own(Classifier, tmp_path / engine, engine=engine)
        run.fit()
        weights.append(run.state["model"])
    assert same_bytes(*weights)


def test_outside_of_training_the_training_step_is_not_called():
    module = ClientModule(Classifier()).eval()
    assert module.step(batch()).loss is None


# --- Refusals ---


class Manual(Classifier):
    """Steps its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Classifier):
    """Has two optimizers."""

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.body, self.fc)]


class NoLoss(Classifier):
    """Returns no loss."""

    def training_step(self, batch, batch_idx):
        self(batch[0])


class OwnStep(Classifier):
    """Overrides a hook that a client's fit does not call."""

    def optimizer_step(self, *args, **options):
        super().optimizer_step(*args, **options)


SCHEDULE = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Manual, {}, r"model: Manual optimizes manually, so no loss terms can be added\. Return the loss"),
        (TwoOptimizers, {}, r"model: TwoOptimizers\.configure_optimizers does not return one optimizer\. Return one"),
        (NoLoss, {}, r"model: NoLoss\.training_step returned NoneType\. Return the loss, a tensor"),
        (OwnStep, {}, r"model: OwnStep overrides optimizer_step, which a client's fit does not call\. Remove it"),
        (Classifier, {"compile": True}, r"compile: a LightningModule's own training step is not compiled"),
        (Classifier, {"engine": "stacked"}, r"engine: StackedEngine cannot stack Classifier \(it is a LightningModule"),
        *[
            (Classifier, {key: SCHEDULE}, rf"{key}: needs an optimizer in the config in place of Classifier's own")
            for key in ("lr_scheduler", "round_lr_scheduler")
        ],
    ],
)
def test_training_that_is_not_supported_is_refused_before_round_1(model, options, message, tmp_path):
    with pytest.raises(ConfigError, match=f"^{message}"):
        own(model, tmp_path, **options).fit()
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_method_that_needs_features_or_a_head_asks_for_it_by_name(tmp_path):
    options = f"--model FromModule --model.module {__name__}.Classifier --model.head fc"
    with pytest.raises(ConfigError, match=rf"^model: .* Did you mean {options}\?$"):
        own(Classifier, tmp_path, FedProto()).fit()
    with pytest.raises(ConfigError, match=rf"^algorithm.personal: 'head' .* body, fc, .* {options}$"):
        own(Classifier, tmp_path, FedRep()).fit()


def test_a_method_with_parameters_of_its_own_needs_an_optimizer_in_the_config():
    with pytest.raises(ConfigError, match=r"^algorithm: .*optimizer.*Classifier"):
        APPLE().client_module(Classifier()).configure_optimizers()


def test_an_optimizer_in_the_config_replaces_that_of_the_module_with_a_warning(tmp_path):
    run = own(Classifier, tmp_path, optimizer=partial(torch.optim.SGD, lr=0.1), rounds=1)
    with pytest.warns(UserWarning, match="Classifier's configure_optimizers ") as told:
        run.fit()
    assert len(told) == 1
    assert type(run.client_module(0).configure_optimizers()) is torch.optim.SGD
    assert ClientModule(Classifier()).has_own_optimizer
    assert FedAvg().client_module(Classifier()).has_own_optimizer

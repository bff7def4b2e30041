"""Parameters that the model itself freezes: the same everywhere, so neither sent, nor counted, nor kept."""

import json
from functools import partial
from math import prod

import pytest
import torch
from experiments import ONE_EPOCH, digits, experiment, same_bytes, task_of_round
from methods import ADAPTERS, CLASSES, METHODS, SIAMESE
from test_lightning_model import Classifier, own
from torch import nn

from fl_lightning.algorithms import MOON, Ditto, FedAvg, FedPer, FedRep, FedSiamDA, Local, PFedMe
from fl_lightning.analysis.export import network_of, write_network
from fl_lightning.client.fit import ClientTrainerView, LocalWork
from fl_lightning.core.errors import ClientFailure, ConfigError
from fl_lightning.data.federated_data import sha256
from fl_lightning.engines import ProcessesEngine, StackedEngine
from fl_lightning.engines.serialization import SerializedValue, deserialize
from fl_lightning.models import Backbone

NAMES = {"encoder.1.weight", "encoder.1.bias"}
SIZE = 4 * (64 * 12 + 12)


class Frozen(Backbone):
    """A network whose first layer is frozen, as if it was pretrained."""

    def __init__(self, in_shape, num_classes, frozen=True):
        first = nn.Linear(prod(in_shape), 12)
        for parameter in first.parameters():
            parameter.requires_grad_(not frozen)
        super().__init__(
            nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(12, 8), nn.ReLU()), nn.Linear(8, num_classes), 8
        )


def finished(run_dir, algorithm=None, **options):
    run = experiment(run_dir, algorithm, **{"model": Frozen, "rounds": 2, "trainer": ONE_EPOCH} | options)
    run.fit()
    return run


def tensors_of(state):
    return {f"{section}/{name}" for section, tensors in state.items() for name in tensors}


def bytes_of(run):
    return [[float(row[f"comm/{way}_bytes"]) for way in ("down", "up")] for row in run.csv.rows]


@pytest.mark.parametrize("engine", ["sequential", StackedEngine(), ProcessesEngine(2)])
@pytest.mark.fast_cases(1)
def test_frozen_parameters_are_neither_sent_nor_counted(tmp_path, engine):
    run = finished(tmp_path / "frozen", engine=engine)
    free = finished(tmp_path / "free", model=partial(Frozen, frozen=False), engine=engine)
    assert not {name for name in tensors_of(run.state) if name.partition("/")[2] in NAMES}
    for less, more in zip(bytes_of(run), bytes_of(free), strict=True):
        assert [all_ - some for some, all_ in zip(less, more, strict=True)] == [4 * SIZE, 4 * SIZE]  # four clients


class Unfreezing(Classifier):
    """A LightningModule that trains its body from the second epoch on."""

    frozen_in = "__init__"

    def __init__(self):
        super().__init__()
        if self.frozen_in == "__init__":
            self.body.requires_grad_(False)

    def on_fit_start(self):
        if self.frozen_in == "on_fit_start":
            self.body.requires_grad_(False)

    def on_train_epoch_start(self):
        self.body.requires_grad_(self.current_epoch >= 1)


def test_parameters_that_the_fit_unfreezes_are_refused_unless_the_fit_also_freezes_them(tmp_path, monkeypatch):
    message = (
        r"client \d, round 1: model: 'body.1.weight' is frozen when the model is built, so it is not sent, but "
        r"unfrozen in the fit. Build it trainable, and freeze it in on_fit_start.$"
    )
    with pytest.raises(ClientFailure, match=message):
        own(Unfreezing, tmp_path / "refused").fit()
    monkeypatch.setattr(Unfreezing, "frozen_in", "on_fit_start")
    run = own(Unfreezing, tmp_path / "trained")
    run.fit()
    initial = run.worker.template.backbone.state_dict()
    assert not torch.equal(run.state["model"]["body.1.weight"], initial["body.1.weight"])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", [FedPer, partial(FedRep, head_epochs=0), Local, Ditto])
def test_clients_do_not_keep_frozen_parameters(tmp_path, method):
    run = finished(tmp_path, method())
    kept = {name for state in run.memory.values() for name in tensors_of(state)}
    assert not {name for name in kept if name.partition("/")[2] in NAMES}


def test_the_final_model_and_a_resumed_run_have_no_frozen_parameters_but_an_export_has(tmp_path):
    whole = finished(tmp_path / "whole", rounds=3)
    finished(tmp_path / "part")
    part = experiment(tmp_path / "part", model=Frozen, rounds=3, trainer=ONE_EPOCH)
    part.fit(resume=True)
    models = [torch.load(folder / "final" / "model.pt", weights_only=True) for folder in (whole.run_dir, part.run_dir)]
    assert same_bytes(*models)
    initial = whole.worker.template.backbone.state_dict()
    assert models[0].keys() == initial.keys() - NAMES
    note = json.loads((tmp_path / "whole" / "final" / "base.json").read_text())
    assert note["fixed_tensors"] == sha256(initial[name] for name in sorted(NAMES, reverse=True))
    write_network(network_of(whole), tmp_path / "exported.pt")
    exported = torch.load(tmp_path / "exported.pt", weights_only=True)
    assert same_bytes(exported, initial | models[0])


def test_a_run_with_other_frozen_parameters_is_not_resumed(tmp_path):
    finished(tmp_path)
    other = experiment(tmp_path, model=Doubled, rounds=3, trainer=ONE_EPOCH)
    with pytest.raises(ConfigError, match=r"^model: "):
        other.fit(resume=True)


class Doubled(Frozen):
    """The same network with another frozen layer."""

    def __init__(self, in_shape, num_classes):
        super().__init__(in_shape, num_classes)
        self.encoder[1].weight.data *= 2


class FrozenNorm(Backbone):
    """A network with a frozen first part: a layer, a BatchNorm, a BatchNorm without parameters, and dropout."""

    def __init__(self, in_shape, num_classes):
        norms = (nn.BatchNorm1d(12), nn.BatchNorm1d(12, affine=False), nn.Dropout(0.5))
        first = nn.Sequential(nn.Linear(prod(in_shape), 12), *norms).requires_grad_(False)
        trained = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8, affine=False))
        super().__init__(nn.Sequential(nn.Flatten(), first, nn.ReLU(), trained), nn.Linear(8, num_classes), 8)


def test_buffers_of_frozen_layers_do_not_change_and_are_not_sent(tmp_path):
    run = finished(tmp_path, model=FrozenNorm)
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    fixed = {f"encoder.1.{layer}.{name}" for layer in (1, 2) for name in statistics}
    fixed |= {f"encoder.1.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")}
    assert set(run.worker.fixed) == fixed
    assert {f"encoder.3.1.{name}" for name in statistics} < run.state["model"].keys()
    assert not fixed & run.state["model"].keys()
    fresh = FrozenNorm((1, 8, 8), 10).state_dict()
    buffers = {name: value for name, value in run.worker.fixed.items() if name in fixed and "running" in name}
    assert all(torch.equal(value, fresh[name]) for name, value in buffers.items())
    module = run.worker.modules.build().train()
    training = {name for name, layer in module.backbone.encoder[1].named_modules() if layer.training}
    assert training == {"", "0", "3"}  # dropout is as in training


@pytest.mark.parametrize("method", [FedAvg, MOON, Ditto, PFedMe, FedSiamDA], ids=lambda method: method.__name__)
def test_all_copies_share_the_memory_of_frozen_parameters(tmp_path, method):
    run = experiment(tmp_path, method(), model=frozen_siamese, trainer=ONE_EPOCH)
    run.load()
    worker = run.worker
    places = {value.data_ptr() for value in worker.fixed.values()}
    slot = worker.modules.new_slot()
    modules = [worker.modules.build(), *([slot.module, slot.reset()] if slot else [])]
    task = task_of_round(run, 1, 0)
    assert not worker.run(task).failure
    module = worker.modules.receive(task)
    module.trainer = ClientTrainerView(worker.idle_trainer, worker.idle_trainer, LocalWork(1, 1))
    for term in module.terms():
        term.begin(module)
    modules += [module, *(copied for term in module.terms() for copied in copies_in(term))]
    for copied in modules:
        named = copied.named_parameters()
        frozen = [p for name, p in named if f".{name}".endswith((".0.1.weight", ".0.1.bias"))]
        assert len(frozen) >= 2
        assert {p.data_ptr() for p in frozen} == places
        assert not any(p.requires_grad for p in frozen)


def copies_in(term):
    lists = [value for value in vars(term).values() if isinstance(value, list)]
    return [module for each in lists for module in each if isinstance(module, nn.Module)]


def test_worker_processes_map_the_frozen_parameters(tmp_path):
    run = experiment(tmp_path, model=Frozen)
    run.load()
    parts = SerializedValue(run.worker).parts
    received = deserialize(parts)
    ends = [(part.ctypes.data, part.ctypes.data + len(part)) for part in parts]
    for name, value in received.fixed.items():
        assert torch.equal(value, run.worker.fixed[name])
        assert any(start <= value.data_ptr() < end for start, end in ends)
        module = received.modules.build()
        assert dict(module.backbone.named_parameters())[name].data_ptr() == value.data_ptr()


def test_a_module_given_to_the_user_has_weights_of_its_own(tmp_path):
    run = finished(tmp_path)
    before = {name: value.clone() for name, value in run.worker.fixed.items()}
    module = run.client_module(0)
    for parameter in module.parameters():
        parameter.data += 1
    assert all(torch.equal(value, before[name]) for name, value in run.worker.fixed.items())


class MovingAverage(Classifier):
    """A LightningModule that changes a frozen layer in place after each batch."""

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        next(self.body.parameters()).data.mul_(0.5)


def test_a_fit_that_changes_a_frozen_parameter_is_refused(tmp_path):
    with pytest.raises(ClientFailure, match=r"model: 'body.1.weight' is frozen"):
        own(MovingAverage, tmp_path).fit()


SIAMESE_NAMES = {"encoder.0.1.weight", "encoder.0.1.bias"}


def free_siamese(in_shape, num_classes):
    return SIAMESE(in_shape=in_shape, num_classes=num_classes, hidden=(12, 16))


def frozen_siamese(in_shape, num_classes):
    backbone = free_siamese(in_shape, num_classes)
    backbone.encoder[0][1].requires_grad_(False)
    return backbone


def models_of(run):
    return [run.client_module(client).backbone.state_dict() for client in range(6)]


# These methods select entries, masks or ratios among all parameters, so freezing some changes the selection.
OTHERS = ("APPLE", "CriticalFL", "DisPFL", "IFCA", "PeerCriticalFL")
# `ADAPTERS` are left out, too: each of their models has frozen weights, and their tests look at these.
NO_ENCODER = ("FedDistill", "FedGH", "FedProto", "FedTGP", "LGFedAvg", "Local")  # send none


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("Algorithm", *ADAPTERS)])
def test_no_method_trains_or_sends_frozen_parameters(tmp_path, name):
    method, options = METHODS[name]
    sizes, models = [], []
    for first in (frozen_siamese, free_siamese):
        run = finished(tmp_path / first.__name__, method(), **options | {"model": first})
        sizes.append(sum(map(sum, bytes_of(run))))
        if first is frozen_siamese:
            models = [*models_of(run), run.worker.template.backbone.state_dict()]
    initial = run.worker.template.backbone.state_dict()  # the same random numbers, and nothing shares them
    for model in models:
        assert all(torch.equal(model[entry], initial[entry]) for entry in SIAMESE_NAMES)
    assert sizes[0] < sizes[1] or (name in NO_ENCODER and sizes[0] == sizes[1])


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("Algorithm", *OTHERS, *ADAPTERS)])
def test_not_sending_frozen_parameters_changes_no_model(tmp_path, monkeypatch, name):
    method, options = METHODS[name]
    options = options | {"model": frozen_siamese, "scenario": digits(6, alpha=100.0)}
    run = finished(tmp_path / "less", method(), **options)
    less = models_of(run)
    sent_all = property(lambda self: frozenset(), lambda self, names: None)
    monkeypatch.setattr(type(run.algorithm), "fixed", sent_all, raising=False)
    other = finished(tmp_path / "more", method(), **options)
    for one, more in zip(less, models_of(other), strict=True):
        for entry, value in one.items():
            torch.testing.assert_close(value, more[entry], rtol=1e-5, atol=1e-6)

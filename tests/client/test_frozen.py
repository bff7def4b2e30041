"""Parameters that the model itself freezes: the same everywhere, so neither sent, nor counted, nor kept."""

from functools import partial
from math import prod

import pytest
import torch
from experiments import ONE_EPOCH, digits, experiment, same_bytes
from methods import CLASSES, METHODS, SIAMESE
from test_lightning_model import Classifier, own
from torch import nn

from fl_lightning.algorithms import Ditto, FedPer, FedRep, Local
from fl_lightning.core.errors import ClientFailure
from fl_lightning.engines import ProcessesEngine, StackedEngine
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


def test_the_final_model_and_a_resumed_run_contain_the_frozen_parameters(tmp_path):
    whole = finished(tmp_path / "whole", rounds=3)
    finished(tmp_path / "part")
    part = experiment(tmp_path / "part", model=Frozen, rounds=3, trainer=ONE_EPOCH)
    part.fit(resume=True)
    models = [torch.load(folder / "final" / "model.pt", weights_only=True) for folder in (whole.run_dir, part.run_dir)]
    assert same_bytes(*models)
    initial = whole.worker.template.backbone.state_dict()
    assert models[0].keys() == initial.keys()
    assert all(torch.equal(models[0][name], initial[name]) for name in NAMES)


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
NO_ENCODER = ("FedDistill", "FedGH", "FedProto", "FedTGP", "LGFedAvg", "Local")  # send none


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Algorithm"])
def test_no_method_trains_or_sends_frozen_parameters(tmp_path, name):
    method, options = METHODS[name]
    sizes = []
    for first in (frozen_siamese, free_siamese):
        run = finished(tmp_path / first.__name__, method(), **options | {"model": first})
        sizes.append(sum(map(sum, bytes_of(run))))
        if first is frozen_siamese:
            initial = run.worker.template.backbone.state_dict()
            for model in models_of(run):
                assert all(torch.equal(model[entry], initial[entry]) for entry in SIAMESE_NAMES)
    assert sizes[0] < sizes[1] or (name in NO_ENCODER and sizes[0] == sizes[1])


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("Algorithm", *OTHERS)])
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

"""FedBABU: the head is not trained before the fine-tuning (baselines: B3)."""

from functools import partial

import pytest
import torch
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, same_bytes
from loops import assert_equals_loop, cross_entropy_steps, rounds_by_hand
from torch import nn

from fl_lightning.algorithms import FedBABU
from fl_lightning.algorithms.personalized import fedbabu
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric

HEAVY = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


class NormedHead(MLP):
    """A head with BatchNorm."""

    def __init__(self, in_shape, num_classes):
        super().__init__(in_shape, num_classes, (8,))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), self.head)


def weights(backbone, part=""):
    return {name: value.clone() for name, value in backbone.state_dict().items() if name.startswith(part)}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", [HEAVY, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)])
def test_the_head_stays_initial_on_every_client(tmp_path, optimizer):
    method, heads = FedBABU(tune_epochs=1), []
    upload = method.upload
    method.upload = lambda module, *rest: (heads.append(weights(module.backbone, "head.")), upload(module, *rest))[1]
    run = finished(tmp_path, method, optimizer=optimizer)
    initial = weights(run.worker.template.backbone, "head.")
    assert len(heads) == 12
    assert all(same_bytes(head, initial) for head in heads)
    assert same_bytes(weights(run.worker.modules.build_shared(run.state["model"]).backbone, "head."), initial)
    assert not any(name.startswith("head.") for name in run.state["model"])
    left = torch.load(tmp_path / "final" / "model.pt")
    assert same_bytes({n: v for n, v in left.items() if n.startswith("head.")}, initial)
    assert not run.memory
    assert "global/acc" in run.csv.rows[-1]


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """Only the body has a gradient, through the initial head."""
    run = experiment(tmp_path, FedBABU(), **UNEQUAL)

    def train(local, client, batches):
        local.head.requires_grad_(False)
        cross_entropy_steps(local, batches)

    body, _ = rounds_by_hand(run, train, weighting="uniform", personal="head.")
    run.fit()
    assert_equals_loop(run, run.state["model"], body)


def test_batchnorm_statistics_of_a_frozen_head_are_shared(tmp_path):
    run = finished(tmp_path, FedBABU(tune_epochs=0), model=NormedHead, rounds=1)
    assert {name for name in run.state["model"] if name.startswith("head.")} == {
        f"head.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert run.state["model"]["head.1.running_mean"].any()


# --- Fine-tuning ---


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("tune", "moves"), [("full", ("encoder.", "head.")), ("body", "encoder."), ("head", "head.")])
def test_only_the_chosen_part_is_fine_tuned(tmp_path, tune, moves):
    received = {"evaluation": Evaluation(client_model="received"), "model": NormMLP, "optimizer": HEAVY}
    plain = experiment(tmp_path / "plain", FedBABU(tune_epochs=0), rounds=1, **received)
    tuned = experiment(tmp_path / "tuned", FedBABU(tune=tune, tune_epochs=2), rounds=1, **received)
    for run in (plain, tuned):
        run.fit()
    assert same_bytes(plain.state["model"], tuned.state["model"])
    assert plain.csv.rows[0]["global/acc"] == tuned.csv.rows[0]["global/acc"]
    assert plain.csv.rows[0]["client/loss_mean"] > tuned.csv.rows[0]["client/loss_mean"]
    before = weights(plain.client_module(0).backbone)
    after = weights(tuned.client_module(0).backbone)
    assert same_bytes(before, weights(plain.worker.modules.build_shared(plain.state["model"]).backbone))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith(moves)
    }


def test_fine_tuning_does_not_train_parameters_that_the_model_freezes():
    backbone = MLP((4,), 3, (8, 8))
    backbone.encoder[1].weight.requires_grad_(False)
    method = FedBABU(tune_epochs=2)
    module = method.client_module(backbone)
    before = weights(module.backbone)
    with torch.no_grad():
        method.personalize(module, [(torch.randn(8, 4), torch.arange(8) % 3)])
    after = weights(module.backbone)
    assert {name for name in after if torch.equal(before[name], after[name])} == {"encoder.1.weight"}
    assert not module.backbone.encoder[1].weight.requires_grad


# --- What is refused ---


@pytest.mark.parametrize("client_model", ["trained", "received"])
def test_clients_are_fine_tuned_at_the_learning_rate_of_the_last_round(tmp_path, monkeypatch, client_model):
    seen = []
    tune = fedbabu.fine_tune
    monkeypatch.setattr(
        fedbabu, "fine_tune", lambda module, *args: seen.append(module.context.lr_scale) or tune(module, *args)
    )
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.1)
    options = {"round_lr_scheduler": schedule, "evaluation": Evaluation(client_model=client_model)}
    run = experiment(tmp_path, FedBABU(tune_epochs=1), rounds=3, **options)
    run.check()
    run.client_module(0)
    assert seen == [1.0]
    run.fit()
    assert sorted(set(seen)) == pytest.approx([0.01, 0.1, 1.0])
    seen.clear()
    run.client_module(0)
    run.test()
    assert len(seen) > 1
    assert set(seen) == {run.server.lr_scales.of(3)}

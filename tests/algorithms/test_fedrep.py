"""FedRep: two phases of a fit, each for one part of the model (baselines: B2)."""

import copy
import math
from functools import partial
from typing import ClassVar

import pytest
import torch
from experiments import UNEQUAL, NormMLP, assert_near, experiment, in_float64, same_bytes, samples_of, task_of_round
from loops import assert_equals_loop, rounds_by_hand
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import FedPAC, FedRep
from fl_lightning.cli.main import main
from fl_lightning.client.loss_term import FitContext, LossTerm
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, seed_everything
from fl_lightning.engines import StackedEngine, Task
from fl_lightning.engines.trainer import inference
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

HEAVY = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


def epochs(n):
    return {"accelerator": "cpu", "max_epochs": n}


def weights(backbone, part=""):
    return {name: value.clone() for name, value in backbone.state_dict().items() if name.startswith(part)}


@in_float64
def test_a_fit_equals_a_loop_by_hand(tmp_path):
    """One optimizer for both phases. While the head learns, BatchNorm and dropout of the body are in eval mode."""
    run = experiment(tmp_path, FedRep(head_epochs=2), model=NormMLP, optimizer=HEAVY, trainer=epochs(3))
    run.load()
    net = copy.deepcopy(run.worker.template.backbone).train()
    seed_everything(0, Stream.TRAINING, 1, 2)
    momentum = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    batches = run.worker.client_data.batches(Task(1, 2, run.server.download(1, 2), {}))
    for epoch in range(3):
        phase = "head." if epoch < 2 else "encoder."
        net.encoder.train(phase == "encoder.")
        for x, y in batches:
            own = [(name, p) for name, p in net.named_parameters() if name.startswith(phase)]
            gradients = torch.autograd.grad(F.cross_entropy(net(x), y), [p for _, p in own])
            with torch.no_grad():
                for (name, p), g in zip(own, gradients, strict=True):
                    momentum[name] = 0.9 * momentum[name] + g + 0.1 * p
                    p -= 0.1 * momentum[name]
    result = run.worker.run(task_of_round(run, 1, 2))
    sent = result.upload.section("model") | result.memory["personal"]
    assert_near(sent, net.state_dict())


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """One epoch trains the head, the other the body."""
    run = experiment(tmp_path, FedRep(head_epochs=1), **UNEQUAL)

    def train(local, client, batches):
        batches = list(batches)
        for i, (x, y) in enumerate(batches):
            part = local.head if i < len(batches) / 2 else local.encoder
            gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(part.parameters()))
            with torch.no_grad():
                for p, g in zip(part.parameters(), gradients, strict=True):
                    p -= 0.2 * g

    shared, own = rounds_by_hand(run, train, personal="head.")
    run.fit()
    assert_equals_loop(run, run.state["model"], shared)
    for client, head in own.items():
        assert_equals_loop(run, run.memory[client]["personal"], head)


class Epochs(LossTerm):
    """Records the epochs of each fit."""

    seen: ClassVar[list[int]] = []  # shared by all copies of the term

    def begin_epoch(self, module):
        self.seen.append(module.current_epoch)

    def forward(self, step):
        return step.logits.sum() * 0.0


def test_loss_terms_are_notified_of_the_epochs_of_both_phases(tmp_path):
    Epochs.seen.clear()
    experiment(tmp_path, FedRep(loss_terms=[Epochs()]), rounds=1, clients_per_round=2, trainer=epochs(3)).fit()
    assert Epochs.seen == [0, 1, 2] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("model", [MLP, NormMLP])
def test_stacked_clients_with_different_numbers_of_epochs_equal_sequential_ones(tmp_path, model):
    """With max_steps, clients with fewer batches have more epochs, all in the second phase."""
    for trainer in (epochs(3), {"accelerator": "cpu", "max_epochs": -1, "max_steps": 30}):
        runs = [
            experiment(
                tmp_path / f"{type(engine).__name__}-{len(trainer)}",
                FedRep(head_epochs=2),
                model=model,
                trainer=trainer | {"precision": "64-true"},
                engine=engine,
                rounds=2,
            )
            for engine in ("sequential", StackedEngine())
        ]
        for run in runs:
            run.fit()
        one, other = runs
        torch.testing.assert_close(one.state["model"], other.state["model"], rtol=1e-9, atol=1e-9)
        for client in one.memory:
            torch.testing.assert_close(one.memory[client], other.memory[client], rtol=1e-9, atol=1e-9)


# --- The final phase ---


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("clients", "engine"),
    [
        ("received", "sequential"),
        pytest.param("trained", "sequential", marks=pytest.mark.thorough),
        pytest.param("trained", StackedEngine(), marks=pytest.mark.thorough),
    ],
)
def test_the_final_phase_trains_the_head_alone_and_is_not_kept(tmp_path, clients, engine):
    options = {"model": NormMLP, "evaluation": Evaluation(client_model=clients), "engine": engine}
    runs = {n: experiment(tmp_path / str(n), FedRep(final_epochs=n), **options) for n in (0, 3)}
    for run in runs.values():
        run.fit()
    plain, tuned = runs[0], runs[3]
    assert same_bytes(plain.state["model"], tuned.state["model"])
    for client in plain.memory:
        assert same_bytes(plain.memory[client]["personal"], tuned.memory[client]["personal"])
        before, after = (run.client_module(client).eval() for run in (plain, tuned))
        assert same_bytes(weights(before.backbone, "encoder."), weights(after.backbone, "encoder."))
        assert not same_bytes(weights(before.backbone, "head."), weights(after.backbone, "head."))
        assert all(p.requires_grad for p in after.backbone.parameters())
        x, y = samples_of(plain, client)
        with torch.no_grad():
            assert F.cross_entropy(after(x), y) < F.cross_entropy(before(x), y)
    assert plain.csv.rows[-1]["client/loss_mean"] != tuned.csv.rows[-1]["client/loss_mean"]


@pytest.mark.parametrize("fit", [False, True])
def test_the_final_phase_equals_a_loop_by_hand(tmp_path, fit):
    """Batches of the fit's size in a new order in each epoch, with the fit's optimizer options."""
    run = experiment(tmp_path, FedRep(final_epochs=2), batch_size=16, optimizer=HEAVY)
    run.load()
    run.worker.client_data.eval_batch_size = 7  # must not matter
    module = run.worker.modules.receive(task_of_round(run, 1, 1))
    if fit:
        run.worker.fit(module, task_of_round(run, 1, 1))
    net = copy.deepcopy(module.backbone).requires_grad_(True)
    x, y = samples_of(run, 1)
    optimizer = HEAVY(net.head.parameters())
    state = torch.get_rng_state()
    for _ in range(2):
        for chosen in torch.randperm(len(y)).split(16):
            optimizer.zero_grad()
            F.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
    torch.set_rng_state(state)
    with inference(module, run.worker.idle_trainer):
        run.algorithm.personalize(module, run.worker.client_data.training_batches(1))
    assert same_bytes(weights(module.backbone), weights(net))


def test_the_final_phase_skips_a_batch_of_one_sample_if_the_head_has_batchnorm():
    class Normed(MLP):
        def __init__(self, in_shape, num_classes):
            super().__init__(in_shape, num_classes, (8,))
            self.head = nn.Sequential(nn.BatchNorm1d(8), self.head)

    method = FedRep(final_epochs=1)
    module = method.client_module(Normed((4,), 3)).eval()
    module.context = FitContext(batch_size=4)
    with torch.no_grad():
        method.personalize(module, [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))])
    assert int(module.backbone.head[0].num_batches_tracked) == 1


# --- What is refused ---


@pytest.mark.parametrize("method", [FedRep, FedPAC])
def test_steps_that_leave_none_for_the_body_of_the_largest_client_are_refused(tmp_path, method):
    def run(steps, **options):
        trainer = {"accelerator": "cpu", "max_steps": steps, "max_epochs": -1}
        return experiment(tmp_path / "run", method(**options), trainer=trainer, rounds=1)

    (first := run(1, head_epochs=0)).load()
    per_epoch = math.ceil(max(len(shard.train) for shard in first.data.shards) / first.training.batch_size)
    with pytest.raises(ConfigError, match=rf"^algorithm.head_epochs: .*trainer.max_steps {2 * per_epoch} "):
        run(2 * per_epoch, head_epochs=2).fit()
    assert not (tmp_path / "run").exists()
    run(2 * per_epoch + 1, head_epochs=2).fit()


@pytest.mark.thorough
def test_a_dry_run_need_not_reach_the_body(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "digits_fedrep.yaml", "--fast", "--logger", "null"]) == 0


def test_parameters_that_the_model_freezes_are_not_trained(tmp_path):
    backbone = MLP((4,), 3, (8, 8))
    backbone.encoder[1].weight.requires_grad_(False)
    module = FedRep(head_epochs=0, final_epochs=1).client_module(backbone)
    before = weights(module.backbone)
    with torch.no_grad():
        FedRep(final_epochs=1).personalize(module, [(torch.randn(8, 4), torch.arange(8) % 3)])
    assert same_bytes(weights(module.backbone, "encoder."), {k: v for k, v in before.items() if "encoder" in k})
    assert not module.backbone.encoder[1].weight.requires_grad
    module.on_train_epoch_start()
    assert not module.backbone.encoder[1].weight.requires_grad
    assert module.backbone.encoder[3].weight.requires_grad

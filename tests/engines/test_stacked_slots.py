"""Stacked clients keep their modules between rounds: the results are those of new modules."""

import pytest
import torch
from experiments import NormMLP, digits, experiment
from stacking import DOUBLE, Spoilt, assert_equal_rounds, results, tasks
from task_runners import run_tasks
from test_client_slot import MEDDLES, Meddler, replace_layer, replace_weight
from test_round_fit import Terminated
from torch import nn

from fl_lightning.algorithms import FedAvg, FedPer, FedProx, FedSKC
from fl_lightning.engines import SequentialEngine, StackedEngine, stacked
from fl_lightning.engines.module_factory import ModuleFactory
from fl_lightning.engines.stacked_fit import StackedFit
from fl_lightning.engines.stacked_slots import StackedSlots
from fl_lightning.engines.step_contents import tensors_of
from fl_lightning.models import Backbone

pytestmark = pytest.mark.numeric


class DropoutMLP(Backbone):
    def __init__(self, in_shape, num_classes):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 8)), nn.Linear(8, num_classes), 8)


def fitted(tmp_path, *options, **more):
    run = experiment(tmp_path, *options, rounds=1, **{"trainer": DOUBLE | {"max_epochs": 2}} | more)
    run.fit()
    return run


@pytest.fixture
def groups(monkeypatch):
    """The stacked fits, once they have trained."""
    fits = []

    class Noted(StackedFit):
        def train(self):
            super().train()
            fits.append(self)

    monkeypatch.setattr(stacked, "StackedFit", Noted)
    return fits


@pytest.mark.thorough
def test_a_larger_round_and_another_experiment_get_slots_of_their_own(tmp_path):
    engine = StackedEngine()
    for name, method in (("plain", FedAvg()), ("proximal", FedProx(mu=1.0))):
        run = fitted(tmp_path / name, method)
        run_tasks(engine, run.worker, tasks(run, 2)[:2])
        again, new = (results(run, one, 2, evaluate=True) for one in (engine, StackedEngine()))
        assert_equal_rounds(again, new, 0)


def test_the_weights_of_all_clients_are_rows_of_one_tensor(tmp_path, groups):
    run = fitted(tmp_path, FedPer(), model=NormMLP)
    results(run, StackedEngine(), 2)
    (group,) = groups
    flat = group.slots.stacks["encoder.1.weight"].untyped_storage()
    for row, client in enumerate(group.clients):
        for name, value in tensors_of(client.module.backbone):
            assert value.data_ptr() == group.slots.stacks[name][row].data_ptr()
            is_sent = name in client.module.weight_memory.flat and value.is_floating_point()
            assert (value.untyped_storage().data_ptr() == flat.data_ptr()) == is_sent
        assert client.module.weight_memory.flat is client.slot.weights


@pytest.mark.parametrize("method", [FedAvg, FedProx, FedPer])
def test_no_module_is_built_from_the_second_round_on(tmp_path, monkeypatch, method):
    run = fitted(tmp_path, method())
    engine, builds, build = StackedEngine(), [], ModuleFactory.build
    monkeypatch.setattr(ModuleFactory, "build", lambda *args: builds.append(1) or build(*args))
    for round in (2, 3, 4):
        run_tasks(engine, run.worker, tasks(run, round))
        assert len(builds) == run.clients
    engine.close()
    run_tasks(engine, run.worker, tasks(run, 5))
    assert len(builds) == 2 * run.clients


@pytest.mark.parametrize("name", ["encoder.1.weight", "head.weight"])  # sent, and personal
def test_a_slot_is_built_anew_after_one_of_its_tensors_was_moved(tmp_path, name):
    modules = fitted(tmp_path, FedPer(), model=NormMLP).worker.modules
    slots = StackedSlots(modules, modules.new_slot(), 2)
    first, second = slots.slot(0), slots.slot(1)
    step = slots.step()
    assert (slots.slot(1), slots.step()) == (second, step)
    moved = dict(tensors_of(second.module.backbone))[name]
    moved.data = moved.detach().clone()
    assert slots.slot(0) is first
    assert slots.slot(1) is not second
    value = dict(tensors_of(slots.slot(1).module.backbone))[name]
    assert value.data_ptr() == slots.stacks[name][1].data_ptr()
    assert slots.step() is not step


OPTIONS = {
    "FedAvg": (FedAvg(), {"model": NormMLP}),
    "local buffers": (FedAvg(buffers="local"), {"model": NormMLP, "optimizer_state": "kept"}),
    "FedPer": (FedPer(), {"model": NormMLP}),
    "FedSKC": (FedSKC(), {}),
    "dropout": (FedAvg(), {"model": DropoutMLP}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_new_modules(tmp_path, monkeypatch, name):
    algorithm, options = OPTIONS[name]
    run, engine = fitted(tmp_path, algorithm, **options), StackedEngine()
    reset = [results(run, engine, round, evaluate=round == 3) for round in (2, 3, 4)]
    monkeypatch.setattr(ModuleFactory, "new_slot", lambda self: None)
    built = [results(run, StackedEngine(), round, evaluate=round == 3) for round in (2, 3, 4)]
    assert_equal_rounds(reset[1], built[1], 1e-12)
    for one, other in zip(reset, built, strict=True):
        for client in one:
            torch.testing.assert_close(one[client].upload.tensors, other[client].upload.tensors, rtol=0, atol=1e-12)
            assert one[client].losses == pytest.approx(other[client].losses, rel=1e-12)


@pytest.mark.parametrize("meddle", MEDDLES)
@pytest.mark.filterwarnings("ignore:StackedEngine.* a hook puts something else in the place of 'head.weight'")
def test_what_clients_do_to_their_modules_does_not_reach_the_next_round(tmp_path, monkeypatch, groups, meddle):
    """`Meddler` does it in even rounds, and checks in each that it is new. Only replaced tensors are not stacked."""
    run, engine = experiment(tmp_path, FedPer(loss_terms=[Meddler(meddle)]), trainer=DOUBLE), StackedEngine()
    run.load()
    reset = [run_tasks(engine, run.worker, tasks(run, round)) for round in (1, 2, 3)]
    monkeypatch.setattr(ModuleFactory, "new_slot", lambda self: None)
    built = [run_tasks(StackedEngine(), run.worker, tasks(run, round)) for round in (1, 2, 3)]
    assert len(groups) == (4 if meddle in (replace_weight, replace_layer) else 6)  # of six rounds
    for round, one, other in zip((1, 2, 3), reset, built, strict=True):
        for ours, expected in zip(one, other, strict=True):
            assert str(ours.failure) == str(expected.failure)
            assert not ours.failure or round == 2
            if not ours.failure:
                torch.testing.assert_close(ours.upload.tensors, expected.upload.tensors, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [FedAvg, FedProx, FedPer, FedSKC])
def test_clients_that_are_alike_are_one_group(tmp_path, groups, method):
    run = fitted(tmp_path, method())
    results(run, StackedEngine(), 2)
    assert [len(group.kinds) for group in groups] == [1]


def test_random_states_are_kept_only_if_something_draws(tmp_path, groups):
    run, engine = fitted(tmp_path), StackedEngine()
    for evaluate in (False, False, True):
        results(run, engine, 2, evaluate=evaluate)
    moved = groups[-1].clients[1].module.backbone.head.weight
    moved.data = moved.detach().clone()  # row 1 gets a new slot while the clients start
    results(run, engine, 2)
    assert [any(client.random_states for client in group.clients) for group in groups] == [True, False, True, False]


def test_the_row_of_a_client_that_cannot_start_is_used_by_the_next(tmp_path, groups):
    largest = max(len(shard.train) for shard in digits().build(0).shards)  # it starts first
    run = experiment(tmp_path, FedAvg(loss_terms=[Spoilt("begin", {largest})]), trainer=DOUBLE)
    run.load()
    one, other = (
        {result.client: result for result in run_tasks(engine, run.worker, tasks(run, 1))}
        for engine in (SequentialEngine(), StackedEngine())
    )
    assert len(groups[0].clients) == run.clients - 1
    assert [client for client in one if one[client].failure] == [client for client in other if other[client].failure]
    for client, result in one.items():
        if not result.failure:
            torch.testing.assert_close(result.upload.tensors, other[client].upload.tensors, rtol=0, atol=1e-9)


def test_a_sigterm_ends_a_fit_after_its_step(tmp_path):
    Terminated.steps = 0
    run = experiment(tmp_path, FedAvg(loss_terms=[Terminated()]), batch_size=8)
    run.check()
    with pytest.raises(SystemExit):
        run_tasks(StackedEngine(), run.worker, tasks(run, 1))
    assert Terminated.steps == 1

"""A slot's module is what a newly built one is, whatever the client before did to it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from experiments import NormMLP, experiment, publish, same_bytes, task_of_round
from methods import METHODS, assert_same_run
from task_runners import run_tasks, tasks_in
from test_module_copier import everything
from torch import nn

from fl_lightning.algorithms import CwFedAvg, FedAvg, FedPer, WeightedMean
from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.callbacks import RoundCallback
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
from fl_lightning.core.flat_tensors import as_flat
from fl_lightning.engines import SequentialEngine, Worker
from fl_lightning.evaluation.evaluation import Evaluation

WITH_SLOT = (
    "FedAvg",
    "FedProx",
    "FedSKC",
    "FedDW",
    "MOON",
    "FedSiamDA",
    "CwFedAvg",
    "FedPer",
    "UAPDFL",
    "local buffers",
)


def built(run):
    run.load()
    return run.worker


@pytest.mark.parametrize("name", WITH_SLOT)
def test_after_a_client_the_module_is_a_new_one(tmp_path, name):
    method, options = METHODS[name]
    worker = built(run := experiment(tmp_path, method(), **options))
    if not run.algorithm.server:
        publish(run)
    slot = worker.modules.intact_slot()
    run_tasks(SequentialEngine(), worker, [task_of_round(run, 1, client) for client in (0, 1)])
    assert worker.modules.intact_slot() is slot
    module = slot.reset()
    assert all(parameter.grad is None for parameter in module.parameters())
    module.weight_memory.flat = None
    assert everything(module) == everything(worker.modules.build().train())


class Meddler(LossTerm):
    """Does something to the module in the fits of even rounds, and counts its fits in its attributes."""

    def __init__(self, meddle):
        super().__init__()
        self.meddle, self.fits, self.first = meddle, [], None
        self.register_buffer("seen", torch.zeros(2))

    def begin(self, module):
        self.fits.append(module.context.round)
        self.first = self.first or module.context.round
        self.seen += module.context.round
        if module.context.round % 2 == 0:
            self.meddle(module)

    def forward(self, step):
        assert len(self.fits) == 1
        return self.seen.sum() * step.logits.square().mean() * 1e-3 * self.first


def double_gradient(module):
    module.backbone.head.weight.register_hook(lambda gradient: 2 * gradient)


def double_output(module):
    module.backbone.head.register_forward_hook(lambda part, inputs, output: 2 * output)


def freeze(module):
    module.backbone.head.weight.requires_grad_(False)


def replace_weight(module):
    module.backbone.head.weight = nn.Parameter(module.backbone.head.weight.detach() * 0.5)


def move_weight(module):
    module.backbone.head.weight.data = module.backbone.head.weight.detach().clone()


def add_attributes(module):
    module.backbone.head.temperature = 3.0
    module.notes["something"] = {"x": torch.ones(1)}


def replace_layer(module):
    module.backbone.head = nn.Linear(module.backbone.head.in_features, 10)


def fail(module):
    raise RuntimeError("in the middle")


MEDDLES = [double_gradient, double_output, freeze, replace_weight, move_weight, add_attributes, replace_layer, fail]


@pytest.mark.parametrize("meddle", MEDDLES)
@pytest.mark.parametrize("method", [FedAvg, FedPer], ids=["sent head", "personal head"])
def test_what_a_client_does_to_its_module_does_not_reach_the_next(tmp_path, method, meddle):
    run = experiment(tmp_path, method(loss_terms=[Meddler(meddle)]))
    worker = built(run)
    tasks = [task_of_round(run, number, 0) for number in (1, 2, 3)]
    together = run_tasks(SequentialEngine(), worker, tasks)
    alone = [worker.run(task) for task in tasks]
    assert [bool(result.failure) for result in together] == [False, meddle is fail, False]
    for one, other in zip(together, alone, strict=True):
        assert one.losses == other.losses
        if not one.failure:
            assert same_bytes(one.upload.section("model"), other.upload.section("model"))


class Bank(dict):
    """A dict with attributes, which no slot can restore."""

    fits = 0


class Options:
    """An object with attributes only, such as a config, that also refers to itself."""

    def __init__(self):
        self.fits, self.nested, self.itself = 0, {"lists": [[], {"fits": 0}]}, self


class Counting(LossTerm):
    """Counts in an object."""

    def __init__(self, bank):
        super().__init__()
        self.bank = bank

    def begin(self, module):
        self.bank.fits += 1
        if isinstance(self.bank, Options):
            lists, counts = self.bank.nested["lists"]
            lists.append(module.context.round)
            counts["fits"] += 1
            assert (len(lists), counts["fits"], self.bank.fits) == (1, 1, 1)

    def forward(self, step):
        return step.logits.square().mean() * 0.1 * self.bank.fits


def test_a_slot_restores_objects_with_options(tmp_path):
    worker = built(run := experiment(tmp_path, FedAvg(loss_terms=[Counting(Options())])))
    slot = worker.modules.intact_slot()
    tasks = [task_of_round(run, 1, client) for client in (0, 1, 2)]
    together, alone = run_tasks(SequentialEngine(), worker, tasks), [worker.run(task) for task in tasks]
    assert slot is worker.modules.intact_slot() is not None
    for one, other in zip(together, alone, strict=True):
        assert same_bytes(one.upload.section("model"), other.upload.section("model"))


class Shared(nn.Module):
    """Two names for one weight."""

    def __init__(self, in_shape, num_classes):
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.head(self.two(self.one(x.flatten(1))))


class TwoTypes(nn.Module):
    """Weights of two types."""

    def __init__(self, in_shape, num_classes):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.head(x.flatten(1)) * self.scale.float()


@pytest.mark.parametrize(
    "options",
    [{"algorithm": FedAvg(loss_terms=[Counting(Bank())])}, {"model": Shared}, {"model": TwoTypes}],
    ids=["an object", "tied weights", "two types"],
)
def test_modules_that_no_slot_can_hold_are_built_for_each_client(tmp_path, options):
    worker = built(run := experiment(tmp_path, **options))
    tasks = [task_of_round(run, 1, client) for client in (0, 1, 2)]
    together, alone = run_tasks(SequentialEngine(), worker, tasks), [worker.run(task) for task in tasks]
    assert worker.modules.intact_slot() is None
    for one, other in zip(together, alone, strict=True):
        assert same_bytes(one.upload.section("model"), other.upload.section("model"))


class Gathered(WeightedMean):
    """Holds all uploads of a round."""

    only_averages = False

    def begin(self, round):
        return []

    def fold(self, folded, upload):
        model = upload.message.section("model")
        folded.append((upload, {name: value.clone() for name, value in model.items()}))

    def finish(self, folded, round, knowledge):
        assert all(same_bytes(upload.message.section("model"), copied) for upload, copied in folded)
        return super().finish(fold_all(WeightedMean(), [upload for upload, _ in folded], round), round, knowledge)


@pytest.mark.parametrize("evaluate", [False, True])
def test_an_upload_keeps_its_numbers_when_the_next_client_trains(tmp_path, evaluate):
    """With BatchNorm, whose counters are not in the flat tensor."""
    worker = built(run := experiment(tmp_path, FedAvg(aggregator=Gathered()), model=NormMLP))
    tasks = [task_of_round(run, 1, client) for client in (0, 1, 2)]
    tasks = [type(task)(**{**vars(task), "evaluate": evaluate}) for task in tasks]
    held = []

    def done(result):
        state = result.upload.section("model")
        held.append((state, {name: value.clone() for name, value in state.items()}))

    SequentialEngine().run(worker, tasks_in(tasks), done)
    assert all(as_flat(state) for state, _ in held)
    assert all(same_bytes(state, copied) for state, copied in held)
    assert not same_bytes(held[0][0], held[1][0])


@pytest.mark.parametrize(("device", "places"), [("cpu", 1), ("cuda", 3)])
def test_uploads_whose_losses_are_read_together_do_not_share_memory(tmp_path, monkeypatch, device, places):
    worker = built(run := experiment(tmp_path))
    tasks = [replace(task_of_round(run, 1, client), keep_upload=False) for client in (0, 1, 2)]
    monkeypatch.setattr(Worker, "device", torch.device(device))
    results = run_tasks(SequentialEngine(), worker, tasks)
    assert len({as_flat(result.upload.section("model")).flat.data_ptr() for result in results}) == places


def test_a_client_that_is_given_away_is_a_module_of_its_own(tmp_path):
    run = experiment(tmp_path, FedAvg(), rounds=1)
    run.fit()
    module = run.client_module(0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run_tasks(SequentialEngine(), run.worker, [task_of_round(run, 1, client) for client in (0, 1)])
    assert same_bytes(module.state_dict(), before)
    assert type(module) is ClientModule
    assert module.context.class_counts.sum() > 0


AFTER_ROUNDS = Evaluation("received")  # otherwise, uploads are copies, because a trained model is used once more


class Keeps(RoundCallback):
    """Keeps every upload of the run, and a copy of it."""

    def __init__(self):
        self.uploads = []

    def on_client_end(self, run, result):
        state = result.upload.section("model")
        self.uploads.append((state, {name: value.clone() for name, value in state.items()}))


class Looks(RoundCallback):
    """Notes where every upload of the run is in memory."""

    keeps_no_uploads = True

    def __init__(self):
        self.places = []

    def on_client_end(self, run, result):
        self.places.append(as_flat(result.upload.section("model")).flat.data_ptr())


def test_uploads_that_nobody_keeps_share_their_memory(tmp_path):
    keeps, looks = Keeps(), Looks()
    kept = experiment(tmp_path / "kept", callbacks=[keeps], model=NormMLP, evaluation=AFTER_ROUNDS)
    lent = experiment(tmp_path / "lent", callbacks=[looks], model=NormMLP, evaluation=AFTER_ROUNDS)
    kept.fit()
    lent.fit()
    assert len(set(looks.places)) == 1 < len(looks.places)
    assert all(same_bytes(state, copied) for state, copied in keeps.uploads)
    assert_same_run(kept, lent)


@pytest.mark.parametrize("method", [partial(FedAvg, aggregator=Gathered()), CwFedAvg], ids=["own", "of clients"])
def test_uploads_that_the_method_keeps_do_not(tmp_path, method):
    run = experiment(tmp_path, method(), callbacks=[looks := Looks()], evaluation=AFTER_ROUNDS)
    run.fit()
    assert len(set(looks.places)) > 1

"""The unit of work stands alone: in another order, in another process, the bytes are the same."""

import multiprocessing
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from experiments import NormMLP, experiment, same_bytes, task_of_round, untimed
from task_runners import Backwards, run_pickled

from fl_lightning.algorithms import (
    UAPDFL,
    CwFedAvg,
    DistillingWeights,
    FedAvg,
    FedSKC,
    LocalContrastive,
    UnitAlignment,
)
from fl_lightning.client.module import LossTerm
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import Engine, SequentialEngine, Task
from fl_lightning.engines.base import in_client_order
from fl_lightning.evaluation.evaluation import Evaluation


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedAvg, FedSKC, CwFedAvg, partial(UAPDFL, n_com=2)])
def test_another_order_of_clients_changes_nothing(tmp_path, algorithm):
    forth, back = (
        experiment(tmp_path / type(e).__name__, algorithm(), engine=e, evaluation=Evaluation(client_model="received"))
        for e in (SequentialEngine(), Backwards())
    )
    forth.fit()
    back.fit()
    assert same_bytes(forth.state["model"], back.state["model"])
    assert untimed(forth.csv.rows) == untimed(back.csv.rows)


def test_results_are_put_in_client_order():
    class Item:
        def __init__(self, client):
            self.client = client

    arriving = (Item(client) for client in (7, 2, 9, 4))
    assert [item.client for item in in_client_order(arriving, [2, 4, 7, 9])] == [2, 4, 7, 9]


def test_uploads_are_folded_as_they_arrive(tmp_path):
    events = []

    class Watched(Engine):
        def run(self, worker, tasks):
            for task in tasks:
                events.append(("fit", task.client))
                yield worker.run(task)

    run = experiment(tmp_path, engine=Watched(), rounds=1)
    fold = run.algorithm.aggregator.fold

    def watch(uploads):
        return fold((events.append(("fold", u.client)), u)[1] for u in uploads)

    run.algorithm.aggregator.fold = watch
    run.fit()
    clients = run.server.participants(1)
    assert events == [(what, client) for client in clients for what in ("fit", "fold")]


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [pytest.param(FedAvg(buffers="local"), marks=pytest.mark.slow), FedSKC()])
def test_a_spawned_process_gives_the_same_bytes(tmp_path, algorithm):
    run = experiment(tmp_path, algorithm, model=NormMLP, rounds=2)
    run.fit()
    client = run.server.participants(2)[0]
    download, memory = run.server.download(3, client), run.memory.get(client, {})
    task = Task(3, client, download, memory, lr_scale=0.5, evaluate=True, evaluate_globally=True)
    here = run.worker.run(task)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pickle.loads(pool.apply(run_pickled, (pickle.dumps((run.worker, task)), torch.get_num_threads())))
    assert here.failure is None
    assert same_bytes(here.upload.tensors, there.upload.tensors)
    assert here.upload.numbers == there.upload.numbers
    assert here.memory.keys() == there.memory.keys()
    assert all(same_bytes(here.memory[name], there.memory[name]) for name in here.memory)
    assert (here.losses, here.local, here.on_global) == (there.losses, there.local, there.on_global)


class Breaks(SequentialEngine):
    """Cannot carry anything out; notes that it is let go of."""

    closed = 0

    def run(self, worker, tasks):
        raise ConfigError("engine: it is broken")

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("algorithm", [FedAvg, partial(UAPDFL, n_com=2)])
def test_an_engine_is_let_go_of_however_a_run_ends(tmp_path, algorithm):
    """Without a server it works before round 1."""
    engine = Breaks()
    with pytest.raises(ConfigError, match="it is broken"):
        experiment(tmp_path, algorithm(), engine=engine).fit()
    assert engine.closed == 1


class Fits(LossTerm):
    """How many fits the term has begun."""

    def __init__(self):
        super().__init__()
        self.begun = 0

    def begin(self, module):
        self.begun += 1

    def forward(self, step):
        return step.logits.sum() * 0 + self.begun


def test_each_fit_has_a_module_of_its_own(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[Fits()]), evaluation=Evaluation(client_model="received"))
    run.fit()
    assert [row["client/train_fits"] for row in run.csv.rows] == [1.0, 1.0, 1.0]


def test_a_task_leaves_no_trace_in_the_worker(tmp_path):
    run = experiment(tmp_path, FedSKC(), rounds=2)
    run.fit()
    task = task_of_round(run, 2, run.server.participants(2)[0])
    first = run.worker.run(task)
    for other in run.server.participants(1):
        run.worker.run(task_of_round(run, 1, other))
    assert same_bytes(first.upload.tensors, run.worker.run(task).upload.tensors)


class Vandal(LossTerm):
    """A term that leaves behind whatever it can, in every client's fit."""

    def begin(self, module):
        self.fits = getattr(self, "fits", 0) + 1
        for parameter in module.backbone.parameters():
            parameter.register_hook(lambda grad: grad * 1.5)
            parameter.seen = True
        module.backbone.register_forward_hook(lambda *args: None)
        module.backbone.extra = torch.nn.Linear(2, 2)
        module.backbone.register_buffer("more", torch.ones(3), persistent=False)
        module.optimizer_factory = None

    def forward(self, step):
        assert self.fits == 1
        return step.logits.sum() * 0


class Momentous(torch.optim.SGD):
    """An optimizer that would go on with what it last knew, if it could."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)
        assert not any(hasattr(p, "_held") for group in self.param_groups for p in group["params"])

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter._held = torch.ones(1)
        return super().step(closure)


def test_nothing_a_fit_leaves_behind_reaches_the_next(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[Vandal()]), optimizer=Momentous)
    run._build()
    tasks = [task_of_round(run, 1, client) for client in run.server.participants(1)]
    alone = []
    for task in tasks:
        fresh = experiment(tmp_path, FedAvg(loss_terms=[Vandal()]), optimizer=Momentous)
        fresh._build()
        alone.append(fresh.worker.run(task))
    together = [run.worker.run(task) for task in tasks]
    for one, other in zip(alone, together, strict=True):
        assert one.failure is None
        assert same_bytes(one.upload.tensors, other.upload.tensors)
        assert one.losses == other.losses


def test_every_piece_of_knowledge_sees_all_of_a_clients_data(tmp_path):
    """Alone or beside others that have gone through the data before it."""
    together = [LocalContrastive(), DistillingWeights(allow_bias=True), UnitAlignment()]
    run = experiment(tmp_path / "together", FedAvg(loss_terms=together), rounds=1)
    run._build()
    upload = run.worker.run(replace(task_of_round(run, 1, 0), fit=False)).upload
    for term in together:
        alone = experiment(tmp_path / term.name, FedAvg(loss_terms=[term]), rounds=1)
        alone._build()
        expected = alone.worker.run(replace(task_of_round(alone, 1, 0), fit=False)).upload
        assert same_bytes(upload.section(term.knowledge[0].name), expected.section(term.knowledge[0].name))

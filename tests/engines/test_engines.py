"""The unit of work stands alone: in another order, in another process, the bytes are the same."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from experiments import experiment, same_bytes, task_of_round, untimed
from task_runners import Backwards

from fl_lightning.algorithms import UAPDFL, CwFedAvg, DistillingWeights, FedAvg, FedSKC, LocalContrastive, UnitAlignment
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import Engine, SequentialEngine
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.evaluation.evaluation import Evaluation


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* contain initial weights")
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


class Item:
    def __init__(self, client, nbytes=0):
        self.client, self.nbytes = client, nbytes


def test_results_are_put_ClientOrder():
    arrived = []
    arrive = ClientOrder([2, 4, 7, 9], lambda item: arrived.append(item.client))
    seen = [(arrive(Item(client)), list(arrived))[1] for client in (7, 2, 9, 4)]
    assert seen == [[], [2], [2], [2, 4, 7, 9]]


def test_a_result_is_reported_when_it_arrives_and_counted_while_it_waits():
    events = []
    order = ClientOrder([2, 4, 7, 9], lambda item: events.append(item.client), lambda: events.append("arrived"))
    counted = []
    for item in (Item(7, 70), Item(4, 40), Item(2, 20), Item(9, 90)):
        order(item)
        counted.append((len(order), order.waiting_bytes, order.next_client))
    assert counted == [(1, 70, 2), (2, 110, 2), (0, 0, 9), (0, 0, None)]
    assert events == ["arrived", "arrived", "arrived", 2, 4, 7, "arrived", 9]


def test_results_that_were_passed_on_are_not_kept():
    arrive, items = ClientOrder([2, 4], lambda item: None), [Item(4), Item(2)]
    references = [weakref.ref(item) for item in items]
    while items:
        arrive(items.pop(0))
    assert [reference() for reference in references] == [None, None]


def test_uploads_are_folded_as_they_arrive(tmp_path):
    events = []

    class Watched(Engine):
        def run(self, worker, tasks, done):
            for task in tasks:
                events.append(("fit", task.client))
                done(worker.run(task))

    run = experiment(tmp_path, engine=Watched(), rounds=1)
    fold = run.algorithm.aggregator.fold

    def watch(folded, upload):
        events.append(("fold", upload.client))
        fold(folded, upload)

    run.algorithm.aggregator.fold = watch
    run.fit()
    clients = run.server.participants(1)
    assert events == [(what, client) for client in clients for what in ("fit", "fold")]


class Breaks(SequentialEngine):
    """Cannot carry anything out; counts calls of `close`."""

    closed = 0

    def run(self, worker, tasks, done):
        raise ConfigError("engine: it is broken")

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("algorithm", [FedAvg, partial(UAPDFL, n_com=2)])
def test_an_engine_is_closed_when_a_run_fails(tmp_path, algorithm):
    """Without a server it works before round 1."""
    engine = Breaks()
    with pytest.raises(ConfigError, match="it is broken"):
        experiment(tmp_path, algorithm(), engine=engine).fit()
    assert engine.closed == 1


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
        assert not any(hasattr(p, "held") for group in self.param_groups for p in group["params"])

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.held = torch.ones(1)
        return super().step(closure)


@pytest.mark.thorough
def test_nothing_a_fit_leaves_behind_reaches_the_next(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[Vandal()]), optimizer=Momentous)
    run.check()
    tasks = [task_of_round(run, 1, client) for client in run.server.participants(1)]
    alone = []
    for task in tasks:
        fresh = experiment(tmp_path, FedAvg(loss_terms=[Vandal()]), optimizer=Momentous)
        fresh.check()
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
    run.check()
    upload = run.worker.run(replace(task_of_round(run, 1, 0), fit=False)).upload
    for term in together:
        alone = experiment(tmp_path / term.name, FedAvg(loss_terms=[term]), rounds=1)
        alone.check()
        expected = alone.worker.run(replace(task_of_round(alone, 1, 0), fit=False)).upload
        assert same_bytes(upload.section(term.knowledge[0].name), expected.section(term.knowledge[0].name))

"""Clients that fail: the run stops with one line, or continues without them."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from experiments import ONE_EPOCH, NormMLP, digits, experiment, same_bytes, task_of_round
from stacking import Spoilt
from task_runners import run_tasks

from fl_lightning.algorithms import Aggregator, FedAvg
from fl_lightning.algorithms.base import Aggregation
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ClientFailure, TooFewClients
from fl_lightning.core.message import Message
from fl_lightning.data import Arrays, Partition, Scenario
from fl_lightning.engines import SequentialEngine, StackedEngine


class Trouble(LossTerm):
    """Return NaN or raise an exception in round 2."""

    def __init__(self, kind="nan"):
        super().__init__()
        self.kind, self.bad = kind, False

    def begin(self, module):
        self.bad = module.context.round == 2

    def forward(self, step):
        if self.bad and self.kind == "exception":
            raise RuntimeError("the disk\nis on fire")
        return step.logits.sum() * (torch.nan if self.bad else 0.0)


class BadUpload(FedAvg):
    """Upload Inf for one client."""

    def upload(self, module, batches, n_samples, num_classes):
        message = super().upload(module, batches, n_samples, num_classes)
        if n_samples == self.victim:
            message.tensors["model/head.bias"][0] = torch.inf
        return message


def test_a_nan_loss_names_client_round_and_term(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[Trouble()]), checkpoint_every=3)
    with pytest.raises(ClientFailure, match=r"client \d, round 2: loss term 'trouble' is NaN or Inf"):
        run.fit()
    assert run.checkpoints.rounds() == [1, 0]


def test_an_exception_names_client_and_round_on_one_line(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[Trouble("exception")]), clients_per_round=1)
    with pytest.raises(ClientFailure, match=r"client \d, round 2: RuntimeError: the disk is on fire$") as caught:
        run.fit()
    assert isinstance(caught.value.__cause__, RuntimeError)


def run_with_bad_upload(tmp_path, **options):
    method = BadUpload()
    run = experiment(tmp_path, method, rounds=1, **options)
    run.check()
    sizes = {client: len(run.data.shards[client].train) for client in run.server.participants(1)}
    victim = max(sizes, key=sizes.get)
    assert list(sizes.values()).count(sizes[victim]) == 1
    method.victim = sizes[victim]
    return run, victim


def test_an_upload_that_is_not_finite_is_refused(tmp_path):
    run, victim = run_with_bad_upload(tmp_path)
    with pytest.raises(ClientFailure, match=f"client {victim}, round 1: the upload's 'model/head.bias' is NaN or Inf"):
        run.fit()


def test_dropped_client_has_no_influence(tmp_path):
    run, victim = run_with_bad_upload(tmp_path / "drop", on_client_failure="drop")
    with pytest.warns(UserWarning, match=rf"client {victim}, round 1: .*; dropped from this round"):
        run.fit()
    assert run.csv.rows[0]["client/failed"] == 1

    class Others(Aggregation):
        def add(self, upload):
            if upload.client != victim:
                super().add(upload)

    class Without(FedAvg):
        def aggregation(self, round):
            return Others(self, round)

    without = experiment(tmp_path / "without", Without(), rounds=1)
    without.fit()
    assert same_bytes(run.state["model"], without.state["model"])


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:StackedEngine")
@pytest.mark.parametrize("engine", ["shared", "alone", "stacked", "processes"])
def test_each_engine_continues_without_dropped_clients(tmp_path, engine, processes):
    engine = processes if engine == "processes" else ENGINES[engine]()
    sizes = [len(shard.train) for shard in digits().build(0).shards]
    failing = {1, 4}
    with_failures = FedAvg(loss_terms=[Spoilt("nan", {sizes[client] for client in failing})])
    options = {"clients_per_round": None, "rounds": 2, "trainer": ONE_EPOCH | {"precision": "64-true"}}
    run = experiment(tmp_path / "drop", with_failures, engine=engine, on_client_failure="drop", **options)
    with pytest.warns(UserWarning, match="dropped from this round") as seen:
        run.fit()
    dropped = [found for one in seen if (found := re.match(r"client (\d), round (\d): .*; dropped", str(one.message)))]
    assert sorted(found.groups() for found in dropped) == [("1", "1"), ("1", "2"), ("4", "1"), ("4", "2")]
    assert [row["client/failed"] for row in run.csv.rows] == [2, 2]

    class Others(Aggregation):
        def add(self, upload):
            if upload.client not in failing:
                super().add(upload)

    class Without(FedAvg):
        def aggregation(self, round):
            return Others(self, round)

    without = experiment(tmp_path / "without", Without(loss_terms=[Spoilt("nan", set())]), **options)
    without.fit()
    for name, tensor in without.state["model"].items():
        torch.testing.assert_close(run.state["model"][name], tensor, rtol=1e-9, atol=1e-9)


def test_too_few_clients_end_the_run(tmp_path):
    run, _ = run_with_bad_upload(tmp_path, on_client_failure="drop", min_clients=4)
    with (
        pytest.warns(UserWarning, match="dropped"),
        pytest.raises(TooFewClients, match="round 1: 3 of 4 clients were left, min_clients is 4"),
    ):
        run.fit()


class Sizes(Partition):
    """A partition with given numbers of samples."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def split(self, labels, clients, rng):
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes))[:clients]


def arrays(tmp_path, *sizes):
    n = sum(sizes)
    x, y = np.random.default_rng(0).normal(size=(n, 4)), np.arange(n) % 3
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return Scenario(Arrays(str(tmp_path / "data.npz")), Sizes(*sizes), len(sizes), local_test=0.0)


def test_last_batch_of_one_is_left_out_with_batchnorm(tmp_path):
    run = experiment(
        tmp_path / "run", scenario=arrays(tmp_path, 9, 8), model=NormMLP, clients_per_round=None, batch_size=4, rounds=1
    )
    run.fit()
    steps = [run.state["model"][name] for name in run.state["model"] if name.endswith("num_batches_tracked")]
    assert steps == [torch.tensor(4)]  # 2 batches an epoch for each, 2 epochs


def test_a_client_of_one_sample_cannot_train_batchnorm(tmp_path):
    options = {"scenario": arrays(tmp_path, 8, 1), "clients_per_round": None, "rounds": 1}
    run = experiment(tmp_path / "norm", model=NormMLP, **options)
    with pytest.raises(ClientFailure, match=r"client 1, round 1: 1 training sample"):
        run.fit()
    experiment(tmp_path / "plain", **options).fit()


def test_messages_hold_tensors_and_numbers_only(tmp_path):
    class Smuggler(FedAvg):
        def upload(self, module, batches, n_samples, num_classes):
            return Message({}, {"data": batches})

    with pytest.raises(ClientFailure, match=r"Message.numbers\['data'\] is a ReadyBatches"):
        experiment(tmp_path, Smuggler()).fit()


def test_an_aggregators_own_error_is_raised_unchanged(tmp_path):
    class Broken(Aggregator):
        def finish(self, folded, round, knowledge):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        experiment(tmp_path, FedAvg(aggregator=Broken())).fit()


def test_gradient_clipping_reaches_the_fit(tmp_path):
    run = experiment(
        tmp_path,
        rounds=1,
        clients_per_round=1,
        batch_size=10_000,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        trainer={"accelerator": "cpu", "max_steps": 1, "gradient_clip_val": 1e-3},
    )
    run.fit()
    start = run.worker.template.backbone.state_dict()
    moved = torch.cat([(run.state["model"][name] - start[name]).flatten() for name in start]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)


# --- SystemExit, KeyboardInterrupt and other odd exceptions ---


class Strange(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


class Raising(LossTerm):
    """Raise one of `ODD` in round 2, in the first step or when the fit begins."""

    def __init__(self, error, early=False):
        super().__init__()
        self.error, self.early, self.round = error, early, 0

    def begin(self, module):
        self.round = module.context.round if module.context.class_counts.sum() > 10 else 0  # not the checks' ten ones
        if self.early and self.round == 2:
            raise ODD[self.error]

    def forward(self, step):
        if self.round == 2:
            raise ODD[self.error]
        return step.logits.sum() * 0


ENGINES = {"shared": SequentialEngine, "alone": partial(SequentialEngine, False), "stacked": StackedEngine}
ODD = {
    "SystemExit: 0": SystemExit(0),
    "SystemExit": SystemExit(),
    "GeneratorExit": GeneratorExit(),
    "MemoryError": MemoryError(),
    r"Strange: \(no message\)": Strange(),
    "Ctrl-C": KeyboardInterrupt(),
}


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:StackedEngine")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("message", list(ODD)[:-1])
def test_every_exception_in_a_clients_code_is_a_failure_of_the_client(tmp_path, engine, early, message):
    term = Raising(message, early)
    with pytest.raises(ClientFailure, match=rf"^client \d, round 2: {message}$"):
        experiment(tmp_path, FedAvg(loss_terms=[term]), engine=ENGINES[engine]()).fit()


@pytest.mark.fast_cases(2)
@pytest.mark.filterwarnings("ignore:StackedEngine")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("early", [False, True])
def test_ctrl_c_in_a_fit_ends_the_run(tmp_path, engine, early):
    """As itself, although Lightning turns it into `SystemExit(1)` within a fit."""
    term = Raising("Ctrl-C", early)
    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path, FedAvg(loss_terms=[term]), engine=ENGINES[engine]()).fit()


class PressedOnce(LossTerm):
    """Ctrl-C in the first training step, and in no other."""

    pressed = False

    def forward(self, step):
        if step.backbone.training and not PressedOnce.pressed:
            PressedOnce.pressed = True
            raise KeyboardInterrupt
        return step.logits.sum() * 0


@pytest.mark.filterwarnings("ignore:StackedEngine")
@pytest.mark.parametrize("engine", ENGINES)
def test_nobody_trains_on_after_ctrl_c(tmp_path, engine):
    PressedOnce.pressed = True
    run = experiment(tmp_path, FedAvg(loss_terms=[PressedOnce()]), engine=ENGINES[engine]())
    run.load()
    PressedOnce.pressed = False
    with pytest.raises(KeyboardInterrupt):
        run_tasks(run.engine, run.worker, [task_of_round(run, 1, client) for client in range(3)])


def test_client_that_exits_is_dropped(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[Raising("SystemExit: 0")]), on_client_failure="drop")
    with pytest.raises(TooFewClients), pytest.warns(UserWarning, match="round 2: SystemExit: 0"):
        run.fit()

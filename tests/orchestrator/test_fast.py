"""Dry runs (`fit --fast`)."""

import os
import re
import tempfile
from dataclasses import replace
from multiprocessing.util import get_temp_dir

import numpy as np
import pytest
import torch
import wandb  # noqa: F401 - it makes temporary folders once a process, which are not those of a test
from commands import TINY, contents, run, tiny
from experiments import NormMLP, experiment
from lightning.pytorch.loggers.logger import DummyLogger
from methods import METHODS, Episodes
from torch import nn

from fl_lightning import LossTerm, RoundCallback, RoundFigure
from fl_lightning.algorithms import UAPDFL, FedAvg, FedRep, StructuralKnowledge
from fl_lightning.algorithms.base import Aggregation
from fl_lightning.callbacks import BytesByRound, Checkpointing, ClientDrift, RowNorms
from fl_lightning.core.errors import CheckpointError, ClientFailure, ConfigError, Interrupted
from fl_lightning.data import Digits, Dirichlet, FederatedData, Scenario, Shard
from fl_lightning.data.truncation import truncate_dataset
from fl_lightning.engines import StackedEngine
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.runs import dry_run

FAST = ("fit", "--config", "tiny.yaml", "--fast")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A working folder with a config. The folder for temporary files must be empty in the end."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    (here / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(here)
    get_temp_dir()  # what multiprocessing keeps as long as this process lasts lies elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield here
    assert not list(temporary.iterdir())


class Loud(DummyLogger):
    """A logger that must not be called."""

    def log_metrics(self, *args, **kwargs):
        raise AssertionError("logged")


class Watch(RoundCallback):
    """Record the events and the files at the end."""

    def __init__(self, act=None):
        self.seen, self.left, self.act = [], {}, act

    def on_round_start(self, run, participants):
        self.seen.append(("round", run.round + 1, len(participants)))

    def on_client_end(self, run, result):
        self.seen.append(("client", result.upload is not None))
        if self.act:
            self.act()

    def on_round_metrics(self, run, metrics):
        self.seen.append(("metrics", {"global/acc", "client/acc_mean"} <= metrics.keys()))

    def on_fit_end(self, run):
        self.left = contents(run.run_dir)
        self.run_dir = run.run_dir


class Steps(LossTerm):
    """Record the batch size of each step."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, step):
        self.sizes.append(len(step.targets))
        return step.logits.sum() * 0.0


class Counting(nn.Module):
    """A network that counts the samples it evaluates."""

    seen = 0

    def __new__(cls, in_shape, num_classes):
        model = NormMLP(in_shape, num_classes)
        model.register_forward_pre_hook(cls.count)
        return model

    @staticmethod
    def count(module, inputs):
        if not module.training:
            Counting.seen += len(inputs[0])


# --- The command ---


def test_dry_run_passes(folders):
    before = contents(folders)
    outcome = run(*FAST, "--callbacks", "[RowNorms, Checkpointing]")
    assert outcome.code == 0, outcome.err
    assert not outcome.err
    assert " resume, RowNorms, CommunicationMeter, RoundProgress, final model" in outcome.out
    line = outcome.out.splitlines()[-1]
    start = r"dry run passed in [\d.]+ s: FedSKC on Digits, 2 rounds with 2 of 4 clients and up to 2 batches each: "
    assert re.match(start, line)
    assert line.endswith("; nothing was logged or kept")
    assert contents(folders) == before


def test_dry_run_does_not_change_runs_and_cannot_resume(folders):
    tiny(folders / "run", "--rounds", "1")
    before = contents(folders)
    assert run(*FAST, "--run_dir", folders / "run").code == 0
    error = "fl-lightning: error: --fast: a dry run cannot resume. Leave out either --fast or --resume.\n"
    assert run("fit", "--resume", folders / "run", "--fast") == (2, "", error)
    assert contents(folders) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--callbacks", "[{class_path: EarlyStopping, init_args: {monitor: globl/acc}}]"], "globl/acc"),
        (["--logger", "WandbRoundLogger", "--logger.name", "x" * 129], "128"),
        (["--scenario.clients", "200"], "scenario.partition"),
        (["--lr_scheduler", "OneCycleLR", "--lr_scheduler.max_lr", "1", "--lr_scheduler.total_steps", "5",
          "--trainer.max_epochs", "9"], "lr_scheduler"),
        (["--round_lr_scheduler", "OneCycleLR", "--round_lr_scheduler.max_lr", "1",
          "--round_lr_scheduler.total_steps", "2", "--rounds", "9"], "round_lr_scheduler"),
    ],
    ids=lambda each: each[1] if isinstance(each, list) else "",
)  # fmt: skip
@pytest.mark.fast_cases(2)
def test_dry_run_refuses_what_a_run_refuses(folders, words, expected):
    """The message is the same, also for errors that depend on all rounds, epochs or data."""
    before = contents(folders)
    real, fast = run("fit", "--config", "tiny.yaml", *words), run(*FAST, *words)
    assert fast.code == 2
    assert fast.err == real.err
    assert expected in fast.err
    assert contents(folders) == before


def test_dry_run_finds_a_failing_client_and_drops_none(folders):
    before = contents(folders)
    outcome = run(*FAST, "--optimizer.lr", "1e30", "--on_client_failure", "drop")
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) == 1
    assert "NaN or Inf" in outcome.err
    assert "dry run passed" not in outcome.out
    assert contents(folders) == before


def test_dry_run_signs_nothing(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (folders / "ours_fast.py").write_text("from fl_lightning import FedAvg\nclass Ours(FedAvg):\n    pass\n")
    assert run(*FAST, "--algorithm", "ours_fast.Ours").code == 0
    watch = Watch()
    experiment(tmp_path / "run", callbacks=[watch]).fit(config={"model": {"class_path": "ours_fast.Net"}}, fast=True)
    assert not {".signature", "config.yaml"} & watch.left.keys()
    assert not (tmp_path / "config").exists()


# --- Which parts of a run are covered ---


def test_dry_run_calls_every_part_of_a_run(tmp_path):
    watch, term = Watch(), Steps()
    algorithm = FedAvg(loss_terms=[term])
    orchestrator = experiment(
        tmp_path / "run",
        algorithm,
        rounds=9,
        callbacks=[watch, RowNorms(), ClientDrift(every=5), BytesByRound(), Checkpointing()],
        logger=Loud(),
        evaluate_every=4,
        evaluation=Evaluation(personal_on_global=True),
    )
    done = orchestrator.fit(fast=True)
    clients = [("client", True), ("client", True)]
    rounds = [[("round", 1, 2), *clients, ("metrics", False)], [("round", 2, 2), *clients, ("metrics", True)]]
    assert watch.seen == [*rounds[0], *rounds[1]]
    assert {name.split("/")[1] for name in watch.left if name.startswith("figures/")} == {"row_norms", "drift", "bytes"}
    assert {"final/model.pt", "final/summary.json", "metrics.csv", "partition.csv"} <= watch.left.keys()
    assert not watch.run_dir.exists()
    assert not (tmp_path / "run").exists()
    assert "personal_on_global/acc_mean" in done.rounds[1]
    assert done.summary["rounds"] == 2
    assert done.history.index.tolist() == [1, 2]
    assert repr(done).startswith("dry run passed: 2 rounds")


class Fails(LossTerm):
    """Fail once there is shared knowledge."""

    def __init__(self):
        super().__init__()
        self.shared = StructuralKnowledge()

    @property
    def knowledge(self):
        return (self.shared,)

    def forward(self, step):
        if self.shared.known is not None and self.shared.known.any():
            raise ZeroDivisionError("in round 2")
        return step.logits.sum() * 0.0


def test_dry_run_finds_a_failure_in_round_two(tmp_path):
    with pytest.raises(ClientFailure, match="in round 2"):
        experiment(tmp_path / "run", FedAvg(loss_terms=[Fails()])).fit(fast=True)


def test_dry_run_finds_a_state_that_cannot_be_saved(tmp_path):
    class Extra(Aggregation):
        def finish(self):
            return super().finish() | {"extra": {"seen": object()}}

    class Listing(FedAvg):
        """Add an object to the state that cannot be saved."""

        def aggregation(self, round):
            return Extra(self, round)

    with pytest.raises(CheckpointError, match="checkpoint"):
        experiment(tmp_path / "run", Listing()).fit(fast=True)


def test_dry_run_trains_each_client_on_two_batches(tmp_path):
    sizes = []

    class Noting(FedAvg):
        def upload(self, module, *args):
            sizes.append(module.loss_terms[0].sizes)
            return super().upload(module, *args)

    experiment(tmp_path, Noting(loss_terms=[Steps()]), trainer={"accelerator": "cpu", "max_epochs": 7}).fit(fast=True)
    assert sizes == [[64, 64]] * 4  # two clients in each of two rounds


def test_dry_run_uses_a_small_part_of_the_data(tmp_path):
    Counting.seen = 0
    scenario = Scenario(Digits(), Dirichlet(0.3, min_samples=10), 40)
    options = {"model": Counting, "evaluation": Evaluation("received"), "clients_per_round": None}
    orchestrator = experiment(tmp_path, scenario=scenario, **options)
    orchestrator.fit(fast=True)
    assert len(orchestrator.evaluator.scored) == 2
    # the first batch of a check, twice, and in each round the global test set and what two clients hold back
    assert 256 <= Counting.seen <= 2 * 128 + 2 * (256 + 2 * 40)


def test_truncated_sorted_test_set_keeps_its_classes():
    loaded = Digits().load()
    order = loaded.y_test.argsort()
    loaded = replace(loaded, x_test=loaded.x_test[order], y_test=loaded.y_test[order])
    data = FederatedData(loaded, [Shard(torch.arange(1000), torch.arange(1000, 1003)), Shard(torch.arange(5), order)])
    cut = truncate_dataset(data, 64)
    assert [len(shard.train) for shard in cut.shards] == [64, 5]
    assert [len(shard.test) for shard in cut.shards] == [3, 256]
    assert len(cut.data.x_test) == len(cut.data.y_test) == 256
    assert cut.data.y_test.unique().tolist() == list(range(10))
    assert cut.data.y_test.bincount().min() > 15
    first, last = cut.shards[0].train[[0, -1]].tolist()
    assert (first, last) == (0, 999)
    assert len(cut.shards[0].train.unique()) == 64
    assert len(data.shards[0].train) == 1000  # as it was
    assert len(data.data.y_test) == len(order)
    assert cut.data.x_train is loaded.x_train


def test_datasets_with_their_own_batches_are_not_truncated():
    data = Scenario(Episodes(), Dirichlet(1.0, min_samples=60), 3).build(0)
    cut = truncate_dataset(data, 4)
    assert [len(shard.train) for shard in cut.shards] == [len(shard.train) for shard in data.shards]
    assert len(cut.data.x_test) == len(data.data.x_test)


@pytest.mark.parametrize(("batch_size", "validation", "samples"), [(32, 0.0, 64), (10, 0.2, 25)])
def test_validation_split_leaves_two_batches(batch_size, validation, samples):
    assert dry_run.train_samples(batch_size, validation) == samples
    assert samples - round(samples * validation) >= 2 * batch_size


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [({}, 1, 2), ({"max_steps": 1}, None, 1), ({"max_epochs": 3, "max_steps": -1}, 3, 2), ({"max_steps": 9}, None, 2)],
)
def test_shortened_fit_keeps_epochs_and_has_two_steps(given, epochs, steps):
    short = dry_run.shorten_fit({"precision": "32", "limit_train_batches": 0.5, **given})
    assert short == {"precision": "32", "max_epochs": epochs, "max_steps": steps, "limit_train_batches": 2}


QUICK = ("UAPDFL", "SCAFFOLD")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_dry_run_works_with_every_method(name, tmp_path):
    method, options = METHODS[name]
    watch = Watch()
    options = {"rounds": 30, "callbacks": [watch], **options}
    orchestrator = experiment(tmp_path / "run", method(), **options)
    orchestrator.fit(fast=True)
    assert watch.left


def test_dry_run_keeps_epochs_that_a_method_needs(tmp_path):
    trainer = {"accelerator": "cpu", "max_epochs": 3}
    assert experiment(tmp_path, FedRep(head_epochs=2), trainer=trainer, clients_per_round=1).fit(fast=True).finished
    assert trainer == {"accelerator": "cpu", "max_epochs": 3}  # the given options are not changed
    with pytest.raises(ConfigError, match="head_epochs: 3 of"):
        experiment(tmp_path, FedRep(head_epochs=3), trainer=trainer).fit(fast=True)


def test_dry_run_refuses_what_the_engine_refuses(tmp_path):
    trainer = {"accelerator": "cpu", "limit_train_batches": 0.5}  # of which a trial would make a number
    with pytest.raises(ConfigError, match="cannot stack"):
        experiment(tmp_path, engine=StackedEngine(), batch_size=2, trainer=trainer).fit(fast=True)


def test_dry_run_with_client_state_on_disk_leaves_nothing(tmp_path, folders):
    watch = Watch()
    run = experiment(tmp_path / "run", UAPDFL(n_com=2), client_store="disk", callbacks=[watch])
    run.fit(fast=True)
    assert sum(name.startswith("clients/") for name in watch.left) >= 6
    assert not (tmp_path / "run").exists()


# --- Failures ---


class Breaks(RoundFigure):
    """A figure that cannot be drawn."""

    name = "breaks"

    def measure(self, run):
        return {"x": np.zeros(3)}

    def draw(self, arrays):
        raise ZeroDivisionError("no figure")


def test_dry_run_finds_a_figure_that_cannot_be_drawn(tmp_path):
    with pytest.raises(ZeroDivisionError, match="no figure"):
        experiment(tmp_path, callbacks=[Breaks()], rounds=100).fit(fast=True)


def test_orchestrator_cannot_be_used_after_a_dry_run(tmp_path):
    orchestrator = experiment(tmp_path / "run")
    orchestrator.fit(fast=True)
    for options in ({}, {"fast": True}, {"resume": True}):
        with pytest.raises(ConfigError, match=r"^fast: "):
            orchestrator.fit(**options)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"^fast: a dry run cannot resume"):
        experiment(tmp_path / "run").fit(resume=True, fast=True)


def test_interrupted_dry_run_suggests_no_resume(tmp_path):
    watch = Watch(lambda: os.kill(os.getpid(), 2))
    with pytest.raises(Interrupted, match=r"stopped by SIGINT after round 0 of 2; nothing is kept$"):
        experiment(tmp_path / "run", callbacks=[watch]).fit(fast=True)
    assert not (tmp_path / "run").exists()

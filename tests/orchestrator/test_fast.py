"""`fit --fast`: everything is tried once, and nothing is left."""

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
from fl_lightning.callbacks import BytesByRound, Checkpointing, ClientDrift, RowNorms
from lightning.pytorch.loggers.logger import DummyLogger
from methods import METHODS, Episodes
from torch import nn

from fl_lightning import LossTerm, RoundCallback, RoundFigure
from fl_lightning.algorithms import UAPDFL, FedAvg, FedRep
from fl_lightning.algorithms.global_model.fedskc import StructuralKnowledge
from fl_lightning.core.errors import CheckpointError, ClientFailure, ConfigError, Interrupted
from fl_lightning.data import Digits, Dirichlet, FederatedData, Scenario, Shard
from fl_lightning.data.truncation import truncate_dataset
from fl_lightning.engines import StackedEngine
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.runs import dry_run

FAST = ("fit", "--config", "tiny.yaml", "--fast")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """An empty working folder with a config, and one for temporary files that is empty again in the end."""
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
    """A logger that is not to be used."""

    def log_metrics(self, *args, **kwargs):
        raise AssertionError("logged")


class Watch(RoundCallback):
    """Notes what happens, and what lies in the folder in the end."""

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
    """Counts the steps of a fit, and the samples of each."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, step):
        self.sizes.append(len(step.targets))
        return step.logits.sum() * 0.0


class Counting(nn.Module):
    """A network that counts the samples it is asked about where it is not trained."""

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


def test_all_is_well(folders):
    before = contents(folders)
    outcome = run(*FAST)
    assert outcome.code == 0, outcome.err
    assert not outcome.err
    *_, line = outcome.out.splitlines()
    start = r"dry run passed in [\d.]+ s: FedSKC on Digits, 2 rounds with 2 of 4 clients and up to 2 batches each: "
    assert re.match(start, line)
    assert line.endswith("; nothing was logged or kept")
    assert contents(folders) == before


def test_the_callbacks_that_were_tried_are_named():
    outcome = run(*FAST, "--callbacks", "[RowNorms, Checkpointing]")
    assert " resume, RowNorms, CommunicationMeter, RoundProgress, final model" in outcome.out


def test_a_folder_that_is_there_is_left_alone(folders):
    tiny(folders / "run", "--rounds", "1")
    before = contents(folders)
    assert run(*FAST, "--run_dir", folders / "run").code == 0
    assert contents(folders) == before


def test_it_is_no_way_to_go_on(folders):
    tiny(folders / "run", "--rounds", "1")
    before = contents(folders)
    outcome = run("fit", "--resume", folders / "run", "--fast")
    assert outcome.code == 2
    assert outcome.err == (
        "fl-lightning: error: --fast: a dry run cannot resume. Leave out either --fast or --resume.\n"
    )
    assert contents(folders) == before
    assert run("fit", "--resume", folders / "run", "--rounds", "2").code == 0


@pytest.mark.parametrize(
    ("words", "told"),
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
def test_what_a_run_would_refuse_is_refused(folders, words, told):
    """As it would be: what only shows over all rounds, all epochs or all of the data, too."""
    before = contents(folders)
    real, fast = run("fit", "--config", "tiny.yaml", *words), run(*FAST, *words)
    assert fast.code == 2
    assert fast.err == real.err
    assert told in fast.err
    assert contents(folders) == before


def test_what_would_go_wrong_in_a_round_goes_wrong(folders):
    before = contents(folders)
    outcome = run(*FAST, "--optimizer.lr", "1e30", "--on_client_failure", "drop")
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) == 1
    assert "NaN or Inf" in outcome.err
    assert "dry run passed" not in outcome.out
    assert contents(folders) == before


def test_nothing_is_signed(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (folders / "ours_fast.py").write_text("from fl_lightning import FedAvg\nclass Ours(FedAvg):\n    pass\n")
    assert run(*FAST, "--algorithm", "ours_fast.Ours").code == 0
    watch = Watch()
    experiment(tmp_path / "run", callbacks=[watch]).fit(config={"model": {"class_path": "ours_fast.Net"}}, fast=True)
    assert not {".signature", "config.yaml"} & watch.left.keys()
    assert not (tmp_path / "config").exists()


# --- What is tried ---


def test_it_goes_through_everything(tmp_path):
    watch, term = Watch(), Steps()
    algorithm = FedAvg(loss_terms=[term])
    made = experiment(
        tmp_path / "run",
        algorithm,
        rounds=9,
        callbacks=[watch, RowNorms(), ClientDrift(every=5), BytesByRound(), Checkpointing()],
        logger=Loud(),
        evaluate_every=4,
        evaluation=Evaluation(personal_on_global=True),
    )
    done = made.fit(fast=True)
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


class Fails(LossTerm):
    """Fails once there is shared knowledge, as a typo in the code that reads it would."""

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


def test_what_fails_in_round_two_alone_is_found(tmp_path):
    with pytest.raises(ClientFailure, match="in round 2"):
        experiment(tmp_path / "run", FedAvg(loss_terms=[Fails()])).fit(fast=True)


def test_a_state_that_no_checkpoint_brings_back_is_found(tmp_path):
    class Listing(FedAvg):
        """Keeps what a resume does not give back: a tensor of its own beside the state."""

        def aggregate(self, state, uploads):
            after = super().aggregate(state, uploads)
            return after | {"extra": {"seen": object()}}

    with pytest.raises(CheckpointError, match="checkpoint"):
        experiment(tmp_path / "run", Listing()).fit(fast=True)


def test_a_client_trains_on_two_batches(tmp_path):
    sizes = []

    class Noting(FedAvg):
        def upload(self, module, *args):
            sizes.append(module.loss_terms[0].sizes)
            return super().upload(module, *args)

    experiment(tmp_path, Noting(loss_terms=[Steps()]), trainer={"accelerator": "cpu", "max_epochs": 7}).fit(fast=True)
    assert sizes == [[32, 32]] * 4  # two clients in each of two rounds


def test_of_the_data_a_little_is_looked_at(tmp_path):
    Counting.seen = 0
    scenario = Scenario(Digits(), Dirichlet(0.3, min_samples=10), 40)
    options = {"model": Counting, "evaluation": Evaluation("received"), "clients_per_round": None}
    made = experiment(tmp_path, scenario=scenario, **options)
    made.fit(fast=True)
    assert len(made.evaluator.scored) == 2
    # the first batch of a check, twice, and in each round the global test set and what two clients hold back
    assert 256 <= Counting.seen <= 2 * 128 + 2 * (256 + 2 * 40)


def test_a_sorted_test_set_keeps_its_classes():
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


def test_batches_and_scores_of_ones_own_get_all_the_data():
    data = Scenario(Episodes(), Dirichlet(1.0, min_samples=60), 3).build(0)
    cut = truncate_dataset(data, 4)
    assert [len(shard.train) for shard in cut.shards] == [len(shard.train) for shard in data.shards]
    assert len(cut.data.x_test) == len(data.data.x_test)


@pytest.mark.parametrize(("batch_size", "validation", "samples"), [(32, 0.0, 64), (10, 0.2, 25)])
def test_a_share_that_is_held_back_leaves_two_batches(batch_size, validation, samples):
    assert dry_run.train_samples(batch_size, validation) == samples
    assert samples - round(samples * validation) >= 2 * batch_size


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [({}, 1, 2), ({"max_steps": 1}, None, 1), ({"max_epochs": 3, "max_steps": -1}, 3, 2), ({"max_steps": 9}, None, 2)],
)
def test_epochs_stay_and_steps_are_two(given, epochs, steps):
    short = dry_run.shorten_fit({"precision": "32", "limit_train_batches": 0.5, **given})
    assert short == {"precision": "32", "max_epochs": epochs, "max_steps": steps, "limit_train_batches": 2}


QUICK = ("UAPDFL", "FedProto", "SCAFFOLD")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_every_method_can_be_tried(name, tmp_path):
    method, options = METHODS[name]
    watch = Watch()
    options = {"rounds": 30, "callbacks": [watch], **options}
    made = experiment(tmp_path / "run", method(), **options)
    made.fit(fast=True)
    assert watch.left


def test_epochs_that_a_method_goes_by_are_no_obstacle(tmp_path):
    trainer = {"accelerator": "cpu", "max_epochs": 3}
    assert experiment(tmp_path, FedRep(head_epochs=2), trainer=trainer).fit(fast=True).finished
    assert trainer == {"accelerator": "cpu", "max_epochs": 3}  # the given options are not changed
    with pytest.raises(ConfigError, match="head_epochs: 3 of"):
        experiment(tmp_path, FedRep(head_epochs=3), trainer=trainer).fit(fast=True)


@pytest.mark.parametrize("engine", ["auto", "stacked", pytest.param("processes", marks=pytest.mark.slow)])
def test_every_engine_can_be_tried(engine, tmp_path):
    assert experiment(tmp_path, engine=engine).fit(fast=True).finished


def test_what_an_engine_cannot_carry_out_is_refused(tmp_path):
    trainer = {"accelerator": "cpu", "limit_train_batches": 0.5}  # of which a trial would make a number
    with pytest.raises(ConfigError, match="cannot stack"):
        experiment(tmp_path, engine=StackedEngine(), batch_size=2, trainer=trainer).fit(fast=True)


def test_clients_kept_on_disk_leave_nothing(tmp_path, folders):
    watch = Watch()
    run = experiment(tmp_path / "run", UAPDFL(n_com=2), client_store="disk", callbacks=[watch])
    run.fit(fast=True)
    assert sum(name.startswith("clients/") for name in watch.left) >= 6
    assert not (tmp_path / "run").exists()


# --- What goes wrong ---


class Breaks(RoundFigure):
    """A figure whose picture cannot be drawn."""

    name = "breaks"

    def measure(self, run):
        return {"x": np.zeros(3)}

    def draw(self, arrays):
        raise ZeroDivisionError("no picture")


def test_a_figure_that_cannot_be_drawn_is_found_out(tmp_path):
    with pytest.raises(ZeroDivisionError, match="no picture"):
        experiment(tmp_path, callbacks=[Breaks()], rounds=100).fit(fast=True)


class Failing(LossTerm):
    def forward(self, step):
        raise RuntimeError("no loss")


def test_a_client_that_fails_is_not_dropped(tmp_path):
    with pytest.raises(ClientFailure, match="no loss"):
        experiment(tmp_path, FedAvg(loss_terms=[Failing()]), on_client_failure="drop").fit(fast=True)


def test_what_was_tried_is_spent(tmp_path):
    made = experiment(tmp_path / "run")
    made.fit(fast=True)
    for options in ({}, {"fast": True}, {"resume": True}):
        with pytest.raises(ConfigError, match=r"^fast: this orchestrator has made a dry run"):
            made.fit(**options)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"^fast: a dry run cannot resume"):
        experiment(tmp_path / "run").fit(resume=True, fast=True)


def test_a_trial_that_is_stopped_does_not_say_how_to_go_on(tmp_path):
    watch = Watch(lambda: os.kill(os.getpid(), 2))
    with pytest.raises(Interrupted, match=r"stopped by SIGINT after round 0 of 2; nothing is kept$"):
        experiment(tmp_path / "run", callbacks=[watch]).fit(fast=True)
    assert not (tmp_path / "run").exists()

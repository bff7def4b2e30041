"""Hooks of `Algorithm`: personal parts, access to the client's own data, a variable number of participants."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments import NormMLP, assert_near, digits, experiment, finished, in_float64, same_bytes, task_of_round

from fl_lightning.algorithms import DriftCorrection, FedAvg, GlobalPeriodReview
from fl_lightning.algorithms.base import Aggregation
from fl_lightning.callbacks import Checkpointing, EarlyStopping
from fl_lightning.callbacks.defaults import by_name
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data import Shard
from fl_lightning.engines import SequentialEngine, StackedEngine
from fl_lightning.evaluation.evaluation import Evaluation


class PersonalHead(FedAvg):
    """The head never leaves its client."""

    personal = ("head.",)


class PersonalModel(FedAvg):
    """The whole model never leaves its client."""

    personal = ("",)
    one_model = False


class AddsSampleCounts(FedAvg):
    """Before training, a client adds its numbers of samples to its bias, and uses random numbers."""

    validation = 0.25

    def prepare(self, module, batches, validation):
        torch.rand(3)
        assert not module.training
        assert torch.is_grad_enabled()
        counts = [sum(len(y) for _, y in part) for part in (batches, validation)]
        with torch.no_grad():
            module.backbone.head.bias += torch.tensor([*counts, *[0] * 8]) / 1000


class AlwaysClassThree(FedAvg):
    """The evaluated model always predicts class 3."""

    def personalize(self, module, batches):
        assert not module.training
        assert not torch.is_grad_enabled()
        assert len(list(batches))
        module.backbone.head.weight.zero_()
        module.backbone.head.bias.copy_(torch.eye(10)[3])


class GrowingCohort(FedAvg):
    """Each round has one participant more."""

    def initial_state(self, *args):
        return super().initial_state(*args) | {"round": {"number": torch.tensor(1)}}

    def cohort(self, state, participants, clients):
        return min(clients, participants + int(state["round"]["number"]))

    def aggregation(self, round):
        return Counting(self, round)


class Counting(Aggregation):
    def finish(self):
        return super().finish() | {"round": {"number": self.round.before["round"]["number"] + 1}}


# --- AlwaysClassThree parts ---


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_personal_parts_are_kept_by_the_client_and_never_sent(tmp_path, buffers):
    run = finished(tmp_path, PersonalHead(buffers=buffers), model=NormMLP)
    entries = run.worker.template.backbone.state_dict()
    statistics = {name for name in entries if "running" in name or "num_batches" in name}
    head = {"head.weight", "head.bias"}
    kept = head | (statistics if buffers == "local" else set())
    shared = entries.keys() - kept - (statistics if buffers != "average" else set())
    assert run.state["model"].keys() == shared == run.server.download(4, 0).section("model").keys()
    trained = [client for client in range(6) if run.memory.get(client, {})]
    assert trained
    assert all(run.memory[client]["personal"].keys() == kept for client in trained)
    client = run.server.participants(3)[0]
    module = run.worker.modules.receive(task_of_round(run, 4, client)).backbone.state_dict()
    assert same_bytes({name: module[name] for name in kept}, run.memory[client]["personal"])
    assert same_bytes({name: module[name] for name in shared}, run.state["model"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine",
    [lambda _: SequentialEngine(local_loop=False), lambda _: StackedEngine(), lambda processes: processes],
    ids=["a fit each", "stacked", "processes"],
)
@pytest.mark.parametrize("method", [PersonalHead, AddsSampleCounts, AlwaysClassThree, GrowingCohort])
@in_float64
def test_every_engine_calls_the_hooks(tmp_path, method, engine, processes):
    one = experiment(tmp_path / "one", method())
    other = experiment(tmp_path / "other", method(), engine=engine(processes))
    for run in (one, other):
        run.fit()
    assert_near(other.state["model"], one.state["model"])
    for row, again in zip(one.csv.rows, other.csv.rows, strict=True):
        assert row["client/acc_mean"] == again["client/acc_mean"]


def test_start_sets_the_facts_of_the_run_in_the_method_and_in_all_its_aggregators():
    inner = DriftCorrection()
    method = AddsSampleCounts(aggregator=GlobalPeriodReview(inner))
    method.start([8, 4, 20], frozenset({"head.bias"}))
    assert method.samples == [6, 3, 15]
    assert method.fixed == {"head.bias"}
    assert method.aggregator.clients == inner.clients == 3


# --- AddsSampleCounts at the client's own data ---


def test_prepare_gets_the_training_and_the_validation_share(tmp_path):
    run = experiment(tmp_path, AddsSampleCounts())
    run.load()
    client, shard = 2, run.data.shards[2].train
    train, validation = run.worker.client_data.split(client)
    assert run.worker.client_data.sample_count(client) == run.algorithm.samples[client] == len(train)
    assert len(validation)
    back = round(0.25 * len(shard))
    order = generator(run.seed, Stream.VALIDATION, client).permutation(len(shard))
    assert validation.tolist() == sorted(shard[order[:back]].tolist())
    assert sorted([*train.tolist(), *validation.tolist()]) == sorted(shard.tolist())
    start = run.worker.modules.receive(task_of_round(run, 1, client))
    added = (start.backbone.head.bias - run.worker.template.backbone.head.bias) * 1000
    torch.testing.assert_close(added[:2], torch.tensor([len(train), float(back)]), rtol=1e-3, atol=1e-2)
    result = run.worker.run(task_of_round(run, 1, client))
    assert result.upload.numbers["n_samples"] == len(train)
    batches = list(run.worker.client_data.batches(task_of_round(run, 1, client)))
    assert len(batches) == -(-len(train) // run.training.batch_size)


@pytest.mark.parametrize("method", [FedAvg, AddsSampleCounts])
def test_class_counts_are_those_of_the_training_samples(tmp_path, method):
    """Without those for validation, also for a client that is held out. They are no view of all clients' counts."""
    run = experiment(tmp_path, method(), scenario=replace(digits(), held_out_clients=2))
    run.load()
    for client in range(6):
        counts = run.worker.modules.receive(task_of_round(run, 1, client)).context.class_counts
        labels = run.data.data.y_train[run.worker.client_data.split(client)[0]].tolist()
        assert counts.tolist() == [labels.count(c) for c in range(10)]
        assert counts.untyped_storage().nbytes() == counts.nbytes


@pytest.mark.parametrize(("dealt", "held_back"), [(9, 2), (10, 2), (14, 4), (1, 0)])
def test_the_size_of_the_validation_share_is_rounded_half_to_even(tmp_path, dealt, held_back):
    run = experiment(tmp_path, AddsSampleCounts())
    run.load()
    run.worker.client_data.data = replace(run.data, shards=[Shard(torch.arange(dealt), torch.arange(1))])
    train, validation = run.worker.client_data.split(0)
    assert (len(train), len(validation)) == (dealt - held_back, held_back)
    assert run.worker.client_data.sample_count(0) == dealt - held_back


@pytest.mark.thorough
def test_random_numbers_in_prepare_do_not_change_the_training(tmp_path):
    class Drawing(FedAvg):
        def prepare(self, module, batches, validation):
            torch.rand(5)

    runs = [experiment(tmp_path / kind.__name__, kind(), model=NormMLP) for kind in (FedAvg, Drawing)]
    for run in runs:
        run.fit()
    assert same_bytes(runs[0].state["model"], runs[1].state["model"])


# --- What is measured ---


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("clients", ["trained", "received"])
def test_only_the_evaluated_model_is_personalized(tmp_path, clients):
    evaluation = Evaluation(client_model=clients, personal_on_global=True)
    plain = finished(tmp_path / "plain", FedAvg(), evaluation=evaluation)
    run = finished(tmp_path / "personal", AlwaysClassThree(), evaluation=evaluation)
    assert same_bytes(plain.state["model"], run.state["model"])
    for client in run.server.participants(3):
        labels = run.data.data.y_train[run.data.shards[client].test]
        with (run.run_dir / "clients.csv").open(newline="") as file:
            lines = [line for line in csv.DictReader(file) if line["client"] == str(client) and line["round"] == "3"]
        assert float(lines[0]["acc"]) == pytest.approx(float((labels == 3).float().mean()), abs=1e-6)
    share = float((run.data.data.y_test == 3).float().mean())
    assert run.csv.rows[-1]["personal_on_global/acc_mean"] == pytest.approx(share, abs=1e-6)
    module = run.client_module(1)
    assert module(torch.rand(4, 1, 8, 8)).argmax(dim=1).tolist() == [3] * 4


def test_without_a_global_model_nothing_global_is_logged(tmp_path):
    run = experiment(tmp_path, PersonalModel(), callbacks=[Checkpointing(), EarlyStopping(patience=1, min_delta=1.0)])
    summary = run.fit().summary
    assert not [name for row in run.csv.rows for name in row if name.startswith("global/")]
    assert len(run.csv.rows) == 2  # stopped by the clients' mean
    best = max(row["client/acc_mean"] for row in run.csv.rows)
    assert summary["client/acc_mean_best"] == best
    assert by_name(run.callbacks)["Checkpointing"].best == best
    first = next((row["round"] for row in run.csv.rows if row["client/acc_mean"] >= 0.5), None)
    assert summary["R_0.5"] == first
    assert not (Path(run.run_dir) / "final" / "model.pt").exists()


# --- Cohorts that vary ---


def test_a_method_can_set_the_number_of_participants(tmp_path):
    run = finished(tmp_path, GrowingCohort(), clients_per_round=1)
    with (run.run_dir / "clients.csv").open(newline="") as file:
        seen = [int(line["round"]) for line in csv.DictReader(file)]
    assert [seen.count(round) for round in (1, 2, 3)] == [2, 3, 4]
    rng = generator(run.seed, Stream.PARTICIPANTS, 4)
    assert run.server.participants(4) == sorted(rng.choice(6, 5, replace=False).tolist())

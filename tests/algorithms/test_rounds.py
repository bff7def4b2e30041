"""The round in aggregators and shared knowledge: its number, the state before it, random numbers and metrics."""

import numpy as np
import pytest
import torch
from experiments import experiment, finished, record_rounds, same_bytes
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedAMP, FedAvg, WeightedMean
from fl_lightning.algorithms.server import Server
from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.round import Round
from fl_lightning.core.seeding import Stream, derive
from fl_lightning.core.state_dicts import RunningMean


class Drawing(WeightedMean):
    """Reports the round and a random number."""

    def finish(self, folded, round, knowledge):
        round.metrics.update(number=round.number, draw=round.rng.random())
        return super().finish(folded, round, knowledge)


@pytest.mark.thorough
def test_metrics_of_the_server_are_logged_and_random_numbers_depend_on_seed_and_round(tmp_path):
    run = finished(tmp_path / "run", FedAvg(aggregator=Drawing()), rounds=3, seed=5)
    drawn = [np.random.default_rng(derive(5, Stream.AGGREGATION, round)).random() for round in (1, 2, 3)]
    assert [row["server/number"] for row in run.csv.rows] == [1, 2, 3]
    assert [row["server/draw"] for row in run.csv.rows] == drawn
    stopped = experiment(tmp_path / "stopped", FedAvg(aggregator=Drawing()), rounds=2, seed=5)
    stopped.fit()
    again = experiment(tmp_path / "stopped", FedAvg(aggregator=Drawing()), rounds=3, seed=5)
    again.fit(resume=True)
    assert [row["server/draw"] for row in again.csv.rows] == drawn
    assert same_bytes(again.state["model"], run.state["model"])


def test_the_random_numbers_of_a_round_go_on_from_draw_to_draw():
    round = Round(1, {}, seed=5)
    assert [round.rng.random() for _ in range(3)] == np.random.default_rng(5).random(3).tolist()


class Extrapolation(WeightedMean):
    """FedExP (Jhunjhunwala, Wang, Joshi 2023): a server step that grows with the disagreement of the clients' changes.

    It keeps sums, not uploads, because `begin` has the weights before.
    """

    def begin(self, round):
        return {"mean": RunningMean(), "squares": 0.0, "before": round.before["model"]}

    def fold(self, folded, upload):
        model = upload.message.section("model")
        folded["mean"].add(model, 1)
        folded["squares"] += sum(float((model[n] - w).square().sum()) for n, w in folded["before"].items())

    def finish(self, folded, round, knowledge):
        mean, before = folded["mean"].value(), round.before["model"]
        moved = sum(float((mean[name] - w).square().sum()) for name, w in before.items())
        step = max(1.0, folded["squares"] / (2 * folded["mean"].count * moved))
        round.metrics["step"] = step
        return {"model": {name: w + step * (mean[name] - w) for name, w in before.items()}}


def flat(model):
    return torch.cat([value.double().flatten() for value in model.values()])


def test_a_fold_can_use_the_weights_before(tmp_path):
    trainer = {"accelerator": "cpu", "precision": "64-true"}
    run = experiment(tmp_path, FedAvg(aggregator=Extrapolation()), trainer=trainer)
    rounds = record_rounds(run)
    run.fit()
    for (before, uploads, after), row in zip(rounds, run.csv.rows, strict=True):
        models, start = [upload.message.section("model") for upload in uploads], before["model"]
        changes = torch.stack([flat(model) - flat(start) for model in models])
        step = max(1.0, (changes.square().sum() / (2 * len(models) * changes.mean(dim=0).square().sum())).item())
        assert row["server/step"] == pytest.approx(step, rel=1e-9)
        expected = flat(start) + step * (flat(mean_by_hand(models, [1] * len(models))) - flat(start))
        torch.testing.assert_close(flat(after["model"]), expected, rtol=1e-9, atol=1e-12)


class Counted(SharedKnowledge):
    """The participants' class counts, and on the server the number of all uploads so far."""

    name = "counted"
    server_only = ("uploads",)

    def initial(self, num_classes):
        return {"counts": torch.ones(num_classes), "uploads": torch.tensor(0)}

    def summarize(self, module, batches, num_classes):
        return {"counts": sum(F.one_hot(y, num_classes).sum(dim=0) for _, y in batches).float()}

    def merge(self, previous, uploads, round):
        assert round.before["counted"] is previous
        return {
            "counts": sum(upload.message.section("counted")["counts"] for upload in uploads),
            "uploads": previous["uploads"] + len(uploads),
        }


class Reading(LossTerm):
    def __init__(self):
        super().__init__()
        self.piece = Counted()

    def begin(self, module):
        assert not hasattr(self.piece, "uploads")

    def forward(self, step):
        return 0 * self.piece.counts.sum()


def test_knowledge_of_the_server_alone_is_kept_and_not_sent(tmp_path):
    run = finished(tmp_path, FedAvg(loss_terms=[Reading()]), rounds=3)
    clients = len(run.server.participants(1))
    assert int(run.state["counted"]["uploads"]) == 3 * clients
    assert run.server.download(4, 0).section("counted").keys() == {"counts"}
    plain = finished(tmp_path / "plain", FedAvg(), rounds=1)
    down = run.csv.rows[0]["comm/down_bytes"] - plain.csv.rows[0]["comm/down_bytes"]
    assert down == clients * run.state["counted"]["counts"].nbytes


@pytest.mark.parametrize("algorithm", [FedAvg(), FedAMP()], ids=["one model", "a model for each client"])
def test_an_upload_comes_with_the_weights_that_the_client_received(tmp_path, monkeypatch, algorithm):
    sent, received = {}, {}
    task, fold = Server.task, type(algorithm.aggregator).fold

    def send(server, round, client, download, **options):
        sent[round, client] = download.section("model")
        return task(server, round, client, download, **options)

    def receive(aggregator, folded, upload):
        received[len(received)] = (upload.client, upload.received)
        fold(aggregator, folded, upload)

    monkeypatch.setattr(Server, "task", send)
    monkeypatch.setattr(type(algorithm.aggregator), "fold", receive)
    finished(tmp_path / "run", algorithm, rounds=2)
    assert [client for client, _ in received.values()] == [client for _, client in sent]
    assert all(same_bytes(after, sent[key]) for key, (_, after) in zip(sent, received.values(), strict=True))

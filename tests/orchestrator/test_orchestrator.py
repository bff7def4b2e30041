"""The round loop: participants, schedules, evaluation, precision and logging."""

import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from experiments import NormMLP, accuracy_and_loss, client_series, experiment, same_bytes, untimed

from fl_lightning import orchestrator
from fl_lightning.algorithms import UAPDFL, CwFedAvg, FedAvg, FedPer, FedSKC
from fl_lightning.client.optimizers import LRScales
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.loggers import collection as loggers
from fl_lightning.runs.reader import open_run_folder


def test_participants_are_sampled_uniformly_without_replacement(tmp_path):
    run = experiment(tmp_path, clients_per_round=2)
    run.load()
    drawn = [run.server.participants(round) for round in range(1, 3001)]
    assert all(len(set(clients)) == 2 and clients == sorted(clients) for clients in drawn)
    shares = np.bincount(np.concatenate(drawn), minlength=6) / 3000
    np.testing.assert_allclose(shares, 2 / 6, atol=0.04)  # 4.6 standard deviations
    everybody = experiment(tmp_path, clients_per_round=None)
    everybody.load()
    assert everybody.server.participants(7) == list(range(6))


def test_schedule_over_rounds_is_the_torch_schedule():
    def scales(scheduler, rounds):
        scale = LRScales(scheduler, rounds)
        return [scale.of(round) for round in range(1, rounds + 1)]

    assert LRScales(None, 3).of(2) == 1.0
    exponential = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.95)
    assert scales(exponential, 4) == pytest.approx([0.95**r for r in range(4)])
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)
    assert scales(cosine, 10) == pytest.approx([(1 + np.cos(np.pi * r / 10)) / 2 for r in range(10)])


def test_schedule_over_rounds_reaches_the_clients(tmp_path):
    """A learning rate of zero after round 1 leaves the weights of round 1."""
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.0)
    falling = experiment(tmp_path / "falling", round_lr_scheduler=step, rounds=3, **options)
    falling.fit()
    one = experiment(tmp_path / "one", rounds=1, **options)
    one.fit()
    assert same_bytes(falling.state["model"], one.state["model"])


def test_global_metrics_are_those_of_the_shared_model(tmp_path):
    run = experiment(tmp_path, model=NormMLP)
    run.fit()
    module = run.worker.modules.build()
    module.backbone.load_state_dict(run.state["model"])
    acc, loss = accuracy_and_loss(module, run.data.data.x_test, run.data.data.y_test)
    assert run.csv.rows[-1]["global/acc"] == acc
    assert run.csv.rows[-1]["global/loss"] == pytest.approx(loss, rel=1e-6)


def test_received_models_are_scored_on_every_clients_own_test_split(tmp_path):
    run = experiment(tmp_path, evaluation=Evaluation(client_model="received"), clients_per_round=2)
    run.fit()
    module = run.worker.modules.build()
    module.backbone.load_state_dict(run.state["model"])
    row, own, expected = run.csv.rows[-1], client_series(tmp_path, 3), []
    for client, shard in enumerate(run.data.shards):
        acc, _ = accuracy_and_loss(module, run.data.data.x_train[shard.test], run.data.data.y_train[shard.test])
        assert own[f"client_{client}/acc"] == acc
        expected.append(acc)
    assert row["client/acc_mean"] == pytest.approx(np.mean(expected))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.parametrize("algorithm", [FedAvg, partial(UAPDFL, n_com=2)])
def test_both_are_the_metrics_of_received_and_of_trained_models(tmp_path, algorithm):
    rows = {}
    for how in ("received", "trained", "both"):
        options = {"rounds": 2, "clients_per_round": 3, "evaluation": Evaluation(how)}
        run = experiment(tmp_path / how, algorithm=algorithm(), **options)
        run.fit()
        rows[how] = run.csv.rows
    for received, trained, both in zip(rows["received"], rows["trained"], rows["both"], strict=True):
        of_clients = [name for name in received if name.startswith("client/") and "train" not in name]
        assert len(of_clients) == 5
        assert {name: both[name] for name in of_clients} == {name: received[name] for name in of_clients}
        assert {name: both[f"trained_{name}"] for name in of_clients} == {name: trained[name] for name in of_clients}
        assert {name for name in both if name.startswith("trained_client/")} == {f"trained_{n}" for n in of_clients}
    assert (
        open_run_folder(tmp_path / "both").summary["trained_client/acc_mean_last"]
        == rows["trained"][-1]["client/acc_mean"]
    )


def test_max_clients_evaluates_the_same_clients_in_every_round(tmp_path):
    runs = [
        experiment(tmp_path / str(most), rounds=2, evaluation=Evaluation("received", max_clients=most))
        for most in (3, 6, None)
    ]
    for run in runs:
        run.fit()
    three, six, unlimited = ([client_series(run.run_dir, round) for round in (1, 2)] for run in runs)
    assert six == unlimited
    run = runs[0]
    for round in (0, 1):
        all_scores, scores = ({k: v for k, v in one[round].items() if k.endswith("/acc")} for one in (six, three))
        assert scores.items() < all_scores.items()
        assert scores.keys() == {f"client_{client}/acc" for client in run.evaluator.scored}
        assert run.csv.rows[round]["client/acc_mean"] == pytest.approx(np.mean(list(scores.values())))
    assert same_bytes(run.state["model"], runs[2].state["model"])
    assert run.test().clients.keys() == {*run.evaluator.scored}


def test_trained_models_are_evaluated_on_their_own_clients(tmp_path):
    run = experiment(tmp_path, evaluation=Evaluation(personal_on_global=True), clients_per_round=2, rounds=1)
    trained = {}
    upload = run.algorithm.upload

    def watch(module, *data):
        loaded = run.data.data
        client = run.server.participants(1)[len(trained)]
        own = run.data.shards[client].test
        trained[client] = (
            accuracy_and_loss(module, loaded.x_train[own], loaded.y_train[own])[0],
            accuracy_and_loss(module, loaded.x_test, loaded.y_test)[0],
        )
        return upload(module, *data)

    run.algorithm.upload = watch
    run.fit()
    row = run.csv.rows[0]
    assert {name: value for name, value in client_series(tmp_path, 1).items() if name.endswith("/acc")} == {
        f"client_{client}/acc": own for client, (own, _) in trained.items()
    }
    assert row["personal_on_global/acc_mean"] == pytest.approx(np.mean([both for _, both in trained.values()]))


@pytest.mark.thorough
def test_evaluation_every_few_rounds_and_after_the_last(tmp_path):
    run = experiment(tmp_path, rounds=5, evaluate_every=2)
    run.fit()
    assert [row["round"] for row in run.csv.rows if "global/acc" in row] == [2, 4, 5]
    assert all("client/train_loss" in row for row in run.csv.rows)
    often = experiment(tmp_path / "often", rounds=5)
    often.fit()
    assert same_bytes(run.state["model"], often.state["model"])


def test_test_evaluates_every_client_at_any_checkpoint(tmp_path):
    run = experiment(tmp_path, rounds=4, evaluate_every=4, keep_checkpoints=9)
    run.fit()
    again = experiment(tmp_path, rounds=4, evaluate_every=4)
    again.load(3)
    tested = again.test()
    assert tested["round"] == 3
    assert len(tested.clients) == 6
    module = again.worker.modules.build_shared(run.checkpoints.read(3).state["state"]["model"])
    assert tested["global/acc"] == accuracy_and_loss(module, run.data.data.x_test, run.data.data.y_test)[0]


@pytest.mark.parametrize(("few", "warned", "series"), [(6, 0, True), (5, 1, False)])
def test_metrics_of_clients_are_not_logged_if_there_are_many(tmp_path, monkeypatch, few, warned, series):
    monkeypatch.setattr(loggers, "FEW_CLIENTS", few)
    run = experiment(tmp_path, rounds=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit()
    message = "log_clients: metrics of single clients are not logged (6 clients). Set log_clients: true to log them."
    assert [str(one.message) for one in caught] == [message] * warned
    assert (tmp_path / "clients.csv").exists() == series
    experiment(tmp_path / "wanted", rounds=1, log_clients=not series).fit()
    assert (tmp_path / "wanted" / "clients.csv").exists() != series


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-true", 5e-2), ("64-true", 1e-3)])
def test_messages_have_full_precision_in_every_trainer_precision(tmp_path, precision, tolerance):
    options = {"rounds": 2, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    runs = []
    for name in (precision, "32-true"):
        trainer = {"accelerator": "cpu", "max_epochs": 1, "precision": name}
        runs.append(experiment(tmp_path / name, FedSKC(gpr=False), trainer=trainer, **options))
        runs[-1].fit()
    run, full = runs
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert {value.dtype for value in run.state["model"].values()} == {expected}
    assert run.csv.rows[-1]["client/train_lcl"] == pytest.approx(full.csv.rows[-1]["client/train_lcl"], rel=tolerance)
    for name, value in full.state["model"].items():
        torch.testing.assert_close(run.state["model"][name].float(), value, rtol=0, atol=tolerance)
    assert not same_bytes({n: v.float() for n, v in run.state["model"].items()}, full.state["model"])


def test_summary_equals_the_figures_of_the_rounds(tmp_path):
    run = experiment(tmp_path, rounds=4, evaluation=Evaluation(target_accuracies=[0.2, 1.0]))
    summary = run.fit().summary
    acc = [row["global/acc"] for row in run.csv.rows]
    assert (summary["global/acc_last"], summary["global/acc_best"]) == (acc[-1], max(acc))
    assert summary["global/acc_best_round"] == 1 + acc.index(max(acc))
    assert summary["R_0.2"] == 1 + next(i for i, value in enumerate(acc) if value >= 0.2)
    assert summary["R_1"] is None
    assert summary["comm/total_up_bytes"] == sum(row["comm/up_bytes"] for row in run.csv.rows)
    assert json.loads((tmp_path / "final" / "summary.json").read_text()) == summary


def test_final_weights_are_a_plain_state_dict(tmp_path):
    run = experiment(tmp_path, model=NormMLP)
    run.fit()
    weights = torch.load(tmp_path / "final" / "model.pt", weights_only=True)
    NormMLP((1, 8, 8), 10).load_state_dict(weights)
    assert same_bytes(weights, run.state["model"])


def test_global_random_state_does_not_matter(tmp_path):
    rows = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        run = experiment(tmp_path / str(seed), FedAvg())
        run.fit()
        rows.append(untimed(run.csv.rows))
    assert rows[0] == rows[1]


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.parametrize("algorithm", [CwFedAvg, lambda: UAPDFL(n_com=2)])
def test_client_module_is_the_one_that_test_evaluates(tmp_path, algorithm):
    run = experiment(tmp_path, algorithm(), rounds=2)
    run.fit()
    found = run.test()
    for client in range(6):
        module, index = run.client_module(client).eval(), run.data.shards[client].test
        x, y = run.data.data.prepare(run.data.data.x_train[index]), run.data.data.y_train[index]
        accuracy = (module(x).argmax(dim=1) == y).float().mean().item()
        assert found.clients[client]["acc"] == pytest.approx(accuracy)
        assert module.context.class_counts.tolist() == run.data.class_counts()[client].tolist()


def test_uploads_and_client_states_are_released_during_the_round(tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr(orchestrator, "train_metrics", lambda results: held.extend(results) or {})
    experiment(tmp_path, FedPer(), rounds=1).fit()
    assert len(held) == 4
    assert all(result.upload is None and not result.memory for result in held)

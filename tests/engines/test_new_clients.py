"""Clients that are held out: they leave the training unchanged, and get what the method gives a new client."""

import copy
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import (
    ONE_EPOCH,
    NormMLP,
    digits,
    experiment,
    finished,
    in_float64,
    in_two_parts,
    local_batches,
    same_bytes,
    untimed,
)
from methods import METHODS, elements
from torch.nn.functional import cross_entropy

from fl_lightning import Evaluation, FederatedOrchestrator
from fl_lightning.algorithms import (
    CCVR,
    CFL,
    IFCA,
    UAPDFL,
    ClientSampler,
    DFedAvgM,
    Ditto,
    FedAMP,
    FedAvg,
    FedBABU,
    FedFomo,
    FedPer,
    FedRep,
    Local,
    PeerAlgorithm,
    Ring,
)
from fl_lightning.core.errors import ClientFailure, ConfigError
from fl_lightning.core.message import Message
from fl_lightning.data import FederatedData, Scenario, Shard
from fl_lightning.evaluation.evaluation import evaluate
from fl_lightning.evaluation.summary import better_goal

HELD_OUT = replace(digits(), held_out_clients=2)
SGD = partial(torch.optim.SGD, lr=0.1)


class WithoutThem(Scenario):
    """A scenario whose data lack all samples of the held-out clients."""

    def build(self, seed: int) -> FederatedData:
        built = super().build(seed)
        rest = built.held_out
        away = torch.cat([part for shard in rest for part in (shard.train, shard.test)])
        kept = torch.ones(len(built.data.y_train), dtype=torch.bool)
        kept[away[away < len(built.data.y_train)]] = False
        place = kept.cumsum(0) - 1
        data = replace(built.data, x_train=built.data.x_train[kept], y_train=built.data.y_train[kept])
        shards = [Shard(place[shard.train], place[shard.test]) for shard in built.shards]
        return replace(built, data=data, shards=shards, held_out=())


def scores_by_hand(run: FederatedOrchestrator, networks: list[torch.nn.Module]) -> dict[str, float]:
    """Return the metrics of networks, one for each held-out client."""
    data, scores = run.data.data, []
    for client, network in zip(run.data.held_out_clients, networks, strict=True):
        own = run.data.shard(client).test
        scores.append(evaluate(network.eval(), [(data.prepare(data.x_train[own]), data.y_train[own])]))
    acc, n = torch.tensor([score.values["acc"] for score in scores]), torch.tensor([score.n for score in scores])
    return {
        "new_client/acc_mean": acc.mean().item(),
        "new_client/acc_weighted": ((acc * n).sum() / n.sum()).item(),
        "new_client/acc_std": acc.std(correction=0).item(),
        "new_client/acc_worst_decile": acc.min().item(),
        "new_client/loss_mean": sum(score.values["loss"] for score in scores) / len(scores),
    }


def train_by_hand(run: FederatedOrchestrator, network: torch.nn.Module, client: int, parts: str = "") -> None:
    """Train the parameters of a network whose names begin with `parts`, as a client would in the next round."""
    chosen = [value for name, value in network.named_parameters() if name.startswith(parts)]
    optimizer = SGD(chosen)
    for batches in local_batches(run, run.round + 1, client):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(network(run.data.data.prepare(x)), y).backward()
            optimizer.step()


def new_client_row(row: dict[str, float]) -> dict[str, float]:
    """Return the scores of the held-out clients."""
    return {name: value for name, value in row.items() if re.match("new_client/(?!untrained)", name)}


# --- Training is unchanged ---

QUICK = ("SCAFFOLD", "UAPDFL")
METHODS_TWICE = [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in METHODS]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.parametrize("name", METHODS_TWICE)
def test_training_is_that_of_data_without_the_held_out_clients(tmp_path: Path, name: str) -> None:
    method, options = METHODS[name]
    scenario = options.get("scenario", digits())
    options = {"rounds": 2, "clients_per_round": 3, "class_weights": "balanced", **options}
    if name in ("FedLC", "FedROD", "FedSKC with ProtoNet", "ProtoNet"):
        del options["class_weights"]
    whole, without = (
        finished(
            tmp_path / kind.__name__,
            method(),
            **options | {"scenario": kind(**vars(scenario) | {"held_out_clients": 2})},
        )
        for kind in (Scenario, WithoutThem)
    )
    assert whole.state.keys() == without.state.keys()
    assert all(same_bytes(whole.state[part], without.state[part]) for part in whole.state)
    assert whole.memory.keys() == without.memory.keys() <= set(range(whole.clients))
    for client in whole.memory:
        assert all(same_bytes(own, without.memory[client][part]) for part, own in whole.memory[client].items())
    rows = untimed(whole.csv.rows)
    assert all(new_client_row(row) for row in rows)
    rows = [{key: value for key, value in row.items() if not key.startswith("new_client/")} for row in rows]
    assert rows == untimed(without.csv.rows)
    newest = [max(run.run_dir.glob("checkpoints/*/state.pt")) for run in (whole, without)]
    assert elements(newest[0]) == elements(newest[1])
    assert (whole.run_dir / "clients.csv").read_bytes() == (without.run_dir / "clients.csv").read_bytes()


# --- What a new client gets ---


@in_float64
def test_without_a_personal_part_a_new_client_gets_the_global_model(tmp_path: Path) -> None:
    run = finished(tmp_path, scenario=HELD_OUT, trainer=ONE_EPOCH, rounds=2)
    model = run.evaluator.global_module(2).backbone
    row = new_client_row(run.csv.rows[-1])
    assert row == pytest.approx(scores_by_hand(run, [model, model]), abs=1e-9)
    assert new_client_row(run.test()) == row


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@in_float64
@pytest.mark.parametrize(
    ("algorithm", "options", "trained"),
    [
        (FedPer(), {}, ""),
        (Local(), {}, ""),
        (FedRep(), {}, "head."),
        (FedAvg(), {"evaluation": Evaluation(new_client_model="trained")}, ""),
        (FedPer(), {"evaluation": Evaluation(new_client_model="received")}, None),
    ],
)
def test_a_new_client_trains_what_it_lacks(tmp_path: Path, algorithm: Any, options: Any, trained: str | None) -> None:
    run = finished(tmp_path, algorithm, scenario=HELD_OUT, optimizer=SGD, rounds=2, **options)
    networks = []
    for client in run.data.held_out_clients:
        network = copy.deepcopy(run.worker.template.backbone)
        network.load_state_dict(run.state["model"] if not isinstance(algorithm, Local) else {}, strict=False)
        if trained is not None:
            train_by_hand(run, network, client, trained)
        networks.append(network)
    assert new_client_row(run.csv.rows[-1]) == pytest.approx(scores_by_hand(run, networks), abs=1e-9)


def test_learning_rates_of_new_clients_follow_the_schedule_up_to_the_last_round(tmp_path: Path) -> None:
    ends = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=3)
    run = experiment(tmp_path, FedPer(), scenario=HELD_OUT, rounds=2, round_lr_scheduler=ends, trainer=ONE_EPOCH)
    scales = []
    run.check()
    tasks = run.server.new_client_tasks
    run.server.new_client_tasks = lambda *args: scales.append((args[0], args[3])) or tasks(*args)
    for round in (1, 2):
        run.evaluator.after_round(round, [])
    of = run.server.lr_scales.of
    assert scales == [(2, of(2)), (3, of(2))]


class AllButTheLast(ClientSampler):
    """All clients except the last."""

    def sample(self, round: int, participants: int) -> list[int]:
        return list(range(len(self.samples) - 1))


@pytest.mark.parametrize("method", [FedAMP, FedFomo])
def test_a_new_client_gets_the_message_of_a_client_that_has_never_taken_part(tmp_path: Path, method: Any) -> None:
    """The held-out client is the last, so that the other clients have the same ids in both runs."""
    seed = next(seed for seed in range(100) if replace(digits(), held_out_clients=1).build(seed).client_ids[-1] == 5)
    options = {"seed": seed, "rounds": 2, "trainer": ONE_EPOCH, "clients_per_round": None}
    known = finished(tmp_path / "known", method(), client_sampler=AllButTheLast(), **options)
    scenario = replace(digits(), held_out_clients=1)
    new = finished(tmp_path / "new", method(), scenario=scenario, **options)
    (task,) = new.server.new_client_tasks(3, new.state, {5: {}}, 1.0, True)
    expected = known.server.download(3, 5)
    assert task.download.numbers == expected.numbers
    assert task.download.tensors
    assert same_bytes(task.download.tensors, expected.tensors)


def test_a_client_that_joins_clusters_gets_the_mean_of_all_participants(tmp_path: Path) -> None:
    algorithm = CFL(eps1=float("inf"), eps2=0.0, min_rounds=0, min_size=1)
    run = finished(tmp_path, algorithm, scenario=HELD_OUT, trainer=ONE_EPOCH, rounds=1)
    assert "cluster_1" in run.state
    task, _ = run.server.new_client_tasks(4, run.state, {4: {}, 5: {}}, 1.0, True)
    assert same_bytes(task.download.section("model"), run.state["model"])


@pytest.mark.parametrize("method", [PeerAlgorithm, DFedAvgM])
def test_a_peer_that_joins_collects_from_all_peers(tmp_path: Path, method: Any) -> None:
    run = finished(tmp_path, method(graph=Ring()), scenario=HELD_OUT, trainer=ONE_EPOCH, rounds=1)
    memories = {}
    run.evaluator.initial_uploads((4, 5), lambda result: memories.update({result.client: result.memory}))
    task, _ = run.server.new_client_tasks(4, run.state, memories, 1.0, True)
    visible = run.server.visible_state
    for peer in range(4):
        published = {name: value for name, value in visible.peer(peer).items() if not name.startswith("number/")}
        assert same_bytes(task.download.section(f"peer_{peer}"), published)
        if method is DFedAvgM:
            assert task.download.numbers[f"peer_{peer}/weight"] == pytest.approx(1 / 5)
    assert task.memory["laid_out"]["number/n_samples"] == len(run.data.shard(4).train)


def test_personalisation_and_choice_of_a_cluster_need_no_training(tmp_path: Path) -> None:
    for algorithm in (FedBABU(tune_epochs=1), IFCA(clusters=2)):
        assert not algorithm.trains_new_clients
        run = experiment(tmp_path, algorithm, scenario=HELD_OUT, trainer=ONE_EPOCH)
        run.check()
        fits = [
            task.fit for task in run.server.new_client_tasks(1, run.state, {4: {}}, 1.0, algorithm.trains_new_clients)
        ]
        assert fits == [False]
    tuned, plain = (
        finished(tmp_path / str(epochs), FedBABU(tune_epochs=epochs), scenario=HELD_OUT, rounds=1).csv.rows[-1]
        for epochs in (5, 0)
    )
    assert tuned["new_client/acc_mean"] > plain["new_client/acc_mean"] + 0.1


@pytest.mark.thorough
def test_a_new_client_gets_the_calibrated_model(tmp_path: Path) -> None:
    run = finished(tmp_path, CCVR(), scenario=HELD_OUT, rounds=1, trainer=ONE_EPOCH)
    (calibrated, plain) = (
        scores_by_hand(run, [copy.deepcopy(module.backbone) for _ in range(2)])
        for module in (run.evaluator.global_module(1), run.worker.modules.build_shared(run.state["model"]))
    )
    assert new_client_row(run.csv.rows[-1]) == pytest.approx(calibrated, abs=1e-5)
    assert calibrated != pytest.approx(plain, abs=1e-3)


# --- Engines and resume ---


@in_float64
@pytest.mark.parametrize("engine", ["stacked", pytest.param("processes", marks=pytest.mark.thorough)])
def test_every_engine_gives_the_same_metrics(tmp_path: Path, engine: Any) -> None:
    options = {"scenario": HELD_OUT, "rounds": 2, "trainer": ONE_EPOCH, "optimizer": SGD}
    one, other = (
        untimed(finished(tmp_path / name, FedPer(), engine=name, **options).csv.rows) for name in ("sequential", engine)
    )
    for row, same in zip(one, other, strict=True):
        assert new_client_row(row)
        assert same == pytest.approx(row, abs=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [pytest.param(Ditto, marks=pytest.mark.thorough), partial(UAPDFL, n_com=2)])
def test_a_resumed_run_gives_the_same_metrics(tmp_path: Path, algorithm: Any) -> None:
    whole, rest = in_two_parts(tmp_path, algorithm, 2, scenario=HELD_OUT, trainer=ONE_EPOCH)
    assert untimed(rest.csv.rows) == untimed(whole.csv.rows)
    assert new_client_row(rest.csv.rows[-1])


# --- Options, names and messages ---


def test_new_clients_are_evaluated_when_the_others_are_and_are_in_the_summary(tmp_path: Path) -> None:
    run = finished(tmp_path, scenario=HELD_OUT, rounds=3, evaluate_every=2, trainer=ONE_EPOCH)
    assert [bool(new_client_row(row)) for row in run.csv.rows] == [False, True, True]
    summary = json.loads((tmp_path / "final" / "summary.json").read_text())
    accuracies = [row["new_client/acc_mean"] for row in run.csv.rows[1:]]
    assert summary["new_client/acc_mean_last"] == accuracies[-1]
    assert summary["new_client/acc_mean_best"] == max(accuracies)
    assert better_goal("new_client/r2_score_weighted_last") == "maximize"
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert header.index("client/acc_mean") < header.index("new_client/acc_mean") < header.index("comm/up_bytes")


def test_max_clients_limits_the_new_clients_too(tmp_path: Path) -> None:
    scenario = replace(digits(), held_out_clients=4)
    run = experiment(tmp_path, scenario=scenario, clients_per_round=2, evaluation=Evaluation(max_clients=3))
    run.check()
    assert len(run.evaluator.new_clients) == 3
    assert set(run.evaluator.new_clients) < {2, 3, 4, 5}


def test_more_participants_than_training_clients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^clients_per_round: 5 .* 4"):
        experiment(tmp_path, scenario=HELD_OUT, clients_per_round=5)
    unknown = replace(HELD_OUT, clients=None)
    with pytest.raises(ConfigError, match=r"^clients_per_round: 9 .* 8"):
        experiment(tmp_path, scenario=unknown, clients_per_round=9).check()


class OwnCentres(FedAvg):
    """A method whose shared state has an entry for each client."""

    def download(self, state: Any, client: int, rng: Any) -> Message:
        return Message.pack({"model": state["model"], "centre": {"own": torch.zeros(4)[client]}})


def test_a_method_without_a_message_for_new_clients_is_refused(tmp_path: Path) -> None:
    run = experiment(tmp_path, OwnCentres(), scenario=HELD_OUT, trainer=ONE_EPOCH)
    message = "scenario.held_out_clients: OwnCentres has no message for a new client. Override its add_client: index 4"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        run.fit()


def test_a_failure_names_the_client_by_its_own_number(tmp_path: Path) -> None:
    options = {"scenario": HELD_OUT, "model": NormMLP, "batch_size": 32, "seed": 1}
    run = experiment(tmp_path, FedPer(), **options)
    run.check()
    new = run.data.held_out_clients[0]
    run.data.held_out = [Shard(shard.train[:1], shard.test) for shard in run.data.held_out]
    with pytest.raises(
        ClientFailure, match=rf"^client {new} \({run.data.client_ids[new]}\), round 2: 1 training sample"
    ):
        run.evaluator.after_round(1, [])


def test_without_held_out_clients_there_are_no_such_metrics(tmp_path: Path) -> None:
    run = finished(tmp_path, rounds=1, trainer=ONE_EPOCH)
    assert not new_client_row(run.csv.rows[-1])
    assert run.data.client_ids is None

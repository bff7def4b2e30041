"""Runs with an adversary: who attacks, what the server receives, what is measured, resumes, engines and refusals."""

import csv
import re
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from commands import TINY, run, run_page
from experiments import (
    NormMLP,
    check_metric_names,
    client_series,
    digits,
    experiment,
    finished,
    record_rounds,
    same_bytes,
    untimed,
)
from methods import METHODS

from fl_lightning import Evaluation, attacks
from fl_lightning.algorithms import (
    CCVR,
    SCAFFOLD,
    CriticalFL,
    FedAvg,
    FedAvgM,
    FedGH,
    FedPer,
    FedProto,
    FedRep,
    Local,
    PeerAlgorithm,
)
from fl_lightning.attacks import (
    ALIE,
    IPM,
    Adversary,
    Backdoor,
    GaussianNoise,
    LabelFlip,
    MinMax,
    ModelReplacement,
    SignFlip,
)
from fl_lightning.attacks.base import UpdateAttack
from fl_lightning.callbacks.run_summary import describe_data
from fl_lightning.core.errors import ConfigError, TooFewClients
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import weighted_mean
from fl_lightning.core.task import Task
from fl_lightning.data import FederatedData
from fl_lightning.engines import StackedEngine

TWO_ROUNDS = {"rounds": 2, "clients_per_round": None, "trainer": {"accelerator": "cpu", "max_epochs": 1}}
ATTACKERS = [1, 4]
PAGE = (Path(__file__).parents[2] / "docs" / "attacks.md").read_text()


def started(clients, count=10, seed=0):
    adversary = Adversary(clients=clients)
    adversary.start(count, seed)
    return adversary.attackers


# --- Who attacks ---


def test_a_share_of_the_clients_is_drawn_by_the_seed():
    assert len(started(0.2)) == 2
    assert started(None) == started(0.2)
    assert len(started(0.01)) == 1
    assert started(0.0) == started([]) == frozenset()
    assert started(0.2) < started(0.5)
    assert started(0.5) != started(0.5, seed=1)
    counts = np.zeros(10)
    for seed in range(500):
        chosen = started(0.3, seed=seed)
        assert len(chosen) == 3
        counts[list(chosen)] += 1
    assert abs(counts / 500 - 0.3).max() < 0.1
    assert started([3, 1]) == {1, 3}


def test_all_methods_and_attacks_have_the_same_attackers(tmp_path):
    options = {"adversary": IPM(clients=0.3)}, {"adversary": LabelFlip(clients=0.3)}
    found = []
    for number, (method, each) in enumerate(zip((FedAvg(), FedRep()), options, strict=True)):
        one = experiment(tmp_path / str(number), method, **each)
        one.check()
        found.append(one.adversary.attackers)
    assert found[0] == found[1]
    assert len(found[0]) == 2


@pytest.mark.parametrize("clients", [1, 1.0, -0.1, 2, [1, 1], [6], [-1], float("nan")])
def test_bad_attackers_are_refused(tmp_path, clients):
    with pytest.raises(ConfigError, match=r"^adversary.clients: "):
        experiment(tmp_path / "run", adversary=IPM(clients=clients)).check()
    assert not (tmp_path / "run").exists()


# --- What the server receives ---


def vector(state):
    return torch.cat([value.double().flatten() for value in state.values()]).numpy()


def test_the_server_averages_crafted_updates(tmp_path):
    """Inner product manipulation by hand: from the uploads of an honest run with the same first round."""
    options = TWO_ROUNDS | {"rounds": 1}
    honest = experiment(tmp_path / "honest", **options)
    recorded = record_rounds(honest)
    honest.fit()
    ((before, uploads, _),) = recorded
    start = vector(before["model"])
    updates = {each.client: vector(each.message.section("model")) - start for each in uploads}
    crafted = -0.5 * np.mean([update for k, update in updates.items() if k not in ATTACKERS], axis=0)
    sent = [start + (crafted if k in ATTACKERS else update) for k, update in updates.items()]
    sizes = [each.n_samples for each in uploads]
    expected = np.average(sent, axis=0, weights=sizes)

    options |= {"evaluation": Evaluation(client_model="received")}  # otherwise uploads are copies in any case
    attacked = experiment(tmp_path / "attacked", adversary=IPM(clients=ATTACKERS, epsilon=0.5), **options)
    received = record_rounds(attacked)
    attacked.fit()
    ((_, arrived, after),) = received
    assert [each.client for each in arrived] == list(range(6))
    np.testing.assert_allclose(vector(after["model"]), expected, rtol=1e-5, atol=1e-7)
    for k, each in enumerate(arrived):
        assert each.n_samples == sizes[k]
        expected_bytes = uploads[k].message.section("model")
        assert same_bytes(dict(each.message.section("model")), dict(expected_bytes)) == (k not in ATTACKERS)
    assert same_bytes(after["model"], weighted_mean((e.message.section("model") for e in arrived), sizes))


def test_statistics_and_other_sections_are_those_of_honest_training(tmp_path):
    options = TWO_ROUNDS | {"rounds": 1, "model": NormMLP, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    runs = []
    for number, adversary in enumerate((None, SignFlip(clients=ATTACKERS))):
        one = experiment(tmp_path / str(number), SCAFFOLD(), adversary=adversary, **options)
        runs.append(record_rounds(one))
        one.fit()
    ((_, honest, _),), ((_, attacked, _),) = runs
    buffers = {name for name in honest[1].message.section("model") if "running" in name or "num_batches" in name}
    assert len(buffers) == 3
    for one, other in zip(honest, attacked, strict=True):
        first, second = one.message.section("model"), other.message.section("model")
        same = {name for name in first if torch.equal(first[name], second[name])}
        assert same == (buffers if one.client in ATTACKERS else {*first})
        assert same_bytes(one.message.section("control"), other.message.section("control"))


def test_no_attackers_change_nothing(tmp_path):
    runs = [
        finished(tmp_path / str(number), adversary=adversary, rounds=2)
        for number, adversary in enumerate((None, IPM(clients=0.0), Backdoor(clients=[])))
    ]
    for one in runs[1:]:
        assert same_bytes(one.state["model"], runs[0].state["model"])
        assert untimed(one.csv.rows) == untimed(runs[0].csv.rows)
        assert one.data.digest() == runs[0].data.digest()
        assert not one.server.holds_uploads
        for name in ("clients.csv", "partition.csv"):
            assert (one.run_dir / name).read_bytes() == (runs[0].run_dir / name).read_bytes()


def test_the_base_class_only_leaves_clients_out_of_the_metrics(tmp_path):
    plain, marked = (
        finished(tmp_path / str(i), adversary=adversary, **TWO_ROUNDS)
        for i, adversary in enumerate((None, Adversary(clients=ATTACKERS)))
    )
    assert same_bytes(plain.state["model"], marked.state["model"])
    assert plain.csv.rows[0]["global/acc"] == marked.csv.rows[0]["global/acc"]
    assert plain.csv.rows[0]["client/acc_mean"] != marked.csv.rows[0]["client/acc_mean"]
    assert marked.csv.rows[0]["attack/participants"] == 2


# --- The server's check ---


class Crafted(UpdateAttack):
    """Sends uploads that a test has chosen, by client."""

    def replace_uploads(self, uploads, round, buffers):
        return [self.change(each) if each.client in self.attackers and round == 2 else each for each in uploads]


def nan(upload):
    model = dict(upload.message.section("model"))
    name = next(iter(model))
    model[name] = model[name].clone().fill_(float("nan"))
    return upload._replace(message=Message.pack({"model": model}, **upload.message.numbers))


def shorter(upload):
    model = dict(upload.message.section("model"))
    model.popitem()
    return upload._replace(message=Message.pack({"model": model}, **upload.message.numbers))


@pytest.mark.parametrize(("change", "reason"), [(nan, "contains NaN or Inf"), (shorter, "is missing")])
def test_crafted_uploads_that_cannot_be_averaged_are_dropped(tmp_path, change, reason):
    adversary = Crafted(clients=ATTACKERS)
    adversary.change = change
    one = experiment(tmp_path / "run", adversary=adversary, **TWO_ROUNDS)
    received = record_rounds(one)
    with pytest.warns(UserWarning, match="dropped from this round") as seen:
        one.fit()
    lines = [str(each.message) for each in seen if "dropped" in str(each.message)]
    assert [line.partition(":")[0] for line in lines] == ["client 1, round 2", "client 4, round 2"]
    assert all(reason in line for line in lines)
    assert [[each.client for each in uploads] for _, uploads, _ in received] == [[*range(6)], [0, 2, 3, 5]]
    assert [row["attack/dropped"] for row in one.csv.rows] == [0, 2]
    assert [row["attack/participants"] for row in one.csv.rows] == [2, 2]


@pytest.mark.filterwarnings("ignore:client .* dropped from this round")
@pytest.mark.parametrize(("attackers", "fewest"), [([0, 1, 2, 3, 4, 5], 1), (ATTACKERS, 5)])
def test_too_few_uploads_end_the_run(tmp_path, attackers, fewest):
    adversary = Crafted(clients=attackers)
    adversary.change = nan
    one = experiment(tmp_path / "run", adversary=adversary, min_clients=fewest, **TWO_ROUNDS)
    with pytest.raises(TooFewClients, match=f"round 2: {6 - len(attackers)} of 6 clients were left"):
        one.fit()
    assert one.round == 1


def test_an_overflow_is_dropped(tmp_path):
    adversary = ModelReplacement(clients=[1], scale=1e300)
    with pytest.warns(UserWarning, match=r"client 1, round 1: .* NaN or Inf"):
        one = finished(tmp_path / "run", adversary=adversary, **TWO_ROUNDS | {"rounds": 1})
    assert np.isfinite(vector(one.state["model"])).all()


def test_a_round_without_honest_clients_has_no_client_metrics(tmp_path):
    one = finished(tmp_path / "run", adversary=ALIE(clients=[*range(6)], z=1.0), **TWO_ROUNDS)
    plain = finished(tmp_path / "plain", **TWO_ROUNDS)
    assert same_bytes(one.state["model"], plain.state["model"])
    assert not [name for name in one.csv.rows[0] if name.startswith("client/")]


# --- Metrics ---


@pytest.mark.parametrize("client_model", ["trained", "received", "both"])
def test_attackers_are_left_out_of_all_metrics_of_clients(tmp_path, client_model):
    options = TWO_ROUNDS | {"evaluation": Evaluation(client_model=client_model, personal_on_global=True)}
    plain = finished(tmp_path / "plain", **options)
    one = finished(tmp_path / "run", adversary=LabelFlip(clients=ATTACKERS), **options)
    honest = [0, 2, 3, 5]
    for round, row in enumerate(one.csv.rows, 1):
        series = client_series(one.run_dir, round)
        assert {name.partition("/")[0] for name in series} == {f"client_{k}" for k in honest}
        assert row["client/acc_mean"] == pytest.approx(fmean(series[f"client_{k}/acc"] for k in honest))
        worst = min(series[f"client_{k}/acc"] for k in honest)
        assert row["client/acc_worst_decile"] == pytest.approx(worst)
        assert row["client/train_loss"] == pytest.approx(fmean(series[f"client_{k}/train_loss"] for k in honest))
    series = client_series(plain.run_dir, 1)  # honest clients train alike in round 1
    row = one.csv.rows[0]
    assert row["client/train_loss"] == pytest.approx(fmean(series[f"client_{k}/train_loss"] for k in honest))
    if client_model == "trained":
        assert row["client/acc_mean"] == pytest.approx(fmean(series[f"client_{k}/acc"] for k in honest))
    check_metric_names(one)


def test_the_success_rate_of_a_backdoor_by_hand(tmp_path):
    attack = ModelReplacement(clients=ATTACKERS, data=Backdoor(target=3))
    one = finished(tmp_path / "run", adversary=attack, **TWO_ROUNDS)
    data = one.data.data
    others = data.y_test != 3
    x = data.x_test[others].clone()
    x[:, :, 5:, 5:] = data.x_train.max()
    with torch.no_grad():
        predicted = one.evaluator.global_module(2)(data.prepare(x)).argmax(dim=1)
    rate = float((predicted == 3).double().mean())
    assert one.csv.rows[-1]["attack/success_rate"] == pytest.approx(rate)
    assert rate > 0.3
    assert one.test()["attack/success_rate"] == pytest.approx(rate)
    check_metric_names(one)


def test_the_success_rate_of_a_label_flip_by_hand(tmp_path):
    attack = LabelFlip(clients=[0, 1, 2, 3], source=1, target=8)
    one = finished(tmp_path / "run", adversary=attack, **TWO_ROUNDS)
    data = one.data.data
    with torch.no_grad():
        predicted = one.evaluator.global_module(2)(data.prepare(data.x_test[data.y_test == 1])).argmax(dim=1)
    assert one.csv.rows[-1]["attack/success_rate"] == pytest.approx(float((predicted == 8).double().mean()))
    check_metric_names(one)


def test_without_a_global_model_the_success_rate_is_the_mean_of_honest_clients(tmp_path):
    attack = Backdoor(clients=ATTACKERS, target=3)
    options = {"adversary": attack, "evaluation": Evaluation(client_model="received"), **TWO_ROUNDS}
    one = finished(tmp_path / "run", FedPer(), **options)
    data = one.data.data
    x = data.x_test[data.y_test != 3].clone()
    x[:, :, 5:, 5:] = data.x_train.max()
    honest, rates = [client for client in range(one.clients) if client not in ATTACKERS], []
    for client, download in zip(honest, one.server.downloads(3, honest), strict=True):
        module = one.worker.modules.receive(Task(3, client, download, one.server.memory.get(client, {})))
        with torch.no_grad():
            rates.append(float((module.eval()(data.prepare(x)).argmax(dim=1) == 3).double().mean()))
    assert len({*rates}) > 1
    assert one.csv.rows[-1]["attack/success_rate"] == pytest.approx(fmean(rates))
    check_metric_names(one)


def test_the_success_rate_of_trained_clients_is_that_of_the_round_in_all_engines(tmp_path):
    """Half of the clients take part. Clients of `Local` only evaluate what they have trained."""
    options = {"adversary": Backdoor(clients=ATTACKERS, share=1.0), **TWO_ROUNDS, "clients_per_round": 3}
    one = finished(tmp_path / "one", Local(), **options)
    other = finished(tmp_path / "other", Local(), engine=StackedEngine(), **options)
    known = [row["attack/success_rate"] for row in one.csv.rows]
    assert all(0 <= rate < 0.6 for rate in known)  # honest clients do not learn the trigger from others
    assert [row["attack/success_rate"] for row in other.csv.rows] == pytest.approx(known, abs=0.02)
    assert (
        "attack/success_rate" not in finished(tmp_path / "no", Local(), adversary=LabelFlip(), **TWO_ROUNDS).csv.rows[0]
    )


def test_the_calibrated_model_is_attacked(tmp_path):
    attack = Backdoor(clients=ATTACKERS, target=3)
    one = finished(tmp_path / "run", CCVR(), adversary=attack, **TWO_ROUNDS | {"rounds": 1})
    data = one.data.data
    x = data.x_test[data.y_test != 3].clone()
    x[:, :, 5:, 5:] = data.x_train.max()
    modules = one.evaluator.global_module(1), one.worker.modules.build_shared(one.state["model"])
    with torch.no_grad():
        outputs = [module.eval()(data.prepare(x)) for module in modules]
    calibrated, plain = (float((each.argmax(dim=1) == 3).double().mean()) for each in outputs)
    assert one.csv.rows[0]["attack/success_rate"] == pytest.approx(calibrated)
    assert calibrated != plain


def test_participants_are_counted_by_round(tmp_path):
    one = finished(tmp_path / "run", adversary=SignFlip(clients=0.4), rounds=4, clients_per_round=2)
    expected = [len(one.adversary.attackers & {*one.server.participants(round)}) for round in range(1, 5)]
    assert [row["attack/participants"] for row in one.csv.rows] == expected
    assert len({*expected}) > 1


def test_the_summary_of_a_run_names_the_attack(tmp_path):
    one = experiment(tmp_path / "run", adversary=SignFlip(clients=ATTACKERS))
    one.check()
    assert describe_data(one).endswith("training samples each; 2 attack (SignFlip)")


# --- Methods ---

REFUSED = {"peers": PeerAlgorithm, "prototypes": FedProto, "features": FedGH, "masked weights": CriticalFL}


@pytest.mark.parametrize("name", REFUSED)
def test_attacks_on_updates_refuse_methods_that_upload_no_weights(tmp_path, name):
    one = experiment(tmp_path / "run", REFUSED[name](), adversary=IPM())
    with pytest.raises(ConfigError, match=r"^adversary: IPM .* LabelFlip .* Backdoor"):
        one.fit()
    assert not (tmp_path / "run").exists()


UNSENT = {"FedDistill", "FedProto", "FedTGP", "FedGH", "FedKD", "IFCA", "Local", "CriticalFL"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_each_method_works_with_attacks_or_refuses_them_before_round_1(tmp_path, name):
    method, options = METHODS[name]
    public = method().public is not None
    one = experiment(tmp_path / "run", method(), adversary=SignFlip(clients=[0]), **options | {"rounds": 1})
    if name in UNSENT or public:
        with pytest.raises(ConfigError, match=r"^adversary: SignFlip replaces"):
            one.fit()
        assert not (tmp_path / "run").exists()
        return
    one.fit()
    assert one.csv.rows[0]["attack/dropped"] == 0


def test_attacks_on_data_work_without_a_server(tmp_path):
    one = finished(tmp_path / "run", PeerAlgorithm(), adversary=Backdoor(clients=ATTACKERS), **TWO_ROUNDS)
    assert one.csv.rows[0]["attack/participants"] == 2
    check_metric_names(one)


def test_clients_on_their_own_machines_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(FederatedData, "is_remote", True)
    with pytest.raises(ConfigError, match=r"^adversary: attacks are simulated"):
        experiment(tmp_path / "run", adversary=LabelFlip()).check()


# --- Resume, engines, dry runs ---

KINDS = [
    lambda: GaussianNoise(clients=ATTACKERS, std=0.01),
    lambda: MinMax(clients=ATTACKERS),
    lambda: ModelReplacement(clients=ATTACKERS, data=Backdoor(trigger="blend")),
]


@pytest.mark.parametrize("attack", KINDS)
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_resumed_run_gives_the_same_bytes(tmp_path, attack, store):
    options = TWO_ROUNDS | {"client_store": store, "algorithm": FedAvgM()}
    whole = finished(tmp_path / "whole", adversary=attack(), **options | {"rounds": 3})
    finished(tmp_path / "part", adversary=attack(), **options | {"rounds": 2, "algorithm": FedAvgM()})
    rest = experiment(tmp_path / "part", adversary=attack(), **options | {"rounds": 3, "algorithm": FedAvgM()})
    rest.fit(resume=True)
    assert same_bytes(whole.state["model"], rest.state["model"])
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("attack", KINDS)
@pytest.mark.thorough
def test_processes_give_the_same_bytes(tmp_path, attack, processes):
    runs = [
        finished(tmp_path / str(number), adversary=attack(), engine=engine, **TWO_ROUNDS)
        for number, engine in enumerate(("sequential", processes))
    ]
    assert same_bytes(runs[0].state["model"], runs[1].state["model"])
    assert untimed(runs[0].csv.rows) == untimed(runs[1].csv.rows)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:StackedEngine")
def test_stacked_clients_are_attacked_alike(tmp_path):
    options = TWO_ROUNDS | {"trainer": {"accelerator": "cpu", "max_epochs": 1, "precision": "64-true"}}
    one, other = (
        finished(tmp_path / str(number), adversary=MinMax(clients=ATTACKERS), engine=engine, **options)
        for number, engine in enumerate(("sequential", StackedEngine()))
    )
    np.testing.assert_allclose(vector(one.state["model"]), vector(other.state["model"]), atol=1e-6)


def test_a_dry_run_works(tmp_path):
    one = experiment(tmp_path / "run", adversary=ModelReplacement(clients=0.9, data=Backdoor()))
    assert one.fit(fast=True).is_dry_run
    assert not (tmp_path / "run").exists()


def test_tests_on_the_test_set_keep_the_attackers_data(tmp_path):
    scenario = digits()
    scenario.validation_share = 0.2
    one = finished(tmp_path / "run", adversary=LabelFlip(clients=ATTACKERS), scenario=scenario, **TWO_ROUNDS)
    labels = one.data.data.y_train[one.data.shards[1].train]
    one.use_test_set()
    assert torch.equal(one.data.data.y_train[one.data.shards[1].train], labels)


# --- The command line ---


@pytest.mark.thorough
def test_the_command_line_takes_attacks_by_name_and_detects_a_change(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY.replace("algorithm: FedSKC", "algorithm: FedAvg"))
    words = ("fit", "--config", tmp_path / "tiny.yaml", "--run_dir", tmp_path / "run", "--rounds=2")
    attack = "--adversary={class_path: ModelReplacement, init_args: {clients: [1], data: {class_path: Backdoor}}}"
    assert run(*words, attack).code == 0
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert {"attack/participants", "attack/dropped", "attack/success_rate"} <= {*next(csv.reader(file))}
    changed = run("fit", "--resume", tmp_path / "run", "--rounds=3", "--adversary.clients=[2]")
    assert changed.code == 2
    assert re.search(r"adversary.*clients.*\[1\] -> \[2\]", changed.err)
    assert run("fit", "--resume", tmp_path / "run", "--rounds=3").code == 0
    assert run("test", tmp_path / "run").code == 0
    other = ("fit", "--config", tmp_path / "tiny.yaml", "--run_dir", tmp_path / "other", "--rounds=2")
    assert run(*other, "--adversary=alie", "--adversary.z=1.5", "--adversary.clients=0.3").code == 0
    table = run("compare", tmp_path / "run", tmp_path / "other", "--metric=attack/participants", "--by=adversary")
    assert table.code == 0, table.err
    assert "ALIE" in table.out
    assert run("report", tmp_path / "run", tmp_path / "other", "-o", tmp_path / "report.html").code == 0
    assert "attack/success_rate" in (tmp_path / "report.html").read_text()


def test_wrong_names_of_attacks_get_a_suggestion():
    assert "Did you mean Backdoor?" in run("fit", "--config=digits_fedavg.yaml", "--adversary=Backdor").err
    assert "MinMax" in run("list", "adversaries").out


@pytest.mark.thorough
def test_the_snippets_of_the_page_run_in_their_order(tmp_path, monkeypatch):
    """Each run has one round, and the comparison two attacks."""
    monkeypatch.chdir(tmp_path)
    short = "--rounds 1 --trainer.max_epochs 1 --logger null"

    def reduced(block):
        block = block.replace("\\\n", "").replace("SignFlip,IPM,MinMax,", "").replace("--seeds 0 1 2", "--seeds 0")
        return block.replace("--config digits_fedavg.yaml", f"--config digits_fedavg.yaml {short}").replace(
            "--rounds 10", ""
        )

    *_, table, last = run_page(PAGE, reduced)
    assert {"Adversary", "LabelFlip"} <= {*table.out.split()}
    assert "ended: 1 round is done" in last.out


def test_the_page_names_each_attack_and_each_refused_method():
    assert all(f"`{name}`" in PAGE for name in [*attacks.__all__, *UNSENT])

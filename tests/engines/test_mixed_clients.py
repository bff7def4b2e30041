"""Runs in which clients have different networks: `Mixed` under the methods that exchange no encoder."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from experiments import (
    ONE_EPOCH,
    UNEQUAL,
    NormMLP,
    client_series,
    descend,
    digits,
    experiment,
    finished,
    in_float64,
    in_two_parts,
    samples_of,
    task_of_round,
    untimed,
)
from flower_grid import flower, remote_experiment  # noqa: F401
from loops import assert_equals_loop, steps_of
from methods import assert_same_run
from task_runners import run_tasks
from torch import nn
from torch.nn import functional as F

import fl_lightning
from fl_lightning import CNN, MLP, Evaluation, LeNet, Mixed, UnitDivergence
from fl_lightning.algorithms import (
    FML,
    FedAvg,
    FedDistill,
    FedGH,
    FedKD,
    FedPer,
    FedProto,
    FedTGP,
    LGFedAvg,
    Local,
    Proximal,
)
from fl_lightning.callbacks import ClientDrift, ConfusionMatrix, KnowledgeMap, RowNorms
from fl_lightning.callbacks.monitor import round_metrics
from fl_lightning.callbacks.run_summary import describe_model
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import AutoEngine, ProcessesEngine, StackedEngine, auto
from fl_lightning.engines.exchange import check_exchange, methods_that_work
from fl_lightning.runs.partition import read_architectures, read_counts

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = [partial(MLP, hidden=(16,)), partial(CNN, feature_dim=24), NormMLP]
MIXED = Mixed(MODELS, feature_dim=8)
QUICK = {"model": MIXED, "rounds": 2, "trainer": ONE_EPOCH}
METHODS = [FedProto, FedDistill, LGFedAvg, Local, FedGH, partial(FedTGP, server_epochs=2)]
METHODS += [partial(kind, shared_model=partial(MLP, hidden=(8,))) for kind in (FML, FedKD)]


# --- One network ---


@pytest.mark.parametrize("method", [FedAvg, FedProto])
@pytest.mark.parametrize("assign", ["round_robin", "random"])
def test_one_network_is_that_network_bit_for_bit(tmp_path, method, assign):
    plain = finished(tmp_path / "plain", method(), model=NormMLP, rounds=2)
    mixed = finished(tmp_path / "mixed", method(), model=Mixed([NormMLP], assign), rounds=2)
    assert_same_run(plain, mixed)


def test_equal_networks_average_as_one_network_but_start_apart(tmp_path):
    run = experiment(tmp_path, FedAvg(), model=Mixed([NormMLP, NormMLP]))
    run.check()
    one, other = (group.template.backbone.state_dict() for group in run.worker.groups)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    starts = [run.starting_module(client).backbone.state_dict() for client in range(2)]
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in one)


# --- Each method, resumed, in processes and on the clients' machines ---


@pytest.mark.parametrize("method", METHODS)
def test_three_architectures_train_and_resume_byte_for_byte(tmp_path, method):
    whole, resumed = in_two_parts(tmp_path, method, 1, **QUICK)
    assert_same_run(whole, resumed)
    widths = {len(whole.client_module(client).backbone.state_dict()) for client in range(3)}
    assert len(widths) == 3
    assert whole.csv.rows[-1]["client/train_loss"] < whole.csv.rows[0]["client/train_loss"]


@pytest.fixture(scope="module")
def processes():
    class Lasting(ProcessesEngine):
        def close(self):
            pass

    engine = Lasting(workers=2)
    yield engine
    ProcessesEngine.close(engine)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_processes_give_the_bytes_of_one_client_after_another(tmp_path, processes, method):
    alone = finished(tmp_path / "alone", method(), **QUICK)
    assert_same_run(alone, finished(tmp_path / "shared", method(), engine=processes, **QUICK))


@pytest.mark.parametrize("method", [FedProto, LGFedAvg])
@pytest.mark.usefixtures("flower")
def test_clients_on_their_own_machines_give_the_same_bytes(tmp_path, method):
    alone = finished(tmp_path / "alone", method(), **QUICK)
    remote, _ = remote_experiment(tmp_path / "remote", alone, method, folder=tmp_path, **QUICK)
    remote.fit()
    for section, tensors in alone.state.items():
        assert all(torch.equal(value, remote.state[section][name]) for name, value in tensors.items())
    assert untimed(alone.csv.rows) == untimed(remote.csv.rows)


# --- Whole runs by hand ---


def networks_by_hand(run):
    """Return a copy of each client's initial network."""
    return [copy.deepcopy(run.worker.for_client(client).template.backbone) for client in range(run.clients)]


@in_float64
def test_prototypes_of_different_networks_equal_a_loop(tmp_path):
    options = {"model": Mixed(MODELS[:2], feature_dim=8), "rounds": 3, "trainer": ONE_EPOCH} | UNEQUAL
    run = experiment(tmp_path, FedProto(lam=0.7), **options)
    run.check()
    networks, prototypes, participants = networks_by_hand(run), {}, []
    for round in range(1, 4):
        participants = run.server.participants(round)
        for client in participants:
            network = networks[client].train()
            for x, y in steps_of(run, round, client):
                features = network.encoder(x)
                pulled = [
                    ((row - prototypes[int(label)]) ** 2).mean() if int(label) in prototypes else row.sum() * 0
                    for row, label in zip(features, y, strict=True)
                ]
                loss = F.cross_entropy(network.head(features), y) + 0.7 * torch.stack(pulled).mean()
                descend(network, loss, 0.2)
        means = {}
        for client in participants:
            x, y = samples_of(run, client)
            with torch.no_grad():
                features = networks[client].eval().encoder(x)
            for label in y.unique().tolist():
                means.setdefault(label, []).append(features[y == label].mean(dim=0))
        prototypes |= {label: sum(each) / len(each) for label, each in means.items()}
    run = finished(tmp_path / "run", FedProto(lam=0.7), **options)
    values = run.state["prototypes"]["values"]
    assert run.state["prototypes"]["known"].nonzero().flatten().tolist() == sorted(prototypes)
    for label, prototype in prototypes.items():
        torch.testing.assert_close(values[label], prototype, rtol=1e-12, atol=1e-12)
    for client, network in enumerate(networks):
        own = dict(run.client_module(client).backbone.state_dict())
        assert_equals_loop(run, own, dict(network.state_dict()), 1e-11)


@in_float64
def test_the_shared_head_of_different_networks_equals_a_loop(tmp_path):
    run = finished(tmp_path, LGFedAvg(), model=Mixed(MODELS[:2], feature_dim=8), rounds=2, **UNEQUAL)
    networks, head = networks_by_hand(run), copy.deepcopy(run.worker.template.backbone.head)
    for round in (1, 2):
        participants = run.server.participants(round)
        sizes = {client: len(samples_of(run, client)[1]) for client in participants}
        mean = {name: torch.zeros_like(value) for name, value in head.state_dict().items()}
        for client in participants:
            network = networks[client].train()
            network.head.load_state_dict(head.state_dict())
            for x, y in steps_of(run, round, client):
                descend(network, F.cross_entropy(network(x), y), 0.2)
            for name, value in network.head.state_dict().items():
                mean[name] += sizes[client] / sum(sizes.values()) * value
        head.load_state_dict(mean)
    assert_equals_loop(run, dict(run.state["model"]), {f"head.{name}": value for name, value in mean.items()}, 1e-12)


# --- What is exchanged ---


@pytest.mark.parametrize(
    ("method", "feature_dim", "what", "works"),
    [
        (FedAvg, None, "encoder.1.weight", {"FedDistill", "Local"}),
        (FedPer, 8, "encoder.0.1.weight", {"FedDistill", "FedProto", "LGFedAvg", "Local"}),
        (FedProto, None, "prototypes/values", {"FedDistill", "Local"}),
        (LGFedAvg, None, "head.weight", {"FedDistill", "Local"}),
    ],
)
def test_what_differs_is_refused_before_round_1(tmp_path, method, feature_dim, what, works):
    with pytest.raises(ConfigError, match=r"^model: ") as error:
        finished(tmp_path / "run", method(), model=Mixed(MODELS, feature_dim=feature_dim))
    assert f"{what!r}" in str(error.value)
    text = str(error.value).rpartition("Methods that work: ")[2]
    named, _, rest = text.removesuffix(".").partition(", or set model.feature_dim")
    assert works <= {*named.split(", ")}
    assert not {"FedAvg", method.__name__} & {*named.split(", ")}
    assert bool(rest) is (feature_dim is None)
    assert not (tmp_path / "run").exists()


def test_a_tensor_of_another_type_is_refused(tmp_path):
    class Half(NormMLP):
        def __init__(self, in_shape, num_classes):
            super().__init__(in_shape, num_classes)
            self.encoder[4] = nn.Identity()
            self.register_buffer("count", torch.zeros(1))

    class Whole(Half):
        def __init__(self, in_shape, num_classes):
            super().__init__(in_shape, num_classes)
            self.count = self.count.double()

    with pytest.raises(ConfigError, match=r"^model: .*'count'.* float32 in Half .* float64"):
        finished(tmp_path, FedAvg(), model=Mixed([Half, Whole]))


def test_the_methods_that_work_are_those_that_exchange_nothing_of_the_encoder(tmp_path):
    run = experiment(tmp_path, Local(), **QUICK)
    run.check()
    assert {"FedProto", "FedDistill", "LGFedAvg", "Local"} <= {*methods_that_work(run.worker)}
    assert not {"FedAvg", "FedPer", "FedBN", "APFL", "PeerAlgorithm"} & {*methods_that_work(run.worker)}
    for name in methods_that_work(run.worker):
        experiment(tmp_path, getattr(fl_lightning, name)(), **QUICK).check()


def test_a_term_that_reads_shared_features_is_checked_too(tmp_path):
    run = experiment(tmp_path, Local(loss_terms=[Proximal(0.1)]), model=Mixed(MODELS))
    run.check()
    run = experiment(tmp_path, FedDistill(loss_terms=[fl_lightning.PrototypeAlignment(0.1)]), model=Mixed(MODELS))
    with pytest.raises(ConfigError, match="prototypes/values"):
        run.check()
    check_exchange(SimpleNamespace(model=MLP))  # one network: nothing to check


@pytest.mark.parametrize(
    ("models", "key"),
    [([MLP, LeNet], "model.models.1"), ([LeNet, MLP], "model.models.0"), ([MLP, nn.Identity], "model.models.1")],
)
def test_a_network_that_does_not_fit_is_named(tmp_path, models, key):
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        experiment(tmp_path, Local(), model=Mixed(models)).check()


def test_a_list_of_another_length_is_refused(tmp_path):
    held_out = replace(digits(), held_out_clients=2)
    experiment(tmp_path, Local(), model=Mixed(MODELS, [0, 1, 2, 0, 1, 2]), scenario=held_out).check()
    with pytest.raises(ConfigError, match=r"^model.assign: "):
        experiment(tmp_path, Local(), model=Mixed(MODELS, [0, 1, 2, 0]), scenario=held_out).check()


# --- Frozen layers, batches and engines of each group ---


class Frozen(NormMLP):
    """Its first layer, which another network trains, is frozen."""

    def __init__(self, in_shape, num_classes):
        super().__init__(in_shape, num_classes)
        self.encoder[1].requires_grad_(False)


def test_a_layer_that_one_network_freezes_is_trained_and_kept_by_another(tmp_path):
    run = finished(tmp_path, Local(), model=Mixed([Frozen, NormMLP]), scenario=digits(2), clients_per_round=2)
    frozen, trained = (run.memory[client]["personal"] for client in range(2))
    assert "encoder.1.weight" not in frozen
    assert not torch.equal(trained["encoder.1.weight"], run.worker.of_group(1).template.backbone.encoder[1].weight)
    start = run.worker.template.backbone.encoder[1].weight
    assert torch.equal(run.client_module(0).backbone.encoder[1].weight, start)


def test_only_networks_with_batchnorm_need_two_samples_per_batch(tmp_path):
    run = experiment(tmp_path, Local(), **QUICK)
    run.check()
    assert [group.client_data.min_batch for group in run.worker.groups] == [1, 1, 2]


def test_stacked_is_refused_and_auto_leaves_it_out(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^engine: StackedEngine cannot stack several networks"):
        experiment(tmp_path, Local(), engine=StackedEngine(), **QUICK).check()
    run = experiment(tmp_path, Local(), engine=AutoEngine(budget=0.1), **QUICK)
    run.check()
    monkeypatch.setattr(auto, "SHORT_RUN", 0)
    monkeypatch.setattr(auto, "usable_cores", lambda: 1)
    monkeypatch.setattr(StackedEngine, "run", None)
    run_tasks(run.engine, run.worker, [task_of_round(run, 1, client) for client in range(6)])
    assert run.engine.choice == "sequential"


# --- Evaluation ---


@pytest.mark.parametrize("client_model", ["trained", "received", "both"])
def test_each_client_is_evaluated_with_its_own_network(tmp_path, client_model):
    run = finished(tmp_path, LGFedAvg(), evaluation=Evaluation(client_model=client_model), clients_per_round=6, **QUICK)
    row, own = run.csv.rows[-1], client_series(tmp_path, 2)
    by_name = {}
    for client in range(run.clients):
        if f"client_{client}/acc" in own:
            by_name.setdefault(MIXED.names[client % 3], []).append(own[f"client_{client}/acc"])
        if client_model != "trained":
            module, shard = run.client_module(client).eval(), run.data.shards[client].test
            x, y = run.data.data.x_train[shard], run.data.data.y_train[shard]
            assert own[f"client_{client}/acc"] == pytest.approx(float((module(x).argmax(1) == y).double().mean()))
    for name, values in by_name.items():
        assert row[f"architecture/{name}/acc_mean"] == pytest.approx(sum(values) / len(values))
    assert {name for name in row if name.startswith("architecture/")} <= {*round_metrics(run)}


@pytest.mark.filterwarnings("ignore:.*contain initial weights")
def test_untrained_clients_of_different_networks_are_not_evaluated_together(tmp_path):
    evaluation = Evaluation(client_model="received")
    run = finished(tmp_path, LGFedAvg(), evaluation=evaluation, **QUICK | {"rounds": 1, "clients_per_round": 1})
    losses = []
    for client in range(run.clients):
        x, y = samples_of(run, client, "test")
        losses.append(float(F.cross_entropy(run.client_module(client).eval()(x), y).detach()))
    assert run.csv.rows[-1]["client/loss_mean"] == pytest.approx(sum(losses) / 6, rel=1e-5)


@pytest.mark.parametrize("method", [FedProto, LGFedAvg])
def test_held_out_clients_have_the_networks_that_follow(tmp_path, method):
    scenario = replace(digits(), held_out_clients=2)
    run = finished(tmp_path, method(), scenario=scenario, **QUICK | {"clients_per_round": 4})
    assert [run.worker.architecture_of(client) for client in run.data.held_out_clients] == ["CNN", "NormMLP"]
    assert run.csv.rows[-1]["new_client/acc_mean"] > 0


def test_the_architecture_of_each_client_is_recorded(tmp_path):
    run = finished(tmp_path, FedProto(), **QUICK)
    assert read_architectures(tmp_path) == ["MLP", "CNN", "NormMLP"] * 2
    assert read_counts(tmp_path / "partition.csv").counts.tolist() == run.data.class_counts().tolist()
    clients = fl_lightning.runs.load(tmp_path).clients
    assert (clients["architecture"] == clients["client"].map(lambda client: MIXED.names[client % 3])).all()
    column = "architecture/CNN/acc_mean"
    last = [row[column] for row in run.csv.rows if column in row][-1]
    assert fl_lightning.runs.load(tmp_path).runs[f"{column}_last"].tolist() == [last]
    assert "CNN, 58," in describe_model(run)
    assert "2 clients" in describe_model(run)


def test_with_one_network_nothing_is_recorded(tmp_path):
    run = finished(tmp_path, FedProto(), **QUICK | {"model": MODELS[0]})
    assert read_architectures(tmp_path) == ()
    assert not any("architecture" in name for name in run.csv.rows[-1])


# --- Callbacks ---


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS[:-1])  # FedKD, the last, does not reveal its clients' trained models
def test_callbacks_look_at_each_clients_own_network(tmp_path, method):
    callbacks = [RowNorms(), ConfusionMatrix(), UnitDivergence(), KnowledgeMap(client=1)]
    if method is LGFedAvg:
        callbacks.append(ClientDrift())
    if method is Local:  # its empty upload reveals no model
        callbacks = [ConfusionMatrix()]
    run = finished(tmp_path, method(), callbacks=callbacks, **QUICK)
    assert len(list((tmp_path / "figures").glob("*/*.npz"))) >= len(callbacks)
    if method is not Local:
        assert 0 <= run.csv.rows[-1]["row_norms/gap"] < 2


def test_a_dry_run_trains_the_networks_of_its_clients(tmp_path):
    assert experiment(tmp_path / "run", FedProto(), **QUICK).fit(fast=True).is_dry_run

"""Peers without a server: collecting, mixing and client state, compared with loops by hand."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from commands import rows, run, tiny
from experiments import (
    UNEQUAL,
    NoDropout,
    NormMLP,
    accuracy_and_loss,
    assert_near,
    client_series,
    digits,
    experiment,
    finished,
    in_float64,
    same_bytes,
)
from loops import assert_publications_equal_loop, peers_by_hand
from methods import assert_same_run
from peers import Watching, mean_by_hand, model_of, peers_in, published
from task_runners import Backwards

from fl_lightning.algorithms import (
    UAPDFL,
    DFedAvgM,
    DisPFL,
    DistillingWeights,
    ErdosRenyi,
    FedAvg,
    HistoryContrast,
    LocalContrastive,
    PeerAlgorithm,
    PeerCriticalFL,
    Ring,
)
from fl_lightning.callbacks import RoundCallback
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ClientFailure, TooFewClients
from fl_lightning.core.message import Message, Upload, bundle, message_to_tensors, tensors_to_message, unbundle
from fl_lightning.core.task import failed_result
from fl_lightning.engines.flower import shared_entries
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP, Head

K = 6
MODEL = partial(MLP, hidden=(16,))
WEIGHTS = 64 * 16 + 16 + 16 * 10 + 10  # |w| of that model on digits
ALL = {"clients_per_round": K, "trainer": {"accelerator": "cpu", "max_epochs": 1}}


class NaNInOneRound(LossTerm):
    """A loss that is NaN in one round, for the clients with `n` samples."""

    def __init__(self, round, n):
        super().__init__()
        self.round, self.n, self.bad = round, n, False

    def begin(self, module):
        self.bad = module.context.round == self.round and int(module.context.class_counts.sum()) == self.n

    def forward(self, step):
        return step.logits.sum() * (torch.nan if self.bad else 0.0)


def publications(clients, seed=0):
    """Return random publications with a parameter, statistics and a counter."""
    generator = torch.Generator().manual_seed(seed)
    sections = [
        {"weight": torch.randn(3, 2, generator=generator), "tracked": torch.randint(9, (), generator=generator)}
        for _ in range(clients)
    ]
    samples = torch.randint(1, 50, (clients,), generator=generator).tolist()
    return [Message.pack({"model": s}, n_samples=n) for s, n in zip(sections, samples, strict=True)]


# --- Mixing ---


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("clients", [1, 2, 5])
def test_mix_is_the_weighted_mean_of_the_own_and_the_peers_models(clients, weighting):
    own, *others = messages = publications(clients)
    mixed = PeerAlgorithm(weighting=weighting).mix(own, [Upload(k, message) for k, message in enumerate(others)])
    weights = [m.numbers["n_samples"] if weighting == "samples" else 1 for m in messages]
    expected = mean_by_hand([m.section("model") for m in messages], weights)
    assert mixed.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mixed[name], value)


def test_a_client_without_peers_keeps_its_weights_bit_for_bit():
    (own,) = publications(1)
    assert same_bytes(PeerAlgorithm().mix(own, []), own.section("model"))


def test_publications_are_unchanged_by_the_state_and_by_bundles():
    messages = dict(zip((2, 10, 1), publications(3), strict=True))
    messages[4] = Message(numbers={"n_samples": 2**53 + 1, "share": 0.1})
    for message in messages.values():
        again = tensors_to_message(message_to_tensors(message))
        assert same_bytes(again.tensors, message.tensors)
        assert again.numbers == message.numbers
    arrived = unbundle(bundle(messages))
    assert [upload.client for upload in arrived] == [1, 2, 4, 10]
    for client, message, *_ in arrived:
        assert same_bytes(message.tensors, messages[client].tensors)
        assert message.numbers == messages[client].numbers
    assert unbundle(bundle({})) == []


# --- Collecting ---


@pytest.mark.thorough
def test_n_com_other_clients_are_sampled_in_each_round(tmp_path):
    run = finished(tmp_path, PeerAlgorithm(n_com=2), rounds=1, **ALL)
    drawn = {(r, k): peers_in(run.server.download(r, k)) for r in range(2, 302) for k in range(K)}
    assert all(len(set(peers)) == 2 and k not in peers for (_, k), peers in drawn.items())
    for k in range(K):
        counts = np.bincount(np.concatenate([drawn[r, k] for r in range(2, 302)]), minlength=K)
        np.testing.assert_allclose(np.delete(counts, k) / 300, 2 / (K - 1), atol=0.13)  # 4.6 standard deviations
    assert any(drawn[r, 0] != drawn[r, 1] for r in range(2, 12) if {0, 1}.isdisjoint(drawn[r, 0] + drawn[r, 1]))
    assert {key: peers_in(run.server.download(*key)) for key in list(drawn)[:20]} == dict(list(drawn.items())[:20])


@pytest.mark.parametrize("n_com", [None, 1])
def test_clients_collect_only_from_linked_peers(tmp_path, n_com):
    run = finished(tmp_path, PeerAlgorithm(n_com=n_com, graph=Ring()), rounds=1, **ALL)
    for client in range(K):
        around = {(client - 1) % K, (client + 1) % K}
        drawn = [set(peers_in(run.server.download(round, client))) for round in range(2, 22)]
        assert set.union(*drawn) == around
        assert all(len(peers) == (1 if n_com == 1 else 2) for peers in drawn)


# --- Rounds ---


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, PeerAlgorithm(graph=Ring()), model=NoDropout, **UNEQUAL)
    expected = peers_by_hand(run)
    run.fit()
    assert_publications_equal_loop(run, expected)


@pytest.mark.thorough
@in_float64
def test_collecting_from_all_peers_equals_fedavg(tmp_path):
    peers, server = (
        experiment(tmp_path / type(method).__name__, method, rounds=2, **ALL) for method in (PeerAlgorithm(), FedAvg())
    )
    peers.fit()
    server.fit()
    assert_near(peers.state["model"], server.state["model"])


def test_before_round_one_every_client_has_published_the_initial_model(tmp_path):
    engine = Watching()
    run = finished(tmp_path, PeerAlgorithm(), rounds=1, clients_per_round=1, engine=engine)
    initial = run.worker.modules.build().backbone.state_dict()
    (task,) = engine.tasks
    for client in range(K):
        tensors, n = published(run, client)
        assert same_bytes(model_of(tensors), initial) == (client != task.client)
        assert n == len(run.data.shards[client].train)
    assert all(same_bytes(upload.message.section("model"), initial) for upload in unbundle(task.download))
    assert run.csv.rows[0]["comm/total_bytes"] == (K - 1) * (4 * WEIGHTS + 8)  # publishing is not communication


def test_a_client_that_does_not_take_part_keeps_its_last_publication(tmp_path):
    states, everybody = [], range(K)

    class Watch(RoundCallback):
        def on_round_start(self, run, participants):
            states.append([published(run, client)[0] for client in everybody])

    run = finished(tmp_path, PeerAlgorithm(n_com=2), rounds=4, clients_per_round=2, callbacks=[Watch()])
    for round in (1, 2, 3):
        for client in everybody:
            kept = same_bytes(states[round - 1][client], states[round][client])
            assert kept == (client not in run.server.participants(round))


def test_a_client_that_fails_keeps_its_last_publication(tmp_path):
    probe = experiment(tmp_path / "probe", PeerAlgorithm())
    probe.load()
    victim = probe.server.participants(2)[0]
    trouble = NaNInOneRound(2, len(probe.data.shards[victim].train))
    method, options = partial(PeerAlgorithm, n_com=2, loss_terms=[trouble]), {"on_client_failure": "drop"}
    runs = [experiment(tmp_path / str(rounds), method(), rounds=rounds, **options) for rounds in (1, 2)]
    runs[0].fit()
    with pytest.warns(UserWarning, match=f"client {victim}, round 2: .* is NaN or Inf"):
        runs[1].fit()
    for client in range(K):
        kept = same_bytes(*(published(run, client)[0] for run in runs))
        assert kept == (client == victim or client not in probe.server.participants(2))
    assert runs[1].csv.rows[1]["client/failed"] == 1


# --- Shared knowledge ---


@pytest.mark.thorough
def test_soft_labels_are_merged_over_the_client_and_its_peers(tmp_path):
    engine = Watching()
    model = partial(MLP, hidden=(16,), head=Head(classifier="bias_free"))
    method = PeerAlgorithm(n_com=1, loss_terms=[DistillingWeights()])
    run = finished(tmp_path, method, rounds=3, engine=engine, model=model, scenario=digits(alpha=0.05), **ALL)
    kept = 0
    for client, task in engine.of_round(3).items():
        merged, before = (memory["soft_labels"]["values"] for memory in (run.memory[client], task.memory))
        heard = [tensors_to_message(task.memory["laid_out"]), *(upload.message for upload in unbundle(task.download))]
        sections = [message.section("soft_labels") for message in heard]
        for i in range(10):
            total = sum(float(section["counts"][i]) for section in sections)
            kept += not total and not torch.equal(before[i], torch.eye(10)[i])
            expected = before[i]
            if total:
                expected = sum(section["counts"][i] / total * section["values"][i] for section in sections)
            torch.testing.assert_close(merged[i], expected)
    assert kept  # knowledge of a class lasts while no peer holds it


@pytest.mark.parametrize("term", [LocalContrastive, HistoryContrast])
def test_terms_that_need_an_earlier_round_are_off_in_the_first(tmp_path, term):
    run = finished(tmp_path, PeerAlgorithm(n_com=2, loss_terms=[term()]), rounds=2, **ALL)
    first, second = (row.get(f"client/train_{term.name}", 0.0) for row in run.csv.rows)
    assert first == 0.0 < second


def test_the_state_of_a_term_stays_with_its_client(tmp_path):
    engine = Watching()
    run = finished(tmp_path, PeerAlgorithm(n_com=2, loss_terms=[HistoryContrast()]), rounds=2, engine=engine, **ALL)
    assert run.csv.rows[1]["client/train_history"] > 0
    for task in engine.of_round(2).values():
        own = {f"model/encoder.{name}": value for name, value in task.memory["term_history"].items()}
        assert own
        assert same_bytes(own, {name: task.memory["laid_out"][name] for name in own})
        assert not any("history" in name for name in task.download.tensors)


# --- BatchNorm's statistics ---

STATISTICS = {f"encoder.2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.thorough
@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_buffers_are_averaged_kept_or_dropped(tmp_path, buffers):
    engine = Watching()
    method = PeerAlgorithm(n_com=2, buffers=buffers)
    run = finished(tmp_path, method, rounds=2, model=NormMLP, engine=engine, **ALL)
    initial = run.worker.modules.build().backbone.state_dict()
    for task in engine.of_round(2).values():
        messages = [
            tensors_to_message(task.memory["laid_out"]),
            *(upload.message for upload in unbundle(task.download)),
        ]
        assert all((message.section("model").keys() >= STATISTICS) == (buffers == "average") for message in messages)
        assert STATISTICS.isdisjoint(messages[0].section("model")) == (buffers != "average")
        module = run.worker.modules.build()
        run.algorithm.receive(module, task.download, task.memory)
        loaded = module.backbone.state_dict()
        expected = mean_by_hand([m.section("model") for m in messages], [m.numbers["n_samples"] for m in messages])
        if buffers == "local":
            expected |= task.memory["personal"]
        elif buffers == "drop":
            expected |= {name: initial[name] for name in STATISTICS}
        for name, value in expected.items():
            torch.testing.assert_close(loaded[name], value)
        assert ("personal" in task.memory) == (buffers == "local")
        assert (loaded["encoder.2.num_batches_tracked"] > 0) == (buffers != "drop")
    if buffers == "local":
        means = torch.stack([run.memory[client]["personal"]["encoder.2.running_mean"] for client in range(K)])
        assert len(means.unique(dim=0)) == K


# --- What is measured ---


def test_global_accuracy_is_that_of_the_mean_of_all_clients_models(tmp_path):
    run = finished(tmp_path, PeerAlgorithm(n_com=2), rounds=2, model=NormMLP, clients_per_round=3)
    models, samples = zip(*(published(run, client) for client in range(K)), strict=True)
    module = run.worker.modules.build()
    module.backbone.load_state_dict(mean_by_hand([model_of(model) for model in models], samples))
    acc, loss = accuracy_and_loss(module, run.data.data.x_test, run.data.data.y_test)
    assert run.csv.rows[-1]["global/acc"] == pytest.approx(acc, abs=1e-9)
    assert run.csv.rows[-1]["global/loss"] == pytest.approx(loss, rel=1e-5)
    saved = torch.load(tmp_path / "final" / "model.pt", weights_only=True)
    assert same_bytes(saved, run.state["model"])


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("clients", ["trained", "received"])
def test_clients_are_evaluated_as_trained_or_as_mixed(tmp_path, clients):
    run = finished(tmp_path, PeerAlgorithm(n_com=2), rounds=2, clients_per_round=3, evaluation=Evaluation(clients))
    scored = run.server.participants(2) if clients == "trained" else range(K)
    own = client_series(tmp_path, 2)
    assert {name for name in own if name.endswith("/acc")} == {f"client_{k}/acc" for k in scored}
    for client in scored:
        group = [client, *peers_in(run.server.download(3, client))] if clients == "received" else [client]
        models, samples = zip(*(published(run, k) for k in group), strict=True)
        module = run.worker.modules.build()
        module.backbone.load_state_dict(mean_by_hand([model_of(model) for model in models], samples))
        test = run.data.shards[client].test
        acc, _ = accuracy_and_loss(module, run.data.data.x_train[test], run.data.data.y_train[test])
        assert own[f"client_{client}/acc"] == pytest.approx(acc, abs=1e-9)


# --- Nothing depends on order, process or restarts ---

METHODS = {
    "gossip": partial(PeerAlgorithm, n_com=2, buffers="local"),
    "terms": partial(PeerAlgorithm, graph=ErdosRenyi(0.4), loss_terms=[LocalContrastive(), HistoryContrast()]),
    "ua_pdfl": partial(UAPDFL, n_com=2, th_i=0.02, buffers="local"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_clients_does_not_matter(tmp_path, method):
    forth, back = (
        experiment(tmp_path / type(engine).__name__, METHODS[method](), model=NormMLP, engine=engine)
        for engine in (Watching(), Backwards())
    )
    forth.fit()
    back.fit()
    assert len(forth.memory) == K
    assert_same_run(forth, back)


# --- The command line ---


@pytest.mark.thorough
def test_peers_and_their_graph_are_options_of_the_command_line(tmp_path):
    graph = ["--algorithm.n_com", "1", "--algorithm.graph", "Ring", "--algorithm.graph.reach", "2"]
    tiny(tmp_path / "run", "--algorithm", "UAPDFL", *graph, "--algorithm.th_i", ".inf", "--rounds", "2")
    weights = 64 * 8 + 8 + 8 * 10 + 10
    for row in rows(tmp_path / "run"):
        assert float(row["comm/down_bytes"]) == 4 * (4 * (10 + 8) + 8 + 4 * weights)
    outcome = run("fit", "--resume", tmp_path / "run", "--rounds", "3")
    assert outcome.code == 0, outcome.err
    assert len(rows(tmp_path / "run")) == 3
    assert run("test", tmp_path / "run").code == 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_testing_a_run_evaluates_each_clients_last_model(tmp_path, buffers):
    finished(tmp_path, PeerAlgorithm(n_com=2, buffers=buffers), model=NormMLP, clients_per_round=6)
    again = experiment(tmp_path, PeerAlgorithm(n_com=2, buffers=buffers), model=NormMLP, clients_per_round=6)
    again.load()
    found, last = again.test(), client_series(tmp_path, 3)
    assert [found.clients[k]["acc"] for k in range(6)] == [last[f"client_{k}/acc"] for k in range(6)]


def test_a_new_client_is_linked_to_all_and_changes_no_other_link():
    method = PeerAlgorithm(graph=Ring())
    state = method.initial_state(MLP((4,), 3), 3, 5, np.random.default_rng(0))
    before = state["links"]["matrix"]
    after = method.add_client(state, {})["links"]["matrix"]
    assert torch.equal(after[:5, :5], before)
    assert after[5].tolist() == [True] * 5 + [False]
    assert not after[:, 5].any()


class FailsAtFirst(Watching):
    """Client 1 fails before round 1 and in round 1."""

    def run(self, worker, tasks, done):
        for task in tasks:
            self.tasks += [task] if task.fit else []
            fails = task.client == 1 and (task.round == 0 or (task.round == 1 and task.fit))
            done(failed_result(task, OSError("no space left")) if fails else worker.run(task))


@pytest.mark.filterwarnings("ignore:client 1, round [01]. .*dropped")
@pytest.mark.parametrize("method", [PeerAlgorithm, DFedAvgM, DisPFL, PeerCriticalFL, UAPDFL])
def test_a_client_that_fails_before_round_1_is_no_peer_until_it_has_trained(tmp_path, method):
    engine, own = FailsAtFirst(), {} if method in (PeerAlgorithm, DFedAvgM, DisPFL) else {"n_com": 5}
    run = experiment(tmp_path, method(**own), engine=engine, on_client_failure="drop", clients_per_round=6)
    run.fit()
    collected = [{k: peers_in(task.download) for k, task in engine.of_round(r).items()} for r in (1, 2, 3)]
    others = {k: [j for j in range(6) if j not in (1, k)] for k in range(6)}
    assert collected[:2] == [others | {1: []}] * 2
    assert collected[2] == {k: [j for j in range(6) if j != k] for k in range(6)}
    assert [row["client/failed"] for row in run.csv.rows] == [1, 0, 0]
    if method is PeerAlgorithm:
        tensors, samples = zip(*(published(run, client) for client in range(6)), strict=True)
        assert_near(run.state["model"], mean_by_hand([model_of(one) for one in tensors], samples), 1e-6)


class Tampers(Watching):
    """Try each upload of a round, as it is and without most of a layer's values."""

    tried = 0

    def run(self, worker, tasks, done):
        for task in tasks:
            result = worker.run(task)
            if task.fit:
                laid_out, name = result.memory["laid_out"], "values/head.weight"
                cut = result.memory | {"laid_out": laid_out | {name: laid_out[name][:1]}}
                self.try_upload(result, shared_entries(worker, task.client))
                with pytest.raises(RuntimeError):
                    self.try_upload(replace(result, memory=cut), shared_entries(worker, task.client))
                self.tried += 1
            done(result)


def test_an_upload_that_peers_could_not_use_is_found_on_trial(tmp_path):
    engine = Tampers()
    finished(tmp_path, DisPFL(), engine=engine, rounds=2, **ALL)
    assert engine.tried == 2 * K


def test_a_failure_before_round_1_ends_a_run_that_drops_no_client(tmp_path):
    with pytest.raises(ClientFailure, match="client 1, round 0: OSError"):
        experiment(tmp_path, PeerAlgorithm(), engine=FailsAtFirst()).fit()


@pytest.mark.filterwarnings("ignore:client 1, round 0. .*dropped")
def test_too_few_clients_before_round_1_end_the_run(tmp_path):
    options = {"on_client_failure": "drop", "min_clients": 6, "clients_per_round": 6}
    with pytest.raises(TooFewClients, match="round 0: 5 of 6"):
        experiment(tmp_path, PeerAlgorithm(), engine=FailsAtFirst(), **options).fit()

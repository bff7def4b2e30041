"""Figure callbacks, compared with loops over the same runs."""

from functools import partial

import numpy as np
import pytest
import torch
from experiments import ONE_EPOCH, client_series, experiment, finished, in_float64, same_bytes
from matplotlib.image import imread

from fl_lightning.algorithms import CCVR, UAPDFL, ClassWise, CwFedAvg, FedAvg, FedBuff, FedSiamDA, FedSKC
from fl_lightning.algorithms.client_sampling import ClientSampler
from fl_lightning.algorithms.decentralized.ua_pdfl import jensen_shannon
from fl_lightning.algorithms.personalized.cwfedavg import class_models
from fl_lightning.attacks import LabelFlip
from fl_lightning.callbacks import (
    AggregationWeights,
    BytesByRound,
    ClassRelations,
    ClientDrift,
    ConfusionMatrix,
    KnowledgeMap,
    RoundCallback,
    RowNorms,
    UnitDivergence,
)
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import MLP, Head
from fl_lightning.scheduling import Buffered, DeviceClock

SIAMESE = partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16))


class Uploads(RoundCallback):
    """Record the models that are sent, from which tests compute the expected figures."""

    def __init__(self):
        self.models, self.starts, self.shared = {}, {}, []

    def on_fit_start(self, run):
        self.shared.append(run.state["model"])

    def on_client_end(self, run, result):
        key = run.round + 1, result.client
        self.models[key] = result.upload.section("model")
        self.starts[key] = run.starting_module(result.client).backbone.state_dict()

    def on_round_metrics(self, run, metrics):
        self.shared.append(run.state["model"])


def run_and_load(run_dir, figure, algorithm=None, **options):
    """Return a run of two rounds with one figure, its arrays after the last round, and the models that were sent."""
    seen = Uploads()
    run = experiment(run_dir, algorithm, callbacks=[seen, figure], **{"rounds": 2, "trainer": ONE_EPOCH} | options)
    run.fit()
    last = run_dir / "figures" / figure.name / f"round-{run.round:06d}"
    assert imread(last.with_suffix(".png")).std() > 0
    with np.load(last.with_suffix(".npz"), allow_pickle=False) as arrays:
        return run, dict(arrays), seen


def vector(model):
    return torch.cat([value.flatten() for value in model.values() if value.is_floating_point()])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [CCVR, FedAvg])
def test_class_relations_equal_a_loop_over_the_evaluated_model(tmp_path, algorithm):
    """The model is the one whose accuracy is `global/acc`: with CCVR, the calibrated one."""
    run, arrays, _ = run_and_load(tmp_path, ClassRelations(), algorithm())
    module = run.evaluator.global_module(run.round).eval()
    x, y = run.data.data.prepare(run.data.data.x_test), run.data.data.y_test
    with torch.no_grad():
        outputs = module(x).softmax(dim=1)
        accuracy = (outputs.argmax(dim=1) == y).double().mean()
        assert run.csv.rows[-1]["global/acc"] == pytest.approx(float(accuracy))
        sl = torch.stack([outputs[y == j].mean(dim=0) for j in range(10)])
        weight = module.backbone.head.weight
        cr = torch.stack([torch.stack([weight[i] @ weight[j] for j in range(10)]).softmax(dim=0) for i in range(10)])
    np.testing.assert_allclose(arrays["sl"], sl, atol=1e-6)
    np.testing.assert_allclose(arrays["cr"], cr, atol=1e-6)
    distance = sum(float((sl[i, j] - cr[i, j]) ** 2) for i in range(10) for j in range(10)) / 100
    assert run.csv.rows[-1]["class_relations/distance"] == pytest.approx(distance, rel=1e-4)
    assert all("class_relations/distance" not in row for row in run.csv.rows[:-1])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedAvg, lambda: CwFedAvg(lam=1.0), lambda: UAPDFL(n_com=2)])
def test_row_norms_equal_a_loop_over_the_models(tmp_path, algorithm):
    run, arrays, seen = run_and_load(tmp_path, RowNorms(), algorithm())
    clients = run.server.participants(2)
    assert arrays["clients"].tolist() == clients
    gaps, p, estimate = [], [], []
    for row, client in enumerate(clients):
        np.testing.assert_array_equal(arrays["data"][row], run.data.class_counts()[client])
        for name, models in (("received", seen.starts), ("trained", seen.models)):
            weight = models[2, client]["head.weight"]
            np.testing.assert_allclose(arrays[name][row], [float(w.norm()) for w in weight], rtol=1e-6)
        share = arrays["data"][row] / arrays["data"][row].sum()
        norms = arrays["trained"][row] / arrays["trained"][row].sum()
        gaps.append(np.sqrt(sum((share - norms) ** 2)))
        p.extend(share)
        estimate.extend(norms)
    assert run.csv.rows[-1]["row_norms/gap"] == pytest.approx(np.mean(gaps))
    assert run.csv.rows[-1]["row_norms/correlation"] == pytest.approx(np.corrcoef(p, estimate)[0, 1])
    if "sources" in run.state:
        rows = class_models(run.state)["head.weight"]
        np.testing.assert_allclose(arrays["class_models"][4], [float(w.norm()) for w in rows[4]], rtol=1e-6)
    else:
        assert "class_models" not in arrays


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("participates", [False, True])
def test_knowledge_map_shows_the_client_or_else_the_first_participant(tmp_path, participates):
    probe = experiment(tmp_path)
    probe.load()
    first, *others = probe.server.participants(1)
    client = others[0] if participates else min({*range(6)} - {first, *others})
    run, arrays, _ = run_and_load(tmp_path, KnowledgeMap(client=client, samples=60), FedSKC(), rounds=1)
    shown = client if participates else first
    assert arrays["client"] == shown
    assert arrays["points"].shape == (60, 2)
    assert len(set(arrays["labels"])) > 5
    assert arrays["classes"].tolist() == np.flatnonzero(run.data.class_counts()[shown]).tolist()
    assert arrays["knowledge"].shape == (len(arrays["classes"]), 2)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedAvg, lambda: UAPDFL(n_com=2)])
def test_divergences_equal_a_loop_over_the_trained_models(tmp_path, algorithm):
    figure = UnitDivergence(pairs=[(0, 1), (2, 3)])
    run, arrays, seen = run_and_load(tmp_path, figure, algorithm(), clients_per_round=6)
    unit = torch.ones(1, *run.data.data.in_shape)

    def distribution(client):
        with torch.no_grad():
            return run.worker.modules.build_shared(seen.models[2, client]).eval()(unit).softmax(dim=1)[0]

    units = [distribution(client) for client in range(6)]
    for i in range(6):
        for j in range(6):
            assert arrays["divergence"][i, j] == pytest.approx(jensen_shannon(units[i], units[j]), abs=1e-6)
    row = run.csv.rows[-1]
    pairs = [arrays["divergence"][i, j] for i in range(6) for j in range(6) if i != j]
    assert row["divergence/mean"] == pytest.approx(np.mean(pairs))
    assert row["divergence/2-3"] == pytest.approx(arrays["divergence"][2, 3])
    assert arrays["rounds"].tolist() == [1, 2]
    assert arrays["names"].tolist() == ["divergence/mean", "divergence/0-1", "divergence/2-3"]
    np.testing.assert_allclose(arrays["values"][0], [row["divergence/mean"] for row in run.csv.rows])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedAvg, lambda: CwFedAvg(lam=1.0), lambda: UAPDFL(n_com=2)])
@in_float64
def test_drift_equals_a_loop_over_the_updates(tmp_path, algorithm):
    run, arrays, seen = run_and_load(tmp_path, ClientDrift(), algorithm())
    step = vector(seen.shared[2]) - vector(seen.shared[1])
    for row, client in enumerate(run.server.participants(2)):
        update = vector(seen.models[2, client]) - vector(seen.starts[2, client])
        cosine = float(update @ step / (update.norm() * step.norm()))
        assert arrays["distance"][row] == pytest.approx(float((update - step).norm()), rel=1e-6)
        assert arrays["cosine"][row] == pytest.approx(cosine, abs=1e-6)
        assert client_series(tmp_path, 2)[f"client_{client}/drift_cosine"] == pytest.approx(cosine, abs=1e-6)
    assert run.csv.rows[-1]["drift/distance_mean"] == pytest.approx(arrays["distance"].mean())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedSKC, FedSiamDA, lambda: FedAvg(aggregator=ClassWise())])
@in_float64
def test_aggregation_weights_reproduce_the_shared_model(tmp_path, algorithm):
    run, arrays, seen = run_and_load(tmp_path, AggregationWeights(), algorithm(), model=SIAMESE, rounds=1)
    clients, weights = run.server.participants(1), torch.from_numpy(arrays["weights"])
    assert arrays["clients"].tolist() == clients
    assert weights.sum(dim=0).numpy() == pytest.approx(1.0)
    total = weights.reshape(len(clients), -1).sum(dim=1)
    assert client_series(tmp_path, 1)[f"client_{clients[0]}/weight"] == pytest.approx(float(total[0]))
    if weights.ndim == 1:
        made = sum(w * vector(seen.models[1, client]).double() for w, client in zip(weights, clients, strict=True))
        torch.testing.assert_close(made, vector(run.state["model"]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("figure", [ClassRelations, KnowledgeMap])
def test_figures_of_test_samples_refuse_a_test_set_of_other_classes(tmp_path, figure):
    """Labels of few-shot test samples count other classes, and would be drawn as those of the training samples."""
    run = experiment(tmp_path, callbacks=[one := figure()])
    run.check()
    run.data.data.evaluate = lambda module, batches: None
    with pytest.raises(ConfigError, match=rf"callbacks: {figure.__name__}: .*other classes"):
        one.check(run)


def test_knowledge_map_names_the_client_whose_model_it_shows(tmp_path):
    figure = KnowledgeMap(samples=20)
    _, arrays, _ = run_and_load(tmp_path, figure, rounds=1)
    assert f"trained model of client {arrays['client']}" in figure.draw(arrays).axes[0].get_title()


def test_bytes_by_round_equal_the_communication_meter(tmp_path):
    run, arrays, _ = run_and_load(tmp_path, BytesByRound())
    assert arrays["up"].tolist() == [row["comm/up_bytes"] for row in run.csv.rows]
    assert arrays["up"].sum() + arrays["down"].sum() == run.csv.rows[-1]["comm/total_bytes"]


def test_a_figure_is_measured_when_it_is_due(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.callbacks.figures.to_png", lambda figure: b"")
    experiment(tmp_path, callbacks=[RowNorms(every=2)], rounds=3, trainer=ONE_EPOCH).fit()
    names = sorted(path.name for path in (tmp_path / "figures" / "row_norms").iterdir())
    assert names == [f"round-00000{n}.{kind}" for n in (2, 3) for kind in ("npz", "png")]
    with pytest.raises(ConfigError, match=r"callbacks: RowNorms.every: 0 is below 1"):
        RowNorms(every=0)
    with pytest.raises(ConfigError, match=r"callbacks: KnowledgeMap.samples: 3 is below 10"):
        KnowledgeMap(samples=3)


class Planned(ClientSampler):
    """The participants of each of three rounds."""

    def sample(self, round, participants):
        return [[0], [], [0, 2, 5]][round - 1]


FIGURES = {"ClientDrift": ClientDrift, "UnitDivergence": UnitDivergence, "RowNorms": lambda: RowNorms(1)}
FIGURES |= {"KnowledgeMap": lambda: KnowledgeMap(1, samples=10)}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_figures_of_clients_leave_out_attackers_and_rounds_without_others(tmp_path, figure):
    """Round 1 has only an attacker, round 2 none of the clients, and round 3 the attacker and others."""
    options = {"adversary": LabelFlip(clients=[0]), "client_sampler": Planned(), "min_clients": 0}
    finished(tmp_path, callbacks=[one := figure()], trainer=ONE_EPOCH, **options)
    (path,) = (tmp_path / "figures" / one.name).glob("*.npz")
    with np.load(path, allow_pickle=False) as arrays:
        assert path.stem == "round-000003"
        assert arrays["clients" if "clients" in arrays else "client"].tolist() in ([2, 5], 2)


def test_drift_of_stale_updates_is_measured_from_what_the_client_received(tmp_path, monkeypatch):
    """And the measurement leaves what the server knows of the client's start as it was."""
    monkeypatch.setattr("fl_lightning.callbacks.figures.to_png", lambda figure: b"")
    clock = {"clock": DeviceClock(spread=1.5), "round_policy": Buffered(4), "clients_per_round": 2, "rounds": 6}
    plain = finished(tmp_path / "plain", FedBuff(), **clock)
    seen = Uploads()
    run = finished(tmp_path / "seen", FedBuff(), callbacks=[ClientDrift(), seen], **clock)
    assert same_bytes(run.state["model"], plain.state["model"])
    ages = [row["client/staleness"] for row in run.csv.rows]
    assert max(ages) >= 1
    for round in range(1, 7):
        versions = run.server.schedule.plan(round, 2).versions
        for client, version in versions.items():
            assert same_bytes(dict(seen.starts[round, client]), dict(seen.shared[version]))


@pytest.mark.thorough
def test_figures_change_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.callbacks.figures.to_png", lambda figure: b"")  # drawing takes most of the time
    figures = [ClassRelations(1), RowNorms(1), UnitDivergence(), ClientDrift(), BytesByRound(1), ConfusionMatrix(1)]
    figures.append(KnowledgeMap(1, samples=20))
    plain = experiment(tmp_path / "plain", FedSKC(), rounds=2)
    seen = experiment(tmp_path / "seen", FedSKC(), rounds=2, callbacks=figures)
    plain.fit()
    seen.fit()
    assert all(torch.equal(value, seen.state["model"][name]) for name, value in plain.state["model"].items())

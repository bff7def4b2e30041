"""Confusion matrices of the global model and the worst client, compared with scikit-learn."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from experiments import ONE_EPOCH, client_series, digits, experiment, untested
from matplotlib.image import imread
from sklearn.metrics import confusion_matrix

from fl_lightning.algorithms import (
    APFL,
    APPLE,
    CCVR,
    IFCA,
    UAPDFL,
    DisPFL,
    Ditto,
    FedALA,
    FedAvg,
    FedPer,
    FedProto,
    PeerFedPer,
    PerFedAvg,
)
from fl_lightning.callbacks import ConfusionMatrix
from fl_lightning.callbacks.confusion_matrix import MOST_COUNTS, accuracy, confusion
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives import Regression
from fl_lightning.data import Shard
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.evaluation.round_metrics import RoundMetrics


def expected(run, module, x, y):
    """Return the matrix of scikit-learn on all samples at once."""
    with torch.no_grad():
        predicted = module.eval()(run.data.data.prepare(x)).argmax(dim=1)
    return confusion_matrix(y, predicted, labels=range(10))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedAvg, PeerFedPer, FedPer, Ditto, PerFedAvg])
def test_matrices_equal_those_of_scikit_learn(tmp_path, algorithm):
    options = {"rounds": 1, "trainer": ONE_EPOCH, "evaluation": Evaluation(client_model="received")}
    run = experiment(tmp_path, algorithm(), callbacks=[ConfusionMatrix()], **options)
    run.fit()
    last = tmp_path / "figures" / "confusion_matrix" / "round-000001"
    assert imread(last.with_suffix(".png")).std() > 0
    with np.load(last.with_suffix(".npz"), allow_pickle=False) as stored:
        arrays = dict(stored)
    data = run.data.data
    if run.algorithm.one_model:
        module = run.worker.modules.build_shared(run.state["model"])
        np.testing.assert_array_equal(arrays["global"], expected(run, module, data.x_test, data.y_test))
        assert accuracy(arrays["global"]) == pytest.approx(run.csv.rows[-1]["global/acc"])
    assert ("global" in arrays) == run.algorithm.one_model
    module_of = run.client_module if run.algorithm.server else run.starting_module
    own = [
        expected(run, module_of(client), data.x_train[shard.test], data.y_train[shard.test])
        for client, shard in enumerate(run.data.shards)
    ]
    accs = [matrix.trace() / matrix.sum() for matrix in own]
    worst = int(np.argmin(accs))
    assert arrays["client"] == worst
    np.testing.assert_array_equal(arrays["worst"], own[worst])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("model", ["trained", "received"])
@pytest.mark.parametrize(
    "algorithm", [Ditto, DisPFL, FedAvg, CCVR, APFL, FedALA, FedPer, FedProto, IFCA, PeerFedPer, PerFedAvg, UAPDFL]
)
def test_accuracies_in_the_figure_are_those_of_the_tables(tmp_path, algorithm, model):
    """The worst client and its accuracy are those of `clients.csv`, whichever model `client_model` selects."""
    options = {"rounds": 2, "scenario": digits(6, alpha=5.0), "evaluation": Evaluation(client_model=model)}
    run = experiment(tmp_path, algorithm(), callbacks=[figure := ConfusionMatrix()], **options)
    run.fit()
    with np.load(tmp_path / "figures" / "confusion_matrix" / "round-000002.npz", allow_pickle=False) as stored:
        arrays = dict(stored)
    table = {int(name[7:-4]): value for name, value in client_series(tmp_path, 2).items() if name.endswith("/acc")}
    assert len(table) == {"trained": 4, "received": 6}[model]
    assert arrays["client"] == min(table, key=table.get)
    assert accuracy(arrays["worst"]) == pytest.approx(min(table.values()))
    if "global/acc" in run.csv.rows[-1]:
        assert accuracy(arrays["global"]) == pytest.approx(run.csv.rows[-1]["global/acc"])
    title = figure.draw(arrays).axes[-2].get_title()
    assert f"client {arrays['client']}" in title
    assert f"{model} model" in title
    assert f"accuracy {min(table.values()):.4f}" in title


def test_methods_that_hide_the_trained_models_show_the_received_ones(tmp_path):
    for model in ("trained", "received"):
        run = experiment(tmp_path, APPLE(), callbacks=[figure := ConfusionMatrix()])
        run.evaluation = Evaluation(client_model=model)
        if model == "trained":
            with pytest.raises(ConfigError, match=r"callbacks: ConfusionMatrix: .* evaluation\.client_model"):
                run.check()
        else:
            run.check()
            assert figure.measure(run)["model"] == "received"


def test_a_round_without_tested_clients_has_no_figure(tmp_path):
    run = experiment(tmp_path, PeerFedPer(), callbacks=[figure := ConfusionMatrix()])
    run.check()
    run.round = run.rounds
    metrics = RoundMetrics()
    figure.on_round_metrics(run, metrics)
    figure.on_round_end(run, metrics)
    assert not (tmp_path / "figures").exists()


def test_counts_do_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    logits, y = torch.randn(97, 7), torch.randint(7, (97,))
    whole = confusion_matrix(y, logits.argmax(dim=1), labels=range(7))
    for size in (1, 10, 97):
        batches = zip(logits.split(size), y.split(size), strict=True)
        np.testing.assert_array_equal(confusion(torch.nn.Identity(), batches, 7), whole)


def test_missing_test_samples_and_missing_classes_are_refused(tmp_path):
    figure = ConfusionMatrix()
    run = experiment(tmp_path, PeerFedPer(), callbacks=[figure])
    run.check()
    run.data.shards = untested(run.data, range(run.clients))
    with pytest.raises(ConfigError, match=r"test samples.*scenario\.local_test"):
        figure.check(run)
    run.data.objective = Regression()
    with pytest.raises(ConfigError, match=r"^callbacks: ConfusionMatrix: .*classes"):
        figure.check(run)


def test_worst_client_is_the_first_of_equal_clients_with_test_samples(tmp_path):
    figure = ConfusionMatrix()
    run = experiment(tmp_path, callbacks=[figure], evaluation=Evaluation(client_model="received", max_clients=3))
    run.check()
    shards, scored = run.data.shards, run.evaluator.scored
    measured = figure.measure(run)
    accs = {client: own["acc"] for client, own in run.test().clients.items()}
    assert measured["client"] == min(accs, key=accs.get)
    run.data.shards = untested(run.data, {*range(6)} - {scored[1]})
    assert figure.measure(run)["client"] == scored[1]
    run.data.shards = [Shard(shard.train, shards[0].test) for shard in shards]
    assert figure.measure(run)["client"] == scored[0]
    run.data.data.evaluate = lambda module, batches: None  # few-shot: the global test set has other classes
    assert {*figure.measure(run)} == {"worst", "client", "model"}


# --- The figure ---


def matrices(classes, seed=0):
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 3, (classes, classes)) + np.diag(rng.integers(5, 30, classes))
    own = matrix.copy()
    own[classes // 2 :] = 0
    return {"global": matrix, "worst": own, "client": np.array(7), "model": np.array("received")}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("classes", [MOST_COUNTS + 1, 2, 100, 1000])
def test_labels_do_not_overlap_at_any_number_of_classes(classes):
    """Tick labels do not overlap, and titles stay inside the figure."""
    figure = ConfusionMatrix().draw(matrices(classes))
    figure.savefig("/dev/null", format="png", dpi=120)
    for axes in figure.axes[:2]:
        for axis, start, end in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
            boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
            boxes.sort(key=lambda box: getattr(box, start))
            assert len(boxes) >= min(classes, 10)
            assert all(getattr(a, end) < getattr(b, start) for a, b in pairwise(boxes))
        for text in (axes.title, axes.xaxis.label):
            box = text.get_window_extent()
            assert min(box.x0, box.y0) >= 0
            assert box.x1 <= figure.bbox.x1
            assert box.y1 <= figure.bbox.y1
        assert len(axes.texts) == (np.count_nonzero(axes.images[0].get_array().filled(0)) if classes <= 12 else 0)
    first, second = (axes.title.get_window_extent() for axes in figure.axes[:2])
    assert first.x1 < second.x0


def test_titles_name_the_models():
    arrays = matrices(10)
    figure = ConfusionMatrix().draw(arrays)
    titles = [axes.get_title() for axes in figure.axes[:2]]
    accs = [np.trace(arrays[name]) / arrays[name].sum() for name in ("global", "worst")]
    assert titles == [
        f"global model on the global test set\naccuracy {accs[0]:.4f}",
        f"client 7, the worst: received model\non its own test split\naccuracy {accs[1]:.4f}",
    ]
    assert figure.axes[0].get_ylabel() == "true class"
    shares = figure.axes[1].images[0].get_array()
    assert shares.mask[5:].all()
    assert not shares.mask[:5].any()
    np.testing.assert_allclose(shares[:5].sum(axis=1), 1)
    del arrays["global"]
    assert [bool(axes.get_title()) for axes in ConfusionMatrix().draw(arrays).axes] == [True, False]

"""Metrics of torchmetrics beside loss and accuracy, against scikit-learn on the same predictions."""

import re
from dataclasses import replace
from functools import partial

import commands
import numpy as np
import pytest
import torch
import torchmetrics
from experiments import experiment, same_bytes, untimed
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    cohen_kappa_score,
    confusion_matrix,
    f1_score,
    fbeta_score,
    jaccard_score,
    matthews_corrcoef,
    mean_squared_error,
    precision_score,
    r2_score,
    recall_score,
    roc_auc_score,
)
from test_objectives import Made, made

from fl_lightning.algorithms import Local
from fl_lightning.analysis.comparison import compare
from fl_lightning.callbacks import Checkpointing, EarlyStopping
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives import Classification, MultiLabel, Regression
from fl_lightning.data import IID, Digits, Pathological, Scenario
from fl_lightning.engines.trainer import inference
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.evaluation.extra_metrics import check_measures, measures_of, snake_case
from fl_lightning.evaluation.summary import is_lower_better

F1_AND_AUROC = ["MulticlassF1Score", "MulticlassAUROC"]


def run_with(run_dir, *metrics, algorithm=None, **options):
    run = experiment(run_dir, algorithm, evaluation=Evaluation("received", metrics=list(metrics)), **options)
    run.fit()
    return run


def predictions(run, module, x):
    with inference(module, run.worker.idle_trainer):
        return module(run.data.data.prepare(x)).softmax(dim=1).numpy()


def test_f1_and_auroc_are_scikit_learns_for_the_global_model_and_each_client(tmp_path):
    run = run_with(tmp_path, *F1_AND_AUROC, rounds=2)
    data, last = run.data.data, run.csv.rows[-1]
    shares = predictions(run, run.worker.modules.build_shared(run.state["model"]), data.x_test)
    y = data.y_test.numpy()
    assert last["global/f1_score"] == pytest.approx(f1_score(y, shares.argmax(1), average="macro"), abs=1e-6)
    assert last["global/auroc"] == pytest.approx(roc_auc_score(y, shares, multi_class="ovr"), abs=1e-6)
    assert last["global/acc"] == pytest.approx((shares.argmax(1) == y).mean(), abs=1e-9)

    tested, seen = run.test(), {"f1_score": [], "auroc": []}
    for client, shard in enumerate(run.data.shards):
        shares = predictions(run, run.client_module(client), data.x_train[shard.test])
        y = data.y_train[shard.test].numpy()
        labels = sorted({*y} | {*shares.argmax(1)})
        f1 = f1_score(y, shares.argmax(1), labels=labels, average="macro", zero_division=0)
        defined = [c for c in range(10) if 0 < (y == c).sum() < len(y)]
        auroc = np.mean([roc_auc_score(y == c, shares[:, c]) for c in defined]) if defined else None
        for name, value in (("f1_score", f1), ("auroc", auroc)):
            if value is None:
                assert name not in tested.clients[client]
            else:
                seen[name].append((value, len(y)))
                assert tested.clients[client][name] == pytest.approx(value, abs=1e-6)
    for name, pairs in seen.items():
        values, sizes = zip(*pairs, strict=True)
        assert tested[f"client/{name}_mean"] == pytest.approx(np.mean(values), abs=1e-6)
        assert tested[f"client/{name}_weighted"] == pytest.approx(np.average(values, weights=sizes), abs=1e-6)
        assert tested[f"client/{name}_std"] == pytest.approx(np.std(values), abs=1e-6)
        assert tested[f"client/{name}_worst_decile"] == pytest.approx(min(values), abs=1e-6)


def test_metrics_of_multi_label_targets_and_of_numbers_are_scikit_learns(tmp_path):
    run = run_with(tmp_path / "labels", "F1Score", "MultilabelAUROC", scenario=made("several labels"), rounds=1)
    data = run.data.data
    with torch.no_grad():
        shares = run.worker.modules.build_shared(run.state["model"])(data.x_test).sigmoid().numpy()
    y, last = data.y_test.numpy(), run.csv.rows[-1]
    assert last["global/f1_score"] == pytest.approx(f1_score(y, shares > 0.5, average="macro"), abs=1e-6)
    assert last["global/auroc"] == pytest.approx(roc_auc_score(y, shares, average="macro"), abs=1e-6)

    for kind in ("one number", "three numbers"):
        run = run_with(tmp_path / kind, "R2Score", "MeanSquaredError", scenario=made(kind), rounds=1)
        data, last = run.data.data, run.csv.rows[-1]
        with torch.no_grad():
            outputs = run.worker.modules.build_shared(run.state["model"])(data.x_test).view_as(data.y_test).numpy()
        assert last["global/r2_score"] == pytest.approx(r2_score(data.y_test.numpy(), outputs), abs=1e-5)
        error = mean_squared_error(data.y_test.numpy(), outputs)
        assert last["global/mean_squared_error"] == pytest.approx(error, rel=1e-5)
        assert last["global/mean_squared_error"] == pytest.approx(last["global/loss"], rel=1e-5)


SAME = {
    "classes": ("acc", {"same_score": {"class_path": "Accuracy", "init_args": {"average": "micro"}}}),
    "several labels": ("acc", {"same_score": {"class_path": "Accuracy", "init_args": {"average": "micro"}}}),
    "one number": ("mae", {"same_error": "MeanAbsoluteError"}),
    "three numbers": ("mae", {"same_error": "MeanAbsoluteError"}),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.fast_cases(1)
def test_built_in_metrics_equal_those_of_torchmetrics(tmp_path, kind):
    name, spec = SAME[kind]
    options = {} if kind == "classes" else {"scenario": made(kind)}
    last = run_with(tmp_path, spec, rounds=1, **options).csv.rows[-1]
    (other,) = spec
    for form in ("global/{}", "client/{}_mean", "client/{}_weighted", "client/{}_worst_decile"):
        assert last[form.format(name)] == pytest.approx(last[form.format(other)], rel=1e-6)


@pytest.mark.thorough
def test_additional_metrics_do_not_change_the_run(tmp_path):
    plain, more = run_with(tmp_path / "plain"), run_with(tmp_path / "more", *F1_AND_AUROC)
    assert same_bytes(plain.state["model"], more.state["model"])
    for one, other in zip(untimed(plain.csv.rows), untimed(more.csv.rows), strict=True):
        assert one == {name: value for name, value in other.items() if not re.search("f1_score|auroc", name)}


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_engines_measure_the_same(tmp_path, engine):
    rows = [
        untimed(run_with(tmp_path / name, *F1_AND_AUROC, engine=name, rounds=2).csv.rows)
        for name in ("sequential", engine)
    ]
    for one, other in zip(*rows, strict=True):
        assert one == (pytest.approx(other, abs=0.05) if engine == "stacked" else other)


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.thorough
def test_methods_without_a_global_model_measure_their_clients(tmp_path):
    run = run_with(tmp_path, "MulticlassF1Score", algorithm=Local())
    assert "client/f1_score_mean" in run.csv.rows[-1]
    assert not any(name.startswith("global/") for name in run.csv.rows[-1])


def test_models_of_clients_are_measured_on_the_global_test_set_too(tmp_path):
    how = Evaluation(personal_on_global=True, metrics=["MulticlassF1Score"])
    run = experiment(tmp_path, evaluation=how, rounds=1, clients_per_round=1)
    run.fit()
    last = run.csv.rows[-1]
    assert last["personal_on_global/f1_score_mean"] == last["global/f1_score"]  # of one client the mean is its model


@pytest.mark.parametrize(("monitor", "better"), [("global/calibration_error", min), ("global/f1_score", max)])
@pytest.mark.fast_cases(1)
def test_monitors_know_which_way_is_better(tmp_path, monitor, better):
    watchers = [EarlyStopping(monitor, patience=9), Checkpointing(monitor=monitor)]
    names = ["CalibrationError", "F1Score"]
    run = experiment(tmp_path, rounds=2, callbacks=watchers, evaluation=Evaluation(metrics=names))
    run.fit()
    best = better(row[monitor] for row in run.csv.rows)
    assert watchers[1].best == best
    assert abs(watchers[0].best) == best


class Gap(torchmetrics.Metric):
    """Metric of a user, for which lower is better: the share of wrong predictions."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("wrong", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("n", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, preds, target) -> None:
        self.wrong += (preds.argmax(dim=1) != target).sum()
        self.n += len(target)

    def compute(self):
        return self.wrong / self.n


def test_a_metric_of_the_user_for_which_lower_is_better(tmp_path):
    watcher = Checkpointing(monitor="global/gap_error")
    how = Evaluation("received", metrics=[f"{__name__}.Gap"])
    run = experiment(tmp_path, rounds=2, callbacks=[watcher], evaluation=how)
    fitted = run.fit()
    summary = fitted.summary
    series = [row["global/gap_error"] for row in run.csv.rows]
    assert summary["global/gap_error_best"] == watcher.best == min(series)
    (group,) = compare([fitted], metric="global/gap_error").groups
    assert group.best.mean == min(series)
    last = run.csv.rows[-1]
    assert last["client/gap_error_worst_decile"] == pytest.approx(1 - last["client/acc_worst_decile"], rel=1e-6)


@pytest.mark.thorough
def test_a_monitor_of_an_error_with_mode_max_gives_a_warning(tmp_path):
    watcher = EarlyStopping("global/calibration_error", mode="max")
    run = experiment(tmp_path, callbacks=[watcher], evaluation=Evaluation(metrics=["CalibrationError"]))
    with pytest.warns(UserWarning, match="takes the worst global/calibration_error"):
        run.fit()


@pytest.mark.thorough
def test_a_config_names_metrics_and_the_final_table_shows_them(tmp_path):
    words = [
        "--evaluation.metrics",
        "[MulticlassF1Score, {auroc: {class_path: AUROC, init_args: {average: weighted}}}]",
    ]
    outcome = commands.tiny(tmp_path / "run", *words)
    last = commands.rows(tmp_path / "run")[-1]
    assert {"global/f1_score", "global/auroc", "client/f1_score_mean", "client/auroc_weighted"} <= last.keys()
    assert "global f1_score" in outcome.out
    assert commands.summary(tmp_path / "run")["global/auroc_last"] == float(last["global/auroc"])
    resumed = commands.run("test", tmp_path / "run")
    assert resumed.code == 0, resumed.err
    assert "global/f1_score" in resumed.out


@pytest.mark.thorough
def test_metrics_can_be_added_on_the_command_line(tmp_path):
    commands.tiny(tmp_path / "run", "--evaluation.metrics+=MulticlassF1Score", "--evaluation.metrics+=CohenKappa")
    assert {"global/f1_score", "global/cohen_kappa"} <= commands.rows(tmp_path / "run")[-1].keys()


# --- Names and arguments ---


@pytest.mark.parametrize("objective", [Classification(), MultiLabel(), Regression()])
def test_names_say_which_way_is_better(objective):
    """Readers of metrics.csv know only names, which must agree with torchmetrics' `higher_is_better`."""
    home = torchmetrics.classification if objective.kind else torchmetrics.regression
    compared = 0
    for name in home.__all__:
        kind = getattr(home, name)
        if name.startswith(objective.kind) and isinstance(getattr(kind, "higher_is_better", None), bool):
            assert is_lower_better(snake_case(name.removeprefix(objective.kind))) != kind.higher_is_better, name
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("name", "snake"),
    [("F1Score", "f1_score"), ("AUROC", "auroc"), ("FBetaScore", "f_beta_score"), ("KLDivergence", "kl_divergence")],
)
def test_names_in_snake_case(name, snake):
    assert snake_case(name) == snake


def test_arguments_are_filled_in_and_overridden():
    (one,) = measures_of([{"class_path": "MulticlassF1Score", "init_args": {"average": "micro"}}], Classification(), 7)
    metric = one.make()
    assert (metric.num_classes, metric.average) == (7, "micro")
    (one,) = measures_of([{"class_path": "MulticlassF1Score", "init_args": {"num_classes": 9}}], Classification(), 7)
    assert one.make().num_classes == 9
    (named,) = measures_of([{"f1_macro": "F1Score"}], MultiLabel(), 3)
    assert (named.name, named.make().num_labels) == ("f1_macro", 3)
    assert measures_of(["MeanSquaredError"], Regression(), 2)[0].make().num_outputs == 2


# --- What is refused ---


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("MulticlasF1Score", "torchmetrics has no 'MulticlasF1Score' for Classification. Did you mean MulticlassF1Sc"),
        ("f1scor", "torchmetrics has no 'f1scor' for Classification. Did you mean MulticlassF1Score?"),
        ("BinaryAUROC", "BinaryAUROC is for two classes, this dataset has 10. Use MulticlassAUROC."),
        (
            "torchmetrics.classification.BinaryF1Score",
            "BinaryF1Score is for two classes, this dataset has 10. Use MulticlassF1Score.",
        ),
        ("MultilabelF1Score", "has no 'MultilabelF1Score' for Classification. Did you mean MulticlassF1Score?"),
        ("MeanSquaredError", "torchmetrics has no 'MeanSquaredError' for Classification. "),
        ("no_such.Metric", "class 'no_such.Metric' not found"),
        ("torch.nn.Linear", "torch.nn.Linear is not a torchmetrics.Metric"),
        ("ConfusionMatrix", "does not return a single number. Use the callback ConfusionMatrix."),
        ("MulticlassROC", "MulticlassROC does not return a single number"),
        (
            {"class_path": "F1Score", "init_args": {"average": "none"}},
            "MulticlassF1Score does not return a single number. Set its average",
        ),
        (
            {"class_path": "F1Score", "init_args": {"avrage": "macro"}},
            "MulticlassF1Score has no option 'avrage'. Did you mean average?",
        ),
        ({"class_path": "F1Score", "init_args": {"average": "mean"}}, "MulticlassF1Score: "),
        ({"class_path": "F1Score", "nme": "f1"}, "unknown key 'nme'"),
        ({"f1": {"init_args": {}}}, "not a metric. Give its name, or a class_path with its init_args"),
        ({"f1": "F1Score", "acc": "Accuracy"}, "unknown key "),
        ({"f1/macro": "F1Score"}, "name: 'f1/macro' is taken or has other characters"),
        ({"acc": {"class_path": "F1Score"}}, "name: 'acc' is taken or has other characters"),
        ({"gap": f"{__name__}.Gap"}, "the name 'gap' does not say that lower is better. Use gap_error."),
        ({"f1_error": "F1Score"}, "the name 'f1_error' does not say that higher is better. Use f1_error_score."),
    ],
)
def test_a_wrong_metric_is_refused_in_one_line(tmp_path, spec, message):
    with pytest.raises(ConfigError, match=f"^evaluation.metrics: .*{re.escape(message)}") as refused:
        experiment(tmp_path / "run", evaluation=Evaluation(metrics=[spec])).fit()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_two_of_one_name_are_refused():
    specs = ["F1Score", {"class_path": "F1Score", "init_args": {"average": "micro"}}]
    with pytest.raises(ConfigError, match="two metrics have the name 'f1_score'"):
        measures_of(specs, Classification(), 10)


@pytest.mark.parametrize("average", ["macro", "weighted"])
def test_auroc_is_averaged_over_the_classes_with_positives_and_negatives(average):
    (one,) = measures_of([{"class_path": "AUROC", "init_args": {"average": average}}], Classification(), 4)
    shares = torch.rand(40, 4, generator=torch.Generator().manual_seed(2)).softmax(dim=1)
    y = torch.tensor([0, 1, 1, 2] * 10)
    running = one.start()
    for batch in (slice(15), slice(15, 40)):
        running.update(shares[batch], y[batch])
    own = [roc_auc_score(y == c, shares[:, c]) for c in range(3)]
    assert running.value() == pytest.approx(np.average(own, weights=[1, 2, 1] if average == "weighted" else None))


@pytest.mark.thorough
def test_a_client_with_one_class_has_no_auroc(tmp_path):
    scenario = Scenario(Digits(), Pathological(1), 10)
    run = run_with(tmp_path, "MulticlassAUROC", scenario=scenario, rounds=1)
    last = run.csv.rows[-1]
    assert "global/auroc" in last
    assert not any(name.startswith("client") and "auroc" in name for name in last)


def test_metrics_get_probabilities_even_if_logits_are_between_0_and_1():
    outputs, y = torch.full((4, 2), 0.3), torch.ones(4, 2, dtype=torch.int64)
    (one,) = measures_of(["F1Score"], MultiLabel(), 2)
    running = one.start()
    running.update(*MultiLabel().predictions(outputs, y))
    assert running.value() == 1.0, "a logit of 0.3 is a probability of 0.57"
    (one,) = measures_of(["CalibrationError"], Classification(), 2)
    running = one.start()
    running.update(*Classification().predictions(torch.tensor([[0.0, 1.0]] * 4), torch.ones(4, dtype=torch.int64)))
    assert running.value() == pytest.approx(1 - float(torch.tensor(1.0).sigmoid()), abs=1e-6)


# --- Two classes ---


def specificity_score(y, predicted):
    """True negatives among negatives, from the confusion matrix."""
    ((right, wrong), _) = confusion_matrix(y, predicted)
    return right / (right + wrong)


OF_CLASSES = {
    "MulticlassF1Score": partial(f1_score, average="macro"),
    "Accuracy": accuracy_score,
    "F1Score": f1_score,
    "BinaryF1Score": f1_score,
    "Precision": precision_score,
    "Recall": recall_score,
    "recall": recall_score,
    "sensitivity": recall_score,
    "Specificity": specificity_score,
    "specificity": specificity_score,
    "JaccardIndex": jaccard_score,
    "CohenKappa": cohen_kappa_score,
    "MatthewsCorrCoef": matthews_corrcoef,
}
OF_SHARES = {
    "AUROC": roc_auc_score,
    "BinaryAUROC": roc_auc_score,
    "torchmetrics.classification.BinaryAUROC": roc_auc_score,
    "AveragePrecision": average_precision_score,
}


def value_on(spec, logits, y, positive=1):
    (one,) = measures_of([spec], Classification(), logits.shape[1], positive)
    running = one.start()
    for batch in (slice(0, 7), slice(7, None)):
        running.update(*Classification().predictions(logits[batch], y[batch]))
    return running.value()


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("spec", [*OF_CLASSES, *OF_SHARES])
def test_metrics_of_two_classes_are_scikit_learns(spec, positive):
    rng = torch.Generator().manual_seed(3)
    logits, y = torch.randn(60, 2, generator=rng), (torch.rand(60, generator=rng) < 0.3).long()
    truth = (y == positive).numpy().astype(int)
    share = logits.softmax(dim=1)[:, positive].numpy()
    expected = OF_CLASSES[spec](truth, share > 0.5) if spec in OF_CLASSES else OF_SHARES[spec](truth, share)
    assert value_on(spec, logits, y, positive) == pytest.approx(expected, abs=1e-6)


def test_metrics_of_two_classes_take_their_options():
    logits, y = torch.randn(60, 2, generator=torch.Generator().manual_seed(4)), torch.tensor([0, 1, 1] * 20)
    spec = {"class_path": "FBetaScore", "init_args": {"beta": 2.0}}
    expected = fbeta_score(y, logits.argmax(dim=1), beta=2)
    assert value_on(spec, logits, y) == pytest.approx(expected, abs=1e-6)


def test_auroc_of_samples_of_one_class_is_undefined():
    assert np.isnan(value_on("AUROC", torch.randn(20, 2), torch.ones(20, dtype=torch.int64)))


@pytest.mark.parametrize("average", ["macro", "weighted"])
@pytest.mark.parametrize("classes", [[0], [2], [0, 2]])
def test_average_precision_is_the_mean_over_the_classes_with_positives(average, classes):
    (one,) = measures_of([{"class_path": "AveragePrecision", "init_args": {"average": average}}], Classification(), 4)
    shares = torch.rand(30, 4, generator=torch.Generator().manual_seed(2)).softmax(dim=1)
    y = torch.tensor(classes)[(torch.arange(30) % 3 == 0).long() % len(classes)]
    running = one.start()
    running.update(shares, y)
    own = [average_precision_score(y == c, shares[:, c]) for c in classes]
    weights = [int((y == c).sum()) for c in classes] if average == "weighted" else None
    assert running.value() == pytest.approx(np.average(own, weights=weights))


def test_average_precision_without_a_positive_is_undefined():
    assert np.isnan(value_on("AveragePrecision", torch.randn(20, 2), torch.zeros(20, dtype=torch.int64)))
    (one,) = measures_of(["AveragePrecision"], MultiLabel(), 3)
    labels = torch.tensor([[1, 0, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0]])
    shares = torch.rand(4, 3, generator=torch.Generator().manual_seed(2))
    running = one.start()
    running.update(shares, labels)
    own = [average_precision_score(labels[:, label], shares[:, label]) for label in (0, 2)]
    assert running.value() == pytest.approx(np.mean(own))


@pytest.mark.filterwarnings("ignore:A single label was found")
@pytest.mark.parametrize("predicted", [[0] * 8, [1] * 8, [0, 1] * 4])
@pytest.mark.parametrize("y", [[0] * 8, [1] * 8, [0, 0, 0, 1] * 2, [1, 1, 0, 1] * 2])
@pytest.mark.parametrize("spec", ["MatthewsCorrCoef", "MulticlassMatthewsCorrCoef"])
def test_the_matthews_coefficient_is_scikit_learns_also_for_constants(spec, y, predicted):
    logits = torch.nn.functional.one_hot(torch.tensor(predicted), 2).float()
    assert value_on(spec, logits, torch.tensor(y)) == pytest.approx(matthews_corrcoef(y, predicted), abs=1e-12)


def test_the_matthews_coefficient_of_several_labels_is_that_of_all_of_them_together():
    (one,) = measures_of(["MatthewsCorrCoef"], MultiLabel(), 3)
    rng = torch.Generator().manual_seed(5)
    shares, labels = torch.rand(20, 3, generator=rng), (torch.rand(20, 3, generator=rng) < 0.4).long()
    running = one.start()
    running.update(shares, labels)
    expected = matthews_corrcoef(labels.flatten(), (shares > 0.5).flatten())
    assert running.value() == pytest.approx(expected, abs=1e-12)


def test_a_metric_that_needs_more_samples_than_a_client_has_is_undefined():
    (one,) = measures_of(["R2Score"], Regression(), 1)
    running = one.start()
    running.update(torch.tensor([1.0]), torch.tensor([2.0]))
    assert np.isnan(running.value())
    running.update(torch.tensor([3.0]), torch.tensor([4.0]))
    assert running.value() == 0.0
    with pytest.raises(ConfigError, match=r"r2_score: Needs at least two samples"):
        check_measures([one], Regression(), torch.ones(1, 1), torch.ones(1, 1))


class TwoClasses(Made):
    """Whether the first number is above 0."""

    def load(self):
        loaded = super().load()
        y_train, y_test = ((y > 0).long() for y in (loaded.y_train, loaded.y_test))
        return replace(loaded, y_train=y_train, y_test=y_test, num_classes=2)


@pytest.mark.thorough
def test_metrics_of_a_run_on_two_classes_are_those_of_the_positive_class(tmp_path):
    scenario = Scenario(TwoClasses("one number"), IID(), 6)
    for positive in (0, 1):
        how = Evaluation(metrics=["F1Score", "AUROC", "Recall"], positive_class=positive)
        run = experiment(tmp_path / str(positive), scenario=scenario, evaluation=how)
        run.fit()
        data, last = run.data.data, run.csv.rows[-1]
        share = predictions(run, run.worker.modules.build_shared(run.state["model"]), data.x_test)[:, positive]
        truth = (data.y_test == positive).numpy()
        assert last["global/f1_score"] == pytest.approx(f1_score(truth, share > 0.5), abs=1e-6)
        assert last["global/auroc"] == pytest.approx(roc_auc_score(truth, share), abs=1e-6)
        assert last["global/recall"] == pytest.approx(recall_score(truth, share > 0.5), abs=1e-6)
        assert {"client/f1_score_mean", "client/auroc_mean"} <= last.keys()


def test_a_positive_class_other_than_0_or_1_or_of_more_than_two_classes_is_refused():
    with pytest.raises(ConfigError, match=r"^evaluation.positive_class: .*0 or 1 \(2\)"):
        Evaluation(positive_class=2)
    with pytest.raises(ConfigError, match=r"^evaluation.positive_class: .*\(0\)"):
        measures_of([], Classification(), 10, 0)


def test_metrics_of_three_classes_are_scikit_learns():
    rng = torch.Generator().manual_seed(5)
    logits, y = torch.randn(90, 3, generator=rng), torch.randint(3, (90,), generator=rng)
    predicted, shares = logits.argmax(dim=1), logits.softmax(dim=1)
    expected = {
        "f1_score": f1_score(y, predicted, average="macro"),
        "Precision": precision_score(y, predicted, average="macro"),
        "sensitivity": recall_score(y, predicted, average="macro"),
        "Accuracy": balanced_accuracy_score(y, predicted),
        "auroc": roc_auc_score(y, shares, multi_class="ovr"),
        "CohenKappa": cohen_kappa_score(y, predicted),
        "MatthewsCorrCoef": matthews_corrcoef(y, predicted),
    }
    assert {spec: value_on(spec, logits, y) for spec in expected} == pytest.approx(expected, abs=1e-6)

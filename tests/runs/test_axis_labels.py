"""Labels of axes in a paper's words."""

import pytest

from fl_lightning.runs.axis_labels import axis_label, common_label, evaluated_split


@pytest.mark.parametrize(
    ("metric", "label"),
    [
        ("global/acc", "Test accuracy"),
        ("global/f1_score", "Test F1 score"),
        ("global/loss", "Test loss"),
        ("client/acc", "Client test accuracy"),
        ("client/acc_mean", "Test accuracy (client mean)"),
        ("client/acc_weighted", "Test accuracy (weighted client mean)"),
        ("client/mae_worst_decile", "Test mean absolute error (worst 10% of clients)"),
        ("new_client/acc_mean", "Test accuracy (client mean), new clients"),
        ("client/train_loss", "Training loss"),
        ("comm/total_bytes", "Total communication (bytes)"),
        ("architecture/CNN/acc_mean", "Client acc, CNN"),
        ("clusters/max_norm_1", "Clusters max norm 1"),
    ],
)
def test_labels(metric, label):
    assert axis_label(metric) == label
    assert axis_label(metric, percent=True) == f"{label} (%)"


def test_a_run_with_a_validation_split_has_a_validation_accuracy():
    split = evaluated_split({"scenario.validation_share": 0.2})
    assert axis_label("global/acc", True, split) == "Validation accuracy (%)"
    assert axis_label("client/acc", False, split) == "Client validation accuracy"
    assert evaluated_split({"scenario.validation_share": None}) == evaluated_split({}) == "test"


def test_several_metrics_have_the_label_that_they_share():
    assert common_label(["global/acc", "client/acc_mean"], percent=True) == "Test accuracy (%)"
    assert common_label(["global/acc"], percent=False) == "Test accuracy"
    assert common_label(["global/acc", "global/loss"], percent=False) == ""
    assert common_label(["drift/acc", "global/acc"], percent=True) == "Percent"

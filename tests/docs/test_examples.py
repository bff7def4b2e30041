"""The examples run, and their results are those that their docstrings promise."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments import experiment
from layouts import write_cifar

from fl_lightning.core.state_dicts import RunningMean
from fl_lightning.engines import Task

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*(many workers|val_dataloader|LeafSpec).*")
@pytest.mark.parametrize("name", ["plain_trainer", "loss_term_elsewhere"])
def test_an_example_learns_the_digits(name, capsys):
    assert load(name).main() > 0.9
    assert "test accuracy 0.9" in capsys.readouterr().out


def test_unit_representations_differ_between_classes(capsys, tmp_path):
    results = load("ua_pdfl_figure_4").main(seeds=2, out=str(tmp_path / "figure.png"))
    for values in results.values():
        assert values[:, 0].mean() < values[:, 1].mean()
    assert "Div(1,2) < Div(1,3)" in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:.*(many workers|val_dataloader|LeafSpec).*")
def test_the_regularizer_moves_the_estimate_to_the_class_shares(capsys, tmp_path):
    results = load("cwfedavg_figure_2").main(out=str(tmp_path / "figure.png"))
    assert results["with WDR"]["gap"] < results["without WDR"]["gap"]
    assert results["with WDR"]["correlation"] > results["without WDR"]["correlation"]
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.thorough
def test_the_figure_compares_outputs_and_classification_weights(capsys, tmp_path):
    distances = load("feddw_figure_8").main(rounds=1, out=str(tmp_path / "figure.png"))
    assert list(distances) == ["FedAvg, IID", "FedAvg, non-IID", "FedDW, non-IID"]
    assert all(distance > 0 for distance in distances.values())
    assert distances["FedDW, non-IID"] != distances["FedAvg, non-IID"]
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.thorough
def test_the_custom_algorithm_runs_by_class_path(tmp_path):
    script = Path(sys.executable).parent / "fl-lightning"
    command = [script, "fit", "--config", "custom_algorithm.yaml"]
    reduced = ["--rounds", "2", "--logger", "null", "--run_dir", str(tmp_path / "run")]
    done = subprocess.run([*command, *reduced], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    header, first, *_ = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert float(dict(zip(header.split(","), first.split(","), strict=True))["client/train_proximal_term"]) > 0


@pytest.mark.parametrize("classes", [10, 100])
def test_the_subset_has_the_first_images_of_each_class(tmp_path, monkeypatch, classes):
    splits = write_cifar(tmp_path, classes, monkeypatch)
    load("cifar_subset").main(str(tmp_path), f"CIFAR{classes}", str(tmp_path / "subset.npz"), train=3, test=2)
    with np.load(tmp_path / "subset.npz") as written:
        for split, (images, labels), count in zip(("train", "test"), splits, (3, 2), strict=True):
            seen, chosen = dict.fromkeys(range(classes), 0), []
            for position, label in enumerate(labels):
                seen[int(label)] += 1
                if seen[int(label)] <= count:
                    chosen.append(position)
            assert written[f"y_{split}"].tolist() == [int(labels[position]) for position in chosen]
            assert written[f"x_{split}"].dtype == np.uint8
            np.testing.assert_array_equal(written[f"x_{split}"], images[chosen])


def test_the_custom_algorithm_is_short():
    assert len((EXAMPLES / "custom_algorithm.py").read_text().splitlines()) <= 40


def test_the_custom_algorithm_weights_clients_by_loss(tmp_path):
    run = experiment(tmp_path, load("custom_algorithm").FairProx(mu=0.2), rounds=1)
    run.fit()
    rng = np.random.default_rng(0)
    start = run.algorithm.initial_state(run.worker.template.backbone, 10, 6, rng)
    mean = RunningMean()
    for client in run.server.participants(1):
        result = run.worker.run(Task(1, client, run.algorithm.download(start, client, rng), {}))
        mean.add(result.upload.section("model"), result.losses["loss"])
    for name, value in mean.value().items():
        torch.testing.assert_close(run.state["model"][name], value, rtol=0, atol=0)


@pytest.mark.thorough
def test_clients_of_other_classes_take_over_models_only_with_a_high_threshold(capsys):
    script = load("ua_pdfl_dropout")
    high, low = script.main(th_i=0.1, rounds=3), script.main(th_i=1e-4, rounds=3)
    assert [row[2] for row in high[:2]] == [1, 1]  # everyone continues from one peer's model
    assert high[1][3] > 0.5  # most peers have other classes
    assert [row[2] for row in low] == [1, 0, 0]  # before round 1 all models are equal
    assert low[2][0] < low[2][1]
    assert "accuracy before training" in capsys.readouterr().out

"""Runs on few-shot episodes."""

import csv

import pytest
from layouts import write_cifar

from fl_lightning.cli.main import main


@pytest.mark.parametrize("method", [pytest.param("FedAvg", marks=pytest.mark.thorough), "FedSKC"])
def test_a_method_runs_on_fc100_from_its_config(method, tmp_path, monkeypatch):
    write_cifar(tmp_path, 100, monkeypatch, (1000, 200))
    assert (
        main(
            [
                "fit",
                "--config",
                "fc100_fedavg.yaml",
                f"--scenario.dataset.data_dir={tmp_path}",
                f"--run_dir={tmp_path / 'run'}",
                "--model=MLP",
                "--scenario.clients=2",
                "--clients_per_round=2",
                "--rounds=2",
                "--trainer.max_steps=1",
                "--trainer.accelerator=cpu",
                "--trainer.precision=32-true",
                "--logger=null",
                "--scenario.dataset.few_shot.episodes=20",
                "--scenario.dataset.few_shot.shots=2",
                "--scenario.dataset.few_shot.queries=2",
                f"--algorithm={method}",
                "--algorithm.loss_terms=[{class_path: Prototypical, init_args: {shots: 2}}]",
            ]
        )
        == 0
    )
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["global/acc_interval"]) > 0

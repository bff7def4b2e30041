"""Runs on few-shot episodes."""

import pytest
from commands import rows, run
from layouts import write_cifar

OPTIONS = """
    --model=MLP --scenario.clients=2 --clients_per_round=2 --rounds=2 --logger=null
    --trainer.max_steps=1 --trainer.accelerator=cpu --trainer.precision=32-true
    --scenario.dataset.few_shot.episodes=20 --scenario.dataset.few_shot.shots=2 --scenario.dataset.few_shot.queries=2
"""
PROTONET = "[{class_path: Prototypical, init_args: {shots: 2}}]"


@pytest.mark.thorough
@pytest.mark.parametrize("method", [pytest.param("FedAvg", marks=pytest.mark.thorough), "FedSKC"])
def test_a_method_runs_on_fc100_from_its_config(method, tmp_path, monkeypatch):
    write_cifar(tmp_path, 100, monkeypatch, (1000, 200))
    folders = [f"--scenario.dataset.data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}"]
    method_and_term = [f"--algorithm={method}", f"--algorithm.loss_terms={PROTONET}"]
    outcome = run("fit", "--config", "fc100_fedavg.yaml", *folders, *OPTIONS.split(), *method_and_term)
    assert outcome.code == 0, outcome.err
    assert float(rows(tmp_path / "run")[-1]["global/acc_interval"]) > 0

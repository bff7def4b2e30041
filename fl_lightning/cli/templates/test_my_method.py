"""Tests of MyMethod: the formulas, the special case that equals FedAvg, the bytes that are sent, and the config."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from my_method import MyMethod, PowerMean, PriorMatching

from fl_lightning import Algorithm, FedAvg, FederatedOrchestrator, LocalTraining, Message, Round, Step, Upload
from fl_lightning.cli.main import main
from fl_lightning.data import Digits, Dirichlet, Scenario
from fl_lightning.models import MLP


def test_the_loss_term_is_the_divergence_from_the_class_distribution() -> None:
    counts, p = np.array([3.0, 1.0, 0.0]), np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    term = PriorMatching(beta=2.0)
    term.class_counts.load({"counts": torch.tensor(counts)})
    prior, mean = counts / counts.sum(), p.mean(axis=0)
    expected = 2.0 * sum(q * np.log(q / m) for q, m in zip(prior, mean, strict=True) if q > 0)
    step = Step(logits=torch.tensor(p).log() + 5.0, targets=torch.tensor([0, 2]))
    np.testing.assert_allclose(term(step), expected)


@pytest.mark.parametrize(("power", "expected"), [(0.0, 2.5), (0.5, 3.4), (1.0, 65 / 17)])
def test_the_aggregator_weights_by_a_power_of_the_samples(power: float, expected: float) -> None:
    uploads = [
        Upload(client, Message.pack({"model": {"w": torch.tensor([w])}}, n_samples=n))
        for client, (w, n) in enumerate([(1.0, 1), (4.0, 16)])
    ]
    aggregator, round = PowerMean(power), Round(1, {})
    folded = aggregator.begin(round)
    for upload in uploads:
        aggregator.fold(folded, upload)
    state = aggregator.finish(folded, round, knowledge={})
    torch.testing.assert_close(state["model"]["w"], torch.tensor([expected]))


def train(folder: Path, algorithm: Algorithm) -> FederatedOrchestrator:
    """Run two rounds on scikit-learn's digits."""
    run = FederatedOrchestrator(
        scenario=Scenario(Digits(), Dirichlet(alpha=0.3, min_samples=10), clients=4),
        model=partial(MLP, hidden=(8,)),
        algorithm=algorithm,
        rounds=2,
        training=LocalTraining(trainer={"accelerator": "cpu"}),
        run_dir=folder,
    )
    run.fit()
    return run


def test_with_beta_0_and_power_1_it_is_fedavg(tmp_path: Path) -> None:
    mine = train(tmp_path / "mine", MyMethod(beta=0.0, power=1.0)).state["model"]
    fedavg = train(tmp_path / "fedavg", FedAvg()).state["model"]
    assert all(torch.equal(mine[name], fedavg[name]) for name in fedavg)


def test_a_client_sends_the_model_its_class_counts_and_one_number(tmp_path: Path) -> None:
    run = train(tmp_path / "run", MyMethod())
    model = sum(weight.numel() * weight.element_size() for weight in run.state["model"].values())
    assert [row["comm/up_bytes"] for row in run.csv.rows] == [4 * (model + 10 * 4 + 8)] * 2


def test_the_config_passes_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["fit", "--config", "my_method.yaml", "--fast"]) == 0

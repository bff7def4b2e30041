"""The summary that a run begins with."""

import io
import math
from functools import partial

import pandas as pd
import pytest
import torch
from experiments import experiment
from rich.console import Console

from fl_lightning.algorithms import SCAFFOLD, FedAvgM, FedProto, FedRep, FedSKC, Local, PeerAlgorithm, Proximal
from fl_lightning.callbacks import RoundProgress
from fl_lightning.compression import Float16, TopK
from fl_lightning.data import IID, Scenario, Table
from fl_lightning.models import MLP, FromModule


def summary(run_dir, algorithm=None, resume=False, **options):
    """Run a round of an experiment, and return the lines before it."""
    screen = io.StringIO()
    one = {"rounds": 1, "clients_per_round": 2, "trainer": {"accelerator": "cpu", "max_epochs": 1}}
    progress = RoundProgress(Console(file=screen, width=40))
    fast = options.pop("fast", False)
    run = experiment(run_dir, algorithm, callbacks=[progress], **one | options)
    run.fit(resume=resume, fast=fast)
    lines = screen.getvalue().splitlines()
    return lines[: [line.startswith("round ") for line in lines].index(True)], run


def test_a_run_begins_with_six_lines(tmp_path):
    lines, run = summary(tmp_path / "run", FedSKC(), model=partial(MLP, hidden=(16,)))
    sizes = [len(shard.train) for shard in run.data.shards]
    assert min(sizes) < max(sizes)
    assert lines == [
        "method: FedSKC with LocalContrastive, GlobalPeriodReview; sends model, structural",
        f"data: Digits, 10 classes; 6 clients (Dirichlet) with {min(sizes)} to {max(sizes)} training samples each",
        "input: float32 (1, 8, 8)",
        f"model: MLP, {64 * 16 + 16 + 16 * 10 + 10:,} parameters",
        "device: cpu, precision 32-true, engine sequential",
        f"folder: {tmp_path / 'run'}",
    ]
    again, _ = summary(tmp_path / "run", FedSKC(), resume=True, rounds=2)
    assert again == [*lines[:-1], f"folder: {tmp_path / 'run'}, resumed after round 1"]


def test_the_first_line_names_the_compressors(tmp_path):
    lines, _ = summary(tmp_path, compression=TopK(), download_compression=Float16())
    assert lines[0] == "method: FedAvg; sends model, compressed by TopK (up) and Float16 (down)"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (partial(FedAvgM, loss_terms=[Proximal(0.1)]), "FedAvgM with Proximal, ServerMomentum; sends model"),
        (FedRep, "FedRep; sends model without head"),
        (FedProto, "FedProto with PrototypeAlignment; sends prototypes"),
        (Local, "Local; sends nothing"),
        (SCAFFOLD, "SCAFFOLD with ControlVariates, ServerStep; sends model, control"),
        (PeerAlgorithm, "PeerAlgorithm; sends model"),
    ],
)
@pytest.mark.fast_cases(3)
def test_the_summary_names_what_a_method_sends(algorithm, expected, tmp_path):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    trainer = {"accelerator": "cpu", "max_epochs": 2}
    (line, *_), _ = summary(tmp_path / "run", algorithm(), optimizer=optimizer, trainer=trainer)
    assert line == f"method: {expected}"


def frozen_network(in_features, out_features):
    network = torch.nn.Sequential(torch.nn.Linear(in_features, 4), torch.nn.ReLU(), torch.nn.Linear(4, out_features))
    network[0].requires_grad_(False)
    return network


def test_the_summary_of_a_regression_in_a_dry_run(tmp_path):
    frame = pd.DataFrame(
        {"dose": [i % 40 for i in range(80)], "town": ["a", "b"] * 40, "cost": [math.sqrt(i) for i in range(80)]}
    )
    frame.to_csv(tmp_path / "table.csv", index=False)
    path, arguments = f"{__name__}.frozen_network", {"in_features": 3, "out_features": 1}
    lines, _ = summary(
        tmp_path / "run",
        scenario=Scenario(Table(str(tmp_path / "table.csv"), "cost"), IID(), 3),
        model=partial(FromModule, module=path, module_args=arguments, head="2"),
        engine="stacked",
        fast=True,
    )
    assert lines[1].startswith("data: Table, Regression of 1 outputs; 3 clients (IID) with ")
    assert lines[2:] == [
        "features: dose, town; label: cost",
        f"model: {path}, 21 parameters, 16 of them frozen",
        "device: cpu, precision 32-true, engine stacked",
        "folder: none, because this is a dry run, with a few samples of each client",
    ]

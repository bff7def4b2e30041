"""Every method of the package, and options that change what a client keeps, sends or trains on."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from adapters import LowRankMLP
from experiments import NormMLP, digits, same_bytes, untimed

from fl_lightning import algorithms
from fl_lightning.algorithms import (
    UAPDFL,
    Algorithm,
    Bucketing,
    CenteredClipping,
    CwFedAvg,
    ErdosRenyi,
    FedAvg,
    FedDW,
    FedDyn,
    FedPAC,
    FedRep,
    FedSKC,
    FlexLoRA,
    FLoRA,
    Median,
    PeerAlgorithm,
    PeerCriticalFL,
    Prototypical,
    Proximal,
    WeightedMean,
)
from fl_lightning.data import Digits, Dirichlet, FewShot, Scenario
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP, Head

SIAMESE = partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16))


class Episodes(Digits):
    """Digits learnt in episodes."""

    def load(self):
        few = FewShot(ways=3, shots=2, queries=2, episodes=10)
        return replace(super().load(), cut=few.cut, evaluate=few.evaluate)


NAMES = {name: getattr(algorithms, name) for name in algorithms.__all__}
CLASSES = {name: c for name, c in NAMES.items() if isinstance(c, type) and issubclass(c, Algorithm)} | {
    "FedPAC": partial(FedPAC, head_epochs=0),
    "FedRep": partial(FedRep, head_epochs=0),  # some tests have one epoch alone, and that is the body's
    "PeerCriticalFL": partial(PeerCriticalFL, n_com=2),
    "UAPDFL": partial(UAPDFL, n_com=2),
}
ADAPTERS = ("FFALoRA", "FLoRA", "FedExLoRA", "FedIT", "FedSALoRA", "FlexLoRA", "RoLoRA")
OPTIONS = {  # required by the method
    **{name: {"model": LowRankMLP} for name in ADAPTERS},
    "FedBN": {"model": NormMLP},
    **{name: {"optimizer": partial(torch.optim.SGD, lr=0.1)} for name in ("SCAFFOLD", "FedCM", "FedDC", "MoFedSAM")},
}
EPISODES = Scenario(Episodes(), Dirichlet(1.0, min_samples=60), 6)

# The method and the options of its experiment.
METHODS = {
    **{
        name: (method, {"model": SIAMESE} | OPTIONS.get(name, {}))
        for name, method in CLASSES.items()
        if name != "Algorithm"
    },
    "local buffers": (partial(FedAvg, buffers="local"), {"model": NormMLP}),
    "dropped buffers": (partial(FedAvg, buffers="drop"), {"model": NormMLP}),
    "uniform": (lambda: FedAvg(aggregator=WeightedMean("uniform")), {}),
    "two terms": (lambda: FedDW(loss_terms=[Proximal(0.1)]), {}),
    "kept optimizer": (FedAvg, {"optimizer_state": "kept"}),
    "schedules": (
        FedAvg,
        {
            "lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
            "round_lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
        },
    ),
    "received": (FedSKC, {"evaluation": Evaluation(client_model="received", personal_on_global=True)}),
    "class shares": (partial(CwFedAvg, lam=0.0, distribution="true"), {}),
    "cwFedAVG's code": (partial(CwFedAvg, preset="reference"), {"model": NormMLP, "batch_size": 8}),
    "UA-PDFL's code": (partial(UAPDFL, n_com=2, preset="reference"), {"model": NormMLP}),
    "gossip on a random graph": (lambda: PeerAlgorithm(n_com=1, graph=ErdosRenyi(0.7)), {"model": NormMLP}),
    "ProtoNet": (lambda: FedAvg(loss_terms=[Prototypical(2)]), {"scenario": EPISODES, "model": SIAMESE}),
    "FedSKC with ProtoNet": (lambda: FedSKC(loss_terms=[Prototypical(2)]), {"scenario": EPISODES}),
    "FLoRA with ranks": (partial(FLoRA, ranks=[3, 1]), {"model": LowRankMLP}),
    "FlexLoRA with ranks": (partial(FlexLoRA, ranks=[3, 1]), {"model": LowRankMLP}),
    "FedDyn with clipping": (lambda: FedDyn(aggregator=Bucketing(CenteredClipping(1.0))), {"model": NormMLP}),
    "gossip with a median": (lambda: PeerAlgorithm(n_com=3, aggregator=Bucketing(Median())), {"model": NormMLP}),
    "many clients": (partial(PeerAlgorithm, n_com=3), {"scenario": digits(20, alpha=10.0), "clients_per_round": 15}),
}

# One of each kind: shared state, one start per client, peers, episodes, own sections, access to the client's data and
# to other clients' uploads, an own client module, a variable number of participants.
QUICK = ("FedSKC", "CwFedAvg", "UAPDFL", "FedSKC with ProtoNet", "SCAFFOLD", "FedFomo", "APPLE", "CriticalFL")
FEW_QUICK = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


def assert_same_run(one, other):
    """Compare all results of two runs: state, client state, metrics, checkpoints and final model."""
    assert one.state.keys() == other.state.keys()
    assert all(same_bytes(one.state[name], other.state[name]) for name in one.state)
    assert one.memory.keys() == other.memory.keys()
    for client in one.memory:
        assert one.memory[client].keys() == other.memory[client].keys()
        assert all(same_bytes(one.memory[client][name], other.memory[client][name]) for name in one.memory[client])
    assert untimed(one.csv.rows) == untimed(other.csv.rows)
    left = [("checkpoints/*/state.pt", elements), ("final/summary.json", Path.read_bytes)]
    for pattern, content in [*left, *[("final/model.pt", Path.read_bytes)] * one.algorithm.one_model]:
        newest = [max(run.run_dir.glob(pattern)) for run in (one, other)]
        assert content(newest[0]) == content(newest[1])


def elements(path):
    """Return the bytes of the tensors in a checkpoint's state, by section and name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Validating sparse")  # an earlier load that failed may leave it
        state = torch.load(path, weights_only=True)["state"]
    return {section: [(name, value.numpy().tobytes()) for name, value in own.items()] for section, own in state.items()}

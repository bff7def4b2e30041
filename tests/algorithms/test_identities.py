"""Methods that equal another method bit for bit when their own parts are off, or when built from the same parts."""

from functools import partial
from math import inf

import pytest
import torch
from adapters import LowRankMLP
from experiments import NormMLP, digits, finished, same_bytes
from methods import SIAMESE

from fl_lightning.algorithms import (
    CCVR,
    CFL,
    IFCA,
    MOON,
    QFFL,
    UAPDFL,
    ClassWise,
    CriticalFL,
    CwFedAvg,
    DFedAvgM,
    DualAggregation,
    ErdosRenyi,
    FedACG,
    FedALA,
    FedAMP,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedCM,
    FedDGGA,
    FedDistill,
    FedDistillPlus,
    FedDW,
    FedFomo,
    FedGen,
    FedIT,
    FedLC,
    FedNTD,
    FedPer,
    FedProto,
    FedProx,
    FedRCL,
    FedRep,
    FedSALoRA,
    FedSAM,
    FedSiamDA,
    FedSKC,
    FedSR,
    FedTGP,
    FedUV,
    GlobalDiscrepancy,
    HeurFedAMP,
    LGFedAvg,
    Local,
    LocalContrastive,
    MoFedSAM,
    PeerAlgorithm,
    PeerCriticalFL,
    PeerFedPer,
    ServerMomentum,
    UnitAlignment,
    WeightDistribution,
    WeightedMean,
)
from fl_lightning.models import MLP, Head


class LocalWithValidation(Local):
    """Local training on four fifths of the training data."""

    validation = 0.2


BIAS_FREE = partial(MLP, hidden=(16,), head=Head(classifier="bias_free"))
UNIFORM = partial(FedAvg, weighting="uniform")
GOSSIP = partial(PeerAlgorithm, n_com=2)
LONELY = {"graph": ErdosRenyi(0.0)}

SGD = {"optimizer": partial(torch.optim.SGD, lr=0.2)}

# The method, the method that it equals, the model (with BatchNorm and dropout if possible) and other options.
PAIRS = {
    "CCVR": (partial(CCVR, epochs=0), FedAvg, NormMLP),
    "CFL without a split": (partial(CFL, eps1=0.0, eps2=0.0, min_rounds=0), UNIFORM, NormMLP),
    "CFL before its first split": (partial(CFL, eps1=inf, eps2=0.0, min_rounds=3), UNIFORM, NormMLP),
    "CriticalFL": (partial(CriticalFL, max_share=0.0, keep=1.0), FedAvg, NormMLP),
    "CriticalFL of all clients": (
        partial(CriticalFL, max_share=1.0, keep=1.0),
        FedAvg,
        NormMLP,
        {"clients_per_round": 6},
    ),
    "CwFedAvg": (partial(CwFedAvg, lam=0.0, aggregator=WeightedMean()), FedAvg, NormMLP),
    "DFedAvgM": (partial(DFedAvgM, **LONELY), partial(PeerAlgorithm, weighting="uniform", **LONELY), NormMLP),
    "FedACG": (partial(FedACG, lam=0.0, beta=0.0), UNIFORM, NormMLP),
    "FedALA": (partial(FedALA, layers=0), FedAvg, NormMLP),
    "FedAMP": (partial(FedAMP, lam=0.0), partial(PeerAlgorithm, buffers="local", **LONELY), NormMLP),
    "FedAvgM": (partial(FedAvgM, beta=0.0), FedAvg, NormMLP),
    "FedAvgM, plain": (partial(FedAvgM, beta=0.0, nesterov=False, weighting="uniform"), UNIFORM, NormMLP),
    "FedAvgM's server": (
        lambda: FedAvg(aggregator=ServerMomentum(0.5, weighting="uniform")),
        partial(FedAvgM, beta=0.5, weighting="uniform"),
        NormMLP,
    ),
    "FedBABU": (partial(FedBABU, frozen=[], tune_epochs=0), UNIFORM, NormMLP),
    "FedDGGA": (partial(FedDGGA, step_size=0.0, initial_weights="samples"), FedAvg, NormMLP),
    "FedDGGA, uniform": (partial(FedDGGA, step_size=0.0, initial_weights="uniform"), UNIFORM, NormMLP),
    "FedDW": (partial(FedDW, mu=0.0), FedAvg, BIAS_FREE),
    "FedDistill": (partial(FedDistill, gamma=0.0), Local, NormMLP),
    "FedDistill, cumulative": (partial(FedDistill, gamma=0.0, cumulative=True), Local, NormMLP),
    "FedDistillPlus": (partial(FedDistillPlus, gamma=0.0), FedAvg, NormMLP),
    "FedFomo": (partial(FedFomo, models=0), LocalWithValidation, NormMLP),
    "FedGen": (partial(FedGen, alpha=0.0), FedAvg, NormMLP),
    "FedIT": (FedIT, FedAvg, LowRankMLP),
    "FedLC": (partial(FedLC, tau=0.0), FedAvg, NormMLP),
    "FedNTD": (partial(FedNTD, beta=0.0), FedAvg, NormMLP),
    "FedPer": (partial(FedPer, personal=[]), FedAvg, NormMLP),
    "FedProto": (partial(FedProto, lam=0.0), Local, NormMLP),
    "FedProx": (partial(FedProx, mu=0.0), FedAvg, NormMLP),
    "FedRCL": (partial(FedRCL, w_s=0.0, w_p=0.0), UNIFORM, NormMLP),
    "FedRep": (partial(FedRep, personal=[], head_epochs=0), FedAvg, NormMLP),
    "FedSALoRA": (partial(FedSALoRA, personal=[]), FedIT, LowRankMLP),
    "FedSAM": (partial(FedSAM, rho=0.0, weighting="samples"), FedAvg, NormMLP, SGD),
    "FedSKC": (partial(FedSKC, lcl=False, gda=False, gpr=False), FedAvg, NormMLP),
    "FedSKC with beta 1": (partial(FedSKC, beta=1.0), partial(FedSKC, gpr=False), NormMLP),
    "FedSKC from its parts": (
        lambda: FedAvg(loss_terms=[LocalContrastive(0.1, 2)], aggregator=GlobalDiscrepancy("share", 2)),
        partial(FedSKC, tau=0.1, similar_clients=2, gpr=False, gda_scale="share"),
        NormMLP,
    ),
    "FedSKC's loss and class-wise averaging": (
        lambda: FedAvg(loss_terms=[LocalContrastive(0.1)], aggregator=ClassWise()),
        lambda: FedSKC(tau=0.1, gda=False, gpr=False, aggregator=ClassWise()),
        NormMLP,
    ),
    "FedSiamDA": (partial(FedSiamDA, mu=0.0, aggregation="uniform"), UNIFORM, SIAMESE),
    "FedSiamDA, weighted": (partial(FedSiamDA, mu=0.0, aggregation="weighted"), FedAvg, SIAMESE),
    "FedSiamDA, dual": (partial(FedSiamDA, mu=0.0), lambda: FedAvg(aggregator=DualAggregation()), SIAMESE),
    "FedSR": (partial(FedSR, l2r=0.0, cmi=0.0, probabilistic=False), FedAvg, NormMLP),
    "FedTGP": (partial(FedTGP, lam=0.0), Local, NormMLP),
    "FedUV": (partial(FedUV, lam=0.0, mu=0.0), FedAvg, NormMLP),
    "HeurFedAMP": (partial(HeurFedAMP, lam=0.0), partial(PeerAlgorithm, buffers="local", **LONELY), NormMLP),
    "IFCA": (partial(IFCA, clusters=1), FedAvg, NormMLP),
    "IFCA, uniform": (partial(IFCA, clusters=1, weighting="uniform"), UNIFORM, NormMLP),
    "LGFedAvg": (partial(LGFedAvg, personal=[]), FedAvg, NormMLP),
    "Local of one client": (Local, FedAvg, NormMLP, {"scenario": digits(1), "clients_per_round": 1}),
    "MOON": (partial(MOON, mu=0.0), FedAvg, NormMLP),
    "MoFedSAM": (partial(MoFedSAM, rho=0.0), FedCM, NormMLP, SGD),
    "PeerCriticalFL": (partial(PeerCriticalFL, n_com=2, max_share=0.0, keep=1.0), GOSSIP, NormMLP),
    "PeerFedPer": (partial(PeerFedPer, personal=(), n_com=2), GOSSIP, NormMLP),
    "QFFL": (partial(QFFL, q=0.0), UNIFORM, NormMLP, SGD),
    "UAPDFL": (partial(UAPDFL, n_com=2, dropout=False, layerwise=False, mu=0.0), GOSSIP, NormMLP),
    "UnitAlignment": (lambda: FedAvg(loss_terms=[UnitAlignment(0.0)]), FedAvg, NormMLP),
    "WeightDistribution": (
        lambda: FedAvg(loss_terms=[WeightDistribution(2.0)]),
        lambda: CwFedAvg(lam=2.0, aggregator=WeightedMean()),
        NormMLP,
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return a function that runs a method once, for all tests that compare with it."""
    runs = {}

    def finish(method, model, **options):
        key = repr((method, model, options))
        if key not in runs:
            runs[key] = finished(tmp_path_factory.mktemp("reference"), method(), model=model, rounds=2, **options)
        return runs[key]

    return finish


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.fast_cases(2)
def test_a_method_equals_another_bit_for_bit(tmp_path, reference, name):
    method, other, model, *options = PAIRS[name]
    options = options[0] if options else {}
    run, plain = finished(tmp_path, method(), model=model, rounds=2, **options), reference(other, model, **options)
    if run.algorithm.one_model and plain.algorithm.one_model:
        assert same_bytes(run.state["model"], plain.state["model"])
        assert run.csv.rows[-1]["global/loss"] == plain.csv.rows[-1]["global/loss"]
    for client in range(run.clients):
        one, two = (dict(each.client_module(client).backbone.state_dict()) for each in (run, plain))
        assert same_bytes(one, two), client
    assert run.csv.rows[-1]["client/acc_mean"] == plain.csv.rows[-1]["client/acc_mean"]

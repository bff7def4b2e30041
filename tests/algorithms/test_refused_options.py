"""Options of the methods that are refused, each with its name in the message."""

import inspect
import re
from functools import partial
from math import nan

import pytest
import torch
from adapters import LowRankMLP
from experiments import experiment
from methods import CLASSES, NAMES
from torch import nn

from fl_lightning.algorithms import (
    APFL,
    CCVR,
    FML,
    IFCA,
    SCAFFOLD,
    ControlVariates,
    DistillingWeights,
    Ditto,
    FedAT,
    FedAvg,
    FedBABU,
    FedBN,
    FedCM,
    FedGen,
    FedGH,
    FedKD,
    FedNova,
    FedPer,
    FedProx,
    FedRep,
    FedROD,
    FedSALoRA,
    FedSiamDA,
    FlexLoRA,
    FLoRA,
    HistoryContrast,
    HypersphericalUniformity,
    Local,
    Median,
    ModelContrast,
    NotTrueDistillation,
    PeerAlgorithm,
    PrototypeAlignment,
    Proximal,
    ServerMomentum,
    SiameseAlignment,
    UnitAlignment,
)
from fl_lightning.callbacks import ClusterNorms
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import MLP, Head
from fl_lightning.scheduling import DeviceClock, Tiers

REFUSED = {
    "AFL": {"weight_lr": [-0.1, nan]},
    "APPLE": {"dr_lr": [-1], "mu": [-1], "length": [-1]},
    "CCVR": {"features": [0], "epochs": [-1]},
    "CFL": {"eps1": [-1.0], "eps2": [-1.0], "min_rounds": [-1], "min_size": [0]},
    "CriticalFL": {"window": [0], "every": [0], "sure": [-1], "max_share": [1.5], "keep": [0.0, 1.1]},
    "CwFedAvg": {"lam": [-1.0, nan]},
    "DisPFL": {"dense_ratio": [0.0], "prune_rate": [1.5], "search_rounds": [0]},
    "Ditto": {"lam": [-1]},
    "FedACG": {"lam": [-0.1, 1.0]},
    "FedALA": {"layers": [-1], "rand_percent": [0, 101], "eta": [-1], "threshold": [-1], "max_epochs": [0]},
    "FedAMP": {"alpha": [0.0], "sigma": [-1.0], "lam": [-1.0]},
    "FedAvgM": {"beta": [1.0, -0.1], "server_lr": [0.0, nan]},
    "FedBABU": {"tune_epochs": [-1]},
    "FedDGGA": {"step_size": [-0.1, 1.5, nan], "decay_rounds": [0]},
    "FedDW": {"mu": [-1.0], "linearize_every": [0]},
    "FedDistill": {"gamma": [-0.5]},
    "FedDistillPlus": {"gamma": [-0.5]},
    "FedFomo": {"models": [-1], "epsilon": [-0.1, 1.1], "decay": [-0.1], "validation": [1.0, -0.1]},
    "FedGen": {
        "alpha": [-1.0],
        "beta": [-0.1, nan],
        "decay": [0.0, 1.1],
        "diversity": [-1.0],
        "generator_steps": [0],
        "generator_lr": [0.0],
        "generator_batch_size": [1],
        "noise_dim": [0],
        "hidden_dim": [0],
    },
    "FML": {"alpha": [-0.1, 1.1], "beta": [nan, 2.0]},
    "FedGH": {"server_epochs": [-1], "server_lr": [0.0], "server_batch_size": [0]},
    "FedKD": {"distillation": [-1.0], "energy_start": [0.0, 1.1], "energy_end": [0.0, 1.1], "energy_rounds": [0]},
    "FedNH": {"rho": [-0.1, 1.5], "scale": [0.0]},
    "FedPAC": {"lam": [-1.0], "head_epochs": [-1]},
    "FedProto": {"lam": [-0.5]},
    "FedProx": {"mu": [-0.1]},
    "FedRCL": {"w_s": [-1.0], "w_p": [-1.0], "tau": [0.0], "threshold": [nan], "levels": [[]]},
    "FedRep": {"head_epochs": [-1], "final_epochs": [-2]},
    "FedSR": {"l2r": [-0.1, nan], "cmi": [-1.0]},
    "FedSKC": {"tau": [0.0], "beta": [1.5], "similar_clients": [-1]},
    "FedSiamDA": {"mu": [-0.1, nan]},
    "FedTGP": {"lam": [-0.5], "server_epochs": [-1], "server_lr": [0.0], "server_batch_size": [0], "tau": [-1.0]},
    "FedUV": {"lam": [-1.0], "mu": [-0.5]},
    "FedYogi": {"beta1": [1.0], "beta2": [-0.5], "tau": [0.0], "initial_v": [-1.0], "server_lr": [0.0]},
    "HeurFedAMP": {"self_weight": [1.5], "sigma": [-1.0]},
    "IFCA": {"clusters": [0]},
    "MOON": {"mu": [-1.0], "tau": [0.0], "history": [0]},
    "PFedMe": {"lam": [0], "inner_steps": [0], "personal_lr": [0], "beta": [0]},
    "PeerAlgorithm": {"n_com": [0, -1]},
    "PeerCriticalFL": {"window": [0], "max_share": [2.0], "keep": [0.0], "n_com": [0]},
    "PerFedAvg": {"alpha": [-0.1], "delta": [0.0], "adapt_steps": [-1]},
    "QFFL": {"q": [-0.5, 31.0, nan], "lipschitz": [0.0, -1.0]},
    "SCAFFOLD": {"server_lr": [-1]},
    "UAPDFL": {"th_i": [-0.1, nan], "mu": [-1.0, nan], "n_com": [0]},
}


@pytest.mark.parametrize("method", REFUSED)
def test_an_option_out_of_range_is_refused_by_name(method):
    for option, values in REFUSED[method].items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"^algorithm\.{option}: {re.escape(str(value))} is "):
                NAMES[method](**{option: value})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (FedBABU, {"tune": "head", "frozen": []}, "algorithm.tune: 'head' needs a frozen part"),
        (Local, {"loss_terms": [Proximal(0.1), DistillingWeights()]}, "algorithm.loss_terms: 'dw' "),
        (FedRep, {"personal": []}, "algorithm.head_epochs: 1 needs a personal part to train"),
        (FedRep, {"personal": [], "head_epochs": 0, "final_epochs": 3}, "algorithm.final_epochs: 3 needs a personal"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(kind, options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        kind(**options)


HAS = "algorithm.loss_terms: {} has {!r} already. Set algorithm.mu instead."


@pytest.mark.parametrize(
    ("kind", "terms", "message"),
    [
        (FedNova, [Proximal(0.1)], HAS.format("FedNova", "proximal")),
        (FedProx, [NotTrueDistillation(), Proximal(0.1)], HAS.format("FedProx", "proximal")),
        (FedSiamDA, [HistoryContrast(0.1)], HAS.format("FedSiamDA", "history")),
        (SCAFFOLD, [ControlVariates()], "algorithm.loss_terms: SCAFFOLD has 'control' already. Leave it out."),
        (FedAvg, [Proximal(0.1)] * 2, "algorithm.loss_terms: 'proximal' occurs twice. List each loss term once."),
        (FedNova, [Proximal(0.1)] * 2, "algorithm.loss_terms: 'proximal' occurs twice. List each loss term once."),
    ],
)
def test_a_loss_term_that_occurs_twice_is_refused(kind, terms, message):
    with pytest.raises(ConfigError) as refused:
        kind(loss_terms=terms)
    assert str(refused.value) == message


class Plain(nn.Sequential):
    """A network without encoder and head."""

    def __init__(self, in_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))


ACCUMULATED = {"trainer": {"accelerator": "cpu", "accumulate_grad_batches": 2}}
ADAPTED = {"model": LowRankMLP}
TIERS = {"clock": DeviceClock(), "round_policy": Tiers(7)}
MOMENTUM = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
SCHEDULE = {"lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)}
UNFIT = [
    *((method, {}, {"model": Plain}, "model: .*Plain") for method in (CCVR, FedGen, FedGH, FedKD)),
    (FedKD, {"shared_model": Plain}, {}, "model: .*Plain"),
    (FedBN, {}, {}, "model: FedBN .*MLP"),
    (FedROD, {}, {"model": partial(MLP, head=Head(hidden=(8,)))}, "model.head: FedROD "),
    (FedBABU, {"frozen": ["tail"]}, {}, "algorithm.frozen: 'tail' .*MLP"),
    (IFCA, {"shared_layers": ["body"]}, {}, "algorithm.shared_layers: .*'body'"),
    (FedPer, {"personal": ["head", "heads"]}, {}, "algorithm.personal: 'heads' .*enc"),
    (FedPer, {"personal": ["head", "encoder.0"]}, {}, "algorithm.personal: 'encoder.0' .*enc"),
    (FedPer, {"personal": ["head", ""]}, {}, "algorithm.personal: '' .*enc"),
    (FedPer, {"personal": ["*.lora_B.*"]}, {}, r"algorithm.personal: '\*.lora_B.\*'"),
    (FedSALoRA, {"personal": ["*.lora_C.*"]}, ADAPTED, "algorithm.personal: "),
    (FedSALoRA, {"personal": ["lora_B"]}, ADAPTED, "algorithm.personal: "),
    *((FLoRA, {"ranks": [2, rank]}, ADAPTED, f"algorithm.ranks: {rank} ") for rank in (0, 4)),
    *((FlexLoRA, {"ranks": [rank]}, ADAPTED, f"algorithm.ranks: {rank} ") for rank in (0, 4)),
    *((FedRep, {"head_epochs": epochs}, {}, f"algorithm.head_epochs: {epochs} ") for epochs in (2, 5)),
    *((method, {}, ACCUMULATED, "trainer.accumulate_grad_batches: ") for method in (APFL, Ditto, FML)),
    (FedCM, {}, MOMENTUM, "optimizer: FedCM "),
    (FedNova, {}, {"optimizer": torch.optim.Adam}, "optimizer: FedNova .*SGD.*Adam"),
    (FedNova, {}, SCHEDULE, "lr_scheduler: FedNova "),
    (PeerAlgorithm, {"n_com": 6}, {}, "algorithm.n_com: 6 .* 5"),
    (FedAT, {}, TIERS, "round_policy.tiers: "),
    (FedAvg, {}, TIERS | {"round_policy": Tiers(2)}, "round_policy: "),
    (FedAvg, {}, {"callbacks": [ClusterNorms()]}, "callbacks: ClusterNorms: FedAvg "),
]
"""Methods with their options, the options of an experiment that does not fit them, and the message."""


@pytest.mark.parametrize(("method", "given", "options", "message"), UNFIT)
def test_an_experiment_that_does_not_fit_the_method_is_refused_before_round_1(
    tmp_path, method, given, options, message
):
    with pytest.raises(ConfigError, match=f"^{message}"):
        experiment(tmp_path / "run", method(**given), **options).fit()
    assert not (tmp_path / "run").exists()


OF_AGGREGATORS = {
    "CwFedAvg": {"distribution": "true"},
    "FedSKC": {"beta": 0.5, "gda_scale": "share", "review": "literal"},
    "FedSiamDA": {"aggregation": "uniform"},
    "PFedMe": {"beta": 2.0, "weighting": "samples"},
    "SCAFFOLD": {"server_lr": 2.0},
} | {
    name: {"weighting": next(each for each in ("samples", "uniform") if each != arguments["weighting"].default)}
    for name, method in CLASSES.items()
    if name != "PFedMe" and (arguments := inspect.signature(method).parameters).keys() >= {"weighting", "aggregator"}
}
"""Options that only a method's own aggregator reads, with a value that is not the default."""


@pytest.mark.parametrize("method", OF_AGGREGATORS)
def test_an_option_of_the_aggregator_is_refused_if_another_aggregator_is_given(method):
    kind = NAMES[method]
    for option, value in OF_AGGREGATORS[method].items():
        kind(**{option: value})
        default = inspect.signature(kind).parameters[option].default
        kind(**{option: default}, aggregator=Median())
        with pytest.raises(ConfigError) as refused:
            kind(**{option: value}, aggregator=Median())
        message = str(refused.value)
        assert message.startswith(f"algorithm.{option}: {value} ")
        assert all(fact in message for fact in ("Median", method, "algorithm.aggregator", f"{option} is {default}"))


def test_a_subclass_may_set_both_an_option_and_the_aggregator_of_its_base_class():
    class Own(FedAvg):
        def __init__(self) -> None:
            super().__init__(weighting="uniform", aggregator=ServerMomentum())

    assert Own().aggregator.inner.weighting == "samples"


TERMS_ON_FEATURES = (
    HistoryContrast,
    HypersphericalUniformity,
    ModelContrast,
    PrototypeAlignment,
    SiameseAlignment,
    UnitAlignment,
)


@pytest.mark.parametrize("term", TERMS_ON_FEATURES)
def test_a_term_on_features_refuses_a_model_that_is_no_backbone(term):
    with pytest.raises(ConfigError, match=r"^model: .*Linear"):
        ClientModule(nn.Linear(4, 3), [term()]).on_fit_start()

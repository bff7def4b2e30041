"""FedIT is FedAvg of a model with adapters (Zhang et al., ICASSP 2024)."""

import pytest
from adapters import PLAIN, LowRankMLP, adapters_by_hand
from experiments import UNEQUAL, experiment, in_float64, record_rounds
from loops import assert_equals_loop
from peers import mean_by_hand
from torch import nn

from fl_lightning.algorithms import FedIT
from fl_lightning.core.errors import ConfigError


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedIT(), model=PLAIN, **UNEQUAL)
    expected = adapters_by_hand(run, lambda before, ends, sizes, round: mean_by_hand(ends, sizes))
    run.fit()
    assert_equals_loop(run, run.state["model"], {name: expected[name] for name in run.state["model"]})


def test_only_adapters_head_and_statistics_are_sent(tmp_path):
    run = experiment(tmp_path, FedIT(), model=LowRankMLP, rounds=1)
    rounds = record_rounds(run)
    run.fit()
    ((_, uploads, _),) = rounds
    factors = {f"encoder.{layer}.lora_{part}.default.weight" for layer in (1, 3) for part in "AB"}
    statistics = {f"encoder.4.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    sent = factors | statistics | {"head.weight", "head.bias"}
    assert all(upload.message.section("model").keys() == sent for upload in uploads)


@pytest.mark.parametrize("network", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_model_without_adapters_is_refused(network):
    with pytest.raises(ConfigError, match=r"^model: .* LoRA .* \w+"):
        FedIT().client_module(network)

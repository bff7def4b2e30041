"""FedEx-LoRA: the global model is the mean of the products (Singhal et al., ACL 2025)."""

import pytest
import torch
from adapters import ADAPTED, PLAIN, LowRankMLP, adapters_by_hand, factor, mean_product, weight_of
from experiments import UNEQUAL, experiment, finished, in_float64, record_rounds, same_bytes
from loops import assert_equals_loop
from peers import mean_by_hand

from fl_lightning.algorithms import FedExLoRA, FedIT
from fl_lightning.algorithms.adapters.fedex_lora import residual
from fl_lightning.algorithms.adapters.low_rank import stack_factors


def test_the_residual_is_the_error_of_the_mean_factors(float64):
    weights, factors = [1, 2, 5], [(torch.randn(4, 2), torch.randn(2, 3)) for _ in range(3)]
    b, a = (sum(w * pair[one] for w, pair in zip(weights, factors, strict=True)) / 8 for one in (0, 1))
    exact = sum(w * pair[0] @ pair[1] for w, pair in zip(weights, factors, strict=True)) / 8 - b @ a
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(residual(stack_factors(factors, weights), (b, a)), exact, rtol=0, atol=1e-12)


def corrected(before, ends, sizes, round):
    mean = mean_by_hand(ends, sizes)
    for path, scaling in ADAPTED.items():
        error = mean_product(ends, path, sizes) - mean[factor(path, "B")] @ mean[factor(path, "A")]
        mean[f"{path}.base_layer.weight"] += scaling * (error.T if path == "encoder.3" else error)
    return mean


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedExLoRA(), model=PLAIN, **UNEQUAL)
    expected = adapters_by_hand(run, corrected)
    run.fit()
    assert_equals_loop(run, run.state["model"], {name: expected[name] for name in run.state["model"]})


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@in_float64
def test_the_global_model_is_the_mean_of_the_clients_models(tmp_path, weighting):
    """For a layer whose weight is stored as (m, n) and is not square, and for a square one that is stored as (n, m)."""
    run = experiment(tmp_path, FedExLoRA(weighting=weighting), model=LowRankMLP, **UNEQUAL)
    rounds = record_rounds(run)
    run.fit()
    for before, uploads, after in rounds:
        models = [before["model"] | upload.message.section("model") for upload in uploads]
        sizes = [upload.n_samples if weighting == "samples" else 1 for upload in uploads]
        for path in ADAPTED:
            exact = sum(size * weight_of(one, path) for size, one in zip(sizes, models, strict=True)) / sum(sizes)
            torch.testing.assert_close(weight_of(after["model"], path), exact, rtol=0, atol=1e-12)


def test_uploads_have_no_frozen_weights_and_downloads_have_those_of_adapted_layers(tmp_path):
    run = experiment(tmp_path, FedExLoRA(), model=LowRankMLP, rounds=1)
    rounds = record_rounds(run)
    run.fit()
    ((before, uploads, _),) = rounds
    base = {f"{path}.base_layer.weight" for path in ADAPTED}
    assert {name for name in before["model"] if "base_layer" in name} == base
    assert not any("base_layer" in name for upload in uploads for name in upload.message.section("model"))


def test_with_one_participant_it_is_fedit_bit_for_bit(tmp_path):
    options = UNEQUAL | {"clients_per_round": 1}
    plain, exact = (
        finished(tmp_path / kind.__name__, kind(), model=LowRankMLP, **options).state["model"]
        for kind in (FedIT, FedExLoRA)
    )
    assert same_bytes({name: exact[name] for name in plain}, plain)


def test_the_final_model_and_a_client_have_the_changed_frozen_weights(tmp_path):
    run = finished(tmp_path, FedExLoRA(), model=LowRankMLP, **UNEQUAL)
    start, model = run.worker.template.backbone.state_dict(), run.client_module(0).backbone.state_dict()
    final = torch.load(tmp_path / "final" / "model.pt", weights_only=True)
    for path in ADAPTED:
        name = f"{path}.base_layer.weight"
        assert not torch.equal(run.state["model"][name], start[name])
        assert torch.equal(model[name], run.state["model"][name])
        assert torch.equal(final[name], run.state["model"][name])

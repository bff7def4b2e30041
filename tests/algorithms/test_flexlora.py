"""FlexLoRA: the best adapters of each client's rank (Bai et al., NeurIPS 2024)."""

import pytest
import torch
from adapters import ADAPTED, PLAIN, LowRankMLP, adapters_by_hand, factor, mean_product, whole_weights
from experiments import UNEQUAL, experiment, in_float64, record_rounds
from loops import assert_equals_loop
from peers import mean_by_hand

from fl_lightning.algorithms import FlexLoRA
from fl_lightning.algorithms.adapters.flexlora import svd_of_product, truncate

RANKS = {"none": [], "two": [3, 1]}


def decomposed(before, ends, sizes, round):
    """The singular value decomposition of the mean of the products, from the product itself."""
    mean = mean_by_hand(ends, sizes)
    for path in ADAPTED:
        u, s, v = torch.linalg.svd(mean_product(ends, path, sizes))
        mean[factor(path, "B")], mean[factor(path, "A")] = u[:, :3] * s[:3], v[:3]
    return mean


@pytest.mark.parametrize("ranks", RANKS)
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, ranks):
    """The signs of singular vectors are arbitrary, so that the products are compared."""
    ranks = RANKS[ranks]
    run = experiment(tmp_path, FlexLoRA(ranks=ranks), model=PLAIN, **UNEQUAL)
    expected = adapters_by_hand(run, decomposed, rank=lambda client: ranks[client % 2] if ranks else None)
    run.fit()
    frozen = run.worker.template.backbone.state_dict()
    assert_equals_loop(run, whole_weights(frozen | run.state["model"]), whole_weights(expected))


@pytest.mark.parametrize("shape", [(5, 4, 3), (4, 4, 2), (3, 6, 8)])
def test_the_decomposition_is_that_of_the_product(float64, shape):
    m, n, rank = shape
    b, a = torch.randn(m, rank), torch.randn(rank, n)
    u, s, v = svd_of_product(b, a)
    torch.testing.assert_close(u @ s.diag() @ v, b @ a, rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(b @ a)
    torch.testing.assert_close(s[: len(values)], values[: len(s)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_error_of_a_rank_is_that_of_the_discarded_singular_values(float64, rank):
    b, a = torch.randn(6, 5), torch.randn(5, 7)
    new_b, new_a = truncate((b, a), torch.zeros(6, rank), torch.zeros(rank, 7))
    values = torch.linalg.svdvals(b @ a)
    error = torch.linalg.matrix_norm(b @ a - new_b @ new_a)
    torch.testing.assert_close(error, values[rank:].square().sum().sqrt(), rtol=0, atol=1e-12)


def test_rows_without_a_singular_value_stay_as_they_were_and_can_be_trained(float64):
    b, a, before = torch.randn(6, 2), torch.randn(2, 7), torch.randn(4, 7)
    new_b, new_a = truncate((b, a), torch.randn(6, 4), before)
    torch.testing.assert_close(new_b @ new_a, b @ a, rtol=0, atol=1e-12)
    assert torch.equal(new_a[2:], before[2:])
    assert not new_b[:, 2:].any()


def test_factors_of_convolutions_keep_their_shapes(float64):
    b, a = torch.randn(6, 2, 1, 1), torch.randn(2, 3, 5, 5)
    new_b, new_a = truncate((b.flatten(1), a.flatten(1)), torch.zeros_like(b), torch.zeros_like(a))
    assert (new_b.shape, new_a.shape) == (b.shape, a.shape)
    torch.testing.assert_close(new_b.flatten(1) @ new_a.flatten(1), b.flatten(1) @ a.flatten(1), rtol=0, atol=1e-12)


@in_float64
def test_a_client_of_a_smaller_rank_gets_the_nearest_product_of_its_rank(tmp_path):
    run = experiment(tmp_path, FlexLoRA(ranks=[3, 1]), model=LowRankMLP, **UNEQUAL)
    rounds = record_rounds(run)
    run.fit()
    uploads = rounds[-1][1]
    frozen = run.worker.template.backbone.state_dict()
    for path in ADAPTED:
        sizes, models = zip(*((u.n_samples, u.message.section("model")) for u in uploads), strict=True)
        u, s, v = torch.linalg.svd(mean_product(models, path, sizes))
        for client in range(run.clients):
            rank = 1 if client % 2 else 3
            received = run.server.download(4, client).section("model")
            nearest = (u[:, :rank] * s[:rank]) @ v[:rank]
            product = received[factor(path, "B")] @ received[factor(path, "A")]
            assert received[factor(path, "A")].shape[0] == rank
            torch.testing.assert_close(product, nearest, rtol=0, atol=1e-12)
            whole = run.client_module(client).backbone.state_dict()
            assert whole[factor(path, "A")].shape == frozen[factor(path, "A")].shape
            assert not whole[factor(path, "A")][rank:].any()
            assert not whole[factor(path, "B")][:, rank:].any()

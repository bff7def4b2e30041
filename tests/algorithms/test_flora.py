"""FLoRA: the merged model is the mean of the clients' models, and adapters begin again (Wang et al., NeurIPS 2024)."""

import numpy as np
import pytest
import torch
from adapters import ADAPTED, PLAIN, LowRankMLP, adapters_by_hand, factor, mean_product, weight_of
from experiments import UNEQUAL, experiment, in_float64, record_rounds
from loops import assert_equals_loop
from peers import mean_by_hand

from fl_lightning.algorithms import FLoRA
from fl_lightning.core.seeding import Stream, derive

RANKS = {"none": [], "two": [3, 1]}


def merged(run):
    def serve(before, ends, sizes, round):
        mean, rng = mean_by_hand(ends, sizes), np.random.default_rng(derive(run.seed, Stream.AGGREGATION, round))
        for path, scaling in ADAPTED.items():
            product, name = mean_product(ends, path, sizes), f"{path}.base_layer.weight"
            mean[name] = before[name] + scaling * (product.T if path == "encoder.3" else product)
            a = mean[factor(path, "A")]
            drawn = rng.uniform(-1 / a.shape[1] ** 0.5, 1 / a.shape[1] ** 0.5, a.shape)
            mean[factor(path, "A")] = torch.from_numpy(drawn)
            mean[factor(path, "B")].zero_()
        return mean

    return serve


@pytest.mark.parametrize("ranks", RANKS)
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, ranks):
    ranks = RANKS[ranks]
    run = experiment(tmp_path, FLoRA(ranks=ranks), model=PLAIN, **UNEQUAL)
    expected = adapters_by_hand(run, merged(run), rank=lambda client: ranks[client % 2] if ranks else None)
    run.fit()
    assert_equals_loop(run, run.state["model"], {name: expected[name] for name in run.state["model"]})


@pytest.mark.parametrize("ranks", RANKS)
@in_float64
def test_the_global_model_is_the_mean_of_the_clients_models(tmp_path, ranks):
    run = experiment(tmp_path, FLoRA(ranks=RANKS[ranks]), model=LowRankMLP, **UNEQUAL)
    rounds = record_rounds(run)
    run.fit()
    drawn = set()
    for before, uploads, after in rounds:
        models = [before["model"] | upload.message.section("model") for upload in uploads]
        sizes = [upload.n_samples for upload in uploads]
        for path in ADAPTED:
            exact = sum(size * weight_of(one, path) for size, one in zip(sizes, models, strict=True)) / sum(sizes)
            torch.testing.assert_close(weight_of(after["model"], path), exact, rtol=0, atol=1e-12)
            assert not after["model"][factor(path, "B")].any()
            drawn.add(float(after["model"][factor(path, "A")][0, 0]))
    assert len(drawn) == 2 * len(rounds)


def test_a_client_sends_and_receives_only_the_rows_of_its_rank(tmp_path):
    run = experiment(tmp_path, FLoRA(ranks=[3, 1]), model=LowRankMLP, rounds=1, clients_per_round=6)
    rounds = record_rounds(run)
    run.fit()
    ((_, uploads, _),) = rounds
    sizes = {}
    for client, upload in enumerate(uploads):
        rank = 1 if client % 2 else 3
        for message in (upload.message, run.server.download(2, client)):
            shapes = {name: value.shape for name, value in message.section("model").items()}
            assert shapes[factor("encoder.1", "A")] == (rank, 64)
            assert shapes[factor("encoder.1", "B")] == (12, rank)
        sizes[rank] = upload.message.nbytes
    assert sizes[3] - sizes[1] == 4 * 2 * (64 + 12 + 12 + 12)

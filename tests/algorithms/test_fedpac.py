"""FedPAC: the heads' weights, the centroids, and a run as a loop by hand (Xu et al., ICLR 2023)."""

import copy
from itertools import combinations

import pytest
import torch
from experiments import UNEQUAL, descend, digits, experiment, in_float64, local_batches, same_bytes, samples_of
from loops import assert_equals_loop
from torch.nn import functional as F

from fl_lightning.algorithms import Centroids, FedPAC, FedRep
from fl_lightning.algorithms.personalized.fedpac import collaboration_weights, feature_statistics, simplex_minimum
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round


def statistics_by_hand(features, labels, classes=10):
    """Return `h` and `V / n` as the paper has them: with the shares, means and second moments of the classes."""
    means, variance = torch.zeros(classes, features.shape[1], dtype=torch.float64), 0.0
    for k in range(classes):
        own = features[labels == k].double()
        if len(own):
            share, mean = len(own) / len(labels), own.mean(dim=0)
            means[k] = share * mean
            variance += share * torch.trace(own.T @ own / len(own)) - share**2 * mean @ mean
    return means, variance / len(labels)


def weights_by_hand(i, means, variances):
    """Return client i's weights: the best minimum with `a >= 0` among those of all sets of clients."""
    count, best = len(means), (torch.inf, None)
    matrix = torch.diag(torch.stack(variances))
    for j in range(count):
        for k in range(count):
            matrix[j, k] += ((means[i] - means[j]) * (means[i] - means[k])).sum()
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = matrix[list(chosen)][:, list(chosen)]
            solution = torch.linalg.solve(part, torch.ones(size, dtype=torch.float64))
            weights = torch.zeros(count, dtype=torch.float64)
            weights[list(chosen)] = solution / solution.sum()
            if (weights >= 0).all():
                best = min(best, (float(weights @ matrix @ weights), weights), key=lambda pair: pair[0])
    return best[1]


def test_the_weights_are_the_minimum_on_a_fine_grid():
    for _ in range(20):
        root = torch.randn(3, 3, dtype=torch.float64)
        matrix = root @ root.T
        ticks = torch.arange(201, dtype=torch.float64) / 200
        grid = torch.stack([part.flatten() for part in torch.meshgrid(ticks, ticks, indexing="ij")], dim=1)
        grid = torch.cat([grid, 1 - grid.sum(dim=1, keepdim=True)], dim=1)
        grid = grid[grid[:, 2] >= -1e-12]
        values = ((grid @ matrix) * grid).sum(dim=1)
        found = simplex_minimum(matrix)
        assert (found >= 0).all()
        assert found.sum().item() == pytest.approx(1)
        assert found @ matrix @ found <= values.min() + 1e-12


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_statistics_and_weights_equal_those_by_hand(clients):
    """With missing classes, and a client whose samples are all of one class."""
    means, variances = [], []
    for client in range(clients):
        features = torch.rand(20, 6, dtype=torch.float64)
        labels = torch.randint(0, 3, (20,)) if client else torch.zeros(20, dtype=torch.int64)
        sums = torch.stack([features[labels == k].sum(dim=0) for k in range(4)])
        own = feature_statistics(sums, features.square().sum(), torch.tensor(20))
        for value, expected in zip(own, statistics_by_hand(features, labels, 4), strict=True):
            torch.testing.assert_close(value, expected)
        means.append(own[0])
        variances.append(own[1])
    found = collaboration_weights(torch.stack(means), torch.stack(variances))
    expected = torch.stack([weights_by_hand(i, means, variances) for i in range(clients)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_client_with_exact_statistics_keeps_its_own_head():
    means, variances = torch.rand(3, 4, 5), torch.tensor([0.1, 0.0, 0.1])
    torch.testing.assert_close(collaboration_weights(means, variances)[1], torch.tensor([0.0, 1, 0]).double())


def test_alike_clients_share_their_heads_by_their_variances():
    """Minimum of `Σ a² v`: weights in proportion to `1 / v`."""
    weights = collaboration_weights(torch.ones(2, 3, 4), torch.tensor([0.1, 0.3]))
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.25]] * 2).double())


def test_centroids_are_means_over_all_samples_and_stay_where_there_are_none():
    piece = Centroids()

    def upload(client, sums, counts):
        section = {"sums": torch.tensor(sums), "counts": torch.tensor(counts)}
        return Upload(client, Message.pack({"centroids": section}))

    one, other = upload(0, [[2.0], [0.0], [0.0]], [2.0, 0, 0]), upload(1, [[8.0], [3.0], [0.0]], [2.0, 1, 0])
    first = piece.merge({}, [one, other], Round(1, {}))
    assert first["values"].tolist() == [[2.5], [3.0], [0.0]]
    assert first["known"].tolist() == [True, True, False]
    second = piece.merge(first, [upload(2, [[0.0], [4.0], [6.0]], [0.0, 1, 1])], Round(2, {}))
    assert second["values"].tolist() == [[2.5], [4.0], [6.0]]
    assert second["known"].all()


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    lam, lr = 0.7, 0.2
    run = experiment(tmp_path, FedPAC(lam=lam), **UNEQUAL, trainer={"accelerator": "cpu", "max_epochs": 3})
    run.load()
    model, heads, centroids = copy.deepcopy(run.worker.template.backbone), {}, {}
    initial = copy.deepcopy(model.head.state_dict())
    for round in range(1, 4):
        clients = run.server.participants(round)
        ends, means, variances, sizes = [], [], [], []
        for client in clients:
            local = copy.deepcopy(model)
            local.head.load_state_dict(heads.get(client, initial))
            x, y = samples_of(run, client)
            with torch.no_grad():
                h, v = statistics_by_hand(local.encoder(x.double()), y)
            means.append(h)
            variances.append(v)
            sizes.append(len(y))
            for epoch, batches in enumerate(local_batches(run, round, client)):
                local.encoder.requires_grad_(epoch > 0)
                local.head.requires_grad_(epoch == 0)
                for batch, labels in batches:
                    features = local.encoder(batch.double())
                    loss = F.cross_entropy(local.head(features), labels)
                    for feature, label in zip(features, labels.tolist(), strict=True):
                        if label in centroids:
                            loss = loss + lam * (feature - centroids[label]).square().mean() / len(labels)
                    descend(local, loss, lr)
            ends.append(local)
        pooled = {}
        for client, end in zip(clients, ends, strict=True):
            x, y = samples_of(run, client)
            with torch.no_grad():
                for feature, label in zip(end.encoder(x.double()), y.tolist(), strict=True):
                    pooled.setdefault(label, []).append(feature)
        centroids |= {label: sum(features) / len(features) for label, features in pooled.items()}
        for i, client in enumerate(clients):
            weights = weights_by_hand(i, means, variances).tolist()
            parts = [end.head.state_dict() for end in ends]
            heads[client] = {n: sum(w * p[n] for w, p in zip(weights, parts, strict=True)) for n in initial}
        parts = [end.encoder.state_dict() for end in ends]
        mean = {n: sum(s * p[n] for s, p in zip(sizes, parts, strict=True)) / sum(sizes) for n in parts[0]}
        model.encoder.load_state_dict(mean)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    for client, head in heads.items():
        assert_equals_loop(run, run.state[f"head_{client}"], {f"head.{n}": value for n, value in head.items()})
    received = run.client_module(0).backbone
    torch.testing.assert_close(received.head.weight.detach(), heads[0]["weight"])


@pytest.mark.thorough
def test_one_client_without_alignment_trains_as_in_fedrep(tmp_path):
    one = UNEQUAL | {"scenario": digits(1), "clients_per_round": 1}
    runs = [experiment(tmp_path / type(kind).__name__, kind, **one) for kind in (FedPAC(lam=0.0), FedRep())]
    for run in runs:
        run.fit()
    pac, rep = (run.client_module(0).backbone.state_dict() for run in runs)
    assert same_bytes(pac, rep)

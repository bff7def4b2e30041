"""DisPFL compared with its algorithms (baselines: D1)."""

import copy
import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from experiments import UNEQUAL, NormMLP, descend, experiment, finished, in_float64, publish, samples_of
from loops import assert_equals_loop, steps_of
from peers import model_of, published
from torch.nn import functional as F

from fl_lightning.algorithms import DisPFL, PeerAlgorithm, Ring
from fl_lightning.algorithms.decentralized.dispfl import (
    erk_densities,
    mean_inside_masks,
    next_mask,
    random_mask,
    scatter_values,
    search_rate,
)
from fl_lightning.callbacks import RoundCallback
from fl_lightning.core.state_dicts import pack_mask, unpack_mask
from fl_lightning.models import MLP

PLAIN = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01)
SHAPES = {
    "conv": torch.Size([8, 3, 3, 3]),
    "norm": torch.Size([8]),
    "weight": torch.Size([64, 200]),
    "bias": torch.Size([200]),
    "scale": torch.Size([]),
}


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_erk_densities_keep_the_total_and_follow_the_shapes(ratio):
    densities = erk_densities(SHAPES, ratio)
    sizes = {name: shape.numel() for name, shape in SHAPES.items()}
    assert sum(densities[n] * sizes[n] for n in sizes) == pytest.approx(ratio * sum(sizes.values()))
    raw = {n: sum(s) / s.numel() if s else 1.0 for n, s in SHAPES.items()}
    sparse = {n: densities[n] / raw[n] for n in sizes if densities[n] < 1}
    assert max(sparse.values()) == pytest.approx(min(sparse.values()))
    assert all(max(sparse.values()) * raw[n] > 1 for n in sizes if densities[n] == 1)
    assert all(0 < d <= 1 for d in densities.values())


def test_erk_densities_of_random_shapes_are_at_most_one():
    rng = np.random.default_rng(0)
    for _ in range(200):
        shapes = {str(i): torch.Size(rng.integers(1, 30, rng.integers(1, 5)).tolist()) for i in range(5)}
        for ratio in (1.0, 1.5):
            assert set(erk_densities(shapes, ratio).values()) == {1.0}
        assert max(erk_densities(shapes, 1 - 1e-9).values()) <= 1


def test_random_masks_have_the_given_density_and_are_never_empty():
    one, other = (random_mask(torch.Size([20, 10]), 0.3) for _ in range(2))
    assert one.sum() == other.sum() == 60
    assert not torch.equal(one, other)
    assert random_mask(torch.Size([5]), 0.01).sum() == 1
    assert random_mask(torch.Size([]), 1.0).item()


def test_the_search_rate_falls_to_zero_by_a_cosine():
    assert [search_rate(t, 0.4, 10) for t in (0, 5, 10, 99)] == pytest.approx([0.4, 0.2, 0.0, 0.0])
    assert search_rate(3, 0.4, 10) == pytest.approx(0.2 * (1 + math.cos(0.3 * math.pi)))


def test_the_next_mask_drops_the_smallest_weights_and_adds_the_highest_scores():
    weights = torch.tensor([[5.0, -0.1, 3.0, 0.2], [-4.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    score = torch.tensor([[0.0, 7.0, 0.0, 1.0], [9.0, 2.0, 8.0, 1.5]])
    # of 5, ceil(0.3 * 5) = 2 go: -0.1 and 0.2; the best of what is out are 8 and 7, the latter has just been dropped
    assert next_mask(weights, mask, score, 0.3).tolist() == [[True, True, True, False], [True, False, True, False]]
    assert mask.sum() == 5  # the old mask is not changed
    assert mask[0].all()
    assert torch.equal(next_mask(weights, mask, score, 0.0), mask)
    full = torch.ones(3, 3, dtype=torch.bool)
    assert next_mask(torch.randn(3, 3), full, torch.rand(3, 3), 0.5).all()
    zeros = next_mask(torch.zeros(6), torch.tensor([True, False] * 3), torch.tensor([0.0, 1, 0, 1, 0, 1]), 1.0)
    assert zeros.tolist() == [False, True] * 3


def test_entries_are_averaged_over_the_masks_that_contain_them():
    w = torch.randn(3, 4, 5)
    m = torch.rand(3, 4, 5) < 0.4
    mean = mean_inside_masks([a * b for a, b in zip(w, m, strict=True)], list(m))
    for i, j in np.ndindex(4, 5):
        held = [w[k, i, j].item() for k in range(3) if m[k, i, j]]
        assert mean[i, j].item() == pytest.approx(sum(held) / len(held) if held else 0.0, rel=1e-6)
    assert torch.equal(mean_inside_masks([w[0] * m[0]], [m[0]]), w[0] * m[0])


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 8)])
def test_masks_are_packed_to_bits(shape):
    mask = torch.rand(shape) < 0.5
    bits = pack_mask(mask)
    assert bits.dtype == torch.uint8
    assert bits.numel() == math.ceil(mask.numel() / 8)
    assert torch.equal(unpack_mask(bits, mask.shape), mask)
    weights = torch.randn(shape) * mask
    assert torch.equal(scatter_values(weights[mask], mask), weights)


def published_weights(run, client):
    """Return a client's published weights and the mask that it trained with."""
    tensors, _ = published(run, client)
    shapes = {name: p.shape for name, p in run.worker.template.backbone.named_parameters()}
    masks = {name: unpack_mask(tensors[f"masks/{name}"], shape) for name, shape in shapes.items()}
    return {name: scatter_values(tensors[f"values/{name}"], mask) for name, mask in masks.items()}, masks


def next_masks_of(run, client):
    """Return a client's masks of its next round; before round 1, they are the published ones."""
    if "next_masks" not in run.memory[client]:
        return published_weights(run, client)[1]
    shapes = {name: p.shape for name, p in run.worker.template.backbone.named_parameters()}
    return {name: unpack_mask(run.memory[client]["next_masks"][name], shape) for name, shape in shapes.items()}


class Published(RoundCallback):
    """Keep what each client has published, and its next masks, before each round and at the end."""

    def __init__(self):
        self.rounds = []

    def on_round_start(self, run, participants):
        clients = range(run.clients)
        self.rounds.append(([published_weights(run, k) for k in clients], [next_masks_of(run, k) for k in clients]))

    def on_fit_end(self, run):
        self.on_round_start(run, ())


def test_before_round_1_each_client_has_the_initial_weights_in_its_own_mask(tmp_path):
    run = experiment(tmp_path, DisPFL(dense_ratio=0.3))
    run.check()
    publish(run)
    start = run.worker.template.backbone.state_dict()
    size = sum(value.numel() for value in start.values())
    seen = []
    for client in range(6):
        weights, masks = published_weights(run, client)
        assert sum(int(m.sum()) for m in masks.values()) == pytest.approx(0.3 * size, abs=len(masks))
        for name, value in start.items():
            assert torch.equal(weights[name], value * masks[name])
        now = next_masks_of(run, client)
        assert all(torch.equal(now[name], masks[name]) for name in masks)
        seen.append(masks["encoder.1.weight"])
    assert not any(torch.equal(seen[0], other) for other in seen[1:])
    module = run.worker.modules.receive(run.server.task(1, 0, run.server.download(1, 0)))
    for name, p in module.backbone.named_parameters():  # the mean of equal weights
        assert torch.equal(p.detach(), start[name] * published_weights(run, 0)[1][name])


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """With regrowth by gradients, from the masks that the run draws before round 1."""
    rate, rounds = 0.4, 10
    start, run = (
        experiment(
            tmp_path / name, DisPFL(dense_ratio=0.4, prune_rate=rate, search_rounds=rounds, graph=Ring()), **UNEQUAL
        )
        for name in "ab"
    )
    start.check()
    publish(start)
    local = copy.deepcopy(start.worker.template.backbone)
    trained, masks = zip(*(published_weights(start, k) for k in range(4)), strict=True)
    trained, masks, following = list(trained), list(masks), [next_masks_of(start, k) for k in range(4)]
    for round in range(1, 4):
        weights, used = list(trained), list(masks)
        alpha = rate / 2 * (1 + math.cos(math.pi * (round - 1) / rounds))
        for k in start.server.participants(round):
            group = [(k - 1) % 4, k, (k + 1) % 4]
            masks[k], following[k] = following[k], {}
            with torch.no_grad():
                for name, p in local.named_parameters():
                    total, count = sum(weights[j][name] for j in group), sum(used[j][name].double() for j in group)
                    p.copy_(total / count.clamp(min=1) * masks[k][name])
            for x, y in steps_of(start, round, k):
                gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
                with torch.no_grad():
                    for (name, p), g in zip(local.named_parameters(), gradients, strict=True):
                        p -= 0.2 * g * masks[k][name]
            trained[k] = {name: p.detach().clone() for name, p in local.named_parameters()}
            x, y = samples_of(start, k)
            gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
            for (name, weight), g in zip(trained[k].items(), gradients, strict=True):
                inside = masks[k][name].flatten()
                held = [i for i in range(len(inside)) if inside[i]]
                smallest = sorted(held, key=weight.abs().flatten().tolist().__getitem__)
                kept = set(smallest[math.ceil(alpha * len(held)) :])
                free = [i for i in range(len(inside)) if i not in kept]
                steepest = sorted(free, key=g.abs().flatten().tolist().__getitem__, reverse=True)
                kept |= set(steepest[: len(held) - len(kept)])
                following[k][name] = torch.tensor([i in kept for i in range(len(inside))]).view_as(weight)
    run.fit()
    for k in range(4):
        weights, used = published_weights(run, k)
        assert_equals_loop(run, weights, trained[k])
        assert all(torch.equal(used[name], mask) for name, mask in masks[k].items())
        assert all(torch.equal(next_masks_of(run, k)[name], mask) for name, mask in following[k].items())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("regrow", ["gradient", "random", "none"])
@in_float64
def test_a_round_equals_the_algorithm_by_hand(tmp_path, regrow):
    lr, rate, cpu = 0.1, 0.4, {"accelerator": "cpu", "max_epochs": 2}
    method = DisPFL(dense_ratio=0.4, prune_rate=rate, search_rounds=10, regrow=regrow, graph=Ring())
    options = {"clients_per_round": 6, "rounds": 2, "batch_size": 10_000, "optimizer": PLAIN, "trainer": cpu}
    run = experiment(tmp_path, method, callbacks=[seen := Published()], **options)
    run.fit()
    for round, ((before, masks), (after, following_masks)) in enumerate(pairwise(seen.rounds), start=1):
        for k in (0, 3):
            x, y = samples_of(run, k)
            around = [k, (k - 1) % 6, (k + 1) % 6]
            network = run.worker.modules.build().backbone
            with torch.no_grad():
                for name, p in network.named_parameters():
                    total = sum(before[j][0][name].double() for j in around)
                    count = sum(before[j][1][name].double() for j in around)
                    p.copy_(torch.where(count > 0, total / count, 0.0) * masks[k][name])
            for _ in range(2):
                descend(network, torch.nn.functional.cross_entropy(network(x), y), lr, 0.01)
                with torch.no_grad():
                    for name, p in network.named_parameters():
                        p *= masks[k][name]
            weights, trained_in = after[k]
            torch.nn.functional.cross_entropy(network(x), y).backward()
            alpha = rate / 2 * (1 + math.cos(math.pi * (round - 1) / 10))
            for name, p in network.named_parameters():
                assert torch.equal(trained_in[name], masks[k][name])
                torch.testing.assert_close(weights[name], p.detach(), rtol=1e-9, atol=1e-9)
                following = following_masks[k][name]
                assert following.sum() == trained_in[name].sum()
                few = math.ceil(alpha * int(following.sum()))
                if regrow == "none":
                    assert torch.equal(following, trained_in[name])
                    continue
                smallest = sorted(p.detach().abs()[trained_in[name]].tolist())[few - 1]
                stays = trained_in[name] & (p.detach().abs() > smallest + 1e-5)
                assert following[stays].all()
                taken = following & ~(trained_in[name] & (p.detach().abs() > smallest + 1e-5))
                left = ~following
                if regrow == "gradient" and left.any():
                    assert p.grad.abs()[taken].min() >= p.grad.abs()[left].max() - 1e-4
    if regrow == "random":
        assert not torch.equal(next_masks_of(run, 0)["encoder.1.weight"], masks[0]["encoder.1.weight"])


@pytest.mark.thorough
@in_float64
def test_with_full_masks_it_is_gossip_averaging(tmp_path):
    options = {"model": NormMLP, "rounds": 2}
    run = finished(tmp_path / "one", DisPFL(dense_ratio=1.0, n_com=2), **options)
    other = finished(tmp_path / "other", PeerAlgorithm(n_com=2, weighting="uniform"), **options)
    for client in range(6):
        weights, masks = published_weights(run, client)
        assert all(mask.all() for mask in masks.values())
        assert all(mask.all() for mask in next_masks_of(run, client).values())
        theirs = model_of(published(other, client)[0])
        ours = weights | model_of(published(run, client)[0])
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    ],
)
def test_weight_decay_and_kept_momentum_do_not_leave_the_mask(tmp_path, optimizer):
    method, trained = DisPFL(dense_ratio=0.3), []
    upload = method.upload

    def looked_at(module, *rest):
        if module.context.round:
            trained.append([(p.detach().clone(), module.masks[name]) for name, p in module.backbone.named_parameters()])
        return upload(module, *rest)

    method.upload = looked_at
    cpu = {"accelerator": "cpu", "max_epochs": 1, "gradient_clip_val": 1.0}
    experiment(tmp_path, method, optimizer=optimizer, trainer=cpu, optimizer_state="kept").fit()
    assert len(trained) == 12
    for weights, mask in (pair for one in trained for pair in one):
        assert (weights[~mask] == 0).all()
        assert (weights[mask] != 0).any()


def test_gradients_outside_the_mask_are_zero_before_they_are_clipped():
    module = DisPFL().client_module(MLP(in_shape=(4,), num_classes=3))
    parameters = dict(module.backbone.named_parameters())
    module.masks = {name: torch.arange(p.numel()).view(p.shape) % 3 > 0 for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = torch.full_like(p, 2.0)
    module.on_before_optimizer_step(torch.optim.SGD(parameters.values(), lr=1.0))
    assert all(torch.equal(p.grad, 2.0 * module.masks[name]) for name, p in parameters.items())


def test_the_evaluated_and_the_returned_model_are_the_trained_one(tmp_path):
    run = finished(tmp_path, DisPFL(dense_ratio=0.3), rounds=1, clients_per_round=6)
    assert "global/acc" not in run.csv.rows[-1]
    assert run.test()["client/acc_mean"] == pytest.approx(run.csv.rows[-1]["client/acc_mean"])
    weights, _ = published_weights(run, 2)
    module = run.client_module(2)
    assert all(torch.equal(p.detach(), weights[name]) for name, p in module.backbone.named_parameters())
    module.masks = next_masks_of(run, 2)
    module.on_fit_start()
    for name, p in module.backbone.named_parameters():
        assert torch.equal(p.detach(), weights[name] * next_masks_of(run, 2)[name])


def test_the_bytes_of_sparse_models(tmp_path):
    run = finished(tmp_path, DisPFL(dense_ratio=0.3, n_com=2), rounds=1)
    sizes = {name: p.shape for name, p in run.worker.template.backbone.named_parameters()}
    densities = erk_densities(sizes, 0.3)
    values = sum(max(1, round(densities[n] * s.numel())) for n, s in sizes.items())
    bits = sum(math.ceil(s.numel() / 8) for s in sizes.values())
    assert run.csv.rows[-1]["comm/down_bytes"] == 4 * 2 * (4 * values + bits + 8)

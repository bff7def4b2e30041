"""FedKD: distillation and compression against brute force, its identities, exact messages, and whole runs by hand."""

import copy

import numpy as np
import pytest
import torch
from experiments import UNEQUAL, NormMLP, descend, experiment, finished, in_float64, record_rounds, same_bytes
from loops import assert_equals_loop, steps_of
from peers import mean_by_hand
from test_fml import MEME, SMALL, kl_div
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import FedKD
from fl_lightning.algorithms.personalized import fedkd as kd
from fl_lightning.algorithms.personalized import fml

# --- Distillation ---


@in_float64
def test_distillation_is_weighted_by_the_inverse_of_both_losses():
    own, shared = (torch.tensor(value, requires_grad=True) for value in (0.7, 1.8))
    weight = kd.adaptive_weight(own, shared)
    assert float(weight) == pytest.approx(1 / 2.5, rel=1e-15)
    assert not weight.requires_grad
    assert kd.adaptive_weight(0 * own, 0 * shared).isfinite()


@in_float64
def test_the_hidden_loss_compares_transformed_features():
    own, shared, transform = torch.randn(5, 4), torch.randn(5, 3), torch.randn(4, 3)
    total = 0.0
    for h, s in zip(own, shared, strict=True):
        total += sum((h[i] - sum(transform[i, j] * s[j] for j in range(3))) ** 2 for i in range(4))
    torch.testing.assert_close(kd.hidden_loss(own, shared, transform), total / 20)


@in_float64
def test_the_output_loss_is_the_divergence_from_the_teacher():
    logits, teacher = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = fml.output_loss(logits, teacher)
    torch.testing.assert_close(loss, kl_div(logits, teacher))
    loss.backward()
    assert teacher.grad is None


# --- Compression ---


@pytest.mark.parametrize(("round", "expected"), [(1, 0.9), (2, 0.91), (6, 0.95), (11, 1.0), (12, 1.0), (1000, 1.0)])
def test_the_energy_grows_linearly(round, expected):
    assert kd.energy_threshold(round, 10, 0.9, 1.0) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("energy", [0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_factors_have_the_smallest_rank_that_keeps_the_energy(shape, energy):
    matrix = torch.randn(*shape, dtype=torch.float64)
    left, right = kd.truncated_factors(matrix, energy)
    rank, values = left.shape[1], np.linalg.svd(matrix.numpy(), compute_uv=False)
    total = float((matrix**2).sum())
    assert right.shape == (rank, shape[1])
    assert (values[:rank] ** 2).sum() >= energy * total * (1 - 1e-12)
    assert rank == 1 or (values[: rank - 1] ** 2).sum() < energy * total
    lost = float(((left @ right - matrix) ** 2).sum())  # the smallest error of this rank
    assert lost == pytest.approx((values[rank:] ** 2).sum(), rel=1e-9, abs=1e-12)


def test_a_rank_with_exactly_the_energy_is_enough():
    left, right = kd.truncated_factors(torch.eye(4, dtype=torch.float64), 0.5)
    assert (left.shape, right.shape) == ((4, 2), (2, 4))


def test_factors_of_the_same_size_are_not_sent():
    change = {"w": torch.tensor([[1.0, 2.0], [2.0, 4.0]])}
    sections = kd.compress(change, {"w": torch.zeros(2, 2)}, 0.9)
    assert not sections["factors"]
    assert same_bytes(sections["model"], change)


@pytest.mark.parametrize("rows", [3, 0])
def test_a_matrix_of_zeros_has_empty_factors(rows):
    left, right = kd.truncated_factors(torch.zeros(rows, 4, dtype=torch.float64), 0.9)
    assert (left.shape, right.shape) == ((rows, 0), (0, 4))


def entries():
    """Return entries of a network before and after a change of rank 2, one of them a kernel, with others."""
    before = {
        "matrix": torch.randn(20, 30),
        "kernel": torch.randn(8, 4, 3, 3),
        "bias": torch.randn(20),
        "steps": torch.tensor(3),
        "small": torch.randn(2, 2),
    }
    change = {name: torch.randn_like(value) if value.is_floating_point() else 1 for name, value in before.items()}
    change["matrix"] = torch.randn(20, 2) @ torch.randn(2, 30)
    change["kernel"] = (torch.randn(8, 2) @ torch.randn(2, 36)).view(8, 4, 3, 3)
    return before, {name: value + change[name] for name, value in before.items()}


def test_compressed_entries_are_restored():
    before, after = entries()
    sections = kd.compress(after, before, 0.9999999)
    assert list(sections["model"]) == ["bias", "steps", "small"]
    assert {name: tuple(value.shape) for name, value in sections["factors"].items()} == {
        "matrix/left": (20, 2),
        "matrix/right": (2, 30),
        "kernel/left": (8, 2),
        "kernel/right": (2, 36),
    }
    restored = kd.decompress(sections, before)
    assert list(restored) == list(before)
    for name, value in restored.items():
        torch.testing.assert_close(value, after[name], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(restored[name], after[name]) for name in sections["model"])


def test_with_all_energy_or_without_finite_numbers_entries_are_sent_as_they_are():
    before, after = entries()
    whole = kd.compress(after, before, 1.0)
    assert not whole["factors"]
    assert same_bytes(kd.decompress(whole, {}), after)
    after["matrix"][0, 0] = torch.nan
    assert "matrix" in kd.compress(after, before, 0.9)["model"]


# --- The method ---


def compressed(after, before, energy):
    """Return what the receiver has after a compressed message, entry by entry with NumPy."""
    restored = {}
    for name, value in after.items():
        restored[name] = value.clone()
        if value.dim() < 2:
            continue
        u, s, v = np.linalg.svd((value - before[name]).numpy(), full_matrices=False)
        shares = np.cumsum(s**2) / np.sum(s**2)
        rank = next(k for k in range(1, len(s) + 1) if shares[k - 1] >= energy)
        if rank * sum(value.shape) < value.numel():
            restored[name] = before[name] + torch.from_numpy((u[:, :rank] * s[:rank]) @ v[:rank])
    return restored


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shared_model", [None, MEME])
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, shared_model):
    strength, lr, start, end = 0.7, 0.2, 0.6, 0.9
    method = FedKD(
        distillation=strength, energy_start=start, energy_end=end, energy_rounds=4, shared_model=shared_model
    )
    run = experiment(tmp_path, method, **UNEQUAL)
    run.load()
    module = run.worker.template
    shared, initial, own = copy.deepcopy(module.backbone), (module.own, module.transform), {}
    assert initial[1].weight.shape == (16, shared.feature_dim)
    for round, energy in ((1, 0.6), (2, 0.675), (3, 0.75)):
        ends, sizes, before = [], [], copy.deepcopy(shared.state_dict())
        for client in run.server.participants(round):
            w, (v, transform) = copy.deepcopy(shared), own.setdefault(client, copy.deepcopy(initial))
            for x, y in steps_of(run, round, client):
                (hidden_w, hidden_v), tasks = (w.encoder(x), v.encoder(x)), []
                logits = w.head(hidden_w), v.head(hidden_v)
                tasks = [F.cross_entropy(one, y) for one in logits]
                weight = strength / (tasks[0].item() + tasks[1].item())
                fixed = transform.weight.detach().clone()
                loss_w = tasks[0] + weight * kl_div(logits[0], logits[1].detach())
                loss_w = loss_w + weight * (hidden_v.detach() - hidden_w @ fixed.T).square().mean()
                loss_v = tasks[1] + weight * kl_div(logits[1], logits[0].detach())
                loss_v = loss_v + weight * (hidden_v - transform(hidden_w.detach())).square().mean()
                descend(w, loss_w, lr)
                descend(nn.ModuleList([v, transform]), loss_v, lr)
            ends.append(compressed(w.state_dict(), before, energy))
            sizes.append(len(run.data.shards[client].train))
        shared.load_state_dict(compressed(mean_by_hand(ends, sizes), before, energy))
    run.fit()
    assert_equals_loop(run, run.state["model"], shared.state_dict(), 1e-10)
    for client, (v, transform) in own.items():
        assert_equals_loop(run, run.memory[client]["own_network"], v.state_dict(), 1e-10)
        assert_equals_loop(run, run.memory[client]["transform"], transform.state_dict(), 1e-10)


def test_a_client_restores_exactly_the_servers_model(tmp_path):
    run = experiment(tmp_path, FedKD(energy_start=0.7), model=NormMLP, clients_per_round=3, rounds=3)
    run.load()
    rounds = record_rounds(run)
    run.fit()
    last = set(run.server.participants(3))
    sizes = {}
    for client in range(6):
        message = run.server.download(4, client)
        sizes[client] = message.nbytes
        assert bool(message.section("factors")) == (client in last)
        restored = kd.decompress(message.sections, run.memory.get(client, {}).get("received", {}))
        assert same_bytes(restored, run.state["model"])
        assert same_bytes(
            dict(sorted(run.starting_module(client).backbone.state_dict().items())), dict(sorted(restored.items()))
        )
    assert max(sizes[client] for client in last) < min(sizes[client] for client in set(sizes) - last)
    for before, uploads, _ in rounds:
        for upload in uploads:
            dense, factors = (upload.message.section(name) for name in ("model", "factors"))
            numbers = sum(value.nbytes for value in (*dense.values(), *factors.values()))
            assert upload.message.nbytes == numbers + 8
            assert dense.keys() | {name.rpartition("/")[0] for name in factors} == before["model"].keys()
    sent = sum(upload.message.nbytes for upload in rounds[-1][1])
    assert run.csv.rows[-1]["comm/up_bytes"] == sent
    whole = sum(value.nbytes for value in run.state["model"].values())
    assert sent < 3 * (whole + 8)


def test_a_new_client_receives_the_whole_model(tmp_path):
    run = finished(tmp_path, FedKD(energy_start=0.7), model=SMALL, rounds=2)
    state = run.algorithm.add_client(run.state, {})
    message = run.algorithm.download(state, 6, np.random.default_rng(0))
    assert same_bytes(message.section("model"), run.state["model"])


def test_all_losses_are_recorded_under_their_names(tmp_path):
    run = experiment(tmp_path, FedKD(), model=SMALL, rounds=1)
    run.load()
    module = run.worker.template
    assert module.loss_names == ["ce", "distillation", "hidden", "own_ce", "own_distillation", "own_hidden"]
    result = run.worker.run(run.server.task(1, 0, run.server.download(1, 0)))
    assert list(result.losses) == ["loss", *module.loss_names]
    assert all(value > 0 for value in result.losses.values())
    assert FedKD(distillation=0.0).client_module(SMALL((1, 8, 8), 10)).loss_names == ["ce", "own_ce"]

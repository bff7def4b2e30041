"""AFL's projection and weights against independent computations, and its identity with FedAvg (Mohri et al. 2019)."""

import copy
import itertools

import pytest
import torch
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, record_rounds, same_bytes
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, cross_entropy_steps, loss_by_hand, steps_of
from peers import mean_by_hand

from fl_lightning import Message
from fl_lightning.algorithms import AFL, AgnosticMean, FedAvg
from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.algorithms.global_model.afl import ascend, project_to_simplex
from fl_lightning.client.module import ClientModule
from fl_lightning.client.received_loss import received_loss
from fl_lightning.core.errors import NonFiniteError
from fl_lightning.core.message import Upload
from fl_lightning.core.round import Round
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric


def projected_by_hand(values, total=1.0):
    """Return the nearest of the projections onto the faces of the simplex, one for each set of positive entries."""
    best, nearest = None, float("inf")
    for size in range(1, len(values) + 1):
        for face in itertools.combinations(range(len(values)), size):
            shift = (total - sum(values[k] for k in face)) / size
            point = [values[k] + shift if k in face else 0.0 for k in range(len(values))]
            distance = sum((a - b) ** 2 for a, b in zip(point, values, strict=True))
            if min(point) >= -1e-12 and distance < nearest:
                best, nearest = point, distance
    return best


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=6), total=st.floats(0.01, 4))
def test_the_projection_is_the_nearest_point_of_all_faces(values, total):
    found = project_to_simplex(torch.tensor(values, dtype=torch.float64), total)
    expected = torch.tensor(projected_by_hand(values, total), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert (found >= 0).all()
    assert float(found.sum()) == pytest.approx(total)


def test_a_point_of_the_simplex_is_its_own_projection():
    point = torch.tensor([0.25, 0.5, 0.0, 0.25])
    assert project_to_simplex(point).tolist() == point.tolist()
    assert ascend(point, torch.ones(4), 0.25).tolist() == point.tolist()  # equal losses
    assert ascend(point, torch.tensor([1.0, 9.0, 1.0, 1.0]), 1.0).tolist() == [0, 1, 0, 0]


@in_float64
@pytest.mark.parametrize("initial", ["uniform", "samples"])
def test_a_run_equals_a_loop_by_hand(tmp_path, initial):
    """Three of four clients take part in each round. Their part of λ is projected; that of the others stays."""
    run = experiment(tmp_path, AFL(weight_lr=0.1, initial_weights=initial), **UNEQUAL, rounds=4)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    sizes = [len(shard.train) for shard in run.data.shards]
    weights = [size / sum(sizes) if initial == "samples" else 1 / 4 for size in sizes]
    used = []
    for round in range(1, 5):
        participants, ends, losses = list(run.server.participants(round)), [], []
        for client in participants:
            losses.append(loss_by_hand(run, client, model))
            local = copy.deepcopy(model)
            cross_entropy_steps(local, steps_of(run, round, client))
            ends.append(local.state_dict())
        own = [weights[client] for client in participants]
        used.append([weight / sum(own) for weight in own])
        model.load_state_dict(mean_by_hand(ends, own))
        moved = [weight + 0.1 * loss for weight, loss in zip(own, losses, strict=True)]
        for client, weight in zip(participants, projected_by_hand(moved, sum(own)), strict=True):
            weights[client] = weight
    rounds = record_rounds(run)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    shares = run.state["agnostic"]["weight"] / run.state["agnostic"]["weight"].sum()
    assert shares.tolist() == pytest.approx(weights, rel=1e-9)
    assert max(weights) - min(weights) > 0.1
    for (_, uploads, after), expected in zip(rounds, used, strict=True):
        assert after["weights"]["client"].tolist() == [upload.client for upload in uploads]
        assert after["weights"]["value"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("initial", ["uniform", "samples"])
def test_with_weight_lr_0_it_is_fedavg(tmp_path, initial):
    options = UNEQUAL | {"model": NormMLP}
    ours = finished(tmp_path / "ours", AFL(weight_lr=0.0, initial_weights=initial), **options)
    plain = finished(tmp_path / "plain", FedAvg(weighting=initial), **options)
    assert same_bytes(ours.state["model"], plain.state["model"])
    assert len(set(ours.state["agnostic"]["weight"].tolist())) == (1 if initial == "uniform" else 4)


def one_round(weights, weight_lr=0.1):
    """Return the state after a round in which clients 0 and 1 send the models 0 and 1, and the losses 1 and 3."""
    before = {"model": {"w": torch.tensor([7.0])}, "agnostic": {"weight": torch.tensor(weights, dtype=torch.float64)}}
    uploads = [
        Upload(k, Message.pack({"model": {"w": torch.tensor([float(k)])}}, n_samples=1, received_loss=1.0 + 2 * k))
        for k in (0, 1)
    ]
    aggregator, round = AgnosticMean(weight_lr), Round(1, before)
    return before | aggregator.finish(fold_all(aggregator, uploads, round), round, {})


def test_participants_that_all_have_weight_0_do_not_change_the_model():
    state = one_round([0.0, 0.0, 3.0])
    assert state["model"]["w"].tolist() == [7.0]
    assert state["agnostic"]["weight"].tolist() == [0.0, 0.0, 3.0]
    assert state["weights"]["value"].tolist() == [0.0, 0.0]


def test_a_round_uses_the_weights_before_its_step():
    state = one_round([1.0, 1.0, 2.0])
    assert state["model"]["w"].tolist() == [0.5]
    assert state["agnostic"]["weight"].tolist() == pytest.approx([0.6, 1.4, 2.0])


def test_weights_keep_all_bits_without_a_step():
    weights = [1.0, 1.0, 47.0]
    assert any(weight / sum(weights) * sum(weights) != weight for weight in weights)
    assert one_round(weights, weight_lr=0.0)["agnostic"]["weight"].tolist() == weights


def test_a_loss_that_is_not_finite_is_refused():
    module = ClientModule(MLP(in_shape=(4,), num_classes=2))
    module.notes = {"losses": {"received_loss": torch.tensor(torch.inf)}}
    with pytest.raises(NonFiniteError):
        received_loss(module)

"""FedDG-GA's weights against loops over clients, and its identity with FedAvg (Zhang et al., CVPR 2023)."""

import copy

import pytest
import torch
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, record_rounds, same_bytes
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, cross_entropy_steps, loss_by_hand, steps_of
from peers import mean_by_hand

from fl_lightning.algorithms import FedAvg, FedDGGA, GeneralizationAdjustment
from fl_lightning.algorithms.global_model.feddgga import adjusted_weights
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round

pytestmark = pytest.mark.numeric


def adjusted_by_hand(weights, gaps, step, reference=False):
    """Return the next weights of all clients, one client after another. `gaps` has those that are known."""
    mean = 0.0 if reference else sum(gaps.values()) / max(1, len(gaps))
    largest = max((abs(gap - mean) for gap in gaps.values()), default=0.0)
    if largest == 0 or step == 0:
        return list(weights)
    step = step / len(weights) if reference else step
    moved = [
        min(1.0, max(0.0, weight + step * (gaps[k] - mean) / largest)) if k in gaps else weight
        for k, weight in enumerate(weights)
    ]
    return [weight / sum(moved) for weight in moved]


GAPS = st.lists(st.tuples(st.floats(0, 1), st.none() | st.floats(-5, 5)), min_size=1, max_size=6)


@given(clients=GAPS, step=st.floats(0, 1), reference=st.booleans())
def test_weights_equal_a_loop_over_clients_and_are_shares(clients, step, reference):
    raw = torch.tensor([weight + 0.01 for weight, _ in clients], dtype=torch.float64)
    weights = raw / raw.sum()
    gaps = {k: gap for k, (_, gap) in enumerate(clients) if gap is not None}
    given_gaps = torch.tensor([gaps.get(k, float("nan")) for k in range(len(clients))], dtype=torch.float64)
    share = step / len(clients) if reference else step
    found = adjusted_weights(weights, given_gaps, share, centred=not reference)
    expected = torch.tensor(adjusted_by_hand(weights.tolist(), gaps, step, reference), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # gaps that are almost equal cancel
    assert (found >= 0).all()
    assert float(found.sum()) == pytest.approx(1)


def test_a_client_with_a_gap_above_the_mean_gets_a_larger_weight():
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    found = adjusted_weights(weights, torch.tensor([2.0, 1.0, 0.0]), 0.1)
    assert found.tolist() == pytest.approx([1 / 3 + 0.1, 1 / 3, 1 / 3 - 0.1])
    assert adjusted_weights(weights, torch.tensor([1.0, 1.0, 1.0]), 0.1) is weights
    assert adjusted_weights(weights, torch.tensor([torch.nan, torch.inf, torch.nan]), 0.1) is weights
    assert adjusted_weights(weights, torch.tensor([3.0, 1.0, 0.0]), 1.0)[2] == 0  # never negative


def test_the_step_decreases_linearly_to_zero():
    steps = [GeneralizationAdjustment(0.5, 4).step(round) for round in range(1, 7)]
    assert steps == [0.375, 0.25, 0.125, 0.0, 0.0, 0.0]


def test_the_authors_code_decreases_the_step_at_the_end_of_its_rounds_from_0():
    """`refine_weight_dict_by_GA` is called at the end of round i with `d - (i - 1) d / R`, for round `r = i + 2`."""
    method = GeneralizationAdjustment(0.5, 4, reference=True)
    assert [method.step(i + 2) for i in range(4)] == [0.5 - (i - 1) * 0.5 / 4 for i in range(4)]


@in_float64
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("initial", ["uniform", "samples"])
def test_a_run_equals_a_loop_by_hand(tmp_path, reference, initial):
    """Three of four clients take part in each round, so some gaps are unknown or older."""
    method = FedDGGA(step_size=0.9, decay_rounds=5, reference=reference, initial_weights=initial)
    run = experiment(tmp_path, method, **UNEQUAL, rounds=4)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    sizes = [len(shard.train) for shard in run.data.shards]
    weights = [size / sum(sizes) if initial == "samples" else 1 / 4 for size in sizes]
    own_losses: dict[int, float] = {}
    for round in range(1, 5):
        participants, ends, gaps = list(run.server.participants(round)), [], {}
        for client in participants:
            local = copy.deepcopy(model)
            if client in own_losses:
                gaps[client] = loss_by_hand(run, client, local) - own_losses[client]
            cross_entropy_steps(local, steps_of(run, round, client))
            own_losses[client] = loss_by_hand(run, client, local)
            ends.append(local.state_dict())
        weights = adjusted_by_hand(weights, gaps, 0.9 * (1 - (round - 3 * reference) / 5), reference)
        model.load_state_dict(mean_by_hand(ends, [weights[client] for client in participants]))
    rounds = record_rounds(run)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    shares = run.state["adjustment"]["weight"] / run.state["adjustment"]["weight"].sum()
    assert shares.tolist() == pytest.approx(weights, rel=1e-9)
    assert max(weights) - min(weights) > 0.1
    for _, uploads, after in rounds:
        assert after["weights"]["client"].tolist() == [upload.client for upload in uploads]
        assert float(after["weights"]["value"].sum()) == pytest.approx(1)
        assert (after["weights"]["value"] >= 0).all()


def one_round(weights):
    """Return the state after a round in which clients 0 and 1 take part for the first time, with the models 0 and 1."""
    before = {
        "adjustment": {
            "weight": torch.tensor(weights, dtype=torch.float64),
            "loss": torch.zeros(len(weights), dtype=torch.float64),
            "trained": torch.arange(len(weights)) > 1,
        }
    }
    numbers = {"n_samples": 1, "received_loss": 1.0, "trained_loss": 0.5}
    uploads = [Upload(k, Message.pack({"model": {"w": torch.tensor([float(k)])}}, **numbers)) for k in (0, 1)]
    return GeneralizationAdjustment().finish(uploads, Round(2, before), {})


def test_participants_that_all_have_weight_0_are_averaged_equally():
    state = one_round([0.0, 0.0, 3.0])
    assert state["model"]["w"].tolist() == [0.5]
    assert state["weights"]["value"].tolist() == [0.5, 0.5]
    assert state["adjustment"]["loss"].tolist() == [0.5, 0.5, 0.0]


def test_weights_that_do_not_change_keep_all_bits():
    weights = [1.0, 1.0, 47.0]
    assert any(weight / sum(weights) * sum(weights) != weight for weight in weights)
    assert one_round(weights)["adjustment"]["weight"].tolist() == weights


def test_the_loss_of_the_received_model_ignores_dropout_and_changes_no_random_numbers(tmp_path):
    options = UNEQUAL | {"model": NormMLP}
    ours = finished(tmp_path / "ours", FedDGGA(step_size=0.0), **options)
    plain = finished(tmp_path / "plain", FedAvg(weighting="uniform"), **options)
    assert same_bytes(ours.state["model"], plain.state["model"])

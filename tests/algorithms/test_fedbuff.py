"""FedBuff and FedAsync against an event loop by hand, and the identities with FedAvg."""

import copy
import math

import pytest
import torch
from aggregation import finish
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, in_two_parts, same_bytes
from loops import assert_equals_loop, cross_entropy_steps, steps_of

from fl_lightning.algorithms import BufferedUpdates, FedAsync, FedAvg, FedBuff, FedProx, ModelMixing, PeerAlgorithm
from fl_lightning.algorithms.global_model.fedasync import adapted_weight
from fl_lightning.algorithms.global_model.fedbuff import staleness_weight
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.state_dicts import parameter_names
from fl_lightning.engines import ProcessesEngine
from fl_lightning.scheduling import Buffered, Deadline, DeviceClock

EQUAL = DeviceClock(0.0, 0.0, link_spread=0.0)
ASYNCHRONOUS = {"clock": DeviceClock(spread=1.5), "clients_per_round": 2, "rounds": 8}


def upload(client, w, received, staleness, dtype=torch.float64):
    model = {"w": torch.tensor(w, dtype=dtype), "bn.running_var": torch.tensor([1.0 + client])}
    return Upload(
        client, Message.pack({"model": model}, n_samples=client + 1), {"w": torch.tensor(received)}, staleness
    )


def test_weights_of_stale_updates():
    assert [staleness_weight(tau, 0.5) for tau in (0, 3, 8)] == [1, 0.5, pytest.approx(1 / 3)]
    assert [adapted_weight(0.6, tau, "constant", 0.5, 4) for tau in (0, 9)] == [0.6, 0.6]
    assert [adapted_weight(0.6, tau, "polynomial", 0.5, 4) for tau in (0, 3)] == [0.6, 0.3]
    assert [adapted_weight(0.6, tau, "hinge", 10, 4) for tau in (0, 4, 5, 6)] == [0.6, 0.6, 0.6 / 11, 0.6 / 21]


def test_fedbuffs_step_is_the_mean_of_weighted_updates():
    before = {"model": {"w": torch.tensor([5.0, -3.0], dtype=torch.float64), "bn.running_var": torch.ones(1)}}
    uploads = [upload(0, [1.0, 2.0], [0.5, 0.0], 3), upload(1, [7.0, -3.0], [5.0, -3.0], 0)]
    after = finish(BufferedUpdates(0.1, 0.5), uploads, before)["model"]
    expected = [5 + 0.1 * (0.5 * 0.5 + 2) / 2, -3 + 0.1 * (0.5 * 2 + 0) / 2]
    assert after["w"].tolist() == pytest.approx(expected, rel=1e-12)
    assert after["bn.running_var"].tolist() == [1.5]  # the mean of both, not a step


def test_fedasync_mixes_models_in_one_after_another():
    before = {"model": {"w": torch.tensor([4.0], dtype=torch.float64), "bn.running_var": torch.ones(1)}}
    uploads = [upload(0, [1.0], [9.0], 3), upload(1, [7.0], [9.0], 0)]
    after = finish(ModelMixing(0.6), uploads, before)["model"]
    first = 4 + 0.3 * (1 - 4)
    assert after["w"].tolist() == pytest.approx([first + 0.6 * (7 - first)], rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"model": NormMLP}])
def test_with_equal_times_fedbuff_is_fedavg(tmp_path, options):
    plain = finished(tmp_path / "fedavg", FedAvg(weighting="uniform"), **options)
    ours = finished(tmp_path / "ours", FedBuff(), clock=EQUAL, round_policy=Buffered(), **options)
    assert same_bytes(ours.state["model"], plain.state["model"])
    assert [row["client/staleness"] for row in ours.csv.rows] == [0, 0, 0]
    assert same_bytes(finished(tmp_path / "alone", FedBuff(), **options).state["model"], plain.state["model"])


def test_a_clock_alone_changes_only_the_metrics(tmp_path):
    plain = finished(tmp_path / "plain", FedAvg())
    timed = finished(tmp_path / "timed", FedAvg(), clock=DeviceClock(jitter=0.1))
    assert same_bytes(timed.state["model"], plain.state["model"])
    assert timed.csv.rows[0].keys() - plain.csv.rows[0].keys() == {"time/simulated_s"}
    assert timed.checkpoint_state().keys() == {"state", "callbacks", "engine"}


def by_hand(run, serve):
    """Return the final weights of an asynchronous run by a loop over arrivals, each from the model it received."""
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    versions = [copy.deepcopy(model.state_dict())]
    for round in range(1, run.rounds + 1):
        arrivals = run.server.schedule.plan(round, run.clients_per_round).arrived
        ends = {}
        for one in arrivals:
            model.load_state_dict(versions[one.version])
            local = copy.deepcopy(model)
            cross_entropy_steps(local, steps_of(run, round, one.client))
            ends[one.client] = (local.state_dict(), versions[one.version], round - 1 - one.version)
        versions.append(serve(versions[-1], [ends[client] for client in sorted(ends)]))
    return versions[-1]


def fedbuff_by_hand(before, ends):
    return {
        name: w + 0.7 / len(ends) * sum((end[name] - start[name]) / math.sqrt(1 + tau) for end, start, tau in ends)
        for name, w in before.items()
    }


def fedasync_by_hand(before, ends):
    ((end, _, tau),) = ends
    weight = 0.5 * (1 + tau) ** -0.5
    return {name: (1 - weight) * w + weight * end[name] for name, w in before.items()}


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    options = UNEQUAL | ASYNCHRONOUS | {"round_policy": Buffered(3)}
    run = experiment(tmp_path, FedBuff(server_lr=0.7), **options)
    expected = by_hand(run, fedbuff_by_hand)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    assert max(row["client/staleness"] for row in run.csv.rows) >= 1


@in_float64
def test_a_run_equals_a_loop_by_hand_fedasync(tmp_path):
    options = UNEQUAL | ASYNCHRONOUS | {"round_policy": Buffered(3), "clients_per_round": 1}
    run = experiment(tmp_path, FedAsync(alpha=0.5), **options)
    expected = by_hand(run, fedasync_by_hand)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    assert max(row["client/staleness"] for row in run.csv.rows) >= 2


@pytest.mark.thorough
@pytest.mark.parametrize("policy", [Buffered(4), Deadline(0.5, 2.0, "next_round")])
def test_a_resumed_run_and_other_engines_give_the_same_bytes(tmp_path, policy):
    options = ASYNCHRONOUS | {"round_policy": policy}
    whole, again = in_two_parts(tmp_path, FedBuff, 5, **options)
    assert whole.server.earlier_states
    assert same_bytes(again.state["model"], whole.state["model"])
    timings = ("time/simulated_s", "client/staleness")
    assert [[row[name] for name in timings] for row in again.csv.rows] == [
        [row[name] for name in timings] for row in whole.csv.rows
    ]
    parallel = finished(tmp_path / "parallel", FedBuff(), **options, engine=ProcessesEngine(2))
    assert same_bytes(parallel.state["model"], whole.state["model"])


def test_states_that_no_client_at_work_has_are_forgotten(tmp_path):
    run = finished(tmp_path, FedBuff(), **ASYNCHRONOUS, round_policy=Buffered(4))
    assert run.server.earlier_states.keys() == {one.version for one in run.server.schedule.running} - {8}
    assert all(parameter_names(state["model"]) for state in run.server.earlier_states.values())


@pytest.mark.parametrize(
    ("algorithm", "options", "key"),
    [
        (FedProx(), {"clock": DeviceClock(), "round_policy": Buffered()}, "round_policy"),
        (FedAvg(), {"clock": DeviceClock(), "round_policy": Deadline(1.0, late="next_round")}, "round_policy"),
        (FedBuff(), {"round_policy": Buffered()}, "round_policy"),
        (PeerAlgorithm(), {"clock": DeviceClock()}, "clock"),
    ],
)
def test_what_does_not_fit_is_refused_before_round_1(tmp_path, algorithm, options, key):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        experiment(tmp_path, algorithm, **options).check()

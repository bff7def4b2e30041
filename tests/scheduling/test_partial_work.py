"""Clients that take only as many steps as fit before a deadline, against loops by hand and with all engines."""

import copy
import math
from functools import partial
from itertools import islice

import lightning as L
import pytest
import torch
from adapters import LowRankMLP
from experiments import ONE_EPOCH, UNEQUAL, experiment, finished, in_float64, same_bytes
from loops import assert_equals_loop, cross_entropy_steps, steps_of

from fl_lightning.algorithms import (
    SCAFFOLD,
    CriticalFL,
    FedAvg,
    FedDC,
    FedDyn,
    FedNova,
    FedProx,
    RoLoRA,
    WeightedSampling,
)
from fl_lightning.client.dp_sgd import DPSGD
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import ProcessesEngine
from fl_lightning.scheduling import ClientWork, Deadline, DeviceClock, Schedule

PARTIAL = {"clock": DeviceClock(spread=1.5), "round_policy": Deadline(1.0, late="partial"), "rounds": 4}


def by_hand(run, mean):
    """Return the final weights of an experiment by a loop in which clients stop at the step that the plan says."""
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    limited = 0
    for round in range(1, run.rounds + 1):
        plan = run.server.schedule.plan(round, run.clients_per_round)
        limited += len(plan.steps)
        ends = []
        for client in plan.versions:
            local, steps = copy.deepcopy(model), list(steps_of(run, round, client))
            cross_entropy_steps(local, islice(steps, plan.steps.get(client)))
            done = min(len(steps), plan.steps.get(client, len(steps)))
            ends.append((len(run.data.shards[client].train), done, local.state_dict()))
        model.load_state_dict(mean(model.state_dict(), ends))
    assert limited
    return model.state_dict()


def fedavg_by_hand(start, ends):
    total = sum(n for n, _, _ in ends)
    return {name: sum(n / total * end[name] for n, _, end in ends) for name in start}


def fednova_by_hand(start, ends):
    """Return FedNova's model for plain SGD, whose effective steps are its steps."""
    total = sum(n for n, _, _ in ends)
    tau = sum(n / total * steps for n, steps, _ in ends)
    return {
        name: w - tau * sum(n / total * (w - end[name]) / steps for n, steps, end in ends) for name, w in start.items()
    }


@pytest.mark.parametrize(("deadline", "steps"), [(1.0, [1, 1, 1, 1]), (4.0, [3, 4, 4, 4]), (4.9, [3, 4, 4, 4])])
def test_a_client_takes_the_most_steps_that_end_by_the_deadline(deadline, steps):
    clock, work = DeviceClock(1.0, 0.0, math.inf, math.inf), [ClientWork(count, 0, 0) for count in (3, 4, 5, 9)]
    clock.start(0, 4)
    policy = Deadline(deadline, late="partial")
    plan = Schedule(policy, clock, lambda round, size: [*range(size)], work, 0, min_clients=4).plan(1, 4)
    assert [plan.steps.get(client, work[client].steps) for client in range(4)] == steps
    assert plan.metrics["client/late"] == 0


@in_float64
@pytest.mark.parametrize(("algorithm", "mean"), [(FedAvg(), fedavg_by_hand), (FedNova(), fednova_by_hand)])
def test_a_run_equals_a_loop_by_hand(tmp_path, algorithm, mean):
    run = experiment(tmp_path, algorithm, **UNEQUAL | PARTIAL)
    expected = by_hand(run, mean)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)


def test_a_deadline_that_all_meet_changes_nothing(tmp_path):
    clock = DeviceClock()
    plain = finished(tmp_path / "plain", FedProx(), clock=clock)
    run = finished(tmp_path / "partial", FedProx(), clock=clock, round_policy=Deadline(1e9, late="partial"))
    assert same_bytes(run.state["model"], plain.state["model"])
    assert [row["client/partial"] for row in run.csv.rows] == [0] * 3


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedDyn, FedDC, SCAFFOLD, RoLoRA])
def test_a_clock_alone_changes_no_method(tmp_path, algorithm):
    """The sizes of uploads are measured on clients that have not trained."""
    options = {"rounds": 2, "trainer": ONE_EPOCH, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    options |= {"model": LowRankMLP} if algorithm is RoLoRA else {}
    plain = finished(tmp_path / "plain", algorithm(), **options)
    timed = finished(tmp_path / "timed", algorithm(), clock=DeviceClock(), **options)
    assert same_bytes(timed.state["model"], plain.state["model"])


@pytest.mark.thorough
def test_all_engines_stop_at_the_same_step(tmp_path):
    options = UNEQUAL | PARTIAL | {"optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.9)}
    options |= {"trainer": {**ONE_EPOCH, "max_epochs": 3}}
    alone = finished(tmp_path / "alone", FedAvg(), **options)
    parallel = finished(tmp_path / "parallel", FedAvg(), **options, engine=ProcessesEngine(2))
    assert same_bytes(parallel.state["model"], alone.state["model"])
    stacked = finished(tmp_path / "stacked", FedAvg(), **options, engine="stacked")
    for name, value in alone.state["model"].items():
        torch.testing.assert_close(stacked.state["model"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 50}, {"max_steps": 9}])
def test_trainers_of_the_clients_own_stop_at_the_same_step(tmp_path, limits):
    """A callback in a client's fit keeps it out of the local loop, see `obstacle_to_loop`."""
    options = UNEQUAL | PARTIAL | {"trainer": {"accelerator": "cpu", **limits}}
    loop = finished(tmp_path / "loop", FedAvg(), **options)
    own = finished(tmp_path / "own", FedAvg(), **options, client_callbacks=[L.Callback()])
    assert (loop.worker.can_loop, own.worker.can_loop) == (True, False)
    assert any(row["client/partial"] for row in loop.csv.rows)
    assert same_bytes(own.state["model"], loop.state["model"])


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^round_policy\.late: "):
        experiment(tmp_path, FedAvg(), **PARTIAL, dp_sgd=DPSGD(noise=1.0)).check()
    for key, options in {
        "client_sampler": {"client_sampler": WeightedSampling(), "algorithm": FedAvg(weighting="uniform")},
        "clock": {"algorithm": CriticalFL()},
    }.items():
        with pytest.raises(ConfigError, match=f"^{key}: "):
            experiment(tmp_path, **{"algorithm": FedAvg(), "clock": DeviceClock(online_share=0.5), **options}).check()

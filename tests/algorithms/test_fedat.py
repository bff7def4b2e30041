"""FedAT against a loop over its tiers by hand, and its identities with FedProx and FedAvg."""

import copy

import pytest
import torch
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, in_two_parts, same_bytes
from loops import assert_equals_loop, cross_entropy_steps, steps_of

from fl_lightning.algorithms import FedAT, FedAvg, FedBuff, FedProx, TieredMean
from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.engines import ProcessesEngine
from fl_lightning.scheduling import DeviceClock, Tiers

TIERED = {"clock": DeviceClock(spread=1.5), "round_policy": Tiers(3), "clients_per_round": 2, "rounds": 9}


@pytest.mark.parametrize("options", [{}, {"model": NormMLP}])
def test_without_tiers_it_is_fedprox_and_without_its_term_fedavg(tmp_path, options):
    for name, algorithm, mu in (("fedprox", FedProx(mu=0.3), 0.3), ("fedavg", FedAvg(), 0.0)):
        plain = finished(tmp_path / name, algorithm, **options)
        alone = finished(tmp_path / f"{name}-alone", FedAT(mu=mu), **options)
        single = {"clock": DeviceClock(), "round_policy": Tiers(1)} | options
        tier = finished(tmp_path / f"{name}-tier", FedAT(mu=mu), **single)
        for run in (alone, tier):
            assert same_bytes(run.state["model"], plain.state["model"])


def finish_round(aggregator, upload, round):
    """Return the state after a round with a single upload."""
    return aggregator.finish(fold_all(aggregator, [upload], round), round, {})


def test_a_tier_has_the_weight_of_the_tier_at_the_other_end():
    mean, model = TieredMean(), {"w": torch.tensor([1.0], dtype=torch.float64)}
    state = {"model": model} | mean.initial(model, 10)
    ends = [(0, 2.0), (0, 4.0), (2, 30.0), (0, 8.0), (1, 500.0)]
    models, rounds = [1.0, 1.0, 1.0], [0, 0, 0]
    for number, (tier, w) in enumerate(ends, 1):
        upload = Upload(tier, Message.pack({"model": {"w": torch.tensor([w], dtype=torch.float64)}}, n_samples=1))
        state = finish_round(mean, upload, Round(number, state, tier=tier, tiers=3))
        models[tier], rounds[tier] = w, rounds[tier] + 1
        expected = sum(count * w for count, w in zip(reversed(rounds), models, strict=True)) / sum(rounds)
        assert state["model"]["w"].item() == pytest.approx(expected, rel=1e-12)


def by_hand(run):
    """Return the final weights of an experiment by a loop over the rounds of its tiers."""
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    initial = copy.deepcopy(model.state_dict())
    versions, tiers, rounds = [initial], [initial] * 3, [0] * 3
    for round in range(1, run.rounds + 1):
        plan = run.server.schedule.plan(round, run.clients_per_round)
        ends, sizes = [], []
        for client, version in plan.versions.items():
            model.load_state_dict(versions[version])
            local = copy.deepcopy(model)
            cross_entropy_steps(local, steps_of(run, round, client))
            ends.append(local.state_dict())
            sizes.append(len(run.data.shards[client].train))
        shares = [n / sum(sizes) for n in sizes]
        tiers[plan.tier] = {name: sum(p * end[name] for p, end in zip(shares, ends, strict=True)) for name in initial}
        rounds[plan.tier] += 1
        weights = [rounds[2 - tier] / sum(rounds) for tier in range(3)]
        versions.append({n: sum(w * tier[n] for w, tier in zip(weights, tiers, strict=True)) for n in initial})
    assert min(rounds) >= 1
    return versions[-1]


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedAT(mu=0.0), **UNEQUAL | TIERED | {"clients_per_round": 1, "rounds": 12})
    expected = by_hand(run)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    assert max(row["client/staleness"] for row in run.csv.rows) >= 1


@pytest.mark.thorough
def test_a_resumed_run_and_other_engines_give_the_same_bytes(tmp_path):
    whole, again = in_two_parts(tmp_path, FedAT, 5, **TIERED)
    parallel = finished(tmp_path / "parallel", FedAT(), **TIERED, engine=ProcessesEngine(2))
    for run in (again, parallel):
        assert same_bytes(run.state["model"], whole.state["model"])
    assert [row["time/simulated_s"] for row in again.csv.rows] == [row["time/simulated_s"] for row in whole.csv.rows]


def test_fedbuff_takes_steps_with_the_updates_of_a_tier(tmp_path):
    run = finished(tmp_path, FedBuff(), **TIERED)
    assert max(row["client/staleness"] for row in run.csv.rows) >= 1

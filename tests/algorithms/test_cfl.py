"""CFL compared with the authors' algorithm (baselines: C1)."""

import copy
import math
from itertools import combinations

import numpy as np
import pytest
import torch
from aggregation import finish
from experiments import UNEQUAL, NoDropout, experiment, finished, in_float64, same_bytes
from loops import assert_equals_loop, cross_entropy_steps, steps_of
from peers import mean_by_hand

from fl_lightning.algorithms import CFL, Splits
from fl_lightning.algorithms.clustered.cfl import bipartition, cosines, is_nearer_to_second, update
from fl_lightning.callbacks import ClusterNorms
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.state_dicts import VisibleState

pytestmark = pytest.mark.numeric

ALWAYS = {"eps1": math.inf, "eps2": 0.0, "min_rounds": 0}
ALL = {"clients_per_round": 6}


def test_an_update_is_the_change_of_the_parameters():
    start = {"w": torch.tensor([1.0, 2.0]), "n.running_mean": torch.tensor([5.0]), "steps": torch.tensor(3)}
    end = {"w": torch.tensor([4.0, 1.0]), "n.running_mean": torch.tensor([7.0]), "steps": torch.tensor(9)}
    assert update(start, end).tolist() == [3.0, -1.0]


def test_cosines_equal_the_formula_and_are_zero_for_an_update_of_zero():
    one, other = torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    other[2] = 0.0
    for i, j in np.ndindex(3, 4):
        a, b = one[i].tolist(), other[j].tolist()
        wanted = sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b) + 1e-12)
        assert cosines(one, other)[i, j].item() == pytest.approx(wanted, abs=1e-12)
    assert (cosines(one, other)[:, 2] == 0).all()


def complete_linkage(similarity):
    """Merge the two groups whose least similar members are most similar, until two groups are left."""
    groups = [{i} for i in range(len(similarity))]
    while len(groups) > 2:
        pair = max(combinations(groups, 2), key=lambda p: min(similarity[i, j].item() for i in p[0] for j in p[1]))
        groups = [g for g in groups if g not in pair] + [pair[0] | pair[1]]
    return groups


@pytest.mark.parametrize("m", [2, 3, 8])
def test_bipartition_is_complete_linkage(m):
    for _ in range(5):
        updates = torch.randn(m, 4, dtype=torch.float64)
        similarity = cosines(updates, updates)
        away = bipartition(similarity)
        assert not away[0]
        assert {i for i in range(m) if away[i]} in complete_linkage(similarity)
        assert away.any()


def test_an_update_is_compared_with_the_least_similar_member_of_each_group():
    updates = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [-1.0, 0.2]]).double()
    groups = torch.tensor([False, False, True, True])
    assert not is_nearer_to_second(torch.tensor([1.0, 1.0]), updates, groups)  # 0.7 and 0.8 against 0.7 and -0.6
    assert is_nearer_to_second(torch.tensor([-0.5, 1.0]), updates, groups)
    assert not is_nearer_to_second(torch.tensor([0.2, 1.0]), updates, groups)  # 0.2 and 0.3 against 0.98 and 0
    assert not is_nearer_to_second(torch.zeros(2), updates, groups)


def after_round(aggregator, before, ends, samples=None, last=None):
    """Return the state after a round in which some clients end with these weights, and others have `last` updates."""
    uploads = [
        Upload(k, Message({"model/w": w}, {"n_samples": (samples or {}).get(k, 1)})) for k, w in sorted(ends.items())
    ]
    visible = VisibleState(before, lambda k: {"update": last[k]})
    return before | finish(aggregator, uploads, visible)


def state_of(clients, **models):
    return {
        "model": {"w": torch.zeros(3)},
        "assignment": {
            "cluster": torch.zeros(clients, dtype=torch.int64),
            "heard": torch.zeros(clients, dtype=torch.bool),
            "round": torch.tensor(0),
        },
    } | {name: {"w": torch.tensor(value)} for name, value in models.items()}


def test_each_part_of_a_split_gets_the_mean_of_its_members():
    start = torch.tensor([1.0, 1.0, 1.0])
    deltas = {0: [1.0, 0.0, 0.0], 1: [-1.0, 0.1, 0.0], 2: [1.0, 0.2, 0.0], 3: [-1.0, 0.0, 0.1], 4: [0.9, 0.0, 0.0]}
    ends = {k: start + torch.tensor(d) for k, d in deltas.items()}
    before = state_of(6, cluster_0=start.tolist())
    after = after_round(Splits(10.0, 0.0, 0, 2, "uniform"), before, ends)
    assert after["assignment"]["cluster"].tolist() == [0, 1, 0, 1, 0, 0]
    assert after["assignment"]["heard"].tolist() == [True] * 5 + [False]
    assert after["assignment"]["round"] == 1
    torch.testing.assert_close(after["cluster_0"]["w"], torch.stack([ends[k] for k in (0, 2, 4)]).mean(0))
    torch.testing.assert_close(after["cluster_1"]["w"], torch.stack([ends[k] for k in (1, 3)]).mean(0))
    torch.testing.assert_close(after["model"]["w"], torch.stack(list(ends.values())).mean(0))
    stacked = torch.tensor(list(deltas.values())).double()
    assert after["norms"]["mean"].tolist() == pytest.approx([stacked.mean(0).norm().item()])
    assert after["norms"]["max"].tolist() == pytest.approx([max(math.hypot(*d) for d in deltas.values())])
    assert before["assignment"]["cluster"].tolist() == [0] * 6
    assert not before["assignment"]["heard"].any()
    # next round: cluster 1 has no participants and does not change; cluster 0 is split again, with the next id
    again = after_round(Splits(10.0, 0.0, 0, 2, "uniform"), after, {0: ends[1], 2: ends[0], 4: ends[0], 5: ends[1]})
    assert again["assignment"]["cluster"].tolist() == [0, 1, 2, 1, 2, 0]
    assert same_bytes(again["cluster_1"], after["cluster_1"])
    torch.testing.assert_close(again["cluster_2"]["w"], ends[0])
    assert again["norms"]["mean"].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, True),
        ({"eps1": 0.75}, False),  # the norm of the mean update
        ({"eps1": 0.7501}, True),
        ({"eps2": 1.5}, False),  # the norm of the largest update
        ({"eps2": 1.4999}, True),
        ({"min_rounds": 1}, False),
        ({"min_size": 3}, True),
        ({"min_size": 4}, False),
        ({"eps1": 0.3751, "weighting": "samples"}, True),  # the weighted mean is 1.5 · (1 + 2 + 2 - 3) / 8
        ({"eps1": 0.375, "weighting": "samples"}, False),
    ],
)
def test_when_a_cluster_is_split(options, splits):
    aggregator = Splits(**{"eps1": 0.8, "eps2": 1.0, "min_rounds": 0, "min_size": 2, "weighting": "uniform"} | options)
    ends = {k: torch.tensor([-1.5 if k == 3 else 1.5, 0.0, 0.0]) for k in range(4)}
    after = after_round(aggregator, state_of(5, cluster_0=[0.0] * 3), ends, {0: 1, 1: 2, 2: 2, 3: 3})
    assert after["assignment"]["cluster"].tolist() == ([0, 0, 0, 1, 0] if splits else [0] * 5)


def test_two_clusters_split_in_one_round_get_different_ids():
    before = state_of(6, cluster_0=[0.0] * 3, cluster_1=[0.0] * 3)
    before["assignment"]["cluster"][3:] = 1
    ends = {k: torch.tensor([-1.0 if k in (2, 5) else 1.0, 0.1 * k, 0.0]) for k in range(6)}
    after = after_round(Splits(10.0, 0.0, 0, 2, "uniform"), before, ends)
    assert after["assignment"]["cluster"].tolist() == [0, 0, 2, 1, 1, 3]
    torch.testing.assert_close(after["cluster_2"]["w"], ends[2])
    torch.testing.assert_close(after["cluster_3"]["w"], ends[5])


def test_absent_clients_are_split_by_their_last_update_and_new_clients_stay():
    before = state_of(6, cluster_0=[0.0] * 3)
    before["assignment"]["heard"][[0, 1, 2, 3, 4]] = True
    before["assignment"]["cluster"][4] = 1
    before |= {"cluster_1": {"w": torch.zeros(3)}}
    last = {k: torch.tensor([v, 0.1, 0.0]) for k, v in ((0, -5.0), (2, -1.0), (3, 1.0), (4, -1.0))}
    ends = {0: torch.tensor([1.0, 0.0, 0.0]), 1: torch.tensor([-1.0, 0.0, 0.0])}
    after = after_round(Splits(10.0, 0.0, 0, 1, "uniform"), before, ends, last=last)
    assert after["assignment"]["cluster"].tolist() == [0, 2, 2, 0, 1, 0]


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, CFL(**ALWAYS), model=NoDropout, **UNEQUAL)
    run.load()
    network = copy.deepcopy(run.worker.template.backbone).train()
    models, groups, last = {0: copy.deepcopy(network.state_dict())}, {0: set(range(4))}, {}
    for round in range(1, 4):
        ends, deltas = {}, {}
        for client in run.server.participants(round):
            cluster = next(c for c, members in groups.items() if client in members)
            network.load_state_dict(models[cluster])
            cross_entropy_steps(network, steps_of(run, round, client))
            ends[client] = copy.deepcopy(network.state_dict())
            moves = [(p.detach() - models[cluster][name]).flatten() for name, p in network.named_parameters()]
            deltas[client] = torch.cat(moves)
        for cluster in sorted(groups):
            there = sorted(groups[cluster] & ends.keys())
            if len(there) > 2:
                rows = torch.nn.functional.normalize(torch.stack([deltas[k] for k in there]))
                parts = complete_linkage(rows @ rows.T)
                first, second = sorted(({there[i] for i in part} for part in parts), key=lambda p: there[0] not in p)
                for k in sorted(groups[cluster] - set(there)):
                    if k in last:
                        gap = [
                            min(torch.cosine_similarity(last[k], deltas[j], 0).item() for j in p)
                            for p in (first, second)
                        ]
                        (second if gap[1] > gap[0] else first).add(k)
                    else:
                        first.add(k)
                groups[cluster], groups[len(groups)] = first, second
        last |= deltas
        for cluster, members in groups.items():
            there = sorted(members & ends.keys())
            if there:
                models[cluster] = mean_by_hand([ends[k] for k in there], [1] * len(there))
    run.fit()
    assert len(groups) > 1
    for cluster, members in groups.items():
        assert set((run.state["assignment"]["cluster"] == cluster).nonzero()[:, 0].tolist()) == members
        assert_equals_loop(run, run.state[f"cluster_{cluster}"], models[cluster])
        for client in members:
            sent = run.server.download(4, client).section("model")
            assert same_bytes(sent, run.state[f"cluster_{cluster}"])
    for client, wanted in last.items():
        torch.testing.assert_close(run.memory[client]["last_update"]["update"].double(), wanted, rtol=1e-6, atol=1e-7)


def test_cluster_norms_are_logged(tmp_path):
    run = finished(tmp_path, CFL(**ALWAYS), callbacks=[ClusterNorms()], rounds=2, **ALL)
    first, second = run.csv.rows
    assert (first["clusters/count"], second["clusters/count"]) == (2, run.state["assignment"]["cluster"].max() + 1)
    assert first["clusters/max_norm_0"] > first["clusters/mean_norm_0"] > 0
    assert second["clusters/max_norm_1"] == run.state["norms"]["max"][1]

"""FedPer: what is shared and what stays (baselines: B1)."""

from functools import partial

import pytest
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, same_bytes
from loops import assert_equals_loop, rounds_by_hand

from fl_lightning.algorithms import FedPer
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

DEEP = partial(MLP, hidden=(16, 8))
RECEIVED = {"evaluation": Evaluation(client_model="received")}


def split_entries(entries, *parts):
    """Return the entries of some parts, and the other entries."""
    own = {name for name in entries if name.startswith(parts)}
    return {n: v for n, v in entries.items() if n in own}, {n: v for n, v in entries.items() if n not in own}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("personal", "begin"),
    [(["head"], ("head.",)), (["head", "encoder.3"], ("head.", "encoder.3.")), (["encoder"], ("encoder.",))],
)
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, personal, begin):
    """Each participant trains the shared part and its personal part. Shared parts are averaged."""
    run = experiment(tmp_path, FedPer(personal=personal), model=DEEP, **UNEQUAL)

    shared, own = rounds_by_hand(run, personal=begin)
    run.fit()
    assert_equals_loop(run, run.state["model"], shared)
    assert run.memory.keys() == own.keys()
    for client, entries in own.items():
        assert_equals_loop(run, run.memory[client]["personal"], entries)
        whole = dict(run.client_module(client).backbone.state_dict())
        assert same_bytes(whole, {n: (run.state["model"] | run.memory[client]["personal"])[n] for n in whole})


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
def test_a_client_that_never_took_part_has_the_new_body_and_the_initial_head(tmp_path):
    run = finished(tmp_path, FedPer(), rounds=1, clients_per_round=2, **RECEIVED)
    (never, *_) = set(range(6)) - run.memory.keys()
    head, _ = split_entries(dict(run.worker.template.backbone.state_dict()), "head.")
    model = dict(run.client_module(never).backbone.state_dict())
    assert same_bytes(split_entries(model, "head.")[0], head)
    assert same_bytes(split_entries(model, "head.")[1], run.state["model"])


def test_batchnorm_statistics_belong_to_their_part(tmp_path):
    for personal, sent in ((["head"], True), (["encoder.2", "head"], False)):
        run = finished(tmp_path / str(sent), FedPer(personal=personal), model=NormMLP, rounds=1)
        assert ("encoder.2.running_mean" in run.state["model"]) == sent
        for memory in run.memory.values():
            assert ("encoder.2.running_mean" in memory["personal"]) == (not sent)
            assert not any(name.startswith("encoder.1") for name in memory["personal"])


def test_a_part_is_matched_by_its_whole_name(tmp_path):
    """The part `encoder.1` does not include `encoder.11`."""
    run = finished(tmp_path, FedPer(personal=["encoder.1"]), model=partial(MLP, hidden=(8,) * 6), rounds=1)
    assert {name for m in run.memory.values() for name in m["personal"]} == {"encoder.1.weight", "encoder.1.bias"}
    assert "encoder.11.weight" in run.state["model"]


def test_a_pattern_keeps_the_entries_that_match(tmp_path):
    run = finished(tmp_path, FedPer(personal=["*.bias", "head"]), rounds=1)
    sent, kept = ({*names} for names in (run.state["model"], run.memory[0]["personal"]))
    entries = {*run.worker.template.backbone.state_dict()}
    assert kept == {name for name in entries if name.endswith(".bias") or name.startswith("head.")}
    assert sent == entries - kept != set()

"""HeteroFL: each element is averaged over the clients that hold it (Diao et al. 2021)."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from experiments import (
    ONE_EPOCH,
    UNEQUAL,
    NormMLP,
    descend,
    digits,
    experiment,
    finished,
    in_float64,
    in_two_parts,
    same_bytes,
)
from flower_grid import flower, remote_experiment  # noqa: F401
from loops import assert_equals_loop, steps_of
from methods import assert_same_run
from torch.nn import functional as F

from fl_lightning import CNN, MLP, Evaluation, Mixed
from fl_lightning.algorithms import FedAvg, FedDistill, HeteroFL, WeightedMean
from fl_lightning.algorithms.global_model.heterofl import fits_into, mean_of_slices
from fl_lightning.callbacks import ClientDrift, RowNorms
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines.exchange import methods_that_work

WIDTHS = Mixed([partial(MLP, hidden=(12, 8)), partial(MLP, hidden=(6, 4)), partial(MLP, hidden=(3, 8))])
QUICK = {"model": WIDTHS, "rounds": 2, "trainer": ONE_EPOCH}


def mean_by_hand(before, slices):
    """Average element by element."""
    result = before.clone()
    for place in itertools.product(*map(range, before.shape)):
        held = [(value, weight) for value, weight in slices if all(i < n for i, n in zip(place, value.shape))]  # noqa: B905
        if held:
            result[place] = sum(w * float(v[place]) for v, w in held) / sum(w for _, w in held)
    return result


@pytest.mark.parametrize("shapes", [[(3, 2), (5, 1)], [(5, 4), (3, 2), (1, 3)], [(2, 2)], [(5, 4)]])
def test_an_element_is_the_mean_over_the_slices_that_hold_it(shapes):
    before = torch.randn(5, 4, dtype=torch.float64)
    slices = [(torch.randn(shape, dtype=torch.float64), number + 1.5) for number, shape in enumerate(shapes)]
    old = before.clone()
    torch.testing.assert_close(mean_of_slices(before, slices), mean_by_hand(before, slices), rtol=1e-12, atol=1e-12)
    assert torch.equal(before, old)


def test_integers_are_the_largest_of_the_slices_that_hold_them():
    before, one, other = torch.tensor([9, 9, 9]), torch.tensor([4, -2]), torch.tensor([1])
    assert mean_of_slices(before, [(one, 1.0), (other, 2.0)]).tolist() == [4, -2, 9]
    assert mean_of_slices(torch.tensor(9), [(torch.tensor(3), 1.0), (torch.tensor(5), 1.0)]).item() == 5


def test_a_slice_is_at_most_as_large_in_each_dimension():
    size = torch.Size
    assert fits_into(size((2, 4)), size((3, 4)))
    assert not fits_into(size((4, 2)), size((3, 4)))
    assert not fits_into(size((2,)), size((3, 4)))
    assert not fits_into(None, size(()))


def scaled_logits(network, x, widest):
    """Return the logits of an `MLP` whose hidden outputs are divided by their relative widths."""
    first, second = network.encoder[1], network.encoder[3]
    hidden = (first(x.flatten(1)) * widest[0] / first.out_features).relu()
    return network.head((second(hidden) * widest[1] / second.out_features).relu())


@in_float64
@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_run_equals_a_loop_by_hand(tmp_path, weighting, scaler):
    run = experiment(tmp_path, HeteroFL(weighting=weighting, scaler=scaler), model=WIDTHS, **UNEQUAL)
    run.load()
    model = {name: value.clone() for name, value in run.worker.template.backbone.state_dict().items()}
    for round in range(1, 4):
        uploads = []
        for client in run.server.participants(round):
            local = WIDTHS.factories[client % 3](in_shape=(1, 8, 8), num_classes=10)
            for name, value in local.state_dict().items():
                value.copy_(model[name][tuple(slice(0, n) for n in value.shape)])
            for x, y in steps_of(run, round, client):
                logits = scaled_logits(local, x, (12, 8)) if scaler else local(x)
                descend(local, F.cross_entropy(logits, y), 0.2)
            uploads.append((local.state_dict(), len(run.data.shards[client].train) if weighting == "samples" else 1))
        model = {
            name: mean_by_hand(value, [(upload[name], weight) for upload, weight in uploads])
            for name, value in model.items()
        }
    run.fit()
    assert_equals_loop(run, dict(run.state["model"]), model)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("per_round", [1, 4])
@pytest.mark.parametrize("scaler", [False, True])
def test_equal_widths_are_fedavg_bit_for_bit(tmp_path, weighting, per_round, scaler):
    options = {"rounds": 2, "clients_per_round": per_round}
    alone = finished(tmp_path / "avg", FedAvg(aggregator=WeightedMean(weighting)), model=NormMLP, **options)
    equal = Mixed([NormMLP, NormMLP])
    for folder, model in (("one", NormMLP), ("equal", equal)):
        run = finished(tmp_path / folder, HeteroFL(weighting=weighting, scaler=scaler), model=model, **options)
        if model is NormMLP:
            assert_same_run(alone, run)
        else:
            assert all(torch.equal(value, run.state["model"][name]) for name, value in alone.state["model"].items())


def test_the_scaler_scales_narrow_layers_in_training_only(tmp_path):
    run = experiment(tmp_path, HeteroFL(scaler=True), **QUICK)
    run.load()
    wide, narrow = (run.worker.of_group(number).modules.build().backbone for number in (0, 1))
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(wide.train()(x), wide.eval()(x))
    evaluated = narrow.eval()(x)
    torch.testing.assert_close(narrow.train()(x), scaled_logits(narrow.eval(), x, (12, 8)))
    assert not torch.allclose(narrow.train()(x), evaluated, rtol=0.01)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_the_scaler_is_the_same_in_processes_and_after_a_resume(tmp_path, engine):
    options = QUICK | {"scenario": digits(3), "clients_per_round": 3}
    whole = finished(tmp_path / "whole", HeteroFL(scaler=True), **options)
    finished(tmp_path / "half", HeteroFL(scaler=True), **options | {"rounds": 1})
    resumed = experiment(tmp_path / "half", HeteroFL(scaler=True), engine=engine, **options)
    resumed.fit(resume=True)
    assert same_bytes(whole.state["model"], resumed.state["model"])


def test_a_client_receives_and_sends_only_its_slices(tmp_path):
    run = finished(tmp_path, HeteroFL(), clients_per_round=6, **QUICK)
    sizes = [sum(v.nbytes for v in group.template.backbone.state_dict().values()) for group in run.worker.groups]
    row = run.csv.rows[-1]
    assert row["comm/down_bytes"] == 2 * sum(sizes)
    assert row["comm/up_bytes"] == 2 * sum(sizes) + 6 * 8
    for client in range(3):
        download = run.server.download(3, client)
        assert download.nbytes == sizes[client]
        for name, value in download.section("model").items():
            assert torch.equal(value, run.state["model"][name][tuple(slice(0, n) for n in value.shape)])
            assert value.untyped_storage().nbytes() == value.nbytes  # a view would be stored whole
        sent = run.client_module(client).backbone.state_dict()
        assert all(torch.equal(sent[name], value) for name, value in download.section("model").items())


def test_a_run_resumes_byte_for_byte_and_evaluates_each_width(tmp_path):
    options = QUICK | {"evaluation": Evaluation(client_model="received"), "rounds": 3}
    whole, resumed = in_two_parts(tmp_path, HeteroFL, 2, **options)
    assert_same_run(whole, resumed)
    assert {"global/acc", *(f"architecture/MLP_{k}/acc_mean" for k in range(3))} <= whole.csv.rows[-1].keys()


@pytest.mark.usefixtures("flower")
def test_clients_on_their_own_machines_give_the_same_bytes(tmp_path):
    alone = finished(tmp_path / "alone", HeteroFL(), **QUICK)
    remote, _ = remote_experiment(tmp_path / "remote", alone, HeteroFL, folder=tmp_path, **QUICK)
    remote.fit()
    assert same_bytes(alone.state["model"], remote.state["model"])


@pytest.mark.parametrize(
    ("models", "options", "key"),
    [
        ([partial(MLP, hidden=(4,)), partial(MLP, hidden=(8,))], {}, "model"),
        ([MLP, CNN], {}, "model"),
        ([MLP, partial(MLP, hidden=(8,))], {}, "model"),
        (WIDTHS.models, {"scenario": replace(digits(), held_out_clients=2)}, "scenario.held_out_clients"),
    ],
)
def test_what_is_no_slice_is_refused_before_round_1(tmp_path, models, options, key):
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        finished(tmp_path / "run", HeteroFL(), model=Mixed(models), **options)
    assert not (tmp_path / "run").exists()


def test_callbacks_that_need_equal_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^callbacks: ClientDrift: "):
        finished(tmp_path / "drift", HeteroFL(), callbacks=[ClientDrift()], **QUICK)
    assert finished(tmp_path / "norms", HeteroFL(), callbacks=[RowNorms()], **QUICK).csv.rows[-1]["row_norms/gap"] < 2


def test_it_is_named_among_the_methods_that_work_for_widths_alone(tmp_path):
    for model, works in ((WIDTHS, True), (Mixed([MLP, CNN]), False)):
        run = experiment(tmp_path, FedDistill(), model=model)
        run.check()
        assert ("HeteroFL" in [*methods_that_work(run.worker)]) is works

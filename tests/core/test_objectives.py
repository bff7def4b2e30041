"""Multi-label and regression targets, from the loss to the files of a run."""

import copy
import csv
import re
from functools import partial

import commands
import numpy as np
import pytest
import torch
from experiments import experiment, in_float64, in_two_parts, same_bytes, untimed, weights_after
from methods import ADAPTERS
from torch.nn import functional as F

from fl_lightning.algorithms import UAPDFL, FedAvg, FedDW, FedProx, FedSKC, FedUV
from fl_lightning.callbacks import ClassRelations, EarlyStopping
from fl_lightning.cli.catalogue import classes
from fl_lightning.core.errors import ClientFailure, ConfigError
from fl_lightning.core.objectives import (
    CausalLM,
    Classification,
    MultiLabel,
    Objective,
    Regression,
    Segmentation,
    TokenClassification,
    objective_of,
)
from fl_lightning.data import IID, Dataset, Dirichlet, LoadedData, QuantitySkew, Scenario
from fl_lightning.data.partitions import Pathological, Shards
from fl_lightning.data.transforms import Normalize
from fl_lightning.models import MLP, Head

DIMENSIONS, LABELS, SEED = 5, 3, 3
WITHOUT_CLASSES = ["several labels", "one number", "three numbers"]


class Made(Dataset):
    """A dataset whose labels or numbers are a fixed function of random inputs."""

    def __init__(self, kind: str, n: int = 240, scale: float = 1.0) -> None:
        self.kind, self.n, self.scale = kind, n, scale

    def load(self) -> LoadedData:
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(self.n + 60, DIMENSIONS, generator=rng, dtype=torch.float32)
        y = x @ torch.randn(DIMENSIONS, LABELS, generator=rng, dtype=torch.float32) * self.scale + 0.1
        if self.kind == "several labels":
            y = (y > 0).long()
        elif self.kind == "one number":
            y = y[:, 0]
        outputs = 1 if y.ndim == 1 else LABELS
        return LoadedData(x[: self.n], y[: self.n], x[self.n :], y[self.n :], outputs, Normalize())


def made(kind: str, partition=None, **options) -> Scenario:
    return Scenario(Made(kind), partition or IID(), 6, **options)


def by_hand(scenario: Scenario, loss, mu: float = 0.0, rounds: int = 3):
    """Run FedAvg or FedProx as a plain loop over clients, epochs and batches."""

    def spawned(*key):
        return np.random.SeedSequence(SEED, spawn_key=key)

    data = scenario.build(SEED)
    x, y = data.data.x_train, data.data.y_train
    torch.manual_seed(int(spawned(2).generate_state(1, np.uint64)[0]) >> 1)
    model = MLP(in_shape=(DIMENSIONS,), num_classes=data.data.num_classes, hidden=(16,))
    for round in range(1, rounds + 1):
        chosen = np.random.default_rng(spawned(3, round)).choice(6, 4, replace=False)
        sums, total = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in model.state_dict().items()}, 0
        for client in sorted(chosen.tolist()):
            local, start = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
            order_seed = int(spawned(4, round, client).generate_state(1, np.uint64)[0]) >> 1
            shuffle = torch.Generator().manual_seed(order_seed)
            own = data.shards[client].train
            for _ in range(2):
                for batch in own[torch.randperm(len(own), generator=shuffle)].split(64):
                    optimizer.zero_grad()
                    value = loss(local(x[batch]), y[batch])
                    if mu:
                        far = torch.zeros(())
                        for p, s in zip(local.parameters(), start, strict=True):
                            far = far + (p - s).square().sum()
                        value = value + mu / 2 * far
                    value.backward()
                    optimizer.step()
            for name, weight in local.state_dict().items():
                sums[name] += len(own) * weight.double()
            total += len(own)
        model.load_state_dict({name: (value / total).float() for name, value in sums.items()})
    return model, data


LOSSES = {
    "several labels": lambda outputs, y: F.binary_cross_entropy_with_logits(outputs, y.float()),
    "one number": lambda outputs, y: F.mse_loss(outputs.squeeze(1), y),
    "three numbers": F.mse_loss,
}


@pytest.mark.parametrize("kind", WITHOUT_CLASSES)
def test_fedavg_equals_a_plain_loop_bit_for_bit(tmp_path, kind):
    model, data = by_hand(made(kind), LOSSES[kind])
    run = experiment(tmp_path, FedAvg(), scenario=made(kind), seed=SEED)
    run.fit()
    assert same_bytes(run.state["model"], dict(model.state_dict()))
    outputs, y = model(data.data.x_test).detach(), data.data.y_test
    last = run.csv.rows[-1]
    assert last["global/loss"] == pytest.approx(float(LOSSES[kind](outputs, y)), rel=1e-6)
    if kind == "several labels":
        assert last["global/acc"] == pytest.approx(float(((outputs > 0) == (y > 0)).float().mean()), rel=1e-6)
    else:
        assert last["global/mae"] == pytest.approx(float((outputs - y.view_as(outputs)).abs().mean()), rel=1e-6)
        assert not any("acc" in name for name in last)


def test_fedprox_equals_a_plain_loop_bit_for_bit(tmp_path):
    scenario = made("several labels")
    model, _ = by_hand(scenario, LOSSES["several labels"], mu=0.7)
    assert same_bytes(weights_after(tmp_path, FedProx(mu=0.7), scenario=scenario, seed=SEED), dict(model.state_dict()))


@pytest.mark.parametrize("kind", WITHOUT_CLASSES)
def test_client_metrics_are_computed_on_its_own_samples(tmp_path, kind):
    run = experiment(tmp_path, scenario=made(kind), seed=SEED, clients_per_round=None)
    run.fit()
    name = "acc" if kind == "several labels" else "mae"
    test, values, sizes = run.test(), [], []
    for client, shard in enumerate(run.data.shards):
        x, y = run.data.data.x_train[shard.test], run.data.data.y_train[shard.test]
        with torch.no_grad():
            outputs = run.client_module(client)(x)
        right = ((outputs > 0) == (y > 0)).float() if name == "acc" else (outputs - y.view_as(outputs)).abs()
        values.append(float(right.mean()))
        sizes.append(len(y))
        assert test.clients[client][name] == pytest.approx(values[-1], rel=1e-6)
    assert test[f"client/{name}_weighted"] == pytest.approx(np.average(values, weights=sizes), rel=1e-6)
    assert test[f"client/{name}_worst_decile"] == pytest.approx(min(values) if name == "acc" else max(values), rel=1e-6)


@pytest.mark.parametrize("engine", ["sequential", pytest.param("processes", marks=pytest.mark.thorough)])
def test_a_run_that_diverges_names_the_range_of_the_targets(tmp_path, engine):
    run = experiment(tmp_path, scenario=Scenario(Made("one number", scale=400.0), IID(), 6), rounds=20, engine=engine)
    with pytest.raises(ClientFailure, match="'mse' is NaN or Inf") as raised:
        run.fit()
    low, high = (float(value) for value in run.data.data.y_train.aminmax())
    hint = f". The targets range from {low:g} to {high:g}. Scale them to about -1 to 1 in the data"
    assert str(raised.value).endswith(hint)


def test_small_targets_and_classes_are_no_reason_to_diverge():
    assert Regression().divergence_hint(torch.tensor([-10.0, 3.0])) == ""
    assert "from -10.5 to 3. " in Regression().divergence_hint(torch.tensor([-10.5, 3.0]))
    assert Classification().divergence_hint(torch.tensor([900, 3])) == ""


def test_the_best_round_has_the_lowest_error(tmp_path):
    run = experiment(tmp_path, scenario=made("one number"), rounds=6, callbacks=[EarlyStopping(patience=9)])
    summary = run.fit().summary
    errors = [row["global/mae"] for row in run.csv.rows]
    losses = [row["global/loss"] for row in run.csv.rows]
    assert summary["global/mae_best"] == min(errors)
    assert summary["global/mae_best_round"] == errors.index(min(errors)) + 1
    assert {f"client/mae_{how}_best" for how in ("mean", "weighted")} <= summary.keys()
    assert not any(name.startswith("R_") for name in summary)
    watcher = next(each for each in run.callbacks if isinstance(each, EarlyStopping))
    assert -watcher.best == min(losses)
    assert max(run.checkpoints.rounds()) == 6
    assert losses.index(min(losses)) + 1 in run.checkpoints.rounds()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ["stacked", "processes"])
@pytest.mark.parametrize("kind", WITHOUT_CLASSES)
@in_float64
def test_every_engine_gives_the_same_rows(tmp_path, kind, engine):
    rows = []
    for name in ("sequential", engine):
        run = experiment(tmp_path / name, scenario=made(kind), engine=name, rounds=2)
        run.fit()
        rows.append(untimed(run.csv.rows))
    for one, other in zip(*rows, strict=True):
        assert one == (pytest.approx(other, rel=1e-9, abs=1e-9) if engine == "stacked" else other)


def test_a_resumed_run_ends_in_the_same_bytes(tmp_path):
    whole, half = in_two_parts(tmp_path, FedAvg, 2, scenario=made("three numbers"), rounds=4)
    assert same_bytes(half.state["model"], whole.state["model"])


def test_partition_csv_counts_samples(tmp_path):
    run = experiment(tmp_path, scenario=made("one number", QuantitySkew(min_samples=5)), rounds=1)
    run.fit()
    rows = list(csv.DictReader((tmp_path / "partition.csv").read_text().splitlines()))
    assert list(rows[0]) == ["client", "split", "samples"]
    held = {(int(row["client"]), row["split"]): int(row["samples"]) for row in rows}
    assert held == {
        (k, split): len(getattr(shard, split)) for k, shard in enumerate(run.data.shards) for split in ("train", "test")
    }


@pytest.mark.parametrize("options", [{"local_test": "official"}, {"train_samples": 100}, {"train_samples": 0.5}])
def test_the_scenarios_options_work_without_classes(options):
    data = made("several labels", **options).build(SEED)
    held = [len(shard.train) + len(shard.test) for shard in data.shards]
    if "train_samples" in options:
        assert sum(held) == (100 if options["train_samples"] == 100 else 120)
    else:
        tests = torch.cat([shard.test for shard in data.shards])
        assert len(tests) == 60
        assert torch.equal(data.data.y_train[tests].unique(), torch.tensor([0, 1]))
        assert {int(i) for i in tests} == set(range(240, 300))


# --- Objectives without a run ---


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (torch.tensor([0, 1, 2]), Classification),
        (torch.tensor([[0, 1], [1, 1]]), MultiLabel),
        (torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), MultiLabel),
        (torch.tensor([[True, False]]), MultiLabel),
        (torch.tensor([0.5]), Regression),
        (torch.tensor([[0.0, 1.0]]), Regression),
    ],
)
def test_the_default_objective_depends_on_the_labels(labels, kind):
    assert type(objective_of(labels)) is kind


@pytest.mark.parametrize(
    ("objective", "targets", "by_sample"),
    [
        (Classification(), torch.tensor([0, 2, 1]), lambda o, y: -o.log_softmax(1)[range(3), y]),
        (
            MultiLabel(),
            torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.uint8),
            lambda o, y: -(torch.where(y > 0, o.sigmoid(), 1 - o.sigmoid())).log().mean(1),
        ),
        (Regression(), torch.randn(3, 3), lambda o, y: (o - y).square().mean(1)),
        (Regression("l1"), torch.randn(3, 3), lambda o, y: (o - y).abs().mean(1)),
        (
            Regression("huber"),
            torch.randn(3, 3),
            lambda o, y: torch.where((o - y).abs() < 1, (o - y).square() / 2, (o - y).abs() - 0.5).mean(1),
        ),
    ],
)
def test_losses_are_means_and_sums_over_samples(objective, targets, by_sample):
    outputs = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)) * 2
    expected = by_sample(outputs, targets)
    torch.testing.assert_close(objective.loss(outputs, targets), expected.mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(objective.loss(outputs, targets, "sum"), expected.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(objective.sums(outputs, targets)["loss"], expected.sum(), rtol=1e-5, atol=1e-6)


def test_label_smoothing_affects_only_training():
    outputs, y = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    logs = outputs.log_softmax(1)[0]
    smooth = Classification(label_smoothing=0.3)
    torch.testing.assert_close(smooth.loss(outputs, y), -(0.7 * logs[0] + 0.1 * logs.sum()))
    torch.testing.assert_close(smooth.sums(outputs, y)["loss"], -logs[0])


def test_objectives_are_equal_if_their_options_are():
    assert Regression("l1") == Regression("l1") != Regression()
    assert Classification() == Classification() != MultiLabel()
    assert hash(Regression("l1")) == hash(Regression("l1"))


def test_all_objectives_are_listed():
    known = {CausalLM, Classification, MultiLabel, Regression, Segmentation, TokenClassification}
    assert known == set(classes("objectives"))


# --- Refusals ---


@pytest.mark.parametrize("algorithm", [FedSKC(), FedDW(), FedUV(), UAPDFL()])
def test_a_method_of_classes_refuses_other_labels(tmp_path, algorithm):
    part = next(algorithm.of_classes)
    message = f"^algorithm: {part} compares classes, but the labels are for Regression, not classes. Use another method"
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path / "run", algorithm, scenario=made("one number")).fit()
    assert not (tmp_path / "run").exists()


PLAIN = {
    *("APPLE", "CFL", "CriticalFL", "DFedAvgM", "DisPFL", "Ditto", "FedALA", "FedAMP", "FedAdagrad"),
    *("FedAdam", "FedAvg", "FedAvgM", "FedBABU", "FedFomo", "FedPer", "FedProx", "FedRep", "FedSiamDA", "FedYogi"),
    *("APFL", "FedACG", "FedAT", "FedAsync", "FedBN", "FedBuff", "FedCM", "FedDC", "FedDyn", "FedNova", "FedSAM"),
    *("LGFedAvg", "MoFedSAM", "PFedMe"),
    *("HeteroFL", "HeurFedAMP", "IFCA", "Local", "MOON", "PeerAlgorithm", "PeerCriticalFL", "PeerFedPer"),
    *("AFL", "FedDGGA", "PerFedAvg", "QFFL", "SCAFFOLD", *ADAPTERS),
}
"""Methods that take every objective: each is run on numbers below."""


def test_every_method_is_known_to_need_classes_or_not():
    assert {cls.__name__ for cls in classes("algorithms") if not any(cls().of_classes)} == PLAIN


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "cls", [cls for cls in classes("algorithms") if cls.__name__ in PLAIN - {*ADAPTERS}], ids=lambda cls: cls.__name__
)
def test_methods_without_classes_learn_numbers(tmp_path, cls):
    parts = {"FedSiamDA": {"head": Head(prediction=8)}, "FedBN": {"norm": "batch"}}
    model = partial(MLP, hidden=(16,), **parts.get(cls.__name__, {}))
    slow = partial(torch.optim.SGD, lr=0.05)
    run = experiment(tmp_path, cls(), scenario=made("one number"), model=model, rounds=2, optimizer=slow)
    run.fit()
    name = "global/loss" if cls().one_model else "client/loss_mean"
    assert 0 < run.csv.rows[-1][name] < run.csv.rows[0][name] * 1.5


@pytest.mark.parametrize("partition", [Dirichlet(), Shards(), Pathological()])
def test_a_partition_of_classes_refuses_other_labels(partition):
    message = f"scenario.partition: {type(partition).__name__} splits by class, but the labels are for"
    with pytest.raises(ConfigError, match=message):
        made("several labels", partition).build(0)


def test_a_long_tail_needs_classes():
    with pytest.raises(ConfigError, match=r"^scenario.long_tail: "):
        made("one number", long_tail=10).build(0)


def test_a_figure_of_classes_refuses_other_labels(tmp_path):
    with pytest.raises(ConfigError, match=r"ClassRelations: "):
        experiment(tmp_path / "run", scenario=made("one number"), callbacks=[ClassRelations()]).fit()


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Classification(), "y_train needs one whole number per sample, got float32 of shape (240,)"),
        (MultiLabel(), "y_train needs 1 labels of 0 and 1 per sample, got float32 of shape (240,)"),
    ],
)
def test_labels_that_are_not_for_the_objective_are_refused(objective, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        made("one number", objective=objective).build(0)


@pytest.mark.parametrize(
    ("objective", "labels", "outputs", "message"),
    [
        (MultiLabel(), torch.tensor([[0, 2]]), 2, "has other numbers than 0 and 1"),
        (MultiLabel(), torch.tensor([[0, 1]]), 3, "needs 3 labels of 0 and 1 per sample"),
        (Regression(), torch.tensor([float("nan")]), 1, "holds NaN or Inf"),
        (Regression(), torch.tensor([1]), 1, "needs float32 numbers like the other labels, got int64"),
        (Regression(), torch.zeros(4, 2), 1, "needs 1 numbers per sample, got float32 of shape (4, 2)"),
        (Regression(), torch.zeros(4), 2, "needs 2 numbers per sample, got float32 of shape (4,)"),
    ],
)
def test_wrong_labels_are_refused(objective, labels, outputs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        objective.check(labels, outputs)


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match=r"scenario.objective.label_smoothing: 1 is outside \[0, 1\)"):
        Classification(label_smoothing=1)
    with pytest.raises(ConfigError, match=r"^scenario.objective.criterion: 'rmse'"):
        Regression("rmse")


class Median(Objective):
    """An objective of a user's own: the pinball loss of the median."""

    term = "pinball"

    def loss(self, outputs, targets, reduction="mean"):
        loss = (outputs[:, 0] - targets).abs() / 2
        return loss.mean() if reduction == "mean" else loss.sum()

    def check(self, labels, outputs):
        """Accept all labels."""


def test_a_users_own_objective_is_trained_and_evaluated(tmp_path):
    run = experiment(tmp_path, scenario=made("one number", objective=Median()))
    run.fit()
    last, module = run.csv.rows[-1], run.worker.modules.build_shared(run.state["model"])
    with torch.no_grad():
        loss = Median().loss(module(run.data.data.x_test), run.data.data.y_test)
    assert last["global/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert {"client/train_pinball", "client/loss_mean"} <= last.keys()


def test_a_config_names_the_objective(tmp_path):
    words = ["--scenario.objective", "Classification", "--scenario.objective.label_smoothing", "0.5"]
    commands.tiny(tmp_path / "run", "--algorithm", "FedAvg", *words)
    assert "label_smoothing: 0.5" in (tmp_path / "run" / "config.yaml").read_text()
    config = ["--config", tmp_path / "run.yaml", "--run_dir", tmp_path / "other"]
    refused = commands.run("fit", *config, "--scenario.objective", "MultiLabel")
    assert refused.code == 2
    assert re.search("y_train needs 10 .* int64", refused.err)

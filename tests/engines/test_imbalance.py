"""Class weights in the training loss, and batches in which all classes of a client occur equally often."""

import copy
import re
from functools import partial

import pytest
import torch
from experiments import assert_near, descend, digits, experiment, full_batch, in_float64, samples_of, weights_after
from stacking import DOUBLE, compare
from torch.nn import functional as F

from fl_lightning.algorithms import Ditto, FedAvg, FedDW, FedLC, FedProx
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message
from fl_lightning.core.objectives import Classification, MultiLabel
from fl_lightning.data import IID, Dataset, LoadedData, Scenario
from fl_lightning.data.few_shot import FewShot
from fl_lightning.data.transforms import Normalize
from fl_lightning.engines import StackedEngine, Task
from fl_lightning.models import MLP

TEN = [0.5, 1.0, 2.0, 0.25, 4.0, 1.0, 1.5, 3.0, 0.125, 1.0]


class Labelled(Dataset):
    """Random inputs with given labels."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def load(self) -> LoadedData:
        x = torch.randn(len(self.y), 5, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        outputs = self.y.shape[1] if self.y.ndim == 2 else 2 if self.y.dtype == torch.int64 else 1
        return LoadedData(x, self.y, x[:9], self.y[:9], outputs, Normalize())


def labelled(y: torch.Tensor, clients: int = 2) -> Scenario:
    return Scenario(Labelled(y), IID(), clients, local_test=0.0)


# --- Class weights ---


def balanced(y: torch.Tensor) -> list[float]:
    """Return the weight of each sample by counting: n / (number of classes · samples of its class)."""
    labels = y.tolist()
    return [len(labels) / (len(set(labels)) * labels.count(label)) for label in labels]


@in_float64
@pytest.mark.parametrize("weights", ["balanced", TEN])
def test_fedavg_descends_the_weighted_mean_of_each_clients_losses(tmp_path, weights):
    options = full_batch(0.1, epochs=1) | {"rounds": 1, "clients_per_round": None, "class_weights": weights}
    run = experiment(tmp_path, **options)
    run.fit()
    model = run.worker.modules.build().backbone
    total = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for client, size in enumerate(run.algorithm.samples):
        x, y = samples_of(run, client)
        each = torch.tensor(balanced(y) if weights == "balanced" else [TEN[label] for label in y.tolist()])
        local = copy.deepcopy(model)
        losses = -local(run.data.data.prepare(x).double()).log_softmax(dim=1)[torch.arange(len(y)), y]
        descend(local, (each * losses).sum() / each.sum(), lr=0.1)
        assert size == len(y)
        for name, value in local.state_dict().items():
            total[name] += size / sum(run.algorithm.samples) * value
    assert_near(run.state["model"], total, 1e-6)  # the weights of the classes are float32


def test_weights_that_are_balanced_have_mean_one():
    y = torch.tensor([2, 2, 2, 0, 2, 0])
    weights = Classification().balanced_weights(y, 4)
    assert weights.tolist() == [6 / (2 * 2), 1.0, 6 / (2 * 4), 1.0]
    assert float(weights[y].mean()) == 1.0


def test_a_labels_weight_is_its_negatives_per_positive():
    y = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0]])
    assert MultiLabel().balanced_weights(y, 3).tolist() == [3.0, 1.0, 1.0]


def test_the_weighted_loss_of_several_labels_multiplies_the_positives():
    outputs, y = torch.randn(6, 3), torch.randint(0, 2, (6, 3))
    weights = torch.tensor([3.0, 1.0, 0.5])
    p = outputs.sigmoid()
    expected = -(weights * y * p.log() + (1 - y) * (1 - p).log())
    objective = MultiLabel().weighted(weights)
    torch.testing.assert_close(objective.loss(outputs, y), expected.mean())
    torch.testing.assert_close(objective.loss(outputs, y, "sum"), expected.mean(dim=1).sum())


@pytest.mark.parametrize("objective", [Classification(0.1), MultiLabel()])
def test_evaluation_is_not_weighted(objective):
    outputs = torch.randn(5, 3)
    y = torch.randint(0, 2, (5, 3) if isinstance(objective, MultiLabel) else (5,))
    weighted = objective.weighted(torch.tensor([5.0, 0.1, 2.0]))
    assert objective.sums(outputs, y) == weighted.sums(outputs, y)
    assert weighted.loss(outputs, y) != objective.loss(outputs, y)
    assert objective.weights is None


@pytest.mark.parametrize("algorithm", [FedAvg, partial(FedProx, mu=0.1), FedDW])
@pytest.mark.parametrize("weights", ["balanced", TEN])
def test_stacked_clients_have_their_own_weights(tmp_path, recwarn, algorithm, weights):
    """The engine would warn if it trained the clients one by one."""
    compare(tmp_path, algorithm(), class_weights=weights, batch_sampler="balanced")
    assert not any("StackedEngine" in str(warning.message) for warning in recwarn)


@in_float64
def test_stacked_clients_with_several_labels_in_several_rounds(tmp_path):
    y = (torch.rand(60, 3, generator=torch.Generator().manual_seed(1)) < torch.tensor([0.1, 0.5, 0.8])).long()
    options = {"scenario": labelled(y, 4), "clients_per_round": 2, "trainer": DOUBLE, "class_weights": "balanced"}
    one = weights_after(tmp_path / "one", **options)
    assert_near(weights_after(tmp_path / "other", engine=StackedEngine(), **options), one)
    plain = weights_after(tmp_path / "plain", **options | {"class_weights": None})
    assert not torch.allclose(one["head.weight"], plain["head.weight"])


def test_a_method_that_trains_a_second_model_weights_it_too(tmp_path):
    run = experiment(tmp_path, Ditto(lam=0.0), class_weights="balanced", rounds=1)
    run.check()
    module = run.starting_module(0)
    x, y = samples_of(run, 0)
    x = run.data.data.prepare(x)
    weights = torch.tensor(balanced(y))
    expected = (weights * F.cross_entropy(module.own(x), y, reduction="none")).sum() / weights.sum()
    torch.testing.assert_close(module.own_loss(x, y), expected)


def test_a_module_without_an_orchestrator_takes_weights():
    module = ClientModule(MLP(in_shape=(4,), num_classes=3, hidden=(4,)))
    x, y, weights = torch.randn(8, 4), torch.randint(0, 3, (8,)), torch.tensor([1.0, 2.0, 0.5])
    module.context = FitContext(class_weights=weights)
    assert torch.equal(module.losses(module.step((x, y)))["ce"], F.cross_entropy(module(x), y, weights))


# --- The sampler ---


@pytest.mark.parametrize("round", [1, 2])
def test_balanced_batches_draw_each_class_equally_often(tmp_path, round):
    run = experiment(tmp_path, batch_sampler="balanced", scenario=digits(alpha=0.2))
    run.check()
    for client in range(run.clients):
        task = Task(round, client, Message(), {})
        _, y = samples_of(run, client)
        passes = [list(run.worker.client_data.batches(task).indices()) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*passes, strict=True))  # only the seed decides
        assert [len(batch) for batch in passes[0]] == [len(batch) for batch in torch.arange(len(y)).split(64)]
        assert set(torch.cat(passes[0]).tolist()) <= set(run.data.shards[client].train.tolist())
        batches = run.worker.client_data.batches(task)
        drawn = run.data.data.y_train[torch.cat([torch.cat(list(batches.indices())) for _ in range(40)])]
        counts, classes = torch.bincount(drawn, minlength=10).double(), y.unique()
        assert counts.sum() == counts[classes].sum() == 40 * len(y)
        expected = counts.sum() / len(classes)
        chi_square = float(((counts[classes] - expected) ** 2 / expected).sum())
        assert chi_square < len(classes) - 1 + 5 * (2 * (len(classes) - 1)) ** 0.5  # five standard deviations


def test_samples_of_a_class_are_drawn_equally_often(tmp_path):
    scenario = labelled(torch.tensor([0] * 30 + [1] * 6), 1)
    run = experiment(tmp_path, batch_sampler="balanced", scenario=scenario, clients_per_round=None)
    run.check()
    index = run.data.shards[0].train
    batches = run.worker.client_data.batches(Task(1, 0, Message(), {}))
    drawn = torch.bincount(torch.cat([torch.cat(list(batches.indices())) for _ in range(400)]), minlength=36).double()
    for label in (0, 1):
        counts = drawn[index[run.data.data.y_train[index] == label]]
        chi_square = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert chi_square < len(counts) - 1 + 5 * (2 * (len(counts) - 1)) ** 0.5  # five standard deviations
        assert counts.mean() > 100


def test_uploads_keep_their_weight_and_another_round_draws_anew(tmp_path):
    run = experiment(tmp_path, batch_sampler="balanced", class_weights="balanced")
    run.check()
    first, second = (list(run.worker.client_data.batches(Task(round, 0, Message(), {})).indices()) for round in (1, 2))
    assert not torch.equal(torch.cat(first), torch.cat(second))
    result = run.worker.run(run.server.task(1, 0, run.server.download(1, 0)))
    assert result.upload.numbers == {"n_samples": len(run.data.shards[0].train)}


# --- Refusals ---


class Own(MultiLabel):
    """An objective with a loss of its own."""

    def loss(self, outputs, targets, reduction="mean"):
        return super().loss(outputs, targets, reduction)


REFUSED = {
    "too few": (digits(), {"class_weights": [1.0, 2.0]}, "class_weights: 2 weights, but the number of outputs is 10."),
    "numbers": (
        labelled(torch.rand(20)),
        {"class_weights": "balanced"},
        "class_weights: the loss of Regression has no class weights. Leave class_weights out.",
    ),
    "numbers drawn": (
        labelled(torch.rand(20)),
        {"batch_sampler": "balanced"},
        "batch_sampler: balanced draws from each class equally often, but the labels are for Regression, not classes.",
    ),
    "labels drawn": (
        labelled(torch.randint(0, 2, (20, 3))),
        {"batch_sampler": "balanced"},
        "batch_sampler: balanced draws from each class equally often, but the labels are for MultiLabel, not classes.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(tmp_path, case):
    scenario, options, message = REFUSED[case]
    run = experiment(tmp_path, scenario=scenario, clients_per_round=None, **options)
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        run.check()


def test_a_loss_that_may_not_use_the_weights_is_refused(tmp_path):
    scenario = labelled(torch.randint(0, 2, (20, 3)))
    scenario.objective = Own()
    run = experiment(tmp_path, scenario=scenario, clients_per_round=None, class_weights=[1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match=r"^class_weights: .*Own"):
        run.check()


def test_a_method_that_replaces_the_objectives_loss_is_refused(tmp_path):
    run = experiment(tmp_path, FedLC(), class_weights="balanced")
    with pytest.raises(ConfigError, match=r"^class_weights: .* ce\."):
        run.check()


def test_episodes_are_not_sampled(tmp_path):
    run = experiment(tmp_path, batch_sampler="balanced")
    build = run.scenario.build

    def with_episodes(*args):
        data = build(*args)
        data.data.cut = FewShot().cut
        return data

    run.scenario.build = with_episodes
    with pytest.raises(ConfigError, match="batches of its own"):
        run.check()
    assert LoadedData.cut is not FewShot().cut


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": [1.0, 0.0]}, "class_weights: 0.0 is not above 0; to ignore a class, give it a small weight"),
        ({"class_weights": [float("nan")]}, "class_weights: nan is no finite number"),
        ({"class_weights": "equal"}, "class_weights: 'equal' not found. Use balanced or a list."),
        ({"batch_sampler": "even"}, "batch_sampler: 'even' not found. Use shuffle or balanced."),
    ],
)
def test_bad_values_are_refused_at_once(options, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        LocalTraining(**options)

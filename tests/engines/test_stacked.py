"""The stacked engine: equal to the sequential engine except for rounding, and refusals of what cannot be stacked."""

import copy
from functools import partial
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from experiments import NormMLP, digits, experiment, same_bytes
from lightning.pytorch.plugins.precision import MixedPrecision
from stacking import (
    DOUBLE,
    LOCAL_WORK,
    Augmented,
    DrawingHooks,
    NoisyUpload,
    Spoilt,
    assert_close,
    assert_equal_rounds,
    compare,
    results,
    tasks,
)
from task_runners import run_tasks
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from fl_lightning.algorithms import (
    UAPDFL,
    CwFedAvg,
    DistillingWeights,
    FedAvg,
    FedBABU,
    FedDW,
    FedGen,
    FedProto,
    FedProx,
    FedSiamDA,
    FedSKC,
    HistoryContrast,
    Prototypical,
    WeightDistribution,
)
from fl_lightning.algorithms.base import Aggregation
from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.task import Tasks
from fl_lightning.data import Arrays, Partition, Scenario
from fl_lightning.engines import SequentialEngine, StackedEngine
from fl_lightning.engines.stacked import OPTIMIZERS
from fl_lightning.engines.stacked_step import StackedStep
from fl_lightning.engines.step_contents import ClientStep, StepContents
from fl_lightning.engines.trainer import obstacle_to_loop
from fl_lightning.models import (
    CNN,
    CNN4,
    MLP,
    Backbone,
    FastText,
    Head,
    LeNet,
    MobileNetV2,
    ResNet8,
    ShuffleNetV2,
    TextCNN,
)

pytestmark = pytest.mark.numeric

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


# --- Switches of methods that change a client's step; tests/algorithms/test_methods.py has every method ---

HEADS = partial(MLP, hidden=(16,), head=Head(projection=8, prediction=8))
ALGORITHMS = {
    "local buffers": (partial(FedAvg, buffers="local"), {"model": NormMLP}),
    "dropped buffers": (partial(FedAvg, buffers="drop"), {"model": NormMLP}),
    "FedGen's code": (partial(FedGen, beta=1.0, reference=True), {"model": NormMLP}),
    "FedSKC's code": (partial(FedSKC, preset="reference"), {"model": NormMLP}),
    "cwFedAVG's code": (partial(CwFedAvg, preset="reference"), {"model": NormMLP, "batch_size": 8}),
    "UA-PDFL's code": (partial(UAPDFL, n_com=2, preset="reference"), {"model": NormMLP}),
    "no stop-gradient": (partial(FedSiamDA, mu=0.5, stop_gradient=False), {"model": HEADS}),
    "frozen head": (FedBABU, {"model": NormMLP}),
    "last epoch's prototypes": (partial(FedProto, seen="last_epoch"), {}),
    "all terms": (
        lambda: FedProx(
            mu=0.1, loss_terms=[WeightDistribution(1.0), DistillingWeights(1.0, allow_bias=True), HistoryContrast(0.1)]
        ),
        {},
    ),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_of_methods_that_change_a_step(tmp_path, name):
    algorithm, options = ALGORITHMS[name]
    compare(tmp_path, algorithm(), **options)


# --- What a fit is made of, in float64, where rounding does not hide a mistake ---


@pytest.mark.fast_cases(2)
@pytest.mark.filterwarnings("ignore:trainer.max_steps")
@pytest.mark.parametrize("name", LOCAL_WORK)
def test_local_work_and_clipping(tmp_path, name):
    run = compare(
        tmp_path,
        FedAvg(buffers="local"),
        model=NormMLP,
        trainer=DOUBLE | LOCAL_WORK[name],
        batch_size=12,
        lr_scheduler=partial(ExponentialLR, gamma=0.5),
    )
    sizes = {len(shard.train) % 12 for shard in run.data.shards}
    assert len(sizes) > 2  # incomplete batches of several sizes


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(tmp_path, name):
    """Clients of unequal numbers of steps, some fresh: each has its own step count and moments."""
    optimizer = partial(getattr(torch.optim, name), lr=0.01, **({} if name == "Rprop" else {"weight_decay": 0.01}))
    trainer = DOUBLE | {"max_epochs": 1}
    compare(tmp_path, optimizer=optimizer, optimizer_state="kept", trainer=trainer, batch_size=16)


@pytest.mark.thorough
def test_a_scheduler_that_steers_momentum(tmp_path):
    scheduler = partial(OneCycleLR, max_lr=0.1, total_steps=3)
    compare(tmp_path, lr_scheduler=scheduler, trainer=DOUBLE | {"max_epochs": 3}, optimizer=MOMENTUM)


@pytest.mark.thorough
def test_each_client_draws_its_own_random_numbers(tmp_path):
    plain = digits()
    scenario = Augmented(plain.dataset, plain.partition, plain.clients)
    trainer = DOUBLE | {"max_epochs": 2}
    compare(tmp_path, NoisyUpload(loss_terms=[DrawingHooks()]), scenario=scenario, model=NormMLP, trainer=trainer)


class Replacing(LossTerm):
    """Replaces a parameter by one that the optimizer does not know."""

    def begin_epoch(self, module):
        if module.current_epoch:
            module.backbone.head.bias = nn.Parameter(module.backbone.head.bias.detach() * 0.9)

    def forward(self, step):
        return step.logits.new_zeros(())


def test_a_replaced_parameter_is_not_stacked(tmp_path):
    trainer = DOUBLE | {"max_epochs": 2}
    with pytest.warns(UserWarning, match="'head.bias'"):
        compare(tmp_path, FedAvg(loss_terms=[Replacing()]), trainer=trainer)


class Epochs(LossTerm):
    """Depends on the epoch and step of a module and on the length of its fit."""

    def begin(self, module):
        self.module = [module]
        self.start = float(module.trainer.max_epochs + module.trainer.estimated_stepping_batches)

    def begin_epoch(self, module):
        self.so_far = torch.tensor(float(module.global_step))

    def forward(self, step):
        (module,) = self.module
        here = 1 + module.current_epoch + module.trainer.max_epochs + self.so_far
        return step.logits.square().mean() * here * 1e-2


@pytest.mark.filterwarnings("ignore:trainer.max_steps")
@pytest.mark.parametrize("work", [{"max_epochs": 2}, {"max_epochs": 3, "max_steps": 8}, {"max_steps": 8}])
@pytest.mark.fast_cases(1)
def test_a_module_sees_its_own_progress(tmp_path, work):
    compare(tmp_path, FedAvg(loss_terms=[Epochs()]), trainer=DOUBLE | work, batch_size=16)


class Stops(LossTerm):
    """Stops clients with more than 30 samples at some moment of their fits."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def begin(self, module):
        self._at("fit", module)

    def begin_epoch(self, module):
        self._at(module.current_epoch, module)

    def forward(self, step):
        return step.logits.square().mean()

    def _at(self, moment, module):
        if moment == self.moment and module.context.class_counts.sum() > 30:
            module.trainer.should_stop = True


class Ended(FedAvg):
    """Uploads the progress of a client's module at the end of its fit."""

    def upload(self, module, *rest):
        at = torch.tensor([module.steps, module.current_epoch, module.global_step])
        return super().upload(module, *rest).plus({"at": {"at": at}})

    def aggregation(self, round):
        return WithoutProgress(self, round)


class WithoutProgress(Aggregation):
    def add(self, upload):
        super().add(upload._replace(message=upload.message.without("at")))


@pytest.mark.parametrize("moment", ["fit", 0, 1, "never"])
@pytest.mark.fast_cases(1)
def test_a_client_stops_alone(tmp_path, moment):
    trainer = DOUBLE | {"max_epochs": 3}
    run = compare(tmp_path, Ended(loss_terms=[Stops(moment)]), trainer=trainer, batch_size=16)
    assert len({len(shard.train) > 30 for shard in run.data.shards}) == 2


@pytest.mark.thorough
def test_mixed_precision(tmp_path):
    trainer = {"accelerator": "cpu", "max_epochs": 2, "precision": "bf16-mixed"}
    compare(
        tmp_path, FedProx(mu=0.1), 2e-2, model=NormMLP, trainer=trainer, optimizer=partial(torch.optim.SGD, lr=0.02)
    )


# --- A step of every model ---

IMAGES = {
    "mlp_cosine": partial(MLP, head=Head(classifier="cosine", projection=8)),
    "predictor": partial(MLP, head=Head(projection=8, prediction=8)),
    "cnn": CNN,
    "cnn4": CNN4,
    "lenet": LeNet,
    "resnet8": ResNet8,
    "resnet8_group": partial(ResNet8, norm="group"),
    "shufflenet": ShuffleNetV2,
    "mobilenet": MobileNetV2,
}
TEXTS = {"fasttext": FastText, "textcnn": TextCNN}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", [*IMAGES, *TEXTS])
def test_a_step_of_every_model(name):
    """Gradients, losses and buffers of three clients, each with weights and a batch of its own."""
    if name in IMAGES:
        build, x = partial(IMAGES[name], in_shape=(3, 16, 16)), torch.randn(3, 4, 3, 16, 16, dtype=torch.float64)
    else:
        build, x = partial(TEXTS[name], in_shape=(12,), vocab_size=50), torch.randint(1, 60, (3, 4, 12))
        x[..., 7:] = 0  # padding, whose vector learns nothing
    y = torch.randint(0, 5, (3, 4))
    clients = [ClientModule(build(num_classes=5).double()).train() for _ in range(3)]
    draws = []
    for i in range(3):
        torch.manual_seed(i)
        draws.append(RandomStates(torch.device("cpu")))
    own = [{**dict(c.backbone.named_parameters()), **dict(c.backbone.named_buffers())} for c in clients]
    stacked = {
        name: torch.stack([one[name].detach() for one in own]).requires_grad_(value.requires_grad)
        for name, value in own[0].items()
    }
    steps = {row: StepContents(ClientStep(client)) for row, client in enumerate(clients)}
    outcome = StackedStep(steps, torch.device("cpu"), dict(enumerate(draws)))(stacked, [0, 1, 2], x, y)
    outcome.loss.sum().backward()
    for i, client in enumerate(clients):
        torch.manual_seed(i)
        loss = F.cross_entropy(client(x[i]), y[i])
        loss.backward()
        assert torch.allclose(outcome.loss[i], loss, rtol=1e-9)
        for name, value in own[i].items():
            if value.grad is None and value.requires_grad:
                assert stacked[name].grad is None
            elif value.requires_grad:
                assert_close({"": stacked[name].grad[i]}, {"": value.grad}, 1e-7)
            else:
                assert_close({"": stacked[name][i]}, {"": value}, 1e-9)


# --- Whole runs ---


@pytest.mark.thorough
def test_the_size_of_a_stack_changes_rounding_at_most(tmp_path):
    run = experiment(tmp_path, model=NormMLP, rounds=1, trainer=DOUBLE)
    run.fit()
    together, apart = (results(run, StackedEngine(clients), 2, evaluate=True) for clients in (64, 2))
    assert_equal_rounds(together, apart, 1e-12)


@pytest.mark.parametrize(("clients", "fitting"), [(4, 64), (64, 4)])
@pytest.mark.parametrize("most", [False, True])
def test_a_batch_of_the_round_trains_as_many_tasks_as_are_stacked(tmp_path, monkeypatch, clients, fitting, most):
    run = experiment(tmp_path, rounds=1)
    run.check()
    largest = max(parameter.nbytes for parameter in run.worker.template.parameters())
    monkeypatch.setattr("fl_lightning.engines.stacked.MAX_TENSOR", fitting * largest + (largest if most else 1))
    fits, fit = [], L.Trainer.fit
    monkeypatch.setattr(L.Trainer, "fit", lambda *args, **options: (fits.append(1), fit(*args, **options)))
    taken, seen = [], []
    made = (taken.append(task) or task for task in tasks(run, 1))
    StackedEngine(clients).run(run.worker, Tasks(range(6), made), lambda result: seen.append((len(fits), len(taken))))
    assert seen == [(1, 4)] * 4 + [(1, 6)] * 2


# --- One client's failure ---


REASONS = {"nan": "loss term 'spoilt' is NaN or Inf: lower", "begin": "not me", "epoch": "not me"}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("how", REASONS)
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_client_fails_alone(tmp_path, how, all_of_them):
    """`bad` differs among clients, so this also stacks apart what is not alike."""
    sizes = [len(shard.train) for shard in digits().build(0).shards]
    spoilt = set(sizes) if all_of_them else {sizes[2]}
    run = experiment(tmp_path, FedAvg(loss_terms=[Spoilt(how, spoilt)]), rounds=1, trainer=DOUBLE | {"max_epochs": 2})
    run.check()
    one, other = (
        {r.client: r for r in run_tasks(e, run.worker, tasks(run, 1))} for e in (SequentialEngine(), StackedEngine())
    )
    for client, size in enumerate(sizes):
        if size in spoilt:
            assert f"client {client}, round 1: {REASONS[how]}" in str(other[client].failure)
            assert str(one[client].failure) == str(other[client].failure)
            assert other[client].upload is None
        else:
            assert other[client].failure is None
            assert_close(one[client].upload.tensors, other[client].upload.tensors, 1e-9)


def test_a_client_with_too_few_samples_fails_alone(tmp_path):
    class Sizes(Partition):
        def split(self, labels, clients, rng):
            return np.split(np.arange(len(labels)), [8, 9])[:clients]

    x, y = np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 3
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    scenario = Scenario(Arrays(str(tmp_path / "data.npz")), Sizes(), 3, local_test=0.0)
    options = {"scenario": scenario, "model": NormMLP, "clients_per_round": None, "rounds": 1}
    run = experiment(tmp_path / "run", engine=StackedEngine(), on_client_failure="drop", **options)
    with pytest.warns(UserWarning, match=r"client 1, round 1: 1 training sample.*; dropped"):
        run.fit()
    assert run.csv.rows[0]["client/failed"] == 1


class LateRefusal(LossTerm):
    """Cannot be batched from the second round on."""

    def begin(self, module):
        self.late = module.context.round > 1

    def forward(self, step):
        return step.logits.sum() * (step.logits.detach().max().item() * 0 if self.late else 0)


class LateChange(LossTerm):
    """Replaces a tensor that it holds, but not in its first step, which has a full batch."""

    def begin(self, module):
        self.weights = [torch.ones(())]
        self.late = module.context.round > 1

    def forward(self, step):
        if self.late and len(step.targets) < 64:
            self.weights = [torch.zeros(())]
        return step.logits.mean() * self.weights[0].to(step.logits)


@pytest.mark.parametrize(
    ("term", "words"),
    [(LateRefusal(), ".*vmap.*item"), (LateChange(), "its forward changes 'loss_terms.0.weights'")],
    ids=["refusal", "change"],
)
@pytest.mark.fast_cases(1)
def test_clients_that_cannot_be_stacked_later_are_trained_one_after_another(tmp_path, term, words):
    run = experiment(tmp_path, FedAvg(loss_terms=[term]), rounds=1)
    run.fit()
    with pytest.warns(UserWarning, match=f"StackedEngine: trained one after another: {words}"):
        other = results(run, StackedEngine(), 2)
    one = results(run, SequentialEngine(), 2)
    assert all(same_bytes(one[client].upload.tensors, other[client].upload.tensors) for client in one)


# --- Loss terms that hold all sorts of things ---


class Holder(LossTerm):
    """Holds tensors of the client in lists, dicts, tuples, modules and as the weights themselves."""

    def begin(self, module):
        counts = module.context.class_counts.double()
        self.shares = {"of": (counts / counts.sum(), [counts.sqrt()])}
        self.live = [module.backbone.head.weight]
        self.module = [module]
        self.teacher = [copy.deepcopy(module.backbone).eval()]
        with torch.no_grad():
            self.teacher[0].head.weight.mul_(counts.sum() / 100)

    def forward(self, step):
        shares, (root,) = self.shares["of"]
        with torch.no_grad():
            seen = self.teacher[0](step.inputs)
        weight = self.live[0] * shares[:, None] + self.module[0].context.class_counts[:, None] * self.live[0]
        return (
            (step.logits * root).square().mean() * 1e-3 + weight.square().mean() + (step.logits - seen).square().mean()
        )


@pytest.mark.thorough
def test_tensors_of_a_term_are_found_in_containers_and_modules(tmp_path):
    compare(tmp_path, FedAvg(loss_terms=[Holder()]), trainer=DOUBLE | {"max_epochs": 2})


class Seen(SharedKnowledge):
    """The mean of the logits of the step before, as a buffer and as a plain attribute."""

    name = "seen"

    def initial(self, num_classes):
        return {"mean": torch.zeros(num_classes)}

    def observe(self, step, epoch):
        self.load({"mean": step.logits.detach().mean(dim=0) + epoch + 0 * step.backbone.head.bias.detach()})
        self.last = step.targets.double().mean() + step.features.detach().mean() + step.inputs.mean()

    def summarize(self, module, batches, num_classes):
        return {"mean": self.mean, "last": self.last}

    def merge(self, previous, uploads, round):
        return previous


class Feedback(LossTerm):
    """Reads what its knowledge has seen in the step before."""

    def __init__(self):
        super().__init__()
        self.seen = Seen()

    @property
    def knowledge(self):
        return (self.seen,)

    def forward(self, step):
        last = getattr(self.seen, "last", 0.0)
        return (step.logits - self.seen.mean).square().mean() * 0.1 + last * step.logits.mean()


@pytest.mark.thorough
def test_shared_knowledge_is_read_again_in_each_step(tmp_path):
    compare(tmp_path, FedAvg(loss_terms=[Feedback()]), trainer=DOUBLE | {"max_epochs": 2})


class Net(nn.Module):
    """A network without a named head, and therefore without features."""

    def __init__(self, num_classes):
        super().__init__()
        self.body, self.fc = nn.Linear(64, 16), nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc(F.relu(self.body(x.flatten(1))))


class WithoutFeatures(Seen):
    """Checks that training steps have no features."""

    def observe(self, step, epoch):
        assert step.features is None

    def summarize(self, module, batches, num_classes):
        return {"mean": self.mean}


@pytest.mark.parametrize("observed", [False, True])
def test_a_network_without_a_named_head_is_stacked(tmp_path, observed):
    term = Feedback()
    term.seen = WithoutFeatures()
    compare(tmp_path, FedAvg(loss_terms=[term] if observed else []), model=Net)


# --- Refusals ---


class Writing(LossTerm):
    def begin(self, module):
        self.sum = torch.zeros(())

    def forward(self, step):
        self.sum += step.logits.detach().mean()
        return step.logits.mean() * 0


class Stepwise(LossTerm):
    def begin(self, module):
        self.module = [module]

    def forward(self, step):
        return step.logits.mean() * self.module[0].global_step


class Noisy(LossTerm):
    def forward(self, step):
        return step.logits.mean() * torch.rand_like(step.logits[0, 0])


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x


class Recurrent(Backbone):
    def __init__(self, in_shape, num_classes):
        super().__init__(nn.RNN(8, 4), nn.Linear(4, num_classes), 4)

    def forward(self, x):
        return self.head(self.encoder(x[:, 0])[0][:, -1])


class Counted(Backbone):
    def __init__(self, in_shape, num_classes):
        super().__init__(nn.Sequential(nn.Flatten(), Calls()), nn.Linear(64, num_classes), 64)


class OwnStep(FedAvg):
    def client_module(self, backbone, optimizer=None, lr_scheduler=None):
        class Other(ClientModule):
            def training_step(self, batch, batch_idx):
                return super().training_step(batch, batch_idx)

        return Other(backbone, [], [], optimizer, lr_scheduler)


def with_term(term):
    return {"algorithm": FedAvg(loss_terms=[term])}


class OwnSchedule:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        pass


REFUSED = {
    "loss term 'siamese' .*'loss_terms.0._optimizer', of type SGD": {"algorithm": FedSiamDA(), "model": HEADS},
    "loss term 'dw' .its forward changes 'loss_terms.0._anchor'": {"algorithm": FedDW(linearize_every=2)},
    "loss term 'prototypical' .*vmap": with_term(Prototypical(1)),
    "loss term 'writing' ": with_term(Writing()),
    "loss term 'noisy' .*random numbers": with_term(Noisy()),
    "loss term 'stepwise' .it reads trainer.global_step, which differs between clients": with_term(Stepwise()),
    "Other .it has a training_step of its own": {"algorithm": OwnStep()},
    "optimizer LBFGS .only torch's ASGD": {"optimizer": torch.optim.LBFGS},
    "lr_scheduler OwnSchedule .it is not stepped": {"lr_scheduler": OwnSchedule},
    "Recurrent .*RNN, a recurrent layer": {"model": Recurrent},
    "Counted .its forward changes 'backbone.encoder.1.calls'": {"model": Counted},
    "trainer.accumulate_grad_batches .it is for one fit": {"trainer": {"accumulate_grad_batches": 2}},
    "the callback Timer .it is for one fit": {"client_callbacks": [L.pytorch.callbacks.Timer()]},
    "trainer.limit_train_batches .a share": {"trainer": {"limit_train_batches": 0.5}, "batch_size": 4},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_before_round_1(tmp_path, message):
    options = dict(REFUSED[message])
    trainer = {"accelerator": "cpu"} | options.pop("trainer", {})
    run = experiment(tmp_path, options.pop("algorithm", None), engine=StackedEngine(), trainer=trainer, **options)
    with pytest.raises(ConfigError, match=f"^engine: StackedEngine cannot stack {message}.*; use SequentialEngine$"):
        run.fit()
    assert not (tmp_path / "metrics.csv").exists()


def test_a_gradient_scaler_prevents_the_local_loop():
    """On a CPU Lightning makes bf16 of 16-mixed."""
    plugin = object.__new__(MixedPrecision)
    plugin.precision = "16-mixed"
    trainer = {"callbacks": [], "accumulate_grad_batches": 1, "limit_train_batches": 1.0, "precision_plugin": plugin}
    odd = obstacle_to_loop(SimpleNamespace(**trainer))
    assert odd == ("trainer.precision 16-mixed", "gradients are scaled for all clients alike")


def test_fewer_than_two_clients_are_refused():
    with pytest.raises(ConfigError, match=r"engine.clients: 1 is below 2; use SequentialEngine"):
        StackedEngine(1)

"""ClientModule and LossTerm alone, under plain Lightning."""

from fractions import Fraction
from functools import partial

import lightning as L
import pytest
import torch
from experiments import experiment, untimed
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.algorithms import FedAvg, FedSKC
from fl_lightning.client.loss_term import FitContext, LossTerm, Step
from fl_lightning.client.losses import LossRecord
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import describe
from fl_lightning.core.errors import ConfigError, NonFiniteError
from fl_lightning.models import MLP, FromModule


class WeightNorm(LossTerm):
    """Half the squared norm of the weights, times a coefficient."""

    def __init__(self, coefficient):
        super().__init__()
        self.coefficient = coefficient

    def forward(self, step):
        return self.coefficient * sum((p**2).sum() for p in step.backbone.parameters()) / 2


def loader(n=20, batch_size=20):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def quiet_trainer(logger=False, **options):
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(accelerator="cpu", logger=logger, **quiet, **options)


def model():
    torch.manual_seed(0)
    return MLP(in_shape=(4,), num_classes=3, hidden=(5,))


plain_lightning = pytest.mark.filterwarnings("ignore:.*(many workers|val_dataloader|LeafSpec).*")


@plain_lightning
def test_a_plain_fit_is_sgd_on_cross_entropy_plus_the_terms():
    module = ClientModule(model(), [WeightNorm(0.3)], optimizer=partial(torch.optim.SGD, lr=0.1))
    quiet_trainer(max_epochs=1).fit(module, loader())
    by_hand = model()
    ((x, y),) = loader()
    (F.cross_entropy(by_hand(x), y) + 0.3 * sum((p**2).sum() for p in by_hand.parameters()) / 2).backward()
    for trained, start in zip(module.backbone.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(trained, start - 0.1 * start.grad)


@plain_lightning
def test_losses_are_means_over_the_fits_steps():
    module = ClientModule(model(), [WeightNorm(1.0)], optimizer=partial(torch.optim.SGD, lr=0.0))
    quiet_trainer(max_epochs=2).fit(module, loader(batch_size=10))
    ce = [F.cross_entropy(module(x), y).detach().item() for x, y in loader(batch_size=10)]
    norm = sum((p**2).sum().detach().item() for p in module.parameters()) / 2
    losses = module.train_losses()
    assert losses == pytest.approx({"loss": sum(ce) / 2 + norm, "ce": sum(ce) / 2, "weight_norm": norm}, rel=1e-5)


def test_sums_of_losses_do_not_depend_on_the_order_of_the_steps():
    losses = torch.tensor([2.0**60, 0.1, 3.0, -(2.0**60), 0.7, 0.2, 1e-9]).tolist()
    record = LossRecord()
    for number, loss in enumerate(losses):
        record.add({"ce": torch.tensor(loss), "term": torch.tensor(1.0)})
        if number == 4:
            record.end_epoch()
    exact = float(sum(map(Fraction, losses))) / 7
    assert record.steps == 7
    assert record.means() == {"loss": exact + 1, "ce": exact, "term": 1.0}


@plain_lightning
def test_schedules_within_a_fit_and_over_rounds_multiply():
    module = ClientModule(
        model(),
        optimizer=partial(torch.optim.SGD, lr=0.4),
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1),
    )
    module.context = FitContext(lr_scale=0.5)
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(module, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.4 * 0.5 * 0.1**2)


@plain_lightning
def test_validation_and_test_log_loss_and_accuracy():
    module = ClientModule(model())
    trainer = quiet_trainer(max_epochs=1)
    (logged,) = trainer.test(module, loader(n=21, batch_size=10), verbose=False)
    ((x, y),) = loader(n=21, batch_size=21)
    assert logged["test_acc"] == pytest.approx(float((module(x).argmax(1) == y).float().mean()), rel=1e-6)
    assert logged["test_loss"] == pytest.approx(F.cross_entropy(module(x), y).detach().item(), rel=1e-5)
    (validated,) = trainer.validate(module, loader(n=21, batch_size=10), verbose=False)
    assert validated["val_acc"] == logged["test_acc"]


@plain_lightning
def test_each_of_several_data_loaders_has_its_own_metrics():
    module, trainer = ClientModule(model()), quiet_trainer(max_epochs=1)
    loaders = [loader(n=21, batch_size=10), loader(n=7, batch_size=4)]
    for stage, evaluate in (("val", trainer.validate), ("test", trainer.test)):
        each = evaluate(module, loaders, verbose=False)
        for number, (logged, alone) in enumerate(zip(each, loaders, strict=True)):
            expected = evaluate(module, alone, verbose=False)[0][f"{stage}_acc"]
            assert logged[f"{stage}_acc/dataloader_idx_{number}"] == expected
    assert [len(outputs) for outputs in trainer.predict(module, loaders)] == [3, 2]


@plain_lightning
def test_training_losses_reach_a_plain_trainers_logger(tmp_path):
    trainer = quiet_trainer(L.pytorch.loggers.CSVLogger(tmp_path), max_epochs=1, log_every_n_steps=1)
    module = ClientModule(model(), [WeightNorm(1.0)])
    trainer.fit(module, loader())
    assert {"train_loss", "train_ce", "train_weight_norm"} <= trainer.logged_metrics.keys()


@plain_lightning
def test_training_losses_reach_callbacks_without_a_logger():
    stopping = EarlyStopping("train_loss", patience=1, min_delta=1.0)
    trainer = quiet_trainer(max_epochs=9, callbacks=[stopping])
    trainer.fit(ClientModule(model()), loader())
    assert trainer.current_epoch == 2
    trainer = quiet_trainer(max_epochs=1)
    module = ClientModule(model())
    trainer.fit(module, loader())
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(module.train_losses()["loss"])


@plain_lightning
def test_predict_takes_batches_of_inputs_and_of_training():
    module, trainer = ClientModule(model()), quiet_trainer()
    ((x, y),) = loader()
    for data in (TensorDataset(x, y), TensorDataset(x), list(x)):
        (outputs,) = trainer.predict(module, DataLoader(data, batch_size=20))
        assert torch.equal(outputs, module(x))


def saved(module, folder, **options):
    """Fit a module in a plain `Trainer`, and return the path of the checkpoint that Lightning has written."""
    checkpoint = ModelCheckpoint(folder, **options)
    plain = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    L.Trainer(accelerator="cpu", max_epochs=2, callbacks=[checkpoint], **plain).fit(module, loader())
    return checkpoint.best_model_path


@plain_lightning
@pytest.mark.parametrize(
    "options", [{"monitor": "train_loss"}, {"save_weights_only": True}], ids=["monitor", "weights"]
)
def test_a_checkpoint_of_lightning_opens_without_arguments(tmp_path, options):
    adam = partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9))
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    module = FedSKC().client_module(model(), adam, schedule)
    for piece in module.pieces():
        piece.load(piece.initial(3))
    path = saved(module, tmp_path / "1", **options)
    for generation in range(2):
        opened = ClientModule.load_from_checkpoint(path)
        assert all(map(torch.equal, opened.state_dict().values(), module.state_dict().values()))
        assert list(map(describe, opened.terms())) == list(map(describe, module.terms()))
        optimizer = opened.optimizer_for(opened.backbone.parameters())
        assert type(optimizer) is torch.optim.Adam
        assert tuple(optimizer.param_groups[0]["betas"]) == (0.8, 0.9)
        assert opened.scheduler_factory(optimizer).step_size == 3
        if not generation:
            for piece in opened.pieces():
                piece.load(piece.initial(3))
            path, module = saved(opened, tmp_path / "2", **options), opened


@plain_lightning
def test_a_checkpoint_of_a_wrapped_module_opens(tmp_path):
    network = FromModule((4,), 3, "fl_lightning.models.MLP", "head", {"hidden": [5]})
    module = ClientModule(network)
    opened = ClientModule.load_from_checkpoint(saved(module, tmp_path))
    assert opened.state_dict().keys() == module.state_dict().keys()
    assert isinstance(opened.backbone, FromModule)


@plain_lightning
@pytest.mark.parametrize(
    ("key", "module"),
    [
        ("backbone", lambda: ClientModule(nn.Linear(4, 3))),
        ("optimizer", lambda: ClientModule(model(), optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))),
        ("loss_terms", lambda: ClientModule(model(), [WeightNorm(0.3)])),
    ],
)
def test_what_a_checkpoint_cannot_describe_is_named_and_can_be_given(tmp_path, key, module):
    trained = module()
    path = saved(trained, tmp_path)
    with pytest.raises(ConfigError, match=rf"^{key}: .*load_from_checkpoint\(\.\.\., {key}=\.\.\.\)"):
        ClientModule.load_from_checkpoint(path)
    given = {
        "backbone": nn.Linear(4, 3),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss_terms": [WeightNorm(0.3)],
    }
    opened = ClientModule.load_from_checkpoint(path, **{key: given[key]})
    assert all(map(torch.equal, opened.state_dict().values(), trained.state_dict().values()))


def test_only_the_backbone_is_optimized():
    term = WeightNorm(1.0)
    term.own = nn.Parameter(torch.ones(1))
    optimizer = ClientModule(model(), [term]).configure_optimizers()
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == 4 * 5 + 5 + 5 * 3 + 3


def test_inactive_terms_are_skipped_not_multiplied_by_zero():
    class Broken(LossTerm):
        active = False

        def forward(self, step):
            return step.logits.sum() * torch.nan

    step = Step(torch.randn(2, 3), torch.tensor([0, 1]))
    assert ClientModule(model(), [Broken()]).losses(step).keys() == {"ce"}


def test_a_backbone_without_parts_works_and_has_no_features():
    module = ClientModule(nn.Linear(4, 3))
    step = module.step((torch.randn(2, 4), torch.tensor([0, 1])))
    assert step.features is None
    assert step.logits.shape == (2, 3)


def test_two_terms_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="weight_norm, weight_norm: "):
        ClientModule(model(), [WeightNorm(1.0), WeightNorm(2.0)])


def test_the_first_term_to_fail_is_named():
    record = LossRecord()
    for ce, term in ((1.0, 2.0), (1.0, float("inf")), (float("nan"), float("nan"))):
        record.add({"ce": torch.tensor(ce), "moon": torch.tensor(term)})
    with pytest.raises(NonFiniteError, match="loss term 'moon' is NaN or Inf"):
        record.settle()


def test_the_means_of_an_epoch_are_of_its_own_steps():
    record, means = LossRecord(), []
    for losses in ([1.0, 3.0], [5.0], []):
        for loss in losses:
            record.add({"ce": torch.tensor(loss)})
        means.append(record.epoch_means())
    assert means == [{"loss": 2.0, "ce": 2.0}, {"loss": 5.0, "ce": 5.0}, {}]
    assert record.means() == {"loss": 3.0, "ce": 3.0}


@plain_lightning
def test_terms_are_notified_of_the_start_of_fits_and_epochs():
    class Diary(LossTerm):
        def __init__(self):
            super().__init__()
            self.entries = []

        def begin(self, module):
            self.entries.append("fit")

        def begin_epoch(self, module):
            self.entries.append(module.current_epoch)

        def forward(self, step):
            self.entries.append("step")
            return step.logits.new_zeros(())

    module = ClientModule(model(), [Diary()])
    (diary,) = module.terms()
    for _ in range(2):
        quiet_trainer(max_epochs=2).fit(module, loader(batch_size=10))
    assert diary.entries == 2 * ["fit", 0, "step", "step", 1, "step", "step"]


class Keeper(LossTerm):
    """Keeps the client's number of rounds and its class counts. Its loss is the number of rounds."""

    name = "keeper"

    def __init__(self):
        super().__init__()
        self.rounds, self.counts = torch.tensor(0.0), None

    def begin(self, module):
        self.counts = module.context.class_counts

    def remember(self, module):
        return {"rounds": self.rounds + 1, "counts": self.counts}

    def recall(self, kept):
        self.rounds = kept.get("rounds", torch.tensor(0.0))

    def forward(self, step):
        return self.rounds


def test_the_state_of_a_term_is_restored_in_the_clients_next_round(tmp_path):
    options = {"clients_per_round": 2, "trainer": {"accelerator": "cpu", "max_epochs": 1}}
    whole = experiment(tmp_path / "whole", FedAvg(loss_terms=[Keeper()]), rounds=4, **options)
    sent, upload = [], whole.algorithm.upload
    whole.algorithm.upload = lambda *args: sent.append(upload(*args)) or sent[-1]
    whole.fit()
    parts = [whole.server.participants(round) for round in range(1, 5)]
    took_part = {k: sum(k in part for part in parts) for k in range(6)}
    assert max(took_part.values()) > 1
    assert {k: float(kept["term_keeper"]["rounds"]) for k, kept in whole.memory.items()} == {
        k: float(n) for k, n in took_part.items() if n
    }
    before = [sum(sum(k in part for part in parts[:i]) for k in parts[i]) / 2 for i in range(4)]
    assert [row["client/train_keeper"] for row in whole.csv.rows] == before
    assert {name.partition("/")[0] for message in sent for name in message.tensors} == {"model"}
    experiment(tmp_path / "parts", FedAvg(loss_terms=[Keeper()]), rounds=2, **options).fit()
    rest = experiment(tmp_path / "parts", FedAvg(loss_terms=[Keeper()]), rounds=4, **options)
    rest.fit(resume=True)
    assert untimed(rest.csv.rows) == untimed(whole.csv.rows)


def test_a_term_without_state_has_no_section_in_the_client_state(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[WeightNorm(0.1)]), rounds=1, clients_per_round=1)
    run.fit()
    assert len(run.memory) == 0
    assert not (tmp_path / "clients").exists()


def test_a_module_has_its_clients_class_counts(tmp_path):
    assert ClientModule(model()).context.class_counts is None
    run = experiment(tmp_path, FedAvg(loss_terms=[Keeper()]), rounds=1)
    run.fit()
    assert len(run.memory) == 4
    for k, kept in run.memory.items():
        labels = run.data.data.y_train[run.data.shards[k].train].tolist()
        assert kept["term_keeper"]["counts"].tolist() == [labels.count(j) for j in range(10)]


def test_an_optimizer_for_other_parameters_has_the_clients_options():
    other = nn.Linear(2, 2)
    module = ClientModule(model(), optimizer=partial(torch.optim.Adam, lr=0.4, weight_decay=0.1))
    module.context = FitContext(lr_scale=0.5)
    made, own = module.optimizer_for(other.parameters()), module.configure_optimizers()
    assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in other.parameters()]
    for optimizer in (made, own):
        assert isinstance(optimizer, torch.optim.Adam)
        assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.4, 0.1)
        assert optimizer.param_groups[0]["lr"] == 0.2
    plain = ClientModule(model())
    plain.context = FitContext(lr_scale=0.5)
    (group,) = plain.optimizer_for(other.parameters()).param_groups
    assert (group["lr"], group["momentum"]) == (0.005, 0)


def test_a_checkpoint_cannot_call_arbitrary_functions_as_objective():
    with pytest.raises(ConfigError, match=r"^objective: .*os\.system "):
        ClientModule(torch.nn.Linear(1, 1), objective={"class_path": "os.system", "init_args": {"command": "true"}})

"""A round in one fit: each client is to the bit what it would be in a fit of its own, which some of them get."""

import gc
import os
import signal
import warnings
import weakref
from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import torch
from experiments import NormMLP, digits, experiment, same_bytes, task_of_round
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.profilers import SimpleProfiler
from methods import FEW_QUICK, METHODS, assert_same_run
from stacking import LOCAL_WORK, Augmented, DrawingHooks, NoisyUpload
from task_runners import run_tasks, tasks_in
from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning.algorithms import FedAvg, FedProx, FedSKC, WeightedMean
from fl_lightning.client.module import ClientModule, LossTerm
from fl_lightning.core.errors import ConfigError, FLError
from fl_lightning.core.message import Message
from fl_lightning.core.task import Tasks
from fl_lightning.engines import SequentialEngine, StackedEngine
from fl_lightning.engines.round_fit import RoundFit

ALONE = SequentialEngine(local_loop=False)
CPU = {"accelerator": "cpu", "max_epochs": 2}


@pytest.fixture
def fits(monkeypatch):
    """What each `Trainer.fit` was called with."""
    seen = []
    fit = L.Trainer.fit
    monkeypatch.setattr(
        L.Trainer, "fit", lambda self, module, **rest: (seen.append(module), fit(self, module, **rest))[1]
    )
    return seen


def compare(tmp_path, method=FedAvg, shared=True, **options):
    """One experiment with a fit for each client, and with common ones if the clients can share them."""
    alone = experiment(tmp_path / "alone", method(), engine=ALONE, **options)
    common = experiment(tmp_path / "common", method(), **options)
    alone.fit()
    common.fit()
    assert_same_run(alone, common)
    assert shared is None or common.worker.can_loop == shared


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEW_QUICK)
def test_every_method(tmp_path, fits, name):
    method, options = METHODS[name]
    compare(tmp_path, method, shared=None, rounds=2, **options)
    kinds = {type(module) for module in fits}
    assert kinds == {RoundFit, ClientModule} or ClientModule not in kinds  # a method's own module gets its own fits


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:trainer.max_steps")
@pytest.mark.parametrize("name", LOCAL_WORK)
def test_local_work_and_clipping(tmp_path, name):
    trainer = {"accelerator": "cpu", **LOCAL_WORK[name]}
    compare(tmp_path, partial(FedAvg, buffers="local"), model=NormMLP, trainer=trainer, batch_size=12, rounds=2)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_precisions(tmp_path, precision):
    trainer = CPU | {"precision": precision, "gradient_clip_val": 0.5}
    compare(tmp_path, partial(FedProx, mu=0.1), model=NormMLP, trainer=trainer, rounds=2)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [partial(torch.optim.LBFGS, max_iter=3), partial(torch.optim.Adam, amsgrad=True)])
def test_optimizers(tmp_path, optimizer):
    compare(tmp_path, optimizer=optimizer, rounds=2, lr_scheduler=partial(ExponentialLR, gamma=0.5))


def test_plain_sgd_with_a_schedule_over_rounds(tmp_path):
    """Clients share this optimizer."""
    schedule = partial(ExponentialLR, gamma=0.5)
    compare(tmp_path, optimizer=partial(torch.optim.SGD, lr=0.1), rounds=3, round_lr_scheduler=schedule)


@pytest.mark.thorough
def test_augmentation_dropout_and_hooks_draw_what_they_draw_alone(tmp_path):
    plain = digits()
    scenario = Augmented(plain.dataset, plain.partition, plain.clients)
    compare(tmp_path, lambda: NoisyUpload(loss_terms=[DrawingHooks()]), scenario=scenario, model=NormMLP, rounds=2)


class Stops(LossTerm):
    """Asks the trainer to stop, at some moment."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def begin(self, module):
        self.module, self.steps = [module], 0
        self._now("fit")

    def begin_epoch(self, module):
        self._now(f"epoch {module.current_epoch}")

    def forward(self, step):
        self.steps += 1
        self._now(f"step {self.steps}")
        return step.logits.square().mean()

    def _now(self, moment):
        if moment == self.moment:
            self.module[0].trainer.should_stop = True


class Ended(FedAvg):
    """Notes where a client's module is when its fit is over."""

    def upload(self, module, *rest):
        self.seen.append((module.steps, module.current_epoch, module.global_step))
        return super().upload(module, *rest)


def ends(tmp_path, fits, shared, moment, **options):
    """What becomes of two clients that stop, or not, and where their modules are then."""
    method = Ended(loss_terms=[Stops(moment)])
    method.seen = []
    run = experiment(tmp_path / str(shared), method, **options)
    run._build()
    tasks = [task_of_round(run, 1, client) for client in (0, 1)]
    fits.clear()
    results = run_tasks(SequentialEngine(local_loop=shared), run.worker, tasks)
    assert [type(module) for module in fits] == [RoundFit, *([] if shared else [ClientModule, ClientModule])]
    return results, method.seen


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("moment", ["fit", "epoch 0", "epoch 1", "step 1", "step 5"])
def test_a_client_stops_when_asked(tmp_path, fits, moment):
    options = {"trainer": {"accelerator": "cpu", "max_epochs": 3}, "batch_size": 16}
    (common, here), (alone, there) = (ends(tmp_path, fits, shared, moment, **options) for shared in (True, False))
    assert here == there
    for one, other in zip(common, alone, strict=True):
        assert one.losses == other.losses
        assert same_bytes(one.upload.tensors, other.upload.tensors)


def some_fail(run):
    """The tasks of a round, of which the second one's upload cannot be made."""
    tasks = [task_of_round(run, 1, client) for client in range(4)]
    tasks[1] = replace(tasks[1], download=Message({"model/none": torch.zeros(1)}))
    return tasks


def test_a_client_fails_alone(tmp_path):
    run = experiment(tmp_path, FedSKC())
    run.load()
    results = run_tasks(SequentialEngine(), run.worker, some_fail(run))
    assert [result.client for result in results] == [0, 1, 2, 3]
    assert [result.failure is None for result in results] == [True, False, True, True]
    assert "client 1, round 1: ValueError: 'none' is no entry of this model" in str(results[1].failure)


class Meddler(LossTerm):
    """Changes, for one client, what is everybody's."""

    def begin(self, module):
        self.meddles = module.lr_scale == 2.0

    def begin_epoch(self, module):
        assert torch.is_grad_enabled()
        torch.set_grad_enabled(not self.meddles)

    def forward(self, step):
        warnings.warn("smoke is seen", stacklevel=1)
        if self.meddles:
            warnings.simplefilter("error")
            raise RuntimeError("the disk is on fire")
        return step.logits.mean() * 0


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:smoke")
def test_what_a_client_changes_for_good_is_put_back(tmp_path, shared):
    run = experiment(tmp_path, FedAvg(loss_terms=[Meddler()]))
    run.load()
    tasks = [replace(task_of_round(run, 1, 0), lr_scale=scale) for scale in (1.0, 2.0, 1.0)]
    before, meddling, after = run_tasks(SequentialEngine(local_loop=shared), run.worker, tasks)
    torch.set_grad_enabled(True)
    assert "the disk is on fire" in str(meddling.failure)
    assert same_bytes(before.upload.tensors, after.upload.tensors)


class Terminated(LossTerm):
    """Is sent a SIGTERM in its first step."""

    steps = 0

    def forward(self, step):
        Terminated.steps += 1
        os.kill(os.getpid(), signal.SIGTERM)
        return step.logits.mean() * 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_sigterm_ends_a_fit_after_its_step(tmp_path, shared):
    Terminated.steps = 0
    run = experiment(tmp_path, FedAvg(loss_terms=[Terminated()]), batch_size=8)
    run._build()
    with pytest.raises(SystemExit):
        run_tasks(SequentialEngine(local_loop=shared), run.worker, [task_of_round(run, 1, 0)])
    assert Terminated.steps == 1


# --- How many fits ---


def test_a_round_is_a_fit_and_a_client_is_a_batch(tmp_path, fits):
    """Also for what plain Lightning counts: a callback, a Timer and a profiler on the trainer of the rounds."""
    seen, timer = Batches(), Timer()
    engine = SequentialEngine([seen, timer], SimpleProfiler(tmp_path, "profile"))
    run = experiment(tmp_path, engine=engine, rounds=3)
    run.fit()
    assert [type(module) for module in fits] == [RoundFit] * 3
    clients = [(round, client) for round in (1, 2, 3) for client in run.server.participants(round)]
    assert seen.starts == seen.ends == clients
    assert timer.time_elapsed("train") > 0
    (table,) = (path.read_text() for path in tmp_path.glob("*profile*"))
    lines = [line for line in table.splitlines() if "run_training_batch" in line]
    assert [int(line.split("|")[3]) for line in lines] == [4, 8, 12]  # each fit adds a table of all fits so far


class Batches(L.Callback):
    """Notes the clients and rounds that plain Lightning hooks see."""

    def __init__(self):
        self.starts, self.ends = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.starts.append((trainer.current_epoch + 1, batch))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ends.append((trainer.current_epoch + 1, batch))


def test_a_profiler_that_would_print_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.profiler"):
        SequentialEngine(profiler=SimpleProfiler())


def test_one_trainer_serves_the_run(tmp_path, monkeypatch):
    built = []
    init = L.Trainer.__init__
    monkeypatch.setattr(
        L.Trainer, "__init__", lambda own, *args, **rest: (built.append(own), init(own, *args, **rest))[1]
    )
    experiment(tmp_path, rounds=3).fit()
    assert len(built) == 2  # and the one with the options of the clients, which is never fitted


@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine])
def test_callbacks_that_the_trainer_does_not_take_are_refused_before_the_run(tmp_path, engine):
    run = experiment(tmp_path / "run", engine=engine(callbacks=[ModelCheckpoint()]))
    with pytest.raises(ConfigError, match=r"^engine\.callbacks: .*ModelCheckpoint"):
        run.fit()
    assert not (tmp_path / "run" / "config.yaml").exists()


class StopsRound(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = True


def test_a_callback_cannot_leave_clients_out(tmp_path):
    run = experiment(tmp_path, engine=SequentialEngine(callbacks=[StopsRound()]))
    with pytest.raises(FLError, match=r"engine\.callbacks: .* after 1 of 4 batches"):
        run.fit()


def test_an_error_of_the_server_ends_the_run_as_it_is(tmp_path, fits):
    class Broken(WeightedMean):
        def fold(self, folded, upload):
            raise ZeroDivisionError("mine")

    run = experiment(tmp_path, FedAvg(aggregator=Broken()))
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        run.fit()
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_client_gets_the_same_in_a_fit_of_its_own(tmp_path, fits):
    run = experiment(tmp_path)
    run.load()
    task = task_of_round(run, 1, 0)
    (shared,), alone = run_tasks(SequentialEngine(), run.worker, [task]), run.worker.run(task)
    assert [type(module) for module in fits] == [RoundFit, ClientModule]
    assert same_bytes(shared.upload.tensors, alone.upload.tensors)


@pytest.mark.parametrize("local_loop", [True, False])
def test_a_result_is_used_before_the_next_task_is_made(tmp_path, local_loop):
    run, events = experiment(tmp_path), []
    run.load()
    engine = SequentialEngine(local_loop=local_loop)
    for _ in range(2):  # the second fit of a trainer makes its iterators anew
        made = (events.append(f"task {client}") or task_of_round(run, 1, client) for client in range(3))
        engine.run(run.worker, Tasks([0, 1, 2], made), lambda result: events.append(f"result {result.client}"))
    assert events == 2 * [f"{what} {client}" for client in range(3) for what in ("task", "result")]


def test_results_are_gone_once_nobody_has_them(tmp_path):
    """Not only once Python has looked for garbage: a fit's trainer is some, and has held them."""
    run = experiment(tmp_path)
    run.load()
    tasks, results = [task_of_round(run, 1, client) for client in range(3)], []
    gc.disable()
    try:
        engine = SequentialEngine()
        engine.run(run.worker, tasks_in(tasks), lambda result: results.append(weakref.ref(result)))
        assert [result() for result in results] == [None, None, None]
    finally:
        gc.enable()


class Counts(L.Callback):
    """How many fits have begun."""

    fits = 0

    def on_fit_start(self, trainer, module):
        Counts.fits += 1


class OwnModule(ClientModule):
    """A client module of somebody's own."""

    def on_train_batch_end(self, *rest):
        Counts.fits += 1


class WithOwnModule(FedAvg):
    """A method with it."""

    def client_module(self, *rest):
        module = super().client_module(*rest)
        module.__class__ = OwnModule
        return module


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg, {"trainer": CPU, "client_callbacks": [Counts()]}),
        (FedAvg, {"trainer": CPU | {"accumulate_grad_batches": 2}}),
        (FedAvg, {"trainer": CPU | {"limit_train_batches": 0.5}, "batch_size": 8}),
        (WithOwnModule, {}),
    ],
    ids=["callbacks", "accumulation", "share", "module"],
)
def test_what_is_meant_for_one_fit_gets_one(tmp_path, fits, method, options):
    run = experiment(tmp_path, method(), rounds=1, **options)
    run.fit()
    assert [isinstance(module, RoundFit) for module in fits] == [True, *[False] * 4]


def test_own_schedules_and_callbacks_of_plugins_prevent_the_local_loop(tmp_path):
    class Own:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            pass

    own, plugin = experiment(tmp_path, lr_scheduler=Own), experiment(tmp_path)
    for run, shares in ((own, False), (plugin, True)):
        run.load()
        assert run.worker.can_loop == shares
    del plugin.worker.can_loop
    plugin.worker.idle_trainer.callbacks.append(Counts())
    assert not plugin.worker.can_loop

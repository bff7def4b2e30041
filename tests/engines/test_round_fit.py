"""A round in one fit: each client is to the bit what it would be in a fit of its own, which some of them get."""

import gc
import math
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
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
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


class Sees(LossTerm):
    """Adds what a module and its trainer say of its fit, at the start of each epoch and in each step, to a list."""

    names = ("max_epochs", "max_steps", "limit_train_batches", "num_training_batches", "estimated_stepping_batches")
    names += ("gradient_clip_val", "gradient_clip_algorithm", "precision", "accumulate_grad_batches", "should_stop")

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def begin_epoch(self, module):
        self.module = [module]
        self.note()

    def forward(self, step):
        self.note()
        return step.logits.sum() * 0

    def note(self):
        (module,) = self.module
        options = {name: getattr(module.trainer, name) for name in self.names}
        self.seen.append({"epoch": module.current_epoch, "step": module.global_step} | options)

    def __deepcopy__(self, memo):
        return Sees(self.seen)


def test_a_module_sees_its_own_progress_and_options(tmp_path):
    own = {"max_epochs": 3, "max_steps": 5, "limit_train_batches": 2, "precision": "bf16-mixed"}
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}
    run = experiment(tmp_path, FedAvg(loss_terms=[Sees(seen := [])]), trainer=CPU | own | clipping, batch_size=8)
    run.load()
    task, notes = task_of_round(run, 1, 0), []
    for shared in (False, True):
        seen.clear()
        run_tasks(SequentialEngine(local_loop=shared), run.worker, [task])
        notes.append(seen.copy())
    assert notes[0] == notes[1]
    assert [(one["epoch"], one["step"]) for one in notes[1]] == [(0, 0)] * 2 + [
        (0, 1),
        (1, 2),
        (1, 2),
        (1, 3),
        (2, 4),
        (2, 4),
    ]


class Logs(LossTerm):
    """Logs as a Lightning module can, and sets the learning rate when the fit begins, which is too late."""

    def begin(self, module):
        self.module, module.lr_scale = [module], 0.0

    def forward(self, step):
        self.module[0].log("square", square := step.logits.square().mean())
        return square


def test_a_term_may_log_and_finds_the_optimizer_built(tmp_path):
    run = experiment(tmp_path, FedAvg(loss_terms=[Logs()]))
    run.load()
    task = task_of_round(run, 1, 0)
    (shared,), (alone,) = (run_tasks(engine, run.worker, [task]) for engine in (SequentialEngine(), ALONE))
    assert shared.failure is None
    assert same_bytes(shared.upload.tensors, alone.upload.tensors)


class Computes(LossTerm):
    """Notes the type in which torch computes a product, by moment."""

    def __init__(self, types):
        super().__init__()
        self.types = types

    def note(self, moment):
        self.types[moment] = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype

    def begin(self, module):
        self.note("begin")

    def begin_epoch(self, module):
        self.note("epoch")

    def forward(self, step):
        self.note("step")
        return step.logits.sum() * 0

    def remember(self, module):
        self.note("end")
        return {}

    def __deepcopy__(self, memo):
        return Computes(self.types)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("precision", "step"), [("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)]
)
def test_only_the_steps_of_a_client_are_in_its_precision(tmp_path, shared, precision, step):
    types = {}
    method, trainer = FedAvg(loss_terms=[Computes(types)]), CPU | {"precision": precision}
    run = experiment(tmp_path, method, trainer=trainer)
    run.load()
    types.clear()
    run_tasks(SequentialEngine(local_loop=shared), run.worker, [task_of_round(run, 1, 0)])
    assert types == dict.fromkeys(("begin", "epoch", "end"), torch.float32) | {"step": step}


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
    run.check()
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
    """The tasks of a round. The upload of the second one cannot be made."""
    tasks = [task_of_round(run, 1, client) for client in range(4)]
    tasks[1] = replace(tasks[1], download=Message({"model/none": torch.zeros(1)}))
    return tasks


def test_a_client_fails_alone(tmp_path):
    run = experiment(tmp_path, FedSKC())
    run.load()
    results = run_tasks(SequentialEngine(), run.worker, some_fail(run))
    assert [result.client for result in results] == [0, 1, 2, 3]
    assert [result.failure is None for result in results] == [True, False, True, True]
    assert "client 1, round 1: ValueError: 'none'" in str(results[1].failure)


class Diverged(LossTerm):
    """A NaN, and the number of steps in which it was computed."""

    steps = 0

    def forward(self, step):
        Diverged.steps += 1
        return step.logits.sum() * torch.nan


@pytest.mark.parametrize("shared", [False, True])
def test_a_client_whose_loss_is_nan_trains_no_further_epoch(tmp_path, shared):
    run = experiment(tmp_path, FedAvg(loss_terms=[Diverged()]), batch_size=16)
    run.load()
    Diverged.steps = 0
    (result,) = run_tasks(SequentialEngine(local_loop=shared), run.worker, [task_of_round(run, 1, 0)])
    assert "NaN" in str(result.failure)
    assert Diverged.steps == math.ceil(len(run.data.shard(0).train) / 16)


class Meddler(LossTerm):
    """Changes, for one client, what is everybody's."""

    def begin(self, module):
        self.meddles = module.context.lr_scale == 2.0

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
    run.check()
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


class Epochs(L.Callback):
    """Notes the number of batches, the epoch and an option of the trainer of each round."""

    def __init__(self):
        self.batches, self.epochs, self.anomalies = [], [], []

    def on_train_epoch_start(self, trainer, module):
        self.batches.append(trainer.num_training_batches)
        self.epochs.append(trainer.current_epoch)
        self.anomalies.append(torch.is_anomaly_enabled())


def test_callbacks_see_the_number_of_clients(tmp_path):
    """A progress bar, for instance."""
    epochs = Epochs()
    experiment(tmp_path, engine=SequentialEngine([epochs])).fit()
    assert epochs.batches == [4, 4, 4]


def test_an_engine_of_two_experiments_has_a_trainer_for_each(tmp_path):
    epochs = Epochs()
    engine, runs = SequentialEngine([epochs]), []
    for anomalies in (False, True):
        runs.append(experiment(tmp_path, engine=engine, trainer=CPU | {"detect_anomaly": anomalies}))
        runs[-1].load()
    for run in runs:
        run_tasks(engine, run.worker, [task_of_round(run, 1, 0)])
    assert (epochs.epochs, epochs.anomalies) == ([0, 0], [False, True])


def test_a_closed_engine_starts_again_with_a_new_trainer(tmp_path):
    epochs = Epochs()
    run = experiment(tmp_path, engine=SequentialEngine([epochs]))
    run.load()
    for _ in range(2):
        run_tasks(run.engine, run.worker, [task_of_round(run, 1, 0)])
        run.engine.close()
    assert epochs.epochs == [0, 0]


@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine])
def test_callbacks_that_the_trainer_does_not_take_are_refused_before_the_run(tmp_path, engine):
    run = experiment(tmp_path / "run", engine=engine(callbacks=[ModelCheckpoint()]))
    with pytest.raises(ConfigError, match=r"^engine\.callbacks: .*ModelCheckpoint"):
        run.fit()
    assert not (tmp_path / "run" / "config.yaml").exists()


class StopsRound(L.Callback):
    """Asks the round's trainer to stop, once, after some number of batches."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.after:
            trainer.should_stop, self.after = True, None


@pytest.mark.parametrize("after", [1, 3])
def test_a_callback_cannot_leave_clients_out(tmp_path, after):
    run = experiment(tmp_path, engine=SequentialEngine(callbacks=[StopsRound(after)]))
    with pytest.raises(FLError, match=rf"engine\.callbacks: .* after {after} of 4 batches"):
        run.fit()


def test_a_callback_may_stop_a_round_after_its_last_client(tmp_path):
    run = experiment(tmp_path, engine=SequentialEngine(callbacks=[StopsRound(4)]))
    run.fit()
    assert len(run.csv.rows) == 3


def fail(result):
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("callbacks", "done", "error"),
    [([], fail, ZeroDivisionError), ([StopsRound(2)], id, FLError)],
    ids=["done", "stop"],
)
def test_the_round_after_an_interrupted_one_is_whole(tmp_path, callbacks, done, error):
    run, engine = experiment(tmp_path), SequentialEngine(callbacks)
    run.load()
    tasks = [task_of_round(run, 1, client) for client in range(3)]
    with pytest.raises(error):
        engine.run(run.worker, tasks_in(tasks), done)
    expected, results = (run_tasks(one, run.worker, tasks) for one in (SequentialEngine(), engine))
    assert [result.client for result in results] == [0, 1, 2]
    for one, other in zip(expected, results, strict=True):
        assert same_bytes(one.upload.tensors, other.upload.tensors)


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


def test_uploads_are_gone_once_nobody_has_them(tmp_path):
    """Not only once Python has looked for garbage: a fit's trainer is some, and has held them."""
    run = experiment(tmp_path)
    run.load()
    tasks, uploads = [task_of_round(run, 1, client) for client in range(3)], []
    gc.disable()
    try:
        engine = SequentialEngine()
        engine.run(run.worker, tasks_in(tasks), lambda result: uploads.append(weakref.ref(result.upload)))
        assert [upload() for upload in uploads] == [None, None, None]
    finally:
        gc.enable()


class Referred(LossTerm):
    """Adds a weak reference to the module of each fit to a list."""

    def __init__(self, modules):
        super().__init__()
        self.modules = modules

    def begin(self, module):
        self.modules.append(weakref.ref(module))

    def forward(self, step):
        return step.logits.sum() * 0

    def __deepcopy__(self, memo):
        return Referred(self.modules)


def test_a_client_is_gone_after_a_fit_of_its_own(tmp_path):
    """Although its trainer is a cycle that holds it: a model on a GPU is large."""
    modules, alive = [], []
    run = experiment(tmp_path, FedAvg(loss_terms=[Referred(modules)]))
    run.load()
    tasks = [task_of_round(run, 1, client) for client in range(3)]
    modules.clear()
    gc.disable()
    try:
        ALONE.run(run.worker, tasks_in(tasks), lambda result: alive.extend(module() for module in modules))
    finally:
        gc.enable()
    assert alive == [None] * (1 + 2 + 3)


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

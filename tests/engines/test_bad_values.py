"""Numbers that nothing can be computed with are refused where they are given, before round 1."""

import inspect
import math
import time
from functools import partial

import numpy as np
import pytest
import torch
from commands import TINY, run
from experiments import digits, experiment
from refusals import check_refused_command
from torch.optim import lr_scheduler

from fl_lightning.cli.catalogue import classes
from fl_lightning.client.optimizers import LRScales
from fl_lightning.core.errors import ConfigError, blame, check_number, check_positive
from fl_lightning.engines import SequentialEngine, StackedEngine
from fl_lightning.models import CNN

SHAPES = {"BiLSTM": (12,), "FastText": (12,), "TextCNN": (12,)}
REQUIRED = {
    "PrivateMean": {"noise": 1.0},
    "Splits": {"eps1": 0.4, "eps2": 1.6, "min_rounds": 20, "min_size": 2, "weighting": "uniform"},
}
KINDS = (
    *("algorithms", "loss_terms", "aggregators", "graphs", "clocks", "round_policies", "compressors", "adversaries"),
)
NEED_MODELS = ("Mixed", "Pretrained", "ResizedFeatures")
"""Models of other models or files. Their own tests give them wrong numbers."""
INFINITE = {
    ("CenteredClipping", "tau"),
    ("DeviceClock", "download_mbit"),
    ("DeviceClock", "upload_mbit"),
    ("NormBound", "bound"),
    ("ProcessesEngine", "held_megabytes"),
    ("RayEngine", "held_megabytes"),
    ("UAPDFL", "th_i"),
    *((cls, name) for cls in ("CFL", "Splits") for name in ("eps1", "eps2")),
}
"""Where a class says what infinity means."""


def numbers(type_name):
    """Each number that a config can give to a class: the kind of class, the class, the name."""
    for kind in (*KINDS, "models", "engines"):
        for cls in classes(kind):
            for parameter in inspect.signature(cls).parameters.values():
                if (
                    str(getattr(parameter.annotation, "__name__", parameter.annotation)).split(" | ")[0] == type_name
                    and parameter.name != "num_classes"
                    and cls.__name__ not in NEED_MODELS
                ):
                    yield pytest.param(kind, cls, parameter.name, id=f"{cls.__name__}.{parameter.name}")


def made(kind, cls, **given):
    """An instance, as a config would have it made."""
    if kind == "models":
        given |= {"in_shape": SHAPES.get(cls.__name__, (3, 32, 32)), "num_classes": 3}
        with blame("model"):
            return cls(**given)
    return cls(**REQUIRED.get(cls.__name__, {}) | given)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("kind", "cls", "name"), list(numbers("float")))
def test_every_number_of_every_class_is_finite(kind, cls, name, value):
    if value == math.inf and (cls.__name__, name) in INFINITE:
        thing = made(kind, cls, **{name: value})
        assert getattr(thing.aggregator if cls.__name__ == "CFL" else thing, name) == math.inf
        return
    with pytest.raises(ConfigError, match=rf"^\w+\.[\w.]+: {value} is ") as told:
        made(kind, cls, **{name: value})
    assert name in str(told.value) or name == "value"  # UnitAlignment's is `unit` to its algorithm


@pytest.mark.parametrize("value", [0, -1, 10**18])
@pytest.mark.parametrize(("kind", "cls", "name"), list(numbers("int")))
def test_every_count_is_refused_in_one_line_or_runs(kind, cls, name, value, tmp_path):
    """What is not refused at once is either a count that makes sense or refused before round 1."""
    try:
        thing = made(kind, cls, **{name: value})
        if kind in ("algorithms", "engines") and cls.__name__ != "RayEngine":
            experiment(tmp_path / "run", **{kind.removesuffix("s"): thing}).check()
        elif kind == "graphs":
            assert thing.links(6, np.random.default_rng(0)).shape == (6, 6)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    assert refused or value >= 0
    assert value >= 0 or name in refused
    assert "\n" not in refused
    assert "[enforce fail" not in refused
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("within", "inside", "outside"),
    [
        ("[0, inf)", [0, 0.5, 1e308, 10**400], {-1: "below 0", math.inf: "no finite number", math.nan: "no finite"}),
        ("(0, inf)", [5e-324], {0: "not above 0", -math.inf: "no finite number"}),
        ("[0, 1)", [0, 0.999], {1: r"outside \[0, 1\)", -0.1: r"outside \[0, 1\)", math.nan: "no finite number"}),
        ("(0, 1]", [1, 0.1], {0: r"outside \(0, 1\]", 1.1: r"outside \(0, 1\]"}),
        ("[0, inf]", [math.inf], {math.nan: "no finite number", -1: "below 0"}),
        ("[2, inf)", [2], {1: "below 2"}),
        ("(-inf, inf)", [-1e308, 0], {math.inf: "no finite number", -math.inf: "no finite number"}),
    ],
)
def test_a_number_is_in_its_interval(within, inside, outside):
    for value in [None, *inside]:
        check_number("key", value, within, "fix")
    for value, message in outside.items():
        with pytest.raises(ConfigError, match=rf"^key: {value} is {message}.*; fix$"):
            check_number("key", value, within, "fix")


@pytest.mark.parametrize("value", ["0.1", [1.0], 1j, "a\nb"])
def test_what_is_no_number_is_refused(value):
    for check in (lambda: check_number("key", value, "[0, inf)"), lambda: check_positive(key=value)):
        with pytest.raises(ConfigError, match=r"^key: [^\n]* is not a number$"):
            check()


@pytest.mark.parametrize("number", [1.5, np.float64(2.0)])
def test_what_is_counted_is_whole(number):
    check_positive("algorithm.", rounds=np.int64(2))
    with pytest.raises(ConfigError, match=rf"^algorithm.rounds: {number} is not a whole number$"):
        check_positive("algorithm.", rounds=number)


@pytest.mark.parametrize("number", [10**12 + 1, 10**30])
def test_what_is_counted_has_a_bound(number):
    check_positive("algorithm.", rounds=10**12)
    with pytest.raises(ConfigError, match=f"^algorithm.rounds: {number} is above 1000000000000$"):
        check_positive("algorithm.", rounds=number)


@pytest.mark.parametrize("width", [10**9, 10**12])
def test_a_model_larger_than_the_memory_is_refused(width):
    with pytest.raises(ConfigError, match=r"^model: .* memory"):
        made("models", CNN, feature_dim=width)


# --- What is refused before a folder is there ---

FIT = ["fit", "--config", "tiny.yaml", "--run_dir", "here"]
SCHEDULE = [*FIT, "--lr_scheduler"]
ROUNDS = [*FIT, "--round_lr_scheduler"]
ABSOLUTE = [*ROUNDS, "ExponentialLR", "--round_lr_scheduler.gamma", "0.9", "--lr_scheduler"]
MUON = hasattr(torch.optim, "Muon")  # since torch 2.9
ONE_CYCLE = ["--lr_scheduler.max_lr=1", "--lr_scheduler.total_steps=2"]
ROUND_CYCLE = [word.replace("--", "--round_") for word in ONE_CYCLE]
STEPS = [*SCHEDULE, "OneCycleLR", *ONE_CYCLE, "--trainer.max_epochs", "-1", "--trainer.max_steps"]


def kind(words, *told, name=None):
    return pytest.param(words, told, id=name or " ".join(words[5:]))


KINDS = [
    kind([*FIT, "--batch_size", str(10**30)], f"batch_size: {10**30} is above 1000000000000"),
    kind([*FIT, "--optimizer.lr", ".nan"], "optimizer.lr: nan is no finite number"),
    kind([*FIT, "--optimizer", "Adam", "--optimizer.betas", "[.nan, 0.9]"], "optimizer: Invalid beta parameter"),
    kind([*FIT, "--optimizer", "Muon"], "optimizer: Muon only supports 2D parameters" if MUON else "'Muon' not found"),
    kind([*FIT, "--optimizer", "Adam", "--optimizer.capturable", "true"], "optimizer: If capturable=True"),
    kind([*FIT, "--optimizer", "LBFGS", "--optimizer_state", "kept"], "optimizer_state: LBFGS's", "set fresh"),
    kind([*SCHEDULE, "ExponentialLR", "--lr_scheduler.gamma", "-1"], "lr_scheduler: the learning rate", "is below 0"),
    kind([*SCHEDULE, "LRScheduler"], "lr_scheduler: NotImplementedError"),
    kind([*SCHEDULE, "OneCycleLR", *ONE_CYCLE, "--trainer.max_epochs", "3"], "lr_scheduler: Tried to step 3 times"),
    kind([*STEPS, "6", "--trainer.limit_train_batches", "2"], "lr_scheduler: Tried to step 3", name="two_batches"),
    kind([*STEPS, "3", "--trainer.accumulate_grad_batches", "99"], "lr_scheduler: Tried to step 3", name="one_step"),
    kind([*ROUNDS, "OneCycleLR", *ROUND_CYCLE, "--rounds", "4"], "round_lr_scheduler: Tried to step 3 times"),
    kind(
        [*ABSOLUTE, "OneCycleLR", "--lr_scheduler.max_lr=1", "--lr_scheduler.total_steps=9"],
        "lr_scheduler: OneCycleLR ",
        "round_lr_scheduler",
    ),
    kind(
        [*ABSOLUTE, "CosineAnnealingLR", "--lr_scheduler.T_max=2", "--lr_scheduler.eta_min=0.05"],
        "lr_scheduler: CosineAnnealingLR ",
        "round_lr_scheduler",
    ),
    kind([*ROUNDS, "ExponentialLR", "--round_lr_scheduler.gamma", ".inf"], "round_lr_scheduler: the learning rate"),
    kind([*FIT, "--trainer.gradient_clip_val", "-1"], "trainer.gradient_clip_val: -1", "is below 0"),
    kind([*FIT, "--trainer.limit_train_batches", "1.5"], "trainer.limit_train_batches: 1.5 is outside [0, 1]"),
    kind([*FIT, "--trainer.limit_train_batches", "0.001"], "trainer.limit_train_batches: 0.001 ", "smallest client"),
    kind([*FIT, "--trainer.precision", "16-mixed"], "trainer.precision: 16-mixed ", "cpu"),
    kind([*FIT, "--algorithm.tau", ".nan"], "algorithm.tau: nan ", "0.08"),
    kind([*FIT, "--algorithm.loss_terms+", "{class_path: Proximal, init_args: {mu: .inf}}"], "algorithm.mu: inf"),
    kind([*FIT, "--engine", "ProcessesEngine", "--engine.threads", "100000"], "engine.threads: 100000 is outside"),
    kind([*FIT, "--model.hidden", "[1000000000000000000]"], "model: too large for this machine's memory"),
]


@pytest.mark.fast_cases(9)
@pytest.mark.parametrize(("words", "told"), KINDS)
def test_one_line_says_what_is_wrong_and_nothing_is_left(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("rounds: 3", "rounds: 2"))
    check_refused_command(words, told)


def test_a_trainer_of_null_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("trainer: {max_epochs: 1, accelerator: cpu}", "trainer: null"))
    code, _, err = run(*FIT)
    assert code == 2
    assert "trainer: " in err
    assert "null" in err
    assert not (tmp_path / "here").exists()


# --- Torch's optimizers and schedules by name ---


def named(module, base):
    """The public classes of a module that are subclasses of one."""
    return sorted(n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and n[0] != "_")


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("engine", [SequentialEngine, StackedEngine])
@pytest.mark.parametrize("name", named(torch.optim, torch.optim.Optimizer))
def test_each_optimizer_takes_a_step_or_is_refused_before_round_1(tmp_path, name, engine):
    options = {"lr": 1e-3} if name in ("LBFGS", "SGD") else {}
    trained = experiment(
        tmp_path / "run",
        optimizer=partial(getattr(torch.optim, name), **options),
        engine=engine(),
        rounds=1,
        scenario=digits(3),
        clients_per_round=2,
        trainer={"accelerator": "cpu", "max_epochs": 1},
    )
    try:
        trained.fit()
        refused = ""
    except ConfigError as error:
        refused = str(error)
    assert bool(refused) == (name in {"Muon", "Optimizer", "SparseAdam"} or "cannot stack" in refused)
    assert (tmp_path / "run").exists() == (not refused)
    assert trained.round == (not refused)


GIVEN = {
    "CosineAnnealingLR": {"T_max": 2},
    "CosineAnnealingWarmRestarts": {"T_0": 1},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
    "ExponentialLR": {"gamma": 0.5},
    "MultiStepLR": {"milestones": [1]},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 2},
    "StepLR": {"step_size": 1},
}
"""Arguments that a schedule asks for."""


@pytest.mark.fast_cases(6)
@pytest.mark.filterwarnings("ignore:lr_scheduler. .* but a client's fit has 2 epoch")
@pytest.mark.parametrize("key", ["lr_scheduler", "round_lr_scheduler"])
@pytest.mark.parametrize("name", named(lr_scheduler, lr_scheduler.LRScheduler))
def test_each_schedule_covers_the_run_or_is_refused_before_round_1(tmp_path, name, key):
    schedule = partial(getattr(lr_scheduler, name), **GIVEN.get(name, {}))
    trained = experiment(tmp_path / "run", rounds=2, scenario=digits(3), clients_per_round=2, **{key: schedule})
    try:
        trained.fit()
        refused = ""
    except ConfigError as error:
        refused = str(error)
    odd = {"LRScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}
    assert bool(refused) == (name in odd)
    assert refused == "" or refused.startswith(f"{key}: ")
    assert len(refused) != len(f"{key}: ")
    assert (tmp_path / "run").exists() == (not refused)


def test_a_schedule_with_a_small_minimum_can_be_scaled_over_rounds(tmp_path):
    small = partial(lr_scheduler.CosineAnnealingLR, T_max=2, eta_min=1e-4)
    run = experiment(tmp_path, lr_scheduler=small, round_lr_scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.9))
    run.check()


def test_a_run_of_ever_so_many_rounds_starts_at_once(tmp_path):
    started = time.process_time()
    experiment(tmp_path, rounds=10**12, round_lr_scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.9)).check()
    assert time.process_time() - started < 20


def test_a_schedule_that_ends_later_than_was_looked_ends_in_one_line():
    scales = LRScales(partial(lr_scheduler.OneCycleLR, max_lr=1, total_steps=10_001), rounds=10**6)
    assert scales.of(10_001) > 0
    with pytest.raises(ConfigError, match=r"^round_lr_scheduler: Tried to step 10002 times"):
        scales.of(20_000)


def test_a_schedule_over_rounds_can_be_asked_in_any_order():
    scales = LRScales(partial(lr_scheduler.ExponentialLR, gamma=0.5), rounds=5)
    assert [scales.of(round) for round in (3, 1, 1, 5, 2)] == [0.25, 1.0, 1.0, 0.0625, 0.5]

"""Learning rates in a client's fit: schedules by epoch and by step, factors by parameter name, in each engine.

The reference is a plain loop in float64 with PyTorch's own schedulers and parameter groups.
"""

import copy
from functools import partial

import pytest
import torch
from commands import rows as read_rows
from experiments import digits, experiment, same_bytes
from methods import METHODS
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from fl_lightning import ConfigError, Ditto, FedSiamDA, Head, LocalTraining, WarmupCosine
from fl_lightning.client.optimizers import LRScales
from fl_lightning.client.schedules import ScheduleStarts
from fl_lightning.core.seeding import Stream, derive
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine
from fl_lightning.models import MLP

DOUBLE = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 3}
ENGINES = {"loop": SequentialEngine, "fits": partial(SequentialEngine, local_loop=False), "stacked": StackedEngine}
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIZE = 24


def loop(run, rounds, build, interval, participants=None, spans=1):
    """Return the weights after FedAvg, written as a plain loop, and the learning rates of each client's first round.

    `build(network, steps, epochs)` returns an optimizer and its schedule, which is stepped by hand through all rounds
    before if it spans several. `participants` are the clients of each round, by default all.
    """
    run.load()
    data, epochs = run.data.data, run.training.trainer["max_epochs"]
    x, y = data.prepare(data.x_train).double(), data.y_train
    shared, rates = copy.deepcopy(run.worker.template.backbone).double(), {}
    for round in range(1, rounds + 1):
        sums, total = {}, 0
        for client in participants[round] if participants else range(len(run.data.shards)):
            index, network = run.data.shards[client].train, copy.deepcopy(shared)
            steps = epochs * -(-len(index) // SIZE)
            optimizer, schedule = build(network, spans * steps, spans * epochs)
            for _ in range((round - 1) * (steps if interval == "step" else epochs) if spans > 1 else 0):
                optimizer.step()
                schedule.step()
            shuffle = torch.Generator().manual_seed(derive(run.seed, Stream.BATCHES, round, client))
            seen = rates.setdefault(client, [])
            for _ in range(epochs):
                for chosen in index[torch.randperm(len(index), generator=shuffle)].split(SIZE):
                    if len(seen) < steps:
                        seen.append([group["lr"] for group in optimizer.param_groups])
                    optimizer.zero_grad()
                    cross_entropy(network(x[chosen]), y[chosen]).backward()
                    optimizer.step()
                    if interval == "step":
                        schedule.step()
                if interval == "epoch":
                    schedule.step()
            total += len(index)
            for name, value in network.state_dict().items():
                sums[name] = sums.get(name, 0) + len(index) * value
        shared.load_state_dict({name: value / total for name, value in sums.items()})
    return shared.state_dict(), rates


def near(ours, theirs):
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=1e-12)


def warm(optimizer, steps, warmup):
    """The same schedule, of PyTorch's parts."""
    rise = LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, steps - warmup)], [warmup])


def cosine(optimizer, interval, network, steps, epochs):
    optimizer = optimizer(network.parameters())
    length = steps if interval == "step" else epochs
    return optimizer, warm(optimizer, length, max(1, int(0.4 * length)))


@pytest.mark.fast_cases(4)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "momentum"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_warm_up_and_cosine_over_each_clients_fit_is_that_of_a_plain_loop(tmp_path, engine, optimizer, interval):
    run = experiment(
        tmp_path,
        scenario=digits(4, alpha=0.3),
        clients_per_round=4,
        rounds=2,
        batch_size=SIZE,
        engine=ENGINES[engine](),
        optimizer=optimizer,
        lr_scheduler=partial(WarmupCosine, warmup=0.4),
        lr_scheduler_interval=interval,
        trainer=DOUBLE,
    )
    expected, rates = loop(run, 2, partial(cosine, optimizer, interval), interval)
    if interval == "step":
        assert len({len(seen) for seen in rates.values()}) > 2  # the clients' fits have unequal lengths
    run.fit()
    near(run.state["model"], expected)


def polynomial(optimizer, interval, network, steps, epochs):
    """A schedule whose learning rates follow from those before, over fifty steps on every client."""
    optimizer = optimizer(network.parameters())
    return optimizer, PolynomialLR(optimizer, 50, power=1.5)


SPANNING = {
    "cosine": (cosine, partial(WarmupCosine, warmup=0.4)),
    "polynomial": (polynomial, partial(PolynomialLR, total_iters=50, power=1.5)),
}


@pytest.mark.fast_cases(6)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step", "ignore:lr_scheduler. total_iters")
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", SPANNING)
@pytest.mark.parametrize("per_round", [4, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_schedule_over_the_run_is_stepped_through_all_rounds(tmp_path, engine, per_round, schedule, interval):
    """Also those in which the client did not take part. The run is interrupted after round 2 and resumed."""
    build, ours = SPANNING[schedule]
    options = {
        "scenario": digits(4, alpha=0.3),
        "clients_per_round": per_round,
        "batch_size": SIZE,
        "engine": ENGINES[engine](),
        "optimizer": MOMENTUM,
        "lr_scheduler": ours,
        "lr_scheduler_interval": interval,
        "lr_scheduler_rounds": 4,
        "trainer": DOUBLE | {"max_epochs": 2},
    }
    experiment(tmp_path, rounds=2, **options).fit()
    run = experiment(tmp_path, rounds=4, **options)
    run.fit(resume=True)
    rows = read_rows(tmp_path, "clients.csv")
    participants = {round: [int(row["client"]) for row in rows if row["round"] == str(round)] for round in range(1, 5)}
    assert {len(clients) for clients in participants.values()} == {per_round}
    expected, rates = loop(run, 4, partial(build, MOMENTUM, interval), interval, participants, spans=4)
    assert len({len(seen) for seen in rates.values()}) > 1  # the clients' fits have unequal lengths
    near(run.state["model"], expected)


@pytest.mark.thorough
def test_a_schedule_over_the_run_is_the_same_on_worker_processes(tmp_path):
    options = {
        "lr_scheduler": WarmupCosine,
        "lr_scheduler_interval": "step",
        "lr_scheduler_rounds": 3,
        "optimizer": ADAM,
        "optimizer_state": "kept",
    }
    one = experiment(tmp_path / "one", **options)
    two = experiment(tmp_path / "two", engine=ProcessesEngine(workers=2), **options)
    for run in (one, two):
        run.fit()
    assert same_bytes(one.state["model"], two.state["model"])


def test_the_second_model_of_ditto_follows_a_schedule_over_the_run(tmp_path):
    """With lam 0 and one client, both models start equal in round 1 and take the same steps in all rounds."""
    run = experiment(
        tmp_path,
        Ditto(lam=0.0),
        scenario=digits(1),
        rounds=3,
        clients_per_round=1,
        optimizer=MOMENTUM,
        lr_scheduler=WarmupCosine,
        lr_scheduler_interval="step",
        lr_scheduler_rounds=3,
        trainer=DOUBLE,
    )
    run.fit()
    near(run.state["model"], run.memory[0]["personal_model"])


def test_each_step_of_a_schedule_over_the_run_is_computed_once():
    class Counting(ExponentialLR):
        steps = 0

        def step(self, *args):
            type(self).steps += 1
            super().step(*args)

    starts, rates = ScheduleStarts(rounds=100), []
    for round in range(1, 101):
        sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = Counting(sgd, 0.9)
        starts.advance(schedule, sgd, round, length=5)
        rates.append(schedule.get_last_lr()[0])
    assert rates == pytest.approx([0.9 ** (5 * round) for round in range(100)])
    assert Counting.steps < 100 + 5 * 100 + 1  # a new schedule takes one step of its own


def test_new_clients_train_as_in_the_last_round_of_a_schedule():
    """They train once more after the last round, where a schedule may have ended."""
    rates = []
    for round in (3, 4):
        sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = OneCycleLR(sgd, max_lr=1.0, total_steps=6)
        ScheduleStarts(rounds=3).advance(schedule, sgd, round, length=2)
        rates.append(schedule.get_last_lr())
    assert rates[0] == rates[1] != [0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_rounds": 0}, r"^lr_scheduler_rounds: 0"),
        ({"lr_scheduler_rounds": 3}, r"^lr_scheduler_rounds: 3, but no lr_scheduler"),
        ({"lr_scheduler_rounds": 2, "lr_scheduler": WarmupCosine}, r"^lr_scheduler_rounds: 2 is below rounds, 3"),
        (
            {"lr_scheduler_rounds": 3, "lr_scheduler": WarmupCosine, "round_lr_scheduler": WarmupCosine},
            r"^round_lr_scheduler: lr_scheduler spans",
        ),
        (
            {"lr_scheduler_rounds": 10**4, "lr_scheduler": partial(OneCycleLR, max_lr=1.0, total_steps=15_000)},
            r"^lr_scheduler: total_steps of OneCycleLR is 15000",
        ),
        (
            {"lr_scheduler_rounds": 3, "lr_scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=2)},
            r"^lr_scheduler: Tried to step 3 times",
        ),
    ],
)
def test_a_schedule_over_rounds_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        short(**options).check()


def test_a_schedule_that_is_made_for_the_run_does_not_warn():
    schedule = partial(CosineAnnealingLR, T_max=6)
    short(lr_scheduler=schedule, lr_scheduler_rounds=3).check()
    with pytest.warns(UserWarning, match="T_max of CosineAnnealingLR is 6.* 8 epoch"):
        short(lr_scheduler=schedule, lr_scheduler_rounds=4).check()


def grouped(network, steps, epochs):
    """The head's last layer ten times as fast, the first layer a tenth, the rest at the rate of the optimizer."""
    named = dict(network.named_parameters())
    head = [value for name, value in named.items() if name.startswith("head.")]
    first = [named["encoder.1.weight"]]
    rest = [value for name, value in named.items() if not any(value is one for one in (*head, *first))]
    groups = [{"params": head, "lr": 0.1}, {"params": first, "lr": 0.001}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return optimizer, ExponentialLR(optimizer, 0.9)


FACTORS = {"head.*": 10.0, "encoder.1.w*": 0.1, "*.weight": 1.0}


@pytest.mark.parametrize("engine", ENGINES)
def test_factors_by_pattern_are_parameter_groups_of_a_plain_loop(tmp_path, engine):
    run = experiment(
        tmp_path,
        scenario=digits(4, alpha=0.3),
        clients_per_round=4,
        rounds=2,
        batch_size=SIZE,
        engine=ENGINES[engine](),
        optimizer=ADAM,
        lr_factors={name: factor for name, factor in FACTORS.items() if factor != 1},
        lr_scheduler=partial(ExponentialLR, gamma=0.9),
        lr_scheduler_interval="step",
        trainer=DOUBLE | {"max_epochs": 1},
    )
    expected, rates = loop(run, 2, grouped, "step")
    assert rates[0][0] == [0.1, 0.001, 0.01]
    run.fit()
    near(run.state["model"], expected)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_factors_of_one_change_nothing_and_work_with_kept_state_and_round_schedules(tmp_path, engine):
    options = {
        "optimizer": ADAM,
        "optimizer_state": "kept",
        "round_lr_scheduler": partial(ExponentialLR, gamma=0.5),
        "trainer": DOUBLE | {"max_epochs": 1},
        "engine": ENGINES[engine](),
    }
    plain = experiment(tmp_path / "plain", **options)
    ones = experiment(tmp_path / "ones", lr_factors={"head.*": 1.0, "encoder.*": 1.0}, **options)
    twice = experiment(tmp_path / "twice", lr_factors={"*": 2.0}, **options)
    fast = experiment(tmp_path / "fast", **options | {"optimizer": partial(ADAM, lr=0.02)})
    for run in (plain, ones, twice, fast):
        run.fit()
    assert same_bytes(plain.state["model"], ones.state["model"])
    assert same_bytes(twice.state["model"], fast.state["model"])
    assert not same_bytes(plain.state["model"], fast.state["model"])


@pytest.mark.parametrize("algorithm", [Ditto, partial(FedSiamDA, mu=0.5)], ids=["Ditto", "FedSiamDA"])
def test_second_models_have_the_same_factors(tmp_path, algorithm):
    head = Head(projection=8, prediction=8)
    run = experiment(
        tmp_path,
        algorithm(),
        rounds=1,
        model=partial(MLP, hidden=(16,), head=head),
        optimizer=MOMENTUM,
        lr_factors={"head.*": 10.0},
        trainer=DOUBLE,
    )
    run.load()
    module = run.worker.modules.build()
    second = getattr(module, "own", None) or copy.deepcopy(module.backbone)
    optimizer = module.optimizer_for(second.parameters(), second)
    of = {id(p): name for name, p in second.named_parameters()}
    rates = {of[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert all(rate == pytest.approx(1.0 if name.startswith("head.") else 0.1) for name, rate in rates.items())
    run.fit()


def test_the_second_model_of_ditto_follows_schedule_and_factors(tmp_path):
    """With lam 0 and in one round, both models of the only client take the same steps."""
    run = experiment(
        tmp_path,
        Ditto(lam=0.0),
        rounds=1,
        clients_per_round=1,
        optimizer=MOMENTUM,
        lr_scheduler=partial(WarmupCosine, warmup=2),
        lr_scheduler_interval="step",
        lr_factors={"head.*": 3.0},
        trainer=DOUBLE,
    )
    run.fit()
    (memory,) = (run.memory.get(client) for client in run.memory)
    near(run.state["model"], memory["personal_model"])


# --- WarmupCosine ---


def rates_of(schedule, steps):
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    built, rates = schedule(sgd), []
    for _ in range(steps):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        built.step()
    return rates


@pytest.mark.parametrize(("steps", "warmup"), [(10, 3), (7, 1), (20, 5)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_the_schedule_is_that_of_torchs_parts(steps, warmup):
    ours = rates_of(partial(WarmupCosine, warmup=warmup, steps=steps), steps)
    assert ours == pytest.approx(rates_of(lambda sgd: warm(sgd, steps, warmup), steps), abs=1e-15)
    share = rates_of(partial(WarmupCosine, warmup=(warmup + 0.5) / steps, steps=steps), steps)
    assert share == ours


def test_without_warm_up_it_is_the_cosine_and_ends_where_it_should():
    ours = rates_of(partial(WarmupCosine, end=0.1, steps=8), 12)
    assert ours[:8] == pytest.approx(rates_of(partial(CosineAnnealingLR, T_max=8, eta_min=0.05), 8))
    assert ours[8:] == [0.05] * 4
    assert rates_of(partial(WarmupCosine, warmup=9, steps=3), 3) == pytest.approx([0.125, 0.25, 0.375])


@pytest.mark.parametrize(
    ("options", "key"),
    [({"warmup": -1}, "warmup"), ({"warmup": 1.5}, "warmup"), ({"end": 2}, "end"), ({"steps": 0}, "steps")],
)
def test_arguments_out_of_range_are_refused(options, key):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        WarmupCosine(torch.optim.SGD([torch.zeros(1)], lr=1.0), **options)


def test_over_rounds_the_number_of_steps_has_to_be_given():
    """A resume can change the number of rounds, and with it the learning rates of rounds that are over."""
    with pytest.raises(ConfigError, match=r"^round_lr_scheduler: WarmupCosine needs"):
        LRScales(WarmupCosine, rounds=3)
    assert LRScales(partial(WarmupCosine, steps=4), rounds=4).of(3) == pytest.approx(0.5)


# --- What is refused or warned of before round 1 ---


def short(**options):
    options = {"scenario": digits(3), "batch_size": SIZE, "trainer": {"accelerator": "cpu", "max_epochs": 2}} | options
    return experiment(None, clients_per_round=3, **options)


@pytest.mark.parametrize(
    ("schedule", "option"),
    [
        (partial(OneCycleLR, max_lr=0.1, total_steps=20), "total_steps of OneCycleLR is 20"),
        (partial(CosineAnnealingLR, T_max=10), "T_max of CosineAnnealingLR is 10"),
        (partial(PolynomialLR, total_iters=3), "total_iters of PolynomialLR is 3"),
        (partial(ConstantLR), "total_iters of ConstantLR is 5"),
        (partial(WarmupCosine, steps=9), "steps of WarmupCosine is 9"),
    ],
    ids=lambda value: value.split()[2] if isinstance(value, str) else "",
)
def test_a_schedule_that_is_made_for_more_epochs_warns(schedule, option):
    with pytest.warns(UserWarning, match=rf"^lr_scheduler: {option}, but a client's fit has 2 epoch"):
        short(lr_scheduler=schedule).check()


def test_a_cosine_that_would_rise_again_warns():
    with pytest.warns(UserWarning, match="T_max of CosineAnnealingLR is 3"):
        short(lr_scheduler=partial(CosineAnnealingLR, T_max=3), lr_scheduler_interval="step").check()


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedules_of_the_fits_length_do_not_warn(interval):
    short(lr_scheduler=WarmupCosine, lr_scheduler_interval=interval).check()
    short(lr_scheduler=partial(OneCycleLR, max_lr=0.1, total_steps=2)).check()


def test_a_schedule_that_ends_before_the_largest_clients_fit_is_refused():
    schedule = partial(OneCycleLR, max_lr=0.1, total_steps=5)
    with pytest.raises(ConfigError, match=r"^lr_scheduler: Tried to step 6 times"):
        short(lr_scheduler=schedule, lr_scheduler_interval="step").check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_interval": "batch"}, r"^lr_scheduler_interval: 'batch' not found"),
        ({"lr_factors": {"head.*": 0.0}}, r"^lr_factors\.head\.\*: 0\.0 is not above 0"),
        ({"lr_factors": {"head.*": float("nan")}}, r"^lr_factors\.head\.\*: nan"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LocalTraining(**options)


@pytest.mark.parametrize("factors", [{"hed.*": 2.0}, {"head.*": 2.0, "head.*.bias": 3.0}])
def test_a_pattern_without_a_parameter_is_refused(factors):
    with pytest.raises(ConfigError, match=rf"^lr_factors: '{[*factors][-1]}' matches no trainable".replace("*", r"\*")):
        short(lr_factors=factors).check()


REFUSING = {
    "APFL",
    "APPLE",
    "CriticalFL",
    "FedCM",
    "FedDC",
    "FedKD",
    "FedNova",
    "FedROD",
    "MoFedSAM",
    "PeerCriticalFL",
    "SCAFFOLD",
}
"""Methods that need one learning rate, or train parameters that are not the model's."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_a_factor_on_all_parameters_is_another_learning_rate_for_each_method_or_refused(tmp_path, name):
    method, options = METHODS[name]
    options = {"rounds": 1, "trainer": {"accelerator": "cpu", "max_epochs": 1}} | options
    sgd = partial(torch.optim.SGD, lr=0.02)
    twice = experiment(tmp_path / "twice", method(), **options | {"optimizer": sgd, "lr_factors": {"*": 2.0}})
    fast = experiment(tmp_path / "fast", method(), **options | {"optimizer": partial(sgd, lr=0.04)})
    if name in REFUSING:
        with pytest.raises(ConfigError, match=r"^lr_factors: "):
            twice.check()
        return
    for run in (twice, fast):
        run.fit()
    assert twice.state.keys() == fast.state.keys()
    for section in twice.state:
        assert same_bytes(twice.state[section], fast.state[section])

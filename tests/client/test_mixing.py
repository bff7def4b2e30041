"""MixUp and CutMix in local training, against their equations and a plain loop in float64."""

import copy
import random
from functools import partial

import pytest
import torch
from experiments import digits, experiment, same_bytes
from methods import METHODS
from torch.nn import functional as F

from fl_lightning import ConfigError, FedAvg, FedProx, LocalTraining, LossTerm
from fl_lightning.client.mixing import HiddenTargets, Mixing, bounds, cut_mix, mix_up
from fl_lightning.core.seeding import Stream, derive, seed_everything
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine

DOUBLE = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 2}
ENGINES = {
    "loop": SequentialEngine,
    "fits": partial(SequentialEngine, local_loop=False),
    "processes": partial(ProcessesEngine, workers=2),
}


def test_mix_up_is_the_weighted_sum_with_the_sample_before():
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.arange(5)
    mixture = mix_up(x, 0.3)
    for i in range(5):
        torch.testing.assert_close(mixture.x[i], 0.3 * x[i] + 0.7 * x[i - 1])
    assert mixture.partners(y).tolist() == [4, 0, 1, 2, 3]
    assert mixture.share == 0.3


@pytest.mark.parametrize("place", [(0.0, 0.99), (0.5, 0.5), (0.9, 0.1)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 1.0])
def test_cut_mix_takes_a_rectangle_of_the_image_before_and_its_share(share, place):
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 2, 10, 8)
    mixture = cut_mix(x, share, *place)
    for i in range(4):
        other = mixture.x[i] == x[i - 1]
        assert bool((other | (mixture.x[i] == x[i])).all())
        assert float(other.float().mean()) == pytest.approx(1 - mixture.share)
    rows = (mixture.x[1, 0] == 0).any(1)
    columns = (mixture.x[1, 0] == 0).any(0)
    assert int(other.sum()) == 2 * int(rows.sum()) * int(columns.sum())  # one rectangle


def test_the_rectangle_is_that_of_the_authors_code():
    """`cut = int(size * sqrt(1 - λ))`, from `clip(centre - cut // 2)` to `clip(centre + cut // 2)`."""
    assert bounds(32, 0.5, 0.5) == (8, 24)
    assert bounds(32, 0.5, 0.0) == (0, 8)
    assert bounds(32, 0.5, 0.99) == (23, 32)
    assert bounds(7, 0.5, 0.5) == (2, 4)


def test_an_inner_rectangle_has_the_share_of_the_pixels():
    mixture = cut_mix(torch.rand(2, 1, 40, 40), 0.75, 0.5, 0.5)
    assert mixture.share == 1 - 20 * 20 / (40 * 40)


def test_both_are_drawn_equally_often():
    random.seed(0)
    mixing, x = Mixing(0.2, 1.0), torch.arange(8.0).view(2, 1, 2, 2)
    kinds = [bool(torch.isin(mixing(x).x, x).all()) for _ in range(400)]
    assert 150 < sum(kinds) < 260


def soft(logits, y, share):
    """Cross-entropy with soft targets, which is how the papers write the loss."""
    one, other = (F.one_hot(labels, 10).to(logits) for labels in (y, y.roll(1, 0)))
    return -((share * one + (1 - share) * other) * logits.log_softmax(1)).sum(1).mean()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_that_of_a_plain_loop_with_soft_targets(tmp_path, engine, kind):
    run = experiment(
        tmp_path,
        rounds=2,
        scenario=digits(3),
        clients_per_round=3,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        trainer=DOUBLE,
        engine=ENGINES[engine](),
        **{kind: 0.4},
    )
    run.load()
    data = run.data.data
    x, y = data.prepare(data.x_train).double(), data.y_train
    shared = copy.deepcopy(run.worker.template.backbone).double()
    for round in (1, 2):
        sums, total = {}, 0
        for client, shard in enumerate(run.data.shards):
            network = copy.deepcopy(shared)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            shuffle = torch.Generator().manual_seed(derive(run.seed, Stream.BATCHES, round, client))
            seed_everything(run.seed, Stream.TRAINING, round, client)
            for _ in range(2):
                for chosen in shard.train[torch.randperm(len(shard.train), generator=shuffle)].split(64):
                    share = random.betavariate(0.4, 0.4)
                    if kind == "mixup":
                        mixed = share * x[chosen] + (1 - share) * x[chosen.roll(1)]
                    else:
                        mixture = cut_mix(x[chosen], share, random.random(), random.random())
                        mixed, share = mixture.x, mixture.share
                    optimizer.zero_grad()
                    soft(network(mixed), y[chosen], share).backward()
                    optimizer.step()
            total += len(shard.train)
            for name, value in network.state_dict().items():
                sums[name] = sums.get(name, 0) + len(shard.train) * value
        shared.load_state_dict({name: value / total for name, value in sums.items()})
    run.fit()
    torch.testing.assert_close(dict(run.state["model"]), dict(shared.state_dict()), rtol=0, atol=1e-12)


class ReadsTargets(LossTerm):
    """A term of a user that reads targets without saying so."""

    def forward(self, step):
        return F.cross_entropy(step.logits, step.targets)


class ReadsOne(LossTerm):
    def forward(self, step):
        return step.logits[step.targets == 1].sum()


@pytest.mark.parametrize("term", [ReadsTargets, ReadsOne])
def test_a_term_that_reads_targets_ends_in_one_line(tmp_path, term):
    run = experiment(tmp_path, FedAvg(loss_terms=[term()]), mixup=0.2)
    with pytest.raises(Exception, match="mixup: a loss term "):
        run.fit()


def test_other_terms_are_added_once(tmp_path):
    plain = experiment(tmp_path / "plain", FedAvg(), mixup=0.2, rounds=1)
    zero = experiment(tmp_path / "zero", FedProx(mu=0.0), mixup=0.2, rounds=1)
    near = experiment(tmp_path / "near", FedProx(mu=10.0), mixup=0.2, rounds=1)
    for run in (plain, zero, near):
        run.fit()
    assert same_bytes(plain.state["model"], zero.state["model"])
    assert not same_bytes(plain.state["model"], near.state["model"])


def test_hidden_targets_refuse_every_use():
    hidden = HiddenTargets()
    for use in (len, iter, lambda t: t[0], lambda t: t == 1, lambda t: t.shape, torch.zeros(1).add):
        with pytest.raises(ConfigError, match=r"^mixup: a loss term reads"):
            use(hidden)


@pytest.mark.parametrize(
    ("options", "message"), [({"mixup": 0.0}, r"^mixup: 0\.0 is not above 0"), ({"cutmix": -1}, r"^cutmix: -1 is")]
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LocalTraining(**options)


def test_stacked_clients_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^engine: StackedEngine cannot stack mixup"):
        experiment(tmp_path, mixup=0.2, engine=StackedEngine()).check()


REFUSING = {
    *("APFL", "APPLE", "CwFedAvg", "Ditto", "FedDW", "FedDistill", "FedDistillPlus", "FedGen", "FedLC", "FedNTD"),
    *("FedPAC", "FedProto", "FedRCL", "FedROD", "FedSAM", "FedSKC", "FedSKC with ProtoNet", "FedUV", "MoFedSAM"),
    *("PFedMe", "PerFedAvg", "ProtoNet", "UA-PDFL's code", "UAPDFL", "class shares", "cwFedAVG's code", "received"),
    *("FML", "FedGH", "FedKD", "FedSR", "FedTGP", "two terms"),
}
"""Methods that read the target of each sample in training, or take their own steps."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_each_method_trains_on_mixtures_or_refuses_them_before_round_1(tmp_path, name):
    method, options = METHODS[name]
    run = experiment(tmp_path, method(), **options | {"rounds": 2, "mixup": 0.2})
    if name in REFUSING:
        with pytest.raises(ConfigError, match=r"^mixup: "):
            run.check()
    else:
        run.fit()

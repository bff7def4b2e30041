"""Runs with DP-SGD: what is accepted and refused, epsilon, engines, resumes, and clients' own machines."""

import math
from functools import partial

import pytest
import torch
from experiments import digits, experiment, finished, in_two_parts, same_bytes, samples_of, task_of_round, untimed
from methods import METHODS, SIAMESE
from torch import nn

from fl_lightning import ConfigError, FedAvg, FedProx, LossTerm
from fl_lightning.algorithms import Algorithm
from fl_lightning.callbacks.record_privacy import RecordPrivacy
from fl_lightning.client.dp_sgd import DPSGD, PrivateGradients
from fl_lightning.client.fit import ClientTrainerView, compute_gradients
from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.private_random import PrivateRandom
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine
from fl_lightning.models import MLP
from fl_lightning.models.layers import BATCH_NORMS

pytest.importorskip("opacus")

PLAIN = partial(torch.optim.SGD, lr=0.2)
PRIVATE = {"dp_sgd": DPSGD(noise=1.0), "optimizer": PLAIN, "scenario": digits(4), "clients_per_round": 3}
ONE_EPOCH = {"accelerator": "cpu", "max_epochs": 1}


def without_batch_norm(factory):
    """Return a factory of the same network with LayerNorm in place of BatchNorm."""

    def build(in_shape, num_classes):
        network = factory(in_shape=in_shape, num_classes=num_classes)
        for part in network.modules():
            for name, layer in part.named_children():
                if isinstance(layer, BATCH_NORMS):
                    setattr(part, name, nn.LayerNorm(layer.num_features))
        return network

    return build


# --- All methods -----------------------------------------------------------------------------------------------------

ACCEPTED = {
    *("CFL", "DFedAvgM", "FFALoRA", "FLoRA", "FedACG", "FedAMP", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedCM"),
    *("FedDC", "FedDyn", "FedExLoRA", "FedIT", "FedNTD", "FedPer", "FedProx", "FedSALoRA", "FedSR", "FedYogi"),
    *("FlexLoRA", "HeteroFL", "HeurFedAMP", "LGFedAvg", "Local", "MOON", "PeerAlgorithm", "PeerFedPer", "RoLoRA"),
    *("SCAFFOLD", "local buffers", "dropped buffers", "uniform", "kept optimizer", "schedules", "many clients"),
    *("gossip on a random graph", "FLoRA with ranks", "FlexLoRA with ranks", "FedAT", "FedAsync", "FedBuff"),
    *("FedDyn with clipping", "gossip with a median"),
}
"""Methods whose clients read their samples only in steps, on losses that are means over samples."""


def private_experiment(run_dir, name):
    method, options = METHODS[name]
    model = without_batch_norm(options.get("model", SIAMESE))
    optimizer = options.get("optimizer", PLAIN)
    return experiment(run_dir, method(), **PRIVATE | options | {"model": model, "optimizer": optimizer})


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_accepted_or_refused_before_round_1(tmp_path, name):
    run = private_experiment(tmp_path / "run", name)
    if name in ACCEPTED:
        run.check()
        return
    with pytest.raises(ConfigError, match=r"^(algorithm|algorithm.validation|model|scenario.dataset): .*"):
        run.check()
    assert not (tmp_path / "run").exists()


def module_in_fit(run, client=0):
    """Return a client's module in the middle of its second fit, with changed weights, and batches of its samples."""
    module = run.worker.modules.build().train()
    module.trainer = ClientTrainerView(run.worker.idle_trainer, run.worker.idle_trainer, LocalWork(3, 3))
    for _ in range(2):
        for term in module.terms():
            term.begin(module)
        with torch.no_grad():
            for p in module.backbone.parameters():
                p += 0.05 * torch.randn_like(p)
        for term in module.terms():
            term.recall(term.remember(module))
    for layer in module.modules():
        if isinstance(layer, nn.Dropout) or type(layer).__name__ == "DrawGaussian":
            layer.eval()
    return module, samples_of(run, client)


def gradients_of(module, batch, function):
    optimizer = torch.optim.SGD(module.backbone.parameters(), lr=0.1)
    function(module, optimizer, batch, 0, module.trainer.options)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.backbone.parameters()]
    return torch.cat([gradient.flatten() for gradient in found])


def private_step(clip, expected):
    return PrivateGradients(clip, 0.0, expected, PrivateRandom(torch.device("cpu"), 0))


WITH_TERMS = ("FedAvg", "FedCM", "FedDC", "FedDyn", "FedNTD", "FedProx", "FedSR", "MOON", "SCAFFOLD", "FLoRA")


@pytest.mark.numeric
@pytest.mark.parametrize("name", WITH_TERMS)
def test_without_clipping_and_noise_a_step_is_the_methods_own(tmp_path, name):
    run = private_experiment(tmp_path, name)
    run.check()
    module, (x, y) = module_in_fit(run)
    x = run.worker.client_data.prepare(x[:7])
    own = gradients_of(module, (x, y[:7]), compute_gradients)
    torch.testing.assert_close(
        gradients_of(module, (x, y[:7]), private_step(math.inf, 7)), own, rtol=1e-4, atol=1e-5 * float(own.abs().max())
    )


@pytest.mark.numeric
@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("name", sorted(ACCEPTED - {"many clients"}))
def test_one_record_changes_a_step_of_each_accepted_method_by_at_most_the_norm(tmp_path, name):
    run = private_experiment(tmp_path, name)
    run.check()
    module, (x, y) = module_in_fit(run)
    x = run.worker.client_data.prepare(x[:7])
    replaced, targets = x.clone(), y[:7].clone()
    replaced[3], targets[3] = -100 * replaced[3] + 5, (targets[3] + 1) % 10
    kept = [0, 1, 2, 4, 5, 6]
    clip = 0.05
    batches = [(x, y[:7]), (replaced, targets), (x[kept], y[kept])]
    whole, other, less = (gradients_of(module, batch, private_step(clip, 1)) for batch in batches)
    assert 0 < float((whole - other).norm()) <= 2 * clip * (1 + 1e-4)
    assert 0 < float((whole - less).norm()) <= clip * (1 + 1e-4)


# --- Refusals --------------------------------------------------------------------------------------------------------


class Mean(LossTerm):
    """A term that mixes the samples of a batch."""

    def forward(self, step):
        return step.logits.mean(dim=0).square().sum()


class Drifts(LossTerm):
    """A term that depends on the samples of earlier steps, by very little."""

    seen = 0.0

    def forward(self, step):
        self.seen += 1e-7 * float(step.logits.detach().abs().sum())
        return step.logits.square().mean() + self.seen


class Counts(nn.Module):
    """A network with a buffer that counts its samples."""

    def __init__(self, in_shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return self.layer(x.flatten(1))


class Centred(Counts):
    """A network that subtracts the mean of a batch."""

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x - x.mean(dim=0))


class ReadsSamples(FedAvg):
    def upload(self, module, batches, n_samples, num_classes):
        return super().upload(module, batches, n_samples, num_classes)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"mixup": 0.2}, "mixup"),
        ({"cutmix": 1.0}, "cutmix"),
        ({"compile": True}, "compile"),
        ({"batch_sampler": "balanced"}, "batch_sampler"),
        ({"class_weights": "balanced"}, "class_weights"),
        ({"trainer": ONE_EPOCH | {"accumulate_grad_batches": 2}}, "trainer.accumulate_grad_batches"),
        ({"trainer": ONE_EPOCH | {"limit_train_batches": 0.5}}, "trainer.limit_train_batches"),
        ({"trainer": ONE_EPOCH | {"precision": "bf16-true"}}, "trainer.precision"),
        ({"algorithm": FedAvg(loss_terms=[Mean()])}, "algorithm"),
        ({"algorithm": FedAvg(loss_terms=[Drifts()])}, "algorithm"),
        ({"algorithm": ReadsSamples()}, "algorithm"),
        ({"model": Counts}, "model"),
        ({"model": Centred}, "model"),
        ({"dp_sgd": DPSGD(epsilon=1e-6)}, "dp_sgd.epsilon"),
        ({"engine": StackedEngine()}, "engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_private_is_refused_before_round_1(tmp_path, options, key):
    run = experiment(tmp_path / "run", **PRIVATE | {"trainer": ONE_EPOCH} | options)
    with pytest.raises(ConfigError, match=f"^{key}: "):
        run.check()
    assert not (tmp_path / "run").exists()


def test_the_ledger_is_refused_without_dp_sgd(tmp_path):
    with pytest.raises(ConfigError, match=r"^callbacks: RecordPrivacy"):
        experiment(tmp_path, callbacks=[RecordPrivacy()]).check()


def test_samples_are_hidden_from_a_method_that_wrongly_claims_not_to_read_them(tmp_path):
    class Claims(FedAvg):
        only_steps_read_data = True

        def upload(self, module, batches, n_samples, num_classes):
            return super().upload(module, [*batches], n_samples, num_classes)

    with pytest.raises(Exception, match="dp_sgd: "):
        finished(tmp_path, Claims(), **PRIVATE)


def test_every_method_that_overrides_upload_says_whether_it_reads_samples():
    assert Algorithm.only_steps_read_data
    assert not ReadsSamples.only_steps_read_data


# --- Runs ------------------------------------------------------------------------------------------------------------


def test_epsilon_is_that_of_opacus_for_each_clients_rate_and_steps(tmp_path):
    from opacus.accountants import RDPAccountant

    run = finished(tmp_path, **PRIVATE, rounds=2)
    rounds = {client: [] for client in range(4)}
    lines = [line.split(",") for line in (tmp_path / "clients.csv").read_text().splitlines()]
    columns = {name: lines[0].index(name) for name in ("round", "client", "record_epsilon")}
    for line in lines[1:]:
        rounds[int(line[columns["client"]])].append(float(line[columns["record_epsilon"]]))
    largest = 0.0
    for client, found in rounds.items():
        n, size = len(run.data.shards[client].train), run.training.batch_size
        accountant = RDPAccountant()
        for epsilon in found:
            for _ in range(2 * math.ceil(n / size)):  # two epochs
                accountant.step(noise_multiplier=1.0, sample_rate=min(1.0, size / n))
            assert epsilon == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-9)
            largest = max(largest, epsilon)
    assert sum(map(len, rounds.values())) == 6
    assert run.csv.rows[-1]["privacy/record_epsilon"] == largest


def test_the_counted_steps_are_those_of_the_fits(tmp_path):
    run = experiment(tmp_path, **PRIVATE)
    run.check()
    for client in range(4):
        module = run.worker.modules.receive(task_of_round(run, 1, client))
        run.worker.loop(module, task_of_round(run, 1, client), run.engine.trainer_for(run.worker))
        assert module.steps == run.worker.client_data.private_work(client).steps


def test_noise_follows_from_epsilon_and_the_last_round_reaches_it(tmp_path):
    options = PRIVATE | {"dp_sgd": DPSGD(epsilon=4.0), "clients_per_round": 4, "trainer": ONE_EPOCH}
    run = finished(tmp_path, **options, rounds=2)
    assert run.csv.rows[0]["privacy/record_epsilon"] < 3.5
    assert run.csv.rows[1]["privacy/record_epsilon"] == pytest.approx(4.0, rel=2e-3)
    assert run.csv.rows[1]["privacy/record_epsilon"] <= 4.0
    assert run.training.dp_sgd.epsilon == 4.0  # what the config says


def test_epsilon_is_infinite_without_noise(tmp_path):
    run = finished(tmp_path, **PRIVATE | {"dp_sgd": DPSGD(noise=0.0)}, rounds=1)
    assert run.csv.rows[0]["privacy/record_epsilon"] == math.inf


def test_a_run_in_two_parts_equals_a_run_in_one(tmp_path):
    whole, rest = in_two_parts(tmp_path, FedProx, 2, **PRIVATE, rounds=4)
    assert same_bytes(whole.state["model"], rest.state["model"])
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)
    assert (tmp_path / "whole" / "clients.csv").read_bytes() == (tmp_path / "parts" / "clients.csv").read_bytes()


def test_a_dry_run(tmp_path):
    experiment(tmp_path, **PRIVATE).fit(fast=True)


@pytest.mark.thorough
def test_processes_give_the_same_bytes(tmp_path):
    runs = [
        finished(tmp_path / name, **PRIVATE, rounds=2, engine=engine)
        for name, engine in {
            "sequential": SequentialEngine(),
            "fits": SequentialEngine(local_loop=False),
            "processes": ProcessesEngine(workers=2),
        }.items()
    ]
    for other in runs[1:]:
        assert same_bytes(runs[0].state["model"], other.state["model"])
        assert untimed(runs[0].csv.rows) == untimed(other.csv.rows)


def test_the_noise_of_two_rounds_and_two_clients_differs(tmp_path):
    run = experiment(tmp_path, **PRIVATE)
    run.check()
    noises = [run.worker.private_gradients(task_of_round(run, *place), 9).random for place in ((1, 0), (2, 0), (1, 1))]
    drawn = [source.normal(torch.zeros(5)) for source in noises]
    assert len({tuple(each.tolist()) for each in drawn}) == 3


def test_bf16_mixed_precision(tmp_path):
    options = PRIVATE | {"trainer": ONE_EPOCH | {"precision": "bf16-mixed"}}
    run = finished(tmp_path, **options, rounds=1)
    assert {value.dtype for value in run.state["model"].values()} == {torch.float32}
    assert 0 < run.csv.rows[0]["global/acc"] <= 1


def test_a_network_that_vmap_cannot_batch_is_trained_one_sample_at_a_time_with_a_warning(tmp_path):
    class Branches(MLP):
        def forward(self, x):
            return super().forward(x if x.sum() > -1e9 else -x)

        def features_and_logits(self, x):
            return super().features_and_logits(x if x.sum() > -1e9 else -x)

    def run(model):
        result = finished(tmp_path / model.__name__, **PRIVATE | {"model": partial(model, hidden=(4,))}, rounds=1)
        return result.state["model"]

    with pytest.warns(UserWarning, match=r"^dp_sgd: Branches"):
        one_by_one = run(Branches)
    for name, value in run(MLP).items():
        torch.testing.assert_close(one_by_one[name], value, rtol=1e-3, atol=1e-4)


# --- Clients' own machines -------------------------------------------------------------------------------------------


def test_on_its_own_machine_a_clients_noise_is_not_derived_from_the_seed_and_no_losses_are_sent(tmp_path):
    run = experiment(tmp_path, **PRIVATE | {"scenario": digits(2), "clients_per_round": 2})
    run.check()
    task = task_of_round(run, 1, 0)
    simulated = [run.worker.run(task) for _ in range(2)]
    own = run.worker_of(run.data)
    assert own.own_machine
    real = [own.run(task) for _ in range(2)]
    assert not [result.failure for result in (*simulated, *real) if result.failure]
    models = [result.upload.section("model") for result in (*simulated, *real)]
    assert same_bytes(models[0], models[1])
    assert not same_bytes(models[2], models[3])
    assert not same_bytes(models[1], models[2])
    assert "ce" in simulated[0].losses
    assert not real[0].losses
    noises = [
        each.private_gradients(task, 9).random.normal(torch.zeros(5)) for each in (own, own, run.worker, run.worker)
    ]
    assert not torch.equal(*noises[:2])
    assert torch.equal(*noises[2:])
    sizes = [
        [len(y) for _, y in own.client_data.poisson_batches(task, secret)] for secret in (True, True, False, False)
    ]
    assert sizes[0] != sizes[1]
    assert sizes[2] == sizes[3]


def test_the_classes_of_the_clients_samples_are_not_in_the_context_of_private_fits(tmp_path):
    run = experiment(tmp_path, **PRIVATE)
    run.check()
    assert run.worker.modules.receive(task_of_round(run, 1, 0)).context.class_counts is None
    other = experiment(tmp_path, **PRIVATE | {"dp_sgd": None})
    other.check()
    assert other.worker.modules.receive(task_of_round(other, 1, 0)).context.class_counts is not None

"""UA-PDFL's equations against brute force, Algorithm 2 by hand, and its bytes (spec: 5. UA-PDFL)."""

import copy
import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from experiments import UNEQUAL, NormMLP, descend, experiment, finished, in_float64, record_rounds, same_bytes
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, steps_of
from peers import Watching, mean_by_hand, model_of, peers_in, published
from torch.nn import functional as F

from fl_lightning.algorithms import UAPDFL, FedAvg, UnitAlignment, UnitRepresentation
from fl_lightning.algorithms.decentralized import ua_pdfl as ua
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Message, Upload, tensors_to_message, unbundle
from fl_lightning.core.round import Round
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data import Digits, Partition, Scenario
from fl_lightning.engines import Task
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric

K, C, D = 6, 10, 16  # clients, classes and features of the digits experiments
ENCODER, HEAD = 64 * D + D, D * C + C
UNIT = 4 * (C + D) + 8  # I, I^Aux and the number of samples
ALL = {"clients_per_round": K, "trainer": {"accelerator": "cpu", "max_epochs": 1}}
LN2 = math.log(2)


def floored(distribution):
    return [max(p, 1e-8) for p in distribution.tolist()]


def kl_by_hand(one, other):
    return sum(p * math.log(p / q) for p, q in zip(floored(one), floored(other), strict=True))


def symmetric_by_hand(one, other):
    return kl_by_hand(one, other) / 2 + kl_by_hand(other, one) / 2


def shannon_by_hand(one, other):
    total = 0.0
    for p, q in zip(floored(one), floored(other), strict=True):
        total += 0.5 * p * math.log(2 * p / (p + q)) + 0.5 * q * math.log(2 * q / (p + q))
    return total


BY_HAND = {"jensen_shannon": shannon_by_hand, "symmetric_kl": symmetric_by_hand}


@st.composite
def distributions(draw, n=2):
    """Draw distributions over the same classes, with some probabilities of zero."""
    classes = draw(st.integers(2, 8))
    row = st.lists(st.sampled_from([0.0, 0.0, 1e-12, 1e-6, 0.1, 1.0, 7.0]), min_size=classes, max_size=classes)
    rows = [draw(row.filter(any)) for _ in range(n)]
    return [torch.tensor(row, dtype=torch.float64) / sum(row) for row in rows]


def publication(distribution, n_samples, seed=0):
    """Return a client's publication with a small random model and the given unit representation."""
    generator = torch.Generator().manual_seed(seed)
    model = {
        "encoder.0.weight": torch.randn(3, 2, generator=generator),
        "encoder.1.running_mean": torch.randn(3, generator=generator),
        "encoder.1.num_batches_tracked": torch.randint(9, (), generator=generator),
        "head.weight": torch.randn(2, 3, generator=generator),
        "head.bias": torch.randn(2, generator=generator),
    }
    unit = {"distribution": torch.tensor(distribution), "features": torch.randn(3, generator=generator)}
    return Message.pack({"model": model, "unit": unit}, n_samples=n_samples)


OWN, NEAR, FAR = [0.5, 0.3, 0.2], [0.5, 0.31, 0.19], [0.01, 0.09, 0.9]


def collect_and_mix(method, own, peers, seed=0):
    """Return the messages that a client collects, and the model that it mixes."""
    collected = method.collect(own, peers, np.random.default_rng(seed))
    assert list(collected) == list(peers)
    for message, peer in zip(collected.values(), peers.values(), strict=True):
        assert message.section("unit").keys() == {"distribution", "features"}
        assert message.numbers == peer.numbers
    return collected, method.mix(own, [Upload(*item) for item in collected.items()])


def split(model):
    encoder = {name: value for name, value in model.items() if name.startswith("encoder")}
    return encoder, {name: value for name, value in model.items() if name.startswith("head")}


# --- Eq. 4 to 7: unit representation and divergence ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_eq4_is_a_constant_tensor_of_one_inputs_shape(dtype):
    batch = torch.randint(9, (5, 3, 8, 8)).to(dtype)
    unit = ua.unit_input(batch)
    assert (unit.shape, unit.dtype) == ((1, 3, 8, 8), dtype)
    assert (unit == 1).all()
    assert (ua.unit_input(batch[:1], 3.0) == 3).all()


def test_eq5_is_the_softmax_of_the_logits():
    logits = torch.randn(1, C)
    exps = [math.exp(value) for value in logits[0].tolist()]
    representation = ua.unit_representation(logits)
    torch.testing.assert_close(representation, torch.tensor([value / sum(exps) for value in exps]))
    assert ua.unit_representation(logits.half()).dtype == torch.float32


@pytest.mark.parametrize("name", BY_HAND)
@given(distributions())
def test_eq6_equals_a_brute_force_loop(name, pair):
    assert ua.DIVERGENCES[name](*pair) == pytest.approx(BY_HAND[name](*pair), rel=1e-9, abs=1e-12)


def test_disjoint_distributions_reach_the_bound_and_stay_finite():
    one, other = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert ua.jensen_shannon(one, other) == pytest.approx(LN2, abs=1e-6)
    assert ua.symmetric_kl(one, other) == pytest.approx((0.5 - 1e-8) * math.log(0.5 / 1e-8) * 2, rel=1e-9)


def test_the_method_uses_the_divergence_it_is_given():
    own, peer = publication(OWN, 3), publication(FAR, 3)
    for name, by_hand in BY_HAND.items():
        (gap,) = UAPDFL(divergence=name).divergences(own, [peer])
        sections = own.section("unit")["distribution"], peer.section("unit")["distribution"]
        assert gap == pytest.approx(by_hand(*sections), rel=1e-9)
    assert ua.DIVERGENCES[UAPDFL().divergence] is ua.jensen_shannon


# --- Eq. 11: auxiliary representation, and its average ---


def test_a_publications_representations_are_those_of_its_model(tmp_path):
    value = -0.5
    run = finished(tmp_path, UAPDFL(n_com=2, unit=value), rounds=2, model=NormMLP)
    for client in range(K):
        tensors, _ = published(run, client)
        backbone = run.worker.modules.build().backbone.eval()
        backbone.load_state_dict(model_of(tensors))
        with torch.no_grad():
            features = backbone.encoder(torch.full((1, 1, 8, 8), value))
            torch.testing.assert_close(tensors["unit/features"], features[0])
            torch.testing.assert_close(tensors["unit/distribution"], backbone.head(features)[0].softmax(dim=0))
        assert (tensors["unit/features"].shape, tensors["unit/distribution"].shape) == ((D,), (C,))


@pytest.mark.parametrize("peers", [1, 4])
def test_the_average_is_over_the_client_and_its_peers_or_in_the_reference_over_peers(peers):
    messages = [publication(OWN, n, seed=n) for n in (50, 3, 9, 20, 7)[: peers + 1]]
    heard = [Upload(k - 1, message) for k, message in enumerate(messages)]
    features = [message.section("unit")["features"].tolist() for message in messages]
    samples = [message.numbers["n_samples"] for message in messages]
    pieces = (UnitRepresentation(reference=reference) for reference in (False, True))
    plain, reference = (piece.merge({}, heard, Round(1, {}))["average"] for piece in pieces)
    for i in range(3):
        assert plain[i].item() == pytest.approx(sum(f[i] for f in features) / len(features), rel=1e-5, abs=1e-6)
        total = sum(n * f[i] for n, f in zip(samples[1:], features[1:], strict=True))
        assert reference[i].item() == pytest.approx(total / sum(samples[1:]), rel=1e-5, abs=1e-6)


def test_without_peers_the_average_is_the_clients_own_or_in_the_reference_missing():
    own = publication(OWN, 5)
    alone = [Upload(-1, own)]
    assert torch.equal(UnitRepresentation().merge({}, alone, Round(1, {}))["average"], own.section("unit")["features"])
    assert UnitRepresentation(reference=True).merge({}, alone, Round(1, {})) == {}


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_the_average_of_a_run_is_of_last_rounds_publications(tmp_path, preset):
    engine = Watching()
    run = finished(tmp_path, UAPDFL(n_com=2, preset=preset), rounds=2, engine=engine, **ALL)
    for client, task in engine.of_round(2).items():
        own, peers = tensors_to_message(task.memory["laid_out"]), [each.message for each in unbundle(task.download)]
        heard = peers if preset == "reference" else [own, *peers]
        weights = [m.numbers["n_samples"] if preset == "reference" else 1 for m in heard]
        expected = sum(n * m.section("unit")["features"] for n, m in zip(weights, heard, strict=True)) / sum(weights)
        torch.testing.assert_close(run.memory[client]["unit"]["average"], expected)


# --- Eq. 12 ---


def test_eq12_and_its_gradient_equal_the_formula():
    torch.manual_seed(0)
    backbone, average = MLP(in_shape=(4,), num_classes=3, hidden=(5,)), torch.randn(5)
    term = UnitAlignment(mu=0.7, value=2.0)
    term.unit.load({"average": average})
    linear = backbone.encoder[1]
    step = ClientModule(backbone, [term]).step((torch.randn(6, 4), torch.arange(6) % 3))
    for _ in range(2):  # computed again for new weights
        weight, bias = (p.detach().clone().requires_grad_() for p in (linear.weight, linear.bias))
        expected = 0.7 * ((weight @ torch.full((4,), 2.0) + bias).clamp(min=0) - average).pow(2).sum()
        expected.backward()
        backbone.zero_grad()
        value = term(step)
        value.backward()
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(linear.weight.grad, weight.grad)
        torch.testing.assert_close(linear.bias.grad, bias.grad)
        assert linear.weight.grad.any()
        assert all(p.grad is None for p in backbone.head.parameters())
        assert not term.unit.average.requires_grad
        with torch.no_grad():
            linear.weight += 0.3


def test_the_reference_regulariser_is_the_mean_squared_distance_of_the_batch():
    torch.manual_seed(0)
    backbone, average = MLP(in_shape=(4,), num_classes=3, hidden=(5,)), torch.randn(5)
    term = UnitAlignment(mu=0.7, reference=True)
    term.unit.load({"average": average})
    x = torch.randn(6, 4)
    value = term(ClientModule(backbone, [term]).step((x, torch.arange(6) % 3)))
    features = backbone.encoder(x)
    total = sum((features[b, i].item() - average[i].item()) ** 2 for b in range(6) for i in range(5))
    assert value.item() == pytest.approx(0.7 * total / (6 * 5), rel=1e-5, abs=1e-6)
    assert torch.autograd.grad(value, backbone.encoder[1].weight)[0].any()


def test_the_unit_input_is_computed_in_eval_mode_without_side_effects():
    torch.manual_seed(0)
    backbone = NormMLP((4,), 3)
    norm = backbone.encoder[2]
    with torch.no_grad():
        norm.running_mean.copy_(torch.randn(16))
        norm.running_var.copy_(torch.rand(16) + 0.5)
    term = UnitAlignment(mu=1.0)
    term.unit.load({"average": torch.randn(16)})
    backbone.train()
    backbone.encoder[3].eval()  # a frozen part
    modes = [part.training for part in backbone.modules()]
    buffers = {name: value.clone() for name, value in backbone.named_buffers()}
    step = Step(torch.zeros(2, 3), torch.tensor([0, 1]), None, torch.randn(2, 4), backbone)
    chance = torch.get_rng_state()
    value = term(step)
    assert [part.training for part in backbone.modules()] == modes
    assert modes.count(False) == 1
    assert all(torch.equal(value, buffers[name]) for name, value in backbone.named_buffers())
    assert torch.equal(torch.get_rng_state(), chance)
    features = backbone.eval().encoder(torch.ones(1, 4))[0]
    torch.testing.assert_close(value, (features - term.unit.average).square().sum())


def test_the_modes_are_restored_after_an_error():
    backbone = NormMLP((4,), 3).train()
    with pytest.raises(RuntimeError):
        ua.run_in_eval_mode(backbone.encoder, torch.ones(1, 5))
    assert all(part.training for part in backbone.modules())


@pytest.mark.parametrize("reference", [False, True])
def test_the_term_is_zero_without_an_average(reference):
    backbone = MLP(in_shape=(4,), num_classes=3)
    term = UnitAlignment(mu=1.0, reference=reference)
    assert term(ClientModule(backbone, [term]).step((torch.randn(2, 4), torch.tensor([0, 1])))).item() == 0


@pytest.mark.parametrize("reference", [False, True])
def test_alignment_works_with_a_server(tmp_path, reference):
    run = experiment(tmp_path, FedAvg(loss_terms=[UnitAlignment(0.5, reference=reference)]), rounds=2)
    rounds = record_rounds(run)
    run.fit()
    heard = [uploads for _, uploads, _ in rounds]
    weights = [upload.n_samples if reference else 1 for upload in heard[1]]
    features = [upload.message.section("unit")["features"] for upload in heard[1]]
    expected = sum(n * f for n, f in zip(weights, features, strict=True)) / sum(weights)
    torch.testing.assert_close(run.state["unit"]["average"], expected)
    assert [row["client/train_unit"] > 0 for row in run.csv.rows] == [False, True]


# --- Algorithm 2 on messages made by hand ---


@given(st.integers(1, 5), st.integers(0, 999), st.sampled_from([0.0, 1e-3, 0.02, 0.1, 0.5, math.inf]), st.booleans())
def test_algorithm_2_equals_a_brute_force_loop(peers, seed, th_i, reference):
    rng = np.random.default_rng(seed)
    rows = rng.dirichlet(np.full(3, 20.0 if seed % 2 else 1.0), peers + 1)
    samples = rng.integers(1, 90, peers + 1).tolist()
    own, *others = (publication(rows[k].tolist(), samples[k], k) for k in range(peers + 1))
    heard = dict(zip(sorted(rng.choice(20, peers, replace=False).tolist()), others, strict=True))
    collected, mixed = collect_and_mix(
        UAPDFL(th_i=th_i, preset="reference" if reference else "paper"), own, heard, seed
    )
    mine = own.section("unit")["distribution"]
    gaps = [shannon_by_hand(mine, message.section("unit")["distribution"]) for message in others]
    if th_i and all(gap < th_i for gap in gaps):
        (sent,) = [j for j, message in collected.items() if message.section("model")]
        assert same_bytes(collected[sent].tensors, heard[sent].tensors)
        assert same_bytes(mixed, heard[sent].section("model"))
        return
    similar = [message for message, gap in zip(others, gaps, strict=True) if gap < th_i]
    for j, gap in zip(heard, gaps, strict=True):
        encoder, head = split(heard[j].section("model"))
        assert same_bytes(collected[j].section("model"), encoder | (head if gap < th_i else {}))
    expected = {}
    for part, group in ((0, [own, *others]), (1, [own, *similar])):
        models = [split(message.section("model"))[part] for message in group]
        expected |= mean_by_hand(models, [message.numbers["n_samples"] for message in group])
    assert mixed.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mixed[name], value)
    if not similar:
        assert same_bytes(split(mixed)[1], split(own.section("model"))[1])


@pytest.mark.parametrize("divergence", ["jensen_shannon", "symmetric_kl"])
@pytest.mark.parametrize("others", [[], [NEAR]])
def test_branches_for_a_divergence_equal_to_the_threshold(divergence, others):
    """The paper drops out at `<=` and shares classifiers at `<`; the authors' code does the reverse."""
    own, peers = publication(OWN, 2), {k: publication(d, 3, k) for k, d in enumerate([FAR, *others])}
    th_i = ua.DIVERGENCES[divergence](*(torch.tensor(d) for d in (OWN, FAR)))

    def whole_models(th_i, **options):
        collected, _ = collect_and_mix(UAPDFL(th_i=th_i, divergence=divergence, **options), own, peers)
        return [j for j, message in collected.items() if split(message.section("model"))[1]], collected

    chosen, collected = whole_models(th_i)
    assert len(chosen) == 1
    assert sum(bool(message.section("model")) for message in collected.values()) == 1
    nearer = list(range(1, len(peers)))
    for options, expected in (({"preset": "reference"}, list(peers)), ({"dropout": False}, nearer)):
        shared, collected = whole_models(th_i, **options)
        assert shared == expected
        assert all(message.section("model") for message in collected.values())
        shared, _ = whole_models(math.nextafter(th_i, math.inf), dropout=False)
        assert shared == list(peers)
    below, collected = whole_models(math.nextafter(th_i, 0))
    assert below == list(range(1, len(peers)))
    assert all(message.section("model") for message in collected.values())


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_threshold_zero_never_drops_out_even_for_equal_models(preset):
    own, peers = publication(OWN, 2), {k: publication(OWN, 3, k) for k in range(1, 4)}
    collected, mixed = collect_and_mix(UAPDFL(th_i=0.0, preset=preset), own, peers)
    for j, message in collected.items():
        assert same_bytes(message.section("model"), split(peers[j].section("model"))[0])
    assert same_bytes(split(mixed)[1], split(own.section("model"))[1])


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_an_infinite_threshold_takes_a_uniformly_random_peers_model(preset):
    own, peers = publication(OWN, 2), {k: publication(d, 3, k) for k, d in ((2, NEAR), (5, FAR), (9, OWN))}
    method, taken = UAPDFL(th_i=math.inf, preset=preset), Counter()
    for seed in range(300):
        collected, mixed = collect_and_mix(method, own, peers, seed)
        (chosen,) = [j for j, message in collected.items() if message.section("model")]
        assert same_bytes(mixed, peers[chosen].section("model"))
        taken[chosen] += 1
    assert set(taken) == {2, 5, 9}
    assert all(abs(n - 100) < 38 for n in taken.values())  # 4.6 standard deviations


def test_ablations_of_algorithm_2():
    own, near, far = publication(OWN, 10, 0), publication(NEAR, 30, 1), publication(FAR, 60, 2)
    whole = mean_by_hand([m.section("model") for m in (own, near, far)], [10, 30, 60])

    collected, mixed = collect_and_mix(UAPDFL(th_i=math.inf, dropout=False), own, {1: near, 2: far})
    assert collected == {1: near, 2: far}
    for name, value in whole.items():
        torch.testing.assert_close(mixed[name], value)

    collected, mixed = collect_and_mix(UAPDFL(th_i=0.1, layerwise=False), own, {1: near, 2: far})
    assert collected == {1: near, 2: far}
    for name, value in whole.items():
        torch.testing.assert_close(mixed[name], value)

    collected, mixed = collect_and_mix(UAPDFL(th_i=0.1, layerwise=False), own, {1: near})
    assert same_bytes(mixed, near.section("model"))

    collected, mixed = collect_and_mix(UAPDFL(th_i=0.1, dropout=False), own, {1: near})
    expected = mean_by_hand([m.section("model") for m in (own, near)], [10, 30])
    for name, value in expected.items():
        torch.testing.assert_close(mixed[name], value)


@pytest.mark.parametrize("th_i", [0.0, 0.1, math.inf])
def test_a_client_without_peers_keeps_its_model(th_i):
    own = publication(OWN, 4)
    collected, mixed = collect_and_mix(UAPDFL(th_i=th_i), own, {})
    assert collected == {}
    assert same_bytes(mixed, own.section("model"))


# --- A run ---


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """Clients collect from all three peers. In round 1 all are alike, later sometimes all and sometimes some."""
    th_i, mu, drops, shared = 0.1, 0.05, [], set()
    run = experiment(tmp_path, UAPDFL(th_i=th_i, mu=mu, n_com=None), **UNEQUAL)
    run.load()
    local = copy.deepcopy(run.worker.template.backbone)
    unit = torch.ones(1, 1, 8, 8)

    def publish():
        features = local.encoder(unit).detach()
        return copy.deepcopy(local.state_dict()), features[0], local.head(features).detach().softmax(dim=1)[0]

    sizes = [len(shard.train) for shard in run.data.shards]
    heard = [publish()] * 4
    for round in range(1, 4):
        after = list(heard)
        for client in run.server.participants(round):
            peers = [j for j in range(4) if j != client]
            alike = [j for j in peers if shannon_by_hand(heard[client][2], heard[j][2]) <= th_i]
            drops.append(alike == peers)
            if drops[-1]:
                rng = generator(run.seed, Stream.DOWNLOAD, round, client)
                rng.choice(peers, 3, replace=False)
                local.load_state_dict(heard[rng.choice(peers)][0])
            else:
                shared.add(len(alike))
                parts = []
                for group, prefix in (([client, *peers], "encoder."), ([client, *alike], "head.")):
                    models = [{n: v for n, v in heard[j][0].items() if n.startswith(prefix)} for j in group]
                    parts.append(mean_by_hand(models, [sizes[j] for j in group]))
                local.load_state_dict(parts[0] | parts[1])
            average = sum(features for _, features, _ in heard) / 4
            for x, y in steps_of(run, round, client):
                gap = (local.encoder(unit)[0] - average).square().sum()
                descend(local, F.cross_entropy(local(x), y) + mu * gap, 0.2)
            after[client] = publish()
        heard = after
    assert True in drops[3:]
    assert max(shared) > 0
    run.fit()
    for client in run.memory:
        assert_equals_loop(run, model_of(published(run, client)[0]), heard[client][0])


# --- Bytes of runs ---


@pytest.mark.parametrize(("th_i", "models"), [(math.inf, lambda n: ENCODER + HEAD), (0.0, lambda n: n * ENCODER)])
def test_bytes_of_both_branches_equal_the_closed_formula(tmp_path, th_i, models):
    n_com = 3
    run = finished(tmp_path, UAPDFL(th_i=th_i, n_com=n_com), rounds=1)
    for row in run.csv.rows:
        assert row["comm/down_bytes"] == 4 * (n_com * UNIT + 4 * models(n_com))  # 4 of 6 take part
        assert row["comm/up_bytes"] == 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_bytes_depend_on_the_number_of_similar_peers(tmp_path, preset):
    engine, th_i, n_com = Watching(), 0.03, 3
    run = finished(tmp_path, UAPDFL(th_i=th_i, n_com=n_com, preset=preset), rounds=4, engine=engine)
    branches = Counter()
    for round in range(1, 5):
        expected = 0
        for task in engine.of_round(round).values():
            mine = task.memory["laid_out"]["unit/distribution"]
            gaps = [
                shannon_by_hand(mine, task.download.tensors[f"peer_{j}/unit/distribution"])
                for j in peers_in(task.download)
            ]
            assert len(gaps) == n_com
            similar = sum(gap < th_i for gap in gaps)
            dropped = similar == n_com
            branches["dropout" if dropped else ("mixed" if similar else "none alike")] += 1
            models = ENCODER + HEAD if dropped else n_com * ENCODER + similar * HEAD
            assert task.download.nbytes == n_com * UNIT + 4 * models
            expected += task.download.nbytes
        assert run.csv.rows[round - 1]["comm/down_bytes"] == expected
    assert set(branches) == {"dropout", "mixed", "none alike"}, branches


# --- The method ---


def test_options_reach_the_alignment_term():
    other = UnitAlignment(knowledge=UnitRepresentation())
    other.name = "other"
    for preset in ("paper", "reference"):
        term, last = UAPDFL(mu=0.3, unit=2.0, preset=preset, loss_terms=[other]).loss_terms
        assert (term.mu, term.unit.value, last) == (0.3, 2.0, other)
        assert [term.reference, term.unit.reference] == [preset == "reference"] * 2


# --- Fig. 4's toy ---


class Toy(Partition):
    """Clients 0 and 1 have classes 0 and 1, client 2 has classes 2 and 3, with the same number of samples per class."""

    def __init__(self, samples):
        self.samples = samples

    def split(self, labels, clients, rng):
        n, pools = self.samples, [rng.permutation(np.flatnonzero(labels == j)) for j in range(4)]
        one, two = ([pool[start : start + n] for pool in pools[:2]] for start in (0, n))
        return [np.concatenate(part) for part in (one, two, [pool[:n] for pool in pools[2:]])]


def test_clients_with_the_same_classes_have_a_smaller_divergence(tmp_path):
    run = experiment(
        tmp_path,
        UAPDFL(n_com=2),
        scenario=Scenario(Digits(), Toy(60), 3),
        clients_per_round=3,
        model=MLP,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.5),
        trainer={"accelerator": "cpu", "max_epochs": 20},
    )
    run.load()
    results = [run.worker.run(Task(1, client, Message(), {})) for client in range(3)]
    one, two, three = (result.upload.section("unit")["distribution"] for result in results)
    for divergence in ua.DIVERGENCES.values():
        near, far = divergence(one, two), divergence(one, three)
        assert 0 < near < far / 3

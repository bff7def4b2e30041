"""Messages are compressed and restored: names, types, residuals, and what is not compressed."""

import pytest
import torch
from compressors import name_of
from experiments import same_bytes

from fl_lightning import QSGD, ConfigError, Float16, Message, NonFiniteError, RandomK, SignSGD, TopK
from fl_lightning.compression.codec import COMPRESSED, RESIDUAL, Codec
from fl_lightning.core.seeding import Stream, derive

FEEDBACK = [TopK(keep=0.1), RandomK(keep=0.1), SignSGD(bucket=5)]
ALL = [*FEEDBACK, TopK(keep=1.0), TopK(keep=0.1, feedback=False), RandomK(keep=0.2, feedback=False), QSGD(), Float16()]
SHAPES = {"b.weight": (3, 4), "a.bias": (5,), "c": ()}


def weights(seed=0, dtype=torch.float32, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    found = {name: (scale * torch.randn(shape, generator=rng)).to(dtype) for name, shape in SHAPES.items()}
    return found | {"bn.running_mean": torch.randn(3, generator=rng), "bn.num_batches_tracked": torch.tensor(seed)}


def message(model, **numbers):
    return Message.pack({"model": model, "prototypes": {"x": torch.ones(2)}}, n_samples=3, **numbers)


def send(compressor, model, received, memory=None, round=1, client=2):
    codec = Codec(7, upload=compressor)
    sent, state = codec.compress_upload(message(model), received, memory or {}, round, client)
    return sent, state, Codec(7, upload=compressor).restore_upload(sent, received, round, client)


def parameters(model):
    return {name: model[name] for name in sorted(SHAPES)}


def flat(model):
    return torch.cat([model[name].double().flatten() for name in sorted(SHAPES)])


@pytest.mark.parametrize("compressor", ALL, ids=name_of)
def test_the_result_is_what_was_received_plus_the_restored_update_rounded_once(compressor):
    received, model = weights(0), weights(1)
    sent, state, back = send(compressor, model, received)
    vector = compressor.decode(sent.section(COMPRESSED), 18, derive(7, Stream.COMPRESSION, 1, 2))
    expected = (flat(received) + vector).float()
    assert torch.equal(torch.cat([back.section("model")[name].flatten() for name in sorted(SHAPES)]), expected)
    assert set(state) == ({RESIDUAL} if compressor.feedback else set())
    assert list(back.section("model")) == list(model)


@pytest.mark.parametrize("compressor", ALL, ids=name_of)
def test_buffers_integers_sections_and_numbers_are_sent_as_they_are(compressor):
    received, model = weights(0), weights(1)
    sent, _, back = send(compressor, model, received)
    assert sent.section("model").keys() == {"bn.running_mean", "bn.num_batches_tracked"}
    for one in (sent, back):
        assert one.numbers == {"n_samples": 3}
        assert torch.equal(one.section("prototypes")["x"], torch.ones(2))
        assert all(torch.equal(one.section("model")[name], model[name]) for name in sent.section("model"))
    dense = message(model).nbytes - 4 * 18
    assert sent.nbytes == dense + compressor.nbytes(18)
    assert COMPRESSED not in back.sections


@pytest.mark.parametrize("compressor", FEEDBACK, ids=name_of)
def test_what_was_sent_and_the_residual_sum_up_to_all_updates(compressor):
    memory, updates, restored = {}, torch.zeros(18, dtype=torch.float64), torch.zeros(18, dtype=torch.float64)
    for round in range(1, 30):
        received, model = weights(round), weights(100 + round, scale=0.1)
        sent, memory, _ = send(compressor, model, received, memory, round)
        updates += flat(model) - flat(received)
        restored += compressor.decode(sent.section(COMPRESSED), 18, derive(7, Stream.COMPRESSION, round, 2))
        residual = memory[RESIDUAL]
        assert {name: value.shape for name, value in residual.items()} == {n: torch.Size(s) for n, s in SHAPES.items()}
        assert all(value.dtype == torch.float64 for value in residual.values())
    assert torch.allclose(restored + flat(residual), updates, rtol=0, atol=1e-12)
    assert flat(residual).norm() > 0.1


def test_everything_is_sent_if_all_entries_are_kept():
    received, model = weights(0), weights(1, scale=1.2)
    _, state, back = send(TopK(keep=1.0), model, received)
    for name in SHAPES:
        assert torch.allclose(back.section("model")[name], model[name], rtol=2**-22, atol=2**-24)
    assert flat(state[RESIDUAL]).abs().max() < 2**-22


def test_a_restored_update_is_exact_if_it_is_a_power_of_two():
    received = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    _, state, back = send(TopK(keep=1.0), {name: value * 1.5 for name, value in received.items()}, received)
    assert all(bool((back.section("model")[name] == 1.5).all()) for name in SHAPES)
    assert not flat(state[RESIDUAL]).any()


def test_the_bytes_do_not_depend_on_the_order_of_the_entries():
    received, model = weights(0), weights(1)
    other = dict(reversed(list(model.items())))
    (one, *_), (two, *_) = send(TopK(keep=0.3), model, received), send(TopK(keep=0.3), other, received)
    assert same_bytes(one.section(COMPRESSED), two.section(COMPRESSED))


def test_random_numbers_differ_between_rounds_and_clients():
    received, model, bytes_ = weights(0), weights(1), []
    for key in ((1, 1), (1, 2), (2, 1)):
        sent, *_ = send(QSGD(levels=100, bucket=None), model, received, {}, *key)
        bytes_.append(sent.section(COMPRESSED)["levels"].numpy().tobytes())
    assert len({*bytes_}) == 3


def test_an_upload_of_some_of_the_entries_says_which():
    received, model = weights(0), weights(1)
    del model["b.weight"]
    sent, state, back = send(TopK(keep=1.0), model, received)
    assert sent.section(COMPRESSED)["entries"].tolist() == [0b10100000]  # of a.bias, b.weight, c
    assert "b.weight" not in back.section("model")
    assert state[RESIDUAL].keys() == {"a.bias", "c"}
    assert torch.allclose(back.section("model")["a.bias"], model["a.bias"], atol=1e-6)


def test_residuals_of_entries_that_are_not_uploaded_are_kept():
    received, model = weights(0), weights(1)
    _, state, _ = send(TopK(keep=0.1), model, received)
    part = {name: value for name, value in model.items() if name != "b.weight"}
    _, later, _ = send(TopK(keep=0.1), part, received, state, round=2)
    assert torch.equal(later[RESIDUAL]["b.weight"], state[RESIDUAL]["b.weight"])
    assert not torch.equal(later[RESIDUAL]["a.bias"], state[RESIDUAL]["a.bias"])


def test_entries_of_another_shape_are_sent_as_they_are():
    received, model = weights(0), weights(1) | {"a.bias": torch.ones(2)}
    sent, _, back = send(TopK(keep=1.0), model, received)
    assert "a.bias" in sent.section("model")
    assert back.section("model")["a.bias"].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_restored_in_float32(dtype):
    received, model = weights(0, dtype), {n: v.float() if n in SHAPES else v for n, v in weights(1).items()}
    sent, _, back = send(TopK(keep=1.0), model, received)
    assert sent.section(COMPRESSED)["values"].dtype == torch.float32
    assert all(back.section("model")[name].dtype == torch.float32 for name in SHAPES)
    assert all(torch.allclose(back.section("model")[name], model[name], atol=1e-6) for name in SHAPES)


def test_a_float64_model_is_sent_in_float64():
    received, model = ({n: v.double() for n, v in weights(seed).items()} for seed in (0, 1))
    sent, _, back = send(TopK(keep=1.0), model, received)
    assert sent.section(COMPRESSED)["values"].dtype == torch.float64
    assert all(torch.allclose(back.section("model")[name], model[name], rtol=1e-15) for name in SHAPES)


def test_a_message_shares_no_memory_with_the_weights_of_the_module():
    received, model = weights(0), weights(1)
    sent, _, _ = send(TopK(keep=1.0), model, received)
    before = {name: value.clone() for name, value in sent.tensors.items()}
    for value in model.values():
        value.fill_(0)
    assert same_bytes(before, sent.tensors)


@pytest.mark.parametrize("compressor", ALL, ids=name_of)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_reported_with_the_name_of_the_entry(compressor, value):
    model = weights(1)
    model["a.bias"][2] = value
    with pytest.raises(NonFiniteError, match=r"model/a\.bias"):
        send(compressor, model, weights(0))


def test_an_upload_without_received_weights_is_refused():
    with pytest.raises(ConfigError, match=r"^compression: "):
        send(TopK(), {"other": torch.ones(2)}, weights(0))


def test_without_compressors_messages_are_not_changed():
    codec, one = Codec(), message(weights(0))
    sent, state = codec.compress_upload(one, weights(1), {RESIDUAL: {}}, 1, 0)
    assert sent is one
    assert state == {}
    assert codec.restore_upload(one, None, 1, 0) is one
    assert codec.compress_download(one, 1) is one
    assert codec.restore_download(one, 0) is one


# --- Messages that are not those of the compressor -------------------------------------------------------------------


def tampered(change):
    received = weights(0)
    sent, *_ = send(TopK(keep=0.5), weights(1), received)
    compressed = dict(sent.section(COMPRESSED))
    change(compressed)
    sections = {**sent.sections, COMPRESSED: compressed}
    return Codec(7, upload=TopK(keep=0.5)).restore_upload(Message.pack(sections, n_samples=3), received, 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.clear(),
        lambda c: c.pop("values"),
        lambda c: c.update(more=torch.ones(1)),
        lambda c: c.update(values=c["values"].double()),
        lambda c: c.update(values=c["values"][1:]),
        lambda c: c.update(values=c["values"][None]),
        lambda c: c.update(positions=torch.zeros_like(c["positions"])),
        lambda c: c.update(entries=torch.tensor([0b11100000], dtype=torch.int64)),
        lambda c: c.update(entries=torch.tensor([1, 1], dtype=torch.uint8)),
        lambda c: c.update(entries=torch.tensor([0b10000000], dtype=torch.uint8)),
    ],
)
def test_a_message_of_another_form_is_refused(change):
    with pytest.raises(ValueError, match=r"compressed update|positions"):
        tampered(change)


# --- Downloads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", [Float16(), QSGD()], ids=name_of)
def test_a_download_is_restored_the_same_on_both_sides(compressor):
    model = weights(3)
    server, client = (Codec(7, download=compressor, layout=lambda _: weights(0)) for _ in range(2))
    packed = server.compress_download(message(model, critical=1), 4)
    one, two = server.restore_download(packed, 0), client.restore_download(packed, 0)
    assert same_bytes(one.tensors, two.tensors)
    assert list(one.section("model")) == list(model)
    assert one.numbers == {"n_samples": 3, "critical": 1}
    vector = compressor.decode(packed.section(COMPRESSED), 18, 0)
    assert torch.equal(flat(one.section("model")), vector.float().double())
    assert packed.nbytes == message(model, critical=1).nbytes - 4 * 18 + compressor.nbytes(18)
    assert same_bytes(packed.section("model"), {n: v for n, v in model.items() if n.startswith("bn")})


def test_clients_with_one_model_share_the_compressed_and_the_restored_tensors():
    model, codec = weights(3), Codec(7, download=QSGD(), layout=lambda _: weights(0))
    one, two = (codec.compress_download(message(model), 4) for _ in range(2))
    assert all(value is two.section(COMPRESSED)[name] for name, value in one.section(COMPRESSED).items())
    first, second = codec.restore_download(one, 0), codec.restore_download(two, 1)
    assert all(first.section("model")[name] is second.section("model")[name] for name in model)
    later = codec.compress_download(message(model), 5)
    assert not torch.equal(later.section(COMPRESSED)["levels"], one.section(COMPRESSED)["levels"])
    changed = codec.compress_download(message(weights(4)), 5)
    assert not torch.equal(codec.restore_download(changed, 0).section("model")["c"], first.section("model")["c"])


@pytest.mark.thorough
def test_downloaded_weights_are_unbiased():
    model = weights(3)
    found = []
    for round in range(2000):
        codec = Codec(7, download=QSGD(levels=7, bucket=None), layout=lambda _: weights(0))
        packed = codec.compress_download(message(model), round)
        found.append(flat(codec.restore_download(packed, 0).section("model")))
    step = flat(model).norm() / 7
    assert ((torch.stack(found).mean(dim=0) - flat(model)).abs() < 5 * step / 2 / 2000**0.5).all()

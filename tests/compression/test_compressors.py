"""Each compressor against a reference in float64: its values, its bytes, its bias and its error."""

import math
import random

import numpy as np
import pytest
import torch
from compressors import name_of

from fl_lightning import QSGD, ConfigError, Float16, RandomK, SignSGD, TopK
from fl_lightning.compression.bits import (
    PIECE,
    index_width,
    pack_bits,
    pack_positions,
    position_bytes,
    unpack_bits,
    unpack_positions,
)
from fl_lightning.compression.qsgd import norms_rounded_up

SIZES = (1, 2, 7, 8, 9, 100, 1000, 4097)
ALL = [
    *(TopK(keep=share) for share in (1e-6, 0.01, 0.3, 1.0)),
    *(RandomK(keep=share, feedback=feedback) for share in (0.01, 1.0) for feedback in (True, False)),
    *(QSGD(levels=levels, bucket=bucket) for levels in (1, 7, 127, 1000) for bucket in (None, 3, 512)),
    *(SignSGD(bucket=bucket) for bucket in (None, 3, 512)),
    Float16(),
]


def vector(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def restored(compressor, v, seed=0, dtype=torch.float32):
    return compressor.decode(compressor.encode(v, dtype, seed), len(v), seed)


# --- Bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 8, 13, 24])
@pytest.mark.parametrize("count", [1, 7, 8, 1001])
def test_numbers_are_packed_one_after_another_with_the_highest_bit_first(count, width):
    draw = random.Random(width)
    values = [draw.randrange(2**width) for _ in range(count)]
    text = "".join(f"{value:0{width}b}" for value in values)
    text += "0" * (-len(text) % 8)
    expected = [int(text[start : start + 8], 2) for start in range(0, len(text), 8)]
    packed = pack_bits(torch.tensor(values), width)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == expected
    assert unpack_bits(packed, count, width).tolist() == values


def test_many_numbers_are_packed_in_pieces():
    values = torch.randint(0, 2**11, (2 * PIECE + 5,), generator=torch.Generator().manual_seed(0))
    bits = (values[:, None] >> torch.arange(10, -1, -1)) & 1
    assert pack_bits(values, 11).tolist() == np.packbits(bits.numpy().astype(np.uint8)).tolist()
    assert torch.equal(unpack_bits(pack_bits(values, 11), len(values), 11), values)


@pytest.mark.parametrize("size", SIZES)
def test_an_index_has_the_bits_of_the_largest_one(size):
    assert index_width(size) == max(1, math.ceil(math.log2(size)))


def test_positions_are_sent_as_a_list_if_both_forms_have_the_same_size():
    assert pack_positions(torch.tensor([0, 3]), 4).tolist() == [0b00_11_0000]
    assert pack_positions(torch.tensor([0, 1, 3]), 4).tolist() == [0b1101_0000]  # a mask is smaller


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_positions_are_sent_in_the_smaller_of_two_forms(size, share):
    count = max(1, round(share * size))
    indices = torch.tensor(sorted(random.Random(0).sample(range(size), count)))
    packed = pack_positions(indices, size)
    assert len(packed) == position_bytes(count, size)
    assert len(packed) == min(math.ceil(count * index_width(size) / 8), math.ceil(size / 8))
    assert torch.equal(unpack_positions(packed, count, size), indices)


@pytest.mark.parametrize(
    ("packed", "count", "size"),
    [
        (pack_bits(torch.tensor([3, 2]), 7), 2, 100),  # not ascending
        (pack_bits(torch.tensor([3, 3]), 7), 2, 100),  # twice the same
        (pack_bits(torch.tensor([3, 100]), 7), 2, 100),  # too large
        (torch.tensor([0b11100000], dtype=torch.uint8), 4, 8),  # a mask of three
    ],
)
def test_impossible_positions_are_refused(packed, count, size):
    with pytest.raises(ValueError, match="ascending"):
        unpack_positions(packed, count, size)


# --- All compressors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sent_tensors_have_the_announced_form(size, dtype):
    for compressor in ALL:
        sent = compressor.encode(vector(size), dtype, 0)
        assert {n: (t.dtype, t.numel()) for n, t in sent.items()} == compressor.form(size, dtype)
        assert all(t.ndim == 1 and t.is_contiguous() for t in sent.values())
        assert sum(t.numel() * t.element_size() for t in sent.values()) == compressor.nbytes(size, dtype)
        assert restored(compressor, vector(size), dtype=dtype).shape == (size,)


@pytest.mark.parametrize("size", [9, 1000, 17226])
def test_bytes_have_closed_forms(size):
    k = max(1, round(0.01 * size))
    positions = min(math.ceil(k * math.ceil(math.log2(size)) / 8), math.ceil(size / 8))
    assert TopK(keep=0.01).nbytes(size) == 4 * k + positions
    assert RandomK(keep=0.01).nbytes(size) == 4 * k
    assert QSGD(levels=7, bucket=512).nbytes(size) == 4 * math.ceil(size / 512) + math.ceil(4 * size / 8)
    assert QSGD(levels=127, bucket=None).nbytes(size) == 4 + size
    assert QSGD(levels=1, bucket=None).nbytes(size) == 4 + math.ceil(2 * size / 8)
    assert SignSGD(bucket=512).nbytes(size) == 4 * math.ceil(size / 512) + math.ceil(size / 8)
    assert SignSGD(bucket=None).nbytes(size) == 4 + math.ceil(size / 8)
    assert Float16().nbytes(size) == 2 * size
    assert TopK(keep=0.01).nbytes(size, torch.float64) == 8 * k + positions


@pytest.mark.parametrize("compressor", ALL, ids=name_of)
def test_zeros_stay_zeros_and_the_vector_is_not_changed(compressor):
    zeros, v = torch.zeros(50, dtype=torch.float64), vector(50)
    assert torch.equal(restored(compressor, zeros), zeros)
    restored(compressor, v)
    assert torch.equal(v, vector(50))


@pytest.mark.parametrize("compressor", ALL, ids=name_of)
def test_the_random_numbers_are_those_of_the_seed(compressor):
    state = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]
    one, two = (compressor.encode(vector(3000), torch.float32, seed=5) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == np.random.get_state(legacy=False)["state"]["pos"]


# --- TopK and RandomK ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_keeps_the_first_entries_of_a_stable_sort(keep, ties):
    v = vector(301).mul(2).round() if ties else vector(301)
    order = sorted(range(len(v)), key=lambda i: (-abs(float(v[i])), i))
    chosen = order[: max(1, round(keep * len(v)))]
    expected = [float(np.float32(v[i])) if i in chosen else 0.0 for i in range(len(v))]
    assert restored(TopK(keep=keep), v).tolist() == expected


def test_top_k_of_equal_entries_keeps_the_first():
    v = torch.tensor([1.0, -2.0, 2.0, -2.0, 2.0], dtype=torch.float64)
    assert restored(TopK(keep=0.4), v).tolist() == [0, -2, 2, 0, 0]


def test_random_k_with_feedback_sends_the_values_as_they_are():
    v = vector(40)
    kept = restored(RandomK(keep=0.25), v)
    assert torch.equal(kept[kept != 0], v[kept != 0].float().double())
    assert (kept != 0).sum() == 10


@pytest.mark.thorough
def test_random_k_keeps_each_entry_equally_often_and_is_unbiased_without_feedback():
    v, rounds = vector(40), 4000
    plain = torch.stack([restored(RandomK(keep=0.25), v, seed) for seed in range(rounds)])
    scaled = torch.stack([restored(RandomK(keep=0.25, feedback=False), v, seed) for seed in range(rounds)])
    assert ((plain != 0).sum(dim=1) == 10).all()
    assert torch.allclose(scaled, 4 * plain)
    spread = 0.25 * 0.75 / rounds
    assert ((plain != 0).double().mean(dim=0) - 0.25).abs().max() < 5 * math.sqrt(spread)
    assert ((scaled.mean(dim=0) - v).abs() < 5 * math.sqrt(spread) * 4 * v.abs() + 1e-6).all()


def test_random_k_is_scaled_by_the_exact_share():
    v = vector(7)
    kept = restored(RandomK(keep=0.4, feedback=False), v)
    there = kept != 0
    assert int(there.sum()) == 3  # 0.4 · 7 = 2.8
    assert torch.allclose(kept[there], v[there] * 7 / 3)


# --- QSGD ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 4, 127])
@pytest.mark.parametrize("bucket", [None, 16, 100])
def test_qsgd_rounds_to_neighbouring_levels(levels, bucket):
    v = vector(50)
    found = restored(QSGD(levels=levels, bucket=bucket), v)
    for start in range(0, len(v), bucket or len(v)):
        part = v[start : start + (bucket or len(v))]
        norm = float(np.float32(part.norm()))
        norm = norm if norm >= float(part.norm()) else float(np.nextafter(np.float32(norm), np.float32(np.inf)))
        for value, got in zip(part, found[start : start + len(part)], strict=True):
            level = abs(float(value)) / norm * levels
            near = [math.copysign(one / levels * norm, float(value)) for one in (math.floor(level), math.ceil(level))]
            assert min(abs(float(got) - one) for one in near) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize(("levels", "bucket"), [(1, None), (3, 8), (15, None)])
def test_qsgd_is_unbiased_and_within_the_bound_of_its_variance(levels, bucket):
    v, rounds = vector(32), 4000
    found = torch.stack([restored(QSGD(levels=levels, bucket=bucket), v, seed) for seed in range(rounds)])
    rows = v.view(-1, bucket or 32)
    steps = (rows.norm(dim=1, keepdim=True) / levels).expand_as(rows).flatten()
    assert ((found.mean(dim=0) - v).abs() < 5 * steps / 2 / math.sqrt(rounds)).all()  # a step's deviation is below 1/2
    d = rows.shape[1]
    bound = min(d / levels**2, math.sqrt(d) / levels) * v.square().sum()
    assert (found - v).square().sum(dim=1).mean() < bound
    exact = ((v.abs() / steps) % 1).mul(1 - (v.abs() / steps) % 1).mul(steps.square()).sum()  # p (1 - p) step²
    assert float((found - v).square().sum(dim=1).mean()) == pytest.approx(float(exact), rel=0.1)


def test_norms_are_rounded_up_so_that_no_level_is_above_the_highest():
    rows = vector(3000).view(-1, 1)
    norms = norms_rounded_up(rows, torch.float32)
    assert norms.dtype == torch.float32
    assert (norms.double() >= rows.abs().flatten()).all()
    assert torch.allclose(norms.double(), rows.abs().flatten(), rtol=2**-23, atol=0)


def test_a_level_that_is_never_sent_is_refused():
    sent = QSGD(levels=5, bucket=None).encode(vector(2), torch.float32, 0) | {
        "levels": pack_bits(torch.tensor([0, 11]), 4)
    }
    with pytest.raises(ValueError, match="level"):
        QSGD(levels=5, bucket=None).decode(sent, 2, 0)


# --- SignSGD and Float16 ---------------------------------------------------------------------------------------------


def test_the_sign_of_zero_is_plus():
    v = torch.tensor([0.0, -1.0, 2.0, -3.0], dtype=torch.float64)
    assert restored(SignSGD(bucket=None), v).tolist() == [1.5, -1.5, 1.5, -1.5]


@pytest.mark.parametrize("bucket", [None, 3, 8, 100])
def test_signs_are_scaled_by_the_mean_magnitude(bucket):
    v = vector(50)
    found = restored(SignSGD(bucket=bucket), v, dtype=torch.float64)
    for start in range(0, 50, bucket or 50):
        part, got = v[start : start + (bucket or 50)], found[start : start + (bucket or 50)]
        scale = sum(abs(float(x)) for x in part) / len(part)
        assert got.tolist() == pytest.approx([math.copysign(scale, float(x)) for x in part], rel=1e-14)
        error = part.square().sum() - len(part) * scale**2  # ‖C(v) - v‖² = (1 - ‖v‖₁² / (d ‖v‖²)) ‖v‖²
        assert float((got - part).square().sum()) == pytest.approx(float(error), rel=1e-12)


def test_half_precision_is_numpys():
    v = torch.cat([vector(100), vector(100) * 1e-5, vector(100) * 1e-9, vector(100) * 1e4])
    found = restored(Float16(), v)
    assert found.tolist() == v.numpy().astype(np.float16).astype(np.float64).tolist()
    assert ((found - v).abs() <= torch.maximum(v.abs() * 2**-11, torch.tensor(2**-25))).all()


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: TopK(keep=0.0), "keep"),
        (lambda: TopK(keep=1.1), "keep"),
        (lambda: RandomK(keep=-1.0), "keep"),
        (lambda: QSGD(levels=0), "levels"),
        (lambda: QSGD(bucket=0), "bucket"),
        (lambda: SignSGD(bucket=0), "bucket"),
    ],
)
def test_options_out_of_range_are_refused(build, key):
    with pytest.raises(ConfigError, match=rf"^compression\.{key}: "):
        build()

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.core.inputs import Inputs
from fl_lightning.data.loaders import Batches, ClientDataModule

X = torch.arange(100.0).view(50, 2)
Y = torch.arange(50) * 7


def samples(batches: Batches) -> list[int]:
    """Which samples came, in order; inputs and labels must still belong together."""
    seen = []
    for x, y in batches:
        index = y // 7
        assert torch.equal(x, X[index])
        seen += index.tolist()
    return seen


@given(
    index=st.lists(st.integers(0, 49), max_size=40, unique=True),
    batch_size=st.integers(1, 12),
    min_batch=st.integers(1, 4),
    seed=st.none() | st.integers(0, 2**63 - 1),
)
def test_only_the_last_batch_is_smaller_and_dropped_if_too_small(
    index: list[int], batch_size: int, min_batch: int, seed: int | None
) -> None:
    batches = Batches(X, Y, torch.tensor(index, dtype=torch.int64), batch_size, seed, min_batch)
    sizes = [batch_size] * (len(index) // batch_size)
    if len(index) % batch_size >= min_batch:
        sizes += [len(index) % batch_size] * (len(index) % batch_size > 0)
    assert [len(y) for _, y in batches] == sizes
    assert len(batches) == len(sizes)
    seen = samples(batches)
    assert len(set(seen)) == len(seen) == sum(sizes)
    assert set(seen) <= set(index)


def test_without_a_seed_the_order_of_the_index_stays() -> None:
    index = [5, 3, 41, 0, 7]
    batches = Batches(X, Y, torch.tensor(index), 2)
    assert samples(batches) == index
    assert samples(batches) == index


def test_without_an_index_every_sample_is_used() -> None:
    assert samples(Batches(X, Y, None, 8)) == list(range(50))
    assert sorted(samples(Batches(X, Y, None, 8, seed=0))) == list(range(50))


def test_each_pass_has_a_new_order_drawn_by_the_seed() -> None:
    index = torch.arange(10, 30)
    generator = torch.Generator().manual_seed(9)
    batches = Batches(X, Y, index, 6, seed=9)
    passes = [samples(batches) for _ in range(3)]
    assert passes == [index[torch.randperm(20, generator=generator)].tolist() for _ in range(3)]
    assert len({tuple(order) for order in passes}) == 3


def test_indices_are_those_of_the_batches_of_the_same_pass() -> None:
    index = torch.arange(3, 41)
    one, other = (Batches(X, Y, index, 4, seed=3) for _ in range(2))
    for _ in range(2):
        batches, indices = list(one), list(other.indices())
        assert [y.tolist() for _, y in batches] == [(7 * index).tolist() for index in indices]
    assert list(Batches(X, Y, index[:0], 4).indices()) == []


def test_the_dropped_sample_changes() -> None:
    batches = Batches(X, Y, torch.arange(7), 3, seed=0, min_batch=2)
    left_out = [({*range(7)} - set(samples(batches))).pop() for _ in range(60)]
    assert set(left_out) == set(range(7))


def test_shuffling_does_not_use_torchs_global_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = samples(Batches(X, Y, None, 8, seed=4))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert samples(Batches(X, Y, None, 8, seed=4)) == first


def test_batches_are_copies() -> None:
    batches = Batches(X, Y, None, 50)
    next(iter(batches))[0].zero_()
    assert X.sum() == 99 * 50


def double(x: Tensor) -> Tensor:
    return x * 2


def test_a_batch_is_prepared_after_its_transfer() -> None:
    batches = Batches(X, Y, None, 4)
    data = ClientDataModule(batches, double)
    y = torch.tensor([1, 2])
    x, labels = data.on_after_batch_transfer((torch.full((2, 3), 3.0), y), 0)
    assert torch.equal(x, torch.full((2, 3), 6.0))
    assert labels is y
    assert data.train_dataloader() is batches


# --- Texts ---

WIDTH = 9
LENGTHS = torch.tensor([3, 9, 1, 4, 4, 2, 7, 5])


def texts(mask_dtype: torch.dtype = torch.int64) -> tuple[Inputs, Tensor]:
    """Texts of these lengths with their position as token ids, another input of the same width, and token labels."""
    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    ids = torch.arange(len(LENGTHS) * WIDTH).view(-1, WIDTH) * mask
    x = Inputs({"input_ids": ids, "attention_mask": mask.to(mask_dtype), "image": torch.rand(len(ids), WIDTH)})
    return x, ids.where(mask, -100)


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_batches_of_texts_are_trimmed_to_their_longest(mask_dtype: torch.dtype, size: int) -> None:
    x, y = texts(mask_dtype)
    for seed in (None, 5):
        batches = Batches(x, y, None, size, seed, token_labels=True)
        for (own, labels), rows in zip(batches, Batches(x, y, None, size, seed).indices(), strict=True):
            width = int(LENGTHS[rows].max())
            assert torch.equal(own.tensors["input_ids"], x.tensors["input_ids"][rows, :width])
            assert torch.equal(own.tensors["attention_mask"], x.tensors["attention_mask"][rows, :width])
            assert torch.equal(own.tensors["image"], x.tensors["image"][rows])
            assert torch.equal(labels, y[rows, :width])
            assert labels.is_contiguous()
            assert own.tensors["input_ids"].is_contiguous()


def test_labels_that_are_not_of_tokens_keep_their_width() -> None:
    x, _ = texts()
    flags = torch.ones(len(LENGTHS), WIDTH)
    assert all(y.shape[1] == WIDTH for _, y in Batches(x, flags, None, 2))


def test_batches_of_one_width_can_be_concatenated() -> None:
    x, y = texts()
    index = torch.tensor([0, 3, 5, 2])  # without the longest text
    batches = Batches(x, y, index, 2, token_labels=True, one_width=True)
    inputs, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    assert inputs.shapes["input_ids"] == (4,)
    assert torch.equal(labels, y[index, :4])


def test_a_gap_in_the_mask_is_kept_and_an_empty_text_has_one_token() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    x = Inputs({"input_ids": torch.ones_like(mask), "attention_mask": mask})
    assert x.lengths is not None
    assert x.lengths.tolist() == [3, 1, 4]


@pytest.mark.parametrize("names", [("input_ids", "mask"), ("ids", "attention_mask")])
def test_other_inputs_are_not_trimmed(names: tuple[str, str]) -> None:
    x, y = texts()
    ids, mask, _ = x.tensors.values()
    other = Inputs(dict(zip(names, (ids, mask), strict=True)))
    assert other.lengths is None
    assert Inputs((ids, mask)).lengths is None
    assert all(batch.shapes[names[0]] == (WIDTH,) for batch, _ in Batches(other, y, None, 2))

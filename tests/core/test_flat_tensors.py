"""State dicts in one tensor: the same numbers as entry by entry, and never a stale copy of them."""

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.core.flat_tensors import (
    ALIGNMENT,
    FlatTensors,
    Layout,
    as_flat,
    map_tensors,
    matching_parts,
    owners,
    unflatten,
)
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import RunningMean, first_non_finite

SHAPES = {"w": (3, 5), "steps": None, "scale": (), "none": (0, 4), "b": (17,)}


def flat_state(seed: int = 0, dtype: torch.dtype = torch.float32) -> FlatTensors:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items() if shape is not None
    }
    layout = Layout.of(weights)
    state = FlatTensors(layout.empty(dtype, torch.device("cpu")), layout, {"steps": torch.tensor(seed)}, tuple(SHAPES))
    for name, value in weights.items():
        state[name].copy_(value)
    return state


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6), st.sampled_from([16, 32, 64]))
def test_entries_are_aligned_and_do_not_overlap(shapes: list[list[int]], bits: int) -> None:
    entries = {str(i): torch.zeros(shape, dtype=getattr(torch, f"float{bits}")) for i, shape in enumerate(shapes)}
    layout = Layout.of(entries)
    flat = layout.empty(entries["0"].dtype, torch.device("cpu"))
    for number, view in enumerate(layout.views(flat).values()):
        assert view.shape == tuple(shapes[number])
        assert (view.data_ptr() - flat.data_ptr()) % ALIGNMENT == 0 or not view.numel()
        view.fill_(number + 1)
    assert all(bool((view == number + 1).all()) for number, view in enumerate(layout.views(flat).values()))
    elements = sum(value.numel() for value in entries.values())
    assert int((flat == 0).sum()) == flat.numel() - elements  # so that sums over all of it are those of the entries


def test_a_change_in_place_is_one_of_the_flat_tensor() -> None:
    state = flat_state()
    before = state.flat.clone()
    state["b"].add_(1)
    assert int((state.flat != before).sum()) == 17
    assert as_flat(state) is state


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(b=torch.zeros(17)),
        lambda state: state.__setitem__("w", state["w"].clone()),
        lambda state: state.pop("b"),
        lambda state: state.__ior__({"other": torch.zeros(1)}),
    ],
)
def test_a_state_with_other_entries_is_no_longer_flat(change) -> None:
    state = flat_state()
    change(state)
    assert as_flat(state) is None
    assert owners(state) == list(state.values())
    copied = pickle.loads(pickle.dumps(state))
    assert type(copied) is dict
    assert equal(copied, state)


def test_a_pickle_has_the_flat_tensor_once() -> None:
    state = flat_state()
    content = pickle.dumps(state)
    copied = pickle.loads(content)
    assert b"_unused" not in content
    assert equal(copied, state)
    assert as_flat(copied).flat.data_ptr() == copied["w"].data_ptr()


def test_mapping_the_whole_is_mapping_each_entry() -> None:
    state, names = flat_state(3), {name: name for name in SHAPES}
    mapped = map_tensors(lambda value, name: value * 3, state, names)
    assert as_flat(mapped)
    assert equal(mapped, {name: value * 3 for name, value in state.items()})
    assert map_tensors(lambda value: value, state) is state
    assert equal(map_tensors(lambda value: value * 3, dict(state)), mapped)


def test_parts_match_as_a_whole_only_in_one_layout() -> None:
    one, other = flat_state(1), flat_state(2)
    assert [ours.shape for ours, _ in matching_parts(one, other)] == [one.flat.shape, one["steps"].shape]
    for theirs in (dict(other), flat_state(2, torch.float16)):
        assert [ours.shape for ours, _ in matching_parts(one, theirs)] == [value.shape for value in one.values()]


def test_an_ordinary_state_can_be_saved_and_loaded_without_code(tmp_path: Path) -> None:
    state = flat_state()
    torch.save(unflatten({"state": {"model": state}, "round": 3, "other": None}), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (loaded["round"], loaded["other"]) == (3, None)
    assert equal(loaded["state"]["model"], state)


@pytest.mark.parametrize("kinds", ["fff", "ddd", "fdf", "dff"], ids=["flat", "ordinary", "mixed", "ordinary first"])
def test_a_mean_is_the_same_for_flat_and_ordinary_states(kinds: str) -> None:
    mean, expected = RunningMean(), RunningMean()
    for seed, kind in enumerate(kinds):
        state = flat_state(seed)
        mean.add(state if kind == "f" else dict(state), 7 + seed)
        expected.add(dict(flat_state(seed)), 7 + seed)
    assert equal(mean.value(), expected.value())
    assert bool(as_flat(mean.value())) == (kinds[0] == "f")


def test_a_mean_does_not_change_what_it_is_of() -> None:
    state = flat_state(1)
    before = {name: value.clone() for name, value in state.items()}
    mean = RunningMean()
    for weight in (1, 2):
        mean.add(state, weight)
    mean.value()["w"].zero_()
    assert equal(state, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_entry_that_is_not_finite_is_named(bad: float) -> None:
    state = flat_state()
    assert first_non_finite(state) is None
    state["b"][3] = bad
    assert first_non_finite(state) == "b"


def test_a_message_keeps_a_flat_section() -> None:
    message = Message.pack({"model": flat_state(), "other": {"x": torch.zeros(2)}}, n_samples=3)
    assert as_flat(message.section("model"))
    assert message.nbytes == 4 * (15 + 1 + 0 + 17) + 8 + 4 * 2 + 8
    for same in (message.on_cpu(), message.without("other"), message.plus({"third": {"y": torch.zeros(1)}})):
        assert as_flat(same.section("model"))

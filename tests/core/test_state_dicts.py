import weakref
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.state_dicts import (
    PIECE,
    ExchangedMean,
    RunningMean,
    add_scaled,
    combine,
    extrapolate,
    first_non_finite,
    flatten,
    stack,
    weighted_mean,
)

pytestmark = pytest.mark.numeric

# Multiples of 1/1024 below 1024: their weighted sums are exact in float64, so references need no tolerance.
exact = st.integers(-(2**20), 2**20).map(lambda k: Fraction(k, 1024))
weights = st.integers(1, 10_000)


@given(st.lists(st.tuples(weights, exact, exact), min_size=1, max_size=8))
def test_weighted_mean_equals_exact_fractions(clients: list[tuple[int, Fraction, Fraction]]) -> None:
    states = [{"w": torch.tensor([float(a), float(b)])} for _, a, b in clients]
    mean = weighted_mean(states, [n for n, _, _ in clients])["w"]
    total = sum(n for n, _, _ in clients)
    expected = [float(sum(n * client[i] for n, *client in clients) / total) for i in range(2)]
    assert torch.equal(mean, torch.tensor(expected))


@given(
    st.lists(st.tuples(weights, exact), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), weights, exact), max_size=12),
)
def test_an_exchanged_mean_equals_exact_fractions(start: list, exchanges: list) -> None:
    held, mean = dict(enumerate(start)), ExchangedMean()
    for weight, value in start:
        mean.add({"w": torch.tensor(float(value))}, weight)
    for place, weight, value in exchanges:
        if place in held:
            mean = ExchangedMean(mean.sums, mean.weight)  # as from one round to the next
            mean.remove({"w": torch.tensor(float(held[place][1]))}, held[place][0])
            mean.add({"w": torch.tensor(float(value))}, weight)
            held[place] = weight, value
    total = sum(weight for weight, _ in held.values())
    assert mean.weight == total
    expected = float(sum(weight * value for weight, value in held.values()) / total)
    assert torch.equal(mean.value()["w"], torch.tensor(expected))


def test_an_exchanged_mean_does_not_drift() -> None:
    generator, clients, exchanges = torch.Generator().manual_seed(0), 20, 500
    weights = torch.randint(1, 60_000, (clients,), generator=generator).tolist()
    held = [{"w": torch.randn(1000, generator=generator)} for _ in range(clients)]
    mean, largest = ExchangedMean(), 0.0
    for state, weight in zip(held, weights, strict=True):
        mean.add(state, weight)
    for number in range(exchanges):
        place = number * 7 % clients
        mean.remove(held[place], weights[place])
        held[place] = {"w": torch.randn(1000, generator=generator) * 10 ** (number % 4)}
        mean.add(held[place], weights[place])
        largest = max(largest, float(mean.sums["w"].abs().max()))
    brute = sum(state["w"].double() * weight for state, weight in zip(held, weights, strict=True))
    assert float((mean.sums["w"] - brute).abs().max()) <= 2 * exchanges * 2**-53 * largest
    torch.testing.assert_close(mean.value()["w"], weighted_mean(held, weights)["w"], rtol=1e-6, atol=0)


def test_an_exchanged_mean_of_one_state_is_that_state() -> None:
    mean, old = ExchangedMean(), torch.tensor([1e30, 1.0, 0.1])
    mean.add({"w": old}, 12_345)
    for new in (torch.tensor([1e-30, 3e38, 1 / 3]), torch.tensor([0.1, 0.2, -0.3])):
        mean.remove({"w": old}, 12_345)
        mean.add({"w": new}, 12_345)
        assert torch.equal(mean.value()["w"], new)
        old = new


def test_an_exchanged_mean_accepts_sums_of_any_memory_layout() -> None:
    mean = ExchangedMean({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).T}, 1.0)
    mean.add({"w": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}, 1)
    assert mean.value()["w"].tolist() == [[3.0, 4.5], [4.5, 6.0]]


def test_an_exchanged_mean_keeps_types_and_the_largest_count_and_leaves_what_it_came_from() -> None:
    first = ExchangedMean()
    first.add({"n": torch.tensor(7), "w": torch.tensor([1.0], dtype=torch.float64)}, 1)
    then = ExchangedMean(first.sums, first.weight)
    then.remove({"n": torch.tensor(7), "w": torch.tensor([1.0], dtype=torch.float64)}, 1)
    then.add({"n": torch.tensor(5), "w": torch.tensor([3.0], dtype=torch.float64)}, 2)
    assert {name: (value.dtype, value.tolist()) for name, value in then.value().items()} == {
        "n": (torch.int64, 7),
        "w": (torch.float64, [3.0]),
    }
    assert (first.value()["w"].tolist(), first.weight) == ([1.0], 1)


@given(st.lists(st.tuples(weights, exact), min_size=1, max_size=8), st.sampled_from([1, 2, 1024, 2.0**-20]))
def test_weights_may_come_in_any_unit(clients: list[tuple[int, Fraction]], unit: float) -> None:
    states = [{"w": torch.tensor(float(value))} for _, value in clients]
    plain = weighted_mean(states, [n for n, _ in clients])
    assert torch.equal(weighted_mean(states, [n * unit for n, _ in clients])["w"], plain["w"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [1, 49, 0.1, 12_345])
def test_the_mean_over_one_client_is_its_weights_bit_for_bit(dtype: torch.dtype, weight: float) -> None:
    extremes = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny, -0.0, 0.1, 1 / 3], dtype=dtype)
    values = torch.cat([extremes, torch.rand(2000, generator=torch.Generator().manual_seed(0)).to(dtype)])
    mean = weighted_mean([{"w": values}], [weight])["w"]
    assert mean.dtype == dtype
    assert torch.equal(mean, values)
    assert torch.equal(mean.signbit(), values.signbit())


def test_a_mean_half_way_between_two_numbers_is_rounded_to_the_even_one() -> None:
    """A mean that is updated step by step would round several times."""
    counts = torch.tensor([7, 6, 5, 29, 9, 31, 13])
    total = int(counts.sum())
    values = torch.randint(2**23, 2**23 + 1000, (len(counts), 5000), generator=torch.Generator().manual_seed(0))
    off = (counts @ values) % total
    values[-1] += (total // 2 - off) * pow(int(counts[-1]), -1, total) % total
    exactly = (counts @ values).double() / total
    assert (exactly.frac() == 0.5).all()
    assert torch.equal(weighted_mean([{"w": row.float()} for row in values], counts)["w"], exactly.float())


def test_sums_do_not_run_in_single_precision() -> None:
    states = [{"w": torch.tensor([2.0**24])}, *({"w": torch.tensor([1.0])} for _ in range(1023))]
    assert weighted_mean(states, [1] * 1024)["w"].item() == 2**14 + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    states = [{"w": torch.tensor([value], dtype=dtype)} for value in (256.0, *[1.0] * 255)]
    mean = weighted_mean(states, [1] * 256)["w"]
    assert torch.equal(mean, torch.tensor([511 / 256], dtype=dtype))


def test_integer_entries_keep_the_largest() -> None:
    states = [{"n": torch.tensor(n), "w": torch.tensor(float(n))} for n in (3, 9, 6)]
    mean = weighted_mean(states, [1, 1, 1])
    assert mean["n"].dtype == torch.int64
    assert mean["n"].item() == 9
    assert mean["w"].item() == 6.0


def test_a_mean_counts_states_of_zero_weight() -> None:
    mean = RunningMean()
    for weight in (0, 2, 1):
        mean.add({"w": torch.tensor(5.0)}, weight)
    assert mean.count == 3


def test_zero_weight_adds_nothing() -> None:
    mean = weighted_mean([{"w": torch.tensor(5.0)}, {"w": torch.tensor(7.0)}], [0, 2])
    assert mean["w"].item() == 7.0


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_negative_weight_and_nan_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=f"weight {weight} "):
        RunningMean().add({"w": torch.tensor(5.0)}, weight)


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_averaged_states_are_not_changed(dtype: torch.dtype, clients: int) -> None:
    states = [{"w": torch.tensor([1, 2], dtype=dtype)} for _ in range(clients)]
    weighted_mean(states, [3] * clients)["w"].zero_()
    assert [state["w"].tolist() for state in states] == [[1, 2]] * clients


def test_the_mean_may_be_read_on_the_way() -> None:
    mean = RunningMean()
    seen = []
    for value in (1.0, 5.0, 9.0):
        mean.add({"w": torch.tensor(value), "n": torch.tensor(int(value))}, 1)
        seen.append(mean.value())
    assert [value["w"].item() for value in seen] == [1.0, 3.0, 5.0]
    assert [value["n"].item() for value in seen] == [1, 5, 9]


def test_no_state_is_held_once_it_is_added() -> None:
    mean = RunningMean()
    alive = []
    for _ in range(3):
        state = {"w": torch.rand(4), "n": torch.tensor(1)}
        alive += [weakref.ref(value) for value in state.values()]
        mean.add(state, 1.0)
        del state
    assert [ref() for ref in alive] == [None] * 6


@pytest.mark.parametrize(
    "odd", [{"w": torch.zeros(1)}, {"w": torch.zeros(1), "b": torch.zeros(1), "x": torch.zeros(1)}]
)
def test_states_of_different_models_are_refused(odd: dict[str, torch.Tensor]) -> None:
    mean = RunningMean()
    mean.add({"w": torch.zeros(1), "b": torch.zeros(1)}, 1)
    name = ({"w", "b"} ^ odd.keys()).pop()
    with pytest.raises(ValueError, match=f"different models: '{name}'"):
        mean.add(odd, 1)


def test_the_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no mean: no state dict"):
        RunningMean().value()
    with pytest.raises(ValueError, match="no mean: no state dict"):
        weighted_mean([{"w": torch.ones(1)}], [0])


def test_each_state_needs_a_weight() -> None:
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean([{"w": torch.ones(1)}] * 2, [1])


@given(exact, exact, exact, exact)
def test_extrapolate_equals_its_formula(w: Fraction, v: Fraction, keep: Fraction, step: Fraction) -> None:
    state, other = {"w": torch.tensor([float(w)])}, {"w": torch.tensor([float(v)])}
    got = extrapolate(state, other, float(keep), float(step))["w"]
    assert torch.equal(got, torch.tensor([float(keep * w + step * (v - w))]))


def test_extrapolate_keeps_types_and_integer_entries() -> None:
    state = {"w": torch.tensor([1.0], dtype=torch.float16), "n": torch.tensor(4)}
    other = {"w": torch.tensor([3.0], dtype=torch.float16), "n": torch.tensor(9)}
    got = extrapolate(state, other, 1.0, 0.5)
    assert got["w"].dtype == torch.float16
    assert got["w"].item() == 2.0
    assert got["n"].item() == 4
    assert state["w"].item() == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_entry_that_is_not_finite_is_named(bad: float) -> None:
    good, n = torch.zeros(2, 2), torch.tensor(7)
    spoilt = torch.tensor([[0.0, 0.0], [0.0, bad]])
    assert first_non_finite({"n": n, "a": good}) is None
    assert first_non_finite({"n": n, "a": good, "b": spoilt, "c": spoilt}) == "b"
    assert first_non_finite({"half": spoilt.half()}) == "half"


# Sums of a few quarters are exact in float64: references need no tolerance.
quarters = st.integers(-400, 400).map(lambda k: k / 4)


def quarter_states(clients: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (2, 3), "b": (4,), "none": (0,)}
    return [
        {name: torch.randint(-400, 400, shape, generator=generator) / 4 for name, shape in shapes.items()}
        for _ in range(clients)
    ]


def test_stack_puts_each_state_in_a_row() -> None:
    states = [{"w": torch.rand(2, 3), "n": torch.tensor(k)} for k in (3, 9)]
    stacked = stack(states)
    assert stacked["w"].shape == (2, 2, 3)
    assert stacked["n"].tolist() == [3, 9]
    for k in range(2):
        assert torch.equal(stacked["w"][k], states[k]["w"])
    stacked["w"].zero_()
    assert states[0]["w"].any()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 999), st.data())
def test_combine_equals_a_brute_force_loop(rows: int, clients: int, seed: int, data: st.DataObject) -> None:
    row = st.lists(quarters, min_size=clients, max_size=clients)
    coefficients = [data.draw(row) for _ in range(rows)]
    states = quarter_states(clients, seed)
    combined = combine(torch.tensor(coefficients, dtype=torch.float64), stack(states))
    for name, value in combined.items():
        assert value.dtype == torch.float32
        assert value.shape == (rows, *states[0][name].shape)
        for i in range(rows):
            expected = sum(a * w[name].double() for a, w in zip(coefficients[i], states, strict=True))
            assert torch.equal(value[i], torch.as_tensor(expected).to(torch.float32))


def test_combine_takes_entries_without_dimensions() -> None:
    states = [{"s": torch.tensor(1.0)}, {"s": torch.tensor(3.0)}]
    assert combine(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), stack(states))["s"].tolist() == [2.0, 1.0]


def test_combine_of_one_with_coefficient_one_is_itself_bit_for_bit() -> None:
    values = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    almost = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)  # what a sum of shares may come to
    assert torch.equal(combine(almost, stack([{"w": values}]))["w"][0], values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_combine_rounds_half_precision_once(dtype: torch.dtype) -> None:
    states = [{"w": torch.tensor([value], dtype=dtype)} for value in (256.0, *[1.0] * 255)]
    combined = combine(torch.full((1, 256), 1 / 256), stack(states))["w"]
    assert torch.equal(combined, torch.tensor([[511 / 256]], dtype=dtype))


def test_combine_keeps_the_largest_of_integer_entries() -> None:
    states = [{"n": torch.tensor(n), "steps": torch.tensor([n, 7 - n])} for n in (3, 9, 6)]
    combined = combine(torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), stack(states))
    assert combined["n"].dtype == torch.int64
    assert combined["n"].tolist() == [9, 9]
    assert combined["steps"].tolist() == [[9, 4], [9, 4]]
    combined["n"][0] = 0
    assert combined["n"].tolist() == [0, 9]


def test_flatten_contains_parameters_and_no_statistics() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).half())
    model[1].running_mean += 5
    state = model.state_dict()
    expected = [value for p in model.parameters() for value in p.flatten().tolist()]
    flat = flatten([state, {name: 2 * state[name] for name in sorted(state)}])
    assert flat.dtype == torch.float64
    assert flat.tolist() == [expected, [2 * value for value in expected]]
    assert torch.equal(flatten([{"running_variance": torch.ones(1)}]), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (2 * PIECE + 3,), (PIECE, 2)])
def test_adding_in_pieces_equals_adding_at_once(shape):
    generator = torch.Generator().manual_seed(0)
    held = torch.randn(shape, generator=generator, dtype=torch.float64)
    value = torch.randn(shape, generator=generator)
    expected = held + 49 * value.double()  # the product is exact
    add_scaled(held, value, 49)
    assert torch.equal(held, expected)


def test_a_mean_accepts_tensors_of_any_memory_layout():
    images = [torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    mean = RunningMean()
    for image in images:
        mean.add({"w": image.contiguous(memory_format=torch.channels_last).permute(0, 1, 3, 2)}, 1)
    expected = torch.stack(images).double().mean(dim=0).permute(0, 1, 3, 2)
    torch.testing.assert_close(mean.value()["w"].double(), expected, rtol=1e-6, atol=1e-7)


def test_infinities_of_both_signs_are_found():
    assert first_non_finite({"fine": torch.ones(3), "odd": torch.tensor([1.0, float("inf"), -float("inf")])}) == "odd"


def test_finite_numbers_with_an_infinite_sum_are_finite():
    assert first_non_finite({"large": torch.full((3,), 3e38)}) is None

"""Arithmetic on state dicts for aggregators, such as weighted means.

Means are computed in float64 and rounded to the entry's own type once, at the end. The mean over one client is equal
to that client's weights bit for bit. Of integer entries (BatchNorm's `num_batches_tracked`) the largest is kept.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.flat_tensors import Tensors, map_tensors, matching_parts, owners

State = dict[str, Tensors]
"""Tensors in named groups (sections).

A run's shared state has the section `model`, the shared weights, and one section for each kind of shared knowledge.
An aggregator may add the section `weights`, with the weight of each client: the ids `client` `(K,)`, and `value`,
`(K,)` or by class `(K, C)`.
"""

PIECE = 1 << 18
"""Number of elements that are averaged at a time: 2 MiB in float64."""


class VisibleState(dict[str, Tensors]):
    """Server state as a dict, with a function `peer` that returns the tensors that a given client makes public.

    `Algorithm.public` names these tensors. A state that is computed from it, such as `state | {...}`, is a
    plain dict without this access.

    Args:
        state: The shared state.
        peer: Returns the public section of the state of the client with this id.
    """

    def __init__(self, state: State, peer: Callable[[int], Tensors]) -> None:
        super().__init__(state)
        self.peer = peer


class RunningMean:
    """Weighted mean of state dicts that arrive one at a time; memory does not grow with their number.

    The sum is kept in float64, in which the product of a float32 and a number of samples is exact. It is computed on
    the device of the first state dict.

    Example:
        >>> mean = RunningMean()
        >>> mean.add({"w": torch.tensor([1.0])}, 1)
        >>> mean.add({"w": torch.tensor([5.0])}, 3)
        >>> mean.value()["w"]
        tensor([4.])

    Attributes:
        count: Number of state dicts that were added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weight = 0.0
        self._is_single = True  # and so not multiplied: in float64, n w / n may differ from w

    def add(self, state: Tensors, weight: float) -> None:
        """Add a state dict to the mean, with a non-negative weight. The weights need not sum to 1.

        Raises:
            ValueError: The weight is negative or NaN, or the entries differ from those of the state dicts added before.
        """
        if not weight >= 0:
            raise ValueError(f"weight {weight} of a mean is negative or NaN")
        if not self._dtypes:
            self._dtypes = {name: value.dtype for name, value in state.items()}
        if state.keys() != self._dtypes.keys():
            odd = sorted(state.keys() ^ self._dtypes.keys())[0]
            raise ValueError(f"state dicts of different models: {odd!r} is in one of them only")
        self.count += 1
        if weight == 0:
            return
        if not self._weight:
            self._sums = map_tensors(copy_to_float64, state)
        else:
            self._add_further(state, weight)
        self._weight += weight

    def _add_further(self, state: Tensors, weight: float) -> None:
        for held, value in matching_parts(self._sums, state):
            if not value.is_floating_point():
                torch.maximum(held, value.to(held.device), out=held)
                continue
            if self._is_single:
                held.mul_(self._weight)
            add_scaled(held, value, weight)
        self._is_single = False

    def value(self) -> Tensors:
        """Return the weighted mean of the state dicts added so far, on the CPU.

        Raises:
            ValueError: No state dict with a positive weight was added.
        """
        if not self._weight > 0:
            raise ValueError("no mean: no state dict with a positive weight was added")
        whole = 1.0 if self._is_single else self._weight

        def mean(held: Tensor, dtype: torch.dtype) -> Tensor:
            return (held / whole if held.is_floating_point() else held.clone()).to(dtype).cpu()

        return map_tensors(mean, self._sums, self._dtypes)


def copy_to_float64(value: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor; floating-point values become float64, integers keep their type."""
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return value.to(dtype, copy=True, memory_format=torch.contiguous_format)


def add_scaled(held: Tensor, value: Tensor, factor: float) -> None:
    """Add `factor · value` to the tensor `held` in place, on a CPU in chunks that fit in its cache.

    Args:
        held: A contiguous float64 tensor.
        value: A tensor of the same shape, on any device.
        factor: The factor.
    """
    if held.device.type != "cpu" or held.numel() <= PIECE:
        held.add_(value.to(held.device), alpha=factor)
        return
    for ours, theirs in zip(held.flatten().split(PIECE), value.flatten().split(PIECE), strict=True):
        ours.add_(theirs.to(held.device), alpha=factor)  # converts to float64 in temporary memory


class ExchangedMean:
    """Weighted mean to which state dicts can be added, and from which they can be removed without recomputing the mean.

    The sum is kept in float64. Each change rounds by at most 2^-53 of the sum, so that after 100,000 changes the mean
    is off by at most 10^-11 of its largest value. In float32 it differs from a new mean in the last bit at most. The
    mean of a single state dict is that state dict, bit for bit. Integer entries keep their largest value so far.

    Args:
        sums: The saved attribute `sums` of an earlier object; empty at first. It is not changed.
        weight: The saved sum of the weights.

    Example:
        >>> mean = ExchangedMean()
        >>> mean.add({"w": torch.tensor([1.0])}, 1)
        >>> mean.add({"w": torch.tensor([5.0])}, 3)
        >>> mean.remove({"w": torch.tensor([1.0])}, 1)
        >>> mean.add({"w": torch.tensor([9.0])}, 1)
        >>> mean.value()["w"]
        tensor([6.])
    """

    def __init__(self, sums: Tensors | None = None, weight: float = 0.0) -> None:
        self.sums = {name: value.contiguous().clone() for name, value in (sums or {}).items()}
        self.weight = weight
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, state: Tensors, weight: float) -> None:
        """Add a state dict to the mean, with a positive weight."""
        self._dtypes = {name: value.dtype for name, value in state.items()}
        self._change(state, weight)

    def remove(self, state: Tensors, weight: float) -> None:
        """Remove a state dict from the mean, given the weight it was added with."""
        self._change(state, -weight)

    def _change(self, state: Tensors, weight: float) -> None:
        self.weight += weight
        for name, value in state.items():
            if not value.is_floating_point():
                self.sums[name] = torch.maximum(self.sums.get(name, value), value)
                continue
            if name not in self.sums:
                self.sums[name] = torch.zeros(value.shape, dtype=torch.float64)
            add_scaled(self.sums[name], value, weight)

    def value(self) -> Tensors:
        """Return the weighted mean of the state dicts added and not removed, in the dtypes of the last one added."""
        means = {name: sum / self.weight if sum.is_floating_point() else sum for name, sum in self.sums.items()}
        return {name: mean.to(self._dtypes[name], copy=True) for name, mean in means.items()}


def weighted_mean(states: Iterable[Tensors], weights: Iterable[float]) -> Tensors:
    """Return the weighted mean of state dicts. The weights need not sum to 1.

    Each floating-point entry is `Σ a_k w_k / Σ a_k`, with the weights `a_k` and the entries `w_k`.
    """
    mean = RunningMean()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, float(weight))
    return mean.value()


def extrapolate(state: Tensors, other: Tensors, keep: float, step: float) -> Tensors:
    """Return `keep · w + step · (v - w)`, with `w = state` and `v = other`. Integer entries are those of `w`."""

    def mixed(w: Tensor, v: Tensor) -> Tensor:
        return (keep * w.double() + step * (v.double() - w.double())).to(w.dtype)

    return {name: mixed(w, other[name]) if w.is_floating_point() else w for name, w in state.items()}


def stack(states: Sequence[Tensors]) -> Tensors:
    """Stack K state dicts into one. Each entry becomes a tensor `(K, ...)` with one row per state dict."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def to_float64(state: Tensors) -> Tensors:
    """Return a state dict with its floating-point entries converted to float64, the others unchanged."""
    return {name: value.double() if value.is_floating_point() else value for name, value in state.items()}


def combine(coefficients: Tensor, stacked: Tensors, rounded: bool = True) -> Tensors:
    """Return n linear combinations of K state dicts, one for each row of coefficients.

    Combination `i` is `Σ_k a_ik w_k`, computed in float64 and rounded once at the end.

    Args:
        coefficients: `a`, `(n, K)`.
        stacked: The K state dicts, from `stack`.
        rounded: Round to the entries' own types. False leaves float64, for combinations that are combined again.

    Returns:
        Entries `(n, ...)`. Integer entries are the largest of the K, n times.
    """
    a = coefficients.double()

    def combined(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.amax(dim=0).expand(len(a), *value.shape[1:]).clone()
        exact = torch.tensordot(a, value.double(), dims=1)
        return exact.to(value.dtype) if rounded else exact

    return {name: combined(value) for name, value in stacked.items()}


def parameter_names(state: Tensors, buffers: Collection[str] = ()) -> list[str]:
    """Return the names of a state dict's floating-point entries except buffers.

    Args:
        state: The state dict.
        buffers: Names of the network's buffers. Those with the names of BatchNorm's running statistics are known.
    """
    return [name for name, v in state.items() if v.is_floating_point() and name not in buffers and not _statistic(name)]


def flatten(states: Sequence[Tensors], buffers: Collection[str] = ()) -> Tensor:
    """Return the parameters of K state dicts as one float64 matrix, `(K, P)`: one flattened model per row.

    Args:
        states: The state dicts.
        buffers: Names of the network's buffers, as for `parameter_names`.
    """
    names = parameter_names(states[0], buffers)
    return torch.stack([torch.cat([state[name].double().flatten() for name in names]) for state in states])


def _statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean mask of n entries into bytes for transfer, 8 entries per byte, `(⌈n/8⌉,)`."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def unpack_mask(bits: Tensor, shape: torch.Size) -> Tensor:
    """Unpack a boolean mask of the given shape from bytes with 8 entries each; the inverse of `pack_mask`."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=shape.numel())).bool().view(shape)


def read_numbers(lists: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Return lists of scalar tensors as lists of floats. All values are read from a GPU in one transfer."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in chain.from_iterable(lists):
        by_device.setdefault(value.device, []).append(value)
    read = {device: iter(torch.stack(own).tolist()) for device, own in by_device.items()}
    return [[next(read[value.device]) for value in own] for own in lists]


def sums_of(tensors: Tensors) -> list[Tensor]:
    """Return the sums of a state dict's floating-point tensors; of a flat tensor's entries it is one sum.

    A sum is not finite if its tensor has NaN or Inf.
    """
    return [value.sum() for value in owners(tensors) if value.is_floating_point()]


def first_non_finite(tensors: Tensors, sums: Sequence[float] | None = None) -> str | None:
    """Return the name of the first tensor that contains NaN or Inf, or None. Usually synchronizes with a GPU once.

    Args:
        tensors: The state dict.
        sums: The values of `sums_of(tensors)`, if they have already been read from the device.
    """
    # A finite sum has finite terms, and takes a quarter of the time. The sum of finite terms may overflow.
    if all(map(math.isfinite, read_numbers([sums_of(tensors)])[0] if sums is None else sums)):
        return None
    return next((name for name, value in tensors.items() if not bool(value.isfinite().all())), None)

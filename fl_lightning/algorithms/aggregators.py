"""Aggregators: classes that compute the next shared state from a round's uploads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.core.arguments import PartMixin
from fl_lightning.core.capabilities import Capable
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State, parameter_names

Weighting = Literal["samples", "uniform"]

DRIFT = "drift"
"""The section of the state with the mean of all clients' drifts."""


class Aggregator(PartMixin, Capable):
    """Turn the clients' uploads of a round into the next shared state (`begin`, `fold` each upload, then `finish`).

    `fold` gets the uploads of a round one by one, in ascending client id, and keeps only what `finish` needs; by
    default it keeps all of them in a list. `finish` also gets the merged shared knowledge. State that lasts from round
    to round is a section of the state that `finish` returns; the object itself keeps none.

    Attributes:
        clients: Number of clients of the experiment. `Algorithm.start` sets it.
        buffers: Names of the network's buffers, such as BatchNorm's statistics. `Algorithm.start` sets them.
        leaves: Sections that `finish` adds to the state for callbacks, such as `weights`.
        needs_classes: Whether labels must be classes.
        only_in: Name of the only method that sends what the aggregator reads, if other methods do not send it. Other
            methods of this package refuse the aggregator.
        inner: The aggregator that this one corrects, if any, see `wrap`. By default, this one begins and folds as
            `inner` does.
        only_averages: Whether `fold` only averages the uploads' weights, with `RunningMean`, and keeps none. Uploads
            then stay on the GPU, and only their mean is copied to the CPU; on a CPU, the next client overwrites their
            memory. Otherwise `fold` gets them on the CPU, and may keep them.
        sends_one_model: Whether `model_for` gives every client the state's `model`.
        accepts_stale: Whether uploads may come from clients that received the model of an earlier round, as with
            asynchronous round policies.
        is_mean: Whether the next model is a kind of mean of the uploaded models, such as a median. It can then be the
            `inner` aggregator of a server step. `begin` returns an object with the number of uploads, `count`.
        needs_sampled_clients: Whether a round must have exactly the clients that the client sampler draws, as the
            accountant of `PrivateMean` assumes. Round policies that leave some out, or replace some, are refused.
        finishes_empty_rounds: Whether `finish` is also called after a round without uploads. Otherwise such a round
            does not change the state.
    """

    capabilities: ClassVar = {
        "only_averages": ("begin", "fold"),
        "sends_one_model": ("model_for", "ahead"),
        "is_mean": ("begin", "fold", "finish"),
    }
    section = "algorithm"
    clients = 0
    buffers = frozenset[str]()
    leaves: tuple[str, ...] = field(default=(), init=False)
    needs_classes = False
    only_in: ClassVar[str | None] = None
    inner: Aggregator | None = field(default=None, init=False)
    only_averages = False
    sends_one_model = True
    accepts_stale = False
    is_mean = False
    needs_sampled_clients = False
    finishes_empty_rounds = False

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The shared knowledge, such as class prototypes, that this aggregator reads."""
        return self.inner.knowledge if self.inner else ()

    def wrap(self, inner: Aggregator) -> Aggregator:
        """Set and return `inner`, the aggregator whose model this one changes in `finish`."""
        self.inner, self.leaves = inner, inner.leaves
        folds_alike = type(self).begin is Aggregator.begin and type(self).fold is Aggregator.fold
        self.only_averages = folds_alike and inner.only_averages
        return inner

    @property
    def reports(self) -> tuple[str, ...]:
        """Names of the columns that the aggregator adds to the metrics of a round, if it knows them before round 1."""
        return ()

    def chain(self) -> Iterator[Aggregator]:
        """Yield this aggregator, then the nested `inner` aggregators, from the outside to the inside."""
        yield self
        if self.inner:
            yield from self.inner.chain()

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the aggregator's part of the server's state before round 1, such as zero momentum.

        The `model` is not part of it.
        """
        return self.inner.initial(model, num_classes) if self.inner else {}

    def require_uploads(self, count: int) -> None:
        """Check before round 1 that the number of clients of a round is enough; by default any number is.

        Raises:
            ConfigError: It is too small.
        """
        if self.inner:
            self.inner.require_uploads(count)

    def model_for(self, state: State, client: int) -> Tensors:
        """Return the weights that the server sends to a client, by default the shared model."""
        return state["model"]

    def ahead(self, state: State, clients: Iterable[int]) -> Iterator[State]:
        """For each client, yield the server state. A subclass may yield a copy that also contains the client's model.

        `model_for` is called with the yielded state. By default, this is `state` itself: no model is computed ahead. An
        aggregator that computes models ahead adds them to the yielded state, where `model_for` finds them. A client's
        model must not depend on the other ids in `clients`.
        """
        return (state for _ in clients)

    def begin(self, round: Round) -> Any:
        """Return what `fold` adds a round's uploads to, such as an empty `RunningMean`; by default an empty list."""
        return self.inner.begin(round) if self.inner else []

    def fold(self, folded: Any, upload: Upload) -> None:
        """Add an upload to `folded`, the result of `begin`, as soon as it arrives; by default as the list's last entry.

        A subclass that keeps less than the whole upload frees its memory.
        """
        if self.inner:
            self.inner.fold(folded, upload)
        else:
            folded.append(upload)

    def finish(self, folded: Any, round: Round, knowledge: State) -> State:
        """Return the aggregator's part of the next shared state, including the new `model`.

        Args:
            folded: The result of `begin`, to which `fold` has added all uploads.
            round: The round, with the state at its start and random numbers.
            knowledge: The merged shared knowledge of this round, by name.
        """
        raise NotImplementedError


def fold_all(aggregator: Aggregator, uploads: Iterable[Upload], round: Round) -> Any:
    """Return the uploads of a round as the aggregator folds them, to call its `finish` outside of a run.

    Example:
        >>> from fl_lightning import Message
        >>> models = [{"model": {"w": torch.tensor([w])}} for w in (1.0, 2.0)]
        >>> uploads = [Upload(client, Message.pack(model, n_samples=1)) for client, model in enumerate(models)]
        >>> mean, round = WeightedMean(), Round(1, {})
        >>> mean.finish(fold_all(mean, uploads, round), round, {})["model"]
        {'w': tensor([1.5000])}
    """
    folded = aggregator.begin(round)
    for upload in uploads:
        aggregator.fold(folded, upload)
    return folded


class WeightedMean(Aggregator):
    """FedAvg's aggregation: the weighted mean of the uploaded models, computed as they arrive.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    weighting: Weighting = "samples"

    only_averages = True
    is_mean = True

    def begin(self, round: Round) -> RunningMean:
        """Return an empty mean."""
        return RunningMean()

    def fold(self, folded: RunningMean, upload: Upload) -> None:
        """Add an uploaded model to the mean, weighted by the client's samples or as all others."""
        folded.add(upload.message.section("model"), upload.n_samples if self.weighting == "samples" else 1)

    def finish(self, folded: RunningMean, round: Round, knowledge: State) -> State:
        """Return the weighted mean of the round's uploaded models as the next shared model."""
        return {"model": folded.value()}


def mean_or(inner: Aggregator | None, weighting: Weighting) -> Aggregator:
    """Return the inner aggregator of a server step: the given one, or by default the weighted mean.

    Raises:
        ConfigError: The given one does not compute a kind of mean.
    """
    if inner is not None and not inner.is_mean:
        what = f"{type(inner).__name__} is no mean of the clients' models"
        raise ConfigError(f"algorithm.aggregator: {what}. Use WeightedMean or a robust rule, such as Median.")
    return inner or WeightedMean(weighting)


class ServerStep(Aggregator):
    """Server optimizer: a step from the old weights `w` to `w + server_lr · Δ`, with `Δ` the clients' mean minus `w`.

    Subclasses override `direction` to step along another `u(Δ)`. They may keep moments of `Δ` from round to round, each
    in a section of the state. Only parameters take the step. BatchNorm's statistics become the mean.

    Args:
        server_lr: Server learning rate η_s, above 0. With 1, the result is the mean.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        inner: Computes the clients' mean instead, such as a robust rule. `weighting` has no effect then.

    Raises:
        ConfigError: `server_lr` is not above 0, or `inner` computes no kind of mean.

    Attributes:
        moments: Name and initial value of each moment.
    """

    def __init__(
        self, server_lr: float = 1.0, weighting: Weighting = "samples", inner: Aggregator | None = None
    ) -> None:
        self.inner: Aggregator = self.wrap(mean_or(inner, weighting))
        check_number("algorithm.server_lr", server_lr, "(0, inf)", "1 goes all the way to the mean")
        self.server_lr = server_lr
        self.moments: dict[str, float] = {}

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the initial moments of the server optimizer, one tensor per parameter."""
        names = parameter_names(model, self.buffers)
        return super().initial(model, num_classes) | {
            moment: {name: torch.full_like(model[name], start) for name in names}
            for moment, start in self.moments.items()
        }

    def direction(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """Return one parameter's step direction `u(Δ)` and its updated moments, all in float64.

        Args:
            change: `Δ`, the clients' mean minus the old weights.
            moments: The parameter's moments by name.
        """
        return change, {}

    def finish(self, folded: Any, round: Round, knowledge: State) -> State:
        """Return the model after the server optimizer's step, and the optimizer's new moments."""
        mean, before = self.inner.finish(folded, round, knowledge), round.before
        model, old = mean["model"], before["model"]
        kept: State = {moment: {} for moment in self.moments}
        for name in parameter_names(model, self.buffers):
            start, dtype = old[name].double(), model[name].dtype
            held = {moment: before[moment][name].double() for moment in self.moments}
            direction, moments = self.direction(model[name].double() - start, held)
            model[name] = (start + self.server_lr * direction).to(dtype)
            for moment, value in moments.items():
                kept[moment][name] = value.to(dtype)
        return mean | {"model": model} | kept


class DriftCorrection(Aggregator):
    """The mean of the participants' models plus the mean drift of all clients: the server of FedDC and FedDyn.

    A client's drift is the sum of the changes of its weights in all its rounds. The server computes the mean drift from
    the uploaded models. Use it with `DriftPenalty` or `DynamicRegularizer` on the clients. Without such a term it is
    server momentum that does not decay.

    Args:
        inner: Computes the mean of the participants' models; by default all weigh the same.

    Raises:
        ConfigError: `inner` computes no kind of mean.
    """

    def __init__(self, inner: Aggregator | None = None) -> None:
        self.inner: Aggregator = self.wrap(mean_or(inner, "uniform"))

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the initial mean drift of the clients from the global model: all zeros."""
        drift = {name: torch.zeros_like(model[name]) for name in parameter_names(model, self.buffers)}
        return super().initial(model, num_classes) | {DRIFT: drift}

    def finish(self, folded: Any, round: Round, knowledge: State) -> State:
        """Return the next model and the next mean drift `d`. The model is the participants' mean model plus `d`.

        `d` grows by `Σ (θ_k - w) / clients` over the participants, with the old model `w`.
        """
        averaged = self.inner.finish(folded, round, knowledge)
        model, share, drifts = averaged["model"], folded.count / self.clients, {}
        for name, last in round.before[DRIFT].items():
            mean, start, dtype = model[name].double(), round.before["model"][name].double(), model[name].dtype
            drift = last.double() + share * (mean - start)
            drifts[name], model[name] = drift.to(dtype), (mean + drift).to(dtype)
        return averaged | {"model": model, DRIFT: drifts}

"""Aggregators: how a round's uploads become the next shared state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.core.capabilities import Capable
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.state import RunningMean, State, parameter_names

Weighting = Literal["samples", "uniform"]


class Aggregator(Capable):
    """Turns a round's uploads into the next shared state, in two steps.

    `fold` gets the uploads of a round in ascending client id and keeps only what `finish` needs. `finish` also gets the
    merged shared knowledge. State that lasts from round to round is a section of the state that `finish` returns; the
    object itself keeps none.

    Attributes:
        clients: Number of clients of the experiment. It is set before round 1.
        leaves: Sections that `finish` adds to the state for callbacks to look at, as `weights`.
        needs_classes: Whether what it tells apart is classes.
        only_averages: Whether `fold` only averages the uploads' weights as they arrive, with `RunningMean`. Uploads
            then stay on the GPU, and only their mean is copied to the CPU. Otherwise `fold` gets them on the CPU.
        sends_one_model: Whether `model_for` gives every client the state's `model`.
    """

    capabilities: ClassVar = {"only_averages": ("fold",), "sends_one_model": ("model_for", "ahead")}
    clients: int = 0
    leaves: tuple[str, ...] = ()
    needs_classes: bool = False
    only_averages: bool = False
    sends_one_model: bool = True

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """Shared knowledge that must travel for this aggregator."""
        return ()

    def initial(self, model: Tensors, num_classes: int) -> State:
        """The aggregator's sections of the state before round 1, beside `model`."""
        return {}

    def model_for(self, state: State, client: int) -> Tensors:
        """The weights that a client is sent; the shared model, unless each client has its own."""
        return state["model"]

    def ahead(self, state: State, clients: Iterable[int]) -> Iterator[State]:
        """For each client in turn, the state to ask for its start with; the state itself, unless told otherwise.

        An aggregator for which several starts are cheaper than so many times one adds them here, and `model_for` looks
        first whether the client's is there. It must be the same to the bit, whoever is asked for beside the client.
        """
        return (state for _ in clients)

    def fold(self, uploads: Iterable[Upload]) -> Any:
        """Consume the uploads; return what `finish` needs of them."""
        raise NotImplementedError

    def finish(self, folded: Any, before: State, knowledge: State) -> State:
        """The sections of the next state that the aggregator decides, `model` among them.

        Args:
            folded: What `fold` returned.
            before: The state this round started from.
            knowledge: This round's merged shared knowledge, a section a piece.
        """
        raise NotImplementedError


class WeightedMean(Aggregator):
    """FedAvg's weighted mean of the clients' weights, folded as they arrive.

    Args:
        weighting: Weigh each client by its number of `samples`, or all the same (`uniform`).
    """

    only_averages = True

    def __init__(self, weighting: Weighting = "samples") -> None:
        self.weighting = weighting

    def fold(self, uploads: Iterable[Upload]) -> RunningMean:
        """Add each client's weights to a running mean."""
        mean = RunningMean()
        for upload in uploads:
            mean.add(upload.message.section("model"), upload.n_samples if self.weighting == "samples" else 1)
        return mean

    def finish(self, folded: RunningMean, before: State, knowledge: State) -> State:
        """The mean."""
        return {"model": folded.value()}


class ServerStep(WeightedMean):
    """The server steps from the old weights towards the clients' mean: `w + server_lr · u(Δ)`, `Δ` the mean less `w`.

    Here `u(Δ) = Δ`. Subclasses make it another direction, and may keep moments of `Δ` from round to round: each is a
    section of the state. Only parameters step; BatchNorm's statistics become the mean.

    Args:
        server_lr: η_s, above 0; 1 goes all the way.
        weighting: Weigh each client by its number of `samples`, or all the same (`uniform`).

    Raises:
        ConfigError: `server_lr` is not above 0.

    Attributes:
        moments: What is kept of each parameter, and what its numbers start from.
    """

    def __init__(self, server_lr: float = 1.0, weighting: Weighting = "samples") -> None:
        super().__init__(weighting)
        check_number("algorithm.server_lr", server_lr, "(0, inf)", "1 goes all the way to the mean")
        self.server_lr = server_lr
        self.moments: dict[str, float] = {}

    def initial(self, model: Tensors, num_classes: int) -> State:
        """The moments before round 1."""
        names = parameter_names(model)
        return {
            moment: {name: torch.full_like(model[name], start) for name in names}
            for moment, start in self.moments.items()
        }

    def direction(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """What one parameter moves along, and its new moments; elementwise, in float64.

        Args:
            change: `Δ`, the clients' mean less the old weights.
            moments: What is kept of it, by the names in `moments`.
        """
        return change, {}

    def finish(self, folded: RunningMean, before: State, knowledge: State) -> State:
        """The step, and the new moments."""
        model, old = folded.value(), before["model"]
        kept: State = {moment: {} for moment in self.moments}
        for name in parameter_names(model):
            start, dtype = old[name].double(), model[name].dtype
            held = {moment: before[moment][name].double() for moment in self.moments}
            direction, moments = self.direction(model[name].double() - start, held)
            model[name] = (start + self.server_lr * direction).to(dtype)
            for moment, value in moments.items():
                kept[moment][name] = value.to(dtype)
        return {"model": model} | kept

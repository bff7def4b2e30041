"""CriticalFL: in a critical learning period more clients take part, and each sends only its largest changes.

Yan, Wang, Yuan, Li: "CriticalFL: A Critical Learning Periods Augmented Client Selection Framework for Efficient
Federated Learning", KDD 2023.

Clients report their gradient norm (the federated gradient norm, FGN). While its mean grows from round to round, the
training is in a critical period: the number of participants doubles, and each sends the entries of its model that
changed most. Afterwards the number falls again and whole models are sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Aggregation, Algorithm, Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.client.sgd import check_one_rate
from fl_lightning.client.weights import buffer_names
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import check_number, check_positive
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State, pack_mask, unpack_mask

MASK, VALUES = "entries/mask", "entries/values"
"""Names in an upload's `model`: the mask of the sent entries, one bit per entry, and the values of these entries."""

DETECTOR = "critical"
"""The section of the state with the detector of critical periods."""


# --- The critical period -----------------------------------------------------------------------------------------


def growth(norms: Tensor, window: int) -> float:
    """Return the relative growth of the moving average of gradient norms, `(new - old) / old`.

    The new average includes the last norm, and no longer the first.

    Args:
        norms: `(window + 1,)`, the last FGN at the end.
        window: Number of norms in the moving average.
    """
    old = max(float(norms[:window].mean()), 1e-7)
    return (float(norms[1 : window + 1].mean()) - old) / old


@dataclass(frozen=True)
class CriticalPeriods:
    """Detector of critical learning periods, from gradient norms. It also sets the number of participants.

    The detector checks the FGN of the previous round before rounds `every`, `2 every`, and so on, but not before round
    1. Its result holds until the next check.

    Args:
        delta: δ, the relative growth of the norms above which a period is critical.
        window: Number of norms in the moving average. Norms before the first round count as zero.
        every: Number of rounds between checks.
        sure: Number of checks, counted from the first, that always find a critical period.
    """

    delta: float = 0.01
    window: int = 10
    every: int = 2
    sure: int = 5

    def __post_init__(self) -> None:
        check_positive("algorithm.", window=self.window, every=self.every)
        check_number("algorithm.sure", self.sure, "[0, inf)")
        check_number("algorithm.delta", self.delta, "(-inf, inf)")

    def initial(self) -> Tensors:
        """Return the detector's state before round 1: a critical period, with `clients_per_round` participants."""
        return {
            "norms": torch.zeros(self.window + 1, dtype=torch.float64),
            "round": torch.tensor(0),
            "critical": torch.tensor(True),
            "participants": torch.tensor(0),
            "achieved": torch.tensor(False),
        }

    def update(self, before: Tensors, norm: float, participants: int) -> Tensors:
        """Return the detector's state after a round, from the participants' mean gradient norm and their number.

        Args:
            before: The detector's state before the round.
            norm: The mean FGN of the participants.
            participants: The number of participants, `M`.
        """
        after = before | {"round": before["round"] + 1}
        following = int(after["round"]) + 1
        if following % self.every:
            return after
        check = following // self.every - 1 // self.every  # with every=1 the first check is before round 2
        norms = torch.cat([before["norms"][1:], torch.tensor([norm], dtype=torch.float64)])
        most, achieved = int(before["most"]), bool(before["achieved"]) or participants >= int(before["most"])
        critical = growth(norms, self.window) > self.delta or check <= self.sure
        if critical and not achieved:
            participants = min(most, 2 * participants)
        elif not critical:
            participants -= max(participants // 2, 1)
        return after | {
            "norms": norms,
            "critical": torch.tensor(critical),
            "participants": torch.tensor(participants),
            "achieved": torch.tensor(achieved),
        }


# --- Single entries of a model -----------------------------------------------------------------------------------


def largest_changes(changes: Tensor, keep: float) -> Tensor:
    """Return a mask `(P,)` of the entries that training changed most. It is true for a share `keep` of all entries.

    Args:
        changes: `θ_i - θ^t`, `(P,)`.
        keep: The share of entries to keep. Ties can add more.
    """
    sizes = changes.abs().double()
    return sizes >= float(np.quantile(sizes.numpy(), 1 - keep))


def flatten_entries(model: Tensors, names: Iterable[str]) -> Tensor:
    """Return the named entries of a model, concatenated to one vector `(P,)`."""
    return torch.cat([model[name].flatten() for name in names])


def mask_entries(model: Tensors, names: list[str], chosen: Tensor) -> Tensors:
    """Return a model with only the chosen entries of its parameters, stored as one mask and one vector of values.

    Args:
        model: The whole model.
        names: Names of the parameters.
        chosen: The mask of the entries to keep, `(P,)` bool.
    """
    whole = {name: value for name, value in model.items() if name not in names}
    return whole | {MASK: pack_mask(chosen), VALUES: flatten_entries(model, names)[chosen]}


@dataclass
class EntryMeans:
    """The sums of a round from which `EntryMean` computes the next model.

    Attributes:
        whole: The mean of the tensors that were sent whole.
        sums: For the entries sent with a mask, `(2, P)`: the sums of their weighted values and of the weights, over the
            clients that sent them. None if all models were sent whole.
    """

    whole: RunningMean
    sums: Tensor | None = None


class EntryMean(Aggregator):
    """Average each model entry over the clients that sent it. Entries that no client sent do not change.

    In a round, either all clients send whole models, or all send the result of `mask_entries`.
    """

    def begin(self, round: Round) -> EntryMeans:
        """Return empty means."""
        return EntryMeans(RunningMean())

    def fold(self, folded: EntryMeans, upload: Upload) -> None:
        """Add an upload's tensors to the mean of those sent whole, and its masked entries to the sums."""
        model, weight = dict(upload.message.section("model")), upload.n_samples
        if MASK in model:
            bits, values = model.pop(MASK), model.pop(VALUES)
            chosen = unpack_mask(bits, torch.Size([8 * len(bits)]))  # including padding, which is never chosen
            if folded.sums is None:
                folded.sums = torch.zeros(2, len(chosen), dtype=torch.float64)
            folded.sums[0, chosen] += weight * values.double()
            folded.sums[1, chosen] += weight
        folded.whole.add(model, weight)

    def finish(self, folded: EntryMeans, round: Round, knowledge: State) -> State:
        """Return the next model: each entry is its mean over the clients that sent it, weighted by samples."""
        model, before = folded.whole.value(), round.before["model"]
        if folded.sums is None:
            return {"model": model}
        names = [name for name in before if name not in model]
        old = flatten_entries(before, names).double()
        total, weight = folded.sums[:, : len(old)]
        new = torch.where(weight > 0, total / weight, old).split([before[name].numel() for name in names])
        for name, values in zip(names, new, strict=True):
            model[name] = values.view_as(before[name]).to(before[name].dtype)
        return {"model": {name: model[name] for name in before}}


class MeasuredModule(ClientModule):
    """A client's module that measures the gradient norm of its training.

    Attributes:
        critical: Whether the round is in a critical period.
        received: The received weights.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.critical = False
        self.received: Tensors = {}
        self._squares: Tensor | None = None  # the sum of `|g|²` over the steps so far
        self._epochs, self._lr = 1, 0.0  # begun epochs, and the last learning rate

    def check_fit(self) -> None:
        """Raise an error if parameters have different learning rates, because the gradient norm is scaled by one."""
        check_one_rate(self, "CriticalFL")

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients, and add their squared norm to the sum over the steps of the fit."""
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        squares = [at_least_float32(p.grad).square().sum() for p in self.backbone.parameters() if p.grad is not None]
        total = torch.stack(squares).sum()
        step = total.where(total.isfinite(), 0.0)  # a loss scaler skips the other steps
        self._squares = step if self._squares is None else self._squares + step
        self._epochs, self._lr = self.current_epoch + 1, optimizer.param_groups[0]["lr"]

    @property
    def gradient_norm(self) -> float:
        """The federated gradient norm (FGN): the learning rate times the sum of `|g|²` per epoch, on average.

        `g` is the clipped gradient of a step.
        """
        return 0.0 if self._squares is None else self._lr * float(self._squares) / self._epochs


class CriticalFL(Algorithm):
    """While gradient norms grow, more clients take part, and each sends only its largest changes.

    The experiment's `clients_per_round` is the initial and the smallest number of participants. With `max_share` 0 and
    `keep` 1 this is FedAvg, bit for bit. With `keep` 1 alone only the number of participants changes.

    Bytes a round, each participant, at most: down `model + 8`, up `model + P // 8 + 17`.

    Kept by the server: the last gradient norms.

    Args:
        delta: δ, the relative growth of the gradient norm above which a period is critical.
        window: Number of norms in the moving average. Norms before the first round count as zero.
        every: Number of rounds between the server's checks of the norms.
        sure: Number of checks, counted from the first, that always find a critical period.
        max_share: The largest share of all clients that takes part in a round, unless `clients_per_round` is larger.
        keep: Share of the parameters' entries that a client sends in a critical period; 1 sends whole models.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`. They are always sent completely.
    """

    delta: float = 0.01
    window: int = 10
    every: int = 2
    sure: int = 5
    max_share: float = number(0.75, "[0, 1]", "the paper's code uses 0.75")
    keep: float = number(0.2, "(0, 1]", "the paper's code uses 0.2")
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {  # around the values of Yan et al.
        "delta": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
        "keep": {"distribution": "uniform", "min": 0.1, "max": 1.0},
    }
    module_class = MeasuredModule
    uploads_vary = True  # only weights that have changed are sent in critical periods

    def __post_init__(self) -> None:
        """Check the options. Uploads are whole models only if `keep` is 1."""
        super().__post_init__()
        self.periods = CriticalPeriods(self.delta, self.window, self.every, self.sure)
        self.whole = self.uploads_weights = self.keep == 1

    def own_aggregator(self) -> Aggregator:
        """Return the mean of each entry over the clients that sent it."""
        return EntryMean()

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, and a critical-period detector that starts in a critical period."""
        most = torch.tensor(int(self.max_share * clients))
        state = super().initial_state(backbone, num_classes, clients, rng)
        return state | {DETECTOR: self.periods.initial() | {"most": most}}

    def cohort(self, state: State, participants: int, clients: int) -> int:
        """Return the next round's number of participants: at least `participants`. `CriticalPeriods` may raise it."""
        return max(participants, int(state[DETECTOR]["participants"]))

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the message to a client: the model, and whether the round is in a critical period."""
        message = super().download(state, client, rng)
        return message.plus(critical=int(state[DETECTOR]["critical"]))

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the model, and keep the received weights to find the entries that training changes most."""
        super().receive(module, download, memory)
        assert isinstance(module, MeasuredModule)
        module.received, module.critical = download.section("model"), bool(download.numbers["critical"])

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained model (in a critical period, only the weights that changed most) and the gradient norm."""
        assert isinstance(module, MeasuredModule)
        message = super().upload(module, batches, n_samples, num_classes).plus(gradient_norm=module.gradient_norm)
        if not module.critical or self.keep == 1:
            return message
        model, buffers = message.section("model"), buffer_names(module.backbone)
        names = [name for name in model if name not in buffers]
        chosen = largest_changes(flatten_entries(model, names) - flatten_entries(module.received, names), self.keep)
        return message.without("model").plus({"model": mask_entries(model, names, chosen)})

    def aggregation(self, round: Round) -> NormAggregation:
        """Return the aggregation of a round, which also updates the detector of critical learning periods."""
        return NormAggregation(self, round)


class NormAggregation(Aggregation):
    """The mean of a round's models, and the next state of the detector from the clients' gradient norms."""

    algorithm: CriticalFL

    def __init__(self, algorithm: CriticalFL, round: Round) -> None:
        super().__init__(algorithm, round)
        self.norms: list[float] = []

    def add(self, upload: Upload) -> None:
        """Add an upload to the means, and its gradient norm to the norms."""
        self.norms.append(upload.message.numbers["gradient_norm"])
        super().add(upload)

    def finish(self) -> State:
        """Return the mean of the uploaded models, and the updated detector of critical learning periods."""
        norm = sum(self.norms) / len(self.norms)
        detector = self.algorithm.periods.update(self.round.before[DETECTOR], norm, len(self.norms))
        return super().finish() | {DETECTOR: detector}

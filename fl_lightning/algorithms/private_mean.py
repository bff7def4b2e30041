"""`PrivateMean`: the mean of clipped updates plus noise. The global model is then differentially private for clients.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018 (DP-FedAvg), and Andrew et al.,
"Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.client_sampling import ClientSampler, PoissonSampling, UniformSampling
from fl_lightning.algorithms.protocols import Calibrates, RunPlan, SizesCohort
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.core.state_dicts import State, parameter_names
from fl_lightning.privacy.accountant import fixed_size_epsilon, poisson_epsilon, smallest_noise, tight_poisson_epsilon

KEY = "algorithm.aggregator"
PRIVACY = "privacy"
"""The section of the state with the noise multiplier and the clipping norm."""

EPSILON, TIGHT_EPSILON, CLIP, CLIPPED_SHARE = (
    f"privacy/{name}" for name in ("epsilon", "epsilon_prv", "clip", "clipped_share")
)
ACCOUNTANTS: dict[type[ClientSampler], Callable[[float, float, int, float], float]] = {
    PoissonSampling: poisson_epsilon,
    UniformSampling: fixed_size_epsilon,
}
"""The accountant of each sampler whose rounds can be accounted."""


def clipped(update: Tensors, clip: float) -> tuple[Tensors, float]:
    """Return an update scaled to a Euclidean norm of at most `clip`, all tensors as one vector, and its norm before.

    Args:
        update: The update Δ, in float64.
        clip: The clipping norm C.

    Returns:
        `Δ min(1, C / ‖Δ‖)` and `‖Δ‖`.
    """
    norm = math.sqrt(sum(float(value.square().sum()) for value in update.values()))
    scale = min(1.0, clip / norm) if norm else 1.0
    return {name: scale * value for name, value in update.items()}, norm


def update_noise(noise: float, bit_noise: float) -> float:
    """Return z_Δ, the noise multiplier of the updates that leaves a part of the privacy for the clipped share.

    Andrew et al., theorem 1: `z_Δ = (z^-2 - (2 σ_b)^-2)^(-1/2)`. Updates with z_Δ and the sum of the clients' ±1/2 with
    the standard deviation σ_b are together as private as updates alone with z.

    Args:
        noise: z, the noise multiplier of both together.
        bit_noise: σ_b, above z / 2.
    """
    return (noise**-2 - (2 * bit_noise) ** -2) ** -0.5 if noise else 0.0


@dataclass
class ClippedSum:
    """The sum of a round's clipped updates, to which uploads are added one at a time.

    Attributes:
        clip: The round's clipping norm C.
        total: The sum of the clipped updates by name, in float64.
        bits: The sum of 1/2 for each update of norm at most C and -1/2 for each other update.
    """

    clip: float
    total: Tensors = field(default_factory=dict)
    bits: float = 0.0


class PrivateMean(Aggregator):
    """The sum of clipped updates plus Gaussian noise, over the expected number of clients: user-level privacy.

        w' = w + η_s / (q K) [Σ_k Δ_k min(1, C / ‖Δ_k‖) + N(0, z² C² I)]

    `Δ_k` is the change of all parameters that client k has sent, as one vector. All clients weigh the same, and the
    denominator is the expected number of participants, `clients_per_round`. The sequence of global models is
    (ε, δ)-differentially private. With `PoissonSampling` and `min_clients: 0`, ε compares runs with and without one
    client. With the default sampler, it compares runs in which one client's data are replaced, and is much larger.

    Args:
        clip: C, the largest norm of an update. With `quantile`, C of the first round.
        noise: z, the noise multiplier. With 0, ε is infinite.
        epsilon: In place of `noise`: the ε of the whole run, for which the smallest sufficient z is computed.
        delta: δ, below 1 / K.
        server_lr: η_s, the server's learning rate.
        quantile: Adapt C to this quantile of the norms of the clients' updates. By default C is constant.
        clip_lr: Learning rate of C, with `quantile`: `C exp(-clip_lr (b - quantile))`, with the noisy share b of
            updates whose norm is at most C.
        bit_noise: σ_b, the noise of the number of these updates; by default a twentieth of `clients_per_round`, and at
            least z. It must be above z / 2. The smaller it is, the more noise the updates get.

    Raises:
        ConfigError: An option is out of range, or neither or both of `noise` and `epsilon` are given.
    """

    clip: float = 1.0
    noise: float | None = number(None, "[0, inf)")
    epsilon: float | None = number(None, "(0, inf)")
    delta: float = number(1e-5, "(0, 1)")
    server_lr: float = number(1.0, "(0, inf)")
    quantile: float | None = number(None, "(0, 1)")
    clip_lr: float = number(0.2, "(0, inf)")
    bit_noise: float | None = number(None, "(0, inf)")

    section = KEY
    needs_sampled_clients = True
    finishes_empty_rounds = True

    def __post_init__(self) -> None:
        """Check the options."""
        unlimited = self.noise == 0 and self.quantile is None
        check_number(f"{KEY}.clip", self.clip, "(0, inf]" if unlimited else "(0, inf)")
        super().__post_init__()
        if (self.noise is None) == (self.epsilon is None):
            raise ConfigError(f"{KEY}.noise: give either noise or epsilon. For 1 times the clipping norm, set noise 1.")

    @property
    def reports(self) -> tuple[str, ...]:
        """The columns that the aggregator adds to the metrics of a round."""
        return (EPSILON, TIGHT_EPSILON, *(CLIP, CLIPPED_SHARE) * (self.quantile is not None))

    def start_run(self, plan: RunPlan) -> None:
        """Check the run's other options, and compute the noise multiplier from `epsilon`.

        Raises:
            ConfigError: The method releases more than the global model, rounds cannot be accounted, or an option does
                not fit the number of clients or of rounds.
        """
        refuse_further_releases(plan.algorithm, self)
        refuse_unaccountable_rounds(plan)
        if self.delta >= 1 / self.clients:
            what = f"{self.delta:g} is not below 1 / {self.clients}, one over the number of clients"
            raise ConfigError(f"{KEY}.delta: {what}. Lower it.")
        self._expected, self._rounds = plan.clients_per_round, plan.rounds
        self._sampler, self._seed = type(plan.sampler), None if plan.is_remote else plan.seed
        if self.epsilon is not None:
            self._multiplier = smallest_noise(self.epsilon, lambda noise: self._spent(noise, plan.rounds))
        else:
            self._multiplier = self.noise or 0.0
            self._spent(self._multiplier, 1)  # raises an error if opacus is missing
        self._bit_noise = self.bit_noise or max(plan.clients_per_round / 20, self._multiplier)
        if self.quantile is not None and 2 * self._bit_noise <= self._multiplier:
            what = f"{self._bit_noise:g} is not above half of the noise multiplier {self._multiplier:g}"
            raise ConfigError(f"{KEY}.bit_noise: {what}. Increase it, or lower noise.")
        warn_of_what_is_not_private(plan)

    def _spent(self, noise: float, rounds: int) -> float:
        """Return ε after a number of rounds with a noise multiplier."""
        return ACCOUNTANTS[self._sampler](noise, self._expected / self.clients, rounds, self.delta)

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the noise multiplier and the clipping norm, which are kept in the state.

        Raises:
            ConfigError: The shared model has BatchNorm statistics or other floating-point buffers.
        """
        parameters = set(parameter_names(model, self.buffers))
        for name, value in model.items():
            if value.is_floating_point() and name not in parameters:
                what = f"{name!r} is a statistic of clients' data, which PrivateMean does not release"
                raise ConfigError(f"algorithm.buffers: {what}. Set algorithm.buffers local, or use GroupNorm.")
        kept = {"noise": self._multiplier, "clip": self.clip}
        return {PRIVACY: {name: torch.tensor(value, dtype=torch.float64) for name, value in kept.items()}}

    def begin(self, round: Round) -> ClippedSum:
        """Return an empty sum with the round's clipping norm.

        Raises:
            ConfigError: The round would cost more than `epsilon`, because a resumed run has more rounds than before.
        """
        noise, clip = (float(round.before[PRIVACY][name]) for name in ("noise", "clip"))
        if self.epsilon is not None and self._spent(noise, round.number) > self.epsilon:
            what = f"round {round.number} would cost more than {self.epsilon:g}, for which the run's noise was computed"
            raise ConfigError(f"{KEY}.epsilon: {what}. Keep the number of rounds.")
        return ClippedSum(clip)

    def fold(self, folded: ClippedSum, upload: Upload) -> None:
        """Add a client's clipped update to the sum."""
        sent, received = upload.message.section("model"), upload.received
        assert received is not None
        names = [name for name in parameter_names(sent, self.buffers) if name in received]
        update, norm = clipped({name: sent[name].double() - received[name].double() for name in names}, folded.clip)
        folded.bits += 0.5 if norm <= folded.clip else -0.5
        for name, value in update.items():
            if name in folded.total:
                folded.total[name] += value
            else:
                folded.total[name] = value

    def finish(self, folded: ClippedSum, round: Round, knowledge: State) -> State:
        """Return the model after the noisy step, and the next clipping norm. A round without uploads is noise alone."""
        noise, rng = float(round.before[PRIVACY]["noise"]), self._generator(round.number)
        old, model = round.before["model"], dict(round.before["model"])
        adapts = self.quantile is not None
        deviation = folded.clip * (update_noise(noise, self._bit_noise) if adapts else noise)
        for name in parameter_names(old, self.buffers):
            total = folded.total.get(name, torch.zeros_like(old[name], dtype=torch.float64))
            if noise:
                total = total + deviation * torch.from_numpy(rng.standard_normal(tuple(total.shape)))
            model[name] = (old[name].double() + self.server_lr / self._expected * total).to(old[name].dtype)
        self._report_epsilon(noise, round)
        kept = round.before[PRIVACY]
        if self.quantile is not None:
            noisy = folded.bits + (self._bit_noise * rng.standard_normal() if noise else 0.0)
            within = 0.5 + noisy / self._expected
            clip = folded.clip * math.exp(-self.clip_lr * (within - self.quantile))
            kept = kept | {"clip": torch.tensor(clip, dtype=torch.float64)}
            round.metrics.update({CLIP: folded.clip, CLIPPED_SHARE: 1 - within})
        return {"model": model, PRIVACY: kept}

    def _report_epsilon(self, noise: float, round: Round) -> None:
        """Add ε of all rounds so far to the metrics, and after the last round the one that takes longer to compute."""
        round.metrics[EPSILON] = self._spent(noise, round.number)
        if round.number == self._rounds and self._sampler is PoissonSampling:
            rate = self._expected / self.clients
            round.metrics[TIGHT_EPSILON] = tight_poisson_epsilon(noise, rate, round.number, self.delta)

    def _generator(self, round: int) -> np.random.Generator:
        """Return the random numbers of a round's noise: the system's, if clients' data are on their own machines."""
        return np.random.default_rng() if self._seed is None else generator(self._seed, Stream.PRIVACY, round)


def refuse_further_releases(algorithm: Algorithm, aggregator: Aggregator) -> None:
    """Raise an error if a method lets the server publish more of its clients' data than the aggregator's model."""
    name, wrong = type(algorithm).__name__, None
    if algorithm.aggregator is not aggregator:
        wrong = f"{type(algorithm.aggregator).__name__} around PrivateMean gets the clients' updates, too"
    elif not algorithm.server or algorithm.public is not None:
        wrong = f"clients of {name} send to each other"
    elif algorithm.knowledge:
        wrong = f"{name} also shares {algorithm.knowledge[0].name!r}, which has no noise"
    elif not algorithm.releases_only_model:
        wrong = f"the server of {name} computes more from uploads than the model"
    elif isinstance(algorithm, Calibrates):
        wrong = f"{name} also uses statistics of the clients' data to calibrate the model"
    elif isinstance(algorithm, SizesCohort):
        wrong = f"{name} chooses the number of participants from uploads"
    if wrong:
        raise ConfigError(f"{KEY}: {wrong}. Use PrivateMean in a method such as FedAvg, FedProx or FedPer.")


def refuse_unaccountable_rounds(plan: RunPlan) -> None:
    """Raise an error if the privacy of rounds with this sampler is not known."""
    if type(plan.sampler) not in ACCOUNTANTS:
        what = f"the privacy of rounds with {type(plan.sampler).__name__} is not known"
        raise ConfigError(f"client_sampler: {what}. Use PoissonSampling with min_clients 0.")
    if type(plan.sampler) is PoissonSampling and plan.sampler.min_clients:
        what = f"with {plan.sampler.min_clients}, small rounds are drawn again, which the accountant does not know"
        raise ConfigError(f"min_clients: {what}. Set it to 0.")


def warn_of_what_is_not_private(plan: RunPlan) -> None:
    """Warn that only the global model is private, and in a simulation that its noise is not secret."""
    what = "only the global model is private. Metrics of clients and all other files of the run folder are not"
    seeded = "" if plan.is_remote else ". This is a simulation: the noise can be computed from the seed"
    warnings.warn(f"{KEY}: {what}{seeded}. See docs/privacy.md", stacklevel=2)

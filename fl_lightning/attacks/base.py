"""Base classes of adversaries: who attacks, what attackers send to the server, and what they train on.

Attacks are simulated. Attackers train as all other clients do. An attack on updates then replaces what they send,
before the server aggregates. An attack on data changes their training samples before round 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field, replace

import numpy as np
import torch
from torch import Size, Tensor

from fl_lightning.core.arguments import FieldsMixin, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.core.state_dicts import first_non_finite, parameter_names
from fl_lightning.data.federated_data import FederatedData
from fl_lightning.data.lazy import Samples
from fl_lightning.data.loaded_data import LoadedData

DEFAULT_SHARE = 0.2
"""Share of the clients that attack, by default."""

Entries = tuple[tuple[str, Size], ...]
"""The name and shape of each entry of an update."""


class Adversary(FieldsMixin):
    """Base class of adversaries, which control some of the clients. The config key is `adversary`.

    With this class itself, the chosen clients do not attack, but they are left out of the clients' metrics as attackers
    are. So its runs are the baseline for attacks by the same clients.

    Args:
        clients: The attackers: a share of the clients, rounded, but at least one unless it is 0; or a list of ids. A
            share is drawn by the seed: the same clients for all methods and attacks, and among those of a larger share.
            By default 0.2.

    Raises:
        ConfigError: `clients` is neither a share in [0, 1) nor a list of different ids, or an option is out of range.

    Attributes:
        attackers: Ids of the attackers. `start` sets them.
        seed: The run's seed. `start` sets it.
        changes_updates: Whether attackers send other updates than those that they have trained. The server then holds
            the uploads of a round until all have arrived.
    """

    clients: float | list[int] | None = None
    attackers: frozenset[int] = field(default=frozenset(), init=False)
    seed: int = field(default=0, init=False)

    section = "adversary"
    changes_updates = False

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if isinstance(self.clients, list):
            if len({*self.clients}) < len(self.clients):
                raise ConfigError(f"adversary.clients: an id occurs twice ({self.clients}). List each attacker once.")
        elif self.clients is not None and not 0 <= self.clients < 1:
            fix = "Give a share of the clients, such as 0.2, or a list of ids"
            raise ConfigError(f"adversary.clients: {self.clients} is outside [0, 1). {fix}.")

    def start(self, clients: int, seed: int) -> None:
        """Choose the attackers before round 1.

        Args:
            clients: Number of clients that train.
            seed: The run's seed.

        Raises:
            ConfigError: No client has one of the ids in the option `clients`.
        """
        self.seed, chosen = seed, self.clients
        if isinstance(chosen, list):
            if unknown := [client for client in chosen if not 0 <= client < clients]:
                where = f"Clients are 0 to {clients - 1}"
                raise ConfigError(f"adversary.clients: client {unknown[0]} not found. {where}.")
            self.attackers = frozenset(chosen)
            return
        share = DEFAULT_SHARE if chosen is None else chosen
        count = max(1, round(share * clients)) if share else 0
        self.attackers = frozenset(generator(seed, Stream.ATTACKS).permutation(clients)[:count].tolist())

    def poison(self, data: FederatedData) -> FederatedData:
        """Return the data on which clients train, with the attackers' changes. By default nothing is changed.

        Raises:
            ConfigError: The attack does not work on these data.
        """
        return data

    def wanted_predictions(self, data: LoadedData) -> tuple[Samples, Tensor] | None:
        """Return test samples and, for each, the class that the attackers want: `(n, ...)` and `(n,)`.

        The attack's success rate is the share of these predictions. By default there is no such goal: None.

        Args:
            data: The data of the run, with the clean test set. `poison` has been called.
        """
        return None

    def replace_uploads(self, uploads: Sequence[Upload], round: int, buffers: Collection[str]) -> list[Upload]:
        """Return what the server receives in place of a round's uploads, in the same order.

        An upload that is not replaced is the same object.

        Args:
            uploads: The uploads of all clients, as they were trained.
            round: The round, from 1.
            buffers: Names of the network's buffers.
        """
        return [*uploads]


class UpdateAttack(Adversary):
    """Base class of attacks on updates: attackers send crafted weights. Subclasses override `craft`.

    An update is the uploaded weights minus the received ones. It has the floating-point parameters that a client both
    receives and uploads. Buffers, integers, shared knowledge and numbers such as `n_samples` are those of the
    attacker's honest training.

    Attributes:
        omniscient: Whether the attack reads the round's honest updates. If a round has none, attackers are honest.
    """

    changes_updates = True
    omniscient = True

    def craft(self, honest: Tensor, own: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the update that each attacker sends, `(m, P)`, or one for all attackers, `(P,)`. All are float64.

        Args:
            honest: The updates of the round's honest clients, `(n - m, P)`.
            own: The updates of the attackers' honest training, `(m, P)`.
            generators: Random numbers of each attacker in this round.
        """
        raise NotImplementedError

    def replace_uploads(self, uploads: Sequence[Upload], round: int, buffers: Collection[str]) -> list[Upload]:
        """Return the uploads, with those of attackers crafted from the honest ones that have entries of the same shape.

        Raises:
            ConfigError: An attacker uploads no weights that it has received.
        """
        forms = [update_entries(upload, buffers) for upload in uploads]
        crafted: dict[int, Upload] = {}
        for form in dict.fromkeys(forms):
            group = [upload for upload, own in zip(uploads, forms, strict=True) if own == form]
            attacking = [upload for upload in group if upload.client in self.attackers]
            if attacking and not form:
                raise ConfigError(no_weights(self, attacking[0].client))
            crafted |= self._craft_uploads(group, attacking, form, round)
        return [crafted.get(upload.client, upload) for upload in uploads]

    def _craft_uploads(
        self, group: Sequence[Upload], attacking: Sequence[Upload], form: Entries, round: int
    ) -> dict[int, Upload]:
        """Return the attackers' crafted uploads by client. All uploads of the group have the same entries."""
        honest = [update_of(upload, form) for upload in group if upload.client not in self.attackers]
        if not attacking or (self.omniscient and not honest):
            return {}
        own = torch.stack([update_of(upload, form) for upload in attacking])
        generators = [generator(self.seed, Stream.ATTACKS, round, upload.client) for upload in attacking]
        crafted = self.craft(torch.stack(honest) if honest else own[:0], own, generators).expand_as(own)
        return {
            upload.client: with_update(upload, form, update) for upload, update in zip(attacking, crafted, strict=True)
        }


def no_weights(attack: Adversary, client: int) -> str:
    """Return the error message that an attack on updates does not work, because a client sends no weights."""
    what = f"{type(attack).__name__} replaces weights, but client {client} uploads none that it has received"
    return f"adversary: {what}. Use LabelFlip or Backdoor, or another method."


def update_entries(upload: Upload, buffers: Collection[str] = ()) -> Entries:
    """Return the entries of a client's update: the parameters that it received, and uploads with the same shape."""
    model, received = upload.message.section("model"), upload.received or {}
    names = (name for name in parameter_names(model, buffers) if name in received)
    return tuple((name, model[name].shape) for name in names if received[name].shape == model[name].shape)


def update_of(upload: Upload, entries: Entries) -> Tensor:
    """Return a client's update as one vector: the uploaded weights minus the received ones, `(P,)` in float64."""
    assert upload.received is not None
    model, received = upload.message.section("model"), upload.received
    return torch.cat([(model[name].cpu().double() - received[name].double()).flatten() for name, _ in entries])


def with_update(upload: Upload, entries: Entries, update: Tensor) -> Upload:
    """Return an upload with another update, `(P,)` in float64. Its weights are rounded once."""
    assert upload.received is not None
    model = dict(upload.message.section("model"))
    for (name, shape), part in zip(entries, update.split([shape.numel() for _, shape in entries]), strict=True):
        weights = upload.received[name].double() + part.view(shape)
        model[name] = weights.to(model[name].device, model[name].dtype)
    message = Message.pack({**upload.message.sections, "model": model}, **upload.message.numbers)
    return upload._replace(message=message)


def fault_of(crafted: Message, honest: Message) -> str | None:
    """Return why a server would refuse a crafted upload; None if it can be aggregated.

    Names, shapes and dtypes must be those of the upload that the client's honest training gave, and all values finite.
    """
    if crafted.numbers.keys() != honest.numbers.keys():
        return "its numbers have other names"
    if not all(np.isfinite(value) for value in crafted.numbers.values()):
        return "a number is NaN or Inf"
    tensors, expected = crafted.tensors, honest.tensors
    for name in sorted(tensors.keys() ^ expected.keys()):
        return f"{name!r} is {'missing' if name in expected else 'unknown'}"
    for name, value in tensors.items():
        if (value.shape, value.dtype) != (expected[name].shape, expected[name].dtype):
            return f"{name!r} has another shape or dtype"
    bad = first_non_finite(tensors)
    return None if bad is None else f"{bad!r} contains NaN or Inf"


class DataAttack(Adversary):
    """Base class of attacks on data: attackers train on changed samples. Subclasses override `change`.

    The data are split among the clients first, so the samples of all other clients and all test samples do not change.

    Args:
        share: Share of an attacker's training samples that are changed, in (0, 1], rounded, but at least one. They are
            drawn by the seed.
    """

    share: float = number(1.0, "(0, 1]")

    def poison(self, data: FederatedData) -> FederatedData:
        """Return the data with a share of the attackers' training samples changed. The given data do not change.

        Raises:
            ConfigError: The attack does not work on these data.
        """
        if not self.attackers:
            return data
        loaded = data.data
        if not data.objective.classes or loaded.y_train.ndim != 1 or loaded.evaluate is not None:
            what = "the labels are not one class per sample, or the dataset has its own evaluation"
            raise ConfigError(f"adversary: {type(self).__name__} changes classes, but {what}. Use another dataset.")
        self.check_data(loaded)
        rows = [self._drawn_rows(data, client) for client in sorted(self.attackers)]
        return replace(data, data=self.change(loaded, torch.cat(rows)))

    def check_data(self, data: LoadedData) -> None:
        """Check that the options are valid for the data.

        Raises:
            ConfigError: They are not.
        """

    def _drawn_rows(self, data: FederatedData, client: int) -> Tensor:
        """Return the indices of an attacker's training samples to change."""
        train = data.shard(client).train
        candidates = train[self.candidates(data.data.y_train[train])]
        count = max(1, round(self.share * len(candidates)))
        order = generator(self.seed, Stream.ATTACKS, 0, client).permutation(len(candidates))
        return candidates[torch.from_numpy(order[:count]).sort().values]

    def candidates(self, y: Tensor) -> Tensor:
        """Return a mask of the samples that may be changed, `(n,)` bool, given their classes. By default all."""
        return torch.ones(len(y), dtype=torch.bool)

    def change(self, data: LoadedData, rows: Tensor) -> LoadedData:
        """Return the data with the training samples at the indices `rows` changed. The given tensors do not change."""
        raise NotImplementedError


def check_class(key: str, value: int | None, classes: int) -> None:
    """Raise an error if a class of the adversary's options does not exist.

    Raises:
        ConfigError: Names the option and the class.
    """
    if value is not None and not 0 <= value < classes:
        raise ConfigError(f"adversary.{key}: class {value} not found. Classes are 0 to {classes - 1}.")

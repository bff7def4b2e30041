"""CriticalFL without a server: each client sets its number of peers from its own and its peers' gradient norms.

Yan, Wang, Yuan, Li: "CriticalFL: A Critical Learning Periods Augmented Client Selection Framework for Efficient
Federated Learning", KDD 2023, between peers as in the tables of Zhu, Fan, Xie: "UA-PDFL: A Personalized Approach for
Decentralized Federated Learning", 2024, where each client serves as its own server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import ClassVar

import numpy as np
import torch

from fl_lightning.algorithms.aggregators import Aggregator, Weighting, fold_all
from fl_lightning.algorithms.base import Batches
from fl_lightning.algorithms.decentralized.peers import PeerAlgorithm
from fl_lightning.algorithms.global_model.criticalfl import (
    DETECTOR,
    MASK,
    CriticalFL,
    CriticalPeriods,
    EntryMean,
    MeasuredModule,
    flatten_entries,
    largest_changes,
    mask_entries,
)
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Tensors, Upload, unbundle
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, pack_mask, parameter_names, unpack_mask

CHANGED = "changed"
"""The section of a published message with the mask of the entries that changed most, one bit each."""

PEER_NORMS = "peer_norms"
"""The section of a module's notes with the gradient norms of the client's peers."""


class PeerCriticalFL(PeerAlgorithm):
    """CriticalFL without a server: a client in a critical period collects from more peers and shares less of its model.

    Each client has its own detector. It receives the mean of the client's gradient norm and the last norms of the peers
    that the client collected from. From a peer in a critical period, a client collects only the entries that changed
    most. Each entry becomes the mean, by samples, of the client's own and the collected ones. With `max_share` 0 and
    `keep` 1 this is `PeerAlgorithm`, bit for bit.

    Bytes a round, each participant, at most: down `max(n_com, int(max_share * N)) * (model + P // 8 + 17)`, up `0`.

    Kept by a client: its model and its last gradient norms.

    Args:
        n_com: Initial and smallest number of peers that a client collects from in a round.
        delta: δ, the relative growth of the gradient norm above which a period is critical.
        window: Number of norms in the moving average. Norms before the first round count as zero.
        every: Number of the client's rounds between two checks of the norms.
        sure: Number of checks, counted from the first, that always find a critical period.
        max_share: The largest share of all clients that a client collects from in a round, unless `n_com` is more.
        keep: Share of the parameters' entries that a peer in a critical period provides; 1 is the whole model.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`. They are always collected completely.
    """

    n_com: int = number(5, "[1, inf)")
    delta: float = 0.01
    window: int = 10
    every: int = 2
    sure: int = 5
    max_share: float = number(0.75, "[0, 1]", "the paper's code uses 0.75")
    keep: float = number(0.2, "(0, 1]", "the paper's code uses 0.2")
    aggregator: Aggregator = field(init=False)
    weighting: Weighting = field(default="samples", init=False)

    search_space: ClassVar = CriticalFL.search_space
    uploads_vary = True  # each client has critical periods of its own
    module_class = MeasuredModule

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.periods = CriticalPeriods(self.delta, self.window, self.every, self.sure)

    def peer_count(self, own: Message) -> int:
        """Return the number of peers to collect from, which the client's own critical-period detector has set."""
        return int(own.numbers["peers"])

    def collect(self, own: Message, peers: Mapping[int, Message], rng: np.random.Generator) -> dict[int, Message]:
        """Return the part of each peer's message that the client collects: a gradient norm, and all or part of a model.

        From a peer in a critical period, it collects only the entries of the model that changed most.
        """
        return {j: collected_part(message, self.aggregator.buffers) for j, message in peers.items()}

    def mix(self, own: Message, received: Sequence[Upload]) -> Tensors:
        """Return the mean of each model entry over the client and the peers that sent the entry."""
        uploads = [Upload(-1, own), *received]
        if any(MASK in upload.message.section("model") for upload in uploads):
            uploads = [Upload(each.client, mask_message(each.message, self.aggregator.buffers)) for each in uploads]
        mean, round = EntryMean(), Round(0, {"model": own.section("model")})
        return mean.finish(fold_all(mean, uploads, round), round, {})["model"]

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Average the client's model with the collected models, and store the peers' gradient norms."""
        super().receive(module, download, memory)
        assert isinstance(module, MeasuredModule)
        norms = [upload.message.numbers["gradient_norm"] for upload in unbundle(download)]
        most = torch.tensor(int(self.max_share * len(self.samples)))
        detector = memory.get(DETECTOR) or self.periods.initial() | {"most": most}
        module.notes = {PEER_NORMS: {"norms": torch.tensor(norms, dtype=torch.float64)}, DETECTOR: detector}
        module.critical = bool(detector["critical"])
        module.received = {name: value.clone() for name, value in self._shared(module.backbone).items()}

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the message to publish: the model with a mask of the entries that changed most, and the gradient norm.

        The mask is only sent in a critical period. The message also has the number of peers to collect from next.
        """
        assert isinstance(module, MeasuredModule)
        message = super().upload(module, batches, n_samples, num_classes)
        if not module.context.round:
            return message.plus(gradient_norm=0.0, peers=self.n_com)
        if module.critical and self.keep < 1:
            model = message.section("model")
            names = parameter_names(model, self.aggregator.buffers)
            before = {name: module.received[name].to(model[name]) for name in names}
            changed = largest_changes(flatten_entries(model, names) - flatten_entries(before, names), self.keep)
            message = message.plus({CHANGED: {"entries": pack_mask(changed)}})
        norms = [module.gradient_norm, *module.notes[PEER_NORMS]["norms"].tolist()]
        detector = self.periods.update(module.notes[DETECTOR], sum(norms) / len(norms), len(norms) - 1)
        module.notes = module.notes | {DETECTOR: detector}
        peers = max(self.n_com, int(detector["participants"]))
        return message.plus(gradient_norm=module.gradient_norm, peers=peers)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state, including the critical-period detector and the message that peers may collect."""
        kept = super().remember(module, upload)
        return kept | {DETECTOR: module.notes[DETECTOR]} if module.context.round else kept


def collected_part(publication: Message, buffers: Collection[str] = ()) -> Message:
    """Return the message that peers collect. In a critical period, its model has only the entries that changed most."""
    numbers = {name: publication.numbers[name] for name in ("n_samples", "gradient_norm")}
    changed = publication.section(CHANGED)
    if not changed:
        return Message(publication.tensors, numbers)
    model = publication.section("model")
    names = parameter_names(model, buffers)
    size = sum(model[name].numel() for name in names)
    chosen = unpack_mask(changed["entries"], torch.Size([size]))
    rest = publication.without("model").without(CHANGED)
    return Message(rest.plus({"model": mask_entries(model, names, chosen)}).tensors, numbers)


def mask_message(message: Message, buffers: Collection[str] = ()) -> Message:
    """Return a message with its model in masked form: a mask of the sent entries, and a vector of their values.

    A model in this form does not change. A whole model gets a mask of ones.
    """
    model = message.section("model")
    if MASK in model:
        return message
    names = parameter_names(model, buffers)
    everything = torch.ones(sum(model[name].numel() for name in names), dtype=torch.bool)
    return message.without("model").plus({"model": mask_entries(model, names, everything)})

"""Base class of methods without a server. It averages models between peers (gossip averaging).

Every client publishes its trained model (`upload`). At the start of a round it collects what its peers published in
earlier rounds. All clients of a round see the same published messages, so results do not depend on their order. Only
collected messages count as communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad

from fl_lightning.algorithms.aggregators import Weighting, fold_all, mean_or
from fl_lightning.algorithms.base import OWN, UNSET, Aggregation, Algorithm, recall, require_same_entries
from fl_lightning.algorithms.decentralized.topology import Complete, Graph
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import load_weights, to_cpu
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Tensors, Upload, bundle, message_to_tensors, tensors_to_message, unbundle
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import ExchangedMean, State, VisibleState

LAID_OUT = "laid_out"
"""The section of the client state with the message that the client last published."""


class PeerAlgorithm(Algorithm):
    """Gossip averaging, FedAvg between peers: each client averages its model with its peers', then trains.

    This is the base of peer-to-peer methods. They override `collect` (which parts of the peers' messages a client
    collects) and `mix` (how it combines them). Each client merges the shared knowledge of its peers and its own. The
    state's `model` is the mean of all clients' models, which no client has. It is only evaluated.

    Bytes a round, each participant: down `(n_com or N - 1) * (model + 8)`, up `0`.

    Kept by a client: its model.

    Args:
        n_com: Number of peers that a client collects from, drawn in each round; by default all that it is linked to.
        graph: The peers that each client can collect from; by default all.
        weighting: Weight a client and its peers by their number of `samples`, or equally (`uniform`).
        aggregator: Computes the mean of a client's and its peers' models instead, such as a robust rule. Updates are
            measured from the client's own model. The evaluated mean of all models does not change.

    Raises:
        ConfigError: `n_com` is below 1, or above the number of other clients, or `aggregator` computes no kind of mean
            or needs more models than a client has.
    """

    n_com: int | None = number(None, "[1, inf)")
    graph: Graph = UNSET
    weighting: Weighting = "samples"

    server = False
    public = LAID_OUT
    trains_new_clients = True

    def __post_init__(self) -> None:
        """Check the options. By default, all peers are linked."""
        super().__post_init__()
        self.aggregator = mean_or(self.aggregator, self.weighting)
        self.graph = self.graph or Complete()

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, and the graph of the peers that clients can collect from."""
        if self.n_com is not None and self.n_com >= clients:
            raise ConfigError(
                f"algorithm.n_com: {self.n_com} peers, but a client has only {clients - 1} others. Decrease it."
            )
        links = torch.from_numpy(self.graph.links(clients, rng))
        fewest = int(links.sum(dim=1).min())
        self.aggregator.require_uploads(1 + (fewest if self.n_com is None else min(self.n_com, fewest)))
        published = torch.zeros(clients, dtype=torch.bool)
        state = super().initial_state(backbone, num_classes, clients, rng)
        return state | {"links": {"matrix": links}, "published": {"clients": published}}

    def add_client(self, state: State, memory: State) -> State:
        """Return the state with one more client, which can collect from all peers."""
        links = pad(state["links"]["matrix"], (0, 1, 0, 1))
        links[-1, :-1] = True
        published = pad(state["published"]["clients"], (0, 1), value=True)
        return state | {"links": {"matrix": links}, "published": {"clients": published}}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return one message with everything that a client collects in a round: its peers' published models.

        A client that failed before round 1 has not published anything until it has trained. Until then its peers leave
        it out, and it collects nothing.
        """
        is_known = state["published"]["clients"]
        if not is_known[client]:
            return bundle({})
        linked = (state["links"]["matrix"][client] & is_known).nonzero()[:, 0].numpy()
        own = publication(state, client)
        limit = self.peer_count(own)
        count = len(linked) if limit is None else min(limit, len(linked))
        peers = sorted(rng.choice(linked, count, replace=False).tolist()) if count else []
        published = {peer: publication(state, peer) for peer in peers}
        return bundle(self.collect(own, published, rng))

    def peer_count(self, own: Message) -> int | None:
        """Return the number of peers that a client collects from in a round; None means all linked peers."""
        return self.n_com

    def collect(self, own: Message, peers: Mapping[int, Message], rng: np.random.Generator) -> dict[int, Message]:
        """Return the parts of the peers' published messages that a client collects; by default everything.

        Args:
            own: The client's own published message.
            peers: The peers' published messages by id, ascending.
            rng: Random numbers of this client and round.
        """
        return dict(peers)

    def mix(self, own: Message, received: Sequence[Upload]) -> Tensors:
        """Return the weights that a client starts training from: the mean of its own and the collected models."""
        round = Round(0, {"model": own.section("model")}, torch.initial_seed())
        folded = fold_all(self.aggregator, [Upload(-1, own), *received], round)
        return self.aggregator.finish(folded, round, {})["model"]

    def weight(self, publication: Message) -> float:
        """Return a client's weight in a mean of models: its number of training samples, or 1 if all weigh the same."""
        return publication.numbers["n_samples"] if self.weighting == "samples" else 1

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the average of the client's and its peers' models. Merge other shared data, such as prototypes.

        If the client has not published a model yet, as before round 1, do nothing.
        """
        if LAID_OUT not in memory:
            return
        untrained = to_cpu({"model": self._shared(module.backbone)})
        own, received = tensors_to_message(Message.pack(untrained).tensors | memory[LAID_OUT]), unbundle(download)
        load_weights(module.backbone, own.section("model") | memory.get(OWN, {}))
        load_weights(module.backbone, self.mix(own, received))
        for piece in module.pieces():
            start = piece.initial(len(module.context.class_counts) if module.context.class_counts is not None else 0)
            if module.context.round == 1 and start:  # untrained models have no useful knowledge
                piece.load(start)
            else:
                round = Round(module.context.round, {"model": own.section("model")}, torch.initial_seed())
                piece.load(piece.merge(memory.get(piece.name) or start, [Upload(-1, own), *received], round))
        recall(module, memory)

    def is_untrained(self, module: ClientModule, memory: State) -> bool:
        """Return whether the client has never trained, so that its own share of the mean is the initial model."""
        published = tensors_to_message(memory.get(LAID_OUT, {})).section("model")
        return not published and OWN not in memory

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state to keep between rounds, which includes the message that the client publishes.

        After training, it also has the merged shared knowledge and the states of the loss terms. The initial model is
        not part of it: the shared state holds it once.
        """
        if not module.context.round:
            return {LAID_OUT: message_to_tensors(upload.without("model"))}
        merged = {piece.name: dict(piece.named_buffers()) for piece in module.pieces()}
        return super().remember(module, upload) | to_cpu(merged) | {LAID_OUT: message_to_tensors(upload)}

    def try_upload(self, round: Round, upload: Upload, memory: State, model: Tensors) -> None:
        """Add the upload to the mean, and let a client with the same network collect and average its publication."""
        self.aggregation(round).add(upload)
        own, published = (
            tensors_to_message(Message.pack({"model": weights}).tensors | memory[LAID_OUT])
            for weights in (model, upload.message.section("model"))
        )
        collected = self.collect(own, {upload.client: published}, round.rng)
        mixed = self.mix(own, [Upload(client, message) for client, message in collected.items()])
        require_same_entries(mixed, model)

    def aggregation(self, round: Round) -> Aggregation:
        """Return the aggregation of a round, which updates the mean over all clients' latest models for evaluation."""
        return LatestModels(self, round)


class LatestModels(Aggregation):
    """The mean over all clients' latest models: an upload replaces the client's previous model."""

    algorithm: PeerAlgorithm

    def __init__(self, algorithm: PeerAlgorithm, round: Round) -> None:
        """Begin with the mean over the clients' previous models, or without models before round 1."""
        super().__init__(algorithm, round)
        state = round.before
        self.before_round_1 = "sums" not in state  # `finish` adds them
        self.model = state["model"]
        self.published = state["published"]["clients"].clone()
        total = 0.0 if self.before_round_1 else float(state["samples"]["total"])
        self.mean = ExchangedMean() if self.before_round_1 else ExchangedMean(state["sums"], total)

    def add(self, upload: Upload) -> None:
        """Replace a client's model in the mean, or add its first one."""
        weight = self.algorithm.weight
        if self.published[upload.client]:
            old = publication(self.round.before, upload.client)
            self.mean.remove(old.section("model"), weight(old))
        self.published[upload.client] = True
        self.model = upload.message.section("model")
        self.mean.add(self.model, weight(upload.message))

    def finish(self) -> State:
        """Return the state with the mean model."""
        samples = {"total": torch.tensor(self.mean.weight, dtype=torch.float64)}
        changed: State = {"model": self.mean.value(), "sums": self.mean.sums, "samples": samples}
        untrained = {"untrained": self.model} if self.before_round_1 else {}  # the same from every client
        return self.round.before | untrained | changed | {"published": {"clients": self.published}}


def publication(state: State, peer: int) -> Message:
    """Return the message that a peer last published; it holds the initial model until the peer has trained."""
    assert isinstance(state, VisibleState)
    return tensors_to_message(Message.pack({"model": state["untrained"]}).tensors | state.peer(peer))

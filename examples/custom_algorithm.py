"""FairProx, made up for this page: stay near the shared model, and let the clients that do worst count most."""

from fl_lightning import Aggregator, Algorithm, LossTerm, Message
from fl_lightning.core.state import weighted_mean


class Anchor(LossTerm):
    """mu/2 · ||w - w_received||²."""

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.mu = mu

    def begin(self, module):
        self.start = [p.detach().clone() for p in module.backbone.parameters()]

    def forward(self, step):
        pairs = zip(step.backbone.parameters(), self.start, strict=True)
        return self.mu / 2 * sum(((now - start) ** 2).sum() for now, start in pairs)


class ByLoss(Aggregator):
    """Weighs each client by its training loss."""

    def fold(self, uploads):
        return [(upload.message.section("model"), upload.message.numbers["loss"]) for upload in uploads]

    def finish(self, folded, before, knowledge):
        return {"model": weighted_mean(*zip(*folded, strict=True))}


class FairProx(Algorithm):
    """Anchored clients, weighed by their loss."""

    def __init__(self, mu: float = 0.1) -> None:
        super().__init__([Anchor(mu)], ByLoss())

    def upload(self, module, *data):
        message = super().upload(module, *data)
        return Message(message.tensors, message.numbers | {"loss": module.train_losses()["loss"]})

"""Define FairProx, an example method: a proximal term, and larger weights for clients with a larger loss."""

from fl_lightning import Aggregator, Algorithm, LossTerm, Message
from fl_lightning.core.state_dicts import weighted_mean


class ProximalTerm(LossTerm):
    """Add mu/2 · ||w - w_received||² to the loss."""

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.mu = mu

    def begin(self, module):
        self.start = [p.detach().clone() for p in module.backbone.parameters()]

    def forward(self, step):
        pairs = zip(step.backbone.parameters(), self.start, strict=True)
        return self.mu / 2 * sum(((now - start) ** 2).sum() for now, start in pairs)


class LossWeightedMean(Aggregator):
    """Weight each client by its training loss."""

    def finish(self, uploads, round, knowledge):
        models = [upload.message.section("model") for upload in uploads]
        return {"model": weighted_mean(models, [upload.message.numbers["loss"] for upload in uploads])}


class FairProx(Algorithm):
    """FedAvg with a proximal term, weighted by the clients' losses."""

    mu: float = 0.1

    def own_terms(self):
        return [ProximalTerm(self.mu)]

    def own_aggregator(self):
        return LossWeightedMean()

    def upload(self, module, *data):
        message = super().upload(module, *data)
        return Message(message.tensors, message.numbers | {"loss": module.train_losses()["loss"]})

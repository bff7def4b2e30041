"""Define FairProx, an example method: a proximal term, and larger weights for clients with a larger loss."""

from fl_lightning import Algorithm, LossTerm, Message, WeightedMean


class ProximalTerm(LossTerm):
    """Add mu/2 · ||w - w_received||² to the loss."""

    mu: float = 0.1

    def begin(self, module):
        self.start = [p.detach().clone() for p in module.backbone.parameters()]

    def forward(self, step):
        pairs = zip(step.backbone.parameters(), self.start, strict=True)
        return self.mu / 2 * sum((now - start).square().sum() for now, start in pairs)


class LossWeightedMean(WeightedMean):
    """Weight each client by its training loss."""

    def fold(self, folded, upload):
        folded.add(upload.message.section("model"), upload.message.numbers["loss"])


class FairProx(Algorithm):
    """FedAvg with a proximal term, weighted by the clients' losses."""

    mu: float = 0.1

    def own_terms(self):
        return [ProximalTerm(mu=self.mu)]

    def own_aggregator(self):
        return LossWeightedMean()

    def upload(self, module, *data):
        message = super().upload(module, *data)
        return Message(message.tensors, message.numbers | {"loss": module.train_losses()["loss"]})

"""ClientModule in a plain `Trainer` with two processes."""

from functools import partial

import pytest
import torch
from test_client import loader, model, plain_lightning, quiet_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fl_lightning.client.distributed import count_unrepeated
from fl_lightning.client.module import ClientModule
from fl_lightning.core.objectives import IGNORED_TOKEN, CausalLM

N = 21


def two_processes(**options):
    return quiet_trainer(strategy="ddp_spawn", devices=2, **options)


@pytest.mark.parametrize("n", [1, 2, 7, 20, 21, 22])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_sample_is_counted_once(n, shuffle, drop_last):
    for replicas in (2, 3):
        counted = []
        for rank in range(replicas):
            sampler = DistributedSampler(range(n), replicas, rank, shuffle=shuffle, drop_last=drop_last)
            for number, batch in enumerate(batches := DataLoader(range(n), 2, sampler=sampler)):
                counted += batch[: count_unrepeated(batches, number, len(batch))].tolist()
        assert sorted(counted) == sorted(set(counted))
        assert len(counted) == (n // replicas * replicas if drop_last else n)


def test_batches_without_a_distributed_sampler_are_whole():
    assert count_unrepeated(loader(N, 4), 5, 1) == 1
    assert count_unrepeated([[1, 2]], 0, 2) == 2


@plain_lightning
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_two_processes_log_the_metrics_of_all_samples():
    module = ClientModule(model(), optimizer=partial(torch.optim.SGD, lr=0.0))
    ((x, y),) = loader(N, N)
    with torch.no_grad():
        logits = module(x)
    acc, loss = float((logits.argmax(1) == y).float().mean()), float(F.cross_entropy(logits, y))
    (tested,) = two_processes().test(module, loader(N, 4), verbose=False)
    (validated,) = two_processes().validate(module, loader(N, 4), verbose=False)
    assert tested == pytest.approx({"test_acc": acc, "test_loss": loss}, rel=1e-6)
    assert validated == pytest.approx({"val_acc": acc, "val_loss": loss}, rel=1e-6)
    trainer = two_processes(max_epochs=1)
    trainer.fit(module, loader(N, 4))
    order = torch.randperm(
        N, generator=torch.Generator().manual_seed(0)
    ).tolist()  # Lightning shuffles training samples
    order += order[:1]
    batches = [own[start : start + 4] for own in (order[::2], order[1::2]) for start in range(0, len(own), 4)]
    losses = [float(F.cross_entropy(logits[batch], y[batch])) for batch in batches]
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@plain_lightning
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_two_processes_log_the_perplexity_of_all_tokens():
    module = ClientModule(torch.nn.Embedding(5, 5), objective=CausalLM())
    ids = torch.randint(0, 5, (N, 6))
    lengths = torch.arange(N) % 5 + 2
    targets = ids.where(torch.arange(6) < lengths[:, None], IGNORED_TOKEN)
    logits = module(ids).detach()
    losses = [F.cross_entropy(logits[i, : n - 1], ids[i, 1:n], reduction="sum") for i, n in enumerate(lengths)]
    perplexity = float((torch.stack(losses).sum() / (lengths - 1).sum()).exp())
    (tested,) = two_processes().test(module, DataLoader(TensorDataset(ids, targets), 4), verbose=False)
    assert tested["test_perplexity"] == pytest.approx(perplexity, rel=1e-5)

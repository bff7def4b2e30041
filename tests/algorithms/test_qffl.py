"""q-FedAvg against Algorithm 2 of Li et al. (ICLR 2020), and its identity with FedAvg."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
from experiments import UNEQUAL, NoDropout, experiment, in_float64, record_rounds
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, cross_entropy_steps, loss_by_hand, steps_of
from peers import mean_by_hand
from torch import nn

from fl_lightning import Message
from fl_lightning.algorithms import QFFL, FairAveraging
from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.core.errors import NonFiniteError
from fl_lightning.core.message import Upload
from fl_lightning.core.round import Round
from fl_lightning.models import FromModule

pytestmark = pytest.mark.numeric


def next_by_hand(start, ends, losses, q, lr):
    """Return `w - Σ Δ_k / Σ h_k` of Algorithm 2, with all clients' parameters as vectors."""
    bound = 1 / lr
    deltas, h = [], []
    for end, loss in zip(ends, losses, strict=True):
        gradient = bound * (start - end)
        deltas.append(loss**q * gradient)
        h.append(q * loss ** (q - 1) * gradient.square().sum() + bound * loss**q)
    return start - sum(deltas) / sum(h)


def served(start, ends, losses, q, lr):
    """Return the aggregator's next model for clients that send these vectors and losses, and the state's weights."""
    uploads = [
        Upload(k, Message.pack({"model": {"w": end}}, n_samples=1 + k, received_loss=loss, lr=lr))
        for k, (end, loss) in enumerate(zip(ends, losses, strict=True))
    ]
    aggregator, round = FairAveraging(q), Round(1, {"model": {"w": start}})
    state = aggregator.finish(fold_all(aggregator, uploads, round), round, {})
    return state["model"]["w"], state["weights"]["value"]


NUMBERS = st.floats(-3, 3)
CLIENTS = st.lists(st.tuples(st.tuples(NUMBERS, NUMBERS), st.floats(1e-3, 20)), min_size=1, max_size=5)


@given(clients=CLIENTS, q=st.floats(0, 8), lr=st.floats(1e-3, 1))
def test_the_next_model_is_that_of_algorithm_2(clients, q, lr):
    ends = [torch.tensor(end, dtype=torch.float64) for end, _ in clients]
    losses, start = [loss for _, loss in clients], torch.tensor([0.5, -1.0], dtype=torch.float64)
    model, weights = served(start, ends, losses, q, lr)
    torch.testing.assert_close(model, next_by_hand(start, ends, losses, q, lr), rtol=1e-9, atol=1e-9)
    shares = torch.tensor([loss**q for loss in losses], dtype=torch.float64)
    torch.testing.assert_close(weights, shares / shares.sum())


def test_a_larger_q_moves_the_model_to_the_client_with_the_larger_loss():
    start, ends = torch.zeros(1, dtype=torch.float64), [torch.tensor([s], dtype=torch.float64) for s in (-0.1, 0.1)]
    moves = [float(served(start, ends, [1.0, 2.0], q, lr=10.0)[0]) for q in (0.0, 0.5, 1.0, 4.0)]
    assert moves == sorted(moves)
    assert abs(moves[0]) < 1e-16
    assert moves[1] > 0.001


@in_float64
@pytest.mark.parametrize(("q", "lipschitz"), [(0.4, None), (3.0, None), (1.0, 0.5)])
def test_a_run_equals_a_loop_by_hand(tmp_path, q, lipschitz):
    """With BatchNorm, and other factors on the learning rate in each round."""
    decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    run = experiment(tmp_path, QFFL(q=q, lipschitz=lipschitz), **UNEQUAL, model=NoDropout, round_lr_scheduler=decay)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    for round in range(1, 4):
        start, ends, losses, lr = copy.deepcopy(model), [], [], 0.2 * 0.5 ** (round - 1)
        for client in run.server.participants(round):
            losses.append(loss_by_hand(run, client, start))
            local = copy.deepcopy(start)
            cross_entropy_steps(local, steps_of(run, round, client), lr)
            ends.append(local)
        vectors = [nn.utils.parameters_to_vector(each.parameters()).detach() for each in (start, *ends)]
        model.load_state_dict(mean_by_hand([end.state_dict() for end in ends], [loss**q for loss in losses]))
        scale = lr if lipschitz is None else 1 / lipschitz
        nn.utils.vector_to_parameters(next_by_hand(vectors[0], vectors[1:], losses, q, scale), model.parameters())
    rounds = record_rounds(run)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict(), 1e-11)
    for _, uploads, after in rounds:
        assert after["weights"]["client"].tolist() == [upload.client for upload in uploads]
        assert float(after["weights"]["value"].sum()) == pytest.approx(1)


def test_extreme_losses_give_finite_models():
    start, ends = torch.zeros(2), [torch.ones(2), torch.zeros(2)]
    for q in (0.0, 0.5, 30.0):
        for losses in ([0.0, 0.0], [0.0, 1e9], [1e9, 1e-9]):
            assert served(start, ends, losses, q, 0.1)[0].isfinite().all()
    assert served(start, [start, start], [1.0, 2.0], 1.0, lr=0.0)[0].tolist() == [0, 0]  # 1/L is 0
    with pytest.raises(NonFiniteError):
        served(start, ends, [1e12, 1.0], 30.0, 0.1)


def test_a_larger_rate_of_some_layers_counts(tmp_path):
    run = experiment(tmp_path, QFFL(), **UNEQUAL, lr_factors={"head.*": 0.1})
    rounds = record_rounds(run)
    run.fit()
    assert {upload.message.numbers["lr"] for _, uploads, _ in rounds for upload in uploads} == {0.2}


class OwnOptimizer(L.LightningModule):
    """A LightningModule with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.004)


def test_the_rate_of_a_models_own_optimizer_counts(tmp_path):
    model = partial(FromModule, module=f"{__name__}.OwnOptimizer", head="net.1")
    run = experiment(tmp_path, QFFL(), model=model, optimizer=None)
    rounds = record_rounds(run)
    run.fit()
    assert {upload.message.numbers["lr"] for _, uploads, _ in rounds for upload in uploads} == {0.004}

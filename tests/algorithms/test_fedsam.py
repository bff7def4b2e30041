"""FedSAM and MoFedSAM compared with Algorithms 1 and 2 (Qu et al., ICML 2022)."""

import copy
from functools import partial

import pytest
import torch
from experiments import UNEQUAL, NoDropout, experiment, finished, in_float64
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import FedSAM, MoFedSAM, Proximal
from fl_lightning.algorithms.global_model.fedsam import ascent
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines.trainer import quiet_trainer


def sharp_gradients(local, x, y, rho):
    """Return the gradients at the perturbed weights of a copy. The network sees the batch once."""
    gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
    norm = sum(g.square().sum() for g in gradients).sqrt()
    other = copy.deepcopy(local)
    with torch.no_grad():
        for p, g in zip(other.parameters(), gradients, strict=True):
            p += rho * g / norm
    return torch.autograd.grad(F.cross_entropy(other(x), y), list(other.parameters()))


@in_float64
@pytest.mark.parametrize("momentum", [False, True])
def test_a_run_equals_a_loop_by_hand(tmp_path, momentum):
    rho, alpha, lr = 0.3, 0.4 if momentum else 1.0, 0.2
    method = MoFedSAM(rho=rho, alpha=alpha) if momentum else FedSAM(rho=rho)
    run = experiment(tmp_path, method, model=NoDropout, **UNEQUAL)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    direction = [torch.zeros_like(p) for p in model.parameters()]
    for round in range(1, 4):
        ends, slopes = [], []
        for client in run.server.participants(round):
            local, steps = copy.deepcopy(model), 0
            for x, y in steps_of(run, round, client):
                gradients = sharp_gradients(local, x, y, rho)
                with torch.no_grad():
                    for p, g, d in zip(local.parameters(), gradients, direction, strict=True):
                        p -= lr * (alpha * g + (1 - alpha) * d)
                steps += 1
            moved = zip(model.parameters(), local.parameters(), strict=True)
            slopes.append([(start - end).detach() / (steps * lr) for start, end in moved])
            ends.append(local.state_dict())
        direction = [sum(parts) / 3 for parts in zip(*slopes, strict=True)]
        model.load_state_dict(
            {
                n: sum(e[n] for e in ends) / 3 if v.is_floating_point() else max(e[n] for e in ends)
                for n, v in ends[0].items()
            }
        )
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())


def test_recorded_losses_are_those_before_the_perturbation(tmp_path):
    options = UNEQUAL | {"rounds": 1, "optimizer": partial(torch.optim.SGD, lr=0.0)}
    plain, sharp = (
        finished(tmp_path / str(r), FedSAM(rho=r, loss_terms=[Proximal(0.1)]), **options) for r in (0.0, 0.5)
    )
    for name in ("client/train_loss", "client/train_ce", "client/train_proximal"):
        assert plain.csv.rows[0][name] == pytest.approx(sharp.csv.rows[0][name])


def test_a_parameter_that_the_loss_does_not_depend_on_has_a_zero_gradient():
    backbone = NoDropout((4,), 3)
    backbone.unused = torch.nn.Parameter(torch.ones(2))
    module = FedSAM(rho=0.3).client_module(backbone).train()
    module.training_step((torch.randn(6, 4), torch.arange(6) % 3), 0).backward()
    assert backbone.unused.grad.tolist() == [0.0, 0.0]
    assert all(p.grad.any() for p in backbone.head.parameters())


def test_a_gradient_of_zero_has_no_perturbation():
    moves = ascent([torch.zeros(2), torch.zeros(1)], 0.1)
    assert not any(move.any() for move in moves)
    moves = ascent([torch.tensor([3.0]), torch.tensor([4.0])], 0.1)
    assert torch.cat(moves).tolist() == pytest.approx([0.06, 0.08])


def test_scaled_half_precision_is_refused(tmp_path):
    module = FedSAM().client_module(NoDropout((4,), 3))
    module.trainer = quiet_trainer({"accelerator": "cpu"})
    module.trainer.precision_plugin.precision = "16-mixed"  # on a CPU Lightning makes bf16 of it
    with pytest.raises(ConfigError, match=r"^trainer\.precision: FedSAM"):
        module.check_fit()

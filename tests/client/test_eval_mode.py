"""Layers that a model's constructor puts into eval mode stay in eval mode during training."""

import warnings

import pytest
import torch
from experiments import NormMLP, experiment, same_bytes
from test_client import quiet_trainer
from test_lightning_model import Classifier, federated_by_hand, own

from fl_lightning.algorithms import FedAvg, FedBABU, FedRep
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine


class EvalNorm(NormMLP):
    """A network with BatchNorm in eval mode, and a dropout in eval mode that would otherwise drop everything."""

    def __init__(self, in_shape, num_classes):
        super().__init__(in_shape, num_classes)
        self.encoder[4].p = 1.0
        for layer in (self.encoder[2], self.encoder[4]):
            layer.requires_grad_(False).eval()


class EvalDropout(Classifier):
    """A LightningModule with dropout in eval mode."""

    def __init__(self):
        super().__init__()
        self.body.eval()


ENGINES = [SequentialEngine(local_loop=False), SequentialEngine(), StackedEngine(), ProcessesEngine(2)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "engine"),
    [(FedAvg, engine) for engine in ENGINES]
    + [(lambda: FedRep(final_epochs=1), "sequential"), (lambda: FedBABU(tune_epochs=1), "sequential")],
)
@pytest.mark.fast_cases(6)
def test_batchnorm_and_dropout_stay_in_eval_mode_with_every_engine(method, engine, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = experiment(tmp_path, method(), model=EvalNorm, engine=engine, rounds=2)
        run.fit()
    module, initial = run.client_module(0), run.worker.template.backbone
    assert module.training
    assert [name for name, layer in module.backbone.named_modules() if not layer.training] == ["encoder.2", "encoder.4"]
    trained = module.backbone.encoder
    assert torch.equal(trained[2].running_mean, initial.encoder[2].running_mean)
    assert not torch.equal(trained[1].weight, initial.encoder[1].weight)  # without dropout, it has a gradient


@pytest.mark.filterwarnings("ignore:Found 5 module")  # of the loop's own trainer
def test_a_lightning_module_trains_as_by_lightning_alone_and_a_warning_names_the_layer(tmp_path):
    run = own(EvalDropout, tmp_path)
    message = "model: layer 'body' of EvalDropout is in eval mode, and stays so during training. Call its train()"
    with pytest.warns(UserWarning, match=message.replace("(", r"\(").replace(")", r"\)")):
        run.fit()

    def train(net, batches):
        net.body.eval()
        quiet_trainer(max_epochs=2).fit(net, batches)

    assert same_bytes(run.state["model"], federated_by_hand(run, EvalDropout, train))


def test_a_model_that_is_in_eval_mode_as_a_whole_is_named_in_a_warning(tmp_path):
    def build(in_shape, num_classes):
        return NormMLP(in_shape, num_classes).eval()

    with pytest.warns(UserWarning, match="^model: NormMLP is in eval mode"):
        experiment(tmp_path, model=build, rounds=1).fit()

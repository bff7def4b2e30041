"""Checks of a run's options, model, optimizer and metrics before round 1."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, cast

import lightning as L
import torch

from fl_lightning.client.fit import ClientTrainerView
from fl_lightning.client.lightning_model import check_lightning_model, class_name, own_optimizer, own_step
from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError, blame
from fl_lightning.engines.checks import (
    blame_inputs,
    blame_network,
    check_batch_sampler,
    check_class_weights,
    check_gradients,
    check_mixing,
    check_optimizer,
    check_options,
    check_outputs,
    check_share,
    check_trainer,
    warn_of_cut_steps,
    warn_of_emulation,
    warn_of_environment,
    warn_of_eval_mode,
    warn_of_probabilities,
    warn_of_unused_optimizer,
)
from fl_lightning.engines.client_callbacks import check_client_callbacks, set_up_callbacks
from fl_lightning.engines.dp_sgd_checks import check_dp_sgd, check_dp_sgd_options
from fl_lightning.engines.schedule_checks import check_lr_factors, check_schedule
from fl_lightning.engines.trainer import inference
from fl_lightning.engines.worker import Worker
from fl_lightning.evaluation.extra_metrics import check_measures
from fl_lightning.models import Mixed


def check_worker(worker: Worker, scaled: bool = False) -> None:
    """Check the options, the model, the optimizer and the metrics before the first round.

    Args:
        worker: The model, data and options of the run.
        scaled: Whether `round_lr_scheduler` scales the clients' learning rates.

    Raises:
        ConfigError: The trainer's options, the model or the optimizer do not fit.
    """
    objective = worker.data.objective
    if not objective.classes and (part := next(worker.algorithm.of_classes, None)):
        fix = "Use another method, such as FedAvg."
        raise ConfigError(f"algorithm: {part} compares classes, but {objective.no_classes}. {fix}")
    check_client_callbacks(worker.client_callbacks)
    with blame("trainer"):
        check_options(worker.training.trainer)
        trainer = worker.idle_trainer
    check_trainer(trainer, worker.training.trainer)
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(worker.device.type):
        fix = "Leave the context, and set trainer.precision"
        raise ConfigError(f"trainer: the run was started inside torch.inference_mode or torch.autocast. {fix}")
    warn_of_environment(worker.device)
    warn_of_emulation(worker.device, str(trainer.precision))
    if worker.training.dp_sgd:
        check_dp_sgd_options(worker.training, trainer, worker.data)
    if worker.training.batch_sampler == "balanced":
        check_batch_sampler(worker.data)
    if isinstance(worker.model, Mixed):
        worker.model.check_clients(len(worker.data.shards) + len(worker.data.held_out))
    for group in worker.groups:
        with blame_network(worker.model, group.group):
            check_network(group, scaled)


def check_network(worker: Worker, scaled: bool) -> None:
    """Check the network, and the options that depend on it: the optimizer, the schedules and the metrics."""
    trainer = worker.idle_trainer
    module = build_module(worker)
    set_up_callbacks(worker.client_callbacks, trainer, worker.modules.build())
    work, longest = works = local_works(worker)
    if not worker.group:
        warn_of_cut_steps(trainer, work.steps)
    if module.trains_itself:
        warn_of_unused_optimizer(module)
        check_own_training(worker, ClientTrainerView(trainer, trainer, work))
    check_schedules(worker, works, scaled)
    begin_trial_fit(worker, module, longest)
    batch = next(iter(worker.client_data.ordered_batches(None)))
    check_forward_pass(worker, module, *batch)
    if worker.training.dp_sgd:
        check_dp_sgd(worker.algorithm, module, batch)
        if reason := worker.obstacle_to_vmap:
            what = f"{class_name(module.backbone)} computes the gradients of single samples one by one"
            warnings.warn(f"dp_sgd: {what}, which is slow, because torch.vmap cannot ({reason}).", stacklevel=2)


def build_module(worker: Worker) -> ClientModule:
    """Return a new module of a client on the training device. Its class weights and mixing are checked."""
    objective, outputs = worker.data.objective, worker.data.data.num_classes
    with blame("model"):
        module = worker.modules.build().to(worker.device)
    warn_of_eval_mode(module)
    if worker.training.class_weights is not None:
        check_class_weights(worker.training.class_weights, objective, outputs, module)
    if worker.training.mixing:
        check_mixing(worker.training.mixing, worker.data, module)
    return module


def local_works(worker: Worker) -> tuple[LocalWork, LocalWork]:
    """Return how much the clients with the fewest and the most samples train, and check that it is at least a step."""
    sizes = worker.data.concatenate()[1]
    fewest, most = (max(1, math.ceil(int(n) / worker.training.batch_size)) for n in (sizes.min(), sizes.max()))
    check_share(worker.idle_trainer, fewest)
    return LocalWork.under(worker.idle_trainer, fewest), LocalWork.under(worker.idle_trainer, most)


def check_schedules(worker: Worker, works: Sequence[LocalWork], scaled: bool) -> None:
    """Check the optimizer, its learning rates for parts of the network, and its schedule."""
    module, trainer = worker.modules.build().to(worker.device), worker.idle_trainer
    with blame("optimizer"):
        if not module.has_own_optimizer:
            check_optimizer(module.optimizer_for(module.backbone.parameters()), trainer, worker.keeps_optimizer)
    check_lr_factors(module, frozenset(worker.fixed))
    check_schedule(module, trainer, works, scaled, worker.training.lr_scheduler_rounds)


def begin_trial_fit(worker: Worker, module: ClientModule, work: LocalWork) -> None:
    """Check a module's schedule and loss terms by beginning a fit of `work` steps, as if each class had a sample."""
    trainer, classes = worker.idle_trainer, worker.data.objective.stratum_count(worker.data.data.num_classes)
    with blame("lr_scheduler"):
        if not module.has_own_optimizer:
            module.configure_optimizers()
    with blame("algorithm"):
        module.context = FitContext(class_counts=torch.ones(classes))
        module.trainer = cast(L.Trainer, ClientTrainerView(trainer, trainer, work))
        for term in module.terms():
            term.begin(module)
        module.check_fit()


def check_forward_pass(worker: Worker, module: ClientModule, x: Any, y: torch.Tensor) -> None:
    """Check the outputs of a module's networks for a batch, their gradients, and the metrics computed from them."""
    objective, outputs = worker.data.objective, worker.data.data.num_classes
    entries = module.backbone.state_dict().keys()
    with blame_inputs(x), inference(module, worker.idle_trainer), torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # torch.compile reads it
        returned = {key: network(x) for key, network in module.networks.items()}
    for key, logits in returned.items():
        check_outputs(logits, len(x), objective.output_shape(y, outputs), worker.factory, key)
        if objective.classes:
            warn_of_probabilities(logits, key)
        check_gradients(logits, module, entries)
        check_measures(worker.scorer.measures, objective, logits.detach(), y)


def check_own_training(worker: Worker, trainer: Any) -> None:
    """Check a model that is a LightningModule, and try a step of its training and its optimizer."""
    module = worker.modules.build().to(worker.device).train()
    module.trainer, vars(module)["log"] = trainer, lambda *args, **options: None
    if worker.training.compile:
        raise ConfigError("compile: a LightningModule's own training step is not compiled. Set compile false.")
    for key in ("lr_scheduler", "lr_factors"):
        if getattr(worker.training, key):
            module.require_optimizer(key)
    check_lightning_model(module)
    batch = next(iter(worker.client_data.ordered_batches(None)))
    entries = module.backbone.state_dict().keys()
    with blame_inputs(batch[0]), trainer.precision_plugin.train_step_context():
        loss, _ = own_step(module, batch, 0)
    check_gradients(loss, module, entries)
    if module.has_own_optimizer:
        with blame("model"):
            check_optimizer(own_optimizer(module)[1], trainer, worker.keeps_optimizer)

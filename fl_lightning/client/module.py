"""`ClientModule`: the LightningModule that a client trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from fl_lightning.client.distributed import count_unrepeated, trainer_of
from fl_lightning.client.exported import described_module, rebuilt, rebuilt_objective, rebuilt_part
from fl_lightning.client.knowledge import SharedKnowledge, unique_knowledge
from fl_lightning.client.lightning_model import class_name, has_optimizer, own_optimizer, own_step, trains_itself
from fl_lightning.client.local_work import Interval, LocalWork
from fl_lightning.client.loss_term import FitContext, LossTerm, Step, objective_weight
from fl_lightning.client.losses import LossRecord, total_loss
from fl_lightning.client.mixing import HiddenTargets, Mixing
from fl_lightning.client.optimizers import (
    OptimizerFactory,
    SchedulerFactory,
    groups_by_factor,
    load_optimizer_tensors,
)
from fl_lightning.client.schedules import WarmupCosine
from fl_lightning.client.weights import WeightMemory, load_weights
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.flat_tensors import matching_parts
from fl_lightning.core.inputs import Batch, Inputs
from fl_lightning.core.message import Tensors
from fl_lightning.core.objectives import Classification, Objective
from fl_lightning.models import Backbone, with_encoder
from fl_lightning.models.base import tapped


class ClientModule(L.LightningModule):
    """The LightningModule that a client trains: a backbone, the objective's loss, and additional loss terms.

    It also works in a plain `Trainer.fit` without an orchestrator. There it logs `train_<term>` once an epoch, `val_*`
    and `test_*`.

    Args:
        backbone: The network. `Step.features` is filled if it has an `encoder` and a `head`. If it is a
            LightningModule, its own `training_step` computes the loss that terms are added to. In a checkpoint of
            `fl-lightning export` this is a description, from which `load_from_checkpoint(path)` builds the network.
        loss_terms: Terms added to the objective's loss, with unique names.
        knowledge: Shared knowledge in addition to that of the loss terms.
        optimizer: Builds the optimizer from the backbone's parameters. By default that of the LightningModule, if the
            backbone is one, or SGD with lr 0.01.
        lr_scheduler: Builds a scheduler from the optimizer.
        objective: Classification with cross-entropy by default. In an exported checkpoint this is a description.
        lr_scheduler_interval: Whether the scheduler is stepped once per local epoch or once per optimizer step.
        lr_factors: Factors on the learning rate by pattern of parameter names of the backbone; see `LocalTraining`.

    Attributes:
        context: The round and the client of the current fit. An experiment sets it before each fit.
        optimizer_state: Initial state of the fit's optimizer, from `optimizer_tensors`; empty for a fresh one.
        notes: Tensors that a method keeps within the client's round, written in `receive` or `prepare` and read in
            `prepare`, `upload` or `remember`. Training steps do not use them.
        loss_record: The losses of the current fit's training steps.
        mixing: Mixes the samples of training batches (MixUp, CutMix), or None.
        eval_layers: Names of the backbone's layers that were in eval mode on creation. `train` keeps them in eval mode.
        weight_memory: How the weights are stored, and whether an upload copies them.

    Raises:
        ConfigError: Two loss terms have one name, or a checkpoint names a network outside of this package.

    Example:
        >>> from fl_lightning.models import MLP
        >>> module = ClientModule(MLP(in_shape=(1, 8, 8), num_classes=10))
        >>> module(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        backbone: nn.Module | Mapping[str, Any],
        loss_terms: Sequence[LossTerm] = (),
        knowledge: Sequence[SharedKnowledge] = (),
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        objective: Objective | Mapping[str, Any] | None = None,
        lr_scheduler_interval: Interval = "epoch",
        lr_factors: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        loss_terms, optimizer, lr_scheduler = (
            rebuilt_part(key, value)
            for key, value in {"loss_terms": loss_terms, "optimizer": optimizer, "lr_scheduler": lr_scheduler}.items()
        )
        names = [term.name for term in loss_terms]
        if len(set(names)) < len(names):
            raise ConfigError(f"loss terms need different names, got {', '.join(names)}: list each of them once")
        self.backbone = backbone if isinstance(backbone, nn.Module) else rebuilt(backbone)
        self.eval_layers = tuple(name for name, layer in self.backbone.named_modules() if not layer.training)
        self.loss_terms = nn.ModuleList(loss_terms)
        self.knowledge = nn.ModuleList(unique_knowledge([*(p for t in loss_terms for p in t.knowledge), *knowledge]))
        self.optimizer_factory = optimizer
        self.scheduler_factory = lr_scheduler
        self.lr_scheduler_interval: Interval = lr_scheduler_interval
        self.lr_factors = dict(lr_factors or {})
        self.mixing: Mixing | None = None
        self.context = FitContext()
        self.objective = Classification()
        if isinstance(objective, Mapping):
            self.objective = rebuilt_objective(objective)
        elif objective:
            self.objective = objective
        self.optimizer_state: Tensors = {}
        self.notes: dict[str, Tensors] = {}
        self.weight_memory = WeightMemory()
        self.loss_record = LossRecord()

    def train(self, mode: bool = True) -> ClientModule:
        """Set train or eval mode, as in `nn.Module`. The backbone's `eval_layers` stay in eval mode."""
        super().train(mode)
        if self.eval_layers:
            for name, layer in self.backbone.named_modules():
                layer.training &= name not in self.eval_layers
        return self

    def forward(self, x: Tensor | Inputs) -> Tensor:
        """Return the backbone's outputs for a batch of inputs, such as logits of shape `(B, C)`."""
        return cast(Tensor, self.backbone(x))

    @property
    def encoder(self) -> nn.Module:
        """The backbone's encoder, which maps inputs to features.

        Raises:
            ConfigError: The backbone's encoder and head cannot be called separately.
        """
        return with_encoder(self.backbone).encoder

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The networks that the client trains, by the config key of each: the backbone, and others of the method."""
        return {"model": self.backbone}

    @property
    def objective(self) -> Objective:
        """The objective (loss and metrics). Its loss is weighted if the fit's context has `class_weights`."""
        weights = self.context.class_weights
        return self._objective if weights is None else self._objective.weighted(weights)

    @objective.setter
    def objective(self, objective: Objective) -> None:
        self._objective = objective

    @property
    def unweighted_objective(self) -> Objective:
        """The objective without `class_weights`."""
        return self._objective

    def class_counts_for(self, term: LossTerm) -> Tensor:
        """Return the number of the client's training samples in each class, `(C,)`, for a loss term that needs it.

        The tensor is on the module's device.

        Args:
            term: The loss term that needs them.

        Raises:
            ConfigError: The context has no `class_counts`. The message names the term.
        """
        counts = self.context.class_counts
        if counts is None:
            fix = "Set module.context = FitContext(class_counts=...) to the client's training samples per class."
            raise ConfigError(f"{type(term).__name__}: class_counts is missing. {fix}")
        return counts.to(self.device)

    def load_weights(self, weights: Tensors) -> None:
        """Load received weights into the backbone. Entries that were not received do not change.

        Raises:
            ValueError: An entry is not in the backbone's state dict.
        """
        own = self.weight_memory.flat
        if own is None or own.keys() != weights.keys():
            load_weights(self.backbone, weights)
            return
        with torch.no_grad():
            for ours, received in matching_parts(own, weights):
                ours.copy_(received)

    def check_fit(self) -> None:
        """Check that the method works with the fit's `Trainer` options. Called before round 1 and before each fit.

        Before round 1, `trainer.num_training_batches` is the number of steps per epoch of the client with most samples.

        Raises:
            ConfigError: The method does not work with an option. The message names it.
        """

    def on_fit_start(self) -> None:
        """Check the `Trainer` options, reset the recorded losses, and call `begin` of each loss term."""
        self.check_fit()
        self.loss_record = LossRecord()
        for term in self.terms():
            term.begin(self)

    def on_train_epoch_start(self) -> None:
        """Call `begin_epoch` of each loss term at the start of an epoch."""
        for term in self.terms():
            term.begin_epoch(self)

    def terms(self) -> Iterator[LossTerm]:
        """Return an iterator over the module's loss terms, whether or not they are active."""
        return cast(Iterator[LossTerm], iter(self.loss_terms))

    @property
    def active_terms(self) -> list[LossTerm]:
        """The loss terms that are computed in the current fit."""
        return [term for term in self.terms() if term.active]

    def pieces(self) -> Iterator[SharedKnowledge]:
        """Return an iterator over the module's `SharedKnowledge` objects: tensors exchanged besides the weights."""
        return cast(Iterator[SharedKnowledge], iter(self.knowledge))

    @property
    def trains_itself(self) -> bool:
        """Whether the backbone is a LightningModule with a `training_step` of its own, which computes the loss."""
        return trains_itself(self.backbone)

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the optimizer comes from `configure_optimizers` of the user's LightningModule (the backbone).

        An optimizer in the config takes precedence.
        """
        return self.optimizer_factory is None and has_optimizer(self.backbone)

    def step(self, batch: Batch, batch_idx: int = 0) -> Step:
        """Run the backbone on a batch. Return a `Step`: logits, features and other tensors that loss terms read.

        In train mode, a backbone that is a LightningModule also computes the loss, in the same forward pass.
        """
        x, y = batch
        backbone, active = self.backbone, self.active_terms
        names = [name for term in active for name in term.taps]
        tapping: AbstractContextManager[Tensors] = tapped(backbone, names) if names else nullcontext({})
        loss, outputs = None, None
        with tapping as taps:
            if self.training and trains_itself(backbone):
                loss, outputs = own_step(self, batch, batch_idx)
                if not (active or any(piece.observes for piece in self.pieces())):
                    outputs = outputs or (None, loss.new_empty(0))  # nothing reads them
            if outputs is None:
                outputs = backbone.features_and_logits(x) if isinstance(backbone, Backbone) else (None, self(x))
        features, logits = outputs
        return Step(logits, y, features, x, backbone, taps, loss)

    def losses(self, step: Step) -> dict[str, Tensor]:
        """Return the losses of a training step by name: the objective's, such as `ce`, and each active loss term's.

        The objective's loss is multiplied by `objective_weight` of the active terms, and left out if that is 0.
        """
        terms = self.active_terms
        losses: dict[str, Tensor] = {}
        if weight := objective_weight(terms):
            loss = self.objective.loss(step.logits, step.targets) if step.loss is None else step.loss
            losses[self._loss_name] = loss if weight == 1 else weight * loss
        return losses | {term.name: term(step) for term in terms}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the loss of a batch: the objective's loss plus the active loss terms. Record each of these.

        With `mixing`, the samples of the batch are mixed first.
        """
        if self.mixing:
            return self._mixed_step(self.mixing, batch, batch_idx)
        step = self.step(batch, batch_idx)
        losses = self.losses(step)
        self.record_step(step, losses)
        return total_loss(losses)

    def _mixed_step(self, mixing: Mixing, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the loss of a batch of mixed samples: `λ loss(y_i) + (1 - λ) loss(y_j)` plus the loss terms."""
        x, y = batch
        mixture = mixing(x)
        step = self.step((mixture.x, y), batch_idx)
        own, other = (self.objective.loss(step.logits, targets) for targets in (y, mixture.partners(y)))
        mixed = mixture.share * own + (1 - mixture.share) * other
        losses = self.losses(replace(step, loss=mixed, targets=cast(Tensor, HiddenTargets())))
        self.record_step(step, losses)
        return total_loss(losses)

    def record_step(self, step: Step, losses: dict[str, Tensor]) -> None:
        """Record the losses of a training step, and call `observe` of each `SharedKnowledge` with `observes=True`."""
        self.loss_record.add(losses)
        for piece in self.pieces():
            if piece.observes:
                piece.observe(step, self.current_epoch)

    def on_train_epoch_end(self) -> None:
        """Check that the epoch's training losses are finite, and log their means over the steps of all devices.

        An experiment logs them for client callbacks only. Otherwise, losses on a GPU are checked at the end of the fit.
        """
        if self.context.logs_losses or self.trainer.loggers:
            means = {f"train_{name}": value for name, value in self.loss_record.epoch_means().items()}
            self.log_dict(means, sync_dist=True)  # all devices take the same number of steps
        else:
            self.loss_record.end_epoch()

    @property
    def loss_names(self) -> list[str]:
        """Names of the losses that `losses` returns: the objective's and those of the active loss terms."""
        terms = self.active_terms
        objective = [self._loss_name] if objective_weight(terms) else []
        return [*objective, *(term.name for term in terms)]

    @property
    def _loss_name(self) -> str:
        return "training_step" if self.trains_itself else self.objective.term

    @property
    def steps(self) -> int:
        """Number of training steps (batches) of the current fit so far."""
        return self.loss_record.steps

    def train_losses(self) -> dict[str, float]:
        """Return the mean of each training loss over the steps of the fit, and the sum of these means as `loss`.

        With several devices, these are the steps of this process, and the logged `train_loss` is the mean of all.
        """
        return self.loss_record.means()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the objective's metrics on a validation batch, such as `val_loss` and `val_acc`."""
        self._log_evaluation("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the objective's metrics on a test batch, such as `test_loss` and `test_acc`."""
        self._log_evaluation("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the outputs for a batch of inputs, or for a batch `(x, y)` as in training."""
        return cast(Tensor, self(batch[0] if isinstance(batch, tuple | list) else batch))

    def _log_evaluation(self, stage: str, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        x, y = batch
        outputs, devices = self(x).float(), 1
        if (trainer := trainer_of(self)) and trainer.world_size > 1:
            devices = trainer.world_size
            loaders = getattr(trainer, f"{stage}_dataloaders")
            y = y[: count_unrepeated(loaders, batch_idx, len(y), dataloader_idx)]
        sums, units = self.objective.sums(outputs[: len(y)], y), int(self.objective.units(y))
        means = {f"{stage}_{name}": value / max(1, units) for name, value in sums.items()}
        # Lightning divides the sum of batch sizes by the number of devices, and rounds it down
        self.log_dict(means, batch_size=units * devices, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Log metrics of the whole validation set that are no means, such as `val_perplexity`."""
        self._log_derived_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Log metrics of the whole test set that are no means, such as `test_perplexity`."""
        self._log_derived_metrics("test")

    def _log_derived_metrics(self, stage: str) -> None:
        if type(self.objective).metrics is Objective.metrics:
            return
        logged, start = self.trainer.callback_metrics, f"{stage}_"
        means = {name.removeprefix(start): float(value) for name, value in logged.items() if name.startswith(start)}
        derived = {name: value for name, value in self.objective.metrics(means).items() if name not in means}
        self.log_dict({f"{start}{name}": value for name, value in derived.items()})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the constructor arguments to a checkpoint of a plain `Trainer.fit`, for `load_from_checkpoint(path)`."""
        key = self.CHECKPOINT_HYPER_PARAMS_KEY
        checkpoint[key] = described_module(self) | checkpoint.get(key, {})

    def configure_optimizers(self) -> Any:
        """Return the optimizer for this round, with its learning-rate scheduler if one is configured.

        Without an optimizer of the user's own, it trains the parameters that `trainables` returns.
        """
        if self.has_own_optimizer and type(self).trainables is ClientModule.trainables:
            configured, optimizer = own_optimizer(self)
        else:
            configured = optimizer = self.optimizer_for(self.trainables())
        if self.optimizer_state:
            load_optimizer_tensors(optimizer, self.optimizer_state)
        if self.scheduler_factory is None:
            return configured
        return [optimizer], [{"scheduler": self.schedule_for(optimizer), "interval": self.lr_scheduler_interval}]

    def schedule_for(self, optimizer: torch.optim.Optimizer) -> Any:
        """Build the learning-rate scheduler of an optimizer for one fit; None if no scheduler is configured.

        A `WarmupCosine` without `steps` gets the length of the fit, times the number of rounds that it spans. If there
        are several, the schedule is stepped to the start of this round.
        """
        if self.scheduler_factory is None:
            return None
        schedule, starts = self.scheduler_factory(optimizer), self.context.schedule_starts
        needs_length = isinstance(schedule, WarmupCosine) and schedule.steps is None
        if (needs_length or starts.rounds > 1) and (trainer := trainer_of(self)):
            length = LocalWork.of(trainer).length(self.lr_scheduler_interval)
            if needs_length:
                schedule.set_length(starts.rounds * length)
            starts.advance(schedule, optimizer, self.context.round, length)
        return schedule

    def step_schedule(self, schedule: Any, after: Interval) -> None:
        """Step a scheduler of `schedule_for`, or None, after an epoch or an optimizer step, if that is its interval.

        A method whose module trains a second model calls it after each step and each epoch of that model.
        """
        if schedule and after == self.lr_scheduler_interval:
            schedule.step()

    def trainables(self) -> Iterable[Any]:
        """Return the parameters or parameter groups that the fit's optimizer trains; by default the backbone's."""
        return self.backbone.parameters()

    def optimizer_for(self, parameters: Iterable[Any], of: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build an optimizer for these parameters with the client's optimizer options and the round's learning rate.

        Args:
            parameters: The parameters or parameter groups.
            of: The network that they belong to, in which `lr_factors` looks up their names. By default the backbone.

        Raises:
            ConfigError: No optimizer was given, and that of the backbone is for all of its parameters. Or `lr_factors`
                is set, and a parameter is none of the network's.
        """
        self.require_optimizer("algorithm")
        groups: dict[float, list[nn.Parameter]] = {}
        if self.lr_factors:
            groups = groups_by_factor(parameters, self.backbone if of is None else of, self.lr_factors)
            parameters = [{"params": group} for group in groups.values()]
        optimizer = (
            self.optimizer_factory(parameters) if self.optimizer_factory else torch.optim.SGD(parameters, lr=0.01)
        )
        for group, factor in zip(optimizer.param_groups, groups, strict=True) if groups else ():
            group["lr"] = group["lr"] * factor
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.context.lr_scale  # not in place: a tensor belongs to all groups
        return optimizer

    def require_optimizer(self, key: str) -> None:
        """Require an optimizer from the config: raise an error if the fit uses that of the user's LightningModule.

        Args:
            key: The config key that requires an optimizer from the config.
        """
        if self.has_own_optimizer:
            what = f"needs an optimizer in the config in place of {class_name(self.backbone)}'s own"
            raise ConfigError(f"{key}: {what}. Name one, such as --optimizer SGD --optimizer.lr 0.1")

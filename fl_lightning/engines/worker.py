"""Carry out a task: the download of a client in, its upload out, by one `Trainer.fit`.

A `Task` and a `Worker` are picklable and hold all there is to know, so that an engine can run them in any process on
any machine and get the same bytes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.algorithms.base import Algorithm, OptimizerState
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import OptimizerFactory, SchedulerFactory, optimizer_tensors
from fl_lightning.client.weights import load_weights, loads_plainly, to_cpu
from fl_lightning.core.errors import ConfigError, NonFiniteError, blame
from fl_lightning.core.message import Tensors
from fl_lightning.core.seeding import Stream, derive, generator, seed_everything
from fl_lightning.core.state import State, first_non_finite
from fl_lightning.core.task import Result, Score, Task, failed
from fl_lightning.data import FederatedData, LoadedData
from fl_lightning.data.loaders import Batches, ClientDataModule, ReadyBatches
from fl_lightning.engines.checks import (
    check_optimizer,
    check_options,
    check_schedule,
    check_share,
    check_trainer,
    most_epochs,
    warn_of_environment,
    warn_of_ignored_training,
)
from fl_lightning.engines.client_callbacks import check_client_callbacks, logged, set_up
from fl_lightning.engines.device import Sent, channels_last, compile_backbone, has_doubles, resident
from fl_lightning.engines.module_copier import ModuleCopier
from fl_lightning.engines.trainer import quiet_lightning, quiet_trainer
from fl_lightning.evaluation.evaluation import evaluate, evaluate_each
from fl_lightning.evaluation.measures import Measure, measures_of, tried
from fl_lightning.models import ModelFactory

Fit = Callable[[ClientModule, Task], torch.optim.Optimizer]


@dataclass
class Worker:
    """What all tasks of a run have in common. `run` carries out one task.

    Args:
        seed: The run's seed.
        algorithm: The method.
        model: Builds the backbone.
        data: The dataset and who holds what.
        batch_size: Samples a training batch.
        trainer: Keyword arguments of Lightning's `Trainer`; one local epoch unless it says otherwise.
        optimizer: Builds each fit's optimizer.
        lr_scheduler: Builds each fit's scheduler, or None.
        optimizer_state: Whether a fit's optimizer starts `fresh`, or goes on from the client's last round (`kept`);
            as the algorithm says if None.
        compile: Compile the backbone, once for all clients and rounds.
        channels_last: Lay images and convolutions out with their channels side by side.
        metrics: Metrics beside what the objective measures, as `Evaluation.metrics` names them.
        positive_class: Of two classes, the one that binary metrics count as positive.
        client_callbacks: Lightning's callbacks, of which each fit gets copies.
        eval_batch_size: Samples a batch where nothing is trained; by default 128 on a CPU, whose caches hold no
            more of a convolution's activations, and 512 elsewhere.
    """

    seed: int
    algorithm: Algorithm
    model: ModelFactory
    data: FederatedData
    batch_size: int = 64
    trainer: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    optimizer_state: OptimizerState | None = None
    compile: bool = False
    channels_last: bool = False
    metrics: Sequence[str | dict[str, Any]] = ()
    positive_class: int = 1
    client_callbacks: Sequence[Callback] = ()
    eval_batch_size: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the constructor arguments. Everything else is built again in the receiving process."""
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    @cached_property
    def template(self) -> ClientModule:
        """The client module with the run's initial weights. Every task trains a copy."""
        seed_everything(self.seed, Stream.INITIAL_WEIGHTS)
        loaded = self.data.data
        backbone = self.model(in_shape=loaded.in_shape, num_classes=loaded.num_classes)
        frozen = {id(parameter): parameter for parameter in backbone.parameters() if not parameter.requires_grad}
        module = self.algorithm.client_module(backbone, self.optimizer, self.lr_scheduler)
        # a method may put a parameter of its own in a frozen one's place
        self.algorithm.fixed = frozenset(n for n, p in module.backbone.named_parameters() if id(p) in frozen)
        module.objective = self.data.objective
        return module

    @cached_property
    def measures(self) -> list[Measure]:
        """Metrics that are computed in addition to those of the objective."""
        return measures_of(self.metrics, self.data.objective, self.data.data.num_classes, self.positive_class)

    @cached_property
    def score_names(self) -> list[str]:
        """Names of the metrics of a model."""
        loaded, objective = self.data.data, self.data.objective
        sums = objective.sums(torch.zeros(1, loaded.num_classes), loaded.y_train[:1])
        return [*sums, *(measure.name for measure in self.measures)]

    @cached_property
    def min_batch(self) -> int:
        """Smallest allowed size of a last training batch: BatchNorm needs two samples, some methods full batches."""
        if self.algorithm.drop_last:
            return self.batch_size
        return 2 if any(isinstance(module, _BatchNorm) for module in self.template.modules()) else 1

    @cached_property
    def setup(self) -> L.Trainer:
        """A trainer that is never fitted; it provides the device and the precision."""
        return self._trainer()

    def _trainer(self) -> L.Trainer:
        return quiet_trainer(self.trainer, self.heard, self.client_callbacks)

    @cached_property
    def heard(self) -> set[str]:
        """Warnings of fits that this process has already shown."""
        return set()

    @property
    def device(self) -> torch.device:
        """The device on which clients are trained."""
        return self.setup.strategy.root_device

    def check(self) -> None:
        """Check everything that tasks depend on, before the first round.

        Raises:
            ConfigError: The trainer's options, the model or the optimizer do not fit.
        """
        objective, outputs = self.data.objective, self.data.data.num_classes
        if not objective.classes and (part := next(self.algorithm.of_classes, None)):
            mend = "take one that does not, as FedAvg"
            raise ConfigError(f"algorithm: {part} compares classes, and {objective.no_classes}; {mend}")
        measures = self.measures
        check_client_callbacks(self.client_callbacks)
        with blame("trainer"):
            check_options(self.trainer)
            trainer = self.setup
        check_trainer(trainer, self.trainer)
        warn_of_environment(self.device)
        with blame("model"):
            module = self.module().to(self.device)
        warn_of_ignored_training(module.backbone)
        set_up(self.client_callbacks, trainer, self.module())
        with blame("optimizer"):
            spare = self.module().to(self.device)
            check_optimizer(spare.optimizer_for(spare.backbone.parameters()), trainer, self.keeps_optimizer)
        fewest = max(1, math.ceil(int(self.data.concatenate()[1].min()) / self.batch_size))
        check_share(trainer, fewest)
        check_schedule(module, most_epochs(trainer, fewest))
        with blame("lr_scheduler"):
            module.configure_optimizers()
        with blame("algorithm"):
            module.class_counts = torch.ones(objective.stratum_count(outputs))
            module.trainer = trainer
            for term in module.terms():
                term.begin(module)
            module.check_fit()
        with blame("model"), self.inference(module):
            x, y = next(iter(self._ordered(None)))
            logits = module(x)
        if logits.shape != (len(x), outputs):
            what = "classes; it needs one number a class" if objective.classes else "numbers to be put out"
            raise ConfigError(f"model: puts out {tuple(logits.shape[1:])} a sample, the dataset has {outputs} {what}")
        tried(measures, objective, logits, y)

    @cached_property
    def _blueprint(self) -> ModuleCopier[ClientModule]:
        module = self.setup.precision_plugin.convert_module(copy.deepcopy(self.template))
        assert isinstance(module, ClientModule)
        module = module.to(self._made_on)
        return ModuleCopier(module.to(memory_format=torch.channels_last) if self.channels_last else module)

    def module(self, blank: Iterable[str] = ()) -> ClientModule:
        """Build a client module with the run's initial weights, in the trainer's precision.

        Args:
            blank: Entries of the network that will be written over, and need no weights.
        """
        module = self._blueprint.build(f"backbone.{name}" for name in blank)
        if self.compile:
            compile_backbone(module.backbone)
        return module

    @cached_property
    def _stored(self) -> LoadedData:
        """The dataset from which batches are taken, on the training device if it fits there."""
        return resident(self.data.data, self.device)

    def prepare(self, x: Tensor) -> Tensor:
        """Convert a stored batch to the network's input."""
        x = self.data.data.prepare(x)
        return channels_last(x) if self.channels_last else x

    def ready_to_train(self, x: Tensor) -> Tensor:
        """Convert a stored batch on the training device to the input of a training step: prepared and augmented."""
        convert = self.setup.precision_plugin.convert_input
        x, augment = self.prepare(convert(x)), self.data.data.augment  # `Trainer.fit` too converts a batch first
        return convert(augment(x) if augment else x)

    def run(self, task: Task, fit: Fit | None = None) -> Result:
        """Carry out a task. An error becomes part of the result, with the client, the round and its cause.

        Args:
            task: The task.
            fit: Trains a client's module and returns its optimizer; by a `Trainer` of its own if not given.
        """
        try:
            return self._run(task, fit or self._fit)
        except BaseException as error:
            return failed(task, error)

    def shared_module(self, weights: Tensors) -> ClientModule:
        """Build a client module with shared weights; other entries keep their initial values."""
        module = self.module()
        load_weights(module.backbone, weights)
        return module

    def score(self, weights: Tensors) -> Score:
        """Evaluate shared weights on the global test set."""
        module = self.shared_module(weights)
        with self.inference(module):
            return self._scored_globally(module)

    def _scored_globally(self, module: ClientModule) -> Score:
        own = self.data.data.evaluate
        batches = self.test_batches()
        return own(module, batches) if own else evaluate(module, batches, self.data.objective, self.measures)

    def local_scores(self, module: ClientModule, clients: Sequence[int]) -> list[Score | None]:
        """Evaluate one module on the test splits of these clients, in common batches; None for an empty split."""
        tests = [self.data.shards[client].test for client in clients]
        sizes = [len(test) for test in tests]
        return evaluate_each(module, self._ordered(torch.cat(tests)), sizes, self.data.objective, self.measures)

    def personal(self, task: Task) -> ClientModule:
        """Return the client's module as it is evaluated before it trains on a task."""
        module = self.received(task)
        with self.inference(module):
            self.algorithm.personalize(module, self.training_batches(task.client))
        return module

    def received(self, task: Task) -> ClientModule:
        """Return the client's own module at the start of a task. torch's random state is then the client's."""
        download = self._sent(task.download) if self._made_on.type != "cpu" else task.download
        # made before seeding: the first module of a process draws the initial weights
        module = self.module(download.section("model") if self._writes_over else ())
        seed_everything(self.seed, Stream.TRAINING, task.round, task.client)
        module.round, module.lr_scale, module.batch_size = task.round, task.lr_scale, self.batch_size
        module.stays = self._stays
        objective, data = self.data.objective, self.data.data
        strata = objective.strata(data.y_train[self.held(task.client)[0]])
        module.class_counts = torch.bincount(strata, minlength=objective.stratum_count(data.num_classes))
        module.optimizer_state = task.memory.get("optimizer", {})
        self.algorithm.receive(module, download, task.memory)
        if task.round and type(self.algorithm).prepare is not Algorithm.prepare:
            self._prepare(module, task)
        return module

    @cached_property
    def _made_on(self) -> torch.device:
        """The device on which modules are built: the training device if the method only loads downloads."""
        return self.device if self.algorithm.receives_by_loading else torch.device("cpu")

    @cached_property
    def _sent(self) -> Sent:
        return Sent(self.device)

    @cached_property
    def _stays(self) -> bool:
        """Whether uploaded weights stay on the training device, where they are averaged."""
        return self.algorithm.only_averages and has_doubles(self.device)

    @cached_property
    def _writes_over(self) -> bool:
        """Whether received weights overwrite the initial ones before anything reads those."""
        return self.algorithm.receives_by_loading and loads_plainly(self.template.backbone)

    def _prepare(self, module: ClientModule, task: Task) -> None:
        seed_everything(self.seed, Stream.PREPARATION, task.round, task.client)
        train, validation = (self._ordered(index) for index in self.held(task.client))
        with self.inference(module), torch.enable_grad():
            self.algorithm.prepare(module, train, validation)
        seed_everything(self.seed, Stream.TRAINING, task.round, task.client)

    def held(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the samples that a client trains on and those that it holds out for its method, both ascending."""
        index = self.data.shards[client].train
        back = len(index) - self.samples(client)
        if not back:
            return index, index[:0]
        order = torch.from_numpy(generator(self.seed, Stream.VALIDATION, client).permutation(len(index)))
        return index[order[back:].sort().values], index[order[:back].sort().values]

    def samples(self, client: int) -> int:
        """Return the number of training samples of a client, `N_k`."""
        dealt = len(self.data.shards[client].train)
        return dealt - round(self.algorithm.validation * dealt)

    def _run(self, task: Task, fit: Fit) -> Result:
        module = self.received(task)
        optimizer = fit(module, task) if task.fit else None
        module.spent = self.algorithm.uploads_by_copying and not (task.evaluate or task.evaluate_globally)
        return self.finished(task, module, optimizer_tensors(optimizer) if optimizer and self.keeps_optimizer else {})

    def finished(self, task: Task, module: ClientModule, optimizer_state: Tensors) -> Result:
        """Return the result of a task after its training, if any.

        Args:
            task: The task.
            module: The client's module, trained.
            optimizer_state: What the client's optimizer ended with, as `optimizer_tensors` gives it, where it is kept.

        Raises:
            NonFiniteError: The upload holds NaN or Inf.
        """
        samples, classes = self.samples(task.client), self.data.data.num_classes
        upload, memory, local, on_global = None, task.memory, None, None
        with self.inference(module):
            if task.upload:
                upload = self.algorithm.upload(module, self.training_batches(task.client), samples, classes)
                memory = self.algorithm.remember(module, upload)
                if optimizer_state:
                    memory = memory | to_cpu({"optimizer": optimizer_state})
                memory = memory if self.device.type == "cpu" else on_cpu(memory)
            if task.evaluate or task.evaluate_globally:
                self.algorithm.personalize(module, self.training_batches(task.client))
            if task.evaluate:
                (local,) = self.local_scores(module, [task.client])
            if task.evaluate_globally:
                on_global = self._scored_globally(module)
        if upload and (bad := first_non_finite(upload.tensors)):
            raise NonFiniteError(f"the upload's {bad!r} is NaN or Inf: lower the learning rate")
        return Result(
            task.client,
            task.download.nbytes,
            upload,
            memory,
            module.train_losses() if task.fit else {},
            module.logged,
            local,
            on_global,
        )

    @property
    def keeps_optimizer(self) -> bool:
        """Whether clients' optimizer states are kept between rounds."""
        return (self.optimizer_state or self.algorithm.optimizer_state) == "kept"

    def batches(self, task: Task) -> Batches:
        """Return a task's training batches as stored, in the client's order for this round.

        Raises:
            ConfigError: The client has too few samples for a batch.
        """
        data, index = self._stored, self.held(task.client)[0]
        seed = derive(self.seed, Stream.BATCHES, task.round, task.client)
        batches = data.cut(data.x_train, data.y_train, index, self.batch_size, seed, self.min_batch)
        if not len(batches):
            of, mend = "a model with BatchNorm", "a model without it"
            if self.algorithm.drop_last:
                of, mend = "a method that drops incomplete ones (algorithm.preset)", "a smaller batch_size"
            raise ConfigError(
                f"{len(index)} training sample(s) make no batch for {of}, "
                f"which needs {self.min_batch}; use {mend}, or a larger scenario.partition.min_samples"
            )
        return batches

    def _fit(self, module: ClientModule, task: Task) -> torch.optim.Optimizer:
        """Train a module and return its optimizer."""
        batches = self.batches(task)
        module.train()
        trainer = self._trainer()
        with quiet_lightning(self.heard):
            trainer.fit(module, datamodule=ClientDataModule(batches, self.ready_to_train))
        if self.client_callbacks and not module.train_losses():
            raise ConfigError("the fit was over before its first step, ended by one of client_callbacks")
        module.logged = logged(trainer, module.train_losses())
        return trainer.optimizers[0]

    @contextmanager
    def inference(self, module: ClientModule) -> Iterator[None]:
        """Put the module into eval mode on the trainer's device, in its precision, without gradients."""
        trainer = self.setup
        with ExitStack() as stack:
            if self.device.type != "cpu":  # where it is already; looking at every part takes time
                module.to(self.device)
            module.eval()
            stack.enter_context(torch.no_grad())
            stack.enter_context(trainer.precision_plugin.forward_context())
            yield

    def training_batches(self, client: int) -> ReadyBatches:
        """Return a client's training data in fixed order, prepared but not augmented, on the trainer's device."""
        return self._ordered(self.held(client)[0])

    def own_test_batches(self, client: int) -> ReadyBatches:
        """Return a client's own test split, prepared, on the trainer's device."""
        return self._ordered(self.data.shards[client].test)

    def _ordered(self, index: Tensor | None) -> ReadyBatches:
        return ReadyBatches(Batches(self._stored.x_train, self._stored.y_train, index, self._eval_batch), self._ready)

    def test_batches(self) -> ReadyBatches:
        """Return the global test set, prepared, on the trainer's device."""
        return ReadyBatches(Batches(self._stored.x_test, self._stored.y_test, None, self._eval_batch), self._ready)

    @property
    def _eval_batch(self) -> int:
        return self.eval_batch_size or (128 if self.device.type == "cpu" else 512)

    def _ready(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.setup.precision_plugin.convert_input(self.prepare(x.to(self.device))), y.to(self.device)


def on_cpu(memory: State) -> State:
    """Return what a client keeps, on the CPU. Only participants have anything on a GPU."""
    return {name: {key: value.cpu() for key, value in tensors.items()} for name, tensors in memory.items()}

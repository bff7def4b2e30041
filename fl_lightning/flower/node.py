"""The program on a client's own machine, which answers the server's messages with the client's data and state."""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.client.module import ClientModule
from fl_lightning.compression.codec import COMPRESSED
from fl_lightning.core.errors import ConfigError, describe_error
from fl_lightning.core.message import Message
from fl_lightning.core.task import Result
from fl_lightning.data import Dataset, FederatedData
from fl_lightning.data.federated_data import sha256
from fl_lightning.data.remote import are_class_names, describe, describe_differences
from fl_lightning.engines.flower import describe_client
from fl_lightning.engines.flower_checks import BadMessage, Contents, quote
from fl_lightning.engines.flower_records import (
    MEGABYTE,
    pack_failure,
    pack_result,
    unpack,
    unpack_task,
)
from fl_lightning.engines.worker import Worker
from fl_lightning.flower.client_states import ClientStates
from fl_lightning.flower.own_data import load_own
from fl_lightning.orchestrator import FederatedOrchestrator

if TYPE_CHECKING:
    from flwr.app import RecordDict

RUN = re.compile(r"[0-9a-f]{32}")
"""Matches the id of a run, after which its folder is named."""


@dataclass
class Site:
    """The settings of a client on its own machine, as in the file that `fl-lightning node` reads.

    Args:
        client: The client's id, from 0. Each machine has another.
        dataset: The client's data.
        local_test: Share of the training samples that the client is tested on, in [0, 1). By default it is tested on
            the dataset's test samples.
        max_megabytes: Largest message that is accepted from the server.
        sends: Names of what a method may upload or publish from this machine, such as `model`. By default everything.
            The number of training samples, mean losses, logged metrics and test metrics are always sent.
        allow: SHA-256 digests of experiments that may name classes outside of this package. Others may name only its
            classes.
        export: File to which this client's model is written at the end of each run, in the format of its ending:
            `.onnx`, `.ts`, `.pt` or `.ckpt`. By default it is not written.
        classes: Names of the classes of all clients, in the same order for each of them. The client may have no sample
            of some of them. By default the classes of its dataset.
    """

    client: int
    dataset: Dataset
    local_test: float | None = None
    max_megabytes: float = 1024
    sends: list[str] | None = None
    allow: list[str] = field(default_factory=list)
    export: str | None = None
    classes: list[str] | None = None

    def __post_init__(self) -> None:
        if self.client < 0:
            raise ConfigError(f"client: {self.client} is below 0. Clients are numbered from 0")
        if self.local_test is not None and not 0 <= self.local_test < 1:
            raise ConfigError(f"local_test: {self.local_test} is outside [0, 1). Give a share")
        if self.classes is not None:
            if not are_class_names(self.classes, len(self.classes)):
                raise ConfigError("classes: a name is empty, too long or occurs twice. Give each class another name")
            self.dataset.known_classes = self.classes


class Node:
    """Answers the messages of a federation's server on a client's own machine.

    The node builds an experiment from the config in a task, which may name only classes of this package, and trains
    the client with its own data. The state that the client keeps between its rounds is written to this machine's disk.

    Args:
        site: The client and its data.
        folder: Folder of the client's states.
        build: Builds an experiment from the text of its config. The second argument is whether the config may name
            classes outside of this package.
        write: Writes the client's model at the end of a run, to the file that the site names. Its arguments are the
            module, the client's data, the text of the experiment's config and the number of the client's network.

    Raises:
        ConfigError: The data cannot be loaded.
    """

    def __init__(
        self,
        site: Site,
        folder: Path,
        build: Callable[[str, bool], FederatedOrchestrator],
        write: Callable[[ClientModule, FederatedData, str, int], None] = lambda *_: None,
    ) -> None:
        self.site, self.folder, self.build, self.write = site, folder, build, write
        self.data: FederatedData = load_own(site.dataset, site.client, site.local_test)
        shard, loaded = self.data.shards[site.client], self.data.data
        digest = sha256([loaded.x_train, loaded.y_train, shard.train, shard.test])  # type: ignore[list-item]
        self.description = describe(loaded, shard, digest)
        self._worker: Worker | None = None
        self._context = copy_context()
        self._states: ClientStates | None = None
        self._experiment = self._run = ""

    def answer(self, records: RecordDict) -> RecordDict:
        """Return the answer to a message of the server. An error is part of the answer, in one line."""
        try:
            contents = unpack(records, self.site.max_megabytes * MEGABYTE)
            kind = contents.values.get("kind")
            if kind == "describe":
                return describe_client(self.site.client, self.description)
            if kind == "task":
                return self._run_task(contents)
            raise BadMessage(f"the message is of an unknown kind: {quote(kind)}")
        except Exception as error:
            return pack_failure(describe_error(error))

    def _run_task(self, contents: Contents) -> RecordDict:
        """Run a task of the server, such as a fit, and return its result. Store the new client state after a fit.

        If the task says `keep_model`, only write the client's model to the site's file.
        """
        values = contents.values
        self._check_task(values)
        worker, states = self._open(values["experiment"], values["run"])
        if values["fixed"] != worker.for_client(self.site.client).fixed_digest:
            fix = "Give this machine the same files, such as those of the pretrained model"
            raise BadMessage(f"model: the frozen part of the network is unlike the server's. {fix}")
        task = unpack_task(contents, states.read(values["state_round"]))
        if task.keep_model:
            uncompiled = replace(worker, training=replace(worker.training, compile=False))
            own = self._context.run(uncompiled.for_client, self.site.client)
            module = self._context.run(own.modules.personalize, task)
            self.write(module, self.data, values["experiment"], own.group)
            return pack_result(Result(self.site.client, task.download.nbytes), worker.algorithm.public)
        result = self._context.run(worker.run, task)
        self._check_sent(worker, sent_kinds(result, worker.algorithm.public))
        if task.upload and not result.failure:
            states.write(task.round, result.memory)
        gc.collect()  # a used Trainer is part of a reference cycle with its model
        return pack_result(result, worker.algorithm.public)

    def _check_task(self, values: Mapping[str, Any]) -> None:
        if values.get("client") != self.site.client:
            raise BadMessage(f"the task is for client {quote(values.get('client'))}, not for client {self.site.client}")
        kinds = {"experiment": str, "run": str, "fixed": str, "state_round": int}
        if wrong := [name for name, kind in kinds.items() if type(values.get(name)) is not kind]:
            raise BadMessage(f"the task has no valid {wrong[0]}")

    def _open(self, experiment: str, run: str) -> tuple[Worker, ClientStates]:
        """Load an experiment and open the client's stored states of a run. What is loaded already is reused.

        Each experiment has a context of its own, with which the restrictions of what it may import end.

        Returns:
            The `Worker` (model, data and options of the experiment), and the storage of the client's states.
        """
        digest = hashlib.sha256(experiment.encode()).hexdigest()
        if self._worker is None or digest != self._experiment:
            self._context, self._run = copy_context(), ""
            self._worker = self._context.run(self._build_worker, experiment, digest)
            self._experiment = digest
        if self._states is None or run != self._run:
            if not RUN.fullmatch(run):
                raise BadMessage("the run's id is not 32 hexadecimal digits")
            self._states, self._run = ClientStates(self.folder / run, self.site.client, digest), run
        return self._worker, self._states

    def _build_worker(self, experiment: str, digest: str) -> Worker:
        """Build the experiment's worker on this site's data, which must be like that of the other sites."""
        orchestrator = self.build(experiment, digest in self.site.allow)
        described = getattr(orchestrator.scenario.dataset, "described", None)
        if not described or self.site.client >= len(described):
            raise BadMessage(f"the experiment has no client {self.site.client}")
        if differences := describe_differences(self.description.form, described[self.site.client].form):
            raise BadMessage(f"the data of client {self.site.client} are unlike the federation's: {differences}")
        if objective := orchestrator.scenario.objective:
            self.data.objective = objective
        worker = orchestrator.worker_of(self.data)
        algorithm = worker.algorithm
        network = worker.for_client(self.site.client).template.backbone
        model = ["model"] * bool(algorithm.shared_names(network))
        self._check_sent(worker, {*model, *(piece.name for piece in algorithm.knowledge)})
        return worker

    def _check_sent(self, worker: Worker, kinds: set[str]) -> None:
        """Raise an error if the federated-learning method sends values that this machine does not permit.

        It is called before the training, and again afterwards, when everything that the method sends is known.

        Args:
            worker: The model, data and options of the experiment, including the method.
            kinds: Names of what the method sends, such as `model`.

        Raises:
            BadMessage: Names the method and what it sends.
        """
        if self.site.sends is not None and (more := sorted(kinds - {*self.site.sends})):
            method, permitted = type(worker.algorithm).__name__, ", ".join(self.site.sends) or "nothing"
            what = f"{method} sends {', '.join(more)}, but this machine may only send {permitted}"
            raise BadMessage(f"sends: {what}. Permit it in the file of this machine, or use another method")


def sent_kinds(result: Result, public: str | None) -> set[str]:
    """Return the names of all values that a client sends to the server, except the number of samples.

    They are tensor groups (sections) and numbers of the upload, and the public section of the client's state.
    Compressed weights are named `model`, too.

    Args:
        result: The result.
        public: The section of the client's state that its peers may read, if any.
    """
    upload, published = result.upload or Message(), [name for name in result.memory if name == public]
    sections = {"model" if name == COMPRESSED else name for name in upload.sections}
    return {*sections, *upload.numbers, *published} - {"n_samples"}

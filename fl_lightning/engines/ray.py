"""An engine that trains several clients at a time on the machines of a Ray cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fl_lightning.core.errors import ConfigError, check_number, check_positive, one_line
from fl_lightning.core.terminal import echo
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.engines.data_source import DatasetParts
from fl_lightning.engines.pool import PoolEngine, serialize_worker
from fl_lightning.engines.pool_worker import PoolWorker
from fl_lightning.engines.ray_actor import Actor, StoredExperiment, on_node, open_dataset
from fl_lightning.engines.ray_connection import check_address, check_local_files, import_ray, keep_signal_handlers
from fl_lightning.engines.serialization import SerializedValue
from fl_lightning.engines.worker import Worker

SLICE = 0.25  # seconds in which Ray does not return to Python, so that a signal has to wait
REPORT = 5.0  # seconds between messages while no actor has started


class RayEngine(PoolEngine):
    """Trains several clients at a time, in actors on the machines of a Ray cluster.

    On CPUs of the same model, results are identical to the sequential engine's with the same number of threads. The
    data and the tensors that a round's clients share are sent to each machine once, through Ray's object store. If an
    actor or a machine is lost, its clients are trained again by other actors. Needs the extra `ray`.

    Without free CPUs or GPUs, the run waits and says so. Several runs can use one cluster: set `workers` in each.

    Args:
        address: Address of the cluster: `host:6379`, or `ray://host:10001` from a machine outside of it. By default
            `RAY_ADDRESS`, a cluster on this machine, or a new one.
        workers: Number of actors. By default, as many as the cluster has cores or GPUs for. If it is given, the run
            also waits for machines that join later.
        threads: Number of torch's threads, and so of CPU cores, of each actor.
        gpus: GPUs of each actor; with 0.25, four actors share one GPU. By default 1 if clients train on GPUs, else 0.
        runtime_env: Ray's runtime environment of all actors. `{working_dir: .}` sends the modules of a folder, and
            `{py_modules: [package, a.whl]}` sends packages and wheels. By default nothing is sent.
        data_dir: Folder on each machine that contains the dataset's file or folder, such as `$SCRATCH/data`. Each
            machine then reads the dataset itself. A machine that does not find it, or finds other values, receives it
            through the object store. By default all machines do.
        timeout: Seconds that a client may take in one round, once an actor has it. An actor that takes longer is killed
            and replaced. By default there is no limit.
        retries: How many times a client is trained again if its actor is lost or takes too long. Then it fails.
        held_megabytes: Memory in MiB for results that wait for a slower client with a lower id. While it is full, no
            other client starts. Each actor can have one such result, even if they take more.

    Raises:
        ConfigError: A number is out of range, or a file of `runtime_env` does not exist.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        threads: int = 1,
        gpus: float | None = None,
        runtime_env: dict[str, Any] | None = None,
        data_dir: str | None = None,
        timeout: float | None = None,
        retries: int = 2,
        held_megabytes: float = 256.0,
    ) -> None:
        super().__init__(timeout, retries, held_megabytes)
        require_trust("engine.address", address)
        require_trust("engine.runtime_env", runtime_env)
        require_trust("engine.data_dir", data_dir)
        check_positive("engine.", workers=workers, threads=threads)
        check_number("engine.gpus", gpus, "[0, inf)")
        check_local_files(runtime_env or {})
        self.address, self.workers, self.threads, self.gpus = address, workers, threads, gpus
        self.runtime_env, self.data_dir = runtime_env, data_dir
        self.gpus_per_actor = 0.0
        self._started, self._reported = False, 0.0
        self._opening: dict[Any, str] = {}  # the outcome of opening the dataset, and the machine

    def size(self, worker: Worker) -> int:
        """Connect to the Ray cluster, and return the number of actors: `workers`, or as many as fit on the machines.

        With `workers`, machines may join later, as in clusters that add machines when they are needed.

        Raises:
            ConfigError: Ray is not installed, the cluster cannot be reached, or no machine has room for an actor.
        """
        ray = self.connect()
        if self.data_dir and self.data_source:
            self.data_source.check()
        self.gpus_per_actor = self.gpus if self.gpus is not None else float(worker.device.type == "cuda")
        if self.workers:
            return self.workers
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        places = sum(places_on(node, self.threads, self.gpus_per_actor) for node in nodes)
        if not places:
            needs = f"{self.threads} core(s)" + (f" and {self.gpus_per_actor:g} GPU(s)" if self.gpus_per_actor else "")
            raise ConfigError(f"engine: no machine of the Ray cluster has {needs} for a worker; set threads or gpus")
        return places

    def close(self) -> None:
        """End all actors, and the Ray cluster or connection if this engine opened it."""
        super().close()
        if self._started:
            import_ray().shutdown()
            self._started = False

    def connect(self) -> ModuleType:
        """Connect to the Ray cluster, or start one on this machine, and return the module `ray`."""
        ray = import_ray()
        if self._started and ray.is_initialized():
            return ray
        environment = self._check_environment(ray)
        if not ray.is_initialized():
            check_address(self.address)
            options = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
            try:
                with keep_signal_handlers():
                    ray.init(self.address, runtime_env=environment, **options)
            except (Exception, SystemExit) as error:  # Ray exits if it finds no Ray cluster
                reason = " ".join(str(error).split())
                raise ConfigError(f"engine.address: no connection to Ray cluster {self.address}: {reason}") from error
            self._started = True
        return ray

    def _check_environment(self, ray: ModuleType) -> Any:
        """Check the runtime environment, and return it as Ray's object; None without one."""
        if self.runtime_env is None:
            return None
        if ray.is_initialized():
            raise ConfigError("engine.runtime_env: Ray is connected already. Give it to ray.init instead")
        try:
            return ray.runtime_env.RuntimeEnv(**self.runtime_env)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"engine.runtime_env: {one_line(error)}") from error

    def _start_worker(self) -> Actor:
        self._reported = time.monotonic()
        return Actor(self.threads, self.gpus_per_actor)

    def _store_experiment(self, worker: Worker) -> StoredExperiment:
        """Put the experiment into Ray's object store. With `data_dir`, machines begin to open the dataset."""
        ray = import_ray()
        if not self.data_dir or not self.data_source:
            return StoredExperiment(ray.put(serialize_worker(worker).parts))
        parts = DatasetParts(worker.data)
        arguments = SerializedValue((self.data_source, self.data_dir, parts.digests)).parts, sys.path
        here = ray.get_runtime_context().get_node_id()
        opened = {}
        for node in ray.nodes():
            if node["Alive"] and node["NodeID"] != here:
                outcome, opened[node["NodeID"]] = on_node(open_dataset, node["NodeID"], 2).remote(*arguments)
                self._opening[outcome] = node["NodeManagerAddress"]
        sent = [ray.put(SerializedValue(value).parts) for value in parts.values]
        return StoredExperiment(ray.put(serialize_worker(worker, parts).parts), opened, sent)

    def _new_storage(self) -> Callable[[SerializedValue], Any]:
        return lambda serialized: import_ray().put(serialized.parts)

    def _wait(self, seconds: float) -> Sequence[PoolWorker]:
        by_reference = {one.expected[0]: one for one in self.pool_workers if isinstance(one, Actor) and one.expected}
        references = list(by_reference)
        ready, _ = import_ray().wait(references, num_returns=1, timeout=min(seconds, SLICE))
        self._report_opened()
        if not ready:
            self._report_waiting()
            return []
        ready, _ = import_ray().wait(references, num_returns=len(references), timeout=0)
        return [by_reference[reference] for reference in ready]

    def _report_waiting(self) -> None:
        """Print what the actors wait for, every few seconds until one of them has started."""
        started = any(isinstance(one, Actor) and one.started for one in self.pool_workers)
        if started or time.monotonic() - self._reported < REPORT:
            return
        self._reported = time.monotonic()
        ray = import_ray()
        free, total = ray.available_resources(), ray.cluster_resources()
        needs = {"CPU": float(self.threads)} | ({"GPU": self.gpus_per_actor} if self.gpus_per_actor else {})
        each = " and ".join(f"{count:g} {kind}" for kind, count in needs.items())
        found = " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in needs)
        line = f"engine: 0 of {len(self.pool_workers)} workers have started. Each needs {each}; {found} are free."
        echo(line, to_stderr=True)

    def _report_opened(self) -> None:
        """Print which machines could not open the dataset, and why, as soon as it is known."""
        if not self._opening:
            return
        ray = import_ray()
        ready, _ = ray.wait(list(self._opening), num_returns=len(self._opening), timeout=0)
        for outcome in ready:
            machine = self._opening.pop(outcome)
            try:
                reason = ray.get(outcome)
            except ray.exceptions.RayError as error:
                reason = one_line(error)
            if reason:
                echo(f"engine.data_dir: machine {machine} receives the dataset instead: {reason}", to_stderr=True)


def places_on(node: dict[str, float], threads: int, gpus: float) -> int:
    """Return how many actors with these numbers of threads and GPUs fit on a machine of the Ray cluster."""
    rooms = [node.get("CPU", 0.0) // threads]
    if gpus:
        rooms.append(node.get("GPU", 0.0) // gpus if gpus >= 1 else node.get("GPU", 0.0) * (1 // gpus))
    return int(min(rooms))

"""The machines of a Ray cluster: their versions of packages, and whether they find a run's dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.core.errors import one_line
from fl_lightning.engines.data_source import DatasetParts, DataSource
from fl_lightning.engines.ray_actor import on_node, open_dataset
from fl_lightning.engines.ray_connection import import_ray
from fl_lightning.engines.serialization import SerializedValue

PACKAGES = ("torch", "lightning", "numpy", "ray")
"""Packages whose versions are compared, in addition to Python and fl-lightning."""

ANSWER = 60.0  # seconds in which a machine must start a process and answer


@dataclass(frozen=True)
class Machine:
    """What was found on a machine of a Ray cluster.

    Args:
        address: Its address.
        cpus: Its number of CPUs for Ray.
        gpus: Its number of GPUs for Ray.
        versions: The version of each package; an empty string for a missing one.
        dataset: Why it could not open the dataset, or an empty string. None if it was not asked to.
        problem: Why it did not answer, or an empty string.
    """

    address: str
    cpus: float
    gpus: float
    versions: Mapping[str, str]
    dataset: str | None = None
    problem: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether workers can start on the machine."""
        return not self.problem and bool(self.versions.get("fl-lightning"))

    def problems(self, ours: Mapping[str, str]) -> list[str]:
        """Return a line for each problem of the machine, with its fix.

        Args:
            ours: The versions on the machine of the main process.
        """
        if self.problem:
            return [f"{self.address}: {self.problem}. Correct engine.runtime_env, or restart Ray there."]
        lines = []
        for name, version in ours.items():
            found = self.versions[name]
            if not found:
                fix = "Install it there" + ", or send it with engine.runtime_env" * (name == "fl-lightning")
                lines.append(f"{self.address}: {name} is missing. {fix}.")
            elif found != version:
                lines.append(f"{self.address}: {name} {found} differs from {version} here. Install the same version.")
        if self.dataset:
            fix = "Copy the files there, or leave out engine.data_dir"
            lines.append(f"{self.address}: the dataset was not opened ({self.dataset}). {fix}.")
        return lines


def inspect_machines(source: DataSource, data_dir: str | None) -> list[Machine]:
    """Ask each machine of the connected Ray cluster for its versions and, with `data_dir`, to open the dataset.

    Args:
        source: The options of the dataset.
        data_dir: The folder on each machine that contains the dataset's file or folder.

    Raises:
        ConfigError: The dataset cannot be read on this machine, or has no files.
    """
    nodes = [node for node in import_ray().nodes() if node["Alive"]]
    versions = [on_node(version_finder(), node["NodeID"]).remote(PACKAGES) for node in nodes]
    opened: list[Any] = [None] * len(nodes)
    if data_dir:
        source.check()
        digests = DatasetParts(source.scenario.build(source.seed)).digests
        arguments = SerializedValue((source, data_dir, digests)).parts, sys.path
        opened = [on_node(open_dataset, node["NodeID"], 2).remote(*arguments)[0] for node in nodes]
    return [inspect_machine(*each) for each in zip(nodes, versions, opened, strict=True)]


def inspect_machine(node: Mapping[str, Any], versions: Any, opened: Any) -> Machine:
    """Wait for the answers of a machine, and return what was found.

    Args:
        node: Ray's description of the node.
        versions: The reference to its versions.
        opened: The reference to the outcome of opening the dataset; None if the machine was not asked to.
    """
    ray = import_ray()
    resources = node["Resources"]
    here = (node["NodeManagerAddress"], resources.get("CPU", 0.0), resources.get("GPU", 0.0))
    try:
        found = ray.get(versions, timeout=ANSWER)
    except ray.exceptions.GetTimeoutError:
        return Machine(*here, {}, problem=f"it did not answer in {ANSWER:g} seconds")
    except ray.exceptions.RayError as error:
        return Machine(*here, {}, problem=one_line(error))
    if opened is None or not found["fl-lightning"]:
        return Machine(*here, found)
    try:
        return Machine(*here, found, ray.get(opened))
    except ray.exceptions.RayError as error:
        return Machine(*here, found, one_line(error))


def version_finder() -> Callable[[Sequence[str]], dict[str, str]]:
    """Return a function that finds the versions of packages, of Python and of fl-lightning in its process.

    Ray sends an inner function by value, so that a machine without fl-lightning can run it.
    """

    def find_versions(packages: Sequence[str]) -> dict[str, str]:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        found = {"python": platform.python_version()}
        try:
            import fl_lightning

            found["fl-lightning"] = fl_lightning.__version__
        except ImportError:
            found["fl-lightning"] = ""
        for name in packages:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = ""
        return found

    return find_versions

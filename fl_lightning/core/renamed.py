"""Tables of renamed options, classes and modules, and functions that refuse or replace old names.

In a user's config or command line an old name is refused, and the message has the new one (`refuse_old_option`,
`new_class`). A config that a run recorded under old names is read as if it had the new ones (`update_config`,
`update_settings`), so that old runs can still be resumed and reported.

How to add an entry:

- An option: `OPTIONS["evaluation.targets"] = "evaluation.target_accuracies"`. Keys are dotted, without `init_args`.
  Keys below a renamed one are renamed with it.
- An option that a callback took over: `CALLBACK_OPTIONS["checkpoint_every"] = ("Checkpointing", "every")`.
- A class: `CLASSES["Given"] = "PredefinedSplit"`. Both are names that `fl_lightning` exports, or exported.
- A module whose classes recorded configs name: `MODULES["wandb_logger"] = "loggers.wandb"`. If a module was split, an
  entry for each class: `MODULES["fedskc.FedSKC"] = "fedskc.fedskc"`.

Remove the old name everywhere else: an option that still exists is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from fl_lightning.core.errors import ConfigError

OPTIONS: dict[str, str] = {
    "engine.seconds": "engine.shared_fit",
    "evaluate_every": "evaluation.every",
    "evaluation.clients": "evaluation.client_model",
    "evaluation.targets": "evaluation.target_accuracies",
    "rivals": "baselines",
}
"""The new key of each renamed option, by its old key."""

CALLBACK_OPTIONS: dict[str, tuple[str, str]] = {
    "checkpoint_every": ("Checkpointing", "every"),
    "keep_checkpoints": ("Checkpointing", "keep_last"),
}
"""The callback and its argument that replace an option, by the option's old key."""

CLASSES: dict[str, str] = {"Given": "PredefinedSplit"}
"""The new name of each renamed class of this package, by its old name."""

MODULES = {
    "algorithms.graphs": "algorithms.decentralized.topology",
    "data.natural": "data.natural_partitions",
    "data.pictures": "data.image_folder",
    "file_loggers": "loggers.files",
    "objectives": "core.objectives",
    "wandb_logger": "loggers.wandb",
}
"""The new module of classes in recorded configs, by the old module or class; both without `fl_lightning`."""

_FEDSKC = "algorithms.global_model.fedskc"
MODULES |= {
    **{f"loggers.collection.{name}Logger": "loggers.files" for name in ("CSV", "MLFlow", "TensorBoard")},
    "loggers.collection.WandbRoundLogger": "loggers.wandb",
    f"{_FEDSKC}.FedSKC": f"{_FEDSKC}.fedskc",
    f"{_FEDSKC}.GlobalDiscrepancy": f"{_FEDSKC}.aggregation",
    f"{_FEDSKC}.GlobalPeriodReview": f"{_FEDSKC}.aggregation",
    f"{_FEDSKC}.LocalContrastive": f"{_FEDSKC}.contrastive_loss",
    f"{_FEDSKC}.ReferenceKnowledge": f"{_FEDSKC}.knowledge",
    f"{_FEDSKC}.StructuralKnowledge": f"{_FEDSKC}.knowledge",
}

PACKAGE = "fl_lightning."
ABSENT = object()


def new_option(key: str) -> str | None:
    """Return the new key of a renamed option, or of a key below a renamed option; None for any other key."""
    return next((new + key.removeprefix(old) for old, new in OPTIONS.items() if f"{key}.".startswith(f"{old}.")), None)


def refuse_old_option(key: str) -> None:
    """Raise an error if a config key is outdated: the option was renamed, or moved to a callback.

    Raises:
        ConfigError: The message contains the new name, or the name of the callback.
    """
    if new := new_option(key):
        raise ConfigError(f"{key}: renamed to {new}. Use the new name.")
    if key in CALLBACK_OPTIONS:
        name, argument = CALLBACK_OPTIONS[key]
        example = f"callbacks: [{{class_path: {name}, init_args: {{{argument}: 5}}}}]"
        raise ConfigError(f"{key}: moved to the callback {name}, as {argument}. Use {example}.")


def new_class(path: str) -> str | None:
    """Return the new name of a renamed class, given its old name or import path; None for any other class."""
    module, _, name = path.rpartition(".")
    return CLASSES.get(name) if not module or f"{module}.".startswith(PACKAGE) else None


def update_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an old run's recorded config with new names of options and classes in place of old ones.

    If a config has both names of an option, the value of the new one is kept.

    Args:
        config: The config as nested mappings, as in a run's `config.yaml`.
    """
    updated = deepcopy(dict(config))
    for old, new in OPTIONS.items():
        value = _group_of(old, updated).pop(old.rpartition(".")[2], ABSENT)
        if value is not ABSENT:
            _group_of(new, updated, add=True).setdefault(new.rpartition(".")[2], value)
    _give_to_callbacks(updated)
    return {key: _update_paths(value) for key, value in updated.items()}


def update_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an old run under the current names of options and classes.

    Args:
        settings: The run's config, flattened to dotted keys.
    """
    updated = deepcopy(dict(settings))
    _give_to_callbacks(updated)
    return {new_option(key) or key: _update_paths(value) for key, value in updated.items()}


def update_path(path: str) -> str:
    """Return the new import path of a renamed class or module of this package; any other text unchanged."""
    if not path.startswith(PACKAGE):
        return path
    module, _, name = path.removeprefix(PACKAGE).rpartition(".")
    module = MODULES.get(f"{module}.{name}") or MODULES.get(module, module)
    return PACKAGE + ".".join(filter(None, (module, CLASSES.get(name, name))))


def _update_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _update_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_update_paths(each) for each in value]
    return update_path(value) if isinstance(value, str) else value


def _group_of(key: str, config: dict[str, Any], add: bool = False) -> dict[str, Any]:
    """Return the innermost dict of a config for the dotted option `key`, or an empty dict if there is no such dict.

    For `algorithm.tau`, that is the `init_args` of `algorithm`, which contain `tau`. With `add`, missing dicts
    are created.
    """
    group: Any = config
    for part in key.split(".")[:-1]:
        group = group.setdefault(part, {}) if add else group.get(part)
        if isinstance(group, dict) and "class_path" in group:
            group = group.setdefault("init_args", {}) if add else group.get("init_args")
        if not isinstance(group, dict):
            return {}
    return group


def _give_to_callbacks(config: dict[str, Any]) -> None:
    """Change an old config in place: move options to the callbacks that have them now, and add missing callbacks."""
    for old in sorted(config.keys() & CALLBACK_OPTIONS.keys()):
        name, argument = CALLBACK_OPTIONS[old]
        value, callbacks = config.pop(old), config.get("callbacks") or []
        if not isinstance(callbacks, list):
            continue
        described = [one for one in callbacks if isinstance(one, dict)]
        same = [one for one in described if str(one.get("class_path")).rpartition(".")[2] == name]
        if not same:
            same = [{"class_path": f"{PACKAGE}callbacks.{name}"}]
            callbacks = [*callbacks, *same]
        same[0].setdefault("init_args", {}).setdefault(argument, value)
        config["callbacks"] = callbacks

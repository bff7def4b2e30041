"""Weights & Biases logger: a step per round, a config to filter by, and a group for runs that differ only in seed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import read_file, write_atomically
from fl_lightning.core.names import labels
from fl_lightning.core.temporary_folders import temporary_files
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.loggers.base import Beginning, Labels, RoundLogger
from fl_lightning.loggers.provenance import source

OFFLINE = ("offline", "dryrun", "disabled")
"""W&B's modes that send nothing to a server."""

RESUME_FILES = ("config.yaml", "metrics.csv", "clients.csv", "warnings.txt", "checkpoints", "clients")
"""Files and folders of a run folder that are needed to test or resume the run."""

FIELDS = {
    "project": "project",
    "entity": "entity",
    "name": "run_name",
    "group": "run_group",
    "tags": "run_tags",
    "job_type": "run_job_type",
    "notes": "run_notes",
}
"""Names that the options of this logger have in W&B's settings."""

LONGEST = {"name": 128, "group": 128, "job_type": 64, "id": 128}
"""Largest number of characters that W&B's server accepts. Its client would only fail when a run is uploaded."""

LONGEST_TAG = 64


class WandbRoundLogger(RoundLogger, LightningWandbLogger):
    """Log to Weights & Biases, a step per round, offline by default except in a W&B sweep.

    An option that is not given takes the value of W&B's environment variable, if it is set. The files are written to
    the run folder. A resumed run continues its W&B run.

    Args:
        project: W&B project, or `WANDB_PROJECT`. By default `fl-lightning`.
        name: Name of the run, or `WANDB_NAME`. By default `<config>-<changes>-seed<seed>`, where the changes are those
            that the command line made to the config.
        offline: Keep everything on disk, to be uploaded with `wandb sync`; or `WANDB_MODE`. By default true, but false
            in a run of W&B's sweep agent, which reads the metrics online. `false` needs an account.
        entity: W&B user or team, or `WANDB_ENTITY`. By default that of the account.
        group: Group of the run, or `WANDB_RUN_GROUP`. By default, runs that differ only in the seed share a group.
        tags: Tags of the run, or `WANDB_TAGS`. The names of algorithm, dataset and partition are added.
        job_type: Job type of the run, or `WANDB_JOB_TYPE`. By default `fit`.
        notes: Notes on the run, or `WANDB_NOTES`.
        log_model: `true` logs `final/model.pt` as a W&B artifact at the end of the run. `all` also logs the checkpoints
            and the files that resuming needs.

    Raises:
        ConfigError: `log_model` has another value.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        offline: bool | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        job_type: str | None = None,
        notes: str | None = None,
        log_model: bool | Literal["all"] = False,
    ) -> None:
        if log_model not in (True, False, "all"):
            raise ConfigError(f"logger.log_model: {log_model!r} is neither true, false nor all")
        super().__init__()
        self.log_model = log_model
        self._swept = bool(os.environ.get("WANDB_SWEEP_ID"))  # a W&B sweep sets the run's id itself
        self._offline_option, default = offline, "online" if self._swept else "offline"
        self.mode = _option_or_variable({True: "offline", False: "online", None: None}[offline], "MODE") or default
        if self.mode not in OFFLINE:
            require_trust("logger.offline", self.mode)
        default_tags = [word.strip() for word in os.environ.get("WANDB_TAGS", "").split(",")]
        self._given: dict[str, Any] = {
            "id": None if self._swept else _option_or_variable(None, "RUN_ID"),
            "project": project if self._swept else _option_or_variable(project, "PROJECT"),
            "entity": entity if self._swept else _option_or_variable(entity, "ENTITY"),
            "name": _option_or_variable(name, "NAME"),
            "group": _option_or_variable(group, "RUN_GROUP"),
            "tags": [tag for tag in default_tags if tag] if tags is None else tags,
            "job_type": _option_or_variable(job_type, "JOB_TYPE") or "fit",
            "notes": _option_or_variable(notes, "NOTES"),
            "mode": self.mode,
            "resume": "allow",
        }
        self._wandb_init = dict(self._given)  # of the current run
        self._last_round = -1  # the last round in the W&B run when the run was resumed
        self._row_is_open = False  # whether values were logged since the last `save`

    def check(self, run_dir: Path | None = None) -> None:
        """Check the options by W&B's own rules before the run begins, without a connection and without writing files.

        Args:
            run_dir: The run folder, if it exists. The file in it that names the W&B run is checked too.

        Raises:
            ConfigError: W&B does not accept an option or an environment variable, or the file is damaged.
        """
        with temporary_files():
            import wandb  # not at the top: importing it takes time and creates temporary folders

        if self._swept and self.mode in OFFLINE:
            key, fix = ("logger.offline", "Set it to false") if self._offline_option else ("WANDB_MODE", "Unset it")
            warnings.warn(f"{key}: {self.mode}, so the W&B sweep gets no metrics of this run. {fix}.", stacklevel=2)
        settings = wandb.Settings()
        for variable, value in os.environ.items():
            if variable.startswith("WANDB_"):
                with _name_key(variable):
                    settings.update_from_env_vars({variable: value})
        options = self._wandb_init
        for option, field in FIELDS.items():
            with _name_key(f"logger.{option}"):
                setattr(settings, field, options[option])
        for option, most in LONGEST.items():
            if len(options[option] or "") > most:
                key = f"logger.{option}" if option in FIELDS else "WANDB_RUN_ID"
                raise ConfigError(f"{key}: {len(options[option])} characters, and W&B accepts at most {most}")
        if re.search(r"[\s/\\#?%:]", options["entity"] or ""):
            raise ConfigError(f"logger.entity: {options['entity']!r} is not the name of a W&B user or team")
        if run_dir is not None:
            read_note(run_dir)

    @property
    def experiment(self) -> Any:
        """The W&B run, created at the first access.

        Lightning's property is not used: it makes `trainer/global_step` the step of every metric, and sets `WANDB_MODE`
        for the whole process.
        """
        if self._experiment is None:
            with temporary_files(of_programs=True):
                import wandb

                settings = wandb.Settings(console="off")
                if self.mode in OFFLINE:
                    settings.silent = True
                if wandb.run is not None and not self._swept:
                    settings.reinit = "create_new"  # by default, W&B would end the run that is open in this process
                self._experiment = wandb.init(**self._wandb_init, settings=settings)
            self._experiment.define_metric("round")
            self._experiment.define_metric("*", step_metric="round")
        return self._experiment

    def begin(self, run: Beginning) -> None:
        """Begin the W&B run and log a table of the partition; for a resumed run, continue its W&B run."""
        if self.attach(run.run_dir, run.config, run.labels) and run.counts is not None:
            clients, classes = run.names
            columns = [f"class {name}" for name in labels(classes, range(len(run.counts[0])))]
            columns = ["client", *["name"] * bool(clients), *columns]
            rows = [[k, *clients[k : k + 1], *map(int, row)] for k, row in enumerate(run.counts)]
            self.log_table("partition", columns, rows, step=run.round)
            self.save()

    def attach(self, run_dir: Path, config: Mapping[str, Any], labels: Labels) -> bool:
        """Begin a W&B run for a run folder, or continue the W&B run that `wandb/run.json` in the folder names.

        The labels of a run that has been online may have been edited there. They are kept, unless the config or the
        environment sets them.

        Args:
            run_dir: The run folder, in which W&B writes its files.
            config: The resolved config.
            labels: Default names of a new run.

        Returns:
            Whether the W&B run is new.

        Raises:
            ConfigError: The file that names the W&B run is damaged, or belongs to another run.
        """
        note, of = read_note(run_dir), [*labels.tags, config.get("seed")]
        if note and note["of"] != of:
            other, this = (" ".join(map(str, words)) for words in (note["of"], of))
            fix = "Restore the file, or remove it to begin a new W&B run."
            raise ConfigError(f"{run_dir / NOTE} belongs to another run, {other} and not {this}. {fix}")
        if not note and (run_dir / NOTE).parent.exists():
            warnings.warn(f"{run_dir / NOTE} not found: a new W&B run begins", stacklevel=2)
        defaults = {"project": "fl-lightning", "name": labels.name, "group": labels.group, "of": of} | note
        self._wandb_init = options = dict(self._given)
        online = note.get("online", False)
        keys = [*(() if self._swept else ("id", "project", "entity")), *(() if online else ("name", "group"))]
        options |= {key: options[key] or defaults.get(key) for key in keys}
        if options["tags"] or not online:
            options["tags"] = list(dict.fromkeys([*options["tags"], *(tag[:LONGEST_TAG] for tag in labels.tags)]))
        rest = {key: value for key, value in config.items() if key != "logger"}  # W&B has fields for its options
        options |= {"dir": str(run_dir), "config": {**group_config(rest), "fl_lightning": source()}}
        self._project, self._save_dir = options["project"], options["dir"]  # Lightning's `name` and `save_dir`
        if self.mode != "disabled":
            with self._undo_on_failure(run_dir / "wandb"):
                with self._suggest_offline():
                    run = self.experiment
                self._last_round = run.summary.get("round", -1) if note else -1
                actual = {"id": run.id, "project": run.project, "entity": run.entity}
                content = defaults | actual | {"online": online or self.mode not in OFFLINE}
                write_atomically(run_dir / NOTE, add_checksum(content))
        return not note

    @contextmanager
    def _suggest_offline(self) -> Iterator[None]:
        """Context in which an error of W&B, such as one of the network, becomes a `ConfigError` of `logger.offline`."""
        from wandb import Error

        try:
            yield
        except Error as error:
            if self.mode in OFFLINE:
                raise
            fix = "Or set it to true, and upload the run later with `wandb sync`"
            raise ConfigError(f"logger.offline: {one_line(error).rstrip('.')}. {fix}") from error

    @contextmanager
    def _undo_on_failure(self, folder: Path) -> Iterator[None]:
        """Context that after an exception closes the W&B run, and removes `folder` if it did not exist before."""
        new = not folder.exists()
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self.finalize("failed")
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    @temporary_files()
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log metrics, images or tables of a round to the W&B run. `save` finishes the round.

        Rounds that W&B has already are not logged again by a resumed run.

        Args:
            metrics: Values by name.
            step: The round. By default the current round, or the next one after `save`.
        """
        run = self.experiment
        if step is None:
            run.log(metrics, commit=False)
        elif step > self._last_round:
            # W&B drops values behind its own step, which is ahead if another process has logged to the run. A run in
            # `shared` mode has no step.
            at = None if self.mode == "shared" else max(step, run.step)
            run.log({**metrics, "round": step}, step=at, commit=False)
            self._row_is_open = True

    @temporary_files()
    def save(self) -> None:
        """Finish the current round in the W&B run: commit the values logged since the last call."""
        if self._row_is_open:
            self.experiment.log({}, commit=True)
            self._row_is_open = False

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Update the summary of the W&B run with the summary of the rounds so far, without None values.

        `define_metric(summary="max")` is not used for best values: it turns the summary entry of `global/acc` into a
        mapping, which sweeps do not find, and forgets the rounds before an offline resume.
        """
        self.experiment.summary.update({name: value for name, value in summary.items() if value is not None})

    def log_files(self) -> None:
        """Log W&B artifacts: the final model if `log_model` is set, and with `log_model=all` the files for resuming."""
        run_dir = Path(self._wandb_init["dir"])
        if not self.log_model or self.mode == "disabled":
            return
        if (model := run_dir / "final" / "model.pt").is_file():
            self._log_artifact("model", [model])
        elif self.log_model is True:
            reason = "this method has no global model, hence no final/model.pt"
            fix = "Use `all` to log the checkpoints, which hold the clients' models."
            warnings.warn(f"logger.log_model: {reason}. {fix}", stacklevel=2)
        if self.log_model == "all":
            self._log_artifact("checkpoints", [run_dir / name for name in RESUME_FILES if (run_dir / name).exists()])

    @temporary_files()
    def _log_artifact(self, kind: str, paths: Sequence[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self.experiment.id}", type="model")
        for path in paths:
            artifact.add_dir(str(path), name=path.name) if path.is_dir() else artifact.add_file(str(path))
        self.experiment.log_artifact(artifact)

    @temporary_files()
    def finalize(self, status: str) -> None:
        """Close the W&B run with exit code 0 for the status `success`, otherwise 1."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


NOTE = Path("wandb", "run.json")
"""File in a run folder with the id, name, group, project and entity of its W&B run."""


def read_note(run_dir: Path) -> dict[str, Any]:
    """Return the content of `wandb/run.json`, which names the W&B run of a run folder; empty if not found.

    Raises:
        ConfigError: The file is damaged, or `wandb` is not a folder.
    """
    place = run_dir / NOTE
    if place.parent.is_symlink() or (place.parent.exists() and not place.parent.is_dir()):
        raise ConfigError(f"{place.parent} is not a folder. Move it away; W&B's files are written there.")
    if not place.exists() and not place.is_symlink():
        return {}
    fix = "Restore it, or remove it to begin a new W&B run."
    if place.is_symlink() or not place.is_file():
        raise ConfigError(f"{place} is not a file. {fix}")
    try:
        content = read_file(place).decode()
        note = json.loads(content)
        note.pop("sha256")
        is_valid = content == add_checksum(note)
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {one_line(error)}") from error
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{place} is damaged. {fix}")
    return note


def add_checksum(note: Mapping[str, Any]) -> str:
    """Return the text of `wandb/run.json`: the given content and its SHA-256 digest, to detect changes."""
    digest = hashlib.sha256(json.dumps(note, indent=1).encode()).hexdigest()
    return json.dumps({**note, "sha256": digest}, indent=1) + "\n"


@contextmanager
def _name_key(key: str) -> Iterator[None]:
    """Context that re-raises any exception as a one-line `ConfigError` that starts with the name of a config key."""
    try:
        yield
    except Exception as error:  # W&B checks its settings with pydantic, whose whole text also refers to its manual
        found = error.errors() if isinstance(error, ValueError) and hasattr(error, "errors") else []
        reason = found[0]["msg"].removeprefix("Value error, ") if found else error
        raise ConfigError(f"{key}: {one_line(reason)}") from error


def group_config(value: Any) -> Any:
    """Return a config as nested dicts, so that W&B can filter runs by keys such as `algorithm.loss_terms.Proximal.mu`.

    W&B joins nested keys by dots. A class becomes a mapping of its `name` and its arguments, a list of classes a
    mapping by name. An argument called `name` stays in `init_args`.
    """
    if isinstance(value, list) and value and all(map(_is_class, value)):
        seen: Counter[str] = Counter()
        return {_unique_name(one["name"], seen): one for one in map(group_config, value)}
    if isinstance(value, list):
        return [group_config(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if not _is_class(value):
        return {key: group_config(one) for key, one in value.items()}
    arguments = group_config({**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})})
    own = {"init_args": {"name": arguments.pop("name")}} if "name" in arguments else {}
    return {"name": value["class_path"].rpartition(".")[2], **arguments, **own}


def _is_class(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _unique_name(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def _option_or_variable(option: str | None, variable: str) -> str | None:
    """Return an option, or the value of the environment variable `WANDB_<variable>` if the option is None."""
    return option if option is not None else os.environ.get(f"WANDB_{variable}") or None

"""A run as Weights & Biases shows it: one row a round, a config that filters, names that group."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from pydantic import ValidationError

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.core.gate import require_trust
from fl_lightning.core.temporary import temporary_files
from fl_lightning.loggers.base import Beginning, Labels, RoundLogger
from fl_lightning.loggers.provenance import source

OFFLINE = ("offline", "dryrun", "disabled")
"""W&B's modes that send nothing."""

TO_GO_ON = ("config.yaml", "metrics.csv", "clients.csv", "warnings.txt", "checkpoints", "clients")
"""What of a run's folder it takes to test the run, or to go on with it."""

FIELDS = {
    "project": "project",
    "entity": "entity",
    "name": "run_name",
    "group": "run_group",
    "tags": "run_tags",
    "job_type": "run_job_type",
    "notes": "run_notes",
}
"""Our options, and what W&B's settings call them."""

LONGEST = {"name": 128, "group": 128, "job_type": 64, "id": 128}
"""Characters that W&B's server takes at most; its client finds out when a run is sent, which may be days later."""

LONGEST_TAG = 64


class WandbRoundLogger(RoundLogger, LightningWandbLogger):
    """Weights & Biases: one run an experiment, one step a round, offline unless told otherwise.

    An option that is not given takes the value of W&B's environment variable for it, and the default where that is not
    set either. The files lie in the run's folder, and a resumed experiment goes on in the same W&B run.

    Args:
        project: W&B project, or `WANDB_PROJECT`; by default `fl-lightning`.
        name: Name of the run, or `WANDB_NAME`; by default `<config>-<changes>-seed<seed>`, where changes are what the
            command line changed of the config.
        offline: Keep everything on disk (`wandb sync` uploads it later), or `WANDB_MODE`; by default true, and false
            needs an account.
        entity: W&B user or team, or `WANDB_ENTITY`; by default the account's own.
        group: Name under which W&B groups runs, or `WANDB_RUN_GROUP`; by default one that the seeds of a setting share.
        tags: Tags of the run, or `WANDB_TAGS`; the names of algorithm, dataset and partition are added.
        job_type: Kind of the run, or `WANDB_JOB_TYPE`; by default `fit`.
        notes: A word about the run, or `WANDB_NOTES`.
        log_model: `true` leaves `final/model.pt` as a W&B artifact when the run ends, `all` also the checkpoints, with
            what it takes to go on from them.

    Raises:
        ConfigError: `log_model` is something else.
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
        with temporary_files():
            import wandb  # not above: it makes temporary folders, and runs that do not log to it need none

        super().__init__()
        self.log_model = log_model
        self.mode = _chosen({True: "offline", False: "online", None: None}[offline], "MODE") or "offline"
        if self.mode not in OFFLINE:
            require_trust("logger.offline", self.mode)
        self._swept = bool(os.environ.get("WANDB_SWEEP_ID"))  # the sweep then says which run it is: W&B sees to that
        words = [word.strip() for word in os.environ.get("WANDB_TAGS", "").split(",")]
        self._wandb_init = {
            "id": None if self._swept else _chosen(None, "RUN_ID"),
            "project": project if self._swept else _chosen(project, "PROJECT"),
            "entity": entity if self._swept else _chosen(entity, "ENTITY"),
            "name": _chosen(name, "NAME"),
            "group": _chosen(group, "RUN_GROUP"),
            "tags": [word for word in words if word] if tags is None else tags,
            "job_type": _chosen(job_type, "JOB_TYPE") or "fit",
            "notes": _chosen(notes, "NOTES"),
            "mode": self.mode,
            "resume": "allow",
            "settings": wandb.Settings(console="off"),
        }
        if self.mode in OFFLINE:
            self._wandb_init["settings"].silent = True
        self._held = -1  # the last round that the W&B run held when this folder's run was resumed
        self._open = False  # whether a round's row is

    def check(self, run_dir: Path | None = None) -> None:
        """Refuse what W&B would refuse later, without asking it or writing anything.

        Args:
            run_dir: The run's folder, if there is one yet: the note in it of its W&B run is checked too.

        Raises:
            ConfigError: An option or a variable is not as W&B wants it, or the note is damaged.
        """
        import wandb

        settings = wandb.Settings()
        for variable, value in os.environ.items():
            if variable.startswith("WANDB_"):
                with _blamed(variable):
                    settings.update_from_env_vars({variable: value})
        told = self._wandb_init
        for option, field in FIELDS.items():
            with _blamed(f"logger.{option}"):
                setattr(settings, field, told[option])
        for option, most in LONGEST.items():
            if len(told[option] or "") > most:
                key = f"logger.{option}" if option in FIELDS else "WANDB_RUN_ID"
                raise ConfigError(f"{key}: {len(told[option])} characters, and W&B takes {most} at most")
        if re.search(r"[\s/\\#?%:]", told["entity"] or ""):
            raise ConfigError(f"logger.entity: {told['entity']!r} is no name of a W&B user or team")
        if run_dir is not None:
            read_note(run_dir)

    @property
    def experiment(self) -> Any:
        """The W&B run; made at the first call.

        Not by Lightning's property: that makes `trainer/global_step` the step of every metric, and sets `WANDB_MODE`
        for whatever else this process may run.
        """
        import wandb

        if self._experiment is None:
            with temporary_files(of_programs=True), _unlaunched():
                self._experiment = wandb.init(**self._wandb_init)
            self._experiment.define_metric("round")
            self._experiment.define_metric("*", step_metric="round")
        return self._experiment

    def begin(self, run: Beginning) -> None:
        """Begin the W&B run, or go on with it; a new one gets the table of who holds what."""
        if self.attach(run.run_dir, run.config, run.labels) and run.counts is not None:
            self.log_counts("partition", run.counts, run.round)

    def attach(self, run_dir: Path, config: Mapping[str, Any], labels: Labels) -> bool:
        """Begin the W&B run of a run folder, or go on with it: what it is called is noted there.

        A run that has been online has its labels there, and may have been given others since: they are left alone,
        but for what the config or the environment says.

        Args:
            run_dir: The folder, where W&B leaves its files.
            config: The resolved config.
            labels: What to call a run that is new.

        Returns:
            Whether it is.

        Raises:
            ConfigError: What is noted there is damaged, or of another run.
        """
        noted, of = read_note(run_dir), [*labels.tags, config.get("seed")]
        if noted and noted["of"] != of:
            words = [" ".join(map(str, one)) for one in (noted["of"], of)]
            mend = "put the run's own back, or remove it to begin another W&B run"
            raise ConfigError(f"{run_dir / NOTE} is of another run, {words[0]} and not {words[1]}: {mend}")
        if not noted and (run_dir / NOTE).parent.exists():
            warnings.warn(f"{run_dir / NOTE} is gone: another W&B run begins", stacklevel=2)
        known = {"project": "fl-lightning", "name": labels.name, "group": labels.group, "of": of} | noted
        told, online = self._wandb_init, noted.get("online", False)
        silent = [*(() if self._swept else ("id", "project", "entity")), *(() if online else ("name", "group"))]
        told |= {key: told[key] or known.get(key) for key in silent}
        if told["tags"] or not online:
            told["tags"] = list(dict.fromkeys([*told["tags"], *(tag[:LONGEST_TAG] for tag in labels.tags)]))
        own = {key: value for key, value in config.items() if key != "logger"}  # W&B has that in fields of its own
        told |= {"dir": str(run_dir), "config": {**grouped(own), "fl_lightning": source()}}
        self._project, self._save_dir = told["project"], told["dir"]  # what Lightning calls `name` and `save_dir`
        if self.mode != "disabled":
            with self._undone(run_dir / "wandb"):
                run = self.experiment
                self._held = run.summary.get("round", -1) if noted else -1
                found = {"id": run.id, "project": run.project, "entity": run.entity}
                note = known | found | {"online": online or self.mode not in OFFLINE}
                write_atomically(run_dir / NOTE, sealed(note))
        return not noted

    @contextmanager
    def _undone(self, folder: Path) -> Iterator[None]:
        """What W&B has begun inside, and left in its folder, is taken back if something goes wrong."""
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
        """Add to a round's row, which `save` closes: its metrics, pictures and tables share one.

        A resumed run may repeat rounds that W&B holds already; it keeps those.

        Args:
            metrics: What to add.
            step: The round; by default the one whose row is open, or else the next.
        """
        run = self.experiment
        if step is None:
            run.log(metrics, commit=False)
        elif step > self._held:
            # W&B drops what is behind its own step, which is further on where somebody else has logged to the run; one
            # in `shared` mode has none.
            at = None if self.mode == "shared" else max(step, run.step)
            run.log({**metrics, "round": step}, step=at, commit=False)
            self._open = True

    @temporary_files()
    def save(self) -> None:
        """Close the round's row."""
        if self._open:
            self.experiment.log({}, commit=True)
            self._open = False

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Put figures into the run's summary; those that are None stay out.

        This is how best values get there, and not by `define_metric(summary="max")`: that makes a mapping of a metric's
        own entry, in which no sweep finds `global/acc` any more, and of a run that was resumed offline it knows the
        last sitting only.
        """
        self.experiment.summary.update({name: value for name, value in summary.items() if value is not None})

    def log_counts(self, key: str, counts: Sequence[Sequence[int]], step: int) -> None:
        """Log a clients x classes table."""
        columns = ["client", *(f"class {j}" for j in range(len(counts[0])))]
        self.log_table(key, columns, [[k, *map(int, row)] for k, row in enumerate(counts)], step=step)
        self.save()

    def log_files(self) -> None:
        """Leave what `log_model` asks for as artifacts of the finished run."""
        run_dir = Path(self._wandb_init["dir"])
        if not self.log_model or self.mode == "disabled":
            return
        if (model := run_dir / "final" / "model.pt").is_file():
            self._leave("model", [model])
        elif self.log_model is True:
            mend = "`all` logs the checkpoints, which hold the clients' models"
            warnings.warn(f"logger.log_model: this method leaves no final/model.pt; {mend}", stacklevel=2)
        if self.log_model == "all":
            self._leave("checkpoints", [run_dir / name for name in TO_GO_ON if (run_dir / name).exists()])

    @temporary_files()
    def _leave(self, kind: str, paths: Sequence[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self.experiment.id}", type="model")
        for path in paths:
            artifact.add_dir(str(path), name=path.name) if path.is_dir() else artifact.add_file(str(path))
        self.experiment.log_artifact(artifact)

    @temporary_files()
    def finalize(self, status: str) -> None:
        """Close the W&B run."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


NOTE = Path("wandb", "run.json")
"""Where a run's folder says which W&B run is its own."""


@contextmanager
def _unlaunched() -> Iterator[None]:
    """Let W&B begin a run without a look at what was staged for its Launch: it imports all of Launch to find nothing.

    That takes a second. Where Launch is imported already, something may have been staged, and W&B looks.
    """
    import wandb

    name = "_detect_and_apply_job_inputs"
    look = getattr(wandb.Run, name, None)
    if look is None or "wandb.sdk.launch" in sys.modules:
        yield
        return
    setattr(wandb.Run, name, lambda run: None)
    try:
        yield
    finally:
        setattr(wandb.Run, name, look)


def read_note(run_dir: Path) -> dict[str, Any]:
    """What a run's folder says of its W&B run; nothing if there is none yet.

    Raises:
        ConfigError: It is not as it was written, or W&B's folder is none.
    """
    place = run_dir / NOTE
    if place.parent.is_symlink() or (place.parent.exists() and not place.parent.is_dir()):
        raise ConfigError(f"{place.parent} is no folder; W&B's files go there, move it away")
    if not place.exists() and not place.is_symlink():
        return {}
    mend = "put it back, or remove it to begin another W&B run"
    if place.is_symlink() or not place.is_file():
        raise ConfigError(f"{place} is no file: {mend}")
    try:
        content = place.read_text(encoding="utf-8")
        note = json.loads(content)
        note.pop("sha256")
        sound = content == sealed(note)
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {one_line(error)}") from error
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise ConfigError(f"{place} is damaged: {mend}")
    return note


def sealed(note: Mapping[str, Any]) -> str:
    """A note as it is written, with the SHA-256 of its content: whatever byte is changed is noticed."""
    digest = hashlib.sha256(json.dumps(note, indent=1).encode()).hexdigest()
    return json.dumps({**note, "sha256": digest}, indent=1) + "\n"


@contextmanager
def _blamed(key: str) -> Iterator[None]:
    """Turn W&B's refusal into one line that names the key."""
    try:
        yield
    except ValidationError as error:  # which tells where to read about pydantic, too
        raise ConfigError(f"{key}: {one_line(error.errors()[0]['msg'].removeprefix('Value error, '))}") from error
    except Exception as error:
        raise ConfigError(f"{key}: {one_line(error)}") from error


def grouped(value: Any) -> Any:
    """A config as W&B's filters want it: `algorithm.name`, `algorithm.tau`, `algorithm.loss_terms.Proximal.mu`.

    W&B joins nested keys by dots. A class is its arguments and its `name`, a list of classes a mapping by their names.
    An argument that is itself called `name` stays below `init_args`.
    """
    if isinstance(value, list) and value and all(map(_is_class, value)):
        seen: Counter[str] = Counter()
        return {_numbered(one["name"], seen): one for one in map(grouped, value)}
    if isinstance(value, list):
        return [grouped(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if not _is_class(value):
        return {key: grouped(one) for key, one in value.items()}
    arguments = grouped({**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})})
    own = {"init_args": {"name": arguments.pop("name")}} if "name" in arguments else {}
    return {"name": value["class_path"].rpartition(".")[2], **arguments, **own}


def _is_class(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def _chosen(option: str | None, variable: str) -> str | None:
    """An option of the config, or what the environment says where the config is silent."""
    return option if option is not None else os.environ.get(f"WANDB_{variable}") or None

"""The options of Lightning's `Trainer` that clients' fits support, and replacements for the others."""

from __future__ import annotations

TRAINER_KEYS = {
    "accelerator",
    "devices",
    "precision",
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "deterministic",
    "benchmark",
    "detect_anomaly",
}
"""The options that a client's fit takes."""

_MEASURED = "clients are measured between fits; see evaluation, and scenario.local_test for the data"
_ONE_DEVICE = "a client's fit runs on one device; the engines processes and ray spread clients over several"
_ENDS = "a client's fit ends at trainer.max_epochs or trainer.max_steps; leave it out"

TRAINER_FIXES = {
    "strategy": _ONE_DEVICE,
    "num_nodes": "a client's fit runs on one device; the engine ray spreads clients over machines",
    "use_distributed_sampler": _ONE_DEVICE,
    "sync_batchnorm": "a client's fit runs on one device; algorithm.buffers says what clients share of BatchNorm",
    "plugins": "trainer.precision says how precisely a client's fit computes; leave it out",
    "logger": "the run has the loggers, a client's fit none; use logger, as in --logger CSVLogger",
    "callbacks": "use client_callbacks for Lightning's in each client's fit, callbacks for what watches the run",
    "profiler": "it would tell of one fit of thousands; use time/fit_s and time/round_s in metrics.csv, or py-spy",
    "fast_dev_run": "use fit --fast, which tries everything in one short round",
    "overfit_batches": "use trainer.limit_train_batches or scenario.train_samples for less data",
    "min_epochs": _ENDS,
    "min_steps": _ENDS,
    "max_time": "use client_callbacks with Lightning's Timer to end each client's fit after some time",
    "limit_val_batches": _MEASURED,
    "limit_test_batches": _MEASURED,
    "limit_predict_batches": "a client's fit predicts nothing; leave it out",
    "val_check_interval": "use evaluation.every, the rounds between evaluations",
    "check_val_every_n_epoch": "use evaluation.every, the rounds between evaluations",
    "num_sanity_val_steps": "everything is tried before round 1 as it is; leave it out",
    "inference_mode": "clients are measured without gradients as it is; leave it out",
    "log_every_n_steps": "a round is a row, with the means over each client's steps; leave it out",
    "enable_checkpointing": "the run is checkpointed, not a client's fit; use Checkpointing under callbacks",
    "default_root_dir": "use run_dir, in which a run leaves everything",
    "enable_progress_bar": "the run has a bar, a client's fit none: the callback RoundProgress; leave it out",
    "enable_model_summary": "in Python, ModelSummary(open_run(RUN).client_module(0)) has one; leave it out",
    "enable_autolog_hparams": "loggers get the whole config as it is; leave it out",
    "model_registry": "use logger.log_model, which leaves the final model with W&B",
    "barebones": "a client's fit has neither logger, bar nor checkpoints as it is; leave it out",
    "reload_dataloaders_every_n_epochs": "each client's fit makes its own batches as it is; leave it out",
}
"""What to use instead of each other option."""


def refused(name: str) -> str:
    """Return the message about an option of Lightning's `Trainer` that a client's fit does not take."""
    known = f"a client's fit does not take it; there are {', '.join(sorted(TRAINER_KEYS))}"
    return f"trainer.{name}: {TRAINER_FIXES.get(name, known)}"

"""List the options of Lightning's `Trainer` that clients' fits support, and replacements for the others."""

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
"""The options that a client's fit supports."""

_EVALUATION = "Clients are evaluated between fits. Use evaluation, and scenario.local_test for the data."
_ONE_DEVICE = "A client's fit runs on one device. Use the engine processes or ray for several devices."
_END = "A client's fit ends at trainer.max_epochs or trainer.max_steps. Leave it out."

TRAINER_FIXES = {
    "strategy": _ONE_DEVICE,
    "num_nodes": "A client's fit runs on one device. The engine ray uses several machines for several clients.",
    "use_distributed_sampler": _ONE_DEVICE,
    "sync_batchnorm": "A client's fit runs on one device. Use algorithm.buffers to average BatchNorm over clients.",
    "plugins": "Use trainer.precision to set the precision of a client's fit.",
    "logger": "The run has loggers, a client's fit does not. Use logger, as in --logger CSVLogger.",
    "callbacks": "Use client_callbacks for callbacks of each client's fit, and callbacks for those of the run.",
    "profiler": "Set engine.profiler, which profiles the rounds; their batches are clients.",
    "fast_dev_run": "Use fit --fast, a dry run of two short rounds.",
    "overfit_batches": "Use trainer.limit_train_batches or scenario.train_samples for less data.",
    "min_epochs": _END,
    "min_steps": _END,
    "max_time": "Use client_callbacks with Lightning's Timer to limit the time of each client's fit.",
    "limit_val_batches": _EVALUATION,
    "limit_test_batches": _EVALUATION,
    "limit_predict_batches": "A client's fit does not predict. Leave it out.",
    "val_check_interval": "Use evaluation.every, the rounds between evaluations.",
    "check_val_every_n_epoch": "Use evaluation.every, the rounds between evaluations.",
    "num_sanity_val_steps": "Everything is checked before round 1. Leave it out.",
    "inference_mode": "Clients are always evaluated without gradients. Leave it out.",
    "log_every_n_steps": "Metrics are means over each client's steps and are logged once a round. Leave it out.",
    "enable_checkpointing": "Checkpoints are of the run, not of a client's fit. Use Checkpointing under callbacks.",
    "default_root_dir": "Use run_dir, the folder for everything that a run writes.",
    "enable_progress_bar": "The run has a progress bar, the callback RoundProgress. Leave it out.",
    "enable_model_summary": "In Python, use ModelSummary(open_run(RUN).client_module(0)). Leave it out.",
    "enable_autolog_hparams": "Loggers always get the whole config. Leave it out.",
    "model_registry": "Use logger.log_model to save the final model to W&B.",
    "barebones": "A client's fit never has a logger, a bar or checkpoints. Leave it out.",
    "reload_dataloaders_every_n_epochs": "Each client's fit has its own batches. Leave it out.",
}
"""The replacement for each option that a client's fit does not support, by the option's name."""


def unsupported_option(name: str) -> str:
    """Return the message about an option of Lightning's `Trainer` that a client's fit does not support."""
    known = f"A client's fit does not support it. Available: {', '.join(sorted(TRAINER_KEYS))}."
    return f"trainer.{name}: {TRAINER_FIXES.get(name, known)}"

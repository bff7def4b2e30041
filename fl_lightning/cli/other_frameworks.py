"""Tables that translate the names of commands, options and classes of other tools to ours.

The other tools are LightningCLI, PFLlib, Flower, FedLab, FedML and common training scripts. The last part of one of our
own keys, such as `tau` or `max_epochs`, needs no entry: it is found among the settings of the chosen classes.
"""

from __future__ import annotations

from collections.abc import Mapping


def by_alias(aliases: Mapping[str, str]) -> dict[str, str]:
    """Invert a mapping from our names to their space-separated aliases in other tools: return our name by alias."""
    return {alias: name for name, words in aliases.items() for alias in words.split()}


COMMANDS = by_alias(
    {
        "new": "init create scaffold quickstart",
        "fit": "train run start simulate",
        "fit --resume": "resume continue",
        "test": "validate evaluate eval predict",
        "watch": "monitor tail",
        "plot": "figure draw",
        "report": "html",
        "compare": "diff",
        "partition": "split",
        "sweep": "tune search agent",
        "cite": "bibtex citation references",
        "list": "ls",
        "list models": "models",
        "list datasets": "datasets",
        "list algorithms": "algorithms",
        "list configs": "configs",
    }
)
"""Our command for each command of another tool."""

OPTIONS = by_alias(
    {
        # optimizer
        "optimizer.lr": "learning_rate local_learning_rate client_lr local_lr lr",
        "round_lr_scheduler=ExponentialLR round_lr_scheduler.gamma": "lr_decay learning_rate_decay_gamma",
        "optimizer=SGD optimizer.momentum": "momentum",
        "optimizer.weight_decay": "weight_decay wd",
        "optimizer": "optim client_optimizer",
        "lr_scheduler": "scheduler",
        # training length
        "trainer.max_epochs": "epochs epoch num_epochs n_epochs local_epochs local_ep local_e le ls E",
        "trainer.max_steps": "local_steps max_iter",
        "rounds": (
            "num_rounds n_rounds global_rounds global_epochs num_server_rounds comm_round communication_rounds gr R T"
        ),
        # clients
        "scenario.clients": (
            "num_clients n_clients n_parties num_users num_partitions num_supernodes client_num_in_total nc K"
        ),
        "clients_per_round": "client_num_per_round num_clients_per_round",
        "clients_per_round (a number of clients, no share)": (
            "join_ratio jr frac fraction_fit fraction_train sample_fraction participation_rate C"
        ),
        "min_clients": "min_fit_clients",
        # data
        "scenario.dataset": "data dataset",
        "scenario.dataset.data_dir": "data_dir datadir data_path data_root root",
        "scenario.partition": "partition partitioner partition_method split",
        "scenario.partition=Dirichlet scenario.partition.alpha": (
            "alpha dirichlet_alpha partition_alpha dir_alpha beta noniid non_iid"
        ),
        "scenario.partition=IID": "iid",
        "batch_size": "batch bs lbs B local_batch_size local_bs train_batch_size",
        # method and model
        "algorithm": "algo alg method strategy",
        "model": "arch net network m",
        # seed, device and speed
        "seed": "seed_everything random_seed init_seed",
        "trainer.accelerator": "device dev accelerator",
        "trainer.accelerator=gpu": "gpus gpu cuda",
        "trainer.accelerator=cpu": "cpu",
        "trainer.devices": "device_id did",
        "trainer.precision=16-mixed": "amp fp16",
        "trainer.precision=bf16-mixed": "bf16",
        "trainer.gradient_clip_val": "grad_clip clip_grad_norm",
        "engine": "backend",
        "engine=processes": "parallel",
        # output, loggers and callbacks
        "run_dir": "logs logdir log_dir save_dir save_folder_name output output_dir out_dir out default_root_dir",
        "logger=WandbRoundLogger": "wandb use_wandb",
        "logger=null": "no_wandb",
        "logger=WandbRoundLogger logger.project": "project wandb_project",
        "logger=WandbRoundLogger logger.entity": "entity",
        "logger=WandbRoundLogger logger.name": "name run_name exp_name",
        "logger": "loggers",
        "callbacks": "callback",
        "resume": "ckpt_path checkpoint resume_from resume_from_checkpoint",
        "evaluation.every": "eval_gap eg eval_every frequency_of_the_test",
    }
)
"""Our option for each option of another tool, with `_` for `-`. Several options are separated by spaces."""

CLASSES = by_alias(
    {
        "WandbRoundLogger": "wandb wandblogger",
        "CSVLogger": "csv",
        "TensorBoardLogger": "tb",
        "Dirichlet": "noniid lda dir hetero",
        "Pathological": "pat",
        "IID": "homo",
        "StepLR": "step",
        "CosineAnnealingLR": "cosine",
        "ExponentialLR": "exponential",
        "Checkpointing": "modelcheckpoint",
        "RoundProgress": "tqdmprogressbar richprogressbar",
        "FedAdam": "fedopt",
    }
)
"""Our class for each name of another tool, without case, `_` and `-`."""

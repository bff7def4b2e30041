"""`Adapted` with a module of the user or of timm as its base: training, and the file of the merged network."""

from functools import partial

import pytest

pytest.importorskip("peft")

import numpy as np
import torch
from experiments import ONE_EPOCH, experiment, same_bytes
from tiny_models import Residual

from fl_lightning import ClientModule
from fl_lightning.algorithms import FedIT
from fl_lightning.analysis.export import merged_network, network_of_module, write_network
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.models import Adapted, FromModule, LoRA

VIT = {"model_name": "vit_tiny_patch16_224", "img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 24}
RESNET = {"model_name": "resnet10t", "num_classes": 2, "zero_init_last": False}  # with zeros nothing reaches them
BASES = {
    "own": ({"module": "tiny_models.Residual", "head": "last"}, ["first", "second"], (3, 2, 2)),
    "timm vit": (
        {"module": "timm.create_model", "module_args": VIT | {"num_heads": 2, "num_classes": 2}, "head": "head"},
        ["qkv", "attn.proj"],
        (3, 16, 16),
    ),
    "timm resnet": (
        {"module": "timm.create_model", "module_args": RESNET, "head": "fc"},
        ["layer2.0.conv1", "conv2"],
        (3, 32, 32),
    ),
}


@pytest.fixture(params=BASES)
def base(request):
    if request.param.startswith("timm"):
        pytest.importorskip("timm")
    return BASES[request.param]


def options(folder, base, targets, in_shape):
    rng, arrays = np.random.default_rng(0), {}
    for part, n in (("train", 48), ("test", 16)):
        arrays[f"x_{part}"] = rng.random((n, *in_shape), dtype=np.float32)
        arrays[f"y_{part}"] = rng.integers(0, 2, n)
    np.savez(folder / "images.npz", **arrays)
    return {
        "scenario": Scenario(Arrays(str(folder / "images.npz")), IID(), 2),
        "model": partial(Adapted, base=partial(FromModule, **base), adapter=LoRA(r=2, targets=targets)),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "clients_per_round": 2,
        "trainer": ONE_EPOCH,
    }


def test_adapters_and_head_are_trained_and_the_merged_file_has_the_users_module(tmp_path, base):
    keywords = base[0]
    common = options(tmp_path, *base)
    run = experiment(tmp_path / "run", FedIT(), rounds=1, **common)
    run.fit()
    resumed = experiment(tmp_path / "run", FedIT(), rounds=2, **common)
    resumed.fit(resume=True)
    whole = experiment(tmp_path / "whole", FedIT(), rounds=2, **common)
    whole.fit()
    assert same_bytes(resumed.state["model"], whole.state["model"])
    assert all("lora" in name or name.startswith("head.") for name in whole.state["model"])
    assert any(value.abs().max() > 0 for name, value in whole.state["model"].items() if "lora_B" in name)
    described = {"class_path": "fl_lightning.models.FromModule", "init_args": keywords}
    model = {"class_path": "fl_lightning.models.Adapted", "init_args": {"base": described}}
    trained = network_of_module(whole.evaluator.global_module(2), whole.data, model)
    merged = merged_network(trained)
    write_network(merged, tmp_path / "merged.ckpt")
    loaded = ClientModule.load_from_checkpoint(tmp_path / "merged.ckpt", backbone=merged.backbone).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(trained.samples), trained.outputs, rtol=1e-4, atol=1e-5)
    if keywords["module"].startswith("tiny_models"):
        own = Residual().eval()
    else:
        import timm

        own = timm.create_model(**keywords["module_args"]).eval()
    write_network(merged, tmp_path / "merged.pt")
    own.load_state_dict(torch.load(tmp_path / "merged.pt"))
    with torch.no_grad():
        torch.testing.assert_close(own(trained.samples), trained.outputs, rtol=1e-4, atol=1e-5)

"""The figure of masks: the pixels that the model predicts, by client."""

import numpy as np
import pytest
from experiments import ONE_EPOCH, experiment

from fl_lightning.algorithms import FedAvg, FedPer
from fl_lightning.callbacks import PredictedMasks
from fl_lightning.callbacks.predicted_masks import COLORS, UNUSED, colored
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.models import UNet


def masks(tmp_path, n=40):
    """Return four clients with random images, and masks that are the sign of the image; one pixel is not used."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 1, 8, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.uint8)
    y[:, 0, 0] = 255
    np.savez(tmp_path / "masks.npz", x_train=x[:-8], y_train=y[:-8], x_test=x[-8:], y_test=y[-8:])
    return Scenario(Arrays(str(tmp_path / "masks.npz")), IID(), 4)


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_the_masks_are_those_of_the_first_test_image_of_each_client(tmp_path, method):
    model = lambda in_shape, num_classes: UNet(in_shape, num_classes, width=4, depth=1)  # noqa: E731
    options = {"scenario": masks(tmp_path), "model": model, "rounds": 1, "trainer": ONE_EPOCH}
    run = experiment(tmp_path / "run", method(), callbacks=[PredictedMasks(clients=2)], **options)
    run.fit()
    folder = tmp_path / "run" / "figures" / "predicted_masks"
    assert (folder / "round-000001.png").stat().st_size > 1000
    with np.load(folder / "round-000001.npz") as arrays:
        assert arrays["clients"].tolist() == [0, 1]
        for row, client in enumerate((0, 1)):
            index = run.data.shards[client].test[0]
            image, mask = run.data.data.x_train[index], run.data.data.y_train[index].long()
            module = run.evaluator.global_module(1) if method is FedAvg else run.client_module(client)
            predicted = module.eval()(run.data.data.prepare(image[None]))[0].argmax(dim=0)
            assert np.array_equal(arrays["predictions"][row], predicted.numpy())
            mask[0, 0] = -1
            assert np.array_equal(arrays["masks"][row], mask.numpy())


def test_each_class_has_its_colour_and_unused_pixels_are_grey():
    colors = colored(np.array([[0, 1], [-1, COLORS.N]]))
    assert colors[0, 0] == pytest.approx(COLORS(0)[:3])
    assert colors[0, 1] == pytest.approx(COLORS(1)[:3])
    assert colors[1, 0] == pytest.approx(UNUSED)
    assert colors[1, 1] == pytest.approx(COLORS(0)[:3])  # colours repeat


def test_labels_that_are_no_masks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="PredictedMasks"):
        experiment(tmp_path, callbacks=[PredictedMasks()]).fit()


def test_at_least_one_client_is_shown():
    with pytest.raises(ConfigError, match=r"PredictedMasks.clients"):
        PredictedMasks(clients=0)

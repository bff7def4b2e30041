"""Update compression: smaller messages between the clients and the server.

`Codec` compresses and restores the messages of a run with a `Compressor` for each direction.
"""

from fl_lightning.compression.base import Compressor as Compressor
from fl_lightning.compression.float16 import Float16 as Float16
from fl_lightning.compression.qsgd import QSGD as QSGD
from fl_lightning.compression.sign_sgd import SignSGD as SignSGD
from fl_lightning.compression.sparse import RandomK as RandomK
from fl_lightning.compression.sparse import TopK as TopK

__all__ = ["QSGD", "Compressor", "Float16", "RandomK", "SignSGD", "TopK"]

"""FedSA-LoRA: clients share the factors `A`, and each keeps its own factors `B`.

Guo, Zeng, Wang, Fan, Wang, Qu: "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025,
Section 3. `A` learns what the clients have in common, and `B` what is specific to a client.
"""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.algorithms.adapters.fedit import FedIT


class FedSALoRA(FedIT):
    """FedAvg of the factors `A`. The factors `B` stay on their client.

    There is no global model. The head, if the model trains one, is averaged as in FedAvg; with `personal`
    `["*.lora_B.*", "head."]` it stays on the client, too.

    Bytes a round, each participant: down `trained - B`, up `trained - B + 8`.

    Kept by a client: its factors `B`.

    Args:
        personal: Patterns or prefixes of the names of entries that stay on their client.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    personal: Sequence[str] = ("*.lora_B.*",)

    one_model = False

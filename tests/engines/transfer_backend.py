"""A weight-transfer backend for CPU in place of NCCL: the same lifecycle, tensors through the rendezvous store.

A test server's workers import it (`--worker-extension-cls`); it registers itself with vLLM. The trainer's side is
`store_group`. Everything between the two is what runs with NCCL too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


@dataclass
class InitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    packed: bool


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class StoreEngine(WeightTransferEngine):  # type: ignore[type-arg]
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = StatelessProcessGroup.create(
            init_info.master_address, init_info.master_port, rank, init_info.world_size
        )

    def receive_weights(self, update_info: UpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = self.group.broadcast(None, src=0)
            assert list(tensor.shape) == shape and str(tensor.dtype) == f"torch.{dtype}"
            self.model.load_weights([(name, tensor)])

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def store_group(host: str, port: int, size: int) -> Any:
    """The trainer's side in place of `lightrl.compat.vllm_process.transfer_group`."""
    return StatelessProcessGroup.create(host, port, 0, size)


if "store" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("store", StoreEngine)

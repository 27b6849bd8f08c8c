"""Lightning's DeepSpeed strategy on CPU, for tests only.

Lightning refuses DeepSpeed without CUDA in three places: it asks for a CUDA accelerator, checks that devices are
numbered like local ranks (a CPU has no number), and hands DeepSpeed that number. DeepSpeed itself runs on CPU with
gloo. Only those three are replaced here; all that trains, saves and loads is what runs on GPUs. DeepSpeed's own
collectives for ranks on one CPU are left out, since the compiler takes over a minute for them.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("DS_LOG_LEVEL", "error")

import deepspeed
import deepspeed.comm.torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy

from lightrl.distributed.fsdp2 import ZeROStrategy

deepspeed.comm.torch.build_shm_op = lambda: None


class CPUZeROStrategy(ZeROStrategy):
    """`ZeROStrategy` without the checks for CUDA."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        engine, wrapped, _, _ = deepspeed.initialize(
            args=None,
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped

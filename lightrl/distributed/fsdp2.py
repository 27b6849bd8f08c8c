"""Lightning's sharding strategies with additions for several models and for complete, verified checkpoints.

Both are optional: `ModelParallelStrategy` and `DeepSpeedStrategy` also work. `FSDP2Strategy` can resume from a plain
checkpoint (single process or DDP) on any number of ranks.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, ParallelStrategy
from torch.distributed.constants import default_pg_timeout

from lightrl.checkpoints.checkpoint_io import (
    by_name,
    checkpoint_kind,
    read_checkpoint,
    readable,
    require_optimizer_states,
    without_secrets,
)
from lightrl.checkpoints.files import DamagedError, partial_folder, publish_folder, remove, verify
from lightrl.compat.lightning_checkpoints import load_module_state, set_data_parallel_size


class _FolderCheckpoints(ParallelStrategy):
    """Saves checkpoints as verified directories, to which all ranks write."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a directory with a part of every rank, which appears only when complete."""
        path = Path(self.broadcast(filepath))
        folder = partial_folder(path)
        if self.is_global_zero:
            remove(folder)
        self.barrier("checkpoint_begun")
        super().save_checkpoint(without_secrets(checkpoint), folder, storage_options)
        self.barrier("checkpoint_written")
        if self.is_global_zero:
            publish_folder(folder, path)
        self.barrier("checkpoint_named")

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the directory or file and its checksums."""
        if self.is_global_zero:
            remove(filepath)

    def _verify_checkpoint(self, path: Path) -> None:
        """Verifies a directory on rank 0, and raises its error on every rank."""
        damage = None
        if self.is_global_zero:
            try:
                verify(path)
            except DamagedError as error:
                damage = str(error)
        damage = self.broadcast(damage)
        if damage is not None:
            with readable(path):
                raise DamagedError(damage)


class FSDP2Strategy(_FolderCheckpoints, ModelParallelStrategy):
    """FSDP2: shards every model over all ranks with `fully_shard`, one unit per transformer block.

    Args:
        param_dtype: Dtype in which weights are gathered and used, with float32 weights for the optimizer. "bfloat16"
            halves the traffic and the memory of gathered weights; keep the Trainer's precision at 32-true. Also the
            default dtype of the engine. Defaults to the Trainer's precision (bf16-mixed gathers float32).
        cpu_offload: Keep weights, gradients, and optimizer states in host memory, and load blocks to the device when
            they are computed. Sets up gloo alongside NCCL.
        reduce_every_micro_batch: Reduce gradients over ranks after each micro-batch instead of once per update. Each
            rank then holds only its shards of gradients, not all of them (4 bytes per parameter). Only the order of
            sums changes. Defaults to True for models of more than 3 billion parameters.
        context_parallel_size: Number of ranks that split one stream of tokens equally, and heads in attention, so
            sequences may exceed `micro_batch_tokens` of one rank. Must divide the number of ranks and of attention
            heads. Requires text and a packed layout. Doesn't affect results.
        timeout: Timeout of collectives, which ends the run. Must exceed the longest rollout of the slowest rank.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    def __init__(
        self,
        param_dtype: Literal["bfloat16", "float16"] | None = None,
        cpu_offload: bool = False,
        reduce_every_micro_batch: bool | None = None,
        context_parallel_size: int = 1,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        # Norms and gathers of offloaded tensors run on the host.
        backend = "cpu:gloo,cuda:nccl" if cpu_offload and torch.cuda.is_available() else None
        super().__init__("auto", 1, process_group_backend=backend, timeout=timeout)
        self.param_dtype = param_dtype
        self.cpu_offload = cpu_offload
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self.context_parallel_size = context_parallel_size

    @cached_property
    def context_group(self) -> Any:
        """Process group of the ranks that share a stream of tokens with this rank. None if there are none."""
        size = self.context_parallel_size
        return None if size == 1 else torch.distributed.new_subgroups(size)[0]

    @property
    def shard_options(self) -> dict[str, Any]:
        """Additional arguments of `fully_shard`."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        options: dict[str, Any] = {}
        if self.param_dtype is not None:
            param = getattr(torch, self.param_dtype)
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=torch.float32)
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return options

    def setup_environment(self) -> None:
        """Makes all ranks data-parallel. By default, Lightning would split every layer over them."""
        set_data_parallel_size(self, self.num_nodes * self.num_processes)
        super().setup_environment()

    def model_to_device(self) -> None:
        """Moves unsharded parameters to the device. Offloaded parameters stay on the host."""
        if not self.cpu_offload:
            super().model_to_device()
            return
        assert self.model is not None
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a directory on any number of ranks, or a plain file. Raises a ValueError if it is damaged."""
        path = Path(self.broadcast(checkpoint_path))
        if checkpoint_kind(path) != "plain":
            self._verify_checkpoint(path)
            return super().load_checkpoint(path, weights_only)
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        assert self.model is not None
        checkpoint = read_checkpoint(path)
        if self.optimizers:
            require_optimizer_states(checkpoint, path)
        load_module_state(checkpoint["state_dict"], self.model)
        options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
        for optimizer, states in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            # Lightning numbers all parameters here, including frozen ones; an optimizer only numbers its own.
            named = by_name(states, _group_names(self.model, optimizer))
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=named, options=options)
        return checkpoint


class ZeROStrategy(_FolderCheckpoints, DeepSpeedStrategy):
    """`DeepSpeedStrategy` that saves only the weights that the module needs, in verified directories.

    Checkpoints omit frozen parameters (of reference and reward models, or of a LoRA base) unless the module's
    `state_dict` has them, such as a changed reference or randomly initialized weights.

    Args:
        stage: ZeRO stage.
        reduce_every_micro_batch: As in `FSDP2Strategy`, for stages 2 and 3. Defaults to True for models of more than 3
            billion parameters.
        kwargs: Arguments of `lightning.pytorch.strategies.DeepSpeedStrategy`, such as `offload_optimizer`,
            `offload_parameters`, and `config`.
    """

    def __init__(self, stage: int = 2, reduce_every_micro_batch: bool | None = None, **kwargs: Any) -> None:
        super().__init__(stage=stage, **kwargs)
        self.reduce_every_micro_batch = reduce_every_micro_batch

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a directory in which every rank writes its part."""
        module: Any = self.lightning_module
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self.exclude_frozen_parameters = frozen.isdisjoint(checkpoint["state_dict"])
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a directory on as many ranks as wrote it. Raises a ValueError if it is damaged."""
        path = Path(self.broadcast(checkpoint_path))
        self._verify_checkpoint(path)
        return super().load_checkpoint(path, weights_only)


def _group_names(model: Any, optimizer: Any) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

"""Base class of all modules, which builds models once, saves and loads them; the optimizer; and grouped settings."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightrl.compat.lightning import KeepsHooks, nearest_of_ours, refuse_callbacks
from lightrl.distributed import strategies
from lightrl.models.policy import PolicyModel, named_hf_weights
from lightrl.models.spec import ModelSpec

Module = TypeVar("Module", bound="SavesPretrained")


class SavesPretrained(KeepsHooks, LightningModule):
    """A LightningModule that builds its models once and saves its trained model in Hugging Face format."""

    kept_hooks = (
        *("configure_callbacks", "setup", "on_fit_start", "on_train_start", "on_validation_epoch_end"),
        *("on_test_epoch_end", "on_save_checkpoint", "on_load_checkpoint"),
    )
    optimizer_factory: Any
    _is_built = False
    _is_sharded = False
    _loaded_tokenizer: str | None = None  # tokenizer of the run whose checkpoint was loaded
    logs_hyperparameters = True  # the command line logs its own
    model_name = "actor"  # in checkpoints
    actor: PolicyModel
    actor_spec: ModelSpec
    _given_settings: list[dict[str, Any]] | None = None  # of the optimizer's groups
    _saved_settings: list[dict[str, Any]] | None = None  # those given to the resumed run

    @abstractmethod
    def build_models(self, in_shards: bool = False) -> None:
        """Sets the models as attributes, empty where possible if ranks load their shards (`in_shards`)."""

    def models(self) -> list[Any]:
        """Returns the models that the strategy shards."""
        return [self.trained_model[0]]

    @property
    def trained_model(self) -> tuple[Any, ModelSpec]:
        """The trained model and its spec, for saving in Hugging Face format."""
        return self.actor, self.actor_spec

    # ---- run ---------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Any]:
        """Rejects callbacks that would have no effect, and preserves `metrics.csv` of a previous run until it logs."""
        trainer: Any = self.trainer
        if trainer.state.fn == "fit":
            refuse_callbacks(trainer.callbacks, manual=not self.automatic_optimization)
            if any(isinstance(logger, CSVLogger) for logger in trainer.loggers):
                from lightrl.compat.lightning_cli import begin_tables

                begin_tables(trainer)
        return []

    def on_fit_start(self) -> None:
        """Records the optimizer's settings before a checkpoint replaces them, and logs the run's hyperparameters."""
        trainer: Any = self.trainer
        self._given_settings = [
            {name: value for name, value in group.items() if isinstance(value, float | int | tuple)}
            | {"lr": group.get("initial_lr", group["lr"])}  # without a schedule's factor
            for group in trainer.optimizers[0].param_groups
        ]
        if self.logs_hyperparameters and trainer.is_global_zero and trainer.loggers:
            from lightrl.algorithms import run_record

            record = run_record.hyperparameters(trainer)
            for logger in trainer.loggers:
                logger.log_hyperparams(record)

    def run_settings(self) -> dict[str, Any]:
        """Returns settings that must match for `--ckpt_path last`: module, sizes, seed, and prompts."""
        from lightrl.algorithms import run_record

        return run_record.run_settings(self, self.trainer.datamodule)  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        """Builds and shards the models once, and drops gradients of a run that ended within an update. Collective."""
        strategy = self.trainer.strategy
        if type(strategy.precision_plugin) is not Precision:
            from lightrl.distributed.precision import keep_exact

            keep_exact(strategy.precision_plugin)
        self.zero_grad()
        if self._is_sharded:
            return
        if strategies.shards(strategy):
            from lightrl.models.folders import build_in_shards

            build_in_shards(self, strategy, built=self._is_built)
        elif not self._is_built:
            self.build_models()
        self._is_built = self._is_sharded = True

    def on_train_start(self) -> None:
        """Sets the optimizer's settings, such as the learning rate, that the resumed run changes."""
        given, saved, self._saved_settings = self._given_settings, self._saved_settings, None
        if saved is not None and given is not None and self.trainer.ckpt_path is not None:
            from lightrl.algorithms.run_record import change_settings

            change_settings(self.trainer, given, saved)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what `lightrl export` needs to build the models, and what identifies the run.

        Converts the hyperparameters of `save_hyperparameters` to plain values, so that files load without pickle.
        """
        from lightrl.algorithms import run_record

        for name in checkpoint.keys() & {"hyper_parameters", "datamodule_hyper_parameters"}:
            checkpoint[name] = run_record.described(checkpoint[name])
        described = run_record.description(type(self).__name__, self.saved_specs, self._tokenizer_path)
        checkpoint["lightrl"] = {**described, "settings": self.run_settings(), "optimizer": self._given_settings}
        trainer: Any = self.trainer
        if trainer.datamodule is not None:  # Lightning's entry lacks it if an override doesn't call `super`
            checkpoint["lightrl"]["data"] = nearest_of_ours(type(trainer.datamodule)).state_dict(trainer.datamodule)

    @property
    def saved_specs(self) -> dict[str, ModelSpec]:
        """The specs of the trained models, for checkpoints."""
        return {self.model_name: self.trained_model[1]}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls: type[Module], checkpoint_path: str | Path, **arguments: Any
    ) -> Module:
        """Loads a module from a checkpoint of any strategy and number of ranks, into host memory.

        Use the module directly, or pass it to a Trainer to start a new run. To resume a run, use
        `trainer.fit(ckpt_path=...)`.

        Args:
            checkpoint_path: Checkpoint file or directory.
            arguments: Constructor arguments, as in the run. The checkpoint holds trained weights; frozen models are
                loaded from their source.

        Raises:
            ValueError: The path is not a checkpoint, or its class or models differ.
        """
        module = cls(**arguments)
        module.load_weights(checkpoint_path)
        return module

    def load_weights(self, checkpoint_path: str | Path) -> None:
        """Builds the models without a trainer and loads a checkpoint's weights; see `load_from_checkpoint`."""
        from lightrl.checkpoints.checkpoint_io import read_checkpoint

        checkpoint = read_checkpoint(checkpoint_path)
        self.build_models()
        self._is_built = True
        SavesPretrained.on_load_checkpoint(self, checkpoint)
        self._loaded_tokenizer = checkpoint["lightrl"].get("tokenizer")
        self.load_state_dict(checkpoint["state_dict"], strict=False)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises a ValueError if the checkpoint has a different class, or lacks trained weights."""
        from lightrl.algorithms import run_record

        run_record.require_own(checkpoint.get("lightrl", {}), type(self).__name__)
        self._saved_settings = checkpoint["lightrl"].get("optimizer")
        if "state_dict" in checkpoint:  # otherwise the strategy loads and checks sharded weights
            # Without the reference: checkpoints omit one that hasn't changed.
            own = {name: x for name, x in self.state_dict().items() if not name.startswith("reference.")}
            run_record.require_weights(own, checkpoint["state_dict"])
        trainer: Any = self._trainer  # None in `load_weights`
        data, stored = getattr(trainer, "datamodule", None), checkpoint["lightrl"].get("data")
        if stored and not getattr(data, "restored", True) and trainer.training:
            nearest_of_ours(type(data)).load_state_dict(data, stored)

    @property
    def _tokenizer_path(self) -> str | None:
        """Returns the path in `data.tokenizer`; None if the model's tokenizer is used."""
        try:
            trainer = self.trainer
        except RuntimeError:  # built by `load_from_checkpoint`
            return self._loaded_tokenizer
        path = getattr(getattr(trainer, "datamodule", None), "tokenizer_path", None)
        return None if path is None else os.path.expanduser(path)

    # ---- Hugging Face format -----------------------------------------------------------------------------------

    def named_policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full tensor) of all parameters, LoRA merged. Collective if sharded."""
        return named_hf_weights(self.trained_model[0])

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves weights, config, and tokenizer as a model directory for transformers and vLLM, with LoRA merged.

        Uses the tokenizer in `data.tokenizer`, or else the model's. Collective: every rank calls it, tensors are
        gathered one by one, and rank 0 writes. The directory appears only when complete.

        Args:
            folder: Model directory to write. Existing files are replaced.

        Raises:
            ValueError: Weights are not finite. Existing files are kept.
        """
        from lightrl.checkpoints.checkpoint_io import first_nonfinite, require_finite
        from lightrl.checkpoints.files import atomic_folder
        from lightrl.models.folders import save_hf_folder

        try:
            strategy: Any = self.trainer.strategy
        except RuntimeError:  # after `load_from_checkpoint` without a trainer
            strategy = SingleDeviceStrategy("cpu")
        state, zero, bad = {}, strategy.is_global_zero, None
        for name, tensor in self.named_policy_weights():
            if zero:
                state[name] = tensor.cpu().clone()
                bad = bad or first_nonfinite({name: tensor})
        require_finite(strategy.broadcast(bad), folder)  # on every rank
        if zero:
            model, spec = self.trained_model
            with atomic_folder(Path(folder)) as new:
                save_hf_folder(
                    model,
                    state,
                    new,
                    tokenizer_path=self._tokenizer_path or spec.path,
                    processor_path=spec.path,
                    chat_template=spec.chat_template,
                )
        strategy.barrier()


# ---- optimizer ---------------------------------------------------------------------------------------------------


def make_optimizer(factory: Callable[[Any], Any], parameters: Any, strategy: Strategy) -> Any:
    """Builds the optimizer; warns if updates are too small for bfloat16 weights.

    An Adam update is about as large as the learning rate. Neighbors of a bfloat16 weight w are 2^-8 to 2^-7 |w| away,
    so a single update below half of that rounds back to w. DeepSpeed's optimizers keep float32 weights.
    """
    optimizer = factory(parameters)
    if "Adam" in type(optimizer).__name__ and not isinstance(strategy, DeepSpeedStrategy):
        for group in optimizer.param_groups:
            _warn_of_lost_updates(group)
    return optimizer


def _warn_of_lost_updates(group: dict[str, Any]) -> None:
    matrices = [p for p in group["params"] if p.dtype == torch.bfloat16 and p.dim() > 1]
    largest = max(matrices, key=lambda p: p.numel(), default=None)
    own = None if largest is None else strategies.local_shard(largest)
    if own is None or not own.numel():
        return
    size, rate = float(own.abs().float().mean()), float(group["lr"])
    if 0 < rate < size * 2.0**-9:
        rank_zero_warn(
            f"optimizer: lr={rate:g} is too small for bfloat16 weights (mean magnitude {size:.1g}, spacing about "
            f"{size * 2.0**-8:.1g}): most updates round to zero. Set actor.dtype=float32 with "
            "trainer.precision=bf16-mixed, or raise the learning rate."
        )


# ---- settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Updates:
    """Updates per rollout and their limits.

    Args:
        minibatch_size: Number of trajectories per optimizer step, over all ranks. Must divide the rollout. Defaults to
            the whole rollout.
        micro_batch_tokens: Maximum number of tokens per forward/backward pass. Affects memory and speed, not results.
            Defaults to 16384, and to 4096 on a CPU.
        max_grad_norm: Maximum joint gradient norm of policy and critic. None disables clipping.
        max_skipped_updates: Number of consecutive updates with a non-finite loss or gradient that stops the run.
        off_policy_correction: Apply `OffPolicyCorrection` to rollouts sampled by older policies. No effect if the loss
            declares that it reads the engine's log-probs.
    """

    minibatch_size: int | None = None
    micro_batch_tokens: int | None = None
    max_grad_norm: float | None = 1.0
    max_skipped_updates: int = 5
    off_policy_correction: bool = True

    def tokens(self, device_type: str) -> int:
        """`micro_batch_tokens`, or its default for the device type."""
        default = 4096 if device_type == "cpu" else 16384  # larger ones are no faster on a CPU, and need more memory
        return default if self.micro_batch_tokens is None else self.micro_batch_tokens


@dataclass(frozen=True)
class Shaping:
    """Clipping of rewards and advantages, and filters on trained tokens.

    Args:
        reward_clip: Maximum absolute trajectory reward, before the KL penalty. None disables clipping.
        advantage_clip: Maximum absolute advantage, after whitening. None disables clipping.
        mask_truncated: Exclude completions truncated at `max_new_tokens` from all losses and their normalizers. They
            still count in the baselines of other completions.
        top_entropy_fraction: Fraction of the rollout's tokens that the policy loss trains, by highest entropy over all
            ranks. In (0, 1]; 1 trains all tokens. The paper (https://arxiv.org/abs/2506.01939) uses 0.2. As in the
            paper, the normalizer counts all tokens. The KL penalty, entropy bonus, and critic also use all tokens.
    """

    reward_clip: float | None = None
    advantage_clip: float | None = None
    mask_truncated: bool = False
    top_entropy_fraction: float = 1.0


@dataclass(frozen=True)
class ExtraLosses:
    """Weights of losses added to the policy loss. 0 disables a loss.

    Args:
        entropy_coef: Weight of the entropy bonus.
        ptx_coef: Weight of the supervised loss on the data module's `ptx` examples, a mean over completion tokens.
            InstructGPT's PPO-ptx (https://arxiv.org/abs/2203.02155, eq. 2) sums over tokens instead.
        aux_loss_coef: Weight of a mixture-of-experts model's load-balancing loss, computed per micro-batch. It is the
            only loss that depends slightly on the micro-batch size.
    """

    entropy_coef: float = 0.0
    ptx_coef: float = 0.0
    aux_loss_coef: float = 0.0


def require_matching_parts(module: Any) -> None:
    """Raises a ValueError if parts of an RL module are incompatible. Called at the end of its constructor."""
    advantage, kl, clip = module.advantage, module.kl, module.shaping.reward_clip
    if advantage.needs_critic and getattr(module, "critic_spec", None) is None:
        raise ValueError(
            f"advantage={type(advantage).__name__} needs a critic but critic=None. Use PPOLightningModule with a "
            "CriticSpec, or an estimator without a critic (GroupRelative, RLOO, ...)."
        )
    advantage.refuse_combination(kl, whiten=module.whiten_advantages)
    if clip is not None:
        advantage.refuse_shaped_rewards(f"reward_clip={clip}")
    if kl is not None and module.actor_spec.random_init and module.reference_spec is None:
        raise ValueError(
            "actor.random_init=True with kl: there are no pretrained weights to use as reference. "
            "Set kl=None, or pass a reference."
        )

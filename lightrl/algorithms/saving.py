"""Trained models as Hugging Face folders, from any of the modules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightrl.models.loading import save_hf_folder
from lightrl.models.spec import ModelSpec
from lightrl.storage import atomic_folder

__all__ = ["SavesPretrained"]


class SavesPretrained(LightningModule):
    """A module whose trained model can be written as transformers writes one."""

    @property
    @abstractmethod
    def trained_model(self) -> tuple[Any, ModelSpec]:
        """The model that is written, and what it was made from."""

    @abstractmethod
    def named_policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter; collective under sharding strategies."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes weights, configuration and tokenizer as a folder that transformers and vLLM load, LoRA merged.

        Collective: every rank calls it, tensors are gathered one by one, and rank 0 writes. The folder appears whole.

        Args:
            folder: where to; what is there is replaced.

        Raises:
            RuntimeError: the module has not been given to a Trainer yet, so there is no model.
        """
        state, zero = {}, self.trainer.is_global_zero
        for name, tensor in self.named_policy_weights():
            if zero:
                state[name] = tensor.cpu().clone()
        if zero:
            model, spec = self.trained_model
            with atomic_folder(Path(folder)) as new:
                save_hf_folder(model, state, new, tokenizer_path=spec.path)
        self.trainer.strategy.barrier()

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, revision: str | None = None) -> None:
        """Uploads what `save_pretrained` writes to the Hugging Face hub. Collective, as that is.

        Args:
            repo_id: organisation/name; made where it does not exist.
            private: whether a new repository is; None is the account's default.
            revision: branch to push to; the main one where None.
        """
        with TemporaryDirectory() as parent:
            folder = Path(parent) / "model"
            self.save_pretrained(folder)
            if self.trainer.is_global_zero:
                from huggingface_hub import HfApi

                hub = HfApi()  # the token is that of the environment, or of `hf auth login`
                hub.create_repo(repo_id, private=private, exist_ok=True)
                hub.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision)

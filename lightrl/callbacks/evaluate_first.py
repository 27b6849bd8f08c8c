"""An evaluation before training, with which later ones are compared."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class EvaluateFirst(Callback):
    """Evaluates once before training, on all evaluation prompts, and logs `eval/*` at step -1.

    It lets Lightning's sanity check run over the whole evaluation set and logs what it finds, which Lightning drops.
    A resumed run has no sanity check and so logs nothing here. `CompletionLogger` then has samples of before
    training, and
    `lightrl report` draws the evaluation at 0 rollouts.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Asks for a sanity check over everything, or, now that a checkpoint is known, for none."""
        trainer.num_sanity_val_steps = float("inf") if trainer.ckpt_path is None else 0

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the metrics of the evaluation."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=-1)
            logger.save()

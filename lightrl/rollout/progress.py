"""How far a rollout is, in the bar that Lightning shows."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

SEPARATOR = " | "


def show_in_bar(trainer: Trainer | None, text: str) -> bool:
    """Puts a text behind the description of the bar that is running, instead of the last one; "" takes it away.

    Any thread may call it.

    Returns:
        whether there is a bar that can show it: Lightning's own are tqdm's and Rich's.
    """
    bar = None if trainer is None else trainer.progress_bar_callback
    if trainer is None or not isinstance(bar, TQDMProgressBar | RichProgressBar) or bar.is_disabled:
        return False
    stages = {"predict": trainer.predicting, "test": trainer.testing, "val": trainer.validating}
    name = next((stage for stage, now in stages.items() if now), "train")
    behind = f"{SEPARATOR}{text}" if text else ""
    if isinstance(bar, TQDMProgressBar):
        try:
            shown = getattr(bar, f"{name}_progress_bar")
        except TypeError:  # what it raises where there is none yet
            return False
        shown.set_description(shown.desc.removesuffix(": ").split(SEPARATOR)[0] + behind)
        return True
    if bar.progress is not None:
        number = getattr(bar, f"{name}_progress_bar_id")
        for task in bar.progress.tasks:
            if task.id == number:
                bar.progress.update(number, description=task.description.split(SEPARATOR)[0] + behind)
                bar.refresh()
                return True
    return False

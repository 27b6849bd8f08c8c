"""`lightrl check-env`: plays the environment of a configuration with scripted replies and no model."""

from __future__ import annotations

import sys

from lightrl.cli import run
from lightrl.cli.config_files import expand_configs


def check_env(config: str, rows: int = 2, replies: list[str] | None = None, seed: int = 0) -> None:
    """Plays the environment of a configuration with scripted replies. Exit code 1 if it has a fault.

    Prints for each script: why it ended, its reward, how many tokens would be trained, seconds per step; then whether
    the chat template extends what was sampled, and whether one seed gives one outcome.

    No model is loaded, no engine started, no reward function called. The environment itself acts as in a run: each
    script plays it twice per row.

    Args:
        config: Configuration file, as for `lightrl fit`.
        rows: Number of rows to play.
        replies: Texts of your own script, one per turn, such as a correct answer.
        seed: Of the environment's `reset`.

    Raises:
        ValueError: The configuration has no `EnvironmentEpisode`.
    """
    expand_configs(["--config", config])
    from lightrl.data.processing import load_processor
    from lightrl.data.templates import load_tokenizer
    from lightrl.environments import EnvironmentEpisode
    from lightrl.environments.scripted import play

    built = run(["--config", config], run=False)
    module, data = built.model, built.datamodule
    episode = getattr(data, "episode", None)
    if not isinstance(episode, EnvironmentEpisode):
        raise ValueError(
            f"data.episode={type(episode).__name__}: is not an EnvironmentEpisode. Check a config with one."
        )
    path = module.actor_spec.path
    tokenizer = load_tokenizer(data.tokenizer_path or path, chat_template=module.actor_spec.chat_template)
    processor = load_processor(path, tokenizer)
    episode.setup(tokenizer, processor)
    prompts = data.prompts.load(tokenizer, shuffle=False, processor=processor)
    batch = prompts.rows(range(min(rows, len(prompts))))
    examples = [
        {**{name: values[i] for name, values in batch.columns.items()}, "prompt": batch.raw[i]}
        for i in range(len(batch))
    ]
    found = play(
        episode,
        examples,
        tokenizer,
        data.sampling,
        seed=seed,
        replies=replies or (),
    )
    problems = found.problems()
    lines = [*found.lines(), *(f"note: {note}" for note in found.notes), *(f"problem: {text}" for text in problems)]
    print("\n".join(lines))
    if problems:
        sys.exit(1)
    print("No problem found.")

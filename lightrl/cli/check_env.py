"""`lightrl check-env`: plays the environment of a configuration with scripted replies and no model."""

from __future__ import annotations

import sys

from lightrl.cli import run
from lightrl.cli.config_files import expand_configs
from lightrl.compat.arguments import at_least


def check_env(config: str, rows: int = 2, replies: list[str] | None = None, seed: int = 0) -> None:
    """Plays the environment of a configuration with scripted replies and no model. Exit status 1 where it is wrong.

    Printed for each script: why it ended, its reward, how many tokens would be trained, seconds per step; then whether
    the chat template extends what was sampled, and whether one seed gives one outcome.

    What the run's objects write, such as its folder, is not made: no model is loaded, no engine started, no reward
    function called. What the environment itself does to files or services is done: each script plays it twice at each
    row, and it is made once more to ask for its tools.

    Args:
        config: of a run, as for `lightrl fit`; `--config FILE` is the same.
        rows: rows of the data set to play, at least 1.
        replies: texts of a script of your own, one per turn, such as a right answer.
        seed: of the environment's `reset`.

    Raises:
        ValueError: the configuration has no `EnvironmentEpisode`.
    """
    at_least("rows", rows, 1)
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
            f"{config}: data.episode is {type(episode).__name__}; scripted replies play an EnvironmentEpisode "
            "only. Run a program of your own against any model's endpoint to try it."
        )
    tokenizer = load_tokenizer(
        data.tokenizer_path or module.actor_spec.path, chat_template=module.actor_spec.chat_template
    )
    processor = load_processor(module.actor_spec.path, tokenizer)
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
        reward_functions=data.scorer is not None,
    )
    for line in found.lines():
        print(line)
    problems = found.problems()
    for note in found.notes:
        print(f"note: {note}")
    for problem in problems:
        print(f"problem: {problem}")
    if problems:
        sys.exit(1)
    print("No problem found.")

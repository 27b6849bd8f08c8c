"""`lightrl check-env`: tests the environment or agent program of a configuration without training."""

from __future__ import annotations

import sys

from lightrl.cli import run
from lightrl.cli.config_files import expand_configs


def check_env(
    config: str, rows: int = 2, replies: list[str] | None = None, seed: int = 0, model: str | None = None
) -> None:
    """Test the environment or agent program of a configuration with scripted replies.

    Prints the transcript of each script: replies, tool calls, trained tokens, the reward, the stop reason, and the
    seconds per turn. Also shows whether the chat template only appends to earlier tokens, and checks that an
    environment is deterministic given a seed. Exits with code 1 if it finds a problem.

    Loads no model, starts no engine, and calls no reward function. The environment or program itself runs as in
    training; programs use an endpoint. Each script runs twice on each example, concurrently.

    Args:
        config: Configuration file, as for `lightrl fit`; `--config FILE` also works.
        rows: Number of examples to run.
        replies: Replies of an additional script, one per turn, such as a correct answer.
        seed: Seed for the environment's `reset`.
        model: Model directory or model ID that generates the replies instead of scripts, such as the model to train.

    Raises:
        ValueError: The configuration has neither `EnvironmentEpisode` nor `AgentProgram`.
    """
    expand_configs(["--config", config])
    from lightrl.data.processing import load_processor
    from lightrl.data.templates import load_tokenizer
    from lightrl.environments.multi_turn import MultiTurn
    from lightrl.environments.scripted import play, transcript
    from lightrl.models.turns import ending_turns

    built = run(["--config", config], run=False)
    module, data = built.model, built.datamodule
    episode = getattr(data, "episode", None)
    if not isinstance(episode, MultiTurn):
        raise ValueError(
            f"data.episode={type(episode).__name__}: neither an EnvironmentEpisode nor an AgentProgram. Pass a "
            "configuration with one of them."
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
    sampling, engine = ending_turns(data.sampling, tokenizer), None
    if model is not None:
        import torch

        from lightrl.engines import TransformersEngine
        from lightrl.records import EngineContext

        engine = TransformersEngine()
        engine.start(EngineContext(model, device="cuda" if torch.cuda.is_available() else "cpu", seed=seed))
    try:
        found = play(episode, examples, tokenizer, sampling, seed=seed, replies=replies or (), engine=engine)
    finally:
        if engine is not None:
            engine.close()
    problems = found.problems()
    lines = [line for played in found.played for line in transcript(played, tokenizer)]
    print("\n".join([*lines, *(f"problem: {text}" for text in problems)]))
    if problems:
        sys.exit(1)
    print("No problems found.")

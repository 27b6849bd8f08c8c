"""The values of a parsed configuration: what cannot be meant is refused, what is secret is kept out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightrl.redaction import plain_secrets, redact, redact_messages, remember_secret, resolve_environment

__all__ = ["from_environment", "plain", "redacted", "refuse_senseless"]

AT_LEAST = {"check_val_every_n_epoch": 1, "log_every_n_steps": 0, "num_sanity_val_steps": -1, "val_check_interval": 1}
"""What Lightning takes silently: argument of the trainer -> least value."""

AT_MOST = {"devices": 100_000, "num_nodes": 1_000_000}
"""What Lightning would make lists of: argument of the trainer -> largest value that can be meant."""


def refuse_senseless(parsed: Any) -> None:
    """Refuses values of the right type that would train nothing, or do nothing, silently.

    Args:
        parsed: the configuration as the parser made it.

    Raises:
        ValueError: the message names the argument, its value and the way out.
    """
    from lightrl.compat.parser_messages import wrong_arguments

    config = plain(parsed)
    command = config.get("subcommand")
    config = config.get(command or "", config)
    trainer = config.get("trainer", {})
    if not isinstance(trainer, dict):
        raise ValueError(
            f"trainer={'null' if trainer is None else str(trainer)[:80]}: must be a mapping of the Trainer's "
            "arguments; leave it out for their defaults."
        )
    if command == "fit" and trainer.get("limit_train_batches") == 0:
        raise ValueError("trainer.limit_train_batches=0: nothing would be trained. `lightrl validate` evaluates alone.")
    for name, least in AT_LEAST.items():
        value = trainer.get(name)
        if isinstance(value, int) and value < least:
            raise ValueError(f"trainer.{name}={value}: must be at least {least}.")
        if isinstance(value, float) and value <= 0:  # a fraction of the epoch
            raise ValueError(f"trainer.{name}={value}: must be above 0.")
    for name, most in AT_MOST.items():
        value = trainer.get(name)
        number = int(value[:9]) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(number, int) and number > most:
            raise ValueError(f"trainer.{name}={value}: must be at most {most:,}; more cannot be meant.")
    seed = config.get("seed_everything")
    if isinstance(seed, int) and not 0 <= seed < 2**32:
        raise ValueError(f"seed_everything={seed}: must be from 0 to {2**32 - 1}, or true for a random one.")
    for path in _without_class(config):
        raise ValueError(f"{path}={{}}: names nothing: give a class (class_path, init_args) or an import path.")
    wrong = list(wrong_arguments({key: config.get(key) for key in ("trainer", "model", "data")}))
    for callback in trainer.get("callbacks") or []:
        wrong += wrong_arguments(callback, path="trainer.callbacks")
    for path, why in wrong:
        raise ValueError(f"{path}={why}.")
    optimizer = ((config.get("model") or {}).get("init_args") or {}).get("optimizer") or {}
    rate = (optimizer.get("init_args") or {}).get("lr") if isinstance(optimizer, dict) else None
    if isinstance(rate, dict | list):  # an empty one passes for a tensor
        raise ValueError(f"model.init_args.optimizer.init_args.lr={rate}: must be a number.")
    for path, value in _numbers(config):
        if not -sys.float_info.max <= value <= sys.float_info.max:  # NaN, too, and 10**400
            shown = str(value)[:20]
            raise ValueError(f"{path}={shown}: must be finite; null is no limit where the argument takes null.")


def redacted(config: Any) -> Any:
    """A copy for what is written, secrets as `***`; says where they stand and remembers them for messages."""
    redact_messages()  # Lightning, which has a format of warnings, is imported by now
    found = list(plain_secrets(plain(config)))
    for _, secret in found:
        remember_secret(secret)
    if found:
        places = ", ".join(dict.fromkeys(path for path, _ in found))
        print(
            f"warning: {places}: a secret stands in the configuration; give it as ${{env:NAME}}. It is written to the "
            "run's folder as ***.",
            file=sys.stderr,
        )
    return _mapped(config, lambda value, name, path: redact(value, name))


def from_environment(config: Any) -> Any:
    """A copy in which each `${env:NAME}` is what the environment says."""
    given: dict[str, str] = {}
    _mapped(config, lambda text, name, path: given.setdefault(path.strip("."), text))

    def resolved(text: Any, name: str, path: str) -> Any:
        if not isinstance(text, str):
            return text
        of_run = path.strip(".").replace("trainer.default_root_dir", "run_dir")  # which sets both
        return resolve_environment(text, of_run if given.get(of_run) == text else path.strip("."))

    return _mapped(config, resolved)


def _without_class(value: Any, path: str = "") -> Iterator[str]:
    """Where nothing was given for a function, which the parser takes for the type that it returns."""
    if isinstance(value, dict) and str(value.get("class_path")).startswith("typing."):
        yield path
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _without_class(inner, f"{path}.{key}" if path else str(key))


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _mapped(config: Any, new: Callable[[Any, str, str], Any], path: str = "", name: str = "") -> Any:
    """A copy of a parsed configuration with each string and number replaced by new(value, name, dotted path)."""
    from jsonargparse import Namespace

    if isinstance(config, str | int | float):
        return new(config, name, path)
    if isinstance(config, Namespace):
        items = {key: _mapped(value, new, f"{path}.{key}", key) for key, value in vars(config).items()}
        return Namespace(**items)
    if isinstance(config, dict):
        return {key: _mapped(value, new, f"{path}.{key}", str(key)) for key, value in config.items()}
    if isinstance(config, list):
        return [_mapped(value, new, f"{path}.{i}", name) for i, value in enumerate(config)]
    return config


def plain(config: Any) -> Any:
    """A parsed configuration as dictionaries and lists."""
    from jsonargparse import Namespace

    if isinstance(config, Namespace):
        config = vars(config)
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items()}
    return [plain(value) for value in config] if isinstance(config, list | tuple) else config

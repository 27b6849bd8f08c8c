"""Masks secrets in saved files and in LightRL's messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

REDACTED = "***"
REFERENCE = re.compile(r"\$\{env:([A-Za-z_]\w*)\}")
NAME = re.compile(
    r"(?i)(^|[_\-.])(token|secret|pass(word|wd)?|pwd|auth|authorization|cookie|credentials?)$"
    r"|(api|access|auth|private|secret|openai|anthropic|wandb)[_-]?key$|[a-z](Token|Secret|Password)$"
)
TOKENIZER = re.compile(r"(?i)(pad|eos|bos|unk|sep|cls|mask|image|video|audio|per)_token$")
VALUE = re.compile(
    r"(://[^/\s:@]*:)[^/\s@]+(?=@)|((?i:[?&][\w-]*(?:token|key|secret|password|signature)=))[^&\s'\"]+"
    r"|((?i:\bbearer )|\bhf_|\bsk-|\bgh[pousr]_|\bgithub_pat_|\bglpat-|\bxox[abpr]-)[\w.~+/=-]{12,}"
)

_secrets: set[str] = set()


def remember_secret(value: str) -> None:
    """Makes `redact_text` mask this value, if it has at least 4 characters."""
    if len(value) >= 4 and REFERENCE.fullmatch(value) is None:
        _secrets.add(value)


def redact_text(text: str) -> str:
    """Masks remembered secrets, passwords in URLs, and common API tokens in a text."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return VALUE.sub(lambda m: m[0] if "${env:" in m[0] else f"{m[1] or m[2] or m[3]}{REDACTED}", text)


def redact(value: Any, name: str = "") -> Any:
    """Copies plain data with secrets masked: values of secret-looking keys, and what `redact_text` finds."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        if NAME.search(name) and not TOKENIZER.search(name) and value != "":
            return value if REFERENCE.fullmatch(str(value)) else REDACTED
        return redact_text(value) if isinstance(value, str) else value
    if type(value) is dict:
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    return type(value)(redact(inner, name) for inner in value) if type(value) in (list, tuple) else value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Masks secrets in command-line arguments: `--any.token=VALUE`, `--any.token VALUE`."""
    redacted, name = list[str](), ""
    for argument in arguments:
        if argument.startswith("--") and "=" in argument:
            key, _, value = argument.partition("=")
            redacted.append(f"{key}={redact(value, key.removesuffix('+'))}")
            name = ""
        else:
            redacted.append(redact(argument, name))
            name = argument if argument.startswith("--") else ""
    return redacted


def plain_secrets(value: Any, name: str = "", path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the secrets in plain data as (dotted path, value)."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            own = str(key) if isinstance(value, dict) else name
            yield from plain_secrets(inner, own, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str | int | float) and value != REDACTED and redact(value, name) == REDACTED:
        yield path, str(value)
    elif isinstance(value, str):
        for found in VALUE.finditer(value):
            if "${env:" not in found[0]:
                yield path, found[0].removeprefix(found[1] or found[2] or found[3])


def resolve_environment(text: str, where: str) -> str:
    """Replaces each `${env:NAME}` by its value, a secret. A ValueError names the argument `where` if it is not set."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ValueError(f"{where}={text!r}: the environment variable {found[1]} is not set. Export it.")
        remember_secret(os.environ[found[1]])
        return os.environ[found[1]]

    return REFERENCE.sub(value, text)

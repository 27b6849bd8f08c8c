"""What must not be written or printed: keys, tokens and passwords, in configurations, messages and tracebacks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

import yaml

__all__ = [
    "REDACTED",
    "plain_secrets",
    "quoted",
    "redact",
    "redact_arguments",
    "redact_messages",
    "redact_text",
    "remember_arguments",
    "remember_secret",
    "remember_secrets",
    "resolve_environment",
]

REDACTED = "***"

SECRET_NAME = re.compile(
    r"(?i)(^|[_\-.])((?<!per_)(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!image_)(?<!video_)(?<!audio_)"
    r"token|(api|access|private|auth|account|license)[_-]?key|(signing|encryption|openai|anthropic|wandb)[_-]key"
    r"|secret([_-]?key)?|pass(word|wd|phrase)?|pwd?|o?auth|authorization|credentials?|bearer|jwt|cookies?"
    r"|(token|secret|password|api[_-]?key)_value|(hf|hub|api|auth|access|bearer|refresh|github)_?tokens?"
    r"|token_(hf|hub|api|auth|access|github|wandb|openai|anthropic)"
    r"|api[_-]?keys|secrets|passwords|(pg|db|mysql|redis|smtp|ftp)_?pass(word)?)([_-]?\d+)?$"
    r"|(?-i:[a-z](Token|Secret|Password|(Api|Access|Private|Secret|Account|License)Key))$"
)
HEADER_NAME = re.compile(r"(?i)((proxy-)?authorization|(set-)?cookie|[a-z]+-[a-z-]*(key|token|secret|auth))$")
TOKEN_TEXT = re.compile(r"(?!\d+$)[\w.~+/=-]{8,}")
"""What may be a secret under the bare name `tokens`, which holds numbers and special tokens, too."""
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|AIza[\w-]{35}|(?:nvapi|xai|pplx|tvly|pypi)-[\w-]{16,}|gsk_[A-Za-z0-9]{16,}"
    r"|[rs]k_live_[A-Za-z0-9]{16,}|ya29\.[\w-]{16,}|dckr_pat_[\w-]{16,}"
    r"|xox[abpr]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|eyJ[\w-]{10,1000}\.eyJ[\w-]{10,}\.[\w-]+)"
    r"|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{8,}|(?:(?<=\bAccountKey=)|(?<=\bSharedAccessKey=))[\w+/]{8,}=*"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
)
URL_LOGIN = re.compile(  # up to the last @, which a password may hold, too; one with / is told from a port
    r"(?<=://)(?!\[)(?!(?:\$\{env:\w+\}|[^/\s:])+:x-oauth-basic@)"
    r"(?:\$\{env:\w+\}|[^/\s@:$]|\$(?!\{env:))*:([^/\s?#]+|(?!\d*[/?#])[^\s?#@'\"]{1,1000})(?=@)"
    r"|(?:(?<=http://)|(?<=https://))(?!\$\{env:)([^/\s@:?#'\"]+)(?=:?@)"  # a name alone is a token there
    r"|(?<=://)(?!\$\{env:)([^/\s@:?#'\"]+)(?=:x-oauth-basic@)"
)
HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|api[_-]key|ocp-apim-subscription-key|x-[a-z-]{0,40}(?:key|token|secret))['\"]?:"
    r" *['\"]?((?:basic|bearer|token|digest) +)?([^\s'\",;]+)"
)
LOGIN_OPTION = re.compile(r"\bcurl\b[^\n]{0,300}? (?:-u|--user)[ =]?['\"]?(?:\$\{env:\w+\}|[^\s:'\"$])+:([^\s'\"]+)")
OPTION = re.compile(
    r"(?i)(?<![\w-])--(?!(?:pad|eos|bos|unk|sep|cls|mask)[_-])(?:[\w.-]*[_.-])?(?:token|secret|passw(?:or)?d|passphrase"
    r"|(?:api|access|auth|private|secret)[_-]?key)(?:=['\"]?([^\s'\"]{4,})| +['\"]?(?!-)([^\s'\"]{8,}))"
)
"""Of a command in a text; in prose the word behind an option is mostly shorter."""
ASSIGNED = re.compile(  # of an environment or a database's address
    r"(?<![\w?&#.-])(?:(?!(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK)_)[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY)"
    r"|[Pp]assword)=['\"]?([^\s'\"&;]{4,})"
)
URL_KEY = re.compile(
    r"(?i)(?<=[?&#])((?:[\w.-]*[_.-])?(?:token|secret|pass(?:word|wd|phrase)?|pwd|sig|signature|credential|auth)"
    r"|(?:[\w.-]*subscription[_-]|(?:access|auth)[_-])?key"
    r"|(?:[\w.-]*[_.-])?api[_-]?key|jwt|\w*accesskey)=([^&\s#'\"]+)"
)
SECRET_AT_END = (URL_LOGIN, URL_KEY, HEADER, LOGIN_OPTION, OPTION, ASSIGNED)
"""Patterns whose last group is the secret, which they end in."""
REFERENCE = re.compile(r"\$\{env:([A-Za-z_]\w*)\}")

_LOOKED_THROUGH = 20_000  # characters; a secret that begins in what is quoted, and is longer, is not known as one
DEEPEST = 100
"""Levels of a configuration that are looked through."""

_secrets: set[str] = set()  # as given to this process, so that no message of any library shows one


def remember_secret(value: str) -> None:
    """From now on `redact_text` replaces this value; one of fewer than 4 characters would spoil every text."""
    if len(value) >= 4 and value != REDACTED and REFERENCE.fullmatch(value) is None:
        escaped = json.dumps(value)[1:-1], repr(value)[1:-1], quote(value), quote(value, safe=""), quote_plus(value)
        _secrets.update((value, *escaped))  # as JSON, messages and URLs show it


def redact_text(text: str) -> str:
    """The text without keys, tokens, passwords in URLs and values that were remembered as secrets."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = SECRET_VALUE.sub(REDACTED, text)
    for pattern in SECRET_AT_END:
        text = pattern.sub(_without_secret, text)
    return text


def quoted(text: str, most: int) -> str:
    """The beginning of what a server said, for a message; it may have written anything, of any length."""
    return redact_text(text[:_LOOKED_THROUGH])[:most]


def _without_secret(found: re.Match[str]) -> str:
    """What a pattern has found, less its last group, the secret that it ends in; a reference stays."""
    secret = found[found.lastindex or 0]
    kept = REFERENCE.fullmatch(secret) is not None
    return found[0] if kept else found[0].removesuffix(secret) + REDACTED


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command without secrets: also those that `--any.token=`, or `--any.token` before it, names."""
    redacted, name = list[str](), ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            redacted.append(redact_text(f"{name}={redact(value, _last(name))}" if equals else argument))
            name = "" if equals else _last(name)
        else:
            redacted.append(redact(argument, name))
            name = ""
    return redacted


def remember_secrets(value: Any, name: str = "") -> None:
    """Remembers every secret of plain data, and what its `${env:NAME}` stand for, before a message can show them.

    Args:
        value: of a configuration.
        name: what it stands under.
    """
    for _, secret in plain_secrets(value, name):
        remember_secret(secret)
    for text in _texts(value):
        for found in REFERENCE.finditer(text):
            remember_secret(os.environ.get(found[1], ""))


def remember_arguments(arguments: Sequence[str]) -> None:
    """As `remember_secrets`, for the arguments of a command: `--name=value` and `--name value`."""
    name = ""
    for argument in arguments:
        option = argument.startswith("--")
        name, _, value = argument.partition("=") if option else (name, "", argument)
        data = _structured(value)
        if value:
            remember_secrets(data, _last(name))
            remember_secrets(value, _last(name) if data is value else "")


def _structured(text: str) -> Any:
    """What a text is as JSON or YAML: lists, mappings, texts; itself where it is none, or has references."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        try:  # references (`*name`) may stand for more than any memory
            refers = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
            data = text if refers else yaml.load(text, yaml.BaseLoader)  # texts, as they stand there
        except Exception:  # no YAML: its constructors raise nearly anything
            data = text
    return data if isinstance(data, dict | list | str) else text


def _last(option: str) -> str:
    return option.lstrip("-").removesuffix("+").rpartition(".")[2]


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth < DEEPEST:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner, depth + 1)


class _Redacted:
    """What the interpreter calls with a message, or to show an error, wrapped so that no secret is shown."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original


class _RedactedWarning(_Redacted):
    """A format of warnings."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return redact_text(self.original(*args, **kwargs))


class _RedactedRecord(_Redacted):
    """A factory of log records: message, traceback and stack."""

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        made: logging.LogRecord = self.original(*args, **kwargs)
        with contextlib.suppress(Exception):  # a message that does not fit its arguments: logging says so later
            text = made.getMessage()
            redacted = redact_text(text)
            if redacted != text:
                made.msg, made.args = redacted, ()
        made.stack_info = redact_text(made.stack_info) if made.stack_info else made.stack_info
        if made.exc_info and made.exc_info[0] is not None:
            text = "".join(traceback.format_exception(*made.exc_info)).rstrip("\n")
            redacted = redact_text(text)
            if redacted != text:  # the text alone, which every formatter shows, too
                made.exc_info, made.exc_text = None, redacted
        return made


class _RedactedHook(_Redacted):
    """`sys.excepthook`."""

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        redacted = redact_text(text)
        if redacted == text or sys.stderr is None:
            self.original(kind, error, trace)
        else:
            sys.stderr.write(redacted)


class _RedactedThreadHook(_Redacted):
    """`threading.excepthook`."""

    def __call__(self, args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        redacted = redact_text(text)
        if redacted == text or sys.stderr is None:
            self.original(args)
        else:
            name = args.thread.name if args.thread is not None else "unknown"
            sys.stderr.write(f"Exception in thread {name}:\n{redacted}")


def redact_messages() -> None:
    """From now on no log record, warning or traceback that this process prints shows a secret. Safe to call twice.

    Lightning sets a format of warnings when it is imported: call this again later.
    """
    if not isinstance(make := logging.getLogRecordFactory(), _Redacted):
        logging.setLogRecordFactory(_RedactedRecord(make))
    if not isinstance(warnings.formatwarning, _Redacted):
        warnings.formatwarning = _RedactedWarning(warnings.formatwarning)
    if not isinstance(sys.excepthook, _Redacted):
        sys.excepthook = _RedactedHook(sys.excepthook)
    if not isinstance(threading.excepthook, _Redacted):
        threading.excepthook = _RedactedThreadHook(threading.excepthook)


def redact(value: Any, name: str = "") -> Any:
    """A copy of plain data (dictionaries, lists, tuples, strings, numbers) without secrets; anything else as it is.

    Redacted are strings and numbers under a name such as `token`, `api_key`, `password`, `authorization`, and in all
    other strings what `redact_text` finds. References to the environment (`${env:NAME}`) stay.
    """
    if _is_number(value):  # YAML reads a password of digits as one
        return REDACTED if _is_secret(name) else value
    if isinstance(value, str):
        whole = _is_secret(name, value) and value and REFERENCE.fullmatch(value) is None
        return REDACTED if whole else redact_text(value)
    if type(value) is dict:
        return {key: redact(inner, each) for key, inner, each in _entries(value, name)}
    if type(value) in (list, tuple):
        return type(value)(redact(inner, each) for inner, each in _named(value, name))
    return value


def _entries(mapping: Mapping[Any, Any], name: str) -> Iterator[tuple[Any, Any, str]]:
    """The entries of a mapping with the names that count for them.

    Texts below a secret's name are secret, whatever their own; in `{name: API_KEY, value: x}` the name counts.
    """
    label = mapping.get("name", mapping.get("key"))
    for key, value in mapping.items():
        if key == "value" and isinstance(label, str) and _is_secret(label):
            yield key, value, label
        else:
            own = isinstance(value, int | float) or key in ("class_path", "init_args") or _is_secret(str(key))
            yield key, value, str(key) if own or not _is_secret(name) else name


def _named(values: Sequence[Any], name: str) -> Iterator[tuple[Any, str]]:
    """The entries of a list with the names that count for them.

    Of a header and its value, or of a name and its value in a list of such pairs, that is the first; of an argument
    behind an option (`--name`, curl's `-u`) the option's.
    """
    pair = _is_pair(values) and (HEADER_NAME.match(values[0]) or values[0] == name)
    name = "" if pair or name.lower() == "tokens" else name  # of a tokenizer
    pairs, option = all(map(_is_pair, values)), ""
    curl = bool(values) and str(values[0]).endswith("curl")
    for number, value in enumerate(values):
        begins = isinstance(value, str) and value.startswith("--")
        if pair and number:
            yield value, values[0]
        elif pairs and _is_secret(value[0]):
            yield value, value[0]
        else:
            yield value, option if isinstance(value, str) and not begins and _is_secret(option) else name
        option = "password" if curl and value in ("-u", "--user") else _last(value).replace("-", "_") if begins else ""


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)


def _is_secret(name: str, value: str = "") -> bool:
    """Whether what stands under a name is secret; a text under `tokens` may be one."""
    named = SECRET_NAME.search(name) or HEADER_NAME.match(name)
    return named is not None or (name.lower() == "tokens" and TOKEN_TEXT.fullmatch(value) is not None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain_secrets(value: Any, name: str = "", path: str = "") -> Iterator[tuple[str, str]]:
    """Where plain data holds secrets themselves: (dotted path, the secret)."""
    if _is_number(value) and _is_secret(name):
        yield path, str(value)
    elif isinstance(value, str):
        if _is_secret(name, value) and value and REFERENCE.fullmatch(value) is None and value != REDACTED:
            yield path, value
            return
        for found in SECRET_VALUE.finditer(value):
            yield path, found[0]
        for pattern in SECRET_AT_END:
            for found in pattern.finditer(value):
                secret = found[found.lastindex or 0]
                if REFERENCE.fullmatch(secret) is None and secret != REDACTED:
                    yield path, secret
    elif path.count(".") > DEEPEST:
        return
    elif isinstance(value, Mapping):
        for key, inner, each in _entries(value, name):
            yield from plain_secrets(inner, each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, (inner, each) in enumerate(_named(value, name)):
            yield from plain_secrets(inner, each, f"{path}.{number}")


def resolve_environment(text: str, where: str) -> str:
    """The text with every `${env:NAME}` replaced by that variable, whose value counts as a secret from now on.

    Args:
        text: of a configuration.
        where: the argument it stands in, for the message.

    Raises:
        ValueError: the variable is not set.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ValueError(f"{where}={text!r}: the environment variable {found[1]} is not set; export it first.")
        remember_secret(os.environ[found[1]])
        return os.environ[found[1]]

    return REFERENCE.sub(value, text)

"""Secrets are masked in what a run saves and in LightRL's own messages."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonargparse import Namespace

from lightrl.checkpoints.redaction import plain_secrets, redact, redact_arguments, redact_text, remember_secret
from lightrl.cli.lightning_cli import redacted
from lightrl.engines.server.client import ServerError
from lightrl.engines.server.pool import ServerPool
from lightrl.engines.server.protocols import PROTOCOLS
from lightrl.rewards import RemoteReward, RewardError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"token": "abc"}, {"token": "***"}),
        ({"api_key": "${env:KEY}"}, None),
        ({"headers": {"Authorization": "Bearer abcdefghijk"}}, {"headers": {"Authorization": "***"}}),
        ({"eos_token": "<eos>", "max_new_tokens": 3, "tokenizer": "gpt2", "api_key_env": "KEY"}, None),
        ({"url": "http://user:pass@host/x?a=1&api_key=k1&b=2"}, {"url": "http://user:***@host/x?a=1&api_key=***&b=2"}),
        ({"url": "http://user:${env:PW}@host", "login": "http://${env:U}:${env:P}@h"}, None),
        ({"path": "org/model", "url": "http://host:8000/v1", "ssh": "ssh://git@github.com/a/b"}, None),
        ([{"x": "hf_abcdefghijklmnopqrst"}], [{"x": "hf_***"}]),
        ({"headers": {"x-api-key": "abc", "Cookie": "s=1"}}, {"headers": {"x-api-key": "***", "Cookie": "***"}}),
        ({"refreshToken": "abc", "wandb_key": "abc"}, {"refreshToken": "***", "wandb_key": "***"}),
        ({"kwargs": {"password": 1234, "pwd": ["ab"]}}, {"kwargs": {"password": "***", "pwd": ["***"]}}),
        ({"use_token": True, "pad_token": 0, "sort_key": "a", "compass": 1, "kl_per_token": 0.1}, None),
    ],
)
def test_what_is_redacted(value: Any, expected: Any) -> None:
    assert redact(value) == (value if expected is None else expected)
    assert bool(list(plain_secrets(value))) == (expected is not None)


def test_the_saved_configuration_masks_numbers_and_urls() -> None:
    config = Namespace(kwargs={"password": 123456, "port": 80}, url="http://u:1@h")
    assert redacted(config) == Namespace(kwargs={"password": "***", "port": 80}, url="http://u:***@h")


def test_no_argument_passes_for_a_secret_that_is_none(root: Path) -> None:
    """Else a run could not be repeated from the configuration that it saves."""
    names = set[str]()
    for folder in ("configs", "lightrl/cli/templates", "examples"):
        for path in (root / folder).rglob("*.yaml"):
            names |= set(re.findall(r"([\w.-]+):(?:\s|$)", path.read_text(), re.MULTILINE))
    for path in (root / "lightrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
                names |= {argument.arg for each in made for argument in [*each.args.args, *each.args.kwonlyargs]}
                names |= {
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
    assert len(names) > 500
    secret = {name for name in names if redact({name: "plain-text"}) != {name: "plain-text"}}
    assert secret <= {"api_key", "token"}


def test_remembered_secrets_and_tokens_are_masked_in_messages() -> None:
    remember_secret("open sesame")
    said = redact_text("401 for http://u:p4ss@h/ with sk-abcdefghijklmnopqrstu: open sesame")
    assert said == "401 for http://u:***@h/ with sk-***: ***"


def test_arguments_of_a_command_are_redacted() -> None:
    given = ["fit", "--actor.token=it's mine", "--engine.api_key", "it's mine", "--kwargs.tokens", "3", "x"]
    assert redact_arguments(given) == [
        *("fit", "--actor.token=***", "--engine.api_key", "***", "--kwargs.tokens", "3", "x")
    ]


def test_a_token_that_a_server_quotes_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whole nor cut by the bound on what is quoted."""
    monkeypatch.setattr("lightrl.checkpoints.redaction._secrets", set())
    monkeypatch.setenv("JUDGE_TOKEN", "hunter2-of-the-judge")
    monkeypatch.setenv("LIGHTRL_SERVER_API_KEY", "hunter2-of-the-engine")
    reward = RemoteReward("http://127.0.0.1:9/score", token_env="JUDGE_TOKEN")
    with pytest.raises(RewardError) as refused:
        reward._decoded(httpx.Response(401, content=f"{'x' * 190} hunter2-of-the-judge".encode()))
    assert "hunter2" not in str(refused.value) and "401" in str(refused.value)
    arguments = ("ServerEngine", ["http://127.0.0.1:9"], PROTOCOLS["vllm"](), None, None, 1.0, 1.0, 0.01)
    pool = ServerPool(*arguments, pushes=True)
    with pytest.raises(ValueError, match="no healthy server"):
        pool.open("tokenizer")
    assert "hunter2" not in str(ServerError("http://h", "/v1", 401, "Incorrect API key: hunter2-of-the-engine"))

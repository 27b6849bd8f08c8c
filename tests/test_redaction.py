"""Keys, tokens and passwords are neither written nor printed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from jsonargparse import Namespace

from lightrl.config_files import expand_configs
from lightrl.config_values import redacted
from lightrl.engines.server.connection import Connection
from lightrl.engines.server.http import ServerError
from lightrl.redaction import (
    plain_secrets,
    redact,
    redact_arguments,
    redact_text,
    remember_arguments,
    remember_secret,
    remember_secrets,
)
from lightrl.rewards import RemoteReward, RewardError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"token": "abc"}, {"token": "***"}),
        ({"api_key": "${env:KEY}"}, {"api_key": "${env:KEY}"}),
        ({"headers": {"Authorization": "Bearer abcdefghijk"}}, {"headers": {"Authorization": "***"}}),
        ({"eos_token": "<eos>", "max_new_tokens": 3, "tokenizer": "gpt2"}, None),
        ({"url": "http://user:pass@host/x?a=1&api_key=k1&b=2"}, {"url": "http://user:***@host/x?a=1&api_key=***&b=2"}),
        ({"url": "http://user:${env:PW}@host"}, None),
        ({"path": "org/model", "url": "http://host:8000/v1"}, None),
        ([{"x": "hf_abcdefghijklmnopqrst"}], [{"x": "***"}]),
        ({"headers": {"x-api-key": "abc", "Cookie": "s=1"}}, {"headers": {"x-api-key": "***", "Cookie": "***"}}),
        ({"refreshToken": "abc", "openai_key": "abc"}, {"refreshToken": "***", "openai_key": "***"}),
        ({"sort_key": "a", "label_column": "key", "padToken_ids": "b", "max_tokens": "3"}, None),
        ({"url": "http://user:p@ss@host/x@y"}, {"url": "http://user:***@host/x@y"}),
        ({"url": "http://host:80/x?mail=a@b"}, None),
        ({"url": "http://u:1@h/?pwd=12&pass=3"}, {"url": "http://u:***@h/?pwd=***&pass=***"}),
        ({"kwargs": {"password": 1234, "pwd": "ab"}}, {"kwargs": {"password": "***", "pwd": "***"}}),
        ({"max_new_tokens": 3, "use_token": True, "pad_token": 0, "compass": 1}, None),
        (
            ["h/?X-Amz-Signature=ab&client_secret=z#access_token=t"],
            ["h/?X-Amz-Signature=***&client_secret=***#access_token=***"],
        ),
        ({"url": "https://tok3n@sentry.io/1"}, {"url": "https://***@sentry.io/1"}),
        ({"url": "https://${env:TOKEN}@sentry.io/1", "login": "http://${env:U}:${env:P}@h"}, None),
        ({"repo": "ssh://git@github.com/a/b", "url": "http://[::1]:80/x@y", "see": "http://h:80/x@y"}, None),
        ({"dsn": "postgresql+psycopg2://u:p/w/x@h/db"}, {"dsn": "postgresql+psycopg2://u:***@h/db"}),
        ({"auth": ["me", "pw"], "basic_auth": "me:pw"}, {"auth": ["***", "***"], "basic_auth": "***"}),
        (
            {"hf_tokens": ["a"], "token_value": "b", "PGPASS": "c"},
            {"hf_tokens": ["***"], "token_value": "***", "PGPASS": "***"},
        ),
        (
            ["https://h/?subscription-key=a&n=1", "https://h/?auth=b"],
            ["https://h/?subscription-key=***&n=1", "https://h/?auth=***"],
        ),
        (
            {"headers": [["Authorization", "a"], ["Accept", "b"]]},
            {"headers": [["Authorization", "***"], ["Accept", "b"]]},
        ),
        (["Authorization: Basic bWU6cHc="], ["Authorization: Basic ***"]),
        ({"params": [["api_key", "a"], ["page", "b"]]}, {"params": [["api_key", "***"], ["page", "b"]]}),
        ({"columns": ["token", "label"], "pairs": [["token", 3], ["a", "b"], "c"]}, None),
        (
            {
                "env": [
                    {"name": "API_KEY", "value": "a"},
                    {"name": "PIN_TOKEN", "value": 12},
                    {"key": "n", "value": "b"},
                ]
            },
            {
                "env": [
                    {"name": "API_KEY", "value": "***"},
                    {"name": "PIN_TOKEN", "value": "***"},
                    {"key": "n", "value": "b"},
                ]
            },
        ),
        ({"name": "API_KEY", "value": "${env:KEY}"}, None),
        (["/usr/bin/curl", "-u", "me:pw", "http://h"], ["/usr/bin/curl", "-u", "***", "http://h"]),
        (["sort", "-u", "a:b"], None),
        (["https://tok3n:x-oauth-basic@h/a", "https://tok3n:@h"], ["https://***:x-oauth-basic@h/a", "https://***:@h"]),
        (["git+https://${env:T}:x-oauth-basic@h", "https://${env:T}:@h"], None),
        (["Authorization: Bearer ${env:TOKEN}"], None),
        ({"api_key": {"a": "b"}}, {"api_key": {"a": "***"}}),
        ({"token": {"class_path": "mine.Kind", "init_args": {"size": 3}}}, None),
        (
            {
                "num_tokens": 3,
                "special_tokens": ["<a>"],
                "stop_tokens": ["b"],
                "token_ids": [1],
                "columns": ["token", "x"],
            },
            None,
        ),
        ({"author": "a", "passes": "b", "auth_type": "d", "micro_batch_tokens": "4"}, None),
        (
            {"x-functions-key": "plainA", "Ocp-Apim-Subscription-Key": "plainB", "Accept": "all", "sort_key": "a"},
            {"x-functions-key": "***", "Ocp-Apim-Subscription-Key": "***", "Accept": "all", "sort_key": "a"},
        ),
        (
            {"cookies": {"sid": "a"}, "API_TOKEN_2": "a", "apitoken": "a", "token_hf": "a", "auth_key": "a"},
            {"cookies": {"sid": "***"}, "API_TOKEN_2": "***", "apitoken": "***", "token_hf": "***", "auth_key": "***"},
        ),
        (
            {"AccountKey": "a", "storageAccountKey": "a", "oauth": "a", "passwd2": "a", "pw": "a", "license_key": "a"},
            dict.fromkeys(("AccountKey", "storageAccountKey", "oauth", "passwd2", "pw", "license_key"), "***"),
        ),
        ({"tokens": "plain-secret-1"}, {"tokens": "***"}),
        (
            [
                {"tokens": "12345678"},
                {"tokens": "<|special|>"},
                {"tokens": ["some_token", "other_token"]},
                {"tokens": 12},
            ],
            None,
        ),
        ({"top_k_2": 1, "pwm": "a", "tokenizer_2": "b", "token_ids": "c", "end2": "d", "x_key_2": "e"}, None),
        (
            ["-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----\nafter"],
            ["***\nafter"],
        ),
        (["-----BEGIN PRIVATE KEY-----\nMIIE cut sho"], ["***"]),
        ([f"AIza{'x' * 35}", f"npm_{'a' * 36}"], ["***", "***"]),
        (["https://hooks.slack.com/services/T00/B00/abcDEF"], ["https://hooks.slack.com/services/***"]),
        (
            ["AccountName=me;AccountKey=abcd+efgh/==;EndpointSuffix=x"],
            ["AccountName=me;AccountKey=***;EndpointSuffix=x"],
        ),
        (
            ["curl -s -u me:pass1 http://h", "curl --user 'me:pa' h", "x-functions-key: abc"],
            ["curl -s -u me:*** http://h", "curl --user 'me:***' h", "x-functions-key: ***"],
        ),
        (
            {
                "command": ["npx", "server", "--api-key", "plain", "--n", "3", "--my.token=plain", "x"],
                "args": ["--token"],
            },
            {"command": ["npx", "server", "--api-key", "***", "--n", "3", "--my.token=***", "x"], "args": ["--token"]},
        ),
        (
            ["a.py --api-key plain-key --n 3", "env OPENAI_API_KEY=plain a.py --hf_token='plain'"],
            ["a.py --api-key *** --n 3", "env OPENAI_API_KEY=*** a.py --hf_token='***'"],
        ),
        (
            ["Server=db;Password=plain;Uid=me", "host=db password=plain dbname=x", "h?x-api-key=a&jwt=b"],
            ["Server=db;Password=***;Uid=me", "host=db password=*** dbname=x", "h?x-api-key=***&jwt=***"],
        ),
        ([f"nvapi-{'a' * 20}", f"gsk_{'a' * 20}", f"xai-{'a' * 20}", f"ASIA{'A' * 16}"], ["***"] * 4),
        (
            {"headers": '{"Authorization": "Basic abc=", "api_key": "plain"}'},
            {"headers": '{"Authorization": "Basic ***", "api_key": "***"}'},
        ),
        (
            {
                "command": [
                    "a.py",
                    "--api-key",
                    "${env:KEY}",
                    "--api-key=${env:KEY}",
                    "--eos-token",
                    "<eos>",
                    "--n",
                    "1",
                ],
                "text": "--token is missing; EOS_TOKEN=<eos> KEY=${env:KEY} HF_TOKEN=${env:HF}; max_tokens=3456",
            },
            None,
        ),
        (["curl -u ${env:USER}:${env:PW} http://h", "sort -u a:b", "curl http://h:80/x", "per-token: 3"], None),
    ],
)
def test_what_is_redacted(value: Any, expected: Any) -> None:
    assert redact(value) == (value if expected is None else expected)
    assert bool(list(plain_secrets(value))) == (expected is not None and "${env" not in str(value))


def test_a_password_of_digits_is_not_written_with_the_configuration() -> None:
    config = Namespace(kwargs={"password": 123456, "port": 80}, url="http://u:1@h")
    assert redacted(config) == Namespace(kwargs={"password": "***", "port": 80}, url="http://u:***@h")


def test_no_argument_passes_for_a_secret_that_is_none(root: Path) -> None:
    """Else it would be written as ***, and a run could not be repeated from what it wrote."""
    names = set[str]()
    for folder in ("configs", "lightrl/templates", "examples"):
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
    assert secret <= {"api_key", "token", "tokens"}


def test_redacting_a_long_text_takes_no_long_time() -> None:
    begun = time.monotonic()
    named = ("AccountKey=", "a-key", "x-key: ", "x-", "--", "--a-", "A_TOKEN", "A=")
    for part in ("curl -u ", "curl ", "-----BEGIN PRIVATE KEY-----", "://x:", "eyJ-", *named):
        redact_text(part * 20_000)
        redact({part * 20_000: "x"})
    assert time.monotonic() - begun < 20


def test_text_is_redacted() -> None:
    assert redact_text("401 for http://u:p4ss@h/ with sk-abcdefghijklmnopqrstu") == "401 for http://u:***@h/ with ***"


def test_a_remembered_secret_is_found_as_json_and_urls_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.redaction._secrets", set())
    secret = 'a "b"/c+d=\nsecret'
    remember_secret(secret)
    for text in (secret, json.dumps({"x": secret}), repr([secret]), quote(secret), urlencode({"k": secret})):
        assert "secret" not in redact_text(text)


def test_logs_and_warnings_are_redacted() -> None:
    """Of a process that the command line started: Lightning's and the rewards' own messages quote URLs."""
    script = """
import logging, warnings
from lightrl.redaction import redact_messages, remember_secret
redact_messages()
redact_messages()
remember_secret("open sesame")
warnings.warn("said open sesame")
logging.getLogger("any").warning("%s for %s", 401, "http://u:p4ss@h/")
try:
    logging.getLogger("any").warning("%d of no number", "x")
except Exception:
    print("lost")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "UserWarning: said ***" in done.stderr and "401 for http://u:***@h/" in done.stderr
    assert "p4ss" not in done.stderr and "lost" not in done.stdout


def test_tracebacks_are_redacted_and_stay_tracebacks() -> None:
    """Of log records, threads and the error that ends a process; one without secrets is shown as ever."""
    script = """
import logging, threading
from lightrl.redaction import redact_messages, remember_secret
redact_messages()
remember_secret("open sesame")
def wrong(word):
    raise KeyError(word)
try:
    wrong("open sesame")
except KeyError:
    logging.getLogger("any").exception("logged")
for word in ("open sesame", "harmless"):
    thread = threading.Thread(target=wrong, args=(word,), name="mine")
    thread.start()
    thread.join()
wrong("it is open sesame")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "sesame" not in done.stderr
    assert done.stderr.count("Traceback") == 4 and done.stderr.count("KeyError: '***'") == 2
    assert "logged\nTraceback" in done.stderr and "Exception in thread mine:" in done.stderr
    assert "KeyError: 'harmless'" in done.stderr and done.stderr.endswith("KeyError: 'it is ***'\n")


def test_arguments_of_a_command_are_redacted_before_a_shell_would_quote_them() -> None:
    given = ["fit", "--actor.token=it's mine", "--engine.api_key", "it's mine", "--kwargs.tokens", "3", "x"]
    assert redact_arguments(given) == [
        *("fit", "--actor.token=***", "--engine.api_key", "***", "--kwargs.tokens", "3", "x")
    ]


def test_secrets_of_files_and_arguments_are_known_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.redaction._secrets", set())
    monkeypatch.setenv("SESAME", "of the environment")
    remember_secrets({"kwargs": [{"api_key": ["in a list"]}], "path": "x/${env:SESAME}"})
    remember_arguments(["--a.token", "after a space", "--b.api_key+=behind a sign", '--c={"password": "in json"}'])
    remember_arguments(
        ["--config", "{model: {kwargs: {token: in flow text, pwd: 2024-01-31}}}", "--d.token='in quotes'"]
    )
    remember_arguments(["--config=a: &a {token: x}\nb: *a", "--e={token: "])  # looked at, no further
    known = ("in a list", "of the environment", "after a space", "behind a sign", "in json")
    for secret in (*known, "in flow text", "2024-01-31", "in quotes"):
        assert redact_text(f"not {secret}!") == "not ***!"


@pytest.mark.parametrize(
    "given", ["{model: {token: plainG666}}", "model: &a {token: plainG666}\nx: *a", "{token: plainG666"]
)
def test_settings_in_place_of_a_file_are_not_shown(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.redaction._secrets", set())
    with pytest.raises(ValueError, match="^--config: settings themselves are given; write them to a file"):
        expand_configs(["--config", given])


def test_a_token_that_a_server_quotes_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whole nor cut by the bound on what is quoted."""
    monkeypatch.setattr("lightrl.redaction._secrets", set())
    monkeypatch.setenv("JUDGE_TOKEN", "hunter2-of-the-judge")
    monkeypatch.setenv("LIGHTRL_SERVER_API_KEY", "hunter2-of-the-engine")
    reward = RemoteReward("http://127.0.0.1:9/score", token_env="JUDGE_TOKEN")
    with pytest.raises(RewardError) as refused:
        reward._decoded(401, f"{'x' * 190} hunter2-of-the-judge".encode())
    assert "hunter2" not in str(refused.value) and "401" in str(refused.value)
    connection = Connection("ServerEngine", ["http://127.0.0.1:9"], "vllm", None, 1.0, 1.0, 0.01)
    with pytest.raises(ValueError, match="No healthy server"):
        connection.open(lambda server: server.healthy())
    assert "hunter2" not in str(ServerError("http://h", "/v1", 401, "Incorrect API key: hunter2-of-the-engine"))

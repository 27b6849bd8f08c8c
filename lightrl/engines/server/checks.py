"""What `ServerEngine` and `ServerTeacher` find out about servers before any model is loaded, and what they refuse.

Messages name the server and the way out. Every rank runs these checks.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrl.engines.server.http import Server
from lightrl.engines.server.protocols import ServerProtocol, VLLMProtocol
from lightrl.models.loading import longrope_limit
from lightrl.records import EngineContext

_PROBES = ("12 + 34 = 46", "The quick brown fox.", "def f(x):\n    return x")


async def look_at(
    server: Server, protocol: ServerProtocol, context: EngineContext, model: str | None, folder: str | None
) -> None:
    """Fills in a server's `facts`.

    Args:
        server: that is up.
        protocol: its kind.
        context: of the run.
        model: name of the served model; the first where None.
        folder: the shared folder for weights; None where they are transferred.

    Raises:
        ValueError: the server lacks what is needed, or serves another model.
        ServerError: it answers with an error.
    """
    server.facts = await protocol.facts(server, model)
    if folder is None and server.facts.transfer_backend is None:
        raise ValueError(
            f"{server.url} takes no weights by transfer: start it with "
            """--weight-transfer-config '{"backend": "nccl"}', or use weights: path."""
        )
    if folder is not None and isinstance(protocol, VLLMProtocol):
        await _check_worker(server, protocol, folder, context.model_path)
    await check_tokenizer(server, protocol, context.model_path)


async def check_tokenizer(server: Server, protocol: ServerProtocol, path: str) -> None:
    """Refuses a server whose tokenizer, where it can be asked, is not that of `path`, with a ValueError."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    for text in _PROBES:
        theirs = await protocol.tokenize(server, text)
        ours = tokenizer.encode(text, add_special_tokens=False)
        if theirs is not None and theirs != ours:
            raise ValueError(
                f"{server.url} has another tokenizer than {path}: {text!r} is {theirs} there and {ours} here. Start it "
                "with the policy's model and tokenizer."
            )


async def _check_worker(server: Server, protocol: VLLMProtocol, folder: str, path: str) -> None:
    """Model and shared folder, as the server's workers see them."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path).get_text_config()
    probe = Path(folder).absolute() / f"probe-{uuid.uuid4().hex}"
    probe.parent.mkdir(parents=True, exist_ok=True)
    probe.touch()
    try:
        answers = await protocol.rpc(server, "lightrl_facts", str(probe))
    finally:
        probe.unlink()
    for answer in answers:
        if not answer.pop("sees"):
            raise ValueError(
                f"{server.url} does not see ServerEngine.shared_folder={folder}: mount the same folder at the same "
                "path on every machine, or use weights: transfer."
            )
        wrong = {name: (value, getattr(config, name, None)) for name, value in answer.items()}
        wrong = {name: pair for name, pair in wrong.items() if pair[0] != pair[1]}
        if wrong:
            listed = ", ".join(f"{name} is {theirs} there and {ours} here" for name, (theirs, ours) in wrong.items())
            raise ValueError(f"{server.url} serves another model: {listed}. Start it with the policy's model.")


def check_length(servers: Sequence[Server], context: EngineContext) -> None:
    """Refuses servers that cannot hold the run's longest prompt and completion, or would use other rotary factors.

    Args:
        servers: whose facts are known.
        context: of the run.
    """
    original = longrope_limit(context.model_path)
    for server in servers:
        longest, limit = (context.max_prompt_tokens or 0) + context.max_new_tokens, server.facts.max_model_len
        if limit and longest > limit:
            raise ValueError(
                f"{server.url} holds max_model_len={limit} tokens; the longest prompt with max_new_tokens="
                f"{context.max_new_tokens} needs {longest}. Start it with --max-model-len {longest}."
            )
        if original is not None and limit and (limit > original) != context.long_rope:
            raise ValueError(
                f"actor.long_rope={context.long_rope}: {server.url} holds max_model_len={limit} tokens, and above "
                f"{original} it uses LongRoPE's factors for long sequences. Set long_rope to {not context.long_rope}, "
                "or start it with another --max-model-len."
            )

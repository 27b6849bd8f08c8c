"""Converts a program's requests to the turns and its conversations to the sequences of a trajectory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any, Literal

from lightrl.engines.background import all_of
from lightrl.environments.base import Message, Tools
from lightrl.environments.bridges import Bridge
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError
from lightrl.environments.endpoint.streams import Stream, cut
from lightrl.environments.ledger import Ledger
from lightrl.environments.multi_turn import Attempt
from lightrl.environments.parsing import ReplyParser
from lightrl.records import Completion, CompletionGroup, StopReason, TrajectoryRow

_COUNTS = ["tool_calls", "parse_errors", "refused_requests", "ignored_parameters", "constrained_turns", "masked_turns"]
Constrained = Literal["engine", "free"]


@dataclass(eq=False, kw_only=True)
class Session:
    """Answers the requests of one trajectory, on the event loop that it was created on.

    A request that continues one of the trajectory's conversations verbatim extends its tokens if the bridge verifies
    that the chat template only appends. Any other request starts a new sequence: sub-agents, compaction, edited
    histories, or a second request for the same turn. A sampled token is trained in the sequence it was sampled in.

    Turns are numbered in the order of their requests, and a turn's seed depends on its number. Programs with sequential
    requests therefore get the same tokens for the same seeds. The number of a canceled request is reused.
    """

    attempt: Attempt
    bridge: Bridge
    parser: Callable[[Tools], ReplyParser]
    max_turns: int
    template_kwargs: Mapping[str, Any]
    notify: Callable[[str], None]
    constrained: Constrained = "engine"  # see `AgentProgram`

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.broken = asyncio.Event()  # set on a failure or an error
        self.failure: str | None = None  # that the policy did not cause
        self.raised_at = ""  # frames of the user's code that raised the failure
        self.error: Exception | None = None  # stops the run
        self.refusal: str | None = None  # of the last rejected request
        self.requested = False
        self.completion = ""  # content of the last reply
        self._ended = False
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self.limit: StopReason | None = None  # that rejected the last request
        self._last: StopReason = "stop"
        self._streams: list[Stream] = []
        self._latest: Stream | None = None
        self._numbers: dict[int, None] = {}  # of turns, including those in progress, by the order of their requests
        self._turns: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._call_ids: dict[str, tuple[str, str]] = {}  # program's ID of a call -> policy's, and the tool's name
        self._waited = 0.0
        self._waiting_since = 0.0
        self._responses: dict[str, list[Message]] = {}
        self._images: dict[str, Any] = {}  # data URL -> image, decoded as in a ledger

    # ---- outcome ----------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def stop_reason(self) -> StopReason:
        """The stop reason if the trajectory ended now without a failure."""
        return self.limit or self._last

    @property
    def conversation(self) -> list[Message]:
        return [] if self._latest is None else self._latest.ledger.conversation

    @property
    def engine_seconds(self) -> float:
        """Seconds during which at least one turn was being sampled."""
        return self._waited + (time.monotonic() - self._waiting_since if self._tasks else 0.0)

    @property
    def rows(self) -> list[TrajectoryRow]:
        """The training sequences with consecutively numbered turns."""
        number = {turn: i for i, turn in enumerate(n for n in self._numbers if n in self._turns)} | {-1: -1}
        rows = [row for stream in self._streams for row in stream.ledger.rows if any(t >= 0 for t in row.turn_ids)]
        if not rows:
            return [TrajectoryRow([0], [-1], [0.0], [-1])]
        return [replace(row, turn_ids=[number[turn] for turn in row.turn_ids]) for row in rows]

    def metrics(self, seconds: float) -> dict[str, float]:
        """Metrics of a trajectory that took `seconds` in total."""
        return {
            "turns": float(self.turns),
            "forks": float(max(sum(stream.ledger.forks + 1 for stream in self._streams) - 1, 0)),
            "environment_seconds": max(seconds - self.engine_seconds, 0.0),
            **self._counts,
        }

    def end(self) -> None:
        """Rejects new requests and cancels turns in progress."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    def fail(self, cause: str, raised_at: str = "") -> None:
        """Records a failure that the policy did not cause. Keeps the first one."""
        if self.failure is None:
            self.failure, self.raised_at = cause, raised_at
        self.broken.set()

    def stop(self, error: Exception) -> None:
        self.error = error
        self.broken.set()

    def refused(self, refused: RefusedError) -> None:
        self.requested = True
        self._counts["refused_requests"] += 1
        self.refusal = refused.message
        if refused.status in (400, 404, 405) and refused.code != "context_length_exceeded":
            self.notify(f"A request from the program was rejected with status {refused.status}: {refused.message}")

    def remember(self, name: str, messages: list[Message]) -> None:
        self._responses[name] = messages

    def recall(self, name: str) -> list[Message]:
        """The conversation of a response. Raises a RefusedError if the trajectory has no such response."""
        if name not in self._responses:
            raise RefusedError(400, f"This trajectory has no response {name!r}.", "previous_response_id")
        return list(self._responses[name])

    # ---- turns ------------------------------------------------------------------------------------------------------

    async def turn(self, asked: Asked) -> Answered:
        """Answers a request, or raises a RefusedError. If canceled, nothing of the turn is trained."""
        task = asyncio.current_task()
        assert task is not None
        self.requested = True
        if self.failure is not None:
            raise RefusedError(503, f"The trajectory failed: {self.failure}")
        if self._ended:
            raise RefusedError(401, "The trajectory has ended, and its key is no longer valid.")
        if self.turns + len(self._tasks) >= self.max_turns:
            self.limit = "turns"
            raise RefusedError(403, f"The trajectory has reached max_turns={self.max_turns}.", code="max_turns")
        try:
            self.parser(asked.tools)
            later = dropwhile(lambda message: message["role"] != "assistant", asked.messages)
            self.bridge.check_roles(list(later), asked.tools)
        except ValueError as error:  # the chat template doesn't support tools
            self.stop(error)
            raise RefusedError(500, str(error)) from error
        if not self._tasks:
            self._waiting_since = time.monotonic()
        self._tasks.add(task)
        self._ignore(asked.ignored)
        try:
            return await self._sample(asked)
        except RefusedError:
            raise
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise RefusedError(503, f"The trajectory failed: {self.failure}") from error
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._waited += time.monotonic() - self._waiting_since

    async def _sample(self, asked: Asked) -> Answered:
        run = self.attempt.sampling
        wanted = min(run.max_new_tokens, asked.max_new_tokens or run.max_new_tokens)
        for name, value in asked.template_kwargs.items():
            if name not in self.template_kwargs or self.template_kwargs[name] != value:
                raise RefusedError(
                    400,
                    f"chat_template_kwargs.{name}={json.dumps(value)}: differs from the run's. Set "
                    "episode.template_kwargs.",
                    f"chat_template_kwargs.{name}",
                    "unsupported_value",
                )
        structured, wish = self._structured(asked)
        extra: dict[str, Any] = {"structured_outputs": structured} if structured else {}
        if asked.top_logprobs:
            extra["logprobs"] = asked.top_logprobs
        number = min({*range(len(self._numbers) + 1)} - self._numbers.keys())
        self._numbers[number] = None
        stream = None
        try:
            messages = self._as_policy(asked.messages)
            begun = self._prefill(messages) if asked.prefill else ""
            stream = self._begun(messages, asked.tools)
            prefix = self.bridge.plain_ids(begun)
            stream.ledger.prefill(prefix)
            length = len(stream.ledger.request_ids)
            left = self.attempt.max_tokens - length
            if left < max(1, run.min_new_tokens):
                self.limit = "tokens"
                raise RefusedError(
                    400,
                    f"The prompt is too long: the conversation has {length} tokens, which leaves none of the "
                    f"{self.attempt.max_tokens} for a reply. Shorten it.",
                    code="context_length_exceeded",
                )
            limit = min(wanted, left)
            sampling = replace(
                run,
                max_new_tokens=limit,
                min_new_tokens=min(run.min_new_tokens, limit),
                stop=[*(run.stop or []), *asked.stop] or None,
                extra={**(run.extra or {}), **extra} or None,
            )
            try:
                group = await self.attempt.sample(stream.ledger, number, sampling, trained=not structured)
            except ValueError as error:
                if not extra:
                    raise
                wish = wish or "top_logprobs"  # not supported by the engine
                raise RefusedError(400, f"{wish}: {error}", wish, "unsupported_value") from error
        except BaseException:
            del self._numbers[number]
            if stream is not None:
                stream.busy = bool(begun)  # permanently, because its tokens end with an unfinished reply
            raise
        stream.busy = False
        return self._answered(asked, stream, number, group, prefix, begun, "tokens" if left < wanted else "length")

    def _answered(
        self,
        asked: Asked,
        stream: Stream,
        number: int,
        group: CompletionGroup,
        prefix: list[int],
        begun: str,
        limit: StopReason,
    ) -> Answered:
        """Records a turn, which continues `begun`. `limit` is the stop reason if it was truncated."""
        (completion,) = group.completions
        prompt_ids = group.request.token_ids
        whole = replace(completion, token_ids=prefix + completion.token_ids)
        reply = self.parser(asked.tools).read(
            prompt_ids[: len(prompt_ids) - len(prefix)], whole, asked.tools, self.bridge
        )
        self._counts["parse_errors"] += bool(reply.errors)
        sampled = reply.content
        reply, stop = cut(reply, asked.stop, len(begun))
        if asked.single:
            reply = replace(reply, tool_calls=reply.tool_calls[:1])
        trained = group.request.trained or completion.support is not None
        self._counts["constrained_turns"] += not group.request.trained
        self._counts["masked_turns"] += not trained
        if not trained:
            self.notify(
                "The program's requests constrain replies, but the engine doesn't record the allowed tokens. Such "
                'turns are not trained (masked_turns). Set episode.constrained to "free" to sample and train them '
                "without the constraint."
            )
        stream.ledger.sampled(completion, group.versions(0), reply.message(), turn=number, trained=trained)
        ended = self.bridge.ends_turn(completion.token_ids)
        stream.sampled = None if ended or reply.tool_calls else sampled
        self._turns.add(number)
        self._latest = stream
        self.completion = reply.content
        self.limit = None
        self._last = "stop" if not reply.truncated else limit
        self._counts["tool_calls"] += len(reply.tool_calls)
        said = reply.content.removeprefix(begun)  # without blank text before calls, which some SDKs take for an answer
        for_program = replace(reply, content=said if said.strip() or not reply.tool_calls else "", tool_calls=[])
        for i, call in enumerate(reply.tool_calls):
            call_id = f"call_{number}_{i}"
            self._call_ids[call_id] = (call.id, call.name)
            for_program.tool_calls.append(replace(call, id=call_id))
        logprobs = None if asked.top_logprobs is None else self._logprobs(asked, completion)
        return Answered(for_program, len(prompt_ids), len(completion.token_ids), stop, logprobs)

    def _logprobs(self, asked: Asked, completion: Completion) -> list[dict[str, Any]]:
        """Log-probs of sampled and most likely tokens, up to the end of the turn or the stop string."""
        tokenizer, entries = self.bridge.tokenizer, list[dict[str, Any]]()
        ids = completion.token_ids[:-1] if self.bridge.ends_turn(completion.token_ids) else completion.token_ids
        text = ""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            word = tokenizer.decode([token])
            return {"token": word, "logprob": logprob, "bytes": list(word.encode(errors="replace"))}

        for place, token in enumerate(ids):
            top = sorted(completion.top[place].items(), key=lambda pair: -pair[1]) if completion.top else []
            likeliest = [entry(*pair) for pair in top[: asked.top_logprobs]]
            entries.append({**entry(token, completion.logprobs[place]), "top_logprobs": likeliest})
            text += entries[-1]["token"]
            if any(stop in text for stop in asked.stop):
                break
        return entries

    def _structured(self, asked: Asked) -> tuple[dict[str, Any], str]:
        """The engine's structured outputs for the reply, and the parameter of the request that requires them."""
        wish = "tool_choice" if asked.forced is not None else "response_format" if asked.structured else ""
        if not wish:
            return {}, ""
        if self.constrained == "free":
            self._ignore([wish])
            return {}, wish
        if not asked.tools:
            return dict(asked.structured), wish
        try:
            single = asked.single or not self.bridge.takes_parallel_calls(asked.tools)
            grammar = self.parser(asked.tools).grammar(asked.tools, asked.forced, asked.structured, single=single)
            return grammar, wish
        except ValueError as error:
            raise RefusedError(400, f"{wish}: {error}", wish, "unsupported_value") from error

    def _ignore(self, names: Sequence[str]) -> None:
        self._counts["ignored_parameters"] += len(names)
        for name in names:
            self.notify(f"Ignoring {name} in the program's requests, because the run's sampling settings apply.")

    async def turns_of(self, asked: Asked) -> list[Answered]:
        """Answers a request with `Asked.n` replies. Each reply is a turn."""
        return await all_of(self.turn(asked) for _ in range(asked.n))

    def _prefill(self, messages: list[Message]) -> str:
        """Removes the beginning of the reply from the end of a conversation and returns it."""
        last = messages.pop()
        text = last.get("content")
        if not messages or last["role"] != "assistant" or last.get("tool_calls") or not isinstance(text, str):
            raise RefusedError(400, "messages: must end with an assistant message of text to continue.", "messages")
        return text

    async def count(self, asked: Asked) -> int:
        self.requested = True
        try:
            return len(self.bridge.render(self.bridge.opened(self._as_policy(asked.messages)), asked.tools))
        except ValueError as error:
            raise RefusedError(400, str(error), "messages") from error

    def _begun(self, messages: list[Message], tools: list[dict[str, Any]]) -> Stream:
        """The conversation that a request continues, or a new one."""
        found = [(stream, *left) for stream in self._streams if (left := stream.rest(messages, tools)) is not None]
        new = Stream(Ledger(self.bridge, tools)), None, ""
        stream, rest, more = max(found, key=lambda each: len(each[0].ledger.messages), default=new)
        stream.busy = True  # permanently if the template rejects the conversation
        try:
            if rest is None:
                stream.ledger.begin(messages)
                self._streams.append(stream)
            elif rest:
                said = messages[-len(rest) - 1] if more else None
                stream.ledger.answer(rest, said, self.bridge.plain_ids(more))
        except ValueError as error:
            raise RefusedError(400, str(error), "messages") from error
        return stream

    def _as_policy(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with the policy's IDs of tool calls, and with names in tool messages."""
        names = {key: name for key, (_, name) in self._call_ids.items()}
        said = []
        for message in messages:
            message = dict(message)
            if message.get("tool_calls"):
                names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
                message["tool_calls"] = [{**call, "id": self._policy_id(call["id"])} for call in message["tool_calls"]]
            if isinstance(message.get("content"), list):
                message["content"] = [self._seen(part) for part in message["content"]]
            if message["role"] == "tool":
                name = names.get(message["tool_call_id"])
                message = {
                    "role": "tool",
                    **({} if name is None else {"name": name}),
                    "tool_call_id": self._policy_id(message["tool_call_id"]),
                    "content": message["content"],
                }
            said.append(message)
        return said

    def _seen(self, part: dict[str, Any]) -> dict[str, Any]:
        """A content block with a decoded image, for comparison with the ledger."""
        if part["type"] != "image":
            return part
        if (url := part["image"]) not in self._images:
            message: Message = {"role": "user", "content": [part]}
            try:
                (message,) = self.bridge.opened(self.bridge.opened([message]))
            except ValueError as error:
                raise RefusedError(400, str(error), "messages") from error
            self._images[url] = message["content"][0]["image"]
        return {**part, "image": self._images[url]}

    def _policy_id(self, call_id: str) -> str:
        return self._call_ids.get(call_id, (call_id, ""))[0]

"""The HTTP server of the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightrl.engines.background import BackgroundLoop
from lightrl.environments.endpoint.anthropic_messages import Messages
from lightrl.environments.endpoint.api import Api
from lightrl.environments.endpoint.callers import UNKNOWN, key_of
from lightrl.environments.endpoint.openai_apis import ChatCompletions
from lightrl.environments.endpoint.requests import RefusedError
from lightrl.environments.endpoint.responses import Responses
from lightrl.environments.endpoint.session import Session

LOOPBACK = "127.0.0.1"
MIXED_UP = (
    "run: a trajectory sent a request with the key of another trajectory. This happens if programs set a process-wide "
    "client, key, or URL, or share threads. Create the client in the program from its `base_url` and `api_key`, or set "
    "process=True."
)
UNTOLD = (
    "run: a request came from a thread without a context, so its trajectory is unknown. Start the thread with "
    "`contextvars.copy_context().run` (as `asyncio.to_thread` does), or set process=True."
)
T = TypeVar("T")
Handler: TypeAlias = Callable[[Api, Session, Request], Awaitable[Response]]
NO_RETRY = {"x-should-retry": "false"}  # respected by both official clients


class Endpoint:
    """Serves sessions at `base_url`, on an event loop in a separate thread.

    Each session has a secret key of 256 random bits, which is valid until the session ends. Without a valid key, only
    `/health` is answered, and no body is read. Port 0 picks a free port, which replaces `{port}` in `url`.
    """

    def __init__(self, bind: str = LOOPBACK, port: int = 0, url: str | None = None) -> None:
        self._sessions: dict[str, Session] = {}  # by key
        self._opened = 0
        self._prefix = f"sk-{secrets.token_hex(8)}-"  # of this endpoint's keys
        try:
            self._socket = socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
        except OSError as error:
            raise ValueError(f"bind={bind!r}, port={port}: {error.strerror}. Use another, or port=0.") from error
        self.port = int(self._socket.getsockname()[1])
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(bind, f"[{bind}]" if ":" in bind else bind)
        self.base_url = (url or f"http://{host}:{{port}}/v1").replace("{port}", str(self.port))
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                headers=[("connection", "close")],  # so that each connection belongs to one trajectory
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._loop = BackgroundLoop("endpoint")
        self._serving = self._loop.submit(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._serving.done():
            time.sleep(0.005)

    def stop(self) -> None:
        self._sessions.clear()
        self._server.should_exit = True
        with contextlib.suppress(Exception):
            self._serving.result(10)
        with contextlib.suppress(Exception):
            self._loop.close()
        self._socket.close()

    def open(self, session: Session, key: str | None = None) -> str:
        """Starts answering requests of a session. Returns its key, by default a new one."""
        key = key or f"{self._prefix}{secrets.token_urlsafe(32)}"
        self._opened += 1
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        self._sessions.pop(key, None)

    def _find(self, request: Request) -> Session:
        """The session of a request. Raises a RefusedError if its key is invalid or another trajectory's."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = (key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).strip()
        session = self._sessions.get(key)
        local = request.client is not None and request.client.host == LOOPBACK
        caller = key_of(request.client.port, request.scope["server"][1]) if request.client and local else None
        issued = session is not None or (caller in self._sessions and key.startswith(self._prefix))  # now, or earlier
        if caller is not None and caller != key and issued and self._opened > 1:
            cause = UNTOLD if caller == UNKNOWN else MIXED_UP
            for mixed_up in filter(None, (session, self._sessions.get(caller))):
                _on_loop(mixed_up, mixed_up.stop, ValueError(cause))
            raise RefusedError(403, cause)
        if session is None:
            raise RefusedError(401, "The API key is invalid, or its trajectory has ended.", code="invalid_api_key")
        return session

    # ---- requests, on the server's loop -----------------------------------------------------------------------------

    def _app(self) -> Starlette:
        chat = ChatCompletions()
        served: dict[tuple[str, str], tuple[Api, Handler]] = {}
        for api in (chat, Responses(), Messages()):
            served["POST", api.path] = api, _answer
            if api.counting is not None:
                served["POST", api.counting] = api, _count

        async def handle(request: Request) -> Response:
            # OpenAI's clients append "/chat/completions" to the base URL, Anthropic's "/v1/messages".
            path = request.url.path.removeprefix("/v1").removeprefix("/v1")
            models = request.method == "GET" and path.split("/")[1:2] == ["models"]
            other = chat, _models if models else _unknown
            return await self._handled(request, *served.get((request.method, path), other))

        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return Starlette(routes=[Route("/health", _health), Route("/{path:path}", handle, methods=methods)])

    async def _handled(self, request: Request, api: Api, answer: Handler) -> Response:
        session = None
        try:
            session = self._find(request)
            return await answer(api, session, request)
        except RefusedError as error:
            refused = error
            if session is not None:
                _on_loop(session, session.refused, refused)
        except ClientDisconnect:  # before the end of its request
            return Response(status_code=499)
        except Exception as error:  # an internal error, so the trajectory fails
            refused = RefusedError(500, f"{type(error).__name__}: {error}")
            if session is not None:
                _on_loop(session, session.fail, f"endpoint: {refused.message}")
        return JSONResponse(api.error(refused), status_code=refused.status, headers=NO_RETRY)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _models(api: Api, session: Session, request: Request) -> Response:
    """The model, under any name, with the fields of both providers."""
    name = request.url.path.partition("/models")[2].lstrip("/")
    model = {
        **{"id": name or "policy", "object": "model", "created": 0, "owned_by": "run"},
        **{"type": "model", "display_name": name or "policy", "created_at": "1970-01-01T00:00:00Z"},
    }
    ends = {"first_id": model["id"], "last_id": model["id"], "has_more": False}
    return JSONResponse(model if name else {"object": "list", "data": [model], **ends})


async def _unknown(api: Api, session: Session, request: Request) -> Response:
    raise RefusedError(
        404,
        f"{request.method} {request.url.path}: not served. Use chat completions, responses, or messages.",
        code="unknown_url",
    )


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError(400, "The body is not a JSON object.")
    return body


async def _count(api: Api, session: Session, request: Request) -> Response:
    asked = api.read(await _body(request), session.recall)
    tokens = await _made(session, session.count(asked), request)  # the client disconnected if None
    return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


async def _answer(api: Api, session: Session, request: Request) -> Response:
    asked = api.read(await _body(request), session.recall)
    answers = await _made(session, session.turns_of(asked), request)
    if answers is None:
        return Response(status_code=499)  # the client disconnected
    written = api.write(asked, answers)
    if isinstance(api, Responses):  # by the ID in the response
        session.remember(written["id"], [*asked.messages[asked.instructions :], answers[0].reply.message()])
    if not asked.stream:
        return JSONResponse(written)
    events = api.events(asked, answers, written)
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _made(session: Session, work: Coroutine[Any, Any, T], request: Request) -> T | None:
    """Runs a coroutine on the session's loop. Cancels it and returns None if the client disconnects."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, session.loop)
    except RuntimeError as error:
        work.close()
        raise RefusedError(503, "The run has ended.") from error
    answer = asyncio.wrap_future(future)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return None
        if answer.cancelled():
            raise RefusedError(503, "The trajectory was canceled.")
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _on_loop(session: Session, function: Callable[..., object], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # its loop may be closed
        session.loop.call_soon_threadsafe(function, *arguments)

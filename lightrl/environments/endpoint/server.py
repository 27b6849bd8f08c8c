"""The loopback server that programs use as a model server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from lightrl.compat.uvicorn import cut, serve
from lightrl.environments.endpoint.anthropic_messages import Messages
from lightrl.environments.endpoint.api import Api
from lightrl.environments.endpoint.callers import key_of
from lightrl.environments.endpoint.openai_chat import ChatCompletions
from lightrl.environments.endpoint.openai_responses import Responses
from lightrl.environments.endpoint.session import Answered, Asked, RefusedError, Session

HOST = "127.0.0.1"
# OpenAI's clients add "/chat/completions" to their base URL, Anthropic's "/v1/messages": one URL does for both.
PREFIXES = ("", "/v1", "/v1/v1")
MIXED_UP = (
    "run: one attempt sent a request with the key of another, which would be trained on it. This happens if programs "
    "set a client, key, or URL for the whole process. Create the client inside the program from its `base_url` and "
    "`api_key`, or set process=True."
)
NO_RETRY = {"x-should-retry": "false"}  # what was rejected is rejected again; both official clients heed it


class Endpoint:
    """Serves sessions on 127.0.0.1 at a free port, from a thread and an event loop of its own.

    Each session has a key, which a secret of 256 random bits signs, compared in constant time, and void after the
    session's end. A key that another attempt of this process uses ends the run.
    Nothing is answered without one, and no body is read.

    Where the thread ends unasked, or nothing listens any more, its sessions fail.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}  # by the part of the key that is not secret
        self._opening = threading.Lock()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((HOST, 0))
        self._port = int(self._socket.getsockname()[1])
        self.base_url = f"http://{HOST}:{self._port}/v1"
        config = uvicorn.Config(
            self._app(),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            headers=[("connection", "close")],  # so that a connection tells which attempt a request comes from
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._error: BaseException | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="endpoint")

    def start(self) -> None:
        """Returns when it answers.

        Raises:
            RuntimeError: it does not come up.
        """
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"The endpoint did not start at {self.base_url}.") from self._error
            time.sleep(0.005)

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._listen())
        except BaseException as error:
            self._error = error
        self._ends = True  # also where the loop broke off, before its requests are given up
        with contextlib.suppress(BaseException):  # broken off once more
            loop.run_until_complete(_give_up_requests())
        loop.close()
        cut(self._server)
        self._socket.close()
        with self._opening:
            left = list(self._sessions.values())
            self._sessions.clear()
        for session in left:
            _fail(session, "endpoint: its thread has ended")

    async def _listen(self) -> None:
        try:
            await serve(self._server, self._socket)
        finally:
            self._ends = True  # before its connections are closed, of which programs are told at once

    @property
    def answers(self) -> bool:
        """Whether it still listens."""
        try:
            with socket.create_connection((HOST, self._port), timeout=5.0):
                return self._thread.is_alive() and not self._ends
        except OSError:
            return False

    def stop(self) -> None:
        """Voids all keys, closes all connections and the socket."""
        with self._opening:
            self._server.should_exit = True
            self._sessions.clear()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._socket.close()

    def open(self, session: Session) -> str:
        """The key of a session, which is answered from now on; the session has failed where the endpoint has ended."""
        name = secrets.token_hex(8)
        with self._opening:
            if self._ends or self._server.should_exit or not self._thread.is_alive():
                session.fail("endpoint: it has ended")
            else:
                self._sessions[name] = session
        return self._key(name)

    def _key(self, name: str) -> str:
        return f"sk-{name}-{hmac.new(self._secret, name.encode(), 'sha256').hexdigest()}"

    def close(self, key: str) -> None:
        """Voids a key."""
        self._sessions.pop(_name(key), None)

    def _find(self, request: Request) -> Session:
        """The session that a request belongs to.

        Raises:
            RefusedError: its key is wrong, or belongs to an attempt that has ended or that did not make the request.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        key = key.strip()
        name = _name(key)
        if not hmac.compare_digest(self._key(name).encode(), key.encode()):
            raise RefusedError(401, "The key is wrong.", code="invalid_api_key")
        session = self._sessions.get(name)
        caller = None if request.client is None else key_of(request.client.port)
        if caller is not None and caller != key:
            for mixed_up in (session, self._sessions.get(_name(caller))):
                if mixed_up is not None:
                    _on_loop(mixed_up, mixed_up.stop, ValueError(MIXED_UP))
            raise RefusedError(403, MIXED_UP)
        if session is None:
            raise RefusedError(401, "The attempt that this key belongs to has ended.", code="invalid_api_key")
        return session

    # ---- requests, on the server's own loop ---------------------------------------------------------------------

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        apis: list[Api] = [ChatCompletions(), Responses(), Messages()]
        for prefix in PREFIXES:
            for api in apis:
                app.add_api_route(prefix + api.path, self._handler(api), methods=["POST"], response_model=None)
            app.add_api_route(prefix + "/models", self._models, methods=["GET"], response_model=None)

        async def missing(request: Request, error: Exception) -> Response:
            status = getattr(error, "status_code", 404)
            api = apis[2] if "anthropic-version" in request.headers else apis[0]
            refused = RefusedError(status, f"{request.method} {request.url.path} is not offered here.")
            with contextlib.suppress(RefusedError):
                _note(self._find(request), refused)
            return _refusal(api, refused)

        app.add_exception_handler(404, missing)
        app.add_exception_handler(405, missing)
        return app

    async def _models(self, request: Request) -> Response:
        try:
            self._find(request)
        except RefusedError as refused:
            return _refusal(ChatCompletions(), refused)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "run"}
        return JSONResponse({"object": "list", "data": [model]})

    def _handler(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            session = None
            try:
                session = self._find(request)
                return await self._answer(api, session, request)
            except RefusedError as refused:
                if session is not None:
                    _note(session, refused)
                return _refusal(api, refused)
            except ClientDisconnect:  # half-way through its request
                return Response(status_code=499)
            except Exception as error:  # a fault of ours: the attempt must not look complete
                if session is not None:
                    _fail(session, f"endpoint: {type(error).__name__}: {error}")
                return _refusal(api, RefusedError(500, f"{type(error).__name__}: {error}"))

        return handle

    async def _answer(self, api: Api, session: Session, request: Request) -> Response:
        body = await _body(request)
        asked = api.read(body, session.recall)
        answered = await _turn(session, asked, request)
        if answered is None:
            return Response(status_code=499)  # nobody reads it
        written = api.write(asked, answered)
        if isinstance(api, Responses):
            # Under the id that the program gets, streamed or not.
            session.remember(written["id"], [*asked.messages[asked.instructions :], answered.reply.message()])
        if asked.stream:
            headers = {"cache-control": "no-cache"}
            return StreamingResponse(
                api.events(asked, answered, written), media_type="text/event-stream", headers=headers
            )
        return JSONResponse(written)


async def _body(request: Request) -> dict[str, Any]:
    """The parsed body.

    Raises:
        RefusedError: it is not a JSON object.
    """
    try:
        parsed = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"The body is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RefusedError(400, "The body must be a JSON object.")
    return parsed


async def _turn(session: Session, asked: Asked, request: Request) -> Answered | None:
    """The session's answer, made on its own loop; None where the client has gone, which gives the turn up."""
    work = session.turn(asked)
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
            raise RefusedError(503, "The attempt was given up.")
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def _give_up_requests() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _name(key: str) -> str:
    """The part of a key that is not secret."""
    return key.removeprefix("sk-").partition("-")[0]


def _on_loop(session: Session, function: Callable[..., object], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # its loop has ended
        session.loop.call_soon_threadsafe(function, *arguments)


def _fail(session: Session, cause: str) -> None:
    _on_loop(session, session.fail, cause)


def _note(session: Session, refused: RefusedError) -> None:
    _on_loop(session, session.refused, refused)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(api: Api, refused: RefusedError) -> Response:
    return JSONResponse(api.error(refused), status_code=refused.status, headers=NO_RETRY)

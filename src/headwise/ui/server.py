"""`headwise serve`: the view with models behind it, for this machine unless told otherwise."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import HeadwiseError
from .capture import Stopped
from .page import page
from .service import Service

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LARGEST = 1 << 20  # bytes of a request
QUEUE = 16  # requests that may wait for the model
SENTENCE = 400  # characters
POLL = 0.05  # seconds between looks whether a client is still there
BODY_SECONDS = 20.0  # until the body of a request must be there
HOST = re.compile(r"(?:(localhost|\d{1,3}(?:\.\d{1,3}){3})|\[([0-9a-f:.]{2,45})\])(?::\d{1,5})?", re.IGNORECASE)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(header: str) -> bool:
    """Whether a Host header is an address of this machine, with or without a port, and nothing else."""
    found = HOST.fullmatch(header)
    return found is not None and local(found[1] or found[2])


class Desk:
    """One model pass at a time: the others wait in line, and those who left are not served."""

    def __init__(self, service: Service) -> None:
        import torch

        self.service = service
        self.threads = torch.get_num_threads()
        self.turn = asyncio.Lock()
        self.waiting = 0

    async def serve(self, request: Request, asked: Any) -> dict[str, Any]:
        if self.waiting >= QUEUE:
            raise Busy
        gone = threading.Event()
        watcher = asyncio.create_task(_leave(request, gone))
        self.waiting += 1
        try:
            async with self.turn:
                if gone.is_set():
                    raise Stopped
                return await asyncio.to_thread(self._answer, asked, gone.is_set)
        finally:
            self.waiting -= 1
            watcher.cancel()

    def _answer(self, asked: Any, stop: Callable[[], bool]) -> dict[str, Any]:
        import torch

        text = asked.get("text") if isinstance(asked, dict) else None
        # a sentence is so little work that threads wait for each other longer than they compute
        short = isinstance(text, str) and len(text) <= SENTENCE
        torch.set_num_threads(1 if short else self.threads)
        return self.service.answer(asked, stop)


class Busy(Exception):
    """Too many wait already."""


async def _leave(request: Request, gone: threading.Event) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(POLL)
    gone.set()


def application(service: Service, *, token: str | None = None) -> Starlette:
    """The server's two answers: the page, and what it asks. token: what every request must know, if given."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import HTMLResponse, JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise _missing(error) from error
    shown, rules = page({"headwise": 1, "runs": [], "live": service.live}, host="hosts/server.js", connect="'self'")
    desk = Desk(service)

    async def root(request: Request) -> Response:
        return HTMLResponse(shown, headers={"Content-Security-Policy": rules + "; frame-ancestors 'none'"})

    async def ask(request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0] != "application/json":
            return JSONResponse({"error": "a request is application/json"}, 415)
        try:
            asked = json.loads(await _body(request))
            return JSONResponse(await desk.serve(request, asked))
        except Large:
            return JSONResponse({"error": f"a request may have {LARGEST:,} bytes"}, 413)
        except Busy:
            return JSONResponse({"error": f"{QUEUE} requests wait already; try again"}, 503)
        except TimeoutError:
            return JSONResponse({"error": f"a request must be whole within {BODY_SECONDS:g} seconds"}, 408)
        except (Stopped, ClientDisconnect):  # nobody reads this
            return JSONResponse({"error": "stopped"}, 499)
        except HeadwiseError as error:
            return JSONResponse({"error": " ".join(str(error).split())}, 422)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "a request is JSON"}, 400)

    routes = [Route("/", root), Route("/api", ask, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)])


class Large(Exception):
    """A request that is too long."""


async def _body(request: Request) -> bytes:
    """No more than is allowed is ever held, and for no longer, whatever the request says about itself."""
    if int(request.headers.get("content-length", "0")) > LARGEST:
        raise Large
    held = bytearray()
    async with asyncio.timeout(BODY_SECONDS):
        async for part in request.stream():
            held += part
            if len(held) > LARGEST:
                raise Large
    return bytes(held)


class Guard:
    """Who may ask: without a token only pages of this machine (no name that was pointed here), with one its holders."""

    def __init__(self, app: Any, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        request = Request(scope)
        unread = _has_body(request)

        async def received() -> Any:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                # what is left of a body would be read for as long as the connection lives
                headers = HEADERS | ({"Connection": "close"} if unread else {})
                extra = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refused = self._refused(request)
        app = PlainTextResponse(refused, 403) if refused else self.app
        await app(scope, received, sent)

    def _refused(self, request: Request) -> str:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "another site may not ask here"
        if _from_another_site(request) and not _navigation(request):
            return "another site may not ask here"
        if self.token is None:
            return "" if names_this_machine(host) else "this address is served to this machine alone"
        given = request.headers.get("x-headwise-token") or request.query_params.get("token") or ""
        right = secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())
        return "" if right else "a token is needed: open the address that headwise serve printed"


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _from_another_site(request: Request) -> bool:
    """What the browser says of the page that asks; a program that is no browser says nothing."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _navigation(request: Request) -> bool:
    """A link to the page, opened in a tab of its own: the page that has the link sees nothing of it."""
    wanted = (request.headers.get("sec-fetch-mode"), request.headers.get("sec-fetch-dest"))
    return request.method == "GET" and request.url.path == "/" and wanted == ("navigate", "document")


def serve(service: Service, *, host: str = "127.0.0.1", port: int = 7447, tell: Any = None) -> None:
    """Serve until interrupted. tell: is called with the address to open."""
    try:
        import uvicorn

        from .connections import settings
    except ImportError as error:
        raise _missing(error) from error
    host = host.removeprefix("[").removesuffix("]")
    token = None if local(host) else secrets.token_urlsafe(18)
    config = uvicorn.Config(application(service, token=token), host=host, port=port, **settings())
    sockets = [_bound(host, port)]
    shown = f"[{host}]" if ":" in host else host
    if tell:
        tell(f"http://{shown}:{sockets[0].getsockname()[1]}/" + (f"?token={token}" if token else ""))
    uvicorn.Server(config).run(sockets=sockets)


def _bound(host: str, port: int) -> Any:
    """The socket, so that an address in use is told in one line."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen()  # from here on a browser waits instead of being refused
    except OSError as error:
        made.close()
        raise HeadwiseError(
            f"{host} port {port} cannot be served: {error.strerror or error}; --port takes another"
        ) from error
    return made


def _missing(error: ImportError) -> HeadwiseError:
    return HeadwiseError(f"the server needs {error.name}; get it with: pip install 'headwise[serve]'")

"""`headwise serve`: the page with models behind it, for this machine only by default."""

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
from .capture import StoppedError
from .page import page
from .service import Service

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_BYTES = 1 << 20  # of a request
MOST_WAITING = 16  # requests in the queue
SHORT_TEXT = 400  # characters
POLL = 0.05  # seconds between checks whether a client is still connected
BODY_SECONDS = 20.0  # until the body of a request must be complete
HOST_HEADER = re.compile(r"(?:(localhost|\d{1,3}(?:\.\d{1,3}){3})|\[([0-9a-f:.]{2,45})\])(?::\d{1,5})?", re.IGNORECASE)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback_header(header: str) -> bool:
    """Whether a Host header is a loopback address, with or without a port."""
    match = HOST_HEADER.fullmatch(header)
    return match is not None and is_loopback(match[1] or match[2])


class RequestQueue:
    """Runs one pass at a time; other requests wait, and those whose client disconnected are dropped."""

    def __init__(self, service: Service) -> None:
        import torch

        self.service = service
        self.threads = torch.get_num_threads()
        self.turn = asyncio.Lock()
        self.waiting = 0

    async def serve(self, request: Request, query: Any) -> dict[str, Any]:
        if self.waiting >= MOST_WAITING:
            raise QueueFull
        disconnected = threading.Event()
        watcher = asyncio.create_task(_watch_disconnect(request, disconnected))
        self.waiting += 1
        try:
            async with self.turn:
                if disconnected.is_set():
                    raise StoppedError
                return await asyncio.to_thread(self._answer, query, disconnected.is_set)
        finally:
            self.waiting -= 1
            watcher.cancel()

    def _answer(self, query: Any, stop: Callable[[], bool]) -> dict[str, Any]:
        import torch

        text = query.get("text") if isinstance(query, dict) else None
        # for a sentence, threads cost more in synchronisation than they save
        short = isinstance(text, str) and len(text) <= SHORT_TEXT
        torch.set_num_threads(1 if short else self.threads)
        return self.service.answer(query, stop)


class QueueFull(Exception):
    """Too many requests are waiting."""


async def _watch_disconnect(request: Request, disconnected: threading.Event) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(POLL)
    disconnected.set()


def application(service: Service, *, token: str | None = None) -> Starlette:
    """The server with its two routes: the page, and its requests. token: required of every request, if set."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import HTMLResponse, JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise _missing_package(error) from error
    text, policy = page({"headwise": 1, "runs": [], "live": service.live}, host="hosts/server.js", connect="'self'")
    queue = RequestQueue(service)

    async def root(request: Request) -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": policy + "; frame-ancestors 'none'"})

    async def ask(request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0] != "application/json":
            return JSONResponse({"error": "a request is application/json"}, 415)
        try:
            query = json.loads(await _body(request))
            return JSONResponse(await queue.serve(request, query))
        except RequestTooLarge:
            return JSONResponse({"error": f"a request may have {MOST_BYTES:,} bytes"}, 413)
        except QueueFull:
            return JSONResponse({"error": f"{MOST_WAITING} requests wait already; try again"}, 503)
        except TimeoutError:
            return JSONResponse({"error": f"a request must be whole within {BODY_SECONDS:g} seconds"}, 408)
        except (StoppedError, ClientDisconnect):  # nobody reads the answer
            return JSONResponse({"error": "stopped"}, 499)
        except HeadwiseError as error:
            return JSONResponse({"error": " ".join(str(error).split())}, 422)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "a request is JSON"}, 400)

    routes = [Route("/", root), Route("/api", ask, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(AccessGuard, token=token)])


class RequestTooLarge(Exception):
    """The body of a request is too long."""


async def _body(request: Request) -> bytes:
    """Read the body within limits of size and time, whatever the headers claim."""
    if int(request.headers.get("content-length", "0")) > MOST_BYTES:
        raise RequestTooLarge
    body = bytearray()
    async with asyncio.timeout(BODY_SECONDS):
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise RequestTooLarge
    return bytes(body)


class AccessGuard:
    """Refuses requests: without a token, all but those to a loopback address; with a token, all without it."""

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
        unread_body = _has_body(request)

        async def receive_tracked() -> Any:
            nonlocal unread_body
            message = await receive()
            unread_body = unread_body and message.get("more_body", False)
            return message

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                # otherwise the rest of the body is read for as long as the connection lives
                headers = HEADERS | ({"Connection": "close"} if unread_body else {})
                extra = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refusal = self._refusal(request)
        app = PlainTextResponse(refusal, 403) if refusal else self.app
        await app(scope, receive_tracked, send_with_headers)

    def _refusal(self, request: Request) -> str:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "another site may not ask here"
        if _is_cross_site(request) and not _is_navigation(request):
            return "another site may not ask here"
        if self.token is None:
            return "" if is_loopback_header(host) else "this address is served to this machine alone"
        token = request.headers.get("x-headwise-token") or request.query_params.get("token") or ""
        valid = secrets.compare_digest(token.encode("utf-8", "replace"), self.token.encode())
        return "" if valid else "a token is needed: open the address that headwise serve printed"


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _is_cross_site(request: Request) -> bool:
    """Whether the browser says that another site sends the request; other programs say nothing."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _is_navigation(request: Request) -> bool:
    """Whether a link to the page was opened: the page with the link cannot read the answer."""
    fetch = (request.headers.get("sec-fetch-mode"), request.headers.get("sec-fetch-dest"))
    return request.method == "GET" and request.url.path == "/" and fetch == ("navigate", "document")


def serve(service: Service, *, host: str = "127.0.0.1", port: int = 7447, announce: Any = None) -> None:
    """Serve until interrupted. announce: is called with the address to open."""
    try:
        import uvicorn

        from .connections import settings
    except ImportError as error:
        raise _missing_package(error) from error
    host = host.removeprefix("[").removesuffix("]")
    token = None if is_loopback(host) else secrets.token_urlsafe(18)
    config = uvicorn.Config(application(service, token=token), host=host, port=port, **settings())
    sockets = [_listening_socket(host, port)]
    address_host = f"[{host}]" if ":" in host else host
    if announce:
        announce(f"http://{address_host}:{sockets[0].getsockname()[1]}/" + (f"?token={token}" if token else ""))
    uvicorn.Server(config).run(sockets=sockets)


def _listening_socket(host: str, port: int) -> Any:
    """A listening socket; an address in use is a one-line error."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # from here on a browser waits for the server
    except (OSError, TypeError, ValueError) as error:  # each of them for some name that is no host
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise HeadwiseError(f"{host} port {port} cannot be served: {reason}; choose another host= or port=") from error
    return listener


def _missing_package(error: ImportError) -> HeadwiseError:
    return HeadwiseError(f"the server needs {error.name}; get it with: pip install 'headwise[serve]'")

"""The connections of the server: bounded in number and in time, whatever a client sends or leaves unsent.

uvicorn closes a connection that is idle after a response, but waits without end for the rest of half-sent headers, and
for a client that does not read what it is sent.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 100  # at once
WAIT_SECONDS = 10.0  # until the headers of a request must be complete, and for a client that reads nothing
MOST_HEADER_BYTES = 16_384


class BoundedConnection(H11Protocol):
    """A connection that ends when no request is complete in time; over the limit, the one that waited longest ends.

    _since: when it began to wait for a request, infinite while one is being answered; _unsent: bytes that the client
    had not read by then.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._wait()
        if len(self.connections) > MOST_CONNECTIONS:
            bounded = [connection for connection in self.connections if isinstance(connection, BoundedConnection)]
            # this one, if all others are being answered
            oldest = min(bounded, key=lambda connection: connection._since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if not self._idle():
            self._since = math.inf

    def on_response_complete(self) -> None:
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def send_400_response(self, msg: str) -> None:
        """Also possible in the middle of a body, when the application may be about to answer."""
        if not self._idle():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer is under way already
            self.transport.abort()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        """Start the timeout."""
        self._since = self.loop.time() if self._idle() else math.inf
        if self._timer is not None:
            self._timer.cancel()
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(WAIT_SECONDS, self._check)

    def _check(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:  # slow, but reading
            self._wait()
        elif self._idle() or unsent:
            self.transport.abort()


def settings() -> dict[str, Any]:
    """Options of uvicorn.Config."""
    return {
        "http": BoundedConnection, "ws": "none", "lifespan": "off", "h11_max_incomplete_event_size": MOST_HEADER_BYTES,
        "timeout_keep_alive": 5, "log_level": "error", "access_log": False, "server_header": False,
    }  # fmt: skip

"""Hostile requests to a real server: no traceback in its log, no answer 500, no hang, and it still serves afterwards.

What is left half-sent is kept open until the server closes it, a few hundred connections at a time.
"""

from __future__ import annotations

import json
import logging
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from campaigns import Report

SHORT, LONG = 200, 20_000
PATIENCE = 0.5  # seconds, instead of the real server's ten
HANG = 20.0  # seconds after which a connection counts as one that is never closed
OPEN_AT_ONCE = 60  # half-sent requests at once
HOSTS = (
    "localhost", "127.0.0.1", "[::1]", "evil.com", "[::1]evil.com", "[::1].evil.com:80", "127.0.0.1:80@evil.com", "",
    "a" * 300, "127.0.0.1:99999999999", "[", "]", "\xff\xfe", "localhost\tx", "localhost:", "127.0.0.1, evil.com",
)  # fmt: skip
PATHS = (
    "/", "/api", "/api/", "//api", "/../etc/passwd", "/%2e%2e/%00", "/api%0d%0aX: y", "/" + "a" * 9000, "*", "http://evil/",
    "/?token=" + "%f0" * 50, "/\x7f", "/é", "/api?" + "&" * 5000, "/%", "/%zz", "",
)  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "get", "G E T", "", "X" * 500, "PRI")
HEADERS = (
    "Origin: http://evil.com", "Origin: null", "Sec-Fetch-Site: cross-site", "Content-Type: application/json",
    "Content-Type: text/plain", "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999",
    "Content-Length: 5, 5", "Content-Length: ５", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: identity", "Expect: 100-continue", "Expect: nothing", "Connection: close", "X\x00: y",
    "Connection: Upgrade\r\nUpgrade: websocket", "Range: bytes=" + "0-1," * 900, "X-Headwise-Token: é",
    "X: " + "y" * 5000, " folded: x", "no colon", ": empty", "Host: localhost", "Accept-Encoding: " + "gzip," * 500,
    "X: \x1b[31m", "Cookie: \r\n more",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"null", b"1e999", b"NaN", b"9" * 10_000, b'"\\ud800"',
    b"\xff\xfe\xfd", b'{"ask":"run","text":"\\ud800"}', b'{"ask":"run","text":"x"}', b'{"ask":["run"]}',
    b'{"ask":"run","text":1e400}', b'{"ask":"steps","text":"x","head":"99999999.1"}', b"\x00" * 100, b" " * 300_000,
    b'{"ask":"run","text":"x","off":"' + b"1.1," * 3000 + b'"}', b'{"ask":"run","text":"x","model":"../../x"}',
    b'{"text":"' + b"x" * 1_200_000 + b'"}',
)  # fmt: skip
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")


class Stub:
    """A service without a model, as strict about a request as the real one."""

    def __init__(self) -> None:
        from headwise.ui.service import Service

        self.live = {"models": ["stub"], "text": "x", "target": None, "longest": 500}
        self._real = Service({"stub": (None, None)}, longest=500)
        self._real._pass = self._refuse  # type: ignore[method-assign]

    def _refuse(self, *arguments: Any) -> Any:
        from headwise.errors import HeadwiseError

        raise HeadwiseError("there is no model here")

    def answer(self, request: Any, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        return {"done": True} if request == {} else self._real.answer(request, stop)


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def serving() -> Iterator[tuple[int, Log, Any]]:
    """The port of a server that is not patient, and what it logs."""
    import uvicorn

    from headwise.ui import connections, server

    with mock.patch.object(connections, "WAIT_SECONDS", PATIENCE), mock.patch.object(server, "BODY_SECONDS", PATIENCE):
        bound = server._listening_socket("127.0.0.1", 0)
        running = uvicorn.Server(uvicorn.Config(server.application(Stub()), **connections.settings()))  # type: ignore[arg-type]
        log, loggers = Log(), [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
        for logger in loggers:
            logger.addHandler(log)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield bound.getsockname()[1], log, running
        finally:
            running.should_exit = True
            thread.join()
            for logger in loggers:
                logger.removeHandler(log)


def hostile(chance: random.Random) -> bytes:
    """One request, usually wrong in more than one way."""
    host = chance.choice(HOSTS[:3] if chance.random() < 0.6 else HOSTS)
    path = chance.choice(("/", "/api") if chance.random() < 0.6 else PATHS)
    method = chance.choice(("GET", "POST") if chance.random() < 0.7 else METHODS)
    lines = [f"{method} {path} HTTP/{chance.choice(('1.1', '1.1', '1.1', '1.0', '2.0', '9'))}", f"Host: {host}"]
    lines += chance.sample(HEADERS, chance.choice((0, 0, 0, 1, 2, 5)))
    body = chance.choice(BODIES)
    if method == "POST" and chance.random() < 0.7:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    elif chance.random() < 0.5:
        lines += ["Content-Type: application/json", "Transfer-Encoding: chunked"]
        body = _chunks(body, chance)
    whole = "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body
    return _spoil(whole, chance)


def _chunks(body: bytes, chance: random.Random) -> bytes:
    size = chance.choice((1, 7, 1000, 70_000))
    parts = [body[start : start + size] for start in range(0, min(len(body), 200 * size), size)]
    text = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return text + chance.choice(
        (b"0\r\n\r\n", b"0\r\n\r\n", b"", b"-1\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", b"0\r\nX: y\r\n")
    )


def _spoil(whole: bytes, chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.5:
        return whole
    position = chance.randrange(len(whole) + 1)
    if kind < 0.75:
        return whole[:position]  # half-sent
    if kind < 0.9:
        return whole[:position] + chance.randbytes(chance.randrange(1, 30)) + whole[position:]
    return whole * chance.choice((2, 3))  # one behind the other


class Try:
    """One connection, and what is expected of it: an end, by whatever answer but 500."""

    def __init__(self, port: int, number: int, data: bytes, chance: random.Random) -> None:
        self.number, self.data, self.got = number, data, b""
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=HANG)
        self.leaves = chance.random() < 0.2
        self.ended = False
        try:
            for start in range(0, len(data), 1 << 16):
                self.connection.sendall(data[start : start + (1 << 16)])
        except OSError:
            pass  # it has been refused already
        if self.leaves:
            self.connection.close()

    def outcome(self) -> str:
        """What happened; waits for the end."""
        if self.leaves:
            return "left"
        try:
            while part := self.connection.recv(1 << 16):
                self.got += part
        except TimeoutError:
            return "hang"
        except OSError:
            pass
        finally:
            self.connection.close()
        codes = STATUS.findall(self.got)
        return codes[0].decode() if codes and b"500" not in codes else "500" if codes else "closed"


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    with serving() as (port, log, running):
        attempts: list[Try] = []
        for number in range(tries):
            chance = random.Random(f"{seed} {number}")
            attempts.append(Try(port, number, hostile(chance), chance))
            report.tries += 1
            if len(attempts) >= OPEN_AT_ONCE or number == tries - 1:
                for attempt in attempts:
                    _judge(report, attempt, seed)
                attempts.clear()
                if log.lines:
                    report.failures.append(f"seed {seed} up to try {number}: logged {log.lines[0][-300:]!r}")
                    log.lines.clear()
        if not _serves(port):
            report.failures.append(f"seed {seed}: after {tries} tries the server does not answer")
        pause = threading.Event()
        for _ in range(int(HANG / 0.1)):
            if not running.server_state.connections:
                break
            pause.wait(0.1)
        else:
            report.failures.append(f"seed {seed}: {len(running.server_state.connections)} connections are left open")
    return report


def _judge(report: Report, attempt: Try, seed: int) -> None:
    outcome = attempt.outcome()
    report.count(outcome)
    if outcome in ("hang", "500"):
        report.failures.append(f"seed {seed} try {attempt.number}: {outcome} after {attempt.data[:120]!r}")


def _serves(port: int) -> bool:
    connection = socket.create_connection(("127.0.0.1", port), timeout=HANG)
    body = json.dumps({}).encode()
    connection.sendall(
        b"POST /api HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )
    got = b""
    while part := connection.recv(1 << 16):
        got += part
    connection.close()
    return got.startswith(b"HTTP/1.1 200") and b'{"done":true}' in got

"""The server: access, requests, limits, one pass at a time, and the page with a model behind it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

import headwise
from headwise.cli import main
from headwise.ui import capture, connections, payload, server
from headwise.ui.service import Service, parse_heads_off
from helpers import small_checkpoints
from helpers.served_pages import served

ANIMAL = "The animal didn't cross the street because it was too tired."
LM = "The animal was too"
TABLE = [[3.0, 5.0, 7.0], [11.0, 13.0, 17.0]]


@pytest.fixture(scope="module")
def service(minilm: tuple[Any, Any]) -> Service:
    lm = small_checkpoints.sharp(small_checkpoints.MODELS["gpt2"]()), small_checkpoints.byte_level()
    return Service({"minilm": minilm, "tiny": lm}, longest=500, tokens=40)


def apart(work: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of its own: the browser's driver runs a loop in the main thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def ask(
    app: Any, *requests: Any, host: str = "127.0.0.1:7447", path: str = "/api", **options: Any
) -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            if not requests:
                return [await client.get(path, **options)]
            return list(await asyncio.gather(*(client.post(path, json=request, **options) for request in requests)))

    return apart(all_of_them())


# --- who may ask ---


@pytest.mark.parametrize("host", ["127.0.0.1:7447", "localhost:1", "[::1]:7447", "127.0.0.1", "LOCALHOST:7447"])
def test_loopback_hosts_are_served(host: str, service: Service) -> None:
    [page] = ask(server.application(service), host=host, path="/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7447", "127.0.0.1.evil.example", "192.168.0.9", "localhost.evil"]
)
def test_other_host_names_are_refused(host: str, service: Service) -> None:
    app = server.application(service)
    for response in (*ask(app, host=host, path="/"), *ask(app, {"ask": "run", "text": "x"}, host=host)):
        assert (response.status_code, response.text) == (403, "this address is served to this machine alone")


@pytest.mark.parametrize(
    "host",
    [
        "[::1]evil.com", "[::1].evil.com:80", "127.0.0.1:80@evil.com", "[::1]:80@evil.com", "127.0.0.1@evil.com",
        "[::1", "::1]", "[::1]]", "[[::1]]", "[::1%evil.com]", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:123456",
        "localhost.", "127.0.0.1 ", " 127.0.0.1", "127.0.0.1/evil", "127.0.0.1#evil", "127.0.0.1?evil",
        "127.0.0.1,evil.com", "",
        "127.1", "0x7f.0.0.1", "2130706433", "127.0.0.1.", "localhost:80:80", "[::ffff:127.0.0.1]evil",
        "evil.com:127.0.0.1", "١٢٧.0.0.1", "127.0.0.1\n",
    ],
)  # fmt: skip
def test_host_headers_that_resemble_loopback_are_refused(host: str) -> None:
    assert not server.is_loopback_header(host)


@pytest.mark.parametrize(
    ("site", "mode", "dest", "path", "status"),
    [
        ("same-origin", "cors", "empty", "/api", 200),
        ("none", "navigate", "document", "/", 200),
        ("cross-site", "navigate", "document", "/", 200),  # a link to the page
        ("cross-site", "navigate", "iframe", "/", 403),
        ("cross-site", "no-cors", "script", "/", 403),
        ("cross-site", "navigate", "document", "/api", 403),
        ("cross-site", "cors", "empty", "/api", 403),
        ("same-site", "cors", "empty", "/api", 403),  # another port of this machine
        ("same-site", "no-cors", "image", "/", 403),
        ("nonsense", "cors", "empty", "/api", 403),
    ],
)
def test_fetch_metadata_of_other_sites_is_refused(
    site: str, mode: str, dest: str, path: str, status: int, service: Service
) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    query = [{"ask": "steps", "text": "animal", "head": "0.0"}] if path == "/api" else []
    [answer] = ask(server.application(service), *query, path=path, headers=headers)
    assert answer.status_code == status


def test_requests_of_other_origins_are_refused(service: Service) -> None:
    app = server.application(service)
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        [answer] = ask(app, {"ask": "run", "text": "x"}, headers={"Origin": origin})
        assert answer.status_code == 403
    [answer] = ask(app, {"ask": "run", "text": "animal"}, headers={"Origin": "http://127.0.0.1:7447"})
    assert answer.status_code == 200


def test_token_is_required_when_it_is_set(service: Service) -> None:
    app = server.application(service, token="sëcret")
    assert [answer.status_code for answer in ask(app, host="192.168.0.9:7447", path="/")] == [403]
    assert [answer.status_code for answer in ask(app, host="192.168.0.9", path="/?token=wrong")] == [403]
    assert [answer.status_code for answer in ask(app, host="192.168.0.9", path="/?token=s%C3%ABcret")] == [200]
    assert [answer.status_code for answer in ask(app, {"ask": "run", "text": "x"})] == [403]


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_is_loopback_recognises_addresses(host: str, is_local: bool) -> None:
    assert server.is_loopback(host) is is_local


# --- requests ---


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"ask": "run", "text": ""}, 422, "the text is empty"),
        ({"ask": "run", "text": "x" * 501}, 422, "the text has 501 characters, 500 are allowed here"),
        ({"ask": "run", "text": "animal " * 45}, 422, "tokens, 40 are allowed here"),
        (
            {"ask": "run", "text": "x", "model": "/etc/passwd"},
            422,
            "no model of that name here; there are minilm, tiny",
        ),
        ({"ask": "run", "text": "x", "model": "../minilm"}, 422, "no model of that name"),
        ({"ask": "run", "text": "x", "off": "9.1"}, 422, "no self layer 9"),
        ({"ask": "run", "text": "x", "off": "x"}, 422, "a head is written layer.head"),
        ({"ask": "read", "text": "x"}, 422, "ask for run, steps or causes"),
        ({"ask": "steps", "text": "x", "head": "77.1"}, 422, "there is no layer 77"),
        ({"ask": ["run"], "text": "x"}, 422, "are texts"),
        (["run"], 422, "a request is an object"),
        ({"ask": "run", "text": "x", "pad": "y" * (1 << 20)}, 413, "1,048,576 bytes"),
    ],
)
def test_invalid_requests_are_refused_with_a_message(request_: Any, status: int, words: str, service: Service) -> None:
    [answer] = ask(server.application(service), request_)
    assert answer.status_code == status and words in answer.json()["error"]


def test_bodies_that_are_not_json_are_refused(service: Service) -> None:
    app = server.application(service)
    for content, kind, status in (
        (b"{", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"[" * 99999, "application/json", 400),
    ):

        async def post(content: bytes = content, kind: str = kind) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                return await client.post("/api", content=content, headers={"Content-Type": kind})

        assert apart(post()).status_code == status
    assert [answer.status_code for answer in ask(app, path="/etc/passwd")] == [404]
    assert [answer.status_code for answer in ask(app, path="/api")] == [405]


def test_run_answer_equals_the_payload(service: Service, run: Callable[..., capture.Pass]) -> None:
    [answer] = ask(server.application(service), {"ask": "run", "text": ANIMAL, "model": "minilm"})
    received, expected = answer.json(), json.loads(json.dumps(payload.run(run(), live=True)))
    assert received.pop("effect") == {"kind": "embedding", "distance": None, "tokens": []}
    assert received == expected
    [steps] = ask(server.application(service), {"ask": "steps", "text": ANIMAL, "model": "minilm", "head": "5.11"})
    assert steps.json()["steps"] == json.loads(json.dumps(payload.steps(run().layers[5], [11])))


def test_heads_off_move_the_embedding(service: Service, minilm: tuple[Any, Any]) -> None:
    [answer] = ask(server.application(service), {"ask": "run", "text": ANIMAL, "model": "minilm", "off": "3.1,5.11"})
    model, tokenizer = minilm
    inputs = tokenizer(ANIMAL, return_tensors="pt")
    with torch.no_grad():
        before = model(**inputs).last_hidden_state[0]
        with headwise.mask_heads(model, {3: [1], 5: [11]}):
            after = model(**inputs).last_hidden_state[0]
    apart = 1 - torch.cosine_similarity(before.mean(0), after.mean(0), 0)
    assert answer.json()["effect"]["distance"] == pytest.approx(float(apart), abs=1e-5) and float(apart) > 1e-4


def test_heads_off_change_the_next_token(service: Service) -> None:
    [answer] = ask(server.application(service), {"ask": "run", "text": LM, "model": "tiny", "off": "1.0"})
    model, tokenizer = service.load("tiny")
    ids = torch.tensor([tokenizer(LM)["input_ids"]])
    with torch.no_grad():
        before = model(ids).logits[0, -1].softmax(-1)
        with headwise.mask_heads(model, {1: [0]}):
            after = model(ids).logits[0, -1].softmax(-1)
    effect = answer.json()["effect"]
    best = int(torch.maximum(before, after).argmax())
    assert effect["what"] == "Next token"
    assert effect["tokens"][0]["before"] == pytest.approx(float(before[best]), abs=1e-4)
    assert effect["tokens"][0]["after"] == pytest.approx(float(after[best]), abs=1e-4)
    assert effect["divergence"] == pytest.approx(float((before * (before / after).log()).sum()), rel=1e-3)


def test_labels_of_heads_are_parsed() -> None:
    model = small_checkpoints.MODELS["gpt2"]()
    assert parse_heads_off(model, "1.2, 1.0,0.1,1.2") == {("self", 1): [0, 2], ("self", 0): [1]}
    assert parse_heads_off(model, "") == {}


def test_lone_surrogate_is_refused_with_a_message(service: Service) -> None:
    for name in ("text", "target", "head", "off", "model"):
        query = {"ask": "run", "text": "x", name: "a\ud800"}

        async def post(query: Any = query) -> httpx.Response:
            transport = httpx.ASGITransport(server.application(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(
                    "/api", content=json.dumps(query), headers={"Content-Type": "application/json"}
                )

        answer = apart(post())
        assert (answer.status_code, "half of a character" in answer.json()["error"]) == (422, True)


# --- bounded in time and number ---


class Stub:
    """A service without a model."""

    live: dict[str, Any] = {"models": ["stub"], "text": "x", "target": None, "longest": 9}  # noqa: RUF012

    def answer(self, request: Any, stop: Any = None) -> dict[str, Any]:
        return {"done": True}


class Log(logging.Handler):
    """What a server logs, which uvicorn keeps from the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def take_lines(self) -> list[str]:
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).removeHandler(self)
        return self.lines


JSON_POST = b"POST /api HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], socket.socket]]:
    """Opens a connection to a server that is not patient, and sends it something; nothing may be logged meanwhile."""
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 7)
    monkeypatch.setattr(server, "BODY_SECONDS", 0.2)
    opened = []
    with served(Stub()) as url:  # type: ignore[arg-type]
        log = Log()  # after uvicorn has set up its own

        def connect(start: bytes) -> socket.socket:
            opened.append(socket.create_connection(("127.0.0.1", int(url.split(":")[2].strip("/"))), timeout=20))
            opened[-1].sendall(start)
            return opened[-1]

        yield connect
        for connection in opened:
            connection.close()
    assert log.take_lines() == []


def rest(connection: socket.socket) -> bytes:
    """All that still comes until the server closes; a server that never does ends the test by a timeout."""
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(
    ("start", "answer"),
    [
        (b"", b""),
        (b"GET / HT", b""),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b""),
        (
            b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n",
            b"HTTP/1.1 404",
        ),  # one request, and half of another
        (JSON_POST + b"Content-Length: 50\r\n\r\n{", b"HTTP/1.1 408"),
        (JSON_POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n", b"HTTP/1.1 408"),
        (JSON_POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", b"HTTP/1.1 400"),
    ],
    ids=["nothing", "line", "headers", "second request", "body", "chunks", "bad chunk"],
)
def test_incomplete_requests_are_closed(start: bytes, answer: bytes, client: Callable[[bytes], socket.socket]) -> None:
    assert rest(client(start)).startswith(answer)


def test_client_that_disconnects_mid_body_leaves_no_trace(client: Callable[[bytes], socket.socket]) -> None:
    for _ in range(3):
        client(JSON_POST + b"Content-Length: 50\r\n\r\n{").close()
    assert b'{"done":true}' in rest(client(JSON_POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"))


def test_longest_waiting_connection_makes_room(client: Callable[[bytes], socket.socket]) -> None:
    waiting = [client(b"GET / HTTP/1.1\r\n") for _ in range(20)]
    assert b"HTTP/1.1 404" in rest(client(b"GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    assert [rest(connection) for connection in waiting] == [b""] * 20


def test_body_is_read_up_to_its_limit_only(client: Callable[[bytes], socket.socket]) -> None:
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1 << 16
        return {"type": "http.request", "body": b" " * (1 << 16), "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/api", "query_string": b"", "headers": headers}
    apart(server.application(Stub())(scope, receive, send))  # type: ignore[arg-type]
    assert received == server.MOST_BYTES + (1 << 16)
    assert sent[0]["status"] == 413 and (b"connection", b"close") in sent[0]["headers"]
    announced = client(JSON_POST + b"Content-Length: 99999999\r\n\r\n")
    assert rest(announced).startswith(b"HTTP/1.1 413")
    refused = client(b"POST /api HTTP/1.1\r\nHost: evil.com\r\nContent-Length: 99999999\r\n\r\n")
    assert rest(refused).startswith(b"HTTP/1.1 403")


def test_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.1)
    stub, much = Stub(), 1 << 25
    monkeypatch.setattr(stub, "answer", lambda request, stop=None: {"much": "x" * much}, raising=False)
    running = served(stub)  # type: ignore[arg-type]
    with running as url:
        lazy = socket.create_connection(("127.0.0.1", int(url.split(":")[2].strip("/"))), timeout=20)
        lazy.sendall(JSON_POST + b"Content-Length: 2\r\n\r\n{}")
        assert lazy.recv(1) == b"H"
        while running.server.server_state.connections:
            threading.Event().wait(0.02)
        assert len(rest(lazy)) < much


# --- one at a time ---


def test_passes_run_one_at_a_time_and_a_full_queue_refuses(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_WAITING", 3)
    running: list[int] = []
    most: list[int] = []

    def slow(request: Any, stop: Any) -> dict[str, Any]:
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.02)
        running.pop()
        return {"done": request["text"]}

    monkeypatch.setattr(service, "answer", slow)
    answers = ask(server.application(service), *({"ask": "run", "text": str(n)} for n in range(5)))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 503, 503]
    assert max(most) == 1 and "3 requests wait already" in answers[-1].json()["error"]


def test_a_text_longer_than_the_model_takes_is_refused_without_naming_a_python_argument(
    minilm: tuple[Any, Any],
) -> None:
    service = Service({"minilm": minilm}, longest=10_000)
    with pytest.raises(headwise.HeadwiseError, match=r"tokens, minilm takes 512 .*; shorten it$"):
        service.answer({"ask": "run", "text": "animal " * 600})


def test_the_announced_way_to_end_the_server_is_no_failure(
    minilm: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(service: Service, *, announce: Callable[[str], None], **options: Any) -> None:
        announce("http://127.0.0.1:7/")
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "serve", interrupted)
    monkeypatch.setattr(Service, "answer", lambda *args: {})
    assert main(["serve"]) == 0
    assert capsys.readouterr() == ("open http://127.0.0.1:7/ (Ctrl-C ends it)\n", "stopped\n")


def test_pass_that_takes_too_long_is_stopped(minilm: tuple[Any, Any]) -> None:
    service = Service({"minilm": minilm}, seconds=0.0)
    with pytest.raises(headwise.HeadwiseError, match="more than 0 seconds and was stopped"):
        service.answer({"ask": "run", "text": "animal"})


def test_disconnected_client_stops_its_pass(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(request: Any, stop: Callable[[], bool]) -> dict[str, Any]:
        begun.set()
        while not stop():
            threading.Event().wait(0.005)
        ended.set()
        raise capture.StoppedError

    monkeypatch.setattr(service, "answer", endless)
    with served(service) as url:
        client = socket.create_connection(("127.0.0.1", int(url.split(":")[2].strip("/"))))
        body = b'{"ask": "run"}'
        client.sendall(
            b"POST /api HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert begun.wait(10)
        client.close()
        assert ended.wait(10)


def test_only_the_newest_passes_are_cached(minilm: tuple[Any, Any]) -> None:
    service = Service({"minilm": minilm})
    for n in range(10):
        service.answer({"ask": "steps", "text": f"animal {n}", "head": "0.0"})
    assert [key[1] for key in service._passes] == [f"animal {n}" for n in range(2, 10)]


# --- the view with a model behind it ---


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with served(service) as address:
        yield address


def test_page_runs_a_sentence_and_switches_heads_off(tab: Any, url: str, service: Service) -> None:
    shown = tab().open(url)
    assert shown.locator(".hw-brand").inner_text().startswith("headwise\nminilm")
    shown.locator("textarea").fill("She sat by the river bank.")
    shown.keyboard.press("Enter")
    shown.locator(".hw-brand", has_text="9 tokens").wait_for()
    shown.locator(".hw-map .cell[data-head='2.3']").click()
    shown.get_by_role("button", name="switch off").click()
    shown.wait_for_selector("[data-effect]")
    query = {"ask": "run", "text": "She sat by the river bank.", "model": "minilm", "off": "2.3"}
    distance = service.answer(query)["effect"]["distance"]
    assert float(shown.locator("[data-effect]").get_attribute("data-effect").replace("−", "-")) == pytest.approx(
        distance, rel=0.06, abs=6e-5
    )
    assert "off=2.3" in shown.url
    shown.get_by_role("button", name="compare with all heads on").click()
    shown.wait_for_selector(".hw-compare .hw-grid")
    assert "minilm without 2.3" in shown.locator(".hw-compare").inner_text()
    for _ in range(2):
        shown.keyboard.press("Control+z")
    shown.locator("[data-effect]").wait_for(state="detached")


def test_the_headline_and_the_outlined_head_agree_after_a_new_text(tab: Any, url: str) -> None:
    shown = tab().open(url)
    headline, outlined = shown.locator(".hw-lead.first"), shown.locator(".hw-map .cell.chosen")

    def agreed() -> str:
        head = outlined.get_attribute("data-head")
        assert outlined.count() == 1 and f" in head {head}." in headline.inner_text()
        return str(head)

    first = agreed()
    shown.locator("textarea").fill("She sat by the river bank.")
    shown.keyboard.press("Enter")
    shown.locator(".hw-brand", has_text="9 tokens").wait_for()
    assert agreed() != first
    shown.get_by_label("model", exact=True).select_option("tiny")
    shown.locator(".hw-brand", has_text="tiny").wait_for()
    agreed()


def test_a_chosen_head_is_kept_for_a_new_text(tab: Any, url: str) -> None:
    shown = tab().open(url)
    shown.locator(".hw-map .cell[data-head='4.5']").click()
    shown.locator("textarea").fill("She sat by the river bank.")
    shown.keyboard.press("Enter")
    shown.locator(".hw-brand", has_text="9 tokens").wait_for()
    assert shown.locator(".hw-chosen b").inner_text() == "head 4.5"


def test_page_runs_the_decoder_on_a_target(tab: Any, bart: tuple[Any, Any]) -> None:
    service = Service(
        {"bart": bart}, text="The animal was tired.", target="It was too", scores={"x": {"encoder": TABLE}}
    )
    with served(service) as url:
        shown = tab().open(url)
        kinds = shown.locator(".hw-map .hw-kind h3")
        assert kinds.all_inner_texts() == ["encoder attention", "decoder attention", "cross attention"]
        assert "Next token" in shown.locator(".hw-effect").inner_text()
        shown.locator(".hw-map .cell[data-head='cross 0.4']").click()
        shown.get_by_role("button", name="switch off").click()
        shown.locator(".hw-effect", has_text="changed by").wait_for()
        assert "off=cross+0.4" in shown.url
        field = shown.get_by_label("what the decoder is given").last
        field.fill("")
        field.press("Enter")
        shown.locator(".hw-brand", has_text="2 layers, 6 heads").wait_for()
        assert "off=" not in shown.url
        shown.get_by_role("tab", name="Map").click()
        shown.get_by_label("statistic", exact=True).select_option("x")
        assert shown.locator(".hw-map .cell").first.inner_text() == "3.00"  # the encoder's, alone as beside a decoder


def test_shared_address_opens_the_same_state(tab: Any, url: str) -> None:
    shown = tab().open(url, "view=steps&model=tiny&text=The+animal+was+too&off=1.0&heads=1.2&token=2")
    shown.wait_for_selector(".hw-weight")
    assert shown.locator(".hw-chosen b").inner_text() == "head 1.2"
    assert "Next token: changed by" in shown.locator(".hw-effect").inner_text()
    shown.locator(".hw-nav .cell[data-head='0.1']").click()  # its steps are requested now
    shown.wait_for_selector(".hw-weight")
    assert shown.locator(".hw-chosen b").inner_text() == "head 0.1"


def test_page_shows_the_causes_of_a_prediction(tab: Any, url: str, service: Service) -> None:
    browser_tab = tab()
    shown = browser_tab.open(url, "model=tiny&text=The+animal+was+too")
    shown.get_by_role("tab", name="Causes").click()
    shown.wait_for_selector(".hw-causes .cell")
    query = {"ask": "causes", "model": "tiny", "text": LM}
    causes = service.answer(query)["causes"]

    def numbers() -> list[float]:
        return [float(text.replace("−", "-")) for text in shown.locator(".hw-causes .cell").all_inner_texts()]

    assert numbers() == pytest.approx([x for row in causes["effects"] for x in row], abs=0.0051)
    assert shown.get_by_label("answer, with its space").input_value() == causes["answer"]["text"]
    shown.get_by_label("answer, with its space").fill("a")
    shown.keyboard.press("Enter")
    shown.locator(".hw-causes .hw-word", has_text="a").first.wait_for()
    assert "answer=a" in shown.url
    chosen = service.answer({**query, "answer": "a"})["causes"]
    assert numbers() == pytest.approx([x for row in chosen["effects"] for x in row], abs=0.0051)
    shown.locator(".hw-causes .cell[data-head='1.2']").click()
    assert shown.locator(".hw-chosen b").inner_text() == "head 1.2"
    shown.get_by_role("tab", name="Causes").click()
    shown.get_by_label("answer, with its space").fill("xyz")
    shown.keyboard.press("Enter")
    shown.locator(".hw-refusal", has_text="the answer 'xyz' is 3 tokens").wait_for()
    shown.get_by_role("button", name="back to the model's own predictions").click()
    shown.wait_for_selector(".hw-causes .cell")
    browser_tab.errors.clear()  # the browser logs every answer that is not 200
    shown.get_by_label("model", exact=True).select_option("minilm")
    shown.locator(".hw-refusal", has_text="minilm predicts no next token").wait_for()


def test_shared_address_opens_the_causes_of_a_token(tab: Any, url: str) -> None:
    shown = tab().open(url, "view=causes&model=tiny&text=The+animal+was+too&answer=a&other=b")
    shown.wait_for_selector(".hw-causes .cell")
    assert shown.locator(".hw-causes .hw-word").all_inner_texts() == ["a", "b"]


def test_errors_are_shown_and_the_view_stays(tab: Any, url: str) -> None:
    browser_tab = tab()
    shown = browser_tab.open(url)
    shown.locator("textarea").fill(" ")
    shown.keyboard.press("Enter")
    assert shown.get_by_role("alert").inner_text() == "the text is empty; give a sentence"
    assert shown.locator(".hw-map .cell").count() == 72
    browser_tab.errors.clear()  # the browser logs every answer that is not 200


def test_page_sends_the_token_of_its_address(tab: Any, service: Service) -> None:
    with served(service, token="abc") as url:
        shown = tab().open(url + "?token=abc")
        assert shown.locator(".hw-map .cell").count() == 72


@pytest.mark.parametrize("host", ["\x1b[31m", "é" * 90, "a b", "x" * 5000, "\ud800", "a..b"])
def test_a_host_that_is_no_name_is_a_one_line_error(host: str) -> None:
    with pytest.raises(headwise.HeadwiseError, match="port 0 cannot be served: .*choose another host= or port="):
        server._listening_socket(host, 0)


def test_address_in_use_is_a_one_line_error() -> None:
    socket_in_use = server._listening_socket("127.0.0.1", 0)
    port = socket_in_use.getsockname()[1]
    socket_in_use.listen()
    with pytest.raises(headwise.HeadwiseError, match=f"127.0.0.1 port {port} cannot be served: Address already in use"):
        server._listening_socket("127.0.0.1", port)
    socket_in_use.close()

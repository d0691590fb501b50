"""The view's server on a free port, for a real browser."""

from __future__ import annotations

import threading
from typing import Any

from headwise.ui import connections, server
from headwise.ui.service import Service


class served:
    """A real server on a free port."""

    def __init__(self, service: Service, token: str | None = None) -> None:
        import uvicorn

        self.socket = server._listening_socket("127.0.0.1", 0)
        config = uvicorn.Config(server.application(service, token=token), **connections.settings())
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}/"

    def __exit__(self, *error: Any) -> None:
        self.server.should_exit = True
        self.thread.join()

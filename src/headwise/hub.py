"""The Hugging Face hub: whether it can be reached, and its library without log lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def unreachable() -> bool:
    """Whether the hub's name does not resolve: then nothing is downloaded, since every attempt takes many seconds."""
    import socket
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants  # not an attribute of the package before it is imported

    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and retry lines of huggingface_hub; the error message has what matters."""
    import logging

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)

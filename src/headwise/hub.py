"""The Hugging Face hub: whether it can be reached, and its library kept quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def unreachable() -> bool:
    """Whether the hub's name cannot even be resolved: then nothing is tried, since each try takes many seconds."""
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
    """No warnings and retry lines of huggingface_hub: what matters of them is in our own message."""
    import logging

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)

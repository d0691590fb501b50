"""The Hugging Face hub: whether it can be reached, and its library without log lines."""

from __future__ import annotations

from contextlib import AbstractContextManager

from .logs import quiet_logger


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


def quiet() -> AbstractContextManager[None]:
    """Silence the warnings and retry lines of huggingface_hub; the error message has what matters."""
    return quiet_logger("huggingface_hub")

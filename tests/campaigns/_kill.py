"""Commands that are killed at a moment of our choice, for campaigns that look at what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence


def run(command: Sequence[str], timeout: float = 600.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that is left alone, with what it printed."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **environment}
    )


def run_and_kill(command: Sequence[str], after: float, **environment: str) -> bool:
    """Start a command, kill it and its children after so many seconds; False if it had ended by itself before."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False

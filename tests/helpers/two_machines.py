"""Two network namespaces as two machines, with a link between them that can be slow, lossy or cut.

Each namespace has a TUN device, and this process passes packets from one to the other, since not every kernel can
delay and drop them (netem). Needs root and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from helpers.torchrun import rank_environment

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 8192
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29_511


@dataclass
class Link:
    """What happens to packets between the machines; it may be changed while they are sent."""

    delay: float = 0.0  # seconds, one way
    loss: float = 0.0  # share of packets that are dropped
    rate: float = 0.0  # bytes per second in each direction; 0 for no limit
    cut: bool = False
    packets: int = 0  # passed on so far
    dropped: int = 0


@dataclass
class Network:
    """Two machines, by number 0 and 1."""

    names: tuple[str, str]
    link: Link = field(default_factory=Link)

    def start(self, machine: int, command: list[str], **variables: str) -> subprocess.Popen[str]:
        """Start a command on a machine, with its output in pipes."""
        environment = {**rank_environment(), "GLOO_SOCKET_IFNAME": f"{self.names[machine]}", **variables}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[machine], *command],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def torchrun(self, command: list[str], *options: str, backend: str = "c10d", **variables: str) -> list[Any]:
        """Start torchrun on both machines, one rank on each."""
        return [
            self.start(machine, agent_command(machine, ADDRESSES, PORT, backend, *options, *command), **variables)
            for machine in range(2)
        ]


def agent_command(machine: int, addresses: tuple[str, str], port: int, backend: str, *arguments: str) -> list[str]:
    """torchrun's command line on one of two machines, with one rank."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    if backend == "static":
        line += [f"--node-rank={machine}", f"--master-addr={addresses[0]}", f"--master-port={port}"]
    else:  # the machines have no names that the other one could look up
        line += ["--rdzv-backend=c10d", "--rdzv-id=rehearsal", f"--rdzv-endpoint={addresses[0]}:{port}"]
        line += [f"--rdzv-conf=is_host={int(machine == 0)}", f"--local-addr={addresses[machine]}"]
    return [*line, *arguments]


def missing_permission() -> str:
    """Why namespaces cannot be made here; "" where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_machines():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        return f"network namespaces cannot be made here: {str(reason).strip()}"


@contextmanager
def two_machines() -> Iterator[Network]:
    """Two machines with a link between them, for as long as the block lasts."""
    names = (f"hw{os.getpid()}a", f"hw{os.getpid()}b")
    network, devices, done = Network(names), list[int](), threading.Event()
    try:
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("netns", "add", name)
            devices.append(_open_tun(name))
            _ip("link", "set", name, "netns", name)
            for line in (["addr", "add", f"{address}/24", "dev", name], ["link", "set", name, "mtu", str(MTU), "up"]):
                _ip("-n", name, *line)
            _ip("-n", name, "link", "set", "lo", "up")
        relay = threading.Thread(target=_relay, args=(devices, network.link, done), daemon=True)
        relay.start()
        yield network
        done.set()
        relay.join()
    finally:
        done.set()
        for device in devices:
            os.close(device)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def _open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _relay(devices: list[int], link: Link, done: threading.Event) -> None:
    """Pass packets on, each after the link's delay and in the time that its rate gives."""
    rng, queue, number = random.Random(0), list[tuple[float, int, int, bytes]](), 0
    free_at = [0.0, 0.0]  # when each direction has sent its last packet
    while not done.is_set():
        wait = min(0.05, max(0.0, queue[0][0] - time.monotonic())) if queue else 0.05
        for device in select.select(devices, [], [], wait)[0]:
            packet, now = os.read(device, 65_536), time.monotonic()
            target = 1 - devices.index(device)
            if link.cut or rng.random() < link.loss:
                link.dropped += 1
                continue
            free_at[target] = max(now, free_at[target]) + (len(packet) / link.rate if link.rate else 0.0)
            heapq.heappush(queue, (free_at[target] + link.delay, number, target, packet))
            number += 1
        while queue and queue[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(queue)
            if not link.cut:
                os.write(devices[target], packet)
                link.packets += 1

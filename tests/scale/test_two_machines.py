"""Two torchrun agents: on one machine over loopback, and (`make two-machines`) on two, over a slow, lossy or cut link.

The machines are network namespaces, which need root (tests/helpers/two_machines.py).
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise import Atlas, Plan, tokenizer
from helpers.rank_inputs import small_bert, small_texts
from helpers.torchrun import PROGRAMS, rank_environment
from helpers.two_machines import Network, agent_command, missing_permission, two_machines

ROUNDS, LIMIT = 4, 900  # seconds: a hang is a failure, a busy machine is none
LOOPBACK = ("127.0.0.1", "127.0.0.1")


def free_port() -> int:
    with socket.create_server((LOOPBACK[0], 0)) as server:
        port: int = server.getsockname()[1]
        return port


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def wait_until(condition: Callable[[], bool], agents: list[Any]) -> None:
    """Wait for a condition while both agents run."""
    end = time.monotonic() + LIMIT
    while not condition():
        for agent in agents:
            assert agent.poll() is None, agent.communicate()[1][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def end(agents: list[Any]) -> list[int]:
    """The exit codes of agents, which are given time to end by themselves."""
    codes = []
    for agent in agents:
        try:
            agent.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.communicate()
        codes.append(agent.returncode)
    return codes


def rounds(folder: Path, count: int, timeout: float) -> list[str]:
    return ["-m", f"{PROGRAMS}.rounds", str(folder), str(count), str(timeout)]


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_agents_on_one_machine_compute_what_one_process_computes(backend: str, tmp_path: Path) -> None:
    port = free_port()
    agents = [
        subprocess.Popen(
            agent_command(machine, LOOPBACK, port, backend, *rounds(tmp_path, ROUNDS, 120)),
            env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for machine in range(2)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=LIMIT) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], [text[-2000:] for _, text in outputs]
    assert [report["rounds"] for report in reports(tmp_path)] == [ROUNDS, ROUNDS]


def test_a_rank_that_cannot_meet_the_others_says_where_it_looked(tmp_path: Path) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK[0], "MASTER_PORT": str(free_port())}
    command = agent_command(0, LOOPBACK, 0, "static")[:1] + rounds(tmp_path, 1, 1)
    subprocess.run(command, env={**rank_environment(), **variables}, capture_output=True, timeout=LIMIT, check=False)
    error = json.loads((tmp_path / "rank-1.json").read_text())["error"]
    assert error.startswith(
        f"rank 1 of 2 did not meet the others at {LOOPBACK[0]}:{variables['MASTER_PORT']} within 1 s"
    )
    assert "GLOO_SOCKET_IFNAME" in error


@pytest.fixture(scope="module")
def permission() -> None:
    reason = missing_permission()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def network(permission: None) -> Iterator[Network]:
    with two_machines() as machines:
        yield machines


@pytest.mark.full
@pytest.mark.parametrize("backend", ["c10d", "static"])
@pytest.mark.parametrize("link", ["slow", "lossy"])
def test_a_bad_link_changes_no_result(link: str, backend: str, network: Network, tmp_path: Path) -> None:
    if link == "slow":
        network.link.delay, network.link.rate = 0.02, 2e6
    else:
        network.link.loss = 0.03
    assert end(network.torchrun(rounds(tmp_path, ROUNDS, 300), backend=backend)) == [0, 0]
    assert [report["rounds"] for report in reports(tmp_path)] == [ROUNDS, ROUNDS]
    assert (network.link.dropped > 0) == (link == "lossy")


@pytest.mark.full
def test_a_cut_link_gives_every_rank_an_error_within_its_timeout(network: Network, tmp_path: Path) -> None:
    timeout = 20.0
    agents = network.torchrun(rounds(tmp_path, 100_000, timeout))
    try:
        wait_until(lambda: all((tmp_path / f"rank-{n}.json").exists() for n in range(2)), agents)
        network.link.cut = True
        cut = time.monotonic()
        wait_until(lambda: all(report["error"] for report in reports_so_far(tmp_path)), [])
        # the timeout, the questions to the store that follow it, and the time that a busy machine takes to answer
        assert time.monotonic() - cut < 3 * timeout
        errors = [report["error"] for report in reports(tmp_path)]
        first_clauses = {error.split(":")[0] for error in errors}
        assert first_clauses == {"machines 0 (10.77.0.1) and 1 of 2 do not reach each other"}
        assert all("; not all ranks came to " in error for error in errors)
    finally:
        for agent in agents:  # torchrun's own agent on the machine without the store waits for it
            agent.kill()
            agent.communicate()


def reports_so_far(folder: Path) -> list[dict[str, Any]]:
    try:
        return reports(folder)
    except ValueError:  # half-written
        return [{"error": ""}]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-machines")
    small_bert().save_pretrained(folder / "model")
    tokenizer("minilm").save_pretrained(folder / "model")
    (folder / "texts.txt").write_text("\n".join(small_texts()) + "\n")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("command", ["atlas", "prune"])
def test_a_command_resumes_after_a_cut(command: str, network: Network, inputs: Path, tmp_path: Path) -> None:
    options = ["--batch", "1"] if command == "prune" else []
    line = [command, "--texts", str(inputs / "texts.txt"), "--model", str(inputs / "model"), "--json", *options]

    def start(run: str, out: str) -> list[Any]:
        program = ["-m", f"{PROGRAMS}.interrupted_corpus", str(tmp_path), *line, "--out", str(tmp_path / out)]
        return network.torchrun(program, RUN=run)

    agents = start("first", "resumed")
    try:
        wait_until((tmp_path / "paused").exists, agents)
        network.link.cut = True
        (tmp_path / "cut").touch()
        assert agents[0].wait(timeout=LIMIT) != 0  # rank 0 does not wait for hours
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    network.link.cut = False
    assert end(start("second", "resumed")) == [0, 0]
    assert end(start("whole", "whole")) == [0, 0]
    if command == "atlas":
        got, want = (Atlas.load(tmp_path / out / "atlas.json") for out in ("resumed", "whole"))
        for name, kinds in want.scores.items():
            np.testing.assert_allclose(got.scores[name]["self"], kinds["self"], rtol=1e-6, err_msg=name)
    else:
        got_plan, want_plan = (Plan.load(tmp_path / out / "plan.json") for out in ("resumed", "whole"))
        assert got_plan.heads == want_plan.heads
    batches = {run: int((tmp_path / f"{run}-0").read_text()) for run in ("second", "whole")}
    assert batches["second"] < batches["whole"]  # rank 0 had measured its part before the cut

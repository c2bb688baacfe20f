"""Queue, workspace, agents and proxies of one end-to-end test, with a check for leftover processes."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.control_plane import TRAINERS, ControlPlane
from tests.kits.stack.stack import LIGHT_START, MARK, ROOT, AgentProcess, clean_environment, marked
from tests.kits.waiting import until


class Gate:
    """Gate that stops a trainer after a step until the test has caught up.

    `environment` is for a job whose trainer looks at it, `of_sessions` for any that reports to a session.
    """

    def __init__(self, file: Path, step: int) -> None:
        self._file = file
        self.environment = {"GATE": str(file)}
        held = (TRAINERS / "gated_sessions", LIGHT_START, TRAINERS, ROOT)
        self.of_sessions = {**self.environment, "PYTHONPATH": os.pathsep.join(map(str, held))}
        self.set(step)

    def set(self, step: int) -> None:
        """Move the gate behind this step."""
        self.step = step
        new = self._file.with_suffix(".new")
        new.write_text(str(step), encoding="utf-8")
        new.replace(self._file)

    def open(self) -> None:
        """Open the gate for all steps."""
        self._file.unlink(missing_ok=True)


class Workshop:
    """Queue, workspace and agents of one test."""

    def __init__(self, stack: ControlPlane, tmp_path: Path) -> None:
        self.stack = stack
        self.queue = f"q-{uuid.uuid4().hex[:12]}"
        self.mark = uuid.uuid4().hex
        self.tmp_path = tmp_path
        self.agents: list[AgentProcess] = []
        self._proxies: list[FaultyProxy] = []

    def submit(self, script: str, parameters: dict[str, Any] | None = None, **more: Any) -> str:
        """Submit a job to this test's queue."""
        return self.stack.submit(script, parameters, queue=self.queue, **more)

    def agent(
        self,
        name: str = "w1",
        *,
        url: str | None = None,
        wrapper: Path | None = None,
        fork: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
        **settings: object,
    ) -> AgentProcess:
        """Start an agent; the same name again restarts the same container.

        fork: from a process that has imported the agent, whose arguments `ps` then shows.
        """
        variables = {
            **clean_environment(),
            **environment,
            MARK: self.mark,
            "BATON_API_URL": url or self.stack.url,
            "BATON_API_KEY": self.stack.keys["worker"],
            "BATON_QUEUE": self.queue,
            "BATON_WORKSPACE": str(self.tmp_path / "workspace"),
            "BATON_WORKER_ID": name,
            "BATON_MACHINE_ID": f"machine-of-{name}",
            "BATON_GPUS": "0",
            "BATON_VRAM_GIB": "0",
            "BATON_POLL_MIN_S": "0.1",
            "BATON_POLL_MAX_S": "0.4",
            "BATON_STABLE_S": "1",
            "BATON_LOG_LEVEL": "DEBUG",
            **{f"BATON_{key.upper()}": str(value) for key, value in settings.items()},
        }
        agent = AgentProcess(
            variables, self.tmp_path / f"{name}-{len(self.agents)}.log", wrapper=wrapper, fork=fork and wrapper is None
        )
        self.agents.append(agent)
        return agent

    def lose(self, agent: AgentProcess, job_id: str) -> None:
        """Kill the agent with its training, and expire the lease, so that another agent gets the job at once."""
        agent.kill_group()
        self.stack.expire_lease(job_id)

    def gate(self, step: int) -> Gate:
        """Make a gate behind this step (tests/e2e/trainers/gate.py)."""
        return Gate(self.tmp_path / f"gate-{uuid.uuid4().hex[:8]}", step)

    def front(self) -> FaultyProxy:
        """Make a proxy before the control plane, for agents that see failures."""
        proxy = FaultyProxy(self.stack.front)
        self._proxies.append(proxy)
        return proxy

    def trainers(self) -> list[psutil.Process]:
        """List the processes besides the agents."""
        own = {agent.pid for agent in self.agents}
        return [process for process in marked(self.mark) if process.pid not in own]

    def training(self, script: str = "chain.py") -> list[psutil.Process]:
        """List the training scripts among these, without their supervisors."""
        found = []
        for process in self.trainers():
            try:
                if any(part.endswith(script) for part in process.cmdline()[:2]):
                    found.append(process)
            except psutil.NoSuchProcess:  # it ended just now
                continue
        return found

    def close(self) -> None:
        """Stop all agents; raises if a process is left."""
        for agent in self.agents:
            if agent.process.poll() is None:
                os.kill(agent.pid, signal.SIGCONT)
                agent.kill_group()
        for proxy in self._proxies:
            proxy.close()
        try:
            until(lambda: not marked(self.mark), 20, what="the end of all processes")
        finally:
            for process in marked(self.mark):
                process.kill()

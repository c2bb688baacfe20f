"""Make the world calls through the agent, which has the attempt's lease (`gpu_client/agent/control/world_relay.py`)."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError

from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.relay import RelayAnswer, RelayRequest
from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport, WorldView
from gpu_client.elastic.errors import (
    DataMismatchError,
    ElasticSetupError,
    NoMajorityError,
    NotAMemberError,
    WorldChangedError,
    WorldMismatchError,
    WorldUnavailableError,
)

AnswerBody = TypeVar("AnswerBody", bound=BaseModel)

VARIABLE = "BATON_WORLD"
CALL_TIMEOUT_S = 15.0
"""Longest wait for the agent's answer in seconds, which exceeds the agent's own limit for a call."""
MAX_ANSWER_BYTES = 1024 * 1024
_REFUSALS = {
    "world_changed": WorldChangedError,
    "no_majority": NoMajorityError,
    "not_a_member": NotAMemberError,
    "world_mismatch": WorldMismatchError,
    "data_mismatch": DataMismatchError,
}


@dataclass(frozen=True)
class NodeSeat:
    """Seat, port and addresses of this process, from the environment variable BATON_WORLD."""

    job: str
    seat: int
    attempt: int
    min: int
    max: int
    socket: str
    """Path of the agent's Unix socket for world calls."""
    port: int
    """Port to listen on; 0 for any free port."""
    addresses: tuple[str, ...]
    """Addresses under which peers reach this process; port 0 stands for the port that the process listens on."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """Read BATON_WORLD; None outside of an elastic job. Raises ElasticSetupError."""
        text = variables.get(VARIABLE)
        if not text:
            return None
        try:
            found = json.loads(text)
            known = {one.name: found[one.name] for one in fields(cls)}
            return cls(**{**known, "addresses": tuple(found["addresses"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ElasticSetupError(f"{VARIABLE} cannot be read ({error})", "The agent writes the variable") from error

    def new_node(self) -> str:
        """Return a node id for this process."""
        return f"{self.seat}.{self.attempt}.{secrets.token_hex(4)}"

    def addresses_at(self, port: int) -> list[str]:
        """Return the advertised addresses of a process that listens on `port`."""
        return [f"{one.removesuffix(':0')}:{port}" if one.endswith(":0") else one for one in self.addresses]


class AgentWorldCalls:
    """World calls over the agent's Unix socket, one connection for each call."""

    def __init__(self, path: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def join(self, request: JoinRequest) -> WorldView:
        """Ask to become a member, or update the request. Raises WorldMismatchError for a program that differs."""
        return self._call(WorldView, "join", request)

    def view(self) -> WorldView:
        """Return the present world."""
        return self._call(WorldView, "view")

    def propose(self, proposal: EpochProposal) -> WorldView:
        """Replace the membership. Raises WorldChangedError, NoMajorityError, NotAMemberError."""
        return self._call(WorldView, "propose", proposal)

    def report(self, report: WorldReport) -> WorldView:
        """Report committed rounds and nodes. Raises NotAMemberError, WorldChangedError."""
        return self._call(WorldView, "report", report)

    def relay(self, request: RelayRequest) -> RelayAnswer:
        """Return presigned URLs for the exchange with a peer, or the calls of peers. Raises NotAMemberError."""
        return self._call(RelayAnswer, "relay", request)

    def lease(self, request: DataRequest) -> DataGrant:
        """Return the shards that the node holds, with new ones. Raises DataMismatchError."""
        return self._call(DataGrant, "lease", request)

    def _call(self, kind: type[AnswerBody], name: str, request: BaseModel | None = None) -> AnswerBody:
        body = None if request is None else request.model_dump(mode="json")
        line = json.dumps({"call": name, "body": body}, separators=(",", ":")).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(self._path)
                connection.sendall(line)
                with connection.makefile("rb") as answers:
                    answer = json.loads(answers.readline(MAX_ANSWER_BYTES))
            status, code = int(answer["status"]), str(answer.get("code", ""))
            if status == 200:
                return kind.model_validate(answer["body"])
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise WorldUnavailableError(f"the agent gave no answer to {name!r}: {error}") from error
        message = str(answer.get("message", code))
        raise _REFUSALS.get(code, WorldUnavailableError)(message)

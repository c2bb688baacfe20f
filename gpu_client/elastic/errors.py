"""Define the errors of elastic trainings."""

from __future__ import annotations

from collections.abc import Sequence


class ElasticError(Exception):
    """Base of all errors of elastic trainings."""


class PeerLostError(ElasticError):
    """Report the peers that the group has lost; the group cannot be used further, and a new epoch must follow.

    nodes: ids of the lost peers. cause: word of `baton.contract.elastic.world.LostNode`: `connection_reset` and
    `refused` prove the death of the peer's process or connection, `silent` does not, `protocol` names a peer that sends
    invalid frames.
    """

    def __init__(self, nodes: Sequence[str], cause: str, message: str = "") -> None:
        super().__init__(f"lost {', '.join(nodes)} ({cause}){': ' if message else ''}{message}")
        self.nodes = tuple(nodes)
        self.cause = cause
        self.message = message


class GroupAbortedError(ElasticError):
    """Report that another thread has aborted the group."""


class ElasticSetupError(ElasticError):
    """Error of a model, optimizer or setting that elastic training cannot use; `remedy` names a correct use."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem
        self.remedy = remedy


class WorldCallError(ElasticError):
    """Base of the refusals and failures of `WorldCalls`."""


class WorldChangedError(WorldCallError):
    """Report that the epoch of a proposal or report is no longer the world's epoch."""


class NoMajorityError(WorldCallError):
    """Report that a proposal keeps too few members while the others may still be alive."""


class WorldUnavailableError(WorldCallError):
    """Report that the control plane gave no answer; the call may or may not have taken effect."""


class WorldMismatchError(WorldCallError):
    """Report that the node's program differs from the world's program; the message names the first difference."""


class DataMismatchError(WorldCallError):
    """Report that the node's order of the shards differs from the order of the other nodes."""


class NotAMemberError(WorldCallError):
    """Report that the world does not know the node as a member or, for joining nodes, at all."""


class NotFiniteError(ElasticError):
    """Refuse values that are NaN, infinite, or not below 2**126, which would spoil the model of all members."""


class StateLostError(ElasticError):
    """Report that no member holds a complete outer state; the next attempt resumes from the newest checkpoint."""


class ProcessLostError(ElasticError):
    """Report that a process of this node has ended or hangs, which ends the node."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"a process of this node has ended or hangs; its output tells why ({cause})")

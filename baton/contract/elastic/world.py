"""Define the world of an elastic training: its nodes, its membership epochs, and the calls of nodes.

A node is one training process with a session of one attempt at one seat of the job. The members of an epoch reduce
their deltas together. Each change of membership raises the epoch by one conditional write.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.contract.base import AnswerModel, Epoch, EpochSeconds, WireModel
from baton.contract.elastic.nodes import MAX_NODES

WorldEpoch = Annotated[int, Field(ge=0, le=10**9, description="Number of the membership; rises with every change")]
Round = Annotated[int, Field(ge=0, le=10**9, description="Number of committed outer steps")]
NodeId = Annotated[
    str,
    Field(pattern=r"^[0-9]{1,2}\.[0-9]{1,9}\.[0-9a-f]{8}$", examples=["3.1.9f86d081"]),
]
"""Seat, attempt at the seat, and 8 random hex digits of the training process."""
Address = Annotated[
    str, Field(max_length=128, pattern=r"^[A-Za-z0-9.\-\[\]:]+:[0-9]{1,5}$", examples=["203.0.113.7:47100"])
]
Certificate = Annotated[str, Field(max_length=2048, pattern=r"^[A-Za-z0-9+/=]*$")]
"""X.509 certificate (DER, base64) that peers pin; empty for a node that no peer connects to by TLS."""
MAX_LINK_MBIT_S = 10**7
_Number = Field(ge=-(10**15), le=10**15)
Setting = Annotated[float, _Number] | Annotated[int, _Number] | Annotated[str, Field(max_length=256)] | bool | None


class TensorShape(WireModel):
    """Name, dtype and shape of one parameter.

    Example: `{"name": "head.weight", "dtype": "float32", "shape": [256, 64]}`
    """

    name: Annotated[str, Field(max_length=256)]
    dtype: Annotated[str, Field(max_length=32)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=10**12)]], Field(max_length=16)]


class NodeProgram(WireModel):
    """Properties of a node's training that all nodes of a world must share; the first node defines the properties.

    Example: `{"torch": "2.13.0", "engine": "wire", "codec": "int8", "parameters": 119296,
    "model_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}`
    """

    torch: Annotated[str, Field(max_length=64)]
    """Version of torch without its build suffix."""
    engine: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,16}$")]
    codec: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,16}$")]
    parameters: Annotated[int, Field(ge=0, le=10**13)]
    """Number of trained values."""
    model_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Digest of names, dtypes and shapes of all trained parameters."""
    tensors: Annotated[list[TensorShape], Field(max_length=256)] = []
    """First parameters, to name the first difference in a refusal."""
    settings: Annotated[dict[Annotated[str, Field(max_length=64)], Setting], Field(max_length=32)] = {}
    """Settings of the outer optimizer that all nodes must share (`outer_lr`, `outer_momentum`, ...)."""


class JoinRequest(WireModel):
    """Body of `POST /job/{id}/world/join`: one training process asks to become a member. A repeat updates the request.

    Example: `{"node": "3.1.9f86d081", "addresses": ["203.0.113.7:47100"], "round": 12, "program":
    {"torch": "2.13.0", "engine": "wire", "codec": "int8", "parameters": 119296,
    "model_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}}`
    """

    node: NodeId
    addresses: Annotated[list[Address], Field(max_length=8)] = []
    """Addresses under which peers reach the node, best first; empty if no peer can connect."""
    certificate: Certificate = ""
    round: Round = 0
    """Round of the outer state that the node holds."""
    ready: bool = True
    """False while the node fetches the outer state from its peers."""
    program: NodeProgram


class LostNode(WireModel):
    """Member that the proposer has lost. Example: `{"node": "1.1.9f86d081", "cause": "connection_reset"}`"""

    node: NodeId
    cause: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    """`connection_reset`, `silent`, `left`, `refused`, `protocol` ..."""
    message: Annotated[str, Field(max_length=256)] = ""


class EpochProposal(WireModel):
    """Body of `POST /job/{id}/world/epoch`: replace the membership of epoch `epoch` by `members`, as epoch + 1.

    Example: `{"node": "0.1.9f86d081", "epoch": 4, "members": ["0.1.9f86d081", "2.1.ab34cd56"], "round": 12}`
    """

    node: NodeId
    """Proposer: a member of the present epoch or, for a world without live members, a joining node."""
    epoch: WorldEpoch
    members: Annotated[list[NodeId], Field(min_length=1, max_length=MAX_NODES)]
    """Present members first, in their order, then joining nodes."""
    round: Round = 0
    lost: Annotated[list[LostNode], Field(max_length=MAX_NODES)] = []


class ExcludeRequest(WireModel):
    """Body of `POST /job/{id}/world/exclude`: an operator removes members that no majority can remove.

    Example: `{"seats": [2, 5]}`
    """

    seats: Annotated[list[Annotated[int, Field(ge=0, le=MAX_NODES - 1)]], Field(min_length=1, max_length=MAX_NODES)]


class RoundReport(WireModel):
    """Committed round. Example: `{"round": 12, "epoch": 4, "contributors": 3, "tokens": 51200, "round_s": 61.2}`"""

    round: Round
    epoch: WorldEpoch
    contributors: Annotated[int, Field(ge=0, le=MAX_NODES)]
    tokens: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Sum of the contributors' weights: tokens or samples."""
    round_s: Annotated[float, Field(ge=0, le=10**7)] = 0.0
    """Seconds from the commit of the round before."""
    reduce_s: Annotated[float, Field(ge=0, le=10**7)] = 0.0
    sent_bytes: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Bytes that the reporting node sent in the reduces of the round, which took `reduce_s` in all."""
    repaired: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Buckets that were reduced again, or repaired after a difference between members."""


class NodeReport(WireModel):
    """State of one node, as the reporting member has seen the node.

    Example: `{"node": "1.1.9f86d081", "tokens": 12800, "state": "training", "link_mbit_s": 480}`
    """

    node: NodeId
    state: Annotated[str, Field(pattern=r"^[a-z_]{1,16}$")]
    tokens: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Weight of the node in the newest round."""
    link_mbit_s: Annotated[float, Field(ge=0, le=MAX_LINK_MBIT_S)] | None = None


class WorldReport(WireModel):
    """Body of `POST /job/{id}/world/report`: newest rounds and nodes, from the first member about every 15 s.

    Example: `{"node": "0.1.9f86d081", "epoch": 4, "rounds": [], "nodes": []}`
    """

    node: NodeId
    epoch: WorldEpoch
    rounds: Annotated[list[RoundReport], Field(max_length=64)] = []
    nodes: Annotated[list[NodeReport], Field(max_length=MAX_NODES)] = []


class NodeView(AnswerModel):
    """Node of a world. Example: `{"node": "3.1.9f86d081", "seat": 3, "member": true, ...}`"""

    node: NodeId
    seat: int
    member: bool
    """False for a joining node."""
    ready: bool = True
    round: Round = 0
    addresses: list[str] = []
    certificate: str = ""
    joined_at: EpochSeconds | None = None
    lease_live: bool = True
    """False if the node's attempt has ended or its lease has expired."""
    relay: bool = False
    """True for a node that exchanges bytes with a peer through the object store, because neither reaches the other."""
    machine_id: str | None = None
    state: str = ""
    tokens: int = 0
    link_mbit_s: float | None = None


class WorldShards(AnswerModel):
    """Shards of an elastic training. Example: `{"total": 96, "finished": 31, "held": {"3.1.9f86d081": 4}}`"""

    total: int | None
    """None for endless data."""
    finished: int
    """Shards that committed rounds contain to the end."""
    held: dict[str, int] = {}
    """By node: shards that the node trains, or has trained since its newest committed round."""


WorldState = Literal["forming", "training", "ended"]


class WorldView(AnswerModel):
    """World of an elastic training, for nodes and users (`GET /job/{id}/world`).

    Example: `{"job": "146683a1-...", "state": "training", "epoch": 4, "round": 12, "min": 2, "max": 8, "nodes": []}`
    """

    job: str
    state: WorldState
    epoch: WorldEpoch
    round: Round
    """Newest round that a proposal or report has named."""
    min: int
    max: int
    nodes: list[NodeView]
    """Members in the order of the epoch, then joining nodes."""
    program: NodeProgram | None = None
    rounds: list[RoundReport] = []
    """Newest rounds, oldest first."""
    advice: str = ""
    """Remedies of rounds that take too much of the time, for users."""
    shards: WorldShards | None = None
    """For users; None for a training that leases no shards."""

    @property
    def members(self) -> list[NodeView]:
        """Return the members of the epoch in their order, which is the order of their ranks."""
        return [one for one in self.nodes if one.member]

    @property
    def joining(self) -> list[NodeView]:
        """Return the nodes that ask to become members."""
        return [one for one in self.nodes if not one.member]


class WorldSeat(AnswerModel):
    """Seat of a claimed attempt in an elastic training, in the worker's claim.

    Checkpoints belong to the elastic job: their manifests name `job` and `epoch` of this model, not those of the claim.
    Example: `{"job": "146683a1-...", "seat": 3, "epoch": 7, "min": 2, "max": 8}`
    """

    job: str
    """Id of the elastic job, whose seat the claimed job is."""
    seat: int
    epoch: Epoch = 0
    """Number of this attempt among the attempts at all seats."""
    min: int
    max: int

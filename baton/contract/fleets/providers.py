"""Define the accounts at providers of machines, which `baton fleet login` stores, and their views without secrets."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SecretStr

from baton.contract.base import AnswerModel, EpochSeconds, WireModel
from baton.contract.names import ProviderName

Secret = Annotated[SecretStr, Field(min_length=1, max_length=16_384)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
Address = Annotated[str, Field(max_length=256, pattern=r"^https?://[\x21-\x7e]+$")]


class VastAccount(WireModel):
    """Account at Vast.ai.

    Example: `{"api_key": "..."}`
    """

    api_key: Secret
    """Key with the permissions instance_read, instance_write, misc, billing_read and user_read."""
    address: Address = "https://console.vast.ai"


class SaladAccount(WireModel):
    """Account at SaladCloud. Salad's keys reach all organizations of their user.

    Example: `{"api_key": "...", "organization": "acme", "project": "training"}`
    """

    api_key: Secret
    organization: Name
    project: Name
    priority: Annotated[str, Field(pattern="^(high|medium|low|batch)$")] = "high"
    """Priority of the machines, which decides price and preemption."""
    address: Address = "https://api.salad.com/api/public"
    identity_keys: Address = "https://matrix-rest-api.salad.com/.well-known/workload-jwks.json"
    """Public keys by which a machine's proof of identity is verified."""


class RunpodAccount(WireModel):
    """Account at RunPod.

    Example: `{"api_key": "..."}`
    """

    api_key: Secret
    cloud: Annotated[str, Field(pattern="^(SECURE|COMMUNITY)$")] = "SECURE"
    address: Address = "https://api.runpod.io/v2"


class Ec2Account(WireModel):
    """Access to Amazon EC2 in one region, by an access key of its own.

    Example: `{"access_key_id": "AKIA...", "secret_access_key": "...", "region": "us-east-1", "image_id": "ami-1",
    "subnet_ids": ["subnet-1"], "security_group_ids": ["sg-1"]}`
    """

    access_key_id: Name
    secret_access_key: Secret
    region: Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")]
    image_id: Annotated[str, Field(pattern=r"^ami-[0-9a-f]{1,32}$")]
    """Machine image with Docker and the GPU driver, for instance the AWS Deep Learning Base image."""
    subnet_ids: Annotated[list[Name], Field(min_length=1, max_length=32)]
    security_group_ids: Annotated[list[Name], Field(min_length=1, max_length=16)]
    instance_types: Annotated[list[Name], Field(min_length=1, max_length=32)] = [
        "g6.xlarge",
        "g5.xlarge",
        "g4dn.xlarge",
    ]
    address: Address | None = None
    """Endpoint in place of Amazon's own."""


class SshHost(WireModel):
    """Machine that a person owns or rents elsewhere.

    Example: `{"name": "desk", "address": "10.0.0.7", "user": "baton", "host_key": "ssh-ed25519 AAAA", "vram_gib": 24}`
    """

    name: Name
    address: Name
    port: Annotated[int, Field(ge=1, le=65_535)] = 22
    user: Name
    host_key: Annotated[str, Field(pattern=r"^(ssh-|ecdsa-|sk-)[a-z0-9@.-]+ [A-Za-z0-9+/=]+$")]
    """Public key of the host, as `ssh-keyscan` prints the key; another host is refused."""
    python: Annotated[str, Field(min_length=1, max_length=256)] = "python3"
    """Program on the host that starts the agent."""
    gpu_model: Annotated[str, Field(max_length=64)] | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    vram_gib: Annotated[float, Field(ge=0, le=4096)] = 0
    disk_gib: Annotated[float, Field(ge=1, le=100_000)] = 40
    region: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{2,32}$")] | None = None
    usd_per_hour: Annotated[float, Field(ge=0, le=1_000_000)] = 0
    """Cost of the host while a fleet uses the host; 0 for a host that is paid anyway."""


class SshAccount(WireModel):
    """Machines that accept an SSH key.

    Example: `{"private_key": "-----BEGIN OPENSSH PRIVATE KEY-----...", "hosts": [{"name": "desk",
    "address": "10.0.0.7", "user": "baton", "host_key": "ssh-ed25519 AAAA", "gpu_model": "RTX 4090"}]}`
    """

    private_key: Secret
    hosts: Annotated[list[SshHost], Field(min_length=1, max_length=500)]


Account = VastAccount | SaladAccount | RunpodAccount | Ec2Account | SshAccount
ACCOUNTS: dict[ProviderName, type[Account]] = {
    "vast": VastAccount,
    "salad": SaladAccount,
    "runpod": RunpodAccount,
    "ec2": Ec2Account,
    "ssh": SshAccount,
}
"""Accounts by provider. The provider `loopback` has no account."""


def reveal(account: WireModel) -> dict[str, Any]:
    """Return the fields of an account or a login as JSON values, secrets included."""
    values = account.model_dump(mode="json")
    return {name: value.get_secret_value() if isinstance(value, SecretStr) else values[name] for name, value in account}


class ProviderView(AnswerModel):
    """Provider of which the deployment holds an account, without any secret.

    Example: `{"provider": "vast", "account": "mail@example.com", "problems": [], "checked_at": 1700000000, ...}`
    """

    provider: ProviderName
    account: str
    balance_usd: float | None = None
    problems: list[str] = []
    """Permissions that the key lacks or should not have, limits that are reached; each with its remedy."""
    checked_at: EpochSeconds


class ProviderPage(AnswerModel):
    """Providers that this deployment can rent from.

    Example: `{"providers": []}`
    """

    providers: list[ProviderView]

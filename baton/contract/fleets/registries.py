"""Define the logins at container registries, which `baton fleet login` stores, and their views without secrets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from baton.contract.base import AnswerModel, EpochSeconds, WireModel
from baton.contract.names import REGISTRY_PATTERN

DOCKER_HUB = "docker.io"
_OTHER_NAMES = frozenset({"index.docker.io", "registry-1.docker.io"})

RegistryName = Annotated[str, Field(pattern=REGISTRY_PATTERN)]


class RegistryLogin(WireModel):
    """User at a container registry, by whom machines pull private images. A host of a machine can read the login.

    Example: `{"username": "acme", "password": "..."}`
    """

    username: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x20-\x7e]+$")]
    password: Annotated[SecretStr, Field(min_length=1, max_length=4096)]
    """Password or access token of one line, best one that can read the images and nothing else."""


class RegistryView(AnswerModel):
    """Registry at which the tenant's machines log in, without the password.

    Example: `{"registry": "ghcr.io", "username": "acme", "stored_at": 1700000000}`
    """

    registry: str
    username: str
    stored_at: EpochSeconds


class RegistryPage(AnswerModel):
    """Registries at which the tenant's machines log in.

    Example: `{"registries": []}`
    """

    registries: list[RegistryView]


def registry_of(image: str) -> str:
    """Return the registry of an image, as Docker reads the name of an image: without a host in the name, Docker Hub."""
    host, slash, _ = image.partition("/")
    if not slash or not ({".", ":"} & set(host) or host == "localhost") or host in _OTHER_NAMES:
        return DOCKER_HUB
    return host

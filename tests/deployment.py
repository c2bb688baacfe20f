"""The very stack that goes to AWS, deployed to the emulated cloud by the same command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import boto3
import requests

from contract.names import BUCKETS, Scope
from functions.local.emulator import Emulator
from tests.control_plane import ControlPlane

ROOT = Path(__file__).parent.parent
STAGE = "e2e"
DEPLOY_TIMEOUT_S = 240
DEPLOYED_HERE = ("-c", "target=host", "-c", "disposable=true", "--require-approval=never")
"""For functions that run on this machine."""


class Deployment(ControlPlane):
    """Deployed from construction; with keys for an admin and a worker, made as an operator would make them."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        tool(emulator, "bootstrap", "aws://000000000000/us-east-1")
        self.deploy_output = self.deploy()
        self.outputs = outputs = json.loads((ROOT / ".cdk" / f"{STAGE}.json").read_text())[f"baton-{STAGE}"]
        # The emulator's own name for the API's host needs a resolver that knows *.localhost; this one needs none.
        api_id = str(urlsplit(outputs["Url"]).hostname).split(".")[0]
        url = f"{emulator.endpoint_url}/_aws/execute-api/{api_id}"
        first = tool(emulator, "admin-key").stdout.strip()
        keys = {
            "admin": issue(url, first, Scope.ADMIN, Scope.SUBMIT, Scope.WORKER),
            "worker": issue(url, first, Scope.WORKER),
        }
        objects = boto3.client("s3", endpoint_url=emulator.endpoint_url)
        names = {name: outputs["".join(word.capitalize() for word in name.split("-"))] for name in BUCKETS}
        super().__init__(url, keys, objects, names)

    def deploy(self) -> str:
        """Deploy, again if it is deployed; what the command said."""
        done = tool(self.emulator, "deploy", *DEPLOYED_HERE)
        return done.stdout + done.stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.client.close()


def issue(url: str, admin_key: str, *scopes: Scope) -> str:
    """A new key, made through the API."""
    body = {"name": "e2e", "scopes": list(scopes)}
    answer = requests.post(f"{url}/keys", json=body, headers={"x-api-key": admin_key}, timeout=30)
    answer.raise_for_status()
    key: str = answer.json()["key"]
    return key


def tool(emulator: Emulator, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`run_tool` on our stage; it must succeed."""
    done = run_tool(emulator, command, *more, stage=STAGE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_tool(emulator: Emulator, command: str, *more: str, stage: str) -> subprocess.CompletedProcess[str]:
    """`python -m cdk` with the emulator as its cloud."""
    return subprocess.run(
        [sys.executable, "-m", "cdk", command, "--stage", stage, *more],
        cwd=ROOT,
        env={
            **os.environ,
            "AWS_ENDPOINT_URL": emulator.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        },
        capture_output=True,
        text=True,
        timeout=DEPLOY_TIMEOUT_S,
        check=False,
    )

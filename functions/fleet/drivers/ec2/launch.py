"""Describe the launch of an EC2 machine: the parameters of RunInstances, and the script that runs the agent. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.contract.fleets.providers import Ec2Account
from functions.fleet.drivers.protocol import CreateIntent

IMAGE_ROOM_GIB = 20
"""Part of the disk for the container image, besides the rented disk and the machine image."""
HOPS = 2
"""Network hops of the metadata service: the container, the second hop, reads the spot notice there."""
DISK_TAG = "baton:disk-gib"
DEPLOYMENT_TAG = "baton:deployment"

_SCRIPT = """\
#!/bin/bash
# Runs the agent's container; whatever ends the script ends the machine.
exec > >(tee -a /var/log/baton.log > /dev/console) 2>&1
trap 'shutdown --poweroff now' EXIT
set -eu
{exports}
{address}timeout 300 bash -c 'until docker info > /dev/null 2>&1; do sleep 1; done'
timeout 1500 docker pull --quiet {image}
docker run --rm --name baton-agent --init {gpus}{publish}--shm-size 8g --stop-timeout 120 {names}{image}
"""
_ADDRESS = """\
metadata=http://169.254.169.254/latest
token=$(curl -sf -m 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $metadata/api/token || true)
addresses=''
for kind in public-ipv4 local-ipv4; do
  found=$(curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" $metadata/meta-data/$kind || true)
  addresses=$addresses${{addresses:+${{found:+,}}}}$found
done
export BATON_ELASTIC_PORT={port} BATON_ELASTIC_ADDRESSES=$addresses
"""


@dataclass(frozen=True, kw_only=True)
class MachineImage:
    """Root disk of a machine image."""

    id: str
    device: str
    gib: int


def disk_size_gib(disk_gib: float, image: MachineImage) -> int:
    """Return the size of the root disk that leaves `disk_gib` to the job."""
    return math.ceil(disk_gib) + image.gib + IMAGE_ROOM_GIB


def boot_script(image: str, environment: Mapping[str, str], *, gpus: bool, port: int | None = None) -> str:
    """Return the user data: pull and run the image with exactly this environment, then power the machine off.

    No value stands on a command line, where every process of the machine could read it. With `port`, the container
    listens there and learns the addresses of the machine, the public one first.
    """
    names = [*environment, *(("BATON_ELASTIC_PORT", "BATON_ELASTIC_ADDRESSES") if port else ())]
    return _SCRIPT.format(
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        address=_ADDRESS.format(port=port) if port else "",
        names="".join(f"--env {name} " for name in names),
        image=shlex.quote(image),
        gpus="--gpus all " if gpus else "",
        publish=f"--publish {port}:{port} " if port else "",
    )


def launch(
    account: Ec2Account, intent: CreateIntent, image: MachineImage, subnet: str, *, type_: str, max_usd: float
) -> dict[str, Any]:
    """Return the parameters of RunInstances. `max_usd`: most USD per hour for the machine without its disk."""
    gib = disk_size_gib(intent.disk_gib, image)
    tags = [
        {"Key": "Name", "Value": intent.token},
        {"Key": DEPLOYMENT_TAG, "Value": intent.token.partition("-")[0]},
        {"Key": DISK_TAG, "Value": str(gib)},
    ]
    tagged = ["instance", "volume", *(["spot-instances-request"] if intent.offer.spot else [])]
    parameters: dict[str, Any] = {
        "ClientToken": intent.token,
        "MinCount": 1,
        "MaxCount": 1,
        "ImageId": image.id,
        "InstanceType": type_,
        "SubnetId": subnet,
        "SecurityGroupIds": account.security_group_ids,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": HOPS},
        "BlockDeviceMappings": [
            {
                "DeviceName": image.device,
                "Ebs": {"VolumeSize": gib, "VolumeType": "gp3", "DeleteOnTermination": True},
            }
        ],
        "TagSpecifications": [{"ResourceType": one, "Tags": tags} for one in tagged],
        "UserData": boot_script(intent.image or "", intent.environment, gpus=intent.offer.gpus > 0, port=intent.port),
    }
    if intent.offer.spot:
        parameters["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
                "MaxPrice": f"{max_usd:.6f}",
            },
        }
    return parameters

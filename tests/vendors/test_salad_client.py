"""Salad's own clients, aimed at the fake: what the clients accept, the fake says as Salad does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.salad.api import RTX_4090, FakeSalad
from fakes.salad.imds import FakeImds
from fakes.salad.signing_key import WorkloadKey
from tests.kits.clock import Clock
from tests.vendors.environment import run_client

RENT = """
import json, sys
from salad_cloud_sdk import SaladCloudSdk
from salad_cloud_sdk.models import (
    ContainerConfiguration, ContainerGroupCreationRequest, ContainerGroupPatch, CreateContainerResourceRequirements,
    LogEntryQuery,
)

address, key, gpu = sys.argv[1:]
sdk = SaladCloudSdk(api_key=key, base_url=address, timeout=10_000)
groups, place = sdk.container_groups, {"organization_name": "acme", "project_name": "training"}
mine = {**place, "container_group_name": "mine"}
said = {}
classes = sdk.organization_data.list_gpu_classes("acme").items
said["classes"] = [[one.name, [price.price for price in one.prices]] for one in classes]
said["quota"] = sdk.quotas.get_quotas("acme").container_groups_quotas.container_replicas_quota
made = groups.create_container_group(
    request_body=ContainerGroupCreationRequest(
        name="mine", display_name="mine", replicas=1, restart_policy="always", autostart_policy=True,
        container=ContainerConfiguration(
            image="me/trainer:1",
            resources=CreateContainerResourceRequirements(cpu=4, memory=16384, gpu_classes=[gpu], storage_amount=2**30),
            environment_variables={"A": "b"}, priority="low",
        ),
    ),
    **place,
)
said["made"] = [made.name, made.priority, made.container.environment_variables["A"]]
try:
    groups.create_container_group(request_body=ContainerGroupCreationRequest(
        name="mine", display_name="mine", replicas=1, restart_policy="always", autostart_policy=True,
        container=ContainerConfiguration(
            image="me/trainer:1", resources=CreateContainerResourceRequirements(cpu=4, memory=16384, gpu_classes=[gpu])
        ),
    ), **place)
except Exception as error:
    said["again"] = error.status
found = groups.get_container_group(**mine)
said["found"] = [found.current_state.status, found.current_state.instance_status_counts.running_count]
said["listed"] = [one.name for one in groups.list_container_groups(**place).items]
(instance,) = groups.list_container_group_instances(**mine).instances
said["instance"] = [instance.state, instance.machine_id]
one = groups.get_container_group_instance(**mine, container_group_instance_id=instance.id_)
said["one"] = one.machine_id
scaled = groups.update_container_group(request_body=ContainerGroupPatch(replicas=2), **mine)
said["replicas"] = scaled.replicas
query = LogEntryQuery(
    start_time="2023-11-14T00:00:00Z", end_time="2023-11-15T00:00:00Z", page_size=10, sort_order="asc",
    query='resource.labels.container_group_name = "other"',
)
said["logs"] = [one.text_log for one in sdk.logs.query_log_entries(request_body=query, organization_name="acme").items]
said["events"] = [one.event_name for one in sdk.system_logs.get_system_logs(**mine).items]
groups.stop_container_group(**mine)
said["stopped"] = groups.get_container_group(**mine).current_state.status
groups.delete_container_group(**mine)
try:
    groups.get_container_group(**mine)
except Exception as error:
    said["gone"] = error.status
print(json.dumps(said))
"""
PROVE = """
import json, sys
from salad_cloud_imds_sdk import SaladCloudImdsSdk

sdk = SaladCloudImdsSdk(base_url=sys.argv[1], timeout=10_000)
status = sdk.metadata.get_status(metadata="true")
print(json.dumps([sdk.metadata.get_token(metadata="true").jwt, status.ready]))
"""
pytestmark = pytest.mark.processes


def group(name: str) -> dict[str, Any]:
    """Return the create call of a group."""
    container = {"image": "i", "resources": {"cpu": 4, "memory": 4096, "gpu_classes": [RTX_4090]}}
    policies = {"replicas": 1, "restart_policy": "always", "autostart_policy": True}
    return {"name": name, **policies, "container": container}


def test_salads_client_rents_reads_and_deletes_a_group(tmp_path: Path) -> None:
    with FakeSalad(Clock(1_700_000_000)) as fake:
        cloud = fake.cloud
        cloud.allocate_s = cloud.download_s = cloud.create_s = cloud.stopping_s = 0.0
        cloud.create(group("other"))
        fake.write_log("other", "step 1")
        done = run_client("salad", "-c", RENT, fake.address, fake.api_key, RTX_4090, home=tmp_path, environment={})
        said = json.loads(done.stdout.splitlines()[-1])
        machine = said["instance"][1]
        assert said == {
            "classes": [[one.name, list(one.prices.values())] for one in cloud.classes.values()],
            "quota": 100,
            "made": ["mine", "low", "b"],
            "again": 400,
            "found": ["running", 1],
            "listed": ["other", "mine"],
            "instance": ["running", machine],
            "one": machine,
            "replicas": 2,
            "logs": ["step 1"],
            "events": [f"Instance {state}" for state in ("Running", "Creating", "Downloading", "Allocated")] * 2,
            "stopped": "stopped",
            "gone": 404,
        }
        assert fake.billing() == ["other"] and list(cloud.groups) == ["other"]


def test_salads_client_reads_the_identity_of_its_container(tmp_path: Path) -> None:
    salad, key = FakeSalad(Clock(1_700_000_000)), WorkloadKey()
    salad.cloud.create(group("mine"))
    with FakeImds(salad, "mine", sign=key.sign, key_id=key.key_id) as imds:
        done = run_client("salad", "-c", PROVE, imds.url, home=tmp_path, environment={})
    token, ready = json.loads(done.stdout.splitlines()[-1])
    # The client accepts tokens of at most 1000 characters.
    assert 500 < len(token) <= 1000 and token.count(".") == 2 and ready is False

"""Test a stage with its own object store: the template, and the refusals before a deployment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aws_cdk import App

from baton.contract.names import BUCKETS
from cdk.app import build
from cdk.resources.access import ACCESS
from cdk.stage import StageSettings, StageSettingsError
from cdk.tool import store_check as cdk_store
from cdk.tool.store_check import StoreError, require_store
from functions.local.emulator import Emulator
from functions.settings import ControlPlaneSettings
from functions.storage.s3.objects import S3ObjectStore
from tests.infrastructure.conftest import NO_BUNDLING, of_type, run_here, template_of
from tests.infrastructure.test_stack import allowed, functions
from tests.kits.clouds.emulator import unique
from tests.kits.clouds.second_store import ACCESS_KEY_ID, SECRET_ACCESS_KEY, SecondStore

STORE = {
    "s3_endpoint": "https://0123456789abcdef.r2.cloudflarestorage.com",
    "s3_secret": "baton/store",
    "data_bucket": "my-data",
    "checkpoints_bucket": "my-checkpoints",
}
SECRET = "arn:<AWS::Partition>:secretsmanager:<AWS::Region>:<AWS::AccountId>:secret:baton/store-??????"


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, Any]:
    return template_of(**STORE)


def test_it_makes_no_buckets_and_says_which_ones_it_uses(elsewhere: dict[str, Any], template: dict[str, Any]) -> None:
    assert of_type(elsewhere, "AWS::S3::Bucket") == {} and of_type(template, "AWS::S3::Bucket") != {}
    assert of_type(elsewhere, "AWS::S3::BucketPolicy") == {}
    values = {name: output["Value"] for name, output in elsewhere["Outputs"].items()}
    assert (values["TrainingData"], values["TrainingCheckpoints"]) == ("my-data", "my-checkpoints")
    assert set(elsewhere["Outputs"]) == set(template["Outputs"])


@pytest.mark.parametrize("name", sorted(ACCESS))
def test_who_needs_objects_may_read_the_secret_and_nobody_else_may(
    elsewhere: dict[str, Any], template: dict[str, Any], name: str
) -> None:
    """All other permissions equal those of a stage with AWS buckets, which test_stack.py compares with the table."""
    without_s3 = {(action, place) for action, place in allowed(template, name) if not action.startswith("s3:")}
    needed = {("secretsmanager:GetSecretValue", SECRET)} if ACCESS[name].buckets else set()
    assert allowed(elsewhere, name) == without_s3 | needed


@pytest.mark.parametrize("name", sorted(ACCESS))
def test_functions_are_told_where_objects_are(elsewhere: dict[str, Any], template: dict[str, Any], name: str) -> None:
    more = {
        "BATON_S3_ENDPOINT": STORE["s3_endpoint"],
        "BATON_S3_REGION": "auto",
        "BATON_S3_SECRET": "baton/store",
        "BATON_DATA_BUCKET": "my-data",
        "BATON_CHECKPOINTS_BUCKET": "my-checkpoints",
    }
    before = functions(template)[name]["Environment"]["Variables"]
    after = functions(elsewhere)[name]["Environment"]["Variables"]
    buckets = {"BATON_DATA_BUCKET", "BATON_CHECKPOINTS_BUCKET"}
    assert {key: value for key, value in after.items() if key not in more} == {
        key: value for key, value in before.items() if key not in buckets
    }
    if buckets <= set(before):
        assert more.items() <= after.items()
    else:
        assert not more.keys() & after.keys(), "it has nothing to do with objects"


@pytest.mark.parametrize("more", [STORE, {"alarm_email": "ops@example.com", "disposable": "true"}], ids=str)
def test_cdk_nag_finds_nothing(tmp_path: Path, more: Mapping[str, str]) -> None:
    """cdk-nag raises, and writes a report, on an unacknowledged finding."""
    app = App(outdir=str(tmp_path), context={**NO_BUNDLING, "stage": "test", **more})
    build(app)
    app.synth()
    report = json.loads((tmp_path / "validation-report.json").read_text())
    assert [plugin["conclusion"] for plugin in report["pluginReports"]] == ["success"], report


def test_a_region_and_a_store_that_takes_no_uploads_in_parts_are_passed_on(elsewhere: dict[str, Any]) -> None:
    regional = functions(template_of(**STORE, s3_region="eu-1", s3_multipart="false"))
    assert regional["worker"]["Environment"]["Variables"]["BATON_S3_REGION"] == "eu-1"
    assert {made["Environment"]["Variables"].get("BATON_MULTIPART") for made in regional.values()} == {"false"}
    assert not [made for made in functions(elsewhere).values() if "BATON_MULTIPART" in made["Environment"]["Variables"]]
    assert StageSettings.from_context({**STORE, "s3_multipart": "true"}) == StageSettings.from_context(STORE)
    assert ControlPlaneSettings.from_environment({"BATON_MULTIPART": "false"}).multipart is False
    assert ControlPlaneSettings.from_environment({}).multipart is True


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"s3_endpoint": ""}, "s3_endpoint: is required with s3_secret."),
        ({"s3_secret": ""}, "s3_secret: is required with s3_endpoint."),
        ({"data_bucket": ""}, "data_bucket: is required with s3_endpoint."),
        ({"checkpoints_bucket": ""}, "checkpoints_bucket: is required with s3_endpoint."),
        (dict.fromkeys(STORE, "") | {"s3_region": "auto"}, "s3_endpoint: is required with s3_region."),
        (dict.fromkeys(STORE, "") | {"data_bucket": "mine"}, "s3_endpoint: is required with data_bucket."),
        ({"s3_endpoint": "r2.example"}, "s3_endpoint: 'r2.example' is no address of a store. Use https://host"),
        ({"s3_endpoint": "https://r2.example/bucket"}, "Use https://host and no path."),
        ({"s3_endpoint": "https://me:secret@r2.example"}, "is no address of a store"),
        ({"s3_endpoint": "http://r2.example"}, "is not encrypted. Use https://host."),
        ({"s3_region": "Auto!"}, "s3_region: 'Auto!' is no region."),
        ({"s3_secret": "arn:aws:secretsmanager:eu-1:1:secret:x"}, "Use its name, not its ARN."),
        ({"data_bucket": "My_Data"}, "data_bucket: 'My_Data' is no bucket name."),
        ({"checkpoints_bucket": "my-data"}, "checkpoints_bucket: equals data_bucket. Use two buckets."),
    ],
)
def test_half_a_store_is_refused(changed: Mapping[str, str], said: str) -> None:
    with pytest.raises(StageSettingsError) as refused:
        StageSettings.from_context({**STORE, **changed})
    assert said in str(refused.value)


# Before a deployment


def cdk(
    emulator: Emulator, command: str, *, endpoint: str, secret: str, buckets: Mapping[str, str], region: str = ""
) -> Any:
    """Run the tool for a stage with a store of its own, on the emulated cloud."""
    context = {
        "target": "host",
        "s3_endpoint": endpoint,
        "s3_secret": secret,
        "s3_region": region,
        "data_bucket": buckets["training-data"],
        "checkpoints_bucket": buckets["training-checkpoints"],
    }
    account = {"AWS_ENDPOINT_URL": emulator.endpoint_url, "AWS_REGION": "us-east-1"}
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    return run_here(command, *(f"-c{name}={value}" for name, value in context.items()), **account, **keys)


def secret_of(
    emulator: Emulator, secret_access_key: str = SECRET_ACCESS_KEY, access_key_id: str = ACCESS_KEY_ID
) -> str:
    name = unique("store")
    text = json.dumps({"access_key_id": access_key_id, "secret_access_key": secret_access_key})
    emulator.client("secretsmanager").create_secret(Name=name, SecretString=text)
    return name


@pytest.mark.emulator
@pytest.mark.processes
@pytest.mark.parametrize("command", ["deploy", "check-store"])
def test_a_store_that_does_not_verify_is_not_deployed_on(emulator: Emulator, tmp_path: Path, command: str) -> None:
    with SecondStore(tmp_path / "store") as store:
        made = store.cloud().buckets
        done = cdk(emulator, command, endpoint=store.endpoint_url, secret=secret_of(emulator), buckets=made)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"baton: s3_endpoint: {store.endpoint_url}, bucket {made['training-data']}: it stores"
    )
    assert done.stderr.endswith("Checkpoints would not be safe there.\n") and done.stderr.count("\n") == 1


@pytest.mark.emulator
def test_a_store_without_uploads_in_parts_is_used_without_them(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = {name: unique(name) for name in BUCKETS}
    for bucket in buckets.values():
        emulator.client("s3").create_bucket(Bucket=bucket)
    monkeypatch.setattr(cdk_store, "_credentials", lambda _: ("test", "test"))
    monkeypatch.setattr(S3ObjectStore, "multiparts", lambda *_: [])
    place = {"data_bucket": buckets["training-data"], "checkpoints_bucket": buckets["training-checkpoints"]}
    store = {**STORE, **place, "target": "host", "s3_endpoint": emulator.endpoint_url, "s3_region": "us-east-1"}
    with pytest.raises(StoreError) as refused:
        require_store(StageSettings.from_context(store))
    assert str(refused.value).endswith(
        f"bucket {buckets['training-data']}: it does not list an upload that is under way. The store cannot take "
        "large files in parts. Use -c s3_multipart=false: each large file is then one upload."
    )
    require_store(StageSettings.from_context({**store, "s3_multipart": "false"}))


@pytest.mark.emulator
def test_a_store_that_verifies_may_be_used(emulator: Emulator) -> None:
    buckets = {name: unique(name) for name in BUCKETS}
    for bucket in buckets.values():
        emulator.client("s3").create_bucket(Bucket=bucket)
    secret = secret_of(emulator, "test", "test")
    url = emulator.endpoint_url
    # To the emulated S3 'auto' is a region like others, and its buckets are in this one.
    done = cdk(emulator, "check-store", endpoint=url, secret=secret, buckets=buckets, region="us-east-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The object store is usable.\n", ""), done.stderr


@pytest.mark.emulator
@pytest.mark.processes
def test_what_is_missing_is_said_in_one_line_without_the_credentials(emulator: Emulator, tmp_path: Path) -> None:
    with SecondStore(tmp_path / "store") as store:
        made, right = store.cloud().buckets, secret_of(emulator)
        gone = {**made, "training-data": "no-such-bucket"}
        url = store.endpoint_url
        tries: dict[str, dict[str, Any]] = {
            "s3_secret: Secrets Manager refused to read 'no-such'": {"secret": "no-such", "buckets": made},
            "SignatureDoesNotMatch": {"secret": secret_of(emulator, "of-yesterday"), "buckets": made},
            "bucket no-such-bucket: refused: ": {"secret": right, "buckets": gone},
        }
        done = {said: cdk(emulator, "check-store", endpoint=url, **given) for said, given in tries.items()}
    done["cannot be reached"] = cdk(emulator, "check-store", endpoint=url, secret=right, buckets=made)
    for said, tried in done.items():
        assert tried.returncode == 2 and tried.stderr.count("\n") == 1, tried.stderr
        assert said in tried.stderr
        assert "of-yesterday" not in tried.stderr and SECRET_ACCESS_KEY not in tried.stderr

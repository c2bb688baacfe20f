"""`python -m cdk`: what it says when it cannot go on, before anything is installed or changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdk.bundling import PYTHON_VERSION
from cdk.stage import Stage, StageError
from functions.local.emulator import Emulator

ROOT = Path(__file__).parents[2]
ACCOUNT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def tool(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as somebody who has no settings of AWS's but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-m", "cdk", *arguments],
        cwd=ROOT,
        env={**kept, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["deploy"], {}, "no AWS credentials. Set AWS_PROFILE"),
        (["deploy"], {"AWS_PROFILE": "nobody"}, "(nobody) could not be found"),
        (["deploy"], {**ACCOUNT, "AWS_REGION": ""}, "no AWS region. Set AWS_REGION"),
        (["deploy"], {**ACCOUNT, "AWS_REGION": "mars-1"}, "'mars-1' is no AWS region"),
        (["synth", "--stage", "My Stage"], {}, "stage: 'My Stage' is no stage name"),
        (["synth", "-c", "target=moon"], {}, "target: 'moon' is unknown. Use 'lambda' or 'host'."),
        (["synth", "-c", "log_retention_days=31"], {}, "log_retention_days: 31 is not one of 1, 7, 14"),
        (["synth", "-c", "alarm_email"], {}, "-c alarm_email: is not NAME=VALUE."),
        (["synth", "-c", "alarm_mail=a@b"], {}, "there is no setting 'alarm_mail'. Use one of disposable,"),
        (["deploy"], {**ACCOUNT, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "AWS cannot be reached: Could not connect"),
    ],
)
def test_says_in_one_line_what_is_missing(
    arguments: list[str], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = tool(*arguments, home=tmp_path, **environment)
    assert done.returncode == 2
    assert done.stderr.startswith("baton: ") and said in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_an_unknown_command_is_refused(tmp_path: Path) -> None:
    done = tool("explode", home=tmp_path)
    assert done.returncode == 2 and "invalid choice: 'explode'" in done.stderr


@pytest.mark.parametrize("name", ["", "-a", "1a", "a" * 17, "A", "a_b", "a\n"])
def test_a_stage_has_a_name_that_fits_into_all_others(name: str) -> None:
    with pytest.raises(StageError, match="is no stage name"):
        Stage(name=name)


def test_settings_come_from_the_context_as_what_they_are() -> None:
    stage = Stage.from_context({"stage": "prod", "disposable": "true", "max_requests_per_s": "50", "alarm_email": None})
    assert stage == Stage(name="prod", disposable=True, max_requests_per_s=50)
    assert stage.prefix == "baton-prod-"
    for wrong in ({"disposable": "yes"}, {"max_requests_per_s": "many"}, {"max_requests_per_s": "0"}):
        with pytest.raises(StageError, match=next(iter(wrong))):
            Stage.from_context(wrong)


def test_the_stack_is_made_without_an_account_and_has_no_findings() -> None:
    """cdk-nag stops the synthesis at any finding that is not acknowledged."""
    done = tool("synth", "--stage", "nobody", home=Path.home())
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((ROOT / ".cdk" / "out" / "baton-nobody.template.json").read_text())
    runtimes = {
        resource["Properties"]["Runtime"]
        for resource in made["Resources"].values()
        if resource["Type"] == "AWS::Lambda::Function"
    }
    assert runtimes == {f"python{PYTHON_VERSION}"}
    report = json.loads((ROOT / ".cdk" / "out" / "validation-report.json").read_text())
    assert [plugin["conclusion"] for plugin in report["pluginReports"]] == ["success"], report


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tenant", "A b"], "tenant: 'A b' is no tenant's name"),
        (["--stage", "nope"], "stage 'nope' is not deployed in this account and region."),
    ],
)
def test_no_first_key_without_a_tenant_and_a_stage(
    emulator: Emulator, arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = tool("admin-key", *arguments, home=tmp_path, **ACCOUNT, AWS_ENDPOINT_URL=emulator.endpoint_url)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1

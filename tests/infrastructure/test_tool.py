"""Test the errors of `python -m cdk` before an installation or a change."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from cdk.bundling import PYTHON_VERSION
from cdk.stage import READY_SHARDS_TAG, StageSettings, StageSettingsError
from cdk.tool import command_line
from cdk.tool.command_line import ToolError, require_no_fewer_shards
from functions.local.emulator import Emulator
from functions.storage.tables import JOBS
from tests.infrastructure.conftest import run_here
from tests.kits.clouds.emulator import unique

ROOT = Path(__file__).parents[2]
ACCOUNT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def tool(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tool without other AWS settings than these."""
    return subprocess.run(
        [sys.executable, "-m", "cdk", *arguments],
        cwd=ROOT,
        env=surroundings(home, **environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def surroundings(home: Path, **environment: str) -> dict[str, str]:
    """Return the environment without other AWS settings than these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**kept, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", **environment}


def start(*arguments: str, home: Path, **environment: str) -> subprocess.Popen[str]:
    """Start the tool in a process group, which gets SIGINT as from Ctrl-C in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "cdk", *arguments],
        cwd=ROOT,
        env=surroundings(home, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["deploy"], {}, "no AWS credentials. Set AWS_PROFILE"),
        (["deploy"], {"AWS_PROFILE": "nobody"}, "(nobody) could not be found"),
        (["deploy"], {**ACCOUNT, "AWS_REGION": ""}, "no AWS region. Set AWS_REGION"),
        (["deploy"], {**ACCOUNT, "AWS_REGION": "mars-1"}, "'mars-1' is no AWS region"),
        (["synth", "--stage", "My Stage"], {}, "stage: 'My Stage' is no valid stage name"),
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
    done = run_here(*arguments, HOME=str(tmp_path), **environment)
    assert done.returncode == 2
    assert done.stderr.startswith("baton: ") and said in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("region", ["cn-north-1", "us-gov-west-1"])
def test_regions_of_other_partitions_are_regions(region: str, tmp_path: Path) -> None:
    nowhere = {**ACCOUNT, "AWS_REGION": region, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    assert "AWS cannot be reached: Could not connect" in run_here("diff", HOME=str(tmp_path), **nowhere).stderr


def test_a_login_that_is_over_is_not_called_an_outage(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile me]\nregion = us-east-1\nsso_session = ours\nsso_account_id = 123456789012\nsso_role_name = deploy\n"
        "[sso-session ours]\nsso_start_url = https://ours.example/start\nsso_region = us-east-1\n"
    )
    done = run_here("deploy", HOME=str(tmp_path), AWS_PROFILE="me", AWS_CONFIG_FILE=str(config))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("baton: the AWS settings are unusable: ") and "SSO" in done.stderr


@pytest.mark.processes
def test_ctrl_c_before_anything_has_begun_ends_in_one_line(tmp_path: Path) -> None:
    """The tool waits for an AWS endpoint that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with start("deploy", home=tmp_path, **ACCOUNT, AWS_ENDPOINT_URL=url) as process:
            silent.settimeout(60)
            connection, _ = silent.accept()
            os.killpg(process.pid, signal.SIGINT)
            said, complained = process.communicate(timeout=240)
            connection.close()
    assert (process.returncode, said, complained) == (130, "", "baton: interrupted before anything was changed.\n")


@pytest.mark.processes
@pytest.mark.usefixtures("cdk_command_line")
def test_ctrl_c_while_the_cdk_command_line_runs_says_how_to_go_on() -> None:
    """The repetition makes the stack, without an account and without findings.

    cdk-nag stops the synthesis at any finding that is not acknowledged.
    """
    out = ROOT / ".cdk" / "out" / "stopped"
    shutil.rmtree(out, ignore_errors=True)
    with start("synth", "--stage", "stopped", home=Path.home()) as process:
        # In its midst: an interpreter that is interrupted while it starts cannot keep its traceback to itself.
        assert process.stderr is not None
        while "Bundling" not in process.stderr.readline():
            assert process.poll() is None, "it ended before it began"
        os.killpg(process.pid, signal.SIGINT)
        _, complained = process.communicate(timeout=240)
    assert process.returncode == 130, complained
    assert complained.splitlines()[-1] == (
        "baton: interrupted. AWS completes the operation in progress;"
        " repeat `python -m cdk synth --stage stopped` to continue."
    )
    assert "Traceback" not in complained
    again = tool("synth", "--stage", "stopped", home=Path.home())
    assert again.returncode == 0, again.stdout + again.stderr
    made = json.loads((out / "baton-stopped.template.json").read_text())
    runtimes = {
        resource["Properties"]["Runtime"]
        for resource in made["Resources"].values()
        if resource["Type"] == "AWS::Lambda::Function"
    }
    assert runtimes == {f"python{PYTHON_VERSION}"}
    report = json.loads((out / "validation-report.json").read_text())
    assert [plugin["conclusion"] for plugin in report["pluginReports"]] == ["success"], report


def test_a_command_line_that_was_installed_by_half_is_installed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / ".cdk"
    program = tools / "node_modules" / "aws-cdk" / "bin" / "cdk"
    monkeypatch.setattr(command_line, "TOOLS", tools)
    monkeypatch.setattr(command_line, "CLI", program)
    tries: list[str] = []

    def npm(line: list[str], **_more: object) -> subprocess.CompletedProcess[str]:
        tries.append(line[2])
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("")
        if len(tries) == 1:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(line, 0, "", "")

    monkeypatch.setattr(subprocess, "run", npm)
    with pytest.raises(KeyboardInterrupt):
        command_line.install()
    command_line.install()
    command_line.install()
    assert tries == ["ci", "ci"], "the second one finished what the first one had begun; the third had nothing to do"


def test_two_commands_at_once_install_the_command_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`npm ci` first removes the installed files, which the first command may be running."""
    tools = tmp_path / ".cdk"
    program = tools / "node_modules" / "aws-cdk" / "bin" / "cdk"
    monkeypatch.setattr(command_line, "TOOLS", tools)
    monkeypatch.setattr(command_line, "CLI", program)
    tries: list[str] = []
    second = threading.Thread(target=command_line.install)
    second_is_here = threading.Event()
    flock = fcntl.flock

    def watched_flock(file: IO[str], operation: int) -> None:
        if threading.current_thread() is second:
            second_is_here.set()
        flock(file, operation)

    def npm(line: list[str], **_more: object) -> subprocess.CompletedProcess[str]:
        tries.append(line[2])
        if threading.current_thread() is not second:
            second.start()
            assert second_is_here.wait(60), "it does not ask whether it is alone"
            program.parent.mkdir(parents=True)
            program.write_text("")
        return subprocess.CompletedProcess(line, 0, "", "")

    monkeypatch.setattr(fcntl, "flock", watched_flock)
    monkeypatch.setattr(subprocess, "run", npm)
    command_line.install()
    second.join(60)
    assert not second.is_alive()
    assert tries == ["ci"]


def test_deploy_refuses_fewer_partitions_than_jobs_have_been_spread_over(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = unique("s")[:15]
    tables = emulator.client("dynamodb")
    tables.create_table(**JOBS.definition(StageSettings(name=stage).prefix))
    arn = tables.describe_table(TableName=JOBS.name(StageSettings(name=stage).prefix))["Table"]["TableArn"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulator.endpoint_url)
    require_no_fewer_shards(StageSettings(name=stage))
    require_no_fewer_shards(StageSettings(name=stage, ready_shards=64))
    tables.tag_resource(ResourceArn=arn, Tags=[{"Key": READY_SHARDS_TAG, "Value": "4"}])
    for enough in (4, 5):
        require_no_fewer_shards(StageSettings(name=stage, ready_shards=enough))
    for fewer in (1, 3):
        with pytest.raises(ToolError, match=r"jobs in 4 partitions; .* Use -c ready_shards=4 or more\."):
            require_no_fewer_shards(StageSettings(name=stage, ready_shards=fewer))
    tables.tag_resource(ResourceArn=arn, Tags=[{"Key": READY_SHARDS_TAG, "Value": "many"}])
    with pytest.raises(ToolError, match=r"is 'many'\. Set the number"):
        require_no_fewer_shards(StageSettings(name=stage))
    require_no_fewer_shards(StageSettings(name="nowhere"))


@pytest.mark.processes
def test_an_unknown_command_or_account_is_refused_by_the_process(tmp_path: Path) -> None:
    done = tool("explode", home=tmp_path)
    assert done.returncode == 2 and "invalid choice: 'explode'" in done.stderr
    done = tool("deploy", home=tmp_path)
    said = "baton: no AWS credentials. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("name", ["", "-a", "1a", "a" * 17, "A", "a_b", "a\n"])
def test_a_stage_has_a_name_that_fits_into_all_others(name: str) -> None:
    with pytest.raises(StageSettingsError, match="is no valid stage name"):
        StageSettings(name=name)


def test_settings_come_from_the_context_as_what_they_are() -> None:
    stage = StageSettings.from_context(
        {"stage": "prod", "disposable": "true", "max_requests_per_s": "50", "alarm_email": None}
    )
    assert stage == StageSettings(name="prod", disposable=True, max_requests_per_s=50)
    assert stage.prefix == "baton-prod-"
    own_store = {"s3_endpoint": "https://s", "s3_secret": "s", "data_bucket": "one", "checkpoints_bucket": "two"}
    for wrong in (
        {"disposable": "yes"},
        {"max_requests_per_s": "many"},
        {"max_requests_per_s": "0"},
        {"ready_shards": "0"},
        {"ready_shards": "65"},
        {"original_progress_s": "59"},
        {"ring_sample_days": "3651"},
        {"fleet_budget": "500"},
        {"fleet_budget": '{"per_week_usd": 5}'},
        {"ring_sample_days": "30", **own_store},
    ):
        with pytest.raises(StageSettingsError, match=next(iter(wrong))):
            StageSettings.from_context(wrong)


@pytest.mark.usefixtures("cdk_command_line")
def test_what_cannot_be_bundled_is_said_in_one_line(tmp_path: Path) -> None:
    offline = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    done = tool("synth", "--stage", "offline", home=Path.home(), **offline)
    assert done.returncode == 1
    bundling, why, _program, what_next = done.stderr.splitlines()
    assert bundling == "Bundling asset baton-offline/Functions/Authorizer/Code/Stage..."
    assert why.startswith("baton: uv could not install the functions' dependencies: ") and "network" in why
    assert what_next == (
        "baton: synth of stage 'offline' failed for the reason above. After the repair,"
        " repeat `python -m cdk synth --stage offline` to continue."
    )


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["admin-key", "--tenant", "A b"], "tenant: 'A b' is no valid tenant name"),
        (["admin-key", "--stage", "nope"], "stage 'nope' is not deployed in this account and region."),
        (["destroy", "--force", "--stage", "nope"], "stage 'nope' is not deployed in this account and region."),
    ],
)
def test_nothing_is_done_for_a_tenant_or_a_stage_that_there_is_not(
    emulator: Emulator, arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = run_here(*arguments, HOME=str(tmp_path), **ACCOUNT, AWS_ENDPOINT_URL=emulator.endpoint_url)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1

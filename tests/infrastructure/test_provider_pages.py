"""Test the provider pages: every block parses and names existing settings and options."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.providers import ACCOUNTS
from baton.contract.jobs.policy import Policy
from gpu_client.agent.app.settings import AgentSettings, variable_name
from gpu_client.agent.app.shutdown import LEAVE_MIN_S
from tests.infrastructure.test_image import entrypoint, health_check, of

PAGES = Path(__file__).parents[2] / "docs" / "providers"
ALL = sorted(PAGES.glob("*.md"))
IMAGE = "registry.example/baton-agent:0.1.0"
FULL_STOP_S = Policy().stop_grace_s + max(Policy().stop_grace_s, LEAVE_MIN_S)
"""Seconds that an agent may take to save everything and end."""


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / page).read_text(), re.M | re.S)


def variables_of(text: str) -> dict[str, str]:
    """Parse the variables of an environment file."""
    return dict(line.split("=", 1) for line in text.splitlines())


def settings_of(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> AgentSettings:
    """Build the agent's settings from the variables of a container alone; raise for an invalid one."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return AgentSettings()


def test_each_page_is_listed_and_has_only_kinds_of_blocks_that_are_looked_at() -> None:
    listed = set(re.findall(r"^\| \[(\S+)\]", (PAGES / "README.md").read_text(), re.M))
    assert listed == {page.name for page in ALL} - {"README.md"}
    kinds = {kind for page in ALL for kind in re.findall(r"^```(\w*)\n", page.read_text(), re.M)} - {""}
    # `text` is what a command prints.
    assert kinds == {"sh", "dockerfile", "env", "json", "yaml", "ini", "text"}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_fleet_and_every_account_is_valid(page: Path) -> None:
    for text in re.findall(r"^cat > \w+\.yaml <<'EOF'\n(.*?)^EOF$", page.read_text(), re.M | re.S):
        FleetSpec.model_validate(yaml.safe_load(text))
    for _, text in re.findall(r"^( *)```yaml\n(.*?)^\1```$", page.read_text(), re.M | re.S):
        for provider, account in yaml.safe_load(text).items():
            if provider in ACCOUNTS:
                ACCOUNTS[provider].model_validate(account)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_variable_exists(page: Path) -> None:
    known = {variable_name(field) for field in AgentSettings.model_fields} | {"SALAD_MACHINE_ID"}
    assert set(re.findall(r"\b(?:BATON|SALAD)_[A-Z_]+\b", page.read_text())) <= known


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        place = page.parent / path if path else page
        assert place.exists(), target
        titles = re.findall(r"^#+ (.+)$", place.read_text(), re.M) if heading else [""]
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_command_can_be_read_by_a_shell(page: Path) -> None:
    for script in blocks(page.name, "sh"):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def commands(page: str, program: str) -> list[list[str]]:
    """Return the words of every call of a program in the shell blocks of a page."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line)) and words[0] == program]


def test_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    (build, push, run) = commands("docker.md", "docker")
    assert build == ["docker", "build", "--file", "gpu_client/Dockerfile", "--tag", IMAGE, "."]
    assert push[-1] == run[-1] == IMAGE
    assert int(run[run.index("--stop-timeout") + 1]) >= FULL_STOP_S
    assert "BATON_API_KEY" not in " ".join(run), "the key is not for the command line"
    (text,) = blocks("docker.md", "env")
    assert settings_of(variables_of(text), monkeypatch).provider == "docker"
    (derived,) = blocks("docker.md", "dockerfile")
    lines = derived.splitlines()
    assert lines[0] == f"FROM {IMAGE}" and lines[-1] == f"USER {of('USER')[0]}", "not root in the end"
    assert ["constraints.txt", "gpu_client/cuda.txt", "/opt/baton/"] in [text.split() for text in of("COPY")]
    assert "--constraint /opt/baton/constraints.txt --constraint /opt/baton/cuda.txt" in derived


def test_salad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check against SaladCloud's OpenAPI description of a container group (June 2026)."""
    (text,) = blocks("salad.md", "json")
    group = json.loads(text)
    assert {"name", "container", "autostart_policy", "restart_policy", "replicas"} <= set(group)
    assert set(group) <= {"name", "display_name", "container", "autostart_policy", "restart_policy", "replicas",
                          "liveness_probe", "country_codes"}  # fmt: skip
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", group["name"])
    assert group["restart_policy"] == "always" and 0 <= group["replicas"] <= 500
    container = group["container"]
    assert set(container) == {"image", "priority", "resources", "environment_variables"} and container["image"] == IMAGE
    assert container["priority"] in ("high", "medium", "low", "batch")
    resources = container["resources"]
    assert set(resources) == {"cpu", "memory", "storage_amount", "gpu_classes"}
    assert resources["memory"] >= 1024 and resources["storage_amount"] >= 2**30
    assert settings_of(container["environment_variables"], monkeypatch).poll_max_s == 60
    probe = group["liveness_probe"]
    assert probe["exec"]["command"] == health_check()
    assert set(probe) - {"exec"} == {"initial_delay_seconds", "period_seconds", "timeout_seconds",
                                     "success_threshold", "failure_threshold"}  # fmt: skip
    for call in commands("salad.md", "curl"):
        assert "--header" in call and "@salad.headers" in call
        assert not [word for word in call if word.lower().startswith("salad-api-key")]
        assert f"/containers/{group['name']}" in " ".join(call) or "@group.json" in call
        if "@group.json" not in call:
            assert json.loads(call[call.index("--data") + 1]) == {"replicas": 0}


def test_vast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check against the options in Vast.ai's documentation of its command line."""
    options = {
        ("create", "template"): {"--name", "--image", "--image_tag", "--disk_space", "--env"},
        ("search", "offers"): {"--type", "--order"},
        ("create", "instance"): {"--template_hash", "--disk", "--bid_price"},
    }
    found = {tuple(call[1:3]): call for call in commands("vast.md", "vastai")}
    assert options.keys() <= found.keys()
    for command, known in options.items():
        assert {word for word in found[command] if word.startswith("--")} <= known, command
    template = found["create", "template"]
    name, tag = (template[template.index(option) + 1] for option in ("--image", "--image_tag"))
    assert f"{name}:{tag}" == IMAGE
    words = shlex.split(template[template.index("--env") + 1])
    assert words[::2] == ["-e"] * (len(words) // 2)
    assert settings_of(dict(word.split("=", 1) for word in words[1::2]), monkeypatch).exit_when_idle_s == 1800


def test_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("kubernetes.md", "yaml")
    job: dict[str, Any] = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "or podFailurePolicy is refused"
    assert pod["terminationGracePeriodSeconds"] >= FULL_STOP_S
    user, _, group = of("USER")[0].partition(":")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (int(user), int(group))
    (container,) = pod["containers"]
    assert container["image"] == IMAGE and "command" not in container
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["livenessProbe"]["exec"]["command"] == health_check()
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]} and mounted["workspace"] == "/workspace"
    plain = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert all(isinstance(value, str) for value in plain.values()), "Kubernetes takes texts only"
    (secret,) = [item["valueFrom"]["secretKeyRef"] for item in container["env"] if item["name"] == "BATON_API_KEY"]
    creates = commands("kubernetes.md", "kubectl")[0]
    assert creates[-2] == secret["name"] and creates[-1].startswith(f"--from-file={secret['key']}=")
    assert settings_of({**plain, "BATON_API_KEY": "baton_0123_secret"}, monkeypatch).exit_when_idle_s == 600
    fails = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert fails[0]["onExitCodes"]["values"] == [2] and fails[0]["onExitCodes"]["containerName"] == container["name"]


def test_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("systemd.md", "ini")
    # Not strict: systemd takes an option several times.
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    service = unit["Service"]
    assert service["ExecStart"] == " ".join(entrypoint())
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", of("STOPSIGNAL")[0])
    assert int(service["TimeoutStopSec"]) >= FULL_STOP_S
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert service["User"] != "root" and service["NoNewPrivileges"] == "true"
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    (variables,) = blocks("systemd.md", "env")
    more = variables_of("\n".join(re.findall(r"^Environment=(.+)$", text, re.M)))
    settings = settings_of({**variables_of(variables), **more}, monkeypatch)
    assert str(settings.health_file).startswith(f"/run/{service['RuntimeDirectory']}/")
    installs = "\n".join(blocks("systemd.md", "sh"))
    assert (
        "--constraint constraints.txt '.[client]'" in installs and "-m 0600 /dev/null /etc/baton/agent.env" in installs
    )
    assert service["EnvironmentFile"] == "/etc/baton/agent.env"

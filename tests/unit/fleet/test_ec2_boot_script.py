"""The boot script of an EC2 machine, run by bash with a docker and a shutdown that write down their calls."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from functions.fleet.drivers.ec2.launch import boot_script
from tests.conformance.drivers.driver_kit import IMAGE

ENVIRONMENT = {"BATON_API_URL": "https://api.example/v1?a=b&c", "BATON_ENROLMENT_TOKEN": 'it\'s $HOME `id` "x"'}
DOCKER = """#!/bin/bash
echo "docker $*" >> calls
[ "$1" != run ] || printf '%s\\n' "$BATON_API_URL" "$BATON_ENROLMENT_TOKEN" > environment
[ "$1" != "$FAILS" ]
"""


@pytest.mark.parametrize("fails", ["", "pull", "run"])
@pytest.mark.parametrize("gpus", [True, False])
def test_the_container_gets_exactly_its_environment_and_its_end_ends_the_machine(
    tmp_path: Path, fails: str, gpus: bool
) -> None:
    for name, program in (("docker", DOCKER), ("shutdown", '#!/bin/bash\necho "shutdown $*" >> calls\n')):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o700)
    script = boot_script(IMAGE, ENVIRONMENT, gpus=gpus)
    for place in ("/var/log/baton.log", "/dev/console"):
        assert place in script
        script = script.replace(place, str(tmp_path / "log"))
    subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "FAILS": fails}, check=False
    )
    run = "docker run --rm --name baton-agent --init "
    run += "--gpus all " if gpus else ""
    run += f"--shm-size 8g --stop-timeout 120 --env BATON_API_URL --env BATON_ENROLMENT_TOKEN {IMAGE}"
    calls = ["docker info", f"docker pull --quiet {IMAGE}", *([] if fails == "pull" else [run])]
    assert (tmp_path / "calls").read_text().splitlines() == [*calls, "shutdown --poweroff now"]
    if fails != "pull":
        assert (tmp_path / "environment").read_text().splitlines() == list(ENVIRONMENT.values())

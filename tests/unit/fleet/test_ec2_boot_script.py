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


CURL = """#!/bin/bash
case "$*" in
  *api/token*) echo secret ;;
  *secret*public-ipv4*) [ -z "$PUBLIC" ] || echo "$PUBLIC"; [ -n "$PUBLIC" ] ;;
  *secret*local-ipv4*) echo 10.0.0.7 ;;
esac
"""


@pytest.mark.parametrize(("public", "addresses"), [("203.0.113.7", "203.0.113.7,10.0.0.7"), ("", "10.0.0.7")])
def test_a_node_publishes_its_port_and_learns_its_addresses(tmp_path: Path, public: str, addresses: str) -> None:
    docker = DOCKER.replace(
        '"$BATON_API_URL" "$BATON_ENROLMENT_TOKEN"', '"$BATON_ELASTIC_PORT $BATON_ELASTIC_ADDRESSES"'
    )
    for name, program in (("docker", docker), ("curl", CURL), ("shutdown", "#!/bin/bash\n")):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o700)
    script = boot_script(IMAGE, ENVIRONMENT, gpus=False, port=47100)
    for place in ("/var/log/baton.log", "/dev/console"):
        script = script.replace(place, str(tmp_path / "log"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FAILS": "", "PUBLIC": public}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=False)
    run = (tmp_path / "calls").read_text().splitlines()[-1]
    assert "--publish 47100:47100 " in run and run.endswith(f"--env BATON_ELASTIC_ADDRESSES {IMAGE}")
    assert (tmp_path / "environment").read_text() == f"47100 {addresses}\n"


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

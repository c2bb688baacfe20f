"""Test the places of the kernel's count of OOM kills."""

from pathlib import Path

import pytest

from gpu_client.agent.process.supervisor import read_oom_kill_count

V2 = "low 0\nhigh 0\nmax 71\noom 3\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("membership", "file", "content", "expected"),
    [
        ("0::/\n", "memory.events", V2, 2),
        ("0::/system.slice/docker-1.scope\n", "system.slice/docker-1.scope/memory.events", V2, 2),
        ("0::/host/path/not/visible\n", "memory.events", V2, 2),
        ("4:memory:/docker/1\n1:cpu:/\n", "memory/docker/1/memory.oom_control", "under_oom 0\noom_kill 5\n", 5),
        ("4:memory:/docker/1\n", "memory/memory.oom_control", "oom_kill 1\n", 1),
        ("0::/\n", "memory.events", "oom 3\n", None),
        ("0::/\n", "other", "", None),
        ("", "memory.events", V2, None),
    ],
)
def test_oom_kill_count(tmp_path: Path, membership: str, file: str, content: str, expected: int | None) -> None:
    (tmp_path / "cgroup").write_text(membership)
    hierarchy = tmp_path / "fs"
    target = hierarchy / file
    target.parent.mkdir(parents=True)
    target.write_text(content)
    assert read_oom_kill_count(tmp_path / "cgroup", hierarchy) == expected


def test_no_cgroups_here(tmp_path: Path) -> None:
    assert read_oom_kill_count(tmp_path / "missing", tmp_path) is None

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.profiles import (
    ConnectionProfile,
    NoProfileError,
    ProfileFile,
    choose_profile,
    load_profiles,
    profile_path,
    save_profiles,
    state_directory,
)

SECRET = "baton_k3f9k3f9_" + "s3cret" * 5
ONE = ConnectionProfile(url="https://one", api_key=SECRET, price_per_hour=0.5)
TWO = ConnectionProfile(url="https://two", api_key="baton_second00_other")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose file has the profiles `one` (current) and `two`."""
    found = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}
    save_profiles(profile_path(found), ProfileFile(current="one", profiles={"one": ONE, "two": TWO}))
    return found


def test_only_the_owner_can_read_what_is_saved(environ: dict[str, str]) -> None:
    path = profile_path(environ)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["profiles.json"]
    assert load_profiles(path).profiles == {"one": ONE, "two": TWO}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_whatever_the_umask(environ: dict[str, str], umask: int) -> None:
    before = os.umask(umask)
    try:
        save_profiles(profile_path(environ), ProfileFile(profiles={"x": ONE}))
    finally:
        os.umask(before)
    assert stat.S_IMODE(profile_path(environ).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610])
def test_a_file_that_others_may_touch_is_refused(environ: dict[str, str], mode: int) -> None:
    path = profile_path(environ)
    path.chmod(mode)
    with pytest.raises(CliError, match=f"mode {mode:04o}.*chmod 600") as caught:
        choose_profile(environ, None)
    assert SECRET not in str(caught.value)
    path.chmod(0o600)
    assert choose_profile(environ, None) == ONE


@pytest.mark.parametrize("damage", ["", "{", '{"profiles": {"one": {"url": 5, "api_key": "' + SECRET + '"}}}', "[1]"])
def test_a_damaged_file_is_one_line_without_its_secrets(environ: dict[str, str], damage: str) -> None:
    path = profile_path(environ)
    path.write_text(damage)
    with pytest.raises(CliError, match=r"is damaged.*baton login") as caught:
        choose_profile(environ, None)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_directory_in_its_place(environ: dict[str, str]) -> None:
    path = profile_path(environ)
    path.unlink()
    path.mkdir()
    with pytest.raises(CliError, match=r"not a regular file|cannot be read"):
        choose_profile(environ, None)


def test_a_failed_save_leaves_the_old_file_alone(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_profiles(profile_path(environ), ProfileFile())
    assert choose_profile(environ, None) == ONE
    assert [file.name for file in profile_path(environ).parent.iterdir()] == ["profiles.json"]


def test_which_profile_counts(environ: dict[str, str]) -> None:
    assert choose_profile(environ, None) == ONE
    assert choose_profile(environ, "two") == TWO
    assert choose_profile({**environ, "BATON_PROFILE": "two"}, None) == TWO
    assert choose_profile({**environ, "BATON_PROFILE": "two"}, "one") == ONE


def test_the_environment_wins_over_the_file(environ: dict[str, str]) -> None:
    both = {**environ, "BATON_API_URL": "https://env", "BATON_API_KEY": "env-key"}
    assert choose_profile(both, None) == ConnectionProfile(url="https://env", api_key="env-key")
    assert choose_profile(both, "two") == TWO, "what is said on the command line wins over both"
    profile_path(environ).chmod(0o644)
    assert choose_profile(both, None).url == "https://env", "a file that is not used does not matter"


def test_half_of_the_environment(environ: dict[str, str]) -> None:
    assert choose_profile({**environ, "BATON_API_KEY": "env-key"}, None) == ONE.model_copy(
        update={"api_key": "env-key"}
    )
    assert choose_profile({**environ, "BATON_API_URL": "https://one/"}, None) == ONE
    with pytest.raises(CliError, match=r"without BATON_API_KEY.*https://one"):
        choose_profile({**environ, "BATON_API_URL": "https://elsewhere"}, None)


@pytest.mark.parametrize(("is_set", "lacks"), [("BATON_API_URL", "BATON_API_KEY"), ("BATON_API_KEY", "BATON_API_URL")])
def test_half_of_the_environment_without_a_profile(tmp_path: Path, is_set: str, lacks: str) -> None:
    with pytest.raises(NoProfileError, match=f"{is_set} is set without {lacks}, and there is no profile 'default'"):
        choose_profile({"XDG_CONFIG_HOME": str(tmp_path), is_set: "https://env"}, None)


def test_no_such_profile(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"no profile 'three'.*existing profiles: one, two.*baton login"):
        choose_profile(environ, "three")
    with pytest.raises(CliError, match="there are no profiles yet"):
        choose_profile({"XDG_CONFIG_HOME": str(tmp_path / "nothing")}, None)


def test_keys_are_in_no_repr() -> None:
    assert SECRET not in repr(ONE) + repr(ProfileFile(profiles={"one": ONE}))


def test_relative_xdg_paths_are_ignored() -> None:
    environ = {"HOME": "/home/me", "XDG_CONFIG_HOME": "config", "XDG_STATE_HOME": "state"}
    assert profile_path(environ) == Path("/home/me/.config/baton/profiles.json")
    assert state_directory(environ) == Path("/home/me/.local/state/baton")

"""Test the training command's environment: its own variables, Baton's without secrets, no shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from baton.contract.names import ring_token
from gpu_client.agent.process.environment import build_environment, expand_command
from gpu_client.agent.workspace.slots import JobDirectories
from tests.unit.agent.agent_kit import JOB_ID, make_item

ROOT = Path("/w/jobs/x.3")
DIRECTORIES = JobDirectories(ROOT, ROOT / "data", ROOT / "output", ROOT / "staging", ROOT / "params.json")
BASE = {
    "PATH": "/usr/bin",
    "HOME": "/root",
    "CUDA_VISIBLE_DEVICES": "0",
    "BATON_API_KEY": "baton_id_secret",
    "BATON_API_URL": "https://api.example",
    "BATON_QUEUE": "default",
}


def environment(resume_from: str = "", **given: str) -> dict[str, str]:
    item = make_item(environment=given)
    return build_environment(item, DIRECTORIES, "/tmp/baton-1/channel", resume_from, BASE)


def test_nothing_of_the_agent_s_settings_is_handed_on() -> None:
    found = environment("/w/jobs/x.3/output/checkpoint-5")
    assert {name: value for name, value in found.items() if name.startswith("BATON_")} == {
        "BATON_JOB_ID": JOB_ID,
        "BATON_EPOCH": "3",
        "BATON_RECIPE": "",
        "BATON_DATA_DIR": "/w/jobs/x.3/data",
        "BATON_OUTPUT_DIR": "/w/jobs/x.3/output",
        "BATON_RESUME_FROM": "/w/jobs/x.3/output/checkpoint-5",
        "BATON_PARAMS": "/w/jobs/x.3/params.json",
        "BATON_CONTROL": "/w/jobs/x.3/control.json",
        "BATON_CHANNEL": "/tmp/baton-1/channel",
        "BATON_ARENA": "",
    }
    assert "baton_id_secret" not in str(found)
    assert (found["HOME"], found["CUDA_VISIBLE_DEVICES"]) == ("/root", "0")


def test_the_provider_s_key_to_the_machine_stays_with_the_agent() -> None:
    rented = {"CONTAINER_ID": "42", "RUNPOD_POD_ID": "p1", "CONTAINER_API_KEY": "key-1", "RUNPOD_API_KEY": "key-2"}
    item = make_item(environment={})
    found = build_environment(item, DIRECTORIES, "", "", rented)
    assert (found["CONTAINER_ID"], found["RUNPOD_POD_ID"]) == ("42", "p1") and "key-" not in str(found)
    own = build_environment(make_item(environment={"RUNPOD_API_KEY": "mine"}), DIRECTORIES, "", "", rented)
    assert own["RUNPOD_API_KEY"] == "mine"


def test_a_job_that_names_rings_is_given_what_opens_them_and_not_the_lease() -> None:
    item = make_item(rings=["shapes"], environment={"BATON_RING_TOKEN": "the user's"})
    found = build_environment(item, DIRECTORIES, "", "", BASE, api_url="https://api.example")
    assert found["BATON_API_URL"] == "https://api.example"
    assert found["BATON_RING_TOKEN"] == ring_token(item.id, item.lease_token)
    assert item.lease_token not in str(found) and "baton_id_secret" not in str(found)


def test_the_recipe_is_told_by_name_and_version() -> None:
    item = make_item(recipe="digits@1", environment={"BATON_RECIPE": "mine@2"})
    found = build_environment(item, DIRECTORIES, "/tmp/baton-1/channel", "", BASE)
    assert found["BATON_RECIPE"] == "digits@1"
    assert expand_command(["--name=${BATON_RECIPE}"], found) == ["--name=digits@1"]


def test_a_fresh_start_resumes_from_nothing() -> None:
    assert environment()["BATON_RESUME_FROM"] == ""


def test_a_run_keeps_its_name_in_weights_and_biases_and_prints_at_once() -> None:
    found = environment()
    assert (found["WANDB_RUN_ID"], found["WANDB_RESUME"], found["PYTHONUNBUFFERED"]) == (JOB_ID, "allow", "1")


def test_the_job_s_variables_win_except_over_what_is_ours() -> None:
    found = environment(HOME="/home/user", WANDB_RUN_ID="mine", BATON_EPOCH="99", BATON_API_KEY="x", PATH="/opt/bin")
    assert (found["HOME"], found["WANDB_RUN_ID"], found["PATH"]) == ("/home/user", "mine", "/opt/bin")
    assert found["BATON_EPOCH"] == "3"


def test_python_in_a_command_is_the_one_that_has_our_packages() -> None:
    assert environment()["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]


def test_our_variables_are_replaced_in_arguments_and_nothing_else_is() -> None:
    found = environment()
    command = ["train", "--out=$BATON_OUTPUT_DIR/x", "${BATON_EPOCH}", "$HOME", "$BATON_NO_SUCH", "a photo of 'sks' $5"]
    assert expand_command(command, found) == [
        "train",
        "--out=/w/jobs/x.3/output/x",
        "3",
        "$HOME",
        "$BATON_NO_SUCH",
        "a photo of 'sks' $5",
    ]


def test_the_key_cannot_be_had_through_an_argument() -> None:
    assert expand_command(["$BATON_API_KEY", "${BATON_API_KEY}"], environment()) == [
        "$BATON_API_KEY",
        "${BATON_API_KEY}",
    ]


RESUME = "${BATON_RESUME_FROM:+--resume_from_checkpoint=$BATON_RESUME_FROM}"


def test_an_option_that_needs_a_checkpoint_is_left_out_where_there_is_none() -> None:
    """Scripts of Hugging Face refuse an empty `--resume_from_checkpoint`: every fresh run failed."""
    command = ["python", "train.py", RESUME, "", "${BATON_EPOCH:+--name=run-${BATON_EPOCH}}", "$BATON_RESUME_FROM"]
    assert expand_command(command, environment()) == ["python", "train.py", "", "--name=run-3", ""]
    assert expand_command(command, environment("/o/checkpoint-5")) == [
        "python",
        "train.py",
        "--resume_from_checkpoint=/o/checkpoint-5",
        "",
        "--name=run-3",
        "/o/checkpoint-5",
    ]


@pytest.mark.parametrize(
    ("argument", "fresh", "resumed"),
    [
        ("${BATON_RESUME_FROM:+--resume}", [], ["--resume"]),
        ("${BATON_RESUME_FROM:+}", [], []),
        ("--mode=${BATON_RESUME_FROM:+old}", ["--mode="], ["--mode=old"]),
        ("exec x ${BATON_RESUME_FROM:+-r $BATON_RESUME_FROM} y", ["exec x  y"], ["exec x -r /c y"]),
        ("${BATON_NO_SUCH:+--a}", ["${BATON_NO_SUCH:+--a}"], ["${BATON_NO_SUCH:+--a}"]),
        ("${BATON_API_KEY:+--a=$BATON_API_KEY}", ["${BATON_API_KEY:+--a=$BATON_API_KEY}"], None),
        ("${BATON_RESUME_FROM:-none}", ["${BATON_RESUME_FROM:-none}"], None),
        ("${HOME:+x}", ["${HOME:+x}"], None),
    ],
)
def test_what_stands_where_a_variable_is_set(argument: str, fresh: list[str], resumed: list[str] | None) -> None:
    assert expand_command([argument], environment()) == fresh
    assert expand_command([argument], environment("/c")) == (fresh if resumed is None else resumed)


def test_a_value_is_not_looked_at_for_variables() -> None:
    found = {**environment(), "BATON_RESUME_FROM": "${BATON_EPOCH:+$BATON_EPOCH}"}
    assert expand_command(["$BATON_RESUME_FROM"], found) == ["${BATON_EPOCH:+$BATON_EPOCH}"]


def test_a_step_s_variable_may_be_empty() -> None:
    found = build_environment(
        make_item(), DIRECTORIES, "", "", BASE, step_variables={"ARGS": RESUME, "N": "$BATON_EPOCH"}
    )
    assert (found["ARGS"], found["N"]) == ("", "3")

"""Test the requirements of jobs against workers, and the order in which jobs are handed out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from functions.domain.jobs.job_selection import leading_equals, mismatch
from tests.kits.api.factories import NOW, make_job, make_spec, make_worker


def job_that_needs(**requirements: Any) -> Any:
    return make_job(spec=make_spec(requirements=requirements))


@pytest.mark.parametrize(
    ("needs", "has", "suits"),
    [
        ({}, {}, True),
        ({"min_vram_gib": 24}, {"vram_gib": 24}, True),
        ({"min_vram_gib": 24}, {"vram_gib": 23.9}, False),
        ({"min_vram_gib": 24}, {}, False),
        ({"min_vram_gib": 0}, {}, True),
        ({"min_disk_gib": 80}, {"disk_gib": 100}, True),
        ({"min_disk_gib": 80}, {"disk_gib": 50}, False),
        ({"min_gpus": 2}, {"gpus": 1}, False),
        ({"min_gpus": 2}, {"gpus": 2}, True),
        ({"min_vram_gib": 24, "min_disk_gib": 80}, {"vram_gib": 48, "disk_gib": 10}, False),
        ({"gpu_models": ["RTX 4090"]}, {"gpu_model": "NVIDIA GeForce RTX 4090"}, True),
        ({"gpu_models": ["rtx 4090"]}, {"gpu_model": "NVIDIA GeForce RTX 4090 (24 GB)"}, True),
        ({"gpu_models": ["A100", "H100"]}, {"gpu_model": "NVIDIA H100-SXM5-80GB"}, True),
        ({"gpu_models": ["A100"]}, {"gpu_model": "NVIDIA RTX 3060"}, False),
        ({"gpu_models": ["A100"]}, {}, False),
        # Whole words: these are other machines.
        ({"gpu_models": ["A10"]}, {"gpu_model": "NVIDIA A100"}, False),
        ({"gpu_models": ["L4"]}, {"gpu_model": "NVIDIA L40S"}, False),
        ({"gpu_models": ["T4"]}, {"gpu_model": "NVIDIA GT430"}, False),
        ({"gpu_models": ["A10"]}, {"gpu_model": "A10"}, True),
        ({"gpu_models": ["a.*"]}, {"gpu_model": "a100"}, False),
    ],
)
def test_requirements(needs: dict[str, Any], has: dict[str, Any], suits: bool) -> None:
    assert (mismatch(job_that_needs(**needs), make_worker(**has), NOW) is None) is suits


def test_the_reason_says_what_is_missing() -> None:
    assert mismatch(job_that_needs(min_vram_gib=24), make_worker(vram_gib=8), NOW) == (
        "needs 24 VRAM (GiB), the worker declares 8"
    )
    assert mismatch(job_that_needs(min_disk_gib=1_000_000), make_worker(), NOW) == (
        "needs 1000000 disk (GiB), the worker declares none"
    )


def test_a_machine_is_avoided_until_the_instant_named() -> None:
    job = make_job(avoid={"m-1": NOW + 10})
    assert mismatch(job, make_worker("m-1"), NOW + 9)
    assert mismatch(job, make_worker("m-1"), NOW + 10) is None
    assert mismatch(job, make_worker("m-2"), NOW) is None


def test_workers_without_an_id_do_not_share_a_ban() -> None:
    job = make_job(avoid={"undefined": NOW + 10, "": NOW + 10, "None": NOW + 10})
    assert mismatch(job, make_worker(None), NOW) is None


def test_rank_is_stale_first_then_priority_then_age() -> None:
    ordered = [
        make_job(id="f", stale=True, priority=0, created_at=NOW + 9),
        make_job(id="g", priority=100, created_at=NOW + 9),
        make_job(id="e", priority=51, created_at=NOW + 9),
        make_job(id="d", priority=50, created_at=NOW),
        make_job(id="a", priority=50, created_at=NOW + 1),
        make_job(id="b", priority=50, created_at=NOW + 1),
        make_job(id="c", priority=9, created_at=1),
        make_job(id="h", priority=0, created_at=1),
    ]
    shuffled = random.Random(7).sample(ordered, len(ordered))
    assert [job.id for job in sorted(shuffled, key=lambda job: job.ready_rank)] == [job.id for job in ordered]


def test_equals_are_the_leading_jobs_of_one_rank() -> None:
    jobs = [make_job(id="a", stale=True), make_job(id="b", stale=True, created_at=NOW + 5), make_job(id="c")]
    assert [job.id for job in leading_equals(jobs)] == ["a", "b"]
    assert [job.id for job in leading_equals(jobs[2:])] == ["c"]
    assert leading_equals([]) == []

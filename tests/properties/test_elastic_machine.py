"""Elastic jobs under disturbance: the job and its seats always come to agree."""

from __future__ import annotations

from tests.properties.elastic_machine import ElasticJob
from tests.properties.profiles import machine_settings

TestElasticJob = ElasticJob.TestCase
TestElasticJob.settings = machine_settings(runs=60, steps=15)

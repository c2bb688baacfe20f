"""Defaults of settings that are read where pydantic is not loaded: by the authorizer."""

from __future__ import annotations

TABLE_PREFIX = "baton-"

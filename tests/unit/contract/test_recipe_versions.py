"""A version of a recipe is for ever: jobs name it, and what they are rendered from must not change beneath them."""

from __future__ import annotations

import hashlib
import json

from baton.contract.yaml_documents import read_document
from functions.recipes import built_in_document, built_in_ids

DIGESTS = {
    "command@1": "461e0b2b89d879f58c6c32a1d6e17733",
    "digits@1": "ac115f9a58e8f040335cfa323a448341",
    "dreambooth-lora-sd@1": "1d4375e9c2528bfeef46869ac6fba77a",
    "dreambooth-lora-sd@2": "702520f4b021abbb559dbede9b72a472",
    "dreambooth-lora-sdxl@1": "e53f0d5ea7637105d36884915e5c68ef",
    "dreambooth-lora-sdxl@2": "86df3e8ab642d8324693a1daf6de1b12",
    "generator@1": "91185af2166c4eb90df2c62fc16bc001",
}
"""Digest of the values of each built-in recipe; comments and line breaks may change."""


def digest_of(recipe_id: str) -> str:
    document = built_in_document(recipe_id)
    assert document is not None
    said = json.dumps(read_document(document).value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def test_no_built_in_recipe_changes_under_its_version() -> None:
    found = {recipe_id: digest_of(recipe_id) for recipe_id in built_in_ids()}
    gone = sorted(DIGESTS.keys() - found.keys())
    assert not gone, f"jobs may name {gone}: a version stays"
    changed = sorted(name for name, digest in DIGESTS.items() if found[name] != digest)
    assert not changed, f"{changed}: a changed recipe needs a new version, in a file of its own"
    new = {name: digest for name, digest in found.items() if name not in DIGESTS}
    assert not new, f"add the new version to DIGESTS: {new}"

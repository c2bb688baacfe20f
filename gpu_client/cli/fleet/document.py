"""Read and write fleet documents."""

from __future__ import annotations

from pathlib import Path

import yaml

from baton.contract.document_models import validate_document
from baton.contract.fleets.fleet import FleetSpec
from baton.contract.yaml_documents import MAX_DOCUMENT_BYTES, read_document
from gpu_client.cli.core.documents import raise_faults, read_text

_NAMES = "Use up to 32 lower-case letters, digits and hyphens, a letter first."
_EXAMPLE = "Write fields like 'name: nights', 'providers: [loopback]', 'max_usd_per_hour: 0.5', 'budget: {...}'."


def read_fleet(file: Path) -> FleetSpec:
    """Read a fleet document. Raises CliError with the place of each fault."""
    document = read_document(read_text(file, "a fleet document", MAX_DOCUMENT_BYTES))
    if not isinstance(document.value, dict) and not document.faults:
        document.fault((), "the document is not a fleet", _EXAMPLE)
    spec = None if document.faults else validate_document(document, FleetSpec, kind="fleets", names=_NAMES)
    if spec is None:
        raise_faults(file, sorted(document.faults, key=lambda fault: (fault.line or 0, fault.column or 0)))
    return spec


def dump_fleet(spec: FleetSpec) -> str:
    """Return the YAML document of a fleet, without the fields that have their defaults."""
    values = spec.model_dump(mode="json", exclude_defaults=True)
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text.rstrip()

"""The local stack with its objects in another store: `python -m functions.local` with credentials in Secrets Manager.

`E2E_STORE_SETTINGS` is a JSON object of what the deployed functions would have in their environment; `E2E_STORE_SECRET`
what the secret holds.
"""

import json
import os
import sys
from typing import Any

from functions.local import program
from functions.local.emulator import Emulator
from functions.local.stack import LocalStack
from functions.settings import ControlPlaneSettings


class SecondStoreStack(LocalStack):
    """A local stack whose handlers find the settings of a stage with a second store."""

    def _export(self, settings: ControlPlaneSettings, emulator: Emulator, *more: Any) -> None:
        super()._export(settings, emulator, *more)
        found = json.loads(os.environ["E2E_STORE_SETTINGS"])
        emulator.client("secretsmanager").create_secret(
            Name=found["BATON_S3_SECRET"], SecretString=os.environ.pop("E2E_STORE_SECRET")
        )
        os.environ.update(found)


program.LocalStack = SecondStoreStack  # type: ignore[attr-defined]
sys.exit(program.main())

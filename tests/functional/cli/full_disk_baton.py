"""Run `baton` with a full disk at the directory FULL_DISK: the kernel refuses writes there.

Needs no privileges. New files are created, as on a full disk, but their descriptors are /dev/full, which fails every
write with ENOSPC.
"""

import os
import runpy
import stat
from pathlib import Path
from typing import Any

_DIRECTORY = Path(os.environ["FULL_DISK"])
_open = os.open


def _opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    descriptor = _open(path, flags, *arguments, **options)
    if flags & os.O_CREAT and Path(os.fsdecode(path)).parent == _DIRECTORY:
        full = _open("/dev/full", os.O_WRONLY)
        assert stat.S_ISCHR(os.fstat(full).st_mode)
        os.dup2(full, descriptor, inheritable=False)
        os.close(full)
    return descriptor


setattr(os, "open", _opened)  # noqa: B010 - another type on purpose
runpy.run_module("gpu_client.cli", run_name="__main__", alter_sys=True)

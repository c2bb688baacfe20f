"""The agent on a machine whose disk has a thousand bytes left, for where no small file system can be mounted."""

import collections
import runpy
import shutil

_Usage = collections.namedtuple("_Usage", "total used free")
setattr(shutil, "disk_usage", lambda _path: _Usage(10**9, 10**9 - 1000, 1000))  # noqa: B010 - another type on purpose
runpy.run_module("gpu_client.agent", run_name="__main__", alter_sys=True)

"""Test failure classes on realistic ends of logs."""

import signal

import pytest

from baton.contract.jobs.job import FailureClass
from gpu_client.agent.process.failures import MAX_REASON_CHARS, ExitStatus, classify_exit
from gpu_client.training.protocol import BAD_INPUT_EXIT_CODE, UNAVAILABLE_EXIT_CODE


def exited(code: int | None = 1, number: int | None = None, **more: object) -> ExitStatus:
    fields: dict[str, object] = {"oom_suspected": False, "stopped_by_us": False, **more}
    return ExitStatus(code=code, signal=number, **fields)  # type: ignore[arg-type]


VALUE_ERROR = """\
Traceback (most recent call last):
  File "/app/train.py", line 12, in <module>
    main()
  File "/app/train.py", line 8, in main
    raise ValueError("CUDA out of memory is mentioned here only as source text")
ValueError: learning rate must be positive"""

CUDA_OOM = """\
  0%|          | 0/500 [00:00<?, ?it/s]
Traceback (most recent call last):
  File "/app/train_dreambooth_lora_sdxl.py", line 1340, in main
    accelerator.backward(loss)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of 23.64 GiB of \
which 512.00 MiB is free. Process 4242 has 23.13 GiB memory in use."""

ACCELERATE_WRAPPER = """\
Traceback (most recent call last):
  File "/opt/venv/bin/accelerate", line 8, in <module>
    sys.exit(main())
  File "/opt/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 772, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1."""

ACCELERATE_KILLED = """\
Steps:  12%|#2        | 61/500 [00:41<04:59,  1.47it/s, loss=0.113]
Traceback (most recent call last):
  File "/opt/venv/bin/accelerate", line 8, in <module>
    sys.exit(main())
subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>."""

TORCHRUN_TAIL = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-14_09:12:33
  host      : salad-node
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 912)
  error_file: <N/A>
  traceback : {traceback}
============================================================"""

DEVICE_ASSERT = """\
../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0] \
Assertion `t >= 0 && t < n_classes` failed.
Traceback (most recent call last):
  File "/app/train.py", line 88, in step
    loss.backward()
RuntimeError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""

LAUNCH_FAILURE = """\
Traceback (most recent call last):
  File "/app/train.py", line 88, in step
    loss.backward()
RuntimeError: CUDA error: unspecified launch failure
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""

ABORT_AFTER_ECC = """\
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: uncorrectable ECC error encountered
Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f2a in /opt/venv/lib/libc10.so)"""

NCCL_SYSTEM = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 31, in <module>
[rank1]:     dist.barrier()
[rank1]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, \
unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
[rank1]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
[rank1]: Last error:
[rank1]: socketStartConnect: Connect to 10.0.0.2<43211> failed : Software caused connection abort"""

RANK0_OOM = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/app/train.py", line 77, in <module>
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB."""

RANK0_KEY_ERROR = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/app/train.py", line 77, in <module>
[rank0]: KeyError: 'pixel_values'"""

DATALOADER_SHM = """\
ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1251, in _try_get_data
    data = self._data_queue.get(timeout=timeout)
RuntimeError: DataLoader worker (pid 311) is killed by signal: Bus error. It is possible that dataloader's workers are \
out of shared memory. Please try to raise your shared memory limit.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/app/train.py", line 40, in <module>
    for batch in loader:
RuntimeError: DataLoader worker (pid(s) 311) exited unexpectedly"""

CHAINED = """\
Traceback (most recent call last):
  File "/app/train.py", line 51, in save
    torch.save(state, path)
OSError: [Errno 28] No space left on device

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/train.py", line 53, in save
    cleanup(path)
FileNotFoundError: [Errno 2] No such file or directory: '/output/tmp'"""

CAUGHT_OOM = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
batch size 8 does not fit, trying 4
Traceback (most recent call last):
  File "/app/train.py", line 90, in <module>
ZeroDivisionError: division by zero"""

TORCH_SAVE_FULL = """\
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/serialization.py", line 850, in save
    _save(obj, opened_zipfile, pickle_module, pickle_protocol)
RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 5696 vs 5590"""

C = FailureClass

CASES: list[tuple[str, ExitStatus, str, FailureClass]] = [
    ("value error", exited(), VALUE_ERROR, C.SCRIPT_ERROR),
    ("only an exit code", exited(3), "bad flags, see --help", C.SCRIPT_ERROR),
    ("nothing printed", exited(1), "", C.SCRIPT_ERROR),
    ("unusual exit code is not a signal", exited(200), "", C.SCRIPT_ERROR),
    ("CUDA out of memory", exited(), CUDA_OOM, C.OUT_OF_MEMORY),
    ("the same below a launcher", exited(), CUDA_OOM + "\n" + ACCELERATE_WRAPPER, C.OUT_OF_MEMORY),
    ("script error below a launcher", exited(), VALUE_ERROR + "\n" + ACCELERATE_WRAPPER, C.SCRIPT_ERROR),
    ("MemoryError", exited(), "Traceback (most recent call last):\nMemoryError", C.OUT_OF_MEMORY),
    ("numpy", exited(), "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB", C.OUT_OF_MEMORY),
    (
        "host allocator",
        exited(),
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
        C.OUT_OF_MEMORY,
    ),
    ("killed", exited(None, signal.SIGKILL, oom_suspected=True), "step 9", C.OUT_OF_MEMORY),
    ("killed below a shell", exited(137), "Killed", C.OUT_OF_MEMORY),
    ("killed below accelerate", exited(), ACCELERATE_KILLED, C.OUT_OF_MEMORY),
    (
        "killed below torchrun",
        exited(),
        TORCHRUN_TAIL.format(code=-9, traceback="Signal 9 (SIGKILL) received by PID 912"),
        C.OUT_OF_MEMORY,
    ),
    ("the kernel counted a kill", exited(1, oom_suspected=True), "worker lost", C.OUT_OF_MEMORY),
    ("dataloader without shared memory", exited(), DATALOADER_SHM, C.OUT_OF_MEMORY),
    ("out of memory on one rank, the other sees NCCL fail", exited(), RANK0_OOM + "\n" + NCCL_SYSTEM, C.OUT_OF_MEMORY),
    ("an out of memory that was dealt with", exited(), CAUGHT_OOM, C.SCRIPT_ERROR),
    ("segfault", exited(None, signal.SIGSEGV), "step 3", C.SEGFAULT),
    ("bus error", exited(None, signal.SIGBUS), "step 3", C.SEGFAULT),
    ("segfault below a shell", exited(139), "train.sh: line 3: 77 Segmentation fault (core dumped)", C.SEGFAULT),
    (
        "segfault below torchrun",
        exited(),
        TORCHRUN_TAIL.format(code=-11, traceback="Signal 11 (SIGSEGV) received"),
        C.SEGFAULT,
    ),
    ("terminated by somebody", exited(None, signal.SIGTERM), "step 3", C.KILLED_BY_SIGNAL),
    ("abort", exited(None, signal.SIGABRT), "double free or corruption (!prev)", C.KILLED_BY_SIGNAL),
    ("killed by us", exited(None, signal.SIGKILL, stopped_by_us=True), "step 3", C.KILLED_BY_SIGNAL),
    ("shell is killed by us", exited(137, stopped_by_us=True), "step 3", C.KILLED_BY_SIGNAL),
    ("disk full", exited(), "OSError: [Errno 28] No space left on device: '/output/checkpoint-10/x'", C.DISK_FULL),
    ("disk full in a tool", exited(), "cp: error writing '/output/a': No space left on device", C.DISK_FULL),
    ("disk full, then the clean-up fails", exited(), CHAINED, C.DISK_FULL),
    ("disk full in torch.save", exited(), TORCH_SAVE_FULL, C.DISK_FULL),
    ("quota", exited(), "OSError: [Errno 122] Disk quota exceeded", C.DISK_FULL),
    ("device-side assert", exited(), DEVICE_ASSERT, C.SCRIPT_ERROR),
    ("launch failure", exited(), LAUNCH_FAILURE, C.NODE_FAULT),
    ("no device", exited(), "RuntimeError: CUDA error: no CUDA-capable device is detected", C.NODE_FAULT),
    ("ECC, aborted", exited(None, signal.SIGABRT), ABORT_AFTER_ECC, C.NODE_FAULT),
    ("XID", exited(), "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, GPU has fallen off the bus.", C.NODE_FAULT),
    ("NVML", exited(), "Failed to initialize NVML: Driver/library version mismatch", C.NODE_FAULT),
    ("no GPU", exited(), "RuntimeError: No CUDA GPUs are available", C.NODE_FAULT),
    ("NCCL", exited(), NCCL_SYSTEM, C.NODE_FAULT),
    ("NCCL because the other rank has a bug", exited(), NCCL_SYSTEM + "\n" + RANK0_KEY_ERROR, C.SCRIPT_ERROR),
    ("cannot start", exited(127, start_error="No such file or directory"), "", C.COMMAND_NOT_FOUND),
    ("shell finds nothing", exited(127), "sh: 1: accelerate: not found", C.COMMAND_NOT_FOUND),
    ("not executable", exited(126), "sh: 1: ./train.sh: Permission denied", C.COMMAND_NOT_FOUND),
    ("the job's own fault, says the script", exited(65), "error: class_prompt: is needed", C.BAD_INPUT),
    ("the same after a traceback", exited(65), VALUE_ERROR, C.BAD_INPUT),
    ("the same where the disk was full", exited(65), "error: No space left on device", C.DISK_FULL),
    ("driver hangs", exited(None, signal.SIGKILL, stopped_by_us=True, unkillable_pids=(7,)), "", C.NODE_FAULT),
]


@pytest.mark.parametrize(
    ("exit_status", "log", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_classes(exit_status: ExitStatus, log: str, expected: FailureClass) -> None:
    failure = classify_exit(exit_status, log.splitlines())
    assert failure.failure_class == expected, failure.reason
    assert failure.reason


def test_a_trainer_stopped_for_lack_of_progress_is_not_called_killed() -> None:
    failure = classify_exit(exited(None, signal.SIGTERM, stopped_by_us=True), ["step 7"], no_progress_s=3600)
    assert failure.failure_class == FailureClass.NO_PROGRESS
    assert "3600 s" in failure.reason


def test_the_reason_is_the_last_exception_not_the_source_line() -> None:
    failure = classify_exit(exited(), VALUE_ERROR.splitlines())
    assert failure.reason == "ValueError: learning rate must be positive"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("loading\nerror: resolution: 100 is not divisible by 8\nbye", "resolution: 100 is not divisible by 8"),
        ("error: first\nerror: last", "last"),
        ("loading\nno such model\n\n", "no such model"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_for_bad_input_is_what_the_script_calls_an_error(log: str, reason: str) -> None:
    assert classify_exit(exited(BAD_INPUT_EXIT_CODE), log.splitlines()).reason == reason


def test_what_cannot_be_had_now_is_no_fault_of_the_job() -> None:
    log = ["loading", "error: the base model a/b cannot be fetched: the hub cannot be reached", "bye"]
    failure = classify_exit(exited(UNAVAILABLE_EXIT_CODE), log)
    assert failure.failure_class is FailureClass.TRANSFER_FAILED and failure.failure_class.node_fault
    assert failure.reason == "the base model a/b cannot be fetched: the hub cannot be reached"


def test_the_reason_is_bounded() -> None:
    failure = classify_exit(exited(), ["RuntimeError: " + "x" * 100_000])
    assert len(failure.reason) == MAX_REASON_CHARS

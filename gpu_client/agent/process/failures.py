"""Classify why a trainer or an attempt failed: a failure class and a sentence.

All functions are pure. The class decides whether the job or the machine is at fault, therefore the functions weigh the
evidence: only the last exception of each process counts (with the chain that caused it), wrapper exceptions of
launchers are skipped, and a collective that failed because a peer died does not count as the cause.
"""

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from baton.contract.jobs.job import FailureClass
from gpu_client.agent.io.inputs import InputsDiffer
from gpu_client.agent.workspace.slots import DiskFullError
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.checkpoints.restore.checkpoint_restore import RestoreFailed
from gpu_client.checkpoints.save.artifacts import MissingOutput
from gpu_client.training.protocol import BAD_INPUT_EXIT_CODE, UNAVAILABLE_EXIT_CODE
from gpu_client.transport.errors import (
    ApiError,
    BatonError,
    DiskFull,
    ObjectMissing,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
    UnsafePath,
)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit of a trainer. Either ``code`` or ``signal`` is set.

    ``stopped_by_us``: the agent had signaled the living trainer. ``start_error``: reason why the command did not start.
    ``unkillable_pids``: processes that survived SIGKILL (a hung driver).
    """

    code: int | None
    signal: int | None
    oom_suspected: bool
    stopped_by_us: bool
    start_error: str | None = None
    unkillable_pids: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """Return True for exit code 0 without unkillable processes."""
        return self.code == 0 and not self.unkillable_pids


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """A failure class and a sentence for people."""

    failure_class: FailureClass
    reason: str


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


# Patterns for one line, in the order of the tries; the first match is the line's meaning. A device-side assert is an
# index error of the script, detected by the GPU.
_MEANINGS: tuple[tuple[FailureClass, re.Pattern[str]], ...] = (
    (FailureClass.SCRIPT_ERROR, _pattern(r"device-side assert")),
    (FailureClass.DISK_FULL, _pattern(r"no space left on device|\bENOSPC\b|errno 28\b|disk quota exceeded|\bEDQUOT\b")),
    (
        FailureClass.DISK_FULL,
        _pattern(r"PytorchStreamWriter failed writing file|inline_container.*unexpected pos \d+ vs \d+"),
    ),
    (
        FailureClass.OUT_OF_MEMORY,
        _pattern(r"MemoryError\b|CUDA out of memory|CUDA error: out of memory"),
    ),
    (FailureClass.OUT_OF_MEMORY, _pattern(r"HIP out of memory|MPS backend out of memory|CUBLAS_STATUS_ALLOC_FAILED")),
    (
        FailureClass.OUT_OF_MEMORY,
        _pattern(r"can't allocate memory|cannot allocate memory|\bENOMEM\b|\bstd::bad_alloc\b"),
    ),
    (FailureClass.OUT_OF_MEMORY, _pattern(r"out of shared memory|killed by signal: killed")),
    (FailureClass.NODE_FAULT, _pattern(r"no CUDA-capable device|CUDA-capable device\(s\) is/are busy or unavailable")),
    (
        FailureClass.NODE_FAULT,
        _pattern(r"CUDA error: (unspecified launch failure|uncorrectable ECC|hardware|unknown error)"),
    ),
    (FailureClass.NODE_FAULT, _pattern(r"uncorrectable (nvlink|ecc) error|double[- ]bit ecc|\bECC error\b")),
    (FailureClass.NODE_FAULT, _pattern(r"NVRM: Xid|\bXid\b.{0,40}\b\d{2,3}\b|GPU has fallen off the bus|GPU is lost")),
    (FailureClass.NODE_FAULT, _pattern(r"driver/library version mismatch|failed to initialize NVML|NVML_ERROR")),
    (FailureClass.NODE_FAULT, _pattern(r"CUDA driver version is insufficient|CUDA driver initialization failed")),
    (FailureClass.NODE_FAULT, _pattern(r"No CUDA GPUs are available|Found no NVIDIA driver")),
    (
        FailureClass.NODE_FAULT,
        _pattern(r"ncclSystemError|ncclUnhandledCudaError|NCCL.{0,200}unhandled (system|cuda) error"),
    ),
    (FailureClass.SEGFAULT, _pattern(r"segmentation fault|killed by signal: (segmentation fault|bus error)")),
)
_COLLECTIVE = re.compile(r"\bNCCL\b|\bnccl[A-Z]\w+|\bgloo\b", re.IGNORECASE)

# Prefixes "[rank0]: " and "[default1]:" (torchrun). The prefix "0: " is too common in ordinary output to mean a rank.
_RANK = re.compile(r"^\[(?:rank|default)(\d+)\]:\s?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)\b(?::|$)")
_WRAPPER = re.compile(r"CalledProcessError|ChildFailedError|ProcessRaisedException|ProcessExitedException|SystemExit")
_CHAIN = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")
# Evidence without an exception: messages of shells, C++ termination, the kernel and tools.
_CRASH = re.compile(
    r"^\s*what\(\):|^terminate called|^fatal error|^fatal python error|segmentation fault|killed by signal"
    r"|no space left|NVRM: Xid|\bXid\b|NVML|out of memory|NCCL WARN|cannot allocate memory|bad_alloc|no CUDA",
    re.IGNORECASE,
)
# Messages by which launchers report that a process died by a signal.
_LAUNCHER_SIGNAL = re.compile(
    r"exitcode\s*:\s*-(\d+)\b|died with <Signals\.SIG\w+: (\d+)>|Signal (\d+) \(SIG\w+\) received by PID"
    r"|terminated with signal SIG\w+ \((\d+)\)"
)
# Shells return 128 + signal; scripts use other codes above 128 for their own purposes.
_SHELL_SIGNALS = {128 + n for n in (2, 3, 4, 6, 7, 8, 9, 11, 13, 15)}
_MEMORY_FAULTS = {signal.SIGSEGV, signal.SIGBUS}
MAX_REASON_CHARS = 400


def classify_exit(
    exit_status: ExitStatus, last_lines: Sequence[str], no_progress_s: int | None = None
) -> AttemptFailure:
    """Classify the exit of a trainer that did not succeed.

    ``last_lines``: oldest first. ``no_progress_s``: seconds without a step after which the agent stopped the trainer.
    """
    if exit_status.start_error is not None:
        return _failure(FailureClass.COMMAND_NOT_FOUND, f"the command could not be started: {exit_status.start_error}")
    if no_progress_s is not None:
        return _failure(FailureClass.NO_PROGRESS, f"stopped: no progress for {no_progress_s} s")
    if exit_status.unkillable_pids:
        pids = ", ".join(str(pid) for pid in exit_status.unkillable_pids)
        return _failure(FailureClass.NODE_FAULT, f"processes did not end on SIGKILL (driver or disk hangs): {pids}")
    number = _find_signal(exit_status)
    if number == signal.SIGKILL and not exit_status.stopped_by_us:
        return _failure(
            FailureClass.OUT_OF_MEMORY, "killed by SIGKILL that the agent did not send: most often out of memory"
        )
    evidence = _find_strongest_evidence(last_lines)
    if number is not None:
        return _classify_signal(number, evidence, exit_status)
    return _classify_exit_code(evidence, exit_status, last_lines)


def _failure(failure_class: FailureClass, reason: str) -> AttemptFailure:
    return AttemptFailure(failure_class, reason[:MAX_REASON_CHARS])


def _format_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _find_last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _find_refusal(lines: Sequence[str]) -> str:
    """Return the last line that begins with "error: " (libraries may print after an error), else the last line."""
    line = next((line for line in reversed(lines) if line.startswith("error: ")), _find_last_line(lines))
    return line.removeprefix("error: ").strip()


def _find_signal(exit_status: ExitStatus) -> int | None:
    if exit_status.signal is not None:
        return exit_status.signal
    if exit_status.code in _SHELL_SIGNALS:
        return exit_status.code - 128
    return None


def _classify_signal(number: int, evidence: AttemptFailure | None, exit_status: ExitStatus) -> AttemptFailure:
    """Classify a death by a signal. The output may say more than the signal (an abort after a CUDA error)."""
    if evidence and evidence.failure_class in (
        FailureClass.OUT_OF_MEMORY,
        FailureClass.DISK_FULL,
        FailureClass.NODE_FAULT,
    ):
        return evidence
    if number in _MEMORY_FAULTS:
        return _failure(FailureClass.SEGFAULT, f"died by {_format_signal(number)}")
    if exit_status.oom_suspected and not exit_status.stopped_by_us:
        return _failure(
            FailureClass.OUT_OF_MEMORY, f"died by {_format_signal(number)} after the kernel had run out of memory"
        )
    sender = " sent by the agent" if exit_status.stopped_by_us else ""
    return _failure(FailureClass.KILLED_BY_SIGNAL, f"died by {_format_signal(number)}{sender}")


def _classify_exit_code(
    evidence: AttemptFailure | None, exit_status: ExitStatus, last_lines: Sequence[str]
) -> AttemptFailure:
    """Classify an exit code, which may be a launcher's code for a death by a signal."""
    if evidence and evidence.failure_class != FailureClass.SCRIPT_ERROR:
        return evidence
    if exit_status.code == BAD_INPUT_EXIT_CODE:
        return _failure(FailureClass.BAD_INPUT, _find_refusal(last_lines))
    if exit_status.code == UNAVAILABLE_EXIT_CODE:
        return _failure(FailureClass.TRANSFER_FAILED, _find_refusal(last_lines))
    if exit_status.code in (126, 127):
        problem = "not found" if exit_status.code == 127 else "not executable"
        return _failure(
            FailureClass.COMMAND_NOT_FOUND,
            f"a command was {problem} (exit code {exit_status.code}): {_find_last_line(last_lines)}",
        )
    if exit_status.oom_suspected:
        return _failure(
            FailureClass.OUT_OF_MEMORY, "the kernel killed one of the trainer's processes for lack of memory"
        )
    launched = _find_launcher_signal(last_lines)
    if launched == signal.SIGKILL and not exit_status.stopped_by_us:
        return _failure(
            FailureClass.OUT_OF_MEMORY, "a worker process of the launcher was killed: most often out of memory"
        )
    if launched in _MEMORY_FAULTS:
        return _failure(FailureClass.SEGFAULT, "a worker process of the launcher died by SIGSEGV or SIGBUS")
    return evidence or _failure(
        FailureClass.SCRIPT_ERROR, f"exit code {exit_status.code}: {_find_last_line(last_lines)}"
    )


def _find_launcher_signal(last_lines: Sequence[str]) -> int | None:
    """Return the first signal in a launcher's reports, because the first death causes the deaths of other processes."""
    for line in last_lines:
        if found := _LAUNCHER_SIGNAL.search(line):
            return int(next(group for group in found.groups() if group))
    return None


def _classify_line(line: str) -> FailureClass | None:
    return next((failure_class for failure_class, pattern in _MEANINGS if pattern.search(line)), None)


# Order of causes when several processes report. A collective's error comes last, because the death of one rank causes
# collective errors in all other ranks.
_RANKING: tuple[tuple[FailureClass, bool], ...] = (
    (FailureClass.DISK_FULL, False),
    (FailureClass.OUT_OF_MEMORY, False),
    (FailureClass.NODE_FAULT, False),
    (FailureClass.SEGFAULT, False),
    (FailureClass.SCRIPT_ERROR, False),
    (FailureClass.NODE_FAULT, True),
    (FailureClass.SCRIPT_ERROR, True),
)


def _find_strongest_evidence(last_lines: Sequence[str]) -> AttemptFailure | None:
    by_rank: dict[str, list[str]] = {}
    for line in last_lines:
        rank = _RANK.match(line)
        by_rank.setdefault(rank.group(1) if rank else "", []).append(line[rank.end() :] if rank else line)
    found: list[tuple[int, AttemptFailure]] = []
    for lines in by_rank.values():
        for failure in _find_final_evidence(lines):
            collective = bool(_COLLECTIVE.search(failure.reason)) and failure.failure_class in (
                FailureClass.NODE_FAULT,
                FailureClass.SCRIPT_ERROR,
            )
            found.append((_RANKING.index((failure.failure_class, collective)), failure))
    return min(found, key=lambda item: item[0])[1] if found else None


def _find_final_evidence(lines: Sequence[str]) -> list[AttemptFailure]:
    """Return the final exception of one process and its chain, or its last crash line."""
    found: list[AttemptFailure] = []
    chained = False
    for line in reversed(lines):
        if _CHAIN.match(line):
            chained = True
        elif _EXCEPTION.match(line):
            if _WRAPPER.search(line):
                continue
            if found and not chained:
                break
            chained = False
            found.append(_failure(_classify_line(line) or FailureClass.SCRIPT_ERROR, line.strip()))
        elif not found and _CRASH.search(line) and (meaning := _classify_line(line)):
            # An exception above a crash line describes the crash itself or an older event, therefore the search ends.
            return [_failure(meaning, line.strip())]
    return found


MAX_ERROR_CHARS = 1024

# The first match counts. The class decides which retry budget is charged: errors of transfers, disks and the agent are
# the machine's fault, errors that would recur on every machine are the job's fault.
_CLASSES: tuple[tuple[tuple[type[BaseException], ...], FailureClass], ...] = (
    ((MissingOutput, BadDirectory), FailureClass.MISSING_OUTPUT),
    ((DiskFull, DiskFullError), FailureClass.DISK_FULL),
    ((ObjectMissing, UnsafePath, InputsDiffer), FailureClass.BAD_INPUT),
    ((RestoreFailed,), FailureClass.RESTORE_FAILED),
    ((TransferError, Unreachable, UnexpectedAnswer), FailureClass.TRANSFER_FAILED),
    ((ApiError,), FailureClass.BAD_INPUT),
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def classify_error(error: Exception) -> AttemptFailure:
    """Return the failure for an error raised between claim and report."""
    if isinstance(error, ApiError) and error.foreign:
        return AttemptFailure(
            FailureClass.TRANSFER_FAILED, f"not the control plane's answer: {error}"[:MAX_ERROR_CHARS]
        )
    for kinds, failure_class in _CLASSES:
        if isinstance(error, kinds):
            return AttemptFailure(failure_class, str(error)[:MAX_ERROR_CHARS])
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return AttemptFailure(FailureClass.DISK_FULL, str(error)[:MAX_ERROR_CHARS])
    return AttemptFailure(FailureClass.NODE_FAULT, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS])


def is_expected(error: Exception) -> bool:
    """Return True for errors of networks and disks. The agent logs other errors with a traceback."""
    return isinstance(error, BatonError | DiskFullError | OSError)


def classify_start_error(error: OSError | ValueError) -> AttemptFailure:
    """Return the failure of a command that did not start."""
    if isinstance(error, ValueError) or error.errno == errno.E2BIG:
        return AttemptFailure(FailureClass.COMMAND_NOT_FOUND, f"the command could not be started: {error}")
    return classify_error(error)

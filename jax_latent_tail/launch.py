"""Several JAX processes on this machine: what the examples, benchmarks and tests start.

The parent calls `run`, which starts the command once per process; the command calls `initialize`
first, which is `jax.distributed.initialize` with what the parent passed in the environment.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jax_latent_tail.errors import LatentTailError

_COORDINATOR = "JAX_LATENT_TAIL_COORDINATOR"
_NUM_PROCESSES = "JAX_LATENT_TAIL_NUM_PROCESSES"
_PROCESS_ID = "JAX_LATENT_TAIL_PROCESS_ID"
_DEVICES = "JAX_LATENT_TAIL_DEVICES_PER_PROCESS"

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_GRACE_S = 2.0
_LOG_TAIL = 8_000


class ProcessError(LatentTailError, RuntimeError):
    """A process failed or the group ran out of time; the message holds the end of each log."""


def run(
    command: Sequence[str],
    num_processes: int,
    *,
    devices_per_process: int = 1,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stream_first: bool = False,
) -> list[str]:
    """Runs a Python command as one jax.distributed group of processes.

    Args:
      command: arguments of the Python interpreter, equal for all processes.
      num_processes: processes to start; the first also hosts the coordinator.
      devices_per_process: CPU devices of each process, or GPUs.
      timeout_s: seconds after which all are ended.
      env: added to this process's environment.
      stream_first: whether the first process writes to this process's terminal instead of a log.

    Returns:
      What each process wrote to stdout and stderr, in order of process id; empty for a streamed
      one.

    Raises:
      ProcessError: a process exited with another status than 0, or the time ran out.

    When this returns or raises, no process started here is left. If this process is killed
    meanwhile, those that have called `initialize` are killed with it.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="jax_latent_tail_") as folder:
        logs = [Path(folder, f"process{index}.log") for index in range(num_processes)]
        try:
            for index, log in enumerate(logs):
                streamed = stream_first and index == 0
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        [sys.executable, *command],
                        env={
                            **os.environ,
                            **(env or {}),
                            "JAX_NUM_CPU_DEVICES": str(devices_per_process),
                            _DEVICES: str(devices_per_process),
                            _COORDINATOR: coordinator,
                            _NUM_PROCESSES: str(num_processes),
                            _PROCESS_ID: str(index),
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=None if streamed else output,
                        stderr=None if streamed else subprocess.STDOUT,
                    )
                processes.append(process)
            failure = _wait(processes, timeout_s)
        finally:
            _end(processes)
        texts = [log.read_text(errors="replace") for log in logs]
    if failure:
        tails = (f"--- process {i} ---\n{text[-_LOG_TAIL:]}" for i, text in enumerate(texts))
        raise ProcessError("\n".join([failure, *tails]))
    return texts


def is_member() -> bool:
    """Whether `run` started this process."""
    return _COORDINATOR in os.environ


def initialize(*, share_gpus: bool = False) -> None:
    """Joins the group that `run` started this process for; does nothing in any other process.

    Of the GPUs that it sees, a process takes `devices_per_process` of its own, in order of process
    id.

    Args:
      share_gpus: all processes take the first GPUs instead. XLA's collectives refuse that.
    """
    if not is_member():
        return
    # Linux: do not outlive the parent, however it ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    import jax

    process_id = int(os.environ[_PROCESS_ID])
    count = int(os.environ[_DEVICES])
    first = 0 if share_gpus else process_id * count
    jax.distributed.initialize(
        os.environ[_COORDINATOR],
        num_processes=int(os.environ[_NUM_PROCESSES]),
        process_id=process_id,
        local_device_ids=range(first, first + count),  # CPU devices heed JAX_NUM_CPU_DEVICES
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    """Waits for all to exit with status 0; otherwise returns what went wrong first."""
    deadline = time.monotonic() + timeout_s
    while True:
        statuses = [process.poll() for process in processes]
        for index, status in enumerate(statuses):
            if status:
                how = signal.Signals(-status).name if status < 0 else f"status {status}"
                return f"process {index} of {len(processes)} ended with {how}"
        if all(status == 0 for status in statuses):
            return None
        if time.monotonic() > deadline:
            running = [index for index, status in enumerate(statuses) if status is None]
            return f"processes {running} were still running after {timeout_s:g} s"
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()  # harmless after exit
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

"""Run one function as N processes that share a GPU, under CUDA MPS or by time slices."""

import contextlib
import multiprocessing
import os
import pathlib
import queue
import subprocess
import tempfile
import traceback

_HANDLE_BYTES = 64


class Peers:
    """What one of the processes knows of the others.

    Attributes:
      rank: this process.
      count: all of them.
    """

    def __init__(self, rank: int, count: int, barrier, handles, timeout_s: float):
        self.rank, self.count = rank, count
        self._barrier, self._handles, self._timeout_s = barrier, handles, timeout_s

    def meet(self) -> None:
        """Return when all have come here; raise if one never does."""
        self._barrier.wait(self._timeout_s)

    def exchange(self, handle: bytes) -> list[bytes]:
        """Everybody's `handle` of 64 bytes."""
        size = _HANDLE_BYTES
        self._handles[self.rank * size : (self.rank + 1) * size] = handle
        self.meet()
        data = bytes(self._handles[: self.count * size])
        self.meet()
        return [data[peer * size : (peer + 1) * size] for peer in range(self.count)]


@contextlib.contextmanager
def mps():
    """A daemon of its own for as long as the context lasts; yields the environment for its clients.

    CUDA_DEVICE_MAX_CONNECTIONS must be unset: with 32 and four clients, MPS runs out of resources.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": None}
        for variable, name in (
            ("CUDA_MPS_PIPE_DIRECTORY", "pipe"),
            ("CUDA_MPS_LOG_DIRECTORY", "log"),
        ):
            path = pathlib.Path(folder) / name
            path.mkdir()
            environment[variable] = str(path)
        control = ["nvidia-cuda-mps-control"]
        env = _with(os.environ, environment)
        subprocess.run([*control, "-d"], env=env, check=True, timeout=30)
        try:
            yield environment
        finally:
            subprocess.run(control, input="quit\n", env=env, text=True, timeout=60)


def _with(base, changes) -> dict[str, str]:
    merged = {**base, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in merged.items() if changes.get(name, "") is not None}


def _main(function, peers, results, arguments):
    try:
        results.put((peers.rank, True, function(peers, *arguments)))
    except BaseException:
        results.put((peers.rank, False, traceback.format_exc()))
        raise


def run(count: int, function, *arguments, environment=None, timeout_s: float = 120.0) -> list:
    """`function(peers, *arguments)` in `count` processes; returns their results in rank order.

    Raises:
      RuntimeError: one of them failed, or did not end in time; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    handles = context.Array("c", count * _HANDLE_BYTES, lock=False)
    results = context.Queue()
    processes = [
        context.Process(
            target=_main,
            args=(function, Peers(rank, count, barrier, handles, timeout_s), results, arguments),
        )
        for rank in range(count)
    ]
    before = dict(os.environ)
    try:
        # Children take the environment as it is when they start.
        os.environ.clear()
        os.environ.update(_with(before, environment or {}))
        for process in processes:
            process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    answers: dict[int, object] = {}
    try:
        while len(answers) < count:
            rank, good, answer = results.get(timeout=timeout_s)
            if not good:
                raise RuntimeError(f"rank {rank} failed:\n{answer}")
            answers[rank] = answer
        for process in processes:
            process.join(timeout_s)
    except queue.Empty:
        missing = sorted(set(range(count)) - set(answers))
        raise RuntimeError(f"ranks {missing} did not end within {timeout_s} s") from None
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [answers[rank] for rank in range(count)]

"""Work that may block for ever, given a limited time.

It runs in threads that are started early: once the interpreter has begun to exit, Python 3.12 and
later start none.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

_READY = 2  # at exit: one for the programs under way, which may stay busy, and one for closing

_Job = Callable[[], None]

_idle: "queue.SimpleQueue[_Worker]" = queue.SimpleQueue()


class _Worker:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name="jax_latent_tail worker", daemon=True)
        thread.start()

    def _run(self) -> None:
        while True:
            self.jobs.get()()


def get_ready() -> None:
    """Starts the threads that `within` needs at exit, unless they are there."""
    while _idle.qsize() < _READY:
        _idle.put(_Worker())


def attempt(work: _Job, timeout_s: float) -> str | None:
    """Like `within`, but raises the error that `work` ends with: returns only whether it is late.

    Not for the interpreter's exit: a thread that is given up is replaced.
    """
    errors: list[Exception] = []

    def keep_error() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    late = within(keep_error, timeout_s)
    if late:
        get_ready()
    elif errors:
        raise errors[0]
    return late


def within(work: _Job, timeout_s: float) -> str | None:
    """Does `work`; returns None if it came to its end in time, and otherwise what was wrong.

    If the time is up it goes on, in a thread that is given up.
    """
    failures: list[str] = []
    done = threading.Event()

    def job() -> None:
        try:
            work()
        except Exception as error:
            failures.append(str(error) or repr(error))
        done.set()

    worker = None
    with contextlib.suppress(queue.Empty):
        worker = _idle.get_nowait()
    worker = worker or _Worker()
    worker.jobs.put(job)
    if not done.wait(timeout_s):
        return f"not done after {timeout_s:.1f} s"
    _idle.put(worker)
    return failures[0] if failures else None

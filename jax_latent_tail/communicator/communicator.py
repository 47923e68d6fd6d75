"""The front door: which implementation serves a table of devices, decided once by all processes.

A decision is collective the first time, and remembered. Communicators live until `close_all`,
which runs when the interpreter exits, or in the program's own time.
"""

import atexit
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jax_latent_tail import native
from jax_latent_tail.communicator import bounded, cuda, group, settings
from jax_latent_tail.communicator.group import DeviceTable
from jax_latent_tail.communicator.rendezvous import Refusal, Rendezvous
from jax_latent_tail.errors import (
    ArgumentError,
    ArgumentValueError,
    CommunicatorError,
    UnavailableError,
)
from jax_latent_tail.spec import TailSpec

_log = logging.getLogger("jax_latent_tail")

CLOSE_TIMEOUT_S = 5.0

_WATCH_S = 0.2


@dataclasses.dataclass(frozen=True)
class Decision:
    """What serves the calls of one description on one table of devices.

    Attributes:
      implementation: "cuda", "cpu" or "xla", plain collectives.
      reason: why, or how.
    """

    implementation: str
    reason: str


class Communicator(Protocol):
    """What is common to the communicators of all platforms."""

    summary: str

    def failure(self) -> str | None:
        """What went wrong on this process's ranks, or None; looks at host memory only."""

    def close(self, timeout_s: float) -> None:
        """Ends it within that time."""


_Key = tuple[str, DeviceTable, TailSpec]

_lock = threading.Lock()  # of everything below, and held while deciding
_decisions: dict[_Key, Decision] = {}
_live: dict[_Key, Communicator] = {}
# Of all communicators since `close_all`, in the order in which they were first made; also of those
# that a reset closed and could not make yet.
_devices: dict[_Key, Mapping[int, Any]] = {}
_watcher: "_Watcher | None" = None
_at_exit = False


def unsupported(platform: str, spec: TailSpec) -> str | None:
    """What about a call's sizes the platform's native implementation does not serve, or None."""
    if platform == "cuda":
        return cuda.unsupported(spec)
    if spec.projects:
        return "the up-projection is part of a call on GPUs only"
    return None


def decide(
    platform: str,
    table: DeviceTable,
    spec: TailSpec,
    devices: Mapping[int, Any],
    obstacle: str | None = None,
) -> Decision:
    """Which implementation serves calls of `spec`; makes the communicator if a native one does.

    Collective: the first time, all processes that hold devices of the table must come here.

    Args:
      platform: "cuda" or "cpu".
      table: global device ids, [groups, ranks].
      devices: the `jax.Device` of each id in the table.
      obstacle: why this process has no use for a native implementation. It takes part all the
        same, and the others then have none either.

    Raises:
      RendezvousError: some process did not come; nothing is decided, and a later call tries again.
      DisagreementError: the processes differ in the call, the version or the environment.
      ArgumentValueError: an environment variable has a value that is not allowed.
    """
    key = (platform, table, spec)
    with _lock:
        decision = _decisions.get(key)
        if decision is None:
            start = time.monotonic()
            decision = _decide(key, devices, obstacle)
            _decisions[key] = decision
            seconds = time.monotonic() - start
            _log.debug("decided for %s on devices %s in %.3f s", spec, table, seconds)
        return decision


def _decide(key: _Key, devices: Mapping[int, Any], obstacle: str | None) -> Decision:
    platform, table, spec = key
    reason = unsupported(platform, spec)
    if reason:
        return Decision("xla", reason)
    me = jax.process_index()
    if all(device.process_index != me for device in devices.values()):
        raise ArgumentValueError(
            "mesh", f"without a device of process {me}", "a mesh with devices of each caller"
        )
    everyone = group.members(table, devices, me)
    processes = group.participants(everyone)
    rendezvous = Rendezvous(
        processes,
        me,
        repr((platform, table)),
        _rendezvous_timeout(),
        names={process: group.describe_process(everyone, process) for process in processes},
    )
    library: native.Library | UnavailableError
    try:
        if obstacle:
            raise UnavailableError(obstacle)
        library = native.load(platform)
    except UnavailableError as error:
        library = error  # a reason for all, which the others must hear
    try:
        with rendezvous.session():
            made = _establish(key, devices, rendezvous, library)
    except Refusal as refusal:
        return Decision("xla", str(refusal))
    _live[key], _devices[key] = made, devices
    _start_watching()
    return Decision(platform, made.summary)


def _rendezvous_timeout() -> float:
    """A value that is not allowed is an error of the meeting, of which the others have to hear."""
    try:
        return settings.rendezvous_timeout(os.environ)
    except ArgumentError:
        return settings.RENDEZVOUS_TIMEOUT_S


def _establish(
    key: _Key, devices: Mapping[int, Any], rendezvous: Rendezvous, library: Any
) -> Communicator:
    platform, table, spec = key
    if platform == "cuda":
        return cuda.CudaCommunicator.establish(table, spec, devices, rendezvous, library)
    from jax_latent_tail.communicator import host  # imports what CUDA has no need of

    return host.HostCommunicator.establish(table, spec, devices, rendezvous, library, os.environ)


def check() -> None:
    """Raises a CommunicatorError if a live communicator of this process has failed."""
    for communicator in list(_live.values()):
        failure = communicator.failure()
        if failure:
            raise CommunicatorError(failure)


def close_all(timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Closes all communicators, the latest first, and forgets all decisions.

    Bounded by `timeout_s` in all, apart from a moment for each communicator.
    """
    global _watcher
    deadline = time.monotonic() + timeout_s
    if not _lock.acquire(timeout=timeout_s):
        _log.warning("another thread still waits for other processes: nothing is closed")
        return
    try:
        if _watcher:
            _watcher.stop()
            _watcher = None
        while _live:
            _close_the_latest(deadline)
        _decisions.clear()
        _devices.clear()
    finally:
        _lock.release()


def reset_all() -> None:
    """Makes every communicator anew, in place: programs that are compiled find the new one.

    Collective: every process must come here, after the same calls; each waits for the others as
    when a communicator is made.

    Raises:
      CommunicatorError: one cannot be made any more; the message says why.
      RendezvousError: some process did not come; what was not made anew is closed, until another
        reset by all makes it.
    """
    with _lock:
        deadline = time.monotonic() + _rendezvous_timeout()
        while _live:
            _close_the_latest(deadline)
        for key in _devices:
            _decisions.pop(key, None)
        refused = []
        for key, devices in list(_devices.items()):
            decision = _decide(key, devices, None)
            _decisions[key] = decision
            if decision.implementation != key[0]:
                refused.append(f"{key[2]} cannot be served again: {decision.reason}")
        if refused:
            raise CommunicatorError("; ".join(refused))


def _close_the_latest(deadline: float) -> None:
    _, communicator = _live.popitem()
    try:
        communicator.close(max(deadline - time.monotonic(), 0.1))
    except Exception:  # the others are to be closed all the same, here and by the peers
        _log.exception("cannot close %s", communicator.summary)


def _start_watching() -> None:
    global _watcher, _at_exit
    if not _at_exit:
        # After JAX registered its own, so that this runs before: devices and processes are there.
        atexit.register(_close_at_exit, os.getpid())
        _at_exit = True
    bounded.get_ready()
    if _watcher is None:
        _watcher = _Watcher()


def _close_at_exit(process: int) -> None:
    """Closes, once what this process has dispatched is done: the other ranks need its part.

    Args:
      process: whose communicators they are; a forked child leaves them alone.
    """
    if os.getpid() != process:
        return

    def finish() -> None:
        for array in jax.live_arrays():
            with contextlib.suppress(Exception):  # donated, or failed, as somebody else has seen
                array.block_until_ready()

    try:
        limit = settings.Settings.read(os.environ).deadline_s
    except ArgumentError:
        limit = settings.Settings.deadline_s
    bounded.within(finish, limit)
    close_all()


class _Watcher:
    """A thread that logs failures: nothing else tells of one while captured graphs are replayed."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="jax_latent_tail watcher", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        told: list[Communicator] = []
        while not self._stopped.wait(_WATCH_S):
            live = list(_live.values())
            # Communicators, not their ids, which those that a reset makes may have again.
            told = [communicator for communicator in told if communicator in live]
            for communicator in live:
                failure = communicator.failure()
                if failure and communicator not in told:
                    told.append(communicator)
                    _log.error("%s failed: %s", communicator.summary, failure)

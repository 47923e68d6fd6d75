"""How the processes of a device table meet: they exchange bytes and decide alike.

A *session* is one attempt to set something up together. It starts with a handshake: every process
posts a fresh nonce, and the hash of all nonces names the keys of everything that follows, so that
nothing of an earlier attempt is ever read. Attempts need not be counted: a process that tries
again posts a new nonce, and the others, seeing it, name the session anew. A process that gives up
takes its nonce away, which ends the wait of the others.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jax_latent_tail.errors import (
    ArgumentError,
    DisagreementError,
    LatentTailError,
    RendezvousError,
)

_log = logging.getLogger("jax_latent_tail")

EVERY_PROCESS = "every process must lower (or prepare) this call"

_SLICE_S = 0.5  # one wait in the store; between two of them a wait looks whether a peer gave up
_WARN_AFTER_S = 10.0
_LEAVE_TIMEOUT_S = 30.0


class Refusal(LatentTailError, RuntimeError):
    """The native implementation cannot run; raised alike, with one text, in every process."""


# What ends a session in all processes at the same step.
_AGREED = (Refusal, DisagreementError, ArgumentError)


class Store(Protocol):
    """A key-value store that all processes see, and its barrier."""

    def write(self, key: str, value: bytes) -> None:
        """Sets a key, new or not."""

    def read(self, folder: str) -> dict[str, bytes]:
        """What is there under `folder/`, by the rest of the key."""

    def wait(self, key: str, seconds: float) -> None:
        """Returns when the key is there, or after so long."""

    def delete(self, key: str) -> None:
        """Removes a key, there or not."""

    def barrier(self, name: str, seconds: float, processes: Sequence[int]) -> bool:
        """Whether all came before the time was up. A name serves once."""


class ServiceStore:
    """The store of JAX's coordination service.

    Args:
      client: a `DistributedRuntimeClient`.
    """

    def __init__(self, client: Any):
        self._client = client

    def write(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def read(self, folder: str) -> dict[str, bytes]:
        found = self._client.key_value_dir_get_bytes(folder + "/")
        return {key[len(folder) + 1 :]: value for key, value in found}

    def wait(self, key: str, seconds: float) -> None:
        with _until_deadline():
            self._client.blocking_key_value_get_bytes(key, max(1, int(1e3 * seconds)))

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)

    def barrier(self, name: str, seconds: float, processes: Sequence[int]) -> bool:
        with _until_deadline():
            milliseconds = max(1, int(1e3 * seconds))
            self._client.wait_at_barrier(name, milliseconds, process_ids=list(processes))
            return True
        return False


@contextlib.contextmanager
def _until_deadline() -> Iterator[None]:
    """The service says that the time is up with an exception that has no class of its own."""
    try:
        yield
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise


def service_store() -> Store:
    """The store of `jax.distributed`; a RendezvousError where that is not initialised."""
    try:
        # Private: JAX has no public way to exchange bytes within a subset of the processes.
        from jax._src.distributed import global_state
    except ImportError as error:
        raise RendezvousError(f"this JAX has no key-value store where expected: {error}") from error
    client = getattr(global_state, "client", None)
    if client is None:
        raise RendezvousError(
            "the group spans several processes, but jax.distributed is not initialised: call"
            " jax.distributed.initialize() in each before anything else"
        )
    return ServiceStore(client)


class Rendezvous:
    """The processes of one device table, as one of them sees the others.

    Args:
      participants: indices of the processes, ascending and with `me` among them.
      me: this process.
      key: what they meet for; equal in all, and different from that of any other meeting that may
        go on at the same time.
      timeout_s: how long one exchange waits for the others.
      store: None where there is one participant only.
      names: what messages call a process.
    """

    def __init__(
        self,
        participants: Sequence[int],
        me: int,
        key: str,
        timeout_s: float,
        store: Store | None = None,
        names: Mapping[int, str] | None = None,
    ):
        assert me in participants
        assert list(participants) == sorted(set(participants))
        self.participants = tuple(participants)
        self.me = me
        self.timeout_s = timeout_s
        self._names = names or {}
        self._store: Any = store
        if len(self.participants) > 1 and store is None:
            self._store = service_store()
        self._root = f"latent_tail/{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        self._session: str | None = None
        self._nonces: dict[str, bytes] = {}
        self._posted: list[str] = []  # keys of this process that are still there
        self._steps = 0
        self._barriers = 0
        # An exception that ends the session here, and some exception everywhere else.
        self._known_to_all: Exception | None = None

    @property
    def alone(self) -> bool:
        """Whether this process holds every device of the table."""
        return len(self.participants) == 1

    def name(self, process: int) -> str:
        return self._names.get(process, f"process {process}")

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Meets the others for as long as the block lasts.

        Leave it with no exception, a `Refusal`, a `DisagreementError` or an `ArgumentError` only
        where all do: it then ends with a barrier. With any other, the others are told that this
        process gave up.

        Raises:
          RendezvousError: some did not come within the time, or left.
        """
        if self.alone:
            yield
            return
        try:
            with self._service():
                self._open()
            try:
                yield
            except Exception as error:
                if isinstance(error, _AGREED) or error is self._known_to_all:
                    self._leave()
                raise
            self._leave()
        finally:
            with contextlib.suppress(RuntimeError):  # the store is gone: so are its keys
                self._withdraw()

    def exchange(self, step: str, payload: bytes) -> list[bytes]:
        """What each participant passed to the same step, in their order; also a barrier.

        All make the same exchanges in the same order. Raises a RendezvousError.
        """
        if self.alone:
            return [payload]
        assert self._session, "exchange outside a session"
        before = list(self._posted)
        self._steps += 1
        folder = f"{self._session}/{self._steps}-{step.replace('/', ' ')}"
        with self._service():
            self._post(f"{folder}/{self.me}", payload)
            found = self._gather(folder, step)
            # All are in this step, so nobody will look at an earlier one again.
            for key in before:
                if key.startswith(self._session):
                    self._remove(key)
        return [found[str(process)] for process in self.participants]

    def agree(self, step: str, work: Callable[[], Any]) -> list[Any]:
        """Does `work` in every process; either it succeeds in all, or all raise the same.

        Args:
          step: what the work is, for messages.
          work: returns what the others need to know, as JSON has it.

        Returns:
          What it returned in each process, in their order.

        Raises:
          Refusal: it failed in some process with an error of this package or the system.
          RendezvousError: it failed in some process with a RendezvousError, which another attempt
            may not; or in another process in a way that is nobody's plan, and the process itself
            raises what that was.
        """
        unforeseen: Exception | None = None
        answer: dict[str, Any]
        try:
            answer = {"value": work()}
        except RendezvousError as error:
            answer = {"not now": str(error)}
        except (LatentTailError, OSError) as error:
            answer = {"refusal": str(error) or repr(error)}
            _log.debug("%s: %s", step, error, exc_info=True)
        except Exception as error:
            unforeseen = error
            answer = {"unforeseen": repr(error)}
        answers = [json.loads(a) for a in self.exchange(step, json.dumps(answer).encode())]
        for process, answer in zip(self.participants, answers, strict=True):
            if "unforeseen" in answer:
                self._known_to_all = unforeseen or RendezvousError(
                    f"{self.name(process)} failed at '{step}': {answer['unforeseen']}"
                )
                raise self._known_to_all
        for process, answer in zip(self.participants, answers, strict=True):
            if "not now" in answer:
                self._known_to_all = RendezvousError(
                    f"'{step}' failed in {self.name(process)}: {answer['not now']}"
                )
                raise self._known_to_all
        for process, answer in zip(self.participants, answers, strict=True):
            if "refusal" in answer:
                raise Refusal(f"'{step}' failed in {self.name(process)}: {answer['refusal']}")
        return [answer["value"] for answer in answers]

    def all_raise(self, error: BaseException) -> bool:
        """Whether `agree` ended with this error, in all processes."""
        return error is self._known_to_all

    def require_equal(self, step: str, facts: Mapping[str, Any]) -> None:
        """Raises a DisagreementError in all processes unless each has the same facts.

        Args:
          facts: by name, as JSON has them; the same names everywhere.
        """
        payload = json.dumps(dict(facts)).encode()
        answers = [json.loads(a) for a in self.exchange(step, payload)]
        first = answers[0]
        for process, answer in zip(self.participants, answers, strict=True):
            differing = [
                f"{name} is {first.get(name)} in {self.name(self.participants[0])}"
                f" and {answer.get(name)} in {self.name(process)}"
                for name in dict.fromkeys((*first, *answer))
                if first.get(name) != answer.get(name)
            ]
            if differing:
                raise DisagreementError(
                    "the processes disagree about this call: " + "; ".join(differing)
                )

    def barrier(self, timeout_s: float) -> bool:
        """Meets the others once more, after the session; whether all came within the time."""
        if self.alone:
            return True
        assert self._session, "no session was opened"
        self._barriers += 1
        try:
            return self._store.barrier(
                f"{self._session}/barrier{self._barriers}", timeout_s, self.participants
            )
        except RuntimeError as error:  # the service is gone
            _log.debug("barrier: %s", error)
            return False

    # The handshake.

    def _open(self) -> None:
        self._session, self._steps, self._barriers = None, 0, 0
        own_nonce = f"{self._root}/nonce/{self.me}"
        self._post(own_nonce, os.urandom(16))
        deadline = time.monotonic() + self.timeout_s
        found: dict[str, bytes] | None = None
        while found is None:
            self._nonces = self._gather(f"{self._root}/nonce", "meeting", deadline)
            text = b"".join(self._nonces[str(process)] for process in self.participants)
            self._session = f"{self._root}/{hashlib.sha256(text).hexdigest()[:32]}"
            confirmation = f"{self._session}/0-open/{self.me}"
            self._post(confirmation, b"")
            found = self._gather(f"{self._session}/0-open", "meeting", deadline, reopen=True)
            if found is None:
                self._remove(confirmation)

    def _leave(self) -> None:
        """Ends a session that came to an end in all processes: nobody reads its keys any more."""
        if not self.barrier(min(self.timeout_s, _LEAVE_TIMEOUT_S)):
            _log.debug("not all processes were seen to leave the meeting")

    def _gather(
        self, folder: str, step: str, deadline: float | None = None, reopen: bool = False
    ) -> Any:
        """Each participant's value in `folder`, when all are there.

        With `reopen`, None as soon as the nonces are no longer those of this session.
        """
        start = time.monotonic()
        deadline = start + self.timeout_s if deadline is None else deadline
        in_session = self._session is not None and folder.startswith(self._session)
        warned = False
        seen: set[int] = set()
        while True:
            # In this order: a peer posts before it leaves, so one whose nonce is gone and whose
            # value was not there afterwards will not post.
            nonces = self._store.read(f"{self._root}/nonce") if in_session else self._nonces
            found = self._store.read(folder)
            missing = [p for p in self.participants if str(p) not in found]
            if not missing:
                return found
            seen.update(set(self.participants) - set(missing))
            gone = [p for p in missing if nonces.get(str(p)) != self._nonces.get(str(p))]
            if in_session and gone:
                if reopen:
                    return None
                raise RendezvousError(
                    f"{self._list(gone)} gave up while this process waited for '{step}'; its own"
                    " error says why"
                )
            now = time.monotonic()
            if now >= deadline:
                # Others that waited may have given up a moment ago.
                never = [process for process in missing if process not in seen] or missing
                raise RendezvousError(
                    f"{self._list(never)} did not come to '{step}' within {now - start:.1f} s:"
                    f" {EVERY_PROCESS}"
                )
            if not warned and now - start >= _WARN_AFTER_S:
                warned = True
                _log.warning(
                    "waiting for %s at '%s' for %.0f s now: %s",
                    self._list(missing),
                    step,
                    now - start,
                    EVERY_PROCESS,
                )
            self._store.wait(f"{folder}/{missing[0]}", min(_SLICE_S, deadline - now))

    def _list(self, processes: Sequence[int]) -> str:
        return ", ".join(map(self.name, processes))

    def _post(self, key: str, value: bytes) -> None:
        self._posted.append(key)
        self._store.write(key, value)

    def _remove(self, key: str) -> None:
        self._store.delete(key)
        self._posted.remove(key)

    def _withdraw(self) -> None:
        # The nonce, posted first, goes last: its absence says that nothing more will come.
        for key in reversed(list(self._posted)):
            self._remove(key)

    @contextlib.contextmanager
    def _service(self) -> Iterator[None]:
        try:
            yield
        except LatentTailError:
            raise
        except RuntimeError as error:
            raise RendezvousError(f"JAX's coordination service failed: {error}") from error

"""File descriptors from process to process of one user on one host, through Unix sockets.

Each process listens in a fresh private folder and tells the others where, together with a token,
through the rendezvous. All then connect to all, show the token and hand over their descriptors.
Whoever else connects gets nothing and is not listened to.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_latent_tail.communicator.rendezvous import Rendezvous
from jax_latent_tail.errors import LatentTailError

# By the time that processes connect, all of them listen: they have just met.
PASS_TIMEOUT_S = 10.0

_TOKEN_BYTES = 32
_MESSAGE = struct.Struct(f"<{_TOKEN_BYTES}sI")  # token, index of the sender
_INT = struct.Struct("i")
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_PATH = 100  # of a Unix socket, the system's own limit being 108 with the final zero

UserReader = Callable[[socket.socket], int]


class PassingError(LatentTailError, RuntimeError):
    """Descriptors could not be handed over."""


def peer_user(connection: socket.socket) -> int:
    """The user at the other end, as the kernel has it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(data)[1])


def close_all(descriptors: Sequence[int]) -> None:
    """Closes descriptors that the caller owns."""
    for descriptor in descriptors:
        os.close(descriptor)


class Exchange:
    """One exchange of descriptors, from the open socket to the last connection.

    Args:
      expected: how many descriptors to take from each of the other processes.
      read_user: tells who is at the other end of a connection.
    """

    def __init__(self, expected: Mapping[int, int], read_user: UserReader = peer_user):
        self._expected = dict(expected)
        self._read_user = read_user
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._folder: str | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._folder = tempfile.mkdtemp(prefix="latent_tail_")  # 0700, and not to be guessed
            self.path = os.path.join(self._folder, "socket")
            if len(os.fsencode(self.path)) > _MAX_PATH:
                raise PassingError(f"{self.path} is too long for a socket; set a shorter TMPDIR")
            self._listener.bind(self.path)
            self._listener.listen(len(self._expected) + 8)
            self._listener.setblocking(False)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> dict[str, str]:
        """What the other processes need, to be told to them alone."""
        return {"path": self.path, "token": self._token.hex()}

    def close(self) -> None:
        """Removes the socket and its folder; may be called again."""
        self._listener.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def receive(self, timeout_s: float | None = None) -> dict[int, list[int]]:
        """The descriptors of every other process, owned by the caller.

        Raises a PassingError if some did not come within the time; nothing is then left open.
        """
        deadline = time.monotonic() + (PASS_TIMEOUT_S if timeout_s is None else timeout_s)
        received: dict[int, list[int]] = {}
        try:
            with contextlib.ExitStack() as stack:
                selector = stack.enter_context(selectors.DefaultSelector())
                selector.register(self._listener, selectors.EVENT_READ)
                while len(received) < len(self._expected):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        missing = sorted(set(self._expected) - set(received))
                        raise PassingError(
                            f"no descriptors came from process {missing} within the time"
                        )
                    for key, _ in selector.select(left):
                        if key.fileobj is self._listener:
                            connection = self._accept()
                            if connection:
                                stack.callback(connection.close)
                                selector.register(connection, selectors.EVENT_READ)
                        else:
                            selector.unregister(key.fileobj)
                            self._take(key.fileobj, received)
            return received
        except BaseException:
            for descriptors in received.values():
                close_all(descriptors)
            raise

    def _accept(self) -> socket.socket | None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone already
            return None
        connection.setblocking(False)
        if self._read_user(connection) != os.geteuid():
            connection.close()
            return None
        return connection

    def _take(self, connection: Any, received: dict[int, list[int]]) -> None:
        """Reads one message; closes what it brought unless it is one that was waited for."""
        most = max(self._expected.values()) + 1
        try:
            # Not socket.recv_fds, which drops the flags.
            data, ancillary, _, _ = connection.recvmsg(
                _MESSAGE.size, socket.CMSG_SPACE(most * _INT.size), socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return
        descriptors = [
            descriptor
            for level, kind, payload in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (descriptor,) in _INT.iter_unpack(payload[: len(payload) // _INT.size * _INT.size])
        ]
        if len(data) == _MESSAGE.size:
            token, sender = _MESSAGE.unpack(data)
            if (
                hmac.compare_digest(token, self._token)
                and sender not in received
                and self._expected.get(sender) == len(descriptors)
            ):
                received[sender] = descriptors
                return
        close_all(descriptors)


def send(
    me: int,
    address: Mapping[str, str],
    descriptors: Sequence[int],
    read_user: UserReader = peer_user,
) -> None:
    """Hands duplicates of `descriptors` from process `me` to the one that listens at `address`."""
    path = address["path"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(PASS_TIMEOUT_S)
        try:
            connection.connect(path)
        except OSError as error:
            raise PassingError(
                f"cannot connect to {path}: {error.strerror or error}; do the processes run in"
                " containers that do not share the folder?"
            ) from error
        if read_user(connection) != os.geteuid():
            raise PassingError(f"{path} belongs to another user")
        message = _MESSAGE.pack(bytes.fromhex(address["token"]), me)
        socket.send_fds(connection, [message], list(descriptors))


def swap(
    rendezvous: Rendezvous,
    step: str,
    outgoing: Mapping[int, Sequence[int]],
    expected: Mapping[int, int],
) -> dict[int, list[int]]:
    """Descriptors to and from other processes; two agreed steps, taken by all of them.

    Args:
      step: for messages.
      outgoing: what to hand to each process; still the caller's afterwards.
      expected: how many to take from each; one that gives none is left out.

    Returns:
      What each gave, owned by the caller.

    Raises:
      Refusal: it failed in some process; nothing is left open in any.
    """
    exchange: Exchange | None = None
    received: dict[int, list[int]] = {}

    def listen() -> dict[str, str] | None:
        nonlocal exchange
        if not expected:
            return None
        exchange = Exchange(expected)
        return exchange.address

    def hand_over() -> None:
        failure: Exception | None = None
        for process, descriptors in outgoing.items():
            try:
                send(rendezvous.me, addresses[process], descriptors)
            except (PassingError, OSError) as error:
                failure = failure or error  # the others need not wait for theirs
        if failure:
            raise failure
        if exchange:
            received.update(exchange.receive())
            exchange.close()  # all have connected

    try:
        answers = rendezvous.agree(f"{step}: listening", listen)
        addresses = dict(zip(rendezvous.participants, answers, strict=True))
        rendezvous.agree(f"{step}: handing over", hand_over)
        return received
    except BaseException:
        for descriptors in received.values():
            close_all(descriptors)
        raise
    finally:
        if exchange:
            exchange.close()

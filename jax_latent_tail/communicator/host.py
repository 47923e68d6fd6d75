"""The communicator for CPU devices: ranks of one process, and of several on one host."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jax_latent_tail import native
from jax_latent_tail.communicator.group import DeviceTable
from jax_latent_tail.communicator.host_memory import SharedFile
from jax_latent_tail.communicator.rendezvous import Refusal, Rendezvous
from jax_latent_tail.communicator.settings import agree
from jax_latent_tail.errors import UnavailableError
from jax_latent_tail.spec import TailSpec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HostCommunicator:
    """The ranks of a device table on this host's CPUs.

    Made by `establish`, in all processes of the table at once; `close` ends it. The memory that
    processes share belongs to the native library and goes with the last call.

    Attributes:
      summary: what it serves and how, for logs.
    """

    def __init__(self, library: native.Library, handle: int, summary: str):
        self.summary = summary
        self._library = library
        self._handle: int | None = handle

    @classmethod
    def establish(
        cls,
        table: DeviceTable,
        spec: TailSpec,
        devices: Mapping[int, Any],
        rendezvous: Rendezvous,
        library: native.Library | UnavailableError,
        environ: Mapping[str, str] = os.environ,
        host: str | None = None,
    ) -> "HostCommunicator":
        """Makes a communicator in every process of the table, or in none.

        Collective, within a session of the rendezvous.

        Args:
          table: global device ids, [groups, ranks].
          spec: of the calls.
          devices: the `jax.Device` of each id.
          library: the native library, or why this process has none.
          host: what tells hosts apart; None reads the boot id.

        Raises:
          Refusal: it cannot be, for the reason in the message; in every process.
          DisagreementError: the processes differ in what they want or in their versions; in every
            process.
          ArgumentValueError: an environment variable has a value that is not allowed.
          RendezvousError: some process did not come, or left.
        """
        # Calls are told apart by the order in which XLA makes them: its versions must agree too.
        versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
        settings = agree(rendezvous, spec, environ, versions)
        numbers = {process: number for number, process in enumerate(rendezvous.participants)}
        processes = [numbers[devices[id_].process_index] for group in table for id_ in group]

        def look() -> dict[str, Any]:
            if isinstance(library, UnavailableError):
                raise library
            return {
                "host": host or _BOOT_ID.read_text().strip(),
                "user": os.geteuid(),
                "bytes": library.cpu_segment_bytes(table, spec, processes),
            }

        facts = rendezvous.agree("looking at the host", look)
        assert not isinstance(library, UnavailableError)
        size: int = facts[0]["bytes"]
        if size:
            for what in ("host", "user"):
                _require_one(rendezvous, what, [fact[what] for fact in facts])
        number = numbers[rendezvous.me]
        file: SharedFile | None = None
        handle: int | None = None
        try:

            def create() -> str | None:
                nonlocal file
                if size and number == 0:
                    file = SharedFile.create(size)
                    return file.name
                return None

            name = rendezvous.agree("creating shared memory", create)[0]

            def open_() -> None:
                nonlocal file, handle
                if size and file is None:
                    file = SharedFile.open(name)
                handle = library.open_cpu(
                    table, spec, processes, number, settings.deadline_s, file.fd if file else -1
                )

            rendezvous.agree("mapping shared memory", open_)
        except BaseException:
            if handle is not None:
                library.close_cpu(handle)
            raise
        finally:
            if file:
                file.close()
        assert handle is not None
        where = f"{size >> 10} KiB shared by {len(numbers)} processes" if size else "in one process"
        return cls(library, handle, f"CPU communicator of {sum(map(len, table))} devices, {where}")

    def failure(self) -> str | None:
        """Why calls fail in this process, once one did; None after `close`."""
        return None if self._handle is None else self._library.cpu_failure(self._handle)

    def close(self, timeout_s: float) -> None:
        """Ends it: calls that wait for other ranks fail, as do all that come; never waits.

        Other processes still finish the calls that this process's ranks have come to, and fail in
        those that they have not. May be called again.
        """
        del timeout_s
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.close_cpu(handle)


def _require_one(rendezvous: Rendezvous, what: str, values: Sequence[Any]) -> None:
    """A Refusal, alike in all processes, unless their values are the same."""
    for process, value in zip(rendezvous.participants, values, strict=True):
        if value != values[0]:
            raise Refusal(
                f"{rendezvous.name(rendezvous.participants[0])} has {what} {values[0]} and"
                f" {rendezvous.name(process)} has {what} {value}: memory is shared only between"
                " processes of one user on one host"
            )

"""Device memory that every rank of a group can write: made here, and mapped from the other ranks.

There are several kinds, tried in order. Each is made in agreed steps, so that all processes take
the same kind or give it up together; what was made for a kind that is given up is released first.

* "vmm", "plain": one process holds all ranks. Memory of the driver's virtual memory management,
  mapped once with access for every device; or ordinary memory and peer access between contexts.
* "posix_fd", "ipc": processes on one host. Virtual memory management with a file descriptor as
  handle, passed through a Unix socket; or ordinary memory and CUDA's IPC handles.
* "fabric": processes on several hosts of one NVLink domain. The handle is plain data.
"""

import contextlib
import ctypes
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_latent_tail.communicator import descriptors
from jax_latent_tail.communicator.driver import Device, Driver, DriverError
from jax_latent_tail.communicator.group import Member
from jax_latent_tail.communicator.rendezvous import Refusal, Rendezvous
from jax_latent_tail.errors import LatentTailError

_log = logging.getLogger("jax_latent_tail")

# Peers map whole allocations, and the driver packs small ordinary ones together.
_GRANULE = 2 << 20

_CONTROL, _WORKSPACE = 0, 1


class MemberError(LatentTailError, RuntimeError):
    """Something failed for one device; the message starts with its rank."""


@contextlib.contextmanager
def naming(member: Member) -> Iterator[None]:
    """Names the member in what the package or the driver raises."""
    try:
        yield
    except LatentTailError as error:
        raise MemberError(f"{member}: {error}") from error


def quietly(what: str, function: Callable[..., Any], *arguments: Any) -> bool:
    """Releases something: an error is logged, for the rest is to be released all the same."""
    try:
        function(*arguments)
    except DriverError as error:
        _log.warning("cannot release %s: %s", what, error)
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to share memory.

    Attributes:
      name: for messages.
      virtual: whether of the virtual memory management.
      handle: the CUmemAllocationHandleType, without prefix, if virtual.
    """

    name: str
    virtual: bool
    handle: str = "NONE"


VMM, PLAIN = Kind("vmm", virtual=True), Kind("plain", virtual=False)
POSIX_FD = Kind("posix_fd", virtual=True, handle="POSIX_FILE_DESCRIPTOR")
IPC = Kind("ipc", virtual=False)
FABRIC = Kind("fabric", virtual=True, handle="FABRIC")


def candidates(everyone: Sequence[Member], hosts: Mapping[int, str]) -> tuple[Kind, ...]:
    """The kinds to try, best first.

    Args:
      hosts: what tells hosts apart, by process.
    """
    if len(hosts) == 1:
        return VMM, PLAIN
    groups: dict[int, set[str]] = {}
    for member in everyone:
        groups.setdefault(member.group, set()).add(hosts[member.process])
    if all(len(group) == 1 for group in groups.values()):
        return POSIX_FD, IPC
    return (FABRIC,)


class Block:
    """One allocation as this process sees it: its own, or a peer's.

    Attributes:
      size: bytes, whole granules.
    """

    size: int

    def place(self, readers: Sequence[Device]) -> None:
        """Maps it for these local devices, if that is not done yet."""
        raise NotImplementedError

    def address(self, reader: Device) -> int:
        """Where a local device finds it."""
        raise NotImplementedError

    def free(self) -> bool:
        """Undoes all there is, mapping and memory; may be called again.

        Whether nothing is left; logs what fails.
        """
        raise NotImplementedError


class VirtualBlock(Block):
    """Memory behind a handle, this process's or imported, and one mapping of it.

    Owns the handle.
    """

    def __init__(self, driver: Driver, handle: Any, size: int):
        self.driver, self.handle, self.size = driver, handle, size
        self._reserved = 0
        self._mapped = False
        self._placed = False

    def place(self, readers: Sequence[Device]) -> None:
        if self._placed:
            return
        call = self.driver.call
        self._reserved = int(call("cuMemAddressReserve", self.size, 0, 0, 0))
        call("cuMemMap", self._reserved, self.size, 0, self.handle, 0)
        self._mapped = True
        access = [access_to(self.driver, reader) for reader in readers]
        call("cuMemSetAccess", self._reserved, self.size, access, len(access))
        self._placed = True

    def address(self, reader: Device) -> int:
        assert self._placed
        return self._reserved

    def unmap(self) -> None:
        """Undoes `place`; logs what fails."""
        call, self._placed = self.driver.call, False
        if self._mapped:
            self._mapped = not quietly("a mapping", call, "cuMemUnmap", self._reserved, self.size)
        if self._reserved and not self._mapped:
            quietly("an address range", call, "cuMemAddressFree", self._reserved, self.size)
            self._reserved = 0

    def free(self) -> bool:
        self.unmap()
        released = self.handle is None or quietly(
            "a memory handle", self.driver.call, "cuMemRelease", self.handle
        )
        self.handle = None
        return released and not self._mapped


def access_to(driver: Driver, reader: Device) -> Any:
    """A CUmemAccessDesc that lets a device read and write."""
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = reader.ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


class PlainBlock(Block):
    """Ordinary memory of a local device, which other contexts of this process reach as it is."""

    def __init__(self, driver: Driver, device: Device, size: int):
        self.driver, self.size = driver, size
        self._device = device
        with device.current():
            self._address = int(driver.call("cuMemAlloc", size))

    def place(self, readers: Sequence[Device]) -> None:
        for reader in readers:
            if reader.ordinal == self._device.ordinal:
                continue
            try:
                # Left on: it is the process's, and XLA relies on it too.
                with reader.current():
                    self.driver.call("cuCtxEnablePeerAccess", self._device.context, 0)
            except DriverError as error:
                if error.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                    raise

    def address(self, reader: Device) -> int:
        return self._address

    def free(self) -> bool:
        freed = not self._address or quietly("device memory", self._free)
        self._address = 0
        return freed

    def _free(self) -> None:
        with self._device.current():
            self.driver.call("cuMemFree", self._address)

    def export(self) -> bytes:
        """The IPC handle."""
        with self._device.current():
            handle = self.driver.call("cuIpcGetMemHandle", self._address)
        return ctypes.string_at(handle.getPtr(), _IPC_HANDLE_BYTES)


_IPC_HANDLE_BYTES = 64


class OpenedBlock(Block):
    """Ordinary memory of another process, opened in the context of each device that needs it."""

    def __init__(self, driver: Driver, data: bytes, size: int):
        self.driver, self.size = driver, size
        self._data = data
        self._opened: list[tuple[Device, int]] = []

    def place(self, readers: Sequence[Device]) -> None:
        flags = self.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        for reader in readers:
            handle = self.driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), self._data, _IPC_HANDLE_BYTES)
            with reader.current():
                address = int(self.driver.call("cuIpcOpenMemHandle", handle, flags))
            self._opened.append((reader, address))

    def address(self, reader: Device) -> int:
        return next(address for opener, address in self._opened if opener is reader)

    def free(self) -> bool:
        closed = [quietly("a peer's memory", self._close, *opened) for opened in self._opened]
        self._opened.clear()
        return all(closed)

    def _close(self, reader: Device, address: int) -> None:
        with reader.current():
            self.driver.call("cuIpcCloseMemHandle", address)


class Region:
    """The memory of one communicator in this process.

    Attributes:
      kind: how it is shared.
      controls, workspaces: this process's own, by member.
      sizes: bytes of every rank's workspace block, by member, of all processes.
    """

    def __init__(self, kind: Kind):
        self.kind = kind
        self.controls: dict[Member, Block] = {}
        self.workspaces: dict[Member, Block] = {}
        self.sizes: dict[Member, int] = {}
        self._kept: set[Member] = set()  # whose control block was there before
        self._foreign: dict[Member, list[Block]] = {}
        self._exported = False

    def control(self, reader: Device, member: Member) -> int:
        """Where a local device finds the control block of a member of its group."""
        own = self.controls.get(member)
        return (own or self._foreign[member][_CONTROL]).address(reader)

    def workspace(self, reader: Device, member: Member) -> int:
        own = self.workspaces.get(member)
        return (own or self._foreign[member][_WORKSPACE]).address(reader)

    def release_peers(self) -> bool:
        """Unmaps what belongs to other processes; whether nothing of it is left."""
        freed = [block.free() for blocks in self._foreign.values() for block in blocks]
        self._foreign.clear()
        return all(freed)

    def release_workspaces(self) -> None:
        """Frees this process's workspaces."""
        for block in self.workspaces.values():
            block.free()
        self.workspaces.clear()

    def abandon(self, rendezvous: Rendezvous | None, keeps: bool = False) -> None:
        """Releases everything that was made for this region.

        Args:
          rendezvous: through which all processes do so at once; None where only this one does.
          keeps: whether it may be in use in this process, and stays as it is.
        """
        released = not keeps and self.release_peers()
        if self.kind == IPC and self._exported:
            # Freeing ordinary memory that a peer has open is undefined: rather lose it.
            answers = [b"?"]
            if rendezvous:
                answers = rendezvous.exchange("releasing memory", b"yes" if released else b"no")
            if set(answers) != {b"yes"}:
                _log.warning("a peer may still have memory of this process open: it is not freed")
                return
        if keeps:
            return
        self.release_workspaces()
        for member, block in self.controls.items():
            if member not in self._kept:
                block.free()
        self.controls.clear()


@dataclasses.dataclass(frozen=True)
class Request:
    """What memory is wanted, and by whom.

    Attributes:
      everyone: the members of all groups.
      devices: the local devices by ordinal, contexts held by the caller for as long as the region.
      uuids: of every member's device.
      control_bytes, workspace_bytes: of each rank.
      granule: sizes are multiples of it, beside what the kind demands.
      kept_controls: control blocks of this process from before, to be used again where they are
        of the kind.
    """

    driver: Driver
    everyone: tuple[Member, ...]
    devices: Mapping[int, Device]
    uuids: Mapping[Member, str]
    control_bytes: int
    workspace_bytes: int
    granule: int = 1
    kept_controls: Mapping[tuple[Kind, Member], Block] = dataclasses.field(default_factory=dict)

    @property
    def local(self) -> tuple[Member, ...]:
        return tuple(member for member in self.everyone if member.ordinal is not None)

    def device(self, member: Member) -> Device:
        assert member.ordinal is not None
        return self.devices[member.ordinal]

    def readers(self, member: Member) -> list[Device]:
        """The local devices in a member's group."""
        return [self.device(reader) for reader in self.local if reader.group == member.group]

    @property
    def foreign(self) -> tuple[Member, ...]:
        """Members of other processes in groups that this process is in."""
        groups = {member.group for member in self.local}
        return tuple(m for m in self.everyone if m.ordinal is None and m.group in groups)

    def of_process(self, process: int, sharing_with: int) -> list[Member]:
        """The members of one process in groups that another is in, in the order of the table."""
        groups = {member.group for member in self.everyone if member.process == sharing_with}
        return [m for m in self.everyone if m.process == process and m.group in groups]


def share(kinds: Sequence[Kind], rendezvous: Rendezvous, request: Request) -> Region:
    """Memory of the first kind that works for all; a Refusal with the reason of each if none does.

    Collective. On any way out but the normal one, all that was made is released.
    """
    rendezvous.agree("peer access", lambda: _check_peer_access(request))
    reasons = []
    for kind in kinds:
        region = Region(kind)
        try:
            _fill(region, rendezvous, request)
            return region
        except Refusal as refusal:
            region.abandon(rendezvous)
            reasons.append(str(refusal))
            _log.info("memory of the kind %s cannot be shared: %s", kind.name, refusal)
        except BaseException:
            region.abandon(None)
            raise
    raise Refusal("; ".join(reasons))


def _check_peer_access(request: Request) -> None:
    """Raises where a local device cannot reach a device of its group that this process sees."""
    driver = request.driver
    visible = driver.physical_devices()
    for reader in request.local:
        for peer in request.everyone:
            ordinal = visible.get(request.uuids[peer])
            if peer.group != reader.group or ordinal in (None, reader.ordinal):
                continue
            device = driver.call("cuDeviceGet", ordinal)
            if not driver.call("cuDeviceCanAccessPeer", request.device(reader).device, device):
                raise MemberError(f"{reader}: no peer access to {peer}")


def _fill(region: Region, rendezvous: Rendezvous, request: Request) -> None:
    """The agreed steps of one kind."""
    kind = region.kind

    def allocate() -> dict[str, list[int]]:
        for member in request.local:
            with naming(member):
                kept = request.kept_controls.get((kind, member))
                if kept:
                    region._kept.add(member)
                region.controls[member] = kept or _create(
                    kind, request, member, request.control_bytes
                )
                region.workspaces[member] = _create(kind, request, member, request.workspace_bytes)
        return {
            str(m.device_id): [region.controls[m].size, region.workspaces[m].size]
            for m in request.local
        }

    sizes = _merged(rendezvous.agree(f"allocating {kind.name} memory", allocate))
    for member in request.everyone:
        region.sizes[member] = sizes[str(member.device_id)][_WORKSPACE]

    if kind is POSIX_FD:
        received = exchange_descriptors(
            rendezvous,
            request,
            kind.name,
            lambda member: [region.controls[member], region.workspaces[member]],
        )
        try:
            rendezvous.agree(
                f"importing {kind.name} memory",
                lambda: _import(region, request, received, sizes),
            )
        finally:
            for handles in received.values():
                descriptors.close_all(handles)
    elif kind in (IPC, FABRIC):
        region._exported = True
        exported = _merged(
            rendezvous.agree(f"exporting {kind.name} memory", lambda: _export(region, request))
        )
        data = {
            member: [bytes.fromhex(text) for text in exported[str(member.device_id)]]
            for member in request.foreign
        }
        rendezvous.agree(
            f"importing {kind.name} memory", lambda: _import(region, request, data, sizes)
        )

    def place() -> None:
        for member in request.local:
            with naming(member):
                region.controls[member].place(request.readers(member))
                region.workspaces[member].place(request.readers(member))
        for member, blocks in region._foreign.items():
            with naming(member):
                for block in blocks:
                    block.place(request.readers(member))

    rendezvous.agree(f"mapping {kind.name} memory", place)


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for answer in answers for key, value in answer.items()}


def _create(kind: Kind, request: Request, member: Member, size: int) -> Block:
    driver, device = request.driver, request.device(member)
    try:
        if not kind.virtual:
            return PlainBlock(driver, device, _round_up(size, max(_GRANULE, request.granule)))
        properties = allocation_properties(driver, kind, device)
        granularity = driver.call(
            "cuMemGetAllocationGranularity",
            properties,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        size = _round_up(size, max(int(granularity), request.granule))
        return VirtualBlock(driver, driver.call("cuMemCreate", size, properties, 0), size)
    except DriverError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        with device.current():
            free, total = driver.call("cuMemGetInfo")
        raise MemberError(
            f"{error}: {size} bytes wanted, {free} of {total} free. XLA reserves most of a GPU at"
            " its start: lower XLA_PYTHON_CLIENT_MEM_FRACTION"
        ) from error


def _round_up(size: int, granule: int) -> int:
    return -(-size // granule) * granule


def handle_type(driver: Driver, kind: Kind) -> Any:
    """The CUmemAllocationHandleType."""
    return getattr(driver.CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{kind.handle}")


def allocation_properties(driver: Driver, kind: Kind, device: Device) -> Any:
    """A CUmemAllocationProp for memory of a device."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = handle_type(driver, kind)
    return properties


def export_handle(driver: Driver, kind: Kind, handle: Any) -> Any:
    """A file descriptor, which the caller owns, or the bytes of a fabric handle."""
    exported = driver.call("cuMemExportToShareableHandle", handle, handle_type(driver, kind), 0)
    return int(exported) if kind is POSIX_FD else bytes(exported.data)


def import_handle(driver: Driver, kind: Kind, exported: Any) -> Any:
    """The handle behind what another process exported; the caller owns it."""
    return driver.call("cuMemImportFromShareableHandle", exported, handle_type(driver, kind))


def _export(region: Region, request: Request) -> dict[str, list[str]]:
    """Handles of this process's memory as text, by device id."""
    exported = {}
    for member in request.local:
        with naming(member):
            blocks = (region.controls[member], region.workspaces[member])
            exported[str(member.device_id)] = [
                block.export().hex()
                if isinstance(block, PlainBlock)
                else export_handle(request.driver, region.kind, block.handle).hex()  # type: ignore[attr-defined]
                for block in blocks
            ]
    return exported


def _import(
    region: Region,
    request: Request,
    exported: Mapping[Member, Sequence[Any]],
    sizes: Mapping[str, Sequence[int]],
) -> None:
    for member in request.foreign:
        with naming(member):
            blocks = region._foreign.setdefault(member, [])
            both = zip(exported[member], sizes[str(member.device_id)], strict=True)
            for data, size in both:
                if region.kind.virtual:
                    handle = import_handle(request.driver, region.kind, data)
                    blocks.append(VirtualBlock(request.driver, handle, size))
                else:
                    blocks.append(OpenedBlock(request.driver, data, size))


def exchange_descriptors(
    rendezvous: Rendezvous,
    request: Request,
    what: str,
    blocks_of: Callable[[Member], Sequence[Block]],
) -> dict[Member, list[int]]:
    """Descriptors of every foreign member's blocks, owned by the caller.

    Args:
      blocks_of: the blocks of a local member; equally many for each.
    """
    others = [p for p in rendezvous.participants if p != rendezvous.me]
    exported: dict[Member, list[int]] = {}
    try:

        def export() -> int:
            count = 0
            for member in request.local:
                with naming(member):
                    mine = exported.setdefault(member, [])
                    for block in blocks_of(member):
                        assert isinstance(block, VirtualBlock)
                        mine.append(export_handle(request.driver, POSIX_FD, block.handle))
                    count = len(mine)
            return count

        count = rendezvous.agree(f"exporting {what} memory", export)[0]
        outgoing = {}
        expected = {}
        for process in others:
            mine = request.of_process(rendezvous.me, sharing_with=process)
            if mine:
                outgoing[process] = [fd for member in mine for fd in exported[member]]
                theirs = request.of_process(process, sharing_with=rendezvous.me)
                expected[process] = count * len(theirs)
        received = descriptors.swap(rendezvous, f"passing {what} memory", outgoing, expected)
    finally:
        for mine_exported in exported.values():
            descriptors.close_all(mine_exported)
    found: dict[Member, list[int]] = {}
    for process, handles in received.items():
        for index, member in enumerate(request.of_process(process, sharing_with=rendezvous.me)):
            found[member] = handles[index * count : (index + 1) * count]
    return found

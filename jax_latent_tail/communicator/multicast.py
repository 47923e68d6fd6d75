"""One mapping whose stores reach the workspaces of all ranks of a group: NVLink multicast.

The switch does the copying. Set-up has been seen to succeed on machines where the first store then
failed, or on some ranks only; so it is made in agreed steps, and believed only when a store by each
rank has been executed and has arrived everywhere.
"""

import contextlib
import ctypes
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jax_latent_tail.communicator import cuda_memory
from jax_latent_tail.communicator.cuda_memory import (
    FABRIC,
    POSIX_FD,
    Kind,
    MemberError,
    Region,
    Request,
    VirtualBlock,
    naming,
    quietly,
)
from jax_latent_tail.communicator.descriptors import close_all, swap
from jax_latent_tail.communicator.driver import Device, Driver
from jax_latent_tail.communicator.group import Member
from jax_latent_tail.communicator.rendezvous import Rendezvous
from jax_latent_tail.errors import RendezvousError

_PROBE_TIMEOUT_S = 10.0
_PROBE_BYTES = 16

# The store that the kernels publish with, once.
_PROBE_PTX = b"""
.version 8.1
.target sm_90
.address_size 64
.visible .entry probe(.param .u64 address, .param .u32 word)
{
  .reg .b64 %a;
  .reg .b32 %w;
  ld.param.u64 %a, [address];
  ld.param.u32 %w, [word];
  multimem.st.relaxed.sys.global.v4.bf16x2 [%a], {%w, %w, %w, %w};
  fence.acq_rel.sys;
  ret;
}
\0"""


def obstacle(
    everyone: Sequence[Member],
    uuids: Mapping[Member, str],
    supported: Mapping[Member, bool],
    region: Region,
) -> str | None:
    """Why a group cannot publish by multicast, or None; the same in every process."""
    if not region.kind.virtual:
        return f"{region.kind.name} memory cannot be bound to it"
    for member in everyone:
        if not supported[member]:
            return f"{member} does not support it"
    if len(set(uuids.values())) < len(everyone):
        return "ranks share a device"
    if len(set(region.sizes.values())) > 1:
        return "the ranks' workspaces differ in size"
    return None


def granularity(driver: Driver, kind: Kind, tp: int) -> int:
    """What the size of memory that is bound must be a multiple of."""
    return int(
        driver.call(
            "cuMulticastGetGranularity",
            _properties(driver, kind, tp, 0),
            driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM,
        )
    )


def _properties(driver: Driver, kind: Kind, tp: int, size: int) -> Any:
    properties = driver.CUmulticastObjectProp()
    properties.numDevices = tp
    properties.size = size
    properties.handleTypes = cuda_memory.handle_type(driver, kind).value
    return properties


class Multicast:
    """The multicast mappings of this process's groups. Owns handles, mappings and bindings."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self.blocks: dict[int, VirtualBlock] = {}  # by group
        self._bound: list[tuple[int, Device, int]] = []

    def address(self, reader: Device, group: int) -> int:
        """Where a local device of the group stores."""
        return self.blocks[group].address(reader)

    def bind(self, group: int, device: Device, workspace: VirtualBlock) -> None:
        handle = self.blocks[group].handle
        self._driver.call("cuMulticastBindMem", handle, 0, workspace.handle, 0, workspace.size, 0)
        self._bound.append((group, device, workspace.size))

    def free(self) -> None:
        """Undoes all there is; logs what fails. No store may be on its way."""
        for block in self.blocks.values():
            block.unmap()
        while self._bound:
            group, device, size = self._bound.pop()
            handle = self.blocks[group].handle
            quietly(
                "a multicast binding",
                self._driver.call,
                "cuMulticastUnbind",
                handle,
                device.device,
                0,
                size,
            )
        for block in self.blocks.values():
            block.free()
        self.blocks.clear()


def share(
    rendezvous: Rendezvous, request: Request, region: Region, tp: int, routed_pitch: int
) -> Multicast:
    """Multicast over the workspaces of `region`, whose contents are lost.

    Collective. A Refusal in all processes, with nothing left of it, if it fails in one.

    Args:
      routed_pitch: bytes from one rank's row to the next, in the slot that the probe uses.
    """
    made = Multicast(request.driver)
    try:
        _connect(made, rendezvous, request, region, tp)
        _probe(made, rendezvous, request, region, routed_pitch)
    except BaseException:
        made.free()
        raise
    return made


def _roots(everyone: Sequence[Member]) -> dict[int, Member]:
    """The member that creates each group's object."""
    return {member.group: member for member in everyone if member.rank == 0}


def _connect(
    made: Multicast, rendezvous: Rendezvous, request: Request, region: Region, tp: int
) -> None:
    driver, kind = request.driver, region.kind
    roots = _roots(request.everyone)
    mine = {member.group for member in request.local}
    rooted = [group for group in sorted(mine) if roots[group].process == rendezvous.me]
    size = next(iter(region.sizes.values()))

    def create() -> dict[str, str]:
        exported = {}
        for group in rooted:
            with naming(roots[group]):
                handle = driver.call("cuMulticastCreate", _properties(driver, kind, tp, size))
                made.blocks[group] = VirtualBlock(driver, handle, size)
                if kind == FABRIC:
                    exported[str(group)] = cuda_memory.export_handle(driver, kind, handle).hex()
        return exported

    answers = rendezvous.agree("creating multicast objects", create)
    imported: dict[int, Any] = {}
    descriptors: dict[int, int] = {}
    try:
        if kind == POSIX_FD:
            descriptors.update(_pass(made, rendezvous, request, rooted, roots))
            imported.update(descriptors)
        elif kind == FABRIC:
            for answer in answers:
                for group, text in answer.items():
                    if int(group) in mine and int(group) not in rooted:
                        imported[int(group)] = bytes.fromhex(text)

        def take() -> None:
            for group, exported in imported.items():
                with naming(roots[group]):
                    handle = cuda_memory.import_handle(driver, kind, exported)
                    made.blocks[group] = VirtualBlock(driver, handle, size)

        rendezvous.agree("importing multicast objects", take)
    finally:
        close_all(list(descriptors.values()))

    def add() -> None:
        for member in request.local:
            with naming(member):
                handle = made.blocks[member.group].handle
                driver.call("cuMulticastAddDevice", handle, request.device(member).device)

    # Each step waits for all: binding before every device is added blocks, or fails.
    rendezvous.agree("adding devices to multicast objects", add)

    def bind() -> None:
        for member in request.local:
            with naming(member):
                workspace = region.workspaces[member]
                assert isinstance(workspace, VirtualBlock)
                made.bind(member.group, request.device(member), workspace)

    rendezvous.agree("binding multicast memory", bind)

    def place() -> None:
        for member in request.local:
            with naming(member):
                made.blocks[member.group].place(request.readers(member))

    rendezvous.agree("mapping multicast memory", place)


def _pass(
    made: Multicast,
    rendezvous: Rendezvous,
    request: Request,
    rooted: Sequence[int],
    roots: Mapping[int, Member],
) -> dict[int, int]:
    """Descriptors of the objects of this process's groups that others created, by group."""
    groups = {
        process: {m.group for m in request.everyone if m.process == process}
        for process in rendezvous.participants
    }
    exported: dict[int, int] = {}

    def export() -> None:
        for group in rooted:
            with naming(roots[group]):
                handle = made.blocks[group].handle
                exported[group] = cuda_memory.export_handle(request.driver, POSIX_FD, handle)

    try:
        rendezvous.agree("exporting multicast objects", export)
        outgoing, expected = {}, {}
        for process in rendezvous.participants:
            if process == rendezvous.me:
                continue
            given = [exported[group] for group in rooted if group in groups[process]]
            if given:
                outgoing[process] = given
            taken = _rooted_at(process, groups[rendezvous.me], roots)
            if taken:
                expected[process] = len(taken)
        received = swap(rendezvous, "passing multicast objects", outgoing, expected)
    finally:
        close_all(list(exported.values()))
    return {
        group: descriptor
        for process, descriptors in received.items()
        for group, descriptor in zip(
            _rooted_at(process, groups[rendezvous.me], roots), descriptors, strict=True
        )
    }


def _rooted_at(process: int, groups: set[int], roots: Mapping[int, Member]) -> list[int]:
    return [group for group in sorted(groups) if roots[group].process == process]


def _probe(
    made: Multicast,
    rendezvous: Rendezvous,
    request: Request,
    region: Region,
    routed_pitch: int,
) -> None:
    """Each rank stores a word of its own to all; a Refusal unless all arrived everywhere."""
    driver = request.driver
    # Fresh words: memory may hold those of an earlier probe.
    words = {
        int(device): word
        for answer in rendezvous.agree(
            "choosing multicast probes",
            lambda: {str(m.device_id): secrets.randbits(32) for m in request.local},
        )
        for device, word in answer.items()
    }

    def store() -> None:
        for member in request.local:
            device, late = request.device(member), None
            with naming(member), device.current(), contextlib.ExitStack() as stack:
                module = driver.call("cuModuleLoadData", _PROBE_PTX)
                stack.callback(quietly, "a module", driver.call, "cuModuleUnload", module)
                function = driver.call("cuModuleGetFunction", module, b"probe")
                address = made.address(device, member.group) + member.rank * routed_pitch
                arguments = (
                    (address, words[member.device_id]),
                    (ctypes.c_uint64, ctypes.c_uint32),
                )
                driver.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)
                late = device.synchronize_within(_PROBE_TIMEOUT_S)
                if late:
                    stack.pop_all()  # the module stays where its kernel may run
            if late:
                raise RendezvousError(f"the device of {member} is busy, {late}")

    rendezvous.agree("storing multicast probes", store)

    def check() -> None:
        data = ctypes.create_string_buffer(_PROBE_BYTES)
        for member in request.local:
            device = request.device(member)
            with naming(member), device.current():
                for peer in request.everyone:
                    if peer.group != member.group:
                        continue
                    address = region.workspace(device, member) + peer.rank * routed_pitch
                    driver.call("cuMemcpyDtoH", ctypes.addressof(data), address, _PROBE_BYTES)
                    expected = words[peer.device_id].to_bytes(4, "little") * (_PROBE_BYTES // 4)
                    if data.raw != expected:
                        raise MemberError(f"a multicast store of {peer} did not arrive")

    rendezvous.agree("checking multicast probes", check)

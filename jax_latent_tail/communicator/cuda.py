"""The CUDA communicator: memory that all ranks share, kernels that are loaded, and their end."""

import ctypes
import dataclasses
import logging
import math
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_latent_tail import native
from jax_latent_tail.communicator import bounded, cuda_memory, group, multicast
from jax_latent_tail.communicator.cuda_memory import Block, Kind, Region, naming, quietly
from jax_latent_tail.communicator.driver import Device, Driver, DriverError
from jax_latent_tail.communicator.group import DeviceTable, Member
from jax_latent_tail.communicator.multicast import Multicast
from jax_latent_tail.communicator.rendezvous import Refusal, Rendezvous
from jax_latent_tail.communicator.settings import Settings, agree
from jax_latent_tail.errors import (
    DisagreementError,
    RendezvousError,
    UnavailableError,
)
from jax_latent_tail.kernels import abi, geometry, store
from jax_latent_tail.kernels.variant import MULTICAST, KernelVariant, arch_for
from jax_latent_tail.spec import TailSpec

_log = logging.getLogger("jax_latent_tail")

# Above this a kernel must ask for its dynamic shared memory.
_DEFAULT_SMEM_BYTES = 48 << 10

# Of the time that a process waits for the others, what it waits for its own devices: the others are
# to hear of it before they give up.
_PATIENCE = 0.8

# How long an attempt that failed waits for its devices before it keeps what they may use.
_ABANDON_TIMEOUT_S = 5.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def unsupported(spec: TailSpec) -> str | None:
    """What about these sizes no kernel serves, or None; the same on every rank."""
    latent, hidden = spec.latent_dim or 0, spec.hidden_dim or 0
    if spec.tp > abi.MAX_RANKS:
        return f"{spec.tp} ranks are more than the kernels' {abi.MAX_RANKS}"
    if latent % 8:
        return f"latent_dim={latent} is not a multiple of 8"
    if hidden % (8 * spec.tp):
        return f"hidden_dim={hidden} is not a multiple of 8 * {spec.tp} ranks"
    if latent == 0 and hidden == 0:
        return "rows of no columns"
    if spec.projects and latent > geometry.UP_MAX_LATENT:
        most = geometry.UP_MAX_LATENT
        return f"latent_dim={latent} is more than the {most} that shared memory has room for"
    return None


def call_hash(spec: TailSpec) -> int:
    """What the headers of calls of this description carry."""
    if spec.gathers:
        assert spec.hidden_dim is not None
        return abi.gather_hash(
            spec.op,
            tp=spec.tp,
            latent=spec.latent_dim or 0,
            hidden=spec.hidden_dim,
            residual=spec.has_residual,
        )
    return abi.call_hash(
        spec.op,
        tp=spec.tp,
        latent=spec.latent_dim or 0,
        hidden=spec.hidden_dim or 0,
        top_k=spec.top_k or 0,
        fp32_internal=spec.fp32_internal,
        eps=spec.eps,
    )


class _RecordPage:
    """A page of host memory that kernels write their `abi.Record` to, and that any thread reads.

    Attributes:
      address: in this process.
      device_address: as the device has it.
    """

    def __init__(self, driver: Driver, device: Device):
        self._driver, self._device = driver, device
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        # Not kept: an exported buffer would pin the mapping for ever.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self._registered = False
        try:
            with device.current():
                driver.call("cuMemHostRegister", self.address, mmap.PAGESIZE, flags)
                self._registered = True
                self.device_address = int(driver.call("cuMemHostGetDevicePointer", self.address, 0))
        except BaseException:
            self.free()
            raise

    @property
    def record(self) -> abi.Record:
        return abi.Record.from_address(self.address)

    def clear(self) -> None:
        ctypes.memset(self.address, 0, ctypes.sizeof(abi.Record))

    def free(self) -> None:
        if self._registered and not quietly("a page of host memory", self._unregister):
            return  # the device may write to it: leave it where it is
        self._registered = False
        self._memory.close()

    def _unregister(self) -> None:
        with self._device.current():
            self._driver.call("cuMemHostUnregister", self.address)


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A cubin in a device's context: its kernels, and how many clusters of each are resident."""

    kernels: tuple[native.CudaKernel, ...]
    resident: tuple[int, ...]


@dataclasses.dataclass
class _Home:
    """What one rank keeps for the life of the process, from its first communicator on.

    Captured graphs hold the address of the control block and the kernels, so they are never freed,
    and used again by the next communicator of the same devices and description. The device's
    context is held by it.
    """

    device: Device
    control: Block
    page: _RecordPage
    loaded: dict[str, _Loaded] = dataclasses.field(default_factory=dict)  # by SHA-256 of the cubin
    in_use: bool = True


# By what they serve: (driver, table, spec, kind of memory, device id).
_homes: dict[tuple[Any, DeviceTable, TailSpec, Kind, int], _Home] = {}


# Where each rank's control block is, once calls may have been captured with it.
_controls: dict[tuple[Any, DeviceTable, TailSpec, int], int] = {}


class CudaCommunicator:
    """One device table's ranks in this process, ready to be called.

    Made by `establish`, in all processes of the table at once; `close` ends it.

    Attributes:
      table, spec: what it serves.
      summary: how, for logs.
    """

    def __init__(
        self,
        table: DeviceTable,
        spec: TailSpec,
        everyone: Sequence[Member],
        rendezvous: Rendezvous,
        library: native.Library | None,
    ):
        self.table, self.spec = table, spec
        self.summary = ""
        self._everyone = tuple(everyone)
        self._local = tuple(member for member in everyone if member.ordinal is not None)
        self._rendezvous = rendezvous
        self._library = library
        self._driver: Any = None
        self._devices: dict[int, Device] = {}
        self._region: Region | None = None
        self._homes: dict[Member, _Home] = {}
        self._new_homes: set[Member] = set()
        self._multicast: Multicast | None = None
        self._modules: list[tuple[Device, Any]] = []
        self._handles: list[int] = []
        self._closed = False

    @classmethod
    def establish(
        cls,
        table: DeviceTable,
        spec: TailSpec,
        devices: Mapping[int, Any],
        rendezvous: Rendezvous,
        library: native.Library | UnavailableError,
        driver: Driver | None = None,
        environ: Mapping[str, str] = os.environ,
        host: str | None = None,
    ) -> "CudaCommunicator":
        """Makes a communicator in every process of the table, or in none.

        Collective, within a session of the rendezvous.

        Args:
          table: global device ids, [groups, ranks].
          spec: of the calls; `unsupported` has nothing against it.
          devices: the `jax.Device` of each id.
          library: the native library, or why this process has none.
          driver: None loads cuda-bindings.
          host: what tells hosts apart; None reads the boot id.

        Raises:
          Refusal: it cannot be, for the reason in the message; in every process.
          DisagreementError: the processes differ in what they want or in their version; in every
            process.
          ArgumentValueError: an environment variable has a value that is not allowed.
          RendezvousError: some process did not come, or left.
        """
        everyone = group.members(table, devices, rendezvous.me)
        loaded = None if isinstance(library, UnavailableError) else library
        self = cls(table, spec, everyone, rendezvous, loaded)
        try:
            settings = agree(
                rendezvous,
                spec,
                environ,
                {"kernel ABI": abi.ABI_VERSION, "kernel sources": store.source_hash()},
            )

            def check() -> dict[str, Any]:
                if isinstance(library, UnavailableError):
                    raise library
                self._driver = driver or Driver.load()
                return self._look_at_devices(host or _BOOT_ID.read_text().strip())

            facts = rendezvous.agree("looking at the devices", check)
            self._make(settings, facts)
        except Refusal:
            self._abandon(agreed=True)
            raise
        except BaseException as error:
            self._abandon(agreed=rendezvous.all_raise(error))
            raise
        return self

    def failure(self) -> str | None:
        """What went wrong on the first of this process's ranks that failed, or None."""
        for home in self._homes.values():
            record = home.page.record
            if record.code:
                return f"{self.spec}: {record.describe()}"
        return None

    def close(self, timeout_s: float) -> None:
        """Ends it: calls fail from now on, graphs give NaN, shared memory is released.

        Waits for the devices and for the other processes, which close theirs, no longer than
        `timeout_s` in all; releases no memory that may still be in use. May be called again.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        self._close_handles()
        idle = bounded.within(self._stop_kernels, timeout_s)
        if idle is not None:
            _log.warning("%s is left as it is, nothing is freed: %s", self.summary, idle)
        met = self._rendezvous.barrier(_left(deadline))
        if not met:
            _log.warning("not all processes came to close %s", self.summary)
        if idle is not None:
            self._give_up()
            return
        assert self._region
        self._release_multicast()
        # Ordinary memory must not be freed before its peers have let it go.
        released = self._region.release_peers()
        if self._region.kind == cuda_memory.IPC and not (
            met and released and self._rendezvous.barrier(_left(deadline))
        ):
            _log.warning("%s: a peer may still use the workspace, it is not freed", self.summary)
        else:
            self._region.release_workspaces()
        for member, home in self._homes.items():
            home.in_use = False
            if member not in self._new_homes:
                self._release_device(self._devices[member.ordinal])  # type: ignore[index]
        self._devices.clear()

    # Making.

    def _look_at_devices(self, host: str) -> dict[str, Any]:
        """What the others need to know of this process and its devices."""
        driver = self._driver
        driver.call("cuInit", 0)
        facts = {}
        for member in self._local:
            with naming(member):
                assert member.ordinal is not None
                device = Device(driver, member.ordinal)
                self._devices[member.ordinal] = device
                has_multicast = bool(device.attribute("MULTICAST_SUPPORTED"))
                arch = arch_for(
                    device.attribute("COMPUTE_CAPABILITY_MAJOR"),
                    device.attribute("COMPUTE_CAPABILITY_MINOR"),
                )
                facts[str(member.device_id)] = [
                    driver.uuid(device.device),
                    arch,
                    has_multicast,
                ]
        served = (driver.bindings, self.table, self.spec)
        kept = sorted({key[3].name for key in _homes if key[:3] == served})
        return {"host": host, "user": os.geteuid(), "devices": facts, "kept": kept}

    def _make(self, settings: Settings, facts: Sequence[Mapping[str, Any]]) -> None:
        """The agreed steps from the devices on."""
        rendezvous = self._rendezvous
        hosts, devices = _compare(rendezvous, facts)
        uuids = {member: devices[str(member.device_id)][0] for member in self._everyone}
        variant = KernelVariant.of(self.spec, _one_arch(self._everyone, devices))
        cubin = self._agree_on_cubin("finding the kernel", variant)

        # Mapping memory beside kernels that wait for a peer can block, and so can loading.
        rendezvous.agree("waiting for the devices", self._synchronize)

        kinds = cuda_memory.candidates(self._everyone, hosts)
        # Captured graphs hold the control blocks of an earlier communicator.
        kept = {name for fact in facts for name in fact["kept"]}
        if kept:
            kinds = tuple(kind for kind in kinds if kind.name in kept)
        request = cuda_memory.Request(
            driver=self._driver,
            everyone=self._everyone,
            devices=self._devices,
            uuids=uuids,
            control_bytes=variant.control_bytes(self.spec.max_tokens),
            workspace_bytes=variant.workspace_bytes(self.spec.max_tokens),
            kept_controls={
                (kind, member): home.control
                for kind in kinds
                for member in self._local
                if (home := _homes.get(self._home_key(kind, member))) and not home.in_use
            },
        )
        if settings.multicast:
            request = self._with_multicast_granule(request, kinds)
        self._region = cuda_memory.share(kinds, rendezvous, request)
        if settings.multicast:
            cubin = self._try_multicast(request, variant, devices) or cubin
        rendezvous.agree("preparing the memory", lambda: self._prepare_memory(settings, request))
        sharing = {
            member: sum(
                (hosts[other.process], uuids[other]) == (hosts[member.process], uuids[member])
                for other in self._everyone
            )
            for member in self._local
        }
        plans: dict[Member, tuple[tuple[native.CudaKernel, ...], list[tuple[int, int]]]] = {}

        def load() -> None:
            for member in self._local:
                with naming(member):
                    plans[member] = self._load(member, cubin, sharing[member])

        rendezvous.agree("loading the kernels", load)
        rendezvous.agree("registering the ranks", lambda: self._register(plans, settings, variant))
        for member, home in self._homes.items():
            home.in_use = True
            _homes[self._home_key(self._region.kind, member)] = home
        self.summary = (
            f"CUDA, {self._region.kind.name} memory of {request.workspace_bytes} bytes a rank,"
            f" {cubin.variant.publish}, kernel {cubin.origin}"
        )

    def _with_multicast_granule(
        self, request: cuda_memory.Request, kinds: Sequence[Kind]
    ) -> cuda_memory.Request:
        """The request with sizes that can be bound to multicast, where this process can tell."""
        try:
            granule = multicast.granularity(self._driver, kinds[0], self.spec.tp)
        except DriverError as error:
            # Without it the sizes differ, or creating the object fails: for all alike.
            _log.debug("no multicast granularity: %s", error)
            return request
        return dataclasses.replace(request, granule=granule)

    def _try_multicast(
        self,
        request: cuda_memory.Request,
        variant: KernelVariant,
        devices: Mapping[str, Sequence[Any]],
    ) -> store.Cubin | None:
        """The kernel that publishes by multicast, if the group can; in all processes or in none."""
        assert self._region
        tp = self.spec.tp
        supported = {member: devices[str(member.device_id)][2] for member in self._everyone}
        reason = multicast.obstacle(self._everyone, request.uuids, supported, self._region)
        pitch = variant.slot.shared_pitch if self.spec.gathers else variant.slot.routed_pitch
        if pitch == 0 or tp == 1:
            reason = "nothing is published to all ranks"
        if reason is None:
            try:
                cubin = self._agree_on_cubin(
                    "finding the multicast kernel",
                    dataclasses.replace(variant, publish=MULTICAST),
                )
                self._multicast = multicast.share(
                    self._rendezvous, request, self._region, tp, pitch
                )
                return cubin
            except Refusal as refusal:
                reason = str(refusal)
        _log.warning("no multicast, although it was asked for: %s", reason)
        return None

    def _home_key(self, kind: Kind, member: Member) -> Any:
        return (self._driver.bindings, self.table, self.spec, kind, member.device_id)

    def _agree_on_cubin(self, step: str, variant: KernelVariant) -> store.Cubin:
        found: list[store.Cubin] = []

        def find() -> dict[str, Any]:
            found.append(store.find(variant))
            kernels = [dataclasses.astuple(kernel) for kernel in found[0].kernels]
            return {"kernel's SHA-256": found[0].sha256, "kernel's entries": kernels}

        answers = self._rendezvous.agree(step, find)
        _require_same(self._rendezvous, answers)
        return found[0]

    def _patience_s(self) -> float:
        """How long a step may wait for this process's devices, so that the others hear of it."""
        return _PATIENCE * self._rendezvous.timeout_s

    def _synchronize(self) -> None:
        """Waits until the devices have done all that they were told.

        Raises a RendezvousError that names one which works on for too long, or the error that is
        found.
        """
        deadline = time.monotonic() + self._patience_s()
        for member in self._local:
            assert member.ordinal is not None
            with naming(member):
                late = self._devices[member.ordinal].synchronize_within(_left(deadline))
            if late:
                raise RendezvousError(f"the device of {member} is busy, {late}")

    def _prepare_memory(self, settings: Settings, request: cuda_memory.Request) -> None:
        """Writes workspaces, control blocks and records as they are before the first call."""
        # A program of another thread may have come in between, which the writes wait for.
        late = bounded.attempt(lambda: self._write_memory(settings, request), self._patience_s())
        if late:
            devices = ", ".join(str(member.device_id) for member in self._local)
            raise RendezvousError(f"of devices {devices} one is busy, {late}")

    def _write_memory(self, settings: Settings, request: cuda_memory.Request) -> None:
        driver, region = self._driver, self._region
        assert region
        for member in self._local:
            with naming(member):
                device = request.device(member)
                control = region.controls[member]
                home = _homes.get(self._home_key(region.kind, member))
                if home is None or home.control is not control:
                    home = _Home(device, control, _RecordPage(driver, device))
                    self._new_homes.add(member)
                self._homes[member] = home
                home.page.clear()
                block = abi.Control()
                block.workspace = region.workspace(device, member)
                block.record = home.page.device_address
                if self._multicast:
                    block.multicast = self._multicast.address(device, member.group)
                block.deadline_ns = math.ceil(settings.deadline_s * 1e9)
                for peer in self._everyone:
                    if peer.group == member.group:
                        block.peer_workspace[peer.rank] = region.workspace(device, peer)
                        block.peer_broken[peer.rank] = (
                            region.control(device, peer) + abi.Control.broken.offset
                        )
                head = ctypes.sizeof(block)
                address = control.address(device)
                with device.current():
                    driver.call(
                        "cuMemsetD32",
                        block.workspace,
                        abi.SENTINEL,
                        request.workspace_bytes // 4,
                    )
                    driver.call(
                        "cuMemsetD32", address + head, 0, (request.control_bytes - head) // 4
                    )
                    driver.call("cuMemcpyHtoD", address, ctypes.addressof(block), head)
        for member in self._local:
            with naming(member):
                request.device(member).synchronize()

    def _load(
        self, member: Member, cubin: store.Cubin, sharing: int
    ) -> tuple[tuple[native.CudaKernel, ...], list[tuple[int, int]]]:
        """The kernels in a member's context, and how to launch each number of tokens.

        Args:
          sharing: members of the table on the same device.
        """
        assert member.ordinal is not None
        device, home = self._devices[member.ordinal], self._homes[member]
        if cubin.sha256 not in home.loaded:
            home.loaded[cubin.sha256] = self._load_module(device, cubin)
            if member not in self._new_homes:
                self._modules.pop()  # it is the home's now, which outlives an attempt that fails
        loaded = home.loaded[cubin.sha256]
        spec, variant = self.spec, cubin.variant
        geometries = geometry.entries(variant.tp, variant.latent, variant.hidden, variant.op)
        sm_count = device.attribute("MULTIPROCESSOR_COUNT")
        roles = (
            1 if spec.gathers else sum(d is not None for d in (spec.latent_dim, spec.hidden_dim))
        )
        plans = []
        for tokens in range(1, spec.max_tokens + 1):
            index = geometry.choose(geometries, tokens)
            ctas = geometry.token_ctas(
                variant.slots(tokens),
                roles=roles,
                active_clusters=loaded.resident[index],
                sm_count=sm_count,
                ranks_on_device=sharing,
                reserved_sms=geometry.RESERVED_SMS if sharing == 1 else 0,
                cluster=geometries[index].cluster,
                untouched_sms=geometry.UNTOUCHED_SMS if sharing > 1 else 0,
            )
            plans.append((index, ctas))
        return loaded.kernels, plans

    def _load_module(self, device: Device, cubin: store.Cubin) -> _Loaded:
        driver = self._driver
        attribute = driver.CUfunction_attribute
        kernels, resident = [], []
        with device.current():
            module = driver.call("cuModuleLoadData", cubin.data)
            self._modules.append((device, module))
            for entry in cubin.kernels:
                function = driver.call("cuModuleGetFunction", module, entry.symbol.encode())
                # An SM keeps its split of cache and shared memory while anything runs on it. With
                # the largest share, kernels that other ranks need fit beside CTAs that wait.
                attributes = {attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: 100}
                if entry.smem_bytes > _DEFAULT_SMEM_BYTES:
                    most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    attributes[most] = entry.smem_bytes
                for name, value in attributes.items():
                    driver.call("cuFuncSetAttribute", function, name, value)
                clusters = driver.call(
                    "cuOccupancyMaxActiveClusters", function, _launch(driver, entry)
                )
                resident.append(int(clusters))
                kernels.append(
                    native.CudaKernel(int(function), entry.cluster, entry.threads, entry.smem_bytes)
                )
        return _Loaded(tuple(kernels), tuple(resident))

    def _register(
        self,
        plans: Mapping[Member, tuple[tuple[native.CudaKernel, ...], list[tuple[int, int]]]],
        settings: Settings,
        variant: KernelVariant,
    ) -> None:
        assert self._library
        assert self._region
        slots = variant.slots(self.spec.max_tokens)
        for member in self._local:
            assert member.ordinal is not None
            device, home = self._devices[member.ordinal], self._homes[member]
            control = home.control.address(device)
            place = (self._driver.bindings, self.table, self.spec, member.device_id)
            if _controls.setdefault(place, control) != control:
                raise UnavailableError(
                    f"{member} had an earlier communicator, whose control block captured graphs"
                    " hold; it cannot be had again in this process"
                )
            kernels, launches = plans[member]
            self._handles.append(
                self._library.add_cuda_rank(
                    ordinal=member.ordinal,
                    devices=[device_id for ids in self.table for device_id in ids],
                    spec=self.spec,
                    rank=member.rank,
                    control=control,
                    record=home.page.address,
                    call_hash=call_hash(self.spec),
                    slots=slots,
                    kernels=kernels,
                    plans=launches,
                    pdl=settings.pdl,
                )
            )

    # Ending.

    def _abandon(self, agreed: bool) -> None:
        """Releases everything of an attempt that failed; no call was made with it.

        Args:
          agreed: whether all processes are here.
        """
        self._closed = True
        self._close_handles()
        keeps = bool(self._region) and self._may_be_in_use()
        if not keeps:
            self._unload()
            for member in self._new_homes & set(self._homes):
                self._homes[member].page.free()
            self._release_multicast()
        if self._region:
            try:
                self._region.abandon(self._rendezvous if agreed else None, keeps)
            except RendezvousError as error:  # what ends this attempt is known already
                _log.warning("memory of an attempt that failed is not freed: %s", error)
        if keeps:
            _abandoned.append(self)
            return
        for device in self._devices.values():
            self._release_device(device)
        self._devices.clear()
        self._homes.clear()

    def _may_be_in_use(self) -> bool:
        """Whether a device still works, maybe with memory of this attempt.

        Marks control blocks of an earlier communicator as closed again: captured graphs hold them.
        """
        deadline = time.monotonic() + _ABANDON_TIMEOUT_S
        busy = [self._is_busy(member, _left(deadline)) for member in self._local]
        return any(busy)

    def _is_busy(self, member: Member, timeout_s: float) -> bool:
        assert member.ordinal is not None
        device = self._devices[member.ordinal]
        kept = None if member in self._new_homes else self._homes.get(member)

        def stop() -> None:
            if kept:
                quietly("a control block", self._mark_closed, kept)
            device.synchronize()

        try:
            late = bounded.attempt(stop, timeout_s)
        except Exception as error:  # then it does nothing any more
            _log.debug("the device of %s, of an attempt that failed: %s", member, error)
            return False
        if late:
            _log.warning(
                "memory of an attempt that failed is not freed: the device of %s is busy, %s",
                member,
                late,
            )
        return late is not None

    def _close_handles(self) -> None:
        for handle in self._handles:
            assert self._library
            self._library.close_cuda_rank(handle)
        self._handles.clear()

    def _stop_kernels(self) -> None:
        """Lets kernels that are under way end with their peers, and any to come without."""
        for device in self._devices.values():
            device.synchronize()
        for home in self._homes.values():
            self._mark_closed(home)
        for device in self._devices.values():
            device.synchronize()

    def _mark_closed(self, home: _Home) -> None:
        word = (1).to_bytes(4, "little")
        address = home.control.address(home.device) + abi.Control.closed.offset
        with home.device.current():
            self._driver.call("cuMemcpyHtoD", address, word, len(word))

    def _release_multicast(self) -> None:
        if self._multicast:
            self._multicast.free()
            self._multicast = None

    def _unload(self) -> None:
        def unload(device: Device, module: Any) -> None:
            with device.current():
                self._driver.call("cuModuleUnload", module)

        while self._modules:
            quietly("a module", unload, *self._modules.pop())

    def _release_device(self, device: Device) -> None:
        quietly("a context", device.release)

    def _give_up(self) -> None:
        """Keeps what a lost or busy context has, for ever."""
        assert self._region
        for member in self._homes:
            _homes.pop(self._home_key(self._region.kind, member), None)
        _abandoned.append(self)


# Communicators whose memory could not be released: kept, so that nothing of it is.
_abandoned: list[CudaCommunicator] = []


def _compare(
    rendezvous: Rendezvous, facts: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, str], dict[str, list[Any]]]:
    """Each process's host, and by device id its UUID, arch and whether it has multicast.

    A Refusal if the users differ.
    """
    for process, fact in zip(rendezvous.participants, facts, strict=True):
        if fact["user"] != facts[0]["user"]:
            raise Refusal(
                f"{rendezvous.name(rendezvous.participants[0])} runs as user {facts[0]['user']}"
                f" and {rendezvous.name(process)} as user {fact['user']}: memory is shared only"
                " between processes of one user"
            )
    hosts = dict(zip(rendezvous.participants, (fact["host"] for fact in facts), strict=True))
    devices = {key: value for fact in facts for key, value in fact["devices"].items()}
    return hosts, devices


def _one_arch(everyone: Sequence[Member], devices: Mapping[str, Sequence[Any]]) -> str:
    """The architecture of all devices; a Refusal where they differ."""
    first = str(devices[str(everyone[0].device_id)][1])
    for member in everyone:
        arch = devices[str(member.device_id)][1]
        if arch != first:
            raise Refusal(f"the devices differ: {everyone[0]} is {first}, {member} is {arch}")
    return first


def _require_same(rendezvous: Rendezvous, answers: Sequence[Mapping[str, Any]]) -> None:
    """A DisagreementError, in every process, if the answers of an agreed step differ."""
    for process, answer in zip(rendezvous.participants, answers, strict=True):
        for name, value in answer.items():
            if value != answers[0][name]:
                raise DisagreementError(
                    f"the {name} is {answers[0][name]} in"
                    f" {rendezvous.name(rendezvous.participants[0])} and {value} in"
                    f" {rendezvous.name(process)}"
                )


def _launch(driver: Driver, entry: store.KernelEntry) -> Any:
    """A CUlaunchConfig of one cluster, to ask how many fit."""
    dims = driver.CUlaunchAttribute()
    dims.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims.value.clusterDim.x, dims.value.clusterDim.y, dims.value.clusterDim.z = 1, entry.cluster, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 1, entry.cluster, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = entry.threads, 1, 1
    config.sharedMemBytes = entry.smem_bytes
    config.attrs = [dims]
    config.numAttrs = 1
    return config


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.1)

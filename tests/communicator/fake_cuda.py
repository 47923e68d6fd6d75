"""A CUDA driver for tests, as several processes of one or more hosts see it.

Each `FakeDriver` is one process's `cuda.bindings.driver`: threads of the test stand in for
processes. Memory has contents, shareable handles are real file descriptors, and whatever a correct
program never does raises `Misuse`, also where the program would swallow that (`Machine.misuses`).
"""

import collections
import contextlib
import ctypes
import itertools
import os
import threading

from cuda.bindings import driver as real

GRANULARITY = 64 << 10
MULTICAST_GRANULARITY = 128 << 10
_DEFAULT_SMEM_BYTES = 48 << 10
_MOST_SMEM_BYTES = 227 << 10
_PACK = 2 << 20  # ordinary allocations below this share a block, and so an IPC handle


class Misuse(AssertionError):
    """Something that undoes the state of a real driver, or that it answers with a crash."""


class Failure(Exception):
    """A call that returns an error."""

    def __init__(self, code):
        super().__init__(code)
        self.status = getattr(real.CUresult, f"CUDA_ERROR_{code}")


class Physical:
    """A GPU: who has it open is the processes' business."""

    def __init__(self, index, capability, sms, memory):
        self.uuid = index.to_bytes(16, "big")
        self.index, self.capability, self.sms = index, capability, sms
        self.total = self.free = memory
        self.multicast = True


class Allocation:
    """Physical memory; alive while a handle, a mapping or an address refers to it."""

    def __init__(self, machine, device, size, handle_types):
        if size > device.free:
            raise Failure("OUT_OF_MEMORY")
        device.free -= size
        self.machine, self.device, self.size, self.handle_types = (
            machine,
            device,
            size,
            handle_types,
        )
        # What its last user left there: nobody clears it.
        self.data = machine.used.pop((device, size), None) or bytearray(os.urandom(64)) * (
            size // 64
        )
        self.references = 0
        self.opened = 0  # by how many other processes, over IPC
        self.fd = os.memfd_create("fake_cuda", os.MFD_CLOEXEC)
        machine.by_inode[os.fstat(self.fd).st_ino] = self
        self.identity = next(machine.numbers)
        machine.by_identity[self.identity] = self

    def take(self):
        self.references += 1
        return self

    def drop(self):
        self.references -= 1
        assert self.references >= 0
        if self.references == 0:
            self.device.free += self.size
            self.machine.used[self.device, self.size] = self.data
            os.close(self.fd)
            self.fd = None

    def write(self, offset, data):
        self.data[offset : offset + len(data)] = data

    def read(self, offset, size):
        return bytes(self.data[offset : offset + size])


class MulticastObject:
    """Memory whose writes reach what is bound to it."""

    def __init__(self, machine, devices, size, handle_types):
        self.machine, self.devices, self.size = machine, devices, size
        self.handle_types = handle_types
        self.added = set()
        self.bound = {}  # physical device -> (allocation, offset)
        self.references = 0
        self.fd = os.memfd_create("fake_cuda", os.MFD_CLOEXEC)
        machine.by_inode[os.fstat(self.fd).st_ino] = self
        self.identity = next(machine.numbers)
        machine.by_identity[self.identity] = self

    def take(self):
        self.references += 1
        return self

    def drop(self):
        self.references -= 1
        assert self.references >= 0
        if self.references == 0:
            os.close(self.fd)
            self.fd = None
            for allocation, _ in self.bound.values():
                allocation.drop()
            self.bound.clear()


class Machine:
    """A host. `same_fabric_as`: another whose memory can be imported here."""

    def __init__(self, devices=8, capability=(9, 0), sms=132, memory=1 << 30, same_fabric_as=None):
        first = same_fabric_as.first + 64 if same_fabric_as else 1
        self.first = first
        self.lock = same_fabric_as.lock if same_fabric_as else threading.RLock()
        self.devices = [Physical(first + i, capability, sms, memory) for i in range(devices)]
        self.no_peer_access = set()  # pairs of indices
        self.handle_types = {1, 8}  # POSIX_FILE_DESCRIPTOR, FABRIC
        self.virtual = self.ipc = True
        self.by_inode = {}
        self.by_identity = same_fabric_as.by_identity if same_fabric_as else {}
        self.numbers = same_fabric_as.numbers if same_fabric_as else itertools.count(1)
        self.used = {}
        self.misuses = []
        self.processes = []

    def process(self, visible=None):
        visible = range(len(self.devices)) if visible is None else visible
        process = FakeDriver(self, [self.devices[index] for index in visible])
        self.processes.append(process)
        return process


class FakeContext:
    def __init__(self, ordinal):
        self.ordinal = ordinal


class Mapping:
    def __init__(self, memory, size):
        self.memory, self.size = memory, size
        self.access = set()


def _number(value):
    return int(value)


class FakeDriver:
    """One process's view. Attributes beside the driver's own functions are for tests.

    Attributes:
      faults: (function, n) -> error name: the n-th call, from 1, returns it.
      calls: how often each function was called.
      trace: all calls in order.
      lost: the error that every call answers with, once the context is dead.
    """

    def __init__(self, machine, devices):
        self.machine = machine
        self.visible = devices
        self.number = next(machine.numbers)
        self.faults = {}
        self.calls = collections.Counter()
        self.trace = []
        self.lost = None
        self.busy = threading.Event()  # cleared: kernels are running
        self.busy.set()
        self.retained = collections.Counter()
        self.contexts = [FakeContext(ordinal) for ordinal in range(len(devices))]
        self.handles = {}
        self.reserved = {}
        self.mapped = {}
        self.plain = {}
        self.opened = {}
        self.registered = {}
        self.modules = {}
        self.functions = {}
        self.smem_bytes = {}  # that a function may have
        self.peer_access = set()
        self.pending = collections.defaultdict(list)  # writes by ordinal that may not be done yet
        self.initialised = False
        self._local = threading.local()
        # Address spaces that do not overlap: an address of another process is then found out.
        self._next = (self.number << 44) + (1 << 30)
        self._counter = itertools.count((self.number << 20) + 1)

    # How calls are made.

    def __getattr__(self, name):
        if not name.startswith("cu"):
            return getattr(real, name)
        body = object.__getattribute__(self, f"_{name}")

        def function(*arguments):
            with self.machine.lock:
                self.calls[name] += 1
                self.trace.append(name)
                if self.lost:
                    return (getattr(real.CUresult, f"CUDA_ERROR_{self.lost}"),)
                code = self.faults.get((name, self.calls[name]))
                if code:
                    return (getattr(real.CUresult, f"CUDA_ERROR_{code}"),)
                try:
                    if name != "cuInit" and not self.initialised:
                        raise Misuse(f"{name} before cuInit")
                    result = body(*arguments)
                except Failure as failure:
                    return (failure.status,)
                except Misuse as misuse:
                    self.machine.misuses.append(f"process {self.number}: {name}: {misuse}")
                    raise
            if name == "cuCtxSynchronize" and not self.busy.wait(30):
                raise Misuse("a test left the device busy")
            if result is None:
                return (real.CUresult.CUDA_SUCCESS,)
            if isinstance(result, tuple):
                return (real.CUresult.CUDA_SUCCESS, *result)
            return real.CUresult.CUDA_SUCCESS, result

        function.__name__ = name
        return function

    @property
    def stack(self):
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def current(self):
        if not self.stack:
            raise Misuse("no context is current")
        return self.stack[-1].ordinal

    def _fresh(self, size):
        address = self._next
        self._next += -(-size // (1 << 21)) * (1 << 21) + (1 << 21)
        return address

    def _resolve(self, address, size, ordinal):
        """(memory, offset) of what a device of this process reaches at an address."""
        for base, mapping in self.mapped.items():
            if base <= address < base + mapping.size:
                if address + size > base + mapping.size:
                    raise Misuse("access beyond a mapping")
                if ordinal not in mapping.access:
                    raise Misuse(f"device {ordinal} has no access to {address:#x}")
                return mapping.memory, address - base
        for base, (owner, allocation) in self.plain.items():
            if base <= address < base + allocation.size:
                if address + size > base + allocation.size:
                    raise Misuse("access beyond an allocation")
                if owner != ordinal and (ordinal, owner) not in self.peer_access:
                    raise Misuse(f"device {ordinal} has no peer access to {owner}")
                return allocation, address - base
        for (opener, base), allocation in self.opened.items():
            if base <= address < base + allocation.size:
                if opener != ordinal:
                    raise Misuse("memory opened in another context")
                return allocation, address - base
        raise Misuse(f"{address:#x} is not memory")

    def write(self, address, data, ordinal):
        """A store by a device of this process, say of a kernel."""
        with self.machine.lock:
            memory, offset = self._resolve(address, len(data), ordinal)
            if isinstance(memory, MulticastObject):
                for allocation, start in memory.bound.values():
                    allocation.write(start + offset, data)
            else:
                memory.write(offset, data)

    def read(self, address, size, ordinal):
        """A load by a device of this process."""
        with self.machine.lock:
            memory, offset = self._resolve(address, size, ordinal)
            if isinstance(memory, MulticastObject):
                raise Misuse("a load from multicast memory")
            return memory.read(offset, size)

    def holdings(self):
        """What this process holds, by kind; empty ones left out."""
        counts = {
            "contexts": sum(self.retained.values()),
            "handles": len(self.handles),
            "reservations": len(self.reserved),
            "mappings": len(self.mapped),
            "ordinary allocations": len(self.plain),
            "opened allocations": len(self.opened),
            "host pages": len(self.registered),
            "modules": len(self.modules),
        }
        return {kind: count for kind, count in counts.items() if count}

    def _device(self, device):
        ordinal = _number(device)
        if not 0 <= ordinal < len(self.visible):
            raise Failure("INVALID_DEVICE")
        return self.visible[ordinal]

    # Devices and contexts.

    def _cuInit(self, flags):
        assert flags == 0
        self.initialised = True

    def _cuDeviceGetCount(self):
        return len(self.visible)

    def _cuDeviceGet(self, ordinal):
        self._device(ordinal)
        return ordinal

    def _cuDeviceGetUuid(self, device):
        uuid = real.CUuuid()
        ctypes.memmove(uuid.getPtr(), self._device(device).uuid, 16)
        return uuid

    def _cuDeviceGetAttribute(self, attribute, device):
        physical = self._device(device)
        names = {
            "COMPUTE_CAPABILITY_MAJOR": physical.capability[0],
            "COMPUTE_CAPABILITY_MINOR": physical.capability[1],
            "MULTIPROCESSOR_COUNT": physical.sms,
            "MULTICAST_SUPPORTED": int(physical.multicast),
        }
        return names[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def _cuDeviceCanAccessPeer(self, device, peer):
        a, b = self._device(device), self._device(peer)
        if a is b:
            raise Misuse("peer access to itself")
        pair = (self.machine.devices.index(a), self.machine.devices.index(b))
        return int(pair not in self.machine.no_peer_access)

    def _cuDevicePrimaryCtxRetain(self, device):
        self._device(device)
        self.retained[_number(device)] += 1
        return self.contexts[_number(device)]

    def _cuDevicePrimaryCtxRelease(self, device):
        if self.retained[_number(device)] == 0:
            raise Misuse("a context released too often")
        self.retained[_number(device)] -= 1

    def _cuCtxPushCurrent(self, context):
        if not self.retained[context.ordinal]:
            raise Misuse("a context that is not retained")
        self.stack.append(context)

    def _cuCtxPopCurrent(self):
        if not self.stack:
            raise Misuse("pop without push")
        return self.stack.pop()

    def _cuCtxSynchronize(self):
        self._finish(self.current())

    def _finish(self, ordinal):
        writes = self.pending.pop(ordinal, [])
        for address, data in writes:
            self.write(address, data, ordinal)

    def _cuCtxEnablePeerAccess(self, context, flags):
        pair = (self.current(), context.ordinal)
        if pair[0] == pair[1]:
            raise Failure("INVALID_DEVICE")
        if pair in self.peer_access:
            raise Failure("PEER_ACCESS_ALREADY_ENABLED")
        self.peer_access.add(pair)

    def _cuMemGetInfo(self):
        device = self.visible[self.current()]
        return device.free, device.total

    # Virtual memory management.

    def _cuMemGetAllocationGranularity(self, properties, option):
        return GRANULARITY

    def _cuMemCreate(self, size, properties, flags):
        assert properties.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert properties.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        types = properties.requestedHandleTypes.value
        if size == 0 or size % GRANULARITY:
            raise Failure("INVALID_VALUE")
        if not self.machine.virtual or (types and types not in self.machine.handle_types):
            raise Failure("NOT_SUPPORTED")
        device = self._device(properties.location.id)
        return self._new_handle(Allocation(self.machine, device, size, types))

    def _new_handle(self, memory):
        handle = next(self._counter)
        self.handles[handle] = memory.take()
        return handle

    def _cuMemRelease(self, handle):
        if handle not in self.handles:
            raise Misuse("an unknown handle released")
        self.handles.pop(handle).drop()

    def _cuMemExportToShareableHandle(self, handle, kind, flags):
        memory = self._known(handle)
        if not kind.value & memory.handle_types:
            raise Failure("INVALID_VALUE")
        if kind.value == 1:
            return os.dup(memory.fd)
        exported = real.CUmemFabricHandle()
        exported.data = memory.identity.to_bytes(64, "little")
        return exported

    def _known(self, handle):
        if handle not in self.handles:
            raise Misuse("an unknown handle")
        return self.handles[handle]

    def _cuMemImportFromShareableHandle(self, exported, kind):
        if kind.value == 1:
            memory = self.machine.by_inode.get(os.fstat(exported).st_ino)
        else:
            memory = self.machine.by_identity.get(int.from_bytes(exported, "little"))
        if memory is None or memory.fd is None:
            raise Failure("INVALID_HANDLE")
        return self._new_handle(memory)

    def _cuMemAddressReserve(self, size, alignment, address, flags):
        if size % GRANULARITY:
            raise Failure("INVALID_VALUE")
        address = self._fresh(size)
        self.reserved[address] = size
        return real.CUdeviceptr(address)

    def _cuMemAddressFree(self, address, size):
        if self.reserved.get(_number(address)) != size:
            raise Misuse("not a reserved range")
        if _number(address) in self.mapped:
            raise Misuse("a range freed while mapped")
        del self.reserved[_number(address)]

    def _cuMemMap(self, address, size, offset, handle, flags):
        address = _number(address)
        memory = self._known(handle)
        if self.reserved.get(address) != size or address in self.mapped:
            raise Misuse("mapped where nothing is reserved")
        if offset + size > memory.size:
            raise Failure("INVALID_VALUE")
        if isinstance(memory, MulticastObject) and len(memory.added) != memory.devices:
            raise Misuse("multicast mapped before all devices were added")
        self.mapped[address] = Mapping(memory.take(), size)

    def _cuMemUnmap(self, address, size):
        mapping = self.mapped.get(_number(address))
        if mapping is None or mapping.size != size:
            raise Misuse("unmapped what is not mapped")
        del self.mapped[_number(address)]
        mapping.memory.drop()

    def _cuMemSetAccess(self, address, size, descriptors, count):
        mapping = self.mapped.get(_number(address))
        if mapping is None or mapping.size != size or count != len(descriptors):
            raise Misuse("access to what is not mapped")
        for descriptor in descriptors:
            assert descriptor.flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._device(descriptor.location.id)
            mapping.access.add(descriptor.location.id)

    # Ordinary memory and IPC.

    def _cuMemAlloc(self, size):
        ordinal = self.current()
        if size < _PACK:
            raise Misuse("a small allocation shares its pages with others")
        allocation = Allocation(self.machine, self.visible[ordinal], size, 0).take()
        address = self._fresh(size)
        self.plain[address] = (ordinal, allocation)
        return real.CUdeviceptr(address)

    def _cuMemFree(self, address):
        if _number(address) not in self.plain:
            raise Misuse("freed what is not allocated")
        ordinal, allocation = self.plain.pop(_number(address))
        if ordinal != self.current():
            raise Misuse("freed in another context")
        if allocation.opened:
            raise Misuse("freed while a peer has it open")
        allocation.drop()

    def _cuIpcGetMemHandle(self, address):
        if not self.machine.ipc:
            raise Failure("NOT_SUPPORTED")
        if _number(address) not in self.plain:
            raise Misuse("not the start of an ordinary allocation")
        handle = real.CUipcMemHandle()
        identity = self.plain[_number(address)][1].identity
        ctypes.memmove(handle.getPtr(), identity.to_bytes(64, "little"), 64)
        return handle

    def _cuIpcOpenMemHandle(self, handle, flags):
        identity = int.from_bytes(ctypes.string_at(handle.getPtr(), 64), "little")
        allocation = self.machine.by_identity.get(identity)
        if allocation is None or allocation.fd is None:
            raise Failure("INVALID_VALUE")
        if any(allocation is own for _, own in self.plain.values()):
            raise Failure("INVALID_CONTEXT")
        key = (self.current(), self._fresh(allocation.size))
        self.opened[key] = allocation.take()
        allocation.opened += 1
        return real.CUdeviceptr(key[1])

    def _cuIpcCloseMemHandle(self, address):
        key = (self.current(), _number(address))
        if key not in self.opened:
            raise Misuse("closed what is not open here")
        allocation = self.opened.pop(key)
        allocation.opened -= 1
        allocation.drop()

    # Host memory, copies.

    def _cuMemHostRegister(self, address, size, flags):
        self.current()
        if address in self.registered:
            raise Failure("HOST_MEMORY_ALREADY_REGISTERED")
        ctypes.string_at(address, size)
        self.registered[address] = size

    def _cuMemHostUnregister(self, address):
        self.current()
        if address not in self.registered:
            raise Misuse("not registered")
        del self.registered[address]

    def _cuMemHostGetDevicePointer(self, address, flags):
        self.current()
        if address not in self.registered:
            raise Misuse("not registered")
        return real.CUdeviceptr(address)

    def _cuMemsetD32(self, address, word, count):
        data = word.to_bytes(4, "little") * count
        self._enqueue(_number(address), data)

    def _enqueue(self, address, data):
        """A write that is done when the context is synchronised, at the latest."""
        self._resolve(address, len(data), self.current())
        self.pending[self.current()].append((address, data))

    def _cuMemcpyHtoD(self, address, source, size):
        data = ctypes.string_at(source, size) if isinstance(source, int) else source[:size]
        self._enqueue(_number(address), data)

    def _cuMemcpyDtoH(self, destination, address, size):
        self._finish(self.current())
        ctypes.memmove(destination, self.read(_number(address), size, self.current()), size)

    # Modules.

    def _cuModuleLoadData(self, data):
        module = next(self._counter)
        self.modules[module] = (self.current(), bytes(data))
        return real.CUmodule(module)

    def _cuModuleUnload(self, module):
        if _number(module) not in self.modules:
            raise Misuse("an unknown module unloaded")
        if self.modules.pop(_number(module))[0] != self.current():
            raise Misuse("unloaded in another context")
        for function, (_, _, home) in list(self.functions.items()):
            if home == _number(module):
                del self.functions[function]

    def _cuModuleGetFunction(self, module, name):
        ordinal, data = self.modules[_number(module)]
        if ordinal != self.current():
            raise Misuse("looked up in another context")
        if name not in data:
            raise Failure("NOT_FOUND")
        function = next(self._counter)
        self.functions[function] = (ordinal, name, _number(module))
        return real.CUfunction(function)

    def _cuFuncSetAttribute(self, function, attribute, value):
        assert _number(function) in self.functions
        if attribute.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES":
            if value > _MOST_SMEM_BYTES:
                raise Failure("INVALID_VALUE")
            self.smem_bytes[_number(function)] = value

    def _cuOccupancyMaxActiveClusters(self, function, config):
        ordinal, _, _ = self.functions[_number(function)]
        if ordinal != self.current():
            raise Misuse("a function of another context")
        cluster = config.attrs[0].value.clusterDim
        size = cluster.x * cluster.y * cluster.z
        assert config.gridDimX % cluster.x == config.gridDimY % cluster.y == 0
        allowed = self.smem_bytes.get(_number(function), _DEFAULT_SMEM_BYTES)
        if config.sharedMemBytes > allowed:
            raise Failure("INVALID_VALUE")
        return self.visible[ordinal].sms * (1024 // config.blockDimX) // size

    # Multicast.

    def _cuMulticastGetGranularity(self, properties, option):
        return MULTICAST_GRANULARITY

    def _cuMulticastCreate(self, properties):
        if properties.size % MULTICAST_GRANULARITY:
            raise Failure("INVALID_VALUE")
        memory = MulticastObject(
            self.machine, properties.numDevices, properties.size, properties.handleTypes
        )
        return self._new_handle(memory)

    def _cuMulticastAddDevice(self, handle, device):
        memory = self._known(handle)
        physical = self._device(device)
        if not physical.multicast:
            raise Failure("NOT_SUPPORTED")
        if physical in memory.added or len(memory.added) == memory.devices:
            raise Misuse("a device added twice, or one too many")
        memory.added.add(physical)

    def _cuMulticastBindMem(self, handle, offset, memory_handle, memory_offset, size, flags):
        multicast, allocation = self._known(handle), self._known(memory_handle)
        if len(multicast.added) != multicast.devices:
            raise Misuse("bound before all devices were added: this waits for ever")
        if size % MULTICAST_GRANULARITY or size > allocation.size or size > multicast.size:
            raise Failure("INVALID_VALUE")
        if allocation.device not in multicast.added or allocation.device in multicast.bound:
            raise Misuse("memory of a device that was not added, or twice")
        multicast.bound[allocation.device] = (allocation.take(), memory_offset)

    def _cuMulticastUnbind(self, handle, device, offset, size):
        multicast = self._known(handle)
        if self._device(device) not in multicast.bound:
            raise Misuse("unbound what is not bound")
        multicast.bound.pop(self._device(device))[0].drop()

    def _cuLaunchKernel(self, function, *rest):
        *dims, shared, stream, parameters, extra = rest
        ordinal, _, _ = self.functions[_number(function)]
        if ordinal != self.current():
            raise Misuse("a function of another context")
        assert dims == [1] * 6
        assert (shared, stream, extra) == (0, 0, 0)
        values, types = parameters
        assert [ctypes.sizeof(t) for t in types] == [8, 4]
        address, word = values
        memory, _ = self._resolve(address, 16, ordinal)
        if not isinstance(memory, MulticastObject):
            raise Misuse("multimem.st to memory that is not multicast")
        self.write(address, word.to_bytes(4, "little") * 4, ordinal)


@contextlib.contextmanager
def descriptors_unchanged(machines):
    """Checks that no file descriptor is left open, those of live memory apart."""

    def count():
        kept = {
            memory.fd
            for machine in machines
            for memory in machine.by_inode.values()
            if memory.fd is not None
        }
        return len(set(map(int, os.listdir("/proc/self/fd"))) - kept)

    before = count()
    yield
    assert count() == before

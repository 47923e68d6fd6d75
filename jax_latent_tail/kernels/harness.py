"""Ranks that share one GPU, for tests and measurements: as streams of a process, or as processes.

The host side of the protocol in its plainest form: it allocates what `abi.py` lays out, connects
the ranks, launches cubins through the driver, and resets after a failure. Needs cuda-bindings.

Every rank's clusters must be resident together, so grids are capped by `geometry.token_ctas` with
all ranks on one device.
"""

import contextlib
import ctypes
import dataclasses
import functools

import numpy as np
from cuda.bindings import driver

from jax_latent_tail.kernels import abi, geometry, store
from jax_latent_tail.kernels.variant import ANY_TOP_K, TAIL, KernelVariant

DEADLINE_S = 2.0
# Peers map whole allocations: give each its own pages.
_GRANULE = 2 << 20
_ALIGN = 1 << 16

_EMPTY_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry empty() { griddepcontrol.wait; ret; }
\0"""


def call(function, *arguments):
    """A driver call: its results, or a RuntimeError with the driver's words for what went wrong."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        raise RuntimeError(f"{function.__name__}: {name.decode() if name else status}")
    return results[0] if len(results) == 1 else tuple(results)


class Device:
    """The first GPU, its primary context made current in this thread."""

    def __init__(self):
        call(driver.cuInit, 0)
        self.device = call(driver.cuDeviceGet, 0)
        self.context = call(driver.cuDevicePrimaryCtxRetain, self.device)
        call(driver.cuCtxSetCurrent, self.context)

    def attribute(self, name: str) -> int:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return call(driver.cuDeviceGetAttribute, which, self.device)

    @property
    def sm_count(self) -> int:
        return self.attribute("MULTIPROCESSOR_COUNT")

    @property
    def capability(self) -> tuple[int, int]:
        return (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self.attribute("COMPUTE_CAPABILITY_MINOR"),
        )

    @property
    def name(self) -> str:
        return call(driver.cuDeviceGetName, 100, self.device).split(b"\0")[0].decode()


class Buffer:
    """Device memory that is freed with the object."""

    def __init__(self, size: int):
        self.size = size
        self.address = int(call(driver.cuMemAlloc, max(size, 16)))

    @classmethod
    def of(cls, array: np.ndarray) -> "Buffer":
        array = np.ascontiguousarray(array)
        buffer = cls(array.nbytes)
        buffer.write(array)
        return buffer

    def write(self, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        if array.nbytes:
            call(driver.cuMemcpyHtoD, self.address, array.ctypes.data, array.nbytes)
            call(driver.cuCtxSynchronize)

    def read(self, dtype, shape, offset: int = 0) -> np.ndarray:
        """A copy, after everything that this context has in flight."""
        call(driver.cuCtxSynchronize)
        out = np.empty(shape, dtype)
        call(driver.cuMemcpyDtoH, out.ctypes.data, self.address + offset, out.nbytes)
        return out

    def repeated(self, count: int) -> "Buffer":
        """A buffer with its content so many times."""
        buffer = Buffer(count * self.size)
        for turn in range(count):
            call(driver.cuMemcpyDtoD, buffer.address + turn * self.size, self.address, self.size)
        call(driver.cuCtxSynchronize)
        return buffer

    def fill(self, word: int) -> None:
        call(driver.cuMemsetD32, self.address, word, self.size // 4)
        call(driver.cuCtxSynchronize)  # streams that do not wait for the default one follow

    def free(self) -> None:
        if self.address:
            call(driver.cuMemFree, self.address)
            self.address = 0

    def __del__(self):
        with contextlib.suppress(Exception):  # the interpreter or the context is going away
            self.free()


def _config(grid, kernel: store.KernelEntry, stream=0, pdl: bool = False):
    """A launch of `kernel`'s geometry; grid is (token CTAs, roles)."""
    dims = driver.CUlaunchAttribute()
    dims.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims.value.clusterDim.x, dims.value.clusterDim.y, dims.value.clusterDim.z = 1, kernel.cluster, 1
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], kernel.cluster, grid[1]
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.smem_bytes
    config.hStream = stream
    config.attrs = [dims, early] if pdl else [dims]
    config.numAttrs = len(config.attrs)
    return config


def _pointers(parameters: ctypes.Structure):
    """The void** of a launch; refers to `parameters`, keep both."""
    base = ctypes.addressof(parameters)
    offsets = [getattr(type(parameters), field[0]).offset for field in parameters._fields_]
    return (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))


class Loaded:
    """A cubin, loaded and resolved in the current context before anything runs."""

    def __init__(self, cubin: store.Cubin):
        self.cubin = cubin
        self.variant: KernelVariant = cubin.variant
        variant = self.variant
        self.geometries = geometry.entries(variant.tp, variant.latent, variant.hidden, variant.op)
        self.module = call(driver.cuModuleLoadData, cubin.data)
        self.functions = [
            call(driver.cuModuleGetFunction, self.module, kernel.symbol.encode())
            for kernel in cubin.kernels
        ]

        for function, kernel in zip(self.functions, cubin.kernels, strict=True):
            _allow_smem(function, kernel.smem_bytes)
        self.resident: dict[int, int] = {}

    def active_clusters(self, index: int) -> int:
        """Clusters of kernel `index` that an otherwise empty GPU holds."""
        if index not in self.resident:
            self.resident[index] = self._ask_for_active_clusters(index)
        return self.resident[index]

    def _ask_for_active_clusters(self, index: int) -> int:
        config = _config((1, 1), self.cubin.kernels[index])
        return call(driver.cuOccupancyMaxActiveClusters, self.functions[index], config)


def _allow_smem(function, count: int) -> None:
    """Lets a kernel have so many bytes of dynamic shared memory."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call(driver.cuFuncSetAttribute, function, attribute, count)


@functools.cache
def empty_kernel():
    """A kernel that does nothing, for the floor of a measurement."""
    return call(driver.cuModuleGetFunction, call(driver.cuModuleLoadData, _EMPTY_PTX), b"empty")


def new_stream():
    """A stream that does not wait for the default one."""
    return call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)


@dataclasses.dataclass
class Call:
    """Arguments of one call of one rank: device addresses, and what is not the rank's own.

    `token_ctas`, `kernel` None: chosen as the product does. For the gathers see
    `abi.LaunchParams`, and `roles` is SHARED_MASK.
    """

    tokens: int
    rows: int = 0
    weights: int = 0
    indices: int = 0
    gamma: int = 0
    latent: int = 0
    shared: int = 0
    shard: int = 0
    permuted_rows: int = 0
    top_k: int = 0
    roles: int = abi.BOTH_MASK
    channel: int = 0
    eps: float = 1e-6
    call_hash: int | None = None
    token_ctas: int | None = None
    kernel: int | None = None
    pdl: bool = False


def _call_hash(variant: KernelVariant, arguments: Call) -> int:
    if variant.op != TAIL:
        return abi.gather_hash(
            variant.op,
            tp=variant.tp,
            latent=variant.latent,
            hidden=variant.hidden,
            residual=arguments.rows != 0,
            channel=arguments.channel,
        )
    return abi.call_hash(
        "fused",
        tp=variant.tp,
        latent=variant.latent,
        hidden=variant.hidden,
        top_k=arguments.top_k if variant.top_k == ANY_TOP_K else variant.top_k,
        fp32_internal=variant.fp32_internal,
        eps=arguments.eps,
        channel=arguments.channel,
    )


class Rank:
    """One rank's memory and stream.

    Args:
      loaded: the kernels, by variant; all of one tp, latent and hidden.
      rank: 0..tp-1.
      max_tokens: room in the workspace.
      ranks_on_device: ranks whose kernels must be resident together with this one's.
      deadline_s: how long a wait may last.
    """

    def __init__(
        self,
        device: Device,
        loaded: Loaded,
        rank: int,
        max_tokens: int = 128,
        channels: int = 1,
        ranks_on_device: int | None = None,
        deadline_s: float = DEADLINE_S,
    ):
        variant = loaded.variant
        self.device, self.rank, self.tp = device, rank, variant.tp
        self.max_tokens, self.channels = max_tokens, channels
        self.ranks_on_device = ranks_on_device or variant.tp
        self.slots = variant.slots(max_tokens)
        self.control_bytes = variant.control_bytes(max_tokens, channels)
        self.workspace_bytes = variant.workspace_bytes(max_tokens, channels)
        self.workspace_offset = -(-self.control_bytes // _ALIGN) * _ALIGN
        size = -(-(self.workspace_offset + self.workspace_bytes) // _GRANULE) * _GRANULE
        self.memory = Buffer(size)
        self.stream = new_stream()
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        host = int(call(driver.cuMemHostAlloc, ctypes.sizeof(abi.Record), flags))
        self.record = abi.Record.from_address(host)
        self.record_device = int(call(driver.cuMemHostGetDevicePointer, host, 0))
        self.deadline_ns = int(deadline_s * 1e9)
        self.peers = [0] * self.tp  # each rank's `memory`, as mapped here
        self.peers[rank] = self.memory.address
        self.clear()

    @property
    def control(self) -> int:
        return self.memory.address

    @property
    def workspace(self) -> int:
        return self.memory.address + self.workspace_offset

    def connect(self, peers: list[int]) -> None:
        """Take the addresses of every rank's `memory` as mapped here; write the control block."""
        self.peers = list(peers)
        self.clear()

    def clear(self) -> None:
        """This rank's part of a reset: everything as at the start. No call may be in flight."""
        block = abi.Control()
        block.deadline_ns = self.deadline_ns
        block.workspace = self.workspace
        block.record = self.record_device
        for peer, base in enumerate(self.peers):
            block.peer_workspace[peer] = base + self.workspace_offset
            block.peer_broken[peer] = base + abi.Control.broken.offset if base else 0
        call(driver.cuMemsetD32, self.workspace, abi.SENTINEL, self.workspace_bytes // 4)
        call(driver.cuMemsetD32, self.control, 0, self.control_bytes // 4)
        call(driver.cuMemcpyHtoD, self.control, ctypes.addressof(block), ctypes.sizeof(block))
        ctypes.memset(ctypes.addressof(self.record), 0, ctypes.sizeof(abi.Record))
        call(driver.cuCtxSynchronize)

    def write_control(self, field: str, value: int) -> None:
        """Set one word of the control block, as the host would."""
        descriptor = getattr(abi.Control, field)
        data = value.to_bytes(descriptor.size, "little")
        call(driver.cuMemcpyHtoD, self.control + descriptor.offset, data, descriptor.size)

    def read_workspace(self) -> np.ndarray:
        """The words of the workspace."""
        return self.memory.read(np.uint32, self.workspace_bytes // 4, self.workspace_offset)

    def read_generations(self) -> np.ndarray:
        """[channel, role, token or tile]"""
        shape = (self.channels, 2, self.slots)
        return self.memory.read(np.uint32, shape, abi.GENERATIONS_OFFSET)

    def _grid(self, loaded: Loaded, arguments: Call):
        """(index of the kernel, (token CTAs, roles))"""
        index = arguments.kernel
        if index is None:
            index = geometry.choose(loaded.geometries, arguments.tokens)
        roles = 2 if arguments.roles == abi.BOTH_MASK else 1
        ctas = arguments.token_ctas or self.token_ctas(loaded, arguments.tokens, roles, index)
        return index, (ctas, roles)

    def launch(self, loaded: Loaded, arguments: Call) -> None:
        """Enqueue one call on this rank's stream."""
        call_hash = arguments.call_hash
        if call_hash is None:
            call_hash = _call_hash(loaded.variant, arguments)
        parameters = abi.LaunchParams(
            control=self.control, slots=self.slots, rank=self.rank, call_hash=call_hash
        )
        for name in (field[0] for field in abi.LaunchParams._fields_):
            if name not in ("control", "slots", "rank", "call_hash"):
                setattr(parameters, name, getattr(arguments, name))
        index, grid = self._grid(loaded, arguments)
        config = _config(grid, loaded.cubin.kernels[index], self.stream, arguments.pdl)
        pointers = _pointers(parameters)
        call(
            driver.cuLaunchKernelEx,
            config,
            loaded.functions[index],
            ctypes.addressof(pointers),
            0,
        )

    def launch_empty(self, loaded: Loaded, arguments: Call) -> None:
        """Enqueue a kernel that does nothing, of the grid that `launch` would take."""
        index, grid = self._grid(loaded, arguments)
        config = _config(grid, loaded.cubin.kernels[index], self.stream, arguments.pdl)
        _allow_smem(empty_kernel(), loaded.cubin.kernels[index].smem_bytes)
        call(driver.cuLaunchKernelEx, config, empty_kernel(), 0, 0)

    def token_ctas(self, loaded: Loaded, tokens: int, roles: int, index: int) -> int:
        """gridDim.x as the product chooses it; nothing else runs here, so nothing is reserved."""
        return geometry.token_ctas(
            loaded.variant.slots(tokens),
            roles=roles,
            active_clusters=loaded.active_clusters(index),
            sm_count=self.device.sm_count,
            ranks_on_device=self.ranks_on_device,
            reserved_sms=0 if self.ranks_on_device > 1 else geometry.RESERVED_SMS,
        )

    def capture(self, enqueue) -> "Graph":
        """What `enqueue()` puts on this rank's stream, as a graph."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(driver.cuStreamBeginCapture, self.stream, mode)
        enqueue()
        return Graph(call(driver.cuStreamEndCapture, self.stream), self.stream)

    def synchronize(self) -> None:
        call(driver.cuStreamSynchronize, self.stream)


class Graph:
    """A captured graph, instantiated and uploaded."""

    def __init__(self, graph, stream):
        self.stream = stream
        self.executable = call(driver.cuGraphInstantiate, graph, 0)
        call(driver.cuGraphUpload, self.executable, stream)

    def launch(self) -> None:
        call(driver.cuGraphLaunch, self.executable, self.stream)


class Timer:
    """Time between two points of a stream, in microseconds."""

    def __init__(self, stream):
        self.stream = stream
        self.events = [call(driver.cuEventCreate, 0) for _ in range(2)]

    def start(self) -> None:
        call(driver.cuEventRecord, self.events[0], self.stream)

    def stop(self) -> None:
        call(driver.cuEventRecord, self.events[1], self.stream)

    def microseconds(self) -> float:
        call(driver.cuEventSynchronize, self.events[1])
        return 1e3 * call(driver.cuEventElapsedTime, *self.events)


def connected(device: Device, loaded: Loaded, **options) -> list[Rank]:
    """All ranks of a group as streams of this process."""
    ranks = [Rank(device, loaded, rank, **options) for rank in range(loaded.variant.tp)]
    for rank in ranks:
        rank.connect([peer.memory.address for peer in ranks])
    return ranks


_HANDLE_BYTES = 64


def share(rank: Rank) -> bytes:
    """A handle with which another process maps this rank's memory."""
    handle = call(driver.cuIpcGetMemHandle, rank.memory.address)
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def map_peers(rank: Rank, handles: list[bytes]) -> None:
    """Connect a rank to the ranks of other processes, given `share` of each."""
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    peers = []
    for peer, data in enumerate(handles):
        if peer == rank.rank:
            peers.append(rank.memory.address)
            continue
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), data, _HANDLE_BYTES)
        peers.append(int(call(driver.cuIpcOpenMemHandle, handle, flags)))
    rank.connect(peers)


def unmap_peers(rank: Rank) -> None:
    """Undo `map_peers`; nothing may be in flight on any rank."""
    for peer, address in enumerate(rank.peers):
        if peer != rank.rank and address:
            call(driver.cuIpcCloseMemHandle, address)
            rank.peers[peer] = 0


def write_generations(rank: Rank, generations: np.ndarray) -> None:
    """Overwrite the generation words, [channel, role, token]."""
    words = np.ascontiguousarray(generations, np.uint32)
    address = rank.control + abi.GENERATIONS_OFFSET
    call(driver.cuMemcpyHtoD, address, words.ctypes.data, words.nbytes)
    call(driver.cuCtxSynchronize)


def write_workspace(rank: Rank, words: np.ndarray) -> None:
    """Overwrite the whole workspace, as if peers had stored into it."""
    words = np.ascontiguousarray(words)
    assert words.nbytes == rank.workspace_bytes
    call(driver.cuMemcpyHtoD, rank.workspace, words.ctypes.data, words.nbytes)
    call(driver.cuCtxSynchronize)

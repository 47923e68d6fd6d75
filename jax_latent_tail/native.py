"""The native library: loading it, registering its FFI targets with JAX, and its C interface.

The library has no Python ABI and no knowledge of JAX. Everything handed to it is copied; what
device and host addresses refer to must live as long as the process.
"""

import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_latent_tail.errors import UnavailableError
from jax_latent_tail.spec import TailSpec

# Another build of the library, say one with a sanitizer.
LIBRARY_VARIABLE = "JAX_LATENT_TAIL_LIBRARY"

CUDA_TARGET = "jax_latent_tail_cuda"
# The same, but never captured into a CUDA graph.
CUDA_TARGET_UNCAPTURED = "jax_latent_tail_cuda_uncaptured"
CPU_TARGET = "jax_latent_tail_cpu"

# 0: lower to calls that XLA does not capture.
CAPTURE_VARIABLE = "JAX_LATENT_TAIL_CAPTURE"

_INTERFACE_VERSION = 3
_CUDA_DRIVER = "libcuda.so.1"
_MAX_MESSAGE = 4096


@dataclasses.dataclass(frozen=True)
class CudaKernel:
    """A kernel loaded in the primary context of its device.

    Attributes:
      function: the CUfunction.
      cluster: CTAs per cluster.
      threads: threads per CTA.
      smem_bytes: dynamic shared memory per CTA.
    """

    function: int
    cluster: int
    threads: int
    smem_bytes: int


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("cluster", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("smem_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_uint32), ("token_ctas", ctypes.c_uint32)]


class _CudaRank(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64),
        ("devices", ctypes.POINTER(ctypes.c_int64)),
        ("num_devices", ctypes.c_uint64),
        ("tp", ctypes.c_int64),
        ("latent_dim", ctypes.c_int64),
        ("hidden_dim", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("max_tokens", ctypes.c_int64),
        ("kernels", ctypes.POINTER(_Kernel)),
        ("num_kernels", ctypes.c_uint64),
        ("plans", ctypes.POINTER(_Plan)),
        ("control", ctypes.c_uint64),
        ("record", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("fp32_internal", ctypes.c_uint32),
        ("ordinal", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("call_hash", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("pdl", ctypes.c_uint32),
        ("gathers", ctypes.c_uint32),
        ("has_residual", ctypes.c_uint32),
    ]


class _CpuCommunicator(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64),
        ("devices", ctypes.POINTER(ctypes.c_int64)),
        ("processes", ctypes.POINTER(ctypes.c_int32)),
        ("num_devices", ctypes.c_uint64),
        ("tp", ctypes.c_int64),
        ("latent_dim", ctypes.c_int64),
        ("hidden_dim", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("max_tokens", ctypes.c_int64),
        ("deadline_s", ctypes.c_double),
        ("eps", ctypes.c_float),
        ("fp32_internal", ctypes.c_uint32),
        ("process", ctypes.c_int32),
        ("segment_fd", ctypes.c_int32),
        ("gathers", ctypes.c_uint32),
        ("has_residual", ctypes.c_uint32),
    ]


def target(platform: str) -> str:
    """The target that calls on a platform are lowered to."""
    if platform == "cpu":
        return CPU_TARGET
    return CUDA_TARGET_UNCAPTURED if os.environ.get(CAPTURE_VARIABLE) == "0" else CUDA_TARGET


def attributes(table: Sequence[Sequence[int]], spec: TailSpec) -> dict[str, object]:
    """What identifies a call to the handlers: its description and its ranks' device ids.

    Args:
      table: global device ids, [groups, ranks].
    """
    return {
        "devices": np.asarray(table, np.int64).reshape(-1),
        **_dims(spec),
        "eps": np.float32(spec.eps),
        "fp32_internal": np.bool_(spec.fp32_internal),
        "gathers": np.bool_(spec.gathers),
        "has_residual": np.bool_(spec.has_residual),
    }


def _dims(spec: TailSpec) -> dict[str, int]:
    return {
        "tp": spec.tp,
        "latent_dim": spec.latent_dim or 0,
        "hidden_dim": spec.hidden_dim or 0,
        "top_k": spec.top_k or 0,
        "max_tokens": spec.max_tokens,
    }


def module_attribute(module: Any) -> dict[str, int]:
    """What tells the calls of the module being lowered from those of another, for CPUs.

    Equal in all processes that lower the same program, and from run to run.

    Args:
      module: an MLIR module with its main function, whose body may be unfinished.
    """
    parts = [str(module.operation.attributes["sym_name"])]
    for operation in module.body.operations:
        names = operation.attributes
        if "sym_name" in names and names["sym_name"].value == "main":
            parts.append(str(names["function_type"]))
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    return {"module": int.from_bytes(digest[:8], "little", signed=True)}


class Library:
    """The loaded library, its targets registered with JAX."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.handle = ctypes.CDLL(str(path))
        version = self.handle.latent_tail_interface_version()
        if version != _INTERFACE_VERSION:
            raise UnavailableError(
                f"{path} has interface version {version}, this package needs {_INTERFACE_VERSION}"
            )
        self.handle.latent_tail_cuda_open.restype = ctypes.c_char_p
        self.handle.latent_tail_cuda_add_rank.restype = ctypes.c_void_p
        self.handle.latent_tail_cuda_add_rank.argtypes = [ctypes.POINTER(_CudaRank)]
        self.handle.latent_tail_cuda_close_rank.argtypes = [ctypes.c_void_p]
        self.handle.latent_tail_cpu_end_series.argtypes = [ctypes.c_int64]
        self.handle.latent_tail_cpu_segment_bytes.restype = ctypes.c_int64
        self.handle.latent_tail_cpu_segment_bytes.argtypes = [ctypes.POINTER(_CpuCommunicator)]
        self.handle.latent_tail_cpu_open.restype = ctypes.c_void_p
        self.handle.latent_tail_cpu_open.argtypes = [
            ctypes.POINTER(_CpuCommunicator),
            ctypes.c_char_p,
            ctypes.c_uint64,
        ]
        self.handle.latent_tail_cpu_failure.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_uint64,
        ]
        self.handle.latent_tail_cpu_close.argtypes = [ctypes.c_void_p]

    def register_cuda(self) -> None:
        """Registers the CUDA targets with JAX, whose back end must be up, and opens the driver.

        Raises:
          UnavailableError: there is no driver, or JAX refuses the library.
        """
        error = self.open_driver(_CUDA_DRIVER)
        if error:
            raise UnavailableError(f"no CUDA driver: {error}")
        self._register(
            "CUDA",
            {
                CUDA_TARGET: {
                    "initialize": "latent_tail_cuda_initialize",
                    "execute": "latent_tail_cuda_execute",
                },
                CUDA_TARGET_UNCAPTURED: {
                    "initialize": "latent_tail_cuda_initialize",
                    "execute": "latent_tail_cuda_execute_uncaptured",
                },
            },
        )

    def register_cpu(self) -> None:
        """Registers the CPU target and the type of its state with JAX, whose back end must be up.

        Raises:
          UnavailableError: JAX refuses the library.
        """
        capsules: Any = {}
        for name in ("type_id", "type_info"):
            getter = getattr(self.handle, f"latent_tail_cpu_state_{name.removeprefix('type_')}")
            getter.restype = ctypes.c_void_p
            capsules[name] = jax.ffi.pycapsule(getter())
        try:
            jax.ffi.register_ffi_type(CPU_TARGET, capsules, platform="cpu")
        except Exception as error:  # what it raises is not documented
            raise UnavailableError(f"JAX refuses {self.path}: {error}") from error
        stages = {
            "instantiate": "latent_tail_cpu_instantiate",
            "execute": "latent_tail_cpu_execute",
        }
        self._register("cpu", {CPU_TARGET: stages})

    def open_driver(self, path: str) -> str | None:
        """Opens the CUDA driver library, once for all; returns why it cannot, or None."""
        error = self.handle.latent_tail_cuda_open(path.encode())
        return error.decode() if error else None

    def _register(self, platform: str, targets: dict[str, dict[str, str]]) -> None:
        for target, stages in targets.items():
            capsules = {
                stage: jax.ffi.pycapsule(getattr(self.handle, symbol))
                for stage, symbol in stages.items()
            }
            try:
                jax.ffi.register_ffi_target(target, capsules, platform=platform)
            except Exception as error:  # what it raises is not documented
                raise UnavailableError(f"JAX refuses {self.path}: {error}") from error

    def add_cuda_rank(
        self,
        *,
        ordinal: int,
        devices: Sequence[int],
        spec: TailSpec,
        rank: int,
        control: int,
        record: int,
        call_hash: int,
        slots: int,
        kernels: Sequence[CudaKernel],
        plans: Sequence[tuple[int, int]],
        pdl: bool,
    ) -> int:
        """Lets calls of `spec` on a local device find this rank; returns its handle.

        Args:
          ordinal: of the device in this process.
          devices: the flattened device table of the call's attributes.
          rank: the device's rank in its group.
          control: device address of the control block.
          record: host address of the rank's `abi.Record`.
          call_hash: what the headers of this rank's calls carry.
          slots: in each buffer of the workspace.
          kernels: those of the cubin.
          plans: (index into kernels, token CTAs) for 1..max_tokens tokens.
          pdl: whether to launch with programmatic stream serialization.
        """
        assert len(plans) == spec.max_tokens
        declared = _CudaRank(
            struct_size=ctypes.sizeof(_CudaRank),
            devices=(ctypes.c_int64 * len(devices))(*devices),
            num_devices=len(devices),
            **_dims(spec),
            kernels=(_Kernel * len(kernels))(*(_Kernel(*dataclasses.astuple(k)) for k in kernels)),
            num_kernels=len(kernels),
            plans=(_Plan * len(plans))(*(_Plan(*plan) for plan in plans)),
            control=control,
            record=record,
            eps=spec.eps,
            fp32_internal=spec.fp32_internal,
            gathers=spec.gathers,
            has_residual=spec.has_residual,
            ordinal=ordinal,
            rank=rank,
            call_hash=call_hash,
            slots=slots,
            pdl=pdl,
        )
        handle = self.handle.latent_tail_cuda_add_rank(ctypes.byref(declared))
        assert handle, "the library and native.py disagree on latent_tail_cuda_rank"
        return handle

    def close_cuda_rank(self, handle: int) -> None:
        """Refuses later calls on the rank."""
        self.handle.latent_tail_cuda_close_rank(handle)

    def end_cpu_series(self, module: int) -> None:
        """Says that a module is lowered: what is compiled next is not what was compiled last.

        Args:
          module: as `module_attribute` has it.
        """
        self.handle.latent_tail_cpu_end_series(module)

    def cpu_segment_bytes(
        self, table: Sequence[Sequence[int]], spec: TailSpec, processes: Sequence[int]
    ) -> int:
        """Bytes of shared memory that `open_cpu` needs; 0 where no group spans processes."""
        declared = _cpu_communicator(table, spec, processes, 0, 1.0, -1)
        size: int = self.handle.latent_tail_cpu_segment_bytes(ctypes.byref(declared))
        assert size >= 0, "the library and native.py disagree on latent_tail_cpu_communicator"
        return size

    def open_cpu(
        self,
        table: Sequence[Sequence[int]],
        spec: TailSpec,
        processes: Sequence[int],
        process: int,
        deadline_s: float,
        segment_fd: int,
    ) -> int:
        """Lets calls of `spec` on this process's CPU devices meet; returns a handle.

        Args:
          table: global device ids, [groups, ranks].
          processes: of each device, row-major: which process holds it, counted from 0.
          process: this one.
          deadline_s: how long a rank waits for its peers.
          segment_fd: shared memory of `cpu_segment_bytes` zeros, which is mapped; the descriptor
            remains the caller's. -1 where none is needed.

        Raises:
          UnavailableError: it cannot be; nothing is left mapped.
        """
        declared = _cpu_communicator(table, spec, processes, process, deadline_s, segment_fd)
        fault = ctypes.create_string_buffer(_MAX_MESSAGE)
        handle: int | None = self.handle.latent_tail_cpu_open(
            ctypes.byref(declared), fault, len(fault)
        )
        if handle is None:
            raise UnavailableError(fault.value.decode(errors="replace"))
        return handle

    def cpu_failure(self, handle: int) -> str | None:
        """Why the calls of an open communicator fail, or None."""
        text = ctypes.create_string_buffer(_MAX_MESSAGE)
        failed = self.handle.latent_tail_cpu_failure(handle, text, len(text))
        return text.value.decode(errors="replace") if failed else None

    def close_cpu(self, handle: int) -> None:
        """Fails pending and later calls. Unmaps the segment when the last running one is through.

        Peers finish the calls that all ranks of this process have come to.
        """
        self.handle.latent_tail_cpu_close(handle)


def _cpu_communicator(
    table: Sequence[Sequence[int]],
    spec: TailSpec,
    processes: Sequence[int],
    process: int,
    deadline_s: float,
    segment_fd: int,
) -> _CpuCommunicator:
    devices = [device for group in table for device in group]
    assert len(devices) == len(processes)
    return _CpuCommunicator(
        struct_size=ctypes.sizeof(_CpuCommunicator),
        devices=(ctypes.c_int64 * len(devices))(*devices),
        processes=(ctypes.c_int32 * len(devices))(*processes),
        num_devices=len(devices),
        **_dims(spec),
        deadline_s=deadline_s,
        eps=spec.eps,
        fp32_internal=spec.fp32_internal,
        process=process,
        segment_fd=segment_fd,
        gathers=spec.gathers,
        has_residual=spec.has_residual,
    )


def expected_path() -> pathlib.Path:
    """Where the library is expected."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return pathlib.Path(named or pathlib.Path(__file__).with_name("liblatent_tail.so"))


_lock = threading.Lock()


def load(platform: str) -> Library:
    """The library, its targets of "cuda" or "cpu" registered with JAX.

    Raises:
      UnavailableError: it is not there, or cannot be used here; the message says why.
    """
    with _lock:
        return _load(platform)


@functools.cache
def _load(platform: str) -> Library:
    path = expected_path()
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:  # the latter for what another version lacks
        raise UnavailableError(
            f"cannot load the native library {path}: {error}; installing this package builds it"
        ) from error
    jax.devices()  # targets that are registered before the back end exists can make it fail
    if platform == "cuda":
        library.register_cuda()
    else:
        library.register_cpu()
    return library

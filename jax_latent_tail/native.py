"""The native library: loading it, registering its FFI targets with JAX, and its C interface.

The library has no Python ABI and no knowledge of JAX. Everything handed to it is copied; what
device and host addresses refer to must live as long as the process.
"""

import ctypes
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Sequence

import jax
import numpy as np

from jax_latent_tail.errors import UnavailableError
from jax_latent_tail.spec import TailSpec

# Another build of the library, say one with a sanitizer.
LIBRARY_VARIABLE = "JAX_LATENT_TAIL_LIBRARY"

CUDA_TARGET = "jax_latent_tail_cuda"
TARGETS = {"cuda": CUDA_TARGET}
# The same, but never captured into a CUDA graph.
CUDA_TARGET_UNCAPTURED = "jax_latent_tail_cuda_uncaptured"

_INTERFACE_VERSION = 1
_CUDA_DRIVER = "libcuda.so.1"


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
        ("pdl", ctypes.c_uint32),
    ]


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
    }


def _dims(spec: TailSpec) -> dict[str, int]:
    return {
        "tp": spec.tp,
        "latent_dim": spec.latent_dim or 0,
        "hidden_dim": spec.hidden_dim or 0,
        "top_k": spec.top_k or 0,
        "max_tokens": spec.max_tokens,
    }


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
            kernels=(_Kernel * len(kernels))(*map(dataclasses.astuple, kernels)),
            num_kernels=len(kernels),
            plans=(_Plan * len(plans))(*plans),
            control=control,
            record=record,
            eps=spec.eps,
            fp32_internal=spec.fp32_internal,
            ordinal=ordinal,
            rank=rank,
            call_hash=call_hash,
            pdl=pdl,
        )
        handle = self.handle.latent_tail_cuda_add_rank(ctypes.byref(declared))
        assert handle, "the library and native.py disagree on latent_tail_cuda_rank"
        return handle

    def close_cuda_rank(self, handle: int) -> None:
        """Refuses later calls on the rank."""
        self.handle.latent_tail_cuda_close_rank(handle)


def library_path() -> pathlib.Path:
    """Where the library is expected."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return pathlib.Path(named or pathlib.Path(__file__).with_name("liblatent_tail.so"))


_lock = threading.Lock()


def load(platform: str) -> Library:
    """The library, its targets of "cuda" registered with JAX.

    Raises:
      UnavailableError: it is not there, or cannot be used here; the message says why.
    """
    with _lock:
        return _load(platform)


@functools.cache
def _load(platform: str) -> Library:
    path = library_path()
    try:
        library = Library(path)
    except OSError as error:
        raise UnavailableError(
            f"cannot load the native library {path}: {error}; installing this package builds it"
        ) from error
    jax.devices()  # targets that are registered before the back end exists can make it fail
    if platform == "cuda":
        library.register_cuda()
    return library

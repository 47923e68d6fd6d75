"""Calls of the CUDA driver API, and devices of this process."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jax_latent_tail.communicator import bounded
from jax_latent_tail.errors import LatentTailError, UnavailableError

# After one of these every later call in the context fails too: there is nothing left to free.
_STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTEXT_IS_DESTROYED",
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_CONTEXT",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "MPS_CLIENT_TERMINATED",
        "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK",
        "UNKNOWN",
    )
)


class DriverError(LatentTailError, RuntimeError):
    """A call of the driver failed.

    Attributes:
      function: its name.
      code: the name of the CUresult, e.g. "CUDA_ERROR_OUT_OF_MEMORY", or what stood against the
        call being made.
    """

    def __init__(self, function: str, code: str):
        super().__init__(f"{function}: {code}")
        self.function = function
        self.code = code

    @property
    def sticky(self) -> bool:
        """Whether the context is lost."""
        return self.code in _STICKY


class Driver:
    """The functions, enumerations and structures of `cuda.bindings.driver`, by name.

    Args:
      bindings: that module, or an object like it whose functions return (status, results...).
    """

    def __init__(self, bindings: Any):
        self.bindings = bindings

    @classmethod
    def load(cls) -> "Driver":
        """Raises an UnavailableError that says what to install."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise UnavailableError(
                f"cuda-bindings cannot be imported ({error}); install it with:"
                ' pip install "jax-latent-tail[cuda13]", or cuda12'
            ) from error
        return cls(driver)

    def call(self, function: str, *arguments: Any) -> Any:
        """The results of a call: None, one, or a tuple. Raises a DriverError."""
        try:
            status, *results = getattr(self.bindings, function)(*arguments)
        except RuntimeError as error:  # how the bindings say that the driver has no such function
            raise DriverError(function, str(error)) from error
        if status != self.bindings.CUresult.CUDA_SUCCESS:
            raise DriverError(function, self.bindings.CUresult(status).name)
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def __getattr__(self, name: str) -> Any:
        """An enumeration, structure or constant of the bindings."""
        return getattr(self.bindings, name)

    def physical_devices(self) -> dict[str, int]:
        """The ordinal of each device that this process sees, by UUID in hex."""
        count = self.call("cuDeviceGetCount")
        return {self.uuid(self.call("cuDeviceGet", ordinal)): ordinal for ordinal in range(count)}

    def uuid(self, device: Any) -> str:
        """In hex; of the MIG instance, where the device is one."""
        # Before CUDA 13 the plain name means the first version, which does not know of MIG.
        second = hasattr(self.bindings, "cuDeviceGetUuid_v2")
        return bytes(
            self.call("cuDeviceGetUuid_v2" if second else "cuDeviceGetUuid", device).bytes
        ).hex()


class Device:
    """A device of this process, its primary context (XLA's) held until `release`."""

    def __init__(self, driver: Driver, ordinal: int):
        self.driver = driver
        self.ordinal = ordinal
        self.device = driver.call("cuDeviceGet", ordinal)
        self.context = driver.call("cuDevicePrimaryCtxRetain", self.device)

    def release(self) -> None:
        self.driver.call("cuDevicePrimaryCtxRelease", self.device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context current in this thread, and afterwards what was current before."""
        self.driver.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def attribute(self, name: str) -> int:
        which = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver.call("cuDeviceGetAttribute", which, self.device))

    def synchronize(self) -> None:
        """Waits for everything in the context; raises the DriverError of what went wrong in it."""
        with self.current():
            self.driver.call("cuCtxSynchronize")

    def synchronize_within(self, timeout_s: float) -> str | None:
        """The same for a limited time; returns what was wrong if that was not enough."""
        return bounded.attempt(self.synchronize, timeout_s)

"""Which implementation a call takes, and why: the same on every process of a program.

Native implementations are chosen while a program is lowered, or ahead of that by `prepare`. All
reasons against one that depend on shapes alone come first, for every process sees them alike; the
rest is agreed on by the processes, which make a communicator together.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import threading
from typing import Any

from jax.sharding import Mesh

from jax_latent_tail.communicator import communicator
from jax_latent_tail.communicator.group import DeviceTable, device_table
from jax_latent_tail.errors import UnavailableError
from jax_latent_tail.spec import AxisName, TailSpec

lowered_per_devices: Any
try:
    # Private. A primitive in this set is lowered anew for every order of the devices; without it
    # one jitted function called with two orders would keep the device table of the first.
    from jax._src.dispatch import prim_requires_devices_during_lowering as lowered_per_devices
except ImportError:
    lowered_per_devices = None

_log = logging.getLogger("jax_latent_tail")

NATIVE_PLATFORMS: tuple[str, ...] = ("cuda", "cpu")
_DEVICE_PLATFORM = {"cuda": "gpu"}  # what a device says where its lowering platform says more

# Under it XLA may run two calls of a program at once, on one workspace.
_CONCURRENT = re.compile(r"xla_gpu_command_buffer_scheduling_mode=[\"']?CONCURRENT")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen for one kind of call.

    Attributes:
      implementation: "cuda" or "cpu", the native call there; or "xla", plain collectives.
      reason: why that one.
      spec: the call's description.
      platform: what the program was lowered for.
      tokens: M of the call; None where it was prepared for any M.
      table: global device ids of its ranks, [groups, ranks]; None where they are not known.
    """

    implementation: str
    reason: str
    spec: TailSpec
    platform: str
    tokens: int | None
    table: DeviceTable | None

    def __str__(self) -> str:
        tokens = "prepared" if self.tokens is None else f"{self.tokens} tokens"
        devices = f" of devices {[list(ids) for ids in self.table]}" if self.table else ""
        return f"{self.implementation} for {self.spec}{devices}, {tokens}: {self.reason}"


_lock = threading.Lock()
_choices: dict[Choice, None] = {}  # in the order they were made


def choose(
    platform: str,
    spec: TailSpec,
    tokens: int | None,
    mesh: Any,
    axis_name: AxisName,
    *,
    exporting: bool = False,
    stream: str | None = None,
    insisted: str | None = None,
) -> Choice:
    """Chooses for a call; the first time for a spec and devices, together with their processes.

    Args:
      platform: what the program is lowered for, in XLA's words: "cpu", "cuda", ...
      tokens: M, or None for any up to spec.max_tokens.
      mesh: the mesh of the enclosing shard_map; without devices the choice is plain.
      exporting: whether the program will run elsewhere.
      stream: what `compute_on` says of the call.
      insisted: the `implementation` argument of the user.

    Raises:
      UnavailableError: `insisted` cannot serve the call.
      RendezvousError, DisagreementError: the processes did not come together, or differ.
    """
    table = device_table(mesh, axis_name) if isinstance(mesh, Mesh) else None
    reason = _obstacle(platform, spec, tokens, mesh, exporting, stream, insisted)
    implementation = "xla"
    if reason is None:
        assert table is not None
        devices = {device.id: device for device in mesh.devices.flat}
        decision = communicator.decide(
            platform, table, spec, devices, obstacle=_obstacle_here(platform)
        )
        implementation, reason = decision.implementation, decision.reason
    if insisted not in (None, implementation):
        raise UnavailableError(f"implementation={insisted!r} cannot serve this call: {reason}")
    choice = Choice(implementation, reason, spec, platform, tokens, table)
    with _lock:
        if choice not in _choices:
            _choices[choice] = None
            _log.info("%s", choice)
    return choice


def forget() -> None:
    """Empties the list of `choices`."""
    with _lock:
        _choices.clear()


def choices() -> list[Choice]:
    """All choices of this process so far, oldest first."""
    with _lock:
        return list(_choices)


def _obstacle(
    platform: str,
    spec: TailSpec,
    tokens: int | None,
    mesh: Any,
    exporting: bool,
    stream: str | None,
    insisted: str | None,
) -> str | None:
    """What stands against the platform's native implementation, in every process alike."""
    if insisted == "xla":
        return "implementation='xla' was asked for"
    if insisted not in (None, platform):
        return f"the program is lowered for {platform}"
    if platform not in NATIVE_PLATFORMS:
        return f"there is no native implementation for {platform}"
    if exporting:
        return "the program is exported: its devices are not known"
    if not isinstance(mesh, Mesh):
        return "the mesh has no devices"
    if tokens is not None and tokens > spec.max_tokens:
        return f"{tokens} tokens are more than max_tokens={spec.max_tokens}"
    kinds = {device.platform for device in mesh.devices.flat}
    if kinds != {_DEVICE_PLATFORM.get(platform, platform)}:
        return f"the program is lowered for {platform}, but the mesh has {sorted(kinds)} devices"
    if stream is not None:
        return f"compute_on({stream!r}) may run it beside another call"
    return communicator.unsupported(platform, spec)


def _obstacle_here(platform: str) -> str | None:
    """What stands against it in this process alone; the others have to be told."""
    if lowered_per_devices is None:
        return "JAX has no jax._src.dispatch.prim_requires_devices_during_lowering where expected"
    if platform == "cuda" and _CONCURRENT.search(_xla_flags()):
        return (
            "XLA_FLAGS has xla_gpu_command_buffer_scheduling_mode=CONCURRENT, under which two calls"
            " of a program may overlap"
        )
    return None


def _xla_flags() -> str:
    """The flags, which may also be in a file that the variable names."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        with contextlib.suppress(OSError):
            return pathlib.Path(flags).read_text()
    return flags

"""Who takes part: the devices of all groups, and the processes that hold them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_latent_tail.spec import AxisName

# Global device ids [groups, ranks].
DeviceTable = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Member:
    """One device of a table.

    Attributes:
      device_id: JAX's id of the device, equal in all processes.
      group, rank: its place in the table.
      process: index of the process that holds the device.
      ordinal: the CUDA ordinal of the device in that process; None where that is another process.
    """

    device_id: int
    group: int
    rank: int
    process: int
    ordinal: int | None

    def __str__(self) -> str:
        return f"rank {self.rank} of group {self.group} (device {self.device_id})"


def device_table(mesh: Any, axis_name: AxisName) -> DeviceTable:
    """The groups in which a call over `axis_name` exchanges data.

    Args:
      mesh: a `jax.sharding.Mesh` with devices.
      axis_name: the axes of the group, major first.

    Returns:
      Ids [groups, ranks]; groups in the mesh's own order of the remaining axes.
    """
    names = tuple(mesh.axis_names)
    others = [name for name in names if name not in axis_name]
    order = [names.index(name) for name in (*others, *axis_name)]
    grid = np.asarray(mesh.devices, dtype=object).transpose(order)
    ranks = int(np.prod([mesh.shape[name] for name in axis_name], dtype=np.int64))
    return tuple(tuple(device.id for device in group) for group in grid.reshape(-1, ranks))


def members(table: DeviceTable, devices: Mapping[int, Any], me: int) -> tuple[Member, ...]:
    """Every device of the table, row-major.

    Args:
      devices: the `jax.Device` of each id in the table.
      me: index of this process.
    """
    found = []
    for group, ids in enumerate(table):
        for rank, device_id in enumerate(ids):
            device = devices[device_id]
            local = device.process_index == me
            ordinal = device.local_hardware_id if local else None
            found.append(Member(device_id, group, rank, device.process_index, ordinal))
    return tuple(found)


def participants(everyone: Sequence[Member]) -> tuple[int, ...]:
    """The processes with a device in the table, ascending."""
    return tuple(sorted({member.process for member in everyone}))


def describe_process(everyone: Sequence[Member], process: int) -> str:
    """'process 1 (devices 4, 5)', for messages."""
    ids = [str(member.device_id) for member in everyone if member.process == process]
    return f"process {process} (device{'s' * (len(ids) > 1)} {', '.join(ids)})"

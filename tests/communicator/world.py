"""Hosts, processes, devices and a key-value store in which communicators are made, by threads."""

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import threading
import time

import fake_cuda

from jax_latent_tail.communicator import cuda
from jax_latent_tail.communicator.driver import Driver
from jax_latent_tail.communicator.rendezvous import Rendezvous, ServiceStore
from jax_latent_tail.kernels import abi, geometry, store
from jax_latent_tail.kernels.variant import KernelVariant
from jax_latent_tail.spec import TailSpec, gather_spec

TIMEOUT_S = 60

_current = threading.local()


def current_process():
    """The process whose thread this is, if any."""
    return getattr(_current, "process", None)


class Service:
    """The coordination service: what `DistributedRuntimeClient` does, for threads."""

    def __init__(self):
        self.values = {}
        self._changed = threading.Condition()
        self._barriers = {}

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_dir_get_bytes(self, folder):
        with self._changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, milliseconds / 1e3):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        with self._changed:
            self.values.pop(key, None)
            self._changed.notify_all()

    def wait_at_barrier(self, name, milliseconds, process_ids):
        with self._changed:
            barrier = self._barriers.setdefault(name, {"came": 0, "failed": False})
            barrier["came"] += 1
            self._changed.notify_all()
            met = self._changed.wait_for(
                lambda: barrier["came"] == len(process_ids) or barrier["failed"],
                milliseconds / 1e3,
            )
            if not met or barrier["failed"]:
                barrier["failed"] = True
                self._changed.notify_all()
                raise RuntimeError(f"DEADLINE_EXCEEDED: barrier {name}")


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What of a `jax.Device` is used."""

    id: int
    process_index: int
    local_hardware_id: int


class Library:
    """The native library: notes who is registered."""

    def __init__(self):
        self.ranks = {}
        self.registrations = []
        self._handles = itertools.count(1)

    def add_cuda_rank(self, **arguments):
        handle = next(self._handles)
        self.ranks[handle] = arguments
        self.registrations.append(arguments)
        return handle

    def close_cuda_rank(self, handle):
        del self.ranks[handle]


@dataclasses.dataclass
class Process:
    """One process of a world.

    Attributes:
      ordinals: its devices, by global id.
    """

    index: int
    machine: fake_cuda.Machine
    bindings: fake_cuda.FakeDriver
    host: str
    ordinals: dict
    native_library: object = dataclasses.field(default_factory=Library)
    environ: dict = dataclasses.field(default_factory=dict)
    timeout_s: float = 20.0
    late_s: float = 0.0


class World:
    """Processes with devices, ids counted through.

    Args:
      shape: devices of each process.
      hosts: the host of each process; all on one by default.
      visible: the physical devices that each process sees, if not its own only.
      shared_device: all processes use the first device of their host.
      permute: gives the order of a process's ordinals.
    """

    def __init__(
        self, shape, *, hosts=None, sees_all=False, shared_device=False, permute=None, **machine
    ):
        hosts = hosts or ["host"] * len(shape)
        self.service = Service()
        self.machines = {}
        for host in hosts:
            if host not in self.machines:
                fabric = next(iter(self.machines.values()), None)
                self.machines[host] = fake_cuda.Machine(
                    devices=1 if shared_device else sum(shape), same_fabric_as=fabric, **machine
                )
        self.processes = []
        self.devices = {}
        next_id, used = 0, dict.fromkeys(self.machines, 0)
        for index, (count, host) in enumerate(zip(shape, hosts, strict=True)):
            own = [0] if shared_device else list(range(used[host], used[host] + count))
            used[host] += count
            if permute:
                own = [own[i] for i in permute[:count]]
            visible = list(range(sum(shape))) if sees_all else own
            bindings = self.machines[host].process(visible)
            ordinals = {}
            for physical in own:
                ordinals[next_id] = visible.index(physical)
                self.devices[next_id] = FakeDevice(next_id, index, visible.index(physical))
                next_id += 1
            self.processes.append(Process(index, self.machines[host], bindings, host, ordinals))

    @property
    def misuses(self):
        return [misuse for machine in self.machines.values() for misuse in machine.misuses]

    def each(self, work, processes=None):
        """`work(process)` in a thread each; results or exceptions, in order."""
        processes = self.processes if processes is None else processes
        results = [None] * len(processes)

        def run(position, process):
            _current.process = process
            try:
                results[position] = work(process)
            except BaseException as error:
                results[position] = error
            if process.bindings.stack:
                process.machine.misuses.append(f"process {process.index} left a context current")

        threads = [
            threading.Thread(target=run, args=item, daemon=True) for item in enumerate(processes)
        ]
        deadline = time.monotonic() + TIMEOUT_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
            assert not thread.is_alive(), "a process hangs"
        assert not self.misuses, self.misuses
        return results

    def establish(self, table, spec, processes=None, specs=None):
        """A communicator, or what was raised, for each process."""
        members = {self.devices[device].process_index for ids in table for device in ids}

        def make(process):
            time.sleep(process.late_s)
            rendezvous = Rendezvous(
                sorted(members),
                process.index,
                repr(table),
                process.timeout_s,
                ServiceStore(self.service),
            )
            with rendezvous.session():
                return cuda.CudaCommunicator.establish(
                    table,
                    (specs or {}).get(process.index, spec),
                    self.devices,
                    rendezvous,
                    process.native_library,
                    driver=Driver(process.bindings),
                    environ=process.environ,
                    host=process.host,
                )

        if processes is None:
            processes = [p for p in self.processes if p.index in members]
        return self.each(make, processes)

    def close(self, communicators, timeout_s=5.0):
        """Closes one of each process, all at once."""
        by_process = {c._rendezvous.me: c for c in communicators}
        self.each(
            lambda process: by_process[process.index].close(timeout_s),
            [p for p in self.processes if p.index in by_process],
        )

    def kept(self, communicators_closed=1):
        """What `holdings` is once everything is closed: what captured graphs refer to."""
        return [
            {
                kind: communicators_closed * len(process.ordinals)
                for kind in (
                    "contexts",
                    "handles",
                    "reservations",
                    "mappings",
                    "host pages",
                    "modules",
                )
            }
            for process in self.processes
        ]

    def check_only_homes(self):
        """With everything closed, only control blocks, records and kernels are left."""
        for process, held in zip(self.processes, self.holdings(), strict=True):
            homes = held.get("contexts", 0)
            blocks = held.get("handles", 0) + held.get("ordinary allocations", 0)
            assert blocks == held.get("host pages", 0) == homes
            virtual = held.get("handles", 0)
            assert held.get("mappings", 0) == held.get("reservations", 0) == virtual
            assert held.get("modules", 0) <= 2 * homes  # one each for unicast and multicast
            assert not held.get("opened allocations", 0)
            assert process.native_library.ranks == {}
        alive = sum(
            memory.fd is not None
            for machine in self.machines.values()
            for memory in machine.by_inode.values()
        )
        assert alive == sum(held.get("contexts", 0) for held in self.holdings())

    def check_wired(self, communicators, table, spec, deadline_s=60.0):
        """Every address in every control block leads where it should; all is as at the start."""
        layout = [(group, rank) for group in range(len(table)) for rank in range(spec.tp)]
        ranks = {}
        for communicator in communicators:
            process = self.processes[communicator._rendezvous.me]
            for arguments in process.native_library.ranks.values():
                owner = next(
                    device
                    for device, ordinal in process.ordinals.items()
                    if ordinal == arguments["ordinal"]
                )
                ranks[owner] = (process, arguments)
        assert sorted(ranks) == sorted(device for ids in table for device in ids)
        controls = {}
        variant = KernelVariant.of(spec, "sm_90")
        size = variant.workspace_bytes(spec.max_tokens)
        for device, (process, arguments) in ranks.items():
            ordinal = arguments["ordinal"]
            data = process.bindings.read(
                arguments["control"], variant.control_bytes(spec.max_tokens), ordinal
            )
            assert arguments["slots"] == variant.slots(spec.max_tokens)
            control = controls[device] = abi.Control.from_buffer_copy(data)
            assert not any(data[abi.GENERATIONS_OFFSET :])
            assert (control.broken, control.closed, control.claimed) == (0, 0, 0)
            assert control.record == arguments["record"]
            for kernel in arguments["kernels"]:
                assert process.bindings.functions[kernel.function][0] == ordinal
            assert control.deadline_ns == int(deadline_s * 1e9)
            words = process.bindings.read(control.workspace, size, ordinal)
            assert words == abi.SENTINEL.to_bytes(4, "little") * (size // 4)
        for group, rank in layout:
            device = table[group][rank]
            process, arguments = ranks[device]
            assert arguments["rank"] == rank
            assert arguments["devices"] == [d for ids in table for d in ids]
            control = controls[device]
            for peer, peer_device in enumerate(table[group]):
                peer_process, peer_arguments = ranks[peer_device]
                mark = bytes([group + 1, rank + 1, peer + 1, 7]) * 4
                offset = size - 16 * (1 + rank)
                process.bindings.write(
                    control.peer_workspace[peer] + offset, mark, arguments["ordinal"]
                )
                own = controls[peer_device].workspace + offset
                assert peer_process.bindings.read(own, 16, peer_arguments["ordinal"]) == mark
                process.bindings.write(control.peer_broken[peer], mark[:4], arguments["ordinal"])
                broken = peer_process.bindings.read(
                    peer_arguments["control"], 4, peer_arguments["ordinal"]
                )
                assert broken == mark[:4]
            assert not any(control.peer_workspace[spec.tp :])
            assert not any(control.peer_broken[spec.tp :])

    def holdings(self):
        """What each process holds of the driver."""
        return [process.bindings.holdings() for process in self.processes]

    def cubin_stand_in(self, variant):
        """What `store.find` gives: a kernel for each geometry."""
        geometries = geometry.entries(variant.tp, variant.latent, variant.hidden, variant.op)
        symbols = [f"kernel_{index}" for index in range(len(geometries))]
        data = f"{variant.key} {symbols}".encode()
        kernels = tuple(
            store.KernelEntry(symbol, g.cluster, g.threads, g.smem_bytes, 64)
            for symbol, g in zip(symbols, geometries, strict=True)
        )
        return store.Cubin(variant, data, hashlib.sha256(data).hexdigest(), kernels, "a stand-in")


def spec(tp, latent=256, hidden=None, max_tokens=40, **options):
    """A small call."""
    return TailSpec(
        tp=tp,
        latent_dim=latent,
        hidden_dim=16 * tp if hidden is None else hidden,
        top_k=options.pop("top_k", None),
        eps=1e-6,
        fp32_internal=False,
        max_tokens=max_tokens,
        **options,
    )


def projection(tp, latent=256, shard=200, max_tokens=40, has_residual=True):
    """An up-projection to `shard` columns of each rank, and the gather of those."""
    return gather_spec(tp, shard, has_residual, max_tokens, latent)


def row(count):
    """A table of one group."""
    return (tuple(range(count)),)


@contextlib.contextmanager
def nothing_left(world, folder):
    """Checks files, descriptors and keys after the block."""
    with fake_cuda.descriptors_unchanged(world.machines.values()):
        yield
    assert os.listdir(folder) == []
    assert world.service.values == {}


logging.getLogger("jax_latent_tail").setLevel(logging.DEBUG)

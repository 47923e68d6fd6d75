"""Publishing through one mapping: where it can be, where it must not be, and what proves it."""

import ctypes
import shutil
import subprocess
import time

import fake_cuda
import pytest
from fake_cuda import MulticastObject
from test_cuda_communicator import force
from world import World, nothing_left, projection, row, spec

from jax_latent_tail.communicator import cuda, multicast
from jax_latent_tail.errors import RendezvousError
from jax_latent_tail.kernels import abi, store
from jax_latent_tail.spec import gather_spec


def asking(world):
    for process in world.processes:
        process.environ["JAX_LATENT_TAIL_MULTICAST"] = "1"
    return world


def control_of(process, arguments):
    data = process.bindings.read(
        arguments["control"], ctypes.sizeof(abi.Control), arguments["ordinal"]
    )
    return abi.Control.from_buffer_copy(data)


def publishes(world, made):
    """What the communicators say; and whether their control blocks agree."""
    (publish,) = {"multicast" if "multicast" in c.summary else "unicast" for c in made}
    for process in world.processes:
        for arguments in process.native_library.ranks.values():
            assert bool(control_of(process, arguments).multicast) == (publish == "multicast")
    return publish


@pytest.mark.parametrize(
    ("shape", "hosts", "table"),
    [
        ([4], None, row(4)),
        ([1, 1, 1], None, row(3)),
        ([2, 2], None, row(4)),
        ([2, 1, 1], None, ((2, 0), (1, 3))),
        ([2, 2], ["a", "b"], row(4)),
        ([2, 2], ["a", "b"], ((0, 2), (3, 1))),
    ],
)
def test_a_store_reaches_every_rank_of_the_group_and_no_other(shape, hosts, table, sockets):
    world = asking(World(shape, hosts=hosts))
    call = spec(len(table[0]))
    with nothing_left(world, sockets):
        made = world.establish(table, call)
        assert publishes(world, made) == "multicast"
        world.check_wired(made, table, call)
        ranks = {}
        for process in world.processes:
            for arguments in process.native_library.ranks.values():
                (device,) = [d for d, o in process.ordinals.items() if o == arguments["ordinal"]]
                ranks[device] = (process, arguments, control_of(process, arguments))
        for device, (process, arguments, control) in ranks.items():
            mark = bytes([device + 1] * 16)
            offset = 16 * (device + 1)
            process.bindings.write(control.multicast + offset, mark, arguments["ordinal"])
            (mine,) = [ids for ids in table if device in ids]
            for peer, (peer_process, peer_arguments, peer_control) in ranks.items():
                found = peer_process.bindings.read(
                    peer_control.workspace + offset, 16, peer_arguments["ordinal"]
                )
                assert (found == mark) == (peer in mine)
        world.close(made)
    assert world.holdings() == world.kept()


def test_the_kernel_is_the_one_that_publishes_so(sockets):
    world = asking(World([1, 1]))
    made = world.establish(row(2), spec(2))
    for process in world.processes:
        modules = [data for _, data in process.bindings.modules.values()]
        assert len(modules) == 1
        assert b"-multicast" in modules[0]
    world.close(made)


# The call, and from one rank's row to the next.
PUBLISHING = {
    "fused": (spec(3), 256 * 2 + 128),
    "all_gather_add": (gather_spec(3, 200, False, 40), 200 * 2 + 112),
    "up_gather_add": (projection(3, shard=200), 32 * 64 * 2 + 128),
}


@pytest.mark.parametrize("op", PUBLISHING)
def test_probes_are_stored_and_checked_where_rows_arrive(op, sockets, monkeypatch):
    call, pitch = PUBLISHING[op]
    world = asking(World([1, 1, 1]))
    stored, checked = [[], [], []], [[], [], []]
    numbers = [process.bindings.number for process in world.processes]
    real_write = fake_cuda.FakeDriver.write
    real_copy = fake_cuda.FakeDriver._cuMemcpyDtoH

    def write(self, address, data, ordinal):
        memory, offset = self._resolve(address, len(data), ordinal)
        if isinstance(memory, MulticastObject):
            stored[numbers.index(self.number)].append(offset)
        real_write(self, address, data, ordinal)

    def copy(self, destination, address, size):
        _, offset = self._resolve(int(address), size, self.current())
        checked[numbers.index(self.number)].append(offset)
        real_copy(self, destination, address, size)

    with nothing_left(world, sockets):
        with monkeypatch.context() as patch:
            patch.setattr(fake_cuda.FakeDriver, "write", write)
            patch.setattr(fake_cuda.FakeDriver, "_cuMemcpyDtoH", copy)
            made = world.establish(row(3), call)
        assert publishes(world, made) == "multicast"
        assert stored == [[rank * pitch] for rank in range(3)]
        assert checked == [[rank * pitch for rank in range(3)]] * 3
        for process in world.processes:
            ((_, module),) = process.bindings.modules.values()
            assert b"-multicast" in module
        world.check_wired(made, row(3), call)  # nothing is left of the probes
        world.close(made)
    assert world.holdings() == world.kept()


@pytest.mark.parametrize(
    "what", ["not asked", "nvls off", "one device", "shared", "ipc", "one rank", "shared half"]
)
def test_where_it_is_not_used(what, sockets, caplog):
    world = World([1] if what == "one rank" else [1, 1], shared_device=what == "shared")
    if what != "not asked":
        asking(world)
    if what == "nvls off":
        for process in world.processes:
            process.environ["NCCL_NVLS_ENABLE"] = "0"
    if what == "one device":
        world.processes[1].bindings.visible[0].multicast = False
    if what == "ipc":
        force(world, "ipc")
    ranks = len(world.processes)
    call = spec(ranks)
    if what == "shared half":
        call = type(call)(2, None, 32, None, 1e-6, False, 4)
    with nothing_left(world, sockets):
        made = world.establish(row(ranks), call)
        assert publishes(world, made) == "unicast"
        world.check_wired(made, row(ranks), call)
        world.close(made)
    assert not any(process.bindings.calls["cuMulticastCreate"] for process in world.processes)
    assert ("no multicast" in caplog.text) == (what not in ("not asked", "nvls off"))


@pytest.mark.parametrize("op", PUBLISHING)
@pytest.mark.parametrize("lost_by", [0, 1, 2])
@pytest.mark.parametrize("what", ["nothing arrives", "one is left out", "garbled"])
def test_a_store_that_does_not_arrive_everywhere_leads_to_unicast(
    lost_by, what, op, sockets, monkeypatch, caplog
):
    """Set-up that succeeds is no proof."""
    world, (call, _) = asking(World([1, 1, 1])), PUBLISHING[op]
    liar = world.processes[lost_by].bindings
    real = fake_cuda.FakeDriver.write

    def write(self, address, data, ordinal):
        memory, offset = self._resolve(address, len(data), ordinal)
        if self is not liar or not isinstance(memory, MulticastObject):
            return real(self, address, data, ordinal)
        bound = list(memory.bound.values())
        if what == "nothing arrives":
            bound = []
        elif what == "one is left out":
            bound = bound[1:]
        else:
            data = data[:12] + bytes(4)
        for allocation, start in bound:
            allocation.write(start + offset, data)
        return None

    monkeypatch.setattr(fake_cuda.FakeDriver, "write", write)
    with nothing_left(world, sockets):
        made = world.establish(row(3), call)
        assert publishes(world, made) == "unicast"
        # The probes of the others are gone too.
        world.check_wired(made, row(3), call)
        assert f"store of rank {lost_by} of group 0" in caplog.text
        world.close(made)
    assert world.holdings() == world.kept()


def test_a_device_that_does_not_come_to_rest_is_named(sockets, monkeypatch):
    monkeypatch.setattr(multicast, "_PROBE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(cuda, "_ABANDON_TIMEOUT_S", 0.3)
    world = asking(World([1, 1]))
    bindings = world.processes[1].bindings
    launch = bindings._cuLaunchKernel

    def never_done(*arguments):
        launch(*arguments)
        bindings.busy.clear()

    monkeypatch.setattr(bindings, "_cuLaunchKernel", never_done, raising=False)
    start = time.monotonic()
    for error in world.establish(row(2), spec(2)):
        assert type(error) is RendezvousError
        assert "'storing multicast probes' failed in process 1: the device of rank 1" in str(error)
    assert time.monotonic() - start < 10
    assert world.holdings()[0] == {}
    bindings.busy.set()


def test_no_kernel_for_it_leads_to_unicast(sockets, monkeypatch, caplog):
    world = asking(World([1, 1]))

    def find(variant):
        if variant.publish == "multicast":
            raise store.UnavailableError("not compiled")
        return world.cubin_stand_in(variant)

    monkeypatch.setattr(store, "find", find)
    with nothing_left(world, sockets):
        made = world.establish(row(2), spec(2))
        assert publishes(world, made) == "unicast"
        world.close(made)
    assert "no multicast, although it was asked for" in caplog.text
    assert "not compiled" in caplog.text


def test_different_wishes_are_a_disagreement(sockets):
    world = World([1, 1])
    world.processes[1].environ["JAX_LATENT_TAIL_MULTICAST"] = "1"
    for error in world.establish(row(2), spec(2)):
        assert "multicast is False in process 0 and True in process 1" in str(error)


def test_the_next_communicator_can_be_multicast_again(sockets):
    world = asking(World([1, 1]))
    for _ in range(3):
        made = world.establish(row(2), spec(2))
        assert publishes(world, made) == "multicast"
        world.close(made)
    assert world.holdings() == world.kept()


@pytest.mark.skipif(not shutil.which("ptxas"), reason="needs ptxas")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_probe_assembles(arch, tmp_path):
    source = tmp_path / "probe.ptx"
    source.write_bytes(multicast._PROBE_PTX.rstrip(b"\0"))
    subprocess.run(
        ["ptxas", f"-arch={arch}", str(source), "-o", str(tmp_path / "probe.cubin")],
        check=True,
        timeout=60,
    )

"""What must come before what while a communicator is made."""

import threading
import time

import pytest
from test_cuda_communicator import force
from world import World, nothing_left, row, spec


def test_no_memory_is_touched_before_all_devices_are_idle(sockets):
    """Mapping beside a kernel that waits for a peer can block for ever."""
    world = World([2, 1])
    busy = world.processes[1].bindings
    busy.busy.clear()
    seen = []

    def look_and_end():
        for process in world.processes:
            seen.extend(name for name in process.bindings.trace if name.startswith("cuMem"))
        busy.busy.set()

    threading.Timer(0.5, look_and_end).start()
    start = time.monotonic()
    made = world.establish(row(3), spec(3))
    assert time.monotonic() - start >= 0.5
    assert seen == []
    world.close(made)


@pytest.mark.parametrize("kind", ["posix_fd", "ipc"])
@pytest.mark.parametrize("table", [((0, 2), (1, 3)), ((3, 1), (0, 2)), ((0, 1), (2, 3))])
def test_groups_that_cross_processes_differently(kind, table, sockets):
    world = World([2, 1, 1])
    force(world, kind)
    with nothing_left(world, sockets):
        made = world.establish(table, spec(2))
        world.check_wired(made, table, spec(2))
        assert all(f"CUDA, {kind} memory" in c.summary for c in made)
        world.close(made)
    world.check_only_homes()


def test_no_rank_is_registered_before_all_are_ready(sockets):
    """A kernel that starts early would meet memory that a slower peer still fills."""
    world = World([1, 1, 1])
    registered = []
    for process in world.processes:
        real = process.native_library.add_cuda_rank

        def add(real=real, **arguments):
            registered.append([p.bindings.trace[-1] for p in world.processes])
            assert all(p.bindings.calls["cuOccupancyMaxActiveClusters"] for p in world.processes)
            return real(**arguments)

        process.native_library.add_cuda_rank = add
    world.processes[2].late_s = 0.2
    made = world.establish(row(3), spec(3))
    assert len(registered) == 3
    world.check_wired(made, row(3), spec(3))
    world.close(made)


@pytest.mark.parametrize("kind", ["vmm", "posix_fd", "ipc"])
def test_memory_is_filled_whatever_its_last_user_left_there(kind, sockets):
    world = World([2] if kind == "vmm" else [1, 1])
    force(world, kind)
    for tokens in (40, 39, 40):  # the same sizes in pages, other control blocks
        made = world.establish(row(2), spec(2, max_tokens=tokens))
        world.check_wired(made, row(2), spec(2, max_tokens=tokens))
        world.close(made)

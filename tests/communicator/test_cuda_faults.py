"""An error of the driver at every call: all processes go the same way, and nothing is left.

The short form takes the first call of each function in one process; `-m long` takes every call in
every process.
"""

import logging

import pytest
from test_cuda_communicator import force, same_refusal
from world import World, nothing_left, row, spec

from jax_latent_tail.communicator import descriptors
from jax_latent_tail.communicator.cuda import CudaCommunicator

# (kind of memory, devices of each process, hosts, table, multicast)
CASES = {
    "vmm": ("vmm", [2], None, row(2), False),
    "plain": ("plain", [2], None, row(2), False),
    "posix_fd": ("posix_fd", [1, 1], None, row(2), False),
    "posix_fd-groups": ("posix_fd", [2, 1, 1], None, ((0, 2), (3, 1)), False),
    "ipc": ("ipc", [2, 1], None, row(3), False),
    "fabric": ("fabric", [1, 1], ["a", "b"], row(2), False),
    "vmm-multicast": ("vmm", [2], None, row(2), True),
    "posix_fd-multicast": ("posix_fd", [2, 1, 1], None, ((0, 2), (3, 1)), True),
    "fabric-multicast": ("fabric", [1, 2], ["a", "b"], row(3), True),
}

# Without these nothing can be undone; tests of their own say what then happens.
RELEASING = {
    "cuCtxPopCurrent",
    "cuDevicePrimaryCtxRelease",
    "cuIpcCloseMemHandle",
    "cuMemAddressFree",
    "cuMemFree",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuMulticastUnbind",
}


def make_world(case):
    kind, shape, hosts, table, multicast = CASES[case]
    world = World(shape, hosts=hosts)
    force(world, kind)
    for process in world.processes:
        process.environ["JAX_LATENT_TAIL_MULTICAST"] = str(int(multicast))
    return world, table, spec(len(table[0]))


def survey(case):
    """How often each process calls each function on the way to a communicator."""
    world, table, call = make_world(case)
    made = world.establish(table, call)
    assert all(isinstance(c, CudaCommunicator) for c in made), made
    expected = "multicast" if CASES[case][4] else "unicast"
    assert all(expected in c.summary for c in made)
    counts = [
        {name: n for name, n in process.bindings.calls.items() if name not in RELEASING}
        for process in world.processes
    ]
    world.close(made)
    return counts


def attempt_with_fault(case, process, function, n, sockets, code="NOT_PERMITTED"):
    world, table, call = make_world(case)
    with nothing_left(world, sockets):
        bindings = world.processes[process].bindings
        bindings.faults[(function, n)] = code
        results = world.establish(table, call)
        assert bindings.calls[function] >= n
        if all(isinstance(result, CudaCommunicator) for result in results):
            # Another kind of memory, or no multicast; the same for all.
            assert len({result.summary for result in results}) == 1
            world.check_wired(results, table, call)
            world.close(results)
            world.check_only_homes()
        else:
            text = same_refusal(results)
            assert f"{function}: CUDA_ERROR_{code}" in text
            assert f"failed in process {process}" in text
            assert world.holdings() == [{}] * len(world.processes)
            assert all(p.native_library.ranks == {} for p in world.processes)
        bindings.faults.clear()
        again = world.establish(table, call)
        assert all(isinstance(result, CudaCommunicator) for result in again), again
        world.check_wired(again, table, call)
        world.close(again)
        world.check_only_homes()
    return results


@pytest.mark.parametrize("case", CASES)
def test_a_fault_at_the_first_call_of_each_function(case, sockets, caplog):
    caplog.set_level(logging.CRITICAL)
    counts = survey(case)
    for function in sorted(counts[-1]):
        attempt_with_fault(case, len(counts) - 1, function, 1, sockets)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_fault_at_every_call(case, sockets, caplog):
    caplog.set_level(logging.CRITICAL)
    for process, functions in enumerate(survey(case)):
        for function, count in functions.items():
            for n in range(1, count + 1):
                attempt_with_fault(case, process, function, n, sockets)


@pytest.mark.parametrize(
    ("case", "function", "next_kind"),
    [
        ("vmm", "cuMemSetAccess", "plain"),
        ("posix_fd", "cuMemCreate", "ipc"),
        ("posix_fd", "cuMemExportToShareableHandle", "ipc"),
        ("posix_fd", "cuMemImportFromShareableHandle", "ipc"),
        ("posix_fd", "cuMemMap", "ipc"),
    ],
)
def test_all_take_the_next_kind_when_one_cannot(case, function, next_kind, sockets):
    results = attempt_with_fault(case, 0, function, 1, sockets)
    assert all(f"CUDA, {next_kind} memory" in result.summary for result in results)


@pytest.mark.parametrize("function", ["bind", "connect", "send"])
def test_a_socket_that_fails_leads_to_the_next_kind(function, sockets, monkeypatch):
    from world import current_process

    world = World([1, 1, 1])

    class Socket(descriptors.socket.socket):
        def bind(self, address):
            self.fail("bind")
            super().bind(address)

        def connect(self, address):
            self.fail("connect")
            super().connect(address)

        def fail(self, name):
            if name == function and current_process() is world.processes[1]:
                raise PermissionError(13, "Permission denied")

    real_send = descriptors.socket.send_fds

    def send_fds(*arguments):
        if function == "send" and current_process() is world.processes[1]:
            raise PermissionError(13, "Permission denied")
        return real_send(*arguments)

    monkeypatch.setattr(descriptors.socket, "socket", Socket)
    monkeypatch.setattr(descriptors.socket, "send_fds", send_fds)
    monkeypatch.setattr(descriptors, "PASS_TIMEOUT_S", 0.5)
    with nothing_left(world, sockets):
        made = world.establish(row(3), spec(3))
        assert all("CUDA, ipc memory" in c.summary for c in made), made
        world.close(made)
    world.check_only_homes()


def test_a_host_without_the_sockets_folder_leads_to_the_next_kind(sockets, monkeypatch):
    """As in containers that share no file system."""
    world = World([1, 1])
    address = descriptors.Exchange.address.fget
    monkeypatch.setattr(
        descriptors.Exchange,
        "address",
        property(lambda self: {**address(self), "path": "/nowhere/socket"}),
    )
    with nothing_left(world, sockets):
        made = world.establish(row(2), spec(2))
        assert all("CUDA, ipc memory" in c.summary for c in made), made
        world.close(made)


def give_up(case, function=None):
    """An attempt whose last step fails, so that all has to be released; `function` fails, too."""
    world, table, call = make_world(case)
    for process in world.processes:
        process.native_library.add_cuda_rank = _refuse
        if function:
            process.bindings.faults[(function, 1)] = "INVALID_VALUE"
    assert "no more ranks" in same_refusal(world.establish(table, call))
    assert world.service.values == {}
    return world


@pytest.mark.parametrize("case", ["posix_fd", "ipc", "posix_fd-multicast"])
def test_an_error_while_giving_up_does_not_change_the_outcome(case, sockets, caplog):
    world = give_up(case)
    assert world.holdings() == [{}] * len(world.processes)
    called = set().union(*(process.bindings.calls for process in world.processes))
    functions = called & RELEASING - {"cuCtxPopCurrent"}
    assert len(functions) >= 5
    for function in functions:
        caplog.clear()
        give_up(case, function)
        assert f"{function}: CUDA_ERROR_INVALID_VALUE" in caplog.text


def _refuse(**arguments):
    raise descriptors.PassingError("no more ranks")

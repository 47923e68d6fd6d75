"""Communicators of several processes, over a driver that notices every misuse."""

import ctypes
import logging
import re
import threading
import time

import numpy as np
import pytest
from world import World, current_process, nothing_left, projection, row, spec

from jax_latent_tail.communicator import cuda, descriptors
from jax_latent_tail.communicator.cuda import CudaCommunicator
from jax_latent_tail.communicator.driver import Device, DriverError
from jax_latent_tail.communicator.rendezvous import Refusal, Rendezvous
from jax_latent_tail.errors import (
    ArgumentValueError,
    DisagreementError,
    RendezvousError,
    UnavailableError,
)
from jax_latent_tail.kernels import abi, geometry, store
from jax_latent_tail.spec import gather_spec

SHAPES = [[1], [2], [8], [1, 1], [1] * 8, [2, 2], [3, 1], [1, 4, 3]]


def same_refusal(results):
    """The text with which all refused."""
    assert all(isinstance(result, Refusal) for result in results), results
    texts = {str(result) for result in results}
    assert len(texts) == 1
    return texts.pop()


def force(world, kind):
    """Leaves the machines no better kind of memory."""
    for machine in world.machines.values():
        if kind == "plain":
            machine.virtual = False
        if kind == "ipc":
            machine.handle_types = set()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sees_all", [False, True])
def test_every_address_leads_to_the_peer(shape, sees_all, sockets):
    world = World(shape, sees_all=sees_all)
    table, call = row(sum(shape)), spec(sum(shape))
    with nothing_left(world, sockets):
        made = world.establish(table, call)
        world.check_wired(made, table, call)
        expected = "vmm" if len(shape) == 1 else "posix_fd"
        assert all(f"CUDA, {expected} memory" in c.summary for c in made)
        world.close(made)
    assert world.holdings() == world.kept()


@pytest.mark.parametrize(
    ("kind", "shape", "hosts"),
    [
        ("plain", [3], None),
        ("ipc", [1, 1, 1], None),
        ("ipc", [2, 2], None),
        ("fabric", [2, 2], ["a", "b"]),
        ("fabric", [1, 1, 2], ["a", "b", "a"]),
    ],
)
def test_the_other_kinds_of_memory(kind, shape, hosts, sockets):
    world = World(shape, hosts=hosts)
    force(world, kind)
    table, call = row(sum(shape)), spec(sum(shape))
    with nothing_left(world, sockets):
        made = world.establish(table, call)
        world.check_wired(made, table, call)
        assert all(f"CUDA, {kind} memory" in c.summary for c in made)
        world.close(made)
    for process, held in zip(world.processes, world.holdings(), strict=True):
        assert held.pop("contexts") == held.pop("host pages") == len(process.ordinals)
        assert set(held.values()) == {len(process.ordinals)}


@pytest.mark.parametrize("seed", range(6))
def test_random_tables_over_random_processes(seed, sockets):
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.integers(1, 4, rng.integers(1, 5))]
    total = sum(shape)
    groups = int(rng.choice([n for n in range(1, total + 1) if total % n == 0]))
    ids = rng.permutation(total).reshape(groups, total // groups)
    table = tuple(tuple(int(d) for d in group) for group in ids)
    world = World(shape, permute=list(rng.permutation(min(shape))) if seed % 2 else None)
    world = world if seed % 2 == 0 else World([min(shape)] * len(shape), permute=None)
    if seed % 2:  # ordinals that run against the ids
        shape = [min(shape)] * len(shape)
        world = World(shape, permute=[int(i) for i in rng.permutation(shape[0])], sees_all=True)
        table = row(sum(shape))
    call = spec(len(table[0]), max_tokens=int(rng.integers(1, 40)))
    with nothing_left(world, sockets):
        made = world.establish(table, call)
        world.check_wired(made, table, call)
        world.close(made)
    assert world.holdings() == world.kept()


def test_groups_on_different_hosts_use_the_memory_of_their_host(sockets):
    world = World([2, 2], hosts=["a", "b"])
    table, call = ((0, 1), (2, 3)), spec(2)
    with nothing_left(world, sockets):
        made = world.establish(table, call)
        world.check_wired(made, table, call)
        assert all("posix_fd" in c.summary for c in made)
        world.close(made)


def test_only_the_processes_of_a_group_map_its_memory(sockets):
    world = World([1, 1, 1, 1])
    made = world.establish(((0, 1), (2, 3)), spec(2))
    # Own control and workspace, and those of one peer.
    assert [held["mappings"] for held in world.holdings()] == [4] * 4
    world.close(made)


def test_processes_that_share_a_gpu_plan_for_it(sockets):
    # Few SMs, so that what fits bounds the plans.
    alone, together = World([1, 1], sms=60), World([1, 1], shared_device=True, sms=60)
    call = spec(2, 3584, 7168, max_tokens=128)
    plans = []
    for world in (alone, together):
        made = world.establish(row(2), call)
        plans.append([p.native_library.registrations[0]["plans"] for p in world.processes])
        world.check_wired(made, row(2), call)
        world.close(made)
    few, many = (4, 128), (1, 480)
    for (own, peers), sharing, reserved in zip(
        plans, (1, 2), (geometry.RESERVED_SMS, 0), strict=True
    ):
        assert own == peers
        assert len(own) == call.max_tokens
        for tokens, (index, ctas) in enumerate(own, start=1):
            cluster, threads = (few, many)[index]
            assert index == (tokens >= geometry.WIDE_FROM_TOKENS)
            assert ctas == geometry.token_ctas(
                tokens,
                roles=2,
                active_clusters=60 * (1024 // threads) // cluster,
                sm_count=60,
                ranks_on_device=sharing,
                reserved_sms=reserved,
                cluster=cluster,
                untouched_sms=geometry.UNTOUCHED_SMS if sharing > 1 else 0,
            )


@pytest.mark.parametrize(
    ("latent", "hidden", "op"),
    [(64, 32, "fused"), (64, None, "all_reduce_rms_norm"), (None, 32, "reduce_scatter")],
)
def test_what_the_library_is_told(latent, hidden, op, sockets):
    world = World([1, 1])
    world.processes[0].environ["JAX_LATENT_TAIL_PDL"] = "0"
    world.processes[1].environ["JAX_LATENT_TAIL_PDL"] = "0"
    call = cuda.TailSpec(
        tp=2,
        latent_dim=latent,
        hidden_dim=hidden,
        top_k=None,
        eps=1e-5,
        fp32_internal=True,
        max_tokens=3,
    )
    made = world.establish(((1, 0),), call)
    for process, rank in zip(world.processes, (1, 0), strict=True):
        (arguments,) = process.native_library.registrations
        assert arguments["rank"] == rank
        assert arguments["devices"] == [1, 0]
        assert arguments["spec"] == call
        assert arguments["pdl"] is False
        assert arguments["call_hash"] == abi.call_hash(
            op, tp=2, latent=latent or 0, hidden=hidden or 0, top_k=0, fp32_internal=True, eps=1e-5
        )
        names = [process.bindings.functions[k.function][1] for k in arguments["kernels"]]
        geometries = geometry.entries(2, latent or 0, hidden or 0)
        assert names == [f"kernel_{index}".encode() for index in range(len(geometries))]
        assert [(k.cluster, k.threads, k.smem_bytes) for k in arguments["kernels"]] == [
            (g.cluster, g.threads, g.smem_bytes) for g in geometries
        ]
        assert arguments["slots"] == 3
        roles = (latent is not None) + (hidden is not None)
        assert all(ctas <= 132 * 8 // roles for _, ctas in arguments["plans"])
    world.close(made)
    assert all(process.native_library.ranks == {} for process in world.processes)


@pytest.mark.parametrize(("max_tokens", "planned"), [(1, 1), (9, 9), (32, 32), (33, 32), (128, 32)])
def test_an_up_projection_has_tiles_in_the_place_of_tokens(max_tokens, planned, sockets):
    world = World([1, 1])
    call = projection(2, shard=200, max_tokens=max_tokens)  # three tiles of 64 columns, and 8 more
    with nothing_left(world, sockets):
        made = world.establish(row(2), call)
        world.check_wired(made, row(2), call)
        rows = 32 * 64 * 2 + 128  # of all tokens and a header, padded
        for process, communicator in zip(world.processes, made, strict=True):
            (arguments,) = process.native_library.registrations
            assert arguments["slots"] == 4
            assert f"memory of {2 * 4 * 2 * rows} bytes a rank" in communicator.summary
            assert len(arguments["plans"]) == planned
            for tokens, (index, ctas) in enumerate(arguments["plans"], start=1):
                assert (index, ctas) == ((tokens > 8) + (tokens > 16), 4)
            assert len(arguments["kernels"]) == 3
        world.close(made)
    assert world.holdings() == world.kept()


def test_an_up_projection_of_more_rows_than_shared_memory_holds_is_not_served():
    assert cuda.unsupported(projection(2, latent=6144)) is None
    reason = "latent_dim=6152 is more than the 6144 that shared memory has room for"
    assert cuda.unsupported(projection(2, latent=6152)) == reason
    assert cuda.unsupported(spec(2, latent=6152)) is None


def test_a_kernel_that_cannot_have_its_shared_memory_is_a_refusal(sockets):
    world = World([1, 1])
    with nothing_left(world, sockets):
        text = same_refusal(world.establish(row(2), projection(2, latent=32768)))
    assert "'loading the kernels' failed in process 0" in text
    assert "cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE" in text


@pytest.mark.parametrize(("shared_device", "sms"), [(False, 60), (True, 60), (False, 132)])
def test_the_tiles_of_an_up_projection_take_turns_where_they_do_not_fit_at_once(
    shared_device, sms, sockets
):
    world = World([1, 1], shared_device=shared_device, sms=sms)
    call = projection(2, latent=3584, shard=3584)
    made = world.establish(row(2), call)
    for process in world.processes:
        (arguments,) = process.native_library.registrations
        expected = geometry.token_ctas(
            56,
            roles=1,
            active_clusters=sms * (1024 // 128) // 8,
            sm_count=sms,
            ranks_on_device=2 if shared_device else 1,
            reserved_sms=0 if shared_device else geometry.RESERVED_SMS,
            cluster=8,
            untouched_sms=geometry.UNTOUCHED_SMS if shared_device else 0,
        )
        assert {ctas for _, ctas in arguments["plans"]} == {expected}
        assert (expected < 56) == (sms == 60)
    world.close(made)


def test_an_up_projection_has_a_call_hash_of_its_own(sockets):
    calls = [
        projection(2), projection(2, latent=264), projection(2, shard=208),
        projection(2, has_residual=False), gather_spec(2, 200, True, 40),
        gather_spec(2, 200, False, 40), spec(2, 256, 400),
    ]  # fmt: skip
    assert len({cuda.call_hash(call) for call in calls}) == len(calls)
    assert cuda.call_hash(projection(2, max_tokens=3)) == cuda.call_hash(projection(2))
    world = World([1, 1])
    made = world.establish(row(2), projection(2))
    for process in world.processes:
        (arguments,) = process.native_library.registrations
        assert arguments["call_hash"] == abi.gather_hash(
            "up_gather_add", tp=2, latent=256, hidden=400, residual=True
        )
    world.close(made)


def test_an_up_projection_and_other_calls_of_its_sizes_have_memory_of_their_own(sockets):
    world = World([1, 1])
    calls = [projection(2), gather_spec(2, 200, True, 32), spec(2, 256, 400)]
    made = [world.establish(row(2), call) for call in calls]
    for process in world.processes:
        assert len({a["control"] for a in process.native_library.registrations}) == len(calls)
    for communicators in made:
        world.close(communicators)
    assert world.holdings() == world.kept(len(calls))


def test_settings_reach_the_control_block(sockets):
    world = World([1, 1])
    for process in world.processes:
        process.environ["JAX_LATENT_TAIL_DEADLINE"] = "1.5"
    made = world.establish(row(2), spec(2))
    world.check_wired(made, row(2), spec(2), deadline_s=1.5)
    world.close(made)


# Refusals and errors.


REASONS = {
    "library": "the library is not there",
    "kernel": "no kernel for",
    "user": "of one user",
    "architecture": "the devices differ",
    "memory": "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "capability": "compute capability 8.0",
    "peer access": "no peer access to rank 1 of group 0 (device 1)",
    "registration": "registered by nobody",
}


def break_one(world, what, monkeypatch):
    """Makes process 1 unable to take part."""
    process = world.processes[1]
    if what == "library":
        process.native_library = UnavailableError(REASONS[what])
    elif what == "kernel":

        def find(variant):
            if current_process() is process:
                raise UnavailableError("no kernel for this")
            return world.cubin_stand_in(variant)

        monkeypatch.setattr(store, "find", find)
    elif what == "user":
        monkeypatch.setattr(cuda.os, "geteuid", lambda: 5 if current_process() is process else 4)
    elif what == "architecture":
        process.bindings.visible[0].capability = (10, 0)
    elif what == "capability":
        process.bindings.visible[0].capability = (8, 0)
    elif what == "memory":
        process.bindings.visible[0].free = 1 << 16
    elif what == "peer access":
        process.machine.no_peer_access.add((0, 1))
    else:

        def add_cuda_rank(**arguments):
            raise UnavailableError(REASONS[what])

        process.native_library.add_cuda_rank = add_cuda_rank


@pytest.mark.parametrize("what", REASONS)
def test_one_that_cannot_makes_all_refuse_alike_and_leaves_nothing(what, sockets, monkeypatch):
    world = World([1, 1, 1], sees_all=what == "peer access")
    break_one(world, what, monkeypatch)
    with nothing_left(world, sockets):
        text = same_refusal(world.establish(row(3), spec(3)))
    assert REASONS[what] in text
    assert "process " in text or what == "architecture"
    assert world.holdings() == [{}] * 3
    assert all(
        process.native_library.ranks == {} for process in (world.processes[0], world.processes[2])
    )


def test_out_of_memory_says_how_much_was_wanted_and_free(sockets):
    world = World([1, 1], memory=100 << 10)
    text = same_refusal(world.establish(row(2), spec(2)))
    assert "131072 bytes wanted, 36864 of 102400 free" in text
    assert "process 0" in text
    assert world.holdings() == [{}] * 2


def test_the_refusal_names_every_kind_that_was_tried(sockets):
    world = World([1, 1])
    world.processes[0].machine.handle_types = set()
    world.processes[0].machine.ipc = False
    text = same_refusal(world.establish(row(2), spec(2)))
    assert "'allocating posix_fd memory' failed in process 0" in text
    assert "'exporting ipc memory' failed in process 0" in text
    assert "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED" in text
    assert "rank 0 of group 0 (device 0)" in text
    assert world.holdings() == [{}] * 2


def disagreement(results):
    assert all(type(result) is DisagreementError for result in results), results
    texts = {str(result) for result in results}
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("difference", ["max_tokens", "eps", "latent_dim", "deadline", "pdl"])
def test_different_calls_are_an_error_that_shows_both_sides(difference, sockets):
    world = World([1, 1, 1])
    specs, sides = {}, ("", "")
    if difference == "deadline":
        world.processes[2].environ["JAX_LATENT_TAIL_DEADLINE"] = "7"
        sides = ("deadline_s is 60.0", "7.0 in process 2")
    elif difference == "pdl":
        world.processes[2].environ["JAX_LATENT_TAIL_PDL"] = "0"
        sides = ("pdl is True", "False in process 2")
    else:
        other = {"max_tokens": 41, "eps": 1e-5, "latent_dim": 248}[difference]
        specs[2] = cuda.dataclasses.replace(spec(3), **{difference: other})
        sides = (f"{difference} is {getattr(spec(3), difference)}", f"{other} in process 2")
    with nothing_left(world, sockets):
        text = disagreement(world.establish(row(3), spec(3), specs=specs))
    assert all(side in text for side in sides)
    assert world.holdings() == [{}] * 3
    made = world.establish(row(3), spec(3)) if specs else []
    world.close(made)


def test_different_kernels_are_an_error_that_shows_both_sides(sockets, monkeypatch):
    world = World([1, 1])

    def find(variant):
        cubin = world.cubin_stand_in(variant)
        if current_process() is world.processes[1]:
            cubin = store.dataclasses.replace(cubin, sha256="5" * 64)
        return cubin

    monkeypatch.setattr(store, "find", find)
    with nothing_left(world, sockets):
        text = disagreement(world.establish(row(2), spec(2)))
    assert "5" * 64 in text
    assert world.cubin_stand_in(world_variant()).sha256 in text
    assert world.holdings() == [{}] * 2


def world_variant():
    from jax_latent_tail.kernels.variant import KernelVariant

    return KernelVariant.of(spec(2), "sm_90")


@pytest.mark.parametrize("value", ["x", "0", "-1", "nan", "inf"])
def test_a_wrong_setting_is_an_error_that_names_it(value, sockets):
    world = World([1, 1])
    for process in world.processes:
        process.environ["JAX_LATENT_TAIL_DEADLINE"] = value
    for error in world.establish(row(2), spec(2)):
        assert type(error) is ArgumentValueError
        assert error.argument == "JAX_LATENT_TAIL_DEADLINE"
    world.processes[0].environ.clear()
    text = disagreement(world.establish(row(2), spec(2)))
    assert "JAX_LATENT_TAIL_DEADLINE" in text
    assert world.service.values == {}


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({}, None),
        ({"latent": 12}, "latent_dim=12"),
        ({"hidden": 24}, "hidden_dim=24"),
        ({"latent": 0, "hidden": 0}, "no columns"),
        ({"tp": 17}, "17 ranks"),
        ({"tp": 16}, None),
        ({"tp": 1}, None),
    ],
)
def test_sizes_that_no_kernel_serves(sizes, reason):
    found = cuda.unsupported(spec(**{"tp": 2, **sizes}))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({}, None),
        ({"latent": 8, "shard": 8}, None),
        ({"latent": 12}, "latent_dim=12"),
        ({"shard": 12}, "hidden_dim=24"),
        ({"tp": 17}, "17 ranks"),
        ({"tp": 16}, None),
        ({"tp": 1}, None),
    ],
)
def test_sizes_of_an_up_projection_that_no_kernel_serves(sizes, reason):
    found = cuda.unsupported(projection(**{"tp": 2, **sizes}))
    assert found is None if reason is None else reason in found


# Late and missing processes.


def test_a_late_process_is_waited_for(sockets, monkeypatch):
    world = World([1, 1])
    world.processes[1].late_s = 0.7
    send = descriptors.send

    def send_late(*arguments):
        if current_process() is world.processes[0]:
            time.sleep(0.3)  # late in the middle, too
        send(*arguments)

    monkeypatch.setattr(descriptors, "send", send_late)
    made = world.establish(row(2), spec(2))
    world.check_wired(made, row(2), spec(2))
    world.close(made)


def test_a_missing_process_is_named_and_a_retry_by_all_succeeds(sockets):
    world = World([1, 1, 1])
    for process in world.processes:
        process.timeout_s = 0.3
    with nothing_left(world, sockets):
        results = world.establish(row(3), spec(3), processes=world.processes[:2])
    for result in results:
        assert type(result) is RendezvousError
        assert "process 2 did not come" in str(result)
        assert "every process must lower (or prepare) this call" in str(result)
    assert world.holdings() == [{}] * 3
    for process in world.processes:
        process.timeout_s = 20
    made = world.establish(row(3), spec(3))
    world.check_wired(made, row(3), spec(3))
    world.close(made)


def all_give_up(world, pattern):
    """All raise one RendezvousError before those that are done would stop waiting."""
    start = time.monotonic()
    results = world.establish(row(2), spec(2))
    assert time.monotonic() - start < 10
    assert {type(result) for result in results} == {RendezvousError}
    (text,) = {str(result) for result in results}
    assert re.search(pattern, text), text


def test_a_device_that_does_not_come_to_rest_is_named_and_a_retry_succeeds(sockets):
    world = World([1, 1])
    for process in world.processes:
        process.timeout_s = 5
    world.processes[1].bindings.busy.clear()
    with nothing_left(world, sockets):
        all_give_up(
            world,
            r"'waiting for the devices' failed in process 1: the device of rank 1 of group 0"
            r" \(device 1\) is busy, not done after 4\.0 s",
        )
    assert world.holdings() == [{}] * 2
    world.processes[1].bindings.busy.set()
    made = world.establish(row(2), spec(2))
    world.check_wired(made, row(2), spec(2))
    world.close(made)


def test_memory_of_a_device_that_does_not_come_to_rest_is_kept(sockets, monkeypatch, caplog):
    monkeypatch.setattr(cuda, "_ABANDON_TIMEOUT_S", 0.3)
    world = World([1, 1])
    force(world, "ipc")
    for process in world.processes:
        process.timeout_s = 5
    bindings = world.processes[1].bindings
    monkeypatch.setattr(bindings, "_cuMemcpyHtoD", lambda *_: bindings.busy.clear(), raising=False)
    all_give_up(
        world, "'preparing the memory' failed in process 1: of devices 1 one is busy, not done"
    )
    monkeypatch.undo()
    assert "memory of an attempt that failed is not freed: the device of rank 1" in caplog.text
    assert world.holdings()[1]["ordinary allocations"] == 2
    assert world.holdings()[1]["opened allocations"] == 2
    bindings.busy.set()


def test_memory_is_kept_where_one_device_is_lost_and_another_is_busy(sockets, monkeypatch, caplog):
    """The first says that it does nothing any more; that is not true of the second."""
    monkeypatch.setattr(cuda, "_ABANDON_TIMEOUT_S", 0.3)
    world = World([2])
    come_to_rest, failing = threading.Event(), threading.Event()
    real = Device.synchronize

    def synchronize(device):
        if failing.is_set():
            if device.ordinal == 0:
                raise DriverError("cuCtxSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
            come_to_rest.wait(20)
        real(device)

    def load(*_):
        failing.set()
        raise UnavailableError("no such kernel")

    monkeypatch.setattr(Device, "synchronize", synchronize)
    monkeypatch.setattr(CudaCommunicator, "_load_module", load)
    assert "no such kernel" in same_refusal(world.establish(row(2), spec(2)))
    assert "is not freed: the device of rank 1 of group 0 (device 1) is busy" in caplog.text
    held = world.holdings()[0]
    come_to_rest.set()
    assert held["handles"] == 4  # the workspaces and control blocks of both


def test_a_control_block_that_cannot_be_written_is_not_waited_for_without_end(
    sockets, monkeypatch, caplog
):
    """An ordinary copy waits for all that the device was told, say for a kernel that never ends."""
    monkeypatch.setattr(cuda, "_ABANDON_TIMEOUT_S", 0.3)
    world = World([1, 1])
    world.close(world.establish(row(2), spec(2)))  # the control blocks remain
    come_to_rest = threading.Event()

    def mark_closed(*_):
        come_to_rest.wait(20)

    def load(*_):
        monkeypatch.setattr(CudaCommunicator, "_mark_closed", mark_closed)
        raise UnavailableError("no such kernel")

    monkeypatch.setattr(CudaCommunicator, "_load", load)
    start = time.monotonic()
    assert "no such kernel" in same_refusal(world.establish(row(2), spec(2)))
    assert time.monotonic() - start < 10
    assert "is busy, not done after 0.3 s" in caplog.text
    come_to_rest.set()


def test_one_that_fails_in_an_unforeseen_way_ends_all(sockets, monkeypatch):
    world = World([1, 1, 1])

    def find(variant):
        if current_process() is world.processes[1]:
            raise ZeroDivisionError("a bug")
        return world.cubin_stand_in(variant)

    monkeypatch.setattr(store, "find", find)
    with nothing_left(world, sockets):
        results = world.establish(row(3), spec(3))
    assert type(results[1]) is ZeroDivisionError
    assert all("process 1 failed at 'finding the kernel'" in str(results[i]) for i in (0, 2))
    assert all(type(results[i]) is RendezvousError for i in (0, 2))
    assert world.holdings() == [{}] * 3


# The end.


@pytest.mark.parametrize("kind", ["posix_fd", "ipc"])
def test_closing_ends_calls_before_memory(kind, sockets):
    world = World([1, 1])
    force(world, kind)
    made = world.establish(row(2), spec(2))
    controls = [p.native_library.registrations[0]["control"] for p in world.processes]
    for process in world.processes:
        process.bindings.trace.clear()
    world.close(made)
    world.close(made)  # does nothing
    for process, control in zip(world.processes, controls, strict=True):
        assert process.native_library.ranks == {}
        trace = process.bindings.trace
        release = {"posix_fd": "cuMemUnmap", "ipc": "cuIpcCloseMemHandle"}[kind]
        order = ["cuCtxSynchronize", "cuMemcpyHtoD", release]
        assert [trace.index(name) for name in order] == sorted(trace.index(n) for n in order)
        assert "cuModuleUnload" not in trace  # captured graphs hold the kernels
        # The control block is where it was, and says that it is closed.
        head = abi.Control.from_buffer_copy(
            process.bindings.read(control, ctypes.sizeof(abi.Control), 0)
        )
        assert head.closed == 1


def test_closing_waits_for_running_kernels(sockets):
    world = World([1, 1])
    made = world.establish(row(2), spec(2))
    busy = world.processes[0].bindings
    busy.busy.clear()
    threading.Timer(0.3, busy.busy.set).start()
    start = time.monotonic()
    world.close(made)
    assert 0.3 <= time.monotonic() - start < 3
    assert world.holdings() == world.kept()


def test_a_kernel_that_never_ends_keeps_its_memory(sockets, caplog):
    world = World([1, 1])
    made = world.establish(row(2), spec(2))
    held = world.holdings()
    for process in world.processes:
        process.bindings.busy.clear()
    start = time.monotonic()
    world.close(made, timeout_s=0.5)
    assert time.monotonic() - start < 3
    assert world.holdings() == held
    assert "nothing is freed: not done after 0.5 s" in caplog.text
    for process in world.processes:
        process.bindings.busy.set()
    # Nor is there another: captured graphs hold a control block that it could not have.
    assert "captured graphs" in same_refusal(world.establish(row(2), spec(2)))
    other = spec(2, max_tokens=3)
    made = world.establish(row(2), other)
    world.check_wired(made, row(2), other)
    world.close(made)


def test_a_lost_context_frees_nothing_and_says_so(sockets, caplog):
    world = World([1, 1])
    made = world.establish(row(2), spec(2))
    held = world.holdings()
    world.processes[0].bindings.lost = "ILLEGAL_ADDRESS"
    world.processes[0].bindings.trace.clear()
    world.close(made)
    assert world.holdings()[0] == held[0]
    assert world.holdings()[1] == world.kept()[1]
    assert "nothing is freed: " in caplog.text
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text
    forbidden = {"cuMemUnmap", "cuMemRelease", "cuMemFree", "cuModuleUnload", "cuMemHostUnregister"}
    assert not forbidden & set(world.processes[0].bindings.trace)


def test_a_peer_that_never_closes_is_not_waited_for_long(sockets, caplog):
    world = World([1, 1])
    made = world.establish(row(2), spec(2))
    start = time.monotonic()
    world.close(made[:1], timeout_s=0.5)
    assert time.monotonic() - start < 3
    assert "not all processes came to close" in caplog.text
    assert world.holdings()[0] == world.kept()[0]
    world.close(made[1:], timeout_s=0.5)
    assert world.holdings() == world.kept()


def test_ordinary_memory_that_a_peer_may_use_is_not_freed(sockets, caplog):
    world = World([1, 1])
    force(world, "ipc")
    made = world.establish(row(2), spec(2))
    world.close(made[:1], timeout_s=0.5)
    assert "it is not freed" in caplog.text
    assert world.holdings()[0]["ordinary allocations"] == 2


def test_one_release_that_fails_does_not_keep_the_others_from_being_tried(sockets, caplog):
    world = World([2, 2])
    made = world.establish(row(4), spec(4))
    bindings = world.processes[0].bindings
    bindings.faults[("cuMemUnmap", bindings.calls["cuMemUnmap"] + 1)] = "INVALID_VALUE"
    world.close(made)
    held, kept = world.holdings()[0], world.kept()[0]
    # Only the one mapping, and the range it is in.
    assert held.pop("mappings") == kept.pop("mappings") + 1
    assert held.pop("reservations") == kept.pop("reservations") + 1
    assert held == kept
    assert "cannot release a mapping: cuMemUnmap: CUDA_ERROR_INVALID_VALUE" in caplog.text


@pytest.mark.parametrize("kind", ["vmm", "plain", "posix_fd", "ipc", "fabric"])
def test_the_next_communicator_takes_the_same_control_blocks(kind, sockets):
    world = (
        World([2])
        if kind in ("vmm", "plain")
        else World([1, 1], hosts=["a", "b"] if kind == "fabric" else None)
    )
    force(world, kind)
    seen = []
    for _ in range(3):
        made = world.establish(row(2), spec(2))
        world.check_wired(made, row(2), spec(2))
        seen.append(
            [
                (a["control"], a["record"])
                for p in world.processes
                for a in p.native_library.ranks.values()
            ]
        )
        world.close(made)
    assert seen[0] == seen[1] == seen[2]
    # Another description has its own.
    made = world.establish(row(2), spec(2, max_tokens=7))
    other = [a["control"] for p in world.processes for a in p.native_library.ranks.values()]
    assert not set(other) & {control for control, _ in seen[0]}
    world.close(made)


def test_a_record_from_before_does_not_fail_the_next_communicator(sockets):
    world = World([2])
    made = world.establish(row(2), spec(2))
    assert made[0].failure() is None
    home = next(iter(made[0]._homes.values()))
    record = home.page.record
    record.code, record.ranks, record.tokens = abi.DEADLINE, 2, 9
    assert "ranks [1]" in made[0].failure()
    world.close(made)
    made = world.establish(row(2), spec(2))
    assert made[0].failure() is None
    world.close(made)


def test_a_failed_attempt_on_kept_control_blocks_closes_them_again(sockets):
    world = World([1, 1])
    world.close(world.establish(row(2), spec(2)))
    broken = world.processes[1].bindings
    broken.faults[("cuMemsetD32", broken.calls["cuMemsetD32"] + 1)] = "INVALID_VALUE"
    same_refusal(world.establish(row(2), spec(2)))
    assert world.holdings() == world.kept()
    for process in world.processes:
        control = process.native_library.registrations[0]["control"]
        head = abi.Control.from_buffer_copy(
            process.bindings.read(control, ctypes.sizeof(abi.Control), 0)
        )
        assert head.closed == 1
    made = world.establish(row(2), spec(2))
    world.check_wired(made, row(2), spec(2))
    world.close(made)


def test_a_failed_attempt_with_another_kernel_does_not_touch_the_kept_one(sockets):
    """The kernel that publishes by multicast takes the place of the other, and back."""
    world = World([1, 1])
    world.close(world.establish(row(2), spec(2)))

    def want(multicast):
        for process in world.processes:
            process.environ["JAX_LATENT_TAIL_MULTICAST"] = multicast

    def refuse(**arguments):
        raise UnavailableError("no more ranks")

    want("1")
    library = world.processes[1].native_library
    add, library.add_cuda_rank = library.add_cuda_rank, refuse
    same_refusal(world.establish(row(2), spec(2)))
    library.add_cuda_rank = add
    for multicast in ("1", "0", "1"):
        want(multicast)
        made = world.establish(row(2), spec(2))
        assert all(("multicast" in c.summary) == (multicast == "1") for c in made)
        world.check_wired(made, row(2), spec(2))
        world.close(made)
    world.check_only_homes()


def test_twenty_communicators_leave_nothing(sockets):
    world = World([2, 2])
    world.close(world.establish(row(4), spec(4)))
    with nothing_left(world, sockets):
        for index in range(20):
            table = (row(4), ((3, 1), (0, 2)))[index % 2]
            made = world.establish(table, spec(4 if len(table) == 1 else 2))
            world.close(made)
    assert world.holdings() == world.kept(2)


def test_a_communicator_keeps_what_others_of_its_devices_use(sockets):
    world = World([1, 1])
    first, second = spec(2), spec(2, max_tokens=3)
    made = world.establish(row(2), first)
    others = world.establish(row(2), second)
    world.close(made)
    for process in world.processes:
        (arguments,) = process.native_library.ranks.values()
        assert arguments["spec"] == second
    world.check_wired(others, row(2), second)
    world.close(others)
    assert world.holdings() == world.kept(2)


def test_the_module_does_not_log_refusals_as_errors(sockets, caplog):
    world = World([1, 1])
    world.processes[0].native_library = UnavailableError("not there")
    with caplog.at_level(logging.WARNING):
        same_refusal(world.establish(row(2), spec(2)))
    assert caplog.text == ""


def test_driver_without_gpu_is_a_reason(sockets):
    world = World([1])
    rendezvous = Rendezvous([0], 0, "x", 1.0)
    with pytest.raises(Refusal, match="cuInit"):
        CudaCommunicator.establish(
            row(1), spec(1), world.devices, rendezvous, world.processes[0].native_library
        )

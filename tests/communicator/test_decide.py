"""The front door: decisions, failures, the end. One process, over the driver of the tests."""

import logging
import subprocess
import sys
import threading
import time

import pytest
import world as worlds
from world import World, row, spec

from jax_latent_tail import native
from jax_latent_tail.communicator import communicator
from jax_latent_tail.communicator.communicator import Decision
from jax_latent_tail.communicator.driver import Driver
from jax_latent_tail.errors import (
    ArgumentValueError,
    CommunicatorError,
    RendezvousError,
    UnavailableError,
)
from jax_latent_tail.kernels import abi


@pytest.fixture
def world(monkeypatch, sockets):
    """One process with four devices, which `decide` finds."""
    made = World([4])
    library = made.processes[0].native_library
    monkeypatch.setattr(Driver, "load", classmethod(lambda cls: cls(made.processes[0].bindings)))
    monkeypatch.setattr(native, "load", lambda platform: library)
    monkeypatch.setattr(communicator.jax, "process_index", lambda: 0)
    monkeypatch.setattr(communicator, "_decisions", {})
    monkeypatch.setattr(communicator, "_live", {})
    for variable in ("JAX_LATENT_TAIL_DEADLINE", "JAX_LATENT_TAIL_PDL"):
        monkeypatch.delenv(variable, raising=False)
    yield made
    communicator.close_all()
    assert not made.misuses


def decide(world, table=None, call=None, **options):
    return communicator.decide("cuda", table or row(4), call or spec(4), world.devices, **options)


def records(world):
    return [
        abi.Record.from_address(arguments["record"])
        for arguments in world.processes[0].native_library.registrations
    ]


def test_a_decision_is_made_once_and_logged_once(world, caplog):
    with caplog.at_level(logging.DEBUG, "jax_latent_tail"):
        first = decide(world)
        calls = dict(world.processes[0].bindings.calls)
        assert decide(world) is first
    assert first.implementation == "cuda"
    assert "vmm memory" in first.reason
    assert world.processes[0].bindings.calls == calls
    (line,) = [r.getMessage() for r in caplog.records if "decided for" in r.getMessage()]
    for part in ("((0, 1, 2, 3),)", str(spec(4)), " s"):
        assert part in line


def test_what_cannot_be_is_decided_once_with_the_reason(world, monkeypatch):
    attempts = []

    def load(platform):
        attempts.append(platform)
        raise UnavailableError("not built")

    monkeypatch.setattr(native, "load", load)
    decision = decide(world)
    assert decision == Decision("xla", decision.reason)
    assert "not built" in decision.reason
    assert "process 0 (devices 0, 1, 2, 3)" in decision.reason
    assert decide(world) is decision
    assert attempts == ["cuda"]
    assert world.holdings() == [{}]


def test_an_obstacle_of_the_caller_is_a_reason(world):
    decision = decide(world, obstacle="no use for it")
    assert decision.implementation == "xla"
    assert "no use for it" in decision.reason
    assert world.processes[0].bindings.calls == {}


def test_sizes_are_decided_without_looking_at_anything(world):
    decision = decide(world, call=spec(4, latent=12))
    assert decision == Decision("xla", "latent_dim=12 is not a multiple of 8")
    assert world.processes[0].bindings.calls == {}
    assert communicator.unsupported("cuda", spec(4)) is None


def test_each_table_and_description_has_its_own(world):
    keys = [(row(4), spec(4)), (((0, 1), (2, 3)), spec(2)), (row(4), spec(4, max_tokens=3))]
    for table, call in keys:
        assert decide(world, table, call).implementation == "cuda"
    assert [(table, call) for _, table, call in communicator._decisions] == keys
    assert len(world.processes[0].native_library.ranks) == 12


@pytest.mark.parametrize(
    "variable", ["JAX_LATENT_TAIL_DEADLINE", "JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT"]
)
def test_an_error_is_not_remembered(world, monkeypatch, variable):
    monkeypatch.setenv(variable, "soon")
    with pytest.raises(ArgumentValueError, match=variable):
        decide(world)
    monkeypatch.delenv(variable)
    assert decide(world).implementation == "cuda"


def test_a_missing_process_is_an_error_and_not_remembered(world, monkeypatch):
    monkeypatch.setenv("JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT", "0.2")
    stores = worlds.ServiceStore(worlds.Service())
    monkeypatch.setattr("jax_latent_tail.communicator.rendezvous.service_store", lambda: stores)
    two = World([2, 2])
    with pytest.raises(RendezvousError, match=r"process 1 \(devices 2, 3\) did not come"):
        communicator.decide("cuda", row(4), spec(4), two.devices)
    assert communicator._decisions == {}
    assert decide(world).implementation == "cuda"


def test_threads_decide_once(world):
    found = []
    threads = [threading.Thread(target=lambda: found.append(decide(world))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert len(world.processes[0].native_library.registrations) == 4


def test_check_raises_the_record_of_a_failure(world):
    decide(world)
    communicator.check()
    record = records(world)[2]
    record.ranks, record.token, record.tokens, record.rank = 1 << 3, 5, 8, 2
    record.waited_ns = 10**9
    record.code = abi.DEADLINE
    with pytest.raises(CommunicatorError, match=r"no payload from ranks \[3\] within 1.000 s"):
        communicator.check()
    communicator.close_all()
    communicator.check()


def test_a_failure_is_logged_once_without_asking(world, caplog):
    decide(world)
    decide(world, call=spec(4, max_tokens=3))
    for index in (1, 6):
        record = records(world)[index]
        record.ranks, record.code = 1, abi.TOLD
    deadline = time.monotonic() + 10
    while len([r for r in caplog.records if r.levelno == logging.ERROR]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(2.5 * communicator._WATCH_S)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all("ranks [0] failed and told this one" in error for error in errors)


def test_close_all_closes_the_latest_first_and_forgets(world):
    decide(world)
    decide(world, call=spec(4, max_tokens=3))
    library = world.processes[0].native_library
    closed = []
    real = library.close_cuda_rank
    library.close_cuda_rank = lambda handle: (closed.append(handle), real(handle))
    communicator.close_all()
    assert closed == [5, 6, 7, 8, 1, 2, 3, 4]
    assert communicator._decisions == {}
    assert "jax_latent_tail watcher" not in [thread.name for thread in threading.enumerate()]
    communicator.close_all()
    assert world.holdings() == world.kept(2)
    assert decide(world).implementation == "cuda"
    assert world.holdings()[0]["handles"] == world.kept(2)[0]["handles"] + 4


def test_a_reset_serves_the_same_calls_again_at_the_same_addresses(world):
    calls = [spec(4), spec(4, max_tokens=3)]
    for call in calls:
        decide(world, call=call)
    library = world.processes[0].native_library
    before = list(library.registrations)
    records(world)[5].code = abi.DEADLINE  # of the second
    with pytest.raises(CommunicatorError):
        communicator.check()
    communicator.reset_all()
    communicator.check()
    after = library.registrations[len(before) :]
    for old, new in zip(before, after, strict=True):
        assert {**old, "kernels": None} == {**new, "kernels": None}
    assert [key[2] for key in communicator._live] == calls
    assert all(decide(world, call=call).implementation == "cuda" for call in calls)
    assert len(library.ranks) == len(after)


def test_a_reset_that_cannot_be_says_why(world):
    decide(world)
    bindings = world.processes[0].bindings
    bindings.faults[("cuMemsetD32", bindings.calls["cuMemsetD32"] + 1)] = "INVALID_VALUE"
    with pytest.raises(CommunicatorError, match=r"fused on 4 ranks.*cannot be served.*cuMemsetD32"):
        communicator.reset_all()
    assert not communicator._live


def test_a_reset_that_failed_can_be_tried_again(world):
    calls = [spec(4), spec(4, max_tokens=3), spec(4, max_tokens=5)]
    for call in calls:
        decide(world, call=call)
    bindings = world.processes[0].bindings
    bindings.faults[("cuMemsetD32", bindings.calls["cuMemsetD32"] + 10)] = "INVALID_VALUE"
    with pytest.raises(CommunicatorError):
        communicator.reset_all()
    assert [key[2] for key in communicator._live] == [calls[0], calls[2]]
    communicator.reset_all()
    assert [key[2] for key in communicator._live] == calls
    communicator.close_all()
    communicator.reset_all()
    assert not communicator._live


def test_the_failure_after_a_reset_is_logged_too(world, caplog):
    decide(world)
    for attempt in range(1, 4):
        records(world)[-1].code = abi.DEADLINE
        deadline = time.monotonic() + 10
        while caplog.text.count("failed:") < attempt:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        communicator.reset_all()


def test_closing_at_exit_is_bounded(world):
    for tokens in (3, 4, 5):
        decide(world, call=spec(4, max_tokens=tokens))
    world.processes[0].bindings.busy.clear()
    start = time.monotonic()
    communicator.close_all(timeout_s=0.5)
    assert time.monotonic() - start < 2
    world.processes[0].bindings.busy.set()


def test_closing_does_not_wait_for_a_thread_that_waits_for_processes(world, caplog):
    decide(world)
    with communicator._lock:
        start = time.monotonic()
        communicator.close_all(timeout_s=0.3)
        assert time.monotonic() - start < 2
    assert "another thread still waits" in caplog.text
    assert len(communicator._decisions) == 1


def test_a_close_that_raises_does_not_keep_the_others_open(world, monkeypatch, caplog):
    decide(world)
    decide(world, call=spec(4, max_tokens=3))
    latest = list(communicator._live.values())[-1]
    monkeypatch.setattr(type(latest), "_close_handles", _raise_once(type(latest)._close_handles))
    communicator.close_all()
    assert communicator._decisions == {}
    assert "cannot close" in caplog.text
    assert len(world.processes[0].native_library.ranks) == 4


def _raise_once(function):
    done = []

    def wrapper(self):
        if not done:
            done.append(1)
            raise OSError("a bug")
        function(self)

    return wrapper


def test_communicators_are_closed_before_jax_at_exit():
    program = """
import atexit
import jax
jax.devices()
from jax_latent_tail.communicator import communicator
class Fake:
    summary = "fake"
    def failure(self): return None
    def close(self, timeout_s): print("closed with", len(jax.devices()) > 0, timeout_s <= 10)
communicator._live["key"] = Fake()
communicator._start_watching()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "closed with True True\n"

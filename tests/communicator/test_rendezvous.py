"""Processes that meet over a key-value store, as threads."""

import logging
import threading
import time

import numpy as np
import pytest
from world import Service

from jax_latent_tail.communicator import rendezvous as module
from jax_latent_tail.communicator.rendezvous import Refusal, Rendezvous, ServiceStore
from jax_latent_tail.errors import DisagreementError, RendezvousError


class Group:
    """Processes that want to meet."""

    def __init__(self, processes, timeout_s=10.0, key="table", service=None):
        self.service = service or Service()
        names = {process: f"process {process} (device {process * 10})" for process in processes}
        self.meetings = {
            process: Rendezvous(
                processes, process, key, timeout_s, ServiceStore(self.service), names
            )
            for process in processes
        }

    def run(self, work, only=None, delays=None):
        """`work(rendezvous)` within a session of each; results or exceptions by process."""
        results = {}

        def meet(process):
            time.sleep((delays or {}).get(process, 0))
            rendezvous = self.meetings[process]
            try:
                with rendezvous.session():
                    results[process] = work(rendezvous)
            except BaseException as error:
                results[process] = error

        threads = [
            threading.Thread(target=meet, args=(process,), daemon=True)
            for process in (self.meetings if only is None else only)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a process hangs"
        return results


def exchanges(rendezvous):
    return [rendezvous.exchange(f"step {step}", bytes([rendezvous.me, step])) for step in range(5)]


def test_everybody_gets_everything_in_the_order_of_the_processes():
    group = Group([2, 5, 11])
    results = group.run(exchanges)
    expected = [[bytes([process, step]) for process in (2, 5, 11)] for step in range(5)]
    assert all(result == expected for result in results.values())
    assert group.service.values == {}


def test_one_process_meets_itself_without_a_store():
    rendezvous = Rendezvous([3], 3, "table", 1.0)
    with rendezvous.session():
        assert rendezvous.exchange("step", b"x") == [b"x"]
        assert rendezvous.agree("step", lambda: [1]) == [[1]]
        with pytest.raises(Refusal, match="'step' failed in process 3: no memory"):
            rendezvous.agree("step", lambda: _raise(OSError("no memory")))
        rendezvous.require_equal("step", {"a": 1})
        assert rendezvous.barrier(0.1)


def test_without_jax_distributed_several_processes_are_told_so():
    with pytest.raises(RendezvousError, match=r"jax\.distributed is not initialised"):
        Rendezvous([0, 1], 0, "table", 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_processes_come_at_any_time(seed):
    rng = np.random.default_rng(seed)
    group = Group(list(range(5)))
    results = group.run(exchanges, delays=dict(enumerate(rng.uniform(0, 0.4, 5))))
    assert len({str(result) for result in results.values()}) == 1
    assert len(results[0]) == 5
    assert group.service.values == {}


def test_each_exchange_is_a_barrier():
    group = Group([0, 1, 2])
    arrived, early = [], []

    def work(rendezvous):
        time.sleep(0.1 * rendezvous.me)
        arrived.append(rendezvous.me)
        rendezvous.exchange("barrier", b"")
        early.append(len(arrived))

    group.run(work)
    assert early == [3, 3, 3]


def _raise(error):
    raise error


def test_work_that_fails_in_some_processes_is_refused_by_all_with_the_first_reason():
    group = Group([0, 1, 2, 3])
    done = []

    def work(rendezvous):
        assert rendezvous.agree("first", lambda: rendezvous.me**2) == [0, 1, 4, 9]
        try:
            rendezvous.agree(
                "second",
                lambda: _raise(OSError(f"reason {rendezvous.me}")) if rendezvous.me > 1 else None,
            )
        except Refusal as refusal:
            done.append(str(refusal))
            # The session goes on.
            return rendezvous.agree("third", lambda: "well")

    results = group.run(work)
    assert all(result == ["well"] * 4 for result in results.values())
    assert set(done) == {"'second' failed in process 2 (device 20): reason 2"}
    assert len(done) == 4
    assert group.service.values == {}


def test_a_bug_in_one_process_is_raised_there_and_told_to_the_others():
    group = Group([0, 1, 2])

    def work(rendezvous):
        rendezvous.agree("step", lambda: [1][rendezvous.me])

    for _ in range(20):
        results = group.run(work)
        assert type(results[1]) is type(results[2]) is IndexError
        assert type(results[0]) is RendezvousError
        assert "process 1 (device 10) failed at 'step': IndexError" in str(results[0])
        assert group.service.values == {}


def test_a_disagreement_shows_both_sides_to_all():
    group = Group([0, 1, 2])

    def work(rendezvous):
        rendezvous.require_equal("facts", {"a": 1, "b": rendezvous.me // 2, "c": None})

    results = group.run(work)
    assert all(type(result) is DisagreementError for result in results.values())
    (text,) = {str(result) for result in results.values()}
    assert "b is 0 in process 0 (device 0) and 1 in process 2 (device 20)" in text
    assert "a is" not in text
    assert "c is" not in text


def test_a_missing_process_is_named_with_the_time_waited():
    group = Group([0, 1, 2, 3], timeout_s=1.2)
    results = group.run(exchanges, only=[0, 2])
    for result in results.values():
        assert type(result) is RendezvousError
        assert "process 1 (device 10), process 3 (device 30) did not come" in str(result)
        assert "within 1." in str(result)
        assert module.EVERY_PROCESS in str(result)
    assert group.service.values == {}


def test_a_long_wait_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "_WARN_AFTER_S", 0.1)
    group = Group([0, 1])
    with caplog.at_level(logging.WARNING, "jax_latent_tail"):
        group.run(exchanges, delays={1: 1.3})
    (record,) = caplog.records
    assert "waiting for process 1 (device 10)" in record.getMessage()
    assert module.EVERY_PROCESS in record.getMessage()


@pytest.mark.parametrize("alone", [[0], [1], [0, 1]])
def test_ten_attempts_that_fail_leave_nothing_and_the_next_succeeds(alone):
    group = Group([0, 1, 2], timeout_s=0.1)
    start = time.monotonic()
    for _ in range(10):
        for result in group.run(exchanges, only=alone).values():
            assert type(result) is RendezvousError
        assert group.service.values == {}
    assert time.monotonic() - start < 5
    for rendezvous in group.meetings.values():
        rendezvous.timeout_s = 10
    results = group.run(exchanges)
    assert all(len(result) == 5 for result in results.values())
    assert group.service.values == {}


def test_attempts_that_overlap_end_up_together():
    """Each gives up and tries again in its own rhythm until all happen to be there."""
    group = Group([0, 1, 2], timeout_s=0.25)
    results = {}

    def persist(process):
        rng = np.random.default_rng(process)
        rendezvous = group.meetings[process]
        for attempt in range(40):
            try:
                with rendezvous.session():
                    results[process] = (attempt, exchanges(rendezvous))
                    return
            except RendezvousError:
                time.sleep(rng.uniform(0, 0.1))

    threads = [threading.Thread(target=persist, args=(process,)) for process in range(3)]
    for index, thread in enumerate(threads):
        thread.start()
        time.sleep((0.4, 0.33, 0)[index])
    for thread in threads:
        thread.join(30)
    assert len({str(exchanged) for _, exchanged in results.values()}) == 1
    assert len(results) == 3
    assert max(attempt for attempt, _ in results.values()) > 0
    assert group.service.values == {}


def test_who_waits_for_one_that_gave_up_is_told_at_once():
    group = Group([0, 1, 2], timeout_s=20)
    start = time.monotonic()

    def work(rendezvous):
        rendezvous.exchange("first", b"")
        if rendezvous.me == 1:
            raise KeyboardInterrupt
        rendezvous.exchange("second", b"")

    results = group.run(work)
    assert type(results[1]) is KeyboardInterrupt
    for process in (0, 2):
        assert type(results[process]) is RendezvousError
        assert "gave up while this process waited for" in str(results[process])
    assert "process 1" in str(results[0]) or "process 1" in str(results[2])
    assert time.monotonic() - start < 5
    assert group.service.values == {}


def test_what_a_dead_process_left_behind_is_not_read():
    group = Group([0, 1])
    root = group.meetings[0]._root
    group.service.key_value_set_bytes(f"{root}/nonce/1", b"of a process that was killed")
    results = group.run(exchanges, delays={1: 0.5})
    expected = [[bytes([process, step]) for process in (0, 1)] for step in range(5)]
    assert all(result == expected for result in results.values())
    assert group.service.values == {}


def test_meetings_for_different_things_do_not_mix():
    service = Service()
    groups = [Group([0, 1], key=f"table {index}", service=service) for index in range(4)]
    found = [None] * 4

    def work(index):
        def body(rendezvous):
            return rendezvous.exchange("step", bytes([index, rendezvous.me]))

        found[index] = groups[index].run(body)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for index, results in enumerate(found):
        assert all(r == [bytes([index, 0]), bytes([index, 1])] for r in results.values())


def test_a_long_session_keeps_few_keys():
    group = Group([0, 1, 2])
    most = []

    def work(rendezvous):
        for step in range(30):
            rendezvous.exchange(f"step {step}", b"")
            most.append(len(group.service.values))

    group.run(work)
    # Of each process: its nonce, and the keys of two steps.
    assert max(most) <= 9


def test_the_nonce_goes_last():
    """Its absence tells the others that nothing more will come."""
    group = Group([0, 1], timeout_s=0.3)
    deleted = []
    real = group.service.key_value_delete
    group.service.key_value_delete = lambda key: (deleted.append(key), real(key))

    def work(rendezvous):
        rendezvous.exchange("step", b"")
        raise KeyboardInterrupt

    group.run(work)
    for process in "01":
        own = [key for key in deleted if key.endswith(f"/{process}")]
        assert len(own) > 1
        assert [("/nonce/" in key) for key in own] == [False] * (len(own) - 1) + [True]


def test_sessions_in_a_row():
    group = Group([0, 1, 2])
    for _ in range(20):
        results = group.run(exchanges)
        assert all(len(result) == 5 for result in results.values())
        assert group.service.values == {}


def test_the_barrier_after_the_session():
    group = Group([0, 1])
    group.run(exchanges)
    met = {}

    def come(process, delay):
        time.sleep(delay)
        met[process] = group.meetings[process].barrier(1.0)

    for delays, expected in (((0, 0.3), True), ((0.3, 0), True)):
        threads = [threading.Thread(target=come, args=item) for item in enumerate(delays)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert met == {0: expected, 1: expected}
    start = time.monotonic()
    assert group.meetings[0].barrier(0.3) is False
    assert time.monotonic() - start < 2


def test_a_service_that_is_gone_is_a_rendezvous_error():
    group = Group([0, 1])

    def work(rendezvous):
        rendezvous.exchange("first", b"")
        rendezvous._store = ServiceStore(Gone())
        rendezvous.exchange("second", b"")

    class Gone:
        def __getattr__(self, name):
            def function(*arguments, **options):
                raise RuntimeError("UNAVAILABLE: no connection")

            return function

    for result in group.run(work).values():
        assert type(result) is RendezvousError
        assert "UNAVAILABLE" in str(result)

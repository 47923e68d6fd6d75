"""Making communicators where something is missing, full or dying: all alike, nothing is left."""

import os
import re
import time

import pytest
from processes import assert_no_more_files_than, shared_files

from jax_latent_tail.communicator import host_memory

# What may come and go by itself: threads and memory of XLA's and of the interpreter.
SPARE = {"threads": 2, "mappings": 24, "KiB": 8 << 10}


def assert_constant(before, after):
    for member, (early, late) in enumerate(zip(before, after, strict=True)):
        for what, count in late.items():
            assert count <= early[what] + SPARE.get(what, 0), (member, what, early, late)


def usage(job, segments=1):
    """What each process holds, once it maps so many segments: the last thread that used one, soon
    after it was closed, unmaps it.
    """
    settled_by = time.monotonic() + 5
    while True:
        used = [outcome.value for outcome in job.ask("usage")]
        if all(use["segments"] == segments for use in used):
            return used
        assert time.monotonic() < settled_by, used
        time.sleep(0.05)


def make_again(job):
    job.ask("close")
    chosen = job.ask("prepare")
    assert all(outcome.value[0] == "cpu" for outcome in chosen), chosen
    assert all(outcome.value == "right" for outcome in job.ask("run"))


def refused_alike(outcomes):
    """The reason why all take plain collectives."""
    (choice,) = {tuple(outcome.value) for outcome in outcomes}
    assert choice[0] == "xla"
    return choice[1]


def test_twenty_communicators_leave_nothing(job):
    for _ in range(3):
        make_again(job)
    before = usage(job)
    for _ in range(20):
        make_again(job)
    assert_constant(before, usage(job))
    job.ask("close")
    usage(job, segments=0)
    make_again(job)


def test_twenty_resets_leave_nothing(job):
    for _ in range(3):
        job.ask("reset")
    before = usage(job)
    for _ in range(20):
        assert not any(outcome.error for outcome in job.ask("reset"))
        assert all(outcome.value == "right" for outcome in job.ask("run"))
    assert_constant(before, usage(job))


def test_ten_attempts_to_which_one_process_does_not_come(job):
    sizes = {"latent_dim": 40}
    rest = [member for member in job.members if member.index != 1]
    job.ask("set_environment", JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT="0.3")
    job.ask("prepare", members=rest, **sizes)
    before = usage(job)
    for _ in range(10):
        for outcome in job.ask("prepare", members=rest, **sizes):
            assert outcome.error == "RendezvousError"
            assert "process 1" in outcome.message
            assert "every process must lower (or prepare) this call" in outcome.message
            assert outcome.seconds < 3
    assert_constant(before, usage(job))
    assert all(outcome.value == "right" for outcome in job.ask("run")), "the old one works on"
    job.ask("set_environment", JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT="20")
    assert all(outcome.value[0] == "cpu" for outcome in job.ask("prepare", **sizes))
    make_again(job)


def test_ten_attempts_that_are_refused(job):
    def attempts(count):
        job.ask("allow_files", members=[job[1]], allowed=False)
        for _ in range(count):
            job.ask("close")
            refused_alike(job.ask("prepare"))
        job.ask("allow_files", members=[job[1]], allowed=True)

    attempts(2)
    before = usage(job, segments=0)
    attempts(10)
    assert_constant(before, usage(job, segments=0))
    make_again(job)


@pytest.mark.parametrize("process", [0, 1], ids=["creating", "opening"])
def test_without_file_descriptors_all_refuse_for_the_reason_of_one(job, process):
    job.ask("close")
    assert not job[process].ask("allow_files", allowed=False).error
    outcomes = job.ask("prepare")
    job[process].ask("allow_files", allowed=True)
    reason = refused_alike(outcomes)
    assert f"failed in process {process}" in reason
    assert "Too many open files" in reason
    usage(job, segments=0)
    make_again(job)


def test_without_room_in_shared_memory_all_refuse_for_the_reason_of_one(job):
    before = usage(job)
    room = os.statvfs(host_memory.FOLDER)
    total = room.f_blocks * room.f_frsize
    if not total:
        pytest.skip(f"{host_memory.FOLDER} has no limit")
    reason = refused_alike(job.ask("prepare", max_tokens=total // 100))
    size = re.search(r"cannot reserve (\d+) bytes in /dev/shm: .*No space left", reason)
    assert size, reason
    assert int(size[1]) > total
    assert "'creating shared memory' failed in process 0" in reason
    assert_constant(before, usage(job))
    assert all(outcome.value == "right" for outcome in job.ask("run"))


STEPS = [
    ("mapping shared memory", "before"),
    ("mapping shared memory", "after"),
    ("creating shared memory", "before"),
    ("creating shared memory", "after"),
    ("looking at the host", "before"),
    ("comparing the calls", "before"),
]


@pytest.mark.parametrize(
    ("step", "when"),
    [STEPS[0], *(pytest.param(*step, marks=pytest.mark.long) for step in STEPS[1:])],
)
def test_a_death_in_the_middle_is_told_to_the_others_in_time(start_job, step, when):
    before = shared_files()
    job = start_job(2, JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT="2")
    job[1].ask("die_in", step=step, when=when)
    job.tell("prepare")
    outcome = job[0].answer()
    job[1].process.wait(10)
    assert outcome.seconds < 8
    if (step, when) == STEPS[1]:  # it was there when all was done
        assert outcome.value[0] == "cpu"
        job[0].ask("compile_")
        outcome = job[0].ask("run")
        assert "rank 1 (device" in outcome.message
        assert outcome.seconds < 8
    else:
        assert outcome.error == "RendezvousError"
        assert "process 1" in outcome.message
        assert job[0].ask("usage").value["segments"] == 0
    assert_no_more_files_than(before)
    job.end()

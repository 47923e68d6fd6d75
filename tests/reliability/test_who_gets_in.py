"""Shared memory and descriptors reach the processes of one job and of one user, and nobody else."""

import contextlib
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import DEADLINE_S, shared_files

from jax_latent_tail.communicator import descriptors, host_memory

STRANGER = Path(__file__).with_name("stranger.py")
NOBODY = 65534

only_as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)


def stranger(user, action, *arguments):
    done = subprocess.run(
        [sys.executable, str(STRANGER), str(user), action, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def segments(member):
    """Of each shared segment that a process maps: the inode and the name that it had."""
    maps = Path(f"/proc/{member.pid}/maps").read_text()
    return dict(re.findall(r" (\d+) +/dev/shm/(jax_latent_tail\w+) \(deleted\)", maps))


def segment_files(member):
    """Those of which a process has descriptors."""
    paths = set()
    for link in Path(f"/proc/{member.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            paths.add(Path(os.readlink(link)))
    return {path for path in paths if path.name.startswith("jax_latent_tail_")}


def test_a_segment_in_use_has_no_name_and_no_descriptor(job):
    found = [segments(member) for member in job.members]
    ((_, name),) = found[0].items()
    assert all(other == found[0] for other in found)
    assert name not in shared_files()
    with pytest.raises(FileNotFoundError):
        host_memory.SharedFile.open(name)
    assert not any(segment_files(member) for member in job.members)


def test_while_processes_meet_the_segment_is_private(job):
    job.ask("close")
    job.ask("open_late", members=[job[2]], seconds=1.5)
    job.tell("prepare")
    seen_by = time.monotonic() + 5
    while not (opened := segment_files(job[0])):
        assert time.monotonic() < seen_by
    (path,) = opened
    name = path.name
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert re.fullmatch(r"jax_latent_tail_[0-9a-f]{32}", name)
    if os.geteuid() == 0:
        assert stranger(NOBODY, "read", path) == "refused PermissionError"
        assert stranger(NOBODY, "write", path) == "refused PermissionError"
    assert path.exists(), "it was over before the stranger came"
    assert all(outcome.value[0] == "cpu" for outcome in job.answers())
    assert name not in shared_files()
    job.ask("open_late", members=[job[2]], seconds=0)


@only_as_root
def test_another_user_gets_nothing_of_a_process(job):
    for place in ("fd", "map_files", "maps", "mem"):
        assert stranger(NOBODY, "read", f"/proc/{job[0].pid}/{place}").startswith("refused")


@pytest.fixture
def exchange():
    made = descriptors.Exchange({1: 1})
    yield made
    made.close()


def message(exchange, token=None):
    return descriptors._MESSAGE.pack(bytes.fromhex(token or exchange.address["token"]), 1).hex()


def received(exchange):
    """What the exchange takes within a second from whoever comes, in the background."""
    taken = []

    def receive():
        try:
            taken.append(exchange.receive(1.5))
        except descriptors.PassingError as error:
            taken.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    return thread, taken


@only_as_root
def test_another_user_cannot_reach_the_socket_that_descriptors_travel_through(exchange):
    path = Path(exchange.path)
    assert stranger(NOBODY, "read", path.parent) == "refused PermissionError"
    assert stranger(NOBODY, "connect", path, message(exchange)) == "refused PermissionError"


@only_as_root
def test_another_user_who_knows_everything_is_not_listened_to(exchange):
    path = Path(exchange.path)
    path.parent.chmod(0o777)
    path.chmod(0o777)
    thread, taken = received(exchange)
    answer = stranger(NOBODY, "connect", path, message(exchange))
    thread.join()
    assert "got [b'', []]" in answer or answer.startswith("refused")
    assert isinstance(taken[0], descriptors.PassingError)


def test_a_process_of_another_job_is_not_listened_to_without_the_token(exchange):
    with_other_token = descriptors.Exchange({1: 1})
    token = with_other_token.address["token"]
    with_other_token.close()
    thread, taken = received(exchange)
    answer = stranger("me", "connect", exchange.path, message(exchange, token))
    thread.join()
    assert "got [b'', []]" in answer or answer.startswith("refused")
    assert isinstance(taken[0], descriptors.PassingError)


def test_the_stranger_of_these_tests_is_heard_where_it_has_the_token(exchange):
    thread, taken = received(exchange)
    stranger("me", "connect", exchange.path, message(exchange))
    thread.join()
    ((sender, handles),) = taken[0].items()
    assert sender == 1
    descriptors.close_all(handles)


def test_two_jobs_at_once_share_nothing_and_do_not_feel_each_other(job, start_job):
    other = start_job(2)
    other.ask("compile_")
    assert not set(segments(job[0])) & set(segments(other[0]))
    job.tell("run", count=300)
    other.tell("run", count=300)
    outcomes = job.answers() + other.answers()
    assert all(outcome.value == "right" for outcome in outcomes), outcomes
    # Nor a failure of the other.
    job.tell("run", count=2000)
    assert other.ask("run", members=[other[0]])[0].error
    outcomes = job.answers()
    assert all(outcome.value == "right" for outcome in outcomes), outcomes
    assert outcomes[0].seconds > DEADLINE_S / 10, "it was over before the failure"
    other.end()

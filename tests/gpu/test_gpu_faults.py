"""What becomes of processes that share a GPU when one of them is stopped, killed or ends.

They do what tests/reliability/member.py can. The same scenarios on CPUs, without a GPU:
JAX_PLATFORMS=cpu pytest --noconftest tests/gpu/test_gpu_faults.py
"""

import os
import re
import time
from pathlib import Path

import pytest
from reliability import processes as members
from reliability.processes import SLACK_S, recovers

from jax_latent_tail import launch
from jax_latent_tail.kernels import processes

PLATFORMS = os.environ.get("JAX_PLATFORMS", "cuda,cpu")
ON_GPU = PLATFORMS.startswith("cuda")
ENVIRONMENT = {"JAX_PLATFORMS": PLATFORMS, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

DEADLINE_S = 4.0  # ranks that share a GPU by time slices are slow
MEETING_S = 8.0

# All under a daemon of their own: one that loses a client may be of no use to the next job.
SHARING = ["mps", "time slices"] if ON_GPU else ["cores"]


@pytest.fixture
def environment(request):
    """For processes that share the GPU in the way of the parameter, by default MPS."""
    sharing = getattr(request, "param", SHARING[0])
    if sharing != "mps":
        yield ENVIRONMENT
        return
    with processes.mps() as daemon:
        yield ENVIRONMENT | {name: value for name, value in daemon.items() if value is not None}


@pytest.fixture
def start_job(environment, tmp_path):
    started = []

    def start(num_processes):
        limits = {
            "JAX_LATENT_TAIL_DEADLINE": str(DEADLINE_S),
            "JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT": str(MEETING_S),
        }
        job = members.Job(tmp_path, num_processes, environment | limits)
        started.append(job)
        return job

    yield start
    for job in started:
        job.end()


@pytest.fixture
def running_job(start_job):
    """Starts processes that have a communicator and a program, which has run."""

    def start(num_processes):
        job = start_job(num_processes)
        # Making a communicator, and compiling, may take longer here than a meeting is allowed to.
        outcomes = job.ask("compile_", timeout_s=60)
        assert not any(outcome.error for outcome in outcomes), outcomes
        outcomes = job.ask("run", count=20)
        assert all(outcome.value == "right" for outcome in outcomes), outcomes
        return job

    return start


def each_way_of_sharing(*nums_processes):
    """(environment, num_processes): by time slices two processes only."""
    return pytest.mark.parametrize(
        ("environment", "num_processes"),
        [
            (sharing, num)
            for sharing in SHARING
            for num in nums_processes
            if num == 2 or sharing != "time slices"
        ],
        indirect=["environment"],
    )


def answers_after_a_death(survivors, environment):
    """What they answer, unless MPS has ended their contexts together with the one that died."""

    def look_at(text):
        ours = re.search(r"(?i)illegal.address|illegal memory|misaligned", text)
        ended = re.search(r"CUDA_ERROR|CUDA error", text) and not ours
        if "CUDA_MPS_PIPE_DIRECTORY" in environment and ended:
            pytest.xfail(f"MPS ended the contexts of processes that live: {text[-2000:]}")

    outcomes = []
    for survivor in survivors:
        try:
            outcomes.append(survivor.answer())
        except AssertionError as ended:
            look_at(str(ended))
            raise
    for outcome in outcomes:
        look_at(f"{outcome.message} {outcome.value}")
    return outcomes


def all_heard(outcomes, index, runs_at_least=0):
    """All had a failed call in time, later ones fail at once, and the missing one is named."""
    assert not any(outcome.error for outcome in outcomes), outcomes
    reasons = [outcome.value["check"] for outcome in outcomes]
    for value, reason in zip((outcome.value for outcome in outcomes), reasons, strict=True):
        assert value["runs"] >= runs_at_least
        assert value["seconds"] < DEADLINE_S + SLACK_S
        assert value["seconds_again"] < 1
        if ON_GPU:
            assert value["message"] == "NaN" or "an earlier call failed" in value["message"]
            assert "an earlier call failed" in value["again"]
        else:
            assert value["again"].endswith(reason)
    if ON_GPU:
        names = rf"from ranks \[[^]]*\b{index}\b[^]]*\] within {DEADLINE_S:.0f}\.\d"
        told = r"failed and told this one"
        assert any(re.search(names, reason) for reason in reasons), reasons
        assert all(re.search(f"{names}|{told}", reason) for reason in reasons), reasons
    else:
        assert len(set(reasons)) == 1
        assert f"rank {index} (device" in reasons[0] or "not finished its part" in reasons[0]


def all_end(job, survivors):
    """In order, without a wait for the one that is dead."""
    start = time.monotonic()
    assert not any(outcome.error for outcome in job.ask("close", members=survivors))
    # What `close` waits for its device and its peers, and then for a moment.
    assert time.monotonic() - start < 5 + SLACK_S
    job.tell("leave", members=survivors, how="exit")
    assert all(survivor.process.wait(10) == 0 for survivor in survivors)


@each_way_of_sharing(2, 4)
def test_a_rank_that_was_killed_between_calls_is_named(running_job, environment, num_processes):
    job = running_job(num_processes)
    survivors = job.others(1)
    job[1].kill()
    job.tell("run_until_it_fails", members=survivors)
    outcomes = answers_after_a_death(survivors, environment)
    assert all(outcome.value["runs"] == 0 for outcome in outcomes), outcomes
    all_heard(outcomes, 1)
    all_end(job, survivors)


@each_way_of_sharing(2)
def test_a_rank_that_is_killed_while_others_wait_for_it_is_named(
    running_job, environment, num_processes
):
    job = running_job(num_processes)
    survivors = job.others(1)
    job.tell("run_until_it_fails", members=survivors)
    time.sleep(DEADLINE_S / 4)
    job[1].kill()
    outcomes = answers_after_a_death(survivors, environment)
    assert all(outcome.value["runs"] == 0 for outcome in outcomes), outcomes
    all_heard(outcomes, 1)
    all_end(job, survivors)


@each_way_of_sharing(2, 4)
def test_a_rank_that_is_killed_in_the_middle_of_calls_is_named(
    running_job, environment, num_processes
):
    job = running_job(num_processes)
    survivors = job.others(1)
    job.tell("run_until_it_fails")
    time.sleep(1)
    job[1].kill()
    all_heard(answers_after_a_death(survivors, environment), 1, runs_at_least=10)
    all_end(job, survivors)


def test_a_process_that_stands_still_for_less_than_the_deadline_does_no_harm(running_job):
    job = running_job(4)
    job.tell("run", count=600)
    for member in job.members:
        time.sleep(0.1)
        member.stop()
        time.sleep(DEADLINE_S / 8)
        member.go_on()
    outcomes = job.answers(timeout_s=60)
    assert all(outcome.value == "right" for outcome in outcomes), outcomes
    assert all(outcome.seconds > DEADLINE_S / 2 for outcome in outcomes), "over before the last"


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_process_that_stands_still_for_longer_is_named_and_hears_of_it(
    running_job, num_processes
):
    job = running_job(num_processes)
    job.tell("run_until_it_fails")
    time.sleep(0.5)
    job[1].stop()
    rest = [member.answer() for member in job.others(1)]
    job[1].go_on()
    late = job[1].answer()
    all_heard(rest, 1, runs_at_least=10)
    if ON_GPU:
        assert not late.error
        assert late.value["message"] == "NaN"
        assert "failed and told this one" in late.value["check"]
        assert "an earlier call failed" in late.value["again"]
    recovers(job)


STEPS = (
    ["waiting for the devices", "preparing the memory", "registering the ranks"]
    if ON_GPU
    else ["looking at the host", "mapping shared memory"]
)


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_is_killed_while_a_communicator_is_made_is_named(start_job, step):
    job = start_job(2)
    job[1].ask("die_in", step=step, when="before")
    job.tell("prepare")
    outcome = job[0].answer()
    assert job[1].process.wait(10)
    assert outcome.error == "RendezvousError", outcome
    assert "process 1" in outcome.message
    assert outcome.seconds < MEETING_S + SLACK_S
    job[0].tell("leave", how="exit")
    assert job[0].process.wait(10) == 0


def test_a_process_that_ends_with_calls_under_way_takes_its_part_in_them(environment):
    program = Path(members.__file__).with_name("leaving.py")
    env = environment | {"JAX_LATENT_TAIL_DEADLINE": "20"}
    texts = launch.run([str(program), "cuda" if ON_GPU else "cpu"], 2, timeout_s=120, env=env)
    assert "all ones: True" in texts[0], texts

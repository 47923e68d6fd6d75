"""What becomes of calls between processes when one of them is late, stopped, dead or elsewhere.

The promise: within the deadline every rank that lives has right numbers or an error that names who
is missing and from which call; later calls raise that error at once; and `reset`, by all, repairs
everything where all still live.
"""

import re
import time

import pytest
from processes import DEADLINE_S, SLACK_S, recovers

from jax_latent_tail.version import __version__


def failed_in_time(outcomes, pattern_of_reason):
    """The reason of a failure, equal for all, each of whom heard of it in time."""
    assert all(outcome.error for outcome in outcomes), outcomes
    assert all(outcome.seconds < DEADLINE_S + SLACK_S for outcome in outcomes), outcomes
    reasons = {outcome.message for outcome in outcomes}
    assert len(reasons) == 1, outcomes
    reason = reasons.pop()
    assert "latent_tail: " in reason
    assert re.search(pattern_of_reason, reason), reason
    return reason.split("latent_tail: ")[1]


def stays_failed(members, reason):
    """Each raises the first reason at once, in calls and in `check`, and has logged it."""
    for member in members:
        after = member.ask("after_failure").value
        assert after["again"].endswith(reason), after
        assert after["seconds_again"] < 1, after
        assert after["check"] == reason
        logged_by = time.monotonic() + 5
        while f"failed: {reason}" not in member.text():
            assert time.monotonic() < logged_by, member.text()[-4000:]
            time.sleep(0.05)


@pytest.mark.parametrize("missing", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_raised_is_named_by_all_others_and_hears_of_it(job, missing):
    assert job[missing].ask("fail").error == "RuntimeError"
    outcomes = job.ask("run", members=job.others(missing))
    reason = failed_in_time(
        outcomes, rf"after 2 s rank {missing} \(device \d+, process {missing}\)"
    )
    assert "has not come to call 0 of site 0 in launch" in reason
    assert all(outcome.seconds > DEADLINE_S * 0.9 for outcome in outcomes)
    stays_failed(job.members, reason)


def test_a_rank_that_makes_one_call_fewer_is_named(job):
    job[1].tell("run", count=4)
    job.tell("run", members=job.others(1), count=5)
    rest = [member.answer() for member in job.others(1)]
    reason = failed_in_time(rest, r"rank 1 \(device .* has not come")
    assert job[1].answer().value == "right"
    stays_failed(job.members, reason)


def test_queued_calls_do_not_wait_out_a_deadline_each(job):
    outcomes = job.ask("run_queued", members=job.others(2), count=20)
    for outcome in outcomes:
        assert outcome.value["failed"] == 20
        assert outcome.seconds < DEADLINE_S + SLACK_S
        (message,) = outcome.value["messages"]
        assert "rank 2 (device" in message


def test_a_rank_that_stands_still_for_less_than_the_deadline_does_no_harm(job):
    job.tell("run", count=600)
    for index in (1, 2, 0):
        time.sleep(0.1)
        job[index].stop()
        time.sleep(0.3)
        job[index].go_on()
    outcomes = job.answers()
    assert all(outcome.value == "right" for outcome in outcomes), outcomes
    assert all(outcome.seconds > 0.9 for outcome in outcomes), "it was over before the first stop"


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_stands_still_for_longer_is_named_and_fails_when_it_goes_on(job, stopped):
    job.tell("run_until_it_fails")
    time.sleep(0.3)
    start = time.monotonic()
    job[stopped].stop()
    rest = [member.answer() for member in job.others(stopped)]
    seconds = time.monotonic() - start
    job[stopped].go_on()
    late = job[stopped].answer()
    assert seconds < DEADLINE_S + SLACK_S
    values = [outcome.value for outcome in (*rest, late)]
    assert all(values), (rest, late)
    (message,) = {value["message"] for value in values}
    # Where it stopped in the middle of a sum, nobody can tell whose part is missing.
    assert f"rank {stopped} (device" in message or "has not finished its part" in message
    reason = message.split("latent_tail: ")[1]
    assert all(value["again"].endswith(reason) and value["check"] == reason for value in values)
    assert all(value["runs"] > 10 for value in values)
    stays_failed(job.members, reason)
    recovers(job)


def test_another_number_of_tokens_is_shown_with_both_sides(job):
    job.ask("compile_", name="four tokens", calls=3)
    job.ask("compile_", name="six tokens", calls=3, num_tokens=6)
    for name in ("four tokens", "six tokens"):
        assert all(outcome.value == "right" for outcome in job.ask("run", name=name))
    for member in job.members:
        member.tell("run", name="six tokens" if member.index == 1 else "four tokens")
    reason = failed_in_time(job.answers(), "with 4 tokens")
    assert "with 6 tokens" in reason
    stays_failed(job.members, reason)


def test_ranks_that_are_out_of_step_find_each_other_after_a_reset(job):
    """One launches another program, or nothing, while the others have several runs in flight."""
    job.ask("compile_", name="six tokens", num_tokens=6)
    job[0].tell("run_queued", count=5)
    job[1].tell("run", name="six tokens")
    job[2].tell("fail")
    assert all(outcome.error or outcome.value["failed"] == 5 for outcome in job.answers())
    recovers(job, "six tokens")


@pytest.mark.parametrize(
    ("option", "usual", "other"),
    [("eps", 1e-6, 1e-5), ("fp32_internal", False, True), ("max_tokens", 128, 64)],
)
def test_other_options_in_one_rank_are_shown_with_both_sides_at_once(job, option, usual, other):
    sizes = {"latent_dim": 32}
    job.tell("prepare", members=job.others(1), **sizes)
    job[1].tell("prepare", **sizes, **{option: other})
    outcomes = job.answers()
    assert {outcome.error for outcome in outcomes} == {"DisagreementError"}
    assert all(outcome.seconds < 5 for outcome in outcomes)
    (message,) = {outcome.message for outcome in outcomes}
    assert f"{option} is {usual} in process 0" in message
    assert f"and {other} in process 1" in message
    # What was there works on, and so does the call on which all agree.
    assert all(outcome.value == "right" for outcome in job.ask("run"))
    chosen = job.ask("prepare", **sizes, **{option: other})
    assert all(outcome.value[0] == "cpu" for outcome in chosen)
    job.ask("close")
    assert all(outcome.value[0] == "cpu" for outcome in job.ask("prepare"))
    assert all(outcome.value == "right" for outcome in job.ask("run"))


def test_another_version_in_one_rank_is_shown_with_both_sides_at_once(job):
    sizes = {"latent_dim": 16}
    job[1].ask("become_version", version="0.0.7")
    outcomes = job.ask("prepare", **sizes)
    job[1].ask("become_version", version=__version__)
    assert {outcome.error for outcome in outcomes} == {"DisagreementError"}
    assert all(outcome.seconds < 5 for outcome in outcomes)
    (message,) = {outcome.message for outcome in outcomes}
    assert f"version is {__version__} in process 0" in message
    assert "and 0.0.7 in process 1" in message
    assert all(outcome.value == "right" for outcome in job.ask("run"))


def test_a_reset_that_one_rank_misses_names_it_and_can_be_tried_again(job):
    job.ask("set_environment", JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT="1")
    outcomes = job.ask("reset", members=job.others(1))
    job.ask("set_environment", JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT="20")
    assert {outcome.error for outcome in outcomes} == {"RendezvousError"}
    assert all("process 1" in outcome.message for outcome in outcomes)
    assert all(outcome.seconds < 5 for outcome in outcomes)
    (outcome,) = job.ask("run", members=[job[1]])
    assert "closed its communicator" in outcome.message
    for outcome in job.ask("run", members=job.others(1)):
        assert "no communicator for" in outcome.message
    recovers(job)


@pytest.mark.parametrize(
    "skew_s", [3, pytest.param(30, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_a_slow_start_is_waited_for(job, skew_s):
    job.ask("close")
    job.ask("set_environment", JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT=str(skew_s + 20))
    job[1].tell("sleep", seconds=skew_s)
    job.tell("prepare")
    job.tell("sleep", members=[job[2]], seconds=DEADLINE_S / 2)  # within the deadline of a call
    job.tell("run")
    assert job[1].answer(skew_s + 30).value is None
    prepared = job.answers(timeout_s=skew_s + 30)
    assert all(outcome.value[0] == "cpu" for outcome in prepared)
    assert prepared[0].seconds > skew_s - 0.5
    assert job[2].answer().value is None
    assert all(outcome.value == "right" for outcome in job.answers())


@pytest.mark.parametrize(
    "how",
    ["SIGKILL", *(pytest.param(how, marks=pytest.mark.long) for how in ("exit", "closing"))],
)
def test_the_death_of_a_process_is_told_to_all_others(job, how):
    survivors = job.others(1)
    job.tell("run_until_it_fails", members=survivors)
    if how == "SIGKILL":
        job.tell("run_until_it_fails", members=[job[1]])
        time.sleep(0.3)
        job[1].kill()
    else:
        job[1].ask("run", count=20)
        job[1].tell("leave", how=how)
    start = time.monotonic()
    values = [member.answer().value for member in survivors]
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    assert all(value["runs"] > 10 for value in values)
    (message,) = {value["message"] for value in values}
    if how == "closing":
        assert "process 1 closed its communicator" in message
        assert all(value["seconds"] < 1 for value in values), "there is nothing to wait for"
    else:
        assert "rank 1 (device" in message or "has not finished its part" in message
    stays_failed(survivors, message.split("latent_tail: ")[1])
    # A new job is needed, and a reset says so.
    job.ask("set_environment", members=survivors, JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT="1")
    for outcome in job.ask("reset", members=survivors):
        assert outcome.error == "RendezvousError"
        assert "process 1" in outcome.message
        assert outcome.seconds < 5
    for outcome in job.ask("run", members=survivors):
        assert "no communicator for" in outcome.message
        assert outcome.seconds < 1


@pytest.mark.long
def test_survivors_hear_of_a_death_before_the_heartbeat_ends_them(start_job):
    """With a deadline below the heartbeat's, as by default. JAX ends them all the same."""
    heartbeat_s = 10
    job = start_job(MEMBER_HEARTBEAT_TIMEOUT=str(heartbeat_s))
    job.ask("compile_")
    assert all(outcome.value == "right" for outcome in job.ask("run"))
    survivors = job.others(1)
    job[1].kill()
    start = time.monotonic()
    outcomes = job.ask("run_until_it_fails", members=survivors)
    assert time.monotonic() - start < heartbeat_s - 2
    assert all("rank 1 (device" in outcome.value["message"] for outcome in outcomes), outcomes
    assert all("rank 1 (device" in outcome.value["check"] for outcome in outcomes), outcomes
    assert all(survivor.process.wait(5 * heartbeat_s) for survivor in survivors)
    assert time.monotonic() - start > heartbeat_s - 3
    assert all("failed: after 2 s rank 1" in survivor.text() for survivor in survivors)

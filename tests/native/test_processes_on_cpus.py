"""Processes that share memory: names of calls, failures, exits. Each test starts real ones."""

import os
import re
import time
from pathlib import Path

import pytest

from jax_latent_tail import launch

MEMBERS = Path(__file__).with_name("members.py")
SOAK = Path(__file__).parents[1] / "gpu" / "jax_soak.py"


def start(name, *arguments, num_processes=2, devices=1, deadline_s=60, timeout_s=180):
    before = segments()
    outputs = launch.run(
        [str(MEMBERS), name, *arguments],
        num_processes,
        devices_per_process=devices,
        timeout_s=timeout_s,
        env={"JAX_PLATFORMS": "cpu", "JAX_LATENT_TAIL_DEADLINE": str(deadline_s)},
    )
    gone_by = time.monotonic() + 10
    while not segments() <= before:  # those of tests beside this one are there for a moment
        assert time.monotonic() < gone_by, segments() - before
        time.sleep(0.05)
    return outputs


def segments():
    """Names of shared memory that somebody makes a communicator with."""
    return {file for file in os.listdir("/dev/shm") if "latent_tail" in file}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["compiled_in_different_order", "extra_program_in_one_process"])
def test_what_a_process_compiles_does_not_disturb_the_others(name, devices):
    outputs = start(name, devices=devices)
    assert all(output.endswith("right\n") for output in outputs)


@pytest.mark.parametrize(("num_processes", "devices"), [(2, 1), (2, 2), (4, 1)])
def test_all_gather_add(num_processes, devices):
    outputs = start("gathers", num_processes=num_processes, devices=devices)
    assert all(output.endswith("right\n") for output in outputs)


def test_a_gather_does_not_meet_a_scatter_of_its_sizes():
    for output in start("gather_where_the_other_scatters", deadline_s=1):
        assert (
            "not come to call 0" in output
        )  # at its deadline, or when the other has left after its


def test_calls_that_cannot_be_told_apart_give_no_wrong_number():
    for output in start("compiled_twice_without_a_run_in_one_process", deadline_s=1):
        assert "has not come to call 0" in output or output.endswith("right\n")


def test_programs_run_in_different_order_end_with_an_error_that_shows_both():
    outputs = start("run_in_different_order", deadline_s=1)
    for output in outputs:
        assert "4 tokens" in output
        assert "6 tokens" in output


def test_a_missing_rank_is_named_within_the_deadline_and_the_failure_stays():
    for output in start("rank_missing", deadline_s=1):
        first, again = [line for line in output.splitlines() if "latent_tail" in line]
        assert "after 1 s rank 1 (device" in first
        assert first == again


def test_a_process_that_leaves_is_named():
    outputs = start("process_leaves")
    assert "process 1 closed its communicator" in outputs[0]


def test_a_process_ends_while_a_call_waits():
    start("exit_while_a_call_waits")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_forked_children_end_and_the_parent_goes_on(num_processes):
    outputs = start("forked_child", num_processes=num_processes, devices=2)
    assert all(output.endswith("right\n") for output in outputs)


def test_without_shared_memory_all_processes_refuse_alike():
    first, second = start("no_room_in_shared_memory")
    assert "'creating shared memory' failed in process 0" in first
    assert first.splitlines()[-1] == second.splitlines()[-1]


@pytest.mark.parametrize(
    ("num_processes", "devices", "calls"),
    [
        (2, 1, 1000),
        *(
            pytest.param(*sizes, marks=pytest.mark.long)
            for sizes in ((4, 1, 100_000), (2, 2, 50_000), (1, 2, 50_000), (1, 8, 50_000))
        ),
    ],
)
def test_many_calls_with_random_sizes_and_delays_are_right(num_processes, devices, calls):
    """And where they are very many, memory and threads of the first are those of the last."""
    steady = ["--steady"] if calls >= 50_000 else []
    outputs = launch.run(
        [str(SOAK), "--platform", "cpu", "--calls", str(calls), *steady],
        num_processes,
        devices_per_process=devices,
        timeout_s=550,
        env={"JAX_PLATFORMS": "cpu"},
    )
    digests = {re.search(r"^digest: \w+$", output, re.MULTILINE)[0] for output in outputs}
    assert len(digests) == 1, outputs

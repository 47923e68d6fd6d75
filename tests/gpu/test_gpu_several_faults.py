"""Faults of test_gpu_faults.py, of ranks with GPUs of their own: one is killed, or stands still.

The same on CPUs: JAX_PLATFORMS=cpu pytest --noconftest tests/gpu/test_gpu_several_faults.py
"""

import pathlib

import pytest
import several
import test_gpu_faults as faults
from reliability import processes as members
from test_gpu_faults import (  # noqa: F401  pytest finds them here
    running_job,
    test_a_process_that_is_killed_while_a_communicator_is_made_is_named,
    test_a_process_that_stands_still_for_less_than_the_deadline_does_no_harm,
    test_a_process_that_stands_still_for_longer_is_named_and_hears_of_it,
    test_a_rank_that_is_killed_in_the_middle_of_calls_is_named,
    test_a_rank_that_is_killed_while_others_wait_for_it_is_named,
    test_a_rank_that_was_killed_between_calls_is_named,
)

COUNT = several.visible_gpus() if faults.ON_GPU else 8


@pytest.fixture
def environment(request):
    """In place of the ways of sharing a GPU, which are the parameter."""
    if getattr(request, "param", faults.SHARING[0]) != faults.SHARING[0]:
        pytest.skip("no GPU is shared here")
    return faults.ENVIRONMENT | several.UNICAST


@pytest.fixture
def start_job(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(members, "MEMBER", pathlib.Path(__file__).with_name("own_gpu_member.py"))
    started = []

    def start(num_processes):
        if num_processes > COUNT:
            pytest.skip(f"not run: {num_processes} GPUs are needed, {COUNT} visible")
        limits = {
            "JAX_LATENT_TAIL_DEADLINE": str(faults.DEADLINE_S),
            "JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT": str(faults.MEETING_S),
        }
        started.append(members.Job(tmp_path, num_processes, environment | limits))
        return started[-1]

    yield start
    for job in started:
        job.end()

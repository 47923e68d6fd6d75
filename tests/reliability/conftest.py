"""A job of three processes that tests share as long as it is sound."""

import pytest
from processes import DEADLINE_S, Job, assert_no_more_files_than, shared_files


@pytest.fixture(scope="session")
def start_job(tmp_path_factory):
    """Starts jobs; all have ended when the session has."""
    started = []

    def start(num_processes=3, environments=None, **environment):
        folder = tmp_path_factory.mktemp("job")
        environment = {
            "JAX_LATENT_TAIL_DEADLINE": str(DEADLINE_S),
            "JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT": "20",
            **environment,
        }
        job = Job(folder, num_processes, environment, environments)
        started.append(job)
        return job

    yield start
    for job in started:
        job.end()


@pytest.fixture(scope="session")
def _shared_job(start_job):
    job = None

    def get():
        nonlocal job
        if job is None or not job.is_idle():
            if job:
                job.end()
            job = start_job()
            outcomes = job.ask("compile_")
            assert not any(outcome.error for outcome in outcomes), outcomes
        return job

    return get


@pytest.fixture
def job(_shared_job):
    """Three processes with a communicator and a program, which has run; no segment has a name."""
    before = shared_files()
    job = _shared_job()
    outcomes = job.ask("run")
    if any(outcome.value != "right" for outcome in outcomes):  # a test left it failed
        job.ask("reset")
        outcomes = job.ask("run")
    if any(outcome.value != "right" for outcome in outcomes):  # or beyond that
        job.end()
        job = _shared_job()
        outcomes = job.ask("run")
    assert [outcome.value for outcome in outcomes] == ["right"] * 3, outcomes
    yield job
    assert_no_more_files_than(before)

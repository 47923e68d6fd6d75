"""Random programs of tails among other operations, exact on every shape of the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_latent_tail import launch

PROGRAM = Path(__file__).with_name("random_programs.py")
SHORT, LONG = 4, 50


def in_one_process(devices, count, first_seed, **environment):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(first_seed), str(count)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith(f"{count} programs exact\n")


def in_processes(num_processes, devices, count, first_seed):
    outputs = launch.run(
        [str(PROGRAM), str(first_seed), str(count)],
        num_processes,
        devices_per_process=devices,
        timeout_s=550,
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert all(output.endswith(f"{count} programs exact\n") for output in outputs)


@pytest.mark.parametrize("devices", [2, 8])
def test_in_one_process(devices):
    in_one_process(devices, SHORT, 0)


def test_with_one_thread_of_xla():
    in_one_process(8, SHORT, 10, NPROC="1")


@pytest.mark.parametrize(("num_processes", "devices"), [(2, 1), (2, 2)])
def test_in_processes(num_processes, devices):
    in_processes(num_processes, devices, SHORT, 20)


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("environment", [{}, {"NPROC": "1"}], ids=["", "one thread"])
def test_many_in_one_process(devices, environment):
    in_one_process(devices, LONG, 100, **environment)


@pytest.mark.long
@pytest.mark.parametrize(("num_processes", "devices"), [(2, 1), (2, 2), (4, 1)])
def test_many_in_processes(num_processes, devices):
    in_processes(num_processes, devices, LONG, 200)

"""The launcher: limits, logs and what it leaves behind."""

import os
import subprocess
import sys
import time

import pytest

from jax_latent_tail import launch


def run(code, num_processes=3, **options):
    return launch.run(["-c", code], num_processes, **({"timeout_s": 60} | options))


def test_returns_what_each_process_wrote():
    outputs = run("import os; print('id', os.environ['JAX_LATENT_TAIL_PROCESS_ID'])")
    assert outputs == ["id 0\n", "id 1\n", "id 2\n"]


def test_a_failing_process_ends_the_others_and_shows_their_logs(tmp_path):
    code = f"""
import os, sys, time
from pathlib import Path
rank = int(os.environ["JAX_LATENT_TAIL_PROCESS_ID"])
Path({str(tmp_path)!r}, str(rank)).write_text(str(os.getpid()))
print("rank", rank, "was here", flush=True)
if rank == 1:
    while len(list(Path({str(tmp_path)!r}).iterdir())) < 3:
        time.sleep(0.01)
    sys.exit(7)
time.sleep(600)
"""
    start = time.monotonic()
    with pytest.raises(launch.ProcessError, match="process 1 of 3 ended with status 7") as caught:
        run(code)
    assert time.monotonic() - start < 30
    for rank in range(3):
        assert f"rank {rank} was here" in str(caught.value)
        pid = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_ignores_sigterm_is_killed_when_the_time_is_up(tmp_path):
    code = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join({str(tmp_path)!r}, "pid"), "w").write(str(os.getpid()))
time.sleep(600)
"""
    with pytest.raises(launch.ProcessError, match=r"processes \[0\] were still running after 2 s"):
        run(code, 1, timeout_s=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_signal_is_named():
    with pytest.raises(launch.ProcessError, match="ended with SIGKILL"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1)


def test_other_processes_are_left_alone():
    code = "import time; time.sleep(600)"
    bystander = subprocess.Popen([sys.executable, "-c", code])
    try:
        with pytest.raises(launch.ProcessError):
            run("import sys; sys.exit(1)", 2)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_members_do_not_outlive_a_killed_parent(tmp_path):
    child = f"""
import os, time
from jax_latent_tail import launch
launch.initialize()
rank = os.environ["JAX_LATENT_TAIL_PROCESS_ID"]
open(os.path.join({str(tmp_path)!r}, rank), "w").write(str(os.getpid()))
time.sleep(600)
"""
    parent = f"from jax_latent_tail import launch; launch.run(['-c', {child!r}], 2, timeout_s=90)"
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        pids = [int(file.read_text()) for file in tmp_path.iterdir()]
        assert len(pids) == 2
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))

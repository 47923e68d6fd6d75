"""The engine without XLA, under stress and under sanitizers."""

import re
import shutil
import subprocess
from pathlib import Path

import jaxlib
import pytest

SOURCE = Path(__file__).parents[2] / "ffi" / "tests"
INCLUDE = Path(jaxlib.__file__).parent / "include"


def build(folder, sanitizer=""):
    if not shutil.which("cmake"):
        pytest.skip("there is no CMake")
    configure = [
        "cmake",
        f"-S{SOURCE}",
        f"-B{folder}",
        f"-DSANITIZE={sanitizer}",
        f"-DJAXLIB_INCLUDE_DIR={INCLUDE}",
    ]
    for command in (configure, ["cmake", "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "cpu_stress"


def stress(program, seed, rounds):
    """Runs all scenarios; addresses are not randomised, which ThreadSanitizer may not survive."""
    command = [str(program), "--seed", str(seed), "--rounds", str(rounds)]
    if shutil.which("setarch"):
        command = ["setarch", "-R", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    threads = re.search(r"(\d+) threads in the pool\n$", done.stdout)
    assert threads, done.stdout
    assert int(threads[1]) < 100


def test_random_orders_delays_and_failures(tmp_path):
    stress(build(tmp_path), seed=0, rounds=2)


@pytest.mark.long
def test_many_random_orders(tmp_path):
    stress(build(tmp_path), seed=1000, rounds=100)


@pytest.mark.long
@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 8), ("address", 20)])
def test_with_a_sanitizer(tmp_path, sanitizer, rounds):
    stress(build(tmp_path, sanitizer), seed=2000, rounds=rounds)

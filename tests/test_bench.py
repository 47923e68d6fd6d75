"""`python -m jax_latent_tail bench` prints a row for each M; the figures are not judged."""

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize("options", [("--top-k", "2"), ("--processes", "2", "--devices", "1")])
def test_prints_a_table(options, tmp_path):
    sizes = {"tokens": [1, 9], "latent-dim": [32], "hidden-dim": [64], "layers": [2], "rounds": [1]}
    flags = [word for name, values in sizes.items() for word in (f"--{name}", *map(str, values))]
    result = subprocess.run(
        [sys.executable, "-m", "jax_latent_tail", "bench", *flags, *options],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,  # `-m` would import sources that lie in the working directory
    )
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| (\d+) (?:\| [\d.]+ ){4}\|$", result.stdout, re.MULTILINE)
    assert rows == ["1", "9"]

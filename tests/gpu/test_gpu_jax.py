"""Jitted programs of JAX on N processes that share the GPU, under MPS and by time slices."""

import os
import pathlib
import subprocess
import sys

import pytest

from jax_latent_tail import launch
from jax_latent_tail.kernels import processes

RANKS = str(pathlib.Path(__file__).with_name("jax_ranks.py"))

EVERYTHING = (
    "prepared", "values", "finalize", "scan_92_layers", "gather", "whole_tail", "captured",
    "transformations", "ten_thousand_calls", "a_late_rank", "closed",
)  # fmt: skip


def run(num_processes, *scenarios, env=None, timeout_s=240):
    """What the processes printed, having found that their latent outputs are equal to the bit."""
    environment = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    texts = launch.run(
        [RANKS, *scenarios], num_processes, timeout_s=timeout_s, env={**environment, **(env or {})}
    )
    print(*texts, sep="\n")
    digests = {line for text in texts for line in text.splitlines() if line.startswith("digest:")}
    assert len(digests) == 1, "the ranks' latent outputs differ"
    return texts


@pytest.fixture(scope="module")
def daemon():
    with processes.mps() as environment:
        yield {name: value for name, value in environment.items() if value is not None}


def test_two_ranks(daemon):
    run(2, *EVERYTHING, env=daemon)


def test_four_ranks(daemon):
    run(4, *EVERYTHING, "halves", env=daemon)


def test_eight_ranks(daemon):
    run(8, *EVERYTHING, env=daemon)


def test_two_ranks_time_sliced():
    run(2, "values", "a_late_rank", "captured")


@pytest.mark.parametrize("allocator", ["bfc", "platform", "vmm", "cuda_async"])
def test_allocators(daemon, allocator):
    run(2, "values", "captured", env={**daemon, "XLA_PYTHON_CLIENT_ALLOCATOR": allocator})


def test_beside_a_preallocated_pool(daemon):
    pool = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
    run(2, "values", env={**daemon, **pool})


def test_a_second_start_with_the_persistent_cache(daemon, tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run(2, "values", "captured", env={**daemon, **cache})
    before = set(tmp_path.iterdir())
    assert before
    run(2, "values", "captured", env={**daemon, **cache})
    assert {path for path in tmp_path.iterdir() if "atime" not in path.name} <= before


def test_a_missing_call_is_an_error_everywhere(daemon):
    texts = run(2, "a_missing_call", env={**daemon, "JAX_LATENT_TAIL_DEADLINE": "1"})
    assert "from ranks [1] within 1.000 s" in texts[0]


EXAMPLE = str(pathlib.Path(__file__).parents[2] / "examples" / "kimi_moe.py")


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_example(daemon, processes):
    """Several processes share the GPU: then every collective of the step is a custom call."""
    several = ["--processes", str(processes), "--share-gpus"] if processes > 1 else []
    result = subprocess.run(
        [sys.executable, EXAMPLE, "--platform", "cuda", *several],
        env={**os.environ, **daemon, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert "PASSED" in result.stdout
    for op in ("fused", "up_gather_add"):
        assert f"cuda for {op} on {processes} ranks" in result.stdout


def test_one_process():
    """One rank: values, and gradients against the plain implementation."""
    texts = launch.run(
        [str(pathlib.Path(RANKS).with_name("jax_single.py"))],
        1,
        timeout_s=120,
        env={"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    print(*texts)

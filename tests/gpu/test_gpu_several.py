"""Jitted programs of JAX on several GPUs: one process, one for each GPU, and between.

Every run compares the bits of its results with those of all runs before, ranks that share one GPU
among them. What needs more GPUs than there are is skipped.
"""

import os
import pathlib
import subprocess
import sys

import pytest
import several
from several import Way

SIZES = (2, 4, 8)
GRIDS = ((4, 2), (8, 2), (8, 4))  # GPUs, groups: dp x tp is 2 x 2, 2 x 4 and 4 x 2
EXAMPLE = str(pathlib.Path(__file__).parents[2] / "examples" / "kimi_moe.py")

# Of jax_ranks.py, whose ranks otherwise share one GPU.
OF_JAX_RANKS = (
    "prepared", "values", "finalize", "scan_92_layers", "gather", "whole_tail", "captured",
    "transformations", "ten_thousand_calls", "a_late_rank", "closed",
)  # fmt: skip


COUNT = several.visible_gpus()


def on_own_gpus(ways):
    """Parameters: each way needs as many GPUs as it has ranks."""
    found = []
    for way in ways:
        count = way.processes * way.devices
        reason = f"not run: {count} GPUs are needed, {COUNT} visible"
        found.append(pytest.param(way, marks=pytest.mark.skipif(count > COUNT, reason=reason)))
    return pytest.mark.parametrize("way", found, ids=str)


def spread(count):
    """One process, a process for each GPU, and one for every two."""
    shapes = dict.fromkeys([(1, count), (count, 1), (count // 2, 2)])
    return [Way(*shape) for shape in shapes if shape[0] * shape[1] == count]


@pytest.mark.parametrize("way", [Way(count, 1, share=True) for count in SIZES], ids=str)
def test_ranks_that_share_a_gpu(way):
    several.run(way)


@pytest.mark.parametrize(
    "way", [Way(count, 1, groups=groups, share=True) for count, groups in GRIDS], ids=str
)
def test_groups_that_share_a_gpu(way):
    several.run(way, "values", "gather", "whole_tail")


@on_own_gpus([Way(1, 1)])
def test_one_rank(way):
    """Of little worth, but what is not shared is then run on one GPU, too."""
    several.run(way, "values", "many_tokens", "gather", "before_and_after", "overlapping")


@on_own_gpus([way for count in SIZES for way in spread(count)])
def test_ranks_with_gpus_of_their_own(way):
    several.run(way)


@on_own_gpus(
    [
        way
        for count, groups in GRIDS
        for way in (
            Way(1, count, groups),
            Way(count, 1, groups),
            Way(count // 2, 2, groups, shuffled=True),  # of one process, but not of one group
        )
    ]
)
def test_groups_with_gpus_of_their_own(way):
    several.run(way, "values", "gather", "whole_tail", "before_and_after", "gradients")


@on_own_gpus([Way(1, 2, shuffled=True), Way(4, 1, shuffled=True), Way(4, 2, shuffled=True)])
def test_ranks_in_another_order_than_devices(way):
    several.run(way, "values", "gather", "before_and_after", "overlapping")


@on_own_gpus([Way(2, 1, isolated=True), Way(4, 2, isolated=True)])
def test_processes_that_see_their_own_gpus_only(way):
    several.run(way, "values", "gather", "before_and_after")


@on_own_gpus([Way(count, 1) for count in SIZES])
def test_what_ranks_that_share_a_gpu_pass(way):
    several.run(way, "--of-jax-ranks", *OF_JAX_RANKS)


@on_own_gpus([Way(2, 1)])
def test_a_missing_call_is_an_error_everywhere(way):
    several.run(way, "--of-jax-ranks", "a_missing_call", JAX_LATENT_TAIL_DEADLINE="1")


@on_own_gpus([way for count in SIZES for way in (Way(1, count), Way(count, 1))])
def test_the_example(way):
    processes = ["--processes", str(way.processes), "--devices", str(way.devices)]
    result = subprocess.run(
        [sys.executable, EXAMPLE, "--platform", "cuda", *processes],
        env={**os.environ, **several.CUDA},
        capture_output=True,
        text=True,
        timeout=240,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert "PASSED" in result.stdout
    assert f"cuda for fused on {way.processes * way.devices} ranks" in result.stdout


@on_own_gpus([Way(1, 2)])
def test_results_are_those_of_ranks_that_share_a_gpu(way):
    """All were compared above, too; here the comparison is seen to have something to compare."""
    shared = several.run(Way(2, 1, share=True), "values", "many_tokens", "finalize", "gather")
    own = several.run(way, "values", "many_tokens", "finalize", "gather")
    assert shared == own

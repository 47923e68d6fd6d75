"""Plain use where the native library is missing, broken or another's."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import harness
    import oracle

    import jax_latent_tail as latent_tail

    inputs = harness.random_inputs(0, 2, 4, 64, 64)
    latents, shards = harness.fused(inputs)
    assert oracle.ulps(latents[0], oracle.latent(inputs.rows, inputs.gamma)).max() <= 1
    assert oracle.ulps(shards, oracle.shards(inputs.shared)).max() == 0
    latent_tail.check()
    latent_tail.reset()
    try:
        harness.fused(inputs, implementation="cpu")
    except latent_tail.UnavailableError as error:
        print(error)
    print(latent_tail.explain())
    latent_tail.close()
"""


def program(library):
    environment = {"JAX_LATENT_TAIL_LIBRARY": str(library)}
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    insisted, *chosen = done.stdout.splitlines()
    assert insisted.startswith("implementation='cpu' cannot serve this call: ")
    assert all(line.startswith("xla for fused on 2 ranks") for line in chosen)
    return insisted


@pytest.mark.parametrize("what", ["missing", "broken"])
def test_calls_take_plain_collectives_and_say_why(what, tmp_path):
    library = tmp_path / "liblatent_tail.so"
    if what == "broken":
        library.write_bytes(b"\x7fELF")
    assert f"cannot load the native library {library}" in program(library)


def test_one_process_without_it_makes_all_take_plain_collectives(start_job, tmp_path):
    missing = {"JAX_LATENT_TAIL_LIBRARY": str(tmp_path / "nowhere.so")}
    job = start_job(2, environments={1: missing})
    (choice,) = {tuple(outcome.value) for outcome in job.ask("prepare")}
    assert choice[0] == "xla"
    assert "failed in process 1" in choice[1]
    assert "nowhere.so" in choice[1]
    assert {outcome.error for outcome in job.ask("compile_")} == {"UnavailableError"}
    assert not any(outcome.error for outcome in job.ask("compile_", implementation=None))
    assert all(outcome.value == "right" for outcome in job.ask("run", count=3))
    job.end()

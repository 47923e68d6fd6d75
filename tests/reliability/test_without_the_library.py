"""Plain use where the native library is missing, broken or another's."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from jax_latent_tail import native

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


def of_another_interface(folder):
    """A library with which this package does not agree on the C interface."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("there is no compiler")
    source, library = folder / "other.cc", folder / "liblatent_tail.so"
    source.write_text('extern "C" int latent_tail_interface_version() { return 99; }\n')
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library


REASON = f"has interface version 99, this package needs {native._INTERFACE_VERSION}"


def test_a_library_of_another_interface_is_refused(tmp_path):
    library = of_another_interface(tmp_path)
    assert f"{library} {REASON}" in program(library)


@pytest.mark.parametrize("what", ["missing", "broken"])
def test_calls_take_plain_collectives_and_say_why(what, tmp_path):
    library = tmp_path / "liblatent_tail.so"
    if what == "broken":
        library.write_bytes(b"\x7fELF")
    assert f"cannot load the native library {library}" in program(library)


@pytest.mark.parametrize("what", ["missing", "of another interface"])
def test_one_process_without_it_makes_all_take_plain_collectives(start_job, what, tmp_path):
    library, reason = tmp_path / "nowhere.so", "nowhere.so"
    if what == "of another interface":
        library, reason = of_another_interface(tmp_path), REASON
    job = start_job(2, environments={1: {"JAX_LATENT_TAIL_LIBRARY": str(library)}})
    (choice,) = {tuple(outcome.value) for outcome in job.ask("prepare")}
    assert choice[0] == "xla"
    assert "failed in process 1" in choice[1]
    assert reason in choice[1]
    outcomes = job.ask("compile_")
    assert {outcome.error for outcome in outcomes} == {"UnavailableError"}
    assert all(reason in outcome.message for outcome in outcomes)
    assert not any(outcome.error for outcome in job.ask("compile_", implementation=None))
    assert all(outcome.value == "right" for outcome in job.ask("run", count=3))
    job.end()

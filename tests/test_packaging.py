"""What is installed: the native library and what it was built against."""

import pathlib
import re
import subprocess
import tomllib

import jaxlib
import pytest

from jax_latent_tail import native

PROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"
FFI_VERSION_OF_OLDEST = (0, 3)  # jaxlib 0.10.2's


@pytest.fixture(scope="module")
def library():
    return native.Library(native.expected_path())


@pytest.mark.smoke
def test_the_library_is_there_and_has_the_interface_that_the_package_needs(library):
    assert library.handle.latent_tail_interface_version() == native._INTERFACE_VERSION


@pytest.mark.smoke
def test_the_library_exports_its_own_names_only(library):
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--format=posix", library.path],
        check=True,
        capture_output=True,
        text=True,
    )
    names = [line.split()[0] for line in listing.stdout.splitlines()]
    assert "latent_tail_interface_version" in names
    assert [name for name in names if not name.startswith("latent_tail_")] == []


@pytest.mark.smoke
def test_the_library_was_built_against_the_oldest_supported_jaxlib(library):
    major, minor = FFI_VERSION_OF_OLDEST
    assert library.handle.latent_tail_xla_ffi_version() == major * 1000 + minor
    # Which this one takes, as it is that or newer.
    header = pathlib.Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"
    here = [
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", header.read_text()).group(1))
        for part in ("MAJOR", "MINOR")
    ]
    assert here[0] == major
    assert here[1] >= minor


def test_the_oldest_supported_jaxlib_is_what_builds_need():
    project = tomllib.loads(PROJECT.read_text())
    (built,) = [r for r in project["build-system"]["requires"] if r.startswith("jaxlib")]
    (run,) = [r for r in project["project"]["dependencies"] if r.startswith("jaxlib")]
    assert run.startswith(built.replace("==", ">=") + ",")

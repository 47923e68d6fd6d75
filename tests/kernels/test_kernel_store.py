"""Finding, refusing and making cubins."""

import importlib.util
import json
import multiprocessing
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from jax_latent_tail.errors import UnavailableError
from jax_latent_tail.kernels import cubin, store
from jax_latent_tail.kernels.variant import KernelVariant

HAVE_COMPILER = importlib.util.find_spec("cutlass") is not None
needs_compiler = pytest.mark.skipif(
    not HAVE_COMPILER, reason="compiling kernels needs the extra `export`"
)
SMALL = KernelVariant("sm_90", 2, 8, 0)  # the quickest to compile
KEY = SMALL.key


@pytest.fixture
def places(monkeypatch, tmp_path):
    """An empty package folder and an empty cache."""
    package, cache = tmp_path / "package", tmp_path / "cache"
    monkeypatch.setattr(store, "package_folder", lambda: package)
    monkeypatch.setenv(store.CACHE_VARIABLE, str(cache))
    monkeypatch.delenv(store.FOLDER_VARIABLE, raising=False)
    return package, cache


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with one compiled cubin and its manifest."""
    if not HAVE_COMPILER:
        pytest.skip("compiling kernels needs the extra `export`")
    from jax_latent_tail.kernels import export

    folder = tmp_path_factory.mktemp("cubins")
    export.main(["--out", str(folder), "--spec", KEY, "--quiet", "-j", "1"])
    return folder


def copied(made, folder, **changes):
    """`made` again, with changes to the manifest entry."""
    folder.mkdir(parents=True)
    (folder / f"{KEY}.cubin").write_bytes((made / f"{KEY}.cubin").read_bytes())
    store.write_manifest(folder, {KEY: {**store.read_manifest(made)[KEY], **changes}})
    return folder / f"{KEY}.cubin"


@pytest.fixture
def no_compiler(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "cutlass" else real(name, *a)
    )


def test_without_a_compiler_the_error_says_what_to_do(places, no_compiler):
    with pytest.raises(UnavailableError) as raised:
        store.find(SMALL)
    text = str(raised.value)
    assert 'pip install "jax-latent-tail[export]"' in text
    assert f"python -m jax_latent_tail.kernels.export --spec {KEY}" in text
    assert store.FOLDER_VARIABLE in text
    assert all(str(place) in text for place in places), "names every place it looked in"


def test_the_package_comes_first(places, made, no_compiler):
    path = copied(made, places[0])
    found = store.find(SMALL)
    assert found.origin == str(path)
    assert found.data == path.read_bytes()
    assert [kernel.symbol for kernel in found.kernels] == ["latent_tail_0"]


def test_a_named_folder_comes_before_the_package(places, made, monkeypatch, tmp_path, no_compiler):
    copied(made, places[0])
    path = copied(made, tmp_path / "named")
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(path.parent))
    assert store.find(SMALL).origin == str(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "size"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "SHA-256"),
        (lambda data: b"", "size"),
    ],
    ids=["truncated", "tampered", "empty"],
)
def test_damaged_is_refused(places, made, no_compiler, damage, reason):
    path = copied(made, places[0])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnavailableError, match=f"its {reason} is"):
        store.find(SMALL)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"abi_version": 0}, "ABI version is 0, not 1"),
        ({"source_hash": "0" * 64}, "source hash is"),
        ({"sha256": "0" * 64}, "SHA-256 is"),
        ({"kernels": None}, "unreadable"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(places, made, no_compiler, change, reason):
    copied(made, places[0], **change)
    with pytest.raises(UnavailableError, match=reason):
        store.find(SMALL)


def test_other_parameters_are_refused(places, made, no_compiler, monkeypatch):
    copied(made, places[0])
    info = cubin.inspect((made / f"{KEY}.cubin").read_bytes())["latent_tail_0"]
    other = cubin.KernelInfo(info.parameters[:-1], info.registers, info.stack_bytes)
    monkeypatch.setattr(cubin, "inspect", lambda data: {"latent_tail_0": other})
    with pytest.raises(UnavailableError, match="parameters of latent_tail_0 are not those"):
        store.find(SMALL)


def test_a_broken_manifest_is_no_manifest(places, no_compiler):
    places[0].mkdir()
    (places[0] / store.MANIFEST).write_text("{")
    with pytest.raises(UnavailableError):
        store.find(SMALL)


def test_inspect_refuses_what_is_no_cubin():
    for data in (b"", b"\x7fELF", b"\x7fELF\x02" + bytes(200), b"text" * 100):
        with pytest.raises(ValueError, match="not a whole cubin"):
            cubin.inspect(data)


@needs_compiler
def test_compiled_once_then_cached(places):
    first = store.find(SMALL)
    assert first.origin.startswith(str(places[1]))
    again = store.find(SMALL)
    assert again == first


@needs_compiler
def test_a_damaged_cache_is_made_anew(places):
    path = pathlib.Path(store.find(SMALL).origin)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert store.find(SMALL).data == path.read_bytes() == whole


@needs_compiler
def test_a_cache_that_cannot_be_written(places, monkeypatch):
    places[1].write_text("a file where the folder should be")
    assert store.find(SMALL).data
    assert places[1].is_file()


def _find_and_count(start, log, answers):
    compile_one = store._compile

    def counted(variant, folder, deadline):
        with open(log, "a") as file:
            file.write("compiled\n")
        return compile_one(variant, folder, deadline)

    store._compile = counted
    start.wait(60)
    answers.put(store.find(SMALL).sha256)


@needs_compiler
def test_eight_processes_at_once(places, tmp_path):
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(8), context.Queue()
    log = tmp_path / "log"
    processes = [
        context.Process(target=_find_and_count, args=(start, log, answers)) for _ in range(8)
    ]
    for process in processes:
        process.start()
    hashes = {answers.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(hashes) == 1
    assert log.read_text() == "compiled\n", "one compiles, the others wait for it"
    names = {path.name for path in store.cache_folder().iterdir()}
    assert names == {f"{KEY}.cubin", f"{KEY}.json", f"{KEY}.lock"}, "no temporary files are left"


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def locked_by_another(places, monkeypatch):
    """The compiler is there, and a process holds the lock of the kernel; ends that process."""
    monkeypatch.setattr(store, "require_compiler", lambda *_: None)
    folder = store.cache_folder()
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / f"{KEY}.lock")], stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"

    def end():
        holder.kill()
        holder.wait()

    yield end
    end()
    holder.stdout.close()


def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(
    locked_by_another, monkeypatch
):
    monkeypatch.setattr(store, "COMPILE_TIMEOUT_S", 0.3)
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=rf"{KEY}\.lock locked for over 0\.3 s"):
        store.find(SMALL)
    assert 0.3 < time.monotonic() - start < 5


def test_a_lock_is_waited_for_until_its_process_is_dead(locked_by_another, monkeypatch):
    monkeypatch.setattr(store, "_compile", lambda *_: "compiled")
    start = time.monotonic()
    end = threading.Timer(0.5, locked_by_another)
    end.start()
    assert store.find(SMALL) == "compiled"
    assert time.monotonic() - start > 0.4
    end.join()


@needs_compiler
def test_export_keeps_what_is_there_and_is_deterministic(made, tmp_path):
    from jax_latent_tail.kernels import export

    path = copied(made, tmp_path / "again")
    before = path.stat().st_mtime_ns, (path.parent / store.MANIFEST).read_bytes()
    export.main(["--out", str(path.parent), "--spec", KEY, "--quiet"])
    assert (path.stat().st_mtime_ns, (path.parent / store.MANIFEST).read_bytes()) == before
    path.unlink()
    export.main(["--out", str(path.parent), "--spec", KEY, "--quiet"])
    assert path.read_bytes() == (made / f"{KEY}.cubin").read_bytes()
    assert json.loads((path.parent / store.MANIFEST).read_text())["format"] == 1

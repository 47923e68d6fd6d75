"""Where cubins come from: the installed package, the user's cache, or the compiler.

A folder of cubins holds KEY.cubin files and their manifest, one JSON object:

    {"format": 1, "cubins": {KEY: entry}}

with entries as `export` writes them. In the cache each KEY has a KEY.json of its own with one
entry, so that processes need not agree on a common file. Everything is written to a temporary file
and renamed; a cubin is used only if its size, hash, ABI version, parameter layout and source hash
fit.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from jax_latent_tail.errors import UnavailableError
from jax_latent_tail.kernels import abi, cubin
from jax_latent_tail.kernels.variant import KernelVariant

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FORMAT = 1

# A folder of cubins to look in first, and another place for the cache.
FOLDER_VARIABLE = "JAX_LATENT_TAIL_CUBINS"
CACHE_VARIABLE = "JAX_LATENT_TAIL_CACHE"

# For a compiler, another process's included. By default less than processes wait for each other
# when a communicator is made: they hear why there is none.
COMPILE_TIMEOUT_S = 240.0
_LOCK_POLL_S = 0.05

_SOURCES = (
    "abi.py", "collective.py", "geometry.py", "module.py", "projection.py", "protocol.py", "ptx.py",
    "variant.py",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KernelEntry:
    """One kernel of a cubin: a geometry. In the order of `geometry.entries`.

    Attributes:
      symbol: name to look up in the loaded module.
      cluster: CTAs per cluster; a launch attribute, cluster dims (1, cluster, 1).
      threads: threads per CTA.
      smem_bytes: dynamic shared memory per CTA.
      registers: per thread.
    """

    symbol: str
    cluster: int
    threads: int
    smem_bytes: int
    registers: int


@dataclasses.dataclass(frozen=True)
class Cubin:
    """A verified cubin: bytes for cuModuleLoadData / cuLibraryLoadData.

    Attributes:
      variant: what it was compiled for.
      data: the file.
      sha256: of `data`, in hex; equal on all ranks of a group.
      kernels: its kernels.
      origin: where it was found, for messages.
    """

    variant: KernelVariant
    data: bytes
    sha256: str
    kernels: tuple[KernelEntry, ...]
    origin: str


def package_folder() -> pathlib.Path:
    """Where a release carries its cubins."""
    return pathlib.Path(__file__).parent / "cubins"


def cache_folder() -> pathlib.Path:
    """Where this user's cubins of these sources are kept."""
    root = os.environ.get(CACHE_VARIABLE)
    if not root:
        import platformdirs  # only where the cache is used at all

        root = platformdirs.user_cache_dir("jax_latent_tail")
    return pathlib.Path(root) / f"cubins-{source_hash()[:16]}"


@functools.cache
def source_hash() -> str:
    """SHA-256, in hex, of the sources that a cubin is compiled from."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((pathlib.Path(__file__).parent / name).read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def find(variant: KernelVariant) -> Cubin:
    """The cubin of `variant`; compiles it if it is found nowhere and the compiler is installed.

    Safe to call from any number of processes at once: one compiles, the others wait for it.

    Raises:
      UnavailableError: none is found and none can be made; names every place and what to do.
    """
    refused: list[str] = []
    named = os.environ.get(FOLDER_VARIABLE)
    for folder in ([pathlib.Path(named)] if named else []) + [package_folder()]:
        entry = read_manifest(folder).get(variant.key)
        found = _load(variant, entry, folder / f"{variant.key}.cubin", refused)
        if found:
            return found
    folder = cache_folder()
    found = _load_cached(variant, folder, refused)
    if found:
        return found
    require_compiler(variant, refused)
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{variant.key}.lock", deadline):
            found = _load_cached(variant, folder, refused)  # another process may have been faster
            return found or _compile(variant, folder, deadline)
    except OSError as error:
        _log.warning("cannot keep a compiled kernel in %s: %s", folder, error)
        with tempfile.TemporaryDirectory() as scratch:
            return _compile(variant, pathlib.Path(scratch), deadline)


def refusal(entry: dict, path: pathlib.Path) -> str | None:
    """Why the cubin at `path` must not be run, or None."""
    try:
        return _refusal(entry, path.read_bytes())
    except OSError as error:
        return f"cannot read it: {error}"


def _refusal(entry: dict, data: bytes) -> str | None:
    wanted = {
        "ABI version": (entry.get("abi_version"), abi.ABI_VERSION),
        "size": (len(data), entry.get("bytes")),
        "SHA-256": (hashlib.sha256(data).hexdigest(), entry.get("sha256")),
        "source hash": (entry.get("source_hash"), source_hash()),
    }
    for what, (has, want) in wanted.items():
        if has != want:
            return f"its {what} is {has}, not {want}"
    try:
        kernels = cubin.inspect(data)
    except ValueError as error:
        return str(error)
    for kernel in entry["kernels"]:
        info = kernels.get(kernel["symbol"])
        if info is None or info.parameters != abi.parameter_layout():
            return f"the parameters of {kernel['symbol']} are not those of ABI {abi.ABI_VERSION}"
    return None


def load(variant: KernelVariant, entry: dict, path: pathlib.Path) -> Cubin:
    """One named cubin; raises an UnavailableError if it is refused."""
    refused: list[str] = []
    found = _load(variant, entry, path, refused)
    if not found:
        raise UnavailableError(f"refused the kernel {refused[-1]}")
    return found


def _load(
    variant: KernelVariant, entry: dict | None, path: pathlib.Path, refused: list[str]
) -> Cubin | None:
    if entry is None:
        refused.append(f"{path.parent}: not there")
        return None
    try:
        data = path.read_bytes()
        reason = _refusal(entry, data)
    except (OSError, KeyError, TypeError) as error:
        reason = f"unreadable: {error!r}"
    if reason:
        refused.append(f"{path}: {reason}")
        _log.warning("refused the kernel %s: %s", path, reason)
        return None
    names = [field.name for field in dataclasses.fields(KernelEntry)]
    return Cubin(
        variant=variant,
        data=data,
        sha256=entry["sha256"],
        kernels=tuple(KernelEntry(**{n: kernel[n] for n in names}) for kernel in entry["kernels"]),
        origin=str(path),
    )


def _load_cached(variant: KernelVariant, folder: pathlib.Path, refused: list[str]) -> Cubin | None:
    try:
        entry = json.loads((folder / f"{variant.key}.json").read_text())
    except (OSError, ValueError):
        entry = None
    return _load(variant, entry, folder / f"{variant.key}.cubin", refused)


def require_compiler(variant: KernelVariant, refused: Sequence[str] = ()) -> None:
    """Raise an UnavailableError that says what to install, unless the compiler is installed."""
    if importlib.util.find_spec("cutlass") is not None:
        return
    looked = "".join(f"\n  {reason}" for reason in refused)
    raise UnavailableError(
        f"no kernel for {variant.key}, and nvidia-cutlass-dsl, which compiles it, is not installed."
        f' Install it with: pip install "jax-latent-tail[export]". Or compile on another machine:'
        f" python -m jax_latent_tail.kernels.export --spec {variant.key} --out DIR, and set"
        f" {FOLDER_VARIABLE}=DIR here." + (f" Looked in:{looked}" if looked else "")
    )


def _compile(variant: KernelVariant, folder: pathlib.Path, deadline: float) -> Cubin:
    """Compile in a process of its own: the compiler is large and keeps global state."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "jax_latent_tail.kernels.export", "--quiet", "--jobs=1"]
        command += ["--out", scratch, "--spec", variant.key]
        # The child finds this very package, wherever the parent got it from.
        root = str(pathlib.Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        try:
            subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                check=True,
                capture_output=True,
                text=True,
                timeout=max(deadline - time.monotonic(), 0.0),
            )
        except subprocess.CalledProcessError as error:
            raise UnavailableError(
                f"compiling the kernel {variant.key} failed:\n{error.stderr[-4000:]}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"compiling the kernel {variant.key}, and waiting for who might, took over"
                f" {COMPILE_TIMEOUT_S:g} s"
            ) from error
        made = pathlib.Path(scratch)
        entry = read_manifest(made)[variant.key]
        # The entry last: with it the cubin counts as there.
        name = f"{variant.key}.cubin"
        write_atomically(folder / name, (made / name).read_bytes())
        write_atomically(folder / f"{variant.key}.json", json.dumps(entry, indent=1).encode())
    return load(variant, entry, folder / name)


def read_manifest(folder: pathlib.Path) -> dict[str, dict]:
    """Entries by key; empty where there is no manifest, or one that cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return dict(manifest["cubins"]) if manifest["format"] == _FORMAT else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("cannot read %s: %r", folder / MANIFEST, error)
        return {}


def write_manifest(folder: pathlib.Path, entries: dict[str, dict]) -> None:
    """Replace the manifest; the same entries give the same bytes."""
    manifest = {"format": _FORMAT, "cubins": dict(sorted(entries.items()))}
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def write_atomically(path: pathlib.Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: pathlib.Path, deadline: float) -> Iterator[None]:
    """Raises an UnavailableError if another process keeps the lock for too long."""
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"another process, which compiles this kernel or stands still, has kept {path}"
                    f" locked for over {COMPILE_TIMEOUT_S:g} s"
                )
            time.sleep(_LOCK_POLL_S)
        yield

"""Starts `jax_several.py` in every way that ranks can be spread, and compares what comes out."""

import contextlib
import dataclasses
import os
import pathlib
import tempfile

from jax_latent_tail import launch
from jax_latent_tail.kernels import processes

FOLDER = pathlib.Path(__file__).parent
MEMBER = str(FOLDER / "jax_several.py")

# No multicast, neither ours nor NCCL's.
UNICAST = {"JAX_LATENT_TAIL_MULTICAST": "0", "NCCL_NVLS_ENABLE": "0"}
CUDA = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **UNICAST}

# A file of digests, read and added to: of other runs on GPUs of the same kind, with the same NumPy.
DIGESTS_VARIABLE = "JAX_LATENT_TAIL_DIGESTS"

# What all results so far were, by platform and what they are of, and who said so first.
_known: dict[tuple[str, str], tuple[str, str]] = {}


def visible_gpus() -> int:
    """How many there are; 0 without a driver."""
    try:
        from cuda.bindings import driver

        driver.cuInit(0)
        return int(driver.cuDeviceGetCount()[1])
    except Exception:  # conftest.py says what is missing
        return 0


@dataclasses.dataclass(frozen=True)
class Way:
    """How ranks are spread.

    Attributes:
      processes, devices: devices are of each process.
      groups: dp.
      shuffled: whether ranks come in another order than devices.
      share: whether all processes take one GPU, under MPS.
      isolated: whether each process sees its own GPUs only.
      platform: "cuda" or "cpu".
    """

    processes: int
    devices: int
    groups: int = 1
    shuffled: bool = False
    share: bool = False
    isolated: bool = False
    platform: str = "cuda"

    def __str__(self) -> str:
        text = f"{self.processes} x {self.devices}"
        text += f" in {self.groups} groups" if self.groups > 1 else ""
        text += " shuffled" * self.shuffled + " isolated" * self.isolated
        return text + " on one GPU" * self.share

    @property
    def flags(self) -> list[str]:
        flags = [f"--platform={self.platform}", f"--groups={self.groups}"]
        for name in ("shuffled", "share", "isolated"):
            flags += [f"--{name}"] * getattr(self, name)
        return flags


def run(way: Way, *arguments: str, timeout_s: float = 240, **environment: str) -> dict[str, str]:
    """Runs scenarios, all that can run without names, and returns the digests of their results.

    Every digest is compared with those of the processes and ways before.
    """
    env = dict(CUDA) if way.platform == "cuda" else {"JAX_PLATFORMS": "cpu"}
    # The oracle, and inputs.
    env["PYTHONPATH"] = os.pathsep.join(
        [str(FOLDER), str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with contextlib.ExitStack() as stack:
        log = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{log}/%p"}
        if way.share:
            daemon = stack.enter_context(processes.mps())
            env |= {name: value for name, value in daemon.items() if value is not None}
        texts = launch.run(
            [MEMBER, *way.flags, *arguments],
            way.processes,
            devices_per_process=way.devices,
            timeout_s=timeout_s,
            env=env | environment,
        )
        nccl = [path.read_text(errors="replace") for path in log.iterdir()]
    # Says NCCL of each device, unless it has been told not to look.
    assert not any("NVLS multicast support is available" in text for text in nccl)
    agreed = {line for text in texts for line in text.splitlines() if line.startswith("agreed ")}
    assert len(agreed) <= 1, f"the processes of {way} differ"
    digests: dict[str, str] = {}
    for process, text in enumerate(texts):
        lines = text.splitlines()
        if process == 0:
            print(way, *lines, f"NCCL in {len(nccl)} processes", sep="\n")
        assert "done" in lines, text
        for line in lines:
            if line.startswith("digest "):
                _, what, found = line.split()
                _compare(way, what, found)
                digests[what] = found
    return digests


def _compare(way: Way, what: str, found: str) -> None:
    path = os.environ.get(DIGESTS_VARIABLE)
    if path and not _known and os.path.exists(path):
        for line in pathlib.Path(path).read_text().splitlines():
            platform, of, *known = line.split(maxsplit=3)
            _known[platform, of] = known[0], known[1]
    key = (way.platform, what)
    if path and key not in _known:
        with open(path, "a") as file:
            print(*key, found, way, file=file)
    known, other = _known.setdefault(key, (found, str(way)))
    assert known == found, f"{what}: the bits of {way} are not those of {other}"

"""What the environment says about communicators; read once for each."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_latent_tail.communicator.rendezvous import Rendezvous
from jax_latent_tail.errors import ArgumentError, ArgumentValueError
from jax_latent_tail.spec import TailSpec
from jax_latent_tail.version import __version__

DEADLINE_VARIABLE = "JAX_LATENT_TAIL_DEADLINE"
RENDEZVOUS_VARIABLE = "JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT"
PDL_VARIABLE = "JAX_LATENT_TAIL_PDL"
MULTICAST_VARIABLE = "JAX_LATENT_TAIL_MULTICAST"
# NCCL's own switch for multicast: who turns it off there has a reason that holds here.
NVLS_VARIABLE = "NCCL_NVLS_ENABLE"

RENDEZVOUS_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Equal in all processes of a table.

    Attributes:
      deadline_s: how long a kernel waits for a peer before the communicator fails.
      pdl: whether launches carry the attribute of programmatic dependent launch.
      multicast: whether to publish through a multicast mapping where the machine can.
    """

    deadline_s: float = 60.0
    pdl: bool = True
    multicast: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Settings":
        """Raises an ArgumentValueError that names the variable."""
        return cls(
            deadline_s=_seconds(environ, DEADLINE_VARIABLE, cls.deadline_s),
            pdl=_switch(environ, PDL_VARIABLE, cls.pdl),
            multicast=_switch(environ, MULTICAST_VARIABLE, cls.multicast)
            and environ.get(NVLS_VARIABLE) != "0",
        )


def agree(
    rendezvous: Rendezvous, spec: TailSpec, environ: Mapping[str, str], facts: Mapping[str, Any]
) -> Settings:
    """The settings, after all processes have found that they want the same call, in the same way.

    Args:
      facts: what else must be equal in all of them, by what a message calls it.

    Raises:
      DisagreementError: something differs; in every process.
      ArgumentValueError: an environment variable has a value that is not allowed.
    """
    error: ArgumentError | None = None
    settings = Settings()
    try:
        settings = Settings.read(environ)
        rendezvous_timeout(environ)
    except ArgumentError as wrong:  # the others have to hear of it
        error = wrong
    everything = {
        "version": __version__,
        **facts,
        **dataclasses.asdict(spec),
        **dataclasses.asdict(settings),
        "environment": str(error) if error else "valid",
    }
    rendezvous.require_equal("comparing the calls", everything)
    if error:
        raise error
    return settings


def rendezvous_timeout(environ: Mapping[str, str]) -> float:
    """Seconds to wait for the other processes; raises an ArgumentValueError."""
    return _seconds(environ, RENDEZVOUS_VARIABLE, RENDEZVOUS_TIMEOUT_S)


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    text = environ.get(variable)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:
        raise ArgumentValueError(variable, repr(text), "a number of seconds, above 0 up to 1e6")
    return seconds


def _switch(environ: Mapping[str, str], variable: str, default: bool) -> bool:
    text = environ.get(variable)
    if not text:
        return default
    if text not in ("0", "1"):
        raise ArgumentValueError(variable, repr(text), "0 or 1")
    return text == "1"

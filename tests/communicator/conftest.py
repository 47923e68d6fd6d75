"""Every test with kernels that need no compiler, a scratch folder for sockets, and a time limit."""

import faulthandler
import tempfile

import pytest

from jax_latent_tail.communicator import cuda
from jax_latent_tail.kernels import store

LIMIT_S = 90


@pytest.fixture(autouse=True)
def _limit():
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def sockets(monkeypatch):
    """The folder in which sockets are made."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path is too long for a socket
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    import world

    monkeypatch.setattr(store, "find", lambda variant: world.World.cubin_stand_in(None, variant))
    monkeypatch.setattr(cuda, "_homes", {})
    monkeypatch.setattr(cuda, "_abandoned", [])

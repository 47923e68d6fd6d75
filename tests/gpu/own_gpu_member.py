"""tests/reliability/member.py, with a GPU of its own for each process."""

import pathlib
import runpy

from jax_latent_tail import launch

initialize = launch.initialize
launch.initialize = lambda **_: initialize()
member = pathlib.Path(__file__).parents[1] / "reliability" / "member.py"
runpy.run_path(str(member), run_name="__main__")

"""`python -m jax_latent_tail COMMAND`."""

import argparse

from jax_latent_tail import bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_latent_tail", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench.add_command(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()

"""`python -m jax_latent_tail bench`: the tail inside a jitted scan, beside XLA's own pipeline.

`unfused` is psum, RMSNorm and psum_scatter; `xla` the plain implementation of the tail, and the
third column the native one of the platform.

Every layer's input is the layer before's output, so that XLA can neither hoist nor merge calls.
Implementations take turns and each keeps its best round: ratios of one run are comparable, and
absolute times only on an otherwise idle machine.
"""

import argparse
import functools
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_latent_tail
from jax_latent_tail import launch, primitive, reference
from jax_latent_tail.spec import DEFAULT_MAX_TOKENS, Operands, TailSpec

_AXIS = ("tp",)
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu"}

Scan = Callable[..., tuple[jax.Array, ...]]


def add_command(commands: Any) -> None:
    parser = commands.add_parser("bench", help="time the tail", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128], metavar="M")
    parser.add_argument("--latent-dim", type=int, default=3584, metavar="L")
    parser.add_argument("--hidden-dim", type=int, default=7168, metavar="H")
    parser.add_argument("--top-k", type=int, default=None, metavar="K", help="finalize expert rows")
    parser.add_argument("--layers", type=int, default=16, help="length of the scan")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="devices of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds, with --processes")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.processes > 1 and not launch.is_member():
        launch.run(
            ["-m", "jax_latent_tail", *sys.argv[1:]],
            arguments.processes,
            devices_per_process=arguments.devices,
            timeout_s=arguments.timeout,
            env={"JAX_PLATFORMS": _PLATFORMS[arguments.platform]},
            stream_first=True,
        )
        return
    jax.config.update("jax_platforms", _PLATFORMS[arguments.platform])
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    launch.initialize()
    tp = arguments.devices * arguments.processes
    mesh = jax.make_mesh((tp,), _AXIS, axis_types=(AxisType.Auto,))
    report = print if jax.process_index() == 0 else lambda *_: None
    report(
        f"jax_latent_tail {jax_latent_tail.__version__}, jax {jax.__version__}, "
        f"{jax.devices()[0].device_kind} on {platform.machine()}, "
        f"{arguments.processes} processes x {arguments.devices} devices, "
        f"L {arguments.latent_dim}, H {arguments.hidden_dim}, K {arguments.top_k}; us per call"
    )
    implementations: dict[str, reference.Implementation] = {"unfused": reference.unfused}
    for name in ("xla", arguments.platform):
        implementations[name] = functools.partial(primitive.latent_tail, implementation=name)
    report(f"| M | {' | '.join(implementations)} | unfused / {arguments.platform} |")
    report("|---|" + "---|" * (len(implementations) + 1))
    for num_tokens in arguments.tokens:
        spec = TailSpec(
            tp=tp,
            latent_dim=arguments.latent_dim,
            hidden_dim=arguments.hidden_dim,
            top_k=arguments.top_k,
            eps=1e-6,
            fp32_internal=False,
            max_tokens=max(DEFAULT_MAX_TOKENS, num_tokens),
        )
        operands = _random_operands(mesh, spec, num_tokens)
        scans = {
            name: _scan(mesh, spec, implementation, arguments.layers)
            for name, implementation in implementations.items()
        }
        best = _interleaved(scans, operands, arguments.rounds)
        times = {name: seconds / arguments.layers * 1e6 for name, seconds in best.items()}
        row = " | ".join(f"{microseconds:.1f}" for microseconds in times.values())
        ratio = times["unfused"] / times[arguments.platform]
        report(f"| {num_tokens} | {row} | {ratio:.2f} |")


def _random_operands(mesh: Mesh, spec: TailSpec, num_tokens: int) -> Operands:
    """Normal data: rows and shared differ from rank to rank, the rest is the same on all."""
    assert spec.latent_dim is not None
    assert spec.hidden_dim is not None
    rows_shape = (spec.tp * num_tokens * (spec.top_k or 1), spec.latent_dim)
    shared_shape = (spec.tp * num_tokens, spec.hidden_dim)

    def generate() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 4)
        rows = jax.random.normal(keys[0], rows_shape, jnp.bfloat16)
        shared = jax.random.normal(keys[1], shared_shape, jnp.bfloat16)
        gamma = jnp.ones(rows_shape[1:], jnp.bfloat16)
        if spec.top_k is None:
            return [rows, gamma, shared]
        weights = jax.random.uniform(keys[2], (num_tokens, spec.top_k), jnp.bfloat16)
        indices = jax.random.permutation(keys[3], weights.size).astype(jnp.int32)
        return [rows, weights, indices.reshape(weights.shape), gamma, shared]

    shardings = [NamedSharding(mesh, spec_of) for spec_of in _in_specs(spec)]
    return spec.operands(*jax.jit(generate, out_shardings=shardings)())


def _in_specs(spec: TailSpec) -> tuple[P, ...]:
    routed = (P(_AXIS),) if spec.top_k is None else (P(_AXIS), P(), P())
    return (*routed, P(), P(_AXIS))


def _scan(
    mesh: Mesh, spec: TailSpec, implementation: reference.Implementation, layers: int
) -> Scan:
    """A jitted scan in which the outputs of each layer are part of the next one's inputs."""

    def layer(operands: Operands, _: None) -> tuple[Operands, None]:
        latent, shard = implementation(spec, _AXIS, operands)
        rows = lax.dynamic_update_slice(operands.rows, latent, (0, 0))
        shared = lax.dynamic_update_slice(operands.shared, shard, (0, 0))
        return operands._replace(rows=rows, shared=shared), None

    def scan(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        operands, _ = lax.scan(layer, spec.operands(*arrays), length=layers)
        return operands.rows, operands.shared

    return jax.jit(
        jax.shard_map(scan, mesh=mesh, in_specs=_in_specs(spec), out_specs=(P(_AXIS), P(_AXIS)))
    )


def _interleaved(scans: dict[str, Scan], operands: Operands, rounds: int) -> dict[str, float]:
    """Least seconds of each scan over rounds in which they take turns, after a warm-up."""
    best = dict.fromkeys(scans, float("inf"))
    for round_ in range(rounds + 1):
        for name, scan in scans.items():
            start = time.perf_counter()
            jax.block_until_ready(scan(*operands.present()))
            if round_:
                best[name] = min(best[name], time.perf_counter() - start)
    return best

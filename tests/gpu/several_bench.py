"""The tail in jitted scans on several GPUs, beside the same pipeline of XLA and NCCL.

    python several_bench.py --processes P --devices D     P processes with D GPUs each
    python several_bench.py --processes P --share         on one GPU, under MPS: without NCCL
    python several_bench.py --platform cpu ...            CPU devices, to try it

Columns, us per layer: (T(184 layers) - T(92 layers)) / 92, each T the least of several rounds in
which all columns take turns, by the clock of the first process.

  native    latent_tail.fused, publishing by unicast stores
  xla       psum, RMSNorm and psum_scatter of bf16, with the same compiler options
  graph     the same with collectives in XLA's CUDA graphs, too
  scan      one layer an iteration, which XLA captures and launches by itself
  46        46 layers an iteration: what the work takes without the launches of the host

and how many times as long the faster of `xla` and `graph` takes as `native`.
"""

import argparse
import contextlib
import os
import platform
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import several
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import launch
from jax_latent_tail.kernels import processes

LAYERS = 92
MAX_TOKENS = 512
EPS = 1e-6
# What XLA captures by default, and collectives.
WITH_COLLECTIVES = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
# Operations of one layer, by the pattern of their names in a compiled program.
OPERATIONS = {
    "native": [r'custom_call_target="jax_latent_tail_\w+"'],
    "xla": [r"\ball-reduce(?:-start)?\(", r"\breduce-scatter(?:-start)?\("],
}


def native(arguments):
    def tail(rows, shared, gamma):
        return latent_tail.fused(
            rows, shared, gamma, axis_name="tp", eps=EPS, max_tokens=MAX_TOKENS,
            implementation=arguments.platform,
        )  # fmt: skip

    return tail


def xla(rows, shared, gamma):
    x = lax.psum(rows, "tp").astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
    latent = (x * inverse_rms * gamma.astype(jnp.float32)).astype(rows.dtype)
    return latent, lax.psum_scatter(shared, "tp", scatter_dimension=1, tiled=True)


def program(mesh, tail, length, unroll, tie, options):
    """A scan in which each layer's rows are the latent rows of the one before.

    Args:
      tie: what keeps XLA from computing the same shards once for all layers. "barrier" costs
        nothing, where XLA leaves the barriers long enough; "update" puts them into the next layer's
        shared rows, a small kernel.
    """

    def scan(rows, shared, gamma):
        def layers(carry, _):
            rows, shared, _ = carry
            shards = []
            for _ in range(unroll):
                if tie == "barrier":
                    rows, shared = lax.optimization_barrier((rows, shared))
                latent, shard = tail(rows, shared, gamma)
                rows = lax.pcast(latent, "tp", to="varying")
                if tie == "update":
                    shared = lax.dynamic_update_slice(shared, shard, (0, 0))
                shards.append(shard)
            return (rows, shared, tuple(shards)), None

        shards = (shared[:, : shared.shape[1] // mesh.size],) * unroll
        carry, _ = lax.scan(layers, (rows, shared, shards), length=length // unroll)
        return carry[0], carry[2]

    out_specs = (P("tp"), (P(None, "tp"),) * unroll)
    mapped = jax.shard_map(scan, mesh=mesh, in_specs=(P("tp"), P("tp"), P()), out_specs=out_specs)
    return jax.jit(mapped, compiler_options=options)


def missing(name, compiled, unroll):
    """What the loop of a compiled program lacks for its layers, in words; empty if nothing."""
    before, _, rest = compiled.as_text().partition("\nENTRY ")
    entry, _, after = rest.partition("\n}")
    found = []
    for pattern in OPERATIONS["native" if name.startswith("native") else "xla"]:
        inside, outside = (len(re.findall(pattern, text)) for text in (before + after, entry))
        if inside < unroll or outside:
            found.append(
                f"{name}: {pattern!r} {inside} times for {unroll} layers, {outside} outside"
            )
    return "; ".join(found)


def choose_tie(mesh, columns, operands):
    for name, (tail, unroll, options) in columns.items():
        step = program(mesh, tail, LAYERS, unroll, "barrier", options)
        reason = missing(name, step.lower(*operands).compile(), unroll)
        if reason:
            print(f"layers are tied by updates: with barriers {reason}")
            return "update"
    return "barrier"


def random_arguments(mesh, num_tokens, latent, hidden):
    def generate():
        keys = jax.random.split(jax.random.key(0), 2)
        rows = jax.random.normal(keys[0], (mesh.size * num_tokens, latent), jnp.bfloat16)
        shared = jax.random.normal(keys[1], (mesh.size * num_tokens, hidden), jnp.bfloat16)
        return rows, shared, jnp.ones(latent, jnp.bfloat16)

    shardings = [NamedSharding(mesh, spec) for spec in (P("tp"), P("tp"), P())]
    return jax.jit(generate, out_shardings=tuple(shardings))()


def measure(mesh, columns, operands, tie, arguments):
    """us per layer by column; `columns` are (tail, unroll, options)."""
    compiled, results = {}, {}
    for name, (tail, unroll, options) in columns.items():
        for length in (LAYERS, 2 * LAYERS):
            step = program(mesh, tail, length, unroll, tie, options)
            compiled[name, length] = step.lower(*operands).compile()
        reason = missing(name, compiled[name, LAYERS], unroll)
        if reason:
            print(f"not to be trusted: {reason}")
        results[name] = np.asarray(compiled[name, LAYERS](*operands)[0].addressable_data(0))
    first, *others = (result.astype(np.float32) for result in results.values())
    for name, other in zip(list(results)[1:], others, strict=True):
        error = np.linalg.norm(other - first) / np.linalg.norm(first)
        if not error < 0.02:
            print(f"{name}: the result is {error:.3f} off")
    best = dict.fromkeys(compiled, float("inf"))
    for round_ in range(arguments.rounds + 3):
        for key, step in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*operands))
            if round_ >= 3:
                best[key] = min(best[key], time.perf_counter() - start)
    return {n: (best[n, 2 * LAYERS] - best[n, LAYERS]) / LAYERS * 1e6 for n in columns}


def table(arguments):
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(AxisType.Auto,))
    capture = latent_tail.compiler_options()
    graph = {**capture, "xla_gpu_enable_command_buffer": WITH_COLLECTIVES}
    columns = {}
    for form, unroll in (("scan", 1), (str(arguments.unroll), arguments.unroll)):
        columns[f"native {form}"] = (native(arguments), unroll, capture)
        if not arguments.share:
            columns[f"xla {form}"] = (xla, unroll, capture)
            columns[f"graph {form}"] = (xla, unroll, graph)
    forms = [name.removeprefix("native ") for name in columns if name.startswith("native")]
    ratios = [] if arguments.share else [f"ratio {form}" for form in forms]
    heads = ["N", "M", *columns, *ratios]
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind} on {platform.machine()}, "
        f"{jax.process_count()} x {jax.local_device_count()}; us per layer"
    )
    for num_tokens in arguments.tokens:
        operands = random_arguments(mesh, num_tokens, *arguments.sizes)
        if num_tokens == arguments.tokens[0]:
            tie = choose_tie(mesh, columns, operands)
        times = measure(mesh, columns, operands, tie, arguments)
        if num_tokens == arguments.tokens[0]:
            check_choices(arguments)
            print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        cells = [f"{value:.2f}" for value in times.values()]
        for form in forms[: len(ratios)]:
            fastest = min(times[f"xla {form}"], times[f"graph {form}"])
            cells.append(f"{fastest / times[f'native {form}']:.2f}")
        print(f"| {mesh.size} | {num_tokens} | {' | '.join(cells)} |", flush=True)


def check_choices(arguments):
    for line in latent_tail.explain().splitlines():
        print(line)
        assert line.startswith(f"{arguments.platform} for fused"), line
        if arguments.platform == "cuda":
            assert ", unicast, " in line, line
            assert os.environ.get("NCCL_NVLS_ENABLE") == "0"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    )
    parser.add_argument("--sizes", type=int, nargs=2, default=(3584, 7168), metavar=("L", "H"))
    parser.add_argument("--unroll", type=int, default=46)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--timeout", type=float, default=560, help="seconds")
    arguments = parser.parse_args()
    if launch.is_member():
        launch.initialize(share_gpus=arguments.share)
        table(arguments)
        return
    env = several.CUDA if arguments.platform == "cuda" else {"JAX_PLATFORMS": "cpu"}
    with processes.mps() if arguments.share else contextlib.nullcontext({}) as daemon:
        launch.run(
            sys.argv,
            arguments.processes,
            devices_per_process=arguments.devices,
            timeout_s=arguments.timeout,
            env={**env, **{name: value for name, value in daemon.items() if value is not None}},
            stream_first=True,
        )


if __name__ == "__main__":
    main()

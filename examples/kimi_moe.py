"""Greedy decoding through a stack of Kimi-K3 MoE blocks, checked against a dense model.

    python examples/kimi_moe.py                        # one process, four CPU devices
    python examples/kimi_moe.py --processes 4          # four processes, one device each
    python examples/kimi_moe.py --preset k3            # K3's widths, one layer
    python examples/kimi_moe.py --platform cuda        # one process, all its GPUs

Every block is x + MoE(RMSNorm(x)); attention, which K3 has between them, is left out. Per rank:

    tokens -> router -> latent down-projection -> own experts -> rows [P, L], not yet summed ---+
         \\-> own part of the shared experts -> partial rows [M, H] ------------------------+   |
                                                                                            v   v
                              x + MoE(RMSNorm(x)), on every rank <- latent_tail.moe_tail(x, up)

The routed experts are split by expert (each rank computes whole experts) or by width (each
computes a slice of all); the partial sums that reach `latent_tail.moe_tail` look the same.

The dense model computes each block in float32 on one device, from the input that the block had
here. The program prints the error of every layer and the time for each implementation of the
tail, and exits with status 1 if an error is above the tolerance.
"""

import argparse
import dataclasses
import functools
import sys
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jax_latent_tail as latent_tail
from jax_latent_tail import launch

Params = dict[str, jax.Array]

# Of the tail, to compare.
IMPLEMENTATIONS = (None, "xla")


@dataclasses.dataclass(frozen=True)
class Config:
    hidden: int  # H
    latent: int  # L
    experts: int
    top_k: int
    expert_width: int
    shared_width: int  # of all shared experts together
    layers: int
    vocabulary: int
    eps: float = 1e-5
    routed_scaling: float = 1.0
    beta: float = 4.0
    linear_beta: float = 25.0


# Kimi K3 has 896 experts, 92 MoE layers and a larger vocabulary.
PRESETS = {
    "tiny": Config(256, 128, 16, 4, 96, 192, layers=4, vocabulary=512),
    "k3": Config(7168, 3584, 32, 16, 3072, 6144, layers=1, vocabulary=512),
}


# Parameters.


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    c = config
    return {
        "norm": (c.hidden,),
        "router": (c.hidden, c.experts),
        "bias": (c.experts,),
        "down": (c.hidden, c.latent),
        "expert_gate": (c.experts, c.latent, c.expert_width),
        "expert_up": (c.experts, c.latent, c.expert_width),
        "expert_down": (c.experts, c.expert_width, c.latent),
        "latent_norm": (c.latent,),
        "up": (c.latent, c.hidden),
        "shared_gate": (c.hidden, c.shared_width),
        "shared_up": (c.hidden, c.shared_width),
        "shared_down": (c.shared_width, c.hidden),
    }


def random_parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter of all layers, the same in every process, as NumPy: it may be large."""
    values: np.ndarray = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32)
    values -= 0.5
    values *= np.sqrt(np.float32(12))
    if name == "bias":  # balances the load in training; here it has to move some choices
        return values / 32
    if name.endswith("norm"):
        values = 1 + values / 8
    elif name != "embedding":
        values *= shape[-2] ** -0.5
    return values.astype(jnp.bfloat16)


def layer_specs(experts_by: str) -> dict[str, P]:
    """How one layer's parameters are split over the axis tp."""
    by_expert = experts_by == "expert"
    return {
        "router": P(),
        "bias": P(),
        "norm": P(),
        "down": P(),
        "expert_gate": P("tp") if by_expert else P(None, None, "tp"),
        "expert_up": P("tp") if by_expert else P(None, None, "tp"),
        "expert_down": P("tp") if by_expert else P(None, "tp"),
        "shared_gate": P(None, "tp"),
        "shared_up": P(None, "tp"),
        "shared_down": P("tp"),
        "latent_norm": P(),
        "up": P(None, "tp"),
    }


def stacked_specs(experts_by: str) -> dict[str, P]:
    """The same for the parameters of all layers, stacked."""
    return {name: P(None, *spec) for name, spec in layer_specs(experts_by).items()}


# One block on one rank, and the stack of them.


def rms_norm(config: Config, x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    normed = x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + config.eps)
    return (normed * scale.astype(jnp.float32)).astype(jnp.bfloat16)


def route(config: Config, h: jax.Array, p: Params) -> tuple[jax.Array, jax.Array]:
    """Weights [M, K] fp32 and experts [M, K]: the bias takes part in the choice only."""
    logits = jnp.dot(
        h.astype(jnp.float32), p["router"].astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    _, chosen = lax.top_k(scores + p["bias"], config.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling, chosen


def situ_glu(config: Config, gate: jax.Array, up: jax.Array) -> jax.Array:
    beta, linear_beta = config.beta, config.linear_beta
    gated = beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate)
    return gated * linear_beta * jnp.tanh(up / linear_beta)


def own_experts(
    config: Config, rows: jax.Array, weights: jax.Array, chosen: jax.Array, p: Params
) -> latent_tail.Unfinalized:
    """This rank's part of the routed experts on latent rows [M, L], one row per assignment.

    Assignments are sorted by expert; those of other ranks' experts come last, where ragged_dot
    computes nothing, and get index -1.
    """
    num_own = p["expert_gate"].shape[0]
    first_own = lax.axis_index("tp") * num_own if num_own < config.experts else 0
    own = chosen.reshape(-1) - first_own
    is_own = (own >= 0) & (own < num_own)
    own = jnp.where(is_own, own, num_own)
    order = jnp.argsort(own, stable=True)
    position = jnp.argsort(order)
    group_sizes = jnp.bincount(own, length=num_own)

    ragged_dot = functools.partial(
        lax.ragged_dot, group_sizes=group_sizes, preferred_element_type=jnp.float32
    )
    sorted_rows = rows[order // config.top_k]
    hidden = situ_glu(
        config,
        ragged_dot(sorted_rows, p["expert_gate"]),
        ragged_dot(sorted_rows, p["expert_up"]),
    ).astype(jnp.bfloat16)
    return latent_tail.Unfinalized(
        permuted=ragged_dot(hidden, p["expert_down"]).astype(jnp.bfloat16),
        weights=weights.astype(jnp.bfloat16),
        indices=jnp.where(is_own, position, -1).astype(jnp.int32).reshape(chosen.shape),
    )


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def block(config: Config, implementation: str | None, x: jax.Array, p: Params) -> jax.Array:
    """x [M, H] + MoE(RMSNorm(x)), the same on every rank; runs in shard_map."""
    h = rms_norm(config, x, p["norm"])
    weights, chosen = route(config, h, p)
    routed = own_experts(config, dot(h, p["down"]).astype(jnp.bfloat16), weights, chosen, p)
    hidden = situ_glu(config, dot(h, p["shared_gate"]), dot(h, p["shared_up"]))
    shared = dot(hidden.astype(jnp.bfloat16), p["shared_down"]).astype(jnp.bfloat16)
    return latent_tail.moe_tail(
        routed,
        shared,
        p["latent_norm"],
        p["up"],
        residual=x,
        axis_name="tp",
        eps=config.eps,
        implementation=implementation,
    )


def decode_step(
    config: Config,
    mesh: Mesh,
    experts_by: str,
    implementation: str | None,
    params: tuple[Params, Params],
    tokens: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Next tokens [M] after tokens [M], and the input and output [layers, M, H] of each block."""

    def stack(x: jax.Array, layers: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def layer(x: jax.Array, p: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            y = block(config, implementation, x, p)
            return y, (x, y)

        return lax.scan(layer, x, layers)

    model, layers = params
    stack = jax.shard_map(
        stack, mesh=mesh, in_specs=(P(), stacked_specs(experts_by)), out_specs=P()
    )
    x, blocks = stack(model["embedding"][tokens], layers)
    normed = rms_norm(config, x, jnp.ones(config.hidden))
    return dot(normed, model["embedding"].T).argmax(axis=-1), blocks


# The dense model.


@functools.partial(jax.jit, static_argnums=0)
def dense_block(config: Config, x: jax.Array, p: Params) -> jax.Array:
    """x + MoE(RMSNorm(x)) in float32 with every expert computed for every token."""

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w.astype(jnp.float32), precision=lax.Precision.HIGHEST)

    def mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return dot(situ_glu(config, dot(x, gate), dot(x, up)), down)

    def add_expert(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        weight, *matrices = expert
        return total + weight[:, None] * mlp(rows, *matrices), None

    h = rms_norm(config, x, p["norm"])
    weights, chosen = route(config, h, p)
    tokens = jnp.arange(len(x))[:, None]
    weight_of_expert = jnp.zeros((len(x), config.experts)).at[tokens, chosen].set(weights).T
    rows = dot(h, p["down"])
    experts = (weight_of_expert, p["expert_gate"], p["expert_up"], p["expert_down"])
    latent, _ = lax.scan(add_expert, jnp.zeros_like(rows), experts)
    mean_square = (latent * latent).mean(axis=-1, keepdims=True)
    latent = latent / jnp.sqrt(mean_square + config.eps) * p["latent_norm"].astype(jnp.float32)
    shared = mlp(h.astype(jnp.float32), p["shared_gate"], p["shared_up"], p["shared_down"])
    return x.astype(jnp.float32) + dot(latent, p["up"]) + shared


def largest_error(
    config: Config, layer: int, parameters: dict[str, np.ndarray], history: list[Any]
) -> float:
    """The largest |block - dense| / |dense| (Frobenius) of one layer over the steps."""
    p = {name: jnp.asarray(parameter[layer]) for name, parameter in parameters.items()}
    errors = []
    for inputs, outputs in history:
        dense = np.asarray(dense_block(config, np.asarray(inputs)[layer], p))
        difference = np.asarray(outputs)[layer].astype(np.float32) - dense
        errors.append(np.linalg.norm(difference) / np.linalg.norm(dense))
    return float(np.max(errors))  # NaN, if any is


# The program.


def parse_arguments() -> argparse.Namespace:
    summary, _, details = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--experts", type=int, help="instead of the preset's")
    parser.add_argument("--experts-by", choices=("expert", "width"), default="expert")
    parser.add_argument("--tokens", type=int, default=8, help="sequences decoded at once (M)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest relative error")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--devices", type=int, help="of each process; default 4 CPUs, or 1 of several processes"
    )
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="all processes take the same GPUs, under CUDA MPS: a test, without XLA's collectives,"
        " which refuse that",
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds, with --processes")
    arguments = parser.parse_args()
    for name in ("layers", "experts", "tokens", "steps", "processes", "devices"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; allowed: at least 1")
    if arguments.share_gpus and arguments.platform != "cuda":
        parser.error("--share-gpus needs --platform cuda")
    if arguments.devices is None:
        arguments.devices = default_devices(arguments)
    overrides = {k: getattr(arguments, k) for k in ("layers", "experts") if getattr(arguments, k)}
    arguments.config = config = dataclasses.replace(PRESETS[arguments.preset], **overrides)
    tp = arguments.processes * arguments.devices
    if config.top_k > config.experts:
        parser.error(f"--experts is {config.experts}; allowed: at least the {config.top_k} chosen")
    split = {"hidden": config.hidden, "shared_width": config.shared_width}
    if arguments.experts_by == "expert":
        split["experts"] = config.experts
    else:
        split["expert_width"] = config.expert_width
    for name, size in split.items():
        if size % tp:
            parser.error(f"{tp} ranks do not divide {name} = {size}; allowed: a divisor")
    return arguments


def default_devices(arguments: argparse.Namespace) -> int:
    if arguments.processes > 1 or arguments.share_gpus:
        return 1
    if arguments.platform == "cpu":
        return 4
    jax.config.update("jax_platforms", "cuda,cpu")
    return jax.device_count()


def main() -> None:
    arguments = parse_arguments()
    if arguments.processes > 1 and not launch.is_member():
        try:
            launch.run(
                sys.argv,
                arguments.processes,
                devices_per_process=arguments.devices,
                timeout_s=arguments.timeout,
                env=environment(arguments),
                stream_first=True,
            )
        except launch.ProcessError as error:
            sys.exit(f"failed: {error}")
        return
    if arguments.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    launch.initialize(share_gpus=arguments.share_gpus)
    sys.exit(run(arguments))


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Of the processes that are started."""
    variables = {"JAX_PLATFORMS": {"cpu": "cpu", "cuda": "cuda,cpu"}[arguments.platform]}
    if arguments.share_gpus:
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return variables


def run(arguments: argparse.Namespace) -> int:
    """Decodes with each implementation; returns the exit status."""
    config: Config = arguments.config
    tp = arguments.processes * arguments.devices
    mesh = jax.make_mesh((tp,), ("tp",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, P())
    leader = jax.process_index() == 0
    if leader:
        platform = jax.devices()[0].platform
        print(
            f"{config}\n{arguments.processes} processes x {arguments.devices} {platform} devices,"
            f" experts by {arguments.experts_by}"
        )

    def place(array: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    layers, kept = {}, {}  # kept for the dense model
    specs = stacked_specs(arguments.experts_by)
    shapes = layer_shapes(config)
    for name in tqdm(shapes, "parameters", disable=not leader):
        parameter = random_parameter(name, (config.layers, *shapes[name]))
        layers[name] = place(parameter, specs[name])
        if leader:
            kept[name] = parameter
    embedding = random_parameter("embedding", (config.vocabulary, config.hidden))
    params = ({"embedding": place(embedding, P())}, layers)
    prompt = place(np.arange(arguments.tokens) % config.vocabulary, P())

    histories: dict[str, list[Any]] = {}
    ms_per_layer = {}
    implementations = ("cuda",) if arguments.share_gpus else IMPLEMENTATIONS
    for implementation in implementations:
        title = f"implementation={implementation}"
        step = jax.jit(
            functools.partial(decode_step, config, mesh, arguments.experts_by, implementation),
            out_shardings=replicated,
        )
        compiled = step.lower(params, prompt).compile()
        tokens, seconds = prompt, []
        histories[title] = []
        for _ in tqdm(range(arguments.steps), title, disable=not leader):
            start = time.perf_counter()
            tokens, blocks = jax.block_until_ready(compiled(params, tokens))
            seconds.append(time.perf_counter() - start)
            histories[title].append(blocks)
        ms_per_layer[title] = min(seconds) / config.layers * 1e3
    if not leader:
        return 0

    worst = 0.0
    print("layer  largest error over the steps: " + ", ".join(histories))
    for layer in range(config.layers):
        errors = [largest_error(config, layer, kept, history) for history in histories.values()]
        print(f"{layer:5d}  " + "  ".join(f"{error:.2e}" for error in errors))
        worst = float(np.max([worst, *errors]))
    print("ms per layer, best step: " + ", ".join(f"{ms:.2f}" for ms in ms_per_layer.values()))
    print(latent_tail.explain())
    passed = worst <= arguments.tolerance
    verdict = "PASSED" if passed else "FAILED"
    print(f"{verdict}: largest error {worst:.2e}, tolerance {arguments.tolerance:g}")
    return 0 if passed else 1


if __name__ == "__main__":
    main()

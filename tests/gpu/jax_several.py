"""Ranks on devices of their own, however they are spread over processes: programs of JAX.

    python jax_several.py [options] [SCENARIO...]

Started by `jax_latent_tail.launch.run` as any number of processes with any number of devices each,
or alone, with all devices. Without names all scenarios run, with --share those of ALONE: all
processes take one GPU then, and NCCL refuses that. --platform cpu runs the same on CPU devices.

Prints `digest WHAT SHA256` for everything whose bits must not depend on how the ranks are spread,
and `agreed SHA256` for what only the processes of one run have alike. `several.py` starts this and
compares.
"""

import argparse
import functools
import hashlib
import os
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from harness import normal, random_inputs, spread
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import launch

PLATFORMS = {"cuda": "cuda,cpu", "cpu": "cpu"}
SIZES = {"cuda": (3584, 7168), "cpu": (160, 640)}  # L, H

# An array of each rank, of each group, and the same with layers in front.
RANKS, GROUPS = P(("dp", "tp")), P("dp")
COLUMNS = P("dp", "tp")
LAYERS = 92


class World:
    """The ranks, and where they are.

    Attributes:
      platform: "cuda" or "cpu".
      mesh: [dp, tp].
      latent, hidden: L and H.
      digests: SHA-256 by what it is of.
    """

    def __init__(self, platform, groups, shuffled):
        self.platform = platform
        self.latent, self.hidden = SIZES[platform]
        devices = np.array(jax.devices())
        self.dp, self.tp = groups, devices.size // groups
        grid = devices.reshape(self.dp, self.tp)
        if shuffled:  # neighbours are of different groups, and the first device is a last rank
            grid = devices.reshape(self.tp, self.dp).T[:, ::-1]
        self.mesh = Mesh(grid, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
        self.places = {device: place for place, device in np.ndenumerate(grid)}
        self.digests: dict[str, str] = {}

    # Arrays. Those of a group are the same however many groups there are.

    def inputs(self, num_tokens, seed=0, draw=spread, **options):
        """What the ranks of each group hold."""
        return [
            random_inputs(
                [seed, num_tokens, self.tp, group],
                self.tp, num_tokens, self.latent, self.hidden, draw=draw, **options,
            )
            for group in range(self.dp)
        ]  # fmt: skip

    def put(self, array, spec):
        """A global array of which this process holds its parts."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def of_ranks(self, per_group):
        """[tp, M, ...] of each group, as the array whose views are [M, ...]."""
        merged = [array.reshape(-1, *array.shape[2:]) for array in per_group]
        return self.put(np.concatenate(merged), RANKS)

    def of_groups(self, per_group):
        """[M, ...] of each group, as the array whose views are [M, ...]."""
        return self.put(np.concatenate(per_group), GROUPS)

    def operands(self, inputs):
        """(routed, shared, gamma)"""
        routed = self.of_ranks([of_group.rows for of_group in inputs])
        if inputs[0].indices is not None:
            weights = self.of_ranks([of_group.weights for of_group in inputs])
            indices = self.of_ranks([of_group.indices for of_group in inputs])
            routed = latent_tail.Unfinalized(routed, weights, indices)
        shared = self.of_ranks([of_group.shared for of_group in inputs])
        return routed, shared, self.of_groups([of_group.gamma for of_group in inputs])

    def parts(self, array):
        """(group, rank, its view) of each device of this process."""
        return [
            (*self.places[part.device], np.asarray(part.data)) for part in array.addressable_shards
        ]

    def program(
        self, function, in_specs=(RANKS, RANKS, GROUPS), out_specs=(GROUPS, COLUMNS), **options
    ):
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, **options)

    # The calls, native or not at all.

    def fused(self, routed, shared, gamma, **options):
        options.setdefault("implementation", self.platform)
        return latent_tail.fused(routed, shared, gamma, axis_name="tp", **options)

    def all_gather_add(self, x, *residual):
        return latent_tail.all_gather_add(
            x, *residual, axis_name="tp", implementation=self.platform
        )

    def moe_tail(self, *arrays, **options):
        options.setdefault("implementation", self.platform)
        return latent_tail.moe_tail(*arrays, axis_name="tp", **options)

    # Results.

    def digest(self, what, group, data):
        """Notes the bits of something that a group has, on each rank that has it."""
        key = f"tp{self.tp},group{group},{what}"
        found = hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()
        assert self.digests.setdefault(key, found) == found, f"the bits of {key} differ"

    def check(self, what, latent, shard, inputs, fp32_internal=False):
        """Compares with the contract, and notes the bits."""
        for group, rank, data in self.parts(shard):
            wrong = oracle.ulps(data, oracle.shards(inputs[group].shared)[rank]) != 0
            assert not wrong.any(), f"{what}: {wrong.sum()} elements of rank {rank}'s shard"
            self.digest(f"{what},shard{rank}", group, data)
        wanted = {}
        for group, rank, data in self.parts(latent):
            if group not in wanted:
                gamma = inputs[group].gamma
                wanted[group] = oracle.latent(
                    contributions(inputs[group]), gamma, fp32_internal=fp32_internal
                )
            worst = oracle.ulps(data, wanted[group]).max()
            assert worst <= 1, f"{what}: rank {rank}'s latent is {worst} ulps off"
            self.digest(f"{what},latent", group, data)


def contributions(inputs):
    """[tp, M, L]"""
    if inputs.indices is None:
        return inputs.rows
    of_ranks = zip(inputs.rows, inputs.weights, inputs.indices, strict=True)
    return np.stack([oracle.contribution(*of_rank) for of_rank in of_ranks])


def varying(x):
    """What all ranks have alike, as what each has of its own."""
    return lax.pcast(x, "tp", to="varying")


# ---- scenarios without a collective of XLA


def values(world):
    for fp32_internal in (False, True):
        step = world.program(functools.partial(world.fused, fp32_internal=fp32_internal))
        for num_tokens in (1, 2, 8, 31, 32, 128):
            inputs = world.inputs(num_tokens)
            what = f"M{num_tokens}" + ",fp32" * fp32_internal
            world.check(what, *step(*world.operands(inputs)), inputs, fp32_internal)


def many_tokens(world):
    """As many as the benchmark has."""
    step = world.program(functools.partial(world.fused, max_tokens=512))
    for num_tokens in (129, 512):
        inputs = world.inputs(num_tokens, draw=normal)
        world.check(f"M{num_tokens}", *step(*world.operands(inputs)), inputs)


def finalize(world):
    step = world.program(world.fused)
    for top_k in (8, 16):
        for num_tokens in (1, 5, 32):
            inputs = world.inputs(num_tokens, top_k=top_k)
            world.check(f"M{num_tokens},K{top_k}", *step(*world.operands(inputs)), inputs)


def gather(world):
    """all_gather_add with and without a residual: exact, save for the sign of zeros."""
    bare = world.program(world.all_gather_add, (RANKS,), GROUPS)
    with_residual = world.program(world.all_gather_add, (RANKS, GROUPS), GROUPS)
    for num_tokens in (1, 3, 8, 32, 128):
        groups = []
        for group in range(world.dp):
            rng = np.random.default_rng([num_tokens, world.tp, group])
            x = spread(rng, world.tp, num_tokens, world.hidden // world.tp)
            groups.append((x, spread(rng, num_tokens, world.hidden)))
        x = world.of_ranks([x for x, _ in groups])
        residual = world.of_groups([residual for _, residual in groups])
        for step, arguments in ((bare, (x,)), (with_residual, (x, residual))):
            for group, _, data in world.parts(step(*arguments)):
                want = groups[group][0].swapaxes(0, 1).reshape(num_tokens, world.hidden)
                if len(arguments) == 2:
                    added = want.astype(np.float32) + groups[group][1].astype(np.float32)
                    want = added.astype(want.dtype)
                assert (data == want).all(), f"M={num_tokens}, {len(arguments)} arguments"
                world.digest(f"M{num_tokens},gather{len(arguments)}", group, data)


def scan_of_layers(world):
    """92 layers with inputs of their own, each captured by itself and several at a time."""
    per_layer = [world.inputs(4, seed=layer, draw=normal) for layer in range(LAYERS)]
    gammas = [of_group.gamma for of_group in per_layer[0]]

    def stacked(name):  # [layers, dp * tp * M, columns]
        layers = [np.concatenate([getattr(g, name) for g in groups]) for groups in per_layer]
        array = np.stack(layers)
        return world.put(array.reshape(LAYERS, -1, array.shape[-1]), P(None, ("dp", "tp")))

    def scan(rows, shared, gamma, unroll):
        def layer(_, xs):
            return None, world.fused(*xs, gamma)

        return lax.scan(layer, None, (rows, shared), unroll=unroll)[1]

    arguments = stacked("rows"), stacked("shared"), world.of_groups(gammas)
    specs = (P(None, ("dp", "tp")),) * 2 + (GROUPS,), (P(None, "dp"), P(None, "dp", "tp"))
    for unroll, options in ((1, latent_tail.compiler_options()), (1, None), (23, None)):
        step = world.program(
            functools.partial(scan, unroll=unroll), *specs, compiler_options=options
        )
        for _ in range(3):  # the first may run before anything is captured
            latent, shard = step(*arguments)
        shards = {(group, rank): data for group, rank, data in world.parts(shard)}
        for group, rank, data in world.parts(latent):
            for layer, groups in enumerate(per_layer):
                want = oracle.latent(groups[group].rows, gammas[group])
                assert oracle.ulps(data[layer], want).max() <= 1, f"latent of layer {layer}"
                want = oracle.shards(groups[group].shared)[rank]
                got = shards[group, rank][layer]
                assert (oracle.ulps(got, want) == 0).all(), f"shard of layer {layer}"
            world.digest("scan,latent", group, data)
            world.digest(f"scan,shard{rank}", group, shards[group, rank])


def whole_tail(world):
    """moe_tail in 92 layers, each on the one before: no collective of XLA.

    Without a digest: for two ranks the up-projection is a GEMM of XLA's choice.
    """
    num_tokens = 4
    inputs = world.inputs(num_tokens, seed=11, draw=normal, top_k=8)
    residuals, stripes = [], []
    for group in range(world.dp):
        rng = np.random.default_rng([12, world.tp, group])
        residuals.append(normal(rng, num_tokens, world.hidden))
        w_up = normal(rng, world.tp, world.latent, world.hidden // world.tp) / 64
        stripes.append(w_up.astype(residuals[0].dtype))

    def stack(routed, shared, gamma, w_up, residual):
        def layer(x, _):
            y = world.moe_tail(routed, shared, gamma, w_up, x)
            return y, y

        return lax.scan(layer, residual, length=LAYERS)[1]

    step = world.program(
        stack,
        (RANKS, RANKS, GROUPS, RANKS, GROUPS),
        P(None, "dp"),
        compiler_options=latent_tail.compiler_options(),
    )
    arguments = *world.operands(inputs), world.of_ranks(stripes), world.of_groups(residuals)
    compiled = step.lower(*arguments).compile()
    text = compiled.as_text()
    assert not any(name in text for name in ("all-reduce", "all-gather", "collective-permute"))
    checked = {}
    for group, rank, data in world.parts(compiled(*arguments)):
        # All ranks took the same columns of each rank's GEMM.
        assert checked.setdefault(group, data.tobytes()) == data.tobytes(), f"rank {rank} differs"
        x, of_group = residuals[group], inputs[group]
        latent = oracle.latent(contributions(of_group), of_group.gamma)
        shards = oracle.shards(of_group.shared).astype(np.float64)
        up = [latent @ w_up.astype(np.float64) for w_up in stripes[group]]
        added = np.concatenate([up[r] + shards[r] for r in range(world.tp)], axis=1)
        for y in data:
            want = x.astype(np.float64) + added
            error = np.linalg.norm(y.astype(np.float64) - want) / np.linalg.norm(want)
            assert error < 4e-3, error  # roundings to bf16
            x = y


def captured(world):
    """Replays of a captured graph with new inputs; the dump shows the capture."""
    sets = [world.inputs(8, seed=seed) for seed in range(4)]
    arrays = [world.operands(inputs) for inputs in sets]
    with tempfile.TemporaryDirectory() as folder:
        options = {**latent_tail.compiler_options(), "xla_dump_to": folder}
        step = world.program(world.fused, compiler_options=options)
        for turn in range(40):
            results = step(*arrays[turn % len(sets)])
            world.check(f"M8,seed{turn % len(sets)}", *results, sets[turn % len(sets)])
        texts = [path.read_text(errors="replace") for path in pathlib.Path(folder).iterdir()]
    if world.platform == "cuda":
        assert any("kCommandBuffer" in text for text in texts)


# ---- scenarios beside XLA's own collectives


def before_and_after(world):
    """A psum whose result our call needs, and collectives that need our results.

    Sums of small whole numbers, and of equal terms, are exact in any order.
    """

    def step(rows, shared, gamma, part):
        scale = lax.psum(part, "tp").astype(rows.dtype)
        latent, shard = world.fused(rows * scale, shared * scale, gamma)
        total = lax.psum(varying(latent).astype(jnp.float32), "tp")
        columns = lax.psum(part, "tp") * lax.all_gather(shard, "tp", axis=1, tiled=True)
        turned = lax.ppermute(shard, "tp", [(r, (r + 1) % world.tp) for r in range(world.tp)])
        return latent, shard, total, columns, turned

    out_specs = (GROUPS, COLUMNS, GROUPS, RANKS, COLUMNS)
    for options in (None, latent_tail.compiler_options()):
        program = world.program(
            step, (RANKS, RANKS, GROUPS, RANKS), out_specs, compiler_options=options
        )
        for num_tokens in (1, 8, 128):
            inputs = world.inputs(num_tokens, seed=21)
            parts = []
            for group, of_group in enumerate(inputs):
                rng = np.random.default_rng([22, group])
                part = rng.integers(-8, 9, (world.tp, num_tokens, 1))
                scale = rng.choice([1, 2, 4], (num_tokens, 1))
                part[-1] += scale - part.sum(axis=0)
                parts.append((part.astype(np.float32), scale))
                of_group.scale = scale
            arguments = *world.operands(inputs), world.of_ranks([part for part, _ in parts])
            for of_group in inputs:
                scale = of_group.scale.astype(of_group.rows.dtype)
                of_group.rows, of_group.shared = of_group.rows * scale, of_group.shared * scale
            for _ in range(5):
                latent, shard, *others = program(*arguments)
                world.check(f"M{num_tokens},before_and_after", latent, shard, inputs)
                latents = {group: data for group, _, data in world.parts(latent)}
                total, columns, turned = ({p[:2]: p[2] for p in world.parts(x)} for x in others)
                for (group, rank), data in total.items():
                    want = world.tp * latents[group].astype(np.float32)
                    assert (data == want).all(), "psum of the latents"
                    shards = oracle.shards(inputs[group].shared)
                    whole = shards.swapaxes(0, 1).reshape(num_tokens, -1).astype(np.float32)
                    got = columns[group, rank]
                    assert (got == whole * parts[group][1]).all(), "all_gather of the shards"
                    want = shards[rank - 1]
                    assert (turned[group, rank] == want).all(), "ppermute of the shards"


def overlapping(world):
    """Collectives of XLA that neither need our calls nor are needed by them, in every layer.

    XLA may run them on another stream: waiting kernels of theirs and of ours must find room
    together on every GPU. They are larger than ours, so that they last longer.
    """
    length = 16
    shape = (512, 4096) if world.platform == "cuda" else (8, 128)
    ring = [(rank, (rank + 1) % world.tp) for rank in range(world.tp)]

    def scan(rows, shared, gamma, other):
        def layer(carry, _):
            rows, other, sums = carry
            latent, shard = world.fused(rows, shared, gamma)
            other = lax.ppermute(other, "tp", ring)
            sums = sums + lax.psum_scatter(other, "tp", tiled=True)
            return (varying(latent), other, sums), (latent, shard)

        zeros = jnp.zeros((shape[0] // world.tp, shape[1]), jnp.float32)
        zeros = lax.pcast(zeros, ("dp", "tp"), to="varying")
        (_, other, sums), ys = lax.scan(layer, (rows, other, zeros), length=length)
        return *ys, other, sums

    capture = latent_tail.compiler_options()
    overlap = {**capture, "xla_gpu_enable_latency_hiding_scheduler": True}
    for num_tokens, options in ((8, None), (8, capture), (8, overlap), (128, overlap)):
        inputs = world.inputs(num_tokens, seed=31, draw=normal)
        for of_group in inputs:  # near 1: its powers are neither huge nor tiny
            gamma = 1 + of_group.gamma.astype(np.float32) / 16
            of_group.gamma = gamma.astype(of_group.rows.dtype)
        others = [
            np.random.default_rng([32, group])
            .integers(-8, 9, (world.tp, *shape))
            .astype(np.float32)
            for group in range(world.dp)
        ]
        step = world.program(
            scan,
            (RANKS, RANKS, GROUPS, RANKS),
            (P(None, "dp"), P(None, "dp", "tp"), RANKS, RANKS),
            compiler_options=options,
        )
        arguments = *world.operands(inputs), world.of_ranks(others)
        for _ in range(10):
            results = step(*arguments)
        latent, shard, other, sums = map(world.parts, results)
        what = f"M{num_tokens},overlapping"
        for group, _, data in latent:
            rows = inputs[group].rows
            for layer, got in enumerate(data):
                want = oracle.latent(rows, inputs[group].gamma)
                assert oracle.ulps(got, want).max() <= 1, f"latent of layer {layer}"
                rows = np.broadcast_to(got, rows.shape)
            world.digest(f"{what},latent", group, data)
        for group, rank, data in shard:
            want = oracle.shards(inputs[group].shared)[rank]
            assert all((oracle.ulps(got, want) == 0).all() for got in data), "shard"
        for group, rank, data in other:
            assert (data == others[group][(rank - length) % world.tp]).all(), "ppermute"
        for group, rank, data in sums:
            want = length * np.split(others[group].sum(axis=0), world.tp)[rank]
            assert (data == want).all(), "psum_scatter"


def gradients(world):
    """Of moe_tail, with all its calls, against those of plain collectives."""
    inputs = world.inputs(8, seed=41, draw=normal, top_k=8)
    for of_group in inputs:
        of_group.rows = np.nan_to_num(of_group.rows)
    residuals, stripes = [], []
    for group in range(world.dp):
        rng = np.random.default_rng([42, world.tp, group])
        residuals.append(normal(rng, 8, world.hidden))
        w_up = normal(rng, world.tp, world.latent, world.hidden // world.tp) / 16
        stripes.append(w_up.astype(residuals[0].dtype))
    routed, *others = world.operands(inputs)
    arguments = *routed, *others, world.of_ranks(stripes), world.of_groups(residuals)
    specs = (RANKS, RANKS, RANKS, RANKS, GROUPS, RANKS, GROUPS)
    wanted = (0, 1, 3, 4, 5, 6)  # all but the indices

    def gradient(implementation):
        def of_views(rows, weights, indices, *arrays):
            routed = latent_tail.Unfinalized(rows, weights, indices)
            y = world.moe_tail(routed, *arrays, implementation=implementation)
            return lax.psum(jnp.sin(y.astype(jnp.float32)).sum(), "dp")

        loss = jax.shard_map(of_views, mesh=world.mesh, in_specs=specs, out_specs=P())
        shardings = tuple(NamedSharding(world.mesh, specs[index]) for index in wanted)
        return jax.jit(jax.grad(loss, argnums=wanted), out_shardings=shardings)

    native = gradient(world.platform)
    text = native.lower(*arguments).compile().as_text()
    assert "jax_latent_tail_" in text
    results = native(*arguments), gradient("xla")(*arguments)
    for index, got, want in zip(wanted, *results, strict=True):
        for (group, rank, a), (*_, b) in zip(world.parts(got), world.parts(want), strict=True):
            a, b = a.astype(np.float64), b.astype(np.float64)
            error = np.linalg.norm(a - b) / np.linalg.norm(b)
            assert error < 1e-2, f"gradient {index} of rank {rank} of group {group}: {error}"


ALONE = (values, many_tokens, finalize, gather, scan_of_layers, whole_tail, captured)
BESIDE_XLA = (before_and_after, overlapping, gradients)


def check_choices(world):
    """All calls were native; on GPUs they publish by ordinary stores, and NCCL must do as much."""
    but = ("was asked for", "on GPUs only")
    explained = latent_tail.explain().splitlines()
    lines = [line for line in explained if not any(reason in line for reason in but)]
    assert lines
    print(*sorted({line.split(" tokens: ")[-1] for line in lines}), sep="\n")
    for line in lines:
        assert line.startswith(f"{world.platform} for "), line
        if world.platform == "cuda":
            assert ", unicast, " in line, line
            assert os.environ.get("NCCL_NVLS_ENABLE") == "0"


def hide_the_others():
    """Leaves this process nothing to see but its own GPUs, as a scheduler may."""
    process, count = (int(os.environ[name]) for name in (launch._PROCESS_ID, launch._DEVICES))
    everyone = range(count * int(os.environ[launch._NUM_PROCESSES]))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, everyone))
    own = visible.split(",")[process * count : (process + 1) * count]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--platform", choices=PLATFORMS, default="cuda")
    parser.add_argument("--share", action="store_true", help="all processes take the first GPU")
    parser.add_argument("--groups", type=int, default=1, help="dp")
    parser.add_argument(
        "--shuffled", action="store_true", help="ranks in another order than devices"
    )
    parser.add_argument(
        "--isolated", action="store_true", help="each process sees its own GPUs only"
    )
    parser.add_argument(
        "--of-jax-ranks", action="store_true", help="NAMES are scenarios of jax_ranks.py"
    )
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", PLATFORMS[arguments.platform])
    if arguments.isolated:
        hide_the_others()
    launch.initialize(share_gpus=arguments.share or arguments.isolated)
    world = World(arguments.platform, arguments.groups, arguments.shuffled)
    known = {scenario.__name__: scenario for scenario in (*ALONE, *BESIDE_XLA)}
    names = [s.__name__ for s in (ALONE if arguments.share else (*ALONE, *BESIDE_XLA))]
    if arguments.of_jax_ranks:
        import jax_ranks

        known = {s.__name__: lambda _, s=s: s() for s in jax_ranks.SCENARIOS}
    for name in arguments.names or names:
        start = time.perf_counter()
        known[name](world)
        print(f"{name}: ok, {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.of_jax_ranks:
        print("agreed", jax_ranks._digest.hexdigest())
    for what, found in sorted(world.digests.items()):
        print(f"digest {what} {found}")
    check_choices(world)
    print("done")


if __name__ == "__main__":
    main()

"""Calls without end at random sizes, orders and delays, every result compared on the device.

    python jax_soak.py [--processes N] [--calls N]        on a GPU, under MPS
    python jax_soak.py --platform cpu [...]

A bank holds some sets of random inputs and what the calls make of them, which is compared on the
host with the contract in NumPy, once. A program is a loop over a few calls in a row: each takes
rows of the bank that depend on the iteration, and counts the elements that differ in a bit. It
holds no collective of XLA, since NCCL refuses ranks that share a GPU. Ranks are delayed on the host
and on the device, each at times of its own.

Every rank prints what it did; the `digest` is of the values that are the same on all ranks.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import math
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import jax_ranks as ranks
import numpy as np
import oracle
from harness import normal, spread
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import launch
from jax_latent_tail.kernels import geometry, processes

SETS = 8
MOST_TOKENS = 40  # of one call; the rows of a set
OUTPUTS = ("latent", "shard", "sum")
REPORT = ("compiled", "calls:", "wrong", "digest:", "KiB")  # how its lines begin
IN_FLIGHT = 6  # programs that are dispatched ahead

SPECS = {
    "rows": P(None, "tp"),
    "shared": P(None, "tp"),
    "gamma": P(),
    "x": P(None, "tp"),
    "residual": P(),
}
TABLES = {
    "latent": P(),
    "latent_of_many": P(),
    "shard": P(None, None, "tp"),
    "sum": P(),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What suits a platform.

    Attributes:
      lengths: of the loops, one program each.
      work: elements of an array that delays a rank.
    """

    latent: int
    hidden: int
    in_a_row: int
    lengths: tuple[int, ...]
    work: int


SIZES = {
    "cuda": Sizes(ranks.L, ranks.H, 16, (1, 2, 8, 32, 64, 128, 96, 64), 1 << 18),
    "cpu": Sizes(48, 256, 8, (1, 4, 16, 32), 1 << 12),
}


def fused(platform, rows, shared, gamma):
    return latent_tail.fused(rows, shared, gamma, axis_name="tp", implementation=platform)


def gather(platform, x, residual):
    return latent_tail.all_gather_add(x, residual, axis_name="tp", implementation=platform)


def inputs_of(seed, tp, sizes):
    """The bank on the host: the ranks' rows after the sets."""
    rng = np.random.default_rng(seed)
    shape = (SETS, tp, MOST_TOKENS)
    return {
        "rows": spread(rng, *shape, sizes.latent),
        "shared": spread(rng, *shape, sizes.hidden),
        "gamma": normal(rng, sizes.latent),
        "x": spread(rng, *shape, sizes.hidden // tp),
        "residual": spread(rng, SETS, MOST_TOKENS, sizes.hidden),
    }


def put(inputs):
    return {
        name: ranks.layers(array) if array.ndim == 4 else ranks.put(array, P())
        for name, array in inputs.items()
    }


def tables_of(platform, bank):
    """What calls make of the bank. The order in which a row is summed up depends on M."""
    few = MOST_TOKENS // 2
    assert few < geometry.WIDE_FROM_TOKENS <= MOST_TOKENS

    def tables(rows, shared, gamma, x, residual):
        def one_set(_, inputs):
            rows, shared, x, residual = inputs
            parts = [
                fused(platform, rows[part], shared[part], gamma)
                for part in (slice(few), slice(few, None))
            ]
            latent, shard = (jnp.concatenate(halves) for halves in zip(*parts, strict=True))
            latent_of_many, _ = fused(platform, rows, shared, gamma)
            return None, (latent, latent_of_many, shard, gather(platform, x, residual))

        return lax.scan(one_set, None, (rows, shared, x, residual))[1]

    step = ranks.program(tables, tuple(SPECS.values()), tuple(TABLES.values()))
    return dict(zip(TABLES, step(*bank.values()), strict=True))


def check_tables(inputs, tables):
    """Compares this process's part of them with the contract."""
    for index in range(SETS):
        rows, shared = inputs["rows"][index], inputs["shared"][index]
        want_latent = oracle.latent(rows, inputs["gamma"])
        want_shard = oracle.rank_sum(shared).astype(shared.dtype)
        columns = inputs["x"][index].swapaxes(0, 1).reshape(MOST_TOKENS, -1).astype(np.float32)
        want_sum = (columns + inputs["residual"][index].astype(np.float32)).astype(shared.dtype)
        for name, want, far in (
            ("latent", want_latent, 1),
            ("latent_of_many", want_latent, 1),
            ("shard", want_shard, 0),
            ("sum", want_sum, 0),
        ):
            for part in tables[name].addressable_shards:
                distance = oracle.ulps(np.asarray(part.data)[index], want[part.index[1:]])
                assert distance.max() <= far, name


def bits(x):
    return lax.bitcast_convert_type(x, jnp.uint16)


def mix(x):
    """A hash of uint32."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def late(delay, work, chance):
    """0, some time later: on this rank and in this iteration, or not, as `chance` has it."""
    x = jnp.full(work, chance % 5, jnp.float32)

    def rounds(count, x):
        for _ in range(count):
            x = jnp.sin(x) + 1
        return x

    if delay == "loop":
        trips = jnp.where(chance % 8 == 0, chance // 8 % 6, 0).astype(jnp.int32)
        x = lax.fori_loop(0, trips, lambda _, x: rounds(8, x), x)
    elif delay == "branch":
        x = lax.cond(chance % 8 == 0, functools.partial(rounds, 48), lambda x: x, x)
    return (x[-1] > 100).astype(jnp.int32)


def soak(platform, sizes, plan, length, delay):
    """A loop of `length` times the calls of the plan: [(what, tokens)]."""
    tp = jax.device_count()

    def loop(start, rows, shared, gamma, x, residual, latent, latent_of_many, shard, total):
        own = lax.axis_index("tp").astype(jnp.uint32)
        one = jnp.where(start < 0, 2, 1).astype(rows.dtype)  # 1, as only the caller knows

        def call(carry, n, what, tokens):
            wrong, seen = carry
            chance = mix(start.astype(jnp.uint32) + n)
            index, first = chance % SETS, (chance >> 8) % (MOST_TOKENS - tokens + 1)
            behind = jnp.int32(0)
            if delay:
                behind = late(delay, sizes.work, mix(chance + own))

            def of(array):
                return lax.dynamic_slice_in_dim(array[index], first, tokens)

            # Ties the call to those before. Never below 0, which the compiler cannot know.
            before = wrong["shard"][0] + wrong["sum"][0] + behind
            factor = jnp.where(before < 0, 2, 1).astype(rows.dtype)
            if what == "gather":
                got = {"sum": gather(platform, of(x) * factor, of(residual) * one)}
                want = {"sum": of(total)}
            else:
                outputs = fused(platform, of(rows) * factor, of(shared) * factor, gamma)
                got = dict(zip(("latent", "shard"), outputs, strict=True))
                many = tokens >= geometry.WIDE_FROM_TOKENS
                want = {"latent": of(latent_of_many if many else latent), "shard": of(shard)}
            for name, value in got.items():
                differ = (bits(value) != bits(want[name])).sum(axis=0, dtype=jnp.int32)
                wrong = {**wrong, name: wrong[name] + differ}
                if name in seen:
                    words = bits(value).astype(jnp.uint32).sum(axis=0, dtype=jnp.uint32)
                    seen = {**seen, name: seen[name] * jnp.uint32(33) + words}
            return wrong, seen

        def layer(carry, iteration):
            for index, (what, tokens) in enumerate(plan):
                n = iteration * len(plan) + index
                carry = call(carry, n.astype(jnp.uint32), what, tokens)
            return carry, None

        widths = {"latent": sizes.latent, "shard": sizes.hidden // tp, "sum": sizes.hidden}
        zeros = {name: jnp.zeros(widths[name], jnp.int32) for name in OUTPUTS}
        wrong = lax.pcast(zeros, "tp", to="varying")
        seen = {name: zeros[name].astype(jnp.uint32) for name in ("latent", "sum")}
        (wrong, seen), _ = lax.scan(layer, (wrong, seen), jnp.arange(length, dtype=jnp.int32))
        counts = [wrong[name].sum() for name in OUTPUTS]
        sums = [mix(words + jnp.arange(len(words), dtype=jnp.uint32)) for words in seen.values()]
        return jnp.stack(counts)[None], jnp.stack([words.sum(dtype=jnp.uint32) for words in sums])

    return loop


def programs_of(platform, sizes, rng, arguments):
    """[(executable, calls in one run)], compiled alike by all processes before anything runs."""
    made = []
    for index, length in enumerate(sizes.lengths):
        tokens = np.exp(rng.uniform(0, math.log(MOST_TOKENS + 1), sizes.in_a_row)).astype(int)
        plan = [("gather" if rng.random() < 0.25 else "fused", int(m)) for m in tokens]
        options = None if index % 4 == 1 else latent_tail.compiler_options()
        delay = (None, "branch", None, "loop")[index % 4]
        step = ranks.program(
            soak(platform, sizes, plan, length, delay),
            (P(), *SPECS.values(), *TABLES.values()),
            (P("tp"), P()),
            compiler_options=options,
        )
        compiled = step.lower(*arguments).compile()
        calls = compiled.as_text().count(f'custom_call_target="jax_latent_tail_{platform}"')
        assert calls >= len(plan), (calls, plan)
        made.append((compiled, length * len(plan)))
    return made


def pause(rng):
    """Lets this rank fall behind, seldom by much."""
    dice = rng.random()
    if dice < 0.02:
        time.sleep(rng.uniform(0.02, 0.06))
    elif dice < 0.3:
        time.sleep(rng.uniform(0, 0.002))


def memory():
    """KiB and threads of this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(status["VmRSS"].split()[0]), int(status["Threads"])


def number(value):
    return ranks.put(np.int32(value), P())


def run(arguments):
    platform, sizes = arguments.platform, SIZES[arguments.platform]
    inputs = inputs_of(arguments.seed, jax.device_count(), sizes)
    bank = put(inputs)
    tables = tables_of(platform, bank)
    check_tables(inputs, tables)
    fixed = (*bank.values(), *tables.values())
    common = np.random.default_rng(arguments.seed)
    own = np.random.default_rng((arguments.seed, jax.process_index()))
    start = time.perf_counter()
    programs = programs_of(platform, sizes, common, (number(0), *fixed))
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)

    done, wrong, digest, used = 0, np.zeros(3, np.int64), hashlib.sha256(), []
    running = collections.deque()

    def read_one():
        nonlocal wrong
        counts, seen = running.popleft()
        for part in counts.addressable_shards:
            wrong = wrong + np.asarray(part.data)[0]
        digest.update(ranks.mine(seen).tobytes())

    start = time.perf_counter()
    while done < arguments.calls:
        step, calls = programs[common.integers(len(programs))]
        running.append(step(number(common.integers(1 << 30)), *fixed))
        done += calls
        pause(own)
        for _ in range(len(running) - own.integers(IN_FLIGHT)):
            read_one()
        if done > (len(used) + 1) * arguments.calls / 20:
            used.append(memory())
            print(f"so far {done} calls, wrong elements {wrong.tolist()}", flush=True)
    while running:
        read_one()
    seconds = time.perf_counter() - start
    latent_tail.check()
    print(f"calls: {done} in {seconds:.1f} s, {done / seconds:.0f} calls/s")
    print("wrong elements:", dict(zip(OUTPUTS, wrong.tolist(), strict=True)))
    print("digest:", digest.hexdigest())
    print("KiB and threads:", used[::4])
    assert not wrong.any(), "wrong numbers"
    if arguments.steady:
        (early_kib, early_threads), (late_kib, late_threads) = used[len(used) // 4], used[-1]
        assert late_kib - early_kib < 8 << 10, used
        assert late_threads - early_threads <= 2, used


def start(arguments):
    """Runs the processes; what they printed, all having seen the same values."""
    env = {
        "JAX_PLATFORMS": "cpu" if arguments.platform == "cpu" else "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    with contextlib.ExitStack() as stack:
        if arguments.platform == "cuda":
            daemon = stack.enter_context(processes.mps())
            env |= {name: value for name, value in daemon.items() if value is not None}
        texts = launch.run(
            sys.argv,
            arguments.processes,
            devices_per_process=arguments.devices,
            timeout_s=arguments.timeout,
            env=env,
        )
    digests = {line for text in texts for line in text.splitlines() if line.startswith("digest:")}
    assert len(digests) == 1, texts
    return texts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", choices=SIZES, default="cuda")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1, help="of each process; CPUs only")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=570, help="seconds for everything")
    parser.add_argument("--steady", action="store_true", help="memory and threads must not grow")
    arguments = parser.parse_args()
    if launch.is_member():
        launch.initialize(share_gpus=True)
        run(arguments)
        return
    for index, text in enumerate(start(arguments)):
        said = [line for line in text.splitlines() if line.startswith(REPORT)]
        print(f"--- process {index}", *said, sep="\n")


if __name__ == "__main__":
    main()

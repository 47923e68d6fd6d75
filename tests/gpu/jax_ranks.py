"""One rank of a group of processes that share a GPU, each scenario a jitted program of JAX.

    python jax_ranks.py SCENARIO...     started by `jax_latent_tail.launch.run`

NCCL refuses two ranks on one GPU, so no program here contains a collective of XLA: inputs are put
on the device by each process, and outputs are compared on the host with the contract in NumPy.
"""

import functools
import hashlib
import os
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import normal, random_inputs, spread
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import launch, spec

L, H = 3584, 7168
SHARDED = P("tp")
IN_SPECS = (SHARDED, SHARDED, P())
OUT_SPECS = (P(), P(None, "tp"))

_digest = hashlib.sha256()  # of all latent outputs: equal on all ranks


def mesh():
    return jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(AxisType.Auto,))


def put(array, spec=SHARDED):
    """A global array of which this process holds its part."""
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh(), spec), lambda index: array[index]
    )


def stacked(per_rank):
    """[tp, M, ...] as the global array whose views in shard_map are [M, ...]."""
    return put(per_rank.reshape(-1, *per_rank.shape[2:]))


def layers(per_layer):
    """[layers, tp, M, ...] as the global array whose views are [layers, M, ...]."""
    merged = per_layer.reshape(per_layer.shape[0], -1, *per_layer.shape[3:])
    return put(merged, P(None, "tp"))


def routed_of(inputs):
    if inputs.indices is None:
        return stacked(inputs.rows)
    return latent_tail.Unfinalized(*map(stacked, (inputs.rows, inputs.weights, inputs.indices)))


def operands(inputs):
    return routed_of(inputs), stacked(inputs.shared), put(inputs.gamma, P())


def program(function, in_specs=IN_SPECS, out_specs=OUT_SPECS, **options):
    return jax.jit(
        jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs), **options
    )


def tail(routed, shared, gamma, **options):
    return latent_tail.fused(
        routed, shared, gamma, axis_name="tp", implementation="cuda", **options
    )


def mine(array):
    """This rank's view of an output."""
    return np.asarray(array.addressable_data(0))


def expected(inputs, fp32_internal=False, eps=1e-6):
    """(latent float64 [M, L], this rank's shard [M, S])"""
    contributions = inputs.rows
    if inputs.indices is not None:
        contributions = np.stack(
            [
                oracle.contribution(*of)
                for of in zip(inputs.rows, inputs.weights, inputs.indices, strict=True)
            ]
        )
    return (
        oracle.latent(contributions, inputs.gamma, eps, fp32_internal),
        oracle.shards(inputs.shared)[jax.process_index()],
    )


def check(latent, shard, inputs, **options):
    want_latent, want_shard = expected(inputs, **options)
    if shard is not None:
        assert (oracle.ulps(mine(shard), want_shard) == 0).all(), "shard"
    if latent is not None:
        assert oracle.ulps(mine(latent), want_latent).max() <= 1, "latent"
        _digest.update(mine(latent).tobytes())


def inputs_of(seed, num_tokens, draw=spread, **options):
    return random_inputs(seed, jax.device_count(), num_tokens, L, H, draw=draw, **options)


# ---- scenarios


def values():
    """Every M up to max_tokens' neighbourhood, spread data, both roundings."""
    for fp32_internal in (False, True):
        step = program(functools.partial(tail, fp32_internal=fp32_internal))
        for num_tokens in (1, 3, 8, 32, 127, 128):
            inputs = inputs_of(num_tokens, num_tokens)
            check(*step(*operands(inputs)), inputs, fp32_internal=fp32_internal)
    text = step.lower(*operands(inputs)).compile().as_text()
    assert "jax_latent_tail_cuda" in text
    assert "all-reduce" not in text
    assert "all-gather" not in text


def finalize():
    for seed, top_k in enumerate((8, 16)):
        step = program(tail)
        for num_tokens in (1, 5, 64):
            inputs = inputs_of(seed, num_tokens, top_k=top_k)
            check(*step(*operands(inputs)), inputs)


def halves():
    inputs = inputs_of(3, 8)

    def norm(rows, gamma):
        return latent_tail.all_reduce_rms_norm(rows, gamma, axis_name="tp", implementation="cuda")

    def scatter(shared):
        return latent_tail.reduce_scatter(shared, axis_name="tp", implementation="cuda")

    latent = program(norm, (SHARDED, P()), P())(stacked(inputs.rows), put(inputs.gamma, P()))
    shard = program(scatter, (SHARDED,), P(None, "tp"))(stacked(inputs.shared))
    check(latent, shard, inputs)


def _scan(unroll=1):
    def scan(rows, shared, gamma):
        def layer(_, xs):
            return None, tail(*xs, gamma)

        return lax.scan(layer, None, (rows, shared), unroll=unroll)[1]

    return scan


_SCAN_SPECS = {
    "in_specs": (P(None, "tp"), P(None, "tp"), P()),
    "out_specs": (P(), P(None, None, "tp")),
}


def scan_92_layers():
    """Distinct inputs for every layer, and values that depend on the iteration."""
    per_layer = [inputs_of(layer, 8, draw=normal) for layer in range(92)]
    rows = layers(np.stack([inputs.rows for inputs in per_layer]))
    shared = layers(np.stack([inputs.shared for inputs in per_layer]))
    gamma = per_layer[0].gamma
    for unroll, options in ((1, None), (1, latent_tail.compiler_options()), (4, None)):
        step = program(_scan(unroll), **_SCAN_SPECS, compiler_options=options)
        for _ in range(3):  # the first may run before anything is captured
            latent, shard = map(mine, step(rows, shared, put(gamma, P())))
        for layer, inputs in enumerate(per_layer):
            inputs.gamma = gamma
            want_latent, want_shard = expected(inputs)
            assert (oracle.ulps(shard[layer], want_shard) == 0).all()
            assert oracle.ulps(latent[layer], want_latent).max() <= 1
        _digest.update(latent.tobytes())


def gather():
    """all_gather_add with and without a residual: exact, save for the sign of zeros."""
    tp = jax.device_count()

    def call(x, *residual):
        return latent_tail.all_gather_add(x, *residual, axis_name="tp", implementation="cuda")

    for num_tokens in (1, 3, 8, 32, 128):
        rng = np.random.default_rng(num_tokens)
        x, residual = spread(rng, tp, num_tokens, H // tp), spread(rng, num_tokens, H)
        columns = x.swapaxes(0, 1).reshape(num_tokens, H)
        total = (columns.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
        y = program(call, (SHARDED,), P())(stacked(x))
        z = program(call, (SHARDED, P()), P())(stacked(x), put(residual, P()))
        for got, want in ((y, columns), (z, total)):
            assert (mine(got) == want).all()
            _digest.update(mine(got).tobytes())


class _MoeTail:
    """Operands of a moe_tail of M tokens on given stripes, and what it adds to the residual."""

    def __init__(self, num_tokens, w_up, columns):
        self.inputs = inputs_of(10 + num_tokens, num_tokens, draw=normal, top_k=8)
        self.residual = normal(np.random.default_rng(num_tokens), num_tokens, H)
        self.arguments = (*operands(self.inputs), w_up, put(self.residual, P()))
        latent, _ = expected(self.inputs)
        shards = oracle.shards(self.inputs.shared).swapaxes(0, 1).reshape(num_tokens, H)
        self.added = latent @ columns + shards.astype(np.float64)

    def check(self, y, x=None):
        """Compares token by token: y [..., M, H] is added to x, by default to the residual."""
        want = (self.residual if x is None else x).astype(np.float64) + self.added
        error = np.linalg.norm(y.astype(np.float64) - want, axis=-1)
        worst = (error / np.linalg.norm(want, axis=-1)).max()
        assert worst < 4e-3, worst  # roundings to bf16
        _digest.update(y.tobytes())


def _compiled(function, arguments, in_one_call):
    """The program, having looked that it has no collective, and no product but in our calls."""
    step = program(function, (SHARDED, SHARDED, P(), SHARDED, P()), P())
    lowered = step.lower(*arguments)
    assert lowered.as_text().count("custom_call @jax_latent_tail_cuda") == 2
    assert ("dot_general" in lowered.as_text()) != in_one_call
    compiled = lowered.compile()
    text = compiled.as_text()
    assert not any(name in text for name in ("all-reduce", "all-gather", "collective-permute"))
    if in_one_call:
        assert not any(name in text for name in (" dot(", "gemm", "matmul"))
    return compiled


def whole_tail():
    """moe_tail: one call with the up-projection for few tokens, a GEMM and a gather for more.

    On its own, the programs in turn on one communicator; in a scan of 92 layers, each on the one
    before; and in one under vmap. No collective of XLA.
    """
    tp = jax.device_count()
    rng = np.random.default_rng(12)
    stripes = (normal(rng, tp, L, H // tp) / 64).astype(jnp.bfloat16)
    w_up = stacked(stripes)
    columns = stripes.swapaxes(0, 1).reshape(L, H).astype(np.float64)

    def one(*arrays):
        return latent_tail.moe_tail(*arrays, axis_name="tp", implementation="cuda")

    most = spec.most_projected_tokens(tp, L, H // tp)
    cases = {num_tokens: _MoeTail(num_tokens, w_up, columns) for num_tokens in (1, 4, 16, 32, 40)}
    steps = {
        num_tokens: _compiled(one, case.arguments, in_one_call=num_tokens <= most)
        for num_tokens, case in cases.items()
    }
    order = np.random.default_rng(0)
    for _ in range(10):
        for num_tokens in order.permutation(list(cases)):
            case = cases[num_tokens]
            case.check(mine(steps[num_tokens](*case.arguments)))

    def scan(layer, length):
        def layers(routed, shared, gamma, w_up, residual):
            def body(x, _):
                y = layer(routed, shared, gamma, w_up, x)
                return y, y

            return lax.scan(body, residual, length=length)[1]

        return layers

    case = cases[4]
    x = case.residual
    for y in mine(_compiled(scan(one, 92), case.arguments, most >= 4)(*case.arguments)):
        case.check(y, x)
        x = y

    batched = jax.vmap(one, (None, None, None, None, 0))  # 8 * 4 tokens
    x = np.stack([case.residual * k for k in range(8)])
    arguments = (*case.arguments[:-1], put(x, P()))
    for y in mine(_compiled(scan(batched, 3), arguments, most >= 32)(*arguments)):
        case.check(y, x)
        x = y


def captured():
    """Replays of a captured graph with new inputs; the dump shows the capture."""
    sets = [inputs_of(seed, 8) for seed in range(8)]
    arrays = [operands(inputs) for inputs in sets]
    with tempfile.TemporaryDirectory() as folder:
        options = {**latent_tail.compiler_options(), "xla_dump_to": folder}
        step = program(tail, compiler_options=options)
        for turn in range(40):
            latent, shard = step(*arrays[turn % len(sets)])
            check(latent, shard, sets[turn % len(sets)])
        texts = [path.read_text(errors="replace") for path in pathlib.Path(folder).iterdir()]
        names = sorted(path.name for path in pathlib.Path(folder).iterdir())
    print("dumped:", names)
    assert any("kCommandBuffer" in text for text in texts)


def transformations():
    """vmap, donation, two specs interleaved, two independent calls of one spec in a program."""
    a, b = inputs_of(1, 4), inputs_of(2, 4)

    batched = program(
        jax.vmap(tail, in_axes=(0, 0, None)), in_specs=(P(None, "tp"), P(None, "tp"), P()),
        out_specs=(P(), P(None, None, "tp")),
    )  # fmt: skip
    latent, shard = batched(
        layers(np.stack([a.rows, b.rows])),
        layers(np.stack([a.shared, b.shared])),
        put(a.gamma, P()),
    )
    b.gamma = a.gamma
    for index, inputs in enumerate((a, b)):
        want_latent, want_shard = expected(inputs)
        assert (oracle.ulps(mine(shard)[index], want_shard) == 0).all()
        assert oracle.ulps(mine(latent)[index], want_latent).max() <= 1

    donating = program(tail, donate_argnums=(0, 1))
    check(*donating(*operands(a)), a)

    def interleaved(rows_a, shared_a, rows_b, shared_b, gamma):
        one = tail(rows_a, shared_a, gamma)
        other = tail(rows_b, shared_b, gamma, fp32_internal=True)
        again = tail(rows_b, shared_b, gamma)  # independent of the first, on its workspace
        last = tail(rows_a, shared_a, gamma, fp32_internal=True)
        return one, other, again, last

    for options in (None, latent_tail.compiler_options()):
        step = program(
            interleaved, (SHARDED,) * 4 + (P(),), (OUT_SPECS,) * 4, compiler_options=options
        )
        arguments = [*operands(a)[:2], *operands(b)[:2], put(a.gamma, P())]
        for _ in range(20):
            one, other, again, last = step(*arguments)
            check(*one, a)
            check(*other, b, fp32_internal=True)
            check(*again, b)
            check(*last, a, fp32_internal=True)


def ten_thousand_calls():
    """Eight values of M in turn, each result compared on the device with the contract."""
    turns, length = 50, 25  # 8 * 50 * 25 = 10,000
    programs = []
    for num_tokens in (1, 2, 3, 8, 17, 32, 64, 128):
        inputs = inputs_of(num_tokens, num_tokens)
        want_latent, _ = expected(inputs)

        def calls(rows, shared, gamma, latent, shard):
            def one(wrong, _):
                # A dependence that the compiler cannot see through: never true.
                scale = jnp.where(wrong[0] < 0, jnp.bfloat16(2), jnp.bfloat16(1))
                got_latent, got_shard = tail(rows * scale, shared * scale, gamma)
                same_shard = got_shard.view(jnp.uint16) == shard.view(jnp.uint16)
                far = jnp.abs(_ordinal(got_latent) - _ordinal(latent)) > 1
                return wrong + jnp.stack([(~same_shard).sum(), far.sum()]), None

            zero = lax.pcast(jnp.zeros(2, jnp.int32), "tp", to="varying")
            return lax.scan(one, zero, length=length)[0]

        step = program(calls, (SHARDED, SHARDED, P(), P(), SHARDED), SHARDED)
        mine_shard = oracle.shards(inputs.shared)
        arguments = (*operands(inputs), put(want_latent.astype(jnp.bfloat16), P()))
        programs.append((step, (*arguments, stacked(mine_shard))))
    rng = np.random.default_rng(0)
    sleeps = np.random.default_rng(jax.process_index())
    for _ in range(turns):
        for index in rng.permutation(len(programs)):
            step, arguments = programs[index]
            wrong = step(*arguments)
            if sleeps.random() < 0.02:
                time.sleep(0.002)
            assert (mine(wrong) == 0).all(), f"program {index}: {mine(wrong)}"


def _ordinal(x):
    bits = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFF), bits)


def a_late_rank():
    """The last rank compiles, and later dispatches, five seconds after the others."""
    late = jax.process_index() == jax.process_count() - 1
    inputs = inputs_of(9, 8)
    step = program(functools.partial(tail, eps=2e-6))
    if late:
        time.sleep(5)
    check(*step(*operands(inputs)), inputs, eps=2e-6)
    if late:
        time.sleep(5)
    check(*step(*operands(inputs)), inputs, eps=2e-6)


def prepared():
    """How long a communicator takes, and that calls then find it."""
    for eps in (3e-6, 4e-6):  # the first also opens the driver
        start = time.perf_counter()
        choice = latent_tail.prepare(mesh(), "tp", latent_dim=L, hidden_dim=H, eps=eps)
        seconds = time.perf_counter() - start
        assert choice.implementation == "cuda", choice
        print(f"prepare: {seconds:.3f} s")
    for latent_dim in (L, None):
        choice = latent_tail.prepare(
            mesh(), "tp", latent_dim=latent_dim, hidden_dim=H, gather=True, residual=True
        )
        assert choice.implementation == "cuda", choice
    inputs = inputs_of(5, 8)
    check(*program(functools.partial(tail, eps=4e-6))(*operands(inputs)), inputs, eps=4e-6)
    assert "cuda" in latent_tail.explain()
    latent_tail.check()


def closed():
    """After close a compiled program raises; a new communicator makes it right again."""
    inputs = inputs_of(6, 8)
    arrays = operands(inputs)
    eager, graph = program(tail), program(tail, compiler_options=latent_tail.compiler_options())
    for step in (eager, graph):
        for _ in range(5):
            check(*step(*arrays), inputs)
    latent_tail.close()
    for step in (eager, graph):
        with pytest.raises(jax.errors.JaxRuntimeError, match="is closed"):
            jax.block_until_ready(step(*arrays))
    latent_tail.prepare(mesh(), "tp", latent_dim=L, hidden_dim=H, implementation="cuda")
    for step in (eager, graph):
        for _ in range(5):
            check(*step(*arrays), inputs)


def a_missing_call():
    """One rank makes no call: the others' outputs are NaN, and everything later raises."""
    rank = jax.process_index()
    inputs = inputs_of(7, 4)
    arrays = operands(inputs)
    eager, graph = program(tail), program(tail, compiler_options=latent_tail.compiler_options())
    for step in (eager, graph):
        for _ in range(5):
            check(*step(*arrays), inputs)
    if rank != 1:
        latent, shard = graph(*arrays)
        assert np.isnan(mine(latent)).all()
        assert np.isnan(mine(shard)).all()
    else:
        time.sleep(float(os.environ["JAX_LATENT_TAIL_DEADLINE"]) + 2)
        # Rank 0 has told this one through device memory, which its first call finds.
        latent, shard = eager(*arrays)
        assert np.isnan(mine(latent)).all()
        assert np.isnan(mine(shard)).all()
    for step in (eager, graph, eager):
        with pytest.raises(jax.errors.JaxRuntimeError, match="latent_tail: an earlier call failed"):
            jax.block_until_ready(step(*arrays))
    with pytest.raises(latent_tail.CommunicatorError, match=r"ranks \[[01]\]") as error:
        latent_tail.check()
    print("check:", error.value)

    latent_tail.reset()
    latent_tail.check()
    for step in (eager, graph):
        for _ in range(5):
            check(*step(*arrays), inputs)
    assert (jnp.arange(4) + 1).sum() == 10  # JAX itself goes on


SCENARIOS = (
    values, finalize, halves, scan_92_layers, gather, whole_tail, captured, transformations,
    ten_thousand_calls, a_late_rank, prepared, closed, a_missing_call,
)  # fmt: skip


def main():
    launch.initialize(share_gpus=True)
    known = {scenario.__name__: scenario for scenario in SCENARIOS}
    for name in sys.argv[1:]:
        start = time.perf_counter()
        known[name]()
        print(f"{name}: ok, {time.perf_counter() - start:.1f} s", flush=True)
    print("digest:", _digest.hexdigest())
    print(latent_tail.explain())


if __name__ == "__main__":
    main()

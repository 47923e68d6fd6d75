"""What single processes do in the tests of several: run as `members.py NAME` by each of them."""

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

LATENT, HIDDEN = 32, 64


def values(seed, num_tokens=4):
    """Inputs [tp, M, H] of all ranks, small integers."""
    import jax

    rng = np.random.default_rng(seed)
    return rng.integers(-4, 4, (jax.device_count(), num_tokens, HIDDEN)).astype(np.float32)


def scattered(inputs):
    """The shards [tp, M, S] of the sum."""
    tp, num_tokens, _ = inputs.shape
    return inputs.sum(axis=0).reshape(num_tokens, tp, -1).swapaxes(0, 1)


def program(calls, num_tokens=4, factor=1.0, name="program"):
    """A jitted chain of reduce_scatter, each of the last one's result, and its sample input.

    Chains that differ in `factor` alone have the same calls and types.
    """
    import jax
    import jax.numpy as jnp
    from harness import make_mesh
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_latent_tail as latent_tail

    tp = jax.device_count()
    mesh = make_mesh((tp,))

    def body(x):
        x = x.reshape(x.shape[1:])
        for _ in range(calls):
            shard = latent_tail.reduce_scatter(
                x * jnp.bfloat16(factor), axis_name="tp", implementation="cpu"
            )
            x = jnp.tile(jnp.sign(shard), tp)
        return shard[None]

    body.__name__ = name
    jitted = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))

    def place(inputs):
        from ml_dtypes import bfloat16

        return jax.make_array_from_callback(
            inputs.shape, NamedSharding(mesh, P("tp")), lambda index: inputs.astype(bfloat16)[index]
        )

    return jitted, place


def expected(inputs, calls, factor=1.0):
    tp = len(inputs)
    for _ in range(calls):
        shards = scattered(inputs * factor)
        inputs = np.sign(np.tile(shards, tp))
    return shards


def run(compiled, place, seed, calls, num_tokens=4, factor=1.0):
    inputs = values(seed, num_tokens)
    result = compiled(place(inputs))
    for part in result.addressable_shards:
        np.testing.assert_array_equal(
            np.asarray(part.data, np.float32), expected(inputs, calls, factor)[part.index]
        )


def failure(function, *arguments):
    """The message of the error that a run ends with, and the seconds it took."""
    import jax

    start = time.monotonic()
    try:
        jax.block_until_ready(function(*arguments))
    except Exception as error:
        return str(error), time.monotonic() - start
    raise AssertionError("no error")


# The programs.


def compiled_in_different_order():
    import jax

    made = {factor: program(3, factor=factor) for factor in (1.0, 2.0)}
    order = (1.0, 2.0) if jax.process_index() == 0 else (2.0, 1.0)
    compiled = {}
    for factor in order:
        jitted, place = made[factor]
        compiled[factor] = jitted.lower(place(values(0))).compile()
    for seed in range(20):
        factor = (1.0, 2.0)[seed % 2]
        run(compiled[factor], made[factor][1], seed, 3, factor=factor)
    print("right")


def extra_program_in_one_process():
    import jax
    import jax.numpy as jnp

    jitted, place = program(3)
    jitted.lower(place(values(0)))  # both make the communicator
    if jax.process_index() == 0:
        for calls in (1, 3, 5):
            extra, _ = program(calls)
            lowered = extra.lower(place(values(0)))
            lowered.compile()
            lowered.compile()
        one, _ = program(3, num_tokens=7, name="another")
        one.lower(place(values(0, 7))).compile()
        jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(3)))
    for seed in range(10):
        run(jitted, place, seed, 3)
    print("right")


def compiled_twice_without_a_run_in_one_process():
    """Where XLA shows nothing that tells the two apart: an error, not a wrong number."""
    import jax

    jitted, place = program(2)
    lowered = jitted.lower(place(values(0)))
    compiled = lowered.compile()
    if jax.process_index() == 0:
        # With an option that makes it another executable to JAX, too.
        compiled = lowered.compile({"xla_cpu_enable_fast_min_max": True})
    try:
        run(compiled, place, 1, 2)
        print("right")  # compiled on different threads of XLA
    except jax.errors.JaxRuntimeError as error:
        print(error)


def gathers():
    """all_gather_add on each process's devices against NumPy, with specials and without."""
    import functools

    import jax
    from harness import make_mesh
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from test_values_on_cpus import added, any_bits, check_bits

    import jax_latent_tail as latent_tail

    tp = jax.device_count()
    mesh = make_mesh((tp,))
    gather = functools.partial(latent_tail.all_gather_add, axis_name="tp", implementation="cpu")
    plain = functools.partial(latent_tail.all_gather_add, axis_name="tp", implementation="xla")
    for num_tokens, shard_dim in ((1, 3584), (8, 40), (128, 56)):
        x, residual = any_bits(num_tokens, num_tokens, tp * shard_dim)
        for arrays, expected in (((x,), x), ((x, residual), added(x, residual))):
            specs = (P(None, "tp"), P())[: len(arrays)]
            placed = [
                jax.make_array_from_callback(
                    array.shape, NamedSharding(mesh, spec), lambda index, array=array: array[index]
                )
                for array, spec in zip(arrays, specs, strict=True)
            ]
            for function in (gather, plain):
                result = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P()))(
                    *placed
                )
                for part in result.addressable_shards:
                    check_bits(np.asarray(part.data), expected)
    print("right")


def gather_where_the_other_scatters():
    """One process runs an all_gather_add, the other a reduce_scatter of the same sizes."""
    import jax
    from harness import make_mesh
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from ml_dtypes import bfloat16

    import jax_latent_tail as latent_tail

    tp = jax.device_count()
    mesh = make_mesh((tp,))
    options = {"axis_name": "tp", "implementation": "cpu"}
    x = jax.make_array_from_callback(
        (4, HIDDEN),
        NamedSharding(mesh, P(None, "tp")),
        lambda index: np.ones((4, HIDDEN), bfloat16)[index],
    )
    compiled = []
    for function, spec in (
        (lambda x: latent_tail.all_gather_add(x, **options), P()),
        (lambda x: latent_tail.reduce_scatter(jax.numpy.tile(x, tp), **options), P(None, "tp")),
    ):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P(None, "tp"), out_specs=spec)
        compiled.append(jax.jit(mapped).lower(x).compile())
    print(failure(compiled[jax.process_index()], x)[0])


def run_in_different_order():
    import jax

    small, large = program(2, num_tokens=4), program(2, num_tokens=6)
    compiled = []
    for (jitted, place), num_tokens in ((small, 4), (large, 6)):
        compiled.append((jitted.lower(place(values(0, num_tokens))).compile(), place, num_tokens))
    if jax.process_index() == 1:
        compiled.reverse()
    function, place, num_tokens = compiled[0]
    print(failure(function, place(values(0, num_tokens)))[0])


def rank_missing():
    import jax

    jitted, place = program(1)
    compiled = jitted.lower(place(values(0))).compile()
    run(compiled, place, 1, 1)
    if jax.process_index() == 1:
        time.sleep(3)  # longer than the deadline
    text, seconds = failure(compiled, place(values(0)))
    again, seconds_again = failure(compiled, place(values(0)))
    print(text)
    print(again)
    limit = 2.5 if jax.process_index() == 0 else 0.5
    assert seconds < limit, seconds
    assert seconds_again < 0.5, seconds_again


def process_leaves():
    import jax

    jitted, place = program(2)
    compiled = jitted.lower(place(values(0))).compile()
    for seed in range(10):
        run(compiled, place, seed, 2)
    if jax.process_index() == 0:
        text, seconds = failure(compiled, place(values(0)))
        print(text)
        assert seconds < 20, seconds
        leave_last()
    import jax_latent_tail as latent_tail

    latent_tail.close()
    os._exit(0)


def leave_last():
    """Ends the process that hosts the coordinator, without which the other would be killed."""
    sys.stdout.flush()
    time.sleep(3)
    os._exit(0)


def forked_child():
    from jax_latent_tail.communicator import communicator

    jitted, place = program(2)
    run(jitted, place, 0, 2)
    # All of the interpreter's end that is this package's; the rest of JAX may hang in a child.
    for leave in (communicator.close_all, lambda: None):
        child = os.fork()
        if child == 0:
            leave()
            os._exit(0)
        deadline = time.monotonic() + 20
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            assert time.monotonic() < deadline, f"the child hangs in {leave}"
            time.sleep(0.01)
        assert status == 0
    for seed in range(5):
        run(jitted, place, seed, 2)
    print("right")


def exit_while_a_call_waits():
    import jax

    jitted, place = program(1)
    compiled = jitted.lower(place(values(0))).compile()
    run(compiled, place, 1, 1)
    if jax.process_index() == 0:
        leave_last()
    inputs = place(values(0))

    def wait():
        import contextlib

        with contextlib.suppress(Exception):
            jax.block_until_ready(compiled(inputs))

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.5)
    # What the interpreter does at its end, without jax.distributed's wait for the other process.
    from jax_latent_tail.communicator import communicator

    communicator.close_all()
    os._exit(0)


def no_room_in_shared_memory():
    """Both processes take plain collectives, for the reason that one of them has."""
    import jax

    import jax_latent_tail as latent_tail
    from jax_latent_tail.communicator import host_memory

    if jax.process_index() == 0:
        host_memory.FOLDER = Path("/nonexistent")
    jitted, place = program(1)
    try:
        jitted.lower(place(values(0)))
    except latent_tail.UnavailableError as error:
        print(error)


if __name__ == "__main__":
    from jax_latent_tail import launch

    launch.initialize()
    globals()[sys.argv[1]]()

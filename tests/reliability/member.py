"""One process of a `processes.Job`: does what the test says, one command at a time.

A command is a line on stdin, [name, options], and names a function of this file. Its answer is a
line on the descriptor in argv[1]: what the function returned or raised, and the seconds it took.
"""

import functools
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from harness import make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16

import jax_latent_tail as latent_tail
from jax_latent_tail import launch
from jax_latent_tail.communicator import host_memory, rendezvous, settings

IMPLEMENTATION = "cuda" if os.environ["JAX_PLATFORMS"].startswith("cuda") else "cpu"

# On GPUs sizes that there are cubins for.
LATENT, HIDDEN = (3584, 7168) if IMPLEMENTATION == "cuda" else (24, 48)


class NotANumber(RuntimeError):
    """What a call gives on a GPU in place of an error."""


# What JAX raises for a failed call depends on its version.
FAILED = (RuntimeError, ValueError)

_compiled = {}  # [name] -> executable, calls, tokens


def inputs(seed, num_tokens):
    """The rows [tp, M, H] of all ranks, small integers: every sum is exact."""
    rng = np.random.default_rng(seed)
    return rng.integers(-4, 5, (jax.device_count(), num_tokens, HIDDEN)).astype(np.float32)


def expected(rows, calls):
    """What the program makes of the rows, [tp, M, H]."""
    tp, num_tokens, _ = rows.shape
    for call in range(calls):
        total = rows.sum(axis=0)
        shards = total.reshape(num_tokens, tp, -1).swapaxes(0, 1)
        shards = np.tile(shards, tp)[..., LATENT:]
        if call < calls - 1:
            shards = np.sign(shards)
        latent = np.broadcast_to(np.sign(total[:, :LATENT]), (tp, num_tokens, LATENT))
        rows = np.concatenate([latent, shards], axis=-1)
    return rows


def place(rows):
    mesh = make_mesh((jax.device_count(),))
    return jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, P("tp")), lambda index: rows.astype(bfloat16)[index]
    )


def run_once(name, seed):
    executable, calls, num_tokens = _compiled[name]
    rows = inputs(seed, num_tokens)
    result = jax.block_until_ready(executable(place(rows)))
    for part in result.addressable_shards:
        actual = np.asarray(part.data, np.float32)
        failed = np.isnan(actual)
        # Not an error that a test could take for the one it waits for.
        right = actual == expected(rows, calls)[part.index]
        assert (right | failed).all(), f"wrong numbers in {name}"
        if failed.any():
            raise NotANumber("NaN")


# The commands.


def prepare(**options):
    """Makes the communicator; returns what was chosen and why."""
    choice = latent_tail.prepare(
        make_mesh((jax.device_count(),)),
        "tp",
        **({"latent_dim": LATENT, "hidden_dim": HIDDEN} | options),
    )
    return [choice.implementation, choice.reason]


def compile_(name="program", calls=2, num_tokens=4, implementation=IMPLEMENTATION, **options):
    """A chain of `fused`, each of the signs of the last one's results."""
    tp = jax.device_count()

    def body(rows):
        rows = rows.reshape(rows.shape[1:])
        for call in range(calls):
            latent, shard = latent_tail.fused(
                rows[:, :LATENT],
                rows,
                jnp.ones(LATENT, jnp.bfloat16),
                axis_name="tp",
                implementation=implementation,
                **options,
            )
            latent = lax.pcast(jnp.sign(latent), "tp", to="varying")
            shard = shard if call == calls - 1 else jnp.sign(shard)
            rows = jnp.concatenate([latent, jnp.tile(shard, tp)[:, LATENT:]], axis=1)
        return rows[None]

    mapped = jax.shard_map(body, mesh=make_mesh((tp,)), in_specs=P("tp"), out_specs=P("tp"))
    executable = jax.jit(mapped).lower(place(inputs(0, num_tokens))).compile()
    _compiled[name] = executable, calls, num_tokens


def run(name="program", first=0, count=1):
    for seed in range(first, first + count):
        run_once(name, seed)
    return "right"


def run_until_it_fails(name="program"):
    """Calls without end; what the first error says, and how the next attempts end."""
    runs = 0
    while True:
        start = time.monotonic()
        try:
            run_once(name, runs)
        except FAILED as error:
            message, seconds = str(error), time.monotonic() - start
            break
        runs += 1
    return {"runs": runs, "message": message, "seconds": seconds} | after_failure(name)


def after_failure(name="program"):
    """How the next run ends, and what `check` says."""
    start = time.monotonic()
    again = checked = None
    try:
        run_once(name, 0)
    except FAILED as error:
        again = str(error)
    seconds = time.monotonic() - start
    try:
        latent_tail.check()
    except latent_tail.CommunicatorError as error:
        checked = str(error)
    return {"again": again, "seconds_again": seconds, "check": checked}


def run_queued(name="program", count=1):
    """Dispatches several runs and then waits; how many failed, and what they say."""
    executable, _, num_tokens = _compiled[name]
    results, messages = [], []
    for seed in range(count):
        try:
            results.append(executable(place(inputs(seed, num_tokens))))
        except FAILED as error:
            messages.append(str(error))
    for result in results:
        try:
            jax.block_until_ready(result)
        except FAILED as error:
            messages.append(str(error))
    return {"failed": len(messages), "messages": sorted(set(messages))}


def set_environment(**variables):
    os.environ.update(variables)


def become_version(version):
    """From now on this process says that it has another version of the package."""
    settings.__version__ = version


def allow_files(allowed):
    """Whether this process may open files, from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard
    if not allowed:
        limit = os.open(os.devnull, os.O_RDONLY)  # the lowest that is free
        os.close(limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def die_in(step, when):
    """Kills this process before or after a step of making a communicator."""
    exchange = rendezvous.Rendezvous.exchange

    def killing(self, name, payload):
        if name == step and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answers = exchange(self, name, payload)
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers

    rendezvous.Rendezvous.exchange = killing


def open_late(seconds):
    """From now on this process opens a shared segment so much later."""
    open_ = host_memory.SharedFile.open

    def late(name):
        time.sleep(seconds)
        return open_(name)

    host_memory.SharedFile.open = late


def usage():
    """What this process holds of the machine."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "segments": sum("/dev/shm/jax_latent_tail" in line for line in maps),
        "mappings": len(maps),
        "KiB": int(status["VmRSS"].split()[0]),
    }


def check():
    latent_tail.check()


def reset():
    latent_tail.reset()


def close():
    latent_tail.close()


def sleep(seconds):
    time.sleep(seconds)


def fail():
    raise RuntimeError("on purpose")


def leave(how):
    """Ends this process, without jax.distributed's wait for the others."""
    if how == "closing":
        latent_tail.close()
    os._exit(0)


if __name__ == "__main__":
    heartbeat = os.environ.get("MEMBER_HEARTBEAT_TIMEOUT")
    if heartbeat:
        jax.distributed.initialize = functools.partial(
            jax.distributed.initialize, heartbeat_timeout_seconds=int(heartbeat)
        )
    launch.initialize(share_gpus=True)
    answers = int(sys.argv[1])

    def answer(**what):
        os.write(answers, json.dumps(what).encode() + b"\n")

    jax.devices()
    answer(value="ready", seconds=0)
    for line in sys.stdin:
        name, options = json.loads(line)
        start = time.monotonic()
        try:
            outcome = {"value": globals()[name](**options)}
        except Exception as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        answer(**outcome, seconds=time.monotonic() - start)
    os._exit(0)

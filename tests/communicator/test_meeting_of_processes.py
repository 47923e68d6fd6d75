"""Real processes that meet through jax.distributed; each checks its own part."""

import sys
import time
from pathlib import Path

import pytest

from jax_latent_tail import launch


@pytest.mark.parametrize("program", ["meet", "decide"])
@pytest.mark.parametrize(("num_processes", "devices"), [(2, 1), (3, 2)])
def test_processes(program, num_processes, devices):
    outputs = launch.run(
        [str(Path(__file__)), program],
        num_processes,
        devices_per_process=devices,
        timeout_s=80,
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert all(output.endswith("checked\n") for output in outputs), outputs


def rendezvous_of(key, timeout_s, processes=None):
    import jax

    from jax_latent_tail.communicator.rendezvous import Rendezvous

    processes = range(jax.process_count()) if processes is None else processes
    return Rendezvous(list(processes), jax.process_index(), key, timeout_s)


def meet_all(rendezvous):
    with rendezvous.session():
        rendezvous.exchange("all are here", b"")


def keys_left():
    from jax._src.distributed import global_state

    return global_state.client.key_value_dir_get_bytes("latent_tail")


def meet():
    import jax

    from jax_latent_tail.communicator.rendezvous import Refusal
    from jax_latent_tail.errors import DisagreementError, RendezvousError

    me, count = jax.process_index(), jax.process_count()
    everything = bytes(range(256)) * 4000
    meeting = rendezvous_of("exchange", 60.0)
    with meeting.session():
        assert meeting.exchange("large", everything[me:]) == [
            everything[process:] for process in range(count)
        ]
        for step in range(50):
            answers = meeting.agree("step", lambda step=step: [me, step])
            assert answers == [[process, step] for process in range(count)]
        with pytest.raises(Refusal, match="'refused' failed in process 1: in 1"):
            meeting.agree("refused", lambda: None if me == 0 else _fail(f"in {me}"))
    assert meeting.barrier(30.0)

    # Nobody waits for ever; all try again, each in its own time.
    meeting = rendezvous_of("retry", 1.5)
    if me == 0:
        start = time.monotonic()
        with pytest.raises(RendezvousError, match=r"process 1.* every process must lower"):
            meet_all(meeting)
        assert time.monotonic() - start < 10
    meet_all(rendezvous_of("all have tried", 60.0))
    meeting.timeout_s = 60.0
    with meeting.session():
        assert meeting.exchange("again", bytes([me])) == [bytes([p]) for p in range(count)]

    for attempt in range(10):
        facts = {"same": 1, "mine": me, "attempt": attempt}
        both = "mine is 0 in process 0 and 1 in process 1"
        with pytest.raises(DisagreementError, match=both), meeting.session():
            meeting.require_equal("facts", facts)

    # A subset does not concern the rest.
    if me < 2:
        meeting = rendezvous_of("two", 60.0, [0, 1])
        with meeting.session():
            assert len(meeting.exchange("step", b"")) == 2
    print("checked")


def _fail(reason):
    raise OSError(reason)


def decide():
    """One process cannot: all take the plain collectives, for one reason."""
    import jax
    from harness import make_mesh

    from jax_latent_tail.communicator import communicator, group
    from jax_latent_tail.spec import TailSpec

    me, count = jax.process_index(), jax.device_count()
    mesh = make_mesh((count,))
    spec = TailSpec(
        tp=count,
        latent_dim=64,
        hidden_dim=8 * count,
        top_k=None,
        eps=1e-6,
        fp32_internal=False,
        max_tokens=4,
    )
    table = group.device_table(mesh, ("tp",))
    devices = {device.id: device for device in mesh.devices.flat}
    time.sleep(0.5 * me)
    decision = communicator.decide(
        "cuda", table, spec, devices, obstacle="not here" if me == 0 else None
    )
    assert decision.implementation == "xla"
    assert decision.reason.startswith("'looking at the devices' failed in process 0 (device")
    assert decision.reason.endswith("not here")
    assert communicator.decide("cuda", table, spec, devices) is decision
    meeting = rendezvous_of("end", 60.0)
    with meeting.session():
        left = [key for key, _ in keys_left() if not key.startswith(meeting._root)]
        assert left == []
        meeting.exchange("seen", b"")
    print("checked")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    launch.initialize()
    globals()[sys.argv[1]]()

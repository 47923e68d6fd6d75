"""Which implementation is chosen, and what is said about it."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import ArgumentTypeError, ArgumentValueError, UnavailableError, choice

TP, L, H = 2, 16, 32


def program(mesh=None, **options):
    tail = functools.partial(latent_tail.fused, axis_name="tp", **options)
    return jax.jit(
        jax.shard_map(
            tail,
            mesh=make_mesh((TP,)) if mesh is None else mesh,
            in_specs=(P("tp"), P("tp"), P()),
            out_specs=(P(), P(None, "tp")),
        )
    )


def arrays(tokens=3):
    return [jnp.ones(shape, jnp.bfloat16) for shape in ((TP * tokens, L), (TP * tokens, H), (L,))]


def lower(program, tokens=3, platform=None):
    traced = program.trace(*arrays(tokens))
    return traced.lower(lowering_platforms=platform and (platform,))


def reason_of_the_last_choice():
    return choice.choices()[-1].reason


@pytest.mark.parametrize("insisted", ["cuda"])
def test_insisting_on_another_platform_is_an_error_that_says_so(insisted):
    with pytest.raises(UnavailableError, match=f"implementation='{insisted}'.*lowered for cpu"):
        lower(program(implementation=insisted))
    lower(program())  # all goes on


def test_a_program_lowered_for_devices_that_the_mesh_has_not_is_plain():
    text = lower(program(eps=2e-6), platform="cuda").as_text()
    assert "jax_latent_tail_cuda" not in text
    assert "lowered for cuda, but the mesh has ['cpu'] devices" in latent_tail.explain()
    with pytest.raises(UnavailableError, match="the mesh has"):
        lower(program(eps=2e-6, implementation="cuda"), platform="cuda")


def test_too_many_tokens_are_plain():
    lower(program(max_tokens=2, eps=3e-6), platform="cuda")
    assert "3 tokens are more than max_tokens=2" in latent_tail.explain()


def test_an_exported_program_is_plain():
    exported = jax.export.export(program(eps=4e-6), platforms=["cuda"])(*arrays())
    assert "custom_call @jax_latent_tail" not in exported.mlir_module()
    assert "exported" in latent_tail.explain()


def test_each_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "jax_latent_tail"):
        for _ in range(3):
            lower(program(eps=5e-6))
    lines = [record.getMessage() for record in caplog.records if "eps 5e-06" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0] in latent_tail.explain()


def prepare(**arguments):
    defaults = {"mesh": make_mesh((TP,)), "axis_name": "tp", "latent_dim": L, "hidden_dim": H}
    return latent_tail.prepare(**{**defaults, **arguments})


def test_prepare_says_what_calls_will_take():
    prepared = prepare(eps=6e-6)
    lower(program(eps=6e-6))
    made = choice.choices()[-1]
    assert (made.implementation, made.spec) == (prepared.implementation, prepared.spec)


def test_a_gather_is_prepared_too_and_numpy_integers_serve():
    prepared = prepare(
        latent_dim=None, hidden_dim=np.int64(H), gather=True, residual=True, max_tokens=np.int64(64)
    )
    mesh = make_mesh((TP,))
    gather = functools.partial(latent_tail.all_gather_add, axis_name="tp", max_tokens=np.int64(64))
    mapped = jax.shard_map(gather, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
    jax.jit(mapped).lower(jnp.ones((2, H // TP), jnp.bfloat16), jnp.ones((1, H), jnp.bfloat16))
    made = choice.choices()[-1]
    assert (made.implementation, made.spec) == (prepared.implementation, prepared.spec)


@pytest.mark.parametrize(("max_tokens", "served"), [(128, 32), (32, 32), (5, 5)])
@pytest.mark.parametrize("residual", [False, True])
def test_an_up_projection_is_prepared_as_moe_tail_calls_it(max_tokens, served, residual):
    prepared = prepare(gather=True, residual=residual, max_tokens=max_tokens)
    assert prepared.spec.projects
    assert prepared.spec.max_tokens == served
    assert prepared.implementation == "xla"
    assert "on GPUs only" in prepared.reason
    mapped = jax.shard_map(
        functools.partial(latent_tail.moe_tail, axis_name="tp", max_tokens=max_tokens),
        mesh=make_mesh((TP,)),
        in_specs=(P("tp"), P("tp"), P(), P(None, "tp")) + (P(),) * residual,
        out_specs=P(),
    )
    shapes = [(TP * 3, L), (TP * 3, H), (L,), (L, H)] + [(3, H)] * residual
    jax.jit(mapped).lower(*(jnp.ones(shape, jnp.bfloat16) for shape in shapes))
    made = [made for made in choice.choices() if made.tokens == 3 and made.spec == prepared.spec]
    assert [(m.implementation, m.reason, m.table) for m in made] == [
        (prepared.implementation, prepared.reason, prepared.table)
    ]
    assert f"up_gather_add on {TP} ranks (latent_dim {L}, hidden_dim {H}" in str(made[0])
    assert "eps" not in str(made[0])


def test_eps_is_the_same_to_all_that_fp32_holds_alike():
    assert prepare(eps=np.float32(1e-6)).spec == prepare(eps=1e-6).spec
    assert prepare(eps=1e-6).spec.eps == 1e-6


@pytest.mark.parametrize("where", ["flags", "quoted", "file"])
def test_flags_that_let_calls_overlap_are_seen(where, monkeypatch, tmp_path):
    flag = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
    flags = {"flags": f"--other=1 {flag}", "quoted": flag.replace("=", '="') + '"'}
    if where == "file":
        (tmp_path / "flags").write_text(flag)
        flags["file"] = str(tmp_path / "flags")
    assert choice._obstacle_here("cuda") is None
    monkeypatch.setenv("XLA_FLAGS", flags[where])
    assert "CONCURRENT" in choice._obstacle_here("cuda")
    assert choice._obstacle_here("cpu") is None


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"mesh": None}, ArgumentTypeError, "mesh is a NoneType"),
        ({"mesh": jax.sharding.AbstractMesh((2,), ("tp",))}, ArgumentTypeError, "mesh is a"),
        ({"axis_name": "ep"}, ArgumentValueError, "axis_name is 'ep'"),
        ({"axis_name": ("tp", "tp")}, ArgumentValueError, "each name once"),
        ({"latent_dim": None, "hidden_dim": None}, ArgumentValueError, "latent_dim is None"),
        ({"latent_dim": 0}, ArgumentValueError, "latent_dim is 0"),
        ({"latent_dim": 1.5}, ArgumentTypeError, "latent_dim is 1.5"),
        ({"hidden_dim": 33}, ArgumentValueError, "hidden_dim is 33"),
        ({"gather": True, "top_k": 2}, ArgumentValueError, "top_k is 2"),
        ({"gather": True, "hidden_dim": None}, ArgumentValueError, "hidden_dim is None"),
        ({"gather": True, "implementation": "cpu"}, UnavailableError, "on GPUs only"),
        ({"gather": True, "implementation": "cuda"}, UnavailableError, "lowered for cpu"),
        ({"residual": True}, ArgumentValueError, "residual is True"),
        ({"top_k": True}, ArgumentTypeError, "top_k is True"),
        ({"latent_dim": None, "top_k": 2}, ArgumentValueError, "top_k is 2"),
        ({"eps": 0}, ArgumentValueError, "eps is 0"),
        ({"max_tokens": 0}, ArgumentValueError, "max_tokens is 0"),
        ({"implementation": "nccl"}, ArgumentValueError, "implementation is 'nccl'"),
        ({"implementation": "cuda"}, UnavailableError, "lowered for cpu"),
    ],
)
def test_prepare_refuses_what_it_cannot_serve(arguments, error, says):
    with pytest.raises(error, match=says):
        prepare(**arguments)


def test_check_and_close_are_harmless_where_nothing_native_runs():
    latent_tail.check()
    latent_tail.close()
    latent_tail.close()


def test_compiler_options_are_accepted_on_every_platform():
    step = jax.jit(jnp.sin, compiler_options=latent_tail.compiler_options())
    assert step(jnp.zeros(2)).shape == (2,)

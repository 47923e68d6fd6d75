"""What a moe_tail is lowered to: which calls, and when the up-projection is part of one."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from harness import make_mesh
from jax.experimental.compute_on import compute_on
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import UnavailableError, choice
from jax_latent_tail.communicator.communicator import Decision

TP, L, H = 4, 24, 64

CALL = re.compile(r"stablehlo\.custom_call @jax_latent_tail_(\w+)\((.*?)\)(.*)")


def arguments(tokens, residual=True, batch=()):
    shapes = [(TP * tokens, L), (TP * tokens, H), (L,), (L, H)] + [(tokens, H)] * residual
    return [jax.ShapeDtypeStruct((*batch, *shape), jnp.bfloat16) for shape in shapes]


def sharded(residual=True, **options):
    specs = (P("tp"), P("tp"), P(), P(None, "tp")) + (P(),) * residual
    tail = functools.partial(latent_tail.moe_tail, axis_name="tp", **options)
    return jax.shard_map(tail, mesh=make_mesh((TP,)), in_specs=specs, out_specs=P())


class Calls:
    """The package's calls in a lowered program, in order, and whether there is another product."""

    def __init__(self, function, *arrays, platform="cuda"):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,))
        self.text = lowered.as_text()
        self.names, self.operands = [], []
        for platform_of_call, operands, rest in CALL.findall(self.text):
            assert platform_of_call == platform
            number = {
                name: int(re.search(rf"{name} = (-?\d+)", rest)[1])
                for name in ("latent_dim", "hidden_dim", "max_tokens")
            }
            gathers = re.search(r"gathers = (\w+)", rest)[1] == "true"
            name = "up_gather_add" if number["latent_dim"] else "all_gather_add"
            self.names.append((name if gathers else "fused", number["max_tokens"]))
            self.operands.append(operands.count("%"))
        self.products = self.text.count("stablehlo.dot_general")


@pytest.fixture
def gpus(monkeypatch):
    """Lets programs be lowered for GPUs as if the devices were some; returns what was decided."""
    refused = {}
    decided = []

    def decide(platform, table, spec, devices, obstacle=None):
        decided.append(spec)
        reason = refused.get(spec.op)
        return Decision("xla", reason) if reason else Decision(platform, "as if")

    monkeypatch.setitem(choice._DEVICE_PLATFORM, "cuda", "cpu")
    monkeypatch.setattr(choice.communicator, "decide", decide)
    decide.refused, decide.specs = refused, decided
    yield decide
    choice.forget()


@pytest.mark.parametrize("implementation", [None, "cuda"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("tokens", [1, 31, 32])
def test_few_tokens_are_two_calls_without_another_product(tokens, residual, implementation, gpus):
    calls = Calls(sharded(residual, implementation=implementation), *arguments(tokens, residual))
    assert calls.names == [("fused", 128), ("up_gather_add", 32)]
    assert calls.operands == [3, 3 + residual]
    assert calls.products == 0
    assert "stablehlo.all_gather" not in calls.text


@pytest.mark.parametrize("implementation", [None, "cuda"])
@pytest.mark.parametrize("tokens", [33, 128])
def test_more_tokens_are_two_calls_around_a_product_of_xla(tokens, implementation, gpus):
    calls = Calls(sharded(implementation=implementation), *arguments(tokens))
    assert calls.names == [("fused", 128), ("all_gather_add", 128)]
    assert calls.operands == [3, 2]
    assert calls.products == 1
    assert "33 tokens are more than max_tokens=32" in latent_tail.explain() or tokens != 33


def test_max_tokens_is_that_of_each_call_up_to_32(gpus):
    assert Calls(sharded(max_tokens=7), *arguments(7)).names == [("fused", 7), ("up_gather_add", 7)]
    calls = Calls(sharded(max_tokens=40), *arguments(40))
    assert calls.names == [("fused", 40), ("all_gather_add", 40)]
    plain = Calls(sharded(max_tokens=7), *arguments(8))
    assert (plain.names, plain.products) == ([], 1)
    assert [spec.max_tokens for spec in gpus.specs] == [7, 7, 40, 40]
    with pytest.raises(UnavailableError, match="8 tokens are more than max_tokens=7"):
        Calls(sharded(max_tokens=7, implementation="cuda"), *arguments(8))


def test_no_tokens_are_no_call(gpus):
    calls = Calls(sharded(implementation="cuda"), *arguments(0))
    assert (calls.names, calls.products, gpus.specs) == ([], 0, [])


def test_where_the_product_cannot_be_had_the_gather_is(gpus):
    gpus.refused["up_gather_add"] = "no kernel of this"
    for implementation in (None, "cuda"):
        calls = Calls(sharded(implementation=implementation), *arguments(3))
        assert calls.names == [("fused", 128), ("all_gather_add", 128)]
        assert calls.products == 1
    gpus.refused["all_gather_add"] = "nor of that"
    assert Calls(sharded(), *arguments(3)).names == [("fused", 128)]
    with pytest.raises(UnavailableError, match="nor of that"):
        Calls(sharded(implementation="cuda"), *arguments(3))


def test_sizes_that_no_kernel_serves_are_plain(gpus):
    hidden = 4 * TP
    shapes = [(TP * 3, L), (TP * 3, hidden), (L,), (L, hidden), (3, hidden)]
    calls = Calls(sharded(), *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert (calls.names, calls.products, gpus.specs) == ([], 1, [])


def test_plain_collectives_where_they_are_asked_for(gpus):
    calls = Calls(sharded(implementation="xla"), *arguments(3))
    assert (calls.names, calls.products, gpus.specs) == ([], 1, [])
    with pytest.raises(UnavailableError, match=r"implementation='cpu'.*lowered for cuda"):
        Calls(sharded(implementation="cpu"), *arguments(3))


@pytest.mark.parametrize(
    ("batch", "names", "products"),
    [
        (4, [("fused", 128), ("up_gather_add", 32)], 0),
        (5, [("fused", 128), ("all_gather_add", 128)], 1),
    ],
)
def test_a_batch_is_one_call_of_all_its_tokens(batch, names, products, gpus):
    mapped = jax.vmap(sharded(), (0, 0, None, None, 0))
    routed, shared, _, _, residual = arguments(8, batch=(batch,))
    _, _, gamma, w_up, _ = arguments(8)
    calls = Calls(mapped, routed, shared, gamma, w_up, residual)
    assert (calls.names, calls.products) == (names, products)
    assert f"tensor<{8 * batch}x{H}xbf16>" in calls.text


def test_a_batch_of_projections_is_a_batch_of_products_and_one_gather(gpus):
    mapped = jax.vmap(sharded(), (None, None, None, 0, None))
    routed, shared, gamma, _, residual = arguments(8)
    w_up = arguments(8, batch=(5,))[3]
    calls = Calls(mapped, routed, shared, gamma, w_up, residual)
    assert calls.names == [("fused", 128), ("all_gather_add", 128)]
    assert calls.products == 1
    assert "stablehlo.while" not in calls.text
    assert f"tensor<{8 * 5}x{H}xbf16>" in calls.text


def test_the_call_is_made_beside_its_derivative(gpus):
    def loss(*arrays):
        return sharded()(*arrays).astype(jnp.float32).sum()

    calls = Calls(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), *arguments(3))
    assert calls.names == [("fused", 128), ("up_gather_add", 32)]


def test_under_compute_on_it_is_plain(gpus):
    """A call there might run beside another one, on the same workspace."""
    calls = Calls(compute_on("device_host")(jax.jit(sharded())), *arguments(3))
    assert (calls.names, gpus.specs) == ([], [])
    assert "compute_on('device_host') may run it beside another call" in latent_tail.explain()


def test_an_exported_program_is_plain(gpus):
    exported = jax.export.export(jax.jit(sharded()), platforms=["cuda"])(*arguments(3))
    assert "custom_call @jax_latent_tail" not in exported.mlir_module()
    assert gpus.specs == []


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("max_tokens", [16, 128])
def test_prepare_makes_what_is_lowered(residual, max_tokens, gpus, monkeypatch):
    monkeypatch.setattr(latent_tail.lifecycle, "_platform", lambda mesh: "cuda")
    prepare = functools.partial(
        latent_tail.prepare, make_mesh((TP,)), "tp", hidden_dim=H, max_tokens=max_tokens
    )
    fused = prepare(latent_dim=L)
    few = prepare(latent_dim=L, gather=True, residual=residual)
    many = prepare(gather=True, residual=residual)
    assert [made.implementation for made in (fused, few, many)] == ["cuda"] * 3
    for tokens, gather in ((3, few), (33, many))[: 1 + (max_tokens > 16)]:
        gpus.specs.clear()
        Calls(sharded(residual, max_tokens=max_tokens), *arguments(tokens, residual))
        assert gpus.specs == [fused.spec, gather.spec]


# On CPUs the product is always XLA's.


@pytest.mark.parametrize("implementation", [None, "cpu"])
@pytest.mark.parametrize("tokens", [1, 32, 33])
def test_on_cpus_the_gather_is_a_call_and_the_product_is_not(tokens, implementation):
    function = sharded(implementation=implementation)
    calls = Calls(function, *arguments(tokens), platform="cpu")
    assert calls.names == [("fused", 128), ("all_gather_add", 128)]
    assert calls.products == 1


def test_on_cpus_one_can_insist_on_what_there_is():
    plain = Calls(sharded(implementation="xla"), *arguments(3), platform="cpu")
    assert (plain.names, plain.products) == ([], 1)
    with pytest.raises(UnavailableError, match=r"implementation='cuda'.*lowered for cpu"):
        Calls(sharded(implementation="cuda"), *arguments(3), platform="cpu")
    with pytest.raises(UnavailableError, match="4 tokens are more than max_tokens=3"):
        Calls(sharded(max_tokens=3, implementation="cpu"), *arguments(4), platform="cpu")
    plain = Calls(sharded(max_tokens=3), *arguments(4), platform="cpu")
    assert (plain.names, plain.products) == ([], 1)


def test_another_platform_has_plain_collectives():
    calls = Calls(sharded(), *arguments(3), platform="tpu")
    assert (calls.names, calls.products) == ([], 1)

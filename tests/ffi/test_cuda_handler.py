"""The CUDA handlers without a GPU: JAX's CPU client calls them, a stand-in driver keeps launches.

So attributes, buffers and errors take their real way through XLA's FFI.
"""

import ctypes
import functools
import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_latent_tail import native
from jax_latent_tail.kernels import abi
from jax_latent_tail.spec import TailSpec, gather_spec

HERE = os.path.dirname(__file__)
TARGET = "jax_latent_tail_test_shim"
CONTROL = 0x7F00_0000_0000
STREAM = 0x5712EA

SPEC = TailSpec(
    tp=2, latent_dim=16, hidden_dim=32, top_k=None, eps=1e-5, fp32_internal=True, max_tokens=8
)
TABLE = ((0, 1),)
KERNELS = [native.CudaKernel(0xF00, 4, 128, 100), native.CudaKernel(0xF01, 1, 480, 200)]
PLANS = [(int(tokens >= 5), 10 + tokens) for tokens in range(1, 9)]


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32), ("cluster", ctypes.c_uint32 * 3),
        ("num_attributes", ctypes.c_uint32), ("pdl", ctypes.c_uint32),
        ("parameters", ctypes.c_uint64 * 17),
    ]  # fmt: skip

    def parameter(self, name):
        names = [field[0] for field in abi.LaunchParams._fields_]
        return self.parameters[names.index(name)]


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "these tests need a C++ compiler"
    path = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
        + [os.path.join(HERE, "cuda_shim.cc"), "-o", str(path)],
        check=True,
        timeout=120,
    )
    shim = ctypes.CDLL(str(path))
    shim.shim_last.restype = ctypes.POINTER(Launch)
    shim.shim_launches.restype = ctypes.c_uint64
    jax.devices()
    library = native.Library(native.expected_path())
    assert library.open_driver(str(path)) is None
    handle = library.handle
    shim.shim_forward_to(handle.latent_tail_cuda_initialize, handle.latent_tail_cuda_execute)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(shim.shim_execute), platform="cpu")
    shim.native_library = library
    return shim


_records = []  # the library reads them as long as the process lives


class Registered:
    """A rank of `spec` on the first device, with a record of its own."""

    def __init__(self, shim, spec=SPEC, table=TABLE, **options):
        self.record = abi.Record()
        _records.append(self.record)
        declared = {"rank": 1, "control": CONTROL, "call_hash": 77, "slots": 9, "pdl": True}
        declared |= options
        self.handle = shim.native_library.add_cuda_rank(
            ordinal=0,
            devices=[d for group in table for d in group],
            spec=spec,
            record=ctypes.addressof(self.record),
            kernels=KERNELS,
            plans=PLANS,
            **declared,
        )


def call(arrays, results, spec=SPEC, table=TABLE, **changes):
    """Runs the handlers on the CPU; returns the shapes of what came out."""
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    attributes = {**native.attributes(table, spec), **changes}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    function = jax.jit(lambda *arrays: jax.ffi.ffi_call(TARGET, types)(*arrays, **attributes))
    return jax.block_until_ready(function(*arrays))


def bf16(*shape):
    return jnp.zeros(shape, jnp.bfloat16)


def results_of(tokens, spec=SPEC):
    halves = [spec.latent_dim, spec.hidden_dim and spec.shard_dim]
    return [((tokens, columns), jnp.bfloat16) for columns in halves if columns]


def fused(tokens, **changes):
    return call([bf16(tokens, 16), bf16(16), bf16(tokens, 32)], results_of(tokens), **changes)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_call_launches_the_kernel_that_its_number_of_tokens_is_planned_for(shim, tokens):
    Registered(shim)
    fused(tokens)
    launch = shim.shim_last().contents
    index, ctas = PLANS[tokens - 1]
    kernel = KERNELS[index]
    assert launch.function == kernel.function
    assert launch.stream == STREAM
    assert list(launch.grid) == [ctas, kernel.cluster, 2]
    assert list(launch.cluster) == [1, kernel.cluster, 1]
    assert list(launch.block) == [kernel.threads, 1, 1]
    assert launch.smem_bytes == kernel.smem_bytes
    wanted = {
        "control": CONTROL, "tokens": tokens, "slots": 9, "permuted_rows": 0, "top_k": 0,
        "rank": 1, "roles": abi.BOTH_MASK, "channel": 0, "call_hash": 77, "weights": 0,
        "indices": 0, "eps": int(np.float32(1e-5).view(np.uint32)),
    }  # fmt: skip
    assert {name: launch.parameter(name) for name in wanted} == wanted
    arrays = [launch.parameter(name) for name in ("rows", "gamma", "shared", "latent", "shard")]
    assert 0 not in arrays
    assert len(set(arrays)) == 5


@pytest.mark.parametrize("pdl", [False, True])
def test_the_pdl_attribute_is_set_where_it_was_asked_for(shim, pdl):
    Registered(shim, pdl=pdl)
    fused(1)
    launch = shim.shim_last().contents
    assert (launch.num_attributes, launch.pdl) == ((2, 1) if pdl else (1, 0))


def test_one_half_launches_one_role(shim):
    routed = TailSpec(2, 16, None, None, 1e-5, True, 8)
    Registered(shim, routed)
    call([bf16(3, 16), bf16(16)], results_of(3, routed), routed)
    launch = shim.shim_last().contents
    assert (launch.grid[2], launch.parameter("roles")) == (1, abi.ROUTED_MASK)
    assert launch.parameter("shared") == launch.parameter("shard") == 0

    shared = TailSpec(2, None, 32, None, 1e-5, True, 8)
    Registered(shim, shared)
    call([bf16(3, 32)], results_of(3, shared), shared)
    launch = shim.shim_last().contents
    assert (launch.grid[2], launch.parameter("roles")) == (1, abi.SHARED_MASK)
    assert launch.parameter("rows") == launch.parameter("gamma") == launch.parameter("latent") == 0


@pytest.mark.parametrize("rows", [0, 5, 300])
def test_a_finalize_passes_its_rows_and_slots(shim, rows):
    spec = TailSpec(2, 16, 32, 4, 1e-5, True, 8)
    Registered(shim, spec)
    arrays = [bf16(rows, 16), bf16(3, 4), jnp.zeros((3, 4), jnp.int32), bf16(16), bf16(3, 32)]
    call(arrays, results_of(3, spec), spec)
    launch = shim.shim_last().contents
    assert launch.parameter("permuted_rows") == rows
    assert launch.parameter("top_k") == 4
    assert launch.parameter("tokens") == 3
    assert launch.parameter("weights") != 0
    assert launch.parameter("indices") != 0


@pytest.mark.parametrize("has_residual", [False, True])
def test_an_all_gather_add_passes_its_rows_in_the_places_of_the_shared_half(shim, has_residual):
    spec = gather_spec(2, 16, has_residual, 8)
    Registered(shim, spec)
    arrays = [bf16(3, 16)] + [bf16(3, 32)] * has_residual
    call(arrays, [((3, 32), jnp.bfloat16)], spec)
    launch = shim.shim_last().contents
    assert (launch.grid[2], launch.parameter("roles")) == (1, abi.SHARED_MASK)
    assert (launch.parameter("rows") != 0) == has_residual
    assert 0 not in (launch.parameter("shared"), launch.parameter("shard"))
    assert launch.parameter("gamma") == launch.parameter("latent") == 0
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*operand"):
        call(arrays[:-1] if has_residual else arrays * 2, [((3, 32), jnp.bfloat16)], spec)


def projecting(has_residual):
    return gather_spec(2, 16, has_residual, 8, latent_dim=24)


def operands_of_projection(tokens, has_residual=True):
    operands = [bf16(tokens, 24), bf16(24, 16), bf16(tokens, 16)]
    return operands + [bf16(tokens, 32)] * has_residual


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("tokens", [1, 8])
def test_an_up_projection_is_passed_beside_what_it_is_gathered_with(shim, tokens, has_residual):
    spec = projecting(has_residual)
    Registered(shim, spec, slots=1)
    arrays = operands_of_projection(tokens, has_residual)
    (gathered,) = call(arrays, [((tokens, 32), jnp.bfloat16)], spec)
    launch = shim.shim_last().contents
    index, ctas = PLANS[tokens - 1]
    assert list(launch.grid) == [ctas, KERNELS[index].cluster, 1]
    latent, w_up, shard, *residual = (array.unsafe_buffer_pointer() for array in arrays)
    wanted = {
        "latent": latent, "weights": w_up, "shared": shard, "rows": residual[0] if residual else 0,
        "shard": gathered.unsafe_buffer_pointer(), "indices": 0, "gamma": 0, "control": CONTROL,
        "tokens": tokens, "slots": 1, "permuted_rows": 0, "top_k": 0, "rank": 1,
        "roles": abi.SHARED_MASK, "channel": 0, "call_hash": 77,
    }  # fmt: skip
    assert {name: launch.parameter(name) for name in wanted} == wanted


def test_a_gather_with_and_without_a_projection_have_communicators_of_their_own(shim):
    Registered(shim, projecting(True), control=CONTROL + 512)
    plain = gather_spec(2, 16, True, 8)
    Registered(shim, plain, control=CONTROL + 1024)
    result = [((3, 32), jnp.bfloat16)]
    call(operands_of_projection(3), result, projecting(True))
    assert shim.shim_last().contents.parameter("control") == CONTROL + 512
    call(operands_of_projection(3)[2:], result, plain)
    assert shim.shim_last().contents.parameter("control") == CONTROL + 1024


WRONG_PROJECTIONS = {
    "no residual": ({3: None}, "no operand 'residual'"),
    "one operand too many": ({4: bf16(1)}, "5 operands instead of 4"),
    "a latent of another width": ({0: bf16(3, 16)}, r"latent has shape \[3, 16\]"),
    "a w_up of fewer rows": ({1: bf16(16, 16)}, r"w_up has shape \[16, 16\]"),
    "a w_up that is transposed": ({1: bf16(16, 24)}, r"w_up has shape \[16, 24\]"),
    "the w_up of all ranks": ({1: bf16(24, 32)}, r"w_up has shape \[24, 32\]"),
    "a shard of other tokens": ({2: bf16(2, 16)}, r"x has shape \[2, 16\]"),
    "a residual of one rank": ({3: bf16(3, 16)}, r"residual has shape \[3, 16\]"),
    "an fp32 latent": ({0: jnp.zeros((3, 24))}, "latent has dtype"),
    "an fp32 w_up": ({1: jnp.zeros((24, 16))}, "w_up has dtype"),
    "an fp32 shard": ({2: jnp.zeros((3, 16))}, "x has dtype"),
}


@pytest.mark.parametrize("case", WRONG_PROJECTIONS)
def test_operands_of_a_projection_that_contradict_the_attributes_are_refused(shim, case):
    Registered(shim, projecting(True))
    launches = shim.shim_launches()
    changes, message = WRONG_PROJECTIONS[case]
    operands = dict(enumerate(operands_of_projection(3))) | changes
    arrays = [array for array in operands.values() if array is not None]
    result = [((3, 32), jnp.bfloat16)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{message}"):
        call(arrays, result, projecting(True))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*result"):
        call(operands_of_projection(3), result * 2, projecting(True))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*9 tokens"):
        call(operands_of_projection(9), [((9, 32), jnp.bfloat16)], projecting(True))
    assert shim.shim_launches() == launches


WRONG_BUFFERS = {
    "no operands": ([], results_of(2), "no operand"),
    "one operand too many": (
        [bf16(2, 16), bf16(16), bf16(2, 32), bf16(1)], results_of(2), "4 operands instead of 3",
    ),
    "one result too few": (
        [bf16(2, 16), bf16(16), bf16(2, 32)], results_of(2)[:1], "no result 'shard'",
    ),
    "one result too many": (
        [bf16(2, 16), bf16(16), bf16(2, 32)], results_of(2) * 2, "4 results instead of 2",
    ),
    "rows of another width": (
        [bf16(2, 8), bf16(16), bf16(2, 32)], results_of(2), r"rows has shape \[2, 8\]",
    ),
    "rows of another rank": (
        [bf16(2, 16, 1), bf16(16), bf16(2, 32)], results_of(2), "rows has shape",
    ),
    "gamma of another length": (
        [bf16(2, 16), bf16(15), bf16(2, 32)], results_of(2), r"gamma has shape \[15\]",
    ),
    "shared of other tokens": (
        [bf16(2, 16), bf16(16), bf16(3, 32)], results_of(2), r"shared has shape \[3, 32\]",
    ),
    "a latent of other tokens": (
        [bf16(2, 16), bf16(16), bf16(2, 32)], [((1, 16), jnp.bfloat16), results_of(2)[1]],
        r"latent has shape \[1, 16\]",
    ),
    "a shard of another width": (
        [bf16(2, 16), bf16(16), bf16(2, 32)], [results_of(2)[0], ((2, 32), jnp.bfloat16)],
        r"shard has shape \[2, 32\]",
    ),
    "fp32 rows": (
        [jnp.zeros((2, 16)), bf16(16), bf16(2, 32)], results_of(2), "rows has dtype",
    ),
    "an fp32 latent": (
        [bf16(2, 16), bf16(16), bf16(2, 32)], [((2, 16), jnp.float32), results_of(2)[1]],
        "latent has dtype",
    ),
    "more than max_tokens": (
        [bf16(9, 16), bf16(16), bf16(9, 32)], results_of(9), "9 tokens; allowed: up to max_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_BUFFERS)
def test_buffers_that_contradict_the_attributes_are_refused(shim, case):
    Registered(shim)
    launches = shim.shim_launches()
    arrays, results, message = WRONG_BUFFERS[case]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{message}"):
        call(arrays, results)
    assert shim.shim_launches() == launches
    fused(2)  # all goes on
    assert shim.shim_launches() == launches + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": None}, "'tp'"),
        ({"devices": None}, "'devices'"),
        ({"eps": np.float64(1e-5)}, "'eps'"),
        ({"tp": 0}, "contradict"),
        ({"tp": 3}, "contradict"),
        ({"gathers": np.bool_(True), "top_k": 2}, "contradict"),
        ({"gathers": np.bool_(True), "hidden_dim": 0}, "contradict"),
        ({"has_residual": np.bool_(True)}, "contradict"),
        ({"latent_dim": -16}, "contradict"),
        ({"max_tokens": 0}, "contradict"),
        ({"devices": np.zeros(3, np.int64)}, "contradict"),
    ],
)
def test_attributes_that_make_no_sense_are_refused(shim, changes, message):
    Registered(shim)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{message}"):
        fused(2, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": np.array([1, 0])},
        {"devices": np.array([0, 1, 2, 3])},
        {"eps": np.float32(2e-5)},
        {"fp32_internal": np.bool_(False)},
        {"max_tokens": 9},
    ],
)
def test_a_call_finds_only_the_communicator_of_its_devices_and_description(shim, changes):
    Registered(shim)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"FAILED_PRECONDITION.*latent_tail.prepare"
    ):
        fused(2, **changes)


def test_a_closed_communicator_takes_no_call_and_a_later_one_takes_its_place(shim):
    old = Registered(shim)
    shim.native_library.close_cuda_rank(old.handle)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"FAILED_PRECONDITION.*is closed"):
        fused(2)
    Registered(shim, control=CONTROL + 512)
    fused(2)
    assert shim.shim_last().contents.parameter("control") == CONTROL + 512


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (abi.DEADLINE, "DEADLINE_EXCEEDED", r"nothing came from ranks \[0, 3\] in time"),
        (abi.MISMATCH, "ABORTED", r"ranks \[0, 3\] made a different call"),
        (abi.TOLD, "ABORTED", r"ranks \[0, 3\] failed"),
    ],
)
def test_after_a_failure_no_call_is_made_until_the_record_is_cleared(shim, code, status, message):
    rank = Registered(shim)
    launches = shim.shim_launches()
    rank.record.ranks = 0b1001
    rank.record.code = code
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{status}.*{message}"):
            fused(2)
    assert shim.shim_launches() == launches
    rank.record.code = 0
    fused(2)
    assert shim.shim_launches() == launches + 1


def test_a_refusal_of_the_driver_is_an_error_that_names_it(shim):
    Registered(shim)
    shim.shim_set_status(700)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_FOR_THE_TEST"):
            fused(2)
    finally:
        shim.shim_set_status(0)
    fused(2)


def test_a_program_finds_its_communicator_after_a_thousand_others(shim):
    for group in range(1000):
        Registered(shim, table=((2 * group + 10, 2 * group + 11),))
    Registered(shim, control=CONTROL + 1024)
    fused(2)
    assert shim.shim_last().contents.parameter("control") == CONTROL + 1024
    call_other = functools.partial(fused, table=((110, 111),))
    call_other(2)
    assert shim.shim_last().contents.parameter("control") == CONTROL


def test_capture_can_be_switched_off_for_what_is_lowered_next(monkeypatch):
    assert native.target("cuda") == native.CUDA_TARGET
    monkeypatch.setenv("JAX_LATENT_TAIL_CAPTURE", "0")
    assert native.target("cuda") == native.CUDA_TARGET_UNCAPTURED
    assert native.target("cpu") == native.CPU_TARGET


def test_a_library_of_another_interface_is_refused(tmp_path):
    source = tmp_path / "other.cc"
    source.write_text('extern "C" int latent_tail_interface_version() { return 99; }')
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "other.so")],
        check=True,
        timeout=60,
    )
    with pytest.raises(native.UnavailableError, match="interface version 99"):
        native.Library(tmp_path / "other.so")

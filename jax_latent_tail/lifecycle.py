"""Around the calls: communicators ahead of time, what was chosen and why, failures, the end."""

from typing import Any

from jax.sharding import Mesh

from jax_latent_tail import choice
from jax_latent_tail.checks import check_axis_names, check_count, check_options
from jax_latent_tail.choice import Choice
from jax_latent_tail.communicator import communicator
from jax_latent_tail.errors import ArgumentTypeError, ArgumentValueError
from jax_latent_tail.spec import DEFAULT_MAX_TOKENS, TailSpec, gather_spec


def prepare(
    mesh: Mesh,
    axis_name: str | tuple[str, ...],
    *,
    latent_dim: int | None = None,
    hidden_dim: int | None = None,
    top_k: int | None = None,
    gather: bool = False,
    residual: bool = False,
    eps: float = 1e-6,
    fp32_internal: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> Choice:
    """Makes the communicator of a kind of call ahead of the first program that has such a call.

    Optional where programs are compiled in the process that runs them; needed before a program
    that was compiled elsewhere, which is never lowered here. Every process with a device in `mesh`
    must call it, with the same arguments.

    Args:
      mesh: the mesh of the shard_map, with its devices.
      axis_name: the group, as in the call.
      latent_dim: L of `fused` and `all_reduce_rms_norm`, and with `gather` of the up-projection;
        None for the others.
      hidden_dim: H, a multiple of tp; None for `all_reduce_rms_norm`.
      top_k: K where the call finalizes expert rows.
      gather: for `all_gather_add`, or with a latent_dim for the up-projection that ends in one. A
        `moe_tail` makes calls of two kinds: `fused`, and on GPUs the latter for few tokens (see
        docs/cuda.md), the former for more, and on CPUs for any number.
      residual: whether the gather adds one.
      eps, fp32_internal, max_tokens, implementation: as in the call.

    Returns:
      What calls of this kind take on these devices, and why.

    Raises:
      ArgumentTypeError, ArgumentValueError: for an argument that is not allowed.
      UnavailableError: `implementation` was insisted on and cannot serve the calls.
      RendezvousError, DisagreementError: not every process came, or they differ.
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError("mesh", f"a {type(mesh).__name__}", "a jax.sharding.Mesh")
    names = check_axis_names(axis_name, f"one of {mesh.axis_names}, or a tuple of such names")
    for name in names:
        if name not in mesh.axis_names:
            raise ArgumentValueError("axis_name", repr(name), f"one of {mesh.axis_names}")
    if latent_dim is None and hidden_dim is None:
        raise ArgumentValueError("latent_dim", None, "an integer, where hidden_dim is None")
    if latent_dim is None and top_k is not None:
        raise ArgumentValueError("top_k", top_k, "None, where latent_dim is None")
    if gather and hidden_dim is None:
        raise ArgumentValueError("hidden_dim", None, "an integer, where gather is True")
    if gather and top_k is not None:
        raise ArgumentValueError("top_k", top_k, "None, where gather is True")
    if residual and not gather:
        raise ArgumentValueError("residual", residual, "False, where gather is False")
    sizes: dict[str, Any] = {"latent_dim": latent_dim, "hidden_dim": hidden_dim, "top_k": top_k}
    for argument, value in sizes.items():
        if value is not None:
            sizes[argument] = check_count(argument, value)
    check_options(eps, fp32_internal, max_tokens, implementation)
    tp = 1
    for name in names:
        tp *= mesh.shape[name]
    if hidden_dim is not None and hidden_dim % tp:
        raise ArgumentValueError("hidden_dim", hidden_dim, f"a multiple of the {tp} ranks")
    if gather:
        shard_dim = sizes["hidden_dim"] // tp
        spec = gather_spec(tp, shard_dim, bool(residual), int(max_tokens), sizes["latent_dim"])
    else:
        spec = TailSpec(
            tp=tp,
            eps=float(eps),
            fp32_internal=bool(fp32_internal),
            max_tokens=int(max_tokens),
            **sizes,
        )
    return choice.choose(_platform(mesh), spec, None, mesh, names, insisted=implementation)


def _platform(mesh: Mesh) -> str:
    """What a program on the mesh is lowered for: JAX calls both kinds of GPU "gpu"."""
    device = mesh.devices.flat[0]
    if device.platform == "gpu":
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return device.platform


def explain() -> str:
    """A line for each kind of call so far: the implementation that was chosen, and why."""
    return "\n".join(map(str, choice.choices()))


def check() -> None:
    """Raises if a native call of this process has failed.

    Looks at memory of the host only, so it returns at once, whatever the device does.

    Raises:
      CommunicatorError: names the rank, the token and what went wrong.
    """
    communicator.check()


def reset() -> None:
    """Makes all communicators anew after a failure, for programs that are compiled already.

    Collective: to be called by every process that has devices in them, once each has seen the
    failure and has no program running. Captured graphs are served again too. A process that has
    died cannot be made up for: that takes a new job.

    Raises:
      CommunicatorError: a communicator cannot be made any more; the message says why.
      RendezvousError: some process did not come; another reset by all may do.
    """
    communicator.reset_all()


def close() -> None:
    """Releases all memory that native implementations share with other ranks and processes.

    To be called by every process, once no program is running; otherwise done when the interpreter
    exits. Programs that were lowered before raise an error afterwards, until `prepare` makes new
    communicators for their calls; functions that are traced anew make theirs.
    """
    communicator.close_all()
    choice.forget()


def compiler_options() -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=...)` with which XLA captures small bodies on GPU.

    By default XLA turns a computation, say the body of a scan, into a CUDA graph only from five
    commands on. A tail between a few others is then launched call by call, which costs more than
    the tail itself. Has no effect on other platforms.
    """
    return {"xla_gpu_graph_min_graph_size": 1}

"""Compile kernels to cubins and a manifest, on any machine: no GPU is needed.

    python -m jax_latent_tail.kernels.export                    # the default matrix
    python -m jax_latent_tail.kernels.export --spec KEY ...     # these variants only
    python -m jax_latent_tail.kernels.export --list             # keys of the default matrix

Needs the extra `export` (nvidia-cutlass-dsl). A key is `KernelVariant.key`, for example
sm_90-tp8-l3584-h7168-k0-bf16-unicast. The output folder gets KEY.cubin files and manifest.json, the
layout that `store` reads; variants already there from the same sources are kept.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import multiprocessing
import os
import pathlib
import tempfile
import typing
from collections.abc import Iterable

from jax_latent_tail.kernels import abi, cubin, geometry, store
from jax_latent_tail.kernels.variant import KernelVariant, default_matrix


class Compiled(typing.NamedTuple):
    """A compiled variant: the cubin, its manifest entry (`store.Entry`), the PTX it came from."""

    cubin: bytes
    entry: dict
    ptx: str


def compile_variant(variant: KernelVariant, kernel: type | None = None) -> Compiled:
    """Compile one variant. `kernel` replaces that of `module`, for measurements."""
    import cuda.bindings.driver as cuda
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64, Uint32

    from jax_latent_tail.kernels.module import Module

    module = Module(variant, kernel)
    arguments = [Int64(0)] * 8 + [Int32(1)] * 7 + [Uint32(0), Float32(0.0)]
    with tempfile.TemporaryDirectory() as scratch:
        compiled = cute.compile(
            module,
            *arguments,
            stream=cuda.CUstream(0),
            options=f"--keep-cubin --keep-ptx --dump-dir={scratch} --gpu-arch {variant.arch}",
        )
        data, ptx = compiled.__cubin__, compiled.__ptx__
    return Compiled(data, _entry(variant, data), ptx)


def _entry(variant: KernelVariant, data: bytes) -> dict:
    info = cubin.inspect(data)
    kernels = []
    shapes = geometry.entries(variant.tp, variant.latent, variant.hidden, variant.op)
    for i, shape in enumerate(shapes):
        symbol = f"latent_tail_{i}"
        kernels.append(
            {
                "symbol": symbol,
                "cluster": shape.cluster,
                "threads": shape.threads,
                "smem_bytes": shape.smem_bytes,
                "registers": info[symbol].registers,
                "stack_bytes": info[symbol].stack_bytes,
                "parameters": [list(parameter) for parameter in info[symbol].parameters],
            }
        )
    return {
        "key": variant.key,
        "variant": dataclasses.asdict(variant),
        "abi_version": abi.ABI_VERSION,
        "source_hash": store.source_hash(),
        "compiler": f"nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}",
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "kernels": kernels,
    }


def _compile_into(out: pathlib.Path, variant: KernelVariant) -> dict:
    compiled = compile_variant(variant)
    store.write_atomically(out / f"{variant.key}.cubin", compiled.cubin)
    return compiled.entry


def export(
    out: pathlib.Path, variants: list[KernelVariant], jobs: int = 1, progress: bool = True
) -> None:
    """Compile what is missing of `variants` into `out` and write the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    entries = {
        key: entry
        for key, entry in store.read_manifest(out).items()
        if store.refusal(entry, out / f"{key}.cubin") is None
    }
    missing = [variant for variant in variants if variant.key not in entries]
    # A process each: the compiler keeps global state, and one that dies must not take all down.
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        running = [pool.submit(_compile_into, out, variant) for variant in missing]
        for done in _with_progress(
            concurrent.futures.as_completed(running), len(running), progress
        ):
            entry = done.result()
            entries[entry["key"]] = entry
    store.write_manifest(out, entries)


def _with_progress(iterable: Iterable, total: int, progress: bool) -> Iterable:
    if not progress:
        return iterable
    import tqdm

    return tqdm.tqdm(iterable, total=total, unit="cubin")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_latent_tail.kernels.export", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=pathlib.Path, default=store.package_folder(), metavar="DIR")
    parser.add_argument("--spec", action="append", metavar="KEY", help="a variant; may be repeated")
    parser.add_argument("--arch", action="append", help="of the default matrix, this arch only")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--list", action="store_true", help="print keys instead of compiling")
    options = parser.parse_args(argv)
    if options.spec:
        variants = [KernelVariant.parse(key) for key in options.spec]
    else:
        variants = [v for v in default_matrix() if not options.arch or v.arch in options.arch]
    if options.list:
        print(*(variant.key for variant in variants), sep="\n")
        return
    store.require_compiler(variants[0])
    export(options.out, variants, options.jobs, progress=not options.quiet)


if __name__ == "__main__":
    main()

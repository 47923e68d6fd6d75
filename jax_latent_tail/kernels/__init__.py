"""The CUDA kernels, the binary interface between them and the host, and the store of cubins.

`abi`, `variant`, `geometry`, `cubin` and `store` need neither the compiler nor CUDA. `ptx`,
`protocol`, `collective`, `projection` and `module` are sources for nvidia-cutlass-dsl and are
imported only where something compiles.
"""

"""What a cubin says about its kernels, read from the ELF file without any CUDA tool."""

import collections.abc
import dataclasses
import struct

_KPARAM_INFO, _FRAME_SIZE, _REGCOUNT = 0x17, 0x11, 0x2F  # EIATTR codes
_SIZED = 0x04  # EIFMT_SVAL: a 16-bit size and that many bytes follow


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """Resources of one kernel.

    Attributes:
      parameters: (offset, size) in bytes of each parameter, in order.
      registers: per thread.
      stack_bytes: local memory per thread; 0 means nothing was spilled.
    """

    parameters: tuple[tuple[int, int], ...]
    registers: int
    stack_bytes: int


def _attributes(section: bytes) -> collections.abc.Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(section):
        form, code, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == _SIZED:
            yield code, section[at : at + size]
            at += size


def inspect(data: bytes) -> dict[str, KernelInfo]:
    """Kernels of a cubin by symbol.

    Raises:
      ValueError: not a whole CUDA ELF file.
    """
    try:
        return _inspect(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a whole cubin: {error}") from error


def _inspect(data: bytes) -> dict[str, KernelInfo]:
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a whole cubin: no 64-bit ELF header")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]

    def content(header: tuple[int, ...]) -> bytes:
        if header[4] + header[5] > len(data):
            raise ValueError("not a whole cubin: a section ends beyond the file")
        return data[header[4] : header[4] + header[5]]

    def text(strings: bytes, at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode()

    section_names = content(headers[names])
    sections = {text(section_names, header[0]): header for header in headers}
    symbols = content(sections[".symtab"])
    symbol_names = content(headers[sections[".symtab"][6]])

    def symbol(index: int) -> str:
        return text(symbol_names, struct.unpack_from("<I", symbols, index * 24)[0])

    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    for code, payload in _attributes(content(sections[".nv.info"])):
        if code in (_REGCOUNT, _FRAME_SIZE):
            index, value = struct.unpack("<II", payload)
            (registers if code == _REGCOUNT else stack)[symbol(index)] = value

    kernels = {}
    for name, header in sections.items():
        if not name.startswith(".nv.info."):
            continue
        kernel = name.removeprefix(".nv.info.")
        parameters = {}
        for code, payload in _attributes(content(header)):
            if code == _KPARAM_INFO:
                _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
                parameters[ordinal] = (offset, packed >> 18)
        kernels[kernel] = KernelInfo(
            parameters=tuple(parameters[i] for i in sorted(parameters)),
            registers=registers[kernel],
            stack_bytes=stack[kernel],
        )
    return kernels

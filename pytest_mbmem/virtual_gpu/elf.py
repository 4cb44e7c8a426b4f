"""What a shared library asks of others: the few parts of an ELF file that the builder needs, without binutils."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# From the System V ABI's ELF-64 object file format and the GNU symbol versioning extension.
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section index, value, size
_VERNEED = struct.Struct("<HHIII")  # version, count, file, auxiliary offset, next offset
_VERNAUX = struct.Struct("<IHHII")  # hash, flags, index, name, next offset
_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED = 1
_UNDEFINED = 0


@dataclass(frozen=True)
class Wanted:
    """An undefined symbol; `library` and `version` are set when the linker bound it to a versioned library."""

    symbol: str
    library: str | None = None  # "libcudart.so.13"
    version: str | None = None  # "libcudart.so.13", or another name the library gives its interface


@dataclass(frozen=True)
class Needs:
    """The libraries that a shared library names (DT_NEEDED) and the symbols that it takes from others."""

    libraries: tuple[str, ...]
    symbols: tuple[Wanted, ...]


def read_needs(path: Path) -> Needs:
    """Read a 64-bit little-endian ELF file. Raises `ValueError` for anything else."""
    with _opened(path) as file:
        return _needs(_File(file))


def read_names(path: Path) -> set[str]:
    """The dynamic symbols that a shared library defines or wants, and some more: all names of their table.

    A name that is the end of another one may be missing, since linkers store both as one; no C++ name is one's end.
    Raises `ValueError` as `read_needs` does.
    """
    with _opened(path) as opened:
        file = _File(opened)
        symbols = file.by_type.get(_SHT_DYNSYM)
        return set(file.content(file.sections[symbols[6]]).decode().split("\0")) if symbols else set()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Errors name the file."""
    with path.open("rb") as file:
        try:
            yield file
        except (struct.error, IndexError) as error:
            raise ValueError(f"{path}: damaged ELF file ({error})") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


class _File:
    """The table of an ELF file's sections."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", header, 40)
        entry_size, count = struct.unpack_from("<HH", header, 58)
        file.seek(table)
        raw = file.read(entry_size * count)
        self.sections = [_SECTION.unpack_from(raw, i * entry_size) for i in range(count)]
        self.by_type = {section[1]: section for section in self.sections}

    def content(self, section: tuple[int, ...]) -> bytes:
        self._file.seek(section[4])
        return self._file.read(section[5])


def _needs(file: _File) -> Needs:
    sections, by_type, content = file.sections, file.by_type, file.content
    if _SHT_DYNAMIC not in by_type or _SHT_DYNSYM not in by_type:
        return Needs((), ())
    dynamic, symbols = by_type[_SHT_DYNAMIC], by_type[_SHT_DYNSYM]
    names = content(sections[symbols[6]])
    libraries_names = content(sections[dynamic[6]])
    libraries = tuple(
        _text(libraries_names, value) for tag, value in struct.iter_unpack("<qQ", content(dynamic)) if tag == _DT_NEEDED
    )
    versions: dict[int, tuple[str, str]] = {}
    if _SHT_GNU_VERNEED in by_type:
        needed = by_type[_SHT_GNU_VERNEED]
        versions = dict(_versions(content(needed), content(sections[needed[6]])))
    indices = content(by_type[_SHT_GNU_VERSYM]) if _SHT_GNU_VERSYM in by_type else b""
    wanted = []
    for i, (name, _, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(content(symbols))):
        if section != _UNDEFINED or name == 0:
            continue
        index = struct.unpack_from("<H", indices, 2 * i)[0] & 0x7FFF if indices else 0
        library, version = versions.get(index, (None, None))
        wanted.append(Wanted(_text(names, name), library, version))
    return Needs(libraries, tuple(wanted))


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _versions(data: bytes, names: bytes) -> Iterator[tuple[int, tuple[str, str]]]:
    """Version index -> (library, version name)."""
    offset = 0
    while True:
        _, count, library, auxiliary, following = _VERNEED.unpack_from(data, offset)
        position = offset + auxiliary
        for _ in range(count):
            _, _, index, name, next_auxiliary = _VERNAUX.unpack_from(data, position)
            yield index & 0x7FFF, (_text(names, library), _text(names, name))
            position += next_auxiliary
        if not following:
            return
        offset += following

"""What compilers said before, on disk: one JSON file per compile, named by a hash of everything that can change its result.

The key holds the program with its source locations, the devices, every option and flag, and the versions of what compiles.
Locations count since a report names source lines; paths in them are made relative, so that a moved checkout still hits, and
what differs from process to process is masked. Beside a result stands, once somebody asked to have it explained, the compressed
dump of its compile. A file that can't be read is a miss; files are replaced atomically, so that two processes may share a folder.
"""

import hashlib
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from remat_kit.analysis.dump import DumpTexts
from remat_kit.analysis.hlo import LIBRARY_FOLDER
from remat_kit.files import source_roots, write_whole
from remat_kit.records import SCHEMA_VERSION, CompiledStep

_POINTER_CALL = "@CustomSPMDPartitioning"  # cuDNN attention and other custom partitionings: the config is id(callback)
_POINTER = re.compile(r'(backend_config = ")(\d+)(")')
_OWN_FRAME = re.compile(r'^(#loc\d+) = loc\("remat_kit/(?:verbs/|worker\.py)[^"]*":.*\)$', re.MULTILINE)
_NAMED_FRAME = re.compile(r'^(#loc\d+) = loc\("[^"]*"\((#loc\d+)\)\)$', re.MULTILINE)
_REPR_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of compile results.

    Attributes:
        folder: Made when first written to.
    """

    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    schema: int
    key: str
    step: CompiledStep


@dataclass(frozen=True, slots=True, kw_only=True)
class _DumpEntry:
    schema: int
    key: str
    texts: DumpTexts


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$REMAT_KIT_CACHE`, else `remat-kit` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own = environ.get("REMAT_KIT_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "remat-kit"


def cache_key(program: str, parts: object) -> str:
    """Hashes a canonical program and whatever else decides the result.

    Args:
        program: See `canonical_program`.
        parts: JSON data: target, options, flags, versions.

    Returns:
        64 hexadecimal digits.
    """
    data = msgspec.json.encode([SCHEMA_VERSION, parts, program], order="deterministic")
    return hashlib.sha256(data).hexdigest()


def canonical_program(text: str, roots: Iterable[str] | None = None) -> str:
    """Removes from a program's text what differs between processes and checkouts and means nothing.

    Args:
        text: StableHLO with locations.
        roots: Folders that paths are made relative to; None = the current folder and Python's search path.

    Returns:
        The text with relative paths, with the addresses of partitioning callbacks numbered in order of appearance, and without
        the addresses in Python reprs and the names and lines of our own callers, so that every verb finds what another compiled.
    """
    text = _without_callers(_relative(text, source_roots() if roots is None else roots))
    seen: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"{match[1]}callback {seen.setdefault(match[2], len(seen))}{match[3]}"

    lines = (_POINTER.sub(number, line) if _POINTER_CALL in line else line for line in text.split("\n"))
    return _REPR_ADDRESS.sub(" at 0x", "\n".join(lines))


def _without_callers(text: str) -> str:
    own = {match[1] for match in _OWN_FRAME.finditer(text)}
    text = _OWN_FRAME.sub(r'\1 = loc("remat_kit")', text)
    return _NAMED_FRAME.sub(lambda match: f"{match[1]} = loc(caller)" if match[2] in own else match[0], text)


def without_roots(texts: DumpTexts) -> DumpTexts:
    """A dump whose source files are relative to the current folder and Python's search path, as in `canonical_program`.

    Installed libraries keep their folder's name, so that a reader of the dump can tell them from the user's code.
    """
    hlo = texts.hlo.replace(f'"{sysconfig.get_path("purelib")}{os.sep}', f'"{LIBRARY_FOLDER}')
    return replace(texts, hlo=_relative(hlo, source_roots()))


def _relative(text: str, roots: Iterable[str]) -> str:
    for root in roots:
        text = text.replace(f'"{root}{os.sep}', '"')
    return text


def load(cache: Cache, key: str) -> CompiledStep | None:
    """What was stored under a key, marked `from_cache`; None = nothing readable."""
    try:
        entry = msgspec.json.decode(_path(cache, key).read_bytes(), type=_Entry)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if (entry.schema, entry.key) != (SCHEMA_VERSION, key):
        return None
    return replace(entry.step, from_cache=True)


def store(cache: Cache, key: str, step: CompiledStep) -> None:
    """Stores a result: whole or not at all.

    Raises:
        OSError: The folder can't be written to.
    """
    path = _path(cache, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(_Entry(schema=SCHEMA_VERSION, key=key, step=step)))


def load_dump(cache: Cache, key: str) -> DumpTexts | None:
    """The dump that was stored under a key; None = nothing readable."""
    try:
        entry = msgspec.json.decode(zlib.decompress(_path(cache, key, "dump").read_bytes()), type=_DumpEntry)
    except (OSError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return entry.texts if (entry.schema, entry.key) == (SCHEMA_VERSION, key) else None


def store_dump(cache: Cache, key: str, texts: DumpTexts) -> None:
    """Stores a dump: whole or not at all.

    Raises:
        OSError: The folder can't be written to.
    """
    path = _path(cache, key, "dump")
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = _DumpEntry(schema=SCHEMA_VERSION, key=key, texts=texts)
    write_whole(path, zlib.compress(msgspec.json.encode(entry), level=1))


def _path(cache: Cache, key: str, ending: str = "json") -> Path:
    return cache.folder / "compile" / f"{key}.{ending}"

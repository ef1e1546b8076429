"""Compiles a lowered step for its target and reads off what memory it takes.

In: a `jax.stages.Lowered` and its target. Out: `CompiledStep`, bytes per device, and for an explanation the texts that the
compile dumped besides, which are cached too. Totals are the compiler's own: from
`memory_analysis()` on CPU and GPU; on TPU from the buffer assignment that every compile dumps into a private folder, for two
reasons. A TPU's compiler refuses a program that does not fit, and the dump is then all there is. And libtpu's
`temp_size_in_bytes` counts fragmentation twice (HLO temp + fragmentation, seen with libtpu 0.0.42.1 and 0.0.50.1), while what it
holds against the memory is arguments + the assignment's temporaries, to the byte.
"""

import dataclasses
import importlib.metadata
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from remat_kit import _jax
from remat_kit.analysis.assignment import BufferTotals, read_totals
from remat_kit.analysis.dump import DumpTexts, find_buffer_assignment, read_texts
from remat_kit.analysis.report import check_dump
from remat_kit.compile.cache import (
    Cache,
    cache_key,
    canonical_program,
    load,
    load_dump,
    store,
    store_dump,
    without_roots,
)
from remat_kit.compile.environment import compiler_flags
from remat_kit.errors import CompileError, DumpError, TargetError, nearest
from remat_kit.records import SCHEMA_VERSION, CompiledStep, MemoryBytes
from remat_kit.targets import OptionValue, Target
from remat_kit.units import parse_bytes

NO_HOST_NOTE = "host memory is not modelled on CPU"
REFUSED_NOTE = "the compiler refuses this program for its size; bytes are from its buffer assignment"
FROM_MESSAGE_NOTE = "bytes are from the compiler's message, rounded: it left no dump"
AGAIN_NOTE = "compiled before without its dump, so compiled again to be explained"
NO_DUMP_NOTE = "libtpu left no dump: temporaries are from memory_analysis(), which counts fragmentation twice"

_PACKAGES = {
    "cpu": (),
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "nvidia-cudnn-cu12"),
    "tpu": ("libtpu",),
}

_REFUSAL = re.compile(r"RESOURCE_EXHAUSTED.*Ran out of memory (on HBM|in memory space hbm)", re.DOTALL)
_REFUSED_TOTAL = re.compile(r"HLO temporaries \((?P<amount>[\d.]+[KMG]?)\)|Used (?P<used>[\d.]+[KMG]?) of")
_UNKNOWN_OPTION = re.compile(r"No such compile option: '(?P<name>[^']*)'")
_BAD_VALUE = re.compile(r"(While setting option (?P<name>\w+), .*|Failed to parse '[^']*' into flag (?P<flag>\w+))")
_REMAT_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]*\.remat[\w.]* = ", re.MULTILINE)


def compile_lowered(
    lowered: Lowered,
    *,
    target: Target,
    xla_options: tuple[tuple[str, OptionValue], ...] = (),
    cache: Cache | None = None,
) -> CompiledStep:
    """Compiles a step, or remembers what its compiler said.

    Args:
        lowered: The step, lowered for the target's devices.
        target: What it was lowered for.
        xla_options: Compiler options of the real run; texts are read as bool, int or float where they look like one.
        cache: Where results are kept; None = compile anew and keep nothing.

    Returns:
        Bytes, compile time, versions.

    Raises:
        TargetError: An option is unknown to the target's compiler, or has a wrong value.
        CompileError: The compiler failed on the program.
    """
    job = _job(lowered, target=target, xla_options=xla_options, cache=cache)
    if cache is not None and (found := load(cache, job.key)) is not None:
        return found
    with _dump_folder() as folder:
        step = _compile(job, Path(folder), is_dumped=job.platform == "tpu")
    return step if cache is None else _stored(cache, job, step, None)


def compile_with_dump(
    lowered: Lowered,
    *,
    target: Target,
    xla_options: tuple[tuple[str, OptionValue], ...] = (),
    cache: Cache | None = None,
) -> tuple[CompiledStep, DumpTexts]:
    """Compiles a step and keeps what its compile dumped; both come from the cache where both are there.

    Args:
        lowered: See `compile_lowered`.
        target: See `compile_lowered`.
        xla_options: See `compile_lowered`.
        cache: See `compile_lowered`.

    Returns:
        What `compile_lowered` gives, and the dump, also of a program that the compiler refused for its size.

    Raises:
        TargetError: See `compile_lowered`.
        CompileError: See `compile_lowered`; or the compile left no dump.
        DumpError: The dump disagrees with the compiler's own totals.
    """
    job = _job(lowered, target=target, xla_options=xla_options, cache=cache)
    known = None if cache is None else load(cache, job.key)
    if cache is not None and known is not None and (kept := load_dump(cache, job.key)) is not None:
        return known, kept
    with _dump_folder() as folder:
        step = _compile(job, Path(folder), is_dumped=True)
        try:
            texts = without_roots(read_texts(Path(folder)))
        except DumpError as error:
            raise CompileError(f"nothing to explain: the compiler for {target.text!r} left no dump. {error}") from error
    if known is not None:
        step = dataclasses.replace(step, notes=(*step.notes, AGAIN_NOTE))
    return (step if cache is None else _stored(cache, job, step, texts)), texts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A compile and all that decides its result; without a cache the key is empty."""

    lowered: Lowered
    target: Target
    platform: str
    options: Mapping[str, OptionValue]
    versions: tuple[tuple[str, str], ...]
    key: str


def _job(lowered: Lowered, *, target: Target, xla_options: tuple[tuple[str, OptionValue], ...], cache: Cache | None) -> _Job:
    options = dict(target.compiler_options) | {name: _typed(value) for name, value in xla_options}
    platform = _platform(target)
    versions = tuple(_versions(platform))
    key = "" if cache is None else _key(lowered, target=target, options=options, versions=versions)
    return _Job(lowered=lowered, target=target, platform=platform, options=options, versions=versions, key=key)


def _dump_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="remat-kit-dump-", ignore_cleanup_errors=True)


def _stored(cache: Cache, job: _Job, step: CompiledStep, texts: DumpTexts | None) -> CompiledStep:
    """Stores a result; one that can't be stored says so."""
    try:
        store(cache, job.key, dataclasses.replace(step, notes=tuple(note for note in step.notes if note != AGAIN_NOTE)))
        if texts is not None:
            store_dump(cache, job.key, texts)
    except OSError as error:
        return dataclasses.replace(step, notes=(*step.notes, f"not cached: {cache.folder}: {error.strerror}"))
    return step


def _key(lowered: Lowered, *, target: Target, options: Mapping[str, OptionValue], versions: tuple[tuple[str, str], ...]) -> str:
    device_facts = ("platform", "device_kind", "topology", "num_hosts", "num_devices", "memory_bytes", "gpu", "tpu")
    parts = {
        "target": {name: repr(getattr(target, name)) for name in device_facts},
        "devices": _jax.lowered_device_ids(lowered),
        "options": {name: repr(value) for name, value in options.items()},
        "jit_options": [(name, repr(value)) for name, value in _jax.lowered_compiler_options(lowered)],
        "flags": compiler_flags(),
        "jax": {name: repr(value) for name, value in jax.config.values.items() if "cache" not in name},
        "versions": versions,
    }
    return cache_key(canonical_program(lowered.as_text(debug_info=True)), parts)


def _compile(job: _Job, folder: Path, *, is_dumped: bool) -> CompiledStep:
    given: dict[str, Any] = dict(job.options)
    if is_dumped:
        given |= {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    started_s = time.perf_counter()
    refused, compiled = None, None
    try:
        compiled = job.lowered.compile(compiler_options=given)
    except jax.errors.JaxRuntimeError as error:
        refused = str(error)
        if not _REFUSAL.search(refused):
            raise _failure(job.target, refused) from error
    compile_s = time.perf_counter() - started_s
    device, host, notes = _memory(job, compiled, refused, folder)
    text = _dumped_text(folder) if compiled is None else compiled.as_text() or ""
    return CompiledStep(
        device=device,
        host=host,
        refused=None if refused is None else refused.strip().splitlines()[0],
        num_xla_remat=count_xla_remat(text),
        compile_s=compile_s,
        versions=job.versions,
        notes=notes,
    )


def count_xla_remat(text: str) -> int:
    """Instructions that XLA's own rematerialization pass added to a compiled program."""
    return len(_REMAT_INSTRUCTION.findall(text))


def _memory(
    job: _Job, compiled: Compiled | None, refused: str | None, folder: Path
) -> tuple[MemoryBytes, MemoryBytes | None, tuple[str, ...]]:
    totals = _dumped_totals(folder)
    if totals is not None and compiled is not None:
        _check_against_compiler(totals, compiled, is_tpu=job.platform == "tpu")
    if totals is not None and (job.platform == "tpu" or compiled is None):
        return totals.device, totals.host, () if refused is None else (REFUSED_NOTE,)
    if compiled is None:
        assert refused is not None
        return _from_message(job.lowered, refused, target=job.target), None, (FROM_MESSAGE_NOTE,)
    device, host = analysed_memory(compiled)
    match job.platform:
        case "cpu":
            return device, None, (NO_HOST_NOTE,)
        case "tpu":
            return device, host, (NO_DUMP_NOTE,)
        case _:
            return device, host, ()


def _check_against_compiler(totals: BufferTotals, compiled: Compiled, *, is_tpu: bool) -> None:
    device, host = analysed_memory(compiled)
    if is_tpu and not device.temp_bytes:  # libtpu says so of toys whose arena is small enough for it to forget
        device = dataclasses.replace(device, temp_bytes=totals.device.temp_bytes)
    stats: Any = compiled.memory_analysis()
    check_dump(totals, device=device, host=host, peak_memory_bytes=stats.peak_memory_in_bytes)


def _dumped_totals(folder: Path) -> BufferTotals | None:
    assignment = find_buffer_assignment(folder)
    if assignment is None:
        return None
    with assignment.open() as lines:
        return read_totals(lines)


def analysed_memory(compiled: Compiled) -> tuple[MemoryBytes, MemoryBytes]:
    """Device and host totals that `memory_analysis()` gives, in bytes.

    Raises:
        CompileError: This backend gives none.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise CompileError("the compiler reports no memory totals (memory_analysis() is None).")
    device, host = (
        MemoryBytes(
            argument_bytes=getattr(stats, f"{space}argument_size_in_bytes"),
            output_bytes=getattr(stats, f"{space}output_size_in_bytes"),
            alias_bytes=getattr(stats, f"{space}alias_size_in_bytes"),
            temp_bytes=getattr(stats, f"{space}temp_size_in_bytes"),
        )
        for space in ("", "host_")
    )
    return device, host


def _from_message(lowered: Lowered, refused: str, *, target: Target) -> MemoryBytes:
    # The message's total is arguments + temporaries; what is not aliased to an argument is not in it.
    found = _REFUSED_TOTAL.search(refused)
    if found is None:
        raise CompileError(f"the compiler refused the step for {target.text!r} and gave no size: {refused.splitlines()[0]}")
    total_bytes = parse_bytes(found["amount"] or found["used"])
    argument_bytes = min(total_bytes, _jax.lowered_argument_bytes(lowered))
    return MemoryBytes(argument_bytes=argument_bytes, output_bytes=0, alias_bytes=0, temp_bytes=total_bytes - argument_bytes)


def _failure(target: Target, message: str) -> TargetError | CompileError:
    unknown = _UNKNOWN_OPTION.search(message)
    if unknown is not None:
        names = (*_jax.compiler_option_names(), *dict(target.compiler_options))
        near = nearest(unknown["name"], names, likeness=0.85)  # the list is short: what is merely similar in it misleads
        return TargetError(f"--xla {unknown['name']}: the compiler for {target.text!r} has no such option.{near}")
    bad = _BAD_VALUE.search(message)
    if bad is not None:
        return TargetError(f"--xla {bad['name'] or bad['flag']}: {bad[0].strip()}")
    return CompileError(f"the compiler for {target.text!r} failed: {message.strip().splitlines()[0][:1000]}")


def _dumped_text(folder: Path) -> str:
    # Several stages share the suffix; the one right after optimization is the scheduled program.
    path = min(folder.glob("*after_optimizations.txt"), default=None)
    return "" if path is None else path.read_text()


def _typed(value: OptionValue) -> OptionValue:
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return value


def _platform(target: Target) -> str:
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend()) if target.platform == "attached" else target.platform


def _versions(platform: str) -> Iterator[tuple[str, str]]:
    for package in ("jax", "jaxlib", *_PACKAGES.get(platform, ())):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "record schema", str(SCHEMA_VERSION)

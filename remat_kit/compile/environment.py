"""Environment variables of a process that compiles. No JAX: they count from the moment that JAX or libtpu is imported."""

import os
import re
from collections.abc import Mapping, MutableMapping

FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Where compilers read their flags; they are honoured, and part of the cache's key."""

_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_FIXED = {
    # libtpu takes a lock file and asks a metadata server unless told not to.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    # JAX's own cache would hand back programs that were never compiled here, and so never dumped.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what every target needs; call it before JAX is imported. The user's own log levels win."""
    environ.update(_FIXED)
    for name, value in _QUIET.items():
        environ.setdefault(name, value)


def add_host_devices(num_devices: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Asks for at least `num_devices` CPU devices, in addition to the user's XLA flags; before JAX's backends load."""
    flags = environ.get("XLA_FLAGS", "")
    asked = [int(number) for number in _DEVICE_COUNT.findall(flags)]
    if num_devices > max(asked, default=1):
        environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_devices}".strip()


def compiler_flags(environ: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """The compiler flags in force, by variable; the number of CPU devices is the target's and left out."""
    found = ((name, " ".join(_DEVICE_COUNT.sub("", environ.get(name, "")).split())) for name in FLAG_VARIABLES)
    return tuple((name, flags) for name, flags in found if flags)

"""What a target can run and whether this machine can compile for it.

Compilers swallow more than devices run: a V100 gets a program with bfloat16 or with cuDNN's flash attention without a word. So a
step's dtypes and kernels are held against the target's row before anything is compiled.
"""

import importlib.util
import platform as machine
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from remat_kit.errors import TargetError
from remat_kit.targets.parse import Target

KNOWN_KERNELS = {
    "cudnn_attention": "cuDNN's flash attention needs a GPU of compute capability 8.0 or newer",
    "splash_attention": "splash attention needs a TPU",
}
"""Kernels whose needs we know, and these needs; any other kernel is the user's own business."""

_DTYPES_THAT_DIFFER = ("float16", "bfloat16", "float64", "float8", "float4")

_PLUGIN = {"cuda": "jax_cuda12_plugin", "tpu": "libtpu"}
_EXTRA = {"cuda": "gpu", "tpu": "tpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether this machine can compile for a platform.

    Attributes:
        is_available: Whether it can, now.
        remedy: When not: the install command, or why there is none here; empty otherwise.
    """

    is_available: bool
    remedy: str = ""


def check_abilities(target: Target, *, dtypes: Iterable[str], kernels: Iterable[str]) -> None:
    """Holds what a step uses against what the target runs.

    Args:
        target: The target.
        dtypes: dtype names that the step's matmuls read; integers are not checked.
        kernels: Names of the step's custom kernels.

    Raises:
        TargetError: The target lacks one of them.
    """
    lacking = [dtype for dtype in dtypes if dtype.startswith(_DTYPES_THAT_DIFFER) and dtype not in (target.dtypes or (dtype,))]
    if lacking:
        raise TargetError(
            f"the step multiplies {', '.join(lacking)}, which {target.kind} has no units for; it has "
            f"{', '.join(target.dtypes or ())}. Set the step's dtype to one of them, or choose another target."
        )
    for kernel in kernels:
        if kernel in KNOWN_KERNELS and target.kernels is not None and kernel not in target.kernels:
            raise TargetError(
                f"the step calls {kernel}, which does not run on {target.kind}: {KNOWN_KERNELS[kernel]}. Choose the step's XLA "
                "attention for this target."
            )


def availability(platform: str, *, kernels: Iterable[str] = ()) -> Availability:
    """Looks whether the packages that compile for a platform are installed; nothing is imported.

    Args:
        platform: Of a row or target.
        kernels: Kernels to compile; cuDNN attention needs a package of its own.
    """
    if platform not in _PLUGIN:
        return Availability(is_available=True)
    missing = [] if _has(_PLUGIN[platform]) else [_PLUGIN[platform]]
    extra = _EXTRA[platform]
    if platform == "cuda" and not (_has("nvidia.cuda_nvcc") or shutil.which("ptxas")):
        missing.append("ptxas")
    if platform == "cuda" and "cudnn_attention" in kernels:
        extra = "gpu-cudnn"
        missing += [] if _has("nvidia.cudnn") else ["cuDNN"]
    if not missing:
        return Availability(is_available=True)
    if (machine.system(), machine.machine()) != ("Linux", "x86_64"):
        here = f"{machine.system()} {machine.machine()}"
        remedy = f"not to be had on {here}: the compiler has wheels for x86-64 Linux only (see the Dockerfile)"
        return Availability(is_available=False, remedy=remedy)
    return Availability(is_available=False, remedy=f"{' and '.join(missing)} missing: pip install 'remat-kit[{extra}]'")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False

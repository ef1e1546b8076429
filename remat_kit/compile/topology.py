"""A target's devices, attached or not: what a step is lowered for.

In: a `Target`. Out: JAX devices, in the topology's order. Compile-only devices come from `jax.experimental.topologies`; the facts
that XLA's GPU compiler wants are written as the text of its `GpuTargetConfigProto`.
"""

import dataclasses
from typing import Any, TypeAlias, assert_never

import jax
from jax.experimental import topologies

from remat_kit import _jax
from remat_kit.compile.environment import add_host_devices
from remat_kit.errors import CompileError, TargetError
from remat_kit.targets import GpuChip, Rows, Target, availability

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core_bytes}
  threads_per_core_limit: {threads_per_core}
  core_count: {num_cores}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache_bytes}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {device_memory_bytes}
  shared_memory_per_block_optin: {shared_memory_per_block_bytes}
  cuda_compute_capability {{ {compute_capability_text} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{device_kind}"
"""

# Hopper and data-centre Blackwell have instructions that XLA uses only when asked to (sm_90a, sm_100a).
_ACCELERATED_MAJORS = (9, 10)


def devices_for(target: Target) -> tuple[Device, ...]:
    """The JAX devices of a target.

    Args:
        target: What to compile for.

    Returns:
        `target.num_devices` devices (all there are, for `attached`), in the topology's order.

    Raises:
        TargetError: The compiler is not installed, or it refuses the topology.
        CompileError: This process has started JAX for something else.
    """
    _claim_backends(target)
    found = availability(target.platform)
    if not found.is_available:
        raise TargetError(f"can't compile for {target.text!r} here: {found.remedy}.")
    match target.platform:
        case "attached":
            return tuple(jax.devices())
        case "cpu":
            return _cpu_devices(target)
        case "cuda":
            return _gpu_devices(target)
        case "tpu":
            return _tpu_devices(target)
        case _:
            assert_never(target.platform)


def identify(target: Target, rows: Rows) -> Target:
    """Fills in what is known of the attached devices; other targets pass through.

    Args:
        target: Any target.
        rows: Where facts of the device kind are looked up.

    Returns:
        The target with its real platform and number of devices, and with the facts of the row that has its device kind.
    """
    if target.platform != "attached":
        return target
    devices = devices_for(target)
    kind = devices[0].device_kind
    platform = {"gpu": "cuda"}.get(devices[0].platform, devices[0].platform)
    if platform not in ("cpu", "cuda", "tpu"):
        raise TargetError(f"'attached': the devices here are {platform}; remat-kit knows cpu, cuda and tpu.")
    num_hosts = jax.process_count()
    known = dataclasses.replace(target, platform=platform, device_kind=kind, num_devices=len(devices), num_hosts=num_hosts)
    row = next((row for row in rows.values() if (row.platform, row.device_kind) == (platform, kind)), None)
    if row is None:
        return known
    return dataclasses.replace(
        known,
        memory_bytes=row.memory_bytes,
        flops_per_s=row.flops_per_s,
        memory_bytes_per_s=row.memory_bytes_per_s,
        host_bytes_per_s=row.host_bytes_per_s,
        link_bytes_per_s=row.link_bytes_per_s,
        price_per_hour=row.price_per_hour,
        dtypes=row.dtypes,
        kernels=row.kernels,
        source=row.source,
    )


def gpu_config_text(chip: GpuChip, *, device_kind: str, memory_bytes: int, memory_bytes_per_s: float) -> str:
    """The `GpuTargetConfigProto` of an absent GPU, as text."""
    major, minor = chip.compute_capability
    feature = " feature_extension: ACCELERATED_FEATURES" if major in _ACCELERATED_MAJORS else ""
    return _GPU_CONFIG.format(
        **dataclasses.asdict(chip),
        compute_capability_text=f"major: {major} minor: {minor}{feature}",
        memory_bandwidth=int(memory_bytes_per_s),
        device_memory_bytes=memory_bytes,
        device_kind=device_kind,
    )


def _claim_backends(target: Target) -> None:
    if _jax.backends_are_initialized():
        return
    if target.platform != "attached":
        jax.config.update("jax_platforms", "cpu")
    if target.platform == "cpu":
        add_host_devices(target.num_devices)


def _cpu_devices(target: Target) -> tuple[Device, ...]:
    devices = jax.devices("cpu")
    if len(devices) < target.num_devices:
        raise CompileError(
            f"{target.text!r} needs {target.num_devices} CPU devices and JAX has started with {len(devices)} in this process: "
            f"start a new one, or set XLA_FLAGS=--xla_force_host_platform_device_count={target.num_devices} before."
        )
    return tuple(devices[: target.num_devices])


def _gpu_devices(target: Target) -> tuple[Device, ...]:
    assert target.gpu is not None
    if target.memory_bytes is None or target.memory_bytes_per_s is None:
        raise TargetError(f"{target.text!r}: the row of {target.kind} needs memory_bytes and memory_bytes_per_s.")
    config = gpu_config_text(
        target.gpu,
        device_kind=target.device_kind,
        memory_bytes=target.memory_bytes,
        memory_bytes_per_s=target.memory_bytes_per_s,
    )
    layout = f"1x{target.num_hosts}x{target.num_devices // target.num_hosts}"  # partitions x hosts x devices of a host
    return _described(target, platform="cuda", topology_name=target.kind, target_config=config, topology=layout)


def _tpu_devices(target: Target) -> tuple[Device, ...]:
    chip = target.tpu
    assert chip is not None
    shape = target.topology or (1,) * chip.topology_rank
    options: dict[str, Any] = {} if chip.chip_config is None else {"chip_config_name": chip.chip_config}
    if set(shape) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{chip.compiler_name}:{'x'.join(map(str, shape))}"
    return _described(target, platform="tpu", topology_name=name, **options)[: target.num_devices]


def _described(target: Target, *, platform: str, topology_name: str, **options: Any) -> tuple[Device, ...]:
    try:
        found = topologies.get_topology_desc(platform=platform, topology_name=topology_name, **options).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as error:
        raise TargetError(f"the compiler refuses {target.text!r}: {str(error).splitlines()[0]}") from error
    assert len(found) >= target.num_devices, f"{target.text}: {len(found)} devices"
    return tuple(found)

"""JAX's devices for a run: platform settings before the first one is touched, several processes, and the peak of a device.

The only place of `train/` that changes JAX's configuration; called by the entry points alone.
"""

import jax

from remat_kit.targets import load_rows
from train.config import ProcessConfig, RunConfig, TrainConfig
from train.errors import ConfigError

HEARTBEAT_TIMEOUT_S = 10
AUTO = "auto"


def start_devices(config: TrainConfig) -> list[jax.Device]:
    """Sets JAX up and gives all devices of the run, those of other processes included.

    Raises:
        ConfigError: A description of processes that has gaps.
    """
    _configure(config.run)
    _join(config.process)
    return jax.devices()


def _configure(run: RunConfig) -> None:
    if run.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", run.cpu_devices)
    if run.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", run.compile_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _join(process: ProcessConfig) -> None:
    if process.coordinator is None:
        return
    if process.coordinator == AUTO:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
        return
    if process.num_processes is None or process.process_id is None:
        raise ConfigError(
            f"--coordinator {process.coordinator} needs --num-processes and --process-id, or start with train.launch."
        )
    jax.distributed.initialize(
        process.coordinator,
        num_processes=process.num_processes,
        process_id=process.process_id,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )


def peak_flops_per_s(device: jax.Device, given: float | None) -> float | None:
    """What a device could do at most: as given, or 16-bit matmuls by remat-kit's row; None = unknown."""
    if given is not None:
        return given
    kinds = {row.device_kind: row.flops_per_s for row in load_rows().values()}
    return kinds.get(device.device_kind)

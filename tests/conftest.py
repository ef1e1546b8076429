"""Set-up for every test: which JAX the tests see, and which tests need a device.

The variables are read when JAX's backends load, so they are set here, before any test module imports JAX; processes that tests
start inherit them.
"""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu takes a lock file and asks a metadata server unless told not to; tests only compile with it.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

_EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
if _EIGHT_DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT_DEVICES}".strip()

# The same examples in every run, and no deadline: the first example of a test may compile.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu`, with the remedy as reason, unless JAX_PLATFORMS asks for a GPU."""
    if {"cuda", "gpu"} & set(os.environ["JAX_PLATFORMS"].split(",")):
        return
    skip = pytest.mark.skip(reason="needs an attached GPU: JAX_PLATFORMS=cuda,cpu pytest -m gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)

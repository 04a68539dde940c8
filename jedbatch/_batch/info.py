"""The installation: versions, devices, and whether planning is compiled."""

import importlib.metadata
import platform

import jax

from jedbatch._support.native import described


def info() -> str:
    """Describes the installation, for a look or for a bug report.

    Returns:
      Versions, the devices that JAX computes on, and whether minibatches are planned by the
      compiled core or by the Python that it stands for.

    Examples:
      >>> import jedbatch
      >>> print(jedbatch.info())  # doctest: +ELLIPSIS
      jedbatch ...
    """
    versions = ", ".join(
        f"{name} {_version(name.lower())}" for name in ("JAX", "jaxlib", "NumPy", "greenlet")
    )
    kinds = [device.device_kind for device in jax.devices()]
    devices = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return "\n".join(
        [
            f"jedbatch {_version('jedbatch')}",
            f"  versions  Python {platform.python_version()}, {versions}",
            f"  devices   {devices}",
            f"  planning  {described()}",
        ]
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

"""The machine a result was made on: its class, which decides whether a result is used again, and its facts.

Nothing here imports torch into this process: versions are read from the installed files, and a GPU is asked about in
a short process of its own, so that a measuring parent never holds a context on the device.
"""

import functools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from speedproof.core.errors import UserError
from speedproof.core.identity import PACKAGE


def environment(device: str) -> dict[str, dict[str, Any]]:
    """The machine as `{"class": …, "facts": …}` for `device` "cpu" or "cuda".

    The class belongs to the identity of records, runs and parity checks. The facts vary from job to job inside a class
    (host, job, GPU UUID, CPU ids) and are only written down. What cannot be found out is None.
    Raises: UserError when `device` is "cuda" and no CUDA device is visible.
    """
    return {"class": dict(_machine_class(device)), "facts": _facts(device)}


@functools.cache
def gpu() -> dict[str, Any]:
    """Name, UUID, memory, CUDA and cuDNN of CUDA device 0 as torch sees it, with power limit and driver from NVML.

    Raises: UserError when torch finds no CUDA device.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found = _probe()
    else:
        answer = subprocess.run(
            [sys.executable, "-m", "speedproof.measure.environment"],
            env=os.environ | {"PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = answer.stdout.strip().splitlines()
        if answer.returncode or not lines:
            last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"execution.device: cuda cannot be used here ({last}); use cpu or mend the driver")
        found = json.loads(lines[-1])
    if not found:
        raise UserError("execution.device: found cuda, but torch sees no CUDA device; use cpu or run on a GPU node")
    return found | _nvml(found["uuid"])


def python_path() -> str:
    """PYTHONPATH for a child that must import this very package, installed or not."""
    return os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))


def _probe() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    mig = re.search(r"MIG (\S+)", properties.name)
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "memory_bytes": properties.total_memory,
        "mig_profile": mig.group(1) if mig else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def nvml_handle(uuid: str) -> Any:
    """The NVML handle of the GPU (or MIG instance) with this UUID; NVML must be initialised.

    NVML and CUDA count devices differently, so an index would pick another GPU.
    """
    import pynvml

    bare = re.sub(r"^(GPU|MIG)-", "", uuid)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")


def _nvml(uuid: str) -> dict[str, Any]:
    values: dict[str, Any] = {"power_limit_w": None, "driver": _driver()}
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library or no permission: all of them only mean that NVML says nothing
        return values
    try:
        values["driver"] = pynvml.nvmlSystemGetDriverVersion()
        values["power_limit_w"] = round(pynvml.nvmlDeviceGetEnforcedPowerLimit(nvml_handle(uuid)) / 1000)
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    return values


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text()) if path.is_file() else None
    return found.group(1) if found else None


@functools.cache
def _machine_class(device: str) -> dict[str, Any]:
    common = {
        "device": device,
        "torch": _torch_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cpus": len(cpu_ids()),
        "compiler": _compiler(),
    }
    if device != "cuda":
        return common
    found = gpu()
    keys = ("memory_bytes", "power_limit_w", "mig_profile", "driver", "cuda", "cudnn")
    # Nothing on a CPU comes from Triton: where the tests have brought it, no measurement is another one.
    return common | {"gpu": found["name"], "triton": _version("triton")} | {key: found[key] for key in keys}


def _facts(device: str) -> dict[str, Any]:
    return {
        "hostname": socket.gethostname(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "cpu_ids": cpu_ids(),
        "host_memory_bytes": host_memory_bytes(),
        "gpu_uuid": gpu()["uuid"] if device == "cuda" else None,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "kernel": platform.release(),
    }


def cpu_ids() -> list[int]:
    """Numbers of the CPUs this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpu_model() -> str:
    """The CPU's name, or implementer and part where the kernel gives no name (aarch64)."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.is_file() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    if "model name" in fields:
        return fields["model name"]
    if "CPU part" in fields:
        return f"{platform.machine()} implementer {fields.get('CPU implementer')} part {fields['CPU part']}"
    return platform.processor() or platform.machine()


def host_memory_bytes() -> int:
    """Memory this process may use: what the host has, or less where its control group allows less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    own = Path("/proc/self/cgroup")
    below = [line.split(":", 2)[2] for line in own.read_text().splitlines()] if own.is_file() else []
    for group in {"/", *below}:
        for name in (f"/sys/fs/cgroup{group}/memory.max", f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes"):
            try:
                limits.append(int(Path(name).read_text()))
            except (OSError, ValueError):  # no such controller, or the word "max"
                continue
    return min(limits)


def _torch_version() -> str | None:
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"__version__ = '([^']+)'", (Path(spec.origin).parent / "version.py").read_text())
    return found.group(1) if found else _version("torch")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """The C++ compiler's own first line: its code is what compiled candidates run, and without it they cannot."""
    path = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return (answer.stdout.splitlines() or [None])[0]


if __name__ == "__main__":
    print(json.dumps(_probe()))

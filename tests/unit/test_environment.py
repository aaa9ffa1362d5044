"""The machine's class decides about reuse; its facts do not, and a missing part is None and never an error."""

import json
import os
import subprocess
import sys

import pytest

from speedproof.core.errors import UserError
from speedproof.measure import environment as module
from speedproof.measure.environment import environment


@pytest.fixture(autouse=True)
def _fresh():
    cached = (module.gpu, module._machine_class)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_class_holds_no_fact_of_one_job(monkeypatch):
    before = environment("cpu")
    module._machine_class.cache_clear()
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(module.socket, "gethostname", lambda: "another-node")
    cpus = len(module.cpu_ids())
    monkeypatch.setattr(module, "cpu_ids", lambda: list(range(100, 100 + cpus)))
    after = environment("cpu")
    assert after["class"] == before["class"]
    assert after["facts"]["job"] == "4711"
    assert after["facts"]["hostname"] == "another-node"
    assert after["facts"]["cpu_ids"][0] == 100


def test_number_of_cpus_belongs_to_the_class(monkeypatch):
    before = environment("cpu")["class"]
    module._machine_class.cache_clear()
    monkeypatch.setattr(module, "cpu_ids", lambda: list(range(72)))
    assert environment("cpu")["class"] == before | {"cpus": 72}


def test_gpu_facts_and_class(monkeypatch):
    card = {
        "name": "NVIDIA GH200 120GB",
        "uuid": "5f0e",
        "memory_bytes": 10,
        "mig_profile": None,
        "cuda": "13.0",
        "cudnn": 92400,
        "power_limit_w": 900,
        "driver": "580.159.04",
    }
    monkeypatch.setattr(module, "gpu", lambda: card)
    found = environment("cuda")
    assert found["class"]["gpu"] == "NVIDIA GH200 120GB"
    assert found["class"]["power_limit_w"] == 900
    assert "5f0e" not in json.dumps(found["class"])
    assert found["facts"]["gpu_uuid"] == "5f0e"


def test_importing_and_asking_needs_no_torch_and_none_of_the_optional_packages():
    code = (
        "import sys\n"
        "for name in ('psutil', 'pynvml', 'scipy', 'typer', 'rich', 'tokenizers'): sys.modules[name] = None\n"
        "from speedproof.measure.environment import environment, _nvml\n"
        "import speedproof.measure.device_lock\n"
        "found = environment('cpu')\n"
        "assert found['class']['torch'], found\n"
        "assert _nvml('5f0e')['power_limit_w'] is None\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": module.python_path()})


def test_version_read_from_the_file_is_the_imported_one():
    import torch

    assert environment("cpu")["class"]["torch"] == torch.__version__


def test_no_gpu_is_one_sentence(monkeypatch):
    monkeypatch.setattr(module, "_probe", dict)
    monkeypatch.setattr(
        module.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout="noise\n{}\n", stderr="")
    )
    with pytest.raises(UserError, match=r"execution.device: found cuda, but torch sees no CUDA device"):
        environment("cuda")

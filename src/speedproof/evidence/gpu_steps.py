"""A step of the GPU check that is no timing of updates, in a fresh process of its own.

`python -m speedproof.evidence.gpu_steps REQUEST RESULT`; what goes wrong becomes a status with a reason.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.core.store import Store
from speedproof.measure.isolate import die_with_parent
from speedproof.measure.worker import status_of
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Parity
from speedproof.settings.recipe import Recipe


def main(request_path: Path, result_path: Path) -> None:
    """Do the step that the request names; the result is written whole, by tests also after each one."""
    die_with_parent()
    request = files.read_json(request_path)
    try:
        result = STEPS[request["step"]](request, result_path)
    except Exception as error:
        traceback.print_exc()
        status, reason = status_of(error)
        result = {"status": status, "reason": reason}
    files.write_json(result_path, result)


def _parity(request: dict[str, Any], _: Path) -> dict[str, Any]:
    """Fresh weights in the execution against the FP32 reference; `failed` where the tolerances are passed."""
    from speedproof.evidence.parity import check_parity

    recipe, execution, cache = _opened(request)
    settings = Parity.parse(request["parity"], "parity")
    found = check_parity(recipe, execution, None, cache, settings)
    return {"status": "ok" if found["holds"] else "failed"} | found


def _validation(request: dict[str, Any], _: Path) -> dict[str, Any]:
    """Rate of a validation over the whole split in targets/s, after a first pass over two batches that compiles."""
    import torch

    from speedproof.model.llama import build
    from speedproof.training.evaluate import evaluate

    recipe, execution, cache = _opened(request)
    torch.set_num_threads(execution.cpu_threads)
    model = build(recipe, execution, execution.device)
    first = range(2 * execution.evaluation_batch)
    warm = evaluate(model, cache.validation, recipe, execution, execution.device, first)
    found = evaluate(model, cache.validation, recipe, execution, execution.device)
    return {
        "status": "ok",
        "reason": None,
        "precision": recipe.precision,
        "targets_per_s": found.targets / found.seconds,
        "targets": found.targets,
        "seconds": found.seconds,
        "first_pass_s": warm.seconds,
        "loss": found.loss,
        "peak_bytes": torch.cuda.max_memory_allocated() if execution.device == "cuda" else None,
    }


def _tests(request: dict[str, Any], result_path: Path) -> dict[str, Any]:
    """The CUDA tests without max-autotune, which times kernels for minutes. Written down after each test."""
    import pytest

    counted = Counted(result_path)
    options = ["-m", "cuda", "-k", "not max-autotune", "-p", "no:cacheprovider", "--rootdir", request["root"]]
    code = pytest.main([*options, str(Path(request["root"]) / "tests/cuda")], plugins=[counted])
    result = counted.result()
    failed = result["failed"]
    if failed or code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        reason = ", ".join(failed) or f"pytest ended with {pytest.ExitCode(code).name}, see the log"
        return result | {"status": "failed", "reason": reason}
    if not result["passed"]:
        return result | {"status": "skipped", "reason": f"{result['skipped']} tests skipped"}
    return result | {"status": "ok", "reason": None}


class Counted:
    """Counts outcomes as they come, so that tests cut short still tell what passed."""

    def __init__(self, result_path: Path):
        self._path, self._passed, self._skipped, self._failed = result_path, 0, 0, []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(report.nodeid.split("::", 1)[-1])
        self._skipped += report.skipped
        self._passed += report.when == "call" and report.passed
        if report.when == "teardown":
            files.write_json(self._path, self.result())

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(f"{report.nodeid} cannot be read")

    def result(self) -> dict[str, Any]:
        """The counts, as of a run that was cut here."""
        done = self._passed + self._skipped + len(self._failed)
        return {
            "status": "timeout",
            "reason": "; ".join([f"cut after {done} tests", *self._failed]),
            "passed": self._passed,
            "skipped": self._skipped,
            "failed": list(self._failed),
        }


def _opened(request: dict[str, Any]) -> tuple[Recipe, Execution, Any]:
    from speedproof.data.token_cache import TokenCache
    from speedproof.training.precision import resolve_precision

    execution = Execution.parse(request["execution"], "execution")
    recipe, _ = resolve_precision(Recipe.parse(request["recipe"], "recipe"), execution.device)
    return recipe, execution, TokenCache.open(Path(request["cache"]), Store(Path(request["store"])))


STEPS = {"parity": _parity, "validation": _validation, "tests": _tests}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""One fresh process that measures the forward pass alone: `python -m speedproof.measure.forward REQUEST RESULT`.

It is the validation that training uses, on random tokens. A first pass warms up and compiles; then come the windows.
"""

import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from speedproof.core import files
from speedproof.core.errors import UserError
from speedproof.measure.isolate import die_with_parent
from speedproof.measure.worker import process_age_s, status_of


class RandomTokens:
    """So many random tokens, read as a split of a token cache is."""

    def __init__(self, vocab_size: int, count: int, seed: int):
        generator = np.random.Generator(np.random.PCG64(seed))
        self._tokens = generator.integers(0, vocab_size, count, dtype=np.uint16)

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens `start` up to `start + count`, uint16 (count,)."""
        return self._tokens[start : start + count]


def main(request_path: Path, result_path: Path) -> None:
    """Time `windows` validations of `batches` batches each; the rate is the median window's."""
    die_with_parent()
    request = files.read_json(request_path)
    result: dict[str, Any] = {"status": "error", "reason": None, "targets_per_s": None, "windows": []}
    try:
        _time(request, result)
        result["status"] = "ok"
        result["targets_per_s"] = statistics.median(window["targets_per_s"] for window in result["windows"])
    except Exception as error:
        traceback.print_exc()
        result["status"], result["reason"] = status_of(error)
        result["user_error"] = result["status"] == "error" and isinstance(error, UserError)
    files.write_json(result_path, result)


def _time(request: dict[str, Any], result: dict[str, Any]) -> None:
    from speedproof.settings.execution import Execution
    from speedproof.settings.recipe import Recipe
    from speedproof.training.evaluate import evaluate
    from speedproof.training.update import Updater

    execution, recipe = Execution.parse(request["execution"]), Recipe.parse(request["recipe"])
    updater = Updater(recipe, execution, execution.device)
    result["startup_s"] = process_age_s()
    context, batch = recipe.model.context_length, execution.evaluation_batch
    vocabulary = recipe.model.vocab_size
    for number in range(1 + request["windows"]):
        batches = request["batches"] if number else 1
        tokens = RandomTokens(vocabulary, batches * batch * context + 1, recipe.seed)
        found = evaluate(updater.model, tokens, recipe, execution, updater.device)
        if number:
            rate = found.targets / found.seconds
            window = {"targets": found.targets, "seconds": found.seconds, "targets_per_s": rate, "loss": found.loss}
            result["windows"].append(window)
        else:
            result["warmup"] = {"first_update_s": found.seconds, "total_s": found.seconds, "updates": 0}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

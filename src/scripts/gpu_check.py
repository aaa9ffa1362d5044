"""Measure the published programme's main rows on one GPU within a few minutes; see scripts/gpu-check."""

import argparse
import sys
from importlib import util
from pathlib import Path

from speedproof.core.errors import EXIT_PREEMPTED, EXIT_USER, Preempted, UserError

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"torch": "torch", "numpy": "numpy", "pandas": "pandas", "yaml": "pyyaml", "pydantic": "pydantic"} | {
    "safetensors": "safetensors",
    "filelock": "filelock",
    "pytest": "pytest",
}
"""Modules and the packages that bring them. The options are read without typer, so that this list stays short."""

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def main(arguments: list[str] | None = None) -> int:
    """Run the check; the exit code is 0 where every row is ok, else 1."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything; what does not fit is left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses at toy size")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu-check", help="folder for table and records")
    parser.add_argument("--python", help="interpreter to use; read by scripts/gpu-check")
    given = parser.parse_args(arguments)
    if missing := [package for module, package in NEEDED.items() if util.find_spec(module) is None]:
        print(f"error: {', '.join(missing)}: not installed for {sys.executable}; install it", file=sys.stderr)
        return EXIT_USER
    from speedproof.evidence.gpu_check import Check

    try:
        check = Check(ROOT, given.device, given.minutes, given.out)
        return 0 if check.run() else EXIT_FAILED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except Preempted as stop:
        print(f"stopped early: {stop}; what was measured lies in {given.out}", file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C; what was measured lies in {given.out}", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""Check the reference's first and second derivatives in FP64 against finite differences."""

from pathlib import Path
from typing import Annotated

import typer

from speedproof.core import files
from speedproof.core.errors import UserError, run


def main(output: Annotated[Path, typer.Option(help="the checks as JSON")]) -> None:
    """Check the reference's first and second derivatives in FP64 against finite differences."""
    import torch

    from speedproof.evidence.derivatives import check_derivatives

    torch.set_num_threads(1)  # more only get in each other's way in a model of five thousand parameters
    value = check_derivatives()
    for check in value["checks"]:
        print(f"{check['name']}: {'holds' if check['holds'] else 'FAILS'} ({check['reason']})")
    if not value["holds"]:
        # Unlike a parity check that fails, this is no finding about an execution: nothing can be judged by it.
        failed = ", ".join(check["name"] for check in value["checks"] if not check["holds"])
        raise UserError(
            f"derivatives: {failed} of the reference model disagree with finite differences; mend the model"
        )
    files.write_json(output, value)


if __name__ == "__main__":
    run(main)

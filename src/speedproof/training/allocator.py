"""The system's allocator, told to keep what it has been given."""

import ctypes
import platform

from speedproof.core.errors import UserError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of mallopt, as glibc's malloc.h numbers them."""

TUNED = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 256 * 2**20}
"""No block from a map of its own, nothing given back, and grown by 256 MiB at a time.

Blocks above 32 MiB, as all logits are, otherwise come from fresh pages at every microbatch, which the kernel must
clear and map one by one.
"""


def tune_allocator() -> None:
    """Tune this process's allocator as `TUNED` says, for all that it allocates from now on; it cannot be undone.

    Raises: UserError naming execution.allocator where the C library is not glibc or refuses.
    """
    library = platform.libc_ver()[0]
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if library == "glibc" else None
    if mallopt is None or not all(mallopt(name, value) for name, value in TUNED.items()):
        raise UserError(
            f"execution.allocator: 'tuned' needs glibc's allocator, found {library or 'another C library'}; use default"
        )

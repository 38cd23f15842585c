"""Keep the C library from handing freed memory back to the system between two operations.

A training step frees and takes the same few megabytes again and again. glibc returns large freed blocks at once, and each
time they come back the kernel maps and clears their pages. A forward and backward pass of 256 sequences in one micro-batch
took 14 % (skewed lengths) to 27 % (full length) longer without this, on two cores; in eight micro-batches, nothing.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""What glibc allows on 64-bit systems (HEAP_MAX_SIZE / 2); larger blocks still come from mmap and go back when freed."""


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process; the heap then stays at its peak. False where the C library is another.

    Source: mallopt(3).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        [
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1),
            mallopt(_M_TOP_PAD, 64 << 20),
        ]
    )

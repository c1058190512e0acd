"""Small blocks: the small files of a simulation have several of them, as large ones have on a node.

Role: with ``CACHEXFS_SIM_BLOCKS=1`` in the environment, and imported before the engine. Digests by block, replication
ahead of a close, reads by segment and copies that are stopped then meet every fault that a simulation has; without it
they are left to tests on mounts.
"""

from __future__ import annotations

import os
import sys

ARE_SMALL = os.environ.get("CACHEXFS_SIM_BLOCKS", "") not in ("", "0")
ENVIRONMENT = "CACHEXFS_SIM_BLOCKS=1 " if ARE_SMALL else ""
BLOCK_BYTES = 4096

if ARE_SMALL:
    assert not any(name.startswith("cachexfs.engine") for name in sys.modules), "import it first"
    from cachexfs.core import digest

    digest.BLOCK_BYTES = BLOCK_BYTES

    from cachexfs.engine import drain, fill, replicate

    drain.STOP_BYTES_MIN = 0
    replicate.AHEAD_BYTES_MIN = 2 * BLOCK_BYTES
    fill.SEGMENT_BYTES = 2 * BLOCK_BYTES

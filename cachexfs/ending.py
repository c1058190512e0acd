"""How a mount ends: that somebody has asked for it, whether undrained data may stay behind, how much does.

Role: daemon layer, shared by ``control_server`` (the command ``umount``) and ``serving`` (signals, the supervisor),
which makes an exit code of it. Concurrency: set by whoever ends the mount, read by who waits for ``requested``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from cachexfs.errors import EXIT_DONE, EXIT_NOT_DURABLE


@dataclass(slots=True, eq=False)
class Ending:
    """``left``: changes and files that are not on the PFS; ``abandoned``: the user wants no drain;
    ``is_published``: all that is staged is known to the catalogue."""

    requested: trio.Event = field(default_factory=trio.Event)
    abandoned: bool = False
    left: int = 0
    is_published: bool = False

    @property
    def exit_code(self) -> int:
        """What the daemon ends with."""
        return EXIT_NOT_DURABLE if self.left or self.abandoned else EXIT_DONE

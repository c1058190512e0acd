"""The ways in which a mount works: who mounts, who serves a read or a write, who lives on when the daemon dies.

Role: ``Mode.cluster`` makes one mounted node, ``Mode.run`` runs Python code (standard library only, it may import
``twin``) as the one whose mount it is. Machines without passthrough have one mode less, and say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachexfs.demo.cluster import LocalCluster
from cachexfs.supervisor.passthrough import probe

HERE = Path(__file__).parent
NOBODY = 65534
#: The interpreter of a user who cannot reach ours; it finds our packages by PYTHONPATH.
SYSTEM_PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"
RUN_S_MAX = 90.0


@dataclass(frozen=True)
class Mode:
    """One way. ``kernel`` and ``reason`` are what ``status`` says of it."""

    name: str
    options: dict[str, str | None]
    kernel: str
    reason: str = ""
    acts_as: int = 0
    mounts_as: int = 0
    supervised: bool = True
    prefix: tuple[str, ...] = field(default=())

    def cluster(self, make: Callable[..., LocalCluster], patch: pytest.MonkeyPatch) -> LocalCluster:
        """One node, mounted this way."""
        if self.acts_as:
            assert os.access(SYSTEM_PYTHON, os.X_OK), f"{SYSTEM_PYTHON} is missing: tools/setup.sh installs it"
            packages = [path for path in sys.path if path.endswith("site-packages")]
            patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), *packages]))
            patch.setattr(sys, "executable", SYSTEM_PYTHON)
        cluster = make(1, self.options, mounted=False)
        node = cluster.nodes[0]
        if self.acts_as:
            for path in (cluster.pfs, node.staging, node.runtime):
                os.chown(path, self.acts_as, self.acts_as)
            cluster.node_options[0] = {"log_file": str(node.runtime / "log")}
        if self.mounts_as:
            os.chown(node.mountpoint, self.mounts_as, self.mounts_as)
            cluster.prefix = ["setpriv", f"--reuid={self.mounts_as}", f"--regid={self.mounts_as}", "--clear-groups"]
        cluster.mount()
        return cluster

    def run(self, code: str, *arguments: object) -> None:
        """Run code as the one whose mount it is; it fails when the code does."""
        ids = {"user": self.acts_as, "group": self.acts_as, "extra_groups": []} if self.acts_as else {}
        python = SYSTEM_PYTHON if self.acts_as else sys.executable
        done = subprocess.run(
            [python, "-P", "-c", code, *map(str, arguments)], env=os.environ | {"PYTHONPATH": str(HERE)}, cwd="/",
            capture_output=True, text=True, check=False, timeout=RUN_S_MAX, **ids,
        )  # type: ignore[call-overload]  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]


WHY_NOT = probe("auto")  # passthrough, on this machine
PASSTHROUGH = ("handler", WHY_NOT) if WHY_NOT else ("passthrough", "")
ALONE = ("handler", "supervisor=off")

_ALL = [
    Mode("kernel", {"supervisor": "on"}, *PASSTHROUGH),
    Mode("handler", {"supervisor": "on", "passthrough": "off"}, "handler", "passthrough=off"),
    Mode("alone", {"supervisor": "off"}, *ALONE, supervised=False),
]
if os.geteuid() == 0:
    user = {"acts_as": NOBODY, "mounts_as": NOBODY}
    _ALL += [
        Mode("for-a-user", {"supervisor": "on", "user": "nobody"}, *PASSTHROUGH, acts_as=NOBODY),
        Mode("unprivileged", {"supervisor": "on"}, "handler", "no CAP_SYS_ADMIN", **user),
        Mode("unprivileged-alone", {"supervisor": "off"}, *ALONE, **user, supervised=False),
    ]
MODES = {mode.name: mode for mode in _ALL}

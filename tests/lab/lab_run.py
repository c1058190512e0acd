"""Run a command with one of the tests' filesystems: ``python tests/lab/lab_run.py strict|nasty|moose CMD ... {}``.

``{}`` stands for a mounted directory of it. Root only; ends with the command, whose exit code it returns.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

from lab_base import Lab
from lab_gluster import Gluster
from lab_moosefs import MooseFs

MAKE: dict[str, Callable[[Lab], Gluster | MooseFs]] = {
    "strict": lambda lab: Gluster(lab, "strict", "disperse", 3, 3, ping_s=3, cache_s=0),
    "nasty": lambda lab: Gluster(lab, "nasty", "distribute", 2, 2, ping_s=3, cache_s=1),
    "small": lambda lab: Gluster(lab, "small", "distribute", 1, 1, ping_s=42, cache_s=0, xfs_mib=400),
    "moose": lambda lab: MooseFs(lab, "moose", 2, 1),
}


def main() -> int:
    """Command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    lab = Lab()
    try:
        mount = str(MAKE[sys.argv[1]](lab).mounts[0])
        with subprocess.Popen([word.replace("{}", mount) for word in sys.argv[2:]]) as process:
            try:
                return process.wait()
            finally:
                process.terminate()  # it takes down what it has made while the filesystem is there
    finally:
        lab.close()


if __name__ == "__main__":
    sys.exit(main())

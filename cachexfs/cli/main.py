"""The command ``cachexfs``: finds a subcommand, runs it, turns errors into one line and an exit code.

Role: entry point. Subcommands are imported when they are called, so that ``--help`` and ``status`` start quickly; those
of other parts of the project (demo, bench, recover, drill, the model) are listed where their module is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

import click

import cachexfs
from cachexfs.cli.output import quiet_pipe, write_error
from cachexfs.errors import EXIT_CANNOT_TELL, EXIT_DONE, EXIT_USAGE, CacheXError

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where a command lives (``module``, ``attribute``) and what ``cachexfs --help`` says of it."""

    module: str
    help: str
    attribute: str = "command"


COMMANDS = {
    "mount": Lazy("cachexfs.cli.mount", "Mount a PFS directory on this node."),
    "umount": Lazy("cachexfs.cli.umount", "Bring everything to the PFS, then unmount."),
    "restart": Lazy("cachexfs.cli.restart", "Another daemon under a live mount."),
    "upgrade": Lazy("cachexfs.cli.restart", "Another version of the daemon under a live mount.", "upgrade"),
    "status": Lazy("cachexfs.cli.status", "How far each checkpoint has got; exit 3 on errors or lost protection."),
    "metrics": Lazy("cachexfs.cli.metrics", "What status knows, for Prometheus."),
    "wait": Lazy("cachexfs.cli.wait", "Wait until a file or checkpoint is at a boundary."),
    "latest": Lazy("cachexfs.cli.latest", "The newest checkpoint that can be restarted from."),
    "explain": Lazy("cachexfs.cli.explain", "Why a path is where it is, and what would bring it further."),
    "recover": Lazy("cachexfs.cli.recover", "Bring what a crash left on this node's NVMe to the PFS."),
    "drill": Lazy("cachexfs.cli.drill", "Prove recovery of a checkpoint on a live job."),
    "bench": Lazy("cachexfs.cli.bench", "Rates through the mount beside tmpfs, NVMe and PFS."),
    "demo": Lazy("cachexfs.demo.command", "Several nodes on this machine: save, lose a node, restore."),
}
HIDDEN = {"job-secret": Lazy("cachexfs.cli.job_secret", "")}
OPTIONAL = ("recover", "drill", "bench", "demo")
MODEL_MODULE = "cachexfs.model.commands"
MODEL_COMMANDS = {
    "probe": "Measure what the durability model needs.",
    "fit": "Fit the durability model to observations.",
    "predict": "When a checkpoint will reach each boundary.",
    "advise": "How often to save, and by which route.",
    "exposure": "How much work is at risk.",
    "simulate": "Many nodes, many failures, from a seed.",
    "report": "A run's boundaries and exposure as a report.",
}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [name for name, lazy in COMMANDS.items() if name not in OPTIONAL or _exists(lazy.module)]
        return names + (list(MODEL_COMMANDS) if _exists(MODEL_MODULE) else [])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx) and cmd_name not in HIDDEN:
            return None
        lazy = COMMANDS.get(cmd_name) or HIDDEN.get(cmd_name)
        if lazy is not None:
            command = getattr(importlib.import_module(lazy.module), lazy.attribute)
            assert isinstance(command, click.Command)
            return command
        group = click.Group()
        importlib.import_module(MODEL_MODULE).register(group)
        return group.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        own = [(name, COMMANDS[name].help) for name in names if name in COMMANDS]
        model = [(name, MODEL_COMMANDS[name]) for name in names if name in MODEL_COMMANDS]
        for title, rows in (("Commands", own), ("Durability model", model)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            import difflib

            close = difflib.get_close_matches(name, self.list_commands(ctx), 1, 0.5)
            hint = f"did you mean '{close[0]}'?" if close else "see 'cachexfs --help'"
            ctx.fail(f"there is no command '{name}': {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(cachexfs.__version__, prog_name="cachexfs")
def cli() -> None:
    """A checkpoint filesystem: node memory, a partner's NVMe, then the parallel filesystem.

    Exit codes: 0 done, 1 the answer is no, 2 wrong usage, 3 data not durable, lost or unprotected, 4 cannot tell (no
    daemon, PFS unreadable), 124 timed out.
    """


def run(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors are printed."""
    try:
        result: Any = cli.main(args=args, prog_name="cachexfs", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        write_error(error.format_message())
        return EXIT_USAGE
    except CacheXError as error:
        write_error(str(error) or type(error).__name__)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        quiet_pipe()
        return EXIT_CANNOT_TELL
    except OSError as error:
        write_error(str(error))
        return EXIT_CANNOT_TELL
    return result if isinstance(result, int) else EXIT_DONE


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())

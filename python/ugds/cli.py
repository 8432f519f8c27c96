# SPDX-License-Identifier: Apache-2.0
"""The command `ugds`. Each command is a function of the parsed arguments that gives its exit status."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence

import ugds
from ugds import _report
from ugds._report import CommandError
from ugds.bench import _cli as bench_commands
from ugds.host import _cli as host_commands

DEVICES = """\
devices:
  emulated:1GiB                     a controller in this process, in memory, new at each opening
  emulated:1GiB?lba=512&queues=2    the same with other traits: ugds info --parameters lists them
  emulated:/path/to/image           one that keeps its data in a file
  pci:0000:65:00.0                  a controller on the bus, after `ugds bind`; ?ns=2 names a namespace
  vfio-user:/run/ssd                a controller that another process serves, such as `ugds serve`
"""


def demo(arguments: argparse.Namespace) -> int:
    from ugds import _demo

    return _demo.run(arguments.file, arguments.device, arguments.json, arguments.corrupt, arguments.overwrite)


def info(arguments: argparse.Namespace) -> int:
    console = _report.console()
    if arguments.parameters:
        from ugds import testing

        rows = testing.parameters()
        if arguments.json:
            for row in rows:
                print(json.dumps(row._asdict()))
        else:
            console.print(_report.table("emulated:SIZE?name=value&…", ("parameter", "values", "meaning"), rows, left=3))
        return 0
    if arguments.uri is None:
        raise CommandError("name a device, or ask for --parameters\n  for example: ugds info emulated:1GiB", status=2)
    with ugds.open(arguments.uri) as device:
        described = ugds.DeviceInfo.of(device)
    if arguments.json:
        print(json.dumps(described.as_dict()))
    else:
        console.print(str(described), markup=False)
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    from ugds import _faults

    if not arguments.last_fault:
        raise CommandError("say what to look at: ugds doctor --last-fault", status=2)
    return _faults.report(arguments.json, every=arguments.all, pid=arguments.pid, device=arguments.device)


def octal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or set(text) - set("01234567") or int(text, 8) > 0o777:
        raise argparse.ArgumentTypeError(f'"{text}" is not an octal mode up to 777, such as 600')
    return int(text, 8)


def serve(arguments: argparse.Namespace) -> int:
    from ugds import _serve

    return _serve.run(arguments.uri, arguments.socket, arguments.mode, arguments.json)


def run_program(arguments: argparse.Namespace) -> int:
    from ugds import _run

    words = arguments.program
    return _run.run(words[1:] if words[:1] == ["--"] else words, arguments.summary, arguments.json)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="ugds",
        description="Moves data between NVMe SSDs and GPU memory under user-space control.",
        epilog="examples:\n"
        "  ugds demo                    store a real file on an emulated SSD, read it back by every mode, compare\n"
        "  ugds info emulated:1GiB      what a device says of itself\n"
        "  ugds devices                 the NVMe controllers of this machine\n"
        "  ugds bench sync              throughput and latency\n"
        "  ugds bench sync --help       every command explains itself\n\n" + DEVICES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ugds {ugds.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    made = _command(
        commands,
        "demo",
        demo,
        "store a real file on a device, read it back by every I/O mode, and compare every byte",
        "examples:\n"
        "  ugds demo                          the weights of a small model, if its package is installed\n"
        "  ugds demo video.mp4\n"
        "  ugds demo video.mp4 --corrupt      flips a bit on the device first: the comparison must find it\n"
        "  ugds demo --json | tail -n 1\n\n"
        "The exit status is 0 where no byte differs.\n\n" + DEVICES,
    )
    made.add_argument("file", nargs="?", metavar="FILE", help="any file with contents")
    made.add_argument("--device", metavar="URI", help="where to store it (an emulated device of the file's size)")
    made.add_argument("--corrupt", action="store_true", help="flip one bit on the emulated device before reading")
    made.add_argument("--overwrite", action="store_true", help="allow a device that may hold data: it is lost")
    _json_option(made)

    shown = _command(
        commands,
        "info",
        info,
        "what a device says of itself",
        "examples:\n"
        "  ugds info emulated:1GiB\n"
        "  ugds info 'emulated:1GiB?lba=512&mdts=3' --json\n"
        "  ugds info --parameters\n\n" + DEVICES,
    )
    shown.add_argument("uri", nargs="?", metavar="URI", help="a device")
    shown.add_argument("--parameters", action="store_true", help="list what an emulated: URI can set")
    _json_option(shown)

    host_commands.add_commands(functools.partial(_command, commands))
    served = _command(
        commands,
        "serve",
        serve,
        "let other processes drive an emulated device, by the vfio-user protocol",
        "examples:\n"
        "  ugds serve emulated:1GiB --socket /run/user/1000/ssd.sock\n"
        "  ugds serve 'emulated:/path/to/image?size=1GiB' --socket /run/user/1000/ssd/\n\n"
        "One client at a time. When one ends, however it ends, the controller is reset and the next one may come; the\n"
        "data stays. Ctrl-C and SIGTERM end the server. docs/serve.md says what clients find.",
    )
    served.add_argument("uri", metavar="URI", help="an emulated device")
    served.add_argument(
        "--socket", metavar="PATH", required=True, help="where clients connect; cntrl in it, if a folder"
    )
    served.add_argument("--mode", type=octal, default=0o600, metavar="OCTAL", help="who may connect (600: only you)")
    _json_option(served)

    started = _command(
        commands,
        "run",
        run_program,
        "run a program that uses cuFile, with uGDS in the place of NVIDIA's library",
        "examples:\n"
        "  ugds run -- python train.py\n"
        "  ugds run --summary -- python -m pytest tests\n"
        "  ugds run --json -- ./reader data.bin | tail -n 1\n\n"
        "The exit status is the program's; 1 where another libcufile got in. docs/cufile.md says what is supported.",
    )
    started.add_argument("--summary", action="store_true", help="tell at the end, on standard error, what went through")
    started.add_argument("--json", action="store_true", help="tell the same in a last line on standard output, as JSON")
    started.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments"
    )

    asked = _command(
        commands,
        "doctor",
        doctor,
        "what went wrong",
        "examples:\n"
        "  ugds doctor --last-fault\n"
        "  ugds doctor --last-fault --device pci:0000:65:00.0\n"
        "  ugds doctor --last-fault --all --json\n\n"
        "Events of failures are kept in a small file, in UGDS_STATE_DIR, or ugds/ of XDG_STATE_HOME, or\n"
        "~/.local/state/ugds. docs/failures.md explains them.",
    )
    asked.add_argument("--last-fault", action="store_true", help="the events of the last process that had some")
    asked.add_argument("--all", action="store_true", help="those of every process that are kept")
    asked.add_argument("--pid", type=int, metavar="NUMBER", help="those of the processes with this number")
    asked.add_argument("--device", metavar="TEXT", help="only those of devices whose URI has this text")
    _json_option(asked)

    benches = commands.add_parser(
        "bench",
        help="measure",
        description="Measures. Figure names are stable: what they are called today, they are called later.",
        epilog=bench_commands.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = benches.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    bench_commands.add_commands(functools.partial(_command, kinds))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` is without the program's name. Returns the exit status: 1 for what failed, 2 for a
    command line that cannot be obeyed."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except ugds.Error as error:
        message, status = _report.describe(error), 1
    except CommandError as error:
        message, status = str(error), error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python must not try to flush the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    print(f"ugds {arguments.command}: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

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
from ugds import _report, sizes
from ugds._report import CommandError
from ugds.host import _cli as host_commands

DEVICES = """\
devices:
  emulated:1GiB                     a controller in this process, in memory, new at each opening
  emulated:1GiB?lba=512&queues=2    the same with other traits: ugds info --parameters lists them
  emulated:/path/to/image           one that keeps its data in a file
  pci:0000:65:00.0                  a controller on the bus, after `ugds bind`; ?ns=2 names a namespace
  vfio-user:/run/ssd                a controller that another process serves, such as `ugds serve`
"""


def size(text: str) -> int:
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of seconds above 0, and 3600 at most')
    return value


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


def bench(arguments: argparse.Namespace) -> int:
    from ugds import bench

    measure = bench.BENCHMARKS[arguments.benchmark]
    with bench.traced(getattr(arguments, "trace", None)):
        records = measure(arguments)
    if arguments.json:
        for record in records:
            print(record.json())
        return 0
    console = _report.console()
    device = records[0].device if records else arguments.device
    several = len({record.device for record in records}) > 1
    console.print(f"ugds bench {arguments.benchmark}{'' if several else f' on {device}'}", markup=False)
    if arguments.benchmark == "replay":
        from ugds.bench import replay

        console.print(replay.table(records[0]))
    else:
        for part in _report.records_tables(records):
            console.print(part)
    if arguments.benchmark == "completion" and bench.was_crowded(records):
        console.print(
            "The polling thread did not have its processor for itself: other programs were running, and what they cost "
            "is in these figures.\nRepeat the measurement on a quieter machine."
        )
    if device.startswith("emulated:"):
        console.print(_report.EMULATED_NOTE)
    return 0


def speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f'"{text}" is not a factor from 0 to 1000000')
    return value


def octal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or set(text) - set("01234567") or int(text, 8) > 0o777:
        raise argparse.ArgumentTypeError(f'"{text}" is not an octal mode up to 777, such as 600')
    return int(text, 8)


def serve(arguments: argparse.Namespace) -> int:
    from ugds import _serve

    return _serve.run(arguments.uri, arguments.socket, arguments.mode, arguments.json)


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


def _bench_commands(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)

    sync = _command(
        kinds,
        "sync",
        bench,
        "synchronous reads and writes by request size and number of threads, and reads against memcpy",
        "examples:\n"
        "  ugds bench sync\n"
        "  ugds bench sync --sizes 4KiB,1MiB --threads 1,2,4 --mode mixed\n"
        "  ugds bench sync --json | grep ratio_to_memcpy\n\n"
        "ratio_to_memcpy is the throughput of 1 MiB reads over that of memcpy of as many bytes between two buffers of\n"
        "this process, in turn: at 1, a read of the emulated device costs no more than the copy that it has to make.",
    )
    sync.add_argument("--sizes", default="4KiB,64KiB,1MiB,16MiB", metavar="SIZE,…", help="4KiB to 64MiB (%(default)s)")
    sync.add_argument("--threads", default="1,4", metavar="N,…", help="1 to 64 (%(default)s)")
    sync.add_argument("--mode", choices=("read", "write", "mixed"), default="read", help="%(default)s is the default")
    sync.add_argument("--seconds", type=seconds, default=0.3, help="for each measurement (%(default)s)")

    sync.add_argument("--overwrite", action="store_true", help="allow a device that may hold data: it is lost")

    setup = _command(
        kinds,
        "setup",
        bench,
        "the time from nothing to the first byte: opening, registration and one read",
        "examples:\n  ugds bench setup\n  ugds bench setup --processes 30 --json",
    )
    setup.add_argument("--processes", type=positive, default=10, help="fresh processes to measure in (%(default)s)")
    setup.add_argument("--repetitions", type=positive, default=10, help="and openings in one process (%(default)s)")

    overhead = _command(
        kinds,
        "overhead",
        bench,
        "what one 4 KiB read costs in the library and in Python, counted in instructions (needs valgrind)",
        "examples:\n  ugds bench overhead\n  ugds bench overhead --calls 2000 --json\n\n"
        "The device has pump=caller: it runs in the caller's thread, and its own instructions can be told apart:\n"
        "sync_read_4k_instructions = sync_read_4k_total_instructions - emulator_turn_instructions.",
    )
    overhead.add_argument("--calls", type=positive, default=1000, help="reads to count over (%(default)s)")

    completion = _command(
        kinds,
        "completion",
        bench,
        "polling against sleeping for interrupts: a read's time, and the share of a processor that it takes",
        "examples:\n  ugds bench completion\n  ugds bench completion --json | grep interrupt_cpu_percent\n\n"
        "4 KiB reads of an emulated device with 10 us of latency (polling_speedup: how much longer sleeping takes), "
        "and\n1 MiB reads of one with 230 us (interrupt_cpu_percent: of one processor, by the reading thread).",
    )
    completion.add_argument("--seconds", type=seconds, default=1.0, help="for each way of waiting (%(default)s)")
    completion.add_argument("--device", metavar="URI", default=None, help="the same reads on this device instead")
    _json_option(completion)

    _replay_command(kinds)
    for kind, default in ((sync, "emulated:1GiB"), (setup, "emulated:1GiB"), (overhead, "emulated:64MiB?pump=caller")):
        kind.add_argument("--device", metavar="URI", default=default, help="%(default)s is the default")
        _json_option(kind)
    for kind in (sync, setup, completion):  # overhead measures the way that is not taken while a device is traced
        _trace_option(kind)


def _replay_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = _command(
        kinds,
        "replay",
        bench,
        "the requests of a trace once more, at their times or as fast as possible, and both latencies side by side",
        "examples:\n"
        "  ugds bench sync --trace sync.json\n"
        "  ugds bench replay sync.json\n"
        "  ugds bench replay sync.json --speed 0 --threads 4 --device 'emulated:1GiB?latency=80us'\n"
        "  ugds bench replay sync.json --json\n\n"
        "Operation, offset, size and time of each request are replayed, not its data. Each thread waits for a request\n"
        "before it takes the next: late_p99_us says how late requests were issued for want of threads or processors.",
    )
    replay.add_argument("file", metavar="FILE", help="a trace, by --trace or ugds.trace.write_chrome")
    replay.add_argument("--device", metavar="URI", help="where to replay (where it was recorded, if that is emulated)")
    replay.add_argument("--process", type=positive, metavar="N", help="which device of a trace of several")
    replay.add_argument(
        "--speed", type=speed, default=1.0, metavar="FACTOR", help="of time; 0: no waiting (%(default)s)"
    )
    replay.add_argument("--threads", type=positive, metavar="N", help="as many as requests overlapped, 64 at most")
    replay.add_argument("--overwrite", action="store_true", help="allow a device that may hold data: it is lost")
    _json_option(replay)
    _trace_option(replay)


def _trace_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", help="also record every command, for ui.perfetto.dev; makes small requests dearer"
    )


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

    benches = commands.add_parser(
        "bench",
        help="measure",
        description="Measures. Figure names are stable: what they are called today, they are called later.",
        epilog="examples:\n  ugds bench sync\n  ugds bench setup --json\n  ugds bench overhead",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _bench_commands(benches)
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

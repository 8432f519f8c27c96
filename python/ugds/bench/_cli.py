# SPDX-License-Identifier: Apache-2.0
"""`ugds bench …`. What a benchmark needs is imported when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from ugds import _report, sizes
from ugds.bench import _cli_files, _cli_models
from ugds.bench.figures import BATCH, COMPLETION, OVERLAP, SETUP, SETUP_PROCESSES, STREAM, SYNC

MakeCommand = Callable[..., argparse.ArgumentParser]

_WORDS = {True: "holds", False: "missed"}

EXAMPLES = """\
examples:
  ugds bench sync
  ugds bench setup --json
  ugds bench overhead
  ugds bench sync --figure 4 --baseline io_uring:/var/tmp/baseline --json >> figures.jsonl
  ugds bench report figures.jsonl --out report

docs/benchmarks.md has every benchmark, its parameters and its figures."""


def size(text: str) -> int:
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return int(text)


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of a GPU, such as 0')
    return int(text)


def percent(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 99:
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a whole number from 1 to 99; reads or writes alone are `ugds bench sync`'
        )
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of seconds above 0, and 3600 at most')
    return value


def speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f'"{text}" is not a factor from 0 to 1000000')
    return value


def run(arguments: argparse.Namespace) -> int:
    from ugds import bench
    from ugds.bench import _devices, bars

    with _devices.traced(getattr(arguments, "trace", None)):
        records = bench.BENCHMARKS[arguments.benchmark](arguments)
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
    if promised := bars.held(records):
        rows = [(one.figure, one.of, _report.number(one.value), str(one.bar), _WORDS[one.holds]) for one in promised]
        console.print(_report.table("promised", ("figure", "of", "value", "promised", ""), rows, left=2))
    if arguments.benchmark == "completion" and bench.was_crowded(records):
        console.print(
            "The polling thread did not have its processor for itself: other programs were running, and what they cost "
            "is in these figures.\nRepeat the measurement on a quieter machine."
        )
    for note in _report.notes(records):
        console.print(note)
    return 0


def report(arguments: argparse.Namespace) -> int:
    from ugds.bench import report

    made = report.make(arguments.files, arguments.out)
    for chart in made.charts:
        print(
            json.dumps({"chart": chart.name, "title": chart.title, "file": str(chart.file)})
            if arguments.json
            else chart.file
        )
    if not arguments.json:
        print(made.page)
    return 0


def add_commands(command: MakeCommand) -> None:
    """Adds the benchmarks; `command(name, run, summary, epilog)` makes one."""
    _sync(command)
    _mixed(command)
    _batch(command)
    _others(command)
    _replay(command)
    _scheduling(command)
    _gpu(command)
    _cli_files.add_commands(command, run, positive, whole)
    _cli_models.add_commands(command, run, size, positive, whole)
    made = command(
        "report",
        report,
        "draw every figure that there is data for, as PNG files and one page",
        "examples:\n"
        "  ugds bench sync --figure 6 --baseline posix:/var/tmp/baseline --json > sync.jsonl\n"
        "  ugds bench report sync.jsonl --out report\n"
        "  ugds bench setup --json | ugds bench report --out report\n\n"
        "Needs matplotlib: pip install 'ugds[report]'. The page, index.html, holds all it shows.",
    )
    made.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="what `--json` printed (standard input; also by -)"
    )
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="made if it is not there")
    _json_option(made)


def _sync(command: MakeCommand) -> None:
    made = command(
        "sync",
        run,
        "synchronous reads and writes by request size and number of threads, and reads against memcpy",
        "examples:\n"
        "  ugds bench sync\n"
        "  ugds bench sync --sizes 4KiB,1MiB --threads 1,2,4 --mode mixed\n"
        "  ugds bench sync --figure 6 --baseline posix:/var/tmp/baseline --baseline io_uring:/var/tmp/baseline\n"
        "  ugds bench sync --json | grep ratio_to_memcpy\n\n"
        "ratio_to_memcpy is the throughput of 1 MiB reads over that of memcpy of as many bytes between two buffers of\n"
        "this process, in turn: at 1, a read of the emulated device costs no more than the copy that it makes.\n\n"
        "--figure N takes the parameters of a figure of the uGDS paper: 4 (read bandwidth), 5 (write bandwidth), 6\n"
        "(latencies of both), 7 (writes of 64 threads). Options beside it narrow it.\n\n"
        "--gpu N measures 1, 4 and 16 MiB reads and writes between the device and that GPU's memory instead, against\n"
        "the same device with host memory and against the machine's own copies between pinned memory and the GPU:\n"
        "staged_share is the share of the smaller of the two.\n\n" + BASELINES,
    )
    made.add_argument(
        "--figure", type=int, choices=tuple(SYNC), metavar="N", help="4 to 7: the parameters of that figure"
    )
    made.add_argument("--sizes", metavar="SIZE,…", help="4KiB to 64MiB (4KiB,64KiB,1MiB,16MiB)")
    made.add_argument("--threads", metavar="N,…", help="1 to 64 (1,4)")
    made.add_argument("--mode", choices=("read", "write", "mixed"), help="read is the default")
    _gpu_options(made, default=None)
    _load_options(made)
    made.set_defaults(device=None)


def _mixed(command: MakeCommand) -> None:
    made = command(
        "mixed",
        run,
        "reads and writes together, by their ratio, request size and number of threads",
        "examples:\n"
        "  ugds bench mixed\n"
        "  ugds bench mixed --read-percent 50 --sizes 16KiB --threads 1,8\n"
        "  ugds bench mixed --baseline io_uring:/var/tmp/baseline --json\n\n" + BASELINES,
    )
    made.add_argument(
        "--read-percent", type=percent, default=70, metavar="N", help="of the requests, 1 to 99 (%(default)s)"
    )
    made.add_argument("--sizes", default="4KiB,64KiB", metavar="SIZE,…", help="4KiB to 64MiB (%(default)s)")
    made.add_argument("--threads", default="1,4", metavar="N,…", help="1 to 64 (%(default)s)")
    _load_options(made)


def _batch(command: MakeCommand) -> None:
    made = command(
        "batch",
        run,
        "batches of 4 KiB reads against synchronous ones and the device's model; or batches by size and depth",
        "examples:\n"
        "  ugds bench batch\n"
        "  ugds bench batch --figure 10\n"
        "  ugds bench batch --sizes 4KiB --depths 1,128 --mode read\n"
        "  ugds bench batch --figure 8 --baseline io_uring:/var/tmp/baseline --json\n\n"
        "Without --figure or an option of it: batch_share_of_model, the reads a second of batches of 128 as a share\n"
        "of what an emulated device with 20 us of latency allows; requests_ratio_to_sync, the same over synchronous\n"
        "calls from a thread less than there are processors; doorbells_per_submission; and first_batch_ratio.\n"
        "--figure N takes the parameters of a figure of the uGDS paper: 8 (reads), 9 (writes), 10 (the first batch\n"
        "against the following ones, of 128 KiB requests), 11 (both without the first batch). Options beside it\n"
        "narrow it.\n\n" + BASELINES,
    )
    made.add_argument("--figure", type=int, choices=tuple(BATCH), metavar="N", help="8 to 11")
    made.add_argument("--sizes", metavar="SIZE,…", help="of requests (4KiB to 128KiB)")
    made.add_argument("--depths", metavar="N,…", help="requests a batch (1 to 128)")
    made.add_argument("--mode", choices=("read", "write"), help="both are the default, where the figure has both")
    made.add_argument("--total", type=size, metavar="SIZE", help="moved by each process (64MiB)")
    made.add_argument("--processes", type=positive, metavar="N", help="of which each figure is the median (3)")
    made.add_argument("--seconds", type=seconds, default=2.0, help="in all, without --figure (%(default)s)")
    _target_options(made)
    made.set_defaults(device=None)


def _others(command: MakeCommand) -> None:
    setup = command(
        "setup",
        run,
        "the time from nothing to the first byte: opening, registration and one read",
        "examples:\n  ugds bench setup\n  ugds bench setup --processes 30 --json\n  ugds bench setup --figure 3",
    )
    setup.add_argument(
        "--figure", type=int, choices=(SETUP,), metavar="N", help=f"{SETUP}: the defaults are that figure's"
    )
    setup.add_argument(
        "--processes", type=positive, default=SETUP_PROCESSES, help="fresh processes to measure in (%(default)s)"
    )
    setup.add_argument("--repetitions", type=positive, default=10, help="and openings in one process (%(default)s)")
    _device_option(setup, "emulated:1GiB")
    _trace_option(setup)

    overhead = command(
        "overhead",
        run,
        "what one 4 KiB read costs in the library and in Python, counted in instructions (needs valgrind)",
        "examples:\n  ugds bench overhead\n  ugds bench overhead --calls 2000 --json\n\n"
        "The device has pump=caller: it runs in the caller's thread, and its own instructions can be told apart:\n"
        "sync_read_4k_instructions = sync_read_4k_total_instructions - emulator_turn_instructions.",
    )
    overhead.add_argument("--calls", type=positive, default=1000, help="reads to count over (%(default)s)")
    _device_option(overhead, "emulated:64MiB?pump=caller")

    completion = command(
        "completion",
        run,
        "polling against sleeping for interrupts: a read's time, and the share of a processor that it takes",
        "examples:\n  ugds bench completion\n  ugds bench completion --json | grep interrupt_cpu_percent\n"
        "  ugds bench completion --figure 14\n\n"
        "4 KiB reads of an emulated device with 10 us of latency (polling_speedup: how much longer sleeping takes), "
        "and\n1 MiB reads of one with 230 us (interrupt_cpu_percent: of one processor, by the reading thread).",
    )
    completion.add_argument(
        "--figure", type=int, choices=(COMPLETION,), metavar="N", help=f"{COMPLETION}: the defaults are that figure's"
    )
    completion.add_argument("--seconds", type=seconds, default=1.0, help="for each way of waiting (%(default)s)")
    completion.add_argument("--device", metavar="URI", default=None, help="the same reads on this device instead")
    _json_option(completion)
    _trace_option(completion)


def _replay(command: MakeCommand) -> None:
    replay = command(
        "replay",
        run,
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


def _scheduling(command: MakeCommand) -> None:
    fairness = command(
        "fairness",
        run,
        "small reads beside large ones on one device, simulated: this library's scheduling and the uGDS paper's",
        "examples:\n  ugds bench fairness\n  ugds bench fairness --json | grep small_p99_ratio\n"
        "  ugds bench fairness --device 'emulated:256MiB?latency=10us&bandwidth=13GiB/s&mdts=6'\n\n"
        "small_p99_ratio_batch is the p99 of 4 KiB reads beside a batch of 1 MiB reads over their p99 on an idle "
        "device,\nsmall_p99_ratio_sync the same beside synchronous reads of 16 MiB; large_throughput_share is what "
        "the large reads\ngot of the device's bandwidth, the lesser of the two. docs/scheduling.md says what is "
        "simulated, and what is not.",
    )
    fairness.add_argument("--seconds", type=seconds, default=2.0, help="of virtual time, for each load (%(default)s)")
    fairness.add_argument("--device", metavar="URI", default=None, help="an emulated device, instead of four of them")
    _json_option(fairness)

    modes = command(
        "modes",
        run,
        "every mode by loads that it is for and that it is not for: how it schedules, simulated, and how it waits",
        "examples:\n  ugds bench modes\n  ugds bench modes --json | grep priority_read_share\n"
        "  ugds bench modes --device 'emulated:256MiB?latency=80us&bandwidth=6.5GiB/s&mdts=8'\n\n"
        "priority_read_share is the throughput of reads beside background writes over what it is alone, in mode "
        "priority;\npriority_write_share that of the writes; each is the lesser of reads that wait for the device's "
        "latency and reads\nthat take all it has. adaptive_latency_ratio is a 4 KiB read's time in mode adaptive over "
        "the better of polling and\nsleeping, adaptive_cpu_ratio a processor's time at 1 MiB. docs/scheduling.md has "
        "more.",
    )
    modes.add_argument("--only", choices=("scheduling", "waiting"), help="what is simulated, or what takes real time")
    modes.add_argument(
        "--seconds", type=seconds, default=1.0, help="of real time, for each mode and size (%(default)s)"
    )
    modes.add_argument("--device", metavar="URI", default=None, help="an emulated device to simulate, instead of two")
    _json_option(modes)


def _gpu(command: MakeCommand) -> None:
    stream = command(
        "stream",
        run,
        "reads in the order of a GPU's stream, against synchronous ones into the same memory (needs a GPU)",
        "examples:\n"
        "  ugds bench stream\n"
        "  ugds bench stream --route staged --json | grep stream_sync_extra_us\n"
        "  ugds bench stream --figure 12\n\n"
        "stream_sync_extra_us is the time of a 4 KiB read on a stream and its synchronisation, less a synchronous "
        "call's;\nstream_share_of_sync_16mib the throughput of one stream that is kept supplied over that of "
        "synchronous calls;\nsubmission_share_16mib the part of the time that the caller spends in submitting calls, "
        "64 reads of 16 MiB in flight.\n\n"
        "--figure N takes the parameters of a figure of the uGDS paper: 12 (reads of 4 KiB to 1 MiB, each followed by\n"
        "a synchronisation of the stream; --sizes narrows it), 16 (16 MiB reads: synchronous, on one stream, on 16).",
    )
    stream.add_argument("--figure", type=int, choices=tuple(STREAM), metavar="N", help="12 or 16")
    stream.add_argument("--sizes", metavar="SIZE,…", help="each read followed by a synchronisation (4KiB to 16MiB)")
    overlap = command(
        "overlap",
        run,
        "writes on a GPU's stream beside kernels that take as long (needs a GPU)",
        "examples:\n  ugds bench overlap\n  ugds bench overlap --json | grep pipelined_ratio_to_ideal\n\n"
        "Sixteen 1 MiB writes, a kernel before each: one after another (sequential_ms), each write beside the next "
        "kernel\nand both waited for (overlap_ms), and all enqueued at once (pipelined_ms). ideal_ms is the time of "
        "17 stages.",
    )
    overlap.add_argument(
        "--figure", type=int, choices=(OVERLAP,), metavar="N", help=f"{OVERLAP}: the defaults are that figure's"
    )
    register = command(
        "register",
        run,
        "what registering memory takes, and closing it: of the host, and of a GPU by both routes (needs a GPU)",
        "examples:\n  ugds bench register\n  ugds bench register --sizes 64KiB,1GiB --json\n\n"
        "Sizes for which there is no memory to spare are left out.",
    )
    register.add_argument("--sizes", metavar="SIZE,…", help="64KiB to 4GiB (64KiB,1MiB,16MiB,256MiB,1GiB,4GiB)")
    for made in (stream, overlap, register):
        _gpu_options(made, default=0)
        made.add_argument(
            "--device", metavar="URI", help="an emulated device of 5.5 GiB/s and 10 us of latency is the default"
        )
        _json_option(made)
        if made is not register:
            made.add_argument("--overwrite", action="store_true", help="allow a device that may hold data: it is lost")
            _trace_option(made)


def _gpu_options(parser: argparse.ArgumentParser, default: int | None) -> None:
    first = "" if default is None else f" ({default})"
    parser.add_argument("--gpu", type=whole, default=default, metavar="N", help=f"the GPU whose memory is used{first}")
    parser.add_argument(
        "--route", choices=("direct", "staged"), help="demand that route (what a registration of the memory takes)"
    )
    parser.add_argument("--rounds", type=positive, default=9, help="of GPU memory: figures are medians (%(default)s)")


BASELINES = """\
--baseline WHAT, which can be repeated, measures the same on something else, and puts it beside:
  posix:/path/of/a/file            pread and pwrite, by fio; O_DIRECT where the file system has it (route direct), and
                                   else through the page cache (route buffered)
  io_uring:/path/of/a/file?depth=8 the same by io_uring, with so many requests in flight a thread (1)
  emulated:1GiB?queues=1           or any other device
A file that does not exist is made (?size=1GiB, or 256 MiB), and removed at the end. One that exists is read, and
written only with --overwrite."""


def _load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=seconds, default=0.3, help="for each measurement (%(default)s)")
    parser.add_argument(
        "--processes", type=positive, metavar="N", help="fresh processes, of which each figure is the median (none)"
    )
    _target_options(parser)


def _target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baseline", action="append", default=[], metavar="WHAT", help="measure this as well, beside the device"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="allow devices and files that may hold data: it is lost"
    )
    _device_option(parser, "emulated:1GiB")
    _trace_option(parser, "; nothing is measured in fresh processes then")


def _device_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--device", metavar="URI", default=default, help=f"{default} is the default")
    _json_option(parser)


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")


def _trace_option(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help=f"also record every command of this process, for ui.perfetto.dev; makes small requests dearer{more}",
    )

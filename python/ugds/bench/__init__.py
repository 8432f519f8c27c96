# SPDX-License-Identifier: Apache-2.0
"""The benchmarks behind `ugds bench`. Each gives records (see `ugds._report.Record`); none prints."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

from ugds._report import CommandError, Record

# What a benchmark needs is loaded by those who run it: this module is part of every command's start.


def _sync(arguments: argparse.Namespace) -> list[Record]:
    if arguments.gpu is not None or arguments.route is not None:
        return _gpu_sync(arguments)
    from ugds.bench import load, sync, targets
    from ugds.bench.figures import SYNC

    figure = SYNC.get(arguments.figure)
    modes: tuple[str, ...] = figure.modes if figure else ("read",)
    sizes = load.parse_sizes(arguments.sizes or (figure and _list(figure.sizes)) or "4KiB,64KiB,1MiB,16MiB")
    numbers = arguments.threads or (figure and _list(figure.threads)) or "1,4"
    threads = load.parse_numbers(numbers, "--threads", load.MOST_THREADS)
    processes = _processes(arguments, figure.processes if figure else None)
    device = arguments.device or "emulated:1GiB"
    with targets.entered(device, arguments.baseline, arguments.overwrite) as measured:
        modes = (arguments.mode,) if arguments.mode else modes
        return sync.measure(measured, modes, sizes, threads, arguments.seconds, processes)


def _gpu_sync(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import gpu_sync, load

    for name in ("figure", "threads", "processes", "baseline"):
        if getattr(arguments, name):
            raise CommandError(f"--{name} goes with host memory, and not with --gpu or --route", status=2)
    if arguments.mode == "mixed":
        raise CommandError("--mode mixed goes with host memory, and not with --gpu or --route", status=2)
    modes = (arguments.mode,) if arguments.mode else ("read", "write")
    sizes = load.parse_sizes(arguments.sizes or _list(gpu_sync.SIZES))
    a = arguments
    return gpu_sync.measure(a.device, a.gpu or 0, a.route, modes, sizes, a.rounds, a.overwrite)


def _stream(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import load, stream

    a = arguments
    if a.figure == 16 and a.sizes:
        raise CommandError("--sizes goes with --figure 12: figure 16 is of one size", status=2)
    sizes = None if a.sizes is None else load.parse_sizes(a.sizes)
    if sizes and max(sizes) > stream.LARGE:
        raise CommandError("--sizes: 16MiB is the largest that is measured", status=2)
    return stream.measure(a.device, a.gpu, a.route, a.figure, sizes, a.rounds, a.overwrite)


def _overlap(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import overlap

    a = arguments
    return overlap.measure(a.device, a.gpu, a.route, a.rounds, a.overwrite)


def _register(arguments: argparse.Namespace) -> list[Record]:
    from ugds import sizes as units
    from ugds.bench import register

    a, sizes = arguments, list(register.SIZES)
    if a.sizes:
        try:
            sizes = [units.parse(part) for part in a.sizes.split(",")]
        except ValueError as error:
            raise CommandError(f"--sizes: {error}", status=2) from None
        for size in sizes:
            if not register.SMALLEST <= size <= register.LARGEST or size % register.SMALLEST:
                raise CommandError(f"--sizes: {size} is not a multiple of 64KiB from 64KiB to 4GiB", status=2)
    return register.measure(a.device, a.gpu, a.route, sizes, a.rounds)


def _mixed(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import load, mixed, targets

    sizes = load.parse_sizes(arguments.sizes)
    threads = load.parse_numbers(arguments.threads, "--threads", load.MOST_THREADS)
    processes = _processes(arguments, None)
    with targets.entered(arguments.device, arguments.baseline, arguments.overwrite) as measured:
        return mixed.measure(measured, arguments.read_percent, sizes, threads, arguments.seconds, processes)


def _batch(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import batch, batch_figures, load, targets
    from ugds.bench.figures import BATCH

    asked = (arguments.sizes, arguments.depths, arguments.mode, arguments.total, arguments.processes)
    if arguments.figure is None and not any(asked) and not arguments.baseline:
        return batch.measure(arguments.device, arguments.seconds)
    figure = BATCH[arguments.figure or 11]
    sizes = load.parse_sizes(arguments.sizes or _list(figure.sizes))
    depths = load.parse_numbers(arguments.depths or _list(figure.depths), "--depths", 1024)
    modes = (arguments.mode,) if arguments.mode else figure.modes
    processes = _processes(arguments, figure.processes)
    with targets.entered(arguments.device or "emulated:1GiB", arguments.baseline, arguments.overwrite) as measured:
        return batch_figures.measure(measured, modes, sizes, depths, arguments.total or figure.total, processes)


def _setup(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import setup

    return setup.measure(arguments.device, arguments.processes, arguments.repetitions)


def _overhead(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import overhead

    return overhead.measure(arguments.device, arguments.calls)


def _completion(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import completion

    return completion.measure(arguments.device, arguments.seconds)


def _replay(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import replay

    a = arguments
    return replay.measure(a.file, a.device, a.speed, a.threads, a.overwrite, a.process)


def _processes(arguments: argparse.Namespace, default: int | None) -> int | None:
    """How many fresh processes to measure in; None: in this one, whose devices alone can be traced."""
    if arguments.trace is None:
        return arguments.processes or default
    if arguments.processes is not None:
        raise CommandError("--trace records devices of this process: leave out --processes", status=2)
    return None


def _fairness(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import fairness

    return fairness.measure(arguments.device, arguments.seconds)


def _modes(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import modes

    return modes.measure(arguments.device, arguments.seconds, arguments.only)


def _files(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import files, load

    sizes = load.parse_sizes(arguments.sizes) if arguments.sizes else files.SIZES
    return files.measure(arguments.file, sizes, arguments.gpu, arguments.rounds)


def _cufile(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import cufile, load

    a = arguments
    sizes = load.parse_sizes(a.sizes) if a.sizes else cufile.SIZES
    if max(sizes) > cufile.LARGEST:
        raise CommandError("--sizes: 16MiB is the largest that is measured", status=2)
    return cufile.measure(a.file or tempfile.gettempdir(), a.gpu, a.library, sizes, a.rounds)


def _safetensors(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import weights

    a = arguments
    return weights.measure(a.folder, _file_size(a), a.gpu, a.rounds, a.only)


def _checkpoint(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import checkpoint

    return checkpoint.measure(arguments.folder, _file_size(arguments), arguments.gpu, arguments.rounds)


def _file_size(arguments: argparse.Namespace) -> int:
    if arguments.size < 1 << 20:
        raise CommandError(f"--size: {arguments.size} is less than 1MiB", status=2)
    return int(arguments.size)


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def was_crowded(records: list[Record]) -> bool:
    """Whether a thread that polled, and so wanted all of a processor, did not get it."""
    return any(record.figures.get("polling_cpu_percent", (100.0, "%"))[0] < 90 for record in records)


BENCHMARKS: dict[str, Callable[[argparse.Namespace], list[Record]]] = {
    "sync": _sync,
    "mixed": _mixed,
    "batch": _batch,
    "setup": _setup,
    "overhead": _overhead,
    "completion": _completion,
    "replay": _replay,
    "fairness": _fairness,
    "modes": _modes,
    "stream": _stream,
    "overlap": _overlap,
    "register": _register,
    "files": _files,
    "cufile": _cufile,
    "safetensors": _safetensors,
    "checkpoint": _checkpoint,
}

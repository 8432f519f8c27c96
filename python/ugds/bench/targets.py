# SPDX-License-Identifier: Apache-2.0
"""What a load can be put on: the device that is measured, and the baselines that it is compared with.

python -m ugds.bench.targets URI    measures the loads of standard input, a JSON list, in this fresh process
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol
from urllib.parse import unquote

import ugds
from ugds import _report
from ugds import sizes as units
from ugds._core import Device
from ugds._demo import in_memory
from ugds._report import CommandError
from ugds.bench import load as loads_of
from ugds.bench._devices import opened
from ugds.bench.fio import ENGINES, FileTarget
from ugds.bench.load import LARGEST, SPAN, Load, Result


class Target(Protocol):
    @property
    def uri(self) -> str: ...
    @property
    def kind(self) -> str | None:
        """posix, io_uring or ugds for a baseline; None for the device that is measured."""

    def load(self, load: Load) -> Result: ...
    def fresh(self, loads: Iterable[Load]) -> list[Result]:
        """Each load in a process that did nothing else before but the loads ahead of it."""

    def __enter__(self) -> Target: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DeviceTarget:
    """A device by its URI, opened and filled at the first load of this process."""

    def __init__(self, uri: str, kind: str | None = None) -> None:
        self.uri = uri
        self.kind = kind
        self._opened: Device | None = None
        self._closing = ExitStack()

    def __enter__(self) -> DeviceTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._opened = None
        self._closing.close()

    @property
    def device(self) -> Device:
        if self._opened is None:
            with ExitStack() as opening:
                device = opening.enter_context(opened(self.uri))
                if device.capacity < LARGEST:
                    raise CommandError(f"{self.uri} holds less than {units.format(LARGEST)}, which this needs", 2)
                loads_of.fill(device, min(device.capacity, SPAN))
                self._closing = opening.pop_all()
            self._opened = device
        return self._opened

    @property
    def span(self) -> int:
        return min(self.device.capacity, SPAN)

    def load(self, load: Load) -> Result:
        return loads_of.on_device(self.device, self.span, load)

    def fresh(self, loads: Iterable[Load]) -> list[Result]:
        self.close()  # a device on the bus is one process's at a time
        described = json.dumps([dataclasses.asdict(load) for load in loads])
        command = [sys.executable, "-m", "ugds.bench.targets", self.uri]
        done = subprocess.run(command, input=described, capture_output=True, text=True)
        if done.returncode != 0:
            raise CommandError(f"the measuring process failed:\n{done.stderr.strip()}")
        return [Result.of_json(found) for found in json.loads(done.stdout)]


def parse(what: str, overwrite: bool, made: set[Path] | None = None) -> Target:
    """The baseline that `--baseline WHAT` names; files that it makes are added to `made`, and may be written to by all
    that share it. Raises CommandError for what is none."""
    scheme, colon, rest = what.partition(":")
    if scheme not in ENGINES:
        return DeviceTarget(writable(what, overwrite), "ugds")
    place, _, query = rest.partition("?")
    if not colon or not place:
        raise CommandError(f"--baseline {what}: name a file, such as {scheme}:/path/of/a/file", status=2)
    size, depth = None, 1
    for parameter in query.split("&") if query else ():
        name, _, value = parameter.partition("=")
        try:
            if name == "size":
                size = units.parse(unquote(value))
            elif name == "depth" and scheme == "io_uring":
                depth = loads_of.parse_numbers(unquote(value), "depth", 4096)[0]
            else:
                known = "size" if scheme == "posix" else "size and depth"
                raise ValueError(f'"{name}" is no parameter of {scheme}:, which takes {known}')
        except (ValueError, CommandError) as error:
            raise CommandError(f"--baseline {what}: {error}", status=2) from None
    return FileTarget(what, scheme, Path(unquote(place)), size, depth, overwrite, set() if made is None else made)


def writable(uri: str, overwrite: bool) -> str:
    """The URI of a device that a benchmark may write to. Raises CommandError where it could lose data."""
    if not in_memory(uri) and not overwrite:
        raise CommandError(
            f"this benchmark writes to {uri}, which may hold data\n  what to do: add --overwrite if that data can go",
            status=2,
        )
    return uri


@contextmanager
def entered(device: str, baselines: Sequence[str], overwrite: bool) -> Iterator[list[Target]]:
    """The device, which may be written to, and its baselines, ready for loads."""
    targets: list[Target] = [DeviceTarget(writable(device, overwrite))]
    made: set[Path] = set()
    targets += [parse(what, overwrite, made) for what in baselines]
    with ExitStack() as stack:
        yield [stack.enter_context(target) for target in targets]


def measure(targets: Sequence[Target], loads: Sequence[Load], processes: int | None) -> list[list[Result]]:
    """For each load the result on each target, in turn, so that all meet the same machine: in this process, or as the
    median of so many fresh ones for each."""
    if processes is None:
        return [[target.load(load) for target in targets] for load in loads]
    rounds = [[target.fresh(loads) for target in targets] for _ in range(processes)]
    return [
        [loads_of.median([found[which][index] for found in rounds]) for which in range(len(targets))]
        for index in range(len(loads))
    ]


def main(uri: str) -> None:
    loads = [Load(**described) for described in json.load(sys.stdin)]
    with DeviceTarget(uri) as target:
        print(json.dumps([dataclasses.asdict(target.load(load)) for load in loads]))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ugds.Error as error:
        sys.exit(_report.describe(error))
    except CommandError as error:
        sys.exit(str(error))

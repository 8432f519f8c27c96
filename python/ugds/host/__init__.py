# SPDX-License-Identifier: Apache-2.0
"""The NVMe controllers of this machine, and who drives them.

    for controller in ugds.devices():
        print(controller.address, controller.model, controller.holder, controller.unknown)

    ugds.host.bind("0000:65:00.0")    # from the kernel's nvme driver to vfio-pci, for a program to drive it
    ugds.host.unbind("0000:65:00.0")  # and back

The command line has the same as `ugds devices`, `ugds bind` and `ugds unbind`. Sizes are in bytes. The functions may be
called from any number of threads and processes: two moves of the same controller at once are refused.
"""

from __future__ import annotations

from contextlib import ExitStack

from ugds.host import binding, controllers
from ugds.host.binding import Change
from ugds.host.controllers import Controller, Namespace, Volume
from ugds.host.gpus import Gpu
from ugds.host.pci import Link, Neighbour
from ugds.host.roots import Roots
from ugds.host.transports import Transport

__all__ = [
    "Change",
    "Controller",
    "Gpu",
    "Link",
    "Namespace",
    "Neighbour",
    "Roots",
    "Transport",
    "Volume",
    "bind",
    "devices",
    "unbind",
]


def devices(*, roots: Roots | None = None) -> list[Controller]:
    """Every NVMe controller of this machine, by address.

    Nothing is raised for what cannot be read: such facts are None, with the reason in `Controller.unknown`. Without
    root, that is what the disks hold. `roots` is the machine to look at, if not this one.
    """
    return controllers.devices(roots or Roots())


def bind(
    address: str,
    driver: str = "vfio-pci",
    force: bool = False,
    *,
    roots: Roots | None = None,
    report: binding.Report = lambda words: None,
) -> Change:
    """Takes a controller from the kernel and gives it to `driver` ("vfio-pci" or "ugds_drv"), for a program to drive.

    Refused, with every reason in one error, while a disk of it is mounted anywhere, used as swap, part of something
    larger, open elsewhere, or reached through another controller; where its IOMMU group is shared with a device that
    the kernel drives; and where any of it cannot be told. Partition tables, file systems and other signatures refuse it
    too, and what is on it is left to whoever opens it; `force` overrides these alone. A move that fails is taken back.
    Already bound: nothing is done. `report` is told of each step as it is made.

    Raises ugds.Error: EBUSY (refused), ENODEV (no such device, or the driver did not take it), EINVAL (no NVMe
    controller, no address), or what the kernel answers. Needs root.
    """
    with ExitStack() as held:
        plan = binding.plan_bind(roots or Roots(), address, driver, held)
        plan.refuse(force)
        return binding.execute(plan, report, held.close)


def unbind(address: str, *, roots: Roots | None = None, report: binding.Report = lambda words: None) -> Change:
    """Gives a controller back to the kernel's nvme driver, and checks that it took it.

    Refused while a process has the controller open. Raises ugds.Error as `bind`. Needs root.
    """
    plan = binding.plan_unbind(roots or Roots(), address)
    plan.refuse(force=False)
    return binding.execute(plan, report)

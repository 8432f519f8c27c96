# SPDX-License-Identifier: Apache-2.0
"""Controllers for people: what there is, what is on it, how it can be reached, and how far the GPUs are."""

from __future__ import annotations

from collections.abc import Sequence

from ugds import _report, sizes
from ugds._report import RenderableType, Table, escape
from ugds.host.controllers import Controller, Namespace, Volume
from ugds.host.pci import Link
from ugds.host.transports import Transport

UNKNOWN = "unknown"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = _report.table(title, columns, [[escape(cell) for cell in row] for row in rows], left=len(columns))
    for column in made.columns:
        column.overflow = "fold"  # an address or a reason that is cut off is of no use
    return made


def link_text(link: Link | None) -> str:
    if link is None:
        return UNKNOWN
    now, most = (
        f"{f'{speed:g} GT/s' if speed else '? GT/s'} x{width or '?'}"
        for speed, width in ((link.speed, link.width), (link.max_speed, link.max_width))
    )
    return now if now == most else f"{now} of {most}"


def _group_text(controller: Controller) -> str:
    group, others = controller.iommu_group, controller.group_shared_with
    if group is None:
        return "none"
    blocking = [f"{other.address} ({other.driver})" for other in others if other.blocks]
    if blocking:
        return f"{group}, with {', '.join(blocking)}"
    return f"{group}, with {len(others)} that may share it" if others else f"{group}, alone"


def _holder_text(controller: Controller) -> str:
    called = f" ({controller.name})" if controller.name else ""
    override = controller.driver_override
    wanted = f", override {override}" if override not in (None, controller.holder) else ""
    state = f", {controller.state}" if controller.state not in (None, "live") else ""
    return f"{controller.holder}{called}{state}{wanted}"


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _controllers(found: Sequence[Controller]) -> Table:
    rows = [
        (
            c.address,
            f"{c.model or c.pci_id}\nserial {c.serial or UNKNOWN}",
            _holder_text(c),
            link_text(c.link),
            _number(c.numa_node),
            _group_text(c),
        )
        for c in found
    ]
    return _table("NVMe controllers", ("address", "model", "held by", "link", "NUMA", "IOMMU group"), rows)


def _volume_row(address: str, volume: Volume, indent: str = "") -> tuple[str, ...]:
    holds = UNKNOWN if volume.holds is None else ", ".join(volume.holds) or "nothing known"
    block = ""
    use = volume.use
    if isinstance(volume, Namespace):
        block = "?" if volume.block_size is None else str(volume.block_size)
        shared = f"also reached by {', '.join(volume.shared_with)}" if volume.shared_with else ""
        use = ", ".join(filter(None, (use, shared)))
    return address, indent + volume.name, sizes.format(volume.size), block, holds, use or "-"


def _namespaces(found: Sequence[Controller]) -> Table | None:
    rows = []
    for controller in found:
        for namespace in controller.namespaces:
            rows.append(_volume_row(controller.address, namespace))
            rows += [_volume_row("", partition, "  ") for partition in namespace.partitions]
    if not rows:
        return None
    return _table("namespaces and partitions", ("controller", "disk", "size", "block", "holds", "in use"), rows)


def _transport_row(address: str, transport: Transport) -> tuple[str, ...]:
    said = [*transport.uris, *transport.reasons]
    return address, transport.name, "yes" if transport.possible else "no", ", ".join(transport.routes), "\n".join(said)


def _transports(found: Sequence[Controller]) -> Table:
    rows = []
    for controller in found:
        for index, transport in enumerate(controller.transports):
            rows.append(_transport_row("" if index else controller.address, transport))
    return _table(
        "transports", ("controller", "transport", "now", "routes", "what to open, or what is in the way"), rows
    )


def _gpus(found: Sequence[Controller]) -> Table | None:
    rows = []
    for controller in found:
        for index, gpu in enumerate(controller.gpus):
            name = f"{gpu.vendor} {gpu.name.removeprefix(gpu.vendor).strip()}"
            node = _number(gpu.numa_node)
            rows.append(
                ("" if index else controller.address, gpu.address, name, gpu.driver or "none", node, gpu.distance)
            )
    if not rows:
        return None
    return _table("GPUs", ("controller", "GPU", "name", "driver", "NUMA", "distance"), rows)


def tables(found: Sequence[Controller]) -> list[RenderableType]:
    """Everything, as parts to print below each other."""
    parts = [_controllers(found), _namespaces(found), _transports(found), _gpus(found)]
    made: list[RenderableType] = []
    for part in parts:
        if part is not None:
            made += [part, ""]
    if not any(controller.gpus for controller in found):
        made.append("GPUs: none found (NVIDIA, AMD, Intel)")
    unknown = _unknown(found)
    if unknown:
        made.append("\n".join(["unknown, and why:", *unknown]))
    return made


def _unknown(found: Sequence[Controller]) -> list[str]:
    """A line for each reason, with the facts and the controllers that it is given for."""
    facts: dict[tuple[str, str], list[str]] = {}
    for controller in found:
        for fact, reason in controller.unknown.items():
            facts.setdefault((controller.address, reason), []).append(fact)
    addresses: dict[tuple[str, str], list[str]] = {}
    for (address, reason), names in facts.items():
        addresses.setdefault((", ".join(names), reason), []).append(address)
    return [escape(f"  {' '.join(where)} {names}: {reason}") for (names, reason), where in addresses.items()]

# SPDX-License-Identifier: Apache-2.0
"""The fault table, first part: what commands, completions, interrupts and lies do. See rows.py for what a row says."""

from __future__ import annotations

from recovery_table import RECOVERY
from rows import (
    ALWAYS,
    CAP,
    CREATE_CQ,
    CREATE_SQ,
    IDENTIFY,
    OPEN,
    SET_FEATURES,
    SHADOW,
    SHORT,
    URI,
    VS,
    Row,
    admin,
    four,
    inject,
    read,
    write,
)

CALLER = f"{URI}&pump=caller"

# --- Status codes: of each type, and at each command -----------------------------------------------------------------

STATUS = [
    Row("0x002 invalid field", (read("status", status=0x002),), four("EINVAL")),
    Row("0x004 data transfer error", (read("status", status=0x004),), four("EIO")),
    Row("0x005 aborted, power loss", (read("status", status=0x005),), four("ECANCELED")),
    Row("0x006 internal error", (read("status", status=0x006),), four("EIO")),
    Row("0x007 abort requested by nobody", (read("status", status=0x007),), four("ECANCELED")),
    Row("0x008 submission queue deleted", (read("status", status=0x008),), four("ECANCELED")),
    Row("0x00b invalid namespace", (read("status", status=0x00B),), four("EINVAL")),
    Row("0x020 write protected", (write("status", status=0x020),), four("EROFS"), op="write"),
    Row("0x022 transient transport error", (read("status", status=0x022),), four("EAGAIN")),
    Row("0x080 LBA out of range", (read("status", status=0x080),), four("ERANGE")),
    Row("0x081 capacity exceeded", (write("status", status=0x081),), four("ENOSPC"), op="write"),
    Row("0x082 namespace not ready", (read("status", status=0x082),), four("EAGAIN")),
    Row("0x083 reservation conflict", (write("status", status=0x083),), four("EBUSY"), op="write"),
    Row("0x180 command specific: conflicting", (read("status", status=0x180),), four("EINVAL")),
    Row("0x182 write to read-only range", (write("status", status=0x182),), four("EROFS"), op="write"),
    Row("0x280 write fault", (write("status", status=0x280),), four("EIO"), op="write"),
    Row("0x281 unrecovered read error, first command", (read("status", status=0x281, skip=0),), four("EIO"), hit=0),
    Row("0x281 unrecovered read error, third command", (read("status", status=0x281),), four("EIO")),
    Row("0x281 unrecovered read error, last command", (read("status", status=0x281, skip=3),), four("EIO"), hit=3),
    Row("0x281 of every command", (read("status", status=0x281, skip=0, count=4),), four("EIO", "EIO/EIO"), hit=0),
    Row(
        "0x286 and 0x281 at two commands: the first is told",
        (read("status", status=0x286, skip=1), read("status", status=0x281, skip=1)),
        four("EACCES", "EACCES/EIO"),
        hit=1,
    ),
    Row(
        "0x281 while completions come in reverse",
        (read("status", status=0x281),),
        four("EIO"),
        uri=f"{URI}&order=reverse",
    ),
    Row("0x281 with two ring entries", (read("status", status=0x281),), four("EIO"), options={"depth": 2}),
    Row("0x282 end-to-end guard", (read("status", status=0x282),), four("EILSEQ")),
    Row("0x286 access denied", (read("status", status=0x286),), four("EACCES")),
    Row("0x303 path: access transition", (read("status", status=0x303),), four("EAGAIN")),
    Row("0x370 path: host pathing error", (read("status", status=0x370),), four("EIO")),
    Row("0x371 path: aborted by host", (read("status", status=0x371),), four("ECANCELED")),
    Row("0x4ff a reserved status type", (read("status", status=0x4FF),), four("EIO")),
    Row("0x7c0 vendor specific", (read("status", status=0x7C0),), four("EIO")),
]

# --- Completions -----------------------------------------------------------------------------------------------------

#: After a completion that no command waited for the controller is not trusted: it is reset, and what it had in flight
#: then is ended. Which of it had ended before, time decides.
STRAY = "ok|ECANCELED"
COMPLETIONS = [
    Row("late, within the deadline", (read("late", delay_ns=50_000_000),), four("ok")),
    Row("late, all of them", (read("late", delay_ns=30_000_000, skip=0, count=4),), four("ok")),
    Row("late, beyond the deadline", (read("late", delay_ns=3_000_000_000),), four("ETIMEDOUT"), deadline=SHORT),
    Row(
        "late by a little more than the deadline",
        (read("late", delay_ns=260_000_000),),
        four("ok|ETIMEDOUT", "ok|ETIMEDOUT/ECANCELED"),
        deadline=SHORT,
        resets="any",
    ),
    Row("lost, third command", (read("lost"),), four("ETIMEDOUT", "ETIMEDOUT/ECANCELED"), deadline=SHORT, resets="1"),
    Row("lost, last command", (read("lost", skip=3),), four("ETIMEDOUT"), hit=3, deadline=SHORT, resets="1"),
    Row(
        "lost, all of them",
        (read("lost", skip=0, count=4),),
        four("ETIMEDOUT", "ETIMEDOUT|ECANCELED/ETIMEDOUT|ECANCELED"),
        hit=0,
        deadline=SHORT,
        resets="1",
    ),
    Row("lost, of a write", (write("lost"),), four("ETIMEDOUT"), op="write", deadline=SHORT, resets="1"),
    Row("twice", (read("duplicate"),), four(STRAY, "ok/ECANCELED"), resets="any"),
    Row(
        "twice, of every command",
        (read("duplicate", skip=0, count=4),),
        four(STRAY, "ok|ECANCELED/ECANCELED"),
        hit=0,
        resets="any",
    ),
    Row(
        "twice, and the next request is late",
        (read("duplicate", skip=1), read("late", skip=1, delay_ns=100_000_000)),
        four("ok|ECANCELED/ECANCELED"),
        options={"queues": 1, "depth": 2},
        uri=CALLER,
        scene="one by one",
        resets="any",
    ),
    Row(
        "twice, and the next command is late",
        (read("duplicate", skip=1), read("late", skip=1, delay_ns=100_000_000)),
        four("ECANCELED", "ECANCELED/ECANCELED"),
        options={"depth": 2},
        resets="1",
    ),
    Row(
        "of a command that is not in flight", (read("unknown_id"),), four(STRAY, "ok|ECANCELED/ECANCELED"), resets="any"
    ),
    Row(
        "of a command that is not in flight, its own is late",
        (read("unknown_id", skip=1), read("late", skip=1, delay_ns=100_000_000)),
        four("ECANCELED", "ECANCELED/ECANCELED"),
        uri=CALLER,
        resets="1",
    ),
    Row(
        "with the phase of the round before",
        (read("wrong_phase"),),
        four("ETIMEDOUT", "ETIMEDOUT/ETIMEDOUT|ECANCELED"),
        deadline=SHORT,
        resets="1",
    ),
    Row(
        "with the phase of the round before, last command",
        (read("wrong_phase", skip=3),),
        four("ETIMEDOUT"),
        hit=3,
        deadline=SHORT,
        resets="1",
    ),
    Row(
        "with a queue head that cannot be",
        (read("wrong_sq_head"),),
        four("ECANCELED", "ECANCELED/ECANCELED"),
        resets="1",
    ),
    Row(
        "its last dword before the rest",
        (read("torn", delay_ns=300_000_000),),
        four("ECANCELED", "ECANCELED/ECANCELED"),
        resets="1",
    ),
    Row("in reverse order", (), four("ok"), uri=f"{URI}&order=reverse"),
    Row("in any order", (), four("ok"), uri=f"{URI}&order=random&seed=7"),
    Row(
        "late, while the device is closed",
        (write("late", delay_ns=150_000_000, skip=0, count=4),),
        four("ok"),
        op="write",
        scene="close",
    ),
]

# --- Interrupts ------------------------------------------------------------------------------------------------------

SLEEPY = {"interrupts": True, "mode": "throughput"}
SLOW = f"{URI}&latency=2ms"
INTERRUPTS = [
    Row("interrupt lost", (read("lost_interrupt"),), four("ok"), uri=SLOW, options=SLEEPY),
    Row("interrupt lost, of the last command", (read("lost_interrupt", skip=3),), four("ok"), uri=SLOW, options=SLEEPY),
    Row(
        "interrupts lost, all of them",
        (read("lost_interrupt", skip=0, count=ALWAYS),),
        four("ok"),
        uri=SLOW,
        options=SLEEPY,
    ),
    Row("interrupt twice", (read("double_interrupt", skip=0, count=4),), four("ok"), uri=SLOW, options=SLEEPY),
    Row("interrupt for nothing", (read("spurious_interrupt", skip=0, count=4),), four("ok"), uri=SLOW, options=SLEEPY),
    Row(
        "interrupt for nothing, shared by all queues",
        (read("spurious_interrupt", skip=0, count=4),),
        four("ok"),
        uri=f"{SLOW}&vectors=1",
        options=SLEEPY,
    ),
    Row(
        "interrupt lost, of a command that fails",
        (read("status", status=0x281), read("lost_interrupt", skip=2)),
        four("EIO"),
        uri=SLOW,
        options=SLEEPY,
    ),
    Row(
        "interrupts, and a command that hangs",
        (read("hang"),),
        four("ETIMEDOUT"),
        options=SLEEPY,
        deadline=SHORT,
    ),
]

# --- Lies of capabilities and Identify that can be lived with --------------------------------------------------------

MDTS, ONCS, OACS, VWC, NN, SQES = 77, 520, 256, 525, 516, 512
BIG = "emulated:2MiB?lba=512&timeout=1"


#: MQES, CQR, TO, CSS and MPSMAX of the emulated device, by `URI`.
REAL_CAP = 1023 | 1 << 16 | 1 << 24 | 1 << 37 | 4 << 52


def bits(value: int, mask: int) -> dict[str, object]:
    """Of CAP, the others as they are."""
    return inject("reads_as", at=CAP, count=ALWAYS, value=REAL_CAP & ~mask | value)


def identify(cns: int, at: int, value: int, width: int = 1) -> dict[str, object]:
    return inject("identify", cns=cns, at=at, value=value, width=width, count=ALWAYS)


LIES = [
    Row("MDTS states no limit", (), four("ok"), at_open=(identify(1, MDTS, 0),), uri=BIG, size=1 << 20, hit=0),
    Row("MDTS states less than is so", (), four("ok"), at_open=(identify(1, MDTS, 1),), uri=BIG, size=1 << 20, hit=0),
    Row("MDTS states 2^255 pages, small request", (), four("ok"), at_open=(identify(1, MDTS, 255),), uri=BIG),
    Row(
        "MDTS states 2^255 pages, large request",
        (),
        four("EINVAL", "EINVAL/EINVAL"),
        at_open=(identify(1, MDTS, 255),),
        uri=BIG,
        size=1 << 20,
        hit=0,
        violations=("mdts",),
    ),
    Row("Identify: text of bytes that are none", (), four("ok"), at_open=(identify(1, 24, 0xFFFE80C1FF00FFFE, 8),)),
    Row("Identify: no optional command, no cache", (), four("ok"), at_open=(identify(1, ONCS, 0, 8),)),
    Row("Identify: entry sizes that cannot be", (), four("ok"), at_open=(identify(1, SQES, 0xFFFF, 2),)),
    Row("Identify: shadow doorbells that it refuses", (), four("ok"), at_open=(identify(1, OACS, 0x100, 2),)),
    Row("Identify: more blocks used than there are", (), four("ok"), at_open=(identify(0, 8, (1 << 64) - 1, 8),)),
    Row("Identify: 2^32-1 namespaces", (), four("ok"), at_open=(identify(1, NN, 0xFFFFFFFF, 4),)),
    Row(
        "Identify: twice the blocks, and the end is read",
        (),
        four("ERANGE", "ERANGE/ERANGE"),
        at_open=(identify(0, 0, 4096, 8),),
        scene="end",
        hit=0,
    ),
    Row("CAP.TO states no time", (), four("ok"), at_open=(bits(0, 0xFF << 24),)),
    Row("CAP.MQES states two entries", (), four("ok"), at_open=(bits(1, 0xFFFF),)),
    Row("CAP states queues in pieces, and no larger page", (), four("ok"), at_open=(bits(0, 1 << 16 | 0xF << 52),)),
    Row("VS reads as nothing", (), four("ok"), at_open=(inject("reads_as", at=VS, value=0, count=ALWAYS),)),
    Row(
        "more queues granted than asked for", (), four("ok"), at_open=(admin("result", SET_FEATURES, value=0xFFFFFFFE),)
    ),
    Row("one queue granted", (), four("ok"), at_open=(admin("result", SET_FEATURES, value=0),), options={"queues": 4}),
    Row(
        "eight submission queues granted and one completion queue",
        (),
        four("ok"),
        at_open=(admin("result", SET_FEATURES, value=7),),
        options={"queues": 4},
    ),
    Row(
        "shadow doorbells refused", (), four("ok"), at_open=(admin("status", SHADOW, status=2),), uri=f"{URI}&shadow=1"
    ),
    Row("CSTS read as ones once at each look of opening", (), four("ok"), scene="ones at open", uri=CALLER),
]

# --- Memory and descriptors that are not to be had -------------------------------------------------------------------

LACK = [
    Row("no memory at each step of opening", (), four("ok"), scene="steps of open", bound=60),
    Row("no memory at each step of registering", (), four("ok"), scene="steps of register", bound=60),
    Row(
        "no memory at each step of the request",
        (),
        {"sync": None, "batch": "ok", "stream": "ok", "asyncio": "ok"},
        scene="steps of request",
        bound=60,
    ),
    Row("no descriptor left at opening, one after the other", (), four("ok"), scene="descriptors", bound=60),
]

# --- While a device is opened: there is no request yet ---------------------------------------------------------------


def opening(name: str, result: str, *at_open: dict[str, object], **traits: object) -> Row:
    return Row(name, (), {OPEN: result}, at_open=at_open, scene="open", **traits)  # type: ignore[arg-type]


#: What cannot be read any more is taken for gone, and a device that is gone reaches no memory: it is unmapped. This one
#: only says that it is, and complains of it where it was given memory.
STILL_THERE = ("unmap-in-use",)


OPENING = [
    opening("CAP reads as ones", "ENODEV", inject("all_ones", at=CAP, count=ALWAYS)),
    opening("CAP reads as zeros", "EOPNOTSUPP", inject("reads_as", at=CAP, value=0, count=ALWAYS)),
    opening("CAP without the NVM command set", "EOPNOTSUPP", bits(0, 0xFF << 37)),
    opening("CAP.MPSMIN larger than is so", "EIO", bits(4 << 48, 0xF << 48)),
    opening("CAP.MQES of a single entry", "EOPNOTSUPP", bits(0, 0xFFFF)),
    opening("CAP.MQES larger than is so", "EINVAL", bits(0xFFFF, 0xFFFF), uri=f"{URI}&depth=16"),
    opening("every register reads as ones", "ENODEV", inject("all_ones", count=ALWAYS)),
    *(
        opening(
            f"every register reads as ones from look {nth + 1} on",
            "ENODEV|EIO" if nth < 4 else "ENODEV|EIO|ok",  # opening looks at few
            inject("all_ones", skip=nth, count=ALWAYS),
            uri=CALLER,
            violations=STILL_THERE,
        )
        for nth in range(8)
    ),
    opening("CSTS reads as ones from the start", "EIO|ENODEV", inject("all_ones", at=0x1C, count=ALWAYS)),
    opening("never ready", "EIO", inject("never_ready")),
    opening("Identify is lost", "ETIMEDOUT", admin("lost", IDENTIFY), bound=30.0),
    opening("no namespace in the list", "ENODEV", identify(2, 0, 0, 4)),
    opening("a namespace in the list that is beyond the last", "EINVAL", identify(2, 0, 5, 4)),
    opening("a namespace in the list of all ones", "EINVAL", identify(2, 0, 0xFFFFFFFF, 4)),
    opening("no namespaces", "EINVAL", identify(1, NN, 0, 4)),
    opening("a namespace of no blocks", "EINVAL", identify(0, 0, 0, 8)),
    opening("a namespace of 2^64-1 blocks", "EPROTO", identify(0, 0, (1 << 64) - 1, 8)),
    opening("blocks of 2^0 bytes", "EOPNOTSUPP", identify(0, 128, 0, 8), identify(0, 26, 0, 1)),
    opening("blocks of 2^31 bytes", "EOPNOTSUPP", identify(0, 130, 31, 1), identify(0, 26, 0, 1)),
    opening("blocks with metadata", "EOPNOTSUPP", identify(0, 128, 8, 2)),
    *(
        opening(f"{what} refused", error, admin("status", opcode, status=0x006, skip=skip))
        for what, error, opcode, skip in (
            ("Identify of the controller", "EIO", IDENTIFY, 0),
            ("Identify of namespaces", "EIO", IDENTIFY, 1),
            ("Identify of the namespace", "EIO", IDENTIFY, 2),
            ("Set Features", "EIO", SET_FEATURES, 0),
            ("the first completion queue", "EIO", CREATE_CQ, 0),
            ("the second completion queue", "EIO", CREATE_CQ, 1),
            ("the first submission queue", "EIO", CREATE_SQ, 0),
            ("the second submission queue", "EIO", CREATE_SQ, 1),
        )
    ),
    *(
        opening(f"{kind} at {what}", error, admin(kind, opcode))
        for kind, error in (("fatal", "EIO"), ("remove", "ENODEV"))
        for what, opcode in (
            ("Identify", IDENTIFY),
            ("Set Features", SET_FEATURES),
            ("a completion queue", CREATE_CQ),
            ("a submission queue", CREATE_SQ),
        )
    ),
]

GROUPS = {
    "status": STATUS,
    "completions": COMPLETIONS,
    "interrupts": INTERRUPTS,
    "lies": LIES,
    "opening": OPENING,
    **RECOVERY,
    "lack": LACK,
}


def table() -> dict[str, list[Row]]:
    """Every row, by group. Names are unique in a group."""
    return GROUPS

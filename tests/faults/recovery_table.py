# SPDX-License-Identifier: Apache-2.0
"""The fault table, second part: commands that hang, aborts, resets, fatal controllers, and devices that go."""

from __future__ import annotations

from rows import (
    ABORT,
    ALWAYS,
    CAP,
    CC,
    CREATE_CQ,
    CREATE_SQ,
    CSTS,
    SET_FEATURES,
    SHADOW,
    SHORT,
    URI,
    Row,
    admin,
    four,
    inject,
    read,
    write,
)

#: One queue, so that what was made for the request is what a restart makes.
ONE = {"queues": 1}
HANG = read("hang", abortable=False)
STUCK = read("late_write", abortable=False)
TIMED_OUT = four("ETIMEDOUT", "ETIMEDOUT/ECANCELED")


def overdue(name: str, *plant: dict[str, object], resets: str = "1", **traits: object) -> Row:
    """A command that does not come back."""
    results = traits.pop("results", TIMED_OUT)
    return Row(name, plant, results, resets=resets, **{"deadline": SHORT, "options": ONE, **traits})  # type: ignore[arg-type]


HANGS = [
    overdue("hangs, first command", read("hang", skip=0), hit=0, resets="0"),
    overdue("hangs, third command", read("hang"), resets="0"),
    overdue("hangs, last command", read("hang", skip=3), hit=3, resets="0"),
    overdue(
        "hang, two commands",
        read("hang", skip=1, count=2),
        hit=1,
        resets="0",
        results=four("ETIMEDOUT", "ETIMEDOUT/ETIMEDOUT"),
    ),
    overdue(
        "hang, all of them",
        read("hang", skip=0, count=4),
        hit=0,
        resets="0",
        results=four("ETIMEDOUT", "ETIMEDOUT/ETIMEDOUT"),
    ),
    overdue("hangs, of a write", write("hang"), op="write", resets="0"),
    overdue("hangs and writes on", read("late_write"), resets="0"),
    overdue("hangs, with two ring entries", read("hang"), options={"queues": 1, "depth": 2}, resets="0"),
    overdue("hangs, with shadow doorbells", read("hang"), uri=f"{URI}&shadow=1", resets="0"),
    overdue("hangs, with doorbells that are trapped", read("hang"), uri=f"{URI}&doorbells=trapped", resets="0"),
    overdue("hangs, the controller run by its callers", read("hang"), uri=f"{URI}&pump=caller", resets="0"),
    overdue("hangs, and no abort ends it", HANG),
    overdue("hangs, and no abort ends it, of a write", write("hang", abortable=False), op="write"),
    overdue("hang, all of them, and no abort ends them", read("hang", skip=0, count=4, abortable=False), hit=0),
    overdue("writes on, and no abort ends it", STUCK),
    overdue("writes on, and the reset takes 50 ms", STUCK, uri=f"{URI}&ready=50ms"),
    overdue("writes on, with two ring entries", STUCK, options={"queues": 1, "depth": 2}),
    overdue("writes on, with shadow doorbells", STUCK, uri=f"{URI}&shadow=1"),
    overdue("writes on, with interrupts", STUCK, options={"queues": 1, "interrupts": True}),
]

ABORTS = [
    overdue("Abort fails: limit exceeded", STUCK, admin("status", ABORT, status=0x103)),
    overdue("Abort fails: internal error", read("hang"), admin("status", ABORT, status=0x006)),
    overdue("Abort fails: no such command", read("hang"), admin("status", ABORT, status=0x001)),
    overdue("Abort hangs", STUCK, admin("hang", ABORT)),
    overdue("Abort is lost", STUCK, admin("lost", ABORT)),
    overdue("Abort is answered late", read("hang"), admin("late", ABORT, delay_ns=5_000_000), resets="any"),
    overdue("Abort is answered too late", read("hang"), admin("late", ABORT, delay_ns=150_000_000)),
    overdue("Abort is answered twice", read("hang"), admin("duplicate", ABORT), resets="any"),
    overdue("Abort is answered with the wrong phase", STUCK, admin("wrong_phase", ABORT)),
    overdue("Abort is answered with a wrong queue head", STUCK, admin("wrong_sq_head", ABORT)),
    overdue("Abort is answered for another command first", read("hang"), admin("unknown_id", ABORT), resets="any"),
    overdue("Abort says it has, and has not", HANG, inject("abort_lies")),
    overdue("Abort says it has, and data is written on", STUCK, inject("abort_lies")),
    overdue("Abort says it has not, and has", read("hang"), inject("abort_denies"), resets="0"),
    overdue("Abort answers what nobody knows", read("hang"), admin("result", ABORT, value=0xFFFFFFFF), resets="0"),
    overdue("fatal at the Abort", STUCK, admin("fatal", ABORT)),
    overdue("removed at the Abort", HANG, admin("remove", ABORT), after="lost", resets="any"),
]

NOT_STOPPED, RESET_FAILS = inject("never_stopped", count=ALWAYS), inject("reset_fails", count=ALWAYS)
WEDGED = four("ETIMEDOUT", "ETIMEDOUT/EIO")
RESETS = [
    overdue("the reset: CSTS.RDY stays set once", HANG, inject("never_stopped")),
    overdue("the reset: CSTS.RDY stays set, data is written on", STUCK, inject("never_stopped")),
    overdue("the reset: never ready again", HANG, inject("never_ready"), after="failed"),
    overdue(
        "the reset: of the function too, never ready",
        HANG,
        inject("never_stopped"),
        inject("never_ready"),
        after="failed",
    ),
    overdue("nothing stops it", HANG, NOT_STOPPED, RESET_FAILS, after="wedged", resets="0", results=WEDGED),
    overdue(
        "nothing stops it, data is written on",
        STUCK,
        NOT_STOPPED,
        RESET_FAILS,
        after="wedged",
        resets="0",
        results=WEDGED,
    ),
    overdue(
        "nothing stops it, of a write",
        write("hang", abortable=False),
        NOT_STOPPED,
        RESET_FAILS,
        op="write",
        after="wedged",
        resets="0",
        results=WEDGED,
    ),
    overdue(
        "nothing stops it, all commands hang",
        read("late_write", skip=0, count=4, abortable=False),
        NOT_STOPPED,
        RESET_FAILS,
        hit=0,
        after="wedged",
        resets="0",
        results=four("ETIMEDOUT", "ETIMEDOUT|EIO/ETIMEDOUT|EIO"),
    ),
    overdue("the restart: queues refused", HANG, admin("status", SET_FEATURES, status=0x006), after="failed"),
    overdue("the restart: fatal when asked for queues", HANG, admin("fatal", SET_FEATURES), after="failed"),
    overdue("the restart: removed when asked for queues", HANG, admin("remove", SET_FEATURES), after="lost"),
    overdue("the restart: more queues granted than there are", HANG, admin("result", SET_FEATURES, value=0xFFFFFFFE)),
    overdue("the restart: shadow doorbells refused", HANG, admin("status", SHADOW, status=2), uri=f"{URI}&shadow=1"),
    overdue("the restart: a completion queue refused", HANG, admin("status", CREATE_CQ, status=0x101), after="failed"),
    overdue("the restart: a submission queue refused", HANG, admin("status", CREATE_SQ, status=0x101), after="failed"),
    overdue(
        "the restart: the last of two queues refused",
        HANG,
        admin("status", CREATE_SQ, status=0x102, skip=1),
        options={"queues": 2},
        after="failed",
    ),
    overdue("the restart: fatal at a queue", HANG, admin("fatal", CREATE_CQ), after="failed"),
    overdue("the restart: removed at a queue", HANG, admin("remove", CREATE_SQ), after="lost"),
    overdue("the restart: a queue is made twice over", HANG, admin("duplicate", CREATE_CQ), resets="1"),
]

BROKEN = four("ECANCELED", "ECANCELED/ECANCELED")


def broken(name: str, *plant: dict[str, object], **traits: object) -> Row:
    """The controller fails, and is noticed before any deadline."""
    results = traits.pop("results", BROKEN)
    return Row(name, plant, results, **{"resets": "1", "options": ONE, **traits})  # type: ignore[arg-type]


FATAL = [
    broken("fatal at the first command", read("fatal", skip=0), hit=0),
    broken("fatal at the third command", read("fatal")),
    broken("fatal at the last command", read("fatal", skip=3), hit=3),
    broken("fatal at a write", write("fatal"), op="write"),
    broken("fatal, and CSTS.RDY stays set", read("fatal"), inject("never_stopped")),
    broken("fatal, and never ready again", read("fatal"), inject("never_ready"), after="failed"),
    broken(
        "fatal, and nothing stops it",
        read("fatal"),
        NOT_STOPPED,
        RESET_FAILS,
        after="wedged",
        resets="0",
        results=four("EIO", "EIO/EIO"),
    ),
    broken("fatal again at the restart", read("fatal"), admin("fatal", CREATE_CQ), after="failed"),
    broken("the power fails", read("hang", skip=0), scene="power", hit=0),
]

GONE = four("ENODEV", "ENODEV/ENODEV")
REMOVAL = [
    broken("removed at the first command", read("remove", skip=0), hit=0, after="lost", resets="any", results=GONE),
    broken("removed at the third command", read("remove"), after="lost", resets="any", results=GONE),
    broken("removed at the last command", read("remove", skip=3), hit=3, after="lost", resets="any", results=GONE),
    broken("removed at a write", write("remove"), op="write", after="lost", resets="any", results=GONE),
    broken("removed while idle", hit=0, scene="removed", after="lost", resets="any", results=GONE),
    broken(
        "removed while others hang",
        read("hang", skip=0, count=2),
        read("remove", skip=0),
        hit=2,
        after="lost",
        resets="any",
        results=GONE,
    ),
    broken(
        "CSTS reads as ones once, in flight",
        read("late", delay_ns=50_000_000),
        inject("all_ones", at=CSTS),
        results=four("ok"),
        resets="0",
    ),
    broken(
        "every register reads as ones once, in flight",
        read("late", delay_ns=50_000_000),
        inject("all_ones"),
        results=four("ok"),
        resets="0",
    ),
    # It is taken for gone, which reaches no memory: it is unmapped. This device only says so, and sees it happen;
    # whether it has fetched the commands by then, or fetches a ring that was cleared, time decides.
    broken(
        "every register reads as ones, in flight",
        HANG,
        inject("all_ones", count=ALWAYS),
        after="lost",
        resets="any",
        results=GONE,
        violations=("unmap-in-use", "nsid", "duplicate-cid"),
    ),
    broken(
        "CSTS alone reads as ones, in flight",
        HANG,
        inject("all_ones", at=CSTS, count=ALWAYS),
        after="failed",
        resets="any",
    ),
    overdue("CAP reads as ones at the restart", HANG, inject("all_ones", at=CAP), after="failed", resets="any"),
    overdue("CC reads as ones at the reset", HANG, inject("all_ones", at=CC)),
]

DROPPED = [
    overdue(
        "nothing stops it, and the device is dropped",
        read("late_write", skip=0, abortable=False),
        NOT_STOPPED,
        RESET_FAILS,
        hit=0,
        after="wedged",
        resets="0",
        scene="dropped",
        results=WEDGED,
    ),
]

RECOVERY = {
    "hangs": HANGS,
    "aborts": ABORTS,
    "resets": RESETS,
    "fatal": FATAL,
    "removal": REMOVAL,
    "dropped": DROPPED,
}

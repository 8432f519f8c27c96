# SPDX-License-Identifier: Apache-2.0
"""What users without rights reach, and what a program that runs with more rights than its caller believes: sockets,
files, locks, environment. The programs here share nothing with the library but what they are given."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ugds
from ugds import trace

NOBODY = 65534
# The system's own: a user without rights may not reach the interpreter that runs this.
PYTHON = shutil.which("python3", path="/usr/bin:/bin")
COMPILER = shutil.which("cc") or shutil.which("gcc")
INCLUDE = Path(__file__).resolve().parents[2] / "include"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
compiled = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

CONNECT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as one:
    try:
        one.connect(sys.argv[1])
    except OSError as error:
        sys.exit(error.errno)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may look into, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="ugds-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def connect_as(user: int, path: str | Path) -> int:
    """The errno of a connection by another user; 0: it is there."""
    assert PYTHON is not None
    done = subprocess.run([PYTHON, "-I", "-c", CONNECT, str(path)], user=user, group=user, extra_groups=[], timeout=60)
    return done.returncode


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


@as_root
@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_a_socket_is_for_whom_its_mode_says_whatever_the_umask(
    place: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    with ugds.serve("emulated:1MiB", str(place / "mine")):
        assert connect_as(NOBODY, place / "mine") == errno.EACCES
    with ugds.serve("emulated:1MiB", str(place / "ours"), mode=0o666):
        assert stat.S_IMODE((place / "ours").stat().st_mode) == 0o666
        assert connect_as(NOBODY, place / "ours") == 0
    with ugds.serve("emulated:1MiB", str(place / "none"), mode=0o644):  # to connect is to write
        assert connect_as(NOBODY, place / "none") == errno.EACCES


@as_root
def test_a_folder_closes_what_a_mode_opens(place: Path) -> None:
    (place / "private").mkdir(mode=0o700)
    with ugds.serve("emulated:1MiB", str(place / "private") + "/", mode=0o666) as server:
        assert connect_as(NOBODY, server.path) == errno.EACCES


@pytest.mark.parametrize("target", ["nothing", "file", "socket"])
def test_a_link_in_the_sockets_place_is_not_followed(place: Path, target: str) -> None:
    (place / "file").write_bytes(b"kept")
    (place / "file").chmod(0o600)
    with ugds.serve("emulated:1MiB", str(place / "socket")):
        (place / "s").symlink_to(place / target)
        with pytest.raises(ugds.Error, match="no socket") as refused:
            ugds.serve("emulated:1MiB", str(place / "s"), mode=0o666)
        assert refused.value.errno == errno.EEXIST
        assert stat.S_IMODE((place / "socket").stat().st_mode) == 0o600
    assert (place / "s").is_symlink()
    assert (place / "file").read_bytes() == b"kept"
    assert stat.S_IMODE((place / "file").stat().st_mode) == 0o600


LOCK = """
import fcntl, os, sys, time
folder = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(folder, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


@as_root
def test_who_holds_a_folders_lock_keeps_nobody_waiting(place: Path) -> None:
    assert PYTHON is not None
    command = [PYTHON, "-I", "-c", LOCK, str(place)]
    with subprocess.Popen(
        command, user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "locked\n"
            start = time.monotonic()
            with pytest.raises(ugds.Error, match="holds the lock of folder") as refused:
                ugds.serve("emulated:1MiB", str(place / "s"))
            assert refused.value.errno == errno.EBUSY
            assert time.monotonic() - start < 30
        finally:
            other.kill()
    with ugds.serve("emulated:1MiB", str(place / "s")):
        pass


def build(source: str, to: Path, *options: str) -> Path:
    assert COMPILER is not None
    written = to.with_suffix(".c")
    written.write_text("// SPDX-License-Identifier: Apache-2.0\n" + source)
    subprocess.run([COMPILER, "-Wall", "-Werror", str(written), "-o", str(to), *options], check=True)
    return to


# The folder's owner puts a link to another file where the socket has just been made.
SWAP = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
int bind(int fd, const struct sockaddr* address, socklen_t size) {
  int (*real)(int, const struct sockaddr*, socklen_t) = dlsym(RTLD_NEXT, "bind");
  const int result = real(fd, address, size);
  const char* path = ((const struct sockaddr_un*)address)->sun_path;
  if (result == 0 && getenv("SWAP_FOR") && strstr(path, "/s")) {
    unlink(path);
    if (symlink(getenv("SWAP_FOR"), path) != 0) perror("symlink");
  }
  return result;
}
"""


@compiled
def test_a_socket_that_is_swapped_for_a_link_opens_no_file_to_others(place: Path) -> None:
    swap = build(SWAP, place / "swap.so", "-shared", "-fPIC", "-ldl")
    (place / "secret").write_bytes(b"secret")
    (place / "secret").chmod(0o600)
    program = f"import ugds; ugds.serve('emulated:1MiB', {str(place / 's')!r}, mode=0o666)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_PRELOAD": str(swap), "SWAP_FOR": str(place / "secret")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert stat.S_IMODE((place / "secret").stat().st_mode) == 0o600
    assert done.returncode != 0 and "cannot listen" in done.stderr


def test_files_are_made_as_the_umask_says(place: Path, umask: Callable[[int], int]) -> None:
    umask(0o077)
    image = f"emulated:{place / 'image'}?size=1MiB"
    with ugds.open(image) as ssd, ugds.register(bytearray(4096)) as buffer, trace.record(ssd) as recorded:
        ssd.write(buffer)
    trace.write_chrome(place / "trace.json", recorded)
    trace.write_chrome(place / "trace.json.gz", recorded)
    assert len(list(place.iterdir())) == 3
    for made in place.iterdir():
        assert stat.S_IMODE(made.stat().st_mode) == 0o600, made


def test_an_image_that_another_holds_is_not_waited_for(place: Path) -> None:
    image = place / "image"
    image.write_bytes(bytes(1 << 20))
    with image.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(ugds.Error) as refused:
            ugds.open(f"emulated:{image}")
        assert refused.value.errno == errno.EBUSY


# Says by its exit status whether the library believed its environment.
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "ugds.h"
int main(void) {
  static char memory[65536];
  uGDSHandle_t fh;
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle = {.handle = "emulated:1MiB"}};
  uGDSDriverOpen();
  uGDSBufRegister(memory, sizeof memory, UGDS_BUF_FORCE_CUDA);  /* looks for the CUDA driver */
  return uGDSHandleRegister(&fh, &descr).err == UGDS_SUCCESS ? 0 : 7;
}
"""
# What the caller would have loaded into it.
LOADED = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) {
  const int made = open(getenv("MARK"), O_CREAT | O_WRONLY, 0600);
  if (made >= 0) close(made);
}
"""


@as_root
@compiled
def test_a_set_user_id_program_believes_nothing_of_its_callers_environment(place: Path) -> None:
    if os.statvfs(place).f_flag & os.ST_NOSUID:
        pytest.skip("set-user-id is not honoured here")
    library = place / "libugds.so"
    shutil.copy(Path(ugds.__file__).parent / "libugds.so", library)
    program = build(PROGRAM, place / "program", f"-I{INCLUDE}", str(library), f"-Wl,-rpath,{place}")
    loaded = build(LOADED, place / "loaded.so", "-shared", "-fPIC")
    mark = place / "mark"
    environment = {
        "UGDS_INTERRUPT_MODE": "no such mode",
        "UGDS_CUDA_LIBRARY": str(loaded),
        "UGDS_HIP_LIBRARY": str(loaded),
        "UGDS_HSA_LIBRARY": str(loaded),
        "UGDS_IBVERBS_LIBRARY": str(loaded),
        "MARK": str(mark),
    }

    def run() -> int:
        return subprocess.run(
            [str(program)], user=NOBODY, group=NOBODY, extra_groups=[], env=environment, timeout=60
        ).returncode

    place.chmod(0o777)  # so that the mark can be made
    program.chmod(0o755)
    assert run() == 7
    assert mark.exists()  # as it should be for who asks for it himself
    mark.unlink()
    program.chmod(0o4755)
    assert run() == 0
    assert not mark.exists()

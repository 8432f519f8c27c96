# SPDX-License-Identifier: Apache-2.0
"""`ugds run`: the program gets our libcufile, however it looks for one, and no other gets in."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import cufile_client as cf
import pytest
from ugds import _run

TESTS = Path(__file__).parent
READER = """
import ctypes, os, sys
sys.path.insert(0, {tests!r})
import cufile_client as cf
library = cf.CuFile({name!r})
fd = os.open({file!r}, os.O_RDWR)
library.call("cuFileDriverOpen")
handle = library.register(fd)
memory = ctypes.create_string_buffer(5000)
assert library.read(handle, ctypes.addressof(memory), 5000, 100) == 5000
assert library.write(handle, ctypes.addressof(memory), 512, 0) == 512
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ugds", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def run(*arguments: str, status: int = 0, **environment: str) -> tuple[str, str]:
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, f"exit status {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return out, err


def reader(tmp_path: Path, name: str, more: str = "") -> list[str]:
    """A Python program that looks for the library by `name`, and reads and writes a file."""
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    program = tmp_path / "reader.py"
    code = READER.format(tests=str(TESTS), name=name, file=str(tmp_path / "file"))
    program.write_text(code + textwrap.dedent(more))
    return [sys.executable, str(program)]


def last_line(out: str) -> dict[str, Any]:
    told = json.loads(out.splitlines()[-1])
    assert isinstance(told, dict)
    return told


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """Another library of the same name: what NVIDIA's would be."""
    folder = tmp_path / "nvidia" / "lib"
    folder.mkdir(parents=True)
    source = tmp_path / "another.c"
    source.write_text("int cuFileRead(void) { return 77; }\n")
    path = folder / "libcufile.so.0"
    command = [shutil.which("cc") or shutil.which("gcc") or "c++", "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run([*command, "-Wl,-soname,libcufile.so.0"], check=True)
    return path


def past_us(library: Path) -> str:
    """Words by which a program loads a library in a way that `ugds run` does not see."""
    return f"ctypes.CDLL(None).dlmopen(0, {os.fsencode(library)!r}, os.RTLD_NOW)"


@pytest.mark.parametrize("name", ["libcufile.so.0", "libcufile.so"])
def test_a_program_finds_ours_by_name_and_its_counters_move(tmp_path: Path, name: str) -> None:
    out, _ = run("--json", "--", *reader(tmp_path, name))
    told = last_line(out)
    assert told["library"] == str(cf.OURS)
    assert told["status"] == 0
    totals = told["totals"]
    assert (totals["driver_opens"], totals["handles"]) == (1, 1)
    assert (totals["reads"], totals["read_bytes"]) == (1, 5000)
    assert (totals["writes"], totals["written_bytes"]) == (1, 512)
    assert totals["errors"] == 0
    assert len(told["processes"]) == 1


def test_people_get_a_table_and_only_where_they_ask(tmp_path: Path) -> None:
    command = reader(tmp_path, "libcufile.so.0")
    out, err = run("--", *command)
    assert (out, err) == ("", "")
    out, err = run("--summary", "--", *command)
    assert out == ""
    assert "What went through uGDS" in err
    assert "5000" in err
    _, err = run("--summary", "--", sys.executable, "-c", "")
    assert "Nothing that could be counted went through uGDS" in err


def test_a_library_that_needs_it_by_a_path_of_its_own_gets_ours(tmp_path: Path, another: Path) -> None:
    """As PyTorch's does: DT_NEEDED, and a DT_RPATH, which comes before LD_LIBRARY_PATH."""
    source = tmp_path / "user.c"
    source.write_text(
        "struct error { int err, cu_err; };\n"
        'extern struct error cuFileGetVersion_(int *) __asm__("cuFileGetVersion");\n'
        "int version(void) { int v = 0; cuFileGetVersion_(&v); return v; }\n"
    )
    user = tmp_path / "libuser.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    command = [compiler, "-shared", "-fPIC", "-o", str(user), str(source), f"-L{another.parent}", "-l:libcufile.so.0"]
    subprocess.run([*command, f"-Wl,--disable-new-dtags,-rpath,{another.parent}"], check=True)
    program = f"import ctypes; print(ctypes.CDLL({str(user)!r}).version())"
    out, _ = run("--", sys.executable, "-c", program)
    assert out == "1150\n"


def test_a_program_that_opens_another_by_its_path_gets_ours(tmp_path: Path, another: Path) -> None:
    """As PyTorch does before it needs the name, and NVIDIA's bindings where they look for it themselves."""
    out, _ = run("--json", "--", *reader(tmp_path, str(another)))
    told = last_line(out)
    assert told["totals"]["reads"] == 1
    assert told["library"] == str(cf.OURS)


def test_libraries_are_looked_for_where_their_caller_says(tmp_path: Path) -> None:
    """A caller's own search path (DT_RUNPATH) is heeded though the call goes through ours."""
    inner, caller = tmp_path / "inner" / "libinner_of_test.so", tmp_path / "libcaller.so"
    inner.parent.mkdir()
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    (tmp_path / "inner.c").write_text("int one(void) { return 1; }\n")
    (tmp_path / "caller.c").write_text(
        '#include <dlfcn.h>\nint found(void) { return dlopen("libinner_of_test.so", RTLD_NOW) != 0; }\n'
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(inner), str(tmp_path / "inner.c")], check=True)
    command = [compiler, "-shared", "-fPIC", "-o", str(caller), str(tmp_path / "caller.c"), "-ldl"]
    subprocess.run([*command, f"-Wl,--enable-new-dtags,-rpath,{inner.parent}"], check=True)
    out, _ = run("--", sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(caller)!r}).found())")
    assert out == "1\n"


def test_processes_that_a_program_starts_are_counted_too(tmp_path: Path) -> None:
    more = """
    import subprocess
    if len(sys.argv) == 1:
        subprocess.run([sys.executable, sys.argv[0], "again"], check=True)
        if os.fork() == 0:  # what is the parent's is not the child's, nor are its counters
            os._exit(0)
        os.wait()
    """
    out, _ = run("--json", "--", *reader(tmp_path, "libcufile.so.0", more))
    told = last_line(out)
    assert len(told["processes"]) == 2
    assert told["totals"]["reads"] == 2


def test_a_process_that_ends_without_a_word_is_counted(tmp_path: Path) -> None:
    out, _ = run("--json", "--", *reader(tmp_path, "libcufile.so.0", "os.kill(os.getpid(), 9)"), status=137)
    told = last_line(out)
    assert told["status"] == 137
    assert told["totals"]["reads"] == 1


def test_another_library_that_was_there_before_is_an_error(another: Path) -> None:
    _, err = run("--", "sleep", "30", status=1, LD_PRELOAD=str(another))
    assert "another libcufile got into process" in err
    assert str(another) in err


def test_another_library_that_comes_before_the_driver_opens_is_an_error(tmp_path: Path, another: Path) -> None:
    command = reader(tmp_path, "libcufile.so.0")
    program = Path(command[-1])
    program.write_text(program.read_text().replace("library =", f"{past_us(another)}\nlibrary ="))
    start_at = time.monotonic()
    _, err = run("--", *command, status=1)
    assert "another libcufile is loaded in process" in err  # its own words
    assert str(another) in err
    assert time.monotonic() - start_at < 60


@pytest.mark.parametrize("end", ["", "import time; time.sleep(60)", "os._exit(0)"])
def test_another_library_that_comes_after_is_an_error(tmp_path: Path, another: Path, end: str) -> None:
    """Whether the program ends, runs on, or leaves no time for its own words."""
    if end == "os._exit(0)":
        end = "import time; time.sleep(3); os._exit(0)"
    _, err = run("--", *reader(tmp_path, "libcufile.so.0", f"{past_us(another)}\n{end}"), status=1)
    assert "another libcufile got into process" in err
    assert str(another) in err


def test_a_program_that_ours_cannot_get_into_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "still.c"
    source.write_text("int main(void) { return 0; }\n")
    still = tmp_path / "still"
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    if subprocess.run([compiler, "-static", "-o", str(still), str(source)], capture_output=True).returncode != 0:
        pytest.skip("there is no C library to link with statically")
    _, err = run("--", str(still), status=1)
    assert "did not get into the program" in err


def test_the_exit_status_is_the_programs() -> None:
    run("--", "sh", "-c", "exit 3", status=3)
    run("--", "sh", "-c", "kill -TERM $$", status=143)
    _, err = run("--", "/nowhere/program", status=127)
    assert "there is no program /nowhere/program" in err
    _, err = run("--", str(TESTS), status=126)
    _, err = run(status=2)
    assert "for example: ugds run -- python app.py" in err


def test_what_is_no_program_is_told_in_words(tmp_path: Path) -> None:
    program = tmp_path / "program"
    for content in ("echo no line says who reads this\n", "\x7fELF and nothing else"):
        program.write_text(content)
        program.chmod(0o755)
        _, err = run("--", str(program), status=126)
        assert f"{program} cannot be run: Exec format error" in err
    _, err = run("--", f"{program}/in/it", status=126)
    assert "Not a directory" in err


def test_a_program_goes_on_where_there_is_no_room_for_its_counters(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)]).returncode != 0:
        pytest.skip("nothing may be mounted here")
    try:
        (tmp_path / "all of it").write_bytes(bytes(16 << 10))
        made = _run.environment(cf.OURS, tmp_path, os.environ)
        assert subprocess.run(["sh", "-c", "exit 5"], env=made).returncode == 5
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_who_ends_the_command_ends_the_program(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = start("--", sys.executable, "-c", program)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    process.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_the_environment_says_already_stays() -> None:
    before = {"LD_PRELOAD": "/lib/other.so", "LD_LIBRARY_PATH": "/a:/b", "KVIKIO_COMPAT_MODE": "AUTO"}
    made = _run.environment(cf.OURS, Path("/folder"), before)
    assert made["LD_PRELOAD"] == f"{cf.OURS}:{cf.OURS.parent}/libugds_redirect.so:/lib/other.so"
    assert made["LD_LIBRARY_PATH"] == f"{cf.OURS.parent}:{cf.OURS.parent.parent}:/a:/b"
    assert made["KVIKIO_COMPAT_MODE"] == "AUTO"
    assert made["UGDS_RUN_DIR"] == "/folder"
    bare = _run.environment(cf.OURS, Path("/folder"), {})
    assert bare["LD_PRELOAD"] == f"{cf.OURS}:{cf.OURS.parent}/libugds_redirect.so"
    assert (bare.get("KVIKIO_COMPAT_MODE") == "OFF") != Path("/run/udev").is_dir()
    if not Path("/etc/cufile.json").exists():
        assert Path(bare["CUFILE_ENV_PATH_JSON"]).is_file()


def test_what_is_no_page_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"")
    (tmp_path / "2").write_bytes(bytes(5000))
    assert _run.read_pages(tmp_path) == []
    assert _run.read_page(tmp_path / "3") is None


def test_without_a_folder_to_write_to_one_line_names_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_options: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(_run.tempfile, "TemporaryDirectory", none)
    with pytest.raises(_run.CommandError, match=r"No usable temporary directory found.*name one by TMPDIR"):
        _run.run(["true"], False, False)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_a_program_that_becomes_another_user_is_counted(tmp_path: Path) -> None:
    script = "import ctypes; ctypes.CDLL('libcufile.so.0').cuFileDriverOpen()"
    setpriv = ["setpriv", "--reuid=65534", "--clear-groups", "env", "HOME=/nonexistent"]
    out, _ = run("--json", "--", *setpriv, "/usr/bin/python3", "-c", script)
    assert last_line(out)["totals"]["driver_opens"] == 1


def test_a_program_that_cannot_be_counted_says_so(tmp_path: Path) -> None:
    script = (
        "import os, ctypes, sys\n"
        "if len(sys.argv) == 1:\n"
        "    os.environ['UGDS_RUN_DIR'] = '/nonexistent'\n"
        "    os.execv(sys.executable, [sys.executable, sys.argv[0], 'again'])\n"
        "ctypes.CDLL('libcufile.so.0').cuFileDriverOpen()\n"
    )
    program = tmp_path / "program.py"
    program.write_text(script)
    _, err = run("--summary", "--", sys.executable, str(program))
    assert "cannot be counted: a file in /nonexistent could not be made (No such file or directory)" in err
    assert "Nothing that could be counted" in err

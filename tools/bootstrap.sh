# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by ./demo and ./test, from the root of the tree: system packages, a Python and .venv. The rest is
# tools/workspace.py, which runs inside .venv. Defines `bootstrap PURPOSE`, PURPOSE being demo or test.

# What the caller's shell may have set and must not reach our own environment.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_NO_DEPS PIP_REQUIRE_VIRTUALENV \
  PIP_DRY_RUN PIP_NO_BUILD_ISOLATION PIP_REQUIREMENT PIP_REPORT PIP_QUIET
# Where the caller named one, pip still uses its index and its options for the network.
export PIP_DISABLE_PIP_VERSION_CHECK=1

stop() {
  printf '%s\n' "$@" >&2
  exit 2
}

# Sets `python` to the first interpreter that is new enough.
find_python() {
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      python=$candidate
      return
    fi
  done
  stop "uGDS needs Python 3.10 or newer, and none is on the PATH."
}

# Prints the Debian packages that are missing for PURPOSE.
missing_packages() {
  command -v g++ >/dev/null || echo g++
  "$python" -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
  "$python" -c 'import os, sysconfig as s; os.stat(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null ||
    echo python3-dev
  [ -e /usr/include/liburing.h ] || [ -e /usr/local/include/liburing.h ] || echo liburing-dev
  [ -e /usr/include/nlohmann/json.hpp ] || [ -e /usr/local/include/nlohmann/json.hpp ] || echo nlohmann-json3-dev
  [ "$1" = test ] || return 0
  [ -e /usr/include/doctest/doctest.h ] || [ -e /usr/local/include/doctest/doctest.h ] || echo doctest-dev
  if ! command -v valgrind >/dev/null; then
    echo valgrind
    # Valgrind needs the symbols of the C library's loader.
    echo libc6-dbg
  fi
  # Makers of file systems and partition tables, which `ugds bind` has to recognise, and fio, which measures baselines;
  # without them their tests are skipped, so nobody is asked for them.
  [ "$(id -u)" = 0 ] || return 0
  local tool package
  while read -r tool package; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null || echo "$package"
  done <<<'sfdisk fdisk
parted parted
cryptsetup cryptsetup-bin
mkfs.ext4 e2fsprogs
mkfs.xfs xfsprogs
mkfs.vfat dosfstools
mkfs.btrfs btrfs-progs
mkfs.f2fs f2fs-tools
mkfs.exfat exfatprogs
mkntfs ntfs-3g
fio fio'
}

install_packages() {
  local packages
  mapfile -t packages < <(missing_packages "$1")
  [ "${#packages[@]}" -gt 0 ] || return 0
  command -v apt-get >/dev/null ||
    stop "Missing here, under these Debian names: ${packages[*]}" "Install them by your system's package manager."
  [ "$(id -u)" -eq 0 ] ||
    stop "Some system packages are missing. Run this, then try again:" \
      "  sudo apt-get update && sudo apt-get install -y ${packages[*]}"
  echo "Installing system packages: ${packages[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"; } \
    >build/apt.log 2>&1 </dev/null || { tail -n 20 build/apt.log >&2; stop "apt-get failed (build/apt.log has it all)."; }
  mapfile -t packages < <(missing_packages "$1")
  [ "${#packages[@]}" -eq 0 ] || stop "Still missing after the installation: ${packages[*]}"
}

# clang with libFuzzer, whose package not every distribution has by one name. Nobody needs it: without it nothing is
# fuzzed, and what is kept of earlier runs is replayed all the same.
install_fuzzer() {
  [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! command -v clang++ >/dev/null || return 0
  echo "Installing clang, for the fuzzer"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq
    apt-get install -y -qq --no-install-recommends clang libclang-rt-dev || apt-get install -y -qq clang
  } >build/apt-clang.log 2>&1 </dev/null || echo "apt-get failed (build/apt-clang.log): nothing will be fuzzed"
}

# A .venv of another interpreter, or of one that has gone, is made anew.
make_venv() {
  local ours theirs
  ours=$("$python" -c 'import sys; print(sys.version_info[:2], sys.implementation.cache_tag)')
  theirs=$(.venv/bin/python -c 'import sys, pip; print(sys.version_info[:2], sys.implementation.cache_tag)' 2>/dev/null)
  [ "$ours" = "$theirs" ] && return 0
  echo "Making .venv"
  rm -rf .venv
  "$python" -m venv .venv || stop "$python could not make a virtual environment."
}

bootstrap() {
  mkdir -p build
  # Two of us at once would install over each other. tools/workspace.py takes the same lock.
  exec 9>build/.setup.lock
  ! command -v flock >/dev/null || flock 9
  find_python
  install_packages "$1"
  [ "$1" != test ] || install_fuzzer
  make_venv
  exec 9>&-
}

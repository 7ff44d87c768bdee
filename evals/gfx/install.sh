#!/usr/bin/env bash
# What `make compile-gfx` and `make emulate` need of the machine: clang, lld and LLVM's tools of version 22, the first that
# knows gfx950. Installs them by apt where they are missing. Ends with 2 and one sentence when they cannot be had.
set -euo pipefail

version=22
packages=("clang-$version" "lld-$version" "llvm-$version")

fail() {
  echo "compile-gfx: $*" >&2
  exit 2
}

if command -v "clang++-$version" >/dev/null && command -v "ld.lld-$version" >/dev/null &&
  command -v "llvm-objdump-$version" >/dev/null; then
  exit 0
fi

as_root=()
if [[ $(id -u) != 0 ]]; then
  command -v sudo >/dev/null && sudo -n true 2>/dev/null && as_root=(sudo -n)
fi
[[ $(id -u) == 0 || ${#as_root[@]} -gt 0 ]] || fail "only root can install ${packages[*]}"
command -v apt-get >/dev/null || fail "there is no apt-get here: install ${packages[*]} (Debian's names)"
echo "compile-gfx: installing ${packages[*]}"
"${as_root[@]}" apt-get update -qq || fail "apt-get update failed"
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
  fail "apt-get install ${packages[*]} failed; Debian 12 has them in bookworm-security"

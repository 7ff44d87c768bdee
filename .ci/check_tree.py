"""Check what no linter does: sizes of files and functions, the changelog's version, names of one machine's folders.

Run from the project's root. Prints one line per finding; exits with 1 when there is any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# Absolute paths that exist on one developer's machine only; brackets keep this file from finding itself.
FOREIGN_PATHS = re.compile(r"/(wor[k]|far[m])/|/opt/(whee[l]s|pyp[i])|find-link[s]|/roo[t]/|/tm[p]/|\.\./\.librar[y]")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".sh", ".hip", ".h", ".cpp", ".env", ""}


def tracked_files() -> list[Path]:
    """List files of the index, and new ones that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for path in map(Path, names) if path.is_file()]


def size_findings(path: Path, text: str) -> list[str]:
    found = []
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES:
        found.append(f"{path}: {num_lines} lines, limit {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, limit {MAX_FUNCTION_LINES}")
    return found


def path_findings(path: Path, text: str) -> list[str]:
    return [
        f"{path}:{number}: names a folder of one machine: {match.group(0)}"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := FOREIGN_PATHS.search(line))
    ]


def changelog_findings(changelog: str, version_py: str) -> list[str]:
    """The changelog's topmost version is the package's."""
    top = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    version = re.search(r'VERSION = "([^"]+)"', version_py)
    if top is None or version is None:
        return ["CHANGELOG.md or rocm_serve/version.py: no version found"]
    if top.group(1) != version.group(1):
        return [f"CHANGELOG.md begins with {top.group(1)}, rocm_serve/version.py says {version.group(1)}"]
    return []


def main() -> int:
    found = changelog_findings(Path("CHANGELOG.md").read_text(), Path("rocm_serve/version.py").read_text())
    for path in tracked_files():
        if path.suffix not in TEXT_SUFFIXES:
            continue
        text = path.read_text(encoding="utf-8")
        found += path_findings(path, text)
        if path.suffix == ".py":
            found += size_findings(path, text)
    for line in found:
        print(line)
    print(f"check_tree: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

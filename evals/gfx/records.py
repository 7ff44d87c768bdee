"""The committed tables: what each kernel needs, and which levels of proof it has had."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evals.gfx.device import Resources
from evals.gfx.judge import Verdict
from evals.gfx.registry import ARCHS, NotEmulated, Trial
from evals.gfx.toolchain import clang_version

HERE = Path(__file__).resolve().parent
RESOURCES, EMULATED, LEVELS = HERE / "resources.json", HERE / "emulated.json", HERE / "levels.json"
EVIDENCE = HERE.parents[1] / "docs" / "evidence.md"
Table = dict[str, Any]


def read(path: Path) -> Table:
    """Read a committed table; one that is not there yet is empty."""
    table: Table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return table


def write(path: Path, table: Table) -> None:
    """Write a table with one line for each case of a kernel, so that a change of one is a change of few lines."""
    path.write_text(_laid_out(table, "") + "\n", encoding="utf-8")


def merged(kept: Table, found: Table) -> Table:
    """Return both tables of kernels: of a case that both have, what was found now."""
    table = {kernel: dict(by_arch) for kernel, by_arch in kept.items()}
    for kernel, by_arch in found.items():
        held = table.setdefault(kernel, {})
        for arch, cases in by_arch.items():
            held[arch] = {**held.get(arch, {}), **cases}
    return table


def _laid_out(value: Any, indent: str) -> str:
    flat = json.dumps(value, sort_keys=True)
    if not isinstance(value, dict) or len(flat) < 100:
        return flat
    inside = indent + " "
    lines = [f"{inside}{json.dumps(key)}: {_laid_out(value[key], inside)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def toolchain() -> dict[str, str]:
    """Name the compilers whose numbers a table of resources holds."""
    return {"clang": clang_version(), "triton": importlib.metadata.version("triton")}


def _needs(r: Resources) -> dict[str, Any]:
    needs = {key: value for key, value in asdict(r).items() if value}
    for key in ("loads", "stores"):
        if key in needs:
            needs[key] = {str(size): count for size, count in needs[key].items()}
    return {**needs, **({"matrix": list(r.matrix)} if r.matrix else {})}


def resource_table(verdicts: Iterable[Verdict], trials: Mapping[str, Trial]) -> Table:
    """Return what each build of each kernel needs: {"op provider kernel": {arch: {case: [needs]}}}."""
    table: Table = {}
    for v in verdicts:
        trial = trials[v.trial]
        for kernel, builds in v.launched.items():
            rows = table.setdefault(f"{trial.provider} {kernel}", {}).setdefault(v.arch, {})
            rows[f"{trial.op} {trial.case}"] = [_needs(r) for r in builds]
    return table


def resource_differences(found: Table, committed: Table) -> list[str]:
    """Say where kernels that were compiled now need other than what is committed."""
    said = []
    for kernel, by_arch in found.items():
        for arch, cases in by_arch.items():
            for case, builds in cases.items():
                before = committed.get(kernel, {}).get(arch, {}).get(case)
                if before is None:
                    said.append(f"{kernel}, {arch}, {case}: not in {RESOURCES.name}")
                elif before != builds:
                    said.append(f"{kernel}, {arch}, {case}: {json.dumps(builds)}, committed {json.dumps(before)}")
    return said


def resource_lines(found: Table) -> list[str]:
    """Return the table as text, one line a build."""
    head = f"{'arch':7}{'kernel':44}{'VGPR':>5}{'AGPR':>5}{'SGPR':>5}{'LDS':>7}{'scratch':>8}{'spills':>7}  "
    lines = [head + "loads by bytes; stores; matrix; case"]
    for kernel, by_arch in sorted(found.items()):
        for arch, cases in sorted(by_arch.items()):
            for case, builds in cases.items():
                lines += [_resource_line(kernel, arch, case, needs) for needs in builds]
    return lines


def _resource_line(kernel: str, arch: str, case: str, needs: Mapping[str, Any]) -> str:
    numbers = [needs.get(key, 0) for key in ("vgprs", "agprs", "sgprs", "lds", "scratch", "spills")]
    text = "".join(f"{n:>{width}}" for n, width in zip(numbers, (5, 5, 5, 7, 8, 7), strict=True))
    moved = "; ".join(_counts(needs.get(key, {})) for key in ("loads", "stores"))
    return f"{arch:7}{kernel:44}{text}  {moved}; {' '.join(needs.get('matrix', [])) or '-'}; {case}"


def _counts(by_size: Mapping[str, int]) -> str:
    return " ".join(f"{count}x{size}" for size, count in by_size.items()) or "-"


def emulated_table(verdicts: Iterable[Verdict], trials: Mapping[str, Trial]) -> Table:
    """Return what was executed and how it compared: {"provider kernel": {arch: {case: {...}}}}."""
    table: Table = {}
    for v in verdicts:
        trial = trials[v.trial]
        if v.faults or trial.compile_only:
            continue
        said = {"error": float(f"{v.error:.1e}"), "limit": trial.limit, "differing": v.differing, "of": v.elements}
        for kernel in v.launched:
            rows = table.setdefault(f"{trial.provider} {kernel}", {}).setdefault(v.arch, {})
            rows[f"{trial.op} {trial.case}"] = said
    return table


def every_kernel(trials: Sequence[Trial], not_emulated: Sequence[NotEmulated]) -> dict[str, str]:
    """Return the ops that launch each kernel, by "provider kernel"."""
    ops: dict[str, set[str]] = {}
    for trial in trials:
        for kernel in trial.kernels:
            ops.setdefault(f"{trial.provider} {kernel}", set()).add(trial.op)
    for entry in not_emulated:
        ops.setdefault(f"{entry.provider} {entry.kernel}", set()).add(entry.op)
    return {kernel: ", ".join(sorted(names)) for kernel, names in ops.items()}


def missing_levels(trials: Sequence[Trial], not_emulated: Sequence[NotEmulated], emulated: Table) -> list[str]:
    """List kernels that were not executed for an architecture and are not listed with a reason, and idle reasons."""
    excused = {f"{entry.provider} {entry.kernel}" for entry in not_emulated}
    said = []
    for kernel in every_kernel(trials, not_emulated):
        absent = [arch for arch in ARCHS if arch not in emulated.get(kernel, {})]
        if absent and kernel not in excused:
            said.append(
                f"{kernel}: not emulated on {' and '.join(absent)}, and not listed in NOT_EMULATED with a reason"
            )
        if not absent and kernel in excused:
            said.append(f"{kernel}: listed in NOT_EMULATED, and emulated")
    return said

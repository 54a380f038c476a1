"""What is known of Ascend's versions, and read from its files on disk without importing anything of it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

VERSIONS = Path(__file__).parent / "versions.json"


def version_table() -> dict:
    """The vendor's version rows, Python versions and the package index's torch-npu versions, as shipped with the package."""
    return json.loads(VERSIONS.read_text())


def judge_pair(torch: str, torch_npu: str, cann: str | None) -> tuple[str, str]:
    """Whether torch, torch_npu and CANN are an official row of the vendor's table.

    Args:
        torch: a version, with or without its build ("+cpu").
        torch_npu: a version.
        cann: a version, or None where it couldn't be found.

    Returns:
        A verdict and one line: ("ok", "official pair ..."), ("warning", "unlisted ..." or another CANN than the row's: the
        vendor documents such pairs as working), ("fault", "mismatch ...: install ...").
    """
    table = version_table()
    torch, torch_npu, cann = torch.partition("+")[0], torch_npu.partition("+")[0], cann and normal_version(cann)
    have = f"torch {torch}, torch_npu {torch_npu}, CANN {cann or 'unknown'}"
    rows = [row for row in table["rows"] if row["torch_npu"] == torch_npu]
    if any(row["torch"] == torch and row["cann"] == cann for row in rows):
        return "ok", f"official pair: {have}"
    if release(torch_npu) != release(torch):
        return "fault", f"mismatch: {have}; torch and torch_npu must be of one release: install {fitting(torch, cann, table)}"
    if not rows:
        return "warning", f"unlisted: {have} is no row of the vendor's table ({table['source']})"
    if cann is None:
        return "warning", f"{have}: the row's CANN is {rows[0]['cann']}"
    wanted = " or ".join(row["cann"] for row in rows)
    advice = f"torch_npu {torch_npu} goes with CANN {wanted}; for this CANN install {fitting(torch, cann, table)}"
    return "warning", f"mismatch: {have}; {advice}"


def fitting(torch: str, cann: str | None, table: dict) -> str:
    """What to install on this CANN: the row with the torch at hand, or else the newest torch that there is a row for."""
    rows = [row for row in table["rows"] if row["cann"] == cann]
    if not rows:
        rows = [row for row in table["rows"] if row["torch"] == torch]
        return " or ".join(f"torch-npu=={row['torch_npu']} with CANN {row['cann']}" for row in rows) or "a row of the table"
    row = max(rows, key=lambda row: (row["torch"] == torch, release(row["torch"])))
    there = "" if row["torch_npu"] in table["pypi"]["versions"] else " (from the vendor's releases: not on PyPI)"
    return f"torch=={row['torch']} (CPU build) torch-npu=={row['torch_npu']}{there}"


def release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", version).group().split("."))


def normal_version(text: str) -> str:
    """CANN's version as the table writes it: "8.3.RC1" for "V8.3.rc1" and "8.3.RC1.alpha003"."""
    return re.sub(r"^V|\.(ALPHA|BETA).*$", "", text.strip().upper())


def read_key_values(path: Path) -> dict[str, str]:
    """The `key=value` lines of a version file; comments and other lines are passed over."""
    pairs = (line.partition("=") for line in path.read_text(errors="replace").splitlines() if not line.startswith("#"))
    return {key.strip(): value.strip() for key, sign, value in pairs if sign}


def driver_root(root: Path) -> Path:
    """Where driver and firmware are: /etc/ascend_install.info says it, /usr/local/Ascend is its default."""
    info = root / "etc/ascend_install.info"
    place = read_key_values(info).get("Driver_Install_Path_Param") if info.exists() else None
    return under(root, place or "/usr/local/Ascend")


def under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def cann_root(root: Path, environ: Mapping[str, str]) -> Path | None:
    """CANN's folder: what set_env.sh says, or else where it is installed by default (since CANN 9 in `cann`)."""
    if environ.get("ASCEND_HOME_PATH"):
        return under(root, environ["ASCEND_HOME_PATH"])
    places = [root / "usr/local/Ascend" / name for name in ("cann", "ascend-toolkit/latest", "nnae/latest", "nnrt/latest")]
    return next((place for place in places if place.exists()), None)


def read_cann_version(home: Path) -> str | None:
    """CANN's version from the files of its generation, None where no known file holds it.

    `ascend_toolkit_install.info` says `version=8.3.RC2`; `version.cfg` says `[7.6.0.1.220:8.0.0]`, the component's number and
    then CANN's; `runtime/version.info` says `version_dir=8.5.0` beside a component's `Version=8.5.0.2.220`.
    """
    for pattern in ("*-linux/ascend_*_install.info", "ascend_*_install.info"):
        for info in sorted(home.glob(pattern)):
            if version := read_key_values(info).get("version"):
                return normal_version(version)
    config = home / "version.cfg"
    if config.exists():
        values = read_key_values(config)
        for part in ("toolkit", "runtime", "compiler", "opp"):
            if match := re.match(r"\[[^:\]]*:([^\]]+)\]", values.get(f"{part}_running_version", "")):
                return normal_version(match.group(1))
    for part in ("runtime", "opp", "compiler"):
        info = home / part / "version.info"
        if info.exists() and (version := read_key_values(info).get("version_dir")):
            return normal_version(version)
    return None


def in_ranges(version: str, ranges: str) -> bool:
    """Whether a version lies in "[7.0.0,7.6.99],[8.0.0,8.1.99]", bounds included."""
    bounds = re.findall(r"\[([\d.]+),([\d.]+)\]", ranges)
    return any(release(low) <= release(version)[:3] <= release(high.rstrip(".")) for low, high in bounds)


def parse_npu_smi(text: str) -> list[dict]:
    """The chips in `npu-smi info`'s table, A2's (one chip a card) and A3's (two).

    Returns:
        For each chip: npu, chip (numbers), name, health, memory_used_mb, memory_total_mb.
    """
    chips, card = [], None
    chip_row = r"\|\s*(\d+)(?:\s+\d+)?\s*\|\s*[0-9A-F:.]{7,}\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|\s*$"  # chip, used / total
    for line in text.splitlines():
        if match := re.match(r"\|\s*(\d+)\s+([A-Za-z]?\w*\d\w*)\s*\|\s*([A-Z]\w+)\s*\|", line):
            card = {"npu": int(match[1]), "name": match[2], "health": match[3]}
        elif card and (match := re.match(chip_row, line)):
            chips.append(card | {"chip": int(match[1]), "memory_used_mb": int(match[2]), "memory_total_mb": int(match[3])})
    return chips

"""Check the minimum versions in pyproject.toml for known vulnerabilities (`make audit`).

    python scripts/audit.py [--extra vllm ...] [--environment .venv-audit] [--pyproject pyproject.toml]

Installs pip-audit into a separate environment. Exit codes: 0 no known vulnerabilities, 1 vulnerabilities found, 2 some
versions could not be checked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
TOOL = "pip-audit>=2.7,<3"
KNOWN, UNREACHABLE = 1, 2


def requirements(pyproject: Path) -> dict[str, list[str]]:
    """Extra -> requirements; "" for the requirements without an extra.

    Parses the two tables as lists of strings, because Python 3.10 has no TOML parser.
    """
    found: dict[str, list[str]] = {}
    table, entry = "", ""
    for line in pyproject.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if not entry and text.startswith("["):
            table = text
        elif table == "[project.optional-dependencies]" or (table == "[project]" and (entry or "= [" in text)):
            entry += text
            if entry.endswith("]"):
                name, _, values = entry.partition("=")
                if table != "[project]" or name.strip() == "dependencies":
                    found["" if table == "[project]" else name.strip()] = yaml.safe_load(values.strip())
                entry = ""
    return found


def minimum(requirement: str) -> str | None:
    """`name==version` of the oldest version that a requirement allows; None without a lower bound."""
    parsed = Requirement(requirement)
    oldest = [Version(each.version) for each in parsed.specifier if each.operator in (">=", "==", "~=")]
    return f"{parsed.name}=={max(oldest)}" if oldest else None


def minimums(of: dict[str, list[str]], extras: Iterable[str]) -> tuple[list[str], list[str]]:
    """The oldest versions for the base installation and the extras, and the requirements without a lower bound.

    Raises:
        ValueError: An extra doesn't exist.
    """
    unknown = sorted(set(extras) - set(of))
    if unknown:
        raise ValueError(f"--extra {unknown[0]}: doesn't exist. Use one of: {', '.join(filter(None, of))}.")
    every = dict.fromkeys(each for extra in ("", *extras) for each in of[extra])
    pinned = dict.fromkeys(minimum(each) or "" for each in every)
    return sorted(filter(None, pinned)), sorted(each for each in every if minimum(each) is None)


def install(environment: Path) -> str:
    """Creates the environment with pip-audit. Returns "" or the error."""
    if (environment / "bin" / "pip-audit").exists():
        return ""
    for command in (
        [sys.executable, "-m", "venv", str(environment)],
        [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", TOOL],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2] or f"{command[0]} exited with code {done.returncode}"
    return ""


def ask(environment: Path, pinned: list[str]) -> tuple[list[str], list[str], str]:
    """Checks versions. Returns (vulnerabilities, versions that could not be checked, the reason)."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pinned) + "\n")
        file.flush()
        command = [str(environment / "bin" / "pip-audit"), "--requirement", file.name, "--no-deps", "--disable-pip"]
        command += ["--progress-spinner", "off", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        answers = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return [], pinned, done.stderr.strip() or f"pip-audit exited with code {done.returncode}"
    known = [
        f"{each['name']}=={each['version']}: {found['id']} {' '.join(found.get('aliases', []))}, fixed in "
        f"{' or '.join(found.get('fix_versions', [])) or 'no release'}"
        for each in answers
        for found in each.get("vulns", [])
    ]
    skipped = [each for each in answers if "skip_reason" in each]  # pip-audit treats them as not vulnerable
    return known, [each["name"] for each in skipped], skipped[0]["skip_reason"] if skipped else ""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--extra", nargs="*", help="extras to check in addition to the base installation (default: all)"
    )
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-audit", help="environment for pip-audit")
    parser.add_argument("--pyproject", type=Path, default=ROOT / "pyproject.toml", help="file with the requirements")
    options = parser.parse_args(arguments)
    of = requirements(options.pyproject)
    try:
        pinned, unbounded = minimums(of, [*filter(None, of)] if options.extra is None else options.extra)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNREACHABLE
    for each in unbounded:
        print(f"note: {each} has no minimum version and was not checked")
    why = install(options.environment)
    known, unasked, why = (
        ([], pinned, f"failed to install pip-audit: {why}") if why else ask(options.environment, pinned)
    )
    for each in known:
        print(each)
    if len(unasked) == len(pinned):
        print(f"Nothing was checked: pip-audit or the vulnerability database is not available.\n{why[-1000:]}")
        print(f"Rerun with network access. The {len(pinned)} versions to check: {', '.join(pinned)}")
    elif unasked:
        print(f"Not checked, because they are not in the database: {', '.join(unasked)}")
    print(
        f"Checked {len(pinned) - len(unasked)} of {len(pinned)} minimum versions, found {len(known)} vulnerabilities."
    )
    return KNOWN if known else UNREACHABLE if unasked else 0


if __name__ == "__main__":
    sys.exit(main())

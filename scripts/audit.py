"""Asks a database of known weaknesses about the minimum versions that pyproject.toml allows; `make audit` runs it.

    python scripts/audit.py [--extra vllm ...] [--environment .venv-audit] [--pyproject pyproject.toml]

pip-audit is installed into an environment of its own, so that it changes nothing of the project's. Exit status: 0 all
were checked and nothing is known, 1 something is, 2 some could not be checked, and why.
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
    """Extra -> requirements as they are written; "" are those without an extra.

    The two tables are read as what they are, lists of strings, because Python 3.10 has no reader of TOML.
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
    """`name==version` of the oldest version that a requirement allows; None where it has no lower bound."""
    parsed = Requirement(requirement)
    oldest = [Version(each.version) for each in parsed.specifier if each.operator in (">=", "==", "~=")]
    return f"{parsed.name}=={max(oldest)}" if oldest else None


def minimums(of: dict[str, list[str]], extras: Iterable[str]) -> tuple[list[str], list[str]]:
    """The oldest versions of all named extras and of no extra, and the requirements without a lower bound.

    Raises:
        ValueError: there is no such extra.
    """
    unknown = sorted(set(extras) - set(of))
    if unknown:
        raise ValueError(f"--extra {unknown[0]}: there is none of this name. There are: {', '.join(filter(None, of))}.")
    every = dict.fromkeys(each for extra in ("", *extras) for each in of[extra])
    pinned = dict.fromkeys(minimum(each) or "" for each in every)
    return sorted(filter(None, pinned)), sorted(each for each in every if minimum(each) is None)


def install(environment: Path) -> str:
    """Makes the environment with pip-audit in it; "" or why that failed."""
    if (environment / "bin" / "pip-audit").exists():
        return ""
    for command in (
        [sys.executable, "-m", "venv", str(environment)],
        [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", TOOL],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2] or f"{command[0]} ended with {done.returncode}"
    return ""


def ask(environment: Path, pinned: list[str]) -> tuple[list[str], list[str], str]:
    """(what is known, versions that the database does not have or could not say, why) about these versions."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pinned) + "\n")
        file.flush()
        command = [str(environment / "bin" / "pip-audit"), "--requirement", file.name, "--no-deps", "--disable-pip"]
        command += ["--progress-spinner", "off", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        answers = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return [], pinned, done.stderr.strip() or f"pip-audit ended with {done.returncode}"
    known = [
        f"{each['name']}=={each['version']}: {found['id']} {' '.join(found.get('aliases', []))}, mended in "
        f"{' or '.join(found.get('fix_versions', [])) or 'no release'}"
        for each in answers
        for found in each.get("vulns", [])
    ]
    skipped = [each for each in answers if "skip_reason" in each]  # which pip-audit itself counts as nothing known
    return known, [each["name"] for each in skipped], skipped[0]["skip_reason"] if skipped else ""


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--extra", nargs="*", help="extras to look at beside what everybody installs; all where left out"
    )
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-audit", help="where pip-audit is installed")
    parser.add_argument("--pyproject", type=Path, default=ROOT / "pyproject.toml")
    options = parser.parse_args(arguments)
    of = requirements(options.pyproject)
    try:
        pinned, unbounded = minimums(of, [*filter(None, of)] if options.extra is None else options.extra)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNREACHABLE
    for each in unbounded:
        print(f"note: {each} has no minimum version and is not asked about")
    why = install(options.environment)
    known, unasked, why = (
        ([], pinned, f"pip-audit cannot be installed: {why}") if why else ask(options.environment, pinned)
    )
    for each in known:
        print(each)
    if len(unasked) == len(pinned):
        print(f"Nothing was checked: the database of weaknesses, or pip-audit, cannot be reached here.\n{why[-1000:]}")
        print(f"Where there is a network, run this again; the {len(pinned)} versions: {', '.join(pinned)}")
    elif unasked:
        print(f"Not checked, because the database does not have them: {', '.join(unasked)}")
    print(
        f"{len(pinned) - len(unasked)} of {len(pinned)} minimum versions were checked, {len(known)} weaknesses found."
    )
    return KNOWN if known else UNREACHABLE if unasked else 0


if __name__ == "__main__":
    sys.exit(main())

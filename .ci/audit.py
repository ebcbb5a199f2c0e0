"""Compares the pins of constraints.txt with known advisories, and says so where it cannot.

`make audit` runs it, in an environment that has pip-audit. The source is OSV, else the package
index; without a network there is neither. Exit code: 0 if nothing is known of the pins, 1 if
something is, 2 if no source could be asked.
"""

import json
import subprocess
import sys

SOURCES = ("osv", "pypi")


def main() -> int:
    """Asks the first source that answers."""
    for source in SOURCES:
        command = [sys.executable, "-m", "pip_audit", "-r", "constraints.txt", "--no-deps"]
        command += ["--disable-pip", "--format", "json", "--progress-spinner", "off"]
        done = subprocess.run(
            [*command, "--vulnerability-service", source],
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            listed = json.loads(done.stdout)["dependencies"]
        except (ValueError, KeyError):
            reason = done.stderr.strip().splitlines()[-1:] or ["no answer"]
            print(f"audit: {source} cannot be asked: {reason[0]:.300}")
            continue
        # A mirror of the index may not have what it is asked.
        known = [each for each in listed if "vulns" in each]
        if not known:
            print(f"audit: {source} knows none of the pins")
            continue
        found = [(each, problem) for each in known for problem in each["vulns"]]
        for each, problem in found:
            fixed = ", ".join(problem["fix_versions"]) or "no version yet"
            print(f"audit: {each['name']} {each['version']}: {problem['id']}, fixed in {fixed}")
        print(
            f"audit: {source} knows {len(found)} advisories of {len(known)} of {len(listed)} pins"
        )
        return int(bool(found))
    print("audit: NOT DONE: no source of advisories could be asked from here")
    return 2


if __name__ == "__main__":
    sys.exit(main())

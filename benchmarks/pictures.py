"""Make the pictures of Studio in `docs/pictures` from the runs below a folder of checkpoints, with headless Chromium.

    python benchmarks/pictures.py --checkpoints checkpoints --run Trinity-Flows/quickstart_rft

Chromium's own `--screenshot` waits for the page's scripts by a budget of virtual time; nothing else is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

ROOT = Path(__file__).parent.parent
PORT = 4299
WAIT_MILLISECONDS = 20_000


def main() -> None:
    """Serve Studio and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--run", default="Trinity-Flows/quickstart_rft")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures")
    options = parser.parse_args()
    run = quote(options.run, safe="")
    pages = {
        "studio_configuration": "/?file=configs/quickstart/quickstart.yaml",
        "studio_runs": "/runs",
        "studio_run": f"/runs?run={run}",
        "studio_checkpoints": f"/runs?run={run}&tab=Checkpoints",
        "view_table": f"/rollouts/#run={run}&tab=table&by=reward",
        "view_samples": f"/rollouts/#run={run}&tab=samples",
    }
    checkpoints = str(options.checkpoints.absolute())
    command = [sys.executable, "-m", "studio", "--port", str(PORT), "--checkpoints", checkpoints]
    studio = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(f"http://127.0.0.1:{PORT}/_stcore/health")
        for name, path in pages.items():
            take(f"http://127.0.0.1:{PORT}{path}", options.out / f"{name}.png")
    finally:
        studio.terminate()
        studio.wait(30)


def wait_for(address: str) -> None:
    """Wait until a server answers, for a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            urlopen(address, timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def take(address: str, picture: Path) -> None:
    """Save a page as a picture."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        options += ["--window-size=1400,900", f"--virtual-time-budget={WAIT_MILLISECONDS}", f"--screenshot={picture}"]
        subprocess.run(["chromium", *options, address], check=True, capture_output=True, timeout=120)
    print(f"{picture}  {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

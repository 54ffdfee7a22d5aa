"""The same word problems, answered by a command that gets only an address and uses only the standard library."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path


def main() -> None:
    """Answer the task and report the answer."""
    task = json.loads(Path(os.environ["TRINITY_TASK"]).read_text())
    body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"], "max_tokens": 40}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    Path(os.environ["TRINITY_REPORT"]).write_text(json.dumps({"answer": answer}))


if __name__ == "__main__":
    main()

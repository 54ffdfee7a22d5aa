"""The trainer's log-probs of tokens that were recorded through the OpenAI API, against the engine's, in float32.

    python benchmarks/api_logprobs.py [--conversations 1000] [--at-once 16]

Random conversations of a small model: several turns, tool calls, streams, answers that the client cuts or rewrites,
branches, removed beginnings. Prints one JSON line: the numbers of conversations, sequences, sampled tokens and tokens
found in the sequences, the largest gap in a log-prob (nats), and seconds. Exits 1 if a token is missing or a gap is
over 1e-5.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measured import ROOT

sys.path.insert(0, str(ROOT / "tests"))

ALLOWED = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.conversations, args.at_once)
    print(json.dumps(result))
    return int(result["greatest_gap"] > ALLOWED or result["found_tokens"] != result["sampled_tokens"])


def measure(folder: Path, conversations: int, at_once: int) -> dict[str, float]:
    """What is printed."""
    from trinity_core.data.tiny import make_model
    from trinity_core.rollout.inference.in_process import InProcessEngine
    from trinity_core.rollout.inference.settings import EngineSettings

    make_model(folder, 0)
    settings = EngineSettings(str(folder), max_model_len=256, max_num_seqs=64)
    os.environ |= settings.environment()
    from inference.conversations import converse_all, every_answer_is_a_call, gaps
    from inference.openai_server import serving

    engine = InProcessEngine(settings)
    asyncio.run(engine.start())
    began = time.monotonic()
    with serving(folder, engine, tool_call_parser=every_answer_is_a_call(), enable_auto_tool_choice=True) as api:
        sessions = converse_all(api, conversations, at_once)
    talked = time.monotonic()
    differences = gaps(sessions, str(folder))
    return {
        "conversations": len(sessions),
        "sequences": sum(len(session.sequences()) for session in sessions),
        "sampled_tokens": sum(session.sampled_tokens for session in sessions),
        "found_tokens": len(differences),
        "greatest_gap": float(np.abs(differences).max()),
        "talking_seconds": round(talked - began, 1),
        "scoring_seconds": round(time.monotonic() - talked, 1),
    }


if __name__ == "__main__":
    sys.exit(main())

"""A peer whose setting `way` says how it behaves: "well", or how it goes wrong. A real process, like every peer's."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

HELD: list[bytearray] = []


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    settings, steps = asked["settings"], asked["gen_len"] - 1
    tokens = [[(prompt[0] + at) % 100 for at in range(asked["gen_len"])] for prompt in asked["prompts"]]
    way = settings["way"]
    if way == "short":
        tokens[-1] = tokens[-1][:-1]
    elif way == "fewer":
        tokens = tokens[:-1]
    elif way == "other":
        tokens = [[*row[:-1], row[-1] + 1] for row in tokens]
    elif way == "crash":
        print("things were going well", file=sys.stderr)
        raise ValueError("the planted fault")
    elif way == "signal":
        os.kill(os.getpid(), signal.SIGABRT)
    elif way == "hang":
        time.sleep(600)
    elif way == "silent":
        return
    elif way == "garbage":
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            file.write("{")
        return
    elif way == "large":
        for _ in range(settings["mebibytes"]):
            HELD.append(bytearray(os.urandom(2**20)))
        time.sleep(0.3)
    step = settings.get("step_s", 0.01)
    growth = settings.get("growth_s", 0.0)
    with open("/proc/self/status", encoding="ascii") as status:
        peak = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    answer = {
        "token_ids": tokens, "load_s": 0.5, "prefill_s": 0.2 * len(tokens), "step_s": [step + growth * at for at in range(steps)],
        "first_token_s": 0.2, "spans": [["all", "everything", 0.0, step]], "peak_rss_bytes": peak, "bytes_read": 4096, "about": "planted 1",
    }  # fmt: skip
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()

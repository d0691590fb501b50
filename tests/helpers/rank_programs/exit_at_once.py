"""Ends right after the last message, while the group is still known and no thread is given its turn."""

from __future__ import annotations

import sys

import torch

from headwise.scale import started

if __name__ == "__main__":
    sys.setswitchinterval(100)
    with started(timeout=60) as ranks:
        kept = ranks.group
        for _ in range(50):
            ranks.gathered(torch.ones(512))

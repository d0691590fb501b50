"""Ranks that exit right after their last message, while the process group is referenced and no thread gets a turn."""

from __future__ import annotations

import sys

import torch

from headwise.scale import init_ranks

if __name__ == "__main__":
    sys.setswitchinterval(100)
    with init_ranks(timeout=60) as ranks:
        reference = ranks.group
        for _ in range(50):
            ranks.all_gather(torch.ones(512))

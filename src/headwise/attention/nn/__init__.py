"""Modules: multi-head attention, blocks, stacks, KV caches and positions."""

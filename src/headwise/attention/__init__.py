"""The attention core: specification, fast paths, statistics, module and stack."""

"""Fair timing: interleaved races, processor time, the machine's description."""
